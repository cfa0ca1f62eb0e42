"""KDA for q > 1 tokens per request and its rollback, against single steps of the plain laws (SPEC.md 10.4)."""

import math

import pytest
import torch

from reference.kda import CONV, RECURRENCE
from reference.kda_replay import COMMIT, CONV_VERIFY, RECURRENCE_RECORD, RECURRENCE_SLOTS
from reference.numerics import exact, fused
from reference.stage import ContractError

H, Q, R = 2, 8, 3
C = H * 128
S = 1 + 9 * R
i32 = torch.int32


def inputs(seed=0, num=exact):
    """Q tokens for each of R requests, request-major, decays spread over (e^-5, 1) (SPEC.md 16.5)."""
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    T = R * Q
    x = dict(q=r(T, H, 128), k=r(T, H, 128), v=r(T, H, 128), raw_g=(2 * r(T, C)).bfloat16(), b=r(T, H).bfloat16(),
             A_log=torch.rand(H, generator=g) * math.log(16), dt_bias=r(C))  # fmt: skip
    return {n: t.to(num.storage(t.dtype)) for n, t in x.items()}


def pool(*shape, num=exact, dtype=torch.float32, seed=5):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(num.storage(dtype))


def single_steps(x, state, num=exact):
    """Outputs [R, Q, H, 128] and states [R, Q, H, 128, 128] of the plain recurrence, token by token."""
    out, states = [], []
    for r in range(R):
        held = torch.stack([state[r], state[r]])  # slot 1
        for i in range(Q):
            row = {n: t if n in ("A_log", "dt_bias") else t[r * Q + i : r * Q + i + 1] for n, t in x.items()}
            got = RECURRENCE.call(row | dict(slots=torch.tensor([1], dtype=i32), recurrent=held), {}, num)
            held[1] = got["recurrent"][0]
            out.append(got["o"][0])
            states.append(held[1].clone())
    shape = (R, Q)
    return torch.stack(out).unflatten(0, shape), torch.stack(states).unflatten(0, shape)


SLOTS = (torch.randperm(S - 1, generator=torch.Generator().manual_seed(1)) + 1)[: R * Q].to(i32)  # permuted
ONE = torch.tensor([11, 4, 23], dtype=i32)


@pytest.mark.parametrize("accepted", range(1, Q + 1))
def test_slots_start_where_the_kept_token_left(accepted):
    x, kept = inputs(accepted), torch.tensor([accepted, 1, Q], dtype=i32)
    state, o = pool(S, H, 128, 128), torch.full((R * Q, H, 128), torch.nan, dtype=torch.float64)
    start = state[SLOTS.view(R, Q)[torch.arange(R), kept - 1].long()]
    want, states = single_steps(x, start)
    untouched = [i for i in range(S) if i not in SLOTS.tolist()]
    before = state.clone()
    RECURRENCE_SLOTS.apply(x | dict(slots=SLOTS, accepted=kept, recurrent=state, o=o), {}, exact)
    assert (o.view(R, Q, H, 128) - want).abs().max() < 1e-12  # sums of 128 terms of size 1, twice: 1e-14 each
    assert (state[SLOTS.long()].view_as(states) - states).abs().max() < 1e-12
    assert torch.equal(state[untouched], before[untouched])
    RECURRENCE_SLOTS.apply(x | dict(slots=SLOTS, accepted=kept % Q + 1, recurrent=before, o=o), {}, exact)
    assert (o.view(R, Q, H, 128) - want).abs().max() > 1e-3  # the next offset is another state


def recorded(x, num=exact):
    state = pool(S, H, 128, 128, num=num)
    u, kg = pool(S, H, Q, 128, num=num), pool(S, H, Q, 256, num=num, dtype=torch.bfloat16)
    o = torch.full((R * Q, H, 128), torch.nan, dtype=num.compute)
    RECURRENCE_RECORD.apply(x | dict(slots=ONE, recurrent=state, record_u=u, record_kg=kg, o=o), {}, num)
    return state, u, kg, o


def committed(x, state, u, kg, kept, num=exact, W=2 + Q):
    rest = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], slots=ONE, accepted=kept)
    conv = pool(S, W, 3 * C, num=num, dtype=torch.bfloat16)
    COMMIT.apply(dict(record_u=u, record_kg=kg, recurrent=state, conv=conv) | rest, {}, num)
    return state, conv


