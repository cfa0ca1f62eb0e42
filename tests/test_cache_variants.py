"""fp8 cache rows and a bf16 KDA state: roundings against float64, scales on their whole way, who refuses them."""

from dataclasses import replace

import pytest
import torch
from torchrun_worker import WIDE, ranked, single_state, sources, walk

from equivalence.cases import make_state, open_requests, tiny
from equivalence.compare import half_ulp
from equivalence.law_twin import LawTwin, served_by
from equivalence.lockstep import Lockstep
from fast.decoder import FastDecoder
from reference.config import Config
from reference.decoder import Decoder, Model
from reference.kda import RECURRENCE, RECURRENCE_BF16
from reference.mla import ATTENTION, ATTENTION_FP8, CACHE_WRITE_FP8
from reference.numerics import MODES, Numerics, exact, fused
from reference.spec_state import SpecState
from reference.stage import ContractError, bf16, f8, f32
from reference.state import DecodeState
from reference.weights import RandomCheckpoint, all_weights
from reference.world import LocalWorld

VARIANT = dict(mla_cache="fp8", kda_state="bf16", cache_scale=0.046875, query_scale=0.3)
KEPT = replace(tiny, **VARIANT)
T, H, P, B = 4, 2, 9, 4
C, Q = torch.tensor([0.046875]), torch.tensor([0.3])
SCALE = 192**-0.5


def codes() -> list[float]:
    """The finite e4m3 values in order, from the bits: exponent bias 7, no infinities."""
    positive = [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:-1]
    return [-v for v in positive[:0:-1]] + positive


def test_e4m3_has_these_values_and_rounds_to_the_nearest_even_one():
    values = torch.tensor(codes(), dtype=torch.float64)
    stored = torch.arange(256, dtype=torch.uint8).view(f8).double()
    assert torch.equal(stored[stored.isfinite()].unique(), values.unique()) and int(stored.isnan().sum()) == 2
    assert torch.equal(fused.round8(values.float()).double(), values)
    middle, even = (values[1:] + values[:-1]) / 2, fused.round8(values.float()).view(torch.uint8) % 2 == 0
    want = torch.where(even[1:], values[1:], values[:-1])
    assert torch.equal(fused.round8(middle.float()).double(), want)
    up, down = (torch.nextafter(middle.float(), torch.tensor(s)) for s in (torch.inf, -torch.inf))
    assert torch.equal(fused.round8(up).double(), values[1:]) and torch.equal(fused.round8(down).double(), values[:-1])
    assert torch.equal((values[1:] - values[:-1])[(values[:-1] >= 0)], 2 * half_ulp(values, f8)[:-1][values[:-1] >= 0])
    odd = torch.tensor([449.0, 1e30, torch.inf, -torch.inf, torch.nan])
    got = fused.round8(odd).double()
    assert got[:4].tolist() == [448, 448, 448, -448] and got[4].isnan() and exact.round8(odd) is odd


def rows(seed=0) -> dict:
    """Rows with outlier channels, tiny values, and some beyond the range of the scale."""
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    latent, pe = r(P * B, 512), 3 * r(P * B, 64)
    latent[:, 7] *= 4
    latent[:, 9] *= 1e-4
    pe[3, 5], pe[4, 6] = 1e3, -1e3
    return dict(kv_c=latent.bfloat16(), k_pe=pe.bfloat16(), slot_mapping=torch.arange(P * B).roll(1))


def written(x, num=fused, law=CACHE_WRITE_FP8, c=C):
    """All pages with the rows of `rows`, row 0 of page 0 excepted, which is null."""
    cache = torch.full((P, B, 576), torch.nan).to(num.storage(f8))
    law.apply(x | dict(cache_scale=c, cache=cache), {}, num)
    return cache


def plain(x):
    """The unrounded rows as pages, float64."""
    cache = torch.full((P * B, 576), torch.nan, dtype=torch.float64)
    live = x["slot_mapping"] > 0
    cache[x["slot_mapping"][live]] = torch.cat([x["kv_c"], x["k_pe"]], -1)[live].double()
    return cache.view(P, B, 576)


