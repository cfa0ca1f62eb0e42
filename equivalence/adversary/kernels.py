"""Kernels that stand around the one under attack: a late producer, a clock, a neighbour that takes SMs, a grid barrier.

How long they take is read from a tensor of nanoseconds, so that one captured graph serves every stall.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.experimental import primitives
from cutlass.memory import SmemAllocator

from fast.device import load, span, store
from fast.kernel import Arg, Kernel
from reference.stage import Role

CTAS, THREADS, VEC = 16, 256, 4  # of the producer: few, so that what follows finds free SMs while it stalls
CHUNK = CTAS * THREADS * VEC  # words it copies at a time
SMEM = 232448  # bytes: with it a CTA has an SM for itself, and none besides fits
NAP = 100  # ns between two looks at the clock


@cute.jit
def sleep_until(end: Int64) -> Int64:
    """Return when the clock, in ns, has reached `end`; returns its last reading."""
    now = Int64(cute.arch.globaltimer())
    while now < end:
        primitives.nanosleep(NAP)
        now = Int64(cute.arch.globaltimer())
    return now


@cute.kernel
def producer_kernel(mStall: cute.Tensor, mTruth: cute.Tensor, mArena: cute.Tensor, mTimes: cute.Tensor):
    """Let dependents start, stall, copy truth [n] to arena [n], note start and end of each CTA in times [2, CTAS]."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    start = Int64(cute.arch.globaltimer())
    stall = mStall[0]
    if stall > 0:
        sleep_until(start + stall)
    first = (cta * THREADS + tid) * VEC
    for i in cutlass.range(mTruth.shape[0] // CHUNK, unroll=4):
        at = Int64(i) * CHUNK + first
        store(span(mArena, at, VEC), load(span(mTruth, at, VEC)))
    cute.arch.sync_threads()
    if tid == 0:
        mTimes[0, cta] = start
        mTimes[1, cta] = Int64(cute.arch.globaltimer())


@cute.jit
def producer_entry(stall, truth, arena, times, stream: cuda.CUstream):
    producer_kernel(stall, truth, arena, times).launch(
        grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=False
    )


def producer(words: int) -> Kernel:
    """Copies `words` words of 4 bytes, a multiple of CHUNK, after a stall."""
    if words < CHUNK or words % CHUNK:
        raise ValueError(f"producer of {words} words: allowed are multiples of {CHUNK}")
    args = (
        Arg("stall", Role.INDEX, torch.int64, (1,), align=8), Arg("truth", Role.ACTIVATION, torch.int32, (words,)),
        Arg("arena", Role.OUTPUT, torch.int32, (words,)), Arg("times", Role.OUTPUT, torch.int64, (2, CTAS), align=8),
    )  # fmt: skip
    return Kernel(f"producer-{words}", producer_entry, args, grid=(CTAS, 1, 1), block=(THREADS, 1, 1), pdl=False)


@cute.kernel
def clock_kernel(mSeen: cute.Tensor):
    """The clock at entry and after the wait, of each CTA, in seen [2, CTAS]."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    entry = Int64(cute.arch.globaltimer())
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if tid == 0:
        mSeen[0, cta] = entry
        mSeen[1, cta] = Int64(cute.arch.globaltimer())


@cute.jit
def clock_entry(seen, stream: cuda.CUstream):
    clock_kernel(seen).launch(grid=[CTAS, 1, 1], block=[32, 1, 1], stream=stream, use_pdl=True)


CLOCK = Kernel(
    "clock", clock_entry, (Arg("seen", Role.OUTPUT, torch.int64, (2, CTAS), align=8),), grid=(CTAS, 1, 1),
)  # fmt: skip


@cute.kernel
def occupier_kernel(mHold: cute.Tensor, mSeen: cute.Tensor, smem: cutlass.Constexpr):
    """Keep an SM's shared memory for hold[0] ns; seen [2, CTAs] gets start and end."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    SmemAllocator().allocate(smem, 128)
    if tid == 0:
        start = Int64(cute.arch.globaltimer())
        mSeen[0, cta] = start
        mSeen[1, cta] = sleep_until(start + mHold[0])


@cute.jit
def occupier_entry(hold, seen, smem: cutlass.Constexpr, stream: cuda.CUstream):
    occupier_kernel(hold, seen, smem).launch(
        grid=[seen.shape[1], 1, 1], block=[32, 1, 1], smem=smem, stream=stream, use_pdl=False
    )


def occupier(sms: int) -> Kernel:
    """One CTA with all the shared memory of an SM, for each of `sms` SMs."""
    args = (
        Arg("hold", Role.INDEX, torch.int64, (1,), align=8), Arg("seen", Role.OUTPUT, torch.int64, (2, sms), align=8),
    )  # fmt: skip
    return Kernel(f"occupier-{sms}", occupier_entry, args, (SMEM,), grid=(sms, 1, 1), smem=SMEM, pdl=False)


@cute.kernel
def barrier_kernel(mLimit: cute.Tensor, mCount: cute.Tensor, smem: cutlass.Constexpr):
    """A grid barrier, one CTA per SM: it ends when every CTA has come, or after limit[0] ns, which counts as never."""
    tid, _, _ = cute.arch.thread_idx()
    ctas, _, _ = cute.arch.grid_dim()
    SmemAllocator().allocate(smem, 128)
    if tid == 0:
        end = Int64(cute.arch.globaltimer()) + mLimit[0]
        seen = cute.arch.atomic_add(mCount.iterator, Int32(1), sem="acq_rel", scope="gpu") + 1
        now = Int64(cute.arch.globaltimer())
        while seen < ctas and now < end:
            primitives.nanosleep(NAP)
            seen = cute.arch.load(mCount.iterator, Int32, sem="acquire", scope="gpu")
            now = Int64(cute.arch.globaltimer())


@cute.jit
def barrier_entry(limit, count, ctas: cutlass.Constexpr, smem: cutlass.Constexpr, stream: cuda.CUstream):
    barrier_kernel(limit, count, smem).launch(
        grid=[ctas, 1, 1], block=[32, 1, 1], smem=smem, stream=stream, use_pdl=False
    )


def grid_barrier(ctas: int) -> Kernel:
    """The control of the occupier: a grid of one CTA per SM that needs all of them at once. count is zeroed before."""
    args = (
        Arg("limit", Role.INDEX, torch.int64, (1,), align=8), Arg("count", Role.STATE, torch.int32, (1,), align=4),
    )  # fmt: skip
    return Kernel(f"grid_barrier-{ctas}", barrier_entry, args, (ctas, SMEM), grid=(ctas, 1, 1), smem=SMEM, pdl=False)
