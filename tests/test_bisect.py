"""Bisection by swapping, with the law as the twin and seeded faults: the unit, the model runs, what is refused."""

import math

import pytest
import torch

from equivalence.bisect import bisect
from equivalence.cases import load_model
from equivalence.law_twin import LawTwin
from fast.selection import Rule, Selection
from reference.decoder import Model
from reference.stage import ContractError

PROMPTS = ([256, *b"one prompt"], [256, *b"another, longer"])
SPAN = ("kda.conv", "kda.recurrence", "kda.out_norm")
STAGES = ("attn_res.pre", "attn_res.post", "moe.latent_down", "mla.out_gate")


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")[0]


def served(spoil=None, layer=None, spans=(SPAN, *((s,) for s in STAGES)), bad_span=SPAN):
    """Every span served by its clean law, and `bad_span` of one layer by a spoilt one."""
    twins = [LawTwin(f"law.{span[0]}", span) for span in spans]
    rules = [Rule("*", "reference")] + [Rule(s, t.name) for t in twins for s in t.spans[0]]
    if spoil:
        bad = LawTwin("bad", bad_span, spoil=spoil)
        twins.append(bad)
        rules += [Rule(s, "bad", (layer, layer)) for s in bad_span]
    return dict(selection=Selection(tuple(rules)), extra={t.name: t for t in twins})


def scaled(name, factor):
    def spoil(values, tensors):
        values[name] = values[name] * factor

    return spoil


def test_clean_twins_are_equal_after_three_runs(model):
    found = bisect(model, PROMPTS, steps=4, **served())
    assert (found.verdict, found.model_runs, found.key) == ("equal", 3, None) and found.runs[0].ratio == 1.0


def test_logits_of_nan_cannot_be_judged(model):
    """Exact, fused and twin are NaN alike: no difference, and no verdict either, even for a broken twin."""
    nan = {k: torch.full_like(t, torch.nan) if k[0] == "embed.w" else t for k, t in model.weights.items()}
    for how in (served(), served(scaled("recurrent", 1.3), 0)):
        found = bisect(Model(model.config, nan), PROMPTS[:1], steps=2, **how)
        assert found.verdict == "could not judge" and "not finite" in found.text


@pytest.mark.parametrize("layer", (0, 2))
@pytest.mark.parametrize("on", ("outputs", "state"))
def test_a_wrong_state_is_found_in_its_layer(model, layer, on):
    found = bisect(model, PROMPTS, steps=4, on=on, **served(scaled("recurrent", 1.3), layer))
    assert (found.verdict, found.layer, found.stages) == ("disagreement", layer, SPAN)
    assert found.model_runs <= math.log2(model.config.layers * 20) + 6
    assert found.model_runs == 2 + len(found.runs) and "alone" in found.runs[-2].served and not found.runs[-1].bad


def test_a_wrong_stage_is_found_among_others(model):
    found = bisect(model, PROMPTS, steps=3, **served(scaled("out", 1.5), 3, bad_span=("attn_res.post",)))
    assert (found.layer, found.stages) == (3, ("attn_res.post",))
    assert found.as_dict()["key"] == "03.attn_res.post"


def test_a_run_that_turns_nan_is_bad(model):
    found = bisect(model, PROMPTS, steps=3, **served(scaled("o", torch.nan), 1, bad_span=("kda.recurrence",),
                   spans=(("kda.recurrence",),)))  # fmt: skip
    assert (found.layer, found.stages) == (1, ("kda.recurrence",)) and math.isinf(found.runs[0].ratio)


def test_nothing_served_cannot_be_judged(model):
    found = bisect(model, PROMPTS, steps=2, selection=Selection.parse("*=reference"))
    assert found.verdict == "could not judge" and found.model_runs == 0


def test_refusals(model):
    with pytest.raises(ValueError, match="bisect on 'logits': allowed are outputs, state"):
        bisect(model, PROMPTS, on="logits")
    with pytest.raises(ContractError, match="implementation 'bad': allowed are fast, reference"):
        bisect(model, PROMPTS, selection=Selection.parse("kda.conv=bad"))
