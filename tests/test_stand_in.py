"""Stand-in checkpoints: true layout, the statistics they claim, and mistakes that only those statistics show."""

import json
import os
import resource
from dataclasses import replace

import pytest
import torch
from stand_ins import PROMPTS, small, stand_in
from typer.testing import CliRunner

from equivalence.faults import Fault
from equivalence.law_twin import LawTwin, served_by
from equivalence.recording import Hidden
from equivalence.simt import compiler, interpreted
from equivalence.streamed import Serving, stream
from fast.selection import Rule, Selection
from reference import attn_res, moe
from reference.checkpoint import INDEX, Checkpoint, CheckpointError
from reference.kda import delta_rule, gates, unit_keys
from reference.layout import expected
from reference.numerics import fused
from tools.check import AGREE
from tools.cli import app
from tools.stand_in import SHAPES, STATISTICS, StandIn, make, run


def test_names_and_shards_are_those_of_a_real_checkpoint():
    checkpoint = stand_in()
    placed = json.loads((checkpoint.folder / INDEX).read_text())["weight_map"]
    assert set(placed) == set(expected(small)) and len(set(placed.values())) >= 15
    for layer in range(small.layers):
        checkpoint.layer(layer)  # raises for a shape, dtype or value that is not the published one
    checkpoint.top()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_can_be_written_and_shared(name):
    config, _ = SHAPES[name]
    assert config.bos == 256 and expected(config)
    assert {config.is_dense(i) for i in range(config.layers)} == {True, False}
    assert {config.is_mla(i) for i in range(config.layers)} == {True, False}


def test_only_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        make(tmp_path, small)
    with pytest.raises(CheckpointError, match="is not empty"):
        make(tmp_path / "file", small)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="statistic 'tails': allowed are outliers, decays"):
        make(tmp_path / "new", small, ("tails",))
    with pytest.raises(ValueError, match="shape 'wide': allowed are short, deep, rank"):
        run(str(tmp_path / "new"), "wide", "all", 0)
    assert not (tmp_path / "new").exists()


def test_the_command_writes_and_says_what(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "short", (small, "six layers"))
    call = ["stand-in", str(tmp_path / "w"), "--statistics", "decays,router", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, call, prog_name="k3")
    found = json.loads((tmp_path / "out.json").read_text())
    assert result.exit_code == 0 and "six layers; statistics: decays, router" in result.stdout
    assert found["statistics"] == ["decays", "router"] and found["layers"] == 6
    assert torch.equal(
        Checkpoint(tmp_path / "w").layer(1)["self_attn.dt_bias"], layer_of(("decays",), 1)["self_attn.dt_bias"]
    )
    again = CliRunner().invoke(app, call, prog_name="k3")
    assert again.exit_code == 2 and again.stderr.count("\n") == 1 and "is not empty" in again.stderr


def layer_of(statistics, layer):
    return StandIn(small, 0, statistics).layer(layer)


def test_a_tensor_follows_from_seed_and_name():
    a, b, c = (StandIn(small, seed).layer(1) for seed in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["self_attn.q_proj.weight"], c["self_attn.q_proj.weight"])


def log_decays(statistics) -> torch.Tensor:
    t = layer_of(statistics, 1)
    A_log, dt_bias = t["self_attn.A_log"][: small.heads], t["self_attn.dt_bias"]
    raw = torch.zeros(1, small.kda_width)
    return gates(raw, torch.zeros(1, small.heads), A_log, dt_bias, fused)[0]


def test_statistics_are_what_they_claim():
    wide, narrow = log_decays(("decays",)), log_decays(())
    assert wide.amin((0, 2)).max() < -4.9 and wide.amax((0, 2)).min() > -0.02  # every head covers (e^-5, 1)
    assert -3 < narrow.min() and narrow.max() < -2
    embed = StandIn(small, 0).top()["embed_tokens.weight"].float()
    peak = embed.abs().mean(0)
    outliers = StandIn(small, 0).outliers
    rest = [i for i in range(1, small.hidden) if i not in outliers]
    assert peak[outliers].min() > 200 and peak[rest].max() < 2 and torch.equal(embed[0::2], embed[1::2])
    keys = layer_of(("keys",), 0)["self_attn.k_proj.weight"].float() @ StandIn(small, 0, ("keys",)).top()[
        "embed_tokens.weight"
    ].float()[::2].mT  # fmt: skip
    assert torch.corrcoef(keys.mT).min() > 0.9
    large, usual = (layer_of(s, 3)["self_attn.q_b_proj.weight"].float().std() for s in (("queries",), ()))
    assert 290 < large / usual < 310
    moe_ = layer_of(STATISTICS, 1)
    bias, gate = (moe_[f"block_sparse_moe.gate.{n}"] for n in ("e_score_correction_bias", "weight"))
    assert (bias > 0.9).nonzero().flatten().tolist() == [4, 9, 15] and torch.equal(gate[2], gate[3])
    scales = torch.cat([t[::8].flatten() for n, t in moe_.items() if n.endswith("w1.weight_scale")])
    assert scales.min() < 5 and scales.max() > 235 and scales.float().std() > 60
    back = torch.cat([t[::8].flatten() for n, t in moe_.items() if n.endswith("w2.weight_scale")])
    assert back.min() < 5 and 150 < back.max() <= 160


