"""Happens-before: which accesses nothing orders, whatever order they happened to run in.

Every warp has a vector clock over the warps of its grid, and a row that says of which earlier grids it has seen the
end. Edges: bar.sync; cluster barriers with release; mbarrier arrivals to waits; release and acquire accesses, a fence
with a relaxed access, chains of atomics; griddepcontrol.wait (the end of the grid before, and of those before it only
if some thread of that one waited); a launch without PDL. A fence of every thread, then bar.sync, then one thread's
signal counts as a release of all, as kernels are written.

The shadow holds, per 2 bytes, the last write and two reads. A non-coherent load that may be lifted is judged as if it
ran at kernel entry. An asynchronous copy that nobody has waited for is pending: touching its bytes is a race.

Not seen: races between lanes of one warp; more than two unordered reads before a write may lose one; an arrival for
the next phase of an mbarrier counts for this one; fences between generic and asynchronous accesses.
"""

from dataclasses import dataclass

import numpy as np

CELL = 2  # bytes


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders: (kernel, PTX line) of the earlier and the later one as executed, and where."""

    kind: str
    first: tuple[str, int]
    second: tuple[str, int]
    where: str

    def __str__(self) -> str:
        (a, i), (b, j) = self.first, self.second
        return f"{self.kind}: {a} PTX line {i} and {b} PTX line {j} at {self.where}"


class _Shadow:
    def __init__(self, size: int):
        n = size // CELL + 1

        def ints(value=0):
            return np.full(n, value, np.int32)

        self.writer, self.write_epoch, self.write_line, self.write_strong = ints(-1), ints(), ints(), np.zeros(n, bool)
        self.readers = [(ints(-1), ints(), ints(), np.zeros(n, bool)) for _ in range(2)]
        self.pending = np.zeros(n, bool)


class Races:
    def __init__(self, machine, names, grids: int):
        self.machine, self.names, self.count = machine, names, grids
        self.reports: list[Race] = []
        self._known: set = set()
        self.memory = _Shadow(len(machine.arena.mem))
        self.owner = np.zeros(0, np.int32)  # actor -> grid
        self.sync: dict[int, tuple] = {}

    # ---- life of grids

    def begin(self, g, pending) -> None:
        n = g.size // 32
        g.base, g.actors = len(self.owner), n
        self.owner = np.concatenate([self.owner, np.full(n, g.index, np.int32)])
        g.vc = np.zeros((n, n), np.int32)
        np.fill_diagonal(g.vc, 1)
        g.entry = np.zeros(self.count, bool)
        if not g.kernel.pdl:
            g.entry[: g.index] = True
        elif g.index:
            g.entry |= self.machine.grids[g.index - 1].entry
        g.seen = np.tile(g.entry, (n, 1))
        g.released, g.acquired = {}, {}
        g.cluster_clock = {}
        g.shadow = _Shadow(len(g.smem))

    def end(self, g) -> None:
        g.final = g.seen.any(0)
        g.shadow = g.vc = None

    # ---- accesses

    def load(self, g, op, I, offsets, n: int) -> None:
        strong = op.more.get("order", "weak") != "weak"
        self._read(g, self.memory, I, offsets, n, op.line, strong, entry=op.line in g.free)
        if strong:
            self._acquire(g, I, offsets, op.more["order"], op.more["scope"])

    def store(self, g, op, I, offsets, n: int) -> None:
        strong = op.more["order"] != "weak"
        self._write(g, self.memory, I, offsets, n, op.line, strong)
        if strong:
            self._release(g, I, offsets, op.more["order"], op.more["scope"], False)

    def atomic(self, g, op, I, offsets, n: int) -> None:
        order, scope = op.more["order"], op.more["scope"]
        self._write(g, self.memory, I, offsets, n, op.line, True)
        self._acquire(g, I, offsets, order, scope)
        self._release(g, I, offsets, order, scope, True)

    def shared(self, g, op, I, offsets, n, write: bool, pending: bool = False) -> None:
        if write:
            self._write(g, g.shadow, I, offsets, n, op.line, False, pending)
        else:
            self._read(g, g.shadow, I, offsets, n, op.line, False)

    def landed(self, g, lanes, offsets, n: int) -> None:
        g.shadow.pending[self._cells(offsets, n)] = False

    # ---- the check

    @staticmethod
    def _cells(offsets, n):
        n = int(np.max(n))
        return (np.asarray(offsets)[:, None] + np.arange(0, max(n, CELL), CELL)) // CELL

    def _unordered(self, g, w, actor, epoch, entry: bool):
        """Which of these earlier accesses nothing orders before warp w now (or before kernel entry)."""
        known = actor >= 0
        owner = self.owner[np.maximum(actor, 0)]
        same = owner == g.index
        mine = np.where(same, actor - g.base, 0)
        clock = np.zeros_like(epoch) if entry else g.vc[w[:, None], mine]
        seen = g.entry[owner] if entry else g.seen[w[:, None], owner]
        return known & ~np.where(same, clock >= epoch, seen)

    def _read(self, g, s, I, offsets, n, line, strong, entry=False) -> None:
        cells, w = self._cells(offsets, n), g.warp[I].astype(np.int64)
        actor = s.writer[cells]
        own = actor == (g.base + w)[:, None]
        bad = self._unordered(g, w, actor, s.write_epoch[cells], entry) & ~(strong & s.write_strong[cells])
        bad &= ~own if not entry else True
        kind = "read of what a write may change (lifted to kernel entry)" if entry else "write, then read"
        self._tell(kind, g, s, bad, s.writer, s.write_line, cells, line)
        self._tell("asynchronous write that nobody waited for, then read", g, s, s.pending[cells], s.writer,
                   s.write_line, cells, line)  # fmt: skip
        for (a, e, ln, st), order in zip(s.readers, (slice(None), slice(None, None, -1)), strict=True):
            c = cells[order]
            a[c], e[c] = (g.base + w)[order][:, None], g.vc[w, w][order][:, None]
            ln[c], st[c] = line, strong

    def _write(self, g, s, I, offsets, n, line, strong, pending=False) -> None:
        cells, w = self._cells(offsets, n), g.warp[I].astype(np.int64)
        me, now = (g.base + w)[:, None], g.vc[w, w][:, None]
        both = strong & s.write_strong[cells]
        bad = self._unordered(g, w, s.writer[cells], s.write_epoch[cells], False) & ~both
        self._tell("write, then write", g, s, bad, s.writer, s.write_line, cells, line)
        for a, e, ln, st in s.readers:
            bad = self._unordered(g, w, a[cells], e[cells], False) & ~(strong & st[cells])
            self._tell("read, then write", g, s, bad, a, ln, cells, line)
        late = s.pending[cells]
        self._tell(
            "asynchronous write that nobody waited for, then write", g, s, late, s.writer, s.write_line, cells, line
        )
        s.writer[cells], s.write_epoch[cells] = np.broadcast_to(me, cells.shape), np.broadcast_to(now, cells.shape)
        s.write_line[cells], s.write_strong[cells], s.pending[cells] = line, strong, pending
        clash = (s.writer[cells] != me) & (not strong)
        self._tell("two warps write at once", g, s, clash, s.writer, s.write_line, cells, line)

    def _tell(self, kind, g, s, bad, actors, lines, cells, line) -> None:
        if not bad.any():
            return
        at = cells[bad]
        firsts = np.stack([self.owner[np.maximum(actors[at], 0)], lines[at]], 1)
        for (owner, first), index in zip(*np.unique(firsts, axis=0, return_index=True), strict=True):
            key = kind, int(owner), int(first), g.index, line
            if key not in self._known:
                self._known.add(key)
                name = self.machine.grids[int(owner)].name
                where = self._where(g, s, int(at[index]) * CELL)
                self.reports.append(Race(kind, (name, int(first)), (g.name, line), where))

    def _where(self, g, s, offset: int) -> str:
        if s is not self.memory:
            return f"shared memory + {offset % g.smem_bytes}"
        address = self.machine.arena.address(offset)
        inside = [
            (size, name, address - start) for (start, size), name in self.names if start <= address < start + size
        ]
        return "{1} + {2}".format(*min(inside)) if inside else hex(address)

    # ---- edges

    @staticmethod
    def _tick(g, w) -> None:
        g.vc[w, w] += 1

    def barrier(self, g, lanes) -> None:
        ws = np.unique(g.warp[lanes]).astype(np.int64)
        g.vc[ws] = g.vc[ws].max(0)
        g.seen[ws] = g.seen[ws].any(0)
        for table in (g.released, g.acquired):
            have = [table[w] for w in ws.tolist() if w in table]
            if have:
                joined = np.maximum.reduce([h[0] for h in have]), np.logical_or.reduce([h[1] for h in have])
                table.update(dict.fromkeys(ws.tolist(), joined))
        self._tick(g, ws)

    def cluster_arrive(self, g, I, release: bool) -> None:
        for lane in I[np.unique(g.warp[I], return_index=True)[1]].tolist() if release else ():
            key, w = (int(g.cluster[lane]), int(g.target[lane])), int(g.warp[lane])
            clock, seen = g.cluster_clock.get(key, (0, False))
            g.cluster_clock[key] = np.maximum(clock, g.vc[w]), seen | g.seen[w]
            self._tick(g, w)

    def cluster_wait(self, g, lanes) -> None:
        for lane in lanes[np.unique(g.warp[lanes], return_index=True)[1]].tolist():
            self._join(g, int(g.warp[lane]), g.cluster_clock.get((int(g.cluster[lane]), int(g.target[lane]))))

    def publish(self, g, bar: dict, lane: int) -> None:
        w = int(g.warp[lane])
        clock, seen = bar["clock"] or (0, False)
        bar["clock"] = np.maximum(clock, g.vc[w]), seen | g.seen[w]
        self._tick(g, w)

    def observe(self, g, bar: dict, lane: int) -> None:
        self._join(g, int(g.warp[lane]), bar["clock"])

    @staticmethod
    def _join(g, w: int, known: tuple | None) -> None:
        if known:
            np.maximum(g.vc[w], known[0], out=g.vc[w])
            g.seen[w] |= known[1]

    def pdl_wait(self, g, lanes) -> None:
        if g.index:
            ws = np.unique(g.warp[lanes]).astype(np.int64)
            g.seen[ws, g.index - 1] = True
            g.seen[ws] |= self.machine.grids[g.index - 1].final

    def fence(self, g, I, scope: str) -> None:
        if scope == "cta":
            return
        for w in np.unique(g.warp[I]).tolist():
            self._join(g, int(w), g.acquired.pop(w, None))
            g.released[w] = g.vc[w].copy(), g.seen[w].copy()
            self._tick(g, int(w))

    def _acquire(self, g, I, offsets, order: str, scope: str) -> None:
        for lane, offset in zip(I.tolist(), np.asarray(offsets).tolist(), strict=True):
            w, flag = int(g.warp[lane]), self.sync.get(int(offset))
            if flag is None or flag[1] != g.index or ("cta" in (scope, flag[2]) and flag[3] != g.cta[lane]):
                continue
            if order in ("acquire", "acq_rel"):
                self._join(g, w, flag[0])
            else:
                had = g.acquired.get(w, (0, False))
                g.acquired[w] = np.maximum(had[0], flag[0][0]), had[1] | flag[0][1]

    def _release(self, g, I, offsets, order: str, scope: str, chain: bool) -> None:
        for lane, offset in zip(I.tolist(), np.asarray(offsets).tolist(), strict=True):
            w, old = int(g.warp[lane]), self.sync.get(int(offset))
            release = order in ("release", "acq_rel")
            known = (g.vc[w].copy(), g.seen[w].copy()) if release else g.released.get(w)
            if chain and old is not None and old[1] == g.index:
                known = old[0] if known is None else (np.maximum(known[0], old[0][0]), known[1] | old[0][1])
            self.sync.pop(int(offset), None)
            if known is not None:
                self.sync[int(offset)] = known, g.index, scope, int(g.cta[lane])
            if release:
                self._tick(g, w)
