"""`k3 order`: the static order proof over the kernels of fast/."""

from dataclasses import dataclass

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out

ONE_OF_EACH = (1, 2, 8, 64)


@dataclass
class Result:
    reports: list

    @property
    def exit_code(self) -> int:
        verdicts = {r.verdict for r in self.reports}
        return DISAGREEMENT if "findings" in verdicts else UNJUDGED if "unproven" in verdicts or not verdicts else EQUAL

    def as_dict(self) -> dict:
        return dict(verdict=self.exit_code, reports=[r.as_dict() for r in self.reports])


def run(kernel: str, targets: list[str], every: bool) -> Result:
    """Compile and check; prints one line per kernel and target that is not proved, and a summary."""
    from equivalence.order.check import TARGETS, check_kernels
    from fast import BATCHES, production_kernels

    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r}: allowed are {', '.join(TARGETS)}")
    kernels = [k for k in production_kernels(BATCHES if every else ONE_OF_EACH) if kernel in k.name]
    if not kernels:
        raise ValueError(f"no kernel name contains {kernel!r}")
    with console.status(f"proving {len(kernels)} kernels"):
        reports = check_kernels(kernels, targets or TARGETS)
    for report in reports:
        if report.findings:
            out.print("\n".join(report.lines()))
    proved = sum(r.verdict == "proved" for r in reports)
    out.print(f"order: {proved} of {len(reports)} (kernel, target) pairs proved")
    return Result(reports)
