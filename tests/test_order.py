"""The order checker: clean kernels are proved, each way of breaking one is reported, on all three targets."""

from dataclasses import replace
from functools import cache

import order_kernels
import pytest

import fast
from equivalence.order import TARGETS, EditError, ToolMissing, check, check_builds, check_kernels, cubin, mutant
from fast import attn_res, kda

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
BOX_SMEM = ("grid=(128, 1, 1), block=(256, 1, 1),\n", "grid=(128, 1, 1), block=(256, 1, 1), smem=2048,\n")
DECAY = "    decay = mA[k]\n"
SCAN_WAIT = DECAY + WAIT


def gemv_wait(instead: str) -> list[tuple[str, str]]:
    return [(LOAD_W + WAIT, LOAD_W + instead)]


# name -> (kernel, edits, what is to be found: (rule, tensor) of severities error and unproven, quality in brackets)
MUTANTS = {
    "activation loaded invariant": (
        "GEMV", [("load_atom(), gX[(None, i * 32", "load_atom(invariant=True), gX[(None, i * 32")],
        {("R1", "x"), ("R3", "x")},
    ),
    "weights loaded invariant": (
        "GEMV", [("load_atom(l1c_evict_priority=NO_ALLOCATE), gW", "load_atom(invariant=True), gW")],
        {("[R1]", "w"), ("[R7]", "w")},
    ),
    "wait in one warp only": (
        "GEMV", gemv_wait("    if warp == 0:\n    " + WAIT), {("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y")},
    ),
    "wait behind a branch on the block": (
        "GEMV", gemv_wait("    if b > 0:\n    " + WAIT), {("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y")},
    ),
    "wait in a loop that may not run": (
        "GEMV", gemv_wait("    for _ in cutlass.range(b, unroll=1):\n    " + WAIT),
        {("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y")},
    ),
    "activation load above the wait": (
        "GEMV", [(WAIT + LOAD_X, LOAD_X + WAIT)], {("R2", "x"), ("R3", "x")},
    ),
    "weights loaded after the wait": (
        "GEMV", [(LOAD_W + WAIT + LOAD_X, WAIT + LOAD_X + LOAD_W)], {("[R7]", "w")},
    ),
    "address is one of two parameters": (
        "GEMV", [(G_W, "cute.zipped_divide(either(b, mX, mW[row, None]), (8,))"), (GEMV_DEF, EITHER + GEMV_DEF)],
        {("R2", "x"), ("R3", "x")},
    ),
    "address through shared memory": (
        "GEMV",
        [(G_W, "cute.zipped_divide(through_shared(t, mW[row, None]), (8,))"),
         (GEMV_DEF, THROUGH_SHARED + GEMV_DEF), BOX_SMEM],
        {("R4", "")},
    ),
    "store above the wait": (
        "GEMV", gemv_wait("    mY[row] = BFloat16(0.0)\n" + WAIT), {("R6", "y")},
    ),
    "index load above the wait": (
        "SCAN", [(SCAN_WAIT, DECAY + "    one = mSlots[0]\n" + WAIT), ("slot = mSlots[i]", "slot = mSlots[i] + one")],
        {("R2", "slots"), ("R3", "slots")},
    ),
    "state load above the wait": (
        "SCAN", [(SCAN_WAIT, "    decay = mA[k] + mState[0, k]\n" + WAIT)], {("R2", "state"), ("R3", "state")},
    ),
    "weight is written": (
        "SCAN", [("mState[slot, k] = new\n", "mState[slot, k] = new\n            mA[k] = new\n")], {("R8", "decay")},
    ),
    "wait after the first tokens": (
        "SCAN", [(SCAN_WAIT, DECAY), ("        slot = mSlots[i]\n", "    " + WAIT + "        slot = mSlots[i]\n"),
                 ("cutlass.range(mX.shape[0], unroll=1)", "cutlass.range(b, unroll=1)")],
        {("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y")},
    ),
    "asynchronous copy above the wait": (
        "RING", [(WAIT + "    acc = Float32(0.0)\n    for i in cutlass.range(tiles, unroll=1):\n",
                  "    acc = Float32(0.0)\n    for i in cutlass.range(tiles, unroll=1):\n"),
                 ("    acc = cute.arch.warp_reduction_sum(acc)\n    if t % 32 == 0:\n        mY[b, t // 32] = acc\n\n\n"
                  "@cute.jit\ndef ring(",
                  WAIT + "    acc = cute.arch.warp_reduction_sum(acc)\n    if t % 32 == 0:\n"
                  "        mY[b, t // 32] = acc\n\n\n@cute.jit\ndef ring(")],
        {("R2", "x"), ("R3", "x")},
    ),
    "bulk copy above the wait": (
        "BULK", [("sW, mbar_ptr=bars)\n" + WAIT, "sW, mbar_ptr=bars)\n"),
                 ("    cute.arch.barrier()\n    cute.arch.mbarrier_wait(bars, 0)\n",
                  WAIT + "    cute.arch.barrier()\n    cute.arch.mbarrier_wait(bars, 0)\n")],
        {("R2", "x"), ("R3", "x")},
    ),
    "only the sender of bulk copies waits": (
        "BULK", [(WAIT + "    if t == 0:\n        cute.arch.mbarrier_arrive_and_expect_tx(bars + 1",
                  "    if t == 0:\n    " + WAIT + "        cute.arch.mbarrier_arrive_and_expect_tx(bars + 1")],
        {("R5", ""), ("R6", "y")},
    ),
    "relaxed flag": (
        "MAILBOX", [('sem="acquire", scope="sys"', 'sem="relaxed", scope="sys"')], {("R9", "flag")},
    ),
    "flag of the block's scope": (
        "MAILBOX", [('sem="acquire", scope="sys"', 'sem="acquire", scope="cta"')], {("R9", "flag")},
    ),
    "plain flag, lifted out of its loop": (
        "MAILBOX", [('Int32, sem="acquire", scope="sys"', "Int32")], {("R9", "")},
    ),
    "relaxed counter": (
        "SPLIT", [('sem="acq_rel", scope="gpu"', 'sem="relaxed", scope="gpu"')], {("R9", "count")},
    ),
    "partial sums announced without a release": (
        "SPLIT",
        [('sem="acq_rel", scope="gpu"', 'sem="acquire", scope="gpu"'), ("    cute.arch.fence_acq_rel_gpu()\n", "")],
        {("R10", "parts")},
    ),
    "partial sums loaded invariant": (
        "SPLIT", [("total += mParts[s, n]", "total += held(mParts[s, None], n)"),
                  ("@cute.kernel\ndef split_kernel", '''def held(row, n):
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=32, invariant=True)
    made = cute.make_rmem_tensor(cute.make_layout((1,)), Float32)
    cute.copy(atom, cute.zipped_divide(row, (1,))[(None, n)], made)
    return made[0]


@cute.kernel
def split_kernel''')],
        {("R1", "parts")},
    ),
}  # fmt: skip


