"""KDA for several tokens per request, as verification needs it, and rolling its state back to the last kept token.

Rows are request-major: row r * Q + i is token i of request r. `accepted` [R] says how many tokens of the previous
verification were kept, 1..Q (1 when there was none). Two forms: a state slot per token, of which the next step reads
the one that counts; or one checkpoint state and records, from which `kda.commit` rebuilds the state.
Source: SPEC.md 10.4, 15.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .kda import delta_rule, gates, unit_keys
from .numerics import Numerics
from .stage import (
    Constraint,
    Role,
    Stage,
    Tensor_,
    activation,
    bf16,
    f32,
    index,
    output,
    state,
    unique_live,
    weight,
    within,
)  # fmt: skip


def _kept(tensors, dims):
    requests = dims["R"]
    queries = dims.get("Q", dims.get("T", 0) // requests)
    kept = tensors["accepted"][tensors["slots"].view(requests, -1)[:, 0] > 0]
    bad = kept[(kept < 1) | (kept > queries)]
    return f"accepted holds {int(bad[0])}; allowed are 1..{queries}" if len(bad) else None


def _whole(tensors, dims):
    T, R = dims["T"], dims["R"]
    queries = dims.get("Q", dims["W"] - 2 if "W" in dims else T // R)
    if T == R * queries and R * queries:
        return None
    return f"T = {T} rows for R = {R} requests; allowed is {queries} rows per request"


WHOLE = Constraint("T = R * Q", _whole)
KEPT = Constraint("1 <= accepted <= Q", _kept, reads_values=True)
TOKENS = dict(T="rows: requests * tokens per request", R="requests", Q="tokens per request", H="local heads")
SIZES = dict(X="channels 3C", C="channels H * 128", K=128, V=128, P=256, S="state slots", W="2 + tokens per request")

CONV_VERIFY = Stage(
    "kda.conv_verify",
    "10.4",
    axes=TOKENS | SIZES | dict(L=4),
    tensors=(
        activation("x", "T X", strides="rows"),
        weight("conv_weight", "L X", f32),
        index("slots", "R"),
        index("accepted", "R"),
        state("conv", "S W X", bf16, rows="slots"),
        output("q", "T H K", f32),
        output("k", "T H K", f32),
        output("v", "T H V", f32),
    ),
    constraints=(WHOLE, unique_live("slots"), within("slots", "S"), KEPT),
    flops=lambda d, attrs: 12 * d["T"] * d["X"],
)


def window(conv: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
    """The 3 raw inputs [R, 3, 3C] that end at the last kept token: the window at offset accepted - 1."""
    at = (accepted.long() - 1).clamp(0, conv.shape[1] - 3)[:, None] + torch.arange(3, device=conv.device)
    return conv[slots.long().clamp_min(0)[:, None], at]


@CONV_VERIFY.law
def conv_verify(x, conv_weight, slots, accepted, conv, *, num):
    """x [R * Q, 3C]; conv [S, 2 + Q, 3C] -> q, k, v [R * Q, H, 128]; the new rows end with the Q raw inputs."""
    line = torch.cat([window(conv, slots, accepted), x.unflatten(0, (len(slots), -1)).to(conv.dtype)], dim=1)
    taps = num.up(line.unfold(1, 4, 1))  # [R, Q, 3C, 4]
    y = num.chain(silu((taps * num.up(conv_weight).mT).sum(-1)).flatten(0, 1))
    q, k, v = y.unflatten(-1, (3, -1, 128)).unbind(1)
    return dict(q=q, k=k, v=v, conv=line[:, 1:])


def _recurrence(name: str, *tensors: Tensor_, traffic=None) -> Stage:
    return Stage(
        name,
        "10.4",
        axes=TOKENS | SIZES,
        tensors=(
            activation("q", "T H K", f32),
            activation("k", "T H K", f32),
            activation("v", "T H V", f32),
            activation("raw_g", "T C"),
            activation("b", "T H", strides="rows"),
            weight("A_log", "H", f32),
            weight("dt_bias", "C", f32),
            *tensors,
            output("o", "T H V", f32),
        ),
        constraints=(WHOLE, unique_live("slots"), within("slots", "S"))
        + ((KEPT,) if any(t.name == "accepted" for t in tensors) else ()),
        flops=lambda d, attrs: 7 * d["T"] * d["H"] * 128 * 128,
        traffic=traffic,
    )


STATE_BYTES, RECORD_BYTES = 4 * 128 * 128, 4 * 128 + 2 * 256  # per head; of a record per token


def _slots_traffic(d, attrs) -> int:
    """One state read per request and one written per token, beside the rows."""
    return STATE_BYTES * d["H"] * (d["R"] + d["T"]) + _rows_bytes(d) + 4 * (d["T"] + d["R"])


def _record_traffic(d, attrs) -> int:
    """One state read per request and one record written per token, beside the rows."""
    return d["H"] * (STATE_BYTES * d["R"] + RECORD_BYTES * d["T"]) + _rows_bytes(d) + 4 * d["R"]


def _rows_bytes(d) -> int:
    return d["T"] * d["H"] * (4 * 4 * 128 + 2 * 128 + 2) + 4 * d["H"] * 129


RECURRENCE_SLOTS = _recurrence(
    "kda.recurrence_slots",
    index("slots", "T"),
    index("accepted", "R"),
    state("recurrent", "S H V K", f32, rows="slots"),
    traffic=_slots_traffic,
)
RECURRENCE_RECORD = _recurrence(
    "kda.recurrence_record",
    index("slots", "R"),
    Tensor_("recurrent", ("S", "H", "V", "K"), f32, Role.STATE),
    state("record_u", "S H Q V", f32, rows="slots"),
    state("record_kg", "S H Q P", bf16, rows="slots"),
    traffic=_record_traffic,
)


def _sequence(S: Tensor, q, k, v, raw_g, b, A_log, dt_bias, num: Numerics) -> tuple[Tensor, ...]:
    """Q single steps from S [R, H, V, K]: states [R, Q, H, V, K], writes u and outputs o [R, Q, H, V]."""
    q, k = unit_keys(q, k, num)
    parts = [t.unflatten(0, (len(S), -1)) for t in (q, k, num.up(v), *gates(raw_g, b, A_log, dt_bias, num))]
    steps = []
    for token in zip(*(p.unbind(1) for p in parts), strict=True):
        S, u, o = delta_rule(S, *token)
        steps.append((S, u, o))
    return tuple(torch.stack(x, dim=1) for x in zip(*steps, strict=True))


@RECURRENCE_SLOTS.law
def recurrence_slots(q, k, v, raw_g, b, A_log, dt_bias, slots, accepted, recurrent, *, num):
    """slots [R * Q]: token i starts from the state before it and leaves its own in slot i; the first starts from slot
    accepted - 1 of its request."""
    own = slots.long().clamp_min(0).unflatten(0, (len(accepted), -1))
    start = own.gather(1, (accepted.long() - 1).clamp(0, own.shape[1] - 1)[:, None])[:, 0]
    S, _, o = _sequence(num.up(recurrent[start]), q, k, v, raw_g, b, A_log, dt_bias, num)
    o = torch.where((slots > 0)[:, None, None], o.flatten(0, 1), 0)
    return dict(o=num.chain(o), recurrent=S.flatten(0, 1))


@RECURRENCE_RECORD.law
def recurrence_record(q, k, v, raw_g, b, A_log, dt_bias, slots, recurrent, record_u, record_kg, *, num):
    """slots [R]; the checkpoint recurrent[slots] stays. Records per token the write u, and [k | raw_g] with k before
    its L2 norm."""
    S0 = num.up(recurrent[slots.long().clamp_min(0)])
    _, u, o = _sequence(S0, q, k, v, raw_g, b, A_log, dt_bias, num)
    kg = torch.cat([num.round(k), raw_g.unflatten(-1, (-1, 128))], dim=-1)  # [T, H, 256]
    o = torch.where((slots > 0)[:, None, None, None], o, 0).flatten(0, 1)
    return dict(o=num.chain(o), record_u=u.transpose(1, 2), record_kg=kg.unflatten(0, (len(S0), -1)).transpose(1, 2))


COMMIT = Stage(
    "kda.commit",
    "10.4",
    axes=TOKENS | SIZES,
    tensors=(
        Tensor_("record_u", ("S", "H", "Q", "V"), f32, Role.STATE),
        Tensor_("record_kg", ("S", "H", "Q", "P"), bf16, Role.STATE),
        weight("A_log", "H", f32),
        weight("dt_bias", "C", f32),
        index("slots", "R"),
        index("accepted", "R"),
        state("recurrent", "S H V K", f32, rows="slots"),
        state("conv", "S W X", bf16, rows="slots"),
    ),
    constraints=(
        Constraint(
            "W = 2 + Q",
            lambda t, d: None if d["W"] == 2 + d["Q"] else f"conv has W = {d['W']}; allowed is 2 + Q = {2 + d['Q']}",
        ),
        unique_live("slots"),
        within("slots", "S"),
        KEPT,
    ),
    flops=lambda d, attrs: 3 * d["R"] * d["Q"] * d["H"] * 128 * 128,
    traffic=lambda d, attrs: (
        d["R"] * (d["H"] * (2 * STATE_BYTES + RECORD_BYTES * d["Q"]) + 12 * d["X"] + 8) + 4 * d["H"] * 129
    ),
)


@COMMIT.law
def commit(record_u, record_kg, A_log, dt_bias, slots, accepted, recurrent, conv, *, num):
    """S = S0 prod decay_i + sum_j (u_j k_jᵀ) prod_{i > j} decay_i over the kept tokens. Their window moves to the front
    of conv, where the next step reads it with accepted = 1; the entries behind it are not read and stay."""
    at = slots.long().clamp_min(0)
    u, (k, raw_g) = num.up(record_u[at]), record_kg[at].split(128, dim=-1)  # [R, H, Q, 128]
    k = unit_keys(k, k, num)[1]
    log_decay = gates(raw_g.transpose(1, 2).flatten(2), u.new_zeros(()), A_log, dt_bias, num)[0].transpose(1, 2)
    kept = (torch.arange(u.shape[2], device=u.device) < accepted[:, None])[:, None, :, None]
    G = torch.where(kept, log_decay, 0).cumsum(2)  # [R, H, Q, K]; the last entry sums the kept ones
    k = torch.where(kept, k * (G[:, :, -1:] - G).exp(), 0)
    u = torch.where(kept, u, 0)
    S = num.up(recurrent[at]) * G[:, :, -1:].exp() + u.mT @ k
    return dict(recurrent=S, conv=torch.cat([window(conv, slots, accepted), conv[at][:, 3:]], dim=1))
