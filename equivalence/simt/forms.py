"""Statements of PTX that differ in registers, line and label alone are translated once: a form, and how to fill it."""

import re
from collections.abc import Sequence
from functools import lru_cache

from equivalence.isa import ptx

# A stand-in for a register, by the order of first appearance. No name in PTX has an @.
_STAND_IN = re.compile(r"%@(\d+)")


class Form:
    """An instruction with stand-ins for its registers.

    op, operands, guard: as of a Statement. kinds: of the registers, as declared. variables: address of each shared
    variable that it names; parameters: likewise their byte offsets. `translate` sets the rest. tried: whether it has;
    made: its operations, None where it cannot be translated; ends: one of them ends a block; jumps: it is a jump.
    """

    def __init__(
        self, op: str, operands: tuple[str, ...], guard: tuple[str, bool] | None, kinds, variables, parameters
    ):
        self.op, self.operands, self.guard = op, operands, guard
        self.registers = {f"%@{i}": kind for i, kind in enumerate(kinds)}
        self.variables, self.parameters = variables, parameters
        self.tried, self.made, self.ends, self.jumps = False, None, False, False
        text = f"{op} {', '.join(operands)}"
        self.pattern = "%s".join(t.replace("%", "%%") for t in _STAND_IN.split(text)[::2])
        self.order = [int(i) for i in _STAND_IN.findall(text)]

    def text(self, names: Sequence[str]) -> str:
        """The instruction with these registers, without its guard."""
        return self.pattern % tuple([names[i] for i in self.order])

    def named(self, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, bool] | None]:
        """The operands and the guard with these registers."""

        def real(text: str) -> str:
            return _STAND_IN.sub(lambda m: names[int(m[1])], text)

        return tuple(map(real, self.operands)), self.guard and (real(self.guard[0]), self.guard[1])


@lru_cache(1 << 15)
def form(op: str, guarded: bool, pieces: tuple, kinds: tuple[str, ...], places: tuple) -> Form:
    """pieces: the guard and the operands; every second one a name: text, or the number of a register. kinds: of those.
    places: (name, address or None, offset or None) of the shared variables and parameters among the names.

    Raises IndexError or StopIteration for what the order checker cannot read either.
    """
    ptx.form(op, guarded, tuple(None if isinstance(p, int) else p for p in pieces))
    texts, guard = [f"%@{p}" if isinstance(p, int) else p for p in pieces], None
    if guarded:
        guard, texts = (texts[1], "!" not in texts[0]), texts[2:]
    variables = {name: at for name, at, _ in places if at is not None}
    parameters = {name: at for name, _, at in places if at is not None}
    return Form(op, tuple(ptx.split("".join(texts))), guard, kinds, variables, parameters)
