"""Attention residuals in one launch: residual add, softmax mix of up to nine sources, output norm (SPEC.md 4).

Plan. A cluster of `Config.cluster` blocks owns one token, each block a contiguous slice of the hidden size.
load: the weights before the PDL wait; after it every source element once, kept in registers as bf16 until the end.
compute: two sums per source (square, dot) folded so that a lane ends with one of them, summed over the warps through
shared memory and over the cluster through asynchronous stores to the peers; every warp then does the softmax itself.
store: prefix and bank row once all sources are read; the mix after one more such sum, for the output norm.
Bounds: one SM takes 64 bytes a clock from L2, so a lone block needs 2 us for nine rows of 7168; hence clusters.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from torch import Tensor

from reference.attn_res import EPS, FINAL, POST, PRE
from reference.config import Config as Model
from reference.config import k3
from reference.plan import plan
from reference.stage import ContractError, twin

from .device import WARP, any_rows, load, load_weight, rsqrt, span, store, warp_sum
from .kernel import ARCHS, Arg, Kernel

LOG2E = 1.4426950408889634
SMS = 132  # of an H200, the smallest chip served
MAX_CLUSTER = 8  # blocks; the portable limit


@dataclass(frozen=True)
class Config:
    """cluster: blocks that share one token. threads: per block. vec: elements per load (8 is 16 bytes)."""

    cluster: int
    threads: int
    vec: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    def loads(self, hidden: int) -> int:
        """Loads per thread and source row."""
        return hidden // (self.cluster * self.threads * self.vec)

    def registers(self, hidden: int, nb: int) -> int:
        """Estimate per thread, an upper bound of what ptxas 13.4 took: sources lifted once, packed weights, sums."""
        elements = self.loads(hidden) * self.vec
        return elements * (nb + 1) + 3 * elements // 2 + 2 * (nb + 1) + 16

    def fits(self, tokens: int, hidden: int, nb: int) -> bool:
        """The slices divide the row, nothing spills, and all clusters of a step are resident at once."""
        if hidden % (self.cluster * self.threads * self.vec):
            return False
        registers = -(-self.registers(hidden, nb) // 8) * 8
        quarter = -(-self.warps // 4)  # warps on one of an SM's four schedulers, which owns 512 registers per lane
        blocks = min(512 // (registers * quarter), 64 // self.warps)
        return registers <= 248 and tokens * self.cluster <= SMS * blocks

    def shared_bytes(self, sums: int) -> int:
        """Shared memory of `sums` sums over a token: a row of lanes per warp and per peer, and a barrier each."""
        rows = (self.warps > 1 or self.cluster > 1) * self.warps + (self.cluster > 1) * self.cluster
        return sums * (rows * WARP * 4 + (self.cluster > 1) * 8)


def candidates(T: int, D: int, nb: int, clusters: tuple[int, ...] = (1, 2, 4, MAX_CLUSTER)) -> list[Config]:
    """Every legal Config for T tokens of width D that mix nb blocks and the prefix."""
    grid = product(clusters, range(1, 33), (8, 4, 2))
    return [c for cluster, warps, vec in grid if (c := Config(cluster, warps * WARP, vec)).fits(T, D, nb)]


@cache
def choose_config(T: int, D: int, nb: int) -> Config:
    """The Config of a step. The thresholds are counts of clocks, not measurements. Raises ContractError for a bad D."""
    cluster = MAX_CLUSTER
    # A row of 7168 costs one SM 224 clocks of L2 port, a sum across the cluster some 300, and there are two sums: with
    # fewer than two blocks to read, or a row that one warp holds, a lone block is done first.
    if nb < 2 or D < 1024:
        cluster = 1
    while T * cluster > SMS - 4:  # one block per SM; four of 132 are left over by whole clusters of eight
        cluster //= 2
    # 16 warps at most: every warp reads one row of shared memory per warp, for each sum.
    legal = [c for c in candidates(T, D, nb, (cluster,)) if c.warps <= 16]
    if not legal:
        raise ContractError(
            f"attn_res: prefix has D = {D}; allowed are multiples of 64 that divide evenly, such as 7168"
        )
    if D < 1024:
        return min(legal, key=lambda c: (c.warps, c.loads(D)))  # one warp needs no barrier
    return min(legal, key=lambda c: (c.loads(D), -c.vec))  # all of a token in flight at once, in the widest loads


def _lift(parts: list[cute.Tensor]) -> cute.TensorSSA:
    """bf16 registers as fp32 values: a shift or a mask each, where conversion takes two operations for odd elements."""
    n = cute.size(parts[0])
    lifted = cute.make_rmem_tensor(len(parts) * n, Float32)
    for i, part in enumerate(parts):
        words = cute.recast_tensor(part, Int32)
        for j in range(n // 2):
            lifted[i * n + 2 * j] = (words[j] << 16).bitcast(Float32)
            lifted[i * n + 2 * j + 1] = (words[j] & -65536).bitcast(Float32)
    return lifted.load()


def _rounded(values: cute.TensorSSA, vec: int) -> list[cute.Tensor]:
    """fp32 values as bf16 registers, vec at a time, rounded to nearest even."""
    regs = cute.make_rmem_tensor(cute.size(values.shape), BFloat16)
    regs.store(values.to(BFloat16))
    return [cute.make_tensor(regs.iterator + i, cute.make_layout(vec)) for i in range(0, cute.size(regs), vec)]


def _rstd(square: Float32, hidden: int) -> Float32:
    return rsqrt(square * (1.0 / hidden) + EPS)


def _fold(values: list, lane) -> Float32:
    """Sum every value over the warp so that lane `_home(i, len(values))` ends with the sum of values[i].

    Each step halves the list: a lane keeps one half and sends the other to the lane that keeps it. 18 values take 20
    shuffles instead of 90.
    """
    for bit in (16, 8, 4, 2, 1):
        half = (len(values) + 1) // 2
        upper = (lane & bit) != 0
        folded = []
        for i, low in enumerate(values[:half]):
            keep = send = low
            if i + half < len(values):
                high = values[i + half]
                keep = Float32(cutlass.select_(upper, high, low))
                send = Float32(cutlass.select_(upper, low, high))
            folded.append(keep + cute.arch.shuffle_sync_bfly(send, offset=bit))
        values = folded
    return values[0]


def _home(index: int, count: int) -> int:
    """The lowest lane that holds values[index] after `_fold` of `count` values."""
    lane = 0
    for bit in (16, 8, 4, 2, 1):
        half = (count + 1) // 2
        if index >= half:
            lane, index = lane | bit, index - half
        count = half
    return lane


def _shared(cfg: Config, sums: int) -> tuple:
    """Shared memory of `_total`: rows of lanes per warp and per peer, and barriers that count the peers' bytes."""
    smem = cutlass.memory.SmemAllocator()
    rows = peers = ready = None
    if cfg.cluster * cfg.warps > 1:
        rows = smem.allocate_tensor(Float32, cute.make_layout((WARP, cfg.warps, sums)), byte_alignment=16)
    if cfg.cluster > 1:
        peers = smem.allocate_tensor(Float32, cute.make_layout((WARP, cfg.cluster, sums)), byte_alignment=16)
        ready = smem.allocate_array(Int64, sums, byte_alignment=8)
    return rows, peers, ready


