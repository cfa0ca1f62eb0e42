"""Skinny GEMM with fp32 FMA: out[M, N] = x[M, K] w[N, K]^T for one to four tokens, weights straight into registers.

Plan. A warp owns `rows` weight rows at a time, its lanes own 16-byte pieces of K, 256 columns apart. The first `depth`
pieces of the first rows are loaded before griddepcontrol.wait; then x goes to shared memory, and each piece that is
used up is replaced at once by the one `depth` pieces later (of the next rows, past the end), so that the loads in
flight never drain. A shuffle tree ends a row. Bound by the weight stream.
bf16 FMA needs sm_100; both operands are lifted to fp32, which also is what the accumulation asks for.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.memory import SmemAllocator

from .device import WARP, load_weight, span, to_f32, warp_sum

SWEEP = 256  # columns that a warp covers with one 16-byte load per lane


@dataclass(frozen=True)
class FmaConfig:
    """rows: weight rows of a warp at a time. depth: pieces of each in flight. warps, ctas: warps of a CTA, CTAs."""

    rows: int
    depth: int
    warps: int
    ctas: int

    def smem(self, M: int, K: int) -> int:
        return M * sweeps(K) * SWEEP * 2


def sweeps(K: int) -> int:
    return -(-K // SWEEP)


@cute.jit
def fetch(w: cute.Tensor, ring: cute.Tensor, row, block, i: cutlass.Constexpr):
    """Slot i of block `block` of the rows row ..; rows past the end repeat the last one."""
    N, K = w.shape
    column = (block * ring.shape[1] + i) * SWEEP + cute.arch.lane_idx() * 8
    for r in cutlass.range_constexpr(ring.shape[2]):
        if K % SWEEP == 0 or column < K:
            src = span(w[cutlass.min(row + r, N - 1), None], column, 8)
            cute.autovec_copy(load_weight(src), ring[None, i, r])


@cute.jit
def stage_x(x: cute.Tensor, sx: cute.Tensor, threads: cutlass.Constexpr):
    """x [M, K] to shared memory [M, sweeps * 256], zero past K."""
    M, K = x.shape
    tid, _, _ = cute.arch.thread_idx()
    pieces = K // 8
    for i in cutlass.range(tid, M * pieces, threads, unroll=4):
        m, p = i // pieces, i % pieces
        cute.autovec_copy(span(x[m, None], p * 8, 8), span(sx[m, None], p * 8, 8))
    if cutlass.const_expr(K % SWEEP):
        for i in cutlass.range(K + tid, sx.shape[1], threads):
            for m in cutlass.range_constexpr(M):
                sx[m, i] = BFloat16(0.0)


@cute.jit
def use_block(ring: cute.Tensor, sx: cute.Tensor, acc: cute.Tensor, block, w, following, more: cutlass.Constexpr):
    """acc [2, rows, M] += the ring's block; if more, each used slot is refilled from `following` = (row, block)."""
    _, depth, rows = ring.shape
    lane = cute.arch.lane_idx()
    piece = cute.make_rmem_tensor((8,), BFloat16)
    for i in cutlass.range_constexpr(depth):
        fw = [to_f32(ring[None, i, r]) for r in range(rows)]
        if cutlass.const_expr(more):
            fetch(w, ring, following[0], following[1], i)
        cute.arch.sync_warp()  # keeps ptxas from hoisting later loads: they would need registers of their own
        for m in cutlass.range_constexpr(sx.shape[0]):
            cute.autovec_copy(span(sx[m, None], (block * depth + i) * SWEEP + lane * 8, 8), piece)
            fx = to_f32(piece)
            for k in cutlass.range_constexpr(8):
                for r in cutlass.range_constexpr(rows):
                    acc[k % 2, r, m] += fw[r][k] * fx[k]


@cute.jit
def end_rows(acc: cute.Tensor, out: cute.Tensor, row):
    """Sum over the lanes, round once, store, and start again from zero."""
    _, rows, M = acc.shape
    for r in cutlass.range_constexpr(rows):
        for m in cutlass.range_constexpr(M):
            value = warp_sum(acc[0, r, m] + acc[1, r, m])
            if cute.arch.lane_idx() == 0 and row + r < out.shape[1]:
                out[m, row + r] = value.to(BFloat16)
    acc.fill(0.0)


@cute.kernel
def fma_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, cfg: cutlass.Constexpr):
    M, (N, K) = cutlass.const_expr(x.shape[0]), w.shape
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    wid = cute.arch.make_warp_uniform(tid // 32)
    stride = cfg.ctas * cfg.warps * cfg.rows
    row = (wid * cfg.ctas + cta) * cfg.rows
    ring = cute.make_rmem_tensor((8, cfg.depth, cfg.rows), BFloat16)
    if cutlass.const_expr(K % SWEEP):
        ring.fill(0.0)
    for i in cutlass.range_constexpr(cfg.depth):
        fetch(w, ring, row, 0, i)
    cute.arch.griddepcontrol_launch_dependents()
    raw = SmemAllocator().allocate(cfg.smem(M, K), 128)
    layout = cute.make_layout((M, sweeps(K) * SWEEP), stride=(sweeps(K) * SWEEP, 1))
    sx = cute.make_tensor(cute.recast_ptr(raw, dtype=BFloat16), layout)
    cute.arch.griddepcontrol_wait()
    stage_x(x, sx, cfg.warps * WARP)
    cute.arch.sync_threads()

    acc = cute.make_rmem_tensor((2, cfg.rows, M), Float32)
    acc.fill(0.0)
    blocks = cutlass.const_expr(sweeps(K) // cfg.depth)
    block = Int32(0)
    for _ in cutlass.range((N - 1 - row + stride) // stride * blocks - 1, unroll=1):
        if cutlass.const_expr(blocks == 1):
            use_block(ring, sx, acc, 0, w, (row + stride, 0), True)
            end_rows(acc, out, row)
            row += stride
        else:
            last = block == blocks - 1
            after = (cutlass.select_(last, row + stride, row), cutlass.select_(last, 0, block + 1))
            use_block(ring, sx, acc, block, w, after, True)
            if last:
                end_rows(acc, out, row)
            row, block = after
    if row < N:
        use_block(ring, sx, acc, blocks - 1, w, (row, 0), False)
        end_rows(acc, out, row)


@cute.jit
def fma_entry(x, w, out, cfg: cutlass.Constexpr, stream: cuda.CUstream):
    fma_kernel(x, w, out, cfg).launch(
        grid=[cfg.ctas, 1, 1], block=[cfg.warps * WARP, 1, 1], smem=cfg.smem(*x.shape), stream=stream, use_pdl=True
    )
