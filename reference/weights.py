"""Checkpoint tensors as the weights the stages take: fused once, at load (SPEC.md 5.1, 6, 8, 12.1).

A source is anything with `layer(i)` and `top()` that give tensors by checkpoint name: a `Checkpoint`, or the random
weights made here. Weight names are "<stage group>.<argument>".
"""

from collections.abc import Iterator
from hashlib import sha256
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from . import mxfp4
from .config import Config
from .layout import expected, full_name, layer_table, top_table


class Source(Protocol):
    """Where checkpoint tensors come from: by name without prefix."""

    def layer(self, layer: int) -> dict[str, Tensor]: ...

    def top(self) -> dict[str, Tensor]: ...


def top_weights(source: Source, config: Config) -> dict[str, Tensor]:
    """embed.w, head.logits.w [V, D]; head.w_norm, attn_res.final.w_norm, attn_res.final.w_proj [D]; all bf16."""
    t = source.top()
    return {
        "embed.w": t["embed_tokens.weight"],
        "attn_res.final.w_norm": t["output_attn_res_norm.weight"],
        "attn_res.final.w_proj": t["output_attn_res_proj.weight"].squeeze(0),
        "head.w_norm": t["norm.weight"],
        "head.logits.w": t["lm_head.weight"],
    }


def layer_weights(source: Source, config: Config, layer: int) -> dict[str, Tensor]:
    """The weights of one layer: attention residuals, then KDA or MLA, then the dense MLP or the latent MoE."""
    t = source.layer(layer)
    made = {}
    for which, residual, norm in (("pre", "self_attention_res", "input"), ("post", "mlp_res", "post_attention")):
        made[f"attn_res.{which}.w_norm"] = t[f"{residual}_norm.weight"]  # [D]
        made[f"attn_res.{which}.w_proj"] = t[f"{residual}_proj.weight"].squeeze(0)  # [D]
        made[f"attn_res.{which}.w_out"] = t[f"{norm}_layernorm.weight"]  # [D]
    made |= (_mla if config.is_mla(layer) else _kda)(_inside("self_attn.", t), config)
    if config.is_dense(layer):
        made["mlp.gate_up.w"] = torch.cat((t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]))  # [2I, D]
        made["mlp.down.w"] = t["mlp.down_proj.weight"]  # [D, I]
        return made
    return made | _moe(_inside("block_sparse_moe.", t), config)


def all_weights(source: Source, config: Config) -> dict[tuple[str, int | None], Tensor]:
    """Every weight of a model: (name, layer), with layer None outside the layers."""
    made = {(name, None): t for name, t in top_weights(source, config).items()}
    for layer in range(config.layers):
        made |= {(name, layer): t for name, t in layer_weights(source, config, layer).items()}
    return made


