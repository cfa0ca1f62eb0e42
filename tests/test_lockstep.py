"""The lockstep engine against seeded faults in the KDA span: each is reported with its layer, unit and tensor."""

import json
from dataclasses import replace

import pytest
import torch

from equivalence import cases
from equivalence.cases import Case, drive, load_model, make_state, open_requests
from equivalence.law_twin import LawTwin, served_by
from equivalence.lockstep import Lockstep, evaluate
from equivalence.report import Result, describe
from reference.decoder import Model
from reference.kda import gates, unit_keys
from reference.numerics import exact, fused
from reference.plan import Workspace, plan
from reference.stage import ContractError

SPAN = ("kda.conv", "kda.recurrence", "kda.out_norm")
KEY, LAYER, ROWS, STEPS = "01.kda.twin", 1, 5, 3
PROMPTS = ([256], [256, *b"hello"], [256, *b"a longer prompt than a page"])


def lockstep(twins, *, follow="reference", steps=STEPS, layers=(LAYER, LAYER), rows=ROWS, weights=None):
    model, _ = load_model("tiny")
    model = Model(model.config, model.weights | (weights or {}))
    state = make_state(model.config, [len(p) for p in PROMPTS], steps, "cpu")
    decoder = Lockstep(model, state, follow=follow, capacity=steps, **served_by(*twins, layers=layers))
    requests, last = open_requests(decoder, PROMPTS)
    tokens = drive(decoder, requests, last, steps, rows)
    about = dict(tokens=steps)
    return Result(about, decoder.findings(), list(decoder.served.values()), decoder.refused, decoder.ledger()), tokens


def twin(spoil=None, run=None):
    made = LawTwin("kda.twin", SPAN, fused, spoil)
    if run:
        made.run = run
    return made


def redo(values, t, *, decay=lambda d: d, beta=lambda b: b, read=lambda S: S, write=lambda S: S, out=lambda o: o):
    """The recurrence once more, with one thing changed."""
    q, k = unit_keys(values["q"], values["k"], fused)
    log_decay, b = gates(t["raw_g"], t["b"], t["A_log"], t["dt_bias"], fused)
    S = read(t["recurrent"][t["slots"].long()]) * decay(log_decay).exp()[:, :, None, :]
    u = beta(b)[..., None] * (values["v"] - (S @ k[..., None]).squeeze(-1))
    S = S + u[..., None] * k[..., None, :]
    o = out(torch.where((t["slots"] > 0)[:, None, None], (S @ q[..., None]).squeeze(-1), 0))
    y = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * t["w_o_norm"]
    values["recurrent"] = write(S)
    values["out"] = (y.flatten(1) * torch.sigmoid(t["gate"].float())).bfloat16()


def wrong_slot(values, t):
    """Writes the rows of the batch one slot further, then the right ones too."""
    other = (t["slots"].long() + 1) % len(t["recurrent"])
    t["recurrent"][other[t["slots"] > 0]] = values["recurrent"][t["slots"] > 0]


def null_slot(values, t):
    t["recurrent"][0] = values["recurrent"][0]


def null_rows_leak(values, t):
    """Every row adds nothing but a zero times the row before it; NaN of the null slot comes through."""
    values["out"] = (values["out"].float() + 0.0 * values["q"].flatten(1).roll(1, 0)).bfloat16()


def stale_window(values, t):
    values["conv"] = t["conv"][t["slots"].long()].clone()


FAULTS = {
    "wrong decay sign": (lambda v, t: redo(v, t, decay=lambda d: -d), {"recurrent", "out"}),
    "state transposed": (lambda v, t: redo(v, t, write=lambda S: S.mT), {"recurrent"}),
    "beta missing": (lambda v, t: redo(v, t, beta=torch.ones_like), {"recurrent", "out"}),
    "state read as bf16": (lambda v, t: redo(v, t, read=lambda S: S.bfloat16().float()), {"recurrent", "out"}),
    "state stored through bf16": (lambda v, t: redo(v, t, write=lambda S: S.bfloat16().float()), {"recurrent"}),
    "wrong slot": (wrong_slot, {"recurrent elsewhere", "recurrent"}),
    "null slot touched": (null_slot, {"recurrent elsewhere"}),
    "null rows leak": (null_rows_leak, {"out"}),
    "stale window": (stale_window, {"conv"}),
    "sign of a channel": (lambda v, t: v.update(out=torch.cat([-v["out"][:, :1], v["out"][:, 1:]], 1)), {"out"}),
    "two rows swapped": (lambda v, t: v.update(out=v["out"].roll(1, 0)), {"out"}),
    "an output missing": (lambda v, t: v.pop("out"), {"out"}),
    "a state row missing": (lambda v, t: v.pop("recurrent"), {"recurrent"}),
    "an input scaled in place": (lambda v, t: t["gate"].mul_(2), {"memory"}),
    "past the end": (lambda v, t: torch.as_strided(t["out"], (1,), (1,), t["out"].storage_offset() + t["out"].numel())
                     .fill_(1.0), {"memory"}),
}  # fmt: skip


