"""Golden traces: the law still makes them, another machine's noise passes, and moved roundings and formulas do not."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from reference import attn_res, kda, mla
from reference.config import deep, mini
from reference.layout import CheckpointError
from reference.numerics import fused
from reference.weights import all_weights
from tools import traces
from tools.traces import EXACT, FOLDER, MODELS, Integers, Tracer, compare, load, main, record

small = replace(deep, name="small", layers=5, mla_layers=(3, 4), block=4)  # every kind of layer


def test_files_are_small_and_of_numbers():
    files = sorted(f.name for f in FOLDER.iterdir())
    assert files == ["deep.npz", "mini.npz"] and sum(f.stat().st_size for f in FOLDER.iterdir()) <= 1 << 20
    for name, config in MODELS.items():
        kept = load(name)
        assert kept["exact"].dtype == np.float64 and np.isfinite(kept["exact"]).all()
        layers = {int(k.split()[1][:2]) for k in kept["keys"] if k.split()[1][:2].isdigit()}
        assert layers == set(range(config.layers)) and kept["logits"].shape == (2, config.vocab)


def test_the_law_makes_the_traces_of_mini():
    assert [str(c) for c in compare("mini", load("mini"), record(mini))] == []


def test_the_law_makes_the_traces_of_deep():
    if not os.environ.get("K3_SLOW"):
        pytest.skip("20 seconds: set K3_SLOW=1")
    assert [str(c) for c in compare("deep", load("deep"), record(deep))] == []


@pytest.fixture(scope="module")
def kept():
    return record(small)


def noisy(size: float):
    """A tracer whose stages err by `size` of each value."""

    class Noisy(Tracer):
        def execute(self, step, tensors, made):
            super().execute(step, tensors, made)
            for name, t in tensors.items():
                if step.stage.by_name[name].written and t.dtype.is_floating_point:
                    t *= 1 + size * (2 * torch.rand(t.shape, dtype=t.dtype) - 1)

    return Noisy


def test_another_order_of_summation_passes_and_the_limit_is_sharp(kept):
    assert compare("small", kept, record(small, noisy(2.0**-49))) == []
    assert compare("small", kept, record(small, noisy(64 * EXACT)))


def test_fp32_in_another_order_passes(kept, monkeypatch):
    """Every projection adds its products in reversed order; the same with TF32's 11 bits does not pass."""

    def turned(bits):
        def project(x, w, num):
            x, w = num.up(x).flip(-1), num.up(w).flip(-1)
            if x.dtype == torch.float32:
                x, w = ((t.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32) for t in (x, w))
            return x @ w.mT

        monkeypatch.setattr("reference.linear.project", project)
        monkeypatch.setattr("reference.mlp.project", project)
        monkeypatch.setattr("reference.moe.project", project)
        return compare("small", kept, record(small))

    assert turned(0) == []
    assert turned(18)  # bf16 operands have 8 bits: 6 of them are not enough


def changed(stage, edit, monkeypatch):
    """Let a stage's law be edit(law)."""
    monkeypatch.setattr(stage, "fn", edit(stage.fn))


def rounded_mix(law):
    """The mix is rounded to bf16 before the norm, as the published modelling code does: one rounding point moved."""

    def attn(prefix, blocks, w_norm, w_proj, delta=None, w_out=None, *, nb, write, num):
        made = law(prefix, blocks, w_norm, w_proj, delta, None, nb=nb, write=write, num=num)
        if w_out is None:
            return made
        return made | dict(out=num.round(attn_res.rms_norm(num.up(made["out"]), w_out, attn_res.EPS, num)))

    return attn


def rounded_state(law):
    return lambda **args: (made := law(**args)) | dict(recurrent=args["num"].round(made["recurrent"]))


def later_gate(law):
    """v * sigmoid(gate) with the sigmoid rounded first: two roundings where one belongs (SPEC.md 18.2)."""
    return lambda v, gate, num: dict(out=num.round(num.up(v) * num.up(num.round(torch.sigmoid(num.up(gate))))))


def other_eps(law):
    return lambda **args: law(**args | dict(eps=1e-6))


