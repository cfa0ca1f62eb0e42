"""Mutants of the fused KDA decode: one block per token and head, two barriers, a state behind a slot index."""

from equivalence.faults import FAULTS

from .entry import HOISTED, ORDERING, OWN, STATE, made

WAIT = "    cute.arch.griddepcontrol_wait()\n"
SLOT = "    slot = mSlots[token]\n"
KERNEL = "@cute.kernel\ndef kda_kernel("
X_LOAD = "load(span(mX, token * mX.stride[0] + warp * width + channel, VEC))"
CONSTANT = """def constant(src):
    bits = src.element_type.width * cute.size(src)
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), src.element_type, num_bits_per_copy=bits, invariant=True)
    made = cute.make_rmem_tensor(src.layout, src.element_type)
    cute.copy(atom, src, made)
    return made


@cute.kernel
def kda_kernel("""
BARE = """def bare_wait(effects=True):
    from cutlass._mlir.dialects import llvm
    llvm.inline_asm(res=None, operands_=[], asm_string="griddepcontrol.wait;", constraints="",
                    has_side_effects=effects, asm_dialect=llvm.AsmDialect.AD_ATT)


@cute.kernel
def kda_kernel("""
PURE = """def pure(tensor, index):
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T, Int32
    at = (tensor.iterator + index).toint().ir_value()
    return Int32(llvm.inline_asm(T.i32(), [at], "ld.global.b32 $0, [$1];", "=r,l", has_side_effects=False,
                                 asm_dialect=llvm.AsmDialect.AD_ATT))


@cute.kernel
def kda_kernel("""
TRIGGER = "    cute.arch.griddepcontrol_launch_dependents()\n"
SYNC = "        cute.arch.sync_threads()\n"
DELTA = "        delta_rule(rS, shared, beta, warp, lane, cfg.rows)\n"
STORE_STATE = "        store_state(gS, rS, warp, lane, cfg.rows)\n"


def fault(name: str):
    return FAULTS[f"kda.{name}"].edits


