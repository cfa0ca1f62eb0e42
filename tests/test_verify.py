"""Acceptance rules: greedy, standard, block and synthetic, by enumeration, by loops and by counting (SPEC.md 10.3)."""

import itertools
import math
from pathlib import Path

import pytest
import torch

import golden
from reference.checkpoint import Checkpoint
from reference.decoder import Decoder, Model
from reference.draft import MARKOV
from reference.numerics import fused
from reference.sample import SAMPLE, gumbel
from reference.stage import ContractError
from reference.state import DecodeState
from reference.verify import (
    BLOCK,
    GREEDY,
    STANDARD,
    SYNTHETIC,
    block,
    chances,
    standard,
    stream,
    synthetic_rate,
    uniform,
)
from reference.weights import all_weights

N, S = 3, 2
RULES = dict(standard=standard, block=block)
STAGES = dict(standard=STANDARD, block=BLOCK)


def tree(seed, depth, zeros=0):
    """A distribution over N tokens for every prefix of up to `depth` tokens; `zeros` of each are impossible."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for n in range(depth + 1):
        for prefix in itertools.product(range(N), repeat=n):
            w = torch.rand(N, generator=g, dtype=torch.float64) ** 3 + 1e-3
            w[torch.randperm(N, generator=g)[:zeros]] = 0
            out[prefix] = w / w.sum()
    return out


def rows(p, q, drafts, size):
    """p, q [R, size + 1, N] along each drafted sequence; q is zero behind the last draft."""
    empty = torch.zeros(N, dtype=torch.float64)

    def along(t, last):
        each = [[t[tuple(d[:i])] if i < last(d) else empty for i in range(size + 1)] for d in drafts]
        return torch.stack([torch.stack(r) for r in each])

    return along(p, lambda d: size + 1), along(q, len)


def kept_chances(rule, accept):
    """The chance of keeping exactly 0..S drafts: standard stops at the first failure, block takes the last success."""
    size, out = len(accept), []
    for n in range(size + 1):
        if rule == "standard":
            out.append(math.prod(accept[:n]) * (1 - accept[n] if n < size else 1))
        else:
            out.append((accept[n - 1] if n else 1) * math.prod(1 - a for a in accept[n:]))
    return out


def joint(rule, law, p, q, size=S, padded=0):
    """The distribution of the first size + 1 tokens under speculation, all drafts and outcomes enumerated."""
    out = torch.zeros((N,) * (size + 1), dtype=torch.float64)
    drafts = list(itertools.product(range(N), repeat=size - padded))
    P, Q = rows(p, q, drafts, size)
    d = torch.tensor([[*d, *[-1] * padded] for d in drafts])
    accept, weights = law(P, Q, d)
    for i, draft in enumerate(drafts):
        drawn = math.prod(float(q[draft[:k]][t]) for k, t in enumerate(draft))
        for kept, chance in enumerate(kept_chances(rule, accept[i].tolist())):
            if drawn * chance == 0:
                continue
            follow = weights[i, kept] / weights[i, kept].sum()
            for tail in itertools.product(range(N), repeat=size + 1 - kept):
                tokens = (*draft[:kept], *tail)
                rest = math.prod(float(p[tokens[:k]][tokens[k]]) for k in range(kept + 1, size + 1))
                out[tokens] += drawn * chance * float(follow[tail[0]]) * rest
    return out


def truth(p, size=S):
    each = itertools.product(range(N), repeat=size + 1)
    chance = [math.prod(float(p[t[:k]][t[k]]) for k in range(size + 1)) for t in each]
    return torch.tensor(chance, dtype=torch.float64).view((N,) * (size + 1))


@pytest.mark.parametrize("zeros", ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1)), ids=lambda z: f"p{z[0]}-q{z[1]}")
@pytest.mark.parametrize("rule", RULES)
def test_rules_keep_the_targets_distribution(rule, zeros):
    """Exhaustively, with impossible tokens on either side: float64 sums of 9 drafts times 3 outcomes, 1e-14."""
    for seed in range(4):
        p, q = tree(seed, S, zeros[0]), tree(seed + 100, S - 1, zeros[1])
        want = truth(p)
        assert (joint(rule, RULES[rule], p, q) - want).abs().max() < 1e-14
        for padded in (1, 2):
            assert (joint(rule, RULES[rule], p, q, padded=padded) - want).abs().max() < 1e-14


@pytest.mark.parametrize("rule", RULES)
def test_three_drafts_and_a_draft_equal_to_the_target(rule):
    p, q = tree(7, 3), tree(8, 2)
    assert (joint(rule, RULES[rule], p, q, size=3) - truth(p, 3)).abs().max() < 1e-14
    same = {k: v for k, v in p.items() if len(k) < 3}
    assert (joint(rule, RULES[rule], p, same, size=3) - truth(p, 3)).abs().max() < 1e-14


def wrong_rules():
    swapped = lambda law, change: lambda p, q, d: change(*law(p, q, d), p, q)  # noqa: E731
    return {
        "the whole p follows a rejection": ("standard", swapped(standard, lambda a, w, p, q: (a, p))),
        "the residual of standard under block": ("block", swapped(block, lambda a, w, p, q: (a, (p - q).clamp_min(0)))),
        "block chances read from the front": ("standard", block),
        "a chance one percent high": ("block", swapped(block, lambda a, w, p, q: ((1.01 * a).clamp_max(1), w))),
        "no draft behind the last one, but q still there": (
            "standard", swapped(standard, lambda a, w, p, q: (a, (p - q[:, [0, 1, 1]]).clamp_min(0) + 1e-9))),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_rules())
def test_wrong_rules_are_seen(name):
    rule, law = wrong_rules()[name]
    p, q = tree(0, S), tree(100, S - 1)
    assert (joint(rule, law, p, q) - truth(p)).abs().max() > 1e-4


def test_block_equals_the_published_formulas_in_loops():
    """10.3 in logarithms and Python loops; and block verification never keeps fewer drafts on average."""
    size, R = 7, 40
    g = torch.Generator().manual_seed(3)
    p = (2 * torch.randn(R, size + 1, N, generator=g, dtype=torch.float64)).softmax(-1)
    q = (2 * torch.randn(R, size + 1, N, generator=g, dtype=torch.float64)).softmax(-1)
    q[:, -1], d = 0, torch.randint(0, N, (R, size), generator=g)
    h, weights = block(p, q, d)
    for r in range(R):
        logP = 0.0
        for i in range(size + 1):
            if i:
                t = int(d[r, i - 1])
                logP = min(logP + math.log(p[r, i - 1, t]) - math.log(q[r, i - 1, t]), 0.0)
            P = math.exp(logP)
            rest = [max(P * float(p[r, i, x]) - float(q[r, i, x]), 0.0) for x in range(N)]
            assert weights[r, i].tolist() == pytest.approx(rest, abs=1e-14)
            if i:
                want = P if i == size else sum(rest) / (sum(rest) + 1 - P)
                assert float(h[r, i - 1]) == pytest.approx(want, abs=1e-14)
    P, Q = tree(1, S), tree(2, S - 1)
    drafts = list(itertools.product(range(N), repeat=S))
    p, q = rows(P, Q, drafts, S)
    mean = {}
    for rule, law in RULES.items():
        accept = law(p, q, torch.tensor(drafts))[0]
        mean[rule] = sum(
            float(Q[()][d[0]] * Q[d[:1]][d[1]]) * sum(n * c for n, c in enumerate(kept_chances(rule, a.tolist())))
            for d, a in zip(drafts, accept, strict=True)
        )
    assert mean["block"] > mean["standard"]


def call(rule, logits, draft, draft_logits, seed, *, position=None, temperature=1.0, allowed=None, top_k=0, top_p=1.0):
    """One evaluation of a rule for R requests: logits [R, S + 1, N], draft [R, S], draft_logits [R, S, N]."""
    R = len(draft)
    full = lambda v, t: torch.as_tensor(v, dtype=t).expand(R).contiguous()  # noqa: E731
    args = dict(
        draft=draft, logits=logits.flatten(0, 1), draft_logits=draft_logits.flatten(0, 1).float(), seed=seed,
        temperature=full(temperature, torch.float32), top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32), position=full(5, torch.int64) if position is None else position,
        allowed=allowed, tokens=draft.new_zeros(R, draft.shape[1] + 1), count=torch.zeros(R, dtype=torch.int32),
    )  # fmt: skip
    STAGES[rule].check(args, num=fused if logits.dtype == torch.bfloat16 else None)
    got = STAGES[rule].call(args, {}, fused)
    return got["tokens"], got["count"]


def chi_square(counts, p):
    """Pearson's statistic over its limit for a false alarm of 1e-6 (Wilson and Hilferty's approximation, z = 4.753).
    Cells that expect fewer than 10 counts share one."""
    n, rare = counts.sum(), counts.sum() * p < 10
    assert not counts[p == 0].any()
    counts, p = (torch.cat([t[~rare], t[rare].sum()[None]]) for t in (counts.double(), p))
    df = len(p) - 2 + int(n * p[-1] >= 10)
    counts, p = counts[: df + 1], p[: df + 1]
    limit = df * (1 - 2 / (9 * df) + 4.753 * math.sqrt(2 / (9 * df))) ** 3
    return float(((counts - n * p) ** 2 / (n * p)).sum() / limit)


def simulate(rule, n, fresh=True, scale=1.0, size=3, length=4):
    """n requests generate `length` tokens with one distribution per position: [n, length]. scale: of the logits that
    verification is told, against those the draft was drawn from."""
    target, drafted = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    seed, at, out = torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.full((n, length + size + 1), -1)
    while int(at.min()) < length:
        keys = stream(seed, at if fresh else torch.zeros_like(at), "draft")
        draft = torch.stack([(drafted.double() + gumbel(keys, at + i, N)).argmax(-1) for i in range(size)], 1)
        tokens, count = call(rule, target.bfloat16().expand(n, size + 1, N), draft,
                             scale * drafted.expand(n, size, N), seed, position=at)  # fmt: skip
        for i in range(size + 1):
            put = (i < count) & (at < length)
            out[put, at[put] + i] = tokens[put, i]
        at = torch.where(at < length, at + count, at)
    return out[:, :length], target.bfloat16().double().softmax(-1)


def sequences(tokens, p):
    """The chi-square of all sequences [n, 4] of tokens that are drawn independently from p."""
    cell = (tokens * N ** torch.arange(3, -1, -1)).sum(-1)
    want = torch.stack([p[list(t)].prod() for t in itertools.product(range(N), repeat=4)])
    return chi_square(cell.bincount(minlength=N**4), want)


@pytest.mark.parametrize("rule", RULES)
def test_generated_tokens_follow_the_target(rule):
    """40,000 sequences of 4 tokens over several blocks, 81 cells, false alarm 1e-6; a draft that was drawn 20% colder
    than verification believes is seen."""
    assert sequences(*simulate(rule, 40_000)) < 1 < sequences(*simulate(rule, 40_000, scale=0.8))


def test_drafting_again_with_the_same_noise_biases_the_block_rule():
    """The block rule, and only it, has looked at drafts that it then rejects: a token drafted again at such a
    position must be drawn with other noise."""
    assert (
        sequences(*simulate("standard", 40_000, fresh=False)) < 1 < sequences(*simulate("block", 40_000, fresh=False))
    )


def test_uniform_noise():
    u = uniform(torch.tensor([1, 2]), torch.tensor([3, 3]), 50_000)
    assert 0 < u.min() and u.max() <= 1
    for row in u:  # mean and variance within 5 standard errors
        assert abs(float(row.mean()) - 0.5) < 5 * (1 / 12 / 50_000) ** 0.5
        assert abs(float(row.var()) - 1 / 12) < 5 * (1 / 180 / 50_000) ** 0.5
    starts = [torch.tensor([s]) for s in range(5)]
    uses = [stream(torch.tensor([7]), s, use) for s in starts for use in ("draft", "accept", "follow")]
    assert len({int(s) for s in uses}) == 15


def test_greedy_in_a_loop():
    g = torch.Generator().manual_seed(0)
    draft, target = (torch.randint(0, 2, shape, generator=g) for shape in ((300, 7), (300, 8)))
    draft[:50, 3] = -1
    got = GREEDY.call(dict(draft=draft, target=target.flatten()), {}, fused)
    for r in range(300):
        want = []
        for i in range(8):
            want.append(int(target[r, i]))
            if i == 7 or int(draft[r, i]) != want[-1]:
                break
        assert got["tokens"][r].tolist() == want + [-1] * (8 - len(want)) and int(got["count"][r]) == len(want)
    assert set(got["count"].tolist()) == set(range(1, 9))


def test_every_rule_is_greedy_at_temperature_zero():
    """Ties, masked tokens and padding included: the argmax, as `sample` takes it."""
    g = torch.Generator().manual_seed(1)
    R, size, V = 400, 7, 3
    logits = torch.randint(0, 3, (R, size + 1, V), generator=g).bfloat16()  # many ties
    allowed = torch.rand(R * (size + 1), V, generator=g) < 0.7
    allowed[torch.arange(len(allowed)), torch.randint(0, V, (len(allowed),), generator=g)] = True
    target = logits.flatten(0, 1).float().masked_fill(~allowed, -torch.inf).argmax(-1).view(R, size + 1)
    draft = torch.where(torch.rand(R, size, generator=g) < 0.85, target[:, :-1], 1)
    draft[::9, 4] = -1
    want = GREEDY.call(dict(draft=draft, target=target.flatten()), {}, fused)
    assert set(want["count"].tolist()) >= {1, 2, 5, 8}
    noise = torch.randn(R, size, V, generator=g)
    for rule in RULES:
        tokens, count = call(rule, logits, draft, noise, torch.arange(R), temperature=0.0, allowed=allowed)
        assert torch.equal(tokens, want["tokens"]) and torch.equal(count, want["count"])


@pytest.mark.parametrize("rule", RULES)
def test_masks_top_k_and_top_p_bound_what_is_kept_and_what_follows(rule):
    """A drafted token that the mask, top-k or top-p forbid is never emitted, however sure the draft is of it."""
    R, V = 2000, 5
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0]).bfloat16().expand(R, 3, V)
    sure = torch.tensor([0.0, 1.0, 0.0, 8.0, 0.0]).expand(R, 2, V)
    draft, ban = torch.full((R, 2), 3), torch.tensor([True, True, True, False, True])
    for how, legal in (
        (dict(allowed=ban.expand(R * 3, V)), {0, 1, 2, 4}), (dict(top_k=2), {0, 1}), (dict(top_p=0.7), {0, 1}),
    ):  # fmt: skip
        tokens, count = call(rule, logits, draft, sure, torch.arange(R), **how)
        assert set(tokens[:, 0].tolist()) == legal and (count == 1).all()
    assert 3 in call(rule, logits, draft, sure, torch.arange(R))[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_verified_the_same_alone_and_in_a_batch(rule):
    g = torch.Generator().manual_seed(2)
    logits, drafted = torch.randn(30, 4, 6, generator=g).bfloat16(), torch.randn(30, 3, 6, generator=g)
    draft, seed = torch.randint(0, 6, (30, 3), generator=g), torch.arange(30) * 17
    tokens, count = call(rule, logits, draft, drafted, seed)
    for r in (0, 13, 29):
        alone = call(rule, logits[r : r + 1], draft[r : r + 1], drafted[r : r + 1], seed[r : r + 1])
        assert torch.equal(alone[0][0], tokens[r]) and int(alone[1]) == int(count[r])


def test_random_rules_keep_the_distribution_of_mini():
    """30,000 blocks of 2 drafts and the token behind, over the trained model's logits of its 8 likeliest tokens, 3 of
    them allowed: 27 sequences, false alarm 1e-6; logits of the draft told 20% too flat are seen."""
    source = Checkpoint(Path(golden.__file__).parent / "mini")
    c, n, R, T = source.config, 3, 30_000, 1.3
    d = Decoder(Model(c, all_weights(source, c)), DecodeState(c, slots=2, pages=4, num=fused))

    def logits(tokens):
        r = d.state.open()
        row = d.prefill(r, [c.bos, *b"The ", *tokens]).act["vocab_logits"][0]
        d.state.close(r)
        return row

    near = logits([]).float().topk(8).indices
    each = [t for k in range(3) for t in itertools.product(range(n), repeat=k)]
    table = torch.stack([logits(near[list(t)].tolist())[near] for t in each])  # [13, 8]
    chance = (table[:, :n].double() / T).softmax(-1)
    g = torch.Generator().manual_seed(4)
    w1, w2, noise = (torch.randn(8, k, generator=g) for k in (4, 4, 1))
    at = dict(temperature=torch.full((R,), T), seed=torch.arange(R), position=torch.full((R,), 6))
    base = (0.5 * table[0].float() + noise[:, 0]).bfloat16().expand(2 * R, 8)
    at |= dict(w1=w1.bfloat16(), w2=w2.bfloat16(), anchor=torch.zeros(R, dtype=torch.int64))
    made = MARKOV.call(dict(base=base) | at, dict(replay=False), fused)
    place = made["draft"].clamp_max(n - 1)  # behind a forbidden draft nothing is kept
    node = torch.stack([torch.zeros(R).long(), 1 + place[:, 0], 4 + 3 * place[:, 0] + place[:, 1]], dim=1)
    allowed = (torch.arange(8) < n).expand(3 * R, 8)
    for rule, scale in itertools.product(RULES, (1.0, 0.8)):
        tokens, count = call(rule, table[node], made["draft"], scale * made["draft_logits"].view(R, 2, 8), at["seed"],
                             position=at["position"], temperature=T, allowed=allowed)  # fmt: skip
        pick = lambda p: torch.multinomial(p, 1, generator=g)[:, 0]  # noqa: E731
        one = tokens[:, 0]
        two = torch.where(count > 1, tokens[:, 1], pick(chance[1 + one]))
        three = torch.where(count > 2, tokens[:, 2], pick(chance[4 + 3 * one + two]))
        want = chance[0][:, None, None] * chance[1:4][:, :, None] * chance[4:].view(n, n, n)
        assert count.bincount(minlength=4)[1:].min() > R / 50
        assert (chi_square((9 * one + 3 * two + three).bincount(minlength=27), want.flatten()) < 1) == (scale == 1)


def test_chances_are_what_sample_draws_from():
    """200,000 draws of `sample`, false alarm 1e-6; and a temperature 5% off is seen."""
    n, logits = 200_000, torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 0.4]])
    full = lambda v, t: torch.full((n,), v, dtype=t)  # noqa: E731
    args = dict(top_k=full(5, torch.int32), top_p=full(0.9, torch.float32))
    drawn = SAMPLE.call(
        dict(logits=logits.expand(n, -1), temperature=full(0.8, torch.float32), seed=full(3, torch.int64),
             position=torch.arange(n), **args), {}, fused)["tokens"].bincount(minlength=6)  # fmt: skip
    one = {k: v[:1] for k, v in args.items()}
    p = lambda t: chances(logits, torch.tensor([t]), **one)[0]  # noqa: E731
    assert chi_square(drawn, p(0.8)) < 1 < chi_square(drawn, p(0.84))


def test_synthetic_lengths_have_their_mean():
    size, R, rate = 7, 20_000, synthetic_rate(4.5, 7)
    assert sum(rate**i for i in range(8)) == pytest.approx(4.5)
    assert (synthetic_rate(1, 7), synthetic_rate(8, 7)) == pytest.approx((0, 1), abs=1e-9)
    draft, target = torch.zeros(R, size, dtype=torch.int64), torch.ones(R, size + 1, dtype=torch.int64)
    args = dict(draft=draft, target=target.flatten(), seed=torch.arange(R), position=torch.full((R,), 9))
    got = SYNTHETIC.call(args, dict(rates=(rate,) * size), fused)
    count = got["count"].double()
    assert abs(float(count.mean()) - 4.5) < 5 * float(count.std()) / R**0.5
    assert torch.equal((got["tokens"] == 0).sum(-1), got["count"] - 1)
    draft[:, 2] = -1
    assert SYNTHETIC.call(args, dict(rates=(1.0,) * size), fused)["count"].unique().tolist() == [3]
    for mean in (0.9, 8.1, math.nan):
        with pytest.raises(ValueError, match=r"allowed are 1\.\.8"):
            synthetic_rate(mean, 7)


def bad_calls():
    R, size, V = 2, 3, 5
    i64 = torch.int64
    greedy = dict(draft=torch.zeros(R, size, dtype=i64), target=torch.zeros(R * (size + 1), dtype=i64),
                  tokens=torch.zeros(R, size + 1, dtype=i64), count=torch.zeros(R, dtype=torch.int32))  # fmt: skip
    full = {k: v for k, v in greedy.items() if k != "target"} | dict(
        logits=torch.zeros(R * (size + 1), V).bfloat16(), draft_logits=torch.zeros(R * size, V),
        temperature=torch.ones(R), top_k=torch.zeros(R, dtype=torch.int32), top_p=torch.ones(R),
        seed=torch.zeros(R, dtype=i64), position=torch.zeros(R, dtype=i64),
    )  # fmt: skip
    return [
        (GREEDY, greedy, dict(draft=torch.full((R, size), -2)), "draft holds -2; allowed are tokens"),
        (GREEDY, greedy, dict(draft=torch.zeros(R, 4, dtype=i64)), "S = 4 drafts of R = 2 requests"),
        (GREEDY, greedy, dict(draft=torch.zeros(R, size, dtype=torch.int32)), "draft is torch.int32"),
        (GREEDY, greedy, dict(count=torch.zeros(3, dtype=torch.int32)), "count has R = 3; allowed is 2"),
        (BLOCK, full, dict(draft=torch.full((R, size), 5)), r"draft holds 5; allowed are tokens 0\.\.4 and -1"),
        (BLOCK, full, dict(draft_logits=torch.zeros(R * size, 4)), "draft_logits has N = 4; allowed is 5"),
        (BLOCK, full, dict(draft_logits=torch.zeros(5, V)), r"5 draft rows .* allowed are R \* \(S \+ 1\), R \* S"),
        (STANDARD, full, dict(logits=torch.zeros(6, V).bfloat16()), "6 target, 6 draft rows"),
        (STANDARD, full, dict(allowed=torch.ones(3, V, dtype=torch.bool)), "allowed has T = 3; allowed is 8"),
    ]


@pytest.mark.parametrize("stage, good, bad, text", bad_calls(), ids=range(len(bad_calls())))
def test_contracts_name_the_value(stage, good, bad, text):
    stage.check(good)
    with pytest.raises(ContractError, match=text):
        stage.check(good | bad)
