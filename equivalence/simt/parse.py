"""PTX to a Listing: statements whose registers have unique names and types, with jumps resolved to statements.

The reader is the order checker's; this one keeps what executing needs besides: operands, register types, parameters
and shared variables.
"""

import re
from dataclasses import dataclass, field
from functools import partial

from equivalence.isa import ptx
from equivalence.isa.program import Unreadable

from .forms import Form, form

_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bsuf])(\d+)\s+([\w$]+)\s*(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*;")
RESERVED = 1024  # bytes at the start of a CTA's shared memory that belong to the system (compute capability 9 and up)


class Unsupported(NotImplementedError):
    """An instruction or operand that the interpreter does not execute. The message names it and its PTX line."""


@dataclass(frozen=True)
class Statement:
    """One instruction. operands: texts, with registers by their unique names. target: index it may jump to."""

    line: int
    op: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    target: int | None

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")

    def unsupported(self, why: str = "not executed by the interpreter") -> Unsupported:
        return Unsupported(f"PTX line {self.line}: {self.op} {', '.join(self.operands)}: {why}")


@dataclass(slots=True)
class Line:
    """One instruction as its form and its registers, by their unique names. at: PTX line. targets: labels it may jump
    to; target: index of the instruction there."""

    at: int
    text: str
    form: Form
    registers: tuple[str, ...]
    targets: tuple[str, ...] = ()
    target: int | None = None

    def statement(self) -> Statement:
        operands, guard = self.form.named(self.registers)
        return Statement(self.at, self.form.op, operands, guard, self.target)


@dataclass
class Listing:
    """One kernel. registers: name -> type as declared. params: name -> byte offset. shared: name -> byte address.

    dynamic: address of the dynamic shared memory, after the static variables. block: threads per axis if stated.
    """

    symbol: str
    target: str
    lines: list[Line]
    registers: dict[str, str]
    params: dict[str, int]
    shared: dict[str, int]
    dynamic: int
    block: tuple[int, int, int] | None
    labels: set[int] = field(default_factory=set)


class _Reader(ptx.Reader):
    """places: address and byte offset by the names of shared variables and parameters, where it is one."""

    def __init__(self, places: dict[str, tuple[int | None, int | None]], *arguments):
        super().__init__(*arguments)
        self.places = places

    def instruction(self, text: str, line: int) -> Line:
        guard, op, rest = ptx.parted(text)
        pieces, numbers, known, places = ptx.NAMES.split(guard + rest), {}, self.scopes[-1].known, ()
        for i in range(1, len(pieces), 2):
            name = pieces[i]
            if name not in known:
                known[name] = self.operand(name)
            if (found := known[name]).__class__ is str:
                pieces[i] = numbers.setdefault(found, len(numbers))
            elif name in self.places:
                places += ((name, *self.places[name]),)
        made = form(op, bool(guard), tuple(pieces), tuple([self.types[n] for n in numbers]), places)
        inst = Line(line, text, made, tuple(numbers))
        self.jump(inst, op, rest)
        return inst


def read(text: str, symbol: str | None = None) -> Listing:
    """Read `.entry symbol` (None: the only one). Raises Unreadable for text that is not PTX or breaks off."""
    symbols = re.findall(r"\.entry\s+([\w$]+)", text)
    if symbol is None and len(symbols) != 1:
        raise Unreadable(f"the PTX has {len(symbols)} entries; allowed is 1 unless a symbol is named")
    symbol = symbol or symbols[0]
    head = text[: re.search(rf"\.entry\s+{re.escape(symbol)}\s*\(", text).end()]
    after = text[len(head) :]
    params, shared, dynamic = _params(after[: after.index(")")]), *_shared(text)
    places = {name: (shared.get(name), params.get(name)) for name in shared | params}
    reader = ptx.scan(text, symbol, partial(_Reader, places))
    labels = set()
    for line in reader.insts:
        if len(line.targets) > 1:
            raise Unsupported(f"PTX line {line.at}: {line.text}: jumps through a table are not executed")
        for label in line.targets:
            if label not in reader.labels:
                raise Unreadable(f"PTX line {line.at}: {line.text!r} jumps to {label}, which is not in this function")
            line.target = reader.labels[label]
            labels.add(line.target)
    m = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", after)
    block = tuple(int(n or 1) for n in m.groups()) if m else None
    target = re.search(r"\.target\s+(\w+)", text)
    return Listing(
        symbol, target[1] if target else "", reader.insts, reader.types, params, shared, dynamic, block, labels
    )


def _params(text: str) -> dict[str, int]:
    params, at = {}, 0
    for align, _, bits, name, count in _PARAM.findall(text):
        size = int(bits) // 8
        at = -(-at // int(align or size)) * int(align or size)
        params[name] = at
        at += size * int(count or 1)
    return params


def _shared(text: str) -> tuple[dict[str, int], int]:
    shared, at, extern = {}, RESERVED, []
    for align, bits, name, count in _SHARED.findall(text):
        wide = int(align or int(bits) // 8)
        if count == "":
            extern.append((name, wide))
            continue
        at = -(-at // wide) * wide
        shared[name] = at
        at += int(bits) // 8 * int(count)
    at = -(-at // max([16, *(wide for _, wide in extern)])) * max([16, *(wide for _, wide in extern)])
    shared.update({name: at for name, _ in extern})
    return shared, at
