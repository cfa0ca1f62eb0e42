"""The numpy back end: grids of one stream, executed a block at a time over all lanes that stand there.

Order is a choice here. "plain" runs one grid after the other. "adversarial" runs what hardware may: a grid launched
with PDL starts as soon as every CTA before it has triggered or ended, and runs ahead of it; lanes that have not waited
read memory as it was before any unfinished grid; non-coherent loads that the compiler may lift (`hoist`) read memory as
it was at kernel entry. Asynchronous copies land as late as a waiter allows, in both.
"""

from collections.abc import Sequence
from functools import cache
from itertools import takewhile

import numpy as np

from reference.stage import Role

from .arena import Arena, spans
from .grid import Grid
from .hoist import free_loads
from .ir import Code
from .native import Fault
from .operations import PARKED
from .parse import read
from .races import Races
from .translate import translate

ORDERS = ("plain", "adversarial")
WARPS = ("together", "random", "last")
FAIR = 16  # every so many steps the block not run for longest gets its turn, so that spinning ends
STEPS = 2_000_000


@cache
def code(ptx: str) -> tuple[Code, set[int]]:
    """PTX as blocks, and the PTX lines of loads that may be lifted. Raises Unsupported, Unreadable."""
    made = translate(read(ptx))
    return made, free_loads(made)


class Machine:
    """Runs launches of one stream on CPU tensors. order: of ORDERS; warps: of WARPS; races: watch happens-before.

    After `run`, `reports` holds what the detector found, and `explain()` says it in words.
    """

    def __init__(self, order: str = "plain", warps: str = "together", races: bool = False, seed: int = 0):
        if order not in ORDERS or warps not in WARPS:
            raise ValueError(
                f"order {order!r}, warps {warps!r}: allowed are {', '.join(ORDERS)} and {', '.join(WARPS)}"
            )
        self.adversarial, self.warps = order == "adversarial", warps
        self.rng = np.random.default_rng(seed)
        self.watch_races = races
        self.steps = STEPS
        self.races: Races | None = None

    @property
    def reports(self) -> list:
        return self.races.reports if self.races else []

    def run(self, launches: Sequence[tuple]) -> None:
        """launches: (kernel, ptx, tensors in the order of kernel.args), in stream order. Writes tensors in place."""
        bound = [(a, t) for k, _, tensors in launches for a, t in zip(k.args, tensors, strict=True)]
        fixed = [getattr(a, "role", None) is Role.WEIGHT for a, _ in bound]
        self.arena = Arena(
            *([t for (_, t), f in zip(bound, fixed, strict=True) if f == want] for want in (False, True))
        )
        names = [(spans([t])[0], a.name) for a, t in bound]
        self.races = Races(self, names, len(launches)) if self.watch_races else None
        self.grids = [Grid(self, i, kernel, *code(ptx), tensors) for i, (kernel, ptx, tensors) in enumerate(launches)]
        self.finish_all()

    def finish_all(self) -> None:
        """Run `grids` to their end and write their memory back. Raises Fault."""
        with np.errstate(all="ignore"):
            self._run()
        self.arena.write_back()

    def _run(self) -> None:
        first = 0
        for _ in range(self.steps):
            while first < len(self.grids) and self.grids[first].finished:
                first += 1
            if first == len(self.grids):
                return
            started = list(takewhile(lambda g: g.started or self._may_start(g), self.grids[first:]))
            for g in reversed(started) if self.adversarial else started[:1]:
                g.start()
                if not g.finished and self.step(g):
                    break
            else:
                raise Fault(f"{self.grids[first].name}: deadlock: {self.grids[first].waiting()}")
        raise Fault(f"{self.grids[first].name}: no end after {self.steps} steps: {self.grids[first].waiting()}")

    def _may_start(self, g: Grid) -> bool:
        if g.index == 0:
            return True
        before = self.grids[g.index - 1]
        if self.adversarial and g.kernel.pdl:
            return before.started and before.triggered_by_all()
        return all(b.finished for b in self.grids[: g.index])

    def step(self, g: Grid) -> bool:
        """Run one block of one grid; False if none can run."""
        g.release()
        pc = np.where(g.failed == g.events, PARKED, g.pc)
        low = pc.reshape(-1, 32).min(1)
        ready = low < PARKED
        if not ready.any():
            return False
        g.clock += 1
        fair = g.clock % FAIR == 0
        if self.warps == "last" and not fair:
            ready[: np.flatnonzero(ready)[-1]] = False
        elif self.warps == "random" and ready.sum() > 1:
            keep = self.rng.random(len(ready)) < 0.5
            ready = ready & keep if (ready & keep).any() else ready
        blocks = low[ready]
        block = int(min(np.unique(blocks), key=lambda b: g.last_run[b]) if fair else blocks.min())
        g.last_run[block] = g.clock
        lanes = np.flatnonzero((pc == block) & np.repeat(ready & (low == block), 32))
        g.execute(block, lanes)
        if g.done():
            g.finish()
        return True
