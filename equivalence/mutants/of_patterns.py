"""Mutants of the pattern kernels: waits, flags, counters and rings in their smallest form.

The flags and counters are what the production kernels do not have yet; here the rules on them are kept sharp.
"""

from .entry import HOISTED, ORDERING, OWN, QUALITY, made

WAIT = "    cute.arch.griddepcontrol_wait()\n"
LOAD_W = """    for i in cutlass.range_constexpr(steps):
        cute.copy(load_atom(l1c_evict_priority=NO_ALLOCATE), gW[(None, i * 32 + lane)], rW[(None, i)])
"""
LOAD_X = """    for i in cutlass.range_constexpr(steps):
        cute.copy(load_atom(), gX[(None, i * 32 + lane)], rX[(None, i)])
"""
GEMV_DEF = "@cute.kernel\ndef gemv_kernel"
G_W = "cute.zipped_divide(mW[row, None], (8,))"
EITHER = """def either(b, mA, mB):
    at = cutlass.select_(b == 0, mA.iterator.toint(), mB.iterator.toint())
    return cute.make_tensor(cute.make_ptr(BFloat16, at, cute.AddressSpace.gmem, assumed_align=16), mA.layout)


"""
THROUGH_SHARED = """def through_shared(t, mA):
    box = cutlass.memory.SmemAllocator().allocate_tensor(Int64, cute.make_layout(256), 8)
    box[t] = mA.iterator.toint()
    cute.arch.barrier()
    return cute.make_tensor(cute.make_ptr(BFloat16, box[255 - t], cute.AddressSpace.gmem, assumed_align=16), mA.layout)


"""
BOX_SMEM = ("grid=(8, 1, 1), block=(256, 1, 1),\n", "grid=(8, 1, 1), block=(256, 1, 1), smem=2048,\n")
DECAY = "    decay = mA[k]\n"
SCAN_WAIT = DECAY + WAIT
HELD = """def held(row, n):
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=32, invariant=True)
    made = cute.make_rmem_tensor(cute.make_layout((1,)), Float32)
    cute.copy(atom, cute.zipped_divide(row, (1,))[(None, n)], made)
    return made[0]


@cute.kernel
def split_kernel"""
RING_LOOP = "    acc = Float32(0.0)\n    for i in cutlass.range(tiles, unroll=1):\n"
RING_END = """    acc = cute.arch.warp_reduction_sum(acc)
    if t % 32 == 0:
        mY[b, t // 32] = acc


@cute.jit
def ring("""
BULK_WAITS = "    cute.arch.barrier()\n    cute.arch.mbarrier_wait(bars, 0)\n"
BARRIER = "    cute.arch.barrier()\n"
FENCED = "    cute.arch.fence_acq_rel_gpu()\n" + BARRIER
TICKET = '        sLast[0] = cute.arch.atomic_add(mCount.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")\n'
SPUN = BARRIER + "    mY[b * 128 + t] = mInbox"
ARM_X = "    if t == 0:\n        cute.arch.mbarrier_arrive_and_expect_tx(bars + 1"
ARMED_LATE = "    if t == 0:\n    " + WAIT + "        cute.arch.mbarrier_arrive_and_expect_tx(bars + 1"


def wait_is(instead: str) -> list[tuple[str, str]]:
    return [(LOAD_W + WAIT, LOAD_W + instead)]


def seen(*findings: tuple[str, str]) -> dict:
    return dict(findings=frozenset(findings))


NO_WAIT = seen(("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y"))
EARLY_X = seen(("R2", "x"), ("R3", "x"))

