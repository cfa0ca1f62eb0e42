"""Skinny GEMM on tensor cores: out[M, N] = x[M, K] w[N, K]^T for M = 1..64, weights streamed through shared memory.

Plan. A CTA owns `rows` weight rows and one of `splits` ranges of K. One warp produces: it copies [rows, bk] weights and
[M, bk] activations per stage into a ring of `stages`, the weights of the whole ring before griddepcontrol.wait. The
other warps_n x warps_k warps consume: weights are the 16-row A operand of mma.m16n8k16, tokens the 8-wide B operand;
warps_n divide the rows, warps_k the 16-column steps of a stage. Partial sums meet in shared memory (warps_k), then in
an fp32 workspace (splits), where the last CTA of a tile adds them in the order of the splits.
Bound: the weight stream; from about 32 tokens on, also x, which every tile reads from L2.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from .device import WARP

PAD = 8  # elements between rows in shared memory: eight rows of 16 bytes then fall into different banks


@dataclass(frozen=True)
class MmaConfig:
    """rows: weight rows of a CTA. splits: CTAs that share a row tile. bk: columns of a stage. stages: ring depth.

    bulk: rows arrive by cp.async.bulk, one instruction each; otherwise by cp.async, 16 bytes a lane.
    """

    rows: int
    splits: int
    warps_n: int
    warps_k: int
    bk: int
    stages: int
    bulk: bool

    @property
    def consumers(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return WARP * (self.consumers + 1)

    @property
    def pitch(self) -> int:
        return self.bk + PAD

    @property
    def row_tiles(self) -> int:
        """16-row tiles of one warp."""
        return self.rows // (16 * self.warps_n)

    def tiles(self, N: int) -> int:
        return -(-N // self.rows)

    def fragments(self, M: int) -> int:
        """16 x 8 accumulator fragments of one warp."""
        return self.row_tiles * -(-M // 8)

    def ring(self, M: int) -> int:
        """Bytes of the ring, which later holds the partial sums of the warps."""
        sums = 16 * WARP * self.fragments(M) * self.consumers if self.warps_k > 1 else 0
        return -(-max(self.stages * (self.rows + M) * self.pitch * 2, sums) // 128) * 128

    def smem(self, M: int) -> int:
        """Bytes of dynamic shared memory: the ring, two barriers per stage, one flag."""
        return self.ring(M) + 16 * self.stages + 16

    def workspace(self, M: int, N: int) -> tuple[int, ...]:
        """Shape of the fp32 partial sums: tile, split, row group, fragment, lane, the lane's four values."""
        return self.tiles(N), self.splits, self.warps_n, self.fragments(M), WARP, 4


def flat(t: cute.Tensor, offset: int, size: int) -> cute.Tensor:
    return cute.make_tensor(t.iterator + offset, cute.make_layout((size,)))


def fragment(t: cute.Tensor, offset: int, size: int) -> cute.Tensor:
    return cute.make_tensor(t.iterator + offset, cute.make_layout((size, 1, 1)))


