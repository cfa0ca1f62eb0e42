"""Run the rules on compiled kernels and report."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

from . import cubin, ptx, sass
from .rules import ERROR, QUALITY, RULES, UNPROVEN, Case, Finding, View
from .values import parameters

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Seen:
    """One access to global memory as the checker read it. after: the syncs that every path to it passes."""

    where: str
    kind: str
    tensors: str
    before_wait: bool
    after: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """verdict: "findings" if a rule is broken, "unproven" if something could not be followed, else "proved".

    Findings of severity "quality" (a lost prefetch) cost time, not correctness, and leave the verdict alone.
    accesses: what the verdict rests on, PTX then SASS, in program order.
    """

    kernel: str
    target: str
    findings: tuple[Finding, ...]
    accesses: tuple[Seen, ...]

    @property
    def verdict(self) -> str:
        severities = {f.severity for f in self.findings}
        return "findings" if ERROR in severities else "unproven" if UNPROVEN in severities else "proved"

    def lines(self) -> list[str]:
        """A head line, then one line per finding."""
        loads = sum(a.kind == "load" for a in self.accesses)
        stores = sum(a.kind in ("store", "atomic") for a in self.accesses)
        return [f"{self.verdict} {self.kernel} {self.target}: {loads} loads, {stores} stores", *map(str, self.findings)]

    def as_dict(self) -> dict:
        """For JSON."""
        return {**asdict(self), "verdict": self.verdict}


def check(build) -> Report:
    """Check one Build (fast.kernel). Raises ToolMissing without nvdisasm, Unreadable for text it cannot read."""
    return _check(build, cubin.disassemble([(build.cubin, build.symbol)], build.target)[0])


def _check(build, disassembly: str) -> Report:
    kernel = build.kernel
    layout = cubin.parameters(build.cubin, build.symbol)
    ptx_view = View(ptx.read(build.ptx, build.symbol))
    sass_view = View(sass.read(disassembly, build.symbol, layout))
    case = Case(kernel, build.target, ptx_view, sass_view)
    findings = [finding for rule in RULES for finding in rule(case)]
    seen = tuple(_seen(case, view, i) for view in case.views for i in sorted(view.values))
    return Report(kernel.name, build.target, _grouped(findings), seen)


def _seen(case: Case, view: View, i: int) -> Seen:
    program, names = view.program, case.names(parameters(view.values[i]))
    after = tuple(f"{program.where(program.insts[j])} {program.insts[j].op}" for j in view.syncs[i])
    return Seen(program.where(program.insts[i]), program.insts[i].access.kind, names, i in view.early, after)


def _grouped(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding for several that differ only in the instruction: the first, with the number of the others."""

    def key(f: Finding) -> tuple:
        return f.rule, f.severity, f.where.split()[0], f.tensor, f.rule == "R4" and f.text.split(":")[-1]

    counts = Counter(map(key, findings))
    first: dict[tuple, Finding] = {}
    for f in findings:
        more = counts[key(f)] - 1
        first.setdefault(key(f), replace(f, text=f"{f.text} (and {more} more like it)") if more else f)
    order = {ERROR: 0, UNPROVEN: 1, QUALITY: 2}
    return tuple(sorted(first.values(), key=lambda f: order[f.severity]))


def check_builds(builds: Sequence) -> list[Report]:
    """Check many Builds, in their order. Those whose PTX differs only in the kernel's name are checked once."""

    def key(build) -> tuple:
        body = re.sub(rf"\b{re.escape(build.symbol)}", "kernel", build.ptx)
        return build.target, body, build.kernel.pdl, tuple((a.name, a.role) for a in build.kernel.args)

    unique = {key(build): build for build in builds}
    reports: dict[tuple, Report] = {}
    for target in dict.fromkeys(b.target for b in builds):
        some = {k: b for k, b in unique.items() if b.target == target}
        texts = cubin.disassemble([(b.cubin, b.symbol) for b in some.values()], target)
        reports.update({k: _check(b, text) for (k, b), text in zip(some.items(), texts, strict=True)})
    return [_renamed(reports[key(build)], build.kernel.name) for build in builds]


def _renamed(report: Report, kernel: str) -> Report:
    return replace(report, kernel=kernel, findings=tuple(replace(f, kernel=kernel) for f in report.findings))


def check_kernels(kernels: Iterable, targets: Sequence[str] = TARGETS, jobs: int = 1) -> list[Report]:
    """Compile and check every kernel for every target that it is for: a Report each, kernel by kernel.

    jobs: processes to share the work (compiling takes most of it); with more than one, entries have to be functions
    of importable modules.
    """
    kernels = list(kernels)
    if jobs == 1 or len(kernels) < 2:
        return check_builds([kernel.compile(target) for kernel in kernels for target in _served(kernel, targets)])
    shares = [kernels[n::jobs] for n in range(jobs)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        done = list(pool.map(check_kernels, shares, [tuple(targets)] * jobs))
    reports = list(map(iter, done))
    return [next(reports[n % jobs]) for n, kernel in enumerate(kernels) for _ in _served(kernel, targets)]


def _served(kernel, targets: Sequence[str]) -> list[str]:
    return [target for target in targets if target in kernel.archs]