@cute.jit
def _arm(ready: cute.Pointer, sums: cutlass.Constexpr, tid: Int32, cfg: cutlass.Constexpr) -> None:
    """Set up one barrier per sum, each complete when every peer has sent its row, and tell the peers."""
    if tid == 0:
        for i in cutlass.range_constexpr(sums):
            cute.arch.mbarrier_init(ready + i, 1)
        cute.arch.mbarrier_init_fence()
        for i in cutlass.range_constexpr(sums):
            cute.arch.mbarrier_arrive_and_expect_tx(ready + i, cfg.cluster * WARP * 4)
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def _total(value: Float32, rows, peers, ready, tid: Int32, cfg: cutlass.Constexpr, nth: cutlass.Constexpr) -> Float32:
    """The sum of `value` over the cluster's threads of the same lane. The nth call uses buffers of its own."""
    lane, warp = tid % WARP, cute.arch.make_warp_uniform(tid // WARP)
    if cutlass.const_expr(rows is not None):
        rows[lane, warp, nth] = value
        cute.arch.sync_threads()
        value = rows[lane, 0, nth]
        for w in cutlass.range_constexpr(1, cfg.warps):
            value = value + rows[lane, w, nth]
    if cutlass.const_expr(cfg.cluster > 1):
        rank = cute.arch.block_idx_in_cluster()
        mine = peers.iterator + cute.crd2idx((lane, rank, nth), peers.layout)
        for i in cutlass.range_constexpr(0, cfg.cluster, cfg.warps):  # one warp per peer
            if warp + i < cfg.cluster:
                cute.arch.store_async_dsmem(mine, value.bitcast(Int32), ready + nth, warp + i)
        cute.arch.mbarrier_wait(ready + nth, 0)
        value = peers[lane, 0, nth]
        for r in cutlass.range_constexpr(1, cfg.cluster):
            value = value + peers[lane, r, nth]
    return value


@cute.jit
def _weigh(stat: Float32, lane: Int32, hidden: cutlass.Constexpr, count: cutlass.Constexpr) -> list:
    """Softmax weights of `count` sources in every lane, from their sums as `_fold` of squares, then dots, left them."""
    other = cute.arch.shuffle_sync_bfly(stat, offset=16)
    square = Float32(cutlass.select_(lane < 16, stat, other))
    dot = Float32(cutlass.select_(lane < 16, other, stat))
    logit = _rstd(square, hidden) * dot
    top = logit
    for bit in (8, 4, 2, 1):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=bit))
    power = cute.math.exp2((logit - top) * LOG2E, fastmath=True)
    powers = [cute.arch.shuffle_sync(power, _home(j, 2 * count)) for j in range(count)]
    scale = cute.arch.rcp_approx(sum(powers[1:], powers[0]))
    return [e * scale for e in powers]


