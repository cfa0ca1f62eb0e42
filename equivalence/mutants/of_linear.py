"""Mutants of the skinny GEMM: weights in registers (fma, direct), and a ring of stages with producers, consumers and a
cluster that adds its splits (mma)."""

from .entry import HOISTED, ORDERING, OWN, STATE, made
from .of_kda import CONSTANT

WAIT = "    cute.arch.griddepcontrol_wait()\n"
SYNC = "    cute.arch.sync_threads()\n"
HELD = CONSTANT.partition("\n\n\n")[0]

# ---- fma

STAGE = "    stage_x(x, sx, cfg.warps * WARP)\n"
BLOCKS = "    blocks = cutlass.const_expr(sweeps(K)"
COPY_X = "cute.autovec_copy(span(x[m, None], p * 8, 8), span(sx[m, None], p * 8, 8))"
STAGE_DEF = "@cute.jit\ndef stage_x("

FMA = (
    made(ORDERING, "M2", "fma: x staged above the wait", [(WAIT + STAGE, STAGE + WAIT)],
         "static races values", "the activations are copied to shared memory before they exist"),
    made(ORDERING, "M4", "fma: wait in the first warp only", [(WAIT + STAGE, "    if wid == 0:\n    " + WAIT + STAGE)],
         "static races values", "each warp copies its part of x itself"),
    made(ORDERING, OWN, "fma: wait in lane 0 only",
         [(WAIT + STAGE, "    if cute.arch.lane_idx() == 0:\n    " + WAIT + STAGE)],
         "static races values", "the wait is per thread, not per warp"),
    made(ORDERING, "M3", "fma: waits only before it stores, behind a producer that triggers early",
         [(WAIT + STAGE, STAGE), (BLOCKS, WAIT + BLOCKS)],
         "static races values", "a trigger says that the producer started, not that its stores are there"),
    made(ORDERING, OWN, "fma: wait in a loop that may not run",
         [(WAIT + STAGE, "    for _ in cutlass.range(cta, unroll=1):\n    " + WAIT + STAGE)],
         "static races values", "block 0 runs the loop zero times"),
    made(ORDERING, OWN, "fma: out cleared before the wait",
         [(WAIT + STAGE, "    if tid == 0:\n        out[0, row] = BFloat16(0.0)\n" + WAIT + STAGE)],
         "static races", "out may still be read by the launches before"),
    made(ORDERING, OWN, "fma: barrier after staging dropped", [(STAGE + SYNC, STAGE)],
         "static races", "a warp multiplies what others have not copied yet"),
    made(ORDERING, OWN, "fma: barrier of a warp only", [(STAGE + SYNC, STAGE + "    cute.arch.sync_warp()\n")],
         "static races", "x was staged by all warps of the block"),
    made(HOISTED, "M5", "fma: x loaded invariant",
         [(COPY_X, COPY_X.replace("span(x[m, None], p * 8, 8)", "constant(span(x[m, None], p * 8, 8))")),
          (STAGE_DEF, HELD + "\n\n\n" + STAGE_DEF)],
         "static races values", "a non-coherent load may be lifted above the wait, here out of a loop"),
    made(STATE, "M15", "fma tail: padding left uninitialised",
         [("    if cutlass.const_expr(K % SWEEP):\n        for i in cutlass.range(K + tid",
           "    if cutlass.const_expr(False):\n        for i in cutlass.range(K + tid")],
         "law", "zero weights times whatever shared memory held, NaN included"),
    made(STATE, OWN, "fma: last columns forgotten",
         [("use_block(ring, sx, acc, blocks - 1, w, (row, 0)", "use_block(ring, sx, acc, 0, w, (row, 0)")],
         "law", "the last block of K meets the first columns of x"),
)  # fmt: skip

# ---- direct

