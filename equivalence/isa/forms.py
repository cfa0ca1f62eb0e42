"""Instructions that differ in their registers alone are read once: a form, and the registers of each."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from .program import Access, Inst, Move, Operand


def _picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """Picks these elements of a tuple."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places) if places else lambda names: ()


class Form:
    """An instruction with stand-ins for its registers.

    Everything but registers is shared by all that are made of it; each is an `Inst` of its own, which may be changed.
    """

    __slots__ = ("access", "constants", "guard", "implies", "inst", "moves", "reads", "writes")

    def __init__(self, inst: Inst, stand_ins: Mapping[str, int]):
        """stand_ins: which of the registers handed to `fill` takes the place of a name."""
        at: dict[Operand, int] = dict(stand_ins)

        def place(operand: Operand) -> int:
            return at.setdefault(operand, len(at))

        def picker(operands: Sequence[Operand]) -> Callable[[tuple], tuple]:
            return _picker(tuple(map(place, operands)))

        self.inst, access = inst, inst.access
        self.guard = inst.guard and (place(inst.guard[0]), inst.guard[1])
        self.moves = [(place(m.into), picker(m.operands), m.either) for m in inst.moves]
        self.writes, self.reads = picker(inst.writes), picker(inst.reads)
        self.access = access and (access.kind, picker(access.address), *access[2:])
        self.implies = [[(place(name), value) for name, value in pair] for pair in inst.implies]
        self.constants = tuple(at)[len(stand_ins) :]  # values, local memory, registers that have no stand-in

    def fill(self, registers: Sequence[str], at: int, text: str, source: str = "") -> Inst:
        """The instruction of these registers."""
        like, names = self.inst, (*registers, *self.constants)
        guard, access = self.guard, self.access
        return Inst(
            at, like.op, text, source,
            guard and (names[guard[0]], guard[1]),
            tuple([Move(names[into], made(names), either) for into, made, either in self.moves]) if self.moves else (),
            self.writes(names),
            self.reads(names),
            access and Access(access[0], access[1](names), *access[2:]),
            like.sync, like.targets, like.falls, like.exits, like.loose, like.doubt, like.chip,
            tuple([tuple([(names[i], value) for i, value in pair]) for pair in self.implies]) if self.implies else (),
        )  # fmt: skip
