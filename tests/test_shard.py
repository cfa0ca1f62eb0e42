"""Cuts of weights: parts put together are the whole, widths of the published table, the expert pad, errors."""

from dataclasses import replace

import pytest
import torch
from torchrun_worker import WIDE, sources

from reference import moe, mxfp4
from reference.config import k3, k3_rank, mini
from reference.layout import layer_table, top_table
from reference.numerics import exact, fused
from reference.shard import Mesh, cut, rank_config, rank_weights, shard, shard_layer
from reference.stage import ContractError
from reference.weights import layer_weights

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("tp", SIZES)
def test_rank_configs_are_the_served_ones(tp):
    want = k3 if tp == 1 else k3_rank(tp)
    assert rank_config(k3, Mesh(tp)) == want
    assert rank_config(k3, Mesh(tp, experts="expert")).experts == 896 // tp
    assert rank_config(k3, Mesh(tp, experts="expert")).expert_inter == 3072


def put_together(name: str, parts: list, config, mesh: Mesh):
    """The whole tensor, by the table of SPEC.md 12.3 written down once more, as axis and width without padding."""
    base = name.removesuffix(".weight").split(".")[-1]
    if ".experts." in name:
        dim = int(".w2." in name)
        unit = {"weight_packed": 2, "weight_scale": 32}[base] if dim else 1
        own = config.expert_inter // mesh.tp // unit
        assert all(not p.narrow(dim, own, p.shape[dim] - own).any() for p in parts)
        return torch.cat([p.narrow(dim, 0, own) for p in parts], dim)
    rows = "q_proj k_proj v_proj g_proj b_proj f_b_proj q_b_proj kv_b_proj q_conv1d k_conv1d v_conv1d dt_bias A_log"
    rows += " gate_proj up_proj embed_tokens lm_head"
    if base in rows.split():
        return torch.cat(parts)
    if base in ("o_proj", "down_proj"):
        return torch.cat(parts, 1)
    options = dict(gate=mesh.split_router, routed_expert_down_proj=mesh.split_latent,
                   routed_expert_up_proj=mesh.tail != 1)  # fmt: skip
    if options.get(base):
        return torch.cat(parts)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


@pytest.mark.parametrize("options", [dict(tp=2), dict(tp=16), dict(tp=4, tail=0, split_router=True, split_latent=True)])
def test_parts_put_together_are_the_whole(options):
    mesh, source = Mesh(**options), sources()
    for tensors in (source.top(), *(source.layer(i) for i in range(WIDE.layers))):
        parts = [shard_layer(tensors, WIDE, mesh.at(rank)) for rank in range(mesh.tp)]
        assert all(p.keys() == tensors.keys() for p in parts)
        for name, t in tensors.items():
            got = put_together(name, [p[name] for p in parts], WIDE, mesh)
            want = t[: WIDE.heads] if name.endswith("A_log") else t
            assert torch.equal(got, want) and all(p[name].is_contiguous() for p in parts), name


def test_whole_experts_are_dealt_out_unpadded():
    tensors, mesh = sources().layer(1), Mesh(4, experts="expert")
    for rank in range(4):
        held = shard_layer(tensors, WIDE, mesh.at(rank))
        for e in range(4):
            for name in ("w1.weight_packed", "w2.weight_scale"):
                want = tensors[f"block_sparse_moe.experts.{4 * rank + e}.{name}"]
                assert torch.equal(held[f"block_sparse_moe.experts.{e}.{name}"], want)
        assert "block_sparse_moe.experts.4.w1.weight_packed" not in held


def test_a_cut_of_a_strided_tensor_is_dense_and_right():
    padded = torch.full((8, 12), torch.nan)
    padded[:, :8] = torch.arange(64.0).view(8, 8)
    view = padded[:, :8].T  # strided, transposed
    assert torch.equal(cut(view, 4, 3, 1), view[:, 6:8]) and cut(view, 4, 3, 1).is_contiguous()
    assert torch.equal(torch.cat([cut(view, 4, r, 0) for r in range(4)]), view)


def meta(table: dict) -> dict:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in table.items()}


GEMMS = {  # SPEC.md 13
    "kda.in_proj.w": {8: (6288, 7168), 16: (3216, 7168)}, "kda.gate_proj.w": {8: (1536, 128), 16: (768, 128)},
    "kda.o_proj.w": {8: (7168, 1536), 16: (7168, 768)}, "mla.qkv_a.w": {8: (2112, 7168), 16: (2112, 7168)},
    "mla.q_b.w": {8: (2304, 1536), 16: (1152, 1536)}, "mla.gate_proj.w": {8: (1536, 7168), 16: (768, 7168)},
    "mla.w_uk": {8: (12, 128, 512), 16: (6, 128, 512)}, "mlp.gate_up.w": {8: (8448, 7168), 16: (4224, 7168)},
    "mlp.down.w": {8: (7168, 4224), 16: (7168, 2112)}, "mla.o_proj.w": {8: (7168, 1536), 16: (7168, 768)},
}  # fmt: skip
MOE = {  # checkpoint names, as the stacks of 896 experts are not built here
    "experts.7.w1.weight_packed": {8: (384, 1792), 16: (256, 1792)},
    "experts.7.w2.weight_packed": {8: (3584, 192), 16: (3584, 128)},
    "experts.7.w2.weight_scale": {8: (3584, 12), 16: (3584, 8)},
    "shared_experts.gate_proj.weight": {8: (768, 7168), 16: (384, 7168)},
    "shared_experts.down_proj.weight": {8: (7168, 768), 16: (7168, 384)},
    "routed_expert_up_proj.weight": {8: (896, 3584), 16: (448, 3584)}, "gate.weight": {8: (896, 7168), 16: (896, 7168)},
}  # fmt: skip


