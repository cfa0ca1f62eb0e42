"""Checkpoints in the published form: safetensors shards, an index, config.json (SPEC.md 12).

`Checkpoint(folder)` reads config.json and the index only; a shard is mapped when one of its tensors is asked for, so
one layer of a 1.5 TB checkpoint loads without the other shards being there. What a tensor is follows from its name and
stored dtype (U8 pairs are MXFP4, BF16 and F32 are dense), never from the quantisation section of config.json. Vision
tensors are skipped. Nothing is unpickled.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import Config
from .layout import (
    CONFIG,
    PREFIX,
    CheckpointError,
    Table,
    config_from_json,
    config_to_json,
    expected,
    full_name,
    layer_table,
    short,
    top_table,
)
from .mxfp4 import NAN_SCALE

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"\w[\w.-]*\.safetensors")
SKIPPED = ("vision_tower.", "mm_projector.")
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}

__all__ = ["Checkpoint", "CheckpointError", "expected", "write"]


def canonical(name: str) -> str:
    """A text tensor's full name; some files write language_model.layers for language_model.model.layers."""
    bare = "language_model.layers."
    return f"{PREFIX}layers.{name.removeprefix(bare)}" if name.startswith(bare) else name


class Shards:
    """Safetensors files of a folder, mapped when one of their tensors is asked for, under an index that is held against
    the tensors that must be there. `folder` is set first, then `_hold` is called."""

    folder: Path

    def _hold(self, table: Table, stored: dict[str, tuple[str, str]]) -> None:
        """Take over an index, after holding it against the tensors that must be there."""
        self._table, self._stored = table, stored
        self._placed = {}  # shard -> names as stored
        for shard, stored in self._stored.values():
            self._placed.setdefault(shard, set()).add(stored)
        self._open = {}
        named = self._stored.keys()
        for names, problem in ((self._table.keys() - named, "is missing"), (named - self._table.keys(), "is unknown")):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise CheckpointError(f"{self.folder / INDEX}: tensor {short(min(names))} {problem}{more}")

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name, mapped from its shard: pages are read when they are used."""
        name = canonical(name)
        if name not in self._stored:
            raise CheckpointError(f"{self.folder / INDEX}: no tensor {short(name)}")
        shard, stored = self._stored[name]
        file, where = self._shard(shard), f"{self.folder / shard}: tensor {stored!r}"
        view = file.get_slice(stored)
        shape, dtype = self._table[name]
        _check_layout(where, tuple(view.get_shape()), view.get_dtype(), shape, DTYPES[dtype])
        tensor = file.get_tensor(stored)
        self._check(where, name, tensor)
        return tensor

    def _check(self, where: str, name: str, tensor: Tensor) -> None:
        """Refuse values that the kind of checkpoint does not allow."""

    def _shard(self, shard: str):
        """Map a shard once, and hold its header against the index."""
        if shard in self._open:
            return self._open[shard]
        path = self.folder / shard
        refuse_no_file(path)
        try:
            file = safe_open(str(path), "pt")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: the shard is missing") from None
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{path}: truncated or no safetensors file ({reason})") from None
        held, placed = set(file.keys()), self._placed[shard]
        for name in sorted(placed - held):
            raise CheckpointError(f"{path}: tensor {short(name)} is missing, though the index places it here")
        for name in sorted(held - placed):
            if canonical(name) in self._stored:
                other = self._stored[canonical(name)][0]
                raise CheckpointError(f"{path}: tensor {short(name)} is a duplicate; the index places it in {other}")
            if not name.startswith(SKIPPED):
                raise CheckpointError(f"{path}: tensor {short(name)} is unknown to the index")
        self._open[shard] = file
        return file


class Checkpoint(Shards):
    """A checkpoint folder, read tensor by tensor.

    config: its Config. Every method raises CheckpointError with one line that names the file and the tensor.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = config_from_json(read_json(self.folder / CONFIG), str(self.folder / CONFIG))
        stored = read_index(self.folder / INDEX, self.config)
        try:
            table = expected(self.config)
        except ValueError as error:
            raise CheckpointError(f"{self.folder / CONFIG}: {error}") from None
        self._hold(table, stored)

    def top(self) -> dict[str, Tensor]:
        """The tensors outside the layers, by name without prefix."""
        return {name: self.tensor(full_name(name)) for name in top_table(self.config)}

    def layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer, by name without prefix. Opens the shards that hold them and no others."""
        if not 0 <= layer < self.config.layers:
            raise CheckpointError(f"{self.folder}: layer {layer}; allowed are 0..{self.config.layers - 1}")
        return {name: self.tensor(full_name(name, layer)) for name in layer_table(self.config, layer)}

    def _check(self, where: str, name: str, tensor: Tensor) -> None:
        _check_values(where, name, tensor, self.config)


def refuse_no_file(path: Path) -> None:
    """Raise CheckpointError for a folder, pipe or device, which would end in a riddle or in waiting for ever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise CheckpointError(f"{path}: is {kind}; allowed is a file")


def read_json(path: Path) -> object:
    def unique(pairs: list) -> dict:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: {short(twice)} occurs twice")
        return made

    refuse_no_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path}: no JSON ({short(str(error))[1:-1]})") from None


