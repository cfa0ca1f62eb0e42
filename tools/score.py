"""`k3 order --score` and `k3 order --toolchain`: what the checkers catch, and the order proof under other compilers."""

import time

from equivalence.mutants.entry import HOISTED

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, one_line, out, write_json

MARKS = {True: "caught", False: "missed"}


def main(
    kernel: str, targets: list[str], scope: str, score: bool, schedules: int, toolchain: list[str], json: str | None
) -> int:
    """Run what was asked for; the exit code."""
    with one_line(json):
        if score and toolchain:
            raise ValueError("--score and --toolchain are two questions; ask one at a time")
        if toolchain:
            return _toolchains(kernel, targets, toolchain, json)
        return _score(kernel, targets, schedules, json)
    return UNJUDGED


def _score(wanted: str, targets: list[str], schedules: int, json: str | None) -> int:
    from equivalence.mutants.score import score
    from equivalence.order import TARGETS

    began = time.monotonic()
    with console.status("breaking kernels") as status:
        result = score(wanted, targets or TARGETS, schedules=schedules, told=lambda line, _: status.update(line))
    seconds = time.monotonic() - began
    out.print("\n".join(_lines(result)), markup=False, soft_wrap=True)
    out.print(f"{seconds:.0f} s, {result.cpu:.0f} s of CPU time")
    write_json(result.as_dict() | dict(seconds=seconds), json)
    return EQUAL if all(met for _, met in result.demands()) and not result.surprises else DISAGREEMENT


def _lines(result) -> list[str]:
    lines = []
    for family in dict.fromkeys(j.family for j in result.judged):
        mine = [j for j in result.judged if j.family == family]
        lines += ["", f"{family}: hits of each checker by target (runs), CPU seconds"]
        lines += [line for j in mine for line in _mutant(j)]
    lines += ["", "hoisted loads: non-coherent loads above the wait in SASS, and what the order proof said"]
    lines += [_hoisted(j) for j in result.judged if j.family == HOISTED]
    lines += ["", "clean kernels:"]
    lines += [f"  {a.base} {a.target} {a.checker}: {a.text}" for a in result.alarms]
    lines += [f"  {'met    ' if met else 'NOT MET'} {text}" for text, met in result.demands()]
    lines += [f"  survivor: {j.name}: {j.text}" for j in result.survivors]
    lines += [f"  surprise: {s}" for s in result.surprises]
    n, caught = len(result.mutants), sum(j.caught for j in result.mutants)
    return [*lines, f"score: {caught} of {n} mutants caught, {len(result.alarms)} false alarms"]


def _mutant(judged) -> list[str]:
    told = []
    for checker in dict.fromkeys(s.checker for s in judged.seen):
        mine = [s for s in judged.seen if s.checker == checker]
        told.append(f"{checker} " + " ".join(f"{s.hits}/{s.runs}" for s in mine))
    same = "; compiles to the clean kernel's code" if judged.same else ""
    return [
        f"  {MARKS[judged.caught]} {judged.catalog:4} {judged.name:66} {'; '.join(told)}; {judged.seconds:.1f} s{same}"
    ]


def _hoisted(judged) -> str:
    static = {s.target: s.caught for s in judged.seen if s.checker == "static"}
    cells = [f"{t}: {n} above, {MARKS[static[t]]}" for t, n in judged.hoisted.items()]
    return f"  {judged.name:60} {'  '.join(cells)}"


def _toolchains(wanted: str, targets: list[str], folders: list[str], json: str | None) -> int:
    from equivalence.mutants.toolchain import compare
    from equivalence.order import TARGETS

    reports = compare(folders, wanted, targets or TARGETS)
    for report in reports:
        out.print("\n".join(report.lines()), markup=False, soft_wrap=True)
    write_json(dict(toolchains=[r.as_dict() for r in reports]), json)
    if any(r.findings for r in reports):
        return DISAGREEMENT
    return UNJUDGED if any(r.unjudged for r in reports) else EQUAL
