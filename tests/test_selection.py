"""Selections and the specialised decoder: rules, spans, swaps between tokens, explanations, refusals. No GPU."""

import pytest
import torch

import fast  # noqa: F401  (registers the twins)
from equivalence.cases import load_model, make_state
from equivalence.law_twin import LawTwin
from fast.decoder import FastDecoder
from fast.selection import Rule, Selection, divide, span_refs, twins
from reference.decoder import Decoder
from reference.plan import plan
from reference.stage import ContractError

PROMPT = [256, *b"swap me"]
SPAN = ("kda.conv", "kda.recurrence", "kda.out_norm")


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")[0]


def decoder(model, **kw):
    return FastDecoder(model, make_state(model.config, [len(PROMPT)], 40, "cpu"), backend="latency_specialized", **kw)


def test_parse():
    rules = Selection.parse("kda.decode=reference@3-7, attn_res=fast,*=fault:kda.beta@2").rules
    assert rules == (
        Rule("kda.decode", "reference", (3, 7)),
        Rule("attn_res", "fast"),
        Rule("*", "fault:kda.beta", (2, 2)),
    )
    for text in ("kda.decode", "kda.decode=", "=fast", "a=b@x", "a=b@3-", "a b=c"):
        with pytest.raises(ContractError, match="the form is STAGE=IMPLEMENTATION"):
            Selection.parse(text)
    with pytest.raises(ContractError, match="layers 7-3 are empty"):
        Selection.parse("kda.conv=fast@7-3")


def test_the_last_rule_wins_and_layers_limit_it(model):
    known = {"law": LawTwin("law", SPAN)}
    selection = Selection.parse("*=reference,kda.conv=law,kda.recurrence=law,kda.out_norm=law,law=reference@1-1")
    units = divide(plan(model.config, 2), selection, known, torch.device("cpu"))
    assert [u.key for u in units if u.implementation] == ["00.law", "02.law"]
    conv = next(u for u in units if u.key == "01.kda.conv")
    assert (conv.implementation, conv.reason) == (None, "selected")


def test_half_a_span_falls_back_and_says_why(model):
    known = {"law": LawTwin("law", SPAN)}
    selection = Selection.parse("kda.conv=law,kda.recurrence=reference,kda.out_norm=law")
    reasons = {u.key: u.reason for u in divide(plan(model.config, 2), selection, known, torch.device("cpu"))}
    assert reasons["00.kda.conv"] == "another stage of the span is served by the reference"


def test_without_a_gpu_every_twin_says_so(model):
    units = divide(plan(model.config, 2), Selection(), twins(), torch.device("cpu"))
    reasons = {u.key: u.reason for u in units}
    assert (
        reasons["00.kda.conv"].startswith("device cpu: kernels run on CUDA devices") and reasons["embed"] == "no twin"
    )
    assert not any(u.implementation for u in units)


@pytest.mark.parametrize("made", (dict(tokens=65), dict(tokens=4, prefill=True)), ids=str)
def test_what_twins_do_not_serve(model, made):
    units = divide(plan(model.config, **made), Selection(), twins(), torch.device("cpu"))
    reason = next(u for u in units if u.key == "00.kda.conv").reason
    assert reason == (
        "prefill is served by the reference" if "prefill" in made else "batch 65: kda.decode serves 1..64"
    )


def test_swaps_between_tokens_leave_the_text_unchanged(model):
    plain = Decoder(model, make_state(model.config, [len(PROMPT)], 40, "cpu")).generate([PROMPT], 20)[0]
    swapped = decoder(model, extra={"law": LawTwin("law", SPAN)})
    request = swapped.state.open()
    out = [int(swapped.prefill(request, PROMPT).act["tokens"])]
    served = set()
    for token in range(19):
        if token % 3 == 0:
            for stage in SPAN:
                swapped.swap(stage, "law" if token % 2 else "reference", (token % 3, 2))
        out.append(int(swapped.decode([request], out[-1:]).act["tokens"]))
        served.add(frozenset(e.key for e in swapped.explain() if e.served_by == "law"))
    assert out == plain and len(served) > 1


def test_explain_names_state_and_witness(model):
    d = decoder(model, extra={"law": LawTwin("law", SPAN)}, selection=Selection(tuple(Rule(s, "law") for s in SPAN)))
    request = d.state.open()
    d.prefill(request, PROMPT)
    assert {e.reason for e in d.explain() if e.key == "00.kda.conv"} == {"prefill is served by the reference"}
    d.decode([request], [65])
    one = next(e for e in d.explain() if e.key == "00.law")
    assert (one.stages, one.kernels, one.state) == (SPAN, ("law-fused",), ("conv.0", "recurrent.0"))
    assert {s for e in d.explain() for s in e.stages} == {s.stage.name for s in plan(model.config, 1).steps}


def test_an_unknown_swap_changes_nothing(model):
    d = decoder(model)
    before = d.selection
    for target, implementation in (("kda.nothing", "fast"), ("kda.conv", "nobody")):
        with pytest.raises(ContractError, match=r"kda\.nothing|nobody"):
            d.swap(target, implementation)
    assert d.selection is before
    with pytest.raises(ContractError, match="decode_backend 'quick': allowed are reference, latency_specialized"):
        FastDecoder(model, d.state, backend="quick")


def test_arguments_of_a_span_are_unambiguous(model):
    steps = [s for s in plan(model.config, 2).steps if s.layer == 0 and s.stage.name in SPAN]
    refs = span_refs(steps, twins()["kda.decode"].arguments)
    assert set(refs) == set(twins()["kda.decode"].arguments)
    both = [s for s in plan(model.config, 2).steps if s.stage.name == "kda.in_proj"][:2]
    with pytest.raises(ContractError, match=r"01.kda.in_proj: argument 'w' is"):
        span_refs(both, ("x", "w"))
