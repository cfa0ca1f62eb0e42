"""A checkpoint in the published layout with generated weights, whose statistics are those that break kernels.

    ./tools/k3 stand-in FOLDER --shape short --statistics outliers,decays,keys,queries,router,scales

Without a statistic a tensor is what kernel tests draw: unit normals, norms near 1, every gate near its middle.

outliers   four hidden channels carry 100 times the peak of the others in the embedding, which all layers see, and 100
           times their size in what layers add to the residual
decays     KDA decays over the whole of (e^-5, 1), in every head
keys       keys of all tokens are nearly collinear, those of token 2i and 2i + 1 equal, and each is written with full
           strength (beta near 1): the products that chunk forms of KDA are made of do not die away
queries    queries 100 times as large as usual, 300 times in MLA: attention scores of hundreds
router     all tokens want the same experts, the last one among them; others are tied exactly
scales     MXFP4 scale bytes 0 to 240 in one of eight expert rows (0 to 160 in the projection back)
"""

from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from reference import mxfp4
from reference.checkpoint import CheckpointError, write
from reference.config import Config, deep, k3_rank
from reference.layout import expected
from reference.weights import RandomCheckpoint

from .common import out

STATISTICS = ("outliers", "decays", "keys", "queries", "router", "scales")
BYTES = dict(vocab=272, bos=256, eos=257, pad=258)  # byte tokens: prompts need no tokenizer
short = replace(
    deep, name="short", layers=13, mla_layers=(3, 7, 11, 12), heads=8, dense_inter=128, experts=32, topk=4,
    expert_inter=256, shared_inter=256, block=4,
)  # fmt: skip
SHAPES = {
    "short": (short, "small widths that 8 ranks can share"),
    "deep": (replace(deep, name="deep"), "tiny widths"),
    "rank": (
        replace(k3_rank(8), name="rank", layers=3, mla_layers=(2,), experts=64, **BYTES),
        "one layer of each kind at the widths of one of 8 ranks, with 64 experts",
    ),
}
PERIOD, GROUPS = 1_000_003, 8_191  # primes: drawn numbers repeat, rows do not (a tenth of the time)
LARGE, PEAK = 100.0, 3.0  # the peak of unit normals: three standard deviations


