"""Multi-head latent attention, absorbed form, over a paged latent cache. No rotation, gated output.

Source: SPEC.md 6. A cache row is [512 normed latent | 64 k_pe], shared by all heads.
"""

from functools import partial

import torch
from torch import Tensor

from .linear import linear_stage, rms_norm
from .numerics import Numerics
from .stage import (
    Constraint,
    Role,
    Stage,
    Tensor_,
    activation,
    bf16,
    f8,
    f32,
    i64,
    index,
    output,
    state,
    unique_live,
    weight,
    within,
)

LATENT = 512
GATHER_ELEMENTS = 1 << 27  # cache elements lifted at once: keeps the float64 copy of the rows near 1 GiB

QKV_A = linear_stage("mla.qkv_a", "6.1")
Q_B = linear_stage("mla.q_b", "6.3")
GATE_PROJ = linear_stage("mla.gate_proj", "6.9")
O_PROJ = linear_stage("mla.o_proj", "6.10")

LORA_NORM = Stage(
    "mla.lora_norm",
    "6.2",
    axes=dict(T="tokens in this step", Q="query LoRA rank", L=LATENT),
    tensors=(
        activation("q_a", "T Q", strides="rows"),
        activation("kv_a", "T L", strides="rows"),
        weight("w_q_norm", "Q"),
        weight("w_kv_norm", "L"),
        output("q_c", "T Q"),
        output("kv_c", "T L"),
    ),
    attrs=dict(eps="1e-5 as served, 1e-6 in the published modelling code"),
    flops=lambda d, attrs: 4 * d["T"] * (d["Q"] + d["L"]),
)


@LORA_NORM.law
def lora_norm(q_a, kv_a, w_q_norm, w_kv_norm, *, eps, num):
    """Two independent RMSNorms; k_pe is not normed."""
    q_c = num.round(rms_norm(num.up(q_a), w_q_norm, eps, num))
    return dict(q_c=q_c, kv_c=num.round(rms_norm(num.up(kv_a), w_kv_norm, eps, num)))


ABSORB = Stage(
    "mla.absorb",
    "6.4-6.5",
    axes=dict(T="tokens in this step", Y="heads * 192", H="local heads", N=128, L=LATENT, R=576),
    tensors=(activation("q", "T Y"), weight("w_uk", "H N L"), output("q_lat", "T H R")),
    flops=lambda d, attrs: 2 * d["T"] * d["H"] * 128 * LATENT,
)


@ABSORB.law
def absorb(q, w_uk, *, num):
    """q [T, H * 192] -> [T, H, 576]: the 128 nope dims taken through W_UK, the 64 others as they are."""
    nope, pe = q.unflatten(-1, (-1, 192)).split([128, 64], dim=-1)
    latent = num.round(torch.einsum("thn,hnl->thl", num.up(nope), num.up(w_uk)))
    return dict(q_lat=torch.cat([latent, pe], dim=-1))


CACHE_WRITE = Stage(
    "mla.cache_write",
    "6.6",
    axes=dict(T="tokens in this step", L=LATENT, E=64, P="pages", B="rows of a page", R=576),
    tensors=(
        activation("kv_c", "T L"),
        activation("k_pe", "T E", strides="rows"),
        index("slot_mapping", "T", i64),
        state("cache", "P B R", rows="slot_mapping", paged=True),
    ),
    constraints=(
        unique_live("slot_mapping"),
        Constraint("slot_mapping < P * B", lambda t, d: _beyond(t["slot_mapping"], d["P"] * d["B"]), reads_values=True),
    ),
)


def _beyond(rows: Tensor, limit: int) -> str | None:
    bad = rows[rows >= limit]
    return f"slot_mapping holds {int(bad[0])}; allowed are rows 0..{limit - 1}" if len(bad) else None


@CACHE_WRITE.law
def cache_write(kv_c, k_pe, slot_mapping, cache, *, num):
    """One latent row per token: [T, 576] at page * B + row of slot_mapping [T]."""
    return dict(cache=torch.cat([kv_c, k_pe], dim=-1))


