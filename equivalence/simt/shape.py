"""What of a skeleton decides the outcome of a run: `lean` drops the rest, `shape` writes it down without names.

Kernels that differ in data alone (another number of sources, another order of arithmetic) often have one shape, and
then one run tells of all of them (`onchip`).
"""

from collections.abc import Iterator
from dataclasses import replace

from .ir import Address, Block, Code, Op, Reg, Source, Special
from .opcodes import bits
from .skeleton import COMPUTED

# What may go when nobody needs its result. A shuffle stays: it faults without its lanes.
IDLE = (COMPUTED - {"shfl"}) | {"choose"}
NO_MATTER = {"load": {"nc"}, "ldmatrix": {"trans"}, "wgmma": {"signs", "type"}}  # fields that only tell of values


def lean(code: Code) -> Code:
    """The skeleton without branches that decide about nothing and without values that nobody reads, block by block.

    Loops stay as they are, so that it ends if and only if `code` does. A branch goes where both ways lead to the same
    operation: lanes of a warp meet there anyway. Then what it was computed from may go, the CTA's number above all.
    """
    blocks = list(code.blocks)
    while True:
        count = sum(len(block.ops) for block in blocks)
        live = _live([op for block in blocks for op in block.ops])
        blocks = [Block(tuple(op for op in b.ops if op.kind not in IDLE or _wanted(op, live)), b.next) for b in blocks]
        landing = [_landing(blocks, n) for n in range(len(blocks))]
        blocks = [Block(_unbranched(b, landing), b.next) for b in blocks]
        if sum(len(block.ops) for block in blocks) == count:
            break
    live |= _of_wgmma(blocks)
    return replace(code, blocks=tuple(Block(tuple(_led(_bare(op, live), landing) for op in b.ops),
                                            None if b.next is None else landing[b.next]) for b in blocks))  # fmt: skip


def _wanted(op: Op, live: set[str]) -> bool:
    return any(r and r.name in live for r in op.out)


def _bare(op: Op, live: set[str]) -> Op:
    """The operation without results that nobody reads."""
    return op if not op.out or op.kind == "wgmma" else replace(
        op, out=tuple(r if r and r.name in live else None for r in op.out))  # fmt: skip


def _live(ops: list[Op]) -> set[str]:
    """Registers that an operation needs which is not idle, and what those are computed from."""
    makers: dict[str, list[Op]] = {}
    for op in ops:
        for r in op.out if op.kind in IDLE else ():
            if r:
                makers.setdefault(r.name, []).append(op)
    live: set[str] = set()
    todo = [name for op in ops if op.kind not in IDLE for name in _reads(op)]
    while todo:
        if (name := todo.pop()) not in live:
            live.add(name)
            todo += [n for op in makers.get(name, ()) for n in _reads(op)]
    return live


def _reads(op: Op) -> Iterator[str]:
    sources = [a.source for a in op.args] + [p.base for p in _ends(op) if p]
    yield from (s.name for s in sources if isinstance(s, Reg))
    if op.guard:
        yield op.guard[0].name


def _ends(op: Op) -> tuple[Address | None, ...]:
    """The addresses that count: those in shared memory."""
    return op.more.get("source") if op.kind == "bulk_store" else op.at, op.more.get("bar")


def _of_wgmma(blocks: list[Block]) -> set[str]:
    """Registers that multiplications use: others may not touch them for a while, whatever they hold."""
    ops = [op for b in blocks for op in b.ops if op.kind == "wgmma"]
    read = {a.source.name for op in ops for a in op.args if isinstance(a.source, Reg)}
    return read | {r.name for op in ops for r in op.out if r}


def _landing(blocks: list[Block], n: int | None) -> int | None:
    """The first block from this one on that has operations."""
    while n is not None and not blocks[n].ops:
        n = blocks[n].next
    return n


def _unbranched(block: Block, landing: list[int | None]) -> tuple[Op, ...]:
    """The operations without a jump to where lanes go anyway."""
    if not block.ops or block.ops[-1].kind != "jump":
        return block.ops
    same = landing[block.ops[-1].more["target"]] == (None if block.next is None else landing[block.next])
    return block.ops[:-1] if same else block.ops


def _led(op: Op, landing: list[int | None]) -> Op:
    """The operation; a jump past blocks without any, to the end perhaps."""
    if op.kind != "jump":
        return op
    to = landing[op.more["target"]]
    return replace(op, kind="exit", more={}) if to is None else replace(op, more={"target": to})


def specials(code: Code) -> set[str]:
    """The special registers that are read."""
    sources = (a.source for block in code.blocks for op in block.ops for a in op.args)
    return {s.name for s in sources if isinstance(s, Special)}


def shape(code: Code) -> tuple:
    """A lean skeleton without the names of registers, the lines of PTX and the numbers of blocks: two codes have the
    same only if they do the same. It holds, in order, every block with operations and where it leads, and every field
    of every operation but its text; where dynamic shared memory starts; and whether the first block is empty.

    Numbers by first appearance take the place of registers and lines (barriers and multiplications are told apart by
    their lines). Left out is what no run looks at: values that are stored, types of what is loaded or stored (but not
    the bytes), how numbers are multiplied, addresses in global memory. Threads, CTAs and the grid come on top.
    """
    full = [n for n, block in enumerate(code.blocks) if block.ops]
    names = _Names(_of_wgmma(list(code.blocks)), {n: i for i, n in enumerate(full)})
    blocks = tuple((tuple(map(names.op, b.ops)), names.blocks.get(b.next)) for b in code.blocks if b.ops)
    return blocks, code.listing.dynamic, full[:1] == [0]


class _Names:
    """Numbers in the place of names. held: registers of multiplications, which even a global address may not touch.
    blocks: number of each block with operations."""

    def __init__(self, held: set[str], blocks: dict[int, int]):
        self.held, self.blocks = held, blocks
        self.registers: dict[Reg, int] = {}
        self.lines: dict[int, int] = {}

    def reg(self, r: Reg | None) -> tuple[int, int] | None:
        return r and (self.registers.setdefault(r, len(self.registers)), r.width)

    def source(self, s: Source):
        return self.reg(s) if isinstance(s, Reg) else s

    def at(self, p: Address | None, everywhere: bool = False):
        """everywhere: in global memory, of which the register alone can matter."""
        if p is None or not everywhere:
            return p and (self.source(p.base), p.offset)
        return self.source(p.base) if isinstance(p.base, Reg) and p.base.name in self.held else None

    def op(self, op: Op) -> tuple:
        more = {k: v for k, v in op.more.items() if k not in NO_MATTER.get(op.kind, ())}
        for name in ("bar", "source"):
            if name in more:
                more[name] = self.at(more[name], name == "source" and op.kind != "bulk_store")
        if op.kind == "jump":
            more["target"] = self.blocks[more["target"]]
        more = {k: tuple(v) if isinstance(v, list) else v for k, v in more.items()}
        line = self.lines.setdefault(op.line, len(self.lines))
        guard = op.guard and (self.reg(op.guard[0]), op.guard[1])
        return op.kind, line, guard, self.values(op), self.at(op.at, op.kind == "bulk_store"), tuple(more.items())

    def values(self, op: Op) -> tuple:
        """Results and arguments, or the bytes that are moved."""
        if op.kind in ("store", "st_async"):
            return (sum(bits(a.type) for a in op.args) // 8,)
        if op.kind in ("load", "ldmatrix") and not any(op.out):
            return (len(op.out) * bits(op.result) // 8,)
        args = tuple((self.source(a.source), a.type) for a in op.args)
        return op.result, tuple(map(self.reg, op.out)), args
