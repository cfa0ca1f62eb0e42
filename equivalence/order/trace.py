"""Follow addresses from kernel parameters through registers, to a fixed point."""

from collections import ChainMap
from collections.abc import Iterator, Mapping

from ..isa.program import LOAD, LOCAL_MEMORY, Edge, Inst, Literal, Move, Operand, Program, solve
from ..isa.values import UNKNOWN, UNSET, Value, join, loaded, merge, origin

NOTHING = origin(UNKNOWN)  # what a register holds that no instruction on the way has set


def addresses(program: Program) -> dict[int, Value]:
    """The value of the address of every access, by index of the instruction."""
    find = _in_order if program.ordered else _by_name
    return dict(find(program))


def _read(registers: Mapping[str, Value], operands: tuple[Operand, ...]) -> Value:
    value = None
    for operand in operands:
        one = operand if operand.__class__ is frozenset else registers.get(operand, NOTHING)
        value = one if value is None else merge(value, one)
    return NOTHING if value is None else value


def _moved(registers: Mapping[str, Value], inst: Inst, move: Move) -> Value:
    if LOAD in move.operands:
        return loaded(_read(registers, inst.access.address))
    if move.either:
        value = UNSET
        for operand in move.operands:
            value = join(value, _read(registers, (operand,)))
        return value
    return _read(registers, move.operands)


def _by_name(program: Program) -> Iterator[tuple[int, Value]]:
    """One value per register, the union over all its assignments."""
    moves = [(inst, move, move.into) for inst in program for move in inst.moves]
    registers = {into: UNSET for _, _, into in moves}
    grown = True
    while grown:
        grown = False
        for inst, move, into in moves:
            old = registers[into]
            new = join(old, _moved(registers, inst, move))
            if new != old:
                registers[into] = new
                grown = True
    for i, inst in enumerate(program):
        if inst.access:
            yield i, _read(registers, inst.access.address)


class _State:
    """Registers at one point. `under` holds what a register is if a predicate has the given value, `implied` which
    literals follow from a lane's own (after a vote).

    Without `under`, a register that is written and read under one guard would also be read as what it held before,
    and nearly every predicated load would look untraceable.
    """

    __slots__ = ("implied", "registers", "under")

    def __init__(self, registers: dict[str, Value], under: dict[Literal, dict[str, Value]], implied: frozenset):
        self.registers, self.under, self.implied = registers, under, implied

    def __eq__(self, other) -> bool:
        return (self.registers, self.under, self.implied) == (other.registers, other.under, other.implied)

    __hash__ = None

    def copy(self) -> "_State":
        return _State(dict(self.registers), {k: dict(v) for k, v in self.under.items()}, self.implied)

    def special(self, guard: Literal) -> list[dict[str, Value]]:
        """What registers are where this guard holds, as far as it matters; the last that has a register counts."""
        literals = [then for if_, then in self.implied if if_ == guard] if self.implied else []
        return [self.under[known] for known in (*literals, guard) if known in self.under]

    def seen(self, guard: Literal | None) -> Mapping[str, Value]:
        """The registers as an instruction under this guard reads them."""
        special = self.special(guard) if guard and self.under else []
        return ChainMap(*reversed(special), self.registers) if special else self.registers

    def write(self, name: str, value: Value, guard: Literal | None, special: dict[Literal, Value]) -> None:
        """special: what an unguarded write makes of the register where a predicate is known."""
        if guard is None:
            self.registers[name] = value
            for held in self.under.values():
                held.pop(name, None)
            for literal, other in special.items():
                if other != value:
                    self.under[literal][name] = other
            return
        opposite = guard[0], not guard[1]
        kept = self.under.get(opposite, {}).get(name, self.registers.get(name, UNSET))
        self.under.setdefault(guard, {})[name] = value
        self.under.setdefault(opposite, {})[name] = kept
        self.registers[name] = join(value, kept)

    def forget(self, predicate: str) -> None:
        self.under.pop((predicate, True), None)
        self.under.pop((predicate, False), None)
        self.implied = frozenset(i for i in self.implied if predicate not in (i[0][0], i[1][0]))


def _step(inst: Inst, state: _State) -> _State:
    """Changes the state in place."""
    if inst.guard is None and not state.under:  # nearly always
        registers = state.registers
        registers.update([(move.into, _moved(registers, inst, move)) for move in inst.moves])
        return _known(inst, state) if state.implied or inst.implies else state
    seen = state.seen(inst.guard)
    made = [(move.into, _moved(seen, inst, move), _specially(state, inst, move)) for move in inst.moves]
    for name, value, special in made:
        state.write(name, value, inst.guard, special)
    return _known(inst, state)


def _known(inst: Inst, state: _State) -> _State:
    """What is known of predicates after an instruction. Changes the state in place."""
    for name in inst.writes:
        state.forget(name)
    if inst.implies and (inst.moves or inst.writes):
        state.implied |= frozenset(inst.implies)
    return state


def _specially(state: _State, inst: Inst, move: Move) -> dict[Literal, Value]:
    """What an unguarded move yields where a predicate is known, if an operand is special there."""
    if inst.guard is not None or not state.under:
        return {}
    operands = inst.access.address if LOAD in move.operands else move.operands
    names = [o for o in operands if isinstance(o, str)]
    found = {}
    for literal in state.under if names else ():
        if any(name in held for held in state.special(literal) for name in names):
            found[literal] = _moved(state.seen(literal), inst, move)
    return found


def _enter(edge: Edge, state: _State) -> _State:
    special = state.under.get(edge.when)
    return _State({**state.registers, **special}, state.under, state.implied) if special else state


def _meet(a: _State, b: _State) -> _State:
    registers = dict(a.registers)
    for name, value in b.registers.items():
        registers[name] = join(registers[name], value) if name in registers else value
    under = {}
    for guard in a.under.keys() & b.under.keys():
        left, right = a.under[guard], b.under[guard]
        both = {n: join(left[n], right[n]) for n in left.keys() & right.keys()}
        if both:
            under[guard] = both
    return _State(registers, under, a.implied & b.implied)


def _in_order(program: Program) -> Iterator[tuple[int, Value]]:
    """Registers followed in execution order, for code that reuses them."""
    start = _State({LOCAL_MEMORY: UNSET}, {}, frozenset())
    for i, state in solve(program, start, _step, _meet, _enter, _State.copy, lambda inst: inst.moves or inst.writes):
        inst = program.insts[i]
        if inst.access:
            yield i, _read(state.seen(inst.guard), inst.access.address)
