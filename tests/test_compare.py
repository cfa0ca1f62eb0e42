"""Each bound of the comparison, with an error just inside that passes and one just outside that does not."""

import pytest
import torch

from equivalence.compare import (
    BOUNDS,
    FLOOR,
    NARROW,
    SAMPLE,
    SLOPE,
    drifts,
    half_ulp,
    measure,
    pooled_ratio,
    routes,
    slope,
    ulps,
)
from equivalence.judge import Judge, Place, first_bad

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
INF = torch.inf
ROWS, WIDTH = 6, 256
NOISE = {bf16: 0.0, f32: 2.0**-23}  # relative error that the reference makes before it stores


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def sample(dtype, seed=0, rows=ROWS, width=WIDTH):
    """(reference in `dtype`, exact), both [1, rows, width]."""
    exact = torch.randn(1, rows, width, generator=rng(seed), dtype=f64)
    error = torch.randn(exact.shape, generator=rng(seed + 1000), dtype=f64)
    return (exact * (1 + NOISE[dtype] * error)).to(dtype), exact


def judge(twin, ref, exact, dtype, *, live=None, bounds=None):
    """(worst row, worst element), each in units of its bound. A float64 twin stands for one stored in `dtype`."""
    live = torch.ones(twin.shape[:2], dtype=torch.bool) if live is None else live
    seen = measure(twin, ref, exact, live, bounds or BOUNDS[dtype], dtype)
    return float(seen.row.max()), float(seen.element.max())


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_the_reference_passes_its_own_bounds(dtype):
    for seed in range(20):
        ref, exact = sample(dtype, seed)
        assert max(judge(ref, ref, exact, dtype)) <= 1


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("factor, good", [(0.999, True), (1.001, False)])
def test_row_bound(dtype, factor, good):
    ref, exact = sample(dtype)
    error = ref.double()[0, 2] - exact[0, 2]
    limit = BOUNDS[dtype].rms * rms(error) + FLOOR * rms(exact[0, 2])
    noise = torch.randn(WIDTH, generator=rng(7), dtype=f64)
    twin = ref.double()
    twin[0, 2] = exact[0, 2] + noise * (factor * limit / rms(noise))
    row, _ = judge(twin, ref, exact, dtype)
    assert (row <= 1) is good


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("factor, good", [(0.999, True), (1.001, False)])
def test_element_bound(dtype, factor, good):
    ref, exact = sample(dtype)
    error, x = ref.double()[0, 2] - exact[0, 2], exact[0, 2]
    half = half_ulp(x[5:6], dtype)[0]
    scale = error.abs().max() if dtype == f32 else torch.maximum(rms(error), half / 3**0.5)
    own = torch.maximum(BOUNDS[dtype].element * scale, error[5].abs())
    limit = half + own + FLOOR * (x[5].abs() + rms(x))
    twin = ref.double()
    twin[0, 2, 5] = x[5] - factor * limit
    _, element = judge(twin, ref, exact, dtype)
    assert (element <= 1) is good


@pytest.mark.parametrize("factor, good", [(0.99, True), (1.01, False)])
def test_floor_where_the_reference_is_exact(factor, good):
    exact = torch.randn(1, ROWS, WIDTH, generator=rng(3), dtype=f64).float().double()
    twin = exact * (1 + factor * FLOOR)
    assert (judge(twin, exact.float(), exact, f32)[0] <= 1) is good


@pytest.mark.parametrize("extra, good", [(0.65, True), (0.75, False)])
def test_run_bound(extra, good):
    """More rounding noise in every row, of power 0.65^2 or 0.75^2 of the reference's: the limit of (d) is 1/2."""
    ref, exact = sample(bf16, rows=64)
    error = ref.double() - exact
    noise = torch.randn(exact.shape, generator=rng(5), dtype=f64)
    noise = noise - error * (noise * error).sum() / error.square().sum()
    twin = ref.double() + noise * (extra * rms(error) / rms(noise))
    live = torch.ones(1, 64, dtype=torch.bool)
    seen = measure(twin, ref, exact, live, BOUNDS[bf16], bf16)
    assert int(seen.sums[0, 2]) >= SAMPLE and float(seen.row.max()) <= 1
    assert (pooled_ratio(seen.sums[0], BOUNDS[bf16]) <= BOUNDS[bf16].pooled) is good


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_must_stand_at_the_same_places(value):
    ref, exact = sample(bf16)
    with_it = ref.clone()
    with_it[0, 1, 3] = value
    assert judge(with_it, ref, exact, bf16)[1] == INF  # placed
    assert judge(ref, with_it, exact, bf16)[1] == INF  # removed
    assert judge(with_it, with_it, exact, bf16)[1] <= 1
    moved = ref.clone()
    moved[0, 1, 4] = value
    assert judge(moved, with_it, exact, bf16)[1] == INF
    if value == value:
        assert judge(-with_it, with_it, exact, bf16)[1] == INF


