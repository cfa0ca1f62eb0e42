"""Speculation leaves outputs and state unchanged: every accepted count, both forms, every rule (SPEC.md 10, 16.3)."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_verify import call, chi_square

import golden
from reference.checkpoint import Checkpoint
from reference.config import deep
from reference.decoder import Decoder, Model, Sampling
from reference.draft_config import bigram_draft, draft_weights, mini_draft
from reference.drafters import Acceptance, DSpark
from reference.numerics import exact, fused
from reference.spec_state import FORMS, SpecState
from reference.speculate import SpeculativeDecoder
from reference.stage import ContractError
from reference.state import DecodeState
from reference.verify import END
from reference.weights import RandomCheckpoint, all_weights

small = replace(deep, name="small", layers=5, mla_layers=(3, 4), block=4)  # every kind of layer
small_draft = replace(mini_draft, name="small-draft", hidden=small.hidden, taps=(0, 2, 4))
PROMPTS = ([256, *b"def f(x):"], [256, *b"a"], [256, *b"\x00\xff repeated repeated"])


@pytest.fixture(scope="module")
def model():
    return Model(small, all_weights(RandomCheckpoint(small, 1), small))


@pytest.fixture(scope="module")
def trained():
    source = Checkpoint(Path(golden.__file__).parent / "mini")
    return Model(source.config, all_weights(source, source.config))


def plain(model, num=exact, slots=4):
    return Decoder(model, DecodeState(model.config, slots=slots, pages=60, num=num, order=2))


class Scripted:
    """Drafts what it is told: `line[i]` follows token i - 1 of request i. right: how many drafts of each step are."""

    taps = ()

    def __init__(self, lines, right, size=7):
        self.lines, self.right, self.size = lines, itertools.cycle(right), size

    def observe(self, taps, position, slot_mapping):
        pass

    def propose(self, live, rows, *, replay):
        draft = torch.full((rows, self.size), -1)
        for r, line, out in zip(live, self.lines, draft, strict=False):
            n, good = len(r.tokens), next(self.right)
            ahead = (line[n : n + self.size] + [0] * self.size)[: self.size]
            out[:] = torch.tensor([t if i < good else (t + 1) % 256 for i, t in enumerate(ahead)])
        return draft, None


def speculative(model, form, drafter, num=exact, rule="greedy", slots=30, **kw):
    base = DecodeState(model.config, slots=slots, pages=60, num=num, order=5)
    state = SpecState(base, form=form)
    return SpeculativeDecoder(model, state, drafter, rule=rule, **kw)


def owned(state, request):
    """What a request's state says: KDA rows by layer, cache rows below its length."""
    out = {}
    for (name, layer), t in state.tensors.items():
        rows = t[request.pages].flatten(0, 1)[: request.length] if name == "cache" else t[request.slot]
        out[name, layer] = rows.clone()
    return out


def far(a, b):
    """The largest relative distance of two such states; infinite where shapes differ."""
    return max(float((a[k] - b[k]).norm() / b[k].norm()) if a[k].shape == b[k].shape else math.inf for k in b)


@pytest.fixture(scope="module")
def line(model):
    """24 greedy tokens of the first prompt, and the state after each, by plain decoding in float64."""
    d = plain(model)
    r = d.state.open()
    tokens, states = [int(d.prefill(r, PROMPTS[0]).act["tokens"])], [owned(d.state, r)]
    for _ in range(24):
        tokens.append(int(d.decode([r], tokens[-1:]).act["tokens"]))
        states.append(owned(d.state, r))
    return tokens, states


