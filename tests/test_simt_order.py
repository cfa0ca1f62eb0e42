"""The adversarial order and the race detector, on small chains whose every fault is known."""

from types import SimpleNamespace

import pytest
import torch

from equivalence.simt.machine import Machine
from fast.kernel import Arg
from reference.stage import Role

POISON = 0x7FC00000  # NaN in every word that is read too early
N = 128
PRODUCER = """
.version 9.0
.target sm_90a
.visible .entry producer(.param .b64 x)
.reqntid 128, 1, 1
{
  .reg .b32 %r<3>; .reg .b64 %rd<4>;
  TRIGGER_EARLY
  WAIT
  ld.param.b64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.b32 [%rd3], %r1;
  ret;
}"""
CONSUMER = """
.version 9.0
.target sm_90a
.visible .entry consumer(.param .b64 x, .param .b64 y)
.reqntid 128, 1, 1
{
  .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<6>;
  griddepcontrol.launch_dependents;
  ld.param.b64 %rd1, [x];
  ld.param.b64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  setp.lt.u32 %p1, %r1, 32;
  WAIT
  LOAD %r2, [%rd4];
  add.s64 %rd5, %rd2, %rd3;
  st.global.b32 [%rd5], %r2;
  ret;
}"""
WAIT, PLAIN = "griddepcontrol.wait;", "ld.global.b32"
IN_ONE_WARP = "@!%p1 bra $SKIP;\n  griddepcontrol.wait;\n$SKIP:"


def kernel(name: str, args: str):
    made = tuple(Arg(a, Role.ACTIVATION, torch.int32, (N,)) for a in args)
    return SimpleNamespace(name=name, args=made, grid=(1, 1, 1), block=(N, 1, 1), cluster=None, smem=0, pdl=True)


def chain(wait=WAIT, load=PLAIN, early=True, **options) -> tuple[Machine, torch.Tensor]:
    """Producer and consumer on poisoned x: the machine after the run, and what the consumer copied to y."""
    x, y = torch.full((N,), POISON, dtype=torch.int32), torch.zeros(N, dtype=torch.int32)
    trigger = "griddepcontrol.launch_dependents;" if early else ""
    first = PRODUCER.replace("TRIGGER_EARLY", trigger).replace("WAIT", WAIT)
    second = CONSUMER.replace("WAIT", wait).replace("LOAD", load)
    machine = Machine(**options)
    machine.run([(kernel("producer", "x"), first, [x]), (kernel("consumer", "xy"), second, [x, y])])
    return machine, y


RIGHT = torch.arange(N, dtype=torch.int32)
WARPS = ("together", "random", "last")


@pytest.mark.parametrize("order", ["plain", "adversarial"])
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("early", [True, False])
def test_a_chain_that_waits_is_right_and_has_no_race(order, warps, early):
    machine, y = chain(early=early, order=order, warps=warps, races=True)
    assert torch.equal(y, RIGHT) and not machine.reports


@pytest.mark.parametrize("wait, load", [("", PLAIN), (IN_ONE_WARP, PLAIN), (WAIT, "ld.global.nc.b32")],
                         ids=["no wait", "wait in one warp", "non-coherent"])  # fmt: skip
def test_each_fault_is_reported_and_shows_in_values(wait, load):
    machine, y = chain(wait, load, order="plain", races=True)
    assert torch.equal(y, RIGHT), "in plain order nothing shows"
    (race,) = machine.reports
    assert (race.first[0], race.second[0]) == ("producer", "consumer") and race.where.startswith("x + ")
    for warps in WARPS:
        machine, y = chain(wait, load, order="adversarial", warps=warps, races=True)
        wrong = y != RIGHT
        assert (y[wrong] == POISON).all() and wrong.sum() == (96 if wait == IN_ONE_WARP else N)
        assert len(machine.reports) >= 1
    assert chain(wait, load, order="adversarial")[1].ne(RIGHT).any(), "values alone show it too"


SHARED = """
.version 9.0
.target sm_90a
.extern .shared .align 16 .b8 buffer[];
.visible .entry reverse(.param .b64 x)
.reqntid 128, 1, 1
{
  .reg .b32 %r<8>; .reg .b64 %rd<6>;
  ld.param.b64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mov.b32 %r2, buffer;
  shl.b32 %r3, %r1, 2;
  add.s32 %r4, %r2, %r3;
  st.shared.b32 [%r4], %r1;
  BARRIER
  sub.s32 %r5, %r2, %r3;
  ld.shared.b32 %r6, [%r5+508];
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.b32 [%rd3], %r6;
  ret;
}"""


@pytest.mark.parametrize("barrier", [True, False])
def test_a_missing_barrier_is_a_race(barrier):
    x = torch.zeros(N, dtype=torch.int32)
    one = kernel("reverse", "x")
    one.smem = 4 * N
    machine = Machine(races=True, warps="last")
    machine.run([(one, SHARED.replace("BARRIER", "bar.sync 0;" if barrier else ""), [x])])
    assert torch.equal(x, RIGHT.flip(0)) == barrier
    assert bool(machine.reports) == (not barrier)
