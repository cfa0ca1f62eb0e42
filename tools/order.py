"""`k3 order`: the static order proof over the kernels of fast/."""

import os
from dataclasses import dataclass

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out

SCOPES = ("forms", "batch1", "all")


@dataclass
class Result:
    reports: list

    @property
    def exit_code(self) -> int:
        verdicts = {r.verdict for r in self.reports}
        return DISAGREEMENT if "findings" in verdicts else UNJUDGED if "unproven" in verdicts or not verdicts else EQUAL

    def as_dict(self) -> dict:
        return dict(verdict=self.exit_code, reports=[r.as_dict() for r in self.reports])


def run(kernel: str, targets: list[str], scope: str) -> Result:
    """Compile and check; prints one line per finding and a summary.

    scope: "forms" (one kernel of each form), "batch1" (also every kernel of a single request) or "all" (every batch
    size of `fast.BATCHES`, about a quarter of an hour on two cores). kernel: part of the names wanted.
    """
    from equivalence.order.check import TARGETS, check_kernels
    from fast import forms, production_kernels

    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r}: allowed are {', '.join(TARGETS)}")
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r}: allowed are {', '.join(SCOPES)}")
    every = production_kernels()
    chosen = every if scope == "all" else forms(every)
    if scope == "batch1":
        chosen = list(dict.fromkeys([*production_kernels((1,)), *chosen]))
    kernels = [k for k in chosen if kernel in k.name]
    if not kernels:
        raise ValueError(f"no kernel name contains {kernel!r}")
    with console.status(f"proving {len(kernels)} of {len(every)} kernels"):
        reports = check_kernels(kernels, targets or TARGETS, jobs=min(len(kernels), os.cpu_count() or 1))
    for report in reports:
        if report.findings:
            out.print("\n".join(report.lines()), markup=False)
    proved = sum(r.verdict == "proved" for r in reports)
    about = f"{len(kernels)} of {len(every)} kernels x {len(targets or TARGETS)} targets"
    out.print(f"order: {proved} of {len(reports)} proved ({about})")
    return Result(reports)
