"""MLA: absorbed against the published non-absorbed form, paging, masking, causal prefill against single steps."""

import pytest
import torch

from reference.mla import ABSORB, ATTENTION, CACHE_WRITE, LORA_NORM, OUT_GATE, V_UP, attend
from reference.numerics import exact, fused
from reference.stage import ContractError

T, H, P, B = 4, 2, 9, 4
SCALE = dict(scale=192**-0.5)


def case(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g).to(dtype)  # noqa: E731
    return dict(
        q=r(T, H * 192), w_uk=r(H, 128, 512) / 11, w_uv=r(H, 128, 512) / 22, cache=r(P, B, 576),
        block_table=torch.tensor([[3, 7], [1, 0], [8, 2], [0, 0]], dtype=torch.int32),
        lens=torch.tensor([8, 3, 5, 0], dtype=torch.int32),
    )  # fmt: skip


def absorbed(x, num=exact):
    q_lat = ABSORB.call(dict(q=x["q"], w_uk=x["w_uk"]), {}, num)["q_lat"]
    got = ATTENTION.call(dict(q_lat=q_lat, **{k: x[k] for k in ("block_table", "lens", "cache")}), SCALE, num)
    return V_UP.call(dict(o_lat=got["o_lat"], w_uv=x["w_uv"]), {}, num)["v"], got["lse"]


def non_absorbed(x):
    """Keys [nope | pe] and values made from the latent rows, one token and head at a time."""
    out, lse = torch.zeros(T, H, 128, dtype=torch.float64), torch.full((T, H), -torch.inf, dtype=torch.float64)
    for t in range(T):
        n = int(x["lens"][t])
        rows = torch.cat([x["cache"][int(p)] for p in x["block_table"][t]])[:n]
        for h in range(H if n else 0):
            key = torch.cat([rows[:, :512] @ x["w_uk"][h].mT, rows[:, 512:]], 1)
            scores = key @ x["q"].view(T, H, 192)[t, h] * 192**-0.5
            out[t, h] = scores.softmax(0) @ (rows[:, :512] @ x["w_uv"][h].mT)
            lse[t, h] = scores.exp().sum().log()
    return out.flatten(1), lse


def test_absorbed_equals_non_absorbed():
    x = case()
    (v, lse), (want, want_lse) = absorbed(x), non_absorbed(x)
    assert (v - want).abs().max() < 1e-13 and torch.allclose(lse, want_lse, atol=1e-12, rtol=0)
    assert (absorbed(x | dict(lens=x["lens"] - (x["lens"] == 8).int()))[0] - want).abs().max() > 1e-3


def test_unread_rows_may_be_nan():
    x = case()
    want = absorbed(x)[0]
    x["cache"][[0, 4, 5, 6]] = torch.nan  # pages of nobody, the null page among them
    x["cache"][1, 3], x["cache"][2, 1:] = torch.nan, torch.nan  # the tails of the last pages
    v, lse = absorbed(x)
    assert torch.equal(v, want) and not v[3].any() and (lse[3] == -torch.inf).all()


def test_causal_prefill_equals_single_steps():
    g = torch.Generator().manual_seed(3)
    n, start = 150, 5
    q = torch.randn(n, H, 576, generator=g, dtype=torch.float64)
    cache = torch.randn(60, B, 576, generator=g, dtype=torch.float64)
    table = (torch.randperm(58, generator=g)[:40] + 1).int()[None]
    lens = torch.arange(start + 1, start + n + 1, dtype=torch.int32)
    cache[table[0, -1], -1:] = torch.nan
    a = ATTENTION.call(dict(q_lat=q, block_table=table, lens=lens, cache=cache), SCALE, exact, prefill=True)
    b = ATTENTION.call(dict(q_lat=q, block_table=table.expand(n, -1), lens=lens, cache=cache), SCALE, exact)
    assert all((a[k] - b[k]).abs().max() < 1e-13 for k in a)


def test_sharp_and_flat_scores_stay_finite():
    q, rows = torch.full((1, 1, 576), 1e4), torch.ones(1, 3, 576)
    rows[:, 1] = -1.0
    o, lse = attend(q, rows, torch.ones(1, 1, 3, dtype=torch.bool), 1.0, fused)
    assert o.isfinite().all() and torch.allclose(o, torch.ones_like(o)) and lse.isfinite().all()


def test_cache_rows_land_where_slot_mapping_says():
    x = dict(kv_c=torch.ones(3, 512).bfloat16(), k_pe=torch.full((3, 64), 2.0).bfloat16())
    cache = torch.full((P, B, 576), torch.nan).bfloat16()
    rows = torch.tensor([7 * B + 2, 0, B], dtype=torch.int64)
    CACHE_WRITE.apply(x | dict(slot_mapping=rows, cache=cache), {}, fused)
    live = cache.flatten(0, 1).isfinite().all(-1)
    assert live.nonzero().flatten().tolist() == [B, 7 * B + 2]  # row 0 is null and stays
    assert (cache[7, 2, :512] == 1).all() and (cache[7, 2, 512:] == 2).all()


def test_lora_norm_takes_its_eps():
    x = dict(q_a=torch.randn(2, 32).double() / 64, kv_a=torch.randn(2, 512).double() / 64,
             w_q_norm=torch.ones(32).double(), w_kv_norm=torch.ones(512).double())  # fmt: skip
    one, two = (LORA_NORM.call(x, dict(eps=eps), exact)["kv_c"] for eps in (1e-5, 1e-6))
    assert 1e-3 < float((one - two).norm() / two.norm()) < 5e-2  # small rows feel it: SPEC.md 18.1
    assert (two - x["kv_a"] / (x["kv_a"].pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).abs().max() < 1e-13


def test_gate_is_a_sigmoid():
    v, gate = torch.randn(2, 256).double(), torch.randn(2, 256).double()
    assert torch.allclose(OUT_GATE.call(dict(v=v, gate=gate), {}, exact)["out"], v / (1 + (-gate).exp()), rtol=1e-13)


def test_contract():
    x = case(dtype=torch.bfloat16)
    args = dict(q_lat=torch.zeros(T, H, 576).bfloat16(), o_lat=torch.zeros(T, H, 512).bfloat16(), lse=torch.zeros(T, H))
    args |= {k: x[k] for k in ("block_table", "lens", "cache")}
    ATTENTION.check(args)
    with pytest.raises(ContractError, match=r"block_table holds 9; allowed are 0..8"):
        ATTENTION.check(args | dict(block_table=x["block_table"] + 1))
    with pytest.raises(ContractError, match=r"lens holds 9; the block table has room for 8 rows"):
        ATTENTION.check(args | dict(lens=x["lens"] + 1))
    with pytest.raises(ContractError, match=r"cache has R = 575; allowed is 576"):
        ATTENTION.check(args | dict(cache=x["cache"][..., :575]))
    with pytest.raises(ContractError, match=r"slot_mapping holds 36; allowed are rows 0..35"):
        CACHE_WRITE.check(dict(kv_c=torch.zeros(1, 512).bfloat16(), k_pe=torch.zeros(1, 64).bfloat16(),
                               slot_mapping=torch.tensor([36]), cache=x["cache"]))  # fmt: skip
