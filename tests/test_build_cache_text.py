"""The canonical text of kernels, by which the cache of builds finds them: different values never have the same."""

from dataclasses import dataclass, replace
from enum import Flag, IntEnum
from typing import NamedTuple

import numpy
import pytest
import torch
from test_build_cache import kernel

from fast import build_cache
from reference.stage import Role


def test_canonical_text():
    def text(*constants) -> str:
        return build_cache.text(replace(kernel(), constants=constants).code)

    different = [(1,), (True,), (1.0,), ("1",), (0.0,), (-0.0,), (1.0 + 2.0**-52,), (None,), ((1,),), (1, 1), ((1, 1),)]
    assert len({text(*c) for c in different}) == len(different)
    assert text(0.1 + 0.2) == text(0.30000000000000004) and " at 0x" not in text(kernel().constants)
    assert text(Role.STATE) != text("state") and "reference.stage.Role.STATE" in text(Role.STATE)


class Number(int):
    pass


class Word(str):
    pass


class Pair(NamedTuple):
    a: int
    b: int


class Level(IntEnum):
    LOW = 1


class Bits(Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Held(int):
    """Its number is in none of its fields."""

    name: str = ""


@pytest.mark.parametrize("value", [
    Number(1), Word("1"), Pair(1, 2), Bits.A | Bits.B, Bits(0), Held(), (1, (Number(2),)), numpy.float64(1),
    torch.ones(1),
])  # fmt: skip
def test_a_value_of_a_derived_type_is_not_taken_for_a_plain_one(monkeypatch, value):
    """Even where its type comes from a module whose source is in the key."""
    with pytest.raises(build_cache.Unkept):
        build_cache.text(value)
    monkeypatch.setattr(build_cache, "ours", lambda thing: True)
    assert build_cache.text(Level.LOW) != build_cache.text(1) and build_cache.text(Bits.A).endswith("Bits.A")
    with pytest.raises(build_cache.Unkept):
        build_cache.text(value)
