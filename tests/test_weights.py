"""From checkpoint names to stage arguments: every block of every fused weight, and random checkpoints' statistics."""

from dataclasses import replace

import pytest
import torch

from reference import mxfp4
from reference.checkpoint import Checkpoint, write
from reference.config import deep, k3_rank, mini
from reference.layout import expected
from reference.plan import plan
from reference.weights import RandomCheckpoint, all_weights, layer_weights, random_checkpoint_tensors, top_weights

SMALL = replace(mini, name="small", layers=4, mla_layers=(3,), experts=4)  # 2 heads: head order shows
DENSE, KDA, MLA = 0, 1, 3  # layers of SMALL; 1 to 3 are MoE


@pytest.fixture(scope="module")
def source():
    return RandomCheckpoint(SMALL, 5)


def blocks(source, layer: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int, int]:
    return layer_weights(source, SMALL, layer), source.layer(layer), SMALL.heads, SMALL.kda_width, SMALL.hidden


def check_kda(w, t, H, C, D):
    """SPEC.md 5.1, 5.2: rows q|k|v|g|f_a|b|zeros; taps first, channels q|k|v."""
    in_proj, at = w["kda.in_proj.w"], 0
    assert in_proj.shape == (1168, D)  # 4 * 256 + 128 + 2 = 1154, padded to a multiple of 16
    for name, rows in (("q", C), ("k", C), ("v", C), ("g", C), ("f_a", 128), ("b", H)):
        assert torch.equal(in_proj[at : at + rows], t[f"self_attn.{name}_proj.weight"]), name
        at += rows
    assert not in_proj[at:].any()
    taps = w["kda.conv_weight"]
    assert taps.shape == (4, 3 * C) and taps.is_contiguous() and taps.dtype == torch.float32
    for i, name in enumerate("qkv"):
        for tap in range(4):
            assert torch.equal(taps[tap, i * C : (i + 1) * C], t[f"self_attn.{name}_conv1d.weight"][:, 0, tap])
    assert w["kda.A_log"].shape == (H,) and torch.equal(w["kda.A_log"], t["self_attn.A_log"][:H])
    assert w["kda.A_log"].dtype == w["kda.dt_bias"].dtype == w["kda.w_o_norm"].dtype == torch.float32
    for ours, name in (("gate_proj.w", "f_b_proj.weight"), ("dt_bias", "dt_bias"), ("w_o_norm", "o_norm.weight")):
        assert torch.equal(w[f"kda.{ours}"], t[f"self_attn.{name}"])
    assert torch.equal(w["kda.o_proj.w"], t["self_attn.o_proj.weight"])


def check_mla(w, t, H, C, D):
    """SPEC.md 6: kv_b holds, per head, 128 key rows and then 128 value rows."""
    assert torch.equal(w["mla.qkv_a.w"][:64], t["self_attn.q_a_proj.weight"])
    assert torch.equal(w["mla.qkv_a.w"][64:], t["self_attn.kv_a_proj_with_mqa.weight"])
    kv_b = t["self_attn.kv_b_proj.weight"]
    for h in range(H):
        assert torch.equal(w["mla.w_uk"][h], kv_b[256 * h : 256 * h + 128])
        assert torch.equal(w["mla.w_uv"][h], kv_b[256 * h + 128 : 256 * h + 256])
    for ours, name in (("w_q_norm", "q_a_layernorm"), ("w_kv_norm", "kv_a_layernorm"), ("q_b.w", "q_b_proj"),
                       ("gate_proj.w", "g_proj"), ("o_proj.w", "o_proj")):  # fmt: skip
        assert torch.equal(w[f"mla.{ours}"], t[f"self_attn.{name}.weight"]), ours


def check_moe(w, t, H, C, D):
    """SPEC.md 8: gate rows before up rows, in the routed experts and in the shared one."""
    I, S, moe = SMALL.expert_inter, SMALL.shared_inter, "block_sparse_moe."
    for e in range(SMALL.experts):
        dense = {n: mxfp4.dequant(*(t[f"{moe}experts.{e}.{n}.weight_{k}"] for k in ("packed", "scale"))) for n in
                 ("w1", "w2", "w3")}  # fmt: skip
        w13 = mxfp4.dequant(w["moe.w13"][e], w["moe.w13_scale"][e])
        assert torch.equal(w13[:I], dense["w1"]) and torch.equal(w13[I:], dense["w3"])
        assert torch.equal(mxfp4.dequant(w["moe.w2"][e], w["moe.w2_scale"][e]), dense["w2"])
    assert torch.equal(w["moe.shared_up.w"][:S], t[f"{moe}shared_experts.gate_proj.weight"])
    assert torch.equal(w["moe.shared_up.w"][S:], t[f"{moe}shared_experts.up_proj.weight"])
    for ours, name in (("router.w", "gate.weight"), ("bias", "gate.e_score_correction_bias"),
                       ("latent_down.w", "routed_expert_down_proj.weight"),
                       ("w_latent_norm", "routed_expert_norm.weight"), ("latent_up.w", "routed_expert_up_proj.weight"),
                       ("shared_down.w", "shared_experts.down_proj.weight")):  # fmt: skip
        assert torch.equal(w[f"moe.{ours}"], t[moe + name]), ours


def check_dense(w, t, H, C, D):
    I = SMALL.dense_inter
    assert torch.equal(w["mlp.gate_up.w"][:I], t["mlp.gate_proj.weight"])
    assert torch.equal(w["mlp.gate_up.w"][I:], t["mlp.up_proj.weight"])
    assert torch.equal(w["mlp.down.w"], t["mlp.down_proj.weight"])


