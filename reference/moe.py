"""Latent mixture of experts with MXFP4 weights, and the shared expert beside it (SPEC.md 8).

The reference is W4A16: weights dequantised exactly, bf16 activations, fp32 accumulation.
"""

import torch
from torch import Tensor

from .linear import linear_stage, project, rms_norm
from .mlp import gate_up_stage, gated_up
from .mxfp4 import decode
from .numerics import Numerics
from .stage import Stage, activation, f32, i32, output, u8, weight, within

EPS = 1e-5
GATHER_ELEMENTS = 1 << 27  # expert weights dequantised at once

LATENT_DOWN = linear_stage("moe.latent_down", "8.2")
SHARED_UP = gate_up_stage("moe.shared_up", "8.4")
SHARED_DOWN = linear_stage("moe.shared_down", "8.4")

ROUTER = Stage(
    "moe.router",
    "8.1",
    axes=dict(T="tokens in this step", E="experts", D="hidden size"),
    tensors=(activation("x", "T D"), weight("w", "E D"), output("logits", "T E", f32)),
    flops=lambda d, attrs: 2 * d["T"] * d["E"] * d["D"],
)


@ROUTER.law
def router(x, w, *, num):
    """bf16 operands, fp32 accumulation and result: [T, E]."""
    return dict(logits=project(x, w, num))


TOPK = Stage(
    "moe.topk",
    "8.1",
    axes=dict(T="tokens in this step", E="experts", A="experts per token"),
    tensors=(
        activation("logits", "T E", f32),
        weight("bias", "E", f32),
        output("ids", "T A", i32),
        output("weights", "T A", f32),
    ),
    attrs=dict(topk="experts per token"),
)


@TOPK.law
def topk(logits, bias, *, topk, num):
    """Chosen by sigmoid + bias, ties to the lowest expert; weighted by the sigmoid alone, renormalised."""
    choice = torch.sigmoid(num.up(logits)) + num.up(bias)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return dict(ids=ids, weights=weigh(logits, ids, num))


def weigh(logits: Tensor, ids: Tensor, num: Numerics) -> Tensor:
    """Weights [T, A] of the experts `ids` [T, A]: their sigmoids, summing to one."""
    chosen = torch.sigmoid(num.up(logits)).gather(-1, ids.long())
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def _experts(name: str, tensors: tuple, flops) -> Stage:
    axes = dict(
        T="tokens in this step", E="experts", A="experts per token", L="latent width", G="2I", I="expert width",
        LP="L / 2 bytes", LS="L / 32 scales", IP="I / 2 bytes", IS="I / 32 scales",
    )  # fmt: skip

    def traffic(d, attrs):  # distinct experts: at most one per (token, choice)
        row = d["G"] * (d["LP"] + d["LS"]) if "G" in d else d["L"] * (d["IP"] + d["IS"])
        return min(d["T"] * d["A"], d["E"]) * row + 2 * d["T"] * d["A"] * (d["I"] + d["L"])

    return Stage(name, "8.3", axes, tensors, (within("ids", "E", low=0),), flops=flops, traffic=traffic)


EXPERTS_UP = _experts(
    "moe.experts_up",
    (
        activation("z", "T L"),
        activation("ids", "T A", i32),
        weight("w13", "E G LP", u8),
        weight("w13_scale", "E G LS", u8),
        output("m", "T A I"),
    ),
    lambda d, attrs: 2 * d["T"] * d["A"] * d["G"] * d["L"],
)

EXPERTS_DOWN = _experts(
    "moe.experts_down",
    (
        activation("m", "T A I"),
        activation("ids", "T A", i32),
        weight("w2", "E L IP", u8),
        weight("w2_scale", "E L IS", u8),
        output("y", "T A L"),
    ),
    lambda d, attrs: 2 * d["T"] * d["A"] * d["I"] * d["L"],
)


