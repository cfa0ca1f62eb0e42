"""One representation for PTX and SASS: instructions, the paths between them, and a solver over those paths."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from .values import Value

S = TypeVar("S")
_BRACKETS = re.compile(r"[\[{(]")

Literal = tuple[str, bool]  # a predicate register and the value it must have
Operand = str | Value  # a register to read, or a value known at once
LOCAL_MEMORY = "local memory"  # all of it as one register, which only grows
# write, look: ordinary store and load; read, overwrite: by the asynchronous proxy; remote: into a peer's; init: of an
# mbarrier; drained: the thread has waited for its asynchronous reads.
CHIP = (
    "", "write", "look", "read", "overwrite", "remote", "init", "fence", "init fence", "arrive", "wait",
    "cluster arrive", "cluster wait", "barrier", "drained",
)  # fmt: skip
LOAD = "*"  # as an operand: what the instruction's own access yields


class Unreadable(ValueError):
    """PTX, SASS or a cubin that the checker cannot read. The message names the place and what it expected."""


class Move(NamedTuple):
    """into = a value made from the operands: added up, or one of them (`either`)."""

    into: str
    operands: tuple[Operand, ...]
    either: bool = False


class Access(NamedTuple):
    """One access to global memory. kind: load, store, atomic or prefetch. address: operands that add up to it."""

    kind: str
    address: tuple[Operand, ...]
    coherent: bool = True
    order: str = "weak"  # of the PTX memory model: weak, relaxed, volatile, acquire, release, acq_rel
    integer: bool = True  # the data type of an atomic


@dataclass(slots=True)
class Inst:
    """at: PTX line or SASS offset. sync: what it orders, of wait, trigger, barrier, acquire, release.

    targets: labels it may jump to; falls: whether control may go on to the next instruction; exits: the thread may
    end here; loose: a jump or exit that is not always taken when its guard holds. doubt: why the checker cannot tell
    what the instruction does, if so. chip: what it does to shared memory and its barriers, as far as proxies go (CHIP).
    """

    at: int
    op: str
    text: str
    source: str = ""
    guard: Literal | None = None
    moves: tuple[Move, ...] = ()
    writes: tuple[str, ...] = ()  # registers and predicates
    reads: tuple[str, ...] = ()  # registers (PTX only)
    access: Access | None = None
    sync: frozenset[str] = frozenset()
    targets: tuple[str, ...] = ()
    falls: bool = True
    exits: bool = False
    loose: bool = False
    doubt: str = ""
    chip: str = ""
    implies: tuple[tuple[Literal, Literal], ...] = ()  # after it: if the first holds for a lane, so does the second

    def again(self, at: int, source: str) -> "Inst":
        """The same instruction in another place."""
        return Inst(
            at, self.op, self.text, source, self.guard, self.moves, self.writes, self.reads, self.access, self.sync,
            self.targets, self.falls, self.exits, self.loose, self.doubt, self.chip, self.implies,
        )  # fmt: skip

    def registers(self) -> list[str]:
        """All registers and predicates that it names, some of them several times."""
        literals = [*filter(None, [self.guard]), *(literal for pair in self.implies for literal in pair)]
        operands = [o for move in self.moves for o in (move.into, *move.operands)]
        operands += [*self.writes, *self.reads, *(self.access.address if self.access else ())]
        return [*(name for name, _ in literals), *(o for o in operands if isinstance(o, str))]


class Edge(NamedTuple):
    to: int
    when: Literal | None = None  # the path is taken only if this holds


@dataclass
class Program:
    """level: "PTX" or "SASS". edges[i]: where control may go after instruction i; instruction 0 is the entry.

    ordered: registers are reassigned, so their values must be followed in execution order (SASS). In PTX as the
    compilers write it a register stands for one variable and the union over its assignments loses nothing.
    """

    level: str
    insts: list[Inst]
    edges: list[list[Edge]]
    ordered: bool
    blocks: list[range] = field(init=False)
    block_at: dict[int, int] = field(init=False)

    def __post_init__(self):
        leaders = {0} | {e.to for i, out in enumerate(self.edges) for e in out if e.to != i + 1 or len(out) > 1}
        leaders |= {i + 1 for i, out in enumerate(self.edges) if len(out) != 1 or out[0].to != i + 1}
        starts = sorted(s for s in leaders if s < len(self.insts))
        self.blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.insts)], strict=True)]
        self.block_at = {block.start: n for n, block in enumerate(self.blocks)}

    @cached_property
    def block_of(self) -> list[int]:
        """The block of each instruction."""
        return [n for n, block in enumerate(self.blocks) for _ in block]

    @cached_property
    def after(self) -> list[list[int]]:
        """The blocks where control may go from each block."""
        return [[self.block_at[e.to] for e in self.edges[block[-1]]] for block in self.blocks]

    @cached_property
    def feeds(self) -> dict[str, set[str]]:
        """What the values of each register are made from."""
        found: dict[str, set[str]] = {}
        for inst in self.insts:
            for register in inst.writes:
                found.setdefault(register, set()).update(inst.reads, [inst.guard[0]] if inst.guard else [])
        return found

    def where(self, inst: Inst) -> str:
        return f"PTX {inst.at}" if self.level == "PTX" else f"SASS {inst.at:#06x}"

    def __iter__(self) -> Iterator[Inst]:
        return iter(self.insts)


def link(insts: list[Inst], labels: dict[str, int]) -> list[list[Edge]]:
    """The edges of each instruction. A jump to a label that is not there raises Unreadable."""
    edges: list[list[Edge]] = []
    for i, inst in enumerate(insts):
        if not inst.targets and inst.falls and not inst.exits:
            edges.append([Edge(i + 1)] if i + 1 < len(insts) else [])
            continue
        out = []
        for label in inst.targets:
            if label not in labels:
                raise Unreadable(f"{inst.text!r} jumps to {label}, which is not in this function")
            out.append(Edge(labels[label], inst.guard))
        if inst.falls and i + 1 < len(insts):
            leaves = inst.guard and (inst.targets or inst.exits) and not inst.loose
            unless = (inst.guard[0], not inst.guard[1]) if leaves else None
            out.append(Edge(i + 1, unless))
        edges.append([e for e in out if e.to < len(insts)])
    return edges


def solve(
    program: Program,
    start: S,
    step: Callable[[Inst, S], S],
    join: Callable[[S, S], S],
    enter: Callable[[Edge, S], S] = lambda edge, state: state,
    copy: Callable[[S], S] = lambda state: state,
    matters: Callable[[Inst], object] = lambda inst: True,
) -> Iterator[tuple[int, S]]:
    """Forward data flow to its fixed point: yields (index, state before it) for every instruction that is reached.

    step: over one instruction, may change its argument if `copy` makes a fresh one; enter: along one edge; join: where
    paths meet (must grow to a finite height). matters: whether `step` may change anything there; asked once.
    """
    at: list[S | None] = [None] * len(program.blocks)
    at[0] = start
    steps = {i: inst for i, inst in enumerate(program.insts) if matters(inst)}
    within = [[steps[i] for i in block if i in steps] for block in program.blocks]
    todo = {0}
    while todo:
        n = min(todo)
        todo.remove(n)
        state = copy(at[n])
        for inst in within[n]:
            state = step(inst, state)
        for edge in program.edges[program.blocks[n][-1]]:
            to = program.block_at[edge.to]
            arrives = enter(edge, state)
            merged = copy(arrives) if at[to] is None else join(at[to], arrives)
            if at[to] is None or merged != at[to]:
                at[to] = merged
                todo.add(to)
    for n, block in enumerate(program.blocks):
        if at[n] is None:
            continue
        state = copy(at[n])
        for i in block:
            yield i, state
            if i in steps:
                state = step(steps[i], state)


def split(text: str) -> list[str]:
    """Operands: split at commas outside brackets and braces."""
    if not _BRACKETS.search(text):
        return [o for part in text.split(",") if (o := part.strip())]
    out, depth = [""], 0
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            out.append("")
        else:
            out[-1] += c
    return [o.strip() for o in out if o.strip()]
