"""R13: what inline assembly tells the compiler; and that findings name the line of the kernel's source."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import async_kernels
import pytest

import fast.lower as lowering
from equivalence.isa import cubin, ptx
from equivalence.order import check_kernels, mutant
from fast.kernel import ARCHS
from fast.lower import lower

LOAD = "constraints, has_side_effects=True,\n                           asm_dialect"
PEEK = {
    "as it stands": ([], ""),
    "load without side effects": (
        [('"=r,l", has_side_effects=True', '"=r,l", has_side_effects=False')],
        "'ld.global.b32 $0, [$1];' is declared free of side effects",
    ),
    "fence without side effects": (
        [('"~{memory}", has_side_effects=True', '"~{memory}", has_side_effects=False')],
        "'fence.acq_rel.gpu;' is declared free of side effects",
    ),
    "fence without a clobber": ([('"~{memory}"', '""')], "'fence.acq_rel.gpu;' has no memory clobber"),
}


@cache
def reports() -> dict:
    kernels = [
        replace(mutant(async_kernels, edits).PEEK, name=f"peek{n}") for n, (edits, _) in enumerate(PEEK.values())
    ]
    return {r.kernel: r for r in check_kernels(kernels, ("sm_103a",))}


@pytest.mark.parametrize("name", PEEK)
def test_inline_assembly(name):
    report, wanted = reports()[f"peek{list(PEEK).index(name)}"], PEEK[name][1]
    found = [f for f in report.findings if f.rule == "R13"]
    assert [wanted in f.text for f in found] == [True] * bool(wanted), report.lines()
    assert report.verdict == ("findings" if wanted else "proved")
    assert all(f.where == "source" and line(f).strip() in (USE.strip(), "fence()") for f in found)


def line(finding) -> str:
    """The text of the source line that a finding names; mutants are files of their own."""
    name, _, number = finding.source.partition(":")
    files = [Path(m.__file__) for n, m in list(sys.modules.items()) if n.startswith("async_kernels")]
    return next(f.read_text().splitlines()[int(number) - 1] for f in files if f.name == name)


WAIT, USE = "    cute.arch.griddepcontrol_wait()\n", "    mY[t] = peek(mX.iterator + t)\n"


def test_findings_name_their_source_line():
    (report,) = check_kernels([mutant(async_kernels, [(WAIT + USE, USE + WAIT)]).PEEK], ("sm_90a",))
    lines = {(f.rule, f.where.split()[0]): line(f) for f in report.findings}
    assert lines.keys() == {("R2", "PTX"), ("R3", "SASS"), ("R6", "PTX"), ("R6", "SASS")}
    assert set(lines.values()) == {USE.rstrip()}
    assert all(f"[{f.source}]" in str(f) for f in report.findings)


def test_line_information_changes_no_instruction():
    (plain,), (lined,) = (lower(async_kernels.PUBLISH, ["sm_103a"], lines=lines) for lines in (False, True))
    assert ".loc" in lined.ptx and ".loc" not in plain.ptx
    code = [cubin.section(b.cubin, f".text.{b.symbol}") for b in (plain, lined)]
    assert code[0] == code[1]
    ops = [[inst.text for inst in ptx.read(b.ptx, b.symbol)] for b in (plain, lined)]
    assert ops[0] == ops[1]


def test_lowered_code_is_the_compiled_code():
    for target, build in zip(ARCHS, lower(async_kernels.PUBLISH, ARCHS), strict=True):
        made = async_kernels.PUBLISH.compile(target)
        assert build.function is None and made.function is not None
        assert (build.ptx, build.cubin, build.symbol, build.asm) == (made.ptx, made.cubin, made.symbol, made.asm)
        assert lower(async_kernels.PUBLISH, [target])[0].cubin is made.cubin
    with pytest.raises(NotImplementedError, match=r"publish: target 'sm_80'; allowed are sm_90a"):
        lower(async_kernels.PUBLISH, ["sm_80"])


@pytest.mark.parametrize("alike", [True, False])
def test_a_trace_is_shared_only_if_all_targets_gave_the_same(monkeypatch, alike):
    asked = []

    def traced(kernel, targets, lines=False):
        asked.append(targets)
        return "same" if alike else targets[0], [SimpleNamespace(target=target) for target in targets]

    monkeypatch.setattr(lowering, "_traced", traced)
    monkeypatch.setattr(lowering, "_alike", {})
    kernels = [replace(async_kernels.PEEK, smem=n) for n in (16, 32)]  # codes that nothing has compiled
    for kernel in kernels:
        assert [build.target for build in lower(kernel, ARCHS)] == list(ARCHS)
    alone = [(target,) for target in ARCHS]
    assert asked == alone + ([ARCHS] if alike else alone)