@pytest.mark.parametrize("m", range(1, Q + 1))
def test_replay_equals_the_sequential_recurrence(m):
    """In float64 replay is reassociation only: 1e-12 for 8 tokens of size 1. Later tokens' records are not read."""
    x = inputs(m)
    state, u, kg, o = recorded(x)
    before = pool(S, H, 128, 128)
    assert torch.equal(state, before)
    want, states = single_steps(x, state[ONE.long()])
    assert (o.view(R, Q, H, 128) - want).abs().max() < 1e-12
    for t in (u, kg):
        t[ONE.long(), :, m:] = torch.nan
    state, conv = committed(x, state, u, kg, torch.full((R,), m, dtype=i32))
    assert (state[ONE.long()] - states[:, m - 1]).abs().max() < 1e-12
    if m < Q:
        assert (state[ONE.long()] - states[:, m]).abs().max() > 1e-2
    others = [i for i in range(S) if i not in ONE.tolist()]
    old = pool(S, 2 + Q, 3 * C, dtype=torch.bfloat16)
    assert torch.equal(state[others], before[others]) and torch.equal(conv[others], old[others])
    assert torch.equal(conv[ONE.long(), :3], old[ONE.long(), m - 1 : m + 2])


def test_replay_by_single_numbers():
    """The formula of 10.4 written out with Python numbers for one element of the state, counts differing by request."""
    x, kept = inputs(9), torch.tensor([3, 8, 1], dtype=i32)
    state, u, kg, _ = recorded(x)
    S0 = state.clone()
    state, _ = committed(x, state, u, kg, kept)
    for r, h, v, k in ((0, 0, 0, 0), (0, 1, 77, 127), (1, 0, 5, 64), (1, 1, 127, 3), (2, 1, 9, 9)):
        slot, m = int(ONE[r]), int(kept[r])

        def decay(i, r=r, h=h, k=k):
            g = float(x["raw_g"][r * Q + i, 128 * h + k] + x["dt_bias"][128 * h + k])
            return math.exp(-5 / (1 + math.exp(-math.exp(float(x["A_log"][h])) * g)))

        want = float(S0[slot, h, v, k]) * math.prod(decay(i) for i in range(m))
        for j in range(m):
            key = x["k"][r * Q + j, h]
            unit = float(key[k]) / math.sqrt(sum(float(a) ** 2 for a in key) + 1e-6)
            want += float(u[slot, h, j, v]) * unit * math.prod(decay(i) for i in range(j + 1, m))
        assert abs(float(state[slot, h, v, k]) - want) < 1e-13


def test_fused_replay_errs_by_the_rounding_of_k():
    """k enters the record in bf16 (2^-9 relative), all else stays fp32: the state is within 2^-9 of the exact one, in
    norm, and not within 2^-14, which an fp32 record would reach."""
    x, kept = inputs(2, fused), torch.full((R,), Q, dtype=i32)
    state, u, kg, _ = recorded(x, fused)
    assert (u.dtype, kg.dtype, u[0].shape, kg[0].shape) == (
        torch.float32, torch.bfloat16, (H, 8, 128), (H, 8, 256))  # fmt: skip
    state, _ = committed(x, state, u, kg, kept, fused)
    _, states = single_steps({n: t.double() for n, t in x.items()}, pool(S, H, 128, 128)[ONE.long()])
    off = (state[ONE.long()].double() - states[:, -1]).norm() / states[:, -1].norm()
    assert 2**-14 < off < 2**-9


