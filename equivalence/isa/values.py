"""What a register may hold, as far as addresses are concerned.

A value is a set of alternatives; an alternative is the set of origins that were added up to make it. A load of
`table + 4 * i` has the one alternative {parameter of table}; an address picked by a select has two. Origins:

    k >= 0          the pointer in kernel parameter k
    FIRST_LOADED-k  data read through parameter k
    SHARED, LOCAL   an address of shared or local memory
    LOADED          data read from shared memory or through an address of unknown origin
    UNKNOWN         whatever an instruction that is not understood made, or nothing at all

Numbers have no origin. Adding a loaded number to a pointer gives that pointer, so an alternative that holds a
parameter forgets the rest; an alternative without any parameter is an address that cannot be traced.
"""

from collections.abc import Callable
from functools import lru_cache

Value = frozenset[frozenset[int]]

SHARED, LOCAL, LOADED, UNKNOWN, FIRST_LOADED = -1, -2, -3, -4, -5
MAX_ALTERNATIVES = 32  # beyond this the value is UNKNOWN, which is never a pass

UNSET: Value = frozenset()
NUMBER: Value = frozenset({frozenset()})


def origin(tag: int) -> Value:
    return frozenset({frozenset({tag})})


def parameter(index: int) -> Value:
    return origin(index)


def join(a: Value, b: Value) -> Value:
    """Either of two values: control flow meets, or a select."""
    return a if a is b or a == b else a | b


@lru_cache(maxsize=1 << 16)
def merge(a: Value, b: Value) -> Value:
    """Arithmetic on two values. UNSET stays UNSET: nothing is known until both operands are."""
    if a == NUMBER or not b:
        return b
    if b == NUMBER or not a:
        return a
    made = frozenset(_simplify(x | y) for x in a for y in b)
    return made if len(made) <= MAX_ALTERNATIVES else origin(UNKNOWN)


def _simplify(alternative: frozenset[int]) -> frozenset[int]:
    bases = frozenset(t for t in alternative if t >= 0)
    if bases:
        return bases
    return frozenset({SHARED}) if SHARED in alternative else alternative


def loaded(address: Value) -> Value:
    """What a load through `address` yields: data of the parameters it goes through."""
    through = parameters(address)
    return frozenset({frozenset(FIRST_LOADED - k for k in through)}) if through else origin(LOADED)


@lru_cache(maxsize=1 << 12)
def parameters(value: Value) -> frozenset[int]:
    """Every parameter that an alternative of the value starts from."""
    return frozenset(t for alternative in value for t in alternative if t >= 0)


def on_chip(alternative: frozenset[int]) -> bool:
    return bool(alternative & {SHARED, LOCAL}) and not any(t >= 0 for t in alternative)


def untraced(value: Value, name: Callable[[int], str] = str) -> str:
    """Why an address has no known parameter in some alternative; empty if every one has (or is on chip)."""
    for alternative in value:
        if any(t >= 0 for t in alternative) or on_chip(alternative):
            continue
        if UNKNOWN in alternative:
            return "the checker does not understand how it is made"
        if any(t <= FIRST_LOADED for t in alternative):
            through = " or ".join(name(FIRST_LOADED - t) for t in sorted(alternative) if t <= FIRST_LOADED)
            return f"it was loaded from memory, out of {through}"
        return "it was loaded from shared memory" if LOADED in alternative else "it starts from no parameter"
    return "" if value else "nothing sets it on the way"
