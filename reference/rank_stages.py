"""Stages that exist only where ranks share a model: the cut embedding, own experts, the tails of SPEC.md 8.5."""

import torch

from .moe import EPS
from .stage import Stage, activation, f32, i32, i64, index, output, weight

EMBED_SHARD = Stage(
    "embed.shard",
    "3",
    axes=dict(T="tokens in this step", N="rows of the vocabulary on this rank", D="hidden size"),
    tensors=(index("ids", "T", i64), weight("w", "N D"), output("out", "T D")),
    attrs=dict(first="token of row 0"),
    traffic=lambda d, attrs: 4 * d["T"] * d["D"],
)


@EMBED_SHARD.law
def embed_shard(ids, w, *, first, num):
    """ids [T] -> rows of w [N, D]; a token of another rank gives a zero row, so the sum over ranks is exact."""
    at = ids - first
    here = (at >= 0) & (at < len(w))
    rows = w[at.clamp(0, len(w) - 1)].to(num.storage(w.dtype))
    return dict(out=torch.where(here[:, None], rows, 0))


OWN_EXPERTS = Stage(
    "moe.own_experts",
    "8.3",
    axes=dict(T="tokens in this step", A="experts per token"),
    tensors=(
        activation("ids", "T A", i32),
        activation("weights", "T A", f32),
        output("own_ids", "T A", i32),
        output("own_weights", "T A", f32),
    ),
    attrs=dict(first="this rank's first expert", count="experts on this rank"),
)


@OWN_EXPERTS.law
def own_experts(ids, weights, *, first, count, num):
    """Local ids; a choice that lies on another rank becomes local expert 0 with weight 0. All [T, A]."""
    at = ids - first
    here = (at >= 0) & (at < count)
    return dict(own_ids=torch.where(here, at, 0), own_weights=torch.where(here, weights, 0))


FINALIZE_CHAIN = Stage(
    "moe.finalize_chain",
    "8.5",
    axes=dict(T="tokens in this step", A="experts per token", L="latent width"),
    tensors=(activation("y", "T A L"), activation("weights", "T A", f32), output("out", "T L")),
    flops=lambda d, attrs: 2 * d["T"] * d["A"] * d["L"],
)


@FINALIZE_CHAIN.law
def finalize_chain(y, weights, *, num):
    """The older weighted sum: each product rounded, then added into a running sum that is rounded every time."""
    terms = num.round(num.up(y) * num.up(weights)[..., None])
    total = terms[:, 0]
    for a in range(1, terms.shape[1]):
        total = num.round(num.up(total) + num.up(terms[:, a]))
    return dict(out=total)


NORM_SQUARES = Stage(
    "moe.latent_norm_squares",
    "8.5",
    axes=dict(T="tokens in this step", L="latent width"),
    tensors=(activation("x", "T L"), weight("w_latent_norm", "L"), output("out", "T L")),
    flops=lambda d, attrs: 4 * d["T"] * d["L"],
)


@NORM_SQUARES.law
def norm_squares(x, w_latent_norm, *, num):
    """The norm of tier 0: every square is rounded to bf16 before the fp32 mean; one rounding at the end. [T, L]."""
    squares = num.up(num.round(num.up(x).square()))
    inv = (squares.mean(-1, keepdim=True) + EPS).rsqrt()
    return dict(out=num.round(num.up(x) * inv * num.up(w_latent_norm)))


FOLD = Stage(
    "moe.fold",
    "8.5",
    axes=dict(T="tokens in this step", N="columns of this rank", D="hidden size"),
    tensors=(activation("routed", "T N", f32), activation("shared", "T D"), output("out", "T D")),
    attrs=dict(rank="whose columns"),
    flops=lambda d, attrs: d["T"] * d["N"],
)


@FOLD.law
def fold(routed, shared, *, rank, num):
    """Tier 2: this rank's columns of the routed output are added to its partial shared output. [T, D]."""
    left, right = rank * routed.shape[1], (rank + 1) * routed.shape[1]
    mine = num.round(num.up(shared[:, left:right]) + num.up(routed))
    return dict(out=torch.cat((shared[:, :left], mine, shared[:, right:]), -1))
