"""What of a kernel does not depend on data: control, addresses in shared memory, barriers, asynchronous copies.

`skeleton` cuts a Code down to the operations that decide who touches which bytes of shared memory in which order. What
loads bring from memory is unknown. A condition that depends on it becomes a choice, which the caller makes for a whole
CTA or cluster. A `Doubt` is an address, size or barrier that depends on data, or a choice in which threads may differ.
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
COMPUTED = {"pure", "shfl", "vote", "redux", "activemask", "elect"}  # their results follow from their arguments
OF_A_THREAD = ("tid_", "laneid", "warpid")  # special registers that differ inside a CTA
OF_A_CTA = ("ctaid_", "cluster_ctaid_", "cluster_ctarank")


@dataclass(frozen=True)
class Doubt:
    """Why the accesses of a kernel do not follow from its text."""

    line: int
    text: str


@dataclass(frozen=True)
class Skeleton:
    """code: what is left. choices: predicates that depend on data, in program order. parted: those of them in which
    threads may differ. doubts: addresses, sizes and barriers that depend on data, with which nothing can run."""

    code: Code
    choices: tuple[str, ...]
    parted: tuple[Doubt, ...]
    doubts: tuple[Doubt, ...]


def skeleton(code: Code, clustered: bool = False) -> Skeleton:
    """clustered: several CTAs meet in barriers, so that they must choose alike, too."""
    ops = [op for block in code.blocks for op in block.ops]
    kept = [op for op in ops if _shared(op)]
    needed = _needed(ops, kept)
    unknown, uneven = _unknown(ops), _uneven(code, OF_A_THREAD + (OF_A_CTA if clustered else ()))
    doubts = [Doubt(op.line, f"{op.text}: {r.name} depends on data") for op in kept for r in _steers(op)
              if r.name in unknown]  # fmt: skip
    keep = {id(op) for op in kept}
    chosen: dict[str, Op] = {}
    blocks = []
    for block in code.blocks:
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
                        chosen[r.name] = op
                        made.append(replace(op, kind="choose", out=(r,), args=(), at=None, more={}))
        blocks.append(Block(tuple(made), block.next))
    parted = [Doubt(op.line, f"{op.text}: threads of a CTA may differ in {name}") for name, op in chosen.items()
               if name in uneven]  # fmt: skip
    return Skeleton(replace(code, blocks=tuple(blocks)), tuple(chosen), tuple(parted), tuple(doubts))


def _shared(op: Op) -> bool:
    return op.kind in SYNC or (op.kind in ("load", "store", "atom") and op.more["space"] == "shared")


def _steers(op: Op) -> Iterator[Reg]:
    """The registers that say which bytes a kept operation touches, or which barrier; not its guard."""
    values = () if op.kind in ("store", "st_async", "load", "atom", "ldmatrix", "cp_async") else op.args
    if op.kind == "wgmma":
        values = [a for a in op.args if a.type in ("u64", "pred")]
    places = [op.at, op.more.get("bar"), op.more.get("source") if op.kind == "bulk_store" else None]
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


def _spread(ops: list[Op], source) -> set[str]:
    """Registers that get a value from an operation for which source(op), or computed from such a register."""
    out: set[str] = set()
    while True:
        before = len(out)
        for op in ops:
            made = {r.name for r in op.out if r}
            if made - out and (source(op) or (op.kind in COMPUTED and not out.isdisjoint(_reads(op)))
                               or (op.guard and op.guard[0].name in out)):  # fmt: skip
                out |= made
        if len(out) == before:
            return out


def _unknown(ops: list[Op]) -> set[str]:
    """What depends on data: on anything loaded but parameters, or multiplied by a matrix instruction."""
    return _spread(ops, lambda op: op.kind not in COMPUTED | {"mbar_wait"} and not _parameter(op))


def _parameter(op: Op) -> bool:
    return op.kind == "load" and op.more["space"] == "param"


def _uneven(code: Code, own: tuple[str, ...]) -> set[str]:
    """What threads of one CTA may hold different values of: computed, loaded or chosen by way of a thread's number."""
    ops = [op for block in code.blocks for op in block.ops]
    makers = Counter(r.name for op in ops for r in op.out if r)
    regions = [
        (op.guard[0].name, {id(o) for b in _between(code, n) for o in code.blocks[b].ops})
        for n, block in enumerate(code.blocks)
        for op in block.ops
        if op.kind == "jump" and op.guard
    ]
    out: set[str] = set()
    while True:
        parted = set().union(*(inside for guard, inside in regions if guard in out))

        def source(op: Op, parted=parted, out=out) -> bool:
            specials = [a.source.name for a in op.args if isinstance(a.source, Special)]
            return (
                any(s.startswith(own) for s in specials)
                or op.kind in ("elect", "ldmatrix", "mma", "wgmma", "atom")
                or (op.kind == "load" and not out.isdisjoint(_reads(op)))
                or (id(op) in parted and any(makers[r.name] > 1 for r in op.out if r))
            )

        more = _spread(ops, source)
        if more == out:
            return out
        out = more


def _between(code: Code, branch: int) -> set[int]:
    """Blocks that a branch decides about: reached from it, and not on every way from it to an end."""
    last = len(code.blocks)
    ways = []
    for block in code.blocks:
        jumps = [op for op in block.ops if op.kind in ("jump", "exit")]
        to = {op.more["target"] if op.kind == "jump" else last for op in jumps}
        if not any(op.guard is None for op in jumps):
            to.add(last if block.next is None else block.next)
        ways.append(to)
    after = [set(range(last + 1)) for _ in ways] + [{last}]  # what every way to the end passes
    changed = True
    while changed:
        changed = False
        for n in reversed(range(last)):
            new = {n} | set.intersection(*(after[m] for m in ways[n]))
            changed |= new != after[n]
            after[n] = new
    seen, todo = set(), list(ways[branch])
    while todo:
        if (n := todo.pop()) not in seen and n < last:
            seen.add(n)
            todo += ways[n]
    return seen - after[branch]


def _bare(op: Op) -> Op:
    """A kept operation without the data it moves."""
    if op.kind in ("store", "st_async"):
        return replace(op, args=tuple(Read(Const(0), a.type) for a in op.args))
    return op
