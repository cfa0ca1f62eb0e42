"""The rounding budget: what one rounding may do to spread and to concentrated energy, and what is beyond it."""

from types import SimpleNamespace

import pytest
import torch
from stand_ins import stand_in

from equivalence.compare import BOUNDS, FLOOR, SAMPLE, half_ulp, measure
from equivalence.judge import Place, _Values
from equivalence.law_twin import LawTwin, served_by
from equivalence.recording import Hidden
from equivalence.rounding import NEAREST, ROUNDING, UNIT, budget_excess, one_rounding
from equivalence.streamed import Serving, stream
from reference.numerics import fused
from reference.shard import Mesh
from tools.stand_in import SHAPES

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
ONCE, TWICE = "mla.o_proj", "attn_res.pre"  # stages that round once and twice
ROWS, WIDTH = 3, 4096


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normals(seed=0):
    return torch.randn(ROWS, WIDTH, generator=rng(seed), dtype=f64)


def outliers(seed=0, channels=2):
    """Normals, and a few channels that carry all but 1e-3 of the energy."""
    x = normals(seed)
    x[:, :channels] = 2048 * (1 + 0.2 * torch.rand(ROWS, channels, generator=rng(seed + 1), dtype=f64))
    return x


def signs(x):
    return torch.where(torch.rand(x.shape, generator=rng(9), dtype=f64) < 0.5, -1.0, 1.0)


def found(made, exact, stage=ONCE, tensor="out", dtype=bf16):
    """The finding about values that stand for ones stored in `dtype`; float64 keeps errors that bf16 cannot have."""
    live, ref = torch.ones(len(exact), dtype=torch.bool), exact.to(dtype)
    values = _Values([Place(f"00.{stage}", 0, 0, (stage,), tensor)], ref, BOUNDS[dtype], axes=1, capacity=8)
    values.update([(made, ref, exact, live)], torch.zeros(1, dtype=torch.int64))
    (finding,) = values.findings(1)
    return finding


def excess(finding, which=0):
    return next(iter(budget_excess(SimpleNamespace(findings=[finding]), which).values()), 0.0)


def twice(x):
    return ((x * 1.37).to(bf16).double() / 1.37).to(bf16)


@pytest.mark.parametrize("stage, n", [(ONCE, 1), (TWICE, 2)])
@pytest.mark.parametrize("factor", [0.99, 1.01, 1.3])
def test_spread_energy_keeps_the_rms_of_its_roundings(stage, n, factor):
    x = normals()
    finding = found(x + factor * n * ROUNDING * x.abs() * signs(x), x, stage)
    assert finding.effective > SAMPLE / 3 and finding.error == pytest.approx(factor * n * ROUNDING)
    if n == 2 or factor < 1.2:  # else an element may be over by more
        assert excess(finding) == (pytest.approx(factor) if factor > 1 else 0)
    else:
        assert excess(finding) >= factor


@pytest.mark.parametrize("data", [normals, outliers])
def test_one_rounding_passes_and_two_do_not(data):
    over = 0
    for seed in range(40):
        x = data(seed)
        once = found(x.to(bf16), x)
        assert not excess(once) and once.halves <= 1
        over += once.error > ROUNDING
        assert excess(found(twice(x), x)) > 1
    assert (over > 0) is (data is outliers)  # the RMS of one rounding is no bound of a few elements


@pytest.mark.parametrize("stage, n", [(ONCE, 1), (TWICE, 2)])
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_concentrated_energy_has_the_maximum_of_its_roundings(stage, n, factor):
    """All elements are powers of two, where half a ULP is 2^-8 of the value, and all errors are the greatest."""
    x = torch.ones(ROWS, WIDTH, dtype=f64)
    x[:, :2] = 2.0**12
    finding = found(x * (1 + factor * n * UNIT), x, stage)
    assert finding.effective < 7 and finding.halves < n * NEAREST
    assert excess(finding) == (pytest.approx(factor) if factor > 1 else 0)


@pytest.mark.parametrize("data", [normals, outliers])
@pytest.mark.parametrize("factor", [0.98, 1.05])
def test_each_element_of_one_rounding_is_near_half_a_ulp(data, factor):
    x = data()
    made = x.to(bf16).double()
    made[1, 77] = x[1, 77] + factor * NEAREST * half_ulp(x[1, 77], bf16)
    assert (excess(found(made, x)) > 1) is (factor > 1)
    assert not excess(found(made, x, TWICE)) and not excess(found(made, x, "mla.attention"))