def _positive(name: str) -> Constraint:
    """A scale is finite and above 0."""

    def broken(tensors, dims):
        value = float(tensors[name])
        return None if 0 < value < float("inf") else f"{name} holds {value}; allowed are finite numbers above 0"

    return Constraint(f"{name} > 0", broken, reads_values=True)


CACHE_WRITE_FP8 = Stage(
    "mla.cache_write_fp8",
    "6.6",
    axes=CACHE_WRITE.axes,
    tensors=(
        *(t for t in CACHE_WRITE.tensors if t.name != "cache"),
        weight("cache_scale", "1", f32),
        state("cache", "P B R", f8, rows="slot_mapping", paged=True),
    ),
    constraints=(*CACHE_WRITE.constraints, _positive("cache_scale")),
    base=CACHE_WRITE.name,
)


@CACHE_WRITE_FP8.law
def cache_write_fp8(kv_c, k_pe, slot_mapping, cache_scale, cache, *, num):
    """The row over its scale, rounded to e4m3; latent and k_pe share the scale."""
    row = num.up(torch.cat([kv_c, k_pe], dim=-1))
    return dict(cache=num.round8(row / num.up(cache_scale)))


def _lens_fit(tensors, dims):
    longest = int(tensors["lens"].max())
    room = dims["J"] * dims["B"]
    return None if longest <= room else f"lens holds {longest}; the block table has room for {room} rows"


ATTENTION = Stage(
    "mla.attention",
    "6.7",
    axes=dict(
        T="tokens in this step", H="local heads", L=LATENT, P="pages", B="rows of a page", R=576, J="pages per request"
    ),
    tensors=(
        activation("q_lat", "T H R"),
        index("block_table", "T J"),
        index("lens", "T"),
        Tensor_("cache", ("P", "B", "R"), bf16, Role.STATE),
        output("o_lat", "T H L"),
        output("lse", "T H", f32),
    ),
    constraints=(
        within("block_table", "P", low=0),
        Constraint("lens <= J * B", _lens_fit, reads_values=True),
    ),
    attrs=dict(scale="softmax scale, 192^-0.5"),
    flops=lambda d, attrs: 2 * d["T"] * d["H"] * d["J"] * d["B"] * (576 + LATENT),
    traffic=lambda d, attrs: 2 * d["T"] * (d["J"] * d["B"] * 576 + d["H"] * (576 + LATENT)),
)


def attend(q: Tensor, rows: Tensor, seen: Tensor, scale: float, num: Numerics) -> tuple[Tensor, Tensor]:
    """q [..., Q, 576], rows [..., N, 576], seen [..., Q or 1, N] bool -> output [..., Q, 512], base-e LSE [..., Q].

    Rows that no query sees may hold anything, NaN included. A query that sees none gives zero and an LSE of -inf.
    """
    rows = torch.where(seen.any(-2)[..., None], num.up(rows), 0)
    scores = (num.up(q) @ rows.mT * scale).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    # The weights are p / total, not exp(scores - LSE): at |LSE| = 1e6 an fp32 LSE is half a unit off.
    o = p @ rows[..., :LATENT] / total.clamp_min(torch.finfo(p.dtype).tiny)
    return o, (top + total.log()).squeeze(-1)


