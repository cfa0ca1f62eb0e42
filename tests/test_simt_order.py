"""The adversarial order and the race detector, on small chains whose every fault is known."""

import re
from types import SimpleNamespace

import pytest
import test_fast_attn_res as residual
import test_fast_kda as recurrence
import test_fast_linear as gemm
import torch

from equivalence.simt import watch
from equivalence.simt.machine import Machine
from fast import attn_res, kda
from fast.kernel import Arg, pick
from fast.linear import FmaConfig, linear_kernel
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


@pytest.mark.parametrize("middle_waits", [True, False])
@pytest.mark.parametrize("warps", WARPS)
def test_a_wait_reaches_no_further_than_the_grid_before_unless_that_one_waited(warps, middle_waits):
    """Three grids: the third waits and reads what the first one stores, past a grid between them."""
    x, z, y = torch.full((N,), POISON, dtype=torch.int32), *torch.zeros(2, N, dtype=torch.int32)
    first = PRODUCER.replace("TRIGGER_EARLY", "griddepcontrol.launch_dependents;")
    machine = Machine("adversarial", warps, races=True)
    middle, last = first.replace("WAIT", WAIT if middle_waits else ""), CONSUMER.replace("LOAD", PLAIN)
    machine.run([(kernel("producer", "x"), first.replace("WAIT", WAIT), [x]), (kernel("middle", "z"), middle, [z]),
                 (kernel("consumer", "xy"), last.replace("WAIT", WAIT), [x, y])])  # fmt: skip
    assert torch.equal(y, RIGHT) == middle_waits
    assert {frozenset((r.first[0], r.second[0])) for r in machine.reports} == (
        set() if middle_waits else {frozenset(("producer", "consumer"))}
    )


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


# ---------------------------------------------------------------- the twins


def projections(seed: int = 0) -> tuple[list, dict]:
    """Two projections in a row, h = x w1^T and y = h w2^T, all that is written poisoned with NaN."""
    g = torch.Generator().manual_seed(seed)
    t = {n: torch.randn(s, generator=g).bfloat16() for n, s in dict(x=(2, 256), w1=(128, 256), w2=(64, 128)).items()}
    t |= {n: torch.full((2, N), float("nan"), dtype=torch.bfloat16) for n, N in dict(h=128, y=64).items()}
    one = linear_kernel(FmaConfig(2, 1, 4, 9), 2, 128, 256, 256, 128)
    two = linear_kernel(FmaConfig(1, 1, 4, 4), 2, 64, 128, 128, 64)
    return [(one, dict(x=t["x"], w=t["w1"], out=t["h"])), (two, dict(x=t["h"], w=t["w2"], out=t["y"]))], t


def right(t: dict) -> bool:
    _, bound = gemm.oracle(dict(x=t["h"], w=t["w2"]))
    return bool(((t["y"].double() - t["h"].double() @ t["w2"].double().mT).abs() <= bound).all())


@pytest.mark.parametrize("target, warps", [("sm_90a", "together"), ("sm_90a", "random"), ("sm_103a", "last")])
def test_projections_in_a_row_are_ordered(target, warps):
    launches, t = projections()
    assert not watch(launches, target=target, warps=warps) and right(t)


@pytest.mark.parametrize("what", ["no wait", "non-coherent activations"])
def test_a_projection_that_reads_too_early_is_found(what):
    def edit(index: int, ptx: str) -> str:
        if index == 0:
            return ptx
        if what == "no wait":
            return ptx.replace("griddepcontrol.wait;", "")
        return re.sub(r"ld\.global(?=\.(v[24]\.)?b32)", "ld.global.nc", ptx)

    launches, t = projections()
    reports = watch(launches, edit=edit)
    assert reports and all("out + " in r.where for r in reports), "races are on h, which the first launch calls out"
    assert not right(t)


def split() -> tuple:
    M, N, K, cfg = gemm.FORMS["split-bulk"]
    t = gemm.hostile(M, N, K)
    return linear_kernel(cfg, M, N, K, t["x"].stride(0), t["out"].stride(0)), t


def cluster() -> tuple:
    t = residual.hostile(1, 7168, 5, -1)
    return pick(attn_res.attn_res, t, dict(nb=5, write=-1))[0], t


def state() -> tuple:
    t = recurrence.hostile(2, 2)
    return pick(kda.kda_decode, t, {})[0], t


@pytest.mark.parametrize("make", [split, cluster, state])
def test_a_twin_launched_twice_has_no_race(make):
    """Twice, so that the second launch overwrites what the first one read and wrote."""
    assert not watch([make()] * 2)


@pytest.mark.parametrize("which", [0, 1])
def test_the_state_update_needs_both_barriers(which):
    def edit(index: int, ptx: str) -> str:
        at = [m.start() for m in re.finditer(r"bar\.sync", ptx)][which]
        return f"{ptx[:at]}//{ptx[at:]}"

    reports = watch([state()], edit=edit)
    assert reports and all(r.where.startswith("shared memory") for r in reports)
