"""R14: accesses of shared memory that no barrier, phase or group orders, and waits that never end.

The rules of `rules` look at instructions; who meets whom in shared memory takes threads, addresses and counts. So the
skeleton of the PTX runs for all threads of one cluster, with everything loaded unknown, and a happens-before detector
watches (`equivalence.simt.onchip`, which says what it assumes). PTX only: SASS has the same barriers, and the other
rules hold what ptxas moves.
"""

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace

from .rules import ERROR, UNPROVEN, Case, Finding


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
