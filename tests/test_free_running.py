"""Whole decoders side by side: correct twins run equal, faults show in logits, state and ledgers."""

import pytest
import torch

from equivalence.cases import Case, run
from equivalence.law_twin import LawTwin, every_stage, served_by
from equivalence.report import describe
from reference.numerics import exact, fused

CASE = Case("free", 5, ("edge-empty", "edge-one-byte", "edge-length-15"), 22)  # 2,112 logits of routers
SPAN = ("kda.conv", "kda.recurrence", "kda.out_norm")


def free(*twins, layers=None, case=CASE):
    return run(case, "tiny", **served_by(*twins, layers=layers))


@pytest.mark.parametrize("num", [fused, exact], ids=lambda n: n.mode)
def test_correct_twins_run_equal(num):
    """Twins that round as the reference does, and twins that err only where they store."""
    result = free(*every_stage(num))
    assert result.verdict == "equal", result.statement
    assert result.ledger["experts outside"] == result.ledger["tokens outside"] == 0
    assert {"logits", "recurrent", "conv", "cache"} <= {f.place.tensor for f in result.findings}


def test_a_fault_shows_in_the_run():
    def half(values, t):
        values["recurrent"] = values["recurrent"] * 0.5

    result = free(LawTwin("kda.twin", SPAN, fused, half), layers=(0, 0))
    bad = {f.place.tensor for f in result.findings if not f.ok}
    assert result.verdict == "disagreement" and "recurrent" in bad
    worst = next(f for f in result.findings if f.place.key == "00.recurrent" and f.check == "value")
    assert worst.pooled > 10 and "over the run" in describe(worst)


def test_a_neighbours_slot_shows_at_the_end():
    def elsewhere(values, t):
        t["conv"][0, 0, 0] = 0.0

    result = free(LawTwin("kda.twin", SPAN, fused, elsewhere), layers=(1, 1))
    bad = [f for f in result.findings if not f.ok]
    assert [(f.place.key, f.place.tensor) for f in bad] == [("01.conv", "conv elsewhere")]
    assert bad[0].reasons == ["conv entry 0 was changed"]


def test_wrong_experts_are_illegal_and_do_not_spread():
    def wrong(values, t):
        values["ids"] = (values["ids"] + 1) % t["logits"].shape[-1]

    result = free(LawTwin("topk.twin", ("moe.topk",), fused, wrong), layers=(2, 2))
    bad = [f for f in result.findings if not f.ok]
    assert [(f.place.key, f.place.tensor) for f in bad] == [("02.moe.topk", "ids")]  # routes are forced
    assert result.ledger["experts outside"] > 0


def test_wrong_tokens_are_illegal():
    def second(values, t):
        values["tokens"] = t["logits"].argsort(-1, descending=True)[:, -1]

    result = free(LawTwin("sample.twin", ("sample",), fused, second))
    assert [f.place.tensor for f in result.findings if not f.ok] == ["tokens"]
    assert result.ledger["tokens outside"] == 3 * CASE.steps


def test_too_few_tokens_are_no_equality():
    """Of logits only the error of a run is bounded; from some hundred of them nothing follows."""

    def louder(values, t):
        (name,) = values
        values[name] = values[name] * 1.5

    twin = LawTwin("head.twin", ("head.logits",), fused, louder)
    short, long = (free(twin, case=Case("free", 5, CASE.prompts, steps)) for steps in (2, 3))  # 1,632 and 2,448 of them
    assert short.verdict == "could not judge" and "logits" in short.hollow[0]
    assert long.verdict == "disagreement" and long.first.place.tensor == "logits"


def test_nan_shows_at_once():
    def spoil(values, t):
        values["out"][t["x"][:, 0] == t["x"][:, 0].max(), 0] = torch.nan

    result = free(LawTwin("proj.twin", ("kda.in_proj",), fused, spoil), layers=(1, 1))
    (logits,) = (f for f in result.findings if f.place.key == "logits")
    assert result.first.first_token == logits.first_token == 0
    assert "non-finite" in logits.reasons[0]


def test_what_could_not_run_is_no_equality():
    refusing = LawTwin("proj.twin", ("kda.in_proj",))

    def refuse(tensors, attrs):
        raise NotImplementedError("batch 5")

    refusing.run = refuse
    result = free(refusing)
    assert result.exit_code == 2 and "proj.twin could not run: batch 5" in result.statement