def paged(q_lat, block_table, lens, cache, scale, num) -> tuple[Tensor, Tensor]:
    """Each token attends to the first lens[t] rows of its pages: output [T, H, 512], base-e LSE [T, H]."""
    rows = block_table.shape[1] * cache.shape[1]
    at = torch.arange(rows, device=lens.device)
    step = max(1, GATHER_ELEMENTS // (rows * 576))
    parts = [
        attend(q, cache[table.long()].flatten(1, 2), (at < n[:, None])[:, None], scale, num)
        for q, table, n in zip(q_lat.split(step), block_table.split(step), lens.split(step), strict=True)
    ]
    o, lse = (torch.cat(p) for p in zip(*parts, strict=True))
    return o, lse


def causal(q_lat, block_table, lens, cache, scale, num) -> tuple[Tensor, Tensor]:
    """The same for tokens of one request: block_table [1, J]; lens [T] grows by one per token: the mask is causal."""
    rows = cache[block_table[0].long()].flatten(0, 1)
    at, parts = torch.arange(len(rows), device=lens.device), []
    for q, n in zip(q_lat.split(128), lens.split(128), strict=True):
        last = max(1, int(n[-1]))  # a context-parallel rank may hold no row yet
        seen = (at[:last] < n[:, None]).repeat_interleave(q.shape[1], dim=0)  # [128 * H, last]
        parts.append(attend(q.flatten(0, 1), rows[:last], seen, scale, num))
    o, lse = (torch.cat(p).unflatten(0, (len(q_lat), -1)) for p in zip(*parts, strict=True))
    return o, lse


@ATTENTION.law
def attention(q_lat, block_table, lens, cache, *, scale, num, walk=paged):
    """One rounding, of the output. lse [T, H] is in base e."""
    o, lse = walk(q_lat, block_table, lens, cache, scale, num)
    return dict(o_lat=num.round(o), lse=lse)


ATTENTION_FP8 = Stage(
    "mla.attention_fp8",
    "6.7",
    axes=ATTENTION.axes,
    tensors=(
        activation("q_lat", "T H R"),
        weight("query_scale", "1", f32),
        weight("cache_scale", "1", f32),
        index("block_table", "T J"),
        index("lens", "T"),
        Tensor_("cache", ("P", "B", "R"), f8, Role.STATE),
        output("o_lat", "T H L"),
        output("lse", "T H", f32),
    ),
    constraints=(*ATTENTION.constraints, _positive("query_scale"), _positive("cache_scale")),
    attrs=ATTENTION.attrs,
    flops=ATTENTION.flops,
    traffic=lambda d, attrs: d["T"] * (d["J"] * d["B"] * 576 + 2 * d["H"] * (576 + LATENT)),
    base=ATTENTION.name,
)


@ATTENTION_FP8.law
def attention_fp8(q_lat, query_scale, cache_scale, block_table, lens, cache, *, scale, num, walk=paged):
    """Queries over their scale are rounded to e4m3, too; both scales multiply the scores, the cache's the output."""
    q_scale, c_scale = num.up(query_scale), num.up(cache_scale)
    q = num.round8(num.up(q_lat) / q_scale)
    o, lse = walk(q, block_table, lens, cache, scale * q_scale * c_scale, num)
    return dict(o_lat=num.round(o * c_scale), lse=lse)


ATTENTION.prefill(partial(attention, walk=causal))
ATTENTION_FP8.prefill(partial(attention_fp8, walk=causal))


V_UP = Stage(
    "mla.v_up",
    "6.8",
    axes=dict(T="tokens in this step", H="local heads", L=LATENT, V=128, C="channels H * 128"),
    tensors=(activation("o_lat", "T H L"), weight("w_uv", "H V L"), output("v", "T C")),
    flops=lambda d, attrs: 2 * d["T"] * d["H"] * 128 * LATENT,
)


@V_UP.law
def v_up(o_lat, w_uv, *, num):
    """o_lat [T, H, 512] through W_UV [H, 128, 512] -> [T, H * 128]."""
    return dict(v=num.round(torch.einsum("thl,hvl->thv", num.up(o_lat), num.up(w_uv)).flatten(1)))


OUT_GATE = Stage(
    "mla.out_gate",
    "6.9",
    axes=dict(T="tokens in this step", C="channels H * 128"),
    tensors=(activation("v", "T C"), activation("gate", "T C", strides="rows"), output("out", "T C")),
    flops=lambda d, attrs: 3 * d["T"] * d["C"],
)


@OUT_GATE.law
def out_gate(v, gate, *, num):
    """v * sigmoid(gate), both [T, C]."""
    return dict(out=num.round(num.up(v) * num.chain(torch.sigmoid(num.up(gate)))))