def slack(values, c):
    """Half an e4m3 unit of the stored number, what saturation takes away, and the fp32 division."""
    small = values.double() / c.double()
    over = (small.abs() - 448).clamp_min(0)
    return (half_ulp(small.clamp(-448, 448), f8) + over + small.abs() * 2.0**-24) * c.double()


@pytest.mark.parametrize("mode", MODES)
def test_rows_come_back_within_half_a_unit(mode):
    num, x = Numerics(mode), rows()
    back, want = written(x, num).double() * C.double(), plain(x)
    assert written(x, num).dtype == num.storage(f8) and want[0, 0].isnan().all() and back[0, 0].isnan().all()
    limit = slack(want, C) if mode != "exact" else want.abs() * 2.0**-52
    live = ~want.isnan()
    assert ((back - want).abs() <= limit)[live].all()
    if mode != "exact":
        assert ((back - want).abs() > limit / 2)[live].any()  # and half of that is not enough
        cut = (written(x, num).view(torch.uint8) & 0xFE).view(f8).double() * C.double()  # one bit less
        assert ((cut - want).abs() > limit)[live].any()
    assert ((written(x, num, c=torch.ones(1)).double() * C.double() - want).abs() > limit)[live].any()


def attention(x, cache, num=fused, stage=ATTENTION_FP8, prefill=False, **other):
    args = dict(query_scale=Q, cache_scale=C, cache=cache) | {k: x[k] for k in ("q_lat", "block_table", "lens")} | other
    args = {k: t for k, t in args.items() if k in stage.by_name}
    return stage.call(args, dict(scale=SCALE), num, prefill=prefill)


def queries(seed=1):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(T, H, 576, generator=g)
    q[0, 0, 3] = 300.0  # beyond 448 of the query's scale
    return dict(
        q_lat=q.bfloat16(), lens=torch.tensor([8, 3, 5, 0], dtype=torch.int32),
        block_table=torch.tensor([[3, 7], [1, 0], [8, 2], [0, 0]], dtype=torch.int32),
    )  # fmt: skip


