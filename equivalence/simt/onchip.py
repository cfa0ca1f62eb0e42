"""Accesses of shared memory that nothing orders, found from a kernel's text alone: one cluster, whatever the data.

The skeleton of a kernel (`skeleton`) runs in the numpy back end under the race detector, once for each way that its
conditions on data can fall. What is loaded is unknown, so nothing about values is assumed but this: a location that all
threads of a CTA read with plain loads holds one value for them. A condition that is met again falls the other way each
time; where a loop with accesses or barriers meets one, that is not enough, and it is a doubt. Barriers, phases, byte
counts and parities are those of the text; every other poll of an mbarrier is in vain.

    found(kernel, ptx) -> [Found(kind, line, text)]

Where anything depends on the CTA's number, the first and the last cluster stand for all. One schedule stands for all
schedules: happens-before does not depend on it, but a phase that can pass twice before a slow thread looks does.

What makes it cheap leaves out no thread, access or round of a loop: what decides nothing is dropped (`shape.lean`), and
of kernels that are then equal one is run; lanes that act alike share a clock (`alike`); accesses in which a look at all
clocks at once shows nothing wrong are not looked at one by one (`batch`, `_OnChip._quiet`); cells that no access tells
apart are kept as one (`shadow`).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import torch

from . import batch
from .alike import ONE, Alike, Finer
from .arena import Arena
from .grid import Grid
from .ir import Code, Op
from .machine import Machine
from .native import Fault
from .operations import OPERATIONS
from .parse import read
from .races import Races
from .shape import lean, shape, specials
from .skeleton import COMPUTED, Skeleton, skeleton
from .translate import translate
from .warpgroup import Unmultiplied

STEPS = 20_000  # of the machine; the longest of our kernels takes 6,000
CHOICES = 4  # conditions on data that are tried in all combinations; a kernel with more is doubtful
WARPS = "together"  # of the machine: every mutant that is found is found by each schedule alone


@dataclass(frozen=True)
class Found:
    """kind: "race", "stuck" or "doubt". line: of PTX."""

    kind: str
    line: int
    text: str


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for garbage in cycles: there is little, and it took a third of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_uncollected()
def found(kernel, ptx: str) -> list[Found]:
    """Everything wrong with, or unknown about, the order of a kernel's accesses to shared memory.

    kernel: grid, block, cluster, smem and name count. Raises Unsupported for PTX that the interpreter does not run.
    """
    bones = skeleton(translate(read(ptx)), prod(kernel.cluster or (1,)) > 1)
    if bones.doubts:
        return [Found("doubt", d.line, d.text) for d in bones.doubts]
    out = [Found("doubt", d.line, d.text) for d in bones.unsure]
    small = replace(bones, code=lean(bones.code))
    if not _touches(small):
        return out
    choices = [c for c in bones.choices if c in {op.out[0].name for op in _ops(small) if op.kind == "choose"}]
    if len(choices) > CHOICES:
        out.append(Found("doubt", 0, f"{len(choices)} conditions depend on data; {CHOICES} are tried"))
        return out
    starts = _starts(kernel, small.code)
    key = _key(kernel, small.code, starts)
    if key in _clean:
        return out
    told: dict[tuple[str, int], Found] = {}
    for start in starts.values():
        for falls in product((True, False), repeat=len(choices)):
            for one in _run(kernel, small, start, dict(zip(choices, falls, strict=True))):
                told.setdefault((one.kind, one.line), one)
                if one.kind == "doubt":
                    return out + list(told.values())  # a run that was cut off is long; the others may be, too
    if not told:
        _clean.add(key)
    return out + list(told.values())


# Kernels in whose runs nothing was found, in this process. A kernel with a finding runs again each time, so that what
# is told of it has its own lines.
_clean: set[str] = set()


def _key(kernel, code: Code, starts: dict) -> str:
    """All that runs depend on, never a digest of it: the operations, the threads of a cluster and its shared memory,
    and of the grid what is read of it: the number of CTAs, and where the clusters that are looked at start. Choices
    fall both ways, what is loaded is never looked at, and the rest are constants of this module."""
    sizes = tuple(n for n, axis in zip(kernel.grid, "xyz", strict=True) if f"nctaid_{axis}" in specials(code))
    threads = tuple(kernel.block), tuple(kernel.cluster or (1, 1, 1))
    return repr((shape(code), threads, kernel.smem, tuple(starts), sizes))  # a text takes less room


def _ops(bones: Skeleton) -> Iterator[Op]:
    return (op for block in bones.code.blocks for op in block.ops)


def _touches(bones: Skeleton) -> bool:
    """Whether there is shared memory, or a barrier that threads could hang in."""
    return any(op.kind not in COMPUTED | {"jump", "exit", "trap", "pdl", "choose", "warp_sync"} for op in _ops(bones))


def _starts(kernel, code: Code) -> dict[tuple, tuple[int, ...]]:
    """The first CTA of the first and of the last cluster, by what the code sees of it: one, if that is the same."""
    used, out = specials(code), {}
    size = kernel.cluster or (1, 1, 1)
    clusters = [n // s for n, s in zip(kernel.grid, size, strict=True)]
    for last in (0, 1):
        start = tuple((n - 1) * last * s for n, s in zip(clusters, size, strict=True))
        out.setdefault(tuple(at for at, axis in zip(start, "xyz", strict=True) if f"ctaid_{axis}" in used), start)
    return out


def _run(kernel, bones: Skeleton, start: tuple[int, ...], falls: dict[str, bool]) -> Iterator[Found]:
    classes = ONE
    while True:
        machine, fault = _machine(kernel, bones, start, falls, classes), None
        try:
            with np.errstate(all="ignore"):
                machine.finish_all()
        except Finer as finer:
            classes = finer.classes
            continue
        except Fault as error:
            fault = error
        break
    if fault:
        yield Found("doubt" if "no end after" in str(fault) else "stuck", machine.grids[0].line, str(fault))
    for race in machine.races.reports:
        yield Found("race", race.second[1], f"{race.kind}, first at PTX line {race.first[1]}")


def _machine(kernel, bones: Skeleton, start: tuple[int, ...], falls: dict[str, bool], classes) -> Machine:
    one = SimpleNamespace(name=kernel.name, grid=kernel.cluster or (1, 1, 1), block=kernel.block,
                          cluster=kernel.cluster, smem=kernel.smem, pdl=False)  # fmt: skip
    machine = Machine("plain", WARPS, races=True)
    tensors = [torch.empty(16, dtype=torch.uint8) for _ in bones.code.listing.params]
    machine.arena = Arena(tensors)
    machine.races = _OnChip(machine, classes)
    code = batch.batched(bones.code)
    machine.grids = [_Cluster(machine, one, code, tensors, kernel.grid, start, falls)]
    machine.steps = STEPS
    return machine


class _OnChip(Races):
    """Global memory is not watched here. classes: of the lanes of a warp, for `Alike`."""

    def __init__(self, machine, classes: np.ndarray):
        super().__init__(machine, [], 1)
        self.classes = classes

    def _clocks(self, g) -> Alike:
        return Alike(g.size, self.classes)

    def copied(self, g, op, I, offsets, n, write, space, proxy) -> None:
        if space == "shared":
            super().copied(g, op, I, offsets, n, write, space, proxy)

    def _differ(self, g, s, offsets, data):
        return np.zeros(data.shape, bool)  # all that is stored is zero

    def _quiet(self, g, s, I, cells, row: int, write: bool, together: bool = False) -> bool:
        """cells: [lanes, cells], or [accesses, lanes, cells] of accesses that do not touch the same cells."""
        if s.pending[cells].any() or (write and (s.using[cells].any() or s.barriers[cells].any())):
            return False
        know, who = (g.clocks.warps_know, I // 32) if together else (g.clocks.all_know, I)
        actor, epoch = s.write.actor[cells], s.write.epoch[cells]
        if not know(who, actor, epoch) or (row and not know(who, actor, epoch, row, s.proxy[cells])):
            return False
        if not write:
            return True
        shape = *cells.shape[:-1], -1
        actor, epoch = (x.reshape(-1, s.readers)[cells].reshape(shape) for x in (s.reads.actor, s.reads.epoch))
        return know(who, actor, epoch, row)  # what a fence has put before the asynchronous proxy is known anyway


class _Cluster(Grid):
    """start: the number of its first CTA. grid: CTAs of all clusters. falls: how conditions on data fall at first."""

    flight_kind = Unmultiplied

    def __init__(self, machine, kernel, code: Code, tensors, grid, start: tuple[int, ...], falls: dict[str, bool]):
        super().__init__(machine, 0, kernel, code, set(), tensors)
        self.full, self.first, self.falls = grid, start, falls

    def start(self) -> None:
        begun = self.started
        super().start()
        if begun:
            return
        self.met: dict[int, np.ndarray] = {}
        for i, axis in enumerate("xyz"):
            self.special[f"ctaid_{axis}"] += np.uint32(self.first[i])
            self.special[f"nctaid_{axis}"][:] = self.full[i]

    def global_at(self, op: Op, I, a, size: int):
        return np.zeros(len(I), np.int64)

    def load_global(self, op: Op, I, offsets, n: int):
        return np.zeros((len(I), n), np.uint8)

    def store_global(self, I, offsets, data) -> None:
        pass

    def put(self, to, data) -> None:
        pass

    def choose(self, op: Op, I) -> None:
        times = self._met(op)
        self.write(op.out[0], "pred", I, times[I] ^ self.falls[op.out[0].name])
        times[I] ^= True

    def _met(self, op: Op):
        """Per lane: whether it has met an operation an odd number of times."""
        return self.met.setdefault(id(op), np.zeros(self.size, bool))

    def poll(self, op: Op, I) -> None:
        """Every other poll of an mbarrier is in vain, so that a wait which does not poll again shows."""
        times = self._met(op)
        vain, rest = I[~times[I]], I[times[I]]
        self.write(op.out[0], "pred", vain, np.zeros(len(vain), bool))
        times[vain] = True
        if len(rest):
            OPERATIONS["mbar_wait"](self, op, rest)
            times[rest] = ~self.registers[op.out[0].name][rest]

    def finish(self) -> None:
        for offset, bar in self.mbars.items():
            if bar["late"]:
                line = bar["late"][0][0].line
                self.machine.races.report("asynchronous copy still on its way at the end", self, line, line,
                                          f"mbarrier at shared memory + {offset % self.smem_bytes}")  # fmt: skip
        super().finish()

    operations = OPERATIONS | {
        "choose": lambda g, op, I: g.choose(op, I), "mbar_wait": lambda g, op, I: g.poll(op, I), "batch": batch.run,
    }  # fmt: skip
