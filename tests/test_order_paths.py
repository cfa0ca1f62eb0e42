"""Answers of the order checker that are worked out on blocks and bits, against the plain walk over instructions."""

import random
from dataclasses import replace

import pytest

from equivalence.isa.program import Inst, Program, link
from equivalence.mutants import patterns
from equivalence.order import check, check_builds
from equivalence.order.paths import Reach, ahead, bits, loops, reached
from fast.lower import lower


def program(seed: int) -> Program:
    """Straight lines, branches forward and back, exits; some instructions are barriers."""
    draw = random.Random(seed)
    count = draw.randrange(2, 40)
    insts, labels = [], {f"L{i}": i for i in range(count)}
    for i in range(count):
        inst = Inst(i, "x", "x")
        kind = draw.random()
        if kind < 0.25:
            inst.guard = ("P0", True) if draw.random() < 0.7 else None
            inst.targets, inst.falls = (f"L{draw.randrange(count)}",), inst.guard is not None
        elif kind < 0.32:
            inst.falls, inst.exits = False, True
        elif kind < 0.5:
            inst.sync = frozenset({"barrier"})
        insts.append(inst)
    return Program("PTX", insts, link(insts, labels), ordered=False)


@pytest.mark.parametrize("seed", range(60))
def test_reach_is_the_walk(seed):
    made = program(seed)
    count, stops = len(made.insts), {i for i, inst in enumerate(made) if inst.sync}
    for held in (set(), stops):
        reach = Reach(made, bits(held))
        for i in range(count):
            walked = ahead(made, [i], stop=lambda inst, held=held: inst.at in held)
            assert {j for j in range(count) if reach.after(i) >> j & 1} == walked
    assert reached(made) == {0} | ahead(made, [0])


@pytest.mark.parametrize("seed", range(60))
def test_loops_are_what_reaches_itself(seed):
    made = program(seed)
    beyond = {i: ahead(made, [i]) for i in range(len(made.insts))}
    wanted = {frozenset(j for j in beyond[i] if i in beyond[j]) for i in beyond if i in beyond[i]}
    found = loops(made)
    assert {frozenset(group) for group in found} == wanted and len(found) == len(wanted)


def test_equal_code_is_read_once(monkeypatch):
    """sm_100a and sm_103a often have the same code; disassembled behind other code it has other addresses."""
    builds = [b for k in patterns.KERNELS[:3] for b in lower(k, check.TARGETS[1:])]
    codes = {(b.kernel.name, check.cubin.section(b.cubin, f".text.{b.symbol}")) for b in builds}
    assert len(codes) < len(builds)
    alone, read = [check.check(b) for b in builds], []

    def reading(text, symbol, layout, read_sass=check.sass.read):
        read.append(symbol)
        return read_sass(text, symbol, layout)

    monkeypatch.setattr(check.sass, "read", reading)
    assert check_builds(builds) == alone and len(read) == len(codes)
    read.clear()
    other = replace(builds[1], cubin=builds[3].cubin, symbol=builds[3].symbol, ptx=builds[3].ptx)
    check_builds([builds[0], other])
    assert len(read) == 2