@pytest.mark.parametrize("kept", range(8))
@pytest.mark.parametrize("form", FORMS)
def test_state_after_every_accepted_count(model, line, form, kept):
    """`kept` drafts are accepted, then 7 - kept from that offset, then plain decoding goes on.

    1e-11: unit roundoff 1.1e-16 amplified by five layers. Everything that nobody owns is NaN, and stays so.
    """
    tokens, states = line
    s = speculative(model, form, Scripted([tokens], (kept, 7 - kept)))
    r = s.prefill(PROMPTS[0])
    base = s.state.base
    base.reserve((r.request, 40))
    for key, t in base.tensors.items():
        mine = r.request.pages if key[0] == "cache" else r.slots[:1]
        t[[i for i in range(len(t)) if i not in mine]] = torch.nan
    before = base.clone()
    assert s.step([r], rows=2) == [tokens[1 : kept + 2]] and r.request.length == len(PROMPTS[0]) + kept + 1
    assert s.step([r], rows=3) == [tokens[kept + 2 : 10]]
    for name, rows in base.changed(before).items():
        assert set(rows) <= set(r.request.pages if name.startswith("cache") else r.slots), name
    s.state.settle(r)
    assert far(owned(base, r.request), states[9]) < 1e-11 < far(owned(base, r.request), states[8])
    goes_on = Decoder(model, base).decode([r.request], r.tokens[-1:])
    assert int(goes_on.act["tokens"]) == tokens[10] and far(owned(base, r.request), states[10]) < 1e-11
    r.tokens.append(tokens[10])
    s.state.adopt(r)
    assert s.step([r])[0][:2] == tokens[11 : 11 + min(kept + 1, 2)]


@pytest.mark.parametrize("form", FORMS)
def test_a_ragged_batch_generates_what_plain_decoding_does(model, form):
    """Three requests that keep different counts, drafts that end early, pages that grow."""
    want = plain(model).generate(PROMPTS, 22)
    for right, size in (((7, 0, 3, 1, 7, 5, 2), 7), ((2, 3, 1), 3)):
        s = speculative(model, form, Scripted(want, right, size))
        assert s.generate(PROMPTS, 22) == want
        assert len(s.state.base.free_slots) == 29 and len(s.state.base.free_pages) == 59
        assert sum(n > 0 for n in s.statistics.histogram) >= 3
    if form == "slots":  # the window read one token early is seen
        s = speculative(model, form, Scripted(want, (4,)))
        r = s.prefill(PROMPTS[0])
        s.step([r])
        r.accepted -= 1
        s.step([r])
        assert r.tokens != want[0][: len(r.tokens)]


def dspark(model, lines, form, num, **kw):
    config = small_draft if model.config == small else mini_draft
    base = DecodeState(model.config, slots=20, pages=60, num=num, order=5)
    state = SpecState(base, form=form, draft=config)
    tensors = bigram_draft(config, lines)
    drafter = DSpark(config, draft_weights(tensors, config, model.weights), state)
    return SpeculativeDecoder(model, state, drafter, **kw)


@pytest.fixture(scope="module")
def story(trained):
    prompts, n = PROMPTS[:1], 20
    return prompts, n, plain(trained).generate(prompts, n)


@pytest.mark.parametrize("form", FORMS)
def test_dspark_is_greedy_decoding_of_the_trained_model(trained, story, form):
    """The longer run is an equivalence case. Drafts of several lengths are kept, or the test would say nothing."""
    prompts, n, want = story
    s = dspark(trained, want, form, exact)
    assert s.generate(prompts, n) == want
    assert sum(c > 0 for c in s.statistics.histogram) >= 3 and s.statistics.mean() > 1.5


def test_the_record_form_in_fused_precision(trained, story):
    """Tokens are those of plain decoding up to a near tie: float32 sums depend on the batch (8 rows here, 1 there)."""
    prompts, n, _ = story
    want = plain(trained, fused).generate(prompts, n)
    got = dspark(trained, want, "record", fused).generate(prompts, n)
    for prompt, a, b in zip(prompts, got, want, strict=True):
        if a != b:
            i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            d = plain(trained, exact)
            logits = d.prefill(d.state.open(), [*prompt, *b[:i]]).act["vocab_logits"][0]
            assert abs(float(logits[a[i]] - logits[b[i]])) < 2**-6 * float(logits.abs().max())


def letters(tokens):
    """A structured output: digits, letters and one separator take turns; what is legal depends on all before."""
    mask = torch.zeros(small.vocab, dtype=torch.bool)
    n = len(tokens) + sum(t == 48 for t in tokens)
    mask[[*range(48, 58)] if n % 3 == 0 else [*range(97, 123)] if n % 3 == 1 else [44]] = True
    return mask


