"""`k3 order`: the static order proof over the kernels of fast/."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out

SCOPES = ("forms", "batch1", "all")
JOBS = 16  # processes; with more, their start costs more than they save


@dataclass
class Result:
    """chains: findings over the kernels of whole steps; None where not all of their kernels were proved."""

    reports: list
    chains: list | None = None

    @property
    def exit_code(self) -> int:
        verdicts = {r.verdict for r in self.reports} | ({"findings"} if self.chains else set())
        return DISAGREEMENT if "findings" in verdicts else UNJUDGED if "unproven" in verdicts or not verdicts else EQUAL

    def as_dict(self) -> dict:
        chains = None if self.chains is None else [asdict(f) for f in self.chains]
        return dict(verdict=self.exit_code, reports=[r.as_dict() for r in self.reports], chains=chains)


def run(kernel: str, targets: list[str], scope: str, fresh: bool = False) -> Result:
    """Compile and check; prints one line per finding and a summary.

    scope: "forms" (one kernel of each form), "batch1" (also every kernel of a single request) or "all" (every batch
    size from 1 to 64). The last two also follow the chain of kernels through whole steps; of batch sizes that run the
    same code through one. kernel: part of the names wanted; a part has no chains. fresh: compile everything now,
    whatever the cache of builds holds. Otherwise the cache is used, here alone: call this from no process that has
    patched fast/.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r}: allowed are {', '.join(SCOPES)}")
    jobs, many = min(os.cpu_count() or 1, JOBS), scope != "forms" and not kernel
    # Where it is worth it, the other processes start while this one imports and picks the kernels.
    with console.status("proving kernels"), _workers(jobs - 1) if many and jobs > 1 else nullcontext() as pool:
        return _proved(kernel, targets, scope, fresh, jobs, pool)


def _proved(kernel: str, targets: list[str], scope: str, fresh: bool, jobs: int, pool) -> Result:
    from equivalence.order.chain import check_steps
    from equivalence.order.check import TARGETS, prove
    from equivalence.order.collector import seldom_collected
    from fast import BATCHES, apart

    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r}: allowed are {', '.join(TARGETS)}")
    with seldom_collected():
        kernels, every = _chosen(kernel, scope)
    proof = prove(kernels, targets or TARGETS, jobs, fresh, pool)
    reports = proof.reports
    for report in reports:
        if report.findings:
            out.print("\n".join(report.lines()), markup=False)
    proved, codes = sum(r.verdict == "proved" for r in reports), len({k.code for k in kernels})
    about = f"{len(kernels)} of {every} kernels with {codes} codes x {len(targets or TARGETS)} targets"
    made = f"{proof.compiled} compiled now, {proof.kept} from the cache of builds"
    out.print(f"order: {proved} of {len(reports)} proved ({about}; {made})")
    if scope == "forms" or kernel:
        return Result(reports)
    batches = (1,) if scope == "batch1" else BATCHES
    steps, chains = check_steps(apart(batches), targets or TARGETS, reports)
    told = f"chains: {len(chains)} findings in {steps} decode steps, one for all batch sizes that run the same code"
    out.print("\n".join([*map(str, chains), told]), markup=False)
    return Result(reports, chains)


@contextmanager
def _workers(count: int) -> Iterator[Executor]:
    """Processes that start at once, and import what a proof needs."""
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for _ in range(count):
            pool.submit(_ready)
        yield pool


def _ready() -> None:
    import_module("equivalence.order.check")


def _chosen(kernel: str, scope: str) -> tuple[list, int]:
    """The kernels of a scope whose names contain `kernel`, and how many there are of all."""
    from fast import forms, production_kernels

    every = production_kernels()
    chosen = every if scope == "all" else forms(every)
    if scope == "batch1":
        chosen = list(dict.fromkeys([*production_kernels((1,)), *chosen]))
    kernels = [k for k in chosen if kernel in k.name]
    if not kernels:
        raise ValueError(f"no kernel name contains {kernel!r}")
    return kernels, len(every)
