"""One launch in the numpy back end: registers, lanes, shared memory, and how operands are read and written."""

from collections import deque

import numpy as np

from .arena import merged, spans
from .clocks import Clocks, Known
from .clocks import merged as merged_knowledge
from .copies import finish
from .ir import Address, Code, Const, Op, Read, Reg, Shared
from .lanes import DTYPES
from .native import Fault
from .opcodes import bits
from .operations import BAR, CLUSTER, EXITED, OPERATIONS, PARKED, PDL, UNSIGNED, WARP
from .warpgroup import Flight, warps_of

SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


class Grid:
    """Lanes are numbered CTA by CTA, whole warps; CTAs of a cluster follow each other."""

    operations = OPERATIONS
    flight_kind = Flight

    def __init__(self, machine, index: int, kernel, code: Code, free: set[int], tensors):
        self.machine, self.index, self.kernel, self.code, self.name = machine, index, kernel, code, kernel.name
        self.threads = int(np.prod(kernel.block))
        self.warps = -(-self.threads // 32)
        self.ctas = int(np.prod(kernel.grid))
        self.size = self.ctas * self.warps * 32
        self.smem_bytes = -(-(code.listing.dynamic + kernel.smem) // 1024) * 1024
        words = [*(t.data_ptr() for t in tensors), *getattr(kernel, "numbers", ())]
        self.params = np.array(words, np.uint64).view(np.uint8)
        self.starts, self.ends = merged(spans(tensors))
        self.free = free if machine.adversarial or machine.watch_races else set()
        self.last_run, self.clock = np.zeros(len(code.blocks), np.int64), 0
        self.started = self.finished = False
        self.clocks: Clocks | None = None  # with a race detector, while it runs
        self.line = 0  # of the operation that is executed

    # ---- life

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        n, lane = self.size, np.arange(self.size, dtype=np.uint32)
        self.warp, per = lane // 32, self.warps * 32
        cta, thread = lane // per, lane % per
        cl = np.array(self.kernel.cluster or (1, 1, 1), np.uint32)
        csize = int(cl.prod())
        inside, which, g = cta % csize, cta // csize, np.array(self.kernel.grid, np.uint32) // cl
        self.cta, self.rank, self.cluster, self.csize = cta.astype(np.int64), inside, which.astype(np.int64), csize
        ids = {"laneid": lane % 32, "warpid": thread // 32, "cluster_ctarank": inside}
        ids["cluster_nctarank"] = np.full(n, csize, np.uint32)
        b, d = self.kernel.block, {}
        for i, axis in enumerate("xyz"):
            d[f"tid_{axis}"] = thread // np.uint32(np.prod(b[:i], dtype=np.int64)) % np.uint32(b[i])
            at = which // np.uint32(g[:i].prod()) % g[i]
            cin = inside // np.uint32(cl[:i].prod()) % cl[i]
            d[f"ctaid_{axis}"], d[f"cluster_ctaid_{axis}"] = at * cl[i] + cin, cin
            d[f"ntid_{axis}"], d[f"nctaid_{axis}"] = np.full(n, b[i]), np.full(n, self.kernel.grid[i])
            d[f"cluster_nctaid_{axis}"] = np.full(n, cl[i])
        self.special = {k: v.astype(np.uint32) for k, v in (ids | d).items()}
        self.pc = np.where(thread < self.threads, 0, EXITED).astype(np.int64)
        self.why, self.name_of_bar = np.zeros(n, np.int8), np.zeros(n, np.int64)
        self.count_of_bar, self.line_of_bar = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.triggered, self.waited = self.pc >= EXITED, np.zeros(n, bool)
        self.target = np.zeros(n, np.int64)
        self.cluster_arrived = np.zeros(self.ctas // csize, np.int64)
        self.cluster_phase = np.zeros(self.ctas // csize, np.int64)
        self.between = np.zeros(n, bool)  # lanes that have arrived at the cluster's barrier, and not waited
        self.registers = {r.name: np.zeros(n, bool if r.width == 1 else UNSIGNED[r.width]) for r in self.code.registers}
        self.smem = np.full(self.ctas * self.smem_bytes, 0xFF, np.uint8)
        self.open: list = []  # cp.async not yet in a group: (lanes, offsets, data)
        self.groups: dict[int, deque] = {}  # lane -> its groups, oldest first
        self.stores: dict[int, deque] = {}  # lane -> groups of bulk copies to global memory, the last one open
        self.mbars: dict[int, dict] = {}
        self.flight = self.flight_kind(self)
        self.events, self.failed = 0, np.full(n, -1)  # what happened to mbarriers; when a lane last polled in vain
        machine, pending = self.machine, [b for b in self.machine.grids[: self.index] if not b.finished]
        self.before = machine.arena.mem[: machine.arena.hot].copy() if machine.adversarial else None
        self.stale = pending[0].before.copy() if pending else None
        if machine.races:
            machine.races.begin(self)

    def triggered_by_all(self) -> bool:
        return bool((self.triggered | (self.pc >= EXITED)).all())

    def done(self) -> bool:
        return bool((self.pc >= EXITED).all())

    def finish(self) -> None:
        finish(self)
        self.flight.finish()
        self.finished = True
        if self.machine.races:
            self.machine.races.end(self)
        self.registers, self.smem, self.before, self.stale = {}, None, None, None

    def waiting(self) -> str:
        if not self.started:
            return "it never starts"
        lanes = np.flatnonzero(self.pc < EXITED)
        where = [
            f"{int(n)} lanes before block {int(b) % PARKED}"
            for b, n in zip(*np.unique(self.pc[lanes], return_counts=True), strict=True)
        ]
        return ", ".join(where)

    def release(self) -> None:
        """Let go of lanes whose barrier is complete or whose predecessors have ended."""
        parked = np.flatnonzero((self.pc >= PARKED) & (self.pc < EXITED))
        if not len(parked):
            return
        why = self.why[parked]
        if (why == PDL).any() and all(b.finished for b in self.machine.grids[self.index - 1 : self.index]):
            lanes = parked[why == PDL]
            self.waited[lanes] = True
            self.pc[lanes] -= PARKED
            if self.machine.races:
                self.machine.races.pdl_wait(self, lanes)
        together = ((self.pc >= EXITED) | ((self.pc >= PARKED) & (self.why == WARP))).reshape(-1, 32).all(1)
        lanes = (lanes := parked[why == WARP])[together[lanes // 32]]
        self.pc[lanes] -= PARKED
        if len(lanes) and self.machine.races:
            self.machine.races.warps(self, warps_of(lanes))
        self.settle_cluster()
        lanes = parked[why == CLUSTER]
        lanes = lanes[self.cluster_phase[self.cluster[lanes]] >= self.target[lanes]]
        self.pc[lanes] -= PARKED
        if len(lanes) and self.machine.races:
            self.machine.races.cluster_wait(self, lanes)
        self._release_bars(parked[why == BAR])

    def settle_cluster(self) -> None:
        """Complete the phase of clusters whose live lanes have all arrived."""
        live = np.bincount(self.cluster, self.pc < EXITED, len(self.cluster_arrived))
        full = (self.cluster_arrived >= live) & (self.cluster_arrived > 0)
        self.cluster_phase[full] += 1
        self.cluster_arrived[full] = 0

    def _release_bars(self, lanes) -> None:
        if not len(lanes):
            return
        key = self.cta[lanes] * 16 + self.name_of_bar[lanes]
        live = np.bincount(self.cta, self.pc < EXITED, self.ctas)
        for k, n in zip(*np.unique(key, return_counts=True), strict=True):
            mine = lanes[key == k]
            need = int(self.count_of_bar[mine[0]]) or live[int(k) // 16]
            if n > need:
                raise self.fault(
                    self.line, int(mine[0]), f"{n} threads arrive at barrier {int(k) % 16}, which counts {need}"
                )
            if n == need:
                self._aligned(mine)
                self.pc[mine] -= PARKED
                if self.machine.races:
                    self.machine.races.barrier(self, mine)

    def _aligned(self, lanes) -> None:
        """Fault unless aligned barriers let go of whole warps, whose lanes all came by the same instruction."""
        warps = np.unique(lanes[self.line_of_bar[lanes] > 0] // 32)
        at, here = self.line_of_bar.reshape(-1, 32)[warps], np.isin(np.arange(self.size), lanes).reshape(-1, 32)[warps]
        live = self.pc.reshape(-1, 32)[warps] < EXITED
        apart = (live & ~here) | (here & (at != np.where(here, at, 0).max(1, keepdims=True)))
        if apart.any():
            w, lane = (int(k[0]) for k in np.nonzero(apart))
            raise self.fault(int(at[w].max()), int(warps[w]) * 32 + lane, "is not at the aligned barrier of its warp")

    def execute(self, block: int, lanes) -> None:
        made = self.code.blocks[block]
        self.pc[lanes] = EXITED if made.next is None else made.next  # unless the last operation says otherwise
        for op in made.ops:
            I = lanes
            if op.guard:
                I = lanes[self.registers[op.guard[0].name][lanes] == op.guard[1]]
                if not len(I):
                    continue
            self.line = op.line
            self.operations[op.kind](self, op, I)

    # ---- operands

    def read(self, r: Read, I):
        source, kind = r.source, DTYPES[r.type]
        if isinstance(source, Reg):
            if source.name in self.flight.uses:
                self.flight.touch(source.name, I, False)
            v = self.registers[source.name][I]
            if source.width == 1:
                return v
            return (v if v.itemsize == kind.itemsize else v.astype(UNSIGNED[kind.itemsize * 8])).view(kind)
        if isinstance(source, Const):
            if r.type == "pred":
                return np.full(len(I), bool(source.bits))
            return np.full(len(I), source.bits, UNSIGNED[kind.itemsize * 8]).view(kind)
        if isinstance(source, Shared):
            return (
                (np.uint32(source.offset) | self.rank[I] << np.uint32(24))
                .astype(UNSIGNED[kind.itemsize * 8])
                .view(kind)
            )
        return self.special[source.name][I].astype(kind)

    def write(self, out: Reg | None, kind: str, I, value) -> None:
        if out is None:
            return
        if out.name in self.flight.uses:
            self.flight.touch(out.name, I, True)
        if out.width == 1:
            self.registers[out.name][I] = value
            return
        v = np.ascontiguousarray(value).astype(DTYPES[kind], copy=False)
        if bits(kind) < out.width:
            v = v.astype(SIGNED[out.width] if kind[0] == "s" else UNSIGNED[out.width])
        self.registers[out.name][I] = v.view(UNSIGNED[out.width])

    def address(self, at: Address, I):
        width = at.base.width if isinstance(at.base, Reg) else 32 if isinstance(at.base, Shared) else 64
        base = self.read(Read(at.base, f"u{width}"), I)
        return (base + UNSIGNED[width](at.offset % (1 << width))).astype(np.uint64)

    def fault(self, op_line: int, lane: int, why: str, address: int = 0) -> Fault:
        thread = lane % (self.warps * 32)
        cta = tuple(int(self.special[f"ctaid_{a}"][lane]) for a in "xyz")
        return Fault(f"{self.name}: CTA {cta} thread {thread}: PTX line {op_line}: {why} ({address:#x})")

    def global_at(self, op: Op, I, a, size: int):
        """Offsets in the arena of accesses of `size` bytes."""
        a = a.astype(np.int64)
        self.aligned(op, I, a, size)
        i = np.searchsorted(self.starts, a, "right") - 1
        bad = (i < 0) | (a + size > self.ends[np.maximum(i, 0)])
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            raise self.fault(op.line, int(I[k]), "address outside the tensors", int(a[k]))
        arena = self.machine.arena
        return a - arena.starts[(j := np.searchsorted(arena.starts, a, "right") - 1)] + arena.at[j]

    def aligned(self, op: Op, I, a, size: int) -> None:
        if (a % size).any():
            k = int(np.flatnonzero(a % size)[0])
            raise self.fault(op.line, int(I[k]), "misaligned address", int(a[k]))

    def shared_at(self, op: Op, I, a, align: int, size, anywhere: bool = False):
        """Offsets in `smem`, which holds the shared memory of all CTAs."""
        a = a.astype(np.int64)
        rank, at = a >> 24, a & 0xFFFFFF
        self.aligned(op, I, at, align)
        bad = (rank >= self.csize) if anywhere else (rank != self.rank[I])
        bad = bad | (at < 1024) | (at + size > self.code.listing.dynamic + self.kernel.smem)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            raise self.fault(op.line, int(I[k]), "address outside shared memory", int(a[k]))
        return (self.cta[I] - self.rank[I] + rank) * self.smem_bytes + at

    def bytes_of(self, op: Op, I):
        """What a store writes: bytes [lanes, n]."""
        return np.stack([np.ascontiguousarray(self.read(a, I)) for a in op.args], 1).view(np.uint8)

    def whole(self, op: Op, I) -> None:
        """Fault unless every live lane of these lanes' warps is among them."""
        inside = np.zeros(self.size, bool)
        inside[I] = True
        touched = np.zeros(self.size // 32, bool)
        touched[I // 32] = True
        missing = ~inside & np.repeat(touched, 32) & (self.pc < EXITED)
        if missing.any():
            raise self.fault(op.line, int(np.argmax(missing)), "needs a lane of the warp that is not there")

    # ---- memory

    def load_global(self, op: Op, I, offsets, n: int):
        """Bytes [lanes, n] as these lanes may see them."""
        cells, arena = offsets[:, None] + np.arange(n), self.machine.arena
        data, lifted = arena.mem[cells], self.machine.adversarial and op.line in self.free
        if lifted or self.stale is not None:
            early = (offsets < arena.hot) & (True if lifted else ~self.waited[I])
            data[early] = (self.before if self.stale is None else self.stale)[cells[early]]
        return data

    def store_global(self, I, offsets, data) -> None:
        cells, arena = offsets[:, None] + np.arange(data.shape[1]), self.machine.arena
        arena.mem[cells] = data
        if self.stale is not None:
            inside = offsets < arena.hot
            self.stale[cells[inside]] = data[inside]

    def put(self, to, data) -> None:
        """Store bytes, a sequence of [copies, n], at these offsets in `smem`."""
        self.smem[to[:, None] + np.arange(data[0].shape[1])] = np.concatenate(data)

    # ---- barriers in shared memory: counted here, not in bytes

    def mbar(self, op: Op, I, offset: int) -> dict:
        """The barrier that all these lanes use."""
        if offset not in self.mbars:
            raise self.fault(op.line, int(I[0]), "no such barrier, or it was not initialised", offset)
        bar = self.mbars[offset]
        if self.machine.races and not bar["users"][I].all():
            new = I[~bar["users"][I]]
            bar["users"][new] = True
            self.machine.races.barrier_used(self, op, new, bar["made"], offset)
        return bar

    def mbars_of(self, op: Op, I, offsets) -> list[dict]:
        """The barrier of each lane."""
        every = list(dict.fromkeys(offsets.tolist()))
        if len(every) == len(I) or not self.mbars.keys() >= set(every):
            return [self.mbar(op, I[k : k + 1], offset) for k, offset in enumerate(offsets.tolist())]
        bars = {offset: self.mbar(op, I[offsets == offset], offset) for offset in every}
        return [bars[offset] for offset in offsets.tolist()]

    def late(self, bar: dict, *copy) -> None:
        """Arrivals that come with the bytes of copies: (operation, lanes, copies, arrivals, bytes, knowledge); arrivals
        and bytes are those of each lane."""
        self.events += 1
        bar["late"].append(copy)

    def known(self, I) -> list[Known | None]:
        """What each lane hands on at an arrival, with a race detector."""
        return self.clocks.snapshots(I) if self.clocks else [None] * len(I)

    def arrive(self, op: Op, lane: int, bar: dict, n: int, tx: int, known: Known | None) -> None:
        if n > bar["left"]:
            raise self.fault(op.line, lane, "more arrivals than the barrier expects")
        self.events += 1
        bar["left"] -= n
        bar["tx"] += tx
        if known is not bar["last"]:  # lanes of one warp that arrive at once hand on the same
            bar["known"], bar["last"] = merged_knowledge(bar["known"], known), known
        if not bar["left"] and not bar["tx"]:
            bar["phase"] ^= 1
            bar["left"] = bar["expected"]
            bar["done"], bar["known"], bar["last"] = merged_knowledge(bar["done"], bar["known"]), None, None