class StandIn(RandomCheckpoint):
    """A source of such weights; a tensor depends on seed, name and statistics only.

    Raises ValueError for an unknown statistic.
    """

    def __init__(self, config: Config, seed: int = 0, statistics: tuple[str, ...] = STATISTICS):
        super().__init__(config, seed)
        for name in statistics:
            if name not in STATISTICS:
                raise ValueError(f"statistic {name!r}: allowed are {', '.join(STATISTICS)}")
        self.statistics = statistics
        self._quantised: tuple[str, tuple[Tensor, Tensor]] = ("", ())  # codes and scales of the last expert matrix

    def has(self, name: str) -> bool:
        return name in self.statistics

    @property
    def outliers(self) -> Tensor:
        """The four hidden channels that stand out."""
        return torch.tensor([1, 3, 5, 6]) * self.config.hidden // 7 + 1

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        base = name.removesuffix(".weight").rpartition(".")[2]
        key = name.removesuffix("_packed").removesuffix("_scale")  # codes and scales come from one matrix
        rng = torch.Generator().manual_seed(
            int.from_bytes(sha256(f"{self.seed} {key}".encode()).digest()[:7], "little")
        )
        if dtype is torch.uint8:
            return self._packed(name, key, shape, rng)
        if len(shape) == 1:
            return self._vector(base, shape, rng).to(dtype)
        n = prod(shape)
        drawn = torch.randn(min(n, PERIOD), generator=rng) * (
            1.0 if base == "embed_tokens" else prod(shape[1:]) ** -0.5
        )
        t = drawn.repeat(-(-n // len(drawn)))[:n].view(shape)
        rule = getattr(self, f"_{base}", None)
        return (rule(t, rng) if rule else t).to(dtype)

    def _vector(self, base: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        noise, heads = torch.randn(shape, generator=rng), self.config.heads
        if base == "A_log":
            rates = 1 + 15 * torch.arange(heads) / max(heads - 1, 1) if self.has("decays") else torch.ones(heads)
            return torch.cat((rates.log(), torch.zeros(shape[0] - heads)))
        if base == "dt_bias":
            if not self.has("decays"):
                return 0.1 * noise
            rates = 1 + 15 * torch.arange(heads) / max(heads - 1, 1)
            wanted = 18 * torch.rand(heads, 128, generator=rng) - 9  # arguments of the sigmoid
            return (wanted / rates[:, None]).flatten()
        if base == "e_score_correction_bias":
            bias = 0.02 * noise
            if self.has("router"):
                bias[3::4] = bias[2::4][: len(bias[3::4])]
                bias[self.favourites] += 1
            return bias
        return 1 + 0.1 * noise

    @property
    def favourites(self) -> Tensor:
        """All but one of the experts that a token chooses, the last of all included."""
        c = self.config
        return torch.arange(1, c.topk) * c.experts // (c.topk - 1) - 1

    def _embed_tokens(self, t: Tensor, rng) -> Tensor:
        if self.has("keys"):
            t[1::2] = t[0 : len(t) - 1 : 2]
            t[:, 0] = 4  # what all tokens have in common
        if self.has("outliers"):
            t[:, self.outliers] = PEAK * LARGE * torch.tensor([1.0, -1.0, 1.0, -1.0]) * (1 + 0.03 * t[:, self.outliers])
        return t

    def _outlying(self, t: Tensor, rng) -> Tensor:
        """A projection back to the hidden width."""
        if self.has("outliers"):
            t[self.outliers] *= LARGE
        return t

    def _o_proj(self, t: Tensor, rng) -> Tensor:
        return self._outlying(t, rng)

    def _down_proj(self, t: Tensor, rng) -> Tensor:
        return self._outlying(t, rng)

    def _routed_expert_up_proj(self, t: Tensor, rng) -> Tensor:
        return self._outlying(t, rng)

    def _f_b_proj(self, t: Tensor, rng) -> Tensor:
        return 0.25 * t

    def _k_proj(self, t: Tensor, rng) -> Tensor:
        if self.has("keys"):
            t[:, 0] = 4 * torch.randn(len(t), generator=rng)
        return t

    def _b_proj(self, t: Tensor, rng) -> Tensor:
        if self.has("keys"):
            t[:, 0] = 1  # beta near 1
        return t

    def _q_proj(self, t: Tensor, rng) -> Tensor:
        return LARGE * t if self.has("queries") else t

    def _q_b_proj(self, t: Tensor, rng) -> Tensor:
        return PEAK * LARGE * t if self.has("queries") else t

    def _gate(self, t: Tensor, rng) -> Tensor:
        if self.has("router"):
            t[3::4] = t[2::4][: len(t[3::4])]  # equal logits
        return t

    def _lm_head(self, t: Tensor, rng) -> Tensor:
        return 4 * t

    def _packed(self, name: str, key: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Codes or scales of an expert matrix: groups of 32 normals, quantised."""
        codes = name.endswith("_packed")
        width = shape[1] * (2 if codes else mxfp4.GROUP)
        n = shape[0] * width // mxfp4.GROUP
        if self._quantised[0] != key:
            groups = torch.randn(min(n, GROUPS), mxfp4.GROUP, generator=rng) * width**-0.5
            self._quantised = key, mxfp4.quant(groups)
        drawn = self._quantised[1][not codes]
        made = drawn.repeat(-(-n // len(drawn)), 1)[:n].reshape(shape)
        if not codes and self.has("scales"):
            top = 160 if ".w2." in name else 240
            made, rng = made.clone(), torch.Generator().manual_seed(rng.initial_seed() + 1)
            made[::8] = torch.randint(0, top + 1, made[::8].shape, generator=rng, dtype=torch.uint8)
        return made


def make(folder: str | Path, config: Config, statistics: tuple[str, ...] = STATISTICS, seed: int = 0,
         shards: int | None = None) -> None:  # fmt: skip
    """Write a stand-in of `config` into a folder that is empty or not there.

    shards: about how many safetensors files (default: one for each layer). Raises CheckpointError for a folder that
    holds anything, ValueError for an unknown statistic.
    """
    folder, source = Path(folder), StandIn(config, seed, statistics)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is not empty; a stand-in is written into a new or an empty folder")
    table = expected(config)
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in table.values())
    tensors = ((name, source._make(name, *spec)) for name, spec in table.items())
    write(folder, config, tensors, shard_bytes=total // (shards or config.layers) + 1)


def run(folder: str, shape: str, statistics: str, seed: int) -> dict:
    """`k3 stand-in`: write, and say what was written. Raises ValueError for an unknown shape or statistic."""
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r}: allowed are {', '.join(SHAPES)}")
    names = {"all": STATISTICS, "none": ()}.get(statistics)
    if names is None:
        names = tuple(dict.fromkeys(part.strip() for part in statistics.split(",")))
    config, told = SHAPES[shape]
    make(folder, config, names, seed)
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    text = f"{told}; statistics: {', '.join(names) or 'none'}; seed {seed}"
    out.print(f"{folder}: {config.layers} layers in {size / 1e6:.0f} MB: {text}", markup=False)
    return dict(folder=str(folder), shape=shape, statistics=list(names), seed=seed, layers=config.layers, bytes=size)
