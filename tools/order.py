"""`k3 order`: the static order proof over the kernels of fast/."""

import os
from contextlib import nullcontext
from dataclasses import asdict, dataclass

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out

SCOPES = ("forms", "batch1", "all")
SHARED = ("protocols", "forms", "all")
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


def run(kernel: str, targets: list[str], scope: str, fresh: bool = False, shared: str = "") -> Result:
    """Compile and check; prints one line per finding and a summary.

    scope: "forms" (one kernel of each form), "batch1" (also every kernel of a single request) or "all" (every batch
    size of `fast.BATCHES`). The last two also follow the chain of kernels through whole steps. kernel: part of the
    names wanted; a part has no chains. fresh: compile everything now, whatever the cache of builds holds. Otherwise the
    cache is used, here alone: call this from no process that has patched fast/. shared: whose shared memory is followed
    (R14): one kernel of each protocol, one of each form, or all; all of a part, if not said.
    """
    from equivalence.order.chain import check_steps
    from equivalence.order.check import TARGETS, prove, workers
    from equivalence.order.collector import seldom_collected
    from fast import BATCHES

    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        raise ValueError(f"target {unknown[0]!r}: allowed are {', '.join(TARGETS)}")
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r}: allowed are {', '.join(SCOPES)}")
    if shared and shared not in SHARED:
        raise ValueError(f"shared {shared!r}: allowed are {', '.join(SHARED)}")
    many = scope != "forms" and not kernel
    jobs = min(os.cpu_count() or 1, JOBS)
    # Where it is worth it, the other processes start while this one picks the kernels.
    with console.status("proving kernels"), workers(jobs) if many else nullcontext() as pool:
        with seldom_collected():
            kernels, every = _chosen(kernel, scope)
        followed = _followed(kernels, shared or ("all" if kernel else "protocols"))
        proof = prove(kernels, targets or TARGETS, jobs, fresh, pool, followed)
    reports = proof.reports
    for report in reports:
        if report.findings:
            out.print("\n".join(report.lines()), markup=False)
    proved, codes = sum(r.verdict == "proved" for r in reports), len({k.code for k in kernels})
    about = f"{len(kernels)} of {every} kernels with {codes} codes x {len(targets or TARGETS)} targets"
    made = f"{proof.compiled} compiled now, {proof.kept} from the cache of builds"
    out.print(f"order: {proved} of {len(reports)} proved ({about}; {made})")
    out.print(f"shared memory: followed in {len({k.code for k in followed})} of {codes} codes")
    if not many:
        return Result(reports)
    steps, chains = check_steps((1,) if scope == "batch1" else BATCHES, targets or TARGETS, reports)
    out.print("\n".join([*map(str, chains), f"chains: {len(chains)} findings in {steps} decode steps"]), markup=False)
    return Result(reports, chains)


def _followed(kernels: list, shared: str) -> list:
    from equivalence.order.shared import protocols
    from fast import forms

    return {"protocols": protocols, "forms": forms, "all": list}[shared](kernels)


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