@pytest.mark.parametrize("error, good", [(0.99, True), (1.01, False)])
def test_many_equal_rows_of_a_few_channels_are_no_sample(error, good):
    """The same two channels just above a power of two, in each of 600 tokens."""
    x = outliers()[:1].expand(600, -1).clone()
    x[:, :2] = 2048
    made = x.to(bf16).double()
    made[:, :2] *= 1 + error * UNIT
    finding = found(made, x)
    assert finding.effective > SAMPLE / 3 and finding.error > 1.7 * ROUNDING
    assert (not excess(finding)) is good


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_between_the_two_the_budget_is_that_of_the_odds(rows, factor):
    x = torch.full((rows, WIDTH), 2.0**-12, dtype=f64)
    x[:, :200] = 1
    limit = one_rounding(200 * rows, rows, rows * WIDTH)
    assert 1.2 * ROUNDING < limit < 1.5 * ROUNDING and limit == pytest.approx(one_rounding(200, 1, 200))
    finding = found(x * (1 + factor * 2 * limit * signs(x)), x, TWICE)
    assert finding.rows == rows and finding.effective == pytest.approx(200 * rows, rel=1e-3)
    assert (excess(finding) > 1) is (factor > 1)


def test_the_odds_are_kept():
    """N equal elements at powers of two, the worst mantissa: none of 10,000 draws is over its budget, many are over
    the RMS."""
    for n in (4, 15, 60, 400):
        r = UNIT * (2 * torch.rand(10_000, n, generator=rng(n), dtype=f64) - 1)
        drawn = r.square().mean(-1).sqrt()
        assert drawn.max() <= one_rounding(n, 1, n) and (drawn > ROUNDING).double().mean() > 0.3


def test_the_budget_falls_from_the_maximum_to_the_rms():
    sizes = [0, 1, 15, 16, 100, 600, SAMPLE // 3, SAMPLE // 3 + 1, 10**6]
    limits = [one_rounding(n, 1, n) for n in sizes]
    assert limits == sorted(limits, reverse=True) and limits[:3] == [UNIT] * 3 and limits[-2:] == [ROUNDING] * 2
    assert one_rounding(150, 10, 1500) == UNIT  # ten equal rows are no larger sample than one
    assert one_rounding(2 * SAMPLE, 100, 2 * SAMPLE) == ROUNDING  # of narrow rows there may be many
    assert one_rounding(1000, 250, 64000) == ROUNDING and one_rounding(1000, 250, 64001) == UNIT


def test_fp32_has_the_floor_and_unfused_stores_some_of_it_as_bf16():
    x = normals()
    for factor, over in ((0.99, False), (1.01, True)):
        assert (excess(found(x * (1 + factor * FLOOR), x, dtype=f32)) > 1) is over
    rounded = x.to(bf16).double()
    assert excess(found(rounded, x, "kda.conv", "q", f32)) > 1
    assert not excess(found(rounded, x, "kda.conv", "q", f32), 1)


def test_what_is_measured():
    x = torch.ones(2, 3, 128, dtype=f64)
    x[1, :, 1:] = 0
    x[:, 2] = torch.nan
    made = x.to(bf16)
    made[0, 0, 5] += 2.0**-6
    live = torch.tensor([True, True, False]).expand(2, 3)
    seen = measure(made, x.to(bf16), x, live, BOUNDS[bf16], bf16)
    assert seen.norms[:, 3].tolist() == [256, 2] and (seen.norms[:, 2].square() / seen.norms[:, 3]).tolist() == [256, 2]
    assert seen.halves.tolist() == [pytest.approx(4, rel=1e-3), 0]


short = SHAPES["short"][0]
FED = [[256, *b"The quick brown fox"], [256, *b"aaaaaaaaaaaa"], [256, 0]]


@pytest.mark.parametrize("spoil, over", [(None, False), (lambda values, t: values.update(m=twice(values["m"])), True)])
def test_hostile_experts_round_once(spoil, over):
    """Scale bytes 0 to 240 leave the energy of a tensor to a few elements."""
    serving = Serving("law", **served_by(LawTwin("law", ("moe.experts_up",), fused, spoil)))
    for seed in (0, 5):
        stream(stand_in(config=short, seed=seed), Hidden.empty(short, FED, 1), 0, 2, [serving], mesh=Mesh(8))
    judged = [f for f in serving.findings if f.check == "value"]
    assert len(judged) == 4 and min(f.effective for f in judged) < 20 and min(f.compared for f in judged) > SAMPLE
    assert len(budget_excess(SimpleNamespace(findings=judged), 0)) == (2 if over else 0)
