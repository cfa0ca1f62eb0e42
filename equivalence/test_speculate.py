"""Speculation against plain greedy decoding, token for token over a long output, in float64.

2048 tokens where a GPU is, 96 where there is none.
"""

import pytest
import torch

from reference.decoder import Decoder
from reference.draft_config import bigram_draft, draft_weights, mini_draft
from reference.drafters import DSpark
from reference.numerics import exact
from reference.spec_state import FORMS, SpecState
from reference.speculate import SpeculativeDecoder
from reference.state import DecodeState

from .cases import load_model, prompt_tokens

PROMPT = "edge-one-byte"


def states(config, tokens, device):
    return DecodeState(config, slots=11, pages=tokens // 16 + 8, num=exact, device=device, order=3)


def greedy(tokens: int, device: str) -> list[int]:
    model, _ = load_model("mini", device)
    prompts = prompt_tokens([PROMPT], model.config)
    return Decoder(model, states(model.config, tokens, device)).generate(prompts, tokens)[0]


def speculated(line: list[int], form: str, device: str):
    """The same prompt under a draft that knows which tokens follow which in `line`: tokens and decoder."""
    model, _ = load_model("mini", device)
    state = SpecState(states(model.config, len(line), device), form=form, draft=mini_draft)
    tensors = bigram_draft(mini_draft, [line])
    weights = draft_weights({k: t.to(device) for k, t in tensors.items()}, mini_draft, model.weights)
    decoder = SpeculativeDecoder(model, state, DSpark(mini_draft, weights, state))
    return decoder.generate(prompt_tokens([PROMPT], model.config), len(line))[0], decoder


@pytest.fixture(scope="module")
def plain():
    device, tokens = ("cuda", 2048) if torch.cuda.is_available() else ("cpu", 96)
    return greedy(tokens, device), device


@pytest.mark.parametrize("form", FORMS)
def test_long_outputs_are_equal(plain, form):
    line, device = plain
    got, decoder = speculated(line, form, device)
    different = [i for i, (a, b) in enumerate(zip(got, line, strict=True)) if a != b]
    assert not different, f"token {different[0]} of {len(line)} differs"
    assert sum(n > 0 for n in decoder.statistics.histogram) >= 3  # drafts of several lengths were kept