FIRST = "    first = group * cfg.tokens\n"
TOKEN = (
    "    token = [cutlass.min(first + 8 * n + lane // 4, M - 1) for n in range(nt)]"
    "  # columns of tokens past M are dropped\n"
)
B_LOAD = "    b = [[load(span(x[token[n], None], column + STEP * k, 8)) for n in range(nt)] for k in range(steps)]\n"
STORES = "    for n in cutlass.range_constexpr(nt):\n        store(out"
DIRECT_DEF = "@cute.kernel\ndef direct_kernel("

DIRECT = (
    made(ORDERING, "M2", "direct: x loaded above the wait",
         [(WAIT + FIRST + TOKEN + B_LOAD, FIRST + TOKEN + B_LOAD + WAIT)],
         "static races values", "activations are loaded beside the weights"),
    made(ORDERING, OWN, "direct: wait after the products", [(WAIT, ""), (STORES, WAIT + STORES)],
         "static races values", "only the stores are ordered"),
    made(ORDERING, OWN, "direct: idle warps do not wait", [(WAIT, "    if low < N:\n    " + WAIT)],
         "static races", "a warp past the end stores nothing, but it loads"),
    made(ORDERING, OWN, "direct: wait under a predicate of the token",
         [(WAIT, "    if group == 0:\n    " + WAIT)], "static races values", "the second group of tokens never waits"),
    made(HOISTED, "M5", "direct: x loaded invariant",
         [(B_LOAD, B_LOAD.replace("load(", "constant(")), (DIRECT_DEF, HELD + "\n\n\n" + DIRECT_DEF)],
         "static races values", "a non-coherent load may be lifted above the wait"),
    made(STATE, OWN, "direct: stores past the last token",
         [("store(out, M, flat(", "store(out, 64, flat(")], "law", "rows behind the last of out are written"),
    made(STATE, OWN, "direct: row tile repeated",
         [("row = cutlass.min(low, N - 16)", "row = cutlass.min(low, N - 32)")],
         "law", "the last tile starts too early and stores the rows before"),
)  # fmt: skip

# ---- mma

PRODUCER_WAIT = WAIT + "    for i in cutlass.range(ahead, unroll=1):\n        fill(gx"
X_FIRST = """    for i in cutlass.range(ahead, unroll=1):
        fill(gx[None, None, chunk + i], sx[None, None, i], full + i, row, tokens, cfg, count_x)
"""
CONSUMER_WAIT = (
    "        cute.arch.griddepcontrol_wait()  # its activations come from the producers, but its stores are its own\n"
)
EMPTY_WAIT = "        cute.arch.mbarrier_wait(empty + stage, phase)\n"
FULL_WAIT = "        cute.arch.mbarrier_wait(full + stage, phase)\n"
MULTIPLY = "        multiply(sw[None, None, None, stage], sx[None, None, None, stage], acc, wn, wk, cfg.warps_k)\n"
FENCE = """        if cutlass.const_expr(cfg.bulk):\
  # or the arrival overtakes ldmatrix, and the next bulk copy what it reads:
            cute.arch.fence_proxy("async.shared", space="cta")  # on an H200, beside others, in 2 of 100 launches
"""
GIVE_BACK = """        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty + stage)
"""
TURN = "        stage += 1\n        if stage == cfg.stages:\n            stage, phase = Int32(0), phase ^ 1\n"
CONSUMED = GIVE_BACK + TURN
READ = "    cute.arch.sync_threads()  # every stage has been read\n"
SUMMED = "    cute.arch.sync_threads()\n    if wid < cfg.consumers:\n        part"
ARRIVE = (
    "        cute.arch.cluster_arrive()  # no warp of the cluster needs its ring any more, and every `ready` is armed\n"
)
CLUSTER_WAIT = "        cute.arch.cluster_wait()\n"
SEND = "        if wid < cfg.consumers:\n            send(acc, sums, ready, split, wn, wk, cfg)\n"
READY_WAIT = "        cute.arch.mbarrier_wait(ready, 0)\n"
INIT_SYNC = "        cute.arch.mbarrier_init_fence()\n    cute.arch.sync_threads()\n"
SUMS = """        layout = cute.make_layout((4, WARP, cfg.splits, cfg.owned(tokens)))
        sums = cute.make_tensor(cute.recast_ptr(raw, dtype=Float32), layout)
"""