def spoilt(name, ref, exact):
    twin = ref.clone()
    if name == "two rows swapped":
        twin[0, [1, 4]] = twin[0, [4, 1]]
    elif name == "an element off by 3 ulp":
        at = (exact[0, 2].abs() - 1.5).abs().argmin()
        twin[0, 2, at] += 6 * half_ulp(exact[0, 2, at : at + 1], ref.dtype)[0].to(ref.dtype)
    elif name == "a channel's sign":
        twin[..., 9] = -twin[..., 9]
    elif name == "a row one token late":
        twin[0, 3] = twin[0, 2]
    return twin


@pytest.mark.parametrize("name", ["two rows swapped", "an element off by 3 ulp", "a channel's sign",
                                  "a row one token late"])  # fmt: skip
def test_faults_in_bf16(name):
    ref, exact = sample(bf16)
    assert max(judge(spoilt(name, ref, exact), ref, exact, bf16)) > 1


def test_bf16_rounding_inside_an_fp32_state():
    ref, exact = sample(f32)
    row, element = judge(ref.bfloat16().float(), ref, exact, f32)
    assert row > 100 and element > 100


def test_fp32_fault_of_few_ulp():
    """The bound of one element is eight times the greatest error of a row, of some ULP, and the floor: 56 ULP here."""
    ref, exact = sample(f32)
    at = (exact[0, 2].abs() - 1.5).abs().argmin()
    twin = ref.clone()
    twin[0, 2, at] += 50 * 2.0**-23
    assert judge(twin, ref, exact, f32)[1] <= 1
    twin[0, 2, at] += 12 * 2.0**-23
    assert judge(twin, ref, exact, f32)[1] > 1


def heads(lucky: float, seed=0):
    """States [2 slots, 3 heads, 128, 128] whose errors are one number per state row times the key: (reference, exact),
    and such an error. `lucky`: the factor on the reference's error of state row 7."""
    shape = 2, 3, 128
    exact = torch.randn(*shape, 128, generator=rng(seed), dtype=f64)
    keys = torch.randn(2, 3, 1, 128, generator=rng(seed + 1), dtype=f64)
    errors = [torch.randn(*shape, 1, generator=rng(seed + n), dtype=f64) * keys * 2.0**-20 for n in (2, 3)]
    errors[0][:, :, 7] *= lucky
    return (exact + errors[0]).float(), exact, errors[1]


@pytest.mark.parametrize("factor, good", [(1.0, True), (9.0, False)])
def test_a_head_is_one_row(factor, good):
    """A state row on which the reference is exact by luck binds no twin; the head does."""
    ref, exact, error = heads(lucky=0.0)
    verdicts = [Judge(torch.device("cpu")) for _ in range(2)]
    for verdict, axes in zip(verdicts, (1, 2), strict=True):
        twin = (exact + factor * error).float()
        verdict.add(place(0), twin, ref, exact, torch.ones(2, dtype=torch.bool), axes=axes)
        verdict.flush()
    apart, whole = (v.findings()[0] for v in verdicts)
    assert not apart.ok and whole.ok is good
    assert whole.compared == apart.compared == exact.numel()


def test_one_bad_state_row_shows_in_a_head():
    """Sixteen times its error leaves the head's RMS error at 1.7 times the reference's; its elements tell."""
    ref, exact, error = heads(lucky=1.0)
    error[1, 2, 5] *= 16 * error[1, 2].abs().max() / error[1, 2, 5].abs().max()
    verdict = Judge(torch.device("cpu"))
    verdict.add(place(0), (exact + error).float(), ref, exact, torch.ones(2, dtype=torch.bool), axes=2)
    verdict.flush()
    (finding,) = verdict.findings()
    assert finding.worst_row < BOUNDS[f32].rms and finding.worst_element > 1
    assert finding.worst["index"][:3] == [1, 2, 5]


def test_null_rows_do_not_count():
    ref, exact = sample(bf16)
    twin = ref.clone()
    twin[0, 4] = torch.nan
    live = torch.ones(1, ROWS, dtype=torch.bool)
    live[0, 4] = False
    assert max(judge(twin, ref, exact, bf16, live=live)) <= 1


@pytest.mark.parametrize("factor, good", [(0.99, True), (1.01, False)])
def test_narrow_rows_are_pooled_over_layers(factor, good):
    """A lucky reference in one layer does not bind the twin, the layers together do."""
    exact = torch.randn(12, 1, 2, generator=rng(4), dtype=f64)
    ref = exact + 1e-5 * torch.randn(exact.shape, generator=rng(5), dtype=f64)
    ref[3] = exact[3]
    assert exact.shape[-1] < NARROW
    twin = ref.clone()
    limit = BOUNDS[f32].rms * rms(ref - exact) + FLOOR * rms(exact[3])
    twin[3] = exact[3] + factor * limit
    assert (judge(twin, ref, exact, f32)[0] <= 1) is good


