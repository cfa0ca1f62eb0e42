"""Attention residuals: properties of SPEC.md 4, against a second reading written with loops in float64."""

import pytest
import torch

from reference.attn_res import EPS, FINAL, POST, PRE
from reference.numerics import MODES, Numerics, exact, fused
from reference.stage import ContractError

T, B, D = 5, 8, 96


def inputs(seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g).to(dtype)  # noqa: E731
    return dict(prefix=r(T, D), blocks=r(T, B, D), w_norm=r(D), w_proj=r(D), delta=r(T, D), w_out=r(D))


def second_reading(prefix, blocks, w_norm, w_proj, delta, w_out, nb):
    """One token and one source at a time, with the norm applied to the vector before the dot product."""
    out = torch.empty_like(prefix)
    for t in range(len(prefix)):
        p = prefix[t] + delta[t]
        sources = [blocks[t, j] for j in range(nb)] + [p]
        logits = torch.stack([(v / (v.pow(2).mean() + EPS).sqrt() * w_norm) @ w_proj for v in sources])
        weights = logits.exp() / logits.exp().sum()
        mixed = sum(a * v for a, v in zip(weights, sources, strict=True))
        out[t] = mixed / (mixed.pow(2).mean() + EPS).sqrt() * w_out
    return out


@pytest.mark.parametrize("nb", range(9))
def test_equals_the_second_reading(nb):
    x = inputs(nb, torch.float64)
    out = PRE.call(x, dict(nb=nb, write=-1), exact)["out"]
    want = second_reading(**x, nb=nb)
    assert (out - want).abs().max() < 1e-12 * want.abs().max()
    assert (out - second_reading(**(x | dict(prefix=x["prefix"] + 1e-9)), nb=nb)).abs().max() > 1e-12 * want.abs().max()


@pytest.mark.parametrize("mode", MODES)
def test_without_blocks_the_prefix_passes(mode):
    x = inputs()
    del x["delta"], x["w_out"]
    num = Numerics(mode)
    x = {k: v.to(num.storage(v.dtype)) for k, v in x.items()}
    assert torch.equal(FINAL.call(x, dict(nb=0, write=-1), num)["out"], x["prefix"])


def test_a_constant_vector_is_mixed_to_itself():
    """The softmax weights sum to one."""
    x = inputs(1, torch.float64)
    x["blocks"][:] = 0.75
    x["prefix"][:], x["delta"][:] = 0.5, 0.25
    del x["w_out"]
    assert (POST.call(x, dict(nb=8, write=-1), exact)["out"] - 0.75).abs().max() < 1e-15


def test_a_written_block_is_the_new_prefix_and_is_not_read():
    x = inputs(2)
    x["blocks"][:, 3:] = torch.nan
    got = PRE.call(x, dict(nb=3, write=3), fused)
    p = (x["prefix"].float() + x["delta"].float()).bfloat16()
    assert torch.equal(got["prefix"], p) and torch.equal(got["blocks"][:, 3], p)
    assert torch.equal(got["blocks"][:, :3], x["blocks"][:, :3]) and got["blocks"][:, 4:].isnan().all()
    assert got["out"].isfinite().all()


def test_the_unfused_chain_rounds_once_more():
    x = inputs(3)
    one, two = (PRE.call(x, dict(nb=8, write=-1), Numerics(m))["out"] for m in ("fused", "unfused"))
    truth = PRE.call(x, dict(nb=8, write=-1), exact)["out"]
    assert (one.double() - truth).norm() < (two.double() - truth).norm() < 3 * (one.double() - truth).norm()


def test_contract():
    x = inputs() | dict(out=torch.empty(T, D, dtype=torch.bfloat16))
    PRE.check(x)
    with pytest.raises(ContractError, match=r"attn_res.pre: blocks has B = 9 slots; allowed are 1..8"):
        PRE.check(x | dict(blocks=torch.zeros(T, 9, D, dtype=torch.bfloat16)))
    with pytest.raises(ContractError, match=r"delta is torch.float32; allowed is torch.bfloat16"):
        PRE.check(x | dict(delta=x["delta"].float()))
    with pytest.raises(ContractError, match=r"w_norm has D = 95; allowed is 96"):
        PRE.check(x | dict(w_norm=x["w_norm"][:95]))
    with pytest.raises(ContractError, match=r"unknown tensor 'gate'"):
        PRE.check(x | dict(gate=x["delta"]))
