"""Skinny GEMM on tensor cores without shared memory: out[M, N] = x[M, K] w[N, K]^T for a K that fits in registers.

Plan. A warp owns 16 weight rows and `tokens` tokens, and loads its whole operands of mma.m16n8k16 straight into
registers, the weights before griddepcontrol.wait. There is no barrier and no sum between warps.
A lane loads 16 bytes where the fragment layout has twice 4 bytes: columns 8t .. 8t + 7 of every 32 stand in for 2t,
2t + 1, 2t + 8, 2t + 9 of two steps of 16. Both operands do so, and a dot product does not mind.
Bound: latency, of one load of x and K / 16 dependent products.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

from .device import WARP, any_rows, load, load_weight, span
from .linear_mma import flat, fragment, store

STEP = 32  # columns that a warp covers with one 16-byte load per lane


@dataclass(frozen=True)
class DirectConfig:
    """tokens: of a warp, a multiple of 8. warps: of a CTA, side by side along the rows."""

    tokens: int
    warps: int

    def grid(self, M: int, N: int) -> tuple[int, int, int]:
        return -(-N // (16 * self.warps)), (M + self.tokens - 1) // self.tokens, 1

    def registers(self, K: int) -> int:
        """Registers of a lane's operands and sums."""
        return K // STEP * (8 + self.tokens // 2) + self.tokens // 2


@cute.jit
def halves(first: cute.Tensor, second: cute.Tensor, i: cutlass.Constexpr, to: cute.Tensor):
    """The A fragment of step i of two from the pieces of a row and of the row eight below."""
    lo, hi, to = (cute.recast_tensor(t, Int32) for t in (first, second, to))
    for j in cutlass.range_constexpr(2):
        to[2 * j] = lo[2 * i + j]
        to[2 * j + 1] = hi[2 * i + j]


@cute.kernel
def direct_kernel(x: cute.Tensor, w: cute.Tensor, out: cute.Tensor, M: Int32, cfg: cutlass.Constexpr):
    N, K = w.shape
    thread, _, _ = cute.arch.thread_idx()
    block, group, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    cute.arch.griddepcontrol_launch_dependents()
    low = 16 * (block * cfg.warps + cute.arch.make_warp_uniform(thread // WARP))
    row = cutlass.min(low, N - 16)  # the last tile starts early, and a warp past it stores nothing
    nt, steps = cutlass.const_expr(cfg.tokens // 8), cutlass.const_expr(K // STEP)
    column = lane % 4 * 8
    a = [
        [load_weight(span(w[row + lane // 4 + 8 * h, None], column + STEP * k, 8)) for h in range(2)]
        for k in range(steps)
    ]
    cute.arch.griddepcontrol_wait()
    first = group * cfg.tokens
    token = [cutlass.min(first + 8 * n + lane // 4, M - 1) for n in range(nt)]  # columns of tokens past M are dropped
    b = [[load(span(x[token[n], None], column + STEP * k, 8)) for n in range(nt)] for k in range(steps)]

    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    acc = cute.make_rmem_tensor((4, nt), Float32)
    acc.fill(0.0)
    rows = cute.make_rmem_tensor((8,), BFloat16)
    for k in cutlass.range_constexpr(steps):
        for i in cutlass.range_constexpr(2):
            halves(a[k][0], a[k][1], i, rows)
            for n in cutlass.range_constexpr(nt):
                c = fragment(acc, 4 * n, 4)
                cute.gemm(atom, c, fragment(rows, 0, 8), fragment(b[k][n], 4 * i, 4), c)
    for n in cutlass.range_constexpr(nt):
        store(out, M, flat(acc, 4 * n, 4), first // 8 + n, 1, row, low)


@cute.jit
def direct_entry(x, w, out, cfg: cutlass.Constexpr, stream: cuda.CUstream):
    M = x.shape[0]
    direct_kernel(any_rows(x), w, any_rows(out), M, cfg).launch(
        grid=cfg.grid(M, w.shape[0]), block=[cfg.warps * WARP, 1, 1], stream=stream, use_pdl=True
    )