@pytest.mark.parametrize("stage, edit, modes", [
    (attn_res.POST, rounded_mix, {"fused"}), (mla.OUT_GATE, later_gate, {"fused"}),
    (kda.RECURRENCE, rounded_state, {"fused", "unfused"}), (mla.LORA_NORM, other_eps, {"exact"}),
], ids=lambda x: getattr(x, "name", getattr(x, "__name__", None)))  # fmt: skip
def test_a_changed_law_is_named(kept, monkeypatch, stage, edit, modes):
    """A rounding point that moves leaves float64 alone and shows in the mode whose point it is; first of all there."""
    changed(stage, edit, monkeypatch)
    found = compare("small", kept, record(small))
    assert {c.mode for c in found if stage.name in c.key} >= modes, [str(c) for c in found][:5]
    if "exact" not in modes:
        assert all(stage.name in c.key for c in found)
    else:
        assert stage.name in found[0].key


def test_steps_and_weights_that_differ_are_said(kept):
    less = {k: v[1:] if k in ("keys", "exact", "rounded") else v for k, v in kept.items()}
    assert [c.unit for c in compare("small", less, kept)] == ["new steps"]
    assert [c.unit for c in compare("small", kept, less)] == ["steps no longer made"]
    (only,) = compare("small", kept, kept | dict(weights=np.array("0")))
    assert str(only) == "small weights (bits): digests that differ 1, allowed is 0"
    (only,) = compare("small", kept, kept | dict(choices=np.array("0")))
    assert only.key == "experts and tokens"
    for name, change in (("exact", np.nan), ("logits", np.inf)):
        off = kept[name].copy()
        off[0, 0] += change
        assert compare("small", kept, kept | {name: off})


def test_weights_come_from_integers_and_look_like_a_models():
    one, two = (all_weights(Integers(small, seed), small) for seed in (1, 2))
    again = all_weights(Integers(small, 1), small)
    assert all(torch.equal(t, again[k]) for k, t in one.items())
    assert not torch.equal(one["embed.w", None], two["embed.w", None])
    noise = Integers(small, 1)._noise("x", (50, 1000))
    assert abs(float(noise.mean())) < 0.03 and abs(float(noise.std()) - 4**0.5 / 3**0.5) < 0.02
    assert torch.equal(noise * 2**15, (noise * 2**15).round())
    decay = kda.gates(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 1), one["kda.A_log", 0], one["kda.dt_bias", 0],
                      fused)[0]  # fmt: skip
    assert decay.min() < -4 and decay.max() > -0.5


def test_the_tool_refuses_a_broken_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(traces, "FOLDER", tmp_path)
    monkeypatch.setattr(traces, "MODELS", {"small": small})
    assert main(False) == 2 and "small.npz: the file is missing" in capsys.readouterr().err
    assert main(True) == 0 and capsys.readouterr().out == "0 traces compared, 0 changed; recorded anew: small\n"
    assert main(False, str(tmp_path / "out.json")) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == {"changes": [], "kept": False}
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(load('small')['keys'])} traces compared, 0 changed"
    file = tmp_path / "small.npz"
    whole = file.read_bytes()
    for broken in (whole[:1000], b"", b"PK\3\4" + whole[4:2000]):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"small\.npz: no record of traces"):
            load("small")
    np.savez(file, **{k: np.array([object()]) for k in ("keys", "exact", "rounded", "logits", "weights", "choices")})
    with pytest.raises(CheckpointError, match="no record of traces"):
        load("small")


def test_records_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch, kept, capsys):
    """Records that cannot be written are said before any work; one that is cut short leaves the old one."""
    monkeypatch.setattr(traces, "FOLDER", tmp_path / "traces")
    monkeypatch.setattr(traces, "MODELS", {"small": small})
    monkeypatch.setattr(traces, "record", lambda config: pytest.fail("the work had begun"))
    (tmp_path / "traces" / "small.npz").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        main(True)
    (tmp_path / "traces" / "small.npz").rmdir()

    def cut_short(file, **arrays):
        file.write(b"PK")
        raise OSError("No space left on device")

    np.savez_compressed(tmp_path / "traces" / "small.npz", **kept | dict(weights=np.array("0")))
    before = (tmp_path / "traces" / "small.npz").read_bytes()
    monkeypatch.setattr(traces, "record", lambda config: kept)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", cut_short)
        with pytest.raises(OSError, match="No space left"):
            main(True)
    assert [f.name for f in (tmp_path / "traces").iterdir()] == ["small.npz"]
    assert (tmp_path / "traces" / "small.npz").read_bytes() == before and main(False) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["small weights (bits): digests that differ 1, allowed is 0", "0 traces compared, 1 changed"]
    assert main(True) == 0 and capsys.readouterr().out.endswith("0 traces compared, 1 changed; recorded anew: small\n")
    assert main(False) == 0 and capsys.readouterr().out == f"{len(kept['keys'])} traces compared, 0 changed\n"
