"""Which non-coherent loads a compiler may lift to kernel entry: those whose address and guard depend on nothing that
happens later, only on parameters, ids, constants and other such loads. A fixed point over all definitions."""

from .ir import Code, Op, Reg

_LATE = {"atom", "shfl", "vote", "redux", "activemask", "elect", "ldmatrix", "mma", "wgmma", "mbar_wait"}


def _reads(op: Op) -> set[str]:
    sources = [a.source for a in op.args] + [a.base for a in (op.at,) if a]
    return {s.name for s in sources if isinstance(s, Reg)} | ({op.guard[0].name} if op.guard else set())


def free_loads(code: Code) -> set[int]:
    """PTX lines of the loads."""
    ops = [op for block in code.blocks for op in block.ops]
    late: set[str] = set()
    while True:
        before = len(late)
        for op in ops:
            own = op.kind in _LATE or (op.kind == "load" and op.more["space"] != "param" and not op.more["nc"])
            if own or _reads(op) & late:
                late |= {r.name for r in op.out if r}
        if len(late) == before:
            return {op.line for op in ops if op.kind == "load" and op.more["nc"] and not _reads(op) & late}