def masked_plain(model, prompt, n, sampling):
    d = plain(model)
    r, out = d.state.open(), []
    out.append(int(d.prefill(r, prompt, sampling, letters(out)[None]).act["tokens"]))
    while len(out) < n:
        out.append(int(d.decode([r], out[-1:], [sampling], letters(out)[None]).act["tokens"]))
    return out


@pytest.mark.parametrize("form", FORMS)
def test_masks_and_sampling_replay_token_for_token(model, form):
    """Rule "greedy" takes the tokens that plain sampling takes, with temperature, top-k, top-p and a mask, one request
    of the two unmasked."""
    one, two = Sampling(0.9, top_k=20, top_p=0.95, seed=3), Sampling(0.7, seed=4)
    want = [masked_plain(model, PROMPTS[0], 24, one), plain(model).generate([PROMPTS[1]], 24, [two])[0]]
    s = speculative(model, form, Scripted(want, (7, 2, 0, 4)))
    assert s.generate(PROMPTS[:2], 24, [one, two], [letters, None]) == want
    assert s.statistics.mean() > 2


@pytest.mark.parametrize("rule", ("standard", "block"))
def test_an_end_keeps_the_distribution(rule):
    """Words of at most three letters a, b, c that end with c: the chances of all of them, by drawing 40,000 words with
    drafts of three tokens from another distribution. False alarm 1e-6; a draft that is cut before its c, and not behind
    it, is another rule, and is seen."""
    p, q, n = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.2, 0.3, 0.5]), 40_000
    words = [w for k in range(3) for w in itertools.product((0, 1), repeat=k)]
    words = [(*w, 2) for w in words] + list(itertools.product((0, 1), repeat=3))
    want = torch.tensor([math.prod(float(p[t]) for t in w) for w in words], dtype=torch.float64)
    for wrong in (False, True):
        counts = dict.fromkeys(words, 0)
        draft = torch.multinomial(q, 3 * n, True, generator=torch.Generator().manual_seed(1)).view(n, 3)
        ends = (draft == 2).long().cumsum(-1)
        limit = torch.where(ends[:, -1] > 0, (ends == 0).sum(-1) + 1, 3).int()  # the third letter is the last anyway
        told = draft.masked_fill(ends > 0, -1) if wrong else draft
        tokens, count = call(rule, p.log().bfloat16().expand(n, 4, 3), told, q.log().expand(n, 3, 3), torch.arange(n))
        got = END.call(dict(limit=limit, tokens=tokens, count=count), {}, fused)
        assert ((got["tokens"] >= 0).sum(-1) == got["count"]).all() and (got["count"] <= limit).all()
        rest = torch.multinomial(p, 3 * n, True, generator=torch.Generator().manual_seed(2)).view(n, 3)
        for line, kept, more in zip(got["tokens"].tolist(), got["count"].tolist(), rest.tolist(), strict=True):
            word = [*line[:kept], *more][:3]
            counts[tuple(word[: word.index(2) + 1] if 2 in word else word)] += 1
        found = torch.tensor(list(counts.values()))
        assert (chi_square(found, want) > 1) == wrong, (wrong, found)


class Told(Scripted):
    """The same drafts with logits, which say nothing."""

    def propose(self, live, rows, *, replay):
        draft, _ = super().propose(live, rows, replay=replay)
        return draft, torch.zeros(draft.numel(), small.vocab, dtype=torch.float64)