def nearest(x, c):
    """x in units of c as the nearest of `codes`, ties to the even code, in float64: a search, no conversion."""
    values = torch.tensor(codes(), dtype=torch.float64)
    at = (x.float() / c).double()  # the one fp32 rounding on the way
    above = torch.searchsorted(values, at.contiguous()).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    odd = (above - 1 - len(values) // 2) % 2 == 1  # of the lower neighbour's code, counted from zero
    up = (high - at < at - low) | ((high - at == at - low) & odd)
    return torch.where(up, high, low)


def oracle(x, cache):
    """Attention in float64 over rounded rows and queries, token by token, and the bound of an element.

    A score of 576 products in fp32 is off by 2^-20 of the sum of their magnitudes at most (errors add like a random
    walk), and so is its weight's exponent; 2^-20 more for exp and 8 terms; half a bf16 unit for the result.
    """
    out, bound = (torch.zeros(T, H, 512, dtype=torch.float64) for _ in range(2))
    for t in range(T):
        if n := int(x["lens"][t]):
            r = nearest(torch.cat([cache[int(p)] for p in x["block_table"][t]])[:n], C) * C.double()
            q = nearest(x["q_lat"][t], Q) * Q.double()
            a = (SCALE * q @ r.T).softmax(-1)
            off = 2.0**-20 * (1 + 2 * SCALE * (q.abs() @ r.abs().T).amax(-1, keepdim=True))
            out[t], bound[t] = a @ r[:, :512], off * (a @ r[:, :512].abs())
    return out, bound


def excess(got, judged):
    """The worst error in units of its bound, half a bf16 unit of the value included."""
    want, bound = judged
    return float(((got.double() - want).abs() / (bound + half_ulp(want.abs() + bound, bf16))).max())


@pytest.fixture(scope="module")
def judged():
    x, r = queries(), rows()
    return x, r, oracle(x, plain(r))


@pytest.mark.parametrize("mode", ("fused", "unfused"))
def test_attention_reads_rounded_rows_and_queries(judged, mode):
    x, r, want = judged
    got = attention(x, written(r), Numerics(mode))
    assert excess(got["o_lat"], want) <= 1 and not got["o_lat"][3].any()
    assert (got["lse"][3] == -torch.inf).all()


ONE = torch.ones(1)
LOST = {  # a scale that is not delivered somewhere on its way: a production fault that only long texts showed
    "write": lambda x, r: attention(x, written(r, c=ONE)),
    "read": lambda x, r: attention(x, written(r), cache_scale=ONE),
    "output": lambda x, r: attention(x, written(r)),
    "scores": lambda x, r: attention(x, written(r), cache_scale=ONE),
    "queries": lambda x, r: attention(x, written(r), query_scale=ONE),
}
AFTER = {"output": 1 / C.double(), "scores": C.double()}  # what then happens to the output


@pytest.mark.parametrize("where", LOST)
def test_a_scale_that_is_not_delivered_breaks_the_bound(judged, where):
    x, r, want = judged
    assert excess(LOST[where](x, r)["o_lat"].double() * AFTER.get(where, 1), want) > 1


def test_queries_that_are_not_rounded_break_the_bound(judged):
    x, r, want = judged
    cache = written(r).float() * C
    assert excess(attention(x, cache, stage=ATTENTION)["o_lat"], want) > 1


def test_exact_mode_does_not_know_the_scale(judged):
    """Nothing is rounded, so scale and inverse cancel; prefill in one go equals single tokens."""
    x, r, _ = judged
    got = attention(x, written(r, exact), exact)
    want = attention(x, plain(r), exact, ATTENTION)["o_lat"]
    assert (got["o_lat"] - want).abs().max() < 1e-13
    lens = torch.arange(3, 8, dtype=torch.int32)
    line = dict(q_lat=torch.randn(5, H, 576).bfloat16(), lens=lens, block_table=torch.tensor([[8, 2]]).int())
    for num in (exact, fused):
        cache = written(r, num)
        one = attention(line | dict(block_table=line["block_table"].expand(5, -1)), cache, num)
        all_ = attention(line, cache, num, prefill=True)
        limit = 1e-13 if num is exact else 2.0**-7 * float(one["o_lat"].abs().max())  # a bf16 rounding may turn over
        assert (one["o_lat"].double() - all_["o_lat"].double()).abs().max() <= limit


def recurrence(seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    return dict(
        q=r(T, H, 128), k=r(T, H, 128), v=r(T, H, 128), raw_g=(2 * r(T, H * 128)).bfloat16(), b=r(T, H).bfloat16(),
        A_log=torch.rand(H, generator=g), dt_bias=r(H * 128), slots=torch.tensor([5, 0, 2, -1]).int(),
        recurrent=r(6, H, 128, 128).bfloat16(),
    )  # fmt: skip


@pytest.mark.parametrize("prefill", (False, True), ids=("decode", "prefill"))
def test_a_bf16_state_is_rounded_once_where_it_is_stored(prefill):
    """Half a bf16 unit, and 1e-5 of the largest entry for fp32. The output does not feel this token's rounding."""
    x = recurrence()
    x |= dict(slots=x["slots"][:1]) if prefill else {}
    lifted = {k: t.to(exact.storage(t.dtype)) for k, t in x.items()}
    want = RECURRENCE.call(lifted, {}, exact, prefill=prefill)["recurrent"]
    for num in (fused, Numerics("unfused")):
        got = RECURRENCE_BF16.call(x, {}, num, prefill=prefill)
        assert got["recurrent"].dtype == bf16
        error, limit = (got["recurrent"].double() - want).abs(), half_ulp(want, bf16) + 1e-5 * want.abs().max()
        assert (error <= limit).all() and (error > limit / 2).any()
        cut = (got["recurrent"].view(torch.int16) & ~1).view(bf16).double()
        assert ((cut - want).abs() > limit).any()
        same = RECURRENCE.call(x | dict(recurrent=x["recurrent"].float()), {}, num, prefill=prefill)
        assert torch.equal(same["o"], got["o"])
    assert torch.equal(RECURRENCE_BF16.call(lifted, {}, exact, prefill=prefill)["recurrent"], want)


def test_null_slots_keep_their_bits():
    x = recurrence() | dict(o=torch.empty(T, H, 128))
    x["recurrent"][[0, 1, 3, 4]] = torch.nan
    before = x["recurrent"].clone()
    RECURRENCE_BF16.check(x)
    RECURRENCE_BF16.apply(x, {}, fused)
    same = (x["recurrent"].view(torch.int16) == before.view(torch.int16)).flatten(1).all(1)
    assert same.tolist() == [True, True, False, True, True, False] and not x["o"][[1, 3]].any()


# Whole models.


def model(config: Config, seed=1) -> Model:
    return Model(config, all_weights(RandomCheckpoint(config, seed), config))


def logits(model: Model, num=exact, steps=1) -> list:
    state = DecodeState(model.config, slots=4, pages=12, page_size=4, num=num, order=3)
    d, out, requests = Decoder(model, state), [], []
    for prompt in ([256, *b"var"], [65]):
        requests.append(state.open())
        out.append(d.prefill(requests[-1], prompt).act["vocab_logits"])
    state.reserve(*((r, r.length + steps) for r in requests))
    state.poison(keep=requests)
    for i in range(steps):
        out.append(d.decode(requests, [65 + i, 97 + i], rows=3).act["vocab_logits"][:2].clone())
    return out


def apart(a, b) -> float:
    return max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def truth():
    return logits(model(tiny))


def test_exact_mode_is_the_same_model(truth):
    """1e-12: unit roundoff 1.1e-16 amplified by five layers."""
    assert apart(logits(model(KEPT)), truth) < 1e-12
    lost = model(KEPT)
    lost.weights["mla.cache_scale", 4] = torch.tensor([1.0])  # of the write and the read: nothing is rounded
    assert apart(logits(lost), truth) < 1e-12


@pytest.mark.parametrize("stage, argument", [
    (CACHE_WRITE_FP8, "cache_scale"), (ATTENTION_FP8, "cache_scale"), (ATTENTION_FP8, "query_scale"),
], ids=lambda x: getattr(x, "name", x))  # fmt: skip
def test_a_lost_scale_moves_the_model(truth, stage, argument, monkeypatch):
    """Query scale 1 on both sides is another rounding, so only its product is lost here."""
    law = stage.fn

    def lost(**args):
        if argument == "query_scale":
            args["scale"] = args["scale"] / args["query_scale"]
        else:
            args[argument] = torch.ones_like(args[argument])
        return law(**args)

    monkeypatch.setattr(stage, "fn", lost)
    assert apart(logits(model(KEPT)), truth) > 1e-3


def test_state_of_the_variants():
    s = DecodeState(KEPT, slots=3, pages=4, order=1)
    kinds = {name: t.dtype for (name, _), t in s.tensors.items()}
    assert kinds == dict(recurrent=bf16, conv=bf16, cache=f8)
    r = s.open()
    s.reserve((r, 20))
    for t in s.tensors.values():
        t.copy_(torch.randn(t.shape))
    back = s.to(exact).to(fused)
    assert not back.changed(s) and {t.dtype for t in s.to(exact).tensors.values()} == {torch.float64}
    s.poison(keep=[r])
    assert s.changed(back)["cache.3"] == [p for p in range(4) if p not in r.pages]
    plain_ = DecodeState(tiny, slots=3, pages=4)
    size = lambda s, n: sum(t.nbytes for (name, _), t in s.tensors.items() if name == n)  # noqa: E731
    assert all(2 * size(s, n) == size(plain_, n) for n in ("recurrent", "cache"))


@pytest.mark.parametrize("options, num", [(dict(tp=2, dcp=2, lse_base="2"), exact), (dict(tp=1), fused)])
def test_ranks_keep_variants_as_one_device_does(options, num):
    config = replace(WIDE, **VARIANT)
    whole = Model(config, all_weights(sources(config), config))
    want = walk(Decoder(whole, single_state(num, config)))
    got = walk(ranked(LocalWorld(**options), num, config))
    assert apart(got, want) < 1e-12 if num is exact else all(map(torch.equal, got, want))


# Twins.


def lockstep(*twins: LawTwin, steps=3) -> list:
    loaded, prompts = model(KEPT), [[256, *b"lock"], [256, *b"step by step"]]
    state = make_state(KEPT, [len(p) for p in prompts], steps, "cpu")
    decoder = Lockstep(loaded, state, graphs=False, **served_by(*twins))
    requests, last = open_requests(decoder, prompts)
    for _ in range(steps):
        last = decoder.tokens(decoder.decode(requests, last, rows=3))[:2].tolist()
    assert not decoder.refused
    return decoder.findings()


SPANS = ("mla.cache_write_fp8", "mla.attention_fp8", "kda.recurrence_bf16")


def test_lockstep_judges_the_variants():
    found = lockstep(*(LawTwin(f"law.{s}", (s,)) for s in SPANS))
    assert all(f.ok for f in found), [f.reasons for f in found if not f.ok][:3]
    assert {s for f in found for s in f.place.stages} == set(SPANS)
    assert any(f.dtype == "float8_e4m3fn" and f.compared for f in found)


def unscaled_rows(values, tensors):
    values["cache"] = fused.round8(values["cache"].float() * tensors["cache_scale"])


def unscaled_read(values, tensors):
    args = {k: t for k, t in tensors.items() if k not in ("o_lat", "lse")}
    values |= ATTENTION_FP8.call(args | dict(cache_scale=torch.ones(1)), dict(scale=SCALE), fused)


def state_of_fp32(values, tensors):
    """A state that is cut off where it should be rounded, as a plain copy of the upper halves does."""
    values["recurrent"] = (values["recurrent"].float().view(torch.int32) + 0x8000).view(f32)


@pytest.mark.parametrize("stage, spoil, tensor", [
    (SPANS[0], unscaled_rows, "cache"), (SPANS[1], unscaled_read, "o_lat"), (SPANS[2], state_of_fp32, "recurrent"),
], ids=SPANS)  # fmt: skip
def test_lockstep_names_a_fault_of_a_variant(stage, spoil, tensor):
    found = [f.place for f in lockstep(LawTwin("fault", (stage,), spoil=spoil)) if not f.ok]
    assert {p.stages for p in found} == {(stage,)} and tensor in {p.tensor for p in found}


def test_twins_refuse_the_variants_and_say_so():
    """kda.decode keeps an fp32 state: every layer falls to the law, with the reason."""
    loaded = model(KEPT)
    state = make_state(KEPT, [4], 4, "cpu")
    decoder = FastDecoder(loaded, state, backend="latency_specialized")
    r = state.open()
    decoder.prefill(r, [1, 2, 3, 4])
    decoder.decode([r], [5])
    reasons = {e.key: e.reason for e in decoder.explain() if e.stages == ("kda.conv",)}
    assert len(reasons) == 3 and set(reasons.values()) == {"kda.decode has no form for kda.recurrence_bf16"}
    assert {e.served_by for e in decoder.explain() if e.stages[0].startswith("kda.rec")} == {"reference"}


def test_speculation_takes_fp8_rows_and_refuses_a_bf16_state():
    SpecState(DecodeState(replace(KEPT, kda_state="fp32"), slots=9, pages=4))
    with pytest.raises(ContractError, match="speculation over a bf16 KDA state; allowed is fp32"):
        SpecState(DecodeState(KEPT, slots=9, pages=4))
