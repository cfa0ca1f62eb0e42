"""Ways of control in SASS that its jumps alone do not tell: convergence barriers, and calls of helpers."""

import re

from .program import Edge, Inst, Move
from .values import NUMBER

TARGET = re.compile(r"\.L_\w+|\$[\w$]+|(?<![\w+-])0x[0-9a-f]+")


def _base(inst: Inst) -> str:
    return inst.op.partition(".")[0]


def converge(insts: list[Inst], edges: list[list[Edge]], labels: dict[str, int]) -> None:
    """Send every BSYNC to the targets of the BSSYs that reach it; one that none reaches becomes a doubt."""
    opens = {i: inst.text.replace(",", " ").split() for i, inst in enumerate(insts) if _base(inst) == "BSSY"}
    closes = {i: inst.text.split()[-1] for i, inst in enumerate(insts) if _base(inst) == "BSYNC"}
    barriers = {i: next(w for w in words if re.fullmatch(r"B\d+", w)) for i, words in opens.items()}
    for i in closes:
        edges[i] = [e for e in edges[i] if insts[i].guard]
    grown = True
    while grown:
        grown = False
        for start, name in barriers.items():
            to = Edge(labels[TARGET.findall(insts[start].text)[-1]])
            seen, todo = set(), [e.to for e in edges[start]]
            while todo:
                i = todo.pop()
                if i in seen or barriers.get(i) == name:
                    continue
                seen.add(i)
                if closes.get(i) == name:
                    if to not in edges[i]:
                        edges[i].append(to)
                        grown = True
                else:
                    todo += [e.to for e in edges[i]]
    for i in closes:
        if not edges[i]:
            insts[i].doubt = "no BSSY reaches this convergence barrier"


def calls(insts: list[Inst], edges: list[list[Edge]]) -> None:
    """Step over calls of helpers (division and the like) that touch no global memory and order nothing.

    Whatever registers they write hold numbers afterwards. Any other call becomes a doubt.
    """
    for i, inst in enumerate(insts):
        if _base(inst) != "CALL" or inst.doubt:
            continue
        seen, todo = set(), [e.to for e in edges[i] if e.to != i + 1]
        while todo:
            j = todo.pop()
            if j not in seen:
                seen.add(j)
                todo += [e.to for e in edges[j]]
        if any(insts[j].access or insts[j].sync or insts[j].exits or insts[j].doubt for j in seen):
            inst.doubt = "the call is not followed"
        inst.moves = tuple(Move(r, (NUMBER,)) for r in sorted({m.into for j in seen for m in insts[j].moves}))
        inst.writes = tuple(sorted({w for j in seen for w in insts[j].writes}))
        edges[i] = [Edge(i + 1)]