def found(report) -> set[tuple[str, str]]:
    return {(f"[{f.rule}]" if f.severity == "quality" else f.rule, f.tensor) for f in report.findings}


@cache
def mutant_reports() -> dict[tuple[str, str], object]:
    """Every mutant on every target, in one go: nvdisasm starts once per target."""
    kernels = {name: getattr(mutant(order_kernels, edits), kernel) for name, (kernel, edits, _) in MUTANTS.items()}
    builds = {(name, target): kernel.compile(target) for name, kernel in kernels.items() for target in TARGETS}
    return dict(zip(builds, check_builds(list(builds.values())), strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name):
    for target in TARGETS:
        report = mutant_reports()[name, target]
        wanted = MUTANTS[name][2]
        assert found(report) == wanted, (target, report.lines())
        rules = {rule for rule, _ in wanted if not rule.startswith("[")}
        assert report.verdict == ("proved" if not rules else "unproven" if rules == {"R4"} else "findings")


@cache
def clean_reports() -> list:
    return check_kernels(order_kernels.KERNELS)


def test_clean_kernels_are_proved():
    assert [(r.kernel, r.target, r.verdict, r.findings) for r in clean_reports()] == [
        (k.name, target, "proved", ()) for k in order_kernels.KERNELS for target in TARGETS
    ]


def test_a_kernel_that_never_waits():
    """Kernel refuses to build one, so an innocent build is shown as a kernel launched with PDL."""
    plain = mutant(
        order_kernels,
        [(LOAD_W + WAIT, LOAD_W), ("grid=[N // 8, 1, 1], block=[256, 1, 1], stream=stream, use_pdl=True",
                                   "grid=[N // 8, 1, 1], block=[256, 1, 1], stream=stream"),
         ("grid=(128, 1, 1), block=(256, 1, 1),", "grid=(128, 1, 1), block=(256, 1, 1), pdl=False,")],
    ).GEMV  # fmt: skip
    build = plain.compile("sm_103a")
    assert check.check(build).verdict == "proved"
    report = check.check(replace(build, kernel=replace(plain, pdl=True)))
    assert found(report) == {("R2", "x"), ("R3", "x"), ("R5", ""), ("R6", "y")}


def test_reports_say_what_the_verdict_rests_on():
    report = clean_reports()[0]
    rows = [(a.kind, a.tensors, a.before_wait) for a in report.accesses]
    assert rows == [("load", "w", True)] * 4 + [("load", "x", False)] * 4 + [("store", "y", False)] + (
        [("load", "w", True)] * 4 + [("load", "x", False)] * 4 + [("store", "y", False)]
    )
    assert all(bool(a.after) is not a.before_wait for a in report.accesses)
    assert report.as_dict()["verdict"] == "proved"
    line = mutant_reports()["activation load above the wait", "sm_90a"].lines()[1]
    assert line.startswith("error R2 gemv sm_90a PTX ") and " x (activation): ld.global" in line


def fast_kernels() -> dict[str, object]:
    """One kernel for every entry, alone and in clusters; equivalence/order/test_production.py takes all kernels."""
    chosen = {}
    for kernel in fast.production_kernels((1, 64)):
        chosen.setdefault((kernel.entry, kernel.cluster is None), kernel)
    return {kernel.name: kernel for kernel in chosen.values()}


@cache
def fast_reports() -> dict:
    return {(r.kernel, r.target): r for r in check_kernels(fast_kernels().values())}


@pytest.mark.parametrize("name", fast_kernels())
def test_fast_kernels_are_proved(name):
    for target in TARGETS:
        report = fast_reports()[name, target]
        assert (report.verdict, report.findings) == ("proved", ()), report.lines()


CONSTANT = """def constant(src):
    bits = src.element_type.width * cute.size(src)
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), src.element_type, num_bits_per_copy=bits, invariant=True)
    made = cute.make_rmem_tensor(src.layout, src.element_type)
    cute.copy(atom, src, made)
    return made


@cute.kernel
def kda_kernel("""
KDA_MUTANTS = {
    "gate loaded invariant": (
        [("gate = load(span(mGate", "gate = constant(span(mGate"), ("@cute.kernel\ndef kda_kernel(", CONSTANT)],
        "R1", "gate",
    ),
    "slots loaded above the wait": (
        [(WAIT + "    slot = mSlots[token]\n", "    slot = mSlots[token]\n" + WAIT)], "R3", "slots",
    ),
    "wait left out of the decay warp": (
        [(WAIT + "    slot =", "    if warp != DECAY:\n    " + WAIT + "    slot =")], "R3", "raw_g",
    ),
}  # fmt: skip


@cache
def fast_mutant_reports() -> dict[str, object]:
    """On the target where ptxas moves the most."""
    tensors = kda.kda_cases((1,))["t1-h12"]
    kernels = {n: mutant(kda, edits).kda_decode.pick(**tensors)[0] for n, (edits, *_) in KDA_MUTANTS.items()}
    tensors, attrs = attn_res.attn_res_cases()[-1]
    broken = mutant(attn_res, [(WAIT, "    if token > 0:\n    " + WAIT)])
    kernels["attn_res"] = broken.attn_res.pick(**tensors, **attrs)[0]
    return dict(zip(kernels, check_kernels(kernels.values(), ("sm_103a",)), strict=True))


@pytest.mark.parametrize(("name", "rule", "tensor"), [(n, *wanted) for n, (_, *wanted) in KDA_MUTANTS.items()])
def test_mutants_of_the_kda_kernel_are_reported(name, rule, tensor):
    report = fast_mutant_reports()[name]
    assert (rule, tensor) in found(report), report.lines()


def test_a_mutant_of_the_attn_res_kernel_is_reported():
    report = fast_mutant_reports()["attn_res"]
    assert ("R3", "prefix") in found(report), report.lines()


def test_mutants_leave_the_original_alone():
    assert mutant(kda, KDA_MUTANTS["slots loaded above the wait"][0]).__name__ != kda.__name__
    assert fast.production_kernels((1,))[0].entry is kda.kda_entry
    with pytest.raises(EditError, match=r"order_kernels.py: 'no such text' occurs 0 times"):
        mutant(order_kernels, [("no such text", "")])
    with pytest.raises(EditError, match=r"'cute.arch.griddepcontrol_wait\(\)' occurs 6 times"):
        mutant(order_kernels, [(WAIT, "")])


def test_equal_code_is_checked_once_and_reported_twice(monkeypatch):
    builds = [k.compile("sm_90a") for k in (order_kernels.GEMV, replace(order_kernels.GEMV, name="gemv-again"))]
    runs = []
    monkeypatch.setattr(check, "RULES", (*check.RULES, lambda case: runs.append(case) or ()))
    assert [r.kernel for r in check_builds(builds)] == ["gemv", "gemv-again"]
    assert len(runs) == 1


def test_processes_share_the_work():
    kernels = order_kernels.KERNELS[:2]
    assert check_kernels(kernels, ("sm_103a",), jobs=2) == [r for r in clean_reports() if r.target == "sm_103a"][:2]


def test_no_disassembler_is_no_pass(monkeypatch):
    monkeypatch.setattr(cubin, "find_spec", lambda name: None)
    monkeypatch.setattr(cubin.shutil, "which", lambda name: None)
    with pytest.raises(ToolMissing, match="nvdisasm is missing, so SASS cannot be checked: pip install"):
        check_kernels([order_kernels.GEMV], ("sm_90a",))
