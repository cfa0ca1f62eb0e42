"""The rules: what a kernel may load and store where. Each rule is one function over a Case."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from reference.stage import Role

from ..isa.program import Inst, Program
from ..isa.values import Value, parameters, untraced
from .paths import Reach, before_wait, bits, decides, loops, reached, route, syncs_before
from .trace import addresses

ERROR, UNPROVEN, QUALITY = "error", "unproven", "quality"


@dataclass(frozen=True)
class Finding:
    """One breach. where: "PTX <line>", "SASS <offset>", "source" or "step <unit>"; source: file:line of the kernel."""

    rule: str
    severity: str
    kernel: str
    target: str
    where: str
    tensor: str
    role: str
    source: str
    text: str

    def __str__(self) -> str:
        of = f" {self.tensor} ({self.role})" if self.tensor else ""
        at = f" [{self.source}]" if self.source else ""
        return f"{self.severity} {self.rule} {self.kernel} {self.target} {self.where}{of}: {self.text}{at}"


@dataclass
class View:
    """One level of a kernel (PTX or SASS) with the answers that several rules need."""

    program: Program
    reached: set[int] = field(init=False)
    values: dict[int, Value] = field(init=False)  # address of every access that is reached

    def __post_init__(self):
        self.reached = reached(self.program)
        self.values = {i: v for i, v in addresses(self.program).items() if i in self.reached}

    @cached_property
    def early(self) -> set[int]:
        return before_wait(self.program)

    @cached_property
    def syncs(self) -> dict[int, tuple[int, ...]]:
        return syncs_before(self.program)

    @cached_property
    def cycles(self) -> list[set[int]]:
        return loops(self.program)

    @cached_property
    def memo(self) -> dict:
        """Answers that one rule alone needs, and that do not depend on the Case: two targets often share a View."""
        return {}

    def reach(self, sync: str) -> Reach:
        """Where control may go without an unguarded instruction that orders this."""
        if sync not in self.memo:
            stops = (i for i, inst in enumerate(self.program) if sync in inst.sync and inst.guard is None)
            self.memo[sync] = Reach(self.program, bits(stops))
        return self.memo[sync]

    def accesses(self, *kinds: str) -> Iterator[tuple[int, Inst, frozenset[int]]]:
        """Index, instruction and parameters of every reached access of these kinds."""
        for i, value in self.values.items():
            if self.program.insts[i].access.kind in kinds:
                yield i, self.program.insts[i], parameters(value)


@dataclass
class Case:
    """A kernel compiled for one target, at both levels."""

    kernel: object  # fast.kernel.Kernel
    target: str
    ptx: View
    sass: View
    asm: tuple = ()  # of fast.kernel.Asm

    @property
    def views(self) -> tuple[View, View]:
        return self.ptx, self.sass

    def role(self, k: int) -> Role:
        """A parameter without an Arg counts as produced (and rule R4 reports it)."""
        return self.kernel.args[k].role if k < len(self.kernel.args) else Role.ACTIVATION

    def weights(self) -> tuple[int, ...]:
        return tuple(k for k, arg in enumerate(self.kernel.args) if arg.role is Role.WEIGHT)

    def names(self, ks) -> str:
        args = self.kernel.args
        return " or ".join(args[k].name if k < len(args) else f"parameter {k}" for k in sorted(ks))

    def finding(self, rule: str, severity: str, view: View, at: int | None, tensors, text: str) -> Finding:
        inst = view.program.insts[at] if at is not None else None
        return Finding(
            rule, severity, self.kernel.name, self.target,
            view.program.where(inst) if inst else view.program.level,
            self.names(tensors), " or ".join(dict.fromkeys(self.role(k).value for k in sorted(tensors))),
            inst.source if inst else "", text,
        )  # fmt: skip

    def produced(self, ks) -> frozenset[int]:
        """Those parameters whose data a predecessor (or this kernel) may write: all that are no weights."""
        return frozenset(k for k in ks if self.role(k) is not Role.WEIGHT)

    def way(self, view: View, at: int) -> str:
        """How control gets to an instruction without a wait."""
        steps = route(view.program, at)
        told = [f"{view.program.where(view.program.insts[i])} {'taken' if t else 'not taken'}" for i, t in steps[-3:]]
        return f" by way of {', '.join(told)}" if told else " in straight line from the entry"


def non_coherent(case: Case) -> Iterator[Finding]:
    """R1: no non-coherent load (.nc, CONSTANT) of anything but a weight; of a weight it costs the prefetch."""
    for view in case.views:
        for i, inst, ks in view.accesses("load"):
            if inst.access.coherent:
                continue
            if bad := case.produced(ks):
                text = f"{inst.op} may be moved above any wait, barrier or acquire"
                yield case.finding("R1", ERROR, view, i, bad, text)
            elif ks:
                text = f"{inst.op}: ptxas sinks these loads below the wait; use no_allocate or cp.async"
                yield case.finding("R1", QUALITY, view, i, ks, text)


def early_loads(case: Case) -> Iterator[Finding]:
    """R2 (PTX), R3 (SASS): no load of anything but a weight is reached before griddepcontrol.wait."""
    for view in case.views if case.kernel.pdl else ():
        rule = "R2" if view.program.level == "PTX" else "R3"
        for i, inst, ks in view.accesses("load"):
            if i in view.early and (bad := case.produced(ks)):
                text = f"{inst.op} is reached before the wait{case.way(view, i)}"
                yield case.finding(rule, ERROR, view, i, bad, text)


def followed(case: Case) -> Iterator[Finding]:
    """R4: every address is traced, every instruction is understood, both levels touch the same tensors."""
    for view in case.views:
        for i, inst, ks in view.accesses("load", "store", "atomic"):
            if why := untraced(view.values[i], lambda k: case.names([k])):
                yield case.finding("R4", UNPROVEN, view, i, ks, f"{inst.text}: the address cannot be traced: {why}")
            elif beyond := [k for k in ks if k >= len(case.kernel.args)]:
                yield case.finding("R4", UNPROVEN, view, i, beyond, "the kernel has no Arg for this parameter")
        for i in sorted(view.reached):
            if doubt := view.program.insts[i].doubt:
                yield case.finding("R4", UNPROVEN, view, i, (), f"{view.program.insts[i].text}: {doubt}")
    for kinds in (("load",), ("store", "atomic")):
        ptx, sass = (frozenset().union(*(ks for *_, ks in view.accesses(*kinds))) for view in case.views)
        if missing := ptx ^ sass:
            text = f"{' or '.join(kinds)} in {'PTX' if missing & ptx else 'SASS'} only: the two readings disagree"
            yield case.finding("R4", UNPROVEN, case.sass, None, missing, text)


def always_waits(case: Case) -> Iterator[Finding]:
    """R5: a kernel launched with PDL waits on every path to its end, in every thread."""
    for view in case.views if case.kernel.pdl else ():
        for i in sorted(view.early):
            if view.program.insts[i].exits:
                text = f"a thread may end here without having waited{case.way(view, i)}"
                yield case.finding("R5", ERROR, view, i, (), text)


def early_stores(case: Case) -> Iterator[Finding]:
    """R6: no store or atomic is reached before the wait: the predecessor may still read what it overwrites."""
    for view in case.views if case.kernel.pdl else ():
        for i, inst, ks in view.accesses("store", "atomic"):
            if i in view.early:
                text = f"{inst.op} is reached before the wait{case.way(view, i)}"
                yield case.finding("R6", ERROR, view, i, ks, text)


def prefetched(case: Case) -> Iterator[Finding]:
    """R7: weights are in flight before the wait, in PTX and still in SASS."""
    if not case.kernel.pdl:
        return
    touched, above = {}, {}
    for view in case.views:
        for i, _, ks in view.accesses("load", "prefetch"):
            for k in ks.intersection(case.weights()):
                touched.setdefault((k, view.program.level), i)
                if i in view.early:
                    above[k, view.program.level] = i
    sunk = [k for k in case.weights() if (k, "PTX") in above and (k, "SASS") not in above]
    for k in sunk:
        text = "loaded before the wait in PTX, only after it in SASS: the prefetch is lost"
        yield case.finding("R7", QUALITY, case.sass, touched.get((k, "SASS")), {k}, text)
    if touched and not above:
        k = min(k for k, _ in touched)
        text = "no weight is loaded or prefetched before the wait: PDL hides nothing"
        yield case.finding("R7", QUALITY, case.ptx, touched.get((k, "PTX")), {k}, text)


def constant_weights(case: Case) -> Iterator[Finding]:
    """R8: nothing is stored to a weight; what is written is no weight, whatever its Arg says."""
    for view in case.views:
        for i, inst, ks in view.accesses("store", "atomic"):
            if bad := ks.intersection(case.weights()):
                yield case.finding("R8", ERROR, view, i, bad, f"{inst.op} writes a tensor whose role is weight")


def _flags(case: Case) -> Iterator[int]:
    """Reads of global memory that look like a flag or a ticket, and are ordered too weakly to be one.

    A relaxed or volatile read, or an integer atomic, whose value decides a branch; and any read of one address inside
    a loop that decides whether the loop ends.
    """
    program = case.ptx.program
    guards = [i.guard[0] for i in program if i.guard and (i.targets or i.exits)]
    deciding = decides(program, guards)
    ends: dict[int, tuple[set[str], set[str]]] = {}  # of a cycle: what it writes, and what decides whether it ends
    for i, inst, ks in case.ptx.accesses("load", "atomic"):
        if not case.produced(ks) or "acquire" in inst.sync or deciding.isdisjoint(inst.writes):
            continue
        if inst.access.order != "weak" and inst.access.integer:
            yield i
        elif inst.access.order == "weak":
            for n, cycle in enumerate(case.ptx.cycles):
                if i not in cycle:
                    continue
                if n not in ends:
                    out = [program.insts[j].guard for j in _exits(program, cycle)]
                    ends[n] = _written(program, cycle), decides(program, [guard[0] for guard in out if guard])
                written, end = ends[n]
                if written.isdisjoint(inst.access.address) and not end.isdisjoint(inst.writes):
                    yield i


def _exits(program: Program, cycle: set[int]) -> list[int]:
    return [j for j in cycle if any(e.to not in cycle for e in program.edges[j])]


def _written(program: Program, cycle: set[int]) -> set[str]:
    return {w for j in cycle for w in program.insts[j].writes}


def acquires(case: Case) -> Iterator[Finding]:
    """R9: a flag that decides what runs next is read with acquire (or a fence follows) before produced data is loaded.

    Also: a loop whose condition is never computed inside it. A flag read that the compiler lifted out looks like that.
    """
    program = case.ptx.program
    for i in _flags(case):
        flag = parameters(case.ptx.values[i])
        after = case.ptx.reach("acquire").after(i)
        for j, inst, ks in case.ptx.accesses("load"):
            if after >> j & 1 and "acquire" not in inst.sync and case.produced(ks) - flag:
                text = (
                    f"{program.insts[i].op} decides a branch, and {case.names(case.produced(ks) - flag)} is loaded at "
                    f"{program.where(inst)} with no acquire between"
                )
                yield case.finding("R9", ERROR, case.ptx, i, flag, text)
                break
    for cycle in case.ptx.cycles:
        written, out = _written(program, cycle), [program.insts[j].guard for j in _exits(program, cycle)]
        if cycle <= case.ptx.reached and all(guard and guard[0] not in written for guard in out):
            text = "this loop cannot end: its condition is computed outside it"
            yield case.finding("R9", ERROR, case.ptx, min(cycle), (), text)


def releases(case: Case) -> Iterator[Finding]:
    """R10: between a store to global memory and the relaxed atomic that announces it stands a release or a fence."""
    program = case.ptx.program
    announcing = {
        i: ks
        for i, inst, ks in case.ptx.accesses("store", "atomic")
        if (inst.access.kind == "atomic" or inst.access.order != "weak")
        and inst.access.integer
        and "release" not in inst.sync
    }
    for i, inst, ks in case.ptx.accesses("store") if announcing else ():
        if inst.access.order != "weak":
            continue
        after = case.ptx.reach("release").after(i)
        for j in sorted(announcing):
            if after >> j & 1 and ks - announcing[j]:
                text = (
                    f"{program.insts[j].op} at {program.where(program.insts[j])} may announce this store "
                    f"({case.names(announcing[j])}) before it is visible: no release or fence between"
                )
                yield case.finding("R10", ERROR, case.ptx, i, ks, text)
                break


def opaque_asm(case: Case) -> Iterator[Finding]:
    """R13: inline assembly that accesses memory or orders accesses says so to the compiler."""
    for asm in case.asm:
        orders = re.search(r"\b(?:griddepcontrol\.wait|fence|membar|bar\.|barrier\.|mbarrier\.|cp\.async)", asm.text)
        if not asm.effects and (orders or "[" in asm.text):
            text = "is declared free of side effects: the compiler may lift it over any wait, merge it or drop it"
        elif orders and "~{memory}" not in asm.constraints:
            text = "has no memory clobber: the compiler may move ordinary loads and stores across it"
        else:
            continue
        yield Finding(
            "R13", ERROR, case.kernel.name, case.target, "source", "", "", asm.source,
            f"inline assembly {asm.text.strip()!r} {text}",
        )  # fmt: skip


RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    non_coherent, early_loads, followed, always_waits, early_stores, prefetched, constant_weights, acquires, releases,
    opaque_asm,
)  # fmt: skip