def read_index(path: Path, config: Config | None = None) -> dict[str, tuple[str, str]]:
    """The index as full name -> (shard, name as stored), without vision tensors."""
    obj = read_json(path)
    placed = obj.get("weight_map") if isinstance(obj, dict) else None
    if not isinstance(placed, dict):
        raise CheckpointError(f"{path}: 'weight_map' is {short(placed)}; allowed is an object")
    stored, shards = {}, set()
    for name, shard in placed.items():
        if not (isinstance(shard, str) and (shard in shards or SHARD.fullmatch(shard))):
            raise CheckpointError(
                f"{path}: tensor {short(name)} is placed in {short(shard)}; "
                "allowed is the name of a .safetensors file beside the index"
            )
        shards.add(shard)
        if name.startswith(SKIPPED):
            continue
        full = canonical(name)
        if full in stored:
            raise CheckpointError(f"{path}: tensor {short(full)} occurs twice, with and without 'model.'")
        stored[full] = (shard, name)
    experts = config.experts * max(config.layers - config.dense_layers, 0) * 6 if config else 0
    if len(stored) < experts:  # before a table of that many names is made
        raise CheckpointError(f"{path}: names {len(stored)} tensors; {CONFIG} asks for {experts} of experts alone")
    return stored


def _check_layout(where: str, shape: tuple[int, ...], dtype: str, want_shape: tuple[int, ...], want_dtype: str) -> None:
    if dtype != want_dtype:
        raise CheckpointError(f"{where} is {dtype}; allowed is {want_dtype}")
    if shape != want_shape:
        raise CheckpointError(f"{where} has shape {list(shape)}; allowed is {list(want_shape)}")


def _check_values(where: str, name: str, tensor: Tensor, config: Config) -> None:
    """Refuse NaN scales, and heads that config.json does not know of."""
    if name.endswith(".weight_scale") and (bad := (tensor == NAN_SCALE)).any():
        row, group = bad.nonzero()[0].tolist()
        raise CheckpointError(f"{where} has scale byte 0xFF (NaN) at row {row}, group {group}")
    if name.endswith(".A_log") and (bad := tensor[config.heads :] != 0).any():
        entry = config.heads + int(bad.nonzero()[0])
        value = tensor[entry].item()
        raise CheckpointError(f"{where} has {value} at entry {entry}; allowed is 0 beyond the {config.heads} heads")


def write(folder: str | Path, config: Config, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = 4 << 30):
    """Write a checkpoint: every tensor of expected(config), as `write_folder` does; NaN scales are refused, too."""
    check = lambda where, name, tensor: _check_values(where, name, tensor, config)  # noqa: E731
    write_folder(folder, expected(config), config_to_json(config), tensors, check, shard_bytes=shard_bytes)


def write_folder(folder: str | Path, table: Table, text: dict, tensors: Iterable[tuple[str, Tensor]],
                 check: Callable = lambda where, name, tensor: None, *, shard_bytes: int):  # fmt: skip
    """Write every tensor of `table` once, in any order, `shard_bytes` or one tensor per shard; `text` is config.json.

    Shards are built in a sibling folder that takes the place of `folder` at the end: a failed write leaves `folder` as
    it was. An existing `folder` is replaced only if it holds nothing but a checkpoint. Raises CheckpointError for a
    tensor that is unknown, repeated, missing, or of another shape, dtype or content than allowed.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; allowed is a folder")
    for entry in sorted(folder.iterdir()) if folder.exists() else ():
        if entry.name not in (CONFIG, INDEX) and not SHARD.fullmatch(entry.name):
            raise CheckpointError(f"{folder}: holds {short(entry.name)}, which no checkpoint has; it is not replaced")
    work = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    work.mkdir(parents=True)
    try:
        placed, total = _write_shards(work, folder, table, check, tensors, shard_bytes)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        for name, obj in ((INDEX, index), (CONFIG, text)):
            (work / name).write_text(json.dumps(obj, indent=1) + "\n", encoding="utf-8")
        _take_place(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_shards(work: Path, folder: Path, table: Table, check: Callable, tensors, shard_bytes: int) -> tuple:
    """Write the shards; return the placement of each tensor and the sum of their bytes."""
    left, held, parts, total = dict(table), {}, [], 0

    def flush():
        save_file(held, work / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        held.clear()

    size = 0
    for name, tensor in tensors:
        where = f"{folder}: tensor {short(name)}"
        if name not in left:
            known = any(name in part for part in [*parts, held])
            raise CheckpointError(f"{where} {'occurs twice' if known else 'is unknown'}")
        shape, dtype = left.pop(name)
        _check_layout(where, tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)), shape, DTYPES[dtype])
        check(where, name, tensor)
        if held and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        # A copy: the caller may reuse its buffer, and a shard cannot hold two tensors that share memory.
        held[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {short(next(iter(left)))} is missing{more}")
    flush()
    files = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for i, file in enumerate(files):
        (work / f"part-{i}").rename(work / file)
    return {name: file for part, file in zip(parts, files, strict=True) for name in part}, total


def _take_place(work: Path, folder: Path) -> None:
    """Put `work` where `folder` is. A folder that was there is kept until the new one stands."""
    old = folder.with_name(f"{work.name}.old")
    existed = folder.exists()
    if existed:
        folder.rename(old)
    try:
        work.rename(folder)
    except OSError:
        if existed:
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