four = replace(small, layers=4, mla_layers=(3,), experts=32)


class Mutant(LawTwin):
    """A wrong implementation of one stage: spoil(values, tensors, attrs) replaces the law's values."""

    def __init__(self, stage: str, wrong):
        super().__init__("wrong", (stage,), fused, lambda values, tensors: wrong(values, tensors, self.attrs))

    def run(self, tensors, attrs):
        self.attrs = dict(attrs)
        return super().run(tensors, attrs)


def clamped_decay(values, t, attrs):
    """Log-decays below -4 are cut off."""
    q, k = unit_keys(t["q"], t["k"], fused)
    log_decay, beta = gates(t["raw_g"], t["b"], t["A_log"], t["dt_bias"], fused)
    slots = t["slots"].long()
    S, _, o = delta_rule(t["recurrent"][slots.clamp_min(0)], q, k, t["v"], log_decay.clamp_min(-4), beta)
    values |= dict(recurrent=S, o=torch.where((slots > 0)[:, None, None], o, 0))


def half_squares(values, t, attrs):
    """Squares of residuals in fp16, which ends at 65504."""
    v = torch.cat([t["blocks"][:, : attrs["nb"]], values["prefix"][:, None]], 1).float()
    rstd = (v.half().square().float().mean(-1) + attn_res.EPS).rsqrt()
    logits = rstd * (v * (t["w_norm"].float() * t["w_proj"].float())).sum(-1)
    mixed = (logits.softmax(-1)[..., None] * v).sum(1)
    values["out"] = attn_res.rms_norm(mixed, t["w_out"], attn_res.EPS, fused).bfloat16()


def capacity(values, t, attrs):
    """An expert takes three tokens; those beyond get nothing."""
    taken: dict[int, int] = {}
    for row, ids in enumerate(t["ids"].tolist()):
        for at, expert in enumerate(ids):
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > 3:
                values["m"][row, at] = 0


def no_maximum(values, t, attrs):
    """The softmax of attention without its maximum subtracted."""
    for i, n in enumerate(t["lens"].tolist()):
        rows = t["cache"][t["block_table"][i].long()].flatten(0, 1)[: max(n, 1)].float()
        p = (t["q_lat"][i].float() @ rows.mT * attrs["scale"]).exp()
        if n:
            values["o_lat"][i] = (p @ rows[:, :512] / p.sum(-1, keepdim=True)).bfloat16()
            values["lse"][i] = p.sum(-1).log()


def half_scales(values, t, attrs):
    """MXFP4 scales through fp16, which knows 2^-24 to 2^15."""
    args = {name: t[name] for name in ("m", "ids", "w2", "w2_scale")}
    args["w2_scale"] = args["w2_scale"].clamp(127 - 24, 127 + 15)
    values |= moe.EXPERTS_DOWN.call(args, {}, fused)


@pytest.mark.parametrize("statistic, stage, wrong, layer", [
    ("decays", "kda.recurrence", clamped_decay, 0), ("outliers", "attn_res.post", half_squares, 0),
    ("router", "moe.experts_up", capacity, 1), ("queries", "mla.attention", no_maximum, 3),
    ("scales", "moe.experts_down", half_scales, 1),
])  # fmt: skip
def test_a_mistake_that_only_the_statistic_shows(statistic, stage, wrong, layer):
    """Each mutant equals the law on plain random weights, and is found where its statistic is there."""
    for statistics, verdict in (((), "equal"), ((statistic,), "disagreement"), (STATISTICS, "disagreement")):
        serving = Serving("wrong", **served_by(Mutant(stage, wrong)))
        hidden = Hidden.empty(four, PROMPTS, 1)
        stream(stand_in(statistics, config=four), hidden, layer, layer, [serving])
        result = serving.result(dict(tokens=1))
        assert result.verdict == verdict, (statistics, result.statement)
        if result.first:
            assert result.first.place.key == f"{layer:02d}.{stage}"


