"""Skinny GEMM on Hopper's warpgroup tensor cores: out[M, N] = x[M, K] w[N, K]^T for many tokens. sm_90a only.

Plan. A CTA owns 64 weight rows per warpgroup and one of `splits` ranges of K. Weights go straight from global memory
into registers and are the A operand of wgmma from there: no barrier and no fence between a weight and its use, and
`depth` pieces of each row are in flight per lane, the first before griddepcontrol.wait. x is the B operand: producer
warps copy it through registers into a ring of shared memory, once for all warpgroups of the CTA. M is any number up to
the `tokens` that the code is for: those past M repeat the last one, and are not stored.
A lane loads 16 bytes where the fragment layout has four times 4 bytes: words 0..3 of lane t's 16 bytes of 32 columns
stand in for its words of the two halves of two steps of 16. x is stored in the same order: word j of every 16 bytes
goes to half j of the 32 columns.
Bound: the weight stream, and x, which every row tile reads from L2: tiles are tall, so K is split. Splits meet in
shared memory of their cluster, in an order that does not vary.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from .device import WARP, any_rows, load, load_weight, span
from .linear_mma import add_splits, flat, store

CHUNK = 32  # columns that a warp covers with one 16-byte load per lane
ROWS = 64  # weight rows of a warpgroup


@dataclass(frozen=True)
class WgmmaConfig:
    """groups: warpgroups of 64 weight rows. splits: CTAs of a row tile, one cluster. depth: chunks of 32 columns in
    flight. width: chunks of a stage of x. stages: of the ring of x.

    producers: warps that copy x, in teams of `team`, which copy a stage at once: each warp its share of the tokens.
    """

    groups: int
    splits: int
    depth: int
    width: int
    stages: int
    producers: int
    team: int = 1

    @property
    def rows(self) -> int:
        return ROWS * self.groups

    @property
    def warps_n(self) -> int:
        """Warps side by side along the rows: all that multiply."""
        return 4 * self.groups

    @property
    def threads(self) -> int:
        return WARP * (self.warps_n + self.producers)

    @property
    def warps_k(self) -> int:
        """Warps that share accumulators: none, but the sum over splits asks."""
        return 1

    @property
    def row_tiles(self) -> int:
        """16-row tiles of one warp."""
        return 1

    def tiles(self, N: int) -> int:
        return -(-N // self.rows)

    def fragments(self, tokens: int) -> int:
        """16 x 8 accumulator fragments of one warp."""
        return -(-tokens // 8)

    def share(self, tokens: int) -> int:
        """Groups of 8 tokens that one producer copies of a stage, at most."""
        return -(-self.fragments(tokens) // self.team)

    def owned(self, tokens: int) -> int:
        """Fragments of a tile that one CTA of its cluster adds, at most."""
        return -(-self.fragments(tokens) * self.warps_n // self.splits)

    def stage(self, tokens: int) -> int:
        """Bytes of a stage of x, its tokens rounded up to whole groups of 8."""
        return self.width * CHUNK * 2 * 8 * self.fragments(tokens)

    def sums(self, tokens: int) -> int:
        """Bytes of the partial sums that the splits send here."""
        return 16 * WARP * self.splits * self.owned(tokens) if self.splits > 1 else 0

    def smem(self, tokens: int) -> int:
        """Bytes of dynamic shared memory: the ring of x, partial sums, two barriers per stage, one for the splits."""
        return self.stages * self.stage(tokens) + self.sums(tokens) + 16 * self.stages + 16


@cute.jit
def fetch(w: cute.Tensor, ring: cute.Tensor, row: Int32, column: Int32, i: cutlass.Constexpr):
    """Slot i of the ring [8, 2, depth]: chunk i from `column` on, 16 bytes of a row and of the row eight below it."""
    lane = cute.arch.lane_idx()
    for h in cutlass.range_constexpr(2):
        src = span(w[row + lane // 4 + 8 * h, None], column + lane % 4 * 8 + CHUNK * i, 8)
        cute.autovec_copy(load_weight(src, lines=True), ring[None, h, i])  # 2 % at 6288 x 7168 on an H200


@cute.jit
def copy_x(x, last: Int32, sx: cute.Tensor, full, empty, first: Int32, count: Int32, me: Int32, cfg: cutlass.Constexpr):
    """Producer warp `me` copies its share of its team's stages of `count`, the first at column `first`.

    sx [32, tokens / 8, 4, width, stages] in words: 8 tokens of 16 bytes are one core matrix of 128 bytes. Tokens past
    the last one repeat it; their columns are dropped.
    """
    lane = cute.arch.lane_idx()
    groups, share = cutlass.const_expr(sx.shape[1]), cutlass.const_expr(cfg.share(x.shape[0]))
    part = me % cfg.team
    for i in cutlass.range(me // cfg.team, count, cfg.producers // cfg.team, unroll=1):
        slot = i % cfg.stages
        column = first + i * (CHUNK * cfg.width) + lane % 4 * 8
        pieces = [
            load(span(x[cutlass.min(8 * (part + cfg.team * g) + lane // 4, last), None], column + CHUNK * c, 8))
            for c in range(cfg.width)
            for g in range(share)
        ]
        if i >= cfg.stages:
            cute.arch.mbarrier_wait(empty + slot, (i // cfg.stages + 1) % 2)
        for g in cutlass.range_constexpr(share):
            group = part + cfg.team * g
            if cfg.team * (g + 1) <= groups or group < groups:
                for c in cutlass.range_constexpr(cfg.width):
                    words = cute.recast_tensor(pieces[c * share + g], Int32)
                    for j in cutlass.range_constexpr(4):
                        sx[lane, group, j, c, slot] = words[j]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(full + slot)


@cute.jit
def use_block(mma, w, ring, b, acc, full, empty, at, place, cfg: cutlass.Constexpr, more: cutlass.Constexpr):
    """acc += the `depth` chunks in the ring; if more, each used slot is refilled from at = (row, column) on.

    place: (stage of x, its phase). Returns the place that follows. The fragments of a stage are all made before its
    first wgmma: ptxas waits after every single wgmma if others in flight surround the making.
    """
    tokens = cutlass.const_expr(2 * acc.shape[0])
    a = cute.make_rmem_tensor((8, cfg.width), Int32)
    zero = cute.arch.block_idx()[2]  # always; but ptxas, which cannot know, copies here and not right behind the load
    sums = cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, tokens // 8), 1, 1)))
    stage, phase = place
    for base in cutlass.range_constexpr(0, cfg.depth, cfg.width):
        for i in cutlass.range_constexpr(cfg.width):
            words = cute.recast_tensor(ring[None, None, base + i], Int32)
            for j in cutlass.range_constexpr(8):  # four registers a step, by word and then by row
                a[j, i] = words[j // 2, j % 2] ^ zero
            if cutlass.const_expr(more):
                fetch(w, ring, at[0], at[1], base + i)
        cute.arch.mbarrier_wait(full + stage, phase)
        warpgroup.fence()
        for i in cutlass.range_constexpr(cfg.width):
            for s in cutlass.range_constexpr(2):
                part = cute.recast_ptr(a.iterator + 8 * i + 4 * s, dtype=BFloat16)
                part = cute.make_tensor(part, cute.make_layout(((2, 2, 2), 1, 1)))
                cute.gemm(mma, sums, part, b[None, None, None, s, i, stage], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty + stage)
        stage += 1
        if stage == cfg.stages:
            stage, phase = Int32(0), phase ^ 1
    return stage, phase


@cute.jit
def consume(w, ring, b, acc, full, empty, row: Int32, column: Int32, blocks: Int32, cfg: cutlass.Constexpr):
    """Accumulate all blocks of this split: the ring holds the first, b [.., 2, width, stages] are the operands of x."""
    tokens = cutlass.const_expr(2 * acc.shape[0])
    k_major = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (ROWS, tokens, 16), warpgroup.OperandSource.RMEM, k_major, k_major)
    mma = cute.make_tiled_mma(op)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(b))
    acc.fill(0.0)
    place = Int32(0), Int32(0)
    for _ in cutlass.range(blocks - 1, unroll=1):
        column += cfg.depth * CHUNK
        place = use_block(mma, w, ring, b, acc, full, empty, (row, column), place, cfg, True)
    use_block(mma, w, ring, b, acc, full, empty, (row, column), place, cfg, False)


@cute.jit
def send(acc: cute.Tensor, sums: cute.Tensor, ready, split: Int32, warp: Int32, cfg: cutlass.Constexpr):
    """Give every fragment to the CTA of the cluster that adds it, as `add_splits` expects; its own stay on this SM."""
    words = cute.recast_tensor(acc, Int32)
    for f in cutlass.range_constexpr(words.shape[0] // 4):
        q = warp * (words.shape[0] // 4) + f
        to = sums[None, cute.arch.lane_idx(), split, q // cfg.splits]
        if q % cfg.splits == split:
            cute.autovec_copy(flat(acc, 4 * f, 4), to)
        else:
            value = tuple(words[4 * f + i] for i in range(4))
            cute.arch.store_async_dsmem(to.iterator, value, ready, q % cfg.splits)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ready)


@cute.kernel
def wgmma_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, M: Int32, cfg: cutlass.Constexpr):
    tokens, (N, K) = cutlass.const_expr(x.shape[0]), w.shape  # M of the tokens are there
    thread, _, _ = cute.arch.thread_idx()
    split, tile, _ = cute.arch.block_idx()  # the grid is one cluster wide
    wid = cute.arch.make_warp_uniform(thread // WARP)
    raw = SmemAllocator().allocate(cfg.smem(tokens), 128)
    partial = raw + cfg.stages * cfg.stage(tokens)
    full = cute.recast_ptr(partial + cfg.sums(tokens), dtype=Int64)
    empty, ready = full + cfg.stages, full + 2 * cfg.stages
    F = cutlass.const_expr(cfg.fragments(tokens))  # of 8 tokens
    if thread == 0:
        for i in cutlass.range_constexpr(cfg.stages):
            cute.arch.mbarrier_init(full + i, cfg.team)
            cute.arch.mbarrier_init(empty + i, cfg.warps_n)
        if cutlass.const_expr(cfg.splits > 1):
            mine = (F * cfg.warps_n + cfg.splits - 1 - split) // cfg.splits
            cute.arch.mbarrier_init(ready, 1 + cfg.warps_n)
            cute.arch.mbarrier_arrive_and_expect_tx(ready, mine * (cfg.splits - 1) * WARP * 16)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    if cutlass.const_expr(cfg.splits > 1):
        cute.arch.cluster_arrive_relaxed()  # published by the fence above; the wait stands before the first send

    block = cutlass.const_expr(CHUNK * cfg.depth)
    first = split * (K // block) // cfg.splits
    blocks = (split + 1) * (K // block) // cfg.splits - first
    low = tile * cfg.rows
    row = cutlass.min(low, N - cfg.rows)
    acc = cute.make_rmem_tensor((4 * F,), Float32)
    if wid >= cfg.warps_n:
        cute.arch.griddepcontrol_wait()
        layout = cute.make_layout((WARP, F, 4, cfg.width, cfg.stages))
        sx = cute.make_tensor(cute.recast_ptr(raw, dtype=Int32), layout)
        copy_x(x, M - 1, sx, full, empty, first * block, blocks * (cfg.depth // cfg.width), wid - cfg.warps_n, cfg)
    else:
        ring = cute.make_rmem_tensor((8, 2, cfg.depth), BFloat16)
        for i in cutlass.range_constexpr(cfg.depth):
            fetch(w, ring, row + 16 * wid, first * block, i)
        cute.arch.griddepcontrol_wait()  # its activations come from the producers, but its stores are its own
        half = cutlass.const_expr(64 * F)  # elements of 8 columns of all tokens
        shape = ((8, F), (8, 2), 2, cfg.width, cfg.stages)
        stride = ((8, 64), (1, half), 2 * half, 4 * half, 4 * half * cfg.width)
        b = cute.make_tensor(cute.recast_ptr(raw, dtype=BFloat16), cute.make_layout(shape, stride=stride))
        consume(w, ring, b, acc, full, empty, row + 16 * wid, first * block, blocks, cfg)
    if cutlass.const_expr(cfg.splits > 1):
        cute.arch.cluster_wait()
        layout = cute.make_layout((4, WARP, cfg.splits, cfg.owned(tokens)))
        sums = cute.make_tensor(cute.recast_ptr(partial, dtype=Float32), layout)
        if wid < cfg.warps_n:
            send(acc, sums, ready, split, wid, cfg)
        cute.arch.mbarrier_wait(ready, 0)
        add_splits(sums, out, M, F, wid, split, row, low, cfg)
    elif wid < cfg.warps_n:
        for f in cutlass.range_constexpr(F):
            store(out, M, flat(acc, 4 * f, 4), f, 1, row + 16 * wid, low)


@cute.jit
def wgmma_entry(x, w, out, cfg: cutlass.Constexpr, tokens: cutlass.Constexpr, stream: cuda.CUstream):
    wgmma_kernel(any_rows(x, tokens), w, any_rows(out, tokens), x.shape[0], cfg).launch(
        grid=[cfg.splits, cfg.tiles(w.shape[0]), 1],
        block=[cfg.threads, 1, 1],
        smem=cfg.smem(tokens),
        cluster=[cfg.splits, 1, 1] if cfg.splits > 1 else None,
        stream=stream,
        use_pdl=True,
    )
