"""R12: over the kernels of a step in launch order, each has waited for every kernel whose data it meets.

A kernel's wait ends when the kernel before it is complete. That one was complete only after its own wait, if it had one
in every thread; so waiting is transitive, and one kernel that does not wait breaks it for all that follow. What is read
before the wait (weights) has to be complete when the kernel starts: a kernel starts once all CTAs of the one before it
have triggered, which says nothing of their stores, and of earlier kernels only if the trigger came after the wait. A
trigger before the last store is legal as long as every reader waits. A stage that the law serves, or a kernel launched
without PDL, starts when the kernel before it is complete.

Tensors meet by their buffer, weight or state; columns of one buffer are not told apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from fast.kernel import Kernel, pick
from fast.selection import Fast, Selection, Unit, divide, span_refs, twins
from reference.config import deep, k3_rank, mini
from reference.plan import Plan, Ref, plan
from reference.stage import ContractError, Role

from .check import Report
from .collector import seldom_collected
from .rules import ERROR, Finding

Cell = tuple  # (space, name, layer) of a Ref


@dataclass(frozen=True)
class Launch:
    """One kernel of a step (kernel "": a stage served by the law). early: cells it reads before its wait.

    waits: on every path of every thread. patient: triggers only after it has waited.
    """

    key: str
    kernel: str
    pdl: bool
    waits: bool
    patient: bool
    early: frozenset[Cell]
    reads: frozenset[Cell]
    writes: frozenset[Cell]


def check_chain(chain: Sequence[Launch], target: str = "") -> list[Finding]:
    """Which kernels may still be running where they must not. At the end of a step all are complete."""
    found: dict[tuple, Finding] = {}
    start: set[int] = set()  # kernels that may be running when this one starts, and once it has waited
    after: set[int] = set()
    for n, launch in enumerate(chain):
        if n:
            before = chain[n - 1]
            complete = after  # where the kernel before is complete, only what ran beside it to its end may be running
            if launch.pdl:
                start = {n - 1} | (after if before.patient or not before.pdl else start)
            else:
                start = set(complete)
            after = start & complete if launch.pdl and launch.waits else set(start)
        for m, cell, text in _clashes(chain, launch, start, after):
            key = launch.key, chain[m].key, cell
            found.setdefault(key, _finding(launch, chain[m], cell, text, target))
    return list(found.values())


def _clashes(chain: Sequence[Launch], mine: Launch, start: set[int], after: set[int]) -> Iterator[tuple]:
    """(earlier kernel, cell, what happens) for everything that a kernel may meet while another is still running."""
    for m in sorted(start, reverse=True):
        for cell in mine.early & chain[m].writes:
            yield m, cell, "is read before the wait"
    for m in sorted(after, reverse=True):
        for cell in mine.reads & chain[m].writes:
            yield m, cell, "is read"
        for cell in mine.writes & (chain[m].reads | chain[m].writes):
            yield m, cell, "is overwritten"


def _finding(launch: Launch, other: Launch, cell: Cell, text: str, target: str) -> Finding:
    if "before" in text:
        reason = "it may only have triggered"
    else:
        reason = "a kernel between did not wait" if launch.waits or not launch.pdl else "this kernel does not wait"
    return Finding(
        "R12", ERROR, launch.kernel or launch.key, target, f"step {launch.key}",
        cell[1] if cell[2] is None else f"{cell[1]}.{cell[2]}", cell[0], "",
        f"{text} while {other.key} may still be running: {reason}",
    )  # fmt: skip


@dataclass(frozen=True)
class _OnTarget(Fast):
    """A twin as on a GPU of one target, whatever this machine has."""

    target: str

    def unfit(self, plan: Plan, device) -> str | None:
        low, high = self.twin.batch
        served = low <= plan.tokens <= high and not plan.prefill and self.target in self.twin.archs
        return None if served else "not served"


def units(step: Plan, target: str, selection: Selection | None = None) -> list[Unit]:
    """The units of a step as the fast decoder cuts them on a GPU of this target."""
    known = {name: _OnTarget(fast.twin, target) for name, fast in twins().items()}
    return divide(step, selection or Selection(), known, torch.device("meta"))


def kernels(step: Plan, unit: Unit, target: str) -> tuple[Kernel, ...]:
    """The kernels that serve a unit; none if the law does. State has two slots or pages here."""
    if unit.implementation is None:
        return ()
    dims: dict[str, int] = {}
    shapes: dict[str, tuple] = {}
    specs = {s.name: s for part in unit.steps for s in part.stage.tensors}
    refs = span_refs(unit.steps, unit.implementation.arguments)
    for name, ref in refs.items():
        if ref.space == "act":
            shapes[name] = _activation(step, ref)
            dims |= zip(specs[name].axes, shapes[name].shape, strict=True)
    for part in unit.steps:
        dims |= {a: v for a, v in part.stage.axes.items() if isinstance(v, int)}
    for name in refs.keys() - shapes.keys():
        shape = [int(a) if a.isdigit() else dims.get(a, 2) for a in specs[name].axes]
        shapes[name] = torch.empty(shape, dtype=specs[name].dtype, device="meta")
    return pick(unit.implementation.twin, shapes, unit.attrs, target)


def _activation(step: Plan, ref: Ref) -> torch.Tensor:
    shape, dtype = step.buffers[ref.name]
    made = torch.empty(shape, dtype=dtype, device="meta")
    made = made if ref.cols is None else made[:, slice(*ref.cols)]
    return made if ref.rows is None else made[-ref.rows :]


def launches(step: Plan, target: str, reports: dict[str, Report]) -> list[Launch]:
    """The step in launch order. reports: of its kernels on this target, by name. Raises KeyError for one missing, and
    ContractError for a kernel that accesses what its stages do not have."""
    chain, known, seen, first, bound = [], {}, {}, 0, _bound(step)
    for unit in units(step, target):
        parts = bound[first : first + len(unit.steps)]
        first += len(unit.steps)
        alike = unit.implementation, *(part.kind for part in parts)
        if unit.implementation and alike not in known:
            known[alike] = kernels(step, unit, target)
        made = known[alike] if unit.implementation else ()
        cells = {name: cell for part in parts for name, cell in part.cells.items()}
        if not made:
            chain.append(_by_the_law(unit, parts))
        for kernel in made:
            if kernel.name not in seen:
                own = {a.name: ("scratch", f"{kernel.name}.{a.name}", None)
                       for a in kernel.args if a.role is Role.SCRATCH}  # fmt: skip
                seen[kernel.name] = own, accessed(kernel, reports[kernel.name])
            chain.append(_launch(unit.key, kernel, cells, reports[kernel.name], *seen[kernel.name]))
    return chain


@dataclass(frozen=True)
class _Bound:
    """What a step of a plan is bound to. cells: by argument. kind: all that kernels depend on, that is, all but the
    layer; equal numbers for equal kinds of one plan. reads, writes: cells, where the law serves it."""

    cells: dict[str, Cell]
    kind: int
    reads: frozenset[Cell]
    writes: frozenset[Cell]


@lru_cache(maxsize=1)  # the targets of one plan follow each other
def _bound(step: Plan) -> list[_Bound]:
    kinds: dict[tuple, int] = {}
    found = []
    for part in step.steps:
        cells = {n: (r.space, r.name, r.layer) for n, r in part.bind.items()}
        tied = [(n, r.space, r.name, r.cols, r.rows) for n, r in part.bind.items()]
        kind = kinds.setdefault((part.stage.name, *tied, *sorted(part.attrs.items())), len(kinds))
        writes = frozenset(cells[t.name] for t in part.stage.tensors if t.written and t.name in cells)
        found.append(_Bound(cells, kind, frozenset(cells.values()), writes))
    return found


def _by_the_law(unit: Unit, parts: Sequence[_Bound]) -> Launch:
    if len(parts) == 1:
        reads, writes = parts[0].reads, parts[0].writes
    else:
        reads, writes = (frozenset().union(*cells) for cells in zip(*((p.reads, p.writes) for p in parts), strict=True))
    return Launch(unit.key, "", False, True, True, frozenset(), reads, writes)


def accessed(kernel: Kernel, report: Report) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names of the tensors that a kernel reads before its wait, reads, and writes, as the checker saw it."""

    def met(kinds: tuple[str, ...], early: bool | None = None) -> frozenset[str]:
        seen = [a for a in report.accesses if a.kind in kinds and early in (None, a.before_wait)]
        return frozenset(name for a in seen for name in a.tensors.split(" or "))

    return met(("load",), True) if kernel.pdl else frozenset(), met(("load", "atomic")), met(("store", "atomic"))


