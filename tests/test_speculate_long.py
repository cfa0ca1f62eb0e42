"""Greedy decoding of the trained model with and without speculation: token for token, and the state afterwards."""

import os

import pytest
from test_speculate import Scripted, far, owned

from equivalence.cases import load_model
from reference.decoder import Decoder
from reference.draft_config import bigram_draft, draft_weights, mini_draft
from reference.drafters import DSpark
from reference.numerics import exact
from reference.spec_state import FORMS, SpecState
from reference.speculate import SpeculativeDecoder
from reference.state import DecodeState

STORIES = (b"def add(a, b):", b"The river ", b"1 + 2 = ", b'{"name": ', b"Once upon a time", b"import os\n",
           b"Die Stadt ", b"aaaa")  # fmt: skip
LIMIT = 1e-11  # unit roundoff 1.1e-16 amplified by 13 layers


@pytest.fixture(scope="module")
def trained():
    return load_model("mini")[0]


def room(model, slots):
    return DecodeState(model.config, slots=slots, pages=180, num=exact, order=slots)


def walk(model, prompts, tokens):
    """Plain greedy decoding in one batch: the tokens, and each request's state at the last 9 lengths, by count."""
    d = Decoder(model, room(model, len(prompts) + 1))
    requests = [d.state.open() for _ in prompts]
    lines = [[int(d.prefill(r, p).act["tokens"])] for r, p in zip(requests, prompts, strict=True)]
    states = [{} for _ in prompts]
    for n in range(1, tokens + 8):
        for line, new in zip(lines, d.decode(requests, [x[-1] for x in lines]).act["tokens"].tolist(), strict=True):
            line.append(new)
        if n >= tokens - 1:
            for r, kept in zip(requests, states, strict=True):
                kept[n] = owned(d.state, r)
    return lines, states


def compare(s, prompts, lines, states, tokens) -> list:
    """Decode with s until every request has `tokens`, then hold tokens and state against plain decoding."""
    every = [s.prefill(p) for p in prompts]
    while live := [r for r in every if len(r.tokens) < tokens]:
        s.step(live)
    for r, line, kept in zip(every, lines, states, strict=True):
        assert r.tokens == line[: len(r.tokens)]
        s.state.settle(r)
        mine, at = owned(s.state.base, r.request), len(r.tokens) - 1  # the last token is not in the state
        assert [n for n, other in kept.items() if far(mine, other) < LIMIT] == [at]
    return every


ORDER = (3, 0, 7, 1, 6, 2, 5, 4)


@pytest.fixture(scope="module")
def story(trained):
    prompts, tokens = [[256, *STORIES[0]]], 1 + sum(ORDER) + len(ORDER)
    return prompts, *walk(trained, prompts, tokens), tokens


@pytest.mark.parametrize("form", FORMS)
def test_every_accepted_count_leaves_tokens_and_state(trained, story, form):
    """0 to 7 drafts are kept in one request, in mixed order; then plain decoding goes on from that state."""
    _, lines, _, tokens = story
    state = SpecState(room(trained, 12), form=form)
    s = SpeculativeDecoder(trained, state, Scripted(lines, ORDER))
    (r,) = compare(s, *story)
    assert s.statistics.histogram == [1] * 8
    goes_on = Decoder(trained, state.base).decode([r.request], r.tokens[-1:])
    assert int(goes_on.act["tokens"]) == lines[0][tokens]


@pytest.mark.parametrize("form", FORMS)
def test_2048_tokens_of_dspark_are_greedy_decoding(trained, form):
    """8 requests of 256 tokens; what the draft model knows is which byte follows which in all of them together."""
    if not os.environ.get("K3_SLOW"):
        pytest.skip("minutes: set K3_SLOW=1")
    prompts = [[256, *text] for text in STORIES]
    tokens = 2048 // len(prompts)
    lines, states = walk(trained, prompts, tokens)
    state = SpecState(room(trained, 70), form=form, draft=mini_draft)
    weights = draft_weights(bigram_draft(mini_draft, lines), mini_draft, trained.weights)
    s = SpeculativeDecoder(trained, state, DSpark(mini_draft, weights, state))
    compare(s, prompts, lines, states, tokens)
    assert sum(n > 0 for n in s.statistics.histogram) >= 4, s.statistics.histogram
