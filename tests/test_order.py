"""The order checker: clean kernels are proved, each way of breaking one is reported, on all three targets."""

from dataclasses import replace
from functools import cache

import pytest

import fast
from equivalence.isa import cubin
from equivalence.mutants import of_patterns, patterns
from equivalence.mutants.catalog import CATALOG
from equivalence.order import TARGETS, EditError, ToolMissing, check, check_builds, check_kernels, mutant
from fast import attn_res, kda

WAIT = "    cute.arch.griddepcontrol_wait()\n"
# name -> (kernel, edits, what is to be found: (rule, tensor) of severities error and unproven, quality in brackets)
MUTANTS = {m.name: (m.base, m.edits, m.findings) for m in of_patterns.MUTANTS if m.findings is not None}


def found(report) -> set[tuple[str, str]]:
    return {(f"[{f.rule}]" if f.severity == "quality" else f.rule, f.tensor) for f in report.findings}


@cache
def mutant_reports() -> dict[tuple[str, str], object]:
    """Every mutant on every target, in one go: nvdisasm starts once per target."""
    kernels = {name: getattr(mutant(patterns, edits), kernel) for name, (kernel, edits, _) in MUTANTS.items()}
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
    return check_kernels(patterns.KERNELS)


def test_clean_kernels_are_proved():
    assert [(r.kernel, r.target, r.verdict, r.findings) for r in clean_reports()] == [
        (k.name, target, "proved", ()) for k in patterns.KERNELS for target in TARGETS
    ]


def test_a_kernel_that_never_waits():
    """Kernel refuses to build one, so an innocent build is shown as a kernel launched with PDL."""
    plain = mutant(
        patterns,
        [*of_patterns.wait_is(""), ("grid=[N // 8, 1, 1], block=[256, 1, 1], stream=stream, use_pdl=True",
                                   "grid=[N // 8, 1, 1], block=[256, 1, 1], stream=stream"),
         ("grid=(8, 1, 1), block=(256, 1, 1),", "grid=(8, 1, 1), block=(256, 1, 1), pdl=False,")],
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
    line = mutant_reports()["GEMV: activation load above the wait", "sm_90a"].lines()[1]
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
    for target in fast_kernels()[name].archs:
        report = fast_reports()[name, target]
        assert (report.verdict, report.findings) == ("proved", ()), report.lines()


# Of the catalogue, on its smallest production shape: rule and tensor of a finding.
KDA_MUTANTS = {
    "kda: gate loaded invariant": ("R1", "gate"),
    "kda: slots loaded above the wait": ("R3", "slots"),
    "kda: wait left out of the decay warp": ("R3", "raw_g"),
}


@cache
def fast_mutant_reports() -> dict[str, object]:
    """On the target where ptxas moves the most."""
    tensors = kda.kda_cases((1,))["t1-h12"]
    kernels = {name: mutant(kda, CATALOG[name].edits).kda_decode.pick(**tensors)[0] for name in KDA_MUTANTS}
    tensors, attrs = attn_res.attn_res_cases()[-1]
    broken = mutant(attn_res, [(WAIT, "    if token > 0:\n    " + WAIT)])
    kernels["attn_res"] = broken.attn_res.pick(**tensors, **attrs)[0]
    return dict(zip(kernels, check_kernels(kernels.values(), ("sm_103a",)), strict=True))


@pytest.mark.parametrize(("name", "rule", "tensor"), [(name, *wanted) for name, wanted in KDA_MUTANTS.items()])
def test_mutants_of_the_kda_kernel_are_reported(name, rule, tensor):
    report = fast_mutant_reports()[name]
    assert (rule, tensor) in found(report), report.lines()


def test_a_mutant_of_the_attn_res_kernel_is_reported():
    report = fast_mutant_reports()["attn_res"]
    assert ("R3", "prefix") in found(report), report.lines()


def test_mutants_leave_the_original_alone():
    assert mutant(kda, CATALOG["kda: slots loaded above the wait"].edits).__name__ != kda.__name__
    assert fast.production_kernels((1,))[0].entry is kda.kda_entry
    with pytest.raises(EditError, match=r"patterns.py: 'no such text' occurs 0 times"):
        mutant(patterns, [("no such text", "")])
    with pytest.raises(EditError, match=r"'cute.arch.griddepcontrol_wait\(\)' occurs 6 times"):
        mutant(patterns, [(WAIT, "")])


def test_equal_code_is_checked_once_and_reported_twice(monkeypatch):
    builds = [k.compile("sm_90a") for k in (patterns.GEMV, replace(patterns.GEMV, name="gemv-again"))]
    runs = []
    monkeypatch.setattr(check, "RULES", (*check.RULES, lambda case: runs.append(case) or ()))
    assert [r.kernel for r in check_builds(builds)] == ["gemv", "gemv-again"]
    assert len(runs) == 1


def test_processes_share_the_work():
    kernels = patterns.KERNELS[:2]
    assert check_kernels(kernels, ("sm_103a",), jobs=2) == [r for r in clean_reports() if r.target == "sm_103a"][:2]


def test_no_disassembler_is_no_pass(monkeypatch):
    monkeypatch.setattr(cubin, "find_spec", lambda name: None)
    monkeypatch.setattr(cubin.shutil, "which", lambda name: None)
    with pytest.raises(ToolMissing, match="nvdisasm is missing, so SASS cannot be checked: pip install"):
        check_kernels([patterns.GEMV], ("sm_90a",))
