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
    guards = {inst.guard[0] for inst in program if inst.guard}

    def matters(inst: Inst) -> bool:
        return "wait" in inst.sync or not guards.isdisjoint(inst.writes)

    early = set()
    for i, facts in solve(program, frozenset(), _wait_step, _wait_meet, _wait_enter, matters=matters):
        guard = program.insts[i].guard
        if facts != WAITED and not (guard and _opposite(guard) in facts):
            early.add(i)
    return early


def reached(program: Program) -> set[int]:
    return {i for n in _onward(program, [0]) for i in program.blocks[n]}


def _onward(program: Program, blocks: Iterable[int]) -> set[int]:
    """These blocks and all that control may get to from them."""
    seen: set[int] = set()
    todo = list(blocks)
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += program.after[n]
    return seen


def syncs_before(program: Program) -> dict[int, tuple[int, ...]]:
    """For every access, the unguarded syncs (all but triggers) that every path to it passes, in program order."""
    order = [i for i, inst in enumerate(program) if inst.sync - {"trigger"} and inst.guard is None]
    bit = {id(program.insts[i]): 1 << n for n, i in enumerate(order)}

    def step(inst: Inst, passed: int) -> int:
        return passed | bit[id(inst)]

    found, tuples = {}, {}
    for i, passed in solve(program, 0, step, lambda a, b: a & b, matters=lambda inst: id(inst) in bit):
        if program.insts[i].access:
            if passed not in tuples:
                tuples[passed] = tuple(order[n] for n in range(len(order)) if passed >> n & 1)
            found[i] = tuples[passed]
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


class Reach:
    """Where control may go on from an instruction, where some instructions hold it up: sets of instructions as bits."""

    def __init__(self, program: Program, stops: int = 0):
        """stops: the instructions that control does not pass."""
        self.program, self.stops = program, stops
        onward = [self._run(block.start, block.stop) for block in program.blocks]
        self.into = [bits for bits, _ in onward]  # from the start of each block
        grown = True
        while grown:
            grown = False
            for n in range(len(onward) - 1, -1, -1):
                old = self.into[n]
                for after in program.after[n] if onward[n][1] else ():
                    self.into[n] |= self.into[after]
                grown = grown or self.into[n] != old

    def _run(self, start: int, end: int) -> tuple[int, bool]:
        """The instructions up to the first stop, and whether control passes all of them."""
        ahead = self.stops >> start & (1 << end - start) - 1
        passed = ahead & -ahead  # 0: no stop
        bits = 2 * passed - 1 if passed else (1 << end - start) - 1
        return bits << start, not passed

    def after(self, i: int) -> int:
        """Every instruction on a path that goes on from `i`, up to and including the stops."""
        n = self.program.block_of[i]
        found, passes = self._run(i + 1, self.program.blocks[n].stop)
        for after in self.program.after[n] if passes else ():
            found |= self.into[after]
        return found


def bits(indices: Iterable[int]) -> int:
    found = 0
    for i in indices:
        found |= 1 << i
    return found


def loops(program: Program) -> list[set[int]]:
    """The strongly connected sets of instructions that hold a cycle (an inner loop is part of its outer one)."""
    inverse: list[list[int]] = [[] for _ in program.blocks]
    for n, out in enumerate(program.after):
        for to in out:
            inverse[to].append(n)
    order, seen = [], set()
    for root in range(len(program.blocks)):
        todo = [(root, 0)] if root not in seen else []
        seen.add(root)
        while todo:
            n, branch = todo.pop()
            if branch < len(program.after[n]):
                todo.append((n, branch + 1))
                to = program.after[n][branch]
                if to not in seen:
                    seen.add(to)
                    todo.append((to, 0))
            else:
                order.append(n)
    found, taken = [], set()
    for root in reversed(order):
        group, todo = [], [root]
        while todo:
            n = todo.pop()
            if n not in taken:
                taken.add(n)
                group.append(n)
                todo += inverse[n]
        if len(group) > 1 or (group and root in program.after[root]):
            found.append({i for n in group for i in program.blocks[n]})
    return found


def decides(program: Program, guards: Iterable[str]) -> set[str]:
    """The registers whose values reach one of the given predicates (PTX: over all assignments, in any order)."""
    found: set[str] = set()
    todo = list(guards)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += program.feeds.get(name, ())
    return found
