"""The law against independent code: fla-core's plain PyTorch forms of KDA and attention residuals, where installed.

Skipped without it: pip install fla-core einops triton. Its forms compute in float32; the bound of 2e-5 is some hundred
float32 roundings, and a changed gate bound, scale or norm is far outside.
"""

import pytest
import torch

import reference.kda_prefill  # noqa: F401  (registers the laws for many tokens)
from reference.attn_res import FINAL, PRE
from reference.kda import CONV, RECURRENCE
from reference.numerics import exact

naive = pytest.importorskip("fla.ops.kda.naive", reason="fla-core (with einops and triton) is not installed")

H, T, BOUND = 3, 70, 2e-5


def apart(a, b) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def kda_case():
    g = torch.Generator().manual_seed(5)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    return dict(q=r(T, H, 128), k=r(T, H, 128), v=r(T, H, 128), raw_g=r(T, H * 128) * 2, b=r(T, H),
                A_log=torch.rand(H, generator=g) * 2, dt_bias=r(H * 128)), r(1, H, 128, 128) * 0.3  # fmt: skip


@pytest.mark.parametrize("bound", (-5.0, -4.9))
def test_recurrence(bound):
    """Chunk form and single steps against fla's loop; with another gate bound they must differ."""
    from fla.ops.kda.gate import naive_kda_lowerbound_gate

    x, start = kda_case()
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
    gate = naive_kda_lowerbound_gate(x["raw_g"].view(T, H, 128), x["A_log"], x["dt_bias"], lower_bound=bound)
    want, last = naive.naive_recurrent_kda(q[None], k[None], x["v"][None], gate[None], x["b"].sigmoid()[None],
                                           initial_state=start, output_final_state=True)  # fmt: skip
    pool, slots = (
        torch.cat([torch.full_like(start, torch.nan), start.mT]).double(),
        torch.tensor([1], dtype=torch.int32),
    )
    lifted = {n: t.double() for n, t in x.items()}
    got = RECURRENCE.call(lifted | dict(slots=slots, recurrent=pool), {}, exact, prefill=True)
    single = {n: t if n in ("A_log", "dt_bias") else t[:1] for n, t in lifted.items()}
    step = RECURRENCE.call(single | dict(slots=slots, recurrent=pool), {}, exact)
    distances = (apart(got["o"], want[0]), apart(got["recurrent"].mT, last), apart(step["o"], want[0, :1]))
    assert all(d < BOUND for d in distances) if bound == -5.0 else all(d > BOUND for d in distances)


def test_attention_residuals():
    from fla.ops.attnres.naive import naive_attnres

    g = torch.Generator().manual_seed(6)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    x = dict(prefix=r(4, 96), blocks=r(4, 8, 96), w_norm=r(96), w_proj=r(96), w_out=r(96))
    sources = [*x["blocks"][:, :5].unbind(1), x["prefix"]]
    want = naive_attnres(x["w_proj"], sources, x["w_norm"], output_rms_weight=x["w_out"], rms_eps=1e-5)
    lifted = {n: t.double() for n, t in x.items()}
    assert apart(PRE.call(lifted, dict(nb=5, write=-1), exact)["out"], want) < BOUND
    del lifted["w_out"]
    plain = naive_attnres(x["w_proj"], sources, x["w_norm"], rms_eps=1e-5)
    assert apart(FINAL.call(lifted, dict(nb=5, write=-1), exact)["out"], plain) < BOUND
    assert apart(FINAL.call(lifted, dict(nb=4, write=-1), exact)["out"], plain) > BOUND


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fla-core's convolution update is a GPU kernel; no GPU here")
def test_convolution_update():
    from fla.modules.causal_conv1d.ops import causal_conv1d_update

    n, X = 5, 3 * 128
    x, taps, window = torch.randn(n, X), torch.randn(4, X), torch.randn(n + 1, 3, X)
    cache = torch.cat([torch.zeros(n, X, 1), window[1:].mT], -1).cuda().contiguous()
    want, _ = causal_conv1d_update(x.cuda(), cache, weight=taps.mT.contiguous().cuda(), activation="silu")
    slots = torch.arange(1, n + 1, dtype=torch.int32)
    lifted = dict(x=x.double(), conv_weight=taps.double(), conv=window.double())
    got = CONV.call(lifted | dict(slots=slots), {}, exact)
    assert apart(torch.cat([got[i].flatten(1) for i in "qkv"], 1), want.cpu()) < BOUND