def _launch(key: str, kernel: Kernel, cells: dict[str, Cell], report: Report, own: dict, seen: tuple) -> Launch:
    """own: the cells of the kernel's scratch. seen: what it accesses, of `accessed`."""
    known = cells | own
    if unknown := frozenset().union(*seen) - known.keys() - {""}:
        raise ContractError(f"{kernel.name}: {min(unknown)} is no tensor of {key} and no scratch")
    early, reads, writes = (frozenset([known[name] for name in names if name]) for names in seen)
    return Launch(key, kernel.name, kernel.pdl, report.waits, report.patient, early, reads, writes)


def check_steps(batches: Sequence[int], targets: Sequence[str], reports: Iterable[Report]) -> tuple[int, list[Finding]]:
    """R12 over a decode step of every model whose kernels `fast.production_kernels` lists: steps checked, findings.

    Steps of one model that are bound and served alike, and whose kernels access and wait alike, are followed once.
    reports: of all their kernels on these targets. Raises KeyError for one missing.
    """
    by_target = {t: {} for t in targets}
    for report in reports:
        by_target[report.target][report.kernel] = report
    found: list[Finding] = []
    models = (k3_rank(8), k3_rank(16), mini, deep)
    with seldom_collected():
        for config in models:
            found += _check_model([plan(config, batch) for batch in batches], by_target)
    return len(models) * len(batches) * len(targets), list(dict.fromkeys(found))


