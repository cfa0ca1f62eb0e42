"""The adversary: kernels on a GPU under the worst order that the hardware allows, made likely on purpose.

The static proof says what a compiler may have moved; this shows what then happens, and it needs no source. A producer
lets its dependents start at once, stalls, and stores last. Before it, everything produced is poisoned, one tensor at a
time, and so are the outputs. In a captured graph the kernel under attack then runs up to its wait long before its
inputs exist. Right bits at the end mean that it read and stored nothing too early.

    list(run(jobs("sm_90a", batches=(1, 3, 64))))     # in child processes: a hang is a verdict

What a verdict rests on. `subjects.control` breaks the same kernel, wait below its loads; it must be caught in every run
of a stall, or that stall counts for nothing, and without any such stall the verdict is "could not judge". The right
bits come from the same kernel with nothing unfinished before it, run twice; whether they are the law's bits is
lockstep's and `crossval`'s question. n runs without a failure bound the failure rate by 1 - (1 - 0.95)^(1/n).

The other checks: `checks.replay` (a graph must follow its inputs), `checks.padding` and `checks.unowned` (NaN in rows
and slots of nobody), `checks.occupied` (a neighbour takes the SMs), and `table`, the hazard itself in five variants of
one GEMV beside the static proof of each.

What it cannot see: other targets than the GPU at hand; reads that come late enough on this GPU, in every run; a kernel
that relies on what ran two launches before it (the chain here is one producer long); races inside a kernel.
"""

from collections.abc import Iterable

from .attack import CONFIDENCE, REPEATS, STALLS_US, Hang, Verdict, rate_bound
from .watchdog import run

CHECKS = ("table", "watchdog", "kernels")


def jobs(
    target: str, batches: Iterable[int] = (1, 3, 64), only: str = "", repeats: int = REPEATS,
    stalls: Iterable[float] = STALLS_US,
) -> list[dict]:  # fmt: skip
    """A job for each form of kernel for a target at these batch sizes, whose name contains `only`."""
    from .subjects import production

    return [
        dict(part="kernel", kernel=kernel.name, batch=batch, target=target, repeats=repeats, stalls=list(stalls))
        for batch in batches
        for kernel in production(batch, target)
        if only in kernel.name
    ]


__all__ = ["CHECKS", "CONFIDENCE", "REPEATS", "STALLS_US", "Hang", "Verdict", "jobs", "rate_bound", "run"]