def _per_token(fn, x: Tensor, ids: Tensor, packed: Tensor, scale: Tensor, num: Numerics) -> Tensor:
    """fn(x [t, A, 1, K], weights [t, A, N, K]) over slices of tokens small enough to dequantise their experts."""
    step = max(1, GATHER_ELEMENTS // (ids.shape[1] * packed[0].numel() * 2))
    parts = [
        fn(a[:, :, None], decode(packed[e.long()], scale[e.long()], num.compute))
        for a, e in zip(x.split(step), ids.split(step), strict=True)
    ]
    return torch.cat(parts).squeeze(2)


def _per_expert(fn, x: Tensor, ids: Tensor, packed: Tensor, scale: Tensor, num: Numerics) -> Tensor:
    """The same, expert by expert: fn(x [n, K], weights [N, K]). For prefill, where many tokens share an expert."""
    flat, owner = x.flatten(0, 1), ids.flatten()
    order, parts = owner.argsort(stable=True), []
    for e, rows in zip(*_groups(owner[order], order), strict=True):
        parts.append(fn(flat[rows], decode(packed[e], scale[e], num.compute)))
    out = torch.cat(parts)
    return out[order.argsort()].unflatten(0, ids.shape)


def _groups(owner: Tensor, order: Tensor):
    experts, counts = owner.unique_consecutive(return_counts=True)
    return experts.tolist(), order.split(counts.tolist())


@EXPERTS_UP.law
def experts_up(z, ids, w13, w13_scale, *, num):
    """z [T, L] through the chosen experts' gate and up halves, then SiTU: [T, A, I]."""
    z = z[:, None].expand(-1, ids.shape[1], -1)
    return dict(m=_per_token(lambda x, w: gated_up(x, w, num), z, ids, w13, w13_scale, num))


@EXPERTS_UP.prefill
def experts_up_grouped(z, ids, w13, w13_scale, *, num):
    z = z[:, None].expand(-1, ids.shape[1], -1)
    return dict(m=_per_expert(lambda x, w: gated_up(x, w, num), z, ids, w13, w13_scale, num))


@EXPERTS_DOWN.law
def experts_down(m, ids, w2, w2_scale, *, num):
    """m [T, A, I] through the chosen experts' down projections, each rounded: [T, A, L]."""
    return dict(y=_per_token(lambda x, w: num.round(project(x, w, num)), m, ids, w2, w2_scale, num))


@EXPERTS_DOWN.prefill
def experts_down_grouped(m, ids, w2, w2_scale, *, num):
    return dict(y=_per_expert(lambda x, w: num.round(project(x, w, num)), m, ids, w2, w2_scale, num))


FINALIZE = Stage(
    "moe.finalize",
    "8.5",
    axes=dict(T="tokens in this step", A="experts per token", L="latent width"),
    tensors=(activation("y", "T A L"), activation("weights", "T A", f32), output("out", "T L")),
    flops=lambda d, attrs: 2 * d["T"] * d["A"] * d["L"],
)


@FINALIZE.law
def finalize(y, weights, *, num):
    """Weighted sum over a token's experts, fp32, one rounding: [T, L]."""
    return dict(out=num.round((num.up(y) * num.up(weights)[..., None]).sum(1)))


LATENT_NORM = Stage(
    "moe.latent_norm",
    "8.5",
    axes=dict(T="tokens in this step", L="latent width"),
    tensors=(activation("x", "T L"), weight("w_latent_norm", "L"), output("out", "T L")),
    flops=lambda d, attrs: 4 * d["T"] * d["L"],
)


@LATENT_NORM.law
def latent_norm(x, w_latent_norm, *, num):
    return dict(out=num.round(rms_norm(num.up(x), w_latent_norm, EPS, num)))


LATENT_UP = Stage(
    "moe.latent_up",
    "8.5",
    axes=dict(T="tokens in this step", L="latent width", D="hidden size"),
    tensors=(activation("x", "T L"), weight("w", "D L"), output("routed", "T D", f32)),
    flops=lambda d, attrs: 2 * d["T"] * d["D"] * d["L"],
)


@LATENT_UP.law
def latent_up(x, w, *, num):
    """Back to the hidden width; the fused path adds the shared expert before it rounds: [T, D]."""
    return dict(routed=num.chain(project(x, w, num)))


COMBINE = Stage(
    "moe.combine",
    "8.5",
    axes=dict(T="tokens in this step", D="hidden size"),
    tensors=(activation("routed", "T D", f32), activation("shared", "T D"), output("out", "T D")),
    flops=lambda d, attrs: d["T"] * d["D"],
)


@COMBINE.law
def combine(routed, shared, *, num):
    """routed + shared, one rounding: the next layer's delta."""
    return dict(out=num.round(num.up(routed) + num.up(shared)))
