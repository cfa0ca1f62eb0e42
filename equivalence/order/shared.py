"""R14: accesses of shared memory that no barrier, phase or group orders, and waits that never end.

The rules of `rules` look at instructions; who meets whom in shared memory takes threads, addresses and counts. So the
skeleton of the PTX runs for all threads of one cluster, with everything loaded unknown, and a happens-before detector
watches (`equivalence.simt.onchip`, which says what it assumes). PTX only: SASS has the same barriers, and the other
rules hold what ptxas moves.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from math import prod
from types import SimpleNamespace

from .rules import ERROR, UNPROVEN, Case, Finding


def protocols(kernels: Iterable) -> list:
    """The cheapest kernel of each way to use shared memory: of each entry function, with one warp or several, one CTA
    or a cluster, and each setting of the switches (bool) in its constants. Others differ in sizes and counts."""
    cheapest: dict[tuple, tuple[int, object]] = {}
    for k in kernels:
        peers = prod(k.cluster or (1,))
        key = k.entry, prod(k.block) > 32, peers > 1, tuple(map(_switches, k.constants))
        cost = prod(k.block) * peers * max(prod(a.shape) for a in k.args)
        if key not in cheapest or cost < cheapest[key][0]:
            cheapest[key] = cost, k
    return [k for _, k in cheapest.values()]


def _switches(constant) -> tuple:
    if is_dataclass(constant):
        return tuple(v for f in fields(constant) if isinstance(v := getattr(constant, f.name), bool))
    return (constant,) if isinstance(constant, bool) else ()


def unordered(case: Case, ptx: str) -> Iterator[Finding]:
    """The findings for one kernel. ptx: its text, without the names of kernel and target."""
    from equivalence.simt import Unsupported

    k = case.kernel
    try:
        found = _found(ptx, tuple(k.grid), tuple(k.block), k.cluster and tuple(k.cluster), k.smem)
    except Unsupported as error:
        yield case.finding("R14", UNPROVEN, case.ptx, None, (), str(error))
        return
    lines = {inst.at: i for i, inst in enumerate(case.ptx.program.insts)}
    for one in found:
        severity = UNPROVEN if one.kind == "doubt" else ERROR
        yield case.finding("R14", severity, case.ptx, lines.get(one.line), (), one.text)


@lru_cache(maxsize=64)
def _found(ptx: str, grid, block, cluster, smem: int):
    from equivalence.simt.onchip import found

    return found(SimpleNamespace(name="kernel", grid=grid, block=block, cluster=cluster, smem=smem), ptx)
