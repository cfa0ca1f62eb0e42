"""What of a kernel does not depend on data: control, addresses in shared memory, barriers, asynchronous copies.

`skeleton` cuts a Code down to the operations that decide who touches which bytes of shared memory in which order. What
loads bring from memory is unknown. A condition that depends on it becomes a choice, which the caller makes for a whole
CTA or cluster. What does not follow from the text is a `Doubt`: an address, size or barrier that depends on data; a
choice about shared memory or barriers in which threads may differ, or that a loop meets again; a flag in shared memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .ir import Block, Code, Const, Op, Read, Reg, Special

SYNC = {
    "jump", "exit", "trap", "bar", "warp_sync", "cluster_arrive", "cluster_wait", "pdl", "fence", "mbar_init",
    "mbar_arrive", "mbar_wait", "cp_async", "cp_commit", "cp_wait", "cp_arrive", "bulk", "bulk_store", "bulk_commit",
    "bulk_wait", "st_async", "ldmatrix", "wgmma", "wg_fence", "wg_commit", "wg_wait",
}  # fmt: skip
CONTROL = {"jump", "exit", "trap", "pdl"}  # part of SYNC, and touch nothing
COMPUTED = {"pure", "shfl", "vote", "redux", "activemask", "elect"}  # their results follow from their arguments
OF_A_THREAD = ("tid_", "laneid", "warpid")  # special registers that differ inside a CTA
SINGLE = {"elect", "ldmatrix", "mma", "wgmma", "atom"}  # give each thread its own
OF_A_CTA = ("ctaid_", "cluster_ctaid_", "cluster_ctarank")


@dataclass(frozen=True)
class Doubt:
    """Why the accesses of a kernel do not follow from its text."""

    line: int
    text: str


@dataclass(frozen=True)
class Skeleton:
    """code: what is left. choices: predicates that depend on data, in program order. unsure: doubts with which it still
    runs. doubts: addresses, sizes and barriers that depend on data, with which nothing can run."""

    code: Code
    choices: tuple[str, ...]
    unsure: tuple[Doubt, ...]
    doubts: tuple[Doubt, ...]


def skeleton(code: Code, clustered: bool = False) -> Skeleton:
    """clustered: several CTAs meet in barriers, so that they must choose alike, too."""
    ops = [op for block in code.blocks for op in block.ops]
    kept = [op for op in ops if _shared(op)]
    needed = _needed(ops, kept)
    flow = _Flow(code)
    uses = _Uses(ops)
    uneven = _uneven(ops, uses, flow, clustered)
    unknown = _unknown(ops, uses, flow, uneven)
    doubts = [Doubt(op.line, f"{op.text}: {r.name} depends on data") for op in kept for r in _steers(op)
              if r.name in unknown]  # fmt: skip
    keep = {id(op) for op in kept}
    chosen: dict[str, list[tuple[int, Op]]] = {}  # with the block of each
    blocks = []
    for n, block in enumerate(code.blocks):
        made = []
        for op in block.ops:
            outs = {r.name for r in op.out if r}
            if id(op) in keep:
                made.append(_bare(op))
            elif outs & needed:
                if not outs & unknown:
                    made.append(op)
                for r in op.out if outs & unknown else ():
                    if r and r.width == 1 and r.name in needed:
                        chosen.setdefault(r.name, []).append((n, op))
                        made.append(replace(op, kind="choose", out=(r,), args=(), at=None, more={}))
        blocks.append(Block(tuple(made), block.next))
    unsure = [Doubt(op.line, f"{op.text}: a flag in shared memory is not followed") for op in kept
              if op.kind == "atom" or (op.kind == "load" and op.more["order"] != "weak")]  # fmt: skip
    for name, made in chosen.items():
        if name in uneven and _decides(code, flow, name):
            op = made[0][1]
            unsure.append(Doubt(op.line, f"{op.text}: threads of a CTA may differ in {name}"))
        for n, op in made:
            if _acts(code, flow.cycle(n)):
                unsure.append(Doubt(op.line, f"{op.text}: a loop meets this condition on data again and again"))
    return Skeleton(replace(code, blocks=tuple(blocks)), tuple(chosen), tuple(unsure), tuple(doubts))


def _acts(code: Code, blocks: set[int]) -> bool:
    """Whether shared memory or a barrier is touched in these blocks."""
    return any(_shared(op) and op.kind not in CONTROL for n in blocks for op in code.blocks[n].ops)


def _decides(code: Code, flow: "_Flow", name: str) -> bool:
    """Whether a predicate decides about an operation on shared memory or a barrier, by itself or by a branch."""
    for n, block in enumerate(code.blocks):
        for op in block.ops:
            if op.guard and op.guard[0].name == name and _shared(op):
                if op.kind not in CONTROL or _acts(code, flow.between(n)):
                    return True
    return False


def _shared(op: Op) -> bool:
    return op.kind in SYNC or (op.kind in ("load", "store", "atom") and op.more["space"] == "shared")


def _steers(op: Op) -> Iterator[Reg]:
    """The registers that say which bytes a kept operation touches, or which barrier; not its guard."""
    values = () if op.kind in ("store", "st_async", "load", "atom", "ldmatrix", "cp_async") else op.args
    if op.kind == "wgmma":
        values = [a for a in op.args if a.type in ("u64", "pred")]
    places = [op.more["source"] if op.kind == "bulk_store" else op.at, op.more.get("bar")]  # not the global end
    for source in [a.source for a in values] + [p.base for p in places if p]:
        if isinstance(source, Reg):
            yield source


def _reads(op: Op) -> Iterator[str]:
    sources = [a.source for a in op.args] + [p.base for p in (op.at, op.more.get("bar"), op.more.get("source")) if p]
    yield from (s.name for s in sources if isinstance(s, Reg))
    if op.guard:
        yield op.guard[0].name


def _needed(ops: list[Op], kept: list[Op]) -> set[str]:
    """Registers that the kept operations need, and what those are computed from."""
    makers: dict[str, list[Op]] = {}
    for op in ops:
        for r in op.out:
            if r:
                makers.setdefault(r.name, []).append(op)
    needed: set[str] = set()
    todo = [r.name for op in kept for r in _steers(op)] + [op.guard[0].name for op in kept if op.guard]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += [n for op in makers.get(name, ()) if op.kind in COMPUTED or op.guard for n in _reads(op)
                     if op.kind in COMPUTED or n == op.guard[0].name]  # fmt: skip
    return needed


class _Uses:
    """Who reads what. users: by register, operations that compute something from it or are guarded by it."""

    def __init__(self, ops: list[Op]):
        self.users: dict[str, list[Op]] = {}
        self.loads: dict[str, list[Op]] = {}  # that read it
        for op in ops:
            if op.kind in COMPUTED or op.kind == "load":
                into = self.users if op.kind in COMPUTED else self.loads
                for name in _reads(op):
                    into.setdefault(name, []).append(op)
            if op.guard and op.kind not in COMPUTED:
                self.users.setdefault(op.guard[0].name, []).append(op)

    def spread(self, sources: list[Op], more=lambda name: ()) -> set[str]:
        """Registers that get a value from one of these operations, or computed from such a register. more(name): also
        the operations that give values which differ because of this register."""
        out: set[str] = set()
        todo = list(sources)
        while todo:
            for r in todo.pop().out:
                if r and r.name not in out:
                    out.add(r.name)
                    todo += self.users.get(r.name, ())
                    todo += more(r.name)
        return out


def _unknown(ops: list[Op], uses: _Uses, flow: "_Flow", uneven: set[str]) -> set[str]:
    """What depends on data: on anything loaded, parameters (which are pointers) included, or on a matrix product.

    A condition on data that all threads share falls both ways; what comes of it is then known. Not so where threads may
    differ, or in a loop, which meets it again or runs as often as it says: what it decides is unknown behind it.
    """

    def parted(name: str) -> list[Op]:
        return [op for n in flow.branches.get(name, ()) if name in uneven or n in flow.reached(n)
                for op in flow.parts(n)]  # fmt: skip

    return uses.spread([op for op in ops if op.kind not in COMPUTED and op.kind != "mbar_wait"], parted)


def _uneven(ops: list[Op], uses: _Uses, flow: "_Flow", clustered: bool) -> set[str]:
    """What threads of one CTA may hold different values of: computed, loaded or chosen by way of a thread's number.

    A strong load may bring another value to each thread; memory of their own is another for CTAs of a cluster.
    """
    own = OF_A_THREAD + (OF_A_CTA if clustered else ())

    def differs(op: Op) -> bool:
        if op.kind == "load":
            return op.more["order"] != "weak" or (clustered and op.more["space"] == "shared")
        return op.kind in SINGLE or any(isinstance(a.source, Special) and a.source.name.startswith(own)
                                        for a in op.args)  # fmt: skip

    def parted(name: str) -> list[Op]:
        """Loads from there, and what threads compute that a branch on this register parts."""
        return [op for n in flow.branches.get(name, ()) for op in flow.parts(n)] + uses.loads.get(name, [])

    return uses.spread([op for op in ops if differs(op)], parted)


class _Flow:
    """Ways between the blocks of a Code; the number after the last block is the end."""

    def __init__(self, code: Code):
        last, self.blocks = len(code.blocks), code.blocks
        self.last, self.makers = last, Counter(r.name for block in code.blocks for op in block.ops for r in op.out if r)
        self.branches: dict[str, list[int]] = {}  # blocks that end with one, by its guard
        for n, block in enumerate(code.blocks):
            for op in block.ops:
                if op.kind == "jump" and op.guard:
                    self.branches.setdefault(op.guard[0].name, []).append(n)
        self.ways: list[set[int]] = []
        for block in code.blocks:
            jumps = [op for op in block.ops if op.kind in ("jump", "exit")]
            to = {op.more["target"] if op.kind == "jump" else last for op in jumps}
            if not any(op.guard is None for op in jumps):
                to.add(last if block.next is None else block.next)
            self.ways.append(to)
        self.after = [set(range(last + 1)) for _ in self.ways] + [{last}]  # what every way from here to the end passes
        changed = True
        while changed:
            changed = False
            for n in reversed(range(last)):
                new = {n} | set.intersection(*(self.after[m] for m in self.ways[n]))
                changed |= new != self.after[n]
                self.after[n] = new
        self.known: dict[int, set[int]] = {}

    def reached(self, block: int) -> set[int]:
        """Blocks after this one; itself, too, if it is in a loop."""
        if block not in self.known:
            self.known[block] = self._from(block)
        return self.known[block]

    def _from(self, block: int) -> set[int]:
        seen, todo = set(), list(self.ways[block])
        while todo:
            if (n := todo.pop()) not in seen and n < self.last:
                seen.add(n)
                todo += self.ways[n]
        return seen

    def between(self, branch: int) -> set[int]:
        """Blocks that a branch decides about: those before the first that is on every way to the end. It is one of them
        if it decides how often a loop runs."""
        always, seen, todo = self.after[branch] - {branch}, set(), list(self.ways[branch])
        while todo:
            if (n := todo.pop()) not in seen and n not in always:
                seen.add(n)
                todo += self.ways[n]
        return seen

    def parts(self, branch: int) -> list[Op]:
        """Operations in those blocks whose results have another value where they do not run."""
        return [op for n in self.between(branch) if n < self.last for op in self.blocks[n].ops
                if any(self.makers[r.name] > 1 for r in op.out if r)]  # fmt: skip

    def cycle(self, block: int) -> set[int]:
        """The blocks of loops around this one."""
        return {n for n in self.reached(block) if block in self.reached(n)}


def _bare(op: Op) -> Op:
    """A kept operation without the data it moves."""
    if op.kind in ("store", "st_async"):
        return replace(op, args=tuple(Read(Const(0), a.type) for a in op.args))
    return op