MUTANTS = (
    made(HOISTED, "M5", "GEMV: activation loaded invariant",
         [("load_atom(), gX[(None, i * 32", "load_atom(invariant=True), gX[(None, i * 32")],
         "static races values", "ptxas may lift a non-coherent load above the wait", **seen(("R1", "x"), ("R3", "x"))),
    made(QUALITY, OWN, "GEMV: weights loaded invariant",
         [("load_atom(l1c_evict_priority=NO_ALLOCATE), gW", "load_atom(invariant=True), gW")],
         "static", "ptxas sinks these loads below the wait: right, but nothing is prefetched",
         **seen(("[R1]", "w"), ("[R7]", "w"))),
    made(ORDERING, "M4", "GEMV: wait in one warp only", wait_is("    if warp == 0:\n    " + WAIT),
         "static races values", "the wait orders the threads that execute it and no others", **NO_WAIT),
    made(ORDERING, OWN, "GEMV: wait behind a branch on the block", wait_is("    if b > 0:\n    " + WAIT),
         "static races values", "block 0 never waits", **NO_WAIT),
    made(ORDERING, OWN, "GEMV: wait in a loop that may not run",
         wait_is("    for _ in cutlass.range(b, unroll=1):\n    " + WAIT),
         "static races values", "block 0 runs the loop zero times", **NO_WAIT),
    made(ORDERING, "M2", "GEMV: activation load above the wait", [(WAIT + LOAD_X, LOAD_X + WAIT)],
         "static races values", "what is loaded may be of the step before", **EARLY_X),
    made(QUALITY, OWN, "GEMV: weights loaded after the wait", [(LOAD_W + WAIT + LOAD_X, WAIT + LOAD_X + LOAD_W)],
         "static", "right, but the launch overlaps with nothing", **seen(("[R7]", "w"))),
    made(ORDERING, OWN, "GEMV: address is one of two parameters",
         [(G_W, "cute.zipped_divide(either(b, mX, mW[row, None]), (8,))"), (GEMV_DEF, EITHER + GEMV_DEF)],
         "static races values", "a select hides that the early load may read the activation", **EARLY_X),
    made(QUALITY, OWN, "GEMV: address through shared memory",
         [(G_W, "cute.zipped_divide(through_shared(t, mW[row, None]), (8,))"),
          (GEMV_DEF, THROUGH_SHARED + GEMV_DEF), BOX_SMEM],
         "static", "not wrong, but a pointer the proof cannot follow must not pass", **seen(("R4", ""))),
    made(ORDERING, OWN, "GEMV: store above the wait", wait_is("    mY[row] = BFloat16(0.0)\n" + WAIT),
         "static races", "the kernel before may still read or write what is overwritten", **seen(("R6", "y"))),
    made(ORDERING, "M2", "SCAN: index load above the wait",
         [(SCAN_WAIT, DECAY + "    one = mSlots[0]\n" + WAIT), ("slot = mSlots[i]", "slot = mSlots[i] + one")],
         "static races", "slots are produced, too", **seen(("R2", "slots"), ("R3", "slots"))),
    made(ORDERING, "M2", "SCAN: state load above the wait",
         [(SCAN_WAIT, "    decay = mA[k] + mState[0, k]\n" + WAIT)],
         "static races values", "the launch before may still write that state",
         **seen(("R2", "state"), ("R3", "state"))),
    made(ORDERING, OWN, "SCAN: weight is written",
         [("mState[slot, k] = new\n", "mState[slot, k] = new\n            mA[k] = new\n")],
         "static", "what is written is no weight, and loads of it may not precede the wait", **seen(("R8", "decay"))),
    made(ORDERING, OWN, "SCAN: wait after the first tokens",
         [(SCAN_WAIT, DECAY), ("        slot = mSlots[i]\n", "    " + WAIT + "        slot = mSlots[i]\n"),
          ("cutlass.range(mX.shape[0], unroll=1)", "cutlass.range(b, unroll=1)")],
         "static races values", "the wait stands in a loop that block 0 skips", **NO_WAIT),
    made(ORDERING, "M2", "RING: asynchronous copy above the wait",
         [(WAIT + RING_LOOP, RING_LOOP), (RING_END, WAIT + RING_END)],
         "static races values", "cp.async reads when it is issued, not when it is waited for", **EARLY_X),
    made(ORDERING, "M2", "BULK: bulk copy above the wait",
         [("sW, mbar_ptr=bars)\n" + WAIT, "sW, mbar_ptr=bars)\n"), (BULK_WAITS, WAIT + BULK_WAITS)],
         "static races values", "the bulk copy of x is issued before the wait", **EARLY_X),
    made(ORDERING, "M4", "BULK: only the sender of bulk copies waits", [(WAIT + ARM_X, ARMED_LATE)],
         "static", "the others store y without having waited (here a later mbarrier happens to hold them)",
         **seen(("R5", ""), ("R6", "y"))),
    made(ORDERING, OWN, "MAILBOX: relaxed flag", [('sem="acquire", scope="sys"', 'sem="relaxed", scope="sys"')],
         "static", "a relaxed flag orders no later load", **seen(("R9", "flag"))),
    made(ORDERING, OWN, "MAILBOX: flag of the block's scope",
         [('sem="acquire", scope="sys"', 'sem="acquire", scope="cta"')],
         "static", "acquire among the threads of one block says nothing about a peer", **seen(("R9", "flag"))),
    made(ORDERING, OWN, "MAILBOX: plain flag, lifted out of its loop",
         [('Int32, sem="acquire", scope="sys"', "Int32")],
         "static", "a flag that is not volatile is read once, and the loop spins for ever",
         **seen(("R9", ""), ("R14", ""))),
    made(ORDERING, OWN, "SPLIT: relaxed counter", [('sem="acq_rel", scope="gpu"', 'sem="relaxed", scope="gpu"')],
         "static races", "the last block may load partial sums from before its ticket", **seen(("R9", "count"))),
    made(ORDERING, OWN, "SPLIT: partial sums announced without a release",
         [('sem="acq_rel", scope="gpu"', 'sem="acquire", scope="gpu"'), ("    cute.arch.fence_acq_rel_gpu()\n", "")],
         "static races", "the ticket may be seen before the sums it announces", **seen(("R10", "parts"))),
    made(HOISTED, "M5", "SPLIT: partial sums loaded invariant",
         [("total += mParts[s, n]", "total += held(mParts[s, None], n)"),
          ("@cute.kernel\ndef split_kernel", HELD)],
         "static races", "partial sums change while the kernel runs: no .nc load of them",
         **seen(("R1", "parts"))),
    made(ORDERING, OWN, "RING: wait group off by one", [("cp_async_wait_group(1)", "cp_async_wait_group(2)")],
         "static races values", "the tile that is used is the newest but one, and two groups may be on their way"),
    made(ORDERING, OWN, "RING: stage refilled while it is read",
         [("sW[(None, t, (i + 1) % 2)]", "sW[(None, t, i % 2)]")],
         "static races values", "the copy of the next tile goes over the one in use"),
    made(ORDERING, OWN, "BULK: activations not waited for", [("    cute.arch.mbarrier_wait(bars + 1, 0)\n", "")],
         "static races values", "the bulk copy may still be on its way"),
    made(ORDERING, OWN, "BULK: activations polled once",
         [("    cute.arch.mbarrier_wait(bars + 1, 0)\n", "    cute.arch.mbarrier_try_wait(bars + 1, 0)\n")],
         "static", "a poll may come back in vain, and nobody looks"),
    made(ORDERING, OWN, "BULK: wrong parity", [("mbarrier_wait(bars + 1, 0)", "mbarrier_wait(bars + 1, 1)")],
         "static races values", "the phase before the first counts as complete"),
    made(ORDERING, OWN, "SPLIT: barrier before the ticket dropped", [(FENCED, FENCED.replace(BARRIER, ""))],
         "races", "thread 0 announces sums that other threads have not stored"),
    made(ORDERING, OWN, "SPLIT: barrier after the ticket dropped", [(TICKET + BARRIER, TICKET)],
         "static races values", "the other threads read the ticket before thread 0 has it"),
    made(ORDERING, OWN, "SPLIT: epoch off by one", [("if sLast[0] == S - 1:", "if sLast[0] == S - 2:")],
         "races", "the last but one adds the sums, and one is missing"),
    made(ORDERING, OWN, "SPLIT: counter not reset", [("            mCount[tile] = Int32(0)\n", "            pass\n")],
         "values", "right once; the next launch counts on from a stale epoch"),
    made(ORDERING, OWN, "MAILBOX: barrier behind the spinning thread dropped", [(SPUN, SPUN.replace(BARRIER, ""))],
         "", "only thread 0 has seen the flag; the others load what may not be there"),
)  # fmt: skip
