"""Draft checkpoints: written and read like the target's, and every damage named by file and tensor."""

import json
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.checkpoint import INDEX
from reference.draft_checkpoint import DraftCheckpoint, config_from_json, config_to_json, write_draft
from reference.draft_config import DraftConfig, draft_table, draft_weights, k3_draft, mini_draft, random_draft
from reference.layout import CONFIG, CheckpointError

TINY = replace(
    mini_draft, name="tiny-dspark", vocab=40, hidden=32, layers=1, heads=1, q_lora=16, inter=32, mask=39, rank=8
)


@pytest.fixture
def folder(tmp_path):
    write_draft(tmp_path / "draft", TINY, random_draft(TINY, 1), shard_bytes=1 << 17)
    return tmp_path / "draft"


def test_what_is_written_is_read(folder):
    read, made = DraftCheckpoint(folder), random_draft(TINY, 1)
    tensors = read.tensors()
    assert read.config == TINY and tensors.keys() == made.keys() == draft_table(TINY).keys()
    assert all(torch.equal(t, made[name]) for name, t in tensors.items())
    assert len([f for f in folder.iterdir() if f.suffix == ".safetensors"]) > 1
    target = {(name, None): torch.zeros(40, 32).bfloat16() for name in ("embed.w", "head.logits.w")}
    one, two = (draft_weights(t, TINY, target) for t in (tensors, made))
    assert all(torch.equal(t, two[key]) for key, t in one.items())


@pytest.mark.parametrize("config", (k3_draft, mini_draft, TINY), ids=lambda c: c.name)
def test_configurations_survive_json(config):
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("field, value, text", [
    ("model_type", "kimi_k3", "model_type is 'kimi_k3'; allowed is 'k3_dspark'"),
    ("vocab", 0, "vocab is 0; allowed is"), ("heads", 1.5, "heads is 1.5; allowed is"),
    ("layers", True, "layers is True; allowed is"), ("taps", [], r"taps is \[\]"), ("taps", [-1], r"taps is \[-1\]"),
    ("theta", float("inf"), "theta is inf"), ("name", 3, "name is 3"),
    ("mask", 40, "mask is 40; allowed is below vocab = 40"), ("width", 3, "'width' is unknown"),
])  # fmt: skip
def test_a_wrong_field_is_named(field, value, text):
    obj = config_to_json(TINY) | {field: value}
    with pytest.raises(CheckpointError, match=rf"config\.json: {text}"):
        config_from_json(obj)
    assert {f.name for f in fields(DraftConfig)} >= {field} or field in ("model_type", "width")


def test_missing_fields_and_other_json_are_named():
    obj = config_to_json(TINY)
    del obj["rank"]
    with pytest.raises(CheckpointError, match=r"config\.json: rank is missing"):
        config_from_json(obj)
    for name, value in (("theta", 1.0), ("rope", 7), ("beta_fast", 1e-308), ("factor", 1e308)):
        with pytest.raises(CheckpointError, match=f"{name} is|{name} {value}"):
            config_from_json(config_to_json(TINY) | {name: value})
    with pytest.raises(CheckpointError, match=r"model_type is \[\]"):
        config_from_json([])


def spoil(folder, name, edit):
    """Rewrite the shard that holds a tensor: edit(tensors) changes them in place."""
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return file.name


PROJ = "layers.0.self_attn.q_a_proj.weight"


@pytest.mark.parametrize("edit, text", [
    (lambda t: t.update({PROJ: t[PROJ].float()}), "is F32; allowed is BF16"),
    (lambda t: t.update({PROJ: t[PROJ][:-1].contiguous()}), r"has shape \[15, 32\]; allowed is \[16, 32\]"),
    (lambda t: t.pop(PROJ), "is missing, though the index places it here"),
    (lambda t: t.update({"layers.9.mlp.up_proj.weight": t[PROJ].clone()}), "is unknown to the index"),
])  # fmt: skip
def test_a_wrong_tensor_is_named_with_its_file(folder, edit, text):
    file = spoil(folder, PROJ, edit)
    with pytest.raises(CheckpointError, match=text) as raised:
        DraftCheckpoint(folder).tensors()
    assert file in str(raised.value) and "layers." in str(raised.value) and "\n" not in str(raised.value)


def test_damaged_files_are_named(folder):
    index = folder / INDEX
    whole, obj = index.read_text(), json.loads(index.read_text())
    del obj["weight_map"][PROJ]
    for text, told in (
        (whole[:50], "no JSON"),
        (json.dumps(obj), f"tensor '{PROJ}' is missing"),
        ("[]", "'weight_map'"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=told):
            DraftCheckpoint(folder)
    index.write_text(whole)
    shard = folder / json.loads(whole)["weight_map"][PROJ]
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated or no safetensors file"):
        DraftCheckpoint(folder).tensors()
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the file is missing"):
        DraftCheckpoint(folder)


def test_more_layers_than_tensors_are_refused_at_once(folder):
    obj = json.loads((folder / CONFIG).read_text()) | dict(layers=2**31 - 1)
    (folder / CONFIG).write_text(json.dumps(obj))
    with pytest.raises(CheckpointError, match=r"names \d+ tensors; config\.json has 2147483647 layers"):
        DraftCheckpoint(folder)


def test_a_failed_write_leaves_the_folder(folder):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    tensors = random_draft(TINY, 2)
    with pytest.raises(CheckpointError, match="is missing"):
        write_draft(folder, TINY, {k: t for k, t in tensors.items() if k != PROJ})
    with pytest.raises(CheckpointError, match="is unknown"):
        write_draft(folder, TINY, tensors | {"layers.1.x": tensors[PROJ]})
    with pytest.raises(CheckpointError, match="is F32; allowed is BF16"):
        write_draft(folder, TINY, tensors | {PROJ: tensors[PROJ].float()})
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert not [f for f in folder.parent.iterdir() if f != folder]
