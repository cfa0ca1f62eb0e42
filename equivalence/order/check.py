"""Run the rules on compiled kernels and report."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import prod
from multiprocessing import get_context

from fast.lower import lower

from ..isa import cubin, ptx, sass
from ..isa.values import parameters
from .collector import seldom_collected
from .proxies import crossings
from .rules import ERROR, QUALITY, RULES, UNPROVEN, Case, Finding, View
from .shared import unordered

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
_JUMPS = re.compile(r"\b(?:BRA|BSSY|CALL|RET|WARPSYNC)\b.*")  # what names addresses
VIEWS_KEPT = 8  # readings of code in memory: those of one kernel, and some more


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
    accesses: what the verdict rests on, PTX then SASS, in program order. waits: every thread waits on every path.
    patient: no thread triggers the next kernel before it has waited.
    """

    kernel: str
    target: str
    findings: tuple[Finding, ...]
    accesses: tuple[Seen, ...]
    waits: bool
    patient: bool

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
    return _report(build, *_alone(build))


def _alone(build) -> tuple[View, View]:
    (disassembly,) = cubin.disassemble([(build.cubin, build.symbol)], build.target)
    return _views(build, disassembly, {})


def _views(build, disassembly: str, known: dict, body: str = "") -> tuple[View, View]:
    """PTX and SASS. known: what was made of equal texts before; two targets often have one. body: `_body`, if known."""
    body = body or _body(build)
    layout = cubin.parameters(build.cubin, build.symbol)
    if body not in known:
        known[body] = View(ptx.read(build.ptx, build.symbol))
    alike = known.setdefault((cubin.section(build.cubin, f".text.{build.symbol}"), layout), [])
    view = next((view for text, view in alike if _same(text, disassembly)), None)
    if view is None:
        view = View(sass.read(disassembly, build.symbol, layout))
        alike.append((disassembly, view))
    return known[body], view


def _same(one: str, other: str) -> bool:
    """Whether two disassemblies of equal bytes differ in addresses alone: together with others, code has other ones.

    The bytes say where it jumps."""
    lines = zip(one.splitlines(), other.splitlines(), strict=False)
    return one.count("\n") == other.count("\n") and all(a == b or _placed(a) == _placed(b) for a, b in lines)


def _placed(line: str) -> tuple[str, str]:
    before, _, after = line.partition("*/")
    return before.rstrip("0123456789abcdef"), _JUMPS.sub("", after)


def _report(build, ptx_view: View, sass_view: View) -> Report:
    case = Case(build.kernel, build.target, ptx_view, sass_view, build.asm)
    findings = [finding for rule in (*RULES, crossings) for finding in rule(case)]
    findings += unordered(case, _body(build))
    seen = tuple(_seen(case, view, i) for view in case.views for i in sorted(view.values))
    early = [view.program.insts[i] for view in case.views for i in view.early & view.reached]
    waits, patient = not any(i.exits for i in early), not any("trigger" in i.sync for i in early)
    return Report(build.kernel.name, build.target, _grouped(findings), seen, waits, patient)


def _body(build) -> str:
    """PTX without the names of the kernel and the target."""
    pieces = build.ptx.split(build.symbol)
    named = pieces[:1]
    for n, piece in enumerate(pieces[1:]):  # another name may end with it: then a letter stands before
        before = pieces[n] or (build.symbol if n else "")
        named += build.symbol if re.match(r"\w", before[-1:]) else "kernel", piece
    head, *others = f"\n{''.join(named)}".split("\n.target ")
    return "\n".join([head, *(other[other.find("\n") :] if "\n" in other else "" for other in others)])[1:]


def _seen(case: Case, view: View, i: int) -> Seen:
    program, names = view.program, case.names(parameters(view.values[i]))
    syncs = view.syncs[i]
    if syncs not in view.memo:
        view.memo[syncs] = tuple(f"{program.where(program.insts[j])} {program.insts[j].op}" for j in syncs)
    inst = program.insts[i]
    return Seen(program.where(inst), inst.access.kind, names, i in view.early, view.memo[syncs])


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
    """Check many Builds, in their order. Those that differ only in the kernel's name are checked once."""
    with seldom_collected():
        return _checked(builds)