def _dot(a: cute.TensorSSA, b: cute.TensorSSA) -> Float32:
    return (a * b).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@cute.kernel
def mix_kernel(
    mPrefix: cute.Tensor,  # [T, D] bf16
    mBlocks: cute.Tensor,  # [T, B, D] bf16
    mNorm: cute.Tensor,  # [D] bf16
    mProj: cute.Tensor,  # [D] bf16
    mDelta,  # [T, D] bf16 or None
    mWout,  # [D] bf16 or None
    mOut: cute.Tensor,  # [T, D] bf16
    nb: cutlass.Constexpr,
    write: cutlass.Constexpr,
    cfg: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    rank, token, _ = cute.arch.block_idx()  # the grid is one cluster wide
    hidden, lane, sums = cute.size(mNorm), tid % WARP, (nb > 0) + (mWout is not None)
    step = cfg.threads * cfg.vec
    first = rank * step * cfg.loads(hidden) + tid * cfg.vec

    def spans(row: cute.Tensor) -> list[cute.Tensor]:
        """What this thread owns of a row: vec elements of every pass over the block's slice."""
        return [span(row, first + i * step, cfg.vec) for i in range(cfg.loads(hidden))]

    def write_back(row: cute.Tensor, parts: list[cute.Tensor]) -> None:
        for to, part in zip(spans(row), parts, strict=True):
            store(to, part)

    rows, peers, ready = _shared(cfg, sums) if sums else (None, None, None)
    if cutlass.const_expr(ready is not None):
        _arm(ready, sums, tid, cfg)

    weights = [[load_weight(x) for x in spans(w)] for w in ((mNorm, mProj) if nb else ())]
    rWout = None if mWout is None else [load_weight(x) for x in spans(mWout)]
    if cutlass.const_expr(ready is not None):
        cute.arch.cluster_wait()  # every peer has armed its barriers
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    rP = [load(x) for x in spans(mPrefix[token, None])]
    rDelta = None if mDelta is None else [load(x) for x in spans(mDelta[token, None])]
    sources = [[load(x) for x in spans(mBlocks[token, j, None])] for j in range(nb)]
    if cutlass.const_expr(mDelta is not None):
        rP = _rounded(_lift(rP) + _lift(rDelta), cfg.vec)
        write_back(mPrefix[token, None], rP)
    if cutlass.const_expr(write >= 0):
        write_back(mBlocks[token, write, None], rP)  # after this thread's read of the same elements

    lifted = [_lift(s) for s in (*sources, rP)]
    mixed = lifted[nb]
    if cutlass.const_expr(nb > 0):
        w = _lift(weights[0]) * _lift(weights[1])  # exact: 16 significant bits
        stat = _fold([_dot(v, v) for v in lifted] + [_dot(v, w) for v in lifted], lane)
        shares = _weigh(_total(stat, rows, peers, ready, tid, cfg, 0), lane, hidden, nb + 1)
        mixed = lifted[0] * shares[0]
        for v, a in zip(lifted[1:], shares[1:], strict=True):
            mixed = mixed + v * a
    if cutlass.const_expr(mWout is not None):
        square = warp_sum(_total(_dot(mixed, mixed), rows, peers, ready, tid, cfg, sums - 1))
        mixed = mixed * _rstd(square, hidden) * _lift(rWout)
    write_back(mOut[token, None], _rounded(mixed, cfg.vec))


def _launch(prefix, blocks, w_norm, w_proj, delta, w_out, out, nb, write, cfg, stream):
    tokens, (prefix, blocks, out) = prefix.shape[0], map(any_rows, (prefix, blocks, out))
    delta = None if delta is None else any_rows(delta)
    mix_kernel(prefix, blocks, w_norm, w_proj, delta, w_out, out, nb, write, cfg).launch(
        grid=[cfg.cluster, tokens, 1],
        block=[cfg.threads, 1, 1],
        cluster=[cfg.cluster, 1, 1] if cfg.cluster > 1 else None,
        stream=stream,
        use_pdl=True,
    )


C, S = cutlass.Constexpr, cuda.CUstream


@cute.jit
def mix(prefix, blocks, w_norm, w_proj, out, nb: C, write: C, cfg: C, stream: S):
    _launch(prefix, blocks, w_norm, w_proj, None, None, out, nb, write, cfg, stream)


@cute.jit
def add_mix(prefix, blocks, w_norm, w_proj, delta, out, nb: C, write: C, cfg: C, stream: S):
    _launch(prefix, blocks, w_norm, w_proj, delta, None, out, nb, write, cfg, stream)


@cute.jit
def mix_norm(prefix, blocks, w_norm, w_proj, w_out, out, nb: C, write: C, cfg: C, stream: S):
    _launch(prefix, blocks, w_norm, w_proj, None, w_out, out, nb, write, cfg, stream)


@cute.jit
def add_mix_norm(prefix, blocks, w_norm, w_proj, delta, w_out, out, nb: C, write: C, cfg: C, stream: S):
    _launch(prefix, blocks, w_norm, w_proj, delta, w_out, out, nb, write, cfg, stream)


ENTRIES = {(False, False): mix, (True, False): add_mix, (False, True): mix_norm, (True, True): add_mix_norm}


def _strides(name: str, t: Tensor, vec: int) -> tuple[int, ...]:
    """Strides to compile for; those of single elements become row-major. Raises ContractError for unaligned rows."""
    strides = list(t.stride())
    for axis in reversed(range(t.ndim)):
        if t.shape[axis] == 1:
            strides[axis] = 1 if axis + 1 == t.ndim else t.shape[axis + 1] * strides[axis + 1]
    if strides[-1] != 1 or any(s % vec for s in strides[:-1]):
        raise ContractError(
            f"attn_res: {name} has strides {tuple(t.stride())}; allowed are 1 in a row and multiples of {vec}"
        )
    return tuple(strides)


@twin("attn_res", covers=[(PRE.name,), (POST.name,), (FINAL.name,)], archs=ARCHS, batch=range(1, 65))
def attn_res(prefix, blocks, w_norm, w_proj, out, delta=None, w_out=None, *, nb: int, write: int) -> tuple[Kernel, ...]:
    """One kernel. prefix, delta, out [T, D], blocks [T, B, D], w_norm, w_proj, w_out [D], all bf16; nb <= B <= 8.

    Rows may be strided. prefix is written if delta is given, blocks[:, write] if write >= 0: after this call's reads.
    Raises ContractError for another shape, dtype, stride, nb or write.
    """
    tensors = dict(prefix=prefix, blocks=blocks, w_norm=w_norm, w_proj=w_proj, delta=delta, w_out=w_out, out=out)
    tensors = {name: t for name, t in tensors.items() if t is not None}
    dims = PRE.dims(tensors)
    T, D, B = dims["T"], dims["D"], dims["B"]
    for name, t in tensors.items():
        if t.dtype != torch.bfloat16:
            raise ContractError(f"attn_res: {name} is {t.dtype}; allowed is torch.bfloat16")
    if B > 8 or not 0 <= nb <= B or not -1 <= write < B:
        raise ContractError(f"attn_res: nb = {nb}, write = {write}, B = {B}; allowed are 0..B, -1..B-1 and 1..8")
    return (make_kernel(tensors, nb, write, choose_config(T, D, nb)),)


def make_kernel(tensors: dict[str, Tensor], nb: int, write: int, cfg: Config) -> Kernel:
    """The kernel of one Config, which must be among `candidates`. tensors: those given, in the order of an entry."""
    (T, D), B = tensors["prefix"].shape, tensors["blocks"].shape[1]
    if not cfg.fits(T, D, nb):
        raise ContractError(
            f"attn_res: {cfg} for T = {T}, D = {D}, nb = {nb}; allowed are those of candidates(T, D, nb)"
        )
    add, norm = "delta" in tensors, "w_out" in tensors
    args = tuple(
        Arg(name, PRE.by_name[name].role, t.dtype, tuple(t.shape), _strides(name, t, cfg.vec), 2 * cfg.vec,
            "T" if t.ndim > 1 else None)
        for name, t in tensors.items()
    )  # fmt: skip
    flags = "-add" * add + "-norm" * norm + f"-w{write}" * (write >= 0)
    return Kernel(
        f"attn_res-t{T}-d{D}-b{B}-nb{nb}{flags}-c{cfg.cluster}x{cfg.threads}x{cfg.vec}",
        ENTRIES[add, norm],
        args,
        (nb, write, cfg),
        grid=(cfg.cluster, T, 1),
        block=(cfg.threads, 1, 1),
        smem=cfg.shared_bytes((nb > 0) + norm),
        cluster=(cfg.cluster, 1, 1) if cfg.cluster > 1 else None,
        token_axis=1,
    )


def attn_res_cases(model: Model = k3, batches=(1,)) -> list[tuple[dict[str, Tensor], dict[str, int]]]:
    """Every distinct call of a decode step, as (meta tensors, attrs). Of k3, 1, 32 and 64 tokens differ in cluster."""
    cases = []
    for tokens, (shapes, attrs) in product(batches, _calls(model)):
        full = {n: (tokens, *s) for n, s in shapes.items()} | {n: s for n, s in shapes.items() if n.startswith("w_")}
        cases.append(({n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in full.items()}, dict(attrs)))
    return cases


@cache
def _calls(model: Model) -> list[tuple[dict[str, tuple[int, ...]], dict[str, int]]]:
    """(shapes without the tokens, attributes) of the calls that differ. The number of tokens changes nothing else."""
    made, calls, weight = plan(model, 1), {}, (model.hidden,)
    for step in made.steps:
        if step.stage.name.startswith("attn_res."):
            shapes = {n: made.buffers[r.name][0][1:] if r.space == "act" else weight for n, r in step.bind.items()}
            calls.setdefault((*sorted(shapes), *step.attrs.items()), (shapes, step.attrs))
    return list(calls.values())