def test_a_correct_twin_is_equal():
    result, tokens = lockstep([twin(lambda v, t: redo(v, t))], steps=6)
    assert result.verdict == "equal" and result.exit_code == 0, result.statement
    assert [e.served_by for e in result.served if e.key == KEY] == ["kda.twin"]
    reference, same = lockstep([twin()], steps=6)
    assert same == tokens
    assert {f.place.tensor for f in reference.findings if f.place.key == KEY} == {
        "out", "recurrent", "conv", "memory", "recurrent elsewhere", "conv elsewhere"
    }  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name):
    spoil, tensors = FAULTS[name]
    result, tokens = lockstep([twin(spoil)])
    first = result.first
    assert result.verdict == "disagreement" and result.exit_code == 1
    assert (first.place.key, first.place.layer, first.first_token) == (KEY, LAYER, 0), result.statement
    assert first.place.tensor in tensors, result.statement
    assert {f.place.key for f in result.findings if not f.ok} == {KEY}
    assert tokens == lockstep([twin()])[1]  # the trajectory is the reference's


def test_the_first_bad_token_is_named():
    calls = []

    def late(values, t):
        calls.append(1)
        if len(calls) == 3:
            values["out"][t["slots"] > 0] += 1.0

    result, _ = lockstep([twin(late)], steps=5)
    assert (result.first.first_token, result.first.place.tensor, result.first.bad) == (2, "out", 3)
    assert describe(result.first).startswith("token 2, 01.kda.twin, out: ")


def test_one_more_rounding_shows_over_a_run():
    """o rounded to bf16 before the norm: sqrt(2) times the reference's error, lost in the noise of single rows."""
    result, _ = lockstep([twin(lambda v, t: redo(v, t, out=lambda o: o.bfloat16().float()))], steps=12)
    assert result.first.place.tensor == "out" and "over the run" in result.first.reasons[-1]
    assert 1.3 < result.first.pooled < 1.6


def test_a_stale_prefix_is_named():
    """The residual stage forgets to store the sum that it used."""
    fault = LawTwin("attn_res.twin", ("attn_res.post",), fused, lambda v, t: v.pop("prefix"))
    result, _ = lockstep([fault], layers=(2, 2))
    assert (result.first.place.key, result.first.place.tensor) == ("02.attn_res.post", "prefix")


def test_illegal_experts_are_named_and_ties_are_not():
    def swap(values, t):
        values["ids"] = values["ids"].flip(-1)
        values["weights"] = values["weights"].flip(-1)

    assert lockstep([LawTwin("topk.twin", ("moe.topk",), fused, swap)], layers=(2, 2))[0].verdict == "equal"

    def wrong(values, t):
        values["ids"] = (values["ids"] + 1) % t["logits"].shape[-1]

    result, _ = lockstep([LawTwin("topk.twin", ("moe.topk",), fused, wrong)], layers=(2, 2))
    assert (result.first.place.key, result.first.place.tensor) == ("02.moe.topk", "ids")


def test_the_weights_of_experts_chosen_by_a_tie_are_compared():
    """All experts are alike: every set is legal, and so every row may differ; the weights must still be right."""
    model, _ = load_model("tiny")
    keys = ("moe.router.w", 2), ("moe.bias", 2)
    alike = {key: model.weights[key][:1].expand_as(model.weights[key]).contiguous() for key in keys}

    def others(factor):
        def spoil(values, t):
            values["ids"] = t["logits"].shape[-1] - 1 - values["ids"]
            values["weights"] = values["weights"] * factor

        return lockstep([LawTwin("topk.twin", ("moe.topk",), fused, spoil)], layers=(2, 2), weights=alike)[0]

    good, bad = others(1.0), others(1.01)
    assert good.verdict == "equal" and good.ledger["experts inside the error"] > 0
    assert bad.verdict == "disagreement" and bad.first.place.tensor == "weights"