@pytest.mark.parametrize("m", range(1, Q + 1))
def test_convolution_continues_at_the_kept_token(m):
    """Two verifications in a row equal single steps over [window, the m kept inputs, the next inputs]."""
    g = torch.Generator().manual_seed(m)
    line = torch.randn(R, 3 + 2 * Q, 3 * C, generator=g, dtype=torch.float64)
    w = torch.randn(4, 3 * C, generator=g, dtype=torch.float64)
    conv = pool(S, 2 + Q, 3 * C)
    conv[ONE.long(), :3], conv[ONE.long(), 3:] = line[:, :3], torch.nan
    outs = {n: torch.zeros(R * Q, H, 128, dtype=torch.float64) for n in "qkv"}

    def verify(x, kept):
        args = dict(x=x.flatten(0, 1), conv_weight=w, slots=ONE, conv=conv, **outs)
        CONV_VERIFY.apply(args | dict(accepted=torch.full((R,), kept, dtype=i32)), {}, exact)
        return torch.stack([outs[n].view(R, Q, C) for n in "qkv"], dim=2).flatten(2)

    def singly(window, x):
        small, rows = window.clone(), []
        for i in range(Q):
            got = CONV.call(dict(x=x[:, i], conv_weight=w, slots=torch.arange(R, dtype=i32), conv=small), {}, exact)
            small = got["conv"]
            rows.append(torch.cat([got[n].flatten(1) for n in "qkv"], 1))
        return torch.stack(rows, 1)

    first, second = line[:, 3 : 3 + Q], line[:, 3 + Q :]
    assert (verify(first, 1) - singly(line[:, :3], first)).abs().max() < 1e-13
    want = singly(line[:, m : m + 3], second)
    assert (verify(second, m) - want).abs().max() < 1e-13 < (want - singly(line[:, m - 1 : m + 2], second)).abs().max()


@pytest.mark.parametrize("form", ("slots", "record"))
def test_null_requests_are_left_alone(form):
    x, state = inputs(4), pool(S, H, 128, 128)
    live = torch.tensor([False, True, False])
    slots, one = torch.where(live.repeat_interleave(Q), SLOTS, 0), torch.where(live, ONE, torch.tensor([0, 0, -3]))
    one, kept = one.to(i32), torch.tensor([0, 2, 99], dtype=i32)
    owned = slots.unique().tolist()[1:] if form == "slots" else [int(ONE[1])]
    state[[i for i in range(S) if i not in owned]] = torch.nan
    u, kg, conv = pool(S, H, Q, 128), pool(S, H, Q, 256), pool(S, 2 + Q, 3 * C)
    o, before = torch.full((R * Q, H, 128), torch.nan, dtype=torch.float64), [t.clone() for t in (state, u, kg, conv)]
    if form == "slots":
        RECURRENCE_SLOTS.apply(x | dict(slots=slots, accepted=kept, recurrent=state, o=o), {}, exact)
    else:
        RECURRENCE_RECORD.apply(x | dict(slots=one, recurrent=state, record_u=u, record_kg=kg, o=o), {}, exact)
        args = dict(A_log=x["A_log"], dt_bias=x["dt_bias"], slots=one, accepted=kept, recurrent=state, conv=conv)
        COMMIT.apply(args | dict(record_u=u, record_kg=kg), {}, exact)
    o = o.view(R, Q, H, 128)
    assert not o[[0, 2]].any() and o[1].isfinite().all() and o[1].any()
    for t, old in zip((state, u, kg, conv), before, strict=True):
        rest = [i for i in range(S) if i not in owned]
        assert torch.equal(t[rest].view(torch.int64), old[rest].view(torch.int64))


def test_bytes_of_the_two_forms():
    """Eight tokens of three requests. At TP8 (12 heads) a state has 786,432 B and the records of a request 2 * 49,152 B
    (SPEC.md 15): slots read 3 states and write 24; records read 3 and write no state; commit reads and writes 3."""
    x = inputs(0, fused) | dict(o=torch.zeros(R * Q, H, 128))
    row = sum(t.nbytes for t in x.values())
    slots = dict(recurrent=torch.zeros(S, H, 128, 128), slots=SLOTS, accepted=torch.ones(R, dtype=i32))
    state, kept = 786_432 * H // 12, 2 * 49_152 * H // 12
    assert RECURRENCE_SLOTS.bytes(x | slots, {}) == row + 27 * state + 4 * 27
    one = dict(record_u=pool(S, H, Q, 128, num=fused), record_kg=pool(S, H, Q, 256).bfloat16(), slots=ONE,
               recurrent=slots["recurrent"])  # fmt: skip
    assert RECURRENCE_RECORD.bytes(x | one, {}) == row + 3 * state + 3 * kept + 12
    one |= dict(A_log=x["A_log"], dt_bias=x["dt_bias"], conv=torch.zeros(S, 2 + Q, 3 * C), accepted=slots["accepted"])
    assert COMMIT.bytes(one, {}) == 3 * (2 * state + kept + 2 * 3 * 3 * C * 2) + 4 * (H + C) + 24


