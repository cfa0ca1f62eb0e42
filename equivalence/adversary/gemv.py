"""The control set: one small GEMV whose loads of weights and of activations are written in three ways.

Only the marks on the loads differ; in the source every activation is loaded below the wait. What the compiler makes of
the marks differs by target, so the same text is right on one chip and wrong on another.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32

from fast.device import WARP, span, warp_sum
from fast.kernel import Arg, Kernel
from reference.stage import Role

ROWS, COLUMNS, WARPS, VEC = 1024, 1024, 8, 8
PIECES = COLUMNS // (WARP * VEC)  # loads of a lane
MARKS = {
    "plain": {}, "no_allocate": dict(l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE),
    "invariant": dict(invariant=True),
}  # fmt: skip
VARIANTS = (
    ("plain", "plain"), ("no_allocate", "plain"), ("invariant", "plain"), ("plain", "invariant"),
    ("no_allocate", "invariant"),
)  # fmt: skip


def fetch(row: cute.Tensor, lane, mark: str) -> cute.Tensor:
    """A lane's pieces of a row [COLUMNS], as registers [VEC, PIECES]."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), BFloat16, num_bits_per_copy=16 * VEC, **MARKS[mark])
    made = cute.make_rmem_tensor((VEC, PIECES), BFloat16)
    for i in range(PIECES):
        cute.copy(atom, span(row, (i * WARP + lane) * VEC, VEC), made[None, i])
    return made


@cute.kernel
def gemv_kernel(mX: cute.Tensor, mW: cute.Tensor, mOut: cute.Tensor, weights: cutlass.Constexpr, x: cutlass.Constexpr):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    row, lane = cta * WARPS + cute.arch.make_warp_uniform(tid // WARP), tid % WARP
    rW = fetch(mW[row, None], lane, weights)
    cute.arch.griddepcontrol_wait()
    rX = fetch(mX, lane, x)
    cute.arch.griddepcontrol_launch_dependents()
    total = (rW.load().to(Float32) * rX.load().to(Float32)).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    total = warp_sum(total)
    if lane == 0:
        mOut[row] = total.to(BFloat16)


@cute.jit
def gemv_entry(x, w, out, weights: cutlass.Constexpr, marked: cutlass.Constexpr, stream: cuda.CUstream):
    gemv_kernel(x, w, out, weights, marked).launch(
        grid=[ROWS // WARPS, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
    )


def gemv(weights: str, activations: str) -> Kernel:
    """out[1024] = w[1024, 1024] x[1024]; weights, activations: how they are loaded, of MARKS."""
    args = (
        Arg("x", Role.ACTIVATION, torch.bfloat16, (COLUMNS,)), Arg("w", Role.WEIGHT, torch.bfloat16, (ROWS, COLUMNS)),
        Arg("out", Role.OUTPUT, torch.bfloat16, (ROWS,)),
    )  # fmt: skip
    return Kernel(
        f"gemv-{weights}-{activations}", gemv_entry, args, (weights, activations), (ROWS // WARPS, 1, 1),
        (WARPS * WARP, 1, 1),
    )  # fmt: skip