def test_half_ulp_is_that_of_torch():
    for dtype in (bf16, f32):
        x = torch.tensor([1.0, -1.5, 3.0, 2.0**-126, 2.0**-130, 0.0, 65504.0], dtype=dtype)
        up = torch.nextafter(x.abs(), torch.tensor(INF, dtype=dtype))
        assert torch.equal(2 * half_ulp(x.double(), dtype), up.double() - x.abs().double())
    assert ulps(1.0 + 2**-7, 1.0, bf16) == 1 and ulps(1.0, float("nan"), bf16) == INF


def curve(power, tokens=1000, level=1.0, seed=0):
    """A twin whose error grows by token^power more than the reference's, with 20 % of noise on both."""
    noise = 1 + 0.2 * torch.randn(tokens, 2, generator=rng(seed), dtype=f64)
    token = torch.arange(1, tokens + 1, dtype=f64)
    return 1e-3 * noise * torch.stack([level * token**power, torch.ones(tokens, dtype=f64)], -1)


def test_slope_rule():
    """Errors that grow as the reference's do pass at any length; a bias against a random walk does not."""
    for seed in range(20):
        assert not drifts(curve(0.0, seed=seed)) and not drifts(curve(0.0, level=1.9, seed=seed))
        assert not drifts(curve(SLOPE - 0.07, seed=seed))
        assert drifts(curve(SLOPE + 0.07, seed=seed)) and drifts(curve(0.5, seed=seed))
        assert not drifts(curve(0.5, level=0.02, seed=seed))  # still better than the reference
    assert slope(curve(0.5)[:63]) is None and abs(slope(curve(0.5))[0] - 0.5) < 0.06


def test_slope_needs_no_single_bad_step():
    steps = curve(0.0)
    steps[700, 0] *= 5
    assert not drifts(steps)


def test_routes():
    scores = torch.tensor([[0.9, 0.5, 0.5 - 1e-7, 0.1]]).double()
    ref, slack = torch.tensor([[0, 1]]), torch.tensor([6e-8], dtype=f64)

    def legal(ids, slack=slack):
        differs, illegal = routes(torch.tensor([ids], dtype=torch.int32), ref, scores, slack)
        return bool(differs), bool(illegal)

    assert legal([0, 1]) == legal([1, 0]) == (False, False)
    assert legal([2, 0]) == (True, False)
    assert legal([2, 0], slack=torch.tensor([4e-8], dtype=f64)) == (True, True)
    for ids in ([0, 3], [0, 0], [0, -1], [0, 4], [1, 2]):
        assert legal(ids)[1], ids


def place(layer, tensor="out"):
    return Place(f"{layer:02d}.stage", layer, layer, ("stage",), tensor)


def test_judge_finds_the_first_bad_token_and_layer():
    verdicts = Judge(torch.device("cpu"), capacity=8)
    live = torch.ones(ROWS, dtype=torch.bool)
    for token in range(6):
        for layer in range(3):
            ref, exact = (t[0] for t in sample(bf16, 10 * token + layer))
            twin = ref.clone()
            if (token, layer) in ((3, 2), (3, 1), (4, 0)):
                twin[2, 17] += 1.0
            verdicts.add(place(layer), twin, ref, exact, live)
            changed = torch.zeros(40, dtype=torch.bool)
            changed[11] = (token, layer) == (5, 0)
            verdicts.forbid(place(layer, "memory"), changed, lambda i: f"word {i}")
        verdicts.flush()
    findings = verdicts.findings()
    bad = first_bad(findings)
    assert (bad.place.layer, bad.first_token, bad.place.tensor) == (1, 3, "out")
    assert bad.worst["index"] == [2, 17] and bad.worst["token"] == 3 and bad.bad == 1
    assert [f.reasons for f in findings if f.check == "exact" and not f.ok] == [["word 11"]]
    assert all(f.compared == 6 * ROWS * WIDTH for f in findings if f.check == "value")


def test_a_finding_that_only_the_run_shows():
    """Two roundings everywhere: no row and no element is far off, the run is."""
    verdicts = Judge(torch.device("cpu"))
    for token in range(8):
        ref, exact = (t[0] for t in sample(bf16, token, rows=16))
        twin = ((exact * 1.37).bfloat16().double() / 1.37).bfloat16()
        verdicts.add(place(0), twin, ref, exact, torch.ones(16, dtype=torch.bool))
        verdicts.flush()
    (finding,) = verdicts.findings()
    assert finding.bad == 0 and finding.first_token is None and "over the run" in finding.reasons[0]
    assert 1.3 < finding.pooled < 1.5


def test_routes_among_nan_scores_are_legal_only_if_they_are_the_reference_s():
    scores = torch.tensor([[0.9, 0.8, torch.nan, 0.1]], dtype=torch.float64).expand(3, -1)
    twin, ref = torch.tensor([[0, 1], [1, 0], [0, 3]]), torch.tensor([[0, 1]]).expand(3, -1)
    differs, illegal = routes(twin, ref, scores, torch.tensor([0.1, torch.nan, 0.1], dtype=torch.float64))
    assert differs.tolist() == illegal.tolist() == [False, False, True]
