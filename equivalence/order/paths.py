"""Questions about paths: what may run before the wait, which syncs every path passes, what decides a branch."""

from collections import deque
from collections.abc import Iterable

from ..isa.program import Edge, Inst, Literal, Program, solve

Facts = frozenset[Literal]
WAITED: Facts = frozenset({("", False)})  # no path arrives without having waited


def _opposite(literal: Literal) -> Literal:
    return literal[0], not literal[1]


def _wait_step(inst: Inst, facts: Facts) -> Facts:
    if facts == WAITED:
        return facts
    if "wait" in inst.sync:
        if inst.guard is None or inst.guard in facts:
            return WAITED
        facts = facts | {_opposite(inst.guard)}
    return frozenset(f for f in facts if f[0] not in inst.writes) if inst.writes else facts


def _wait_enter(edge: Edge, facts: Facts) -> Facts:
    if edge.when is None or facts == WAITED:
        return facts
    return WAITED if _opposite(edge.when) in facts else facts | {edge.when}


def _wait_meet(a: Facts, b: Facts) -> Facts:
    return b if a == WAITED else a if b == WAITED else a & b


def before_wait(program: Program) -> set[int]:
    """The instructions that some path from the entry runs without having passed griddepcontrol.wait.

    Guards count: an instruction under a predicate that only waited threads have is not among them.
    """
    early = set()
    for i, facts in solve(program, frozenset(), _wait_step, _wait_meet, _wait_enter):
        guard = program.insts[i].guard
        if facts != WAITED and not (guard and _opposite(guard) in facts):
            early.add(i)
    return early


def reached(program: Program) -> set[int]:
    return {i for i, _ in solve(program, 0, lambda inst, s: s, lambda a, b: a)}


def syncs_before(program: Program) -> dict[int, tuple[int, ...]]:
    """For every access, the unguarded syncs (all but triggers) that every path to it passes, in program order."""
    order = [i for i, inst in enumerate(program) if inst.sync - {"trigger"} and inst.guard is None]
    bit = {id(program.insts[i]): 1 << n for n, i in enumerate(order)}
    found = {}
    for i, passed in solve(program, 0, lambda inst, s: s | bit.get(id(inst), 0), lambda a, b: a & b):
        if program.insts[i].access:
            found[i] = tuple(order[n] for n in range(len(order)) if passed >> n & 1)
    return found


def route(program: Program, to: int) -> list[tuple[int, bool]]:
    """The branches on a shortest path from the entry to `to` that passes no unguarded wait: (index, taken)."""
    came: dict[int, tuple[int, bool] | None] = {0: None}
    todo = deque([0])
    while todo and to not in came:
        i = todo.popleft()
        inst = program.insts[i]
        if "wait" in inst.sync and inst.guard is None:
            continue
        for edge in program.edges[i]:
            if edge.to not in came:
                came[edge.to] = i, edge.to != i + 1
                todo.append(edge.to)
    steps, at = [], to
    while came.get(at):
        at, taken = came[at]
        if len(program.edges[at]) > 1:
            steps.append((at, taken))
    return steps[::-1]


def ahead(program: Program, start: Iterable[int], stop=lambda inst: False) -> set[int]:
    """Every instruction on a path that goes on from `start`, up to and including those where `stop` holds."""
    seen: set[int] = set()
    todo = [e.to for i in start for e in program.edges[i]]
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            if not stop(program.insts[i]):
                todo += [e.to for e in program.edges[i]]
    return seen


def loops(program: Program) -> list[set[int]]:
    """The strongly connected sets of instructions that hold a cycle (an inner loop is part of its outer one)."""
    inverse: list[list[int]] = [[] for _ in program.insts]
    for i, out in enumerate(program.edges):
        for edge in out:
            inverse[edge.to].append(i)
    order, seen = [], set()
    for root in range(len(program.insts)):
        todo = [(root, 0)] if root not in seen else []
        seen.add(root)
        while todo:
            i, n = todo.pop()
            if n < len(program.edges[i]):
                todo.append((i, n + 1))
                to = program.edges[i][n].to
                if to not in seen:
                    seen.add(to)
                    todo.append((to, 0))
            else:
                order.append(i)
    found, taken = [], set()
    for root in reversed(order):
        group, todo = set(), [root]
        while todo:
            i = todo.pop()
            if i not in taken:
                taken.add(i)
                group.add(i)
                todo += inverse[i]
        if len(group) > 1 or any(e.to == root for e in program.edges[root]):
            found.append(group)
    return found


def decides(program: Program, guards: Iterable[str]) -> set[str]:
    """The registers whose values reach one of the given predicates (PTX: over all assignments, in any order)."""
    feeds: dict[str, set[str]] = {}
    for inst in program:
        for register in inst.writes:
            feeds.setdefault(register, set()).update(inst.reads, [inst.guard[0]] if inst.guard else [])
    found: set[str] = set()
    todo = list(guards)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += feeds.get(name, ())
    return found
