"""The shipped checkpoint: its size, its layout, what its training log shows, and that it predicts text here."""

import json
from pathlib import Path

import pytest
import torch

from equivalence.cases import GOLDEN, load_model, make_state
from reference.checkpoint import Checkpoint
from reference.config import mini
from reference.decoder import Decoder

FOLDER = GOLDEN / "mini"
TEXT = b'def load(path):\n    """Read a file."""\n    with open(path) as f:\n        return f.readlines()'


@pytest.fixture(scope="module")
def log() -> dict:
    return json.loads((FOLDER / "train_log.json").read_text())


def test_size_and_configuration():
    assert sum(f.stat().st_size for f in Path(FOLDER).iterdir()) <= 16 << 20
    assert Checkpoint(FOLDER).config == mini


def test_better_than_an_order_3_model(log):
    """Clearly below: half its bits per byte, on every category of held-out text."""
    assert log["bits_per_byte"] < log["order3_bits_per_byte"] / 2
    assert all(own < other for own, other in log["by_category"].values())


def test_every_expert_is_used(log):
    shares = log["expert_share_min"]
    assert len(shares) == mini.layers - mini.dense_layers and min(shares) > 0.2 / mini.experts


def test_decays_and_residual_weights_are_spread(log):
    for layer, quantiles in log["decay_quantiles"].items():
        low, middle, high = quantiles[1], quantiles[3], quantiles[-1]
        assert low < 0.6 and high > 0.999 and low < middle < high, layer
    for place, weights in log["attn_res_mean_weights"].items():
        assert len(weights) == 1 or max(weights) < 0.95, place


def test_greedy_text_does_not_collapse_into_one_token(log):
    assert log["generation"]["tokens_each"] == 4096 and len(log["generation"]["diversity"]) >= 4
    for made in log["generation"]["diversity"]:
        assert made["longest_run"] < 512 and made["distinct_tokens"] >= 8


def test_it_predicts_text():
    """Bits per byte of a snippet of our own, token by token: below 3; a model that guesses bytes has 8."""
    model, source = load_model("mini")
    assert source == "checkpoint mini"
    decoder = Decoder(model, make_state(mini, [len(TEXT)], 1, "cpu"))
    request = decoder.state.open()
    logits = decoder.prefill(request, [mini.bos]).act["vocab_logits"]
    bits = 0.0
    for byte in TEXT[:60]:
        bits -= float(logits[0].float().log_softmax(-1)[byte]) / torch.tensor(2.0).log().item()
        logits = decoder.decode([request], [byte]).act["vocab_logits"]
    assert bits / 60 < 3
