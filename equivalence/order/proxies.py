"""R11: what threads access in shared memory the usual way, and what the asynchronous proxy reads or overwrites there.

Bulk copies, wgmma and tcgen05 reach shared memory through a proxy of their own. No barrier orders an ordinary store
before them: on the way from one to the other stands a fence.proxy.async, of the thread that stored or of one that has
learnt of the store. The same holds for the set-up of an mbarrier that a copy or a peer signals, which
fence.mbarrier_init publishes too, and for a load of what a copy overwrites: the load may still be under way when its
thread arrives at the mbarrier that frees the memory, and on an H200 copies did overtake it. In the other direction,
what the proxy reads may be overwritten once its thread has waited for the group (in PTX; SASS counts these groups on
scoreboards that are not followed, and how many groups a wait leaves open is not followed either).

A way leads along one thread, or from a store to a barrier, an mbarrier's arrival or the cluster's barrier, and on from
where another thread passes it. Which part of shared memory an instruction touches is not followed: a store and a copy
that never meet, on a way without a fence, are a false alarm.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..isa.values import on_chip, parameters
from .paths import Reach, bits
from .rules import ERROR, Case, Finding, View

BARRIERS = {"barrier": "barrier", "cluster arrive": "cluster wait"}  # what publishes: what acquires
ARRIVALS = BARRIERS | {"arrive": "wait"}


@dataclass(frozen=True)
class Crossing:
    """What one thread does, what must not follow without `between`, and what happens else.

    passes: the ways to other threads. levels: where `between` is seen; SASS has no image of fence.mbarrier_init.
    """

    first: str
    then: tuple[str, ...]
    between: tuple[str, ...]
    missing: str
    passes: dict[str, str]
    levels: tuple[str, ...] = ("PTX",)


CROSSINGS = (
    Crossing(
        "write", ("read", "overwrite"), ("fence",),
        "without a proxy fence between: the asynchronous proxy may not see what was stored", ARRIVALS, ("PTX", "SASS"),
    ),
    Crossing(
        "look", ("overwrite",), ("fence",),
        "without a proxy fence between: the copy may overtake the load", ARRIVALS, ("PTX", "SASS"),
    ),
    Crossing(
        "init", ("overwrite", "remote"), ("fence", "init fence"),
        "without a fence between: the barrier may be signalled before it is set up", BARRIERS,
    ),
    Crossing(
        "read", ("write", "overwrite"), ("drained",),
        "without a wait for the group between: what is overwritten may still be read", ARRIVALS,
    ),
)  # fmt: skip


def crossings(case: Case) -> Iterator[Finding]:
    """R11: between an ordinary access of shared memory and an asynchronous one stands a fence."""
    for view in case.views:
        if crossings not in view.memo:
            view.memo[crossings] = list(_unfenced(view))
        for u, text in view.memo[crossings]:
            yield case.finding("R11", ERROR, view, u, parameters(view.values.get(u, frozenset())), text)


def _does(view: View, i: int) -> str:
    """Inst.chip, and the same of loads and stores through a generic address of shared memory."""
    inst = view.program.insts[i]
    if inst.chip or not inst.access or not any(map(on_chip, view.values.get(i, ()))):
        return inst.chip
    return {"store": "write", "atomic": "write", "load": "look"}.get(inst.access.kind, "")


def _unfenced(view: View) -> Iterator[tuple[int, str]]:
    """Instructions that may follow too early, and what is wrong."""
    done: dict[str, list[int]] = {}
    for i in sorted(view.reached):
        done.setdefault(_does(view, i), []).append(i)
    free = Reach(view.program)
    for crossing in CROSSINGS:
        later = [i for name in crossing.then for i in done.get(name, ())]
        if view.program.level in crossing.levels and later:
            yield from _crossed(view, done, crossing, later, free)


def _crossed(view: View, done: dict, crossing: Crossing, later: list[int], free: Reach) -> Iterator[tuple[int, str]]:
    program, insts = view.program, view.program.insts
    between = [i for i, inst in enumerate(insts) if inst.chip in crossing.between]

    @cache
    def under(guard) -> Reach:
        """Where threads get without what must stand between; they pass it if it is for all, or under their guard."""
        return Reach(program, bits(i for i in between if insts[i].guard in (None, guard)))

    def beyond(start: int, guard=None) -> int:
        reach = under(guard)
        return reach.after(start) & ~reach.stops

    anywhere = cache(free.after)
    pairs = [(p, q) for a, b in crossing.passes.items() for p in done.get(a, ()) for q in done.get(b, ())]
    # q is never over before p
    pairs = [(p, q) for p, q in pairs if p == q or not anywhere(q) >> p & 1 or anywhere(p) >> q & 1]
    acquired = {q: beyond(q) for q in dict.fromkeys(q for _, q in pairs)}
    told: set[int] = set()
    for i in done.get(crossing.first, ()):
        seen = beyond(i, insts[i].guard)
        passed = [(p, acquired[q]) for p, q in pairs if seen >> p & 1]
        for u in (u for u in later if u not in told):
            way = next((p for p, others in passed if others >> u & 1), None)
            if seen >> u & 1 or way is not None:
                told.add(u)
                by = "" if seen >> u & 1 else f" by way of {program.where(insts[way])}"
                yield u, f"{insts[u].op} after {insts[i].op} at {program.where(insts[i])}{by}, {crossing.missing}"