@pytest.mark.parametrize("follow", ["reference", "twin"])
def test_state_drift_accumulates_only_when_it_is_followed(follow):
    """A decay that is off by 1e-6 stays inside the bound of one step; followed, it adds up and is found."""
    off = twin(lambda v, t: redo(v, t, decay=lambda d: d - 2.0**-22 * 1.5))
    result, _ = lockstep([off], follow=follow, steps=24)
    (found,) = (f for f in result.findings if f.place.tensor == "recurrent")
    ratio = found.curve[-1] / found.curve[0]
    assert (float(ratio[0]) > 2) is (follow == "twin")


def test_what_could_not_run_is_no_equality():
    def refuse(tensors, attrs):
        raise NotImplementedError("rows start off 8 bytes")

    result, tokens = lockstep([twin(run=refuse)])
    assert (result.verdict, result.exit_code) == ("could not judge", 2)
    assert "kda.twin could not run: rows start off 8 bytes" in result.statement
    assert tokens == lockstep([twin()])[1]
    nothing, _ = lockstep([])
    assert nothing.verdict == "could not judge" and "0 of" in nothing.statement


def test_reports_are_json_and_a_table(capsys):
    case = Case("lockstep", 3, ("edge-empty", "edge-one-byte"), 2)
    seen = []
    result = cases.run(case, "tiny", **served_by(twin(null_slot)), progress=lambda *a: seen.append(a))
    made = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert made["verdict"] == "disagreement" and made["first_bad"]["tensor"] == "recurrent elsewhere"
    assert made["about"]["weights"] == "random, seed 0" and len(made["findings"]) == len(result.findings)
    assert {"no twin", "selected"} & set(made["not_judged"])
    assert seen[-1] == (2, 2, "decode")
    result.print()
    assert "disagreement: token 0, 00.kda.twin" in capsys.readouterr().out


def test_a_changed_weight_is_a_disagreement():
    model, _ = load_model("tiny")
    kept = {k: t.clone() for k, t in model.weights.items()}
    case = Case("lockstep", 2, ("edge-empty",), 2)
    try:
        result = cases.run(case, "tiny", **served_by(twin(lambda v, t: t["dt_bias"].add_(2.0**-20))))
    finally:
        for key, t in model.weights.items():
            t.copy_(kept[key])
    assert any(f.place.key == "weights" and f.place.tensor == "kda.dt_bias" for f in result.findings if not f.ok)


def test_span_laws_keep_their_own_precision():
    """A chained value is not rounded between stages, and a state written in the span is read as written."""
    model, _ = load_model("tiny")
    made = plan(model.config, 2)
    state = make_state(model.config, [1, 1], 1, "cpu")
    space = Workspace(made, model.weights, state.tensors, fused, "cpu")
    for t in space.act.values():
        t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(0)) if t.is_floating_point() else t)
    space.index = dict(slots=torch.tensor([1, 2], dtype=torch.int32), slot_mapping=torch.tensor([16, 32]),
                       lens=torch.tensor([1, 1], dtype=torch.int32),
                       block_table=torch.tensor([[1], [2]], dtype=torch.int32))  # fmt: skip
    steps = [s for s in made.steps if s.layer == 3 and s.stage.name in ("mla.cache_write", "mla.attention")]
    values = evaluate(steps, space, exact, state.tensors)
    o_lat = next(v for r, v in values.items() if r.name == "o_lat")
    kv_c = space.act["kv_c"].double()
    assert torch.equal(o_lat, kv_c[:, None].expand_as(o_lat))  # one visible row: attention returns it
    cut = replace(steps[1], bind=steps[1].bind | {"o_lat": replace(steps[1].bind["o_lat"], rows=1)})
    with pytest.raises(ContractError, match="part of the buffer o_lat"):
        evaluate([cut], space, exact, state.tensors)


def test_unknown_modes_are_refused():
    model, _ = load_model("tiny")
    with pytest.raises(ContractError, match="follow 'both': allowed are reference, twin"):
        Lockstep(model, make_state(model.config, [1], 1, "cpu"), follow="both")
    with pytest.raises(ContractError, match="mode 'fast': allowed are lockstep, accumulate, free"):
        cases.run(Case("fast", 1, ("edge-empty",)))
    with pytest.raises(ContractError, match="model 'no-such': allowed are"):
        load_model("no-such")


def test_the_matrix_uses_every_prompt():
    from golden.prompts import load

    table = cases.batches()
    assert {i for ids in table.values() for i in ids} == {p.id for p in load()}
    assert set(table) == {1, 2, 3, 5, 8, 16, 33, 64} and all(len(ids) <= rows for rows, ids in table.items())
    assert {c.rows for c in cases.cases() if c.mode == "lockstep"} == set(table)
    assert len({str(c) for c in cases.cases()}) == len(cases.cases())
