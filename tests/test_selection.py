"""Selections and the specialised decoder: rules, spans, swaps between tokens, explanations, refusals. No GPU."""

import pytest
import torch

import fast  # noqa: F401  (registers the twins)
from equivalence.cases import load_model, make_state
from equivalence.law_twin import LawTwin
from equivalence.simt import interpreted
from fast.decoder import FastDecoder
from fast.selection import Rule, Selection, divide, nowhere, ranges, span_refs, twins
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
    why = "law serves kda.conv, kda.recurrence, kda.out_norm only together, and the rules say kda.recurrence=reference"
    assert (reasons["00.kda.conv"], reasons["00.kda.recurrence"], reasons["00.kda.out_norm"]) == (why, "selected", why)


def test_each_implementation_is_asked_once_for_a_plan(model):
    asked = []

    class Asked(LawTwin):
        def unfit(self, plan, device):
            asked.append(self.spans)
            return "not today"

    known = {"law": Asked("law", SPAN), "same name": Asked("law", ("attn_res.pre",))}
    units = divide(plan(model.config, 2), Selection.parse("*=law"), known, torch.device("cpu"))
    reasons = {u.key: u.reason for u in units}
    assert reasons["02.kda.out_norm"] == reasons["00.kda.conv"] == reasons["01.attn_res.pre"] == "not today"
    assert sorted(asked) == [(("attn_res.pre",),), (SPAN,)]


def test_a_twin_by_name_and_by_default_is_one_choice(model):
    """On a device that it serves; elsewhere both reasons are told, also inside of the span."""
    known = interpreted()
    for text, why in (("kda.conv=kda.decode", "selected"), ("", "no rule says otherwise")):
        units = divide(plan(model.config, 2), Selection.parse(text), known, torch.device("cpu"))
        one = next(u for u in units if u.key == "00.kda.decode")
        assert (len(one.steps), one.reason) == (3, why)
    units = divide(plan(model.config, 2), Selection.parse("kda.conv=reference@0"), twins(), torch.device("cpu"))
    reasons = {u.key: u.reason for u in units}
    assert "only together, and the rules say kda.conv=reference; device cpu: kernels run" in reasons["00.kda.out_norm"]
    assert reasons["01.kda.out_norm"].startswith("device cpu: kernels run")
    known = {"law": LawTwin("law", SPAN)}
    units = divide(plan(model.config, 2), Selection.parse("*=law"), known, torch.device("cpu"))
    assert next(u.reason for u in units if u.key == "embed") == "law is selected and has no such stage"


@pytest.mark.parametrize("text, why", [
    ("kda.conv=fast@1", None), ("attn_res=fast@4", None), ("head.norm=reference", None),
    ("kda.conv=fast@3", "layer 3 is MLA with a mixture of experts; kda.conv is in layers 0-2"),
    ("kda.decode=fast@3-4", "layers 3-4 are MLA with a mixture of experts; "
                            "kda.decode (kda.conv, kda.recurrence, kda.out_norm) is in layers 0-2"),
    ("mlp.down=fast@2-3", "layers 2-3 are KDA and MLA with a mixture of experts; mlp.down is in layer 0"),
    ("moe.topk=fast@0", "layer 0 is KDA with a dense MLP; moe.topk is in layers 1-4"),
    ("mla.q_b=fast@5", "there is no layer 5; mla.q_b is in layers 3-4"),
    ("head.norm=reference@3", "head.norm belongs to no layer; allowed without @"),
    ("kda.recurrence_bf16=reference", "no layer has kda.recurrence_bf16"),
])  # fmt: skip
def test_a_rule_that_covers_nothing_says_which_layers_have_its_stage(model, text, why):
    (rule,) = Selection.parse(text).rules
    assert nowhere(rule, twins(), plan(model.config, 1).steps) == why


def test_ranges():
    assert ranges([4, 0, 1, 2, 2, 6, 7]) == "0-2, 4, 6-7" and ranges([]) == ""


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
    assert one.reason == "selected"
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
