"""Happens-before: which accesses nothing orders, whatever order they happened to run in.

Every lane has a vector clock (`clocks`), and a row that says of which earlier grids it has seen the end. Edges:
bar.sync and bar.warp.sync; cluster barriers with release; mbarrier arrivals to waits; release and acquire accesses, a
fence with a relaxed access, chains of atomics; griddepcontrol.wait (the end of the grid before, and of those before it
only if some thread of that one waited); a launch without PDL; wgmma.wait_group, which counts as a barrier of its warp.
A fence of every thread, then bar.sync, then one thread's signal counts as a release of all, as kernels are written.
Shuffles and votes order nothing; lanes of a warp that arrive at an mbarrier by one instruction hand on what any knew.

wgmma and bulk copies access memory through the asynchronous proxy. A generic write must be put before them by a
fence.proxy.async, of the writer or of anyone who knows of the write; so must a generic read of shared memory before a
bulk write: on an H200 copies overtook loads that only an mbarrier ordered. Until its wait, a copy's destination and
what a wgmma or a bulk store reads are in use: touching them is a race. So is touching a wgmma's registers, and a wgmma
on registers written since the last wgmma.fence.

The shadow holds, per 2 bytes, the last write and some reads: two in global memory, eight in shared memory (the first
and the last lane of four warps). A non-coherent load that may be lifted is judged as if it ran at kernel entry.

Not seen: more unordered reads before a write than the shadow holds may lose one; equal values that lanes of one warp
write at once are no race; two proxies on an mbarrier itself.
"""

from dataclasses import dataclass

import numpy as np

from .clocks import ROWS, Clocks, Known, merged
from .shadow import CELL, UNIT, Shadow, Units

IN_FLIGHT = "asynchronous write that nobody waited for"
UNFENCED = "without fence.proxy.async"


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


