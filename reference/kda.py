"""Kimi Delta Attention for one decode token per request: projections, short convolution, gated delta rule, output norm.

Source: SPEC.md 5. Channels are ordered q | k | v, each C = heads * 128 wide.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu

from .linear import linear_stage, rms_norm
from .numerics import Numerics
from .stage import Stage, activation, bf16, f32, index, output, state, unique_live, weight, within

FLOOR = -5.0  # lower bound of the log-decay
L2_EPS = 1e-6
NORM_EPS = 1e-5
SCALE = 128**-0.5

IN_PROJ = linear_stage("kda.in_proj", "5.1")
GATE_PROJ = linear_stage("kda.gate_proj", "5.1")
O_PROJ = linear_stage("kda.o_proj", "5.7")

CONV = Stage(
    "kda.conv",
    "5.2",
    axes=dict(T="tokens, one per request", X="channels 3C", H="local heads", K=128, V=128, S="state slots", W=3, L=4),
    tensors=(
        activation("x", "T X", strides="rows"),
        weight("conv_weight", "L X", f32),
        index("slots", "T"),
        state("conv", "S W X", bf16, rows="slots"),
        output("q", "T H K", f32),
        output("k", "T H K", f32),
        output("v", "T H V", f32),
    ),
    constraints=(unique_live("slots"), within("slots", "S")),
    flops=lambda d, attrs: 12 * d["T"] * d["X"],
)


@CONV.law
def conv(x, conv_weight, slots, conv, *, num):
    """x [T, 3C]; conv [S, 3, 3C], oldest first -> q, k, v [T, H, 128] and the new window of each row."""
    window = torch.cat([conv[slots.long().clamp_min(0)], x[:, None].to(conv.dtype)], dim=1)  # [T, 4, 3C]
    y = num.chain(silu((num.up(window) * num.up(conv_weight)).sum(1)))
    q, k, v = y.unflatten(-1, (3, -1, 128)).unbind(1)
    return dict(q=q, k=k, v=v, conv=window[:, 1:])


RECURRENCE = Stage(
    "kda.recurrence",
    "5.3-5.5",
    axes=dict(T="tokens, one per request", C="channels H * 128", H="local heads", K=128, V=128, S="state slots"),
    tensors=(
        activation("q", "T H K", f32),
        activation("k", "T H K", f32),
        activation("v", "T H V", f32),
        activation("raw_g", "T C"),
        activation("b", "T H", strides="rows"),
        weight("A_log", "H", f32),
        weight("dt_bias", "C", f32),
        index("slots", "T"),
        state("recurrent", "S H V K", f32, rows="slots", sample=2),  # one error per v and per k
        output("o", "T H V", f32),
    ),
    constraints=(unique_live("slots"), within("slots", "S")),
    flops=lambda d, attrs: 7 * d["T"] * d["H"] * 128 * 128,
)


def unit_keys(q: Tensor, k: Tensor, num: Numerics) -> tuple[Tensor, Tensor]:
    """L2-normalise queries and keys [..., 128] (sum, not mean); the query carries the 128^-0.5 (SPEC.md 5.3)."""
    q, k = num.up(q), num.up(k)
    q = q * (q.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() * SCALE
    return q, k * (k.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def gates(raw_g: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num: Numerics) -> tuple[Tensor, Tensor]:
    """Log-decay [T, H, 128] in (-5, 0) and beta [T, H] from raw_g [T, C] and b [T, H] (SPEC.md 5.4)."""
    g = (num.up(raw_g) + num.up(dt_bias)).unflatten(-1, (-1, 128))
    return FLOOR * torch.sigmoid(num.up(A_log).exp()[:, None] * g), torch.sigmoid(num.up(b))


def delta_rule(S: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """One token: state S [..., V, K], q, k, v, log_decay [..., 128], beta [...] -> S, the write u, o [..., V]."""
    S = S * log_decay.exp()[..., None, :]
    u = beta[..., None] * (v - (S @ k[..., None]).squeeze(-1))
    S = S + u[..., None] * k[..., None, :]
    return S, u, (S @ q[..., None]).squeeze(-1)


@RECURRENCE.law
def recurrence(q, k, v, raw_g, b, A_log, dt_bias, slots, recurrent, *, num):
    """One step of the delta rule per request. Decay precedes the read; the output sees the updated state."""
    q, k = unit_keys(q, k, num)
    log_decay, beta = gates(raw_g, b, A_log, dt_bias, num)
    S, _, o = delta_rule(num.up(recurrent[slots.long().clamp_min(0)]), q, k, num.up(v), log_decay, beta)
    return dict(o=num.chain(torch.where((slots > 0)[:, None, None], o, 0)), recurrent=S)


RECURRENCE_BF16 = Stage(
    "kda.recurrence_bf16",
    "5.8",
    axes=RECURRENCE.axes,
    tensors=tuple(replace(t, dtype=bf16) if t.name == "recurrent" else t for t in RECURRENCE.tensors),
    constraints=RECURRENCE.constraints,
    flops=RECURRENCE.flops,
    base=RECURRENCE.name,
)


@RECURRENCE_BF16.law
def recurrence_bf16(*tensors, num, **named):
    """The same step; what stays in the slot is rounded, what the output reads is not yet."""
    made = recurrence(*tensors, num=num, **named)
    return made | dict(recurrent=num.round(made["recurrent"]))


OUT_NORM = Stage(
    "kda.out_norm",
    "5.6",
    axes=dict(T="tokens in this step", H="local heads", V=128, C="channels H * 128"),
    tensors=(
        activation("o", "T H V", f32),
        activation("gate", "T C", strides="rows"),
        weight("w_o_norm", "V", f32),
        output("out", "T C"),
    ),
    flops=lambda d, attrs: 8 * d["T"] * d["C"],
)


@OUT_NORM.law
def out_norm(o, gate, w_o_norm, *, num):
    """o [T, H, 128] -> RMSNorm over each head, times sigmoid(gate [T, C]) -> [T, C]."""
    y = rms_norm(num.up(o), w_o_norm, NORM_EPS, num)
    return dict(out=num.round(y.flatten(1) * num.chain(torch.sigmoid(num.up(gate)))))