def _checked(builds: Sequence) -> list[Report]:
    def key(build) -> tuple:
        args, k = tuple((a.name, a.role) for a in build.kernel.args), build.kernel
        launched = k.pdl, k.grid, k.block, k.cluster, k.smem
        return build.target, _body(build), build.asm, launched, args

    keys = list(map(key, builds))
    unique = dict(zip(keys, builds, strict=True))
    texts: dict[tuple, str] = {}
    for target in dict.fromkeys(b.target for b in builds):
        some = {k: b for k, b in unique.items() if b.target == target}
        texts |= zip(some, cubin.disassemble([(b.cubin, b.symbol) for b in some.values()], target), strict=True)
    reports: dict[tuple, Report] = {}
    views: dict = {}
    for k, build in unique.items():
        while len(views) > VIEWS_KEPT:
            views.pop(next(iter(views)))
        reports[k] = _report(build, *_views(build, texts[k], views, k[1]))
    return [_renamed(reports[k], build.kernel.name) for k, build in zip(keys, builds, strict=True)]


def _renamed(report: Report, kernel: str) -> Report:
    return replace(report, kernel=kernel, findings=tuple(replace(f, kernel=kernel) for f in report.findings))


@dataclass(frozen=True)
class Proof:
    """A Report for every kernel and target, kernel by kernel. compiled, kept: how many codes were compiled now, and how
    many came from the cache of builds (fast.build_cache). Every report is made now."""

    reports: list[Report]
    compiled: int
    kept: int


def check_kernels(kernels: Iterable, targets: Sequence[str] = TARGETS, jobs: int = 1) -> list[Report]:
    """The reports of `prove`."""
    return prove(kernels, targets, jobs).reports


def prove(
    kernels: Iterable,
    targets: Sequence[str] = TARGETS,
    jobs: int = 1,
    fresh: bool = True,
    pool: Executor | None = None,
) -> Proof:
    """Compile and check every kernel for every target that it is for.

    Kernels that share their code (Kernel.code) are compiled and checked once. jobs: processes to share the work, this
    one included; with more than one, entries have to be functions of importable modules. fresh: without the cache of
    builds, which only the command line asks for. pool: the other processes, if they have been started.
    """
    kernels, targets = list(kernels), tuple(targets)
    kernels = [kernel for kernel in kernels if set(targets) & set(kernel.archs)]
    first: dict[object, object] = {}  # with the most CTAs: shared memory is followed in the first and last cluster
    for kernel in kernels:
        known = first.setdefault(kernel.code, kernel)
        if prod(kernel.grid) > prod(known.grid):
            first[kernel.code] = kernel
    shares = _dealt(list(first.values()), jobs)
    own = pool is None and len(shares) > 1
    with ProcessPoolExecutor(len(shares) - 1, get_context("spawn")) if own else nullcontext(pool) as others:
        theirs = [others.submit(_share, share, targets, fresh) for share in shares[1:]]
        done = [_share(share, targets, fresh) for share in shares[:1]] + [share.result() for share in theirs]
    rows = {k.code: row for share, made in zip(shares, done, strict=True) for k, row in zip(share, made, strict=True)}
    reports = [_renamed(report, kernel.name) for kernel in kernels for report in rows[kernel.code][0]]
    kept = sum(kept for _, kept in rows.values())
    return Proof(reports, len(rows) - kept, kept)


def _dealt(kernels: list, jobs: int) -> list[list]:
    """Shares of like cost, at most `jobs`: round and back again by what takes longest, the threads of a cluster and
    the work of each."""

    def cost(kernel) -> int:
        return prod(kernel.block) * prod(kernel.cluster or (1,)) * max(prod(a.shape) for a in kernel.args)

    shares: list[list] = [[] for _ in range(min(jobs, len(kernels)))]
    turns = cycle([*shares, *reversed(shares)])
    for kernel, share in zip(sorted(kernels, key=cost, reverse=True), turns, strict=False):
        share.append(kernel)
    return shares


def _share(kernels: Sequence, targets: Sequence[str], fresh: bool) -> list[tuple[list[Report], bool]]:
    """The reports of each kernel, and whether all its Builds were kept."""
    builds = [lower(kernel, [t for t in targets if t in kernel.archs], fresh=fresh) for kernel in kernels]
    reports = iter(check_builds([build for some in builds for build in some]))
    return [([_located(b, next(reports)) for b in some], all(b.kept for b in some)) for some in builds]


def _located(build, report: Report) -> Report:
    """The report with the source lines of its findings, from the same code made once more with line information."""
    if not report.findings:
        return report
    (lined,) = lower(build.kernel, [build.target], lines=True)
    views, theirs = _alone(build), _alone(lined)
    for view, other in zip(views, theirs, strict=True):
        if [inst.op for inst in view.program] != [inst.op for inst in other.program]:
            return report
        for inst, twin in zip(view.program, other.program, strict=True):
            inst.source = twin.source
    return _report(replace(build, asm=lined.asm), *views)