class Races:
    def __init__(self, machine, names, grids: int):
        self.machine, self.names, self.count = machine, names, grids
        self.reports: list[Race] = []
        self._known: set = set()
        self.memory = Shadow(len(machine.arena.mem), 2)
        self.bases, self.begun = np.zeros(0, np.int64), []  # first lane of each grid, in the order of their starts
        self.total = 0
        self.sync: dict[int, tuple[Known, int, str, int]] = {}

    # ---- life of grids

    def begin(self, g) -> None:
        g.base, self.total = self.total, self.total + g.size
        self.bases = np.append(self.bases, g.base)
        self.begun.append(g.index)
        g.entry = np.zeros(self.count, bool)
        if not g.kernel.pdl:
            g.entry[: g.index] = True
        elif g.index:
            g.entry |= self.machine.grids[g.index - 1].entry
        g.clocks = self._clocks(g)
        g.shadow = Units(len(g.smem), 8)

    def _clocks(self, g) -> Clocks:
        return Clocks(g.size, g.csize * g.warps * 32, g.entry)

    def end(self, g) -> None:
        g.final = g.clocks.seen.any(0)
        g.shadow = g.clocks = None

    def _owner(self, actor):
        if len(self.begun) == 1:
            return np.full(np.shape(actor), self.begun[0])
        return np.array(self.begun)[np.searchsorted(self.bases, actor, "right") - 1]

    # ---- accesses

    def access(self, g, op, I, offsets, n, write: bool, data=None) -> None:
        """A load or store of n bytes a lane. data: what was written, [lanes, n]."""
        order, space = op.more["order"], op.more["space"]
        strong, s = order != "weak", self._space(g, space)
        if write:
            self._write(g, s, I, offsets, n, op.line, strong, data=data)
            if strong:
                self._release(g, I, self._flag(space, offsets), order, op.more["scope"], False)
        else:
            self._read(g, s, I, offsets, n, op.line, strong, entry=op.line in g.free)
            if strong:
                self._acquire(g, I, self._flag(space, offsets), order, op.more["scope"])

    def atomic(self, g, op, I, offsets, n: int) -> None:
        order, scope, space = op.more["order"], op.more["scope"], op.more["space"]
        flags = self._flag(space, offsets)
        self._write(g, self._space(g, space), I, offsets, n, op.line, True)
        self._acquire(g, I, flags, order, scope)
        self._release(g, I, flags, order, scope, True)

    def copied(self, g, op, I, offsets, n, write: bool, space: str, proxy: bool) -> None:
        """A read or a pending write of an asynchronous copy. proxy: it goes through the asynchronous proxy."""
        row = ROWS[space] if proxy else 0
        if write:
            self._write(g, self._space(g, space), I, offsets, n, op.line, False, pending=space == "shared", row=row)
        else:
            self._read(g, self._space(g, space), I, offsets, n, op.line, False, row=row)

    def shared_read(self, g, op, I, offsets, n: int) -> None:
        self._read(g, g.shadow, I, offsets, n, op.line, False)

    def landed(self, g, offsets, n: int) -> None:
        g.shadow.pending[g.shadow.cells(offsets, n)] = False

    def use(self, g, op, lane: int, offset: int, n: int) -> None:
        """A bulk store begins to read shared memory."""
        one, cells = np.array([lane]), g.shadow.cells([offset], n)
        self._check_read(g, g.shadow, one, cells, op.line, row=1)
        self._take(g, op, one, cells)

    def used(self, g, op, lane: int, offset: int, n: int) -> None:
        self._return(g, op, np.array([lane]), g.shadow.cells([offset], n))

    # ---- warpgroups

    def wgmma(self, g, op, ws, offsets) -> None:
        """A multiplication is issued: what it reads, units at `offsets` of each warp, and its registers."""
        flight = g.flight
        names = flight.names(op)
        for name in names if flight.writes[flight.rows[id(op)], ws].any() else ():
            dirty = flight.dirty[name][ws]
            if dirty.any():
                first = int(dirty[dirty != 0][0])
                self.report(
                    "register written, then wgmma without wgmma.fence", g, max(first, 0), op.line, f"register {name}"
                )
        for name in names[len(op.out) :]:
            self.register(g, op.line, name, ws, False)
        for o in offsets:
            cells = self._operand(g, ws, o)
            self._check_read(g, g.shadow, ws * 32, cells, op.line, row=1, together=True)
            self._take(g, op, ws * 32, cells)

    def wgmma_done(self, g, op, ws, offsets) -> None:
        for o in offsets:
            self._return(g, op, ws * 32, self._operand(g, ws, o))

    @staticmethod
    def _operand(g, ws, offsets):
        cells = g.shadow.cells(offsets.reshape(len(ws), -1), UNIT)
        return cells.reshape(len(ws), -1)

    def register(self, g, line: int, name: str, ws, write: bool) -> None:
        """Another instruction touches a register that an unfinished wgmma uses: accumulators, or to write, all."""
        flight = g.flight
        if (write or name in flight.sums) and flight.uses[name][ws].any():
            first = int(flight.user[name][ws].max())
            self.report(f"register of an unfinished wgmma, then {'write' if write else 'read'}", g, first, line,
                         f"register {name}")  # fmt: skip

    def barrier_made(self, g, op, offset: int, live: bool) -> None:
        g.shadow.barriers[g.shadow.cells([offset], 8)] = op.line if live else 0

    def barrier_used(self, g, op, I, made: tuple, offset: int) -> None:
        """Who uses an mbarrier for the first time must know that it was initialised. made: lane, clock, PTX line."""
        if not g.clocks.know(I, made[0], made[1], (0, ROWS["mbarrier"])):
            where = f"shared memory + {offset % g.smem_bytes}"
            self.report("mbarrier.init, then use", g, made[2], op.line, where)

    def report(self, kind: str, g, first: int, line: int, where: str) -> None:
        if (key := (kind, g.index, first, line)) not in self._known:
            self._known.add(key)
            self.reports.append(Race(kind, (g.name, first), (g.name, line), where))

    # ---- the check

    def _space(self, g, space: str) -> Shadow:
        return self.memory if space == "global" else g.shadow

    def _unordered(self, g, I, actor, epoch, row=0, entry=False, together=False):
        """Which accesses nothing orders before lanes I now (or before kernel entry).

        actor, epoch: [..., len(I), cells]; actor is lane + 1, 0 for none. together: I are first lanes of warps, and
        what any lane of the warp knows counts.
        """
        out = np.zeros(actor.size, bool)
        known = np.flatnonzero(actor)
        if not len(known):
            return out.reshape(actor.shape)
        who = known // actor.shape[-1] % len(I)
        lane, at = actor.ravel()[known] - 1, epoch.ravel()[known]
        owner = self._owner(lane)
        same = owner == g.index
        if entry:
            bad = same | ~g.entry[owner]
        else:
            seen = g.clocks.seen[I[:, None] + np.arange(32)].any(1) if together else g.clocks.seen[I]
            bad = ~same & ~seen[who, owner]
            bad[same] = g.clocks.unordered(I[who[same]], lane[same] - g.base, at[same], row, together)
        out[known] = bad
        return out.reshape(actor.shape)

    def _check_read(self, g, s, I, cells, line, strong=False, row=0, entry=False, together=False) -> None:
        if self._quiet(g, s, I, cells, row, False, together):
            return
        w = s.write
        bad = self._unordered(g, I, w.actor[cells], w.epoch[cells], 0, entry, together) & ~(strong & w.strong[cells])
        kind = "read of what a write may change (lifted to kernel entry)" if entry else "write, then read"
        self._tell(kind, g, s, bad, w, cells, line, I)
        self._tell(f"{IN_FLIGHT}, then read", g, s, s.pending[cells], w, cells, line, I)
        self._unfenced("read", g, s, I, cells, line, row, together, bad)

    def _unfenced(self, then, g, s, I, cells, line, row, together, bad) -> None:
        """Generic writes that no fence puts before an access through the asynchronous proxy."""
        if not row:
            return
        w, generic = s.write, ~s.proxy[cells] & ~bad
        actor = np.where(generic, w.actor[cells], 0)
        late = self._unordered(g, I, actor, w.epoch[cells], row, together=together)
        self._tell(f"generic write, then asynchronous {then} {UNFENCED}", g, s, late, w, cells, line, I)

    def _read(self, g, s, I, offsets, n, line, strong, entry=False, row=0) -> None:
        cells = s.cells(offsets, n)
        self._check_read(g, s, I, cells, line, strong, row, entry)
        self._note_read(g, s, I, cells, line, strong)

    def _note_read(self, g, s, I, cells, line, strong=False) -> None:
        warp, pairs = g.warp[I].astype(np.int64), s.readers // 2
        for which, order in enumerate((slice(None), slice(None, None, -1))):
            slot = (2 * (warp % pairs) + which)[order, None]
            who = I[order][:, None]
            s.reads.put(cells[order] * s.readers + slot, g.base + who, g.clocks.now(who), line, strong)

    def _quiet(self, g, s, I, cells, row: int, write: bool, together: bool = False) -> bool:
        """Whether it takes no more to see that nothing is wrong with these accesses."""
        return False

    def _check_write(self, g, s, I, cells, line, strong, row) -> None:
        if self._quiet(g, s, I, cells, row, True):
            return
        w = s.write
        bad = self._unordered(g, I, w.actor[cells], w.epoch[cells]) & ~(strong & w.strong[cells])
        self._tell("write, then write", g, s, bad, w, cells, line, I)
        self._unfenced("write", g, s, I, cells, line, row, False, bad)
        at = cells * s.readers + np.arange(s.readers)[:, None, None]
        late = self._unordered(g, I, s.reads.actor[at], s.reads.epoch[at]) & ~(strong & s.reads.strong[at])
        self._tell("read, then write", g, s, late, s.reads, at, line, I)
        if row and s is g.shadow:
            actor = np.where(late, 0, s.reads.actor[at])
            unfenced = self._unordered(g, I, actor, s.reads.epoch[at], row)
            self._tell(f"generic read, then asynchronous write {UNFENCED}", g, s, unfenced, s.reads, at, line, I)
        if (made := s.barriers[cells]).any():
            where = f"shared memory + {s.address(int(cells[made > 0][0])) % g.smem_bytes}"
            self.report("mbarrier, then write over it", g, int(made.max()), line, where)
        self._tell(f"{IN_FLIGHT}, then write", g, s, s.pending[cells], w, cells, line, I)
        self._tell("operand that nobody waited for, then write", g, s, s.using[cells] > 0, s.user, cells, line, I)

    def _write(self, g, s, I, offsets, n, line, strong, pending=False, row=0, data=None) -> None:
        cells, w = s.cells(offsets, n), s.write
        self._check_write(g, s, I, cells, line, strong, row)
        me = np.broadcast_to(g.base + I[:, None], cells.shape)
        w.put(cells, me, g.clocks.now(I)[:, None], line, strong)
        s.pending[cells], s.proxy[cells] = pending, row > 0
        clash = (w.actor[cells] != me + 1) & (not strong)
        if clash.any():
            if data is not None and n % CELL == 0:
                differ = self._differ(g, s, offsets, data).reshape(*cells.shape, -1).any(2)
                clash &= differ | ((w.actor[cells] - 1) // 32 != me // 32)
            self._tell("two lanes write at once", g, s, clash, w, cells, line, I)

    def _differ(self, g, s, offsets, data):
        """Which bytes are not those that a lane wrote: [lanes, n]."""
        memory = self.machine.arena.mem if s is self.memory else g.smem
        return memory[np.asarray(offsets)[:, None] + np.arange(data.shape[1])] != data

    def _take(self, g, op, I, cells) -> None:
        s = g.shadow
        for one in cells:
            s.using[one] += 1
        s.user.put(cells, g.base + I[:, None], g.clocks.now(I)[:, None], op.line, False)

    def _return(self, g, op, I, cells) -> None:
        for one in cells:
            g.shadow.using[one] -= 1
        self._note_read(g, g.shadow, I, cells, op.line)

    def _tell(self, kind, g, s, bad, accesses, cells, line, I) -> None:
        if not bad.any():
            return
        at, second = cells[bad], np.broadcast_to(I[:, None], cells.shape)[bad]
        lanes = accesses.actor[at] - 1
        one_warp = lanes // 32 == (g.base + second) // 32
        firsts = np.stack([self._owner(lanes), accesses.line[at], one_warp], 1)
        for (owner, first, one), index in zip(*np.unique(firsts, axis=0, return_index=True), strict=True):
            key = kind, int(owner), int(first), g.index, line, bool(one)
            if key not in self._known:
                self._known.add(key)
                name = self.machine.grids[int(owner)].name
                where = self._where(g, s, s.address(int(at[index]) // (s.readers if accesses is s.reads else 1)))
                text = f"{kind}, in one warp" if one else kind
                self.reports.append(Race(text, (name, int(first)), (g.name, line), where))

    def _where(self, g, s, offset: int) -> str:
        if s is not self.memory:
            return f"shared memory + {offset % g.smem_bytes}"
        address = self.machine.arena.address(offset)
        inside = [(n, name, address - at) for (at, n), name in self.names if at <= address < at + n]
        return "{1} + {2}".format(*min(inside)) if inside else hex(address)

    # ---- edges

    def barrier(self, g, lanes) -> None:
        g.clocks.meet(lanes)

    def warps(self, g, ws) -> None:
        g.clocks.join_warps(ws)

    def cluster_arrive(self, g, I, release: bool) -> None:
        for key, lanes in self._by_phase(g, I):
            g.clocks.arrived[key] = merged(g.clocks.arrived.get(key), g.clocks.given(lanes, release))

    def cluster_wait(self, g, lanes) -> None:
        for key, some in self._by_phase(g, lanes):
            g.clocks.absorb_all(some, g.clocks.arrived.get(key))

    def _by_phase(self, g, I):
        """Lanes by the cluster, and the phase of its barrier, that they arrived in."""
        phases = np.stack([g.cluster[I], g.target[I]], 1)
        for key in np.unique(phases, axis=0):
            yield tuple(key.tolist()), I[(phases == key).all(1)]

    def pdl_wait(self, g, lanes) -> None:
        if g.index:
            g.clocks.seen[lanes, g.index - 1] = True
            g.clocks.seen[lanes] |= self.machine.grids[g.index - 1].final

    def fence(self, g, op, I) -> None:
        if op.more["what"] == "memory":
            g.clocks.fence(I, op.more["scope"])
        elif op.more["what"] == "proxy":
            g.clocks.proxy_fence(I, op.more["spaces"])
        elif op.more["what"] == "mbarrier_init":
            g.clocks.proxy_fence(I, ("mbarrier",))

    @staticmethod
    def _flag(space: str, offsets) -> list[int]:
        """A flag's name: shared memory has negative ones."""
        return [int(o) if space == "global" else -1 - int(o) for o in offsets]

    def _acquire(self, g, I, flags, order: str, scope: str) -> None:
        for lane, offset in zip(I.tolist(), flags, strict=True):
            flag = self.sync.get(offset)
            if flag is None or flag[1] != g.index or ("cta" in (scope, flag[2]) and flag[3] != g.cta[lane]):
                continue
            if order in ("acquire", "acq_rel"):
                g.clocks.absorb(lane, flag[0])
            else:
                cta = -1 if flag[3] == g.cta[lane] else int(flag[3])
                g.clocks.acquired.setdefault(lane, []).append((flag[0], cta))

    def _release(self, g, I, flags, order: str, scope: str, chain: bool) -> None:
        for lane, offset in zip(I.tolist(), flags, strict=True):
            old, known, wide = self.sync.get(offset), None, scope
            if order in ("release", "acq_rel"):
                known = g.clocks.snapshot(lane)
            elif lane in g.clocks.released:
                known, fenced = g.clocks.released[lane]
                wide = "cta" if fenced == "cta" else scope
            if chain and old is not None and old[1] == g.index:
                known = merged(known, old[0])
            self.sync.pop(offset, None)
            if known is not None:
                self.sync[offset] = known, g.index, wide, int(g.cta[lane])