def squarings(n: int):
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)... with n squarings, in place of the triangular solver."""

    def solve(matrix, rhs, **kw):
        unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        power, made = matrix - unit, 2 * unit - matrix
        for _ in range(n):
            power = power @ power
            made = made + made @ power
        return made @ rhs

    return solve


@pytest.mark.parametrize("count, seen", [(3, False), (2, True)])
def test_a_chunk_form_that_ends_early_is_found_only_by_keys(count, seen, monkeypatch):
    """16 tokens need 3 squarings. With 2 the powers of L from the eighth are left out: with keys that have nothing in
    common they are below 1e-15. No fault of a decode step needs this statistic: its outputs are fp32, where an error
    that grows with the keys' products is seen before they are near 1."""
    monkeypatch.setattr(torch.linalg, "solve_triangular", squarings(count))
    fed = [[256, *b"abcdefghijklmnopqrstuvwxyz"]]
    for statistics in ((), ("keys",), STATISTICS):
        gaps, serving = {}, Serving("law", **served_by(LawTwin("law", ("kda.out_norm",), fused)))
        stream(stand_in(statistics, config=four), Hidden.empty(four, fed, 1), 0, 0, [serving], gaps=gaps)
        assert (gaps[0] > AGREE) == (seen and statistics != ()), statistics
        assert gaps[0] < 1e-14 or statistics


@pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
def test_a_kernel_that_clamps_decays_is_found_only_by_the_statistic():
    """The true KDA kernel with one line changed, interpreted."""
    right = "return select_(x > -1 / 16, series, cute.math.exp(x))"
    wrong = right.replace("select_(", "select_(x > -4.0, select_(").replace(
        "exp(x))", "exp(x)), cute.math.exp(x * 0.0 - 4.0))"
    )
    broken = Fault("clamped_decay", "kda", "kda_decode", ((right, wrong),), "log-decays end at -4").implementation()
    rules = [Rule("*", "reference"), *(Rule(stage, broken.name) for stage in broken.spans[0])]
    for statistics, verdict in (((), "equal"), (("decays",), "disagreement"), (STATISTICS, "disagreement")):
        serving = Serving("broken", Selection(tuple(rules)), interpreted({broken.name: broken}))
        stream(stand_in(statistics, config=four), Hidden.empty(four, PROMPTS, 1), 0, 0, [serving])
        result = serving.result(dict(tokens=1))
        assert result.verdict == verdict, (statistics, result.statement)


slow = pytest.mark.skipif(not os.environ.get("K3_SLOW"), reason="minutes: set K3_SLOW=1")


@slow
def test_93_layers_in_the_full_layout():
    """The law through all 93 layers in pieces; the last blocks of attention residuals are judged."""
    config = replace(SHAPES["deep"][0], name="deep")
    checkpoint = stand_in(config=config)
    serving = Serving("law", **served_by(*(LawTwin(f"law.{s}", (f"attn_res.{s}",), fused) for s in ("pre", "post"))))
    left = stream(checkpoint, Hidden.empty(config, PROMPTS, 2), 80, 92, [serving])
    assert left.layer == 93 and left.blocks.shape[1] == 8 and left.blocks.isfinite().all()
    assert serving.result(dict(tokens=2)).verdict == "equal"


@slow
def test_a_layer_of_each_kind_at_true_widths_of_one_of_8_ranks(tmp_path, monkeypatch):
    """Below 3 GB. Law in both modes and interpreted twins, under every statistic at once."""
    from tools.check_checkpoint import run as check

    monkeypatch.setattr(moe, "GATHER_ELEMENTS", 1)  # experts of one token at a time
    make(tmp_path / "rank", SHAPES["rank"][0])
    prompts = "edge-one-byte,repeat-two-letters"
    result = check(
        str(tmp_path / "rank"), None, None, 0, None, None, prompts, 1, "", (), "reference", False, "cpu", False
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20
    verdicts = {p.name: p.verdict for p in result.parts}
    assert verdicts.pop("twins") == "could not judge" and set(verdicts.values()) == {"equal"}, verdicts
    assert Checkpoint(tmp_path / "rank").config.hidden == 7168
