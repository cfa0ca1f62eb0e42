"""Small kernels in the shapes that fast/ has or will have: clean cases for the checkers, and text for mutants.

Names: m global, g tile, s shared, r registers. Every kernel obeys THE RULE of fast/kernel.py.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fast.kernel import Arg, Kernel
from reference.stage import Role

bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
NO_ALLOCATE = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE


def load_atom(**kw):
    return cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), BFloat16, num_bits_per_copy=128, **kw)


@cute.kernel
def gemv_kernel(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor, K: cutlass.Constexpr):
    """One warp per row: weights to registers, wait, activations to registers, dot product."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(t // 32), t % 32
    row = b * 8 + warp
    steps = K // 256
    gW, gX = cute.zipped_divide(mW[row, None], (8,)), cute.zipped_divide(mX, (8,))
    rW = cute.make_rmem_tensor(cute.make_layout((8, steps)), BFloat16)
    rX = cute.make_rmem_tensor(cute.make_layout((8, steps)), BFloat16)
    for i in cutlass.range_constexpr(steps):
        cute.copy(load_atom(l1c_evict_priority=NO_ALLOCATE), gW[(None, i * 32 + lane)], rW[(None, i)])
    cute.arch.griddepcontrol_wait()
    for i in cutlass.range_constexpr(steps):
        cute.copy(load_atom(), gX[(None, i * 32 + lane)], rX[(None, i)])
    cute.arch.griddepcontrol_launch_dependents()
    acc = (rW.load().to(Float32) * rX.load().to(Float32)).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    acc = cute.arch.warp_reduction_sum(acc)
    if lane == 0:
        mY[row] = acc.to(BFloat16)