@pytest.mark.parametrize("tp", (8, 16))
def test_widths_of_a_rank_are_the_published_ones(tp):
    seat = Mesh(tp, tail=0).at(tp - 1)
    dense = replace(k3, dense_layers=93)  # attention and dense MLP of both kinds of layer
    local = rank_config(dense, seat.mesh)
    made = {}
    for layer in (0, 3):
        held = shard_layer(meta(layer_table(dense, layer)), dense, seat)
        made |= layer_weights(type("Held", (), dict(layer=lambda self, i, held=held: held))(), local, layer)
    for name, want in GEMMS.items():
        assert tuple(made[name].shape) == want[tp], name
    table = {n: spec for n, spec in layer_table(k3, 1).items() if ".experts." not in n or ".experts.7." in n}
    held = shard_layer(meta(table), k3, seat)
    for name, want in MOE.items():
        assert tuple(held[f"block_sparse_moe.{name}"].shape) == want[tp], name
    top = shard_layer(meta(top_table(k3)), k3, seat)
    assert tuple(top["lm_head.weight"].shape) == {8: (20480, 7168), 16: (10240, 7168)}[tp]


def test_the_expert_pad_contributes_exactly_zero():
    """TP16: 32 of 256 inner columns are real. The rest is zero going in, and what follows cannot matter."""
    weights = rank_weights(sources(), WIDE, Mesh(16), [5])[5]
    w = {k: weights[f"moe.{k}", 1] for k in ("w13", "w13_scale", "w2", "w2_scale")}
    g = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(16, generator=g)[:4] for _ in range(5)]).int()
    z = torch.randn(5, WIDE.latent, generator=g).bfloat16()

    def run(num, up, down):
        up = {k: up[k] for k in ("w13", "w13_scale")}
        m = moe.EXPERTS_UP.call(dict(z=z.to(num.storage(z.dtype)), ids=ids) | up, {}, num)["m"]
        down = {k: down[k] for k in ("w2", "w2_scale")}
        return m, moe.EXPERTS_DOWN.call(dict(m=m, ids=ids) | down, {}, num)["y"]

    loud = w["w2"].clone(), w["w2_scale"].clone()
    loud[0][..., 16:], loud[1][..., 1:] = 0x77, 127  # the pad of w2 is 6 everywhere
    for num in (exact, fused):
        m, y = run(num, w, w)
        assert m.shape[-1] == 256 and not m[..., 32:].any() and m[..., :32].any()
        assert torch.equal(run(num, w, w | dict(w2=loud[0], w2_scale=loud[1]))[1], y)
    real = [m[..., :32], w["w2"][..., :16], w["w2_scale"][..., :1]]
    m, y = run(exact, w, w)
    unpadded = moe.EXPERTS_DOWN.call(dict(m=m[..., :32], ids=ids, w2=real[1], w2_scale=real[2]), {}, exact)["y"]
    assert (unpadded - y).abs().max() < 1e-13 * y.abs().max()
    w13 = w["w13"].clone()
    w13.unflatten(1, (2, 256))[:, :, 32] = 0x11  # one row of the pad is 0.5, gate and up
    scales = w["w13_scale"].clone()
    scales.unflatten(1, (2, 256))[:, :, 32] = 127
    broken = run(exact, dict(w13=w13, w13_scale=scales), w | dict(w2=loud[0], w2_scale=loud[1]))[1]
    assert (broken - y).abs().max() > 1e-3 * y.abs().max()


def test_the_pad_is_what_quantised_zeros_are():
    packed, scale = mxfp4.quant(torch.zeros(2, 32))
    assert not packed.any() and not scale.any()


BAD = [
    (lambda: rank_config(mini, Mesh(4)), "mini: heads = 2 over 4 ranks; allowed are multiples of 4"),
    (
        lambda: rank_config(replace(WIDE, vocab=273), Mesh(2)),
        "wide: vocab = 273 over 2 ranks; allowed are multiples of 2",
    ),
    (
        lambda: rank_config(replace(WIDE, expert_inter=480), Mesh(16)),
        "wide: expert_inter = 480 over 16 ranks; allowed are multiples of 512",
    ),
    (
        lambda: rank_config(replace(WIDE, experts=12), Mesh(8, experts="expert")),
        "wide: experts = 12 over 8 ranks; allowed are multiples of 8",
    ),
    (
        lambda: rank_config(replace(WIDE, experts=12), Mesh(8, split_router=True)),
        "wide: experts = 12 over 8 ranks; allowed are multiples of 8",
    ),
    (
        lambda: rank_config(replace(WIDE, dense_inter=72), Mesh(16)),
        "wide: dense_inter = 72 over 16 ranks; allowed are multiples of 16",
    ),
    (
        lambda: rank_config(replace(WIDE, hidden=72), Mesh(16, tail=0)),
        "wide: hidden = 72 over 16 ranks; allowed are multiples of 16",
    ),
    (
        lambda: rank_config(replace(WIDE, latent=72), Mesh(16, split_latent=True)),
        "wide: latent = 72 over 16 ranks; allowed are multiples of 16",
    ),
    (
        lambda: cut(torch.zeros(6, 5), 4, 0, 0),
        "shape (6, 5) over 4 ranks; allowed are multiples of 4 in axis 0",
    ),
    (
        lambda: shard("self_attn.new_proj.weight", torch.zeros(4, 4), WIDE, Mesh(2).at(0)),
        "no rule cuts tensor 'self_attn.new_proj.weight'; rules are SPEC.md 12.3",
    ),
]  # fmt: skip


@pytest.mark.parametrize("call, text", BAD, ids=range(len(BAD)))
def test_what_cannot_be_shared_is_named(call, text):
    with pytest.raises(ContractError) as raised:
        call()
    assert str(raised.value) == text
