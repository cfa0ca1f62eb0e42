"""Runs of like accesses to shared memory, watched at once: unrolled copies and loads of a skeleton.

`batched` puts accesses of one kind that follow each other, and the arithmetic between them, into one operation "batch".
It is watched at once if that shows that nothing is wrong, else one by one, as if there were no batch: every register is
written once, and not read before, so that the arithmetic may be done again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from .clocks import ROWS
from .ir import Block, Code, Op, Reg
from .opcodes import bits
from .parse import RESERVED
from .shadow import CELL

LEAST = 2  # accesses of a batch


def batched(code: Code) -> Code:
    """code: lean (`shape`)."""
    return replace(code, blocks=tuple(Block(tuple(_joined(block.ops)), block.next) for block in code.blocks))


def _joined(ops: tuple[Op, ...]) -> Iterator[Op]:
    run = _Run()
    for op in ops:
        if not run.takes(op):
            yield from run.made()
            run = _Run()
            if not run.takes(op):
                yield op
    yield from run.made()


class _Run:
    """Operations that may become a batch."""

    def __init__(self):
        self.ops: list[Op] = []
        self.forms: set[tuple] = set()
        self.read: set[Reg] = set()
        self.written: set[Reg] = set()

    def takes(self, op: Op) -> bool:
        """Whether it belongs to the run, which then holds it."""
        forms = self.forms | ({_form(op)} if op.kind != "pure" else set())
        same = not self.ops or op.guard == self.ops[0].guard
        outs, guard = {r for r in op.out if r}, {op.guard[0]} if op.guard else set()
        reads = set(_reads(op)) | guard
        if not (op.kind == "pure" or _plain(op)) or len(forms) > 1 or not same:
            return False
        if outs & (self.read | reads | self.written):
            return False
        self.ops.append(op)
        self.forms, self.read, self.written = forms, self.read | reads, self.written | outs
        return True

    def made(self) -> list[Op]:
        """The batch, or the operations where there are too few accesses. Arithmetic behind the last stays outside."""
        last = max((i for i, op in enumerate(self.ops) if op.kind != "pure"), default=-1) + 1
        inside, rest = self.ops[:last], self.ops[last:]
        if sum(op.kind != "pure" for op in inside) < LEAST:
            return self.ops
        ((kind, size),), first = self.forms, inside[0]
        more = {"ops": tuple(inside), "kind": kind, "size": size}
        return [Op("batch", first.line, first.text, first.guard, more=more), *rest]


def _form(op: Op) -> tuple[str, int]:
    """The kind, and bytes of each lane: those of a bulk copy are found when it runs."""
    if op.kind == "store":
        return op.kind, sum(bits(a.type) for a in op.args) // 8
    return op.kind, op.more["bytes"] if op.kind == "cp_async" else len(op.out) * bits(op.result or "u8") // 8


def _reads(op: Op) -> Iterator[Reg]:
    places = op.at, op.more.get("bar"), op.more.get("source")
    yield from (s for s in [a.source for a in op.args] + [p.base for p in places if p] if isinstance(s, Reg))


def _plain(op: Op) -> bool:
    """An access with an own way to watch many at once. What a load brings must not matter, nor a global address."""
    source = op.more.get("source")
    if source and isinstance(source.base, Reg) and source.base.width < 64:  # a multiplication may use it
        return False
    if any(op.out) or (op.kind in ("load", "store") and (op.more["space"] != "shared" or op.more["order"] != "weak")):
        return False
    return op.kind in WATCHED


def run(g, op: Op, I) -> None:
    """The operation "batch" on a Grid of `onchip`."""
    places = []
    for one in op.more["ops"]:
        g.line = one.line
        if one.kind == "pure":
            g.operations["pure"](g, one, I)
        else:
            places.append((one, g.address(one.at, I).astype(np.int64), *_operands(g, one, I)))
    if not WATCHED[op.more["kind"]](g, I, places, op.more["size"]):
        for one in op.more["ops"]:
            g.line = one.line
            g.operations[one.kind](g, one, I)


def _operands(g, op: Op, I) -> tuple:
    """Of a bulk copy, sizes and the addresses of barriers."""
    if op.kind != "bulk":
        return ()
    return g.read(op.args[0], I).astype(np.int64), g.address(op.more["bar"], I).astype(np.int64)


def _inside(g, I, a, align: int, n: int, anywhere: bool = False):
    """Offsets in `smem` [accesses, lanes] of addresses, or None if one of them is a fault."""
    rank, at = a >> 24, a & 0xFFFFFF
    home = g.rank[I].astype(np.int64)
    good = (rank < g.csize) if anywhere else (rank == home)
    good = good & (at % align == 0) & (at >= RESERVED) & (at + n <= g.code.listing.dynamic + g.kernel.smem)
    return (g.cta[I] - home + rank) * g.smem_bytes + at if good.all() else None


def _apart(offsets, n: int) -> bool:
    """Whether no two of these writes of n bytes touch the same cell."""
    return n % CELL == 0 and bool((np.diff(np.sort(offsets, axis=None)) >= n).all())


def _addresses(places: list):
    """[accesses, lanes]"""
    return np.stack([place[1] for place in places])


def _lines(places: list):
    return np.array([op.line for op, *_ in places])[:, None, None]


def _loads(g, I, places: list, n: int) -> bool:
    offsets = _inside(g, I, _addresses(places), n, n)
    return offsets is not None and _read(g, I, g.shadow.cells(offsets, n), _lines(places))


def _matrices(g, I, places: list, n: int) -> bool:
    """n: 4 bytes of a lane for each 8 rows that are read."""
    warps = I.reshape(-1, 32) if len(I) % 32 == 0 else None
    if warps is None or (warps != warps[:, :1] // 32 * 32 + np.arange(32)).any():
        return False
    rows = warps[:, : 2 * n].ravel()
    a = _addresses(places).reshape(len(places), -1, 32)[..., : 2 * n].reshape(len(places), -1)
    offsets = _inside(g, rows, a, 16, 16)
    return offsets is not None and _read(g, rows, g.shadow.cells(offsets, 16), _lines(places))


def _read(g, I, cells, lines) -> bool:
    """Reads by lanes I of cells [accesses, lanes, cells], weak and not through the asynchronous proxy."""
    races, s = g.machine.races, g.shadow
    if not races._quiet(g, s, I, cells, 0, False):
        return False
    warp, pairs = g.warp[I].astype(np.int64), s.readers // 2
    for which, order in enumerate((slice(None), slice(None, None, -1))):
        slot = (2 * (warp % pairs) + which)[order, None]
        who = I[order][:, None]
        s.reads.put(cells[:, order] * s.readers + slot, who, g.clocks.now(who), lines, False)
    return True


def _write(g, I, offsets, n: int, lines, epochs, pending: bool, row: int) -> bool:
    """Writes of n bytes by lanes I to offsets [accesses, lanes]."""
    if not _apart(offsets, n):
        return False
    races, s, cells = g.machine.races, g.shadow, g.shadow.cells(offsets, n)
    if not races._quiet(g, s, I, cells, row, True):
        return False
    s.write.put(cells, I[:, None], epochs, lines, False)
    s.pending[cells], s.proxy[cells] = pending, row > 0
    return True


def _stores(g, I, places: list, n: int) -> bool:
    offsets = _inside(g, I, _addresses(places), n, n)
    return offsets is not None and _write(g, I, offsets, n, _lines(places), g.clocks.now(I)[:, None], False, 0)


def _small_copies(g, I, places: list, n: int) -> bool:
    offsets = _inside(g, I, _addresses(places), n, n)
    if offsets is None or not _write(g, I, offsets, n, _lines(places), g.clocks.now(I)[:, None], True, 0):
        return False
    g.open += [(I, to, np.zeros((len(I), n), np.uint8)) for to in offsets]
    return True


def _bulk_copies(g, I, places: list, _: int) -> bool:
    sizes, bars = (np.stack([place[i] for place in places]) for i in (2, 3))
    n = int(sizes[0, 0])
    if not n or n % 16 or (sizes != n).any():
        return False
    offsets = _inside(g, I, _addresses(places), 16, n, True)
    bars = _inside(g, I, bars, 8, 8, True)
    if offsets is None or bars is None or not g.mbars.keys() >= set(bars.ravel().tolist()):
        return False
    epochs = (g.clocks.now(I) + np.arange(len(places))[:, None])[..., None]  # each hands on what its lane knows
    if not _write(g, I, offsets, n, _lines(places), epochs, True, ROWS["shared"]):
        return False
    data, known = np.zeros((1, n), np.uint8), [g.clocks.series(lane, len(places)) for lane in I.tolist()]
    for i, ((op, *_), to, own) in enumerate(zip(places, offsets, bars.tolist(), strict=True)):
        for k in range(len(I)):
            one = I[k : k + 1]
            g.late(g.mbar(op, one, own[k]), op, one, [(one, to[k : k + 1], data)], 0, -n, known[k][i])
    return True


WATCHED: dict[str, Callable] = {
    "load": _loads, "ldmatrix": _matrices, "store": _stores, "cp_async": _small_copies, "bulk": _bulk_copies,
}  # fmt: skip
