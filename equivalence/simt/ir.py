"""What both back ends emit: blocks of operations with typed sources and destinations."""

from dataclasses import dataclass, field

from .parse import Listing


@dataclass(frozen=True)
class Reg:
    name: str  # as an identifier
    width: int  # bits; 1 for a predicate


@dataclass(frozen=True)
class Const:
    bits: int


@dataclass(frozen=True)
class Special:
    name: str  # of SPECIALS' values


@dataclass(frozen=True)
class Shared:
    """Address of a variable in the executing CTA's shared memory."""

    offset: int


Source = Reg | Const | Special | Shared


@dataclass(frozen=True)
class Read:
    """A source and the type it is read as."""

    source: Source
    type: str


@dataclass(frozen=True)
class Address:
    base: Source
    offset: int


@dataclass(frozen=True)
class Op:
    """One operation. kind says which fields of `more` there are; out: destinations (None: dropped) of type `result`."""

    kind: str
    line: int
    text: str
    guard: tuple[Reg, bool] | None = None
    out: tuple[Reg | None, ...] = ()
    result: str = ""
    args: tuple[Read, ...] = ()
    at: Address | None = None
    more: dict = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Block:
    """ops, and where lanes go after them: a conditional jump in the last op, else on to `next` (None: they end)."""

    ops: tuple[Op, ...]
    next: int | None


@dataclass(frozen=True)
class Code:
    listing: Listing
    registers: tuple[Reg, ...]
    blocks: tuple[Block, ...]