def by_piece(t: cute.Tensor, width: int, first) -> cute.Tensor:
    """Rows first.. of global [R, K] as [8, width / 8, R, K / width]: 16-byte pieces, rows, chunks."""
    R, K = t.shape
    row = t.stride[0]
    layout = cute.make_layout((8, width // 8, R, K // width), stride=(1, 8, row, width))
    return cute.make_tensor(t.iterator + cute.assume(first * row, divby=8), layout)


def ring(raw, rows: int, cfg: MmaConfig) -> cute.Tensor:
    """Shared memory as [8, bk / 8, rows, stages]."""
    layout = cute.make_layout((8, cfg.bk // 8, rows, cfg.stages), stride=(1, 8, cfg.pitch, rows * cfg.pitch))
    return cute.make_tensor(cute.recast_ptr(raw, dtype=BFloat16), layout)


@cute.jit
def fill(src: cute.Tensor, dst: cute.Tensor, full, bulk: cutlass.Constexpr):
    """Copy one chunk [8, pieces, R] into one stage and arrive at its barrier when the bytes have landed."""
    _, pieces, R = dst.shape
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(bulk):
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16, num_bits_per_copy=128 * pieces)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, R * pieces * 16)
            for r in cutlass.range(R, unroll_full=True):
                one, to = (flat(t[None, None, r], 0, 8 * pieces) for t in (src, dst))
                cute.copy(atom, one, to, mbar_ptr=full)
    else:
        op = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, BFloat16, num_bits_per_copy=128)
        for i in cutlass.range(-(-R * pieces // WARP), unroll_full=True):
            p = lane + WARP * i
            if R * pieces % WARP == 0 or p < R * pieces:
                cute.copy(atom, src[None, p % pieces, p // pieces], dst[None, p % pieces, p // pieces])
        cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def produce(gw, gx, sw, sx, full, empty, chunk: Int32, count: Int32, cfg: cutlass.Constexpr):
    """Keep the ring full: chunks chunk .. chunk + count of gw and gx into stages 0, 1, .. of sw and sx."""
    ahead = cutlass.min(count, cfg.stages)
    for i in cutlass.range(ahead, unroll=1):
        fill(gw[None, None, None, chunk + i], sw[None, None, None, i], full + i, cfg.bulk)
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range(ahead, unroll=1):
        fill(gx[None, None, None, chunk + i], sx[None, None, None, i], full + i, cfg.bulk)
    stage, phase = Int32(0), Int32(0)
    for i in cutlass.range(cfg.stages, count, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        fill(gw[None, None, None, chunk + i], sw[None, None, None, stage], full + stage, cfg.bulk)
        fill(gx[None, None, None, chunk + i], sx[None, None, None, stage], full + stage, cfg.bulk)
        stage += 1
        if stage == cfg.stages:
            stage, phase = Int32(0), phase ^ 1


@cute.jit
def multiply(sw: cute.Tensor, sx: cute.Tensor, acc: cute.Tensor, wn: Int32, wk: Int32, warps_k: cutlass.Constexpr):
    """acc [4, row tiles, token tiles] += this warp's steps of one stage, sw [8, pieces, rows], sx [8, pieces, M]."""
    lane = cute.arch.lane_idx()
    pair = lane // 16
    _, mt, nt = acc.shape
    _, pieces, M = sx.shape
    load4 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    load2 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), BFloat16)
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    a = cute.make_rmem_tensor((8, mt), BFloat16)
    b = cute.make_rmem_tensor((4, nt), BFloat16)
    for j in cutlass.range_constexpr(pieces // 2 // warps_k):
        piece = 2 * (wk + j * warps_k)
        for n in cutlass.range_constexpr(0, nt - 1, 2):  # tokens past M repeat the last one; their columns are dropped
            token = cutlass.min(8 * (n + pair) + lane % 8, M - 1)
            cute.copy(load4, sx[None, piece + lane // 8 % 2, token], flat(b, 4 * n, 8))
        if cutlass.const_expr(nt % 2):
            token = cutlass.min(8 * (nt - 1) + lane % 8, M - 1)
            cute.copy(load2, flat(sx[None, piece + lane // 8 % 2, token], 0, 4), flat(b, 4 * (nt - 1), 4))
        for m in cutlass.range_constexpr(mt):
            cute.copy(load4, sw[None, piece + pair, 16 * (wn * mt + m) + lane % 16], flat(a, 8 * m, 8))
        for n in cutlass.range_constexpr(nt):
            for m in cutlass.range_constexpr(mt):
                c = fragment(acc, 4 * (n * mt + m), 4)
                cute.gemm(atom, c, fragment(a, 8 * m, 8), fragment(b, 4 * n, 4), c)


@cute.jit
def consume(sw, sx, acc: cute.Tensor, full, empty, count: Int32, wn: Int32, wk: Int32, cfg: cutlass.Constexpr):
    """Accumulate every chunk as it arrives and give its stage back."""
    stage, phase = Int32(0), Int32(0)
    for _ in cutlass.range(count, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        multiply(sw[None, None, None, stage], sx[None, None, None, stage], acc, wn, wk, cfg.warps_k)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty + stage)
        stage += 1
        if stage == cfg.stages:
            stage, phase = Int32(0), phase ^ 1


@cute.jit
def add_warps(acc: cute.Tensor, raw, wid: Int32, wn: Int32, wk: Int32, cfg: cutlass.Constexpr):
    """Add the accumulators of a row group's warps_k warps in order; warp wk keeps fragments wk, wk + warps_k, .."""
    F = cutlass.const_expr(acc.shape[1] * acc.shape[2])
    if cutlass.const_expr(cfg.warps_k > 1):
        lane = cute.arch.lane_idx()
        layout = cute.make_layout((4, WARP, F, cfg.warps_n, cfg.warps_k))
        sums = cute.make_tensor(cute.recast_ptr(raw, dtype=Float32), layout)
        cute.arch.sync_threads()  # every stage has been read
        if wid < cfg.consumers:
            for f in cutlass.range_constexpr(F):
                cute.autovec_copy(flat(acc, 4 * f, 4), sums[None, lane, f, wn, wk])
        cute.arch.sync_threads()
        if wid < cfg.consumers:
            part = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range_constexpr(-(-F // cfg.warps_k)):
                f = wk + j * cfg.warps_k
                if F % cfg.warps_k == 0 or f < F:
                    mine = flat(acc, 4 * j, 4)
                    cute.autovec_copy(sums[None, lane, f, wn, 0], mine)
                    for k in cutlass.range_constexpr(1, cfg.warps_k):
                        cute.autovec_copy(sums[None, lane, f, wn, k], part)
                        mine.store(mine.load() + part.load())


@cute.jit
def add_splits(part: cute.Tensor, f: Int32, value: cute.Tensor):
    """value [4] = the lane's part of fragment f, summed over the splits in order; part [splits, fragments, lane, 4]."""
    splits = cutlass.const_expr(part.shape[0])
    every = cute.make_rmem_tensor((4, splits), Float32)
    for s in cutlass.range_constexpr(splits):
        cute.autovec_copy(part[s, f, cute.arch.lane_idx(), None], every[None, s])
    value.store(every[None, 0].load())
    for s in cutlass.range_constexpr(1, splits):
        value.store(value.load() + every[None, s].load())


@cute.jit
def store(out: cute.Tensor, value: cute.Tensor, f: Int32, mt: cutlass.Constexpr, row: Int32, low: Int32):
    """Round fragment f once and store it: weight rows row + 16 (f % mt) .., tokens 8 (f // mt) .. of out [M, N].

    Rows below `low` belong to the tile before: the last tile starts early where rows do not divide N.
    """
    M = out.shape[0]
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(4):
        n = row + 16 * (f % mt) + lane // 4 + 8 * (i // 2)
        m = 8 * (f // mt) + 2 * (lane % 4) + i % 2
        if m < M and n >= low:
            out[m, n] = value[i].to(BFloat16)


@cute.jit
def arrive(arrivals: cute.Tensor, tile: Int32, flag: cute.Tensor, splits: cutlass.Constexpr):
    """Publish this CTA's partial sums; flag[0] becomes how many CTAs of the tile came before. The last one resets."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_threads()
    if thread == 0:
        before = cute.arch.atomic_add(arrivals.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
        flag[0] = before
        if before == splits - 1:
            cute.arch.store(arrivals.iterator + tile, Int32(0), sem="relaxed", scope="gpu")
    cute.arch.sync_threads()
    cute.arch.fence_acq_rel_gpu()


@cute.kernel
def mma_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, part, arrivals, cfg: cutlass.Constexpr):
    M, (N, K) = cutlass.const_expr(x.shape[0]), w.shape
    thread, _, _ = cute.arch.thread_idx()
    tile, split, _ = cute.arch.block_idx()
    wid = cute.arch.make_warp_uniform(thread // WARP)
    wn, wk = wid % cfg.warps_n, wid // cfg.warps_n
    raw = SmemAllocator().allocate(cfg.smem(M), 128)
    full = cute.recast_ptr(raw + cfg.ring(M), dtype=Int64)
    empty = full + cfg.stages
    flag = cute.make_tensor(cute.recast_ptr(empty + cfg.stages, dtype=Int32), cute.make_layout((1,)))
    if thread == 0:
        for i in cutlass.range_constexpr(cfg.stages):
            cute.arch.mbarrier_init(full + i, 2 if cfg.bulk else 2 * WARP)  # weights and activations arrive apart
            cute.arch.mbarrier_init(empty + i, cfg.consumers)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()

    first = split * (K // cfg.bk) // cfg.splits
    count = (split + 1) * (K // cfg.bk) // cfg.splits - first
    low = tile * cfg.rows
    row = cutlass.min(low, N - cfg.rows)
    sw, sx = ring(raw, cfg.rows, cfg), ring(raw + cfg.stages * cfg.rows * cfg.pitch * 2, M, cfg)
    F, mt = cutlass.const_expr(cfg.fragments(M)), cutlass.const_expr(cfg.row_tiles)
    acc = cute.make_rmem_tensor((4, mt, F // mt), Float32)
    acc.fill(0.0)
    if wid == cfg.consumers:
        produce(by_piece(w, cfg.bk, row), by_piece(x, cfg.bk, 0), sw, sx, full, empty, first, count, cfg)
    else:
        cute.arch.griddepcontrol_wait()  # its activations come from the producer, but its stores are its own
        consume(sw, sx, acc, full, empty, count, wn, wk, cfg)
    add_warps(acc, raw, wid, wn, wk, cfg)

    row += 16 * mt * wn
    last = wid < cfg.consumers
    if cutlass.const_expr(cfg.splits > 1):
        if wid < cfg.consumers:
            for j in cutlass.range_constexpr(-(-F // cfg.warps_k)):
                f = wk + j * cfg.warps_k
                if F % cfg.warps_k == 0 or f < F:
                    cute.autovec_copy(flat(acc, 4 * j, 4), part[tile, split, wn, f, thread % WARP, None])
        arrive(arrivals, tile, flag, cfg.splits)
        last = last and flag[0] == cfg.splits - 1
    if last:
        for j in cutlass.range_constexpr(-(-F // cfg.warps_k)):
            f = wk + j * cfg.warps_k
            if F % cfg.warps_k == 0 or f < F:
                value = flat(acc, 4 * j, 4)
                if cutlass.const_expr(cfg.splits > 1):
                    add_splits(part[tile, None, wn, None, None, None], f, value)
                store(out, value, f, mt, row, low)


@cute.jit
def mma_entry(x, w, out, cfg: cutlass.Constexpr, stream: cuda.CUstream):
    mma_kernel(x, w, out, None, None, cfg).launch(
        grid=[cfg.tiles(w.shape[0]), 1, 1], block=[cfg.threads, 1, 1], smem=cfg.smem(x.shape[0]),
        stream=stream, use_pdl=True,
    )  # fmt: skip


@cute.jit
def split_entry(x, w, out, part, arrivals, cfg: cutlass.Constexpr, stream: cuda.CUstream):
    mma_kernel(x, w, out, part, arrivals, cfg).launch(
        grid=[cfg.tiles(w.shape[0]), cfg.splits, 1], block=[cfg.threads, 1, 1], smem=cfg.smem(x.shape[0]),
        stream=stream, use_pdl=True,
    )  # fmt: skip