def _check_model(steps: Sequence[Plan], reports: dict[str, dict[str, Report]]) -> Iterator[Finding]:
    """The findings over plans of one model; reports by target and kernel."""
    clean, served = [], {}
    for step in steps:
        bound = [(part.stage.name, part.layer, part.bind, part.attrs) for part in step.steps]
        for target, mine in reports.items():
            fit = tuple(_OnTarget(fast.twin, target).unfit(step, None) for fast in twins().values())
            if (target, fit) not in served:  # the first plan is divided, and so are all that are bound like it
                served[target, fit] = bound, _kinds(step, target)
            first, kinds = served[target, fit]
            told = (bound, _facts(step, kinds, target, mine)) if bound == first else None
            if told is None or told not in clean:
                found = check_chain(launches(step, target, mine), target)
                yield from found
                if told and not found:
                    clean.append(told)


def _kinds(step: Plan, target: str) -> list[tuple]:
    """(implementation, number of the first part, of parts) of each unit, those without kernels of their own once."""
    first, seen, out, bound = 0, set(), [], _bound(step)
    for unit in units(step, target):
        size = len(unit.steps)
        kind = unit.implementation and unit.implementation.name, *(p.kind for p in bound[first : first + size])
        if kind not in seen:
            seen.add(kind)
            out.append((unit.implementation, first, size))
        first += size
    return out


def _facts(step: Plan, kinds: Sequence[tuple], target: str, reports: dict[str, Report]) -> list[tuple]:
    """All that the chain of a step depends on beside what its parts are bound to."""
    out, numbers = [], {}  # kernels of one name share their scratch
    for implementation, first, size in kinds:
        made = kernels(step, Unit(step.steps[first : first + size], implementation), target)
        told = [
            (k.pdl, reports[k.name].waits, reports[k.name].patient, accessed(k, reports[k.name]),
             [(a.name, numbers.setdefault(k.name, len(numbers))) for a in k.args if a.role is Role.SCRATCH])
            for k in made
        ]  # fmt: skip
        out.append((implementation and implementation.name, first, size, told))
    return out
