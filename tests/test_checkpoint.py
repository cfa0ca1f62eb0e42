"""Checkpoints: the published inventory, round trips, streaming, and what is refused with which words."""

import json
import os
import resource
import shutil
import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference import checkpoint
from reference.checkpoint import INDEX, Checkpoint, CheckpointError, expected, write
from reference.config import deep, k3, k3_rank, mini
from reference.layout import config_from_json, config_to_json, full_name, layer_table
from reference.weights import random_checkpoint_tensors

TINY = replace(deep, name="tiny", layers=4, mla_layers=(3,), experts=4)
L = "language_model.model.layers."
SHARD = "model-0000{}-of-00005.safetensors"


def read_all(folder) -> dict[str, torch.Tensor]:
    ckpt = Checkpoint(folder)
    made = {full_name(name): t for name, t in ckpt.top().items()}
    for layer in range(ckpt.config.layers):
        made |= {full_name(name, layer): t for name, t in ckpt.layer(layer).items()}
    return made


@pytest.fixture(scope="module")
def tensors():
    return dict(random_checkpoint_tensors(TINY, 3))


@pytest.fixture(scope="module")
def pristine(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write(folder, TINY, tensors.items(), shard_bytes=300_000)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of a sound checkpoint, to be spoilt."""
    return shutil.copytree(pristine, tmp_path / "tiny")


# Inventory and configuration ------------------------------------------------------------------------------------------


def test_the_table_of_k3_is_the_published_inventory():
    """SPEC.md 1: tensor counts of the published checkpoint, and the byte sum of its text part."""
    table = expected(k3)
    experts = [name for name in table if ".experts." in name]
    assert (len(table) - len(experts), len(experts)) == (2_460, 494_592)
    assert sum(prod(shape) * dtype.itemsize for shape, dtype in table.values()) == 1_559_965_606_912
    assert table[L + "5.self_attn.A_log"] == ((128,), torch.float32)
    assert table[L + "92.block_sparse_moe.experts.895.w2.weight_scale"] == ((3584, 96), torch.uint8)


@pytest.mark.parametrize(
    "config", [k3, mini, deep, TINY, replace(k3_rank(8), bos=1, eos=2, pad=3)], ids=lambda c: c.name
)
def test_config_survives_json(config):
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_the_published_fields_alone_make_k3():
    obj = config_to_json(k3)
    del obj["k3_twice"]
    for name in ("moe_layer_freq", "topk_method"):
        del obj["text_config"][name]
    obj["text_config"] |= {"rope_theta": 1e4, "max_position_embeddings": 1048576, "dtype": "bfloat16"}
    obj["vision_config"] = {"anything": 1}
    assert config_from_json(obj) == k3


def test_a_width_that_published_fields_cannot_say_is_refused():
    with pytest.raises(ValueError, match=r"^shared width 384: allowed are multiples of 256$"):
        config_to_json(k3_rank(16))


T, A = "text_config.", "text_config.linear_attn_config."
WHOLE = "allowed is a whole number from 1 to 2147483647"
ABOVE = "allowed is a finite number above 0"
BAD_FIELDS = {  # path, value (... deletes) -> text
    "missing": ("text_config hidden_size", ..., f"{T}hidden_size is missing"),
    "text": ("text_config hidden_size", "64", f"{T}hidden_size is '64'; {WHOLE}"),
    "bool": ("text_config vocab_size", True, f"{T}vocab_size is True; {WHOLE}"),
    "float": ("text_config num_experts", 8.0, f"{T}num_experts is 8.0; {WHOLE}"),
    "zero": ("text_config attn_res_block_size", 0, f"{T}attn_res_block_size is 0; {WHOLE}"),
    "huge": ("text_config num_experts", 10**40, f"{T}num_experts is {10**40}; {WHOLE}"),
    "long": ("text_config num_experts", "9" * 500, f"{T}num_experts is '{'9' * 76}...; {WHOLE}"),
    "negative": ("text_config eos_token_id", -1,
                 f"{T}eos_token_id is -1; allowed is a whole number from 0 to 2147483647"),
    "nan": ("text_config rms_norm_eps", float("nan"), f"{T}rms_norm_eps is nan; {ABOVE}"),
    "negative-float": ("text_config rms_norm_eps", -1e-5, f"{T}rms_norm_eps is -1e-05; {ABOVE}"),
    "huge-float": ("text_config rms_norm_eps", 10**400, f"{T}rms_norm_eps is {'1' + 76 * '0'}...; {ABOVE}"),
    "zero-float": ("text_config activation_situ_beta", 0, f"{T}activation_situ_beta is 0; {ABOVE}"),
    "floor": ("text_config linear_attn_config gate_lower_bound", 5.0,
              f"{A}gate_lower_bound is 5.0; allowed is a finite number below 0"),
    "null": ("text_config activation_situ_beta", None, f"{T}activation_situ_beta is None; {ABOVE}"),
    "section": ("text_config", [], "text_config is []; allowed is an object"),
    "topk": ("text_config num_experts_per_token", 9,
             f"{T}num_experts_per_token is 9; allowed is at most num_experts = 4"),
    "activation": ("text_config hidden_act", "silu", f"{T}hidden_act is 'silu'; allowed is 'situ'"),
    "rotated": ("text_config mla_use_nope", False, f"{T}mla_use_nope is False; allowed is True"),
    "one-is-not-true": ("text_config mla_use_nope", 1, f"{T}mla_use_nope is 1; allowed is True"),
    "ungated": ("text_config mla_use_output_gate", ..., f"{T}mla_use_output_gate is missing; allowed is True"),
    "groups": ("text_config num_expert_group", 8, f"{T}num_expert_group is 8; allowed is 1"),
    "kv-heads": ("text_config num_key_value_heads", 8, f"{T}num_key_value_heads is 8; allowed is 1"),
    "kda-heads": ("text_config linear_attn_config num_heads", 2, f"{A}num_heads is 2; allowed is 1"),
    "layer-lists": ("text_config linear_attn_config kda_layers", [1, 2, 2],
                    f"{A}full_attn_layers and kda_layers do not name each layer 1..4 once"),
    "unknown": ("text_config sliding_window", 128, f"{T}'sliding_window' is unknown"),
    "unknown-inner": ("text_config linear_attn_config chunk", 1, f"{A}'chunk' is unknown"),
    "own": ("k3_twice lora_eps", "small", "k3_twice.lora_eps is 'small'; allowed is a finite number above 0"),
    "unpackable": ("text_config routed_expert_hidden_size", 48,
                   "expert width 32, latent width 48: allowed are multiples of 32 (MXFP4 groups)"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value", "text"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_config_json_refuses(folder, path, value, text):
    file = folder / "config.json"
    obj = json.loads(file.read_text())
    *outer, name = path.split()
    section = obj
    for step in outer:
        section = section[step]
    if value is ...:
        del section[name]
    else:
        section[name] = value
    file.write_text(json.dumps(obj))
    with pytest.raises(CheckpointError) as error:
        Checkpoint(folder)
    assert str(error.value) == f"{file}: {text}"


# Round trips and streaming --------------------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(pristine, tensors):
    assert Checkpoint(pristine).config == TINY
    assert sorted(p.name for p in pristine.glob("*.safetensors")) == [SHARD.format(i) for i in range(1, 6)]
    read = read_all(pristine)
    assert read.keys() == tensors.keys() == expected(TINY).keys()
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype and torch.equal(read[name], t), name
    index = json.loads((pristine / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_short_prefix_and_vision_tensors(folder, tensors):
    """language_model.layers.* is accepted, vision tensors are skipped wherever they lie."""
    index = json.loads((folder / INDEX).read_text())
    for shard in sorted(folder.glob("*.safetensors")):
        held = {name.replace("model.layers", "layers"): t for name, t in load_file(shard).items()}
        save_file(held | {f"vision_tower.{shard.stem}": torch.ones(2)}, shard)
    index["weight_map"] = {n.replace("model.layers", "layers"): s for n, s in index["weight_map"].items()}
    index["weight_map"] |= {"mm_projector.proj.weight": SHARD.format(9)}
    (folder / INDEX).write_text(json.dumps(index))
    read = read_all(folder)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], t) for name, t in tensors.items())


@pytest.fixture
def reads(monkeypatch):
    """What is asked of shards: [(shard, tensor, bytes)]; an opened shard appears once with tensor None."""
    log, real = [], checkpoint.safe_open

    class Recorder:
        def __init__(self, path, framework):
            self.path, self.file = path, real(path, framework)
            log.append((path.rsplit("/")[-1], None, 0))

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            t = self.file.get_tensor(name)
            log.append((self.path.rsplit("/")[-1], name, t.nbytes))
            return t

    monkeypatch.setattr(checkpoint, "safe_open", Recorder)
    return log


def test_a_layer_reads_its_own_tensors_and_nothing_else(folder, tensors, reads):
    ckpt = Checkpoint(folder)
    assert reads == []  # the index is enough
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    needed = {placed[full_name(name, 2)] for name in layer_table(TINY, 2)}
    spoilt = [p for p in folder.glob("*.safetensors") if p.name not in needed]
    assert spoilt and needed
    for path in spoilt:
        path.write_bytes(b"not to be read")
    layer = ckpt.layer(2)
    assert {shard for shard, _, _ in reads} == needed
    assert [name for _, name, _ in reads if name] == [full_name(name, 2) for name in layer]
    assert sum(size for _, _, size in reads) == sum(tensors[full_name(name, 2)].nbytes for name in layer)
    assert all(torch.equal(t, tensors[full_name(name, 2)]) for name, t in layer.items())
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        ckpt.top()


def test_tensors_of_real_size_are_mapped(tmp_path):
    """K3 with 16 experts a layer, and of its shards only the last MLA layer's: a sparse file of 0.8 GB, hardly read."""
    config = replace(k3, name="k3", experts=16)
    table = expected(config)
    here = {full_name(name, 92) for name in layer_table(config, 92) if ".experts." not in name}
    placed = {name: "last.safetensors" if name in here else "absent.safetensors" for name in table}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)))
    header, end = {}, 0
    for name in here:
        shape, dtype = table[name]
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": checkpoint.DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(tmp_path / "last.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    ckpt = Checkpoint(tmp_path)
    before = resident_bytes()
    made = {name: ckpt.tensor(name) for name in here}
    o_proj = made[L + "92.self_attn.o_proj.weight"]
    assert o_proj.shape == (7168, 12288) and o_proj.dtype == torch.bfloat16
    assert end > 800_000_000 and resident_bytes() - before < end // 10
    with pytest.raises(CheckpointError, match=r"/absent.safetensors: the shard is missing$"):
        ckpt.layer(91)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# Bad files ------------------------------------------------------------------------------------------------------------


