"""Small kernels for R11 (bulk copies of shared memory) and R13 (inline assembly): clean, and text for mutants."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from fast.kernel import Arg, Kernel
from reference.stage import Role


@cute.kernel
def publish_kernel(mX: cute.Tensor, mY: cute.Tensor):
    """y = 2 x by tiles of 256: a stage is filled by all threads, stored in bulk by thread 0, and used again."""
    t, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    stage = smem.allocate_tensor(Float32, cute.make_layout(256), 128)
    atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32, num_bits_per_copy=256 * 32)
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range(mX.shape[0] // 256, unroll=1):
        stage[t] = mX[i * 256 + t] * 2.0
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
        if t == 0:
            cute.copy(atom, stage, cute.local_tile(mY, (256,), (i,)))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def publish(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    publish_kernel(mX, mY).launch(grid=[1, 1, 1], block=[256, 1, 1], stream=stream, use_pdl=True)


PUBLISH = Kernel(
    "publish", publish,
    (Arg("x", Role.ACTIVATION, torch.float32, (1024,)), Arg("y", Role.OUTPUT, torch.float32, (1024,))),
    block=(256, 1, 1), smem=1024,
)  # fmt: skip


@dsl_user_op
def peek(at, *, loc=None, ip=None) -> Int32:
    """A load in inline assembly."""
    at = (at.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    made = llvm.inline_asm(T.i32(), [at], "ld.global.b32 $0, [$1];", "=r,l", has_side_effects=True,
                           asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)  # fmt: skip
    return Int32(made)


@dsl_user_op
def fence(*, loc=None, ip=None) -> None:
    llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True,
                    asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip)  # fmt: skip


@cute.kernel
def peek_kernel(mX: cute.Tensor, mY: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    cute.arch.griddepcontrol_wait()
    mY[t] = peek(mX.iterator + t)
    fence()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def peek_entry(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    peek_kernel(mX, mY).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True)


PEEK = Kernel(
    "peek", peek_entry,
    (Arg("x", Role.ACTIVATION, torch.int32, (32,)), Arg("y", Role.OUTPUT, torch.int32, (32,))), block=(32, 1, 1),
)  # fmt: skip
