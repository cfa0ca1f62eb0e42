"""Mutants of the attention residuals: sums that meet in shared memory, then across a cluster by asynchronous stores."""

from .entry import HOISTED, ORDERING, OWN, STATE, made
from .of_kda import CONSTANT

WAIT = "    cute.arch.griddepcontrol_wait()\n"
KERNEL = "@cute.kernel\ndef mix_kernel("
CONST = CONSTANT.partition("\n\n\n")[0] + "\n\n\n" + KERNEL
PREFIX = "    rP = [load(x) for x in spans(mPrefix[token, None])]\n"
DELTA = "    rDelta = None if mDelta is None else [load(x) for x in spans(mDelta[token, None])]\n"
BLOCKS = "    sources = [[load(x) for x in spans(mBlocks[token, j, None])] for j in range(nb)]\n"
TRIGGER = "    cute.arch.griddepcontrol_launch_dependents()\n\n"
WAITED = "        cute.arch.mbarrier_wait(ready + nth, 0)\n"
SYNC = "        cute.arch.sync_threads()\n"
SUMMING = SYNC + "        value = rows[lane, 0, nth]\n"
BANK = "        write_back(mBlocks[token, write, None], rP)  # after this thread's read of the same elements\n"

MUTANTS = (
    made(ORDERING, OWN, "attn_res: wait behind a branch on the token", [(WAIT, "    if token > 0:\n    " + WAIT)],
         "static races values", "the first token never waits"),
    made(ORDERING, "M2", "attn_res: delta loaded above the wait", [(WAIT, DELTA + WAIT), (PREFIX + DELTA, PREFIX)],
         "static races values", "what the layer before adds is loaded before it is there"),
    made(ORDERING, "M2", "attn_res: bank loaded above the wait", [(WAIT, BLOCKS + WAIT), (DELTA + BLOCKS, DELTA)],
         "static races values", "finished blocks look constant, but the last of them was written a moment ago"),
    made(ORDERING, "M4", "attn_res: wait in the first warp only", [(WAIT, "    if tid < 32:\n    " + WAIT)],
         "static races values", "the other warp loads and stores unordered"),
    made(ORDERING, OWN, "attn_res: wait after the loads",
         [(WAIT + TRIGGER, TRIGGER), (PREFIX + DELTA + BLOCKS, PREFIX + DELTA + BLOCKS + WAIT)],
         "static races values", "only the stores are ordered"),
    made(ORDERING, OWN, "attn_res: bank written before the wait",
         [(WAIT, "    if cutlass.const_expr(write >= 0):\n        write_back(mBlocks[token, write, None], "
           "[load_weight(x) for x in spans(mNorm)])\n" + WAIT)],
         "static races", "a placeholder goes to the bank while others may still read or write it"),
    made(HOISTED, "M5", "attn_res: delta loaded invariant",
         [(DELTA, DELTA.replace("[load(", "[constant(")), (KERNEL, CONST)],
         "static races values", "a non-coherent load may be lifted above the wait"),
    made(HOISTED, "M5", "attn_res: bank loaded invariant",
         [(BLOCKS, BLOCKS.replace("[load(", "[constant(")), (KERNEL, CONST)],
         "static races values", "the same, of blocks that this kernel and those before write"),
    made(HOISTED, "M5", "attn_res: prefix loaded invariant",
         [(PREFIX, PREFIX.replace("[load(", "[constant(")), (KERNEL, CONST)],
         "static races values", "the same, of a tensor that the kernel itself writes back"),
    made(ORDERING, OWN, "attn_res: cluster barrier dropped",
         [("    cute.arch.cluster_arrive_relaxed()\n", ""),
          ("        cute.arch.cluster_wait()  # every peer has armed its barriers\n", "        pass\n")],
         "static races", "a peer's barrier may be used before it exists"),
    made(ORDERING, OWN, "attn_res: barrier of the block dropped",
         [("        rows[lane, warp, nth] = value\n" + SYNC, "        rows[lane, warp, nth] = value\n")],
         "static races", "rows of the other warps are read before they are written"),
    made(ORDERING, OWN, "attn_res: barrier of a warp only",
         [("        rows[lane, warp, nth] = value\n" + SYNC,
           "        rows[lane, warp, nth] = value\n        cute.arch.sync_warp()\n")],
         "static races", "the rows come from several warps"),
    made(ORDERING, OWN, "attn_res: peers' sums not waited for", [(WAITED, "")],
         "static races values", "asynchronous stores of the peers may still be on their way"),
    made(ORDERING, OWN, "attn_res: wrong parity", [(WAITED, WAITED.replace("nth, 0)", "nth, 1)"))],
         "static races values", "the phase before the first counts as complete, so the wait passes at once"),
    made(ORDERING, OWN, "attn_res: peers' sums waited for by one warp",
         [(WAITED, "        if warp == 0:\n    " + WAITED)],
         "static races", "an mbarrier orders those that wait on it"),
    made(ORDERING, OWN, "attn_res: peers' sums polled once",
         [(WAITED, WAITED.replace("mbarrier_wait", "mbarrier_try_wait"))],
         "static", "a poll may come back in vain, and nobody looks"),
    made(ORDERING, OWN, "attn_res: barrier of the block counts 32 threads",
         [(SUMMING, SUMMING.replace("sync_threads()", "barrier(barrier_id=1, number_of_threads=32)"))],
         "static values", "each warp passes by itself"),
    made(ORDERING, OWN, "attn_res: barrier in both sides of a split warp",
         [(SUMMING, "        if lane == 0:\n    " + SYNC + "        else:\n"
           "            cute.arch.barrier(barrier_id=0)\n" + SUMMING.removeprefix(SYNC))],
         "static values", "an aligned barrier is for whole warps"),
    made(ORDERING, OWN, "attn_res: barrier expects one peer too few",
         [("ready + i, cfg.cluster * WARP * 4)", "ready + i, (cfg.cluster - 1) * WARP * 4)")],
         "static races values", "the phase completes before the last row has landed"),
    made(ORDERING, OWN, "attn_res: second sum in the buffers of the first",
         [("        rows[lane, warp, nth] = value\n", "        rows[lane, warp, 0] = value\n"),
          ("        value = rows[lane, 0, nth]\n", "        value = rows[lane, 0, 0]\n"),
          ("            value = value + rows[lane, w, nth]\n", "            value = value + rows[lane, w, 0]\n")],
         "static races", "a warp that is ahead overwrites what a slower one still adds: reused early"),
    made(ORDERING, OWN, "attn_res: peers' second sums over the first",
         [("cute.crd2idx((lane, rank, nth), peers.layout)", "cute.crd2idx((lane, rank, 0), peers.layout)"),
          ("        value = peers[lane, 0, nth]\n", "        value = peers[lane, 0, 0]\n"),
          ("            value = value + peers[lane, r, nth]\n", "            value = value + peers[lane, r, 0]\n")],
         "static races", "a peer that is ahead overwrites a row that this block still adds"),
    made(ORDERING, "M6", "attn_res: fence after the barriers' set-up dropped",
         [("        cute.arch.mbarrier_init_fence()\n", "")],
         "static races", "peers may see a barrier that is not set up"),
    made(STATE, "M17", "attn_res full bank: prefix goes over a block that is read",
         [(BANK, "        pass\n"), (BLOCKS, "    if cutlass.const_expr(write >= 0):\n" + BANK + BLOCKS)],
         "law", "at the last block the bank has no free slot, and the write precedes the read"),
    made(STATE, "M17", "attn_res: prefix goes to the slot before",
         [("write_back(mBlocks[token, write, None], rP)", "write_back(mBlocks[token, write - 2, None], rP)")],
         "law", "a live block is overwritten: seen in the bank only, or layers later"),
    made(STATE, OWN, "attn_res: prefix not written back",
         [("        write_back(mPrefix[token, None], rP)\n", "")],
         "law", "the output is right, the next layer is not"),
)  # fmt: skip
