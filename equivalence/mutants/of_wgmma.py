"""Mutants of the skinny GEMM on warpgroup tensor cores: x through registers into a ring of stages, products that run
asynchronously, a cluster that adds its splits. Its kernels are for sm_90a alone."""

from functools import partial

from fast.linear import WGMMA_ARCHS

from .entry import HOISTED, ORDERING, OWN, STATE, made
from .of_linear import HELD, READY_WAIT, TURN

PRODUCER_WAIT = "    if wid >= cfg.warps_n:\n        cute.arch.griddepcontrol_wait()\n"
COPY = (
    "        copy_x(x, M - 1, sx, full, empty, first * block, blocks * (cfg.depth // cfg.width), "
    "wid - cfg.warps_n, cfg)\n"
)
CONSUMER_WAIT = (
    "        cute.arch.griddepcontrol_wait()  # its activations come from the producers, but its stores are its own\n"
)
FULL_WAIT = "        cute.arch.mbarrier_wait(full + stage, phase)\n"
EMPTY_WAIT = "            cute.arch.mbarrier_wait(empty + slot, (i // cfg.stages + 1) % 2)\n"
FENCE = '        cute.arch.fence_proxy("async.shared", space="cta")\n'
FILLED = """        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(full + slot)
"""
DONE = "        warpgroup.commit_group()\n        warpgroup.wait_group(0)\n"
GIVE_BACK = """        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty + stage)
"""
INIT = "        cute.arch.mbarrier_init_fence()\n    cute.arch.sync_threads()\n"
CLUSTER_ARRIVE = (
    "        cute.arch.cluster_arrive_relaxed()  # published by the fence above; the wait stands before the"
)
CLUSTER_WAIT = "        cute.arch.cluster_wait()\n"
SENT = """    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ready)
"""
ALONE = "    if wid >= cfg.warps_n:\n        if thread % WARP == 0:\n"
COPY_X = "@cute.jit\ndef copy_x("
X_LOAD = "            load(span(x[cutlass.min("

on_hopper = partial(made, targets=WGMMA_ARCHS)