@cute.jit
def gemv(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    N, K = mW.shape
    gemv_kernel(mW, mX, mY, K).launch(grid=[N // 8, 1, 1], block=[256, 1, 1], stream=stream, use_pdl=True)


@cute.kernel
def scan_kernel(mA: cute.Tensor, mX: cute.Tensor, mSlots: cute.Tensor, mState: cute.Tensor, mY: cute.Tensor):
    """A recurrence over tokens on a state row found through a slot index; slot 0 is null; then a second pass over y."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    k = b * 128 + t
    decay = mA[k]
    cute.arch.griddepcontrol_wait()
    total = Float32(0.0)
    for i in cutlass.range(mX.shape[0], unroll=1):
        slot = mSlots[i]
        if slot > 0:
            new = mState[slot, k] * decay + mX[i, k].to(Float32)
            mState[slot, k] = new
            total += new
    for i in cutlass.range(mX.shape[0], unroll=2):
        mY[i, k] = (mX[i, k].to(Float32) + total).to(BFloat16)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def scan(
    mA: cute.Tensor, mX: cute.Tensor, mSlots: cute.Tensor, mState: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream
):
    grid = [mX.shape[1] // 128, 1, 1]
    scan_kernel(mA, mX, mSlots, mState, mY).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)


@cute.kernel
def ring_kernel(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor):
    """Weights through a two-stage cp.async ring in shared memory; the first stage is in flight before the wait."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    sW = smem.allocate_tensor(BFloat16, cute.make_layout((8, 128, 2), stride=(1, 8, 1024)), 128)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), BFloat16, num_bits_per_copy=128)
    gW, gX = cute.zipped_divide(mW[b, None], (8,)), cute.zipped_divide(mX, (8,))
    rX = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    tiles = cute.size(gW, mode=[1]) // 128
    cute.copy(atom, gW[(None, t)], sW[(None, t, 0)])
    cute.arch.cp_async_commit_group()
    cute.arch.griddepcontrol_wait()
    acc = Float32(0.0)
    for i in cutlass.range(tiles, unroll=1):
        if i + 1 < tiles:
            cute.copy(atom, gW[(None, (i + 1) * 128 + t)], sW[(None, t, (i + 1) % 2)])
        cute.arch.cp_async_commit_group()
        cute.copy(load_atom(), gX[(None, i * 128 + t)], rX)
        cute.arch.cp_async_wait_group(1)
        rW = sW[(None, t, i % 2)].load().to(Float32)
        acc = (rW * rX.load().to(Float32)).reduce(cute.ReductionOp.ADD, acc, 0)
    cute.arch.griddepcontrol_launch_dependents()
    acc = cute.arch.warp_reduction_sum(acc)
    if t % 32 == 0:
        mY[b, t // 32] = acc


@cute.jit
def ring(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    ring_kernel(mW, mX, mY).launch(grid=[mW.shape[0], 1, 1], block=[128, 1, 1], stream=stream, use_pdl=True)


@cute.kernel
def bulk_kernel(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor):
    """Two bulk copies on two mbarriers: thread 0 sends for the weight row, waits, sends for the activations."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    K = mX.shape[0]
    smem = cutlass.memory.SmemAllocator()
    bars = smem.allocate_array(Int64, 2)
    sW = smem.allocate_tensor(BFloat16, cute.make_layout(K), 128)
    sX = smem.allocate_tensor(BFloat16, cute.make_layout(K), 128)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BFloat16, num_bits_per_copy=K * 16)
    if t == 0:
        cute.arch.mbarrier_init(bars, 1)
        cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(bars, K * 2)
        cute.copy(atom, cute.group_modes(mW[b, None], 0), sW, mbar_ptr=bars)
    cute.arch.griddepcontrol_wait()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, K * 2)
        cute.copy(atom, mX, sX, mbar_ptr=bars + 1)
    cute.arch.barrier()
    cute.arch.mbarrier_wait(bars, 0)
    cute.arch.mbarrier_wait(bars + 1, 0)
    acc = Float32(0.0)
    for i in cutlass.range_constexpr(K // 128):
        acc += sW[i * 128 + t].to(Float32) * sX[i * 128 + t].to(Float32)
    acc = cute.arch.warp_reduction_sum(acc)
    cute.arch.griddepcontrol_launch_dependents()
    if t % 32 == 0:
        mY[b, t // 32] = acc


@cute.jit
def bulk(mW: cute.Tensor, mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    bulk_kernel(mW, mX, mY).launch(grid=[mW.shape[0], 1, 1], block=[128, 1, 1], stream=stream, use_pdl=True)


@cute.kernel
def split_kernel(
    mW: cute.Tensor, mX: cute.Tensor, mParts: cute.Tensor, mCount: cute.Tensor, mY: cute.Tensor, S: cutlass.Constexpr
):
    """Split-K: each CTA stores its partial sums; the last to arrive at the counter adds them and resets the counter."""
    t, _, _ = cute.arch.thread_idx()
    tile, split, _ = cute.arch.block_idx()
    n, span = tile * 128 + t, mX.shape[0] // S
    smem = cutlass.memory.SmemAllocator()
    sLast = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
    rW = cute.make_rmem_tensor(cute.make_layout((8,)), BFloat16)
    cute.copy(load_atom(l1c_evict_priority=NO_ALLOCATE), mW[n, split, None], rW)
    cute.arch.griddepcontrol_wait()
    acc = Float32(0.0)
    for i in cutlass.range_constexpr(span):
        acc += rW[i].to(Float32) * mX[split * span + i].to(Float32)
    mParts[split, n] = acc
    cute.arch.fence_acq_rel_gpu()
    cute.arch.barrier()
    if t == 0:
        sLast[0] = cute.arch.atomic_add(mCount.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
    cute.arch.barrier()
    if sLast[0] == S - 1:
        total = Float32(0.0)
        for s in cutlass.range_constexpr(S):
            total += mParts[s, n]
        mY[n] = total.to(BFloat16)
        if t == 0:
            mCount[tile] = Int32(0)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def split(
    mW: cute.Tensor, mX: cute.Tensor, mParts: cute.Tensor, mCount: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream
):
    N, S, _ = mW.shape
    split_kernel(mW, mX, mParts, mCount, mY, S).launch(
        grid=[N // 128, S, 1], block=[128, 1, 1], stream=stream, use_pdl=True
    )


@cute.kernel
def mailbox_kernel(mInbox: cute.Tensor, mFlag: cute.Tensor, mY: cute.Tensor):
    """A peer fills the inbox, then raises the flag: thread 0 spins on it, the CTA follows through a barrier."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    if t == 0:
        seen = Int32(0)
        while seen == 0:
            seen = cute.arch.load(mFlag.iterator + b, Int32, sem="acquire", scope="sys")
    cute.arch.barrier()
    mY[b * 128 + t] = mInbox[b * 128 + t]
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def mailbox(mInbox: cute.Tensor, mFlag: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    grid = [mY.shape[0] // 128, 1, 1]
    mailbox_kernel(mInbox, mFlag, mY).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)


W, X, S, I, P, Y = Role.WEIGHT, Role.ACTIVATION, Role.STATE, Role.INDEX, Role.SCRATCH, Role.OUTPUT

GEMV = Kernel(
    "gemv", gemv, (Arg("w", W, bf16, (64, 1024)), Arg("x", X, bf16, (1024,)), Arg("y", Y, bf16, (64,))),
    grid=(8, 1, 1), block=(256, 1, 1),
)  # fmt: skip
SCAN = Kernel(
    "scan", scan,
    (Arg("decay", W, f32, (512,)), Arg("x", X, bf16, (8, 512)), Arg("slots", I, i32, (8,)),
     Arg("state", S, f32, (16, 512)), Arg("y", Y, bf16, (8, 512))),
    grid=(4, 1, 1), block=(128, 1, 1),
)  # fmt: skip
RING = Kernel(
    "ring", ring, (Arg("w", W, bf16, (4, 4096)), Arg("x", X, bf16, (4096,)), Arg("y", Y, f32, (4, 4))),
    grid=(4, 1, 1), block=(128, 1, 1), smem=4096,
)  # fmt: skip
BULK = Kernel(
    "bulk", bulk, (Arg("w", W, bf16, (4, 1024)), Arg("x", X, bf16, (1024,)), Arg("y", Y, f32, (4, 4))),
    grid=(4, 1, 1), block=(128, 1, 1), smem=4224,
)  # fmt: skip
SPLIT = Kernel(
    "split", split,
    (Arg("w", W, bf16, (256, 4, 8)), Arg("x", X, bf16, (32,)), Arg("parts", P, f32, (4, 256)),
     Arg("count", P, i32, (2,)), Arg("y", Y, bf16, (256,))),
    grid=(2, 4, 1), block=(128, 1, 1), smem=4,
)  # fmt: skip
MAILBOX = Kernel(
    "mailbox", mailbox,
    (Arg("inbox", P, bf16, (512,)), Arg("flag", P, i32, (4,)), Arg("y", Y, bf16, (512,))),
    grid=(4, 1, 1), block=(128, 1, 1),
)  # fmt: skip
KERNELS = (GEMV, SCAN, RING, BULK, SPLIT, MAILBOX)
