"""Skinny GEMM on tensor cores: out[M, N] = x[M, K] w[N, K]^T for M = 1..64, weights streamed through shared memory.

Plan. A CTA owns `rows` weight rows and one of `splits` ranges of K. `producers` warps copy [rows, bk] weights and
[tokens, bk] activations per stage into a ring of `stages`, the weights of the whole ring before griddepcontrol.wait.
M is any number up to the `tokens` that the code is for, and at least half: those past M repeat others and are not
stored. The other warps_n x warps_k warps consume: weights are the 16-row A operand of mma.m16n8k16, tokens the 8-wide
B operand; warps_n divide the rows, warps_k the 16-column steps of a stage. Partial sums meet in shared memory: of the
CTA (warps_k), then of the cluster that a tile's splits form, where each CTA adds and stores its share of the tile.
Bound: the weight stream; from about 32 tokens on, also x, which every tile reads from L2: rows and splits grow with M.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from .device import WARP, any_rows

PAD = 8  # elements between rows in shared memory: eight rows of 16 bytes then fall into different banks


@dataclass(frozen=True)
class MmaConfig:
    """rows: weight rows of a CTA. splits: CTAs of a row tile, one cluster. bk: columns of a stage. stages: ring depth.

    producers: warps that copy. bulk: a row of a stage arrives by one cp.async.bulk; otherwise by cp.async, 16 bytes a
    lane.
    """

    rows: int
    splits: int
    warps_n: int
    warps_k: int
    bk: int
    stages: int
    producers: int
    bulk: bool

    @property
    def consumers(self) -> int:
        return self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        return WARP * (self.consumers + self.producers)

    @property
    def pitch(self) -> int:
        return self.bk + PAD

    @property
    def row_tiles(self) -> int:
        """16-row tiles of one warp."""
        return self.rows // (16 * self.warps_n)

    def tiles(self, N: int) -> int:
        return -(-N // self.rows)

    def fragments(self, tokens: int) -> int:
        """16 x 8 accumulator fragments of one warp."""
        return self.row_tiles * -(-tokens // 8)

    @property
    def copies(self) -> tuple[int, int, int]:
        """How producers share a stage: columns of one copy, copies of a row, rows that all of them copy at once."""
        width, at_once = (self.bk, self.producers) if self.bulk else (8, self.producers * WARP)
        return width, self.bk // width, at_once // (self.bk // width)

    def ring(self, tokens: int) -> int:
        """Bytes of the ring, which later holds the partial sums: first of all warps, then of all splits."""
        warps = self.fragments(tokens) * self.consumers if self.warps_k > 1 else 0
        splits = self.splits * self.owned(tokens) if self.splits > 1 else 0
        return -(-max(self.stages * (self.rows + tokens) * self.pitch * 2, 16 * WARP * max(warps, splits)) // 128) * 128

    def owned(self, tokens: int) -> int:
        """Fragments of a tile that one CTA of its cluster adds, at most."""
        return -(-self.fragments(tokens) * self.warps_n // self.splits)

    def smem(self, tokens: int) -> int:
        """Bytes of dynamic shared memory: the ring, two barriers per stage, one for the splits."""
        return self.ring(tokens) + 16 * self.stages + 16


def flat(t: cute.Tensor, offset: int, size: int) -> cute.Tensor:
    return cute.make_tensor(t.iterator + offset, cute.make_layout((size,)))


def fragment(t: cute.Tensor, offset: int, size: int) -> cute.Tensor:
    return cute.make_tensor(t.iterator + offset, cute.make_layout((size, 1, 1)))


def ring(raw, rows: int, cfg: MmaConfig) -> cute.Tensor:
    """Shared memory as [8, bk / 8, rows, stages]."""
    layout = cute.make_layout((8, cfg.bk // 8, rows, cfg.stages), stride=(1, 8, cfg.pitch, rows * cfg.pitch))
    return cute.make_tensor(cute.recast_ptr(raw, dtype=BFloat16), layout)


def share(pointer, first, row: int, chunk: int, rows: int, chunks: int, cfg: MmaConfig) -> cute.Tensor:
    """What one producer copies, as [columns of a copy, copies, chunks], from its `first` element on.

    row, chunk: elements from a row to the next, from a chunk or stage to the next. Copies are constant offsets apart.
    """
    width, _, step = cfg.copies
    layout = cute.make_layout((width, -(-rows // step), chunks), stride=(1, step * row, chunk))
    return cute.make_tensor(pointer + cute.assume(first, divby=8), layout)


def source(src: cute.Tensor, i: int, step: int, row: Int32, count) -> cute.Tensor:
    """Copy i of `share`, which starts at `row`: the row i * step on. Those past `count` rows start over with row 0."""
    if count is None:
        return src[None, i]
    # Not the last row again and again: all CTAs would want those lines at once. 5 of 8 tokens took 1.4 times as long.
    rows = Int32(cutlass.select_(row + i * step < count, Int32(i * step), i * step - count))
    return cute.make_tensor(src.iterator + cute.assume(rows * (src.stride[1] // step), divby=8), src[None, 0].layout)


@cute.jit
def fill(src, dst, full, row: Int32, rows: cutlass.Constexpr, cfg: cutlass.Constexpr, count=None):
    """Copy a producer's share of `rows` rows of a chunk, from `row` on; arrive when the bytes have landed.

    src, dst: of `share`. count: of rows that src has, at least half of them; None where it has all.
    """
    width, _, step = cutlass.const_expr(cfg.copies)
    if cutlass.const_expr(cfg.bulk):
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16, num_bits_per_copy=16 * width)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, (rows + step - 1 - row) // step * (2 * width))
            for i in cutlass.range_constexpr(cute.size(dst, mode=[1])):
                if (i + 1) * step <= rows or row + i * step < rows:
                    cute.copy(atom, source(src, i, step, row, count), dst[None, i], mbar_ptr=full)
    else:
        op = cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(op, BFloat16, num_bits_per_copy=128)
        for i in cutlass.range_constexpr(cute.size(dst, mode=[1])):
            if (i + 1) * step <= rows or row + i * step < rows:
                cute.copy(atom, source(src, i, step, row, count), dst[None, i])
        cute.arch.cp_async_mbarrier_arrive_noinc(full)


@cute.jit
def produce(
    w, x, count_x: Int32, raw, full, empty, top: Int32, chunk: Int32, count: Int32, me: Int32, cfg: cutlass.Constexpr
):
    """Keep the ring full: chunks chunk .. chunk + count of the weight rows top .. and of x into stages 0, 1, ..

    count_x: rows of x. me: this thread among those that copy (bulk: this warp among the producers).
    """
    (tokens, K), rows, pitch = cutlass.const_expr(x.shape), cutlass.const_expr(cfg.rows), cutlass.const_expr(cfg.pitch)
    width, pieces, _ = cutlass.const_expr(cfg.copies)
    row, column = me // pieces, me % pieces * width
    wide, to = K // cfg.bk, cute.recast_ptr(raw, dtype=BFloat16)
    gw = share(w.iterator, (top + row) * w.stride[0] + column, w.stride[0], cfg.bk, rows, wide, cfg)
    gx = share(x.iterator, row * x.stride[0] + column, x.stride[0], cfg.bk, tokens, wide, cfg)
    sw = share(to, row * pitch + column, pitch, rows * pitch, rows, cfg.stages, cfg)
    behind = to + cfg.stages * rows * pitch
    sx = share(behind, row * pitch + column, pitch, tokens * pitch, tokens, cfg.stages, cfg)
    ahead = cutlass.min(count, cfg.stages)
    for i in cutlass.range(ahead, unroll=1):
        fill(gw[None, None, chunk + i], sw[None, None, i], full + i, row, rows, cfg)
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range(ahead, unroll=1):
        fill(gx[None, None, chunk + i], sx[None, None, i], full + i, row, tokens, cfg, count_x)
    stage, phase = Int32(0), Int32(0)
    for i in cutlass.range(cfg.stages, count, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        fill(gw[None, None, chunk + i], sw[None, None, stage], full + stage, row, rows, cfg)
        fill(gx[None, None, chunk + i], sx[None, None, stage], full + stage, row, tokens, cfg, count_x)
        stage += 1
        if stage == cfg.stages:
            stage, phase = Int32(0), phase ^ 1


@cute.jit
def multiply(sw: cute.Tensor, sx: cute.Tensor, acc: cute.Tensor, wn: Int32, wk: Int32, warps_k: cutlass.Constexpr):
    """acc [4, row tiles, token tiles] += this warp's steps of a stage: sw [8, pieces, rows], sx [8, pieces, tokens]."""
    lane = cute.arch.lane_idx()
    pair = lane // 16
    _, mt, nt = acc.shape
    _, pieces, tokens = sx.shape
    load4 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    load2 = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2), BFloat16)
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    a = cute.make_rmem_tensor((8, mt), BFloat16)
    b = cute.make_rmem_tensor((4, nt), BFloat16)
    for j in cutlass.range_constexpr(pieces // 2 // warps_k):
        piece = 2 * (wk + j * warps_k)
        for n in cutlass.range_constexpr(0, nt - 1, 2):  # columns of tokens past M are dropped
            token = cutlass.min(8 * (n + pair) + lane % 8, tokens - 1)
            cute.copy(load4, sx[None, piece + lane // 8 % 2, token], flat(b, 4 * n, 8))
        if cutlass.const_expr(nt % 2):
            token = cutlass.min(8 * (nt - 1) + lane % 8, tokens - 1)
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
        if cutlass.const_expr(cfg.bulk):  # or the arrival overtakes ldmatrix, and the next bulk copy what it reads:
            cute.arch.fence_proxy("async.shared", space="cta")  # on an H200, beside others, in 2 of 100 launches
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
def send(acc: cute.Tensor, sums: cute.Tensor, ready, split: Int32, wn: Int32, wk: Int32, cfg: cutlass.Constexpr):
    """Give every fragment of this warp to the CTA of the cluster that adds it; they go round the CTAs."""
    F = cutlass.const_expr(acc.shape[1] * acc.shape[2])
    words = cute.recast_tensor(acc, Int32)
    for j in cutlass.range_constexpr(-(-F // cfg.warps_k)):
        f = wk + j * cfg.warps_k
        if F % cfg.warps_k == 0 or f < F:
            q = wn * F + f
            to = sums[None, cute.arch.lane_idx(), split, q // cfg.splits].iterator
            value = tuple(words[4 * j + i] for i in range(4))
            cute.arch.store_async_dsmem(to, value, ready, q % cfg.splits)


@cute.jit
def add_splits(sums: cute.Tensor, out, M: Int32, F: cutlass.Constexpr, wid, split, row, low, cfg: cutlass.Constexpr):
    """Add this CTA's fragments in the order of the splits and store them; they go round all its warps."""
    warps, total = cutlass.const_expr(cfg.threads // WARP), cutlass.const_expr(F * cfg.warps_n)
    every = cute.make_rmem_tensor((4, cfg.splits), Float32)
    for j in cutlass.range_constexpr(-(-sums.shape[3] // warps)):
        mine = wid + warps * j
        f = split + cfg.splits * mine
        if cfg.splits * warps * (j + 1) <= total or f < total:
            for s in cutlass.range_constexpr(cfg.splits):
                cute.autovec_copy(sums[None, cute.arch.lane_idx(), s, mine], every[None, s])
            value = flat(every, 0, 4)
            for s in cutlass.range_constexpr(1, cfg.splits):
                value.store(value.load() + every[None, s].load())
            store(out, M, value, f % F, cfg.row_tiles, row + 16 * cfg.row_tiles * (f // F), low)


@cute.jit
def store(out: cute.Tensor, M: Int32, value: cute.Tensor, f: Int32, mt: cutlass.Constexpr, row: Int32, low: Int32):
    """Round fragment f once and store it: weight rows row + 16 (f % mt) .., tokens 8 (f // mt) .. of out [M, N].

    Rows below `low` belong to the tile before: the last tile starts early where rows do not divide N.
    """
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(4):
        n = row + 16 * (f % mt) + lane // 4 + 8 * (i // 2)
        m = 8 * (f // mt) + 2 * (lane % 4) + i % 2
        if m < M and n >= low:
            out[m, n] = value[i].to(BFloat16)


@cute.kernel
def mma_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, M: Int32, cfg: cutlass.Constexpr):
    tokens, (N, K) = cutlass.const_expr(x.shape[0]), w.shape  # M of the tokens are there
    thread, _, _ = cute.arch.thread_idx()
    split, tile, _ = cute.arch.block_idx()  # the grid is one cluster wide
    wid = cute.arch.make_warp_uniform(thread // WARP)
    wn, wk = wid % cfg.warps_n, wid // cfg.warps_n
    raw = SmemAllocator().allocate(cfg.smem(tokens), 128)
    full = cute.recast_ptr(raw + cfg.ring(tokens), dtype=Int64)
    empty, ready = full + cfg.stages, full + 2 * cfg.stages
    F, mt = cutlass.const_expr(cfg.fragments(tokens)), cutlass.const_expr(cfg.row_tiles)
    if thread == 0:
        for i in cutlass.range_constexpr(cfg.stages):  # weights and activations arrive apart
            cute.arch.mbarrier_init(full + i, 2 * cfg.producers * (1 if cfg.bulk else WARP))
            cute.arch.mbarrier_init(empty + i, cfg.consumers)
        if cutlass.const_expr(cfg.splits > 1):
            mine = (F * cfg.warps_n + cfg.splits - 1 - split) // cfg.splits
            cute.arch.mbarrier_init(ready, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(ready, mine * cfg.splits * WARP * 16)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()

    first = split * (K // cfg.bk) // cfg.splits
    count = (split + 1) * (K // cfg.bk) // cfg.splits - first
    low = tile * cfg.rows
    row = cutlass.min(low, N - cfg.rows)
    acc = cute.make_rmem_tensor((4, mt, F // mt), Float32)
    acc.fill(0.0)
    if wid >= cfg.consumers:
        me = wid - cfg.consumers if cutlass.const_expr(cfg.bulk) else thread - cfg.consumers * WARP
        produce(w, x, M, raw, full, empty, row, first, count, me, cfg)
    else:
        cute.arch.griddepcontrol_wait()  # its activations come from the producers, but its stores are its own
        sw, sx = ring(raw, cfg.rows, cfg), ring(raw + cfg.stages * cfg.rows * cfg.pitch * 2, tokens, cfg)
        consume(sw, sx, acc, full, empty, count, wn, wk, cfg)
    if cutlass.const_expr(cfg.warps_k > 1):
        add_warps(acc, raw, wid, wn, wk, cfg)
    if cutlass.const_expr(cfg.splits > 1):
        cute.arch.cluster_arrive()  # no warp of the cluster needs its ring any more, and every `ready` is armed
        cute.arch.cluster_wait()
        layout = cute.make_layout((4, WARP, cfg.splits, cfg.owned(tokens)))
        sums = cute.make_tensor(cute.recast_ptr(raw, dtype=Float32), layout)
        if wid < cfg.consumers:
            send(acc, sums, ready, split, wn, wk, cfg)
        cute.arch.mbarrier_wait(ready, 0)
        add_splits(sums, out, M, F, wid, split, row, low, cfg)
    elif wid < cfg.consumers:
        for j in cutlass.range_constexpr(-(-F // cfg.warps_k)):
            f = wk + j * cfg.warps_k
            if F % cfg.warps_k == 0 or f < F:
                store(out, M, flat(acc, 4 * j, 4), f, mt, row + 16 * mt * wn, low)


@cute.jit
def mma_entry(x, w, out, cfg: cutlass.Constexpr, tokens: cutlass.Constexpr, stream: cuda.CUstream):
    mma_kernel(any_rows(x, tokens), w, any_rows(out, tokens), x.shape[0], cfg).launch(
        grid=[cfg.splits, cfg.tiles(w.shape[0]), 1],
        block=[cfg.threads, 1, 1],
        smem=cfg.smem(tokens),
        cluster=[cfg.splits, 1, 1] if cfg.splits > 1 else None,
        stream=stream,
        use_pdl=True,
    )
