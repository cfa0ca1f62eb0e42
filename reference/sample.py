"""Sampling: greedy, or temperature with top-k and top-p, replayable from (seed, position) (SPEC.md 9).

Random choice is Gumbel-max. The noise of a token is a hash of (seed, position, token), so the same request gives the
same stream in any batch, row or twin. A logit mask (structured output) removes tokens before anything else.
"""

import torch
from torch import Tensor

from .stage import Stage, activation, f32, i32, i64, index, output

SAMPLE = Stage(
    "sample",
    "9",
    axes=dict(R="sampled rows", N="vocabulary"),
    tensors=(
        activation("logits", "R N", strides="rows"),
        index("temperature", "R", f32),
        index("top_k", "R", i32),
        index("top_p", "R", f32),
        index("seed", "R", i64),
        index("position", "R", i64),
        index("allowed", "R N", torch.bool, optional=True),
        output("tokens", "R", i64),
    ),
)


def _mix(x: Tensor) -> Tensor:
    """A bijective 64-bit hash (multiply, xor-shift), on int64 with wrap-around; equal on every device."""
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, -0x7E25210B43D22BB3), (33, 0)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = x * factor if factor else x
    return x


def gumbel(seed: Tensor, position: Tensor, n: int) -> Tensor:
    """Standard Gumbel noise [R, n] float64 for rows keyed by seed [R] and position [R]."""
    row = _mix(_mix(seed + 0x1E3779B97F4A7C15) + position)
    bits = _mix(row[:, None] + torch.arange(n, device=seed.device) * 0x2545F4914F6CDD1D)
    u = ((bits >> 12) & ((1 << 52) - 1)).double() * 2**-52 + 2**-53  # exact, below 1: the noise is finite
    return -(-u.log()).log()


def keep(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Tokens [R, N] that survive top-k (0 = off, ties to the lowest token), then top-p of what remains."""
    order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    inside = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    p = order.values.masked_fill(~inside, -torch.inf).softmax(-1)
    inside = inside & (p.cumsum(-1) - p < top_p[:, None])
    return torch.zeros_like(inside).scatter(-1, order.indices, inside)


@SAMPLE.law
def sample(logits, temperature, top_k, top_p, seed, position, allowed=None, *, num):
    """logits [R, N] -> tokens [R]. temperature 0 is argmax, ties to the lowest token."""
    x = logits.double()
    x = x if allowed is None else x.masked_fill(~allowed, -torch.inf)
    hot = x / temperature.double().clamp_min(1e-6)[:, None]
    noisy = hot.masked_fill(~keep(hot, top_k, top_p), -torch.inf) + gumbel(seed, position, x.shape[-1])
    return dict(tokens=torch.where(temperature > 0, noisy.argmax(-1), x.argmax(-1)))
