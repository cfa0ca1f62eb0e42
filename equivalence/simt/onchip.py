"""Accesses of shared memory that nothing orders, found from a kernel's text alone: one cluster, whatever the data.

The skeleton of a kernel (`skeleton`) runs in the numpy back end under the race detector, once for each way that its
conditions on data can fall. What is loaded is unknown, so nothing about values is assumed but this: a location that all
threads of a CTA read with plain loads holds one value for them. A condition that is met again falls the other way each
time; where a loop with accesses or barriers meets one, that is not enough, and it is a doubt. Barriers, phases, byte
counts and parities are those of the text; every other poll of an mbarrier is in vain.

    found(kernel, ptx) -> [Found(kind, line, text)]

Where anything depends on the CTA's number, the first and the last cluster stand for all. One schedule stands for all
schedules: happens-before does not depend on it, but a phase that can pass twice before a slow thread looks does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import torch

from .arena import Arena
from .grid import Grid
from .ir import Op, Special
from .machine import Machine, code
from .native import Fault
from .operations import OPERATIONS
from .races import Races
from .skeleton import COMPUTED, Skeleton, skeleton

STEPS = 20_000  # of the machine; the longest of our kernels takes 6,000
CHOICES = 4  # conditions on data that are tried in all combinations; a kernel with more is doubtful
WARPS = "together"  # of the machine: every mutant that is found is found by each schedule alone


@dataclass(frozen=True)
class Found:
    """kind: "race", "stuck" or "doubt". line: of PTX."""

    kind: str
    line: int
    text: str


def found(kernel, ptx: str) -> list[Found]:
    """Everything wrong with, or unknown about, the order of a kernel's accesses to shared memory.

    kernel: grid, block, cluster, smem and name count. Raises Unsupported for PTX that the interpreter does not run.
    """
    bones = skeleton(code(ptx)[0], prod(kernel.cluster or (1,)) > 1)
    if bones.doubts:
        return [Found("doubt", d.line, d.text) for d in bones.doubts]
    out = [Found("doubt", d.line, d.text) for d in bones.unsure]
    if len(bones.choices) > CHOICES:
        out.append(Found("doubt", 0, f"{len(bones.choices)} conditions depend on data; {CHOICES} are tried"))
        return out
    if not _touches(bones):
        return out
    told: dict[tuple[str, int], Found] = {}
    for cluster in _clusters(kernel, bones):
        for falls in product((True, False), repeat=len(bones.choices)):
            for one in _run(kernel, bones, cluster, dict(zip(bones.choices, falls, strict=True))):
                told.setdefault((one.kind, one.line), one)
                if one.kind == "doubt":
                    return out + list(told.values())  # a run that was cut off is long; the others may be, too
    return out + list(told.values())


def _ops(bones: Skeleton) -> Iterator[Op]:
    return (op for block in bones.code.blocks for op in block.ops)


def _touches(bones: Skeleton) -> bool:
    """Whether there is shared memory, or a barrier that threads could hang in."""
    return any(op.kind not in COMPUTED | {"jump", "exit", "trap", "pdl", "choose", "warp_sync"} for op in _ops(bones))


def _clusters(kernel, bones: Skeleton) -> list[int]:
    sources = [a.source for op in _ops(bones) for a in op.args]
    if not any(isinstance(s, Special) and s.name.startswith("ctaid") for s in sources):
        return [0]
    count = prod(kernel.grid) // prod(kernel.cluster or (1,))
    return sorted({0, count - 1})


def _run(kernel, bones: Skeleton, cluster: int, falls: dict[str, bool]) -> Iterator[Found]:
    one = SimpleNamespace(name=kernel.name, grid=kernel.cluster or (1, 1, 1), block=kernel.block,
                          cluster=kernel.cluster, smem=kernel.smem, pdl=False)  # fmt: skip
    machine = Machine("plain", WARPS, races=True)
    tensors = [torch.empty(16, dtype=torch.uint8) for _ in bones.code.listing.params]
    machine.arena = Arena(tensors)
    machine.races = _OnChip(machine, [], 1)
    machine.grids = [_Cluster(machine, one, bones, tensors, kernel.grid, cluster, falls)]
    machine.steps = STEPS
    try:
        with np.errstate(all="ignore"):
            machine.finish_all()
    except Fault as error:
        yield Found("doubt" if "no end after" in str(error) else "stuck", machine.grids[0].line, str(error))
    for race in machine.races.reports:
        yield Found("race", race.second[1], f"{race.kind}, first at PTX line {race.first[1]}")


class _OnChip(Races):
    """Global memory is not watched here."""

    def copied(self, g, op, I, offsets, n, write, space, proxy) -> None:
        if space == "shared":
            super().copied(g, op, I, offsets, n, write, space, proxy)


class _Cluster(Grid):
    def __init__(self, machine, kernel, bones: Skeleton, tensors, grid, cluster: int, falls: dict[str, bool]):
        super().__init__(machine, 0, kernel, bones.code, set(), tensors)
        self.full, self.which, self.falls = np.array(grid, np.uint32), cluster, falls

    def start(self) -> None:
        begun = self.started
        super().start()
        if begun:
            return
        self.met: dict[int, np.ndarray] = {}
        size = np.array(self.kernel.cluster or (1, 1, 1), np.uint32)
        clusters = self.full // size
        for i, axis in enumerate("xyz"):
            at = self.which // int(clusters[:i].prod()) % int(clusters[i])
            self.special[f"ctaid_{axis}"] += np.uint32(at) * size[i]
            self.special[f"nctaid_{axis}"][:] = self.full[i]

    def global_at(self, op: Op, I, a, size: int):
        return np.zeros(len(I), np.int64)

    def load_global(self, op: Op, I, offsets, n: int):
        return np.zeros((len(I), n), np.uint8)

    def store_global(self, I, offsets, data) -> None:
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

    operations = OPERATIONS | {"choose": lambda g, op, I: g.choose(op, I), "mbar_wait": lambda g, op, I: g.poll(op, I)}
