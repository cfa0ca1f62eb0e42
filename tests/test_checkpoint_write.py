"""Writing checkpoints: any order and strides, and a failed write changes nothing."""

from dataclasses import replace

import pytest
import torch

from reference.checkpoint import Checkpoint, CheckpointError, write
from reference.config import deep
from reference.layout import full_name
from reference.weights import random_checkpoint_tensors

TINY = replace(deep, name="tiny", layers=4, mla_layers=(3,), experts=4)
NORM = "language_model.model.norm.weight"
SCALE = "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"
A_LOG = "language_model.model.layers.2.self_attn.A_log"
LAST = "language_model.model.layers.3.block_sparse_moe.experts.3.w2.weight_scale"


@pytest.fixture(scope="module")
def tensors():
    return dict(random_checkpoint_tensors(TINY, 3))


def holds(folder, tensors) -> bool:
    ckpt = Checkpoint(folder)
    read = {full_name(name): t for name, t in ckpt.top().items()}
    for layer in range(TINY.layers):
        read |= {full_name(name, layer): t for name, t in ckpt.layer(layer).items()}
    return read.keys() == tensors.keys() and all(torch.equal(read[name], t) for name, t in tensors.items())


def test_any_order_strides_and_shared_memory(tmp_path, tensors):
    def hostile():
        rng = torch.Generator().manual_seed(0)
        names = list(tensors)
        for i in torch.randperm(len(names), generator=rng).tolist():
            t = tensors[names[i]]
            buffer = torch.full((*t.shape[:-1], t.shape[-1] + 3), 7, dtype=t.dtype)  # a strided view, overwritten later
            buffer[..., 2:-1] = t
            yield names[i], buffer[..., 2:-1]
            buffer.fill_(9)

    write(tmp_path / "made", TINY, hostile(), shard_bytes=200_000)
    assert holds(tmp_path / "made", tensors)


def test_tensors_that_share_memory(tmp_path, tensors):
    one = tensors["language_model.lm_head.weight"]
    tied = tensors | {"language_model.lm_head.weight": one, "language_model.model.embed_tokens.weight": one}
    write(tmp_path / "made", TINY, tied.items())
    assert holds(tmp_path / "made", tied)


@pytest.mark.parametrize(("shard_bytes", "shards"), [(1, 178), (1 << 40, 1)], ids=["one-tensor-each", "one-shard"])
def test_shard_sizes(tmp_path, tensors, shard_bytes, shards):
    assert len(tensors) == 178
    write(tmp_path / "made", TINY, tensors.items(), shard_bytes=shard_bytes)
    names = sorted(p.name for p in (tmp_path / "made").glob("*.safetensors"))
    assert names == [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    assert holds(tmp_path / "made", tensors)


def test_equal_tensors_give_equal_files(tmp_path, tensors):
    write(tmp_path / "a", TINY, tensors.items(), shard_bytes=300_000)
    write(tmp_path / "b", TINY, tensors.items(), shard_bytes=300_000)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_a_checkpoint_is_replaced_whole(tmp_path, tensors):
    write(tmp_path / "made", TINY, tensors.items(), shard_bytes=100_000)
    other = dict(random_checkpoint_tensors(TINY, 4))
    write(tmp_path / "made", TINY, other.items())
    assert holds(tmp_path / "made", other) and not holds(tmp_path / "made", tensors)
    assert len(list((tmp_path / "made").iterdir())) == 3 and len(list(tmp_path.iterdir())) == 1


def changed(name: str, made):
    return lambda tensors: (tensors | {name: made(tensors[name].clone())}).items()


def entry(where, value):
    def made(t):
        t[where] = value
        return t

    return made


def interrupted(tensors):
    yield from list(tensors.items())[:-5]
    raise KeyboardInterrupt


BAD_TENSORS = {
    "missing": (lambda t: [p for p in t.items() if p[0] != LAST], f"tensor '{LAST}' is missing"),
    "many-missing": (lambda t: list(t.items())[:-5],
                     f"tensor '{LAST.replace('w2', 'w1')}' is missing (and 4 more)"),
    "twice": (lambda t: [*t.items(), (NORM, t[NORM])], f"tensor '{NORM}' occurs twice"),
    "unknown": (lambda t: [*t.items(), ("bias", t[NORM])], "tensor 'bias' is unknown"),
    "shape": (changed(NORM, lambda t: t[None]), f"tensor '{NORM}' has shape [1, 64]; allowed is [64]"),
    "dtype": (changed(NORM, lambda t: t.double()), f"tensor '{NORM}' is torch.float64; allowed is BF16"),
    "scale": (changed(SCALE, entry((3, 0), 255)), f"tensor '{SCALE}' has scale byte 0xFF (NaN) at row 3, group 0"),
    "heads": (changed(A_LOG, entry(5, 1.0)), f"tensor '{A_LOG}' has 1.0 at entry 5; allowed is 0 beyond the 1 heads"),
}  # fmt: skip


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize(("spoil", "text"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_failed_write_changes_nothing(tmp_path, tensors, spoil, text, existing):
    folder = tmp_path / "made"
    if existing:
        write(folder, TINY, tensors.items())
    with pytest.raises(CheckpointError) as error:
        write(folder, TINY, spoil(tensors), shard_bytes=50_000)
    assert str(error.value) == f"{folder}: {text}"
    assert list(tmp_path.iterdir()) == ([folder] if existing else [])
    assert not existing or holds(folder, tensors)


def test_an_interrupted_write_changes_nothing(tmp_path, tensors):
    write(tmp_path / "made", TINY, tensors.items())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "made", TINY, interrupted(tensors), shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == [tmp_path / "made"] and holds(tmp_path / "made", tensors)


def test_a_failed_swap_puts_the_old_folder_back(tmp_path, tensors, monkeypatch):
    write(tmp_path / "made", TINY, tensors.items())
    real = type(tmp_path).rename

    def rename(self, target):
        if self.name.endswith(".writing"):
            raise OSError("no space left")
        return real(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "made", TINY, random_checkpoint_tensors(TINY, 4))
    assert list(tmp_path.iterdir()) == [tmp_path / "made"] and holds(tmp_path / "made", tensors)


def test_folders_that_are_no_checkpoint_are_left_alone(tmp_path, tensors):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as error:
        write(tmp_path, TINY, tensors.items())
    assert str(error.value) == f"{tmp_path}: holds 'notes.txt', which no checkpoint has; it is not replaced"
    with pytest.raises(CheckpointError) as error:
        write(tmp_path / "notes.txt", TINY, tensors.items())
    assert str(error.value) == f"{tmp_path / 'notes.txt'}: is a file; allowed is a folder"
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