MUTANTS = (
    made(ORDERING, "M1", "kda: wait without memory clobber", [(WAIT, "    bare_wait()\n"), (KERNEL, BARE)],
         "static", "nothing tells the compiler that loads may not cross; CuTe DSL 4.8.1 crosses with none of ours"),
    made(ORDERING, "M1", "kda: wait without side effects", [(WAIT, "    bare_wait(False)\n"), (KERNEL, BARE)],
         "static", "inline assembly that nothing uses is deleted, the wait with it"),
    made(ORDERING, "M2", "kda: slots loaded above the wait", [(WAIT + SLOT, SLOT + WAIT)],
         "static races values", "the index is produced on the host side of the step"),
    made(ORDERING, "M2", "kda: x loaded above the wait",
         [(f"window[None, TAPS - 1].store({X_LOAD}.load())", "window[None, TAPS - 1].store(early.load())"),
          (WAIT + SLOT, f"    early = {X_LOAD.replace('warp', 'warp % 3')}\n" + WAIT + SLOT)],
         "static races values", "an activation is no weight, however often its buffer is the same"),
    made(ORDERING, "M4", "kda: wait left out of the decay warp",
         [(WAIT + SLOT, "    if warp != DECAY:\n    " + WAIT + SLOT)],
         "static races values", "the wait is per thread: a warp role without it is not ordered"),
    made(ORDERING, OWN, "kda: wait in lane 0 only", [(WAIT + SLOT, "    if lane == 0:\n    " + WAIT + SLOT)],
         "static races values", "the wait is per thread, not per warp"),
    made(ORDERING, OWN, "kda: wait after the slot is known",
         [(WAIT, ""), ("    if slot > 0:\n", "    if slot > 0:\n    " + WAIT)],
         "static races values", "rows of the null slot never wait, and everything is loaded before the others do"),
    made(ORDERING, OWN, "kda: null rows written before the wait",
         [(WAIT + SLOT,
           "    if warp == 0:\n        null = cute.make_rmem_tensor(VEC, Float32)\n        null.fill(0.0)\n"
           "        store(span(mOut, token * width + channel, VEC), null)\n" + WAIT + SLOT)],
         "static races", "out may still be read by the launches before"),
    made(ORDERING, OWN, "kda: wait behind a branch on the block",
         [(WAIT, "    if head + token > 0:\n    " + WAIT)],
         "static races values", "the first block never waits"),
    made(ORDERING, OWN, "kda: state read before the wait",
         [(WAIT + SLOT, "    held = load(span(mConv, channel, VEC))\n" + WAIT + SLOT),
          ("    beta = sigmoid(mB[token, head].to(Float32))\n",
           "    beta = sigmoid(mB[token, head].to(Float32)) + 0.0 * held[0].to(Float32)\n")],
         "static races values", "a prefetch into registers of state that the step before still writes"),
    made(HOISTED, "M5", "kda: gate loaded invariant",
         [("gate = load(span(mGate", "gate = constant(span(mGate"), (KERNEL, CONSTANT)],
         "static races values", "a non-coherent load may be lifted above the wait"),
    made(HOISTED, "M5", "kda: x loaded invariant",
         [(X_LOAD, X_LOAD.replace("load", "constant", 1)), (KERNEL, CONSTANT)],
         "static", "the same, under a branch on the warp, which may hold it back"),
    made(HOISTED, "M5", "kda: raw_g loaded invariant",
         [("load(span(mRawG,", "constant(span(mRawG,"), (KERNEL, CONSTANT)],
         "static races values", "the same, in the decay warp"),
    made(HOISTED, "M5", "kda: state loaded invariant",
         [("rS[None, j, r].store(load(span(gS", "rS[None, j, r].store(constant(span(gS"),
          ("def load_state(", CONSTANT.partition("\n\n\n")[0] + "\n\n\ndef load_state(")],
         "static", "behind the slot's load it cannot be lifted above the wait, but a merge with the stores may"),
    made(HOISTED, OWN, "kda: slots loaded by assembly without side effects",
         [(SLOT, "    slot = pure(mSlots, token)\n"), (KERNEL, PURE)],
         "static", "the compiler may lift it; 4.8.1 leaves it where it is, and PTX shows no trace of the danger"),
    made(ORDERING, OWN, "kda: first barrier dropped", [(SYNC + DELTA, DELTA)],
         "static races", "q, k, v and decay are read before the other warps have written them"),
    made(ORDERING, OWN, "kda: second barrier dropped", [(STORE_STATE + SYNC, STORE_STATE)],
         "static races", "warp 0 normalises an output that is not complete"),
    made(ORDERING, OWN, "kda: first barrier of a warp only",
         [(SYNC + DELTA, "        cute.arch.sync_warp()\n" + DELTA)],
         "static races", "the four makers of q, k, v and decay are different warps"),
    made(ORDERING, OWN, "kda: first barrier before the decay is written",
         [(SYNC + DELTA, DELTA),
          ("        elif warp == DECAY:\n            store(span(shared[DECAY", "        cute.arch.sync_threads()\n"
           "        if warp == DECAY:\n            store(span(shared[DECAY")],
         "static races values", "the barrier stands one store too early"),
    made(ORDERING, OWN, "kda: norm overwrites a row that is still read",
         [("Q, K, V, DECAY, OUT = range(5)", "Q, K, V, DECAY, OUT = 0, 1, 2, 3, 0")],
         "static races values", "o goes to the row of q, which other warps still read: a stage reused early"),
    made(STATE, "M9", "kda: null slot taken for slot 0", [("    if slot > 0:\n", "    if slot >= 0:\n")],
         "law", "padded rows write the state of slot 0"),
    made(STATE, "M9", "kda: slot -1 wraps to the last",
         [("    if slot > 0:\n", "    if slot < 0:\n        slot = slot + Int32(4)\n    if slot > 0:\n"),
          ("import BFloat16, Float32, Int64", "import BFloat16, Float32, Int32, Int64")],
         "law", "padded rows write the state of the last slot"),
    made(STATE, "M11", "kda: state transposed",
         [("return _row(warp, lane, rows, r) * DIM + j * SHARE * VEC + lane % SHARE * VEC",
           "at = _row(warp, lane, rows, r)\n"
           "    return (j * SHARE * VEC + lane % SHARE * VEC + at % VEC) * DIM + at // VEC * VEC")],
         "law", "rows and columns of the state change places, four elements at a time"),
    made(STATE, "M11", "kda: decay rounded to bf16",
         [("decay[i] = exp_near_zero(", "decay[i] = rounded("),
          ("def exp_near_zero(", "def rounded(x):\n    return Float32(exp_near_zero(x)).to(BFloat16).to(Float32)\n\n\n"
           "def exp_near_zero(")],
         "law", "the output is right to the last bit of bf16, the state drifts"),
    made(STATE, OWN, "kda: wrong sign of the log-decay", fault("decay_sign"), "law", FAULTS["kda.decay_sign"].text),
    made(STATE, OWN, "kda: beta forgotten", fault("beta"), "law", FAULTS["kda.beta"].text),
    made(STATE, "M16", "kda: gate by SiLU", fault("gate"), "law", FAULTS["kda.gate"].text),
    made(STATE, OWN, "kda: window stands still", fault("window"), "law", FAULTS["kda.window"].text),
    made(STATE, OWN, "kda: state stored without the update", [(STORE_STATE, ""), (DELTA, STORE_STATE + DELTA)],
         "law", "the output sees the new state, the slot keeps the old one"),
    made(STATE, "M20", "kda: sums in an order that depends on the batch",
         [("Config(16 if tokens * heads <= 132 else 8)", "Config(16 if tokens == 1 else 8)"),
          ("    for j in range(STEPS):\n        at = j * SHARE",
           "    for j in range(STEPS) if rows == 2 else range(STEPS - 1, -1, -1):\n        at = j * SHARE")],
         "law", "a row's bits change with its batch-mates"),
)  # fmt: skip