MMA = (
    made(ORDERING, "M2", "mma bulk: activations copied before the wait", [(WAIT + X_FIRST, X_FIRST + WAIT)],
         "static races values", "a bulk copy reads when it is issued"),
    made(ORDERING, "M2", "mma async: activations copied before the wait", [(WAIT + X_FIRST, X_FIRST + WAIT)],
         "static races values", "cp.async reads when it is issued"),
    made(ORDERING, "M4", "mma bulk: producers do not wait", [(PRODUCER_WAIT, PRODUCER_WAIT.removeprefix(WAIT))],
         "static races values", "the consumers' wait does not order the producers' copies"),
    made(ORDERING, "M4", "mma async: producers do not wait", [(PRODUCER_WAIT, PRODUCER_WAIT.removeprefix(WAIT))],
         "static races values", "the consumers' wait does not order the producers' copies"),
    made(ORDERING, "M4", "mma bulk: consumers do not wait", [(CONSUMER_WAIT, "")],
         "static", "their stores are ordered only through the mbarriers that the producers' copies complete"),
    made(ORDERING, OWN, "mma async: wait in lane 0 of the producers",
         [(PRODUCER_WAIT, "    if me % 32 == 0:\n    " + PRODUCER_WAIT)],
         "static races values", "the wait is per thread"),
    made(ORDERING, OWN, "mma bulk: full barrier not waited for", [(FULL_WAIT, "")],
         "static races values", "a stage is read while its copies are on their way"),
    made(ORDERING, OWN, "mma async: full barrier not waited for", [(FULL_WAIT, "")],
         "static races values", "a stage is read while its copies are on their way"),
    made(ORDERING, OWN, "mma bulk: full barrier with the wrong parity",
         [(FULL_WAIT, FULL_WAIT.replace("phase)", "phase ^ 1)"))],
         "static races values", "the phase before counts as complete"),
    made(ORDERING, OWN, "mma bulk: stale parity",
         [(CONSUMED, CONSUMED.replace("phase ^ 1", "phase"))],
         "static races values", "in the second round the first round's completion is seen again"),
    made(ORDERING, OWN, "mma bulk: stage refilled without waiting", [(EMPTY_WAIT, "")],
         "static values", "a stage is reused while it is read"),
    made(ORDERING, OWN, "mma async: stage refilled without waiting", [(EMPTY_WAIT, "")],
         "static races", "a stage is reused while it is read"),
    made(ORDERING, OWN, "mma bulk: stage refilled one phase early",
         [(EMPTY_WAIT, EMPTY_WAIT.replace("phase)", "phase ^ 1)"))],
         "static values", "the wait for the empty stage passes in a fresh barrier"),
    made(ORDERING, OWN, "mma bulk: stage given back before it is read",
         [(MULTIPLY + FENCE + GIVE_BACK, FENCE + GIVE_BACK + MULTIPLY)],
         "static races", "the producers refill what the warp still multiplies"),
    made(ORDERING, OWN, "mma async: stage given back before it is read",
         [(MULTIPLY + FENCE + GIVE_BACK, FENCE + GIVE_BACK + MULTIPLY)],
         "static races", "the producers refill what the warp still multiplies"),
    made(ORDERING, OWN, "mma bulk: stage given back by lane 0 alone",
         [(GIVE_BACK, GIVE_BACK.replace("        cute.arch.sync_warp()\n", ""))],
         "static races",
         "ldmatrix is an instruction of the whole warp, so here lane 0 cannot run ahead; elsewhere it could"),
    made(ORDERING, OWN, "mma async: arrival before the copies have landed",
         [("        cute.arch.cp_async_mbarrier_arrive_noinc(full)\n", "        cute.arch.mbarrier_arrive(full)\n")],
         "static races values", "an ordinary arrival does not wait for cp.async"),
    made(ORDERING, OWN, "mma bulk: fewer bytes expected than are sent",
         [("(rows + step - 1 - row) // step * (2 * width))", "(rows + step - 1 - row) // step * width)")],
         "static values", "the stage counts as full with half of its bytes"),
    made(ORDERING, OWN, "mma async: full barrier counts weights only",
         [("cute.arch.mbarrier_init(full + i, 2 * cfg.producers", "cute.arch.mbarrier_init(full + i, cfg.producers")],
         "static races values", "the phase completes before the activations have landed"),
    made(ORDERING, OWN, "mma bulk: empty barrier counts one consumer too few",
         [("mbarrier_init(empty + i, cfg.consumers)", "mbarrier_init(empty + i, cfg.consumers - 1)")],
         "static values", "the stage is refilled while the slowest warp still reads it"),
    made(ORDERING, OWN, "mma bulk: barriers used before they are set up",
         [(INIT_SYNC, INIT_SYNC.replace("    cute.arch.sync_threads()\n", ""))],
         "static races", "other warps meet an mbarrier that is not initialised"),
    made(ORDERING, "M6", "mma bulk: proxy fence before the stage is given back dropped", [(FENCE, "")],
         "static", "the next bulk copy may overtake ldmatrix: 2 of 100 launches on an H200, beside others"),
    made(ORDERING, "M6", "mma bulk: fence after the barriers' set-up dropped",
         [(INIT_SYNC, "    cute.arch.sync_threads()\n")],
         "static", "the asynchronous proxy may see a barrier that is not set up"),
    made(ORDERING, OWN, "mma bulk: sums over stages that are still read", [(READ, "")],
         "static races", "partial sums go where another warp still reads its stage"),
    made(ORDERING, OWN, "mma bulk: partial sums added before they are there",
         [(SUMMED, SUMMED.removeprefix("    cute.arch.sync_threads()\n"))],
         "static races", "sums of the other warps are read before they are written"),
    made(ORDERING, OWN, "mma split: cluster barrier dropped", [(ARRIVE + CLUSTER_WAIT, "")],
         "static races", "sums land in the ring of a peer that still reads it"),
    made(ORDERING, OWN, "mma split: cluster barrier without release",
         [(ARRIVE, ARRIVE.replace("cluster_arrive()", "cluster_arrive_relaxed()"))],
         "static races", "the peer's reads are not ordered before the sums that overwrite them"),
    made(ORDERING, OWN, "mma split: sums sent before the cluster arrives",
         [(ARRIVE + CLUSTER_WAIT + SUMS + SEND, SUMS + SEND + ARRIVE + CLUSTER_WAIT)],
         "static races", "the barrier stands behind what it should hold back"),
    made(ORDERING, OWN, "mma split: splits' sums not waited for", [(READY_WAIT, "")],
         "static races values", "asynchronous stores of the peers may still be on their way"),
    made(ORDERING, OWN, "mma split: splits' sums with the wrong parity",
         [(READY_WAIT, READY_WAIT.replace("0)", "1)"))],
         "static races values", "the phase before the first counts as complete"),
    made(ORDERING, OWN, "mma split: one split too few expected",
         [("mine * cfg.splits * WARP * 16", "mine * (cfg.splits - 1) * WARP * 16")],
         "static races values", "the phase completes before the last split has arrived"),
    made(STATE, OWN, "mma split: one split left out",
         [("            for s in cutlass.range_constexpr(1, cfg.splits):\n                value.store(",
           "            for s in cutlass.range_constexpr(1, cfg.splits - 1):\n                value.store(")],
         "law", "a part of K is missing from the sum"),
    made(STATE, OWN, "mma bulk: one token too many", [("produce(w, x, M, raw", "produce(w, x, M + 1, raw")],
         "law", "a row behind the last of x is read"),
    made(STATE, OWN, "mma bulk: last tile past the end",
         [("    row = cutlass.min(low, N - cfg.rows)\n    acc", "    row = low\n    acc")],
         "law", "rows do not divide N: weights are read, and out is written, beyond the end"),
)  # fmt: skip

MUTANTS = FMA + DIRECT + MMA