MUTANTS = (
    on_hopper(ORDERING, "M2", "wgmma: x copied above the wait",
              [(PRODUCER_WAIT, PRODUCER_WAIT.partition("\n")[0] + "\n"),
               (COPY, COPY + "        cute.arch.griddepcontrol_wait()\n")],
              "static races values", "the producers copy activations before they exist"),
    on_hopper(ORDERING, "M4", "wgmma: producers do not wait",
              [(PRODUCER_WAIT, PRODUCER_WAIT.partition("\n")[0] + "\n")],
              "static races values", "the consumers' wait does not order the producers' loads"),
    on_hopper(ORDERING, "M4", "wgmma: consumers do not wait", [(CONSUMER_WAIT, "")],
              "static", "their stores are ordered only through the stages that the producers fill"),
    on_hopper(ORDERING, OWN, "wgmma: wait in lane 0 of the producers",
              [(PRODUCER_WAIT, ALONE + "    " + PRODUCER_WAIT.partition("\n")[2])],
              "static races values", "the wait is per thread"),
    on_hopper(ORDERING, OWN, "wgmma: full barrier not waited for", [(FULL_WAIT, "")],
              "static races", "products read a stage that is not filled"),
    on_hopper(ORDERING, OWN, "wgmma: full barrier with the wrong parity",
              [(FULL_WAIT, FULL_WAIT.replace("phase)", "phase ^ 1)"))],
              "static values", "the phase before counts as complete"),
    on_hopper(ORDERING, OWN, "wgmma: stale parity",
              [(GIVE_BACK + TURN, GIVE_BACK + TURN.replace("phase ^ 1", "phase"))],
              "static values", "in the second round the first round's completion is seen again"),
    on_hopper(ORDERING, OWN, "wgmma: stage refilled without waiting",
              [(EMPTY_WAIT, "            pass\n")],
              "static values", "a stage is stored to while products read it"),
    on_hopper(ORDERING, OWN, "wgmma: stage refilled one phase early",
              [(EMPTY_WAIT, EMPTY_WAIT.replace("+ 1) % 2)", ") % 2)"))],
              "static values", "the wait for the empty stage passes in a fresh barrier"),
    on_hopper(ORDERING, OWN, "wgmma: stage given back before its products are done",
              [(DONE + GIVE_BACK, DONE.partition("\n")[0] + "\n" + GIVE_BACK + DONE.partition("\n")[2])],
              "static races", "wgmma reads its stage until the group is waited for"),
    on_hopper(ORDERING, OWN, "wgmma: products never waited for", [(DONE, DONE.partition("\n")[0] + "\n")],
              "static races", "sums are stored, and the stage given back, while products are on their way"),
    on_hopper(ORDERING, OWN, "wgmma: registers handed to the products by no fence",
              [("        warpgroup.fence()\n", "")],
              "static races", "wgmma may read its registers before what the warp wrote there is there"),
    on_hopper(ORDERING, "M6", "wgmma: proxy fence after the stores dropped", [(FENCE, "")],
              "static races", "the asynchronous proxy may read what the stage held before"),
    on_hopper(ORDERING, OWN, "wgmma: stage published by lane 0 alone",
              [(FILLED, FILLED.replace("        cute.arch.sync_warp()\n", ""))],
              "static races", "the other lanes' stores are not ordered before the arrival"),
    on_hopper(ORDERING, OWN, "wgmma split: full barrier counts one producer of the team too few",
              [("mbarrier_init(full + i, cfg.team)", "mbarrier_init(full + i, cfg.team - 1)")],
              "static values", "the stage counts as full with half of its tokens"),
    on_hopper(ORDERING, OWN, "wgmma: empty barrier counts one warp too few",
              [("mbarrier_init(empty + i, cfg.warps_n)", "mbarrier_init(empty + i, cfg.warps_n - 1)")],
              "static races values", "the stage is refilled while the slowest warp still reads it"),
    on_hopper(ORDERING, OWN, "wgmma: barriers used before they are set up",
              [(INIT, INIT.replace("    cute.arch.sync_threads()\n", ""))],
              "static races", "other warps meet an mbarrier that is not initialised"),
    on_hopper(ORDERING, OWN, "wgmma split: sums sent before the cluster is there",
              [(CLUSTER_ARRIVE, "        pass  # "), (CLUSTER_WAIT, "")],
              "static races", "a peer's barrier may not be armed when the sums arrive"),
    on_hopper(ORDERING, OWN, "wgmma split: cluster barrier published by no fence",
              [(INIT, "    cute.arch.sync_threads()\n")],
              "static races", "a relaxed arrival alone shows no peer the barrier that was set up"),
    on_hopper(ORDERING, OWN, "wgmma split: splits' sums not waited for", [(READY_WAIT, "")],
              "static races values", "asynchronous stores of the peers may still be on their way"),
    on_hopper(ORDERING, OWN, "wgmma split: splits' sums with the wrong parity",
              [(READY_WAIT, READY_WAIT.replace("0)", "1)"))],
              "static races values", "the phase before the first counts as complete"),
    on_hopper(ORDERING, OWN, "wgmma split: one split too few expected",
              [("mine * (cfg.splits - 1) * WARP * 16", "mine * (cfg.splits - 2) * WARP * 16")],
              "static values", "the phase completes before the last split has arrived"),
    on_hopper(ORDERING, OWN, "wgmma split: own sums not counted",
              [("mbarrier_init(ready, 1 + cfg.warps_n)", "mbarrier_init(ready, 1)"), (SENT, "")],
              "static races", "the sums that stay on this SM are plain stores of other warps"),
    on_hopper(ORDERING, OWN, "wgmma split: own sums published by lane 0 alone",
              [(SENT, SENT.replace("    cute.arch.sync_warp()\n", ""))],
              "static races", "the other lanes' stores are not ordered before the arrival"),
    on_hopper(HOISTED, "M5", "wgmma: x loaded invariant",
              [(X_LOAD, X_LOAD.replace("load(", "constant(")), (COPY_X, HELD + "\n\n\n" + COPY_X)],
              "static", "a non-coherent load may be lifted above the wait; ptxas for sm_90a does not"),
    on_hopper(STATE, OWN, "wgmma: tokens of a team's last warp forgotten",
              [("group = part + cfg.team * g\n", "group = part + cfg.team * (g // 2)\n")],
              "law", "the second group of tokens is never stored; its columns multiply what the stage held"),
    on_hopper(STATE, OWN, "wgmma: last tile past the end",
              [("    row = cutlass.min(low, N - cfg.rows)\n    acc", "    row = low\n    acc")],
              "law", "rows do not divide N: weights are read, and out is written, beyond the end"),
)  # fmt: skip
