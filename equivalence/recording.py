"""Hidden states between two layers, as a file: what a run over the layers before left for the layers that follow.

A recording holds, for every token of every request, the running prefix, the last layer's delta and the finished blocks
of the attention residuals (SPEC.md 4.2). A layer needs nothing else: its own state follows from the tokens before.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reference.checkpoint import INDEX, Checkpoint, CheckpointError
from reference.config import Config
from reference.layout import CONFIG, short
from reference.stage import ContractError, bf16

FORMAT = "k3-hidden-states-1"
FIELDS = ("format", "layer", "decoded", "prompts", "checkpoint", "passed")


@dataclass
class Hidden:
    """Hidden states entering `layer` (config.layers: the head), bf16 on the CPU, one row per token of all requests.

    tokens: of each request; the last `decoded` of each are decoded, those before prefilled. prefix, delta [N, D],
    blocks [N, finished, D]. passed: a digest of the last layer gone through, "" before the first. verified: False where
    that layer's shard was not there to compare it with.
    """

    tokens: list[list[int]]
    decoded: int
    layer: int
    prefix: Tensor
    delta: Tensor
    blocks: Tensor
    prompts: list[str] = field(default_factory=list)
    passed: str = ""
    verified: bool = True

    @classmethod
    def empty(cls, config: Config, tokens: Sequence[Sequence[int]], decoded: int, prompts: Sequence[str] = ()):
        """Before the embedding. Raises ContractError unless each request has a token to prefill and `decoded` more."""
        if decoded < 1 or not tokens:
            raise ContractError(f"{len(tokens)} requests, {decoded} decoded tokens: allowed are 1 and more of both")
        for i, ids in enumerate(tokens):
            if len(ids) <= decoded:
                raise ContractError(f"request {i} has {len(ids)} tokens; {decoded} decoded ones need {decoded + 1}")
        n = sum(map(len, tokens))
        prefix, delta = (torch.zeros(n, config.hidden, dtype=bf16) for _ in range(2))
        return cls([list(ids) for ids in tokens], decoded, 0, prefix, delta, prefix.new_zeros(n, 0, config.hidden),
                   list(prompts))  # fmt: skip

    @property
    def starts(self) -> list[int]:
        """The row at which each request begins."""
        at = [0]
        for ids in self.tokens:
            at.append(at[-1] + len(ids))
        return at[:-1]

    def leaving(self, config: Config) -> "Hidden":
        """Room for what leaves this layer, all NaN until it is written."""
        made = {name: torch.full_like(getattr(self, name), torch.nan) for name in ("prefix", "delta")}
        finished = -(-(self.layer + 1) // config.block)
        blocks = torch.full((len(self.prefix), finished, config.hidden), torch.nan, dtype=bf16)
        return Hidden(self.tokens, self.decoded, self.layer + 1, **made, blocks=blocks, prompts=self.prompts)


def write(file: str | Path, hidden: Hidden, checkpoint: Checkpoint) -> None:
    """Write a recording; a new file appears whole or not at all. Raises FileExistsError if there is one."""
    file = Path(file)
    refuse_existing(file)
    meta = dict(
        format=FORMAT, layer=str(hidden.layer), decoded=str(hidden.decoded), prompts=json.dumps(hidden.prompts),
        checkpoint=identity(checkpoint), passed=hidden.passed,
    )  # fmt: skip
    held = dict(
        tokens=torch.tensor([t for ids in hidden.tokens for t in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in hidden.tokens], dtype=torch.int64),
        prefix=hidden.prefix, delta=hidden.delta, blocks=hidden.blocks,
    )  # fmt: skip
    work = file.with_name(f".{file.name}.{os.getpid()}.writing")
    try:
        save_file(held, work, metadata=meta)
        work.rename(file)
    finally:
        work.unlink(missing_ok=True)


def refuse_existing(file: str | Path) -> None:
    if Path(file).exists():
        raise FileExistsError(f"{file}: exists; a recording is not replaced, name another file")


def read(file: str | Path, checkpoint: Checkpoint) -> Hidden:
    """A recording of this checkpoint. Raises ContractError, one line, for a file that is none, is cut short, or belongs
    to other weights."""
    config = checkpoint.config
    if Path(file).exists() and not Path(file).is_file():
        kind = "a folder" if Path(file).is_dir() else "a pipe or device"
        raise ContractError(f"{file}: is {kind}; allowed is a file")
    try:
        with safe_open(str(file), "pt") as opened:
            meta, held = opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}
    except FileNotFoundError:
        raise ContractError(f"{file}: the recording is missing") from None
    except (SafetensorError, OSError) as error:
        raise ContractError(f"{file}: truncated or no safetensors file ({' '.join(str(error).split())})") from None
    if meta.get("format") != FORMAT or set(meta) != set(FIELDS):
        raise ContractError(f"{file}: format {short(meta.get('format'))}; allowed is {FORMAT!r}, of check --record")
    for name in ("tokens", "lengths"):
        t = held.get(name)
        if t is None or t.dtype != torch.int64 or t.ndim != 1:
            found = "missing" if t is None else f"{t.dtype} {list(t.shape)}"
            raise ContractError(f"{file}: {name} is {found}; allowed is {torch.int64} with one axis")
    try:
        layer, decoded, prompts = int(meta["layer"]), int(meta["decoded"]), json.loads(meta["prompts"])
        tokens = [part.tolist() for part in held["tokens"].split(held["lengths"].tolist())]
        hidden = Hidden(tokens, decoded, layer, held["prefix"], held["delta"], held["blocks"], prompts, meta["passed"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise ContractError(f"{file}: broken ({short(str(error))})") from None
    if meta["checkpoint"] != identity(checkpoint):
        raise ContractError(f"{file}: recorded with another checkpoint than {checkpoint.folder}")
    _check(file, hidden, config)
    try:
        same = not layer or hidden.passed == passed(checkpoint, layer - 1)
    except CheckpointError:  # weights fetched in pieces: the shard of the last layer may be gone
        same, hidden.verified = True, False
    if not same:
        raise ContractError(f"{file}: recorded with other weights of layer {layer - 1} than {checkpoint.folder} holds")
    return hidden


def _check(file, hidden: Hidden, config: Config) -> None:
    if not 0 <= hidden.layer <= config.layers:
        raise ContractError(f"{file}: enters layer {hidden.layer}; allowed are 0..{config.layers}")
    if not isinstance(hidden.prompts, list) or not all(isinstance(p, str) for p in hidden.prompts):
        raise ContractError(f"{file}: prompts are {short(hidden.prompts)}; allowed is a list of texts")
    n = sum(map(len, hidden.tokens))
    want = dict(prefix=(n, config.hidden), delta=(n, config.hidden),
                blocks=(n, -(-hidden.layer // config.block), config.hidden))  # fmt: skip
    for name, shape in want.items():
        t = getattr(hidden, name)
        if tuple(t.shape) != shape or t.dtype != bf16:
            raise ContractError(f"{file}: {name} is {t.dtype} {list(t.shape)}; allowed is {bf16} {list(shape)}")
    Hidden.empty(config, hidden.tokens, hidden.decoded)  # raises for requests that are too short
    bad = [t for ids in hidden.tokens for t in ids if not 0 <= t < config.vocab]
    if bad:
        raise ContractError(f"{file}: token id {bad[0]}; allowed are 0..{config.vocab - 1}")


def identity(checkpoint: Checkpoint) -> str:
    """A digest of a checkpoint's configuration and index."""
    parts = ((checkpoint.folder / name).read_bytes() for name in (CONFIG, INDEX))
    return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


def passed(checkpoint: Checkpoint, layer: int) -> str:
    """A digest of a layer's norm weights, which tells one set of weights from another."""
    names = (f"language_model.model.layers.{layer}.{n}_layernorm.weight" for n in ("input", "post_attention"))
    raw = (checkpoint.tensor(name).contiguous().view(torch.uint8).numpy().tobytes() for name in names)
    return hashlib.sha256(b"".join(raw)).hexdigest()