def bad_calls():
    x = inputs(0, fused) | dict(o=torch.zeros(R * Q, H, 128))
    f, b16 = dict(num=fused), torch.bfloat16
    state, kept = torch.zeros(S, H, 128, 128), torch.ones(R, dtype=i32)
    slots = x | dict(slots=SLOTS, accepted=kept, recurrent=state)
    record = x | dict(slots=ONE, recurrent=state, record_u=torch.zeros(S, H, Q, 128),
                      record_kg=torch.zeros(S, H, Q, 256, dtype=b16))  # fmt: skip
    done = {n: record[n] for n in ("A_log", "dt_bias", "slots", "recurrent", "record_u", "record_kg")}
    done |= dict(accepted=kept, conv=torch.zeros(S, 2 + Q, 3 * C, dtype=b16))
    conv = dict(x=torch.zeros(R * Q, 3 * C, dtype=b16), conv_weight=torch.zeros(4, 3 * C), slots=ONE, accepted=kept,
                conv=done["conv"], **{n: torch.zeros(R * Q, H, 128) for n in "qkv"})  # fmt: skip
    many = lambda n: torch.tensor([1, n, 1], dtype=i32)  # noqa: E731
    twice = torch.tensor([4, 4, 0], dtype=i32)
    return [
        (RECURRENCE_SLOTS, slots, dict(accepted=many(9)), r"accepted holds 9; allowed are 1\.\.8", f),
        (RECURRENCE_SLOTS, slots, dict(accepted=many(0)), r"accepted holds 0; allowed are 1\.\.8", f),
        (RECURRENCE_SLOTS, slots, dict(accepted=torch.ones(5, dtype=i32)), "T = 24 rows for R = 5 requests", f),
        (RECURRENCE_SLOTS, slots, dict(slots=SLOTS[:1].repeat(R * Q)), "more than once; live slots must differ", f),
        (RECURRENCE_RECORD, record, dict(record_u=torch.zeros(S, H, 7, 128)), "record_kg has Q = 8; allowed is 7", f),
        (RECURRENCE_RECORD, record, dict(record_kg=torch.zeros(S, H, Q, 128, dtype=b16)), "P = 128; allowed is 256", f),
        (RECURRENCE_RECORD, record, dict(record_kg=torch.zeros(S, H, Q, 256)), "record_kg is torch.float32", f),
        (RECURRENCE_RECORD, record, dict(slots=ONE[:2]), "24 rows for R = 2 requests; allowed is 8 rows", f),
        (COMMIT, done, dict(accepted=many(-1)), r"accepted holds -1; allowed are 1\.\.8", f),
        (COMMIT, done, dict(accepted=many(9)), r"accepted holds 9; allowed are 1\.\.8", f),
        (COMMIT, done, dict(conv=torch.zeros(S, 3, 3 * C, dtype=b16)), "conv has W = 3; allowed is 2 [+] Q = 10", f),
        (COMMIT, done, dict(slots=twice), "slots holds slot 4 more than once", f),
        (COMMIT, done, dict(record_u=torch.zeros(S, 1, Q, 128)), "has H = 2; allowed is 1", f),
        (CONV_VERIFY, conv, dict(accepted=many(9)), r"accepted holds 9; allowed are 1\.\.8", f),
        (CONV_VERIFY, conv, dict(conv=torch.zeros(S, 3, 3 * C, dtype=b16)), "allowed is 1 rows per request", f),
        (CONV_VERIFY, conv, dict(slots=torch.tensor([1, S, 2], dtype=i32)), r"slots holds 28; allowed are 0\.\.27", f),
    ]  # fmt: skip


@pytest.mark.parametrize("stage, good, bad, text, how", bad_calls(), ids=range(len(bad_calls())))
def test_contracts_name_the_value(stage, good, bad, text, how):
    stage.check(good, **how)
    with pytest.raises(ContractError, match=text):
        stage.check(good | bad, **how)