@pytest.mark.parametrize("rule", ("greedy", "standard", "block"))
@pytest.mark.parametrize("form", FORMS)
def test_nothing_follows_where_a_mask_ends(model, form, rule):
    """A structured output of 12 tokens: drafts go beyond its end, whatever number of them is kept. Then it is refused,
    as plain decoding refuses it, and nothing changes."""
    wanted, ends = masked_plain(model, PROMPTS[0], 12, Sampling()), torch.zeros(small.vocab, dtype=torch.bool)
    lawful = lambda tokens: letters(tokens) if len(tokens) < 12 else ends  # noqa: E731
    for right in (0, 1, 3, 7):
        s = speculative(model, form, Told([wanted + [44] * 9], (right,)), rule=rule)
        r = s.prefill(PROMPTS[0], allowed=lawful)
        while len(r.tokens) < 12:
            s.step([r])
        assert r.tokens == wanted and r.request.length == len(PROMPTS[0]) + 11
        pages, before = list(r.request.pages), s.state.base.clone()
        with pytest.raises(ContractError, match="the mask behind 12 tokens allows no token; at least one is needed"):
            s.step([r])
        assert r.tokens == wanted and r.request.pages == pages and not s.state.base.changed(before)


@pytest.mark.parametrize("rule", ("standard", "block"))
def test_random_rules_obey_masks_and_replay(model, rule):
    def run(seed, prompts=PROMPTS[:2]):
        picks = [Sampling(1.0, top_k=40, seed=seed + i) for i in range(len(prompts))]
        s = dspark(model, [[48, 97, 44] * 9], "record", exact, rule=rule)
        return s.generate(prompts, 10, picks, [letters] * len(prompts))

    got = run(1)
    for tokens in got:
        assert all(letters(tokens[:i])[t] for i, t in enumerate(tokens))
    assert run(1) == got != run(5)
    assert run(1, PROMPTS[:1]) == got[:1]  # alone as in the batch


@pytest.mark.parametrize("rule", ("standard", "block"))
def test_random_rules_at_temperature_zero_are_greedy(model, rule):
    want = plain(model).generate(PROMPTS[:1], 20)
    assert speculative(model, "slots", Told(want, (7, 1, 3)), rule=rule).generate(PROMPTS[:1], 20) == want


def test_synthetic_lengths_and_adaptive_drafting(model):
    s = speculative(model, "record", Scripted([[0] * 99], (0,)), rule="synthetic", rates=[1, 1, 1, 0, 0, 0, 0])
    r = s.prefill(PROMPTS[0])
    assert [len(s.step([r])[0]) for _ in range(3)] == [4, 4, 4] and r.request.length == len(PROMPTS[0]) + 12
    want = plain(model).generate(PROMPTS[:1], 24)
    s = speculative(model, "slots", Scripted(want, (2,)), cost=0.05)
    assert s.generate(PROMPTS[:1], 24) == want  # drafts 7 once, then the two that hold
    assert s.statistics.best(0.05) == 2 and s.statistics.rates[:3] == [1, 1, 0]


def test_acceptance_statistics():
    """Against a loop over all outcomes; the best length against trying every length."""
    a = Acceptance(4, decay=1.0)
    seen = [(4, 4), (0, 4), (2, 4), (2, 3), (1, 1), (0, 2)]
    for kept, drafted in seen:
        a.record(kept, drafted)
    want = [sum(k > i for k, _ in seen) / sum(k >= i < d for k, d in seen) for i in range(4)]
    assert a.rates == pytest.approx(want) and a.mean() == pytest.approx(1 + 9 / 6)
    assert a.histogram == [2, 1, 2, 0, 1]
    for cost in (0.0, 0.05, 0.2, 0.5, 2.0):
        gain = [(1 + sum(math.prod(want[:i]) for i in range(1, n + 1))) / (1 + cost * n) for n in range(1, 5)]
        assert a.best(cost) == gain.index(max(gain)) + 1
    b = Acceptance(1, decay=0.5)
    for kept in (1, 1, 0):
        b.record(kept, 1)
    assert b.rates == pytest.approx([0.75 / 1.75])
    for kept, drafted in ((-1, 2), (3, 2), (1, 5)):
        with pytest.raises(ContractError, match="drafts kept; allowed are"):
            a.record(kept, drafted)