def rewrite(path, change) -> None:
    """Replace the tensors of a shard: change(dict) -> dict."""
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path)


def reindex(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def holder(folder, name: str):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def set_entry(name: str, where: tuple[int, ...], value):
    def spoil(folder):
        def change(tensors):
            tensors[name][where] = value
            return tensors

        rewrite(holder(folder, name), change)

    return spoil


def replace_tensor(name: str, made):
    return lambda folder: rewrite(holder(folder, name), lambda t: t | {name: made(t[name])})


def place(name: str, shard):
    return lambda folder: reindex(folder, lambda placed: placed.update({name: shard}))


def bytes_of(index: int, made):
    def spoil(folder):
        path = folder / SHARD.format(index)
        path.write_bytes(made(path.read_bytes()))

    return spoil


def instead(name: str, make):
    """Something else under a file's name; a pipe that nobody writes into is waited for without end."""
    return lambda folder: ((folder / name).unlink(), make(folder / name))


def pickled(folder):
    torch.save({"a": torch.ones(2)}, folder / SHARD.format(2))


NORM = "language_model.model.norm.weight"
GATE = L + "1.block_sparse_moe.gate.weight"
SCALE = L + "1.block_sparse_moe.experts.2.w3.weight_scale"
A_LOG = L + "2.self_attn.A_log"
BESIDE = "allowed is the name of a .safetensors file beside the index"
BROKEN = "truncated or no safetensors file (*)"  # * is the library's reason
S = [None, *(SHARD.format(i) for i in range(1, 6))]
BAD_FILES = {
    "no-index": (lambda d: (d / INDEX).unlink(), "{d}/" + INDEX + ": the file is missing"),
    "no-config": (lambda d: (d / "config.json").unlink(), "{d}/config.json: the file is missing"),
    "index-not-json": (lambda d: (d / INDEX).write_text('{"weight_map": {'), "{d}/" + INDEX + ": no JSON (*)"),
    "index-not-text": (lambda d: (d / INDEX).write_bytes(b"\xff\xfe{}"), "{d}/" + INDEX + ": no JSON (*)"),
    "index-deep": (lambda d: (d / INDEX).write_text("[" * 100_000), "{d}/" + INDEX + ": no JSON (*)"),
    "index-list": (lambda d: (d / INDEX).write_text("[]"),
                   "{d}/" + INDEX + ": 'weight_map' is None; allowed is an object"),
    "index-doubled": (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
                      "{d}/" + INDEX + ": 'a' occurs twice"),
    "two-prefixes": (place("language_model.layers.0.input_layernorm.weight", S[1]),
                     "{d}/" + INDEX + f": tensor '{L}0.input_layernorm.weight' occurs twice, "
                     "with and without 'model.'"),
    "few-names": (lambda d: reindex(d, dict.clear),
                  "{d}/" + INDEX + ": names 0 tensors; config.json asks for 72 of experts alone"),
    "missing-name": (lambda d: reindex(d, lambda placed: placed.pop(NORM)),
                     "{d}/" + INDEX + f": tensor '{NORM}' is missing"),
    "two-missing": (lambda d: reindex(d, lambda placed: (placed.pop(NORM), placed.pop(GATE))),
                    "{d}/" + INDEX + f": tensor '{GATE}' is missing (and 1 more)"),
    "unknown-name": (place("language_model.model.bias", S[1]),
                     "{d}/" + INDEX + ": tensor 'language_model.model.bias' is unknown"),
    "outside": (place(NORM, "../" + S[1]), "{d}/" + INDEX + f": tensor '{NORM}' is placed in '../{S[1]}'; {BESIDE}"),
    "absolute": (place(NORM, "/" + S[1]), "{d}/" + INDEX + f": tensor '{NORM}' is placed in '/{S[1]}'; {BESIDE}"),
    "inside": (place(NORM, "a/" + S[1]), "{d}/" + INDEX + f": tensor '{NORM}' is placed in 'a/{S[1]}'; {BESIDE}"),
    "pickle-name": (place(NORM, "model.bin"), "{d}/" + INDEX + f": tensor '{NORM}' is placed in 'model.bin'; {BESIDE}"),
    "place-number": (place(NORM, 3), "{d}/" + INDEX + f": tensor '{NORM}' is placed in 3; {BESIDE}"),
    "place-list": (place(NORM, []), "{d}/" + INDEX + f": tensor '{NORM}' is placed in []; {BESIDE}"),
    "missing-shard": (lambda d: (d / S[2]).unlink(), f"{{d}}/{S[2]}: the shard is missing"),
    "shard-is-folder": (instead(S[2], Path.mkdir), f"{{d}}/{S[2]}: is a folder; allowed is a file"),
    "shard-is-pipe": (instead(S[2], os.mkfifo), f"{{d}}/{S[2]}: is a pipe or device; allowed is a file"),
    "index-is-pipe": (instead(INDEX, os.mkfifo), "{d}/" + INDEX + ": is a pipe or device; allowed is a file"),
    "config-is-pipe": (instead("config.json", os.mkfifo),
                       "{d}/config.json: is a pipe or device; allowed is a file"),
    "pickle": (pickled, f"{{d}}/{S[2]}: {BROKEN}"),
    "empty": (bytes_of(2, lambda b: b""), f"{{d}}/{S[2]}: {BROKEN}"),
    "truncated-header": (bytes_of(2, lambda b: b[:100]), f"{{d}}/{S[2]}: {BROKEN}"),
    "truncated-data": (bytes_of(2, lambda b: b[:-1]), f"{{d}}/{S[2]}: {BROKEN}"),
    "huge-header": (bytes_of(2, lambda b: struct.pack("<Q", 2**63) + b[8:]), f"{{d}}/{S[2]}: {BROKEN}"),
    "longer-header": (bytes_of(2, lambda b: struct.pack("<Q", 50_000_000) + b[8:]), f"{{d}}/{S[2]}: {BROKEN}"),
    "header-not-json": (bytes_of(2, lambda b: b[:8] + b"#" + b[9:]), f"{{d}}/{S[2]}: {BROKEN}"),
    "dropped": (lambda d: rewrite(holder(d, NORM), lambda t: {n: v for n, v in t.items() if n != NORM}),
                f"{{d}}/{S[1]}: tensor '{NORM}' is missing, though the index places it here"),
    "duplicate": (lambda d: rewrite(d / S[3], lambda t: t | {NORM: torch.ones(64)}),
                  f"{{d}}/{S[3]}: tensor '{NORM}' is a duplicate; the index places it in {S[1]}"),
    "stowaway": (lambda d: rewrite(d / S[3], lambda t: t | {"x": torch.ones(64)}),
                 f"{{d}}/{S[3]}: tensor 'x' is unknown to the index"),
    "shape": (replace_tensor(GATE, lambda t: t[:, :-1]),
              f"{{d}}/{{s}}: tensor '{GATE}' has shape [4, 63]; allowed is [4, 64]"),
    "transposed": (replace_tensor(GATE, lambda t: t.T),
                   f"{{d}}/{{s}}: tensor '{GATE}' has shape [64, 4]; allowed is [4, 64]"),
    "dtype": (replace_tensor(GATE, lambda t: t.float()), f"{{d}}/{{s}}: tensor '{GATE}' is F32; allowed is BF16"),
    "dense-expert": (replace_tensor(SCALE, lambda t: t.bfloat16()),
                     f"{{d}}/{{s}}: tensor '{SCALE}' is BF16; allowed is U8"),
    "nan-scale": (set_entry(SCALE, (7, 0), 0xFF),
                  f"{{d}}/{{s}}: tensor '{SCALE}' has scale byte 0xFF (NaN) at row 7, group 0"),
    "heads": (set_entry(A_LOG, (1,), 0.5),
              f"{{d}}/{{s}}: tensor '{A_LOG}' has 0.5 at entry 1; allowed is 0 beyond the 1 heads"),
    "nan-heads": (set_entry(A_LOG, (127,), float("nan")),
                  f"{{d}}/{{s}}: tensor '{A_LOG}' has nan at entry 127; allowed is 0 beyond the 1 heads"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "text"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_give_one_clear_line(folder, spoil, text):
    named = next((n for n in (GATE, SCALE, A_LOG) if n in text), NORM)
    shard = holder(folder, named).name
    spoil(folder)
    with pytest.raises(CheckpointError) as error:
        read_all(folder)
    said, (start, _, end) = str(error.value), text.format(d=folder, s=shard).partition("*")
    assert said.startswith(start) and said.endswith(end) and "\n" not in said
    assert "*" in text or said == start
