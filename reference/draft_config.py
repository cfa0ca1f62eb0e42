"""The draft model's configurations, and what its checkpoint holds (SPEC.md 10.1, 12.4)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from .config import Config, k3, mini
from .layout import CheckpointError, Table


@dataclass(frozen=True)
class DraftConfig:
    """A parallel block drafter for one target. Widths are element counts; layers 0-based."""

    name: str
    vocab: int  # vocabulary, hidden size, embedding and head are the target's
    hidden: int
    layers: int
    heads: int
    q_lora: int
    inter: int
    taps: tuple[int, ...]  # target layers whose running sum is read
    mask: int  # token id that stands for a token to be drafted
    rank: int  # of the Markov correction
    block: int = 7  # drafted tokens
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64  # rotated, unlike the target's
    v_dim: int = 128
    eps: float = 1e-5
    theta: float = 50000.0
    factor: float = 32.0  # YaRN
    original: int = 32768
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def kv_row(self) -> int:
        return self.kv_lora + self.rope

    @property
    def q_dim(self) -> int:
        return self.nope + self.rope

    @property
    def softmax_scale(self) -> float:
        """192^-0.5 (0.1 ln 32 + 1)^2; cos and sin are not scaled."""
        return self.q_dim**-0.5 * (0.1 * log(self.factor) + 1) ** 2

    def frequencies(self) -> tuple[float, ...]:
        """Radians per position of the rope / 2 pairs: slow pairs are stretched by `factor`, fast ones kept, a linear
        ramp between the pairs that turn beta_fast and beta_slow times over the original length."""

        def pair(turns):
            return self.rope * log(self.original / (turns * 2 * pi)) / (2 * log(self.theta))

        low, high = max(floor(pair(self.beta_fast)), 0), min(ceil(pair(self.beta_slow)), self.rope - 1)
        out = []
        for i in range(self.rope // 2):
            f = self.theta ** (-2 * i / self.rope)
            stretched = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            out.append(f * (1 - stretched) + f / self.factor * stretched)
        return tuple(out)


k3_draft = DraftConfig(
    "k3-dspark", vocab=k3.vocab, hidden=k3.hidden, layers=5, heads=64, q_lora=1536, inter=14336,
    taps=(2, 23, 47, 71, 89), mask=163837, rank=256,
)  # fmt: skip
mini_draft = DraftConfig(
    "mini-dspark", vocab=mini.vocab, hidden=mini.hidden, layers=2, heads=2, q_lora=32, inter=128,
    taps=(1, 4, 7, 9, 11), mask=259, rank=64,
)  # fmt: skip


def draft_table(config: DraftConfig) -> Table:
    """Every tensor of a draft checkpoint: name -> (shape, bf16)."""
    c, D, V, H = config, config.hidden, config.vocab, config.heads
    shapes = {
        "context_proj.weight": (D, len(c.taps) * D), "context_norm.weight": (D,), "embed_tokens.weight": (V, D),
        "final_norm.weight": (D,), "markov_head.markov_w1.weight": (V, c.rank),
        "markov_head.markov_w2.weight": (V, c.rank), "confidence_head.proj.weight": (1, D + c.rank),
        "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    layer = {
        "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_a_proj": (c.q_lora, D),
        "self_attn.q_a_layernorm": (c.q_lora,), "self_attn.q_b_proj": (H * c.q_dim, c.q_lora),
        "self_attn.kv_a_proj_with_mqa": (c.kv_row, D), "self_attn.kv_a_layernorm": (c.kv_lora,),
        "self_attn.kv_b_proj": (H * (c.nope + c.v_dim), c.kv_lora), "self_attn.o_proj": (D, H * c.v_dim),
        "mlp.gate_proj": (c.inter, D), "mlp.up_proj": (c.inter, D), "mlp.down_proj": (D, c.inter),
    }  # fmt: skip
    for i in range(c.layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: (shape, torch.bfloat16) for name, shape in shapes.items()}


def random_draft(config: DraftConfig, seed: int) -> dict[str, Tensor]:
    """Random tensors of a draft checkpoint; each depends on seed and name only."""
    made = {}
    for name, (shape, dtype) in draft_table(config).items():
        key = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(key))
        made[name] = (1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5).to(dtype)
    return made


def bigram_draft(config: DraftConfig, lines: Iterable[Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """A trivially made draft that keeps something: random layers under a quiet final norm, and a Markov correction that
    knows which token follows which in `lines`."""
    made = random_draft(config, seed)
    table = torch.full((config.vocab, config.vocab), -2.0)
    for a, b in (pair for line in lines for pair in pairwise(line)):
        table[a, b] += 3
    u, s, v = torch.linalg.svd(table)
    root = s[: config.rank].sqrt()
    made["markov_head.markov_w1.weight"] = (u[:, : config.rank] * root).bfloat16()
    made["markov_head.markov_w2.weight"] = (v[: config.rank].T * root).bfloat16()
    made["final_norm.weight"] = torch.full((config.hidden,), 0.05).bfloat16()
    return made


def draft_weights(tensors: Mapping[str, Tensor], config: DraftConfig, target: Mapping) -> dict:
    """Draft tensors as the stages take them, (name, layer) -> tensor; embedding and head are the target's.

    Raises CheckpointError naming the tensor that is missing, unknown, or of another shape or dtype.
    """
    table = draft_table(config)
    for name in sorted(table.keys() ^ tensors.keys()):
        raise CheckpointError(f"draft {config.name}: tensor {name} is {'missing' if name in table else 'unknown'}")
    for name, (shape, dtype) in table.items():
        t = tensors[name]
        if (tuple(t.shape), t.dtype) != (shape, dtype):
            found = f"is {t.dtype} {tuple(t.shape)}; allowed is {dtype} {shape}"
            raise CheckpointError(f"draft {config.name}: {name} {found}")
    made = {(name, None): target[name, None] for name in ("embed.w", "head.logits.w")}
    top = dict(context_proj="context_proj", context_norm="context_norm", final_norm="final_norm",
               w1="markov_head.markov_w1", w2="markov_head.markov_w2")  # fmt: skip
    made |= {(f"draft.{ours}", None): tensors[f"{name}.weight"] for ours, name in top.items()}
    same = dict(w_in="input_layernorm", w_post="post_attention_layernorm", w_q_norm="self_attn.q_a_layernorm",
                w_kv_norm="self_attn.kv_a_layernorm", q_a="self_attn.q_a_proj", q_b="self_attn.q_b_proj",
                kv_a="self_attn.kv_a_proj_with_mqa", o_proj="self_attn.o_proj", down="mlp.down_proj")  # fmt: skip
    for i in range(config.layers):
        t = {n: tensors[f"layers.{i}.{n}.weight"] for n in (*same.values(), "self_attn.kv_b_proj", "mlp.gate_proj",
                                                            "mlp.up_proj")}  # fmt: skip
        kv_b = t["self_attn.kv_b_proj"].unflatten(0, (config.heads, config.nope + config.v_dim))
        made |= {(f"draft.{ours}", i): t[name] for ours, name in same.items()}
        made["draft.w_uk", i] = kv_b[:, : config.nope].contiguous()  # [H, 128, 512]
        made["draft.w_uv", i] = kv_b[:, config.nope :].contiguous()
        made["draft.gate_up", i] = torch.cat((t["mlp.gate_proj"], t["mlp.up_proj"]))  # [2I, D]
    return made


def fits(config: DraftConfig, target: Config) -> None:
    """Raise ValueError unless a draft can serve a target: equal vocabulary and hidden size, taps and mask inside."""
    for name in ("vocab", "hidden"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(f"draft {config.name}: {name} = {ours}; {target.name} has {theirs}")
    wrong = [t for t in config.taps if not 0 <= t < target.layers]
    if wrong or not config.taps:
        raise ValueError(f"draft {config.name}: taps {config.taps}; allowed are layers 0..{target.layers - 1}")
    if not 0 <= config.mask < config.vocab or config.block < 1:
        raise ValueError(
            f"draft {config.name}: mask {config.mask}, block {config.block}; allowed are 0..{config.vocab - 1}, 1 up"
        )