def _inside(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _kda(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    parts = [t[f"{name}_proj.weight"] for name in ("q", "k", "v", "g", "f_a", "b")]
    in_proj = parts[0].new_zeros(config.in_proj_width, config.hidden)  # the padding rows stay zero
    torch.cat(parts, out=in_proj[: sum(len(part) for part in parts)])
    taps = torch.cat([t[f"{name}_conv1d.weight"] for name in "qkv"]).squeeze(1)  # [3C, taps]
    return {
        "kda.in_proj.w": in_proj,
        "kda.gate_proj.w": t["f_b_proj.weight"],  # [C, 128]
        "kda.conv_weight": taps.T.contiguous(),  # [taps, 3C], channel innermost
        "kda.A_log": t["A_log"][: config.heads].clone(),  # the file pads it with zeros
        "kda.dt_bias": t["dt_bias"],  # [C]
        "kda.w_o_norm": t["o_norm.weight"],  # [128]
        "kda.o_proj.w": t["o_proj.weight"],  # [D, C]
    }


def _mla(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    kv_b = t["kv_b_proj.weight"].unflatten(0, (config.heads, config.nope + config.v_dim))  # [H, 256, 512]
    made = {
        "mla.qkv_a.w": torch.cat((t["q_a_proj.weight"], t["kv_a_proj_with_mqa.weight"])),  # [q_lora + 576, D]
        "mla.w_q_norm": t["q_a_layernorm.weight"],
        "mla.w_kv_norm": t["kv_a_layernorm.weight"],
        "mla.q_b.w": t["q_b_proj.weight"],  # [H * 192, q_lora]
        "mla.w_uk": kv_b[:, : config.nope].contiguous(),  # [H, 128, 512]
        "mla.w_uv": kv_b[:, config.nope :].contiguous(),  # [H, 128, 512]
        "mla.gate_proj.w": t["g_proj.weight"],  # [C, D]
        "mla.o_proj.w": t["o_proj.weight"],  # [D, C]
    }
    if config.mla_cache == "fp8":
        made |= {f"mla.{name}": torch.tensor([getattr(config, name)]) for name in ("cache_scale", "query_scale")}
    return made


def _moe(t: dict[str, Tensor], config: Config) -> dict[str, Tensor]:
    E, I, L = config.experts, config.expert_inter, config.latent

    def stack(width: int, rows: tuple[tuple[str, int], ...], kind: str) -> Tensor:
        made = torch.empty(E, sum(count for _, count in rows), width, dtype=torch.uint8)
        for expert, target in enumerate(made):
            parts = [t[f"experts.{expert}.{name}.weight_{kind}"] for name, _ in rows]
            torch.cat(parts, out=target)
        return made

    up, down = (("w1", I), ("w3", I)), (("w2", L),)
    return {
        "moe.router.w": t["gate.weight"],  # [E, D]
        "moe.bias": t["gate.e_score_correction_bias"],  # [E] fp32
        "moe.latent_down.w": t["routed_expert_down_proj.weight"],  # [L, D]
        "moe.w_latent_norm": t["routed_expert_norm.weight"],  # [L]
        "moe.latent_up.w": t["routed_expert_up_proj.weight"],  # [D, L]
        "moe.shared_up.w": torch.cat((t["shared_experts.gate_proj.weight"], t["shared_experts.up_proj.weight"])),
        "moe.shared_down.w": t["shared_experts.down_proj.weight"],  # [D, I_s]
        "moe.w13": stack(L // 2, up, "packed"),  # [E, 2I, L/2] u8, gate rows first
        "moe.w13_scale": stack(L // mxfp4.GROUP, up, "scale"),  # [E, 2I, L/32] u8
        "moe.w2": stack(I // 2, down, "packed"),  # [E, L, I/2] u8
        "moe.w2_scale": stack(I // mxfp4.GROUP, down, "scale"),  # [E, L, I/32] u8
    }


class RandomCheckpoint:
    """A source of random weights with the statistics of a working model. A tensor depends on seed and name only.

    Projections keep unit scale (standard deviation K^-0.5), norms lie around 1, the KDA decays cover (e^-5, 1)
    (SPEC.md 16), router biases are small, and the head is sharp enough for greedy decoding to have a clear winner.
    """

    def __init__(self, config: Config, seed: int):
        self.config, self.seed = config, seed

    def top(self) -> dict[str, Tensor]:
        return {name: self._make(full_name(name), *spec) for name, spec in top_table(self.config).items()}

    def layer(self, layer: int) -> dict[str, Tensor]:
        table = layer_table(self.config, layer)
        return {name: self._make(full_name(name, layer), *spec) for name, spec in table.items()}

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        matrix, _, kind = name.rpartition(".weight")
        key = matrix if dtype is torch.uint8 else name  # packed codes and scales come from one matrix
        seed = int.from_bytes(sha256(f"{self.seed} {key}".encode()).digest()[:8], "little") >> 1
        rng = torch.Generator().manual_seed(seed)
        if dtype is torch.uint8:
            width = shape[1] * (2 if kind == "_packed" else mxfp4.GROUP)
            codes, scales = mxfp4.quant(torch.randn(shape[0], width, generator=rng) * width**-0.5)
            return codes if kind == "_packed" else scales
        return _random(name, shape, self.config, rng).to(dtype)


def random_checkpoint_tensors(config: Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a random checkpoint, by full name, in the published dtypes: what `checkpoint.write` takes."""
    source = RandomCheckpoint(config, seed)
    for name, spec in expected(config).items():
        yield name, source._make(name, *spec)


def _random(name: str, shape: tuple[int, ...], config: Config, rng: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=rng)
    if name.endswith("A_log"):
        rate = 1 + 15 * torch.rand(shape, generator=rng)
        return torch.where(torch.arange(shape[0]) < config.heads, rate.log(), 0.0)
    if name.endswith(("embed_tokens.weight", "dt_bias")):
        return noise
    if name.endswith("e_score_correction_bias"):
        return 0.02 * noise
    if len(shape) == 1:
        return 1 + 0.1 * noise
    gain = 4 if name.endswith("lm_head.weight") else 1
    return gain * noise * prod(shape[1:]) ** -0.5
