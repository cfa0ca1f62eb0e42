"""Draft checkpoints in the published form: one safetensors file or several, an index, config.json (SPEC.md 12.4).

Read and written like the target's (`checkpoint`); errors name the file and the tensor. Nothing is unpickled.
"""

from dataclasses import MISSING, fields
from pathlib import Path

from torch import Tensor

from .checkpoint import INDEX, Shards, read_index, read_json, write_folder
from .draft_config import DraftConfig, draft_table
from .layout import CONFIG, CheckpointError, short

MODERATE = (1e-12, 1e12)  # numbers of which logarithms and powers are taken
KIND = "k3_dspark"  # model_type of config.json; the other fields are those of DraftConfig


def config_to_json(config: DraftConfig) -> dict:
    return (
        {"model_type": KIND} | {f.name: getattr(config, f.name) for f in fields(config)} | {"taps": list(config.taps)}
    )


def config_from_json(obj: object, file: str = CONFIG) -> DraftConfig:
    """The contents of config.json. Raises CheckpointError naming the field that is wrong."""
    if not isinstance(obj, dict) or obj.get("model_type") != KIND:
        found = obj.get("model_type") if isinstance(obj, dict) else obj
        raise CheckpointError(f"{file}: model_type is {short(found)}; allowed is {KIND!r}")
    known = {f.name: f for f in fields(DraftConfig)}
    for name in sorted(obj.keys() - known.keys() - {"model_type"}):
        raise CheckpointError(f"{file}: {short(name)} is unknown")
    made = {}
    for name, f in known.items():
        if name not in obj:
            if f.default is MISSING:
                raise CheckpointError(f"{file}: {name} is missing")
            continue
        made[name] = _take(file, name, obj[name], f.type)
    if made["mask"] >= made["vocab"]:
        raise CheckpointError(f"{file}: mask is {made['mask']}; allowed is below vocab = {made['vocab']}")
    config = DraftConfig(**made)
    if config.theta <= 1 or config.rope % 2:
        raise CheckpointError(f"{file}: theta is {config.theta}, rope {config.rope}; allowed are above 1, and pairs")
    return config


def _take(file: str, name: str, value: object, kind: type) -> object:
    """A field of its declared type: a text, a number above 0 (a mask may be 0), or the list of tapped layers."""
    low = int(name != "mask")
    if kind is str and isinstance(value, str):
        return value
    if kind is int and type(value) is int and low <= value < 2**31:
        return value
    if kind is float and type(value) in (int, float) and MODERATE[0] <= value <= MODERATE[1]:
        return float(value)
    if kind not in (str, int, float) and isinstance(value, list) and value:
        if all(type(t) is int and 0 <= t < 2**31 for t in value):
            return tuple(value)
    raise CheckpointError(f"{file}: {name} is {short(value)}; allowed is what {DraftConfig.__name__}.{name} holds")


class DraftCheckpoint(Shards):
    """A draft's folder, read tensor by tensor. config: its DraftConfig."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = config_from_json(read_json(self.folder / CONFIG), str(self.folder / CONFIG))
        stored, layers = read_index(self.folder / INDEX), self.config.layers
        if len(stored) < layers:  # before a table of that many names is made
            raise CheckpointError(f"{self.folder / INDEX}: names {len(stored)} tensors; {CONFIG} has {layers} layers")
        self._hold(draft_table(self.config), stored)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, as `draft_config.draft_weights` takes them."""
        return {name: self.tensor(name) for name in self._table}


def write_draft(folder: str | Path, config: DraftConfig, tensors: dict[str, Tensor], *, shard_bytes: int = 4 << 30):
    """Write a draft checkpoint as `checkpoint.write` does, with the same promises and errors."""
    write_folder(folder, draft_table(config), config_to_json(config), tensors.items(), shard_bytes=shard_bytes)