def bad_steps():
    zeros = lambda *s: torch.zeros(*s, dtype=torch.int64)  # noqa: E731

    def accepted(n):
        def call(s, r):
            r.accepted = n
            s.step([r])

        return call

    def masked(allowed):
        def call(s, r):
            r.allowed = allowed
            s.verify([r], zeros(1, 7), None)

        return call

    def closed(s, r):
        twin = replace(r, slots=[])
        s.step([twin])

    return [
        (lambda s, r: s.verify([r], zeros(1, 8), None), r"draft has shape \(1, 8\); allowed are 1 rows of at most 7"),
        (lambda s, r: s.verify([r], zeros(2, 7), None), r"draft has shape \(2, 7\); allowed are 1 rows"),
        (lambda s, r: s.verify([r], zeros(1, 7) - 2, None), r"draft holds -2; allowed are tokens 0\.\.271 and -1"),
        (lambda s, r: s.verify([r], zeros(1, 7) + 272, None), r"draft holds 272; allowed are tokens 0\.\.271"),
        (lambda s, r: s.verify([r, r], zeros(2, 7), None), "is closed, has no token yet, or occurs twice"),
        (lambda s, r: s.verify([], zeros(0, 7), None), "0 requests in None rows"),
        (lambda s, r: s.verify([r], zeros(0, 7), None, rows=0), "rows"),
        (closed, "is closed"),
        (accepted(0), r"accepted count 0; allowed are 1\.\.8"),
        (accepted(9), r"accepted count 9; allowed are 1\.\.8"),
        (lambda s, r: s.prefill([]), "at least one token"),
        (lambda s, r: s.prefill([1, 272]), r"token id 272; allowed are 0\.\.271"),
        (lambda s, r: s.prefill([1], allowed=lambda t: torch.zeros(272, dtype=torch.bool)),
         "the mask behind 0 tokens allows no token"),
        (lambda s, r: s.prefill([1], allowed=lambda t: torch.ones(1, 272, dtype=torch.bool)),
         r"the mask behind 0 tokens is torch\.bool \(1, 272\); allowed is torch\.bool \(272,\)"),
        (masked(lambda t: torch.ones(272)), r"the mask behind 1 tokens is torch\.float32 \(272,\); allowed is"),
        (masked(lambda t: [97]), r"the mask behind 1 tokens is \[97\]; allowed is torch\.bool \(272,\)"),
        (masked(lambda t: torch.zeros(272, dtype=torch.bool)), "the mask behind 1 tokens allows no token"),
        (lambda s, r: s.prefill([1] * 16 * 60), "60 pages wanted for 960 tokens, 58 free"),
        (lambda s, r: [s.prefill([1]) for _ in range(4)], "8 slots wanted, 7 free"),
        (lambda s, r: speculative(s.model, "slots", None, rule="tree"), "rule 'tree' with 0 rates: allowed are greedy"),
        (lambda s, r: speculative(s.model, "slots", None, rule="synthetic", rates=[1]), "'synthetic' with 1 rates"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, text", bad_steps(), ids=range(len(bad_steps())))
def test_bad_steps_raise_and_change_nothing(model, call, text):
    s = speculative(model, "slots", Scripted([[]], (0,)), slots=24 if "8 slots" in text else 30)
    r = s.prefill(PROMPTS[0])
    base = s.state.base
    if "8 slots" in text:
        s.prefill(PROMPTS[1])
    pages, slots, length, before = list(base.free_pages), list(base.free_slots), r.request.length, base.clone()
    own = {k: t.clone() for k, t in s.state.own.items()}
    with pytest.raises(ContractError, match=text):
        call(s, r)
    assert base.free_pages == pages and r.request.length == length and not base.changed(before)
    assert sorted(base.free_slots) == sorted(slots) and all(torch.equal(t, own[k]) for k, t in s.state.own.items())


@pytest.mark.parametrize("rule", ("standard", "block"))
def test_random_rules_need_the_logits_of_the_draft(model, rule):
    s = speculative(model, "record", Scripted([[]], (0,)), rule=rule)
    r = s.prefill(PROMPTS[0])
    for logits, text in ((None, "draft logits none"), (torch.zeros(6, 272), r"logits \(6, 272\)")):
        with pytest.raises(ContractError, match=text + rf"; rule {rule} needs them, with shape \(7, 272\)"):
            s.verify([r], torch.zeros(1, 7, dtype=torch.int64), logits)
