"""Latent MoE and SiTU: routing with ties, experts against dense matrices, grouped against per token (SPEC.md 7, 8)."""

import pytest
import torch

import reference.moe as moe
from reference.mlp import GATE_UP, situ
from reference.mxfp4 import dequant, quant
from reference.numerics import exact, fused
from reference.stage import ContractError

T, E, A, L, I = 6, 9, 3, 64, 32


def experts(seed=0):
    g = torch.Generator().manual_seed(seed)
    w13, s13 = quant(torch.randn(E, 2 * I, L, generator=g) / 8)
    w2, s2 = quant(torch.randn(E, L, I, generator=g) / 6)
    z = torch.randn(T, L, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=g)[:A] for _ in range(T)]).int()
    return dict(z=z, ids=ids, w13=w13, w13_scale=s13), dict(ids=ids, w2=w2, w2_scale=s2)


def test_experts_equal_dense_matrices():
    up, down = experts()
    m = moe.EXPERTS_UP.call(up, {}, exact)["m"]
    y = moe.EXPERTS_DOWN.call(down | dict(m=m), {}, exact)["y"]
    for t in range(T):
        for a, e in enumerate(up["ids"][t].tolist()):
            w13 = dequant(up["w13"][e], up["w13_scale"][e], torch.float64)
            w2 = dequant(down["w2"][e], down["w2_scale"][e], torch.float64)
            gate, lift = (w13 @ up["z"][t].double()).chunk(2)
            inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(lift / 25)
            assert (y[t, a] - w2 @ inner).abs().max() < 1e-13


@pytest.mark.parametrize("num", (exact, fused), ids=lambda n: n.mode)
def test_grouped_prefill_equals_per_token(num):
    up, down = experts(1)
    up["ids"][:] = up["ids"][0]  # every token on the same experts
    down["ids"] = up["ids"]
    one, two = (moe.EXPERTS_UP.call(up, {}, num, prefill=p)["m"] for p in (False, True))
    assert torch.allclose(one.double(), two.double(), rtol=1e-12 if num is exact else 2**-7, atol=1e-12)
    one, two = (moe.EXPERTS_DOWN.call(down | dict(m=one), {}, num, prefill=p)["y"] for p in (False, True))
    assert torch.allclose(
        one.double(), two.double(), rtol=1e-12 if num is exact else 2**-7, atol=1e-12 if num is exact else 1e-3
    )


def test_slices_of_tokens_change_nothing(monkeypatch):
    up, _ = experts(2)
    whole = moe.EXPERTS_UP.call(up, {}, exact)["m"]
    monkeypatch.setattr(moe, "GATHER_ELEMENTS", 1)
    assert torch.allclose(moe.EXPERTS_UP.call(up, {}, exact)["m"], whole, rtol=1e-13)


def test_topk_ties_go_to_the_lowest_expert_and_bias_does_not_weigh():
    logits, bias = torch.zeros(2, E), torch.zeros(E)
    logits[1, 7], bias[5] = 1.0, 0.5
    got = moe.TOPK.call(dict(logits=logits, bias=bias), dict(topk=A), fused)
    assert got["ids"].tolist() == [[5, 0, 1], [5, 7, 0]]
    s = torch.sigmoid(torch.tensor([0.0, 1.0, 0.0]))
    assert torch.allclose(got["weights"][1], s / s.sum()) and torch.allclose(got["weights"].sum(-1), torch.ones(2))


def test_finalize_and_combine_round_once():
    y, w = torch.randn(T, A, L).bfloat16(), torch.rand(T, A)
    got = moe.FINALIZE.call(dict(y=y, weights=w), {}, fused)["out"]
    assert torch.equal(got, sum(y[:, a].float() * w[:, a, None] for a in range(A)).bfloat16())
    routed, shared = torch.randn(T, L), torch.randn(T, L).bfloat16()
    out = moe.COMBINE.call(dict(routed=routed, shared=shared), {}, fused)["out"]
    assert torch.equal(out, (routed + shared.float()).bfloat16())
    assert not torch.equal(out, (routed.bfloat16() + shared))


def test_situ_saturates_where_swiglu_does_not():
    a, u = torch.tensor([100.0, -100.0, 1.0, torch.inf]), torch.tensor([100.0, 1.0, -1e6, torch.inf])
    y = situ(a, u)
    assert torch.allclose(y, torch.tensor([100 * torch.tanh(torch.tensor(4.0)), 0.0, y[2], 100.0]), atol=1e-5)
    assert y[2] < -0.7 * 25 and situ(torch.tensor(torch.nan), torch.tensor(1.0)).isnan()
    assert float(torch.nn.functional.silu(a[0]) * u[0]) > 9000  # the mutant that must not pass for it


def test_gate_rows_come_first():
    x, w = torch.eye(4)[:1].double(), torch.zeros(6, 4).double()
    w[0, 0], w[3, 0] = 2.0, 0.5
    out = GATE_UP.call(dict(x=x, w=w), {}, exact)["out"]
    assert (
        torch.allclose(out[0, 0], situ(torch.tensor(2.0).double(), torch.tensor(0.5).double())) and not out[0, 1:].any()
    )


def test_contract():
    up, _ = experts()
    args = up | dict(m=torch.zeros(T, A, I).bfloat16())
    moe.EXPERTS_UP.check(args)
    with pytest.raises(ContractError, match=r"moe.experts_up: ids holds 9; allowed are 0..8"):
        moe.EXPERTS_UP.check(args | dict(ids=up["ids"] + 1))
    with pytest.raises(ContractError, match=r"w13 is torch.int32; allowed is torch.uint8"):
        moe.EXPERTS_UP.check(args | dict(w13=up["w13"].int()))