def check_residuals(w, t, H, C, D):
    for which, residual, norm in (("pre", "self_attention_res", "input"), ("post", "mlp_res", "post_attention")):
        assert torch.equal(w[f"attn_res.{which}.w_norm"], t[f"{residual}_norm.weight"])
        assert torch.equal(w[f"attn_res.{which}.w_proj"][None], t[f"{residual}_proj.weight"])
        assert torch.equal(w[f"attn_res.{which}.w_out"], t[f"{norm}_layernorm.weight"])


CHECKS = [(check_kda, KDA), (check_mla, MLA), (check_moe, KDA), (check_moe, MLA), (check_dense, DENSE),
          (check_kda, DENSE), *((check_residuals, layer) for layer in (DENSE, KDA, MLA))]  # fmt: skip


@pytest.mark.parametrize(("check", "layer"), CHECKS, ids=lambda x: getattr(x, "__name__", x))
def test_layer_weights(source, check, layer):
    check(*blocks(source, layer))


@pytest.mark.parametrize("layer", [DENSE, KDA, MLA])
def test_halves_exchanged_in_any_weight_are_noticed(source, layer):
    """The checks above are complete: each weight is held by exactly one."""
    made, t, H, C, D = blocks(source, layer)
    for name, tensor in made.items():
        axis = 1 if name in ("moe.w13", "moe.w2", "moe.w13_scale", "moe.w2_scale") or tensor.shape[0] == 1 else 0
        order = torch.arange(tensor.shape[axis])
        half = len(order) // 2
        order[:half], order[half : 2 * half] = order[half : 2 * half].clone(), order[:half].clone()
        spoilt = made | {name: tensor.index_select(axis, order)}
        noticed = 0
        for check, at in CHECKS:
            if at == layer:
                try:
                    check(spoilt, t, H, C, D)
                except AssertionError:
                    noticed += 1
        assert noticed == 1, name


def test_top_weights(source):
    w, t = top_weights(source, SMALL), source.top()
    assert torch.equal(w["embed.w"], t["embed_tokens.weight"]) and torch.equal(w["head.logits.w"], t["lm_head.weight"])
    assert torch.equal(w["head.w_norm"], t["norm.weight"])
    assert torch.equal(w["attn_res.final.w_norm"], t["output_attn_res_norm.weight"])
    assert torch.equal(w["attn_res.final.w_proj"][None], t["output_attn_res_proj.weight"])


SIX_HEADS = replace(k3_rank(16), name="six-heads", layers=4, mla_layers=(3,), experts=2, topk=1, vocab=64, hidden=64,
                    q_lora=32, dense_inter=32, latent=32)  # fmt: skip


@pytest.mark.parametrize("config", [SMALL, replace(deep, layers=6, mla_layers=(3, 5)), SIX_HEADS], ids=lambda c: c.name)
def test_weights_are_what_the_plan_asks_for(config):
    """Every weight a decode step binds and no other, each of the dtype, rank and strides its stage declares."""
    asked = {(ref.name, ref.layer): step.stage.by_name[arg] for step in plan(config, 1).steps
             for arg, ref in step.bind.items() if ref.space == "weight"}  # fmt: skip
    made = all_weights(RandomCheckpoint(config, 0), config)
    assert made.keys() == asked.keys()
    for key, spec in asked.items():
        assert made[key].dtype == spec.dtype and made[key].ndim == len(spec.axes) and made[key].is_contiguous(), key


def test_files_and_random_sources_give_the_same_weights(source, tmp_path):
    write(tmp_path / "small", SMALL, random_checkpoint_tensors(SMALL, 5), shard_bytes=1 << 20)
    read, made = all_weights(Checkpoint(tmp_path / "small"), SMALL), all_weights(source, SMALL)
    assert read.keys() == made.keys() and all(torch.equal(read[key], t) for key, t in made.items())


# Random checkpoints ---------------------------------------------------------------------------------------------------


def test_a_random_tensor_depends_on_seed_and_name_only():
    first, again, other = (dict(random_checkpoint_tensors(SMALL, seed)) for seed in (1, 1, 2))
    assert first.keys() == expected(SMALL).keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if not name.endswith("_scale"))
    alone = RandomCheckpoint(SMALL, 1).layer(2)
    assert all(torch.equal(t, first[f"language_model.model.layers.2.{name}"]) for name, t in alone.items())


def test_random_decays_cover_their_range():
    """exp(-5 sigmoid(exp(A_log) (raw_g + dt_bias))) with raw_g ~ N(0, 1): some near both ends, some between."""
    t = RandomCheckpoint(replace(deep, heads=64), 0).layer(1)
    rate = t["self_attn.A_log"][:64].exp()
    assert 1 <= rate.min() < 2 and 8 < rate.max() <= 16 and not t["self_attn.A_log"][64:].any()
    raw_g = torch.randn(200, 64, 128, generator=torch.Generator().manual_seed(0))
    decay = torch.exp(-5 * torch.sigmoid(rate[:, None] * (raw_g + t["self_attn.dt_bias"].view(64, 128))))
    for low, high in ((0, 0.01), (0.01, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1)):
        assert ((decay >= low) & (decay <= high)).float().mean() > 0.03, (low, high)


def test_random_projections_keep_unit_scale():
    t = RandomCheckpoint(mini, 0).layer(3)
    for name, w in t.items():
        if w.dtype == torch.bfloat16 and w.ndim == 2:
            gain = w.float().pow(2).sum(1).mean().sqrt()  # of one output, for inputs of variance 1
            assert abs(gain - 1) < 6 * (2 * w.numel()) ** -0.5 + 0.01, name  # sampling error, six sigma, and bf16
    bias = t["block_sparse_moe.gate.e_score_correction_bias"]
    assert 0 < bias.abs().max() < 0.1
