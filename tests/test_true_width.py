"""One layer at K3's true widths over 2 to 16 ranks: tails, the expert pad from 192 to 256, empty context shards."""

import os
from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch

from reference import moe, mxfp4
from reference.config import k3
from reference.dcp import local_length
from reference.decoder import Decoder, Model
from reference.numerics import exact, fused
from reference.ranks import RankedDecoder, WorldState
from reference.shard import Mesh, rank_weights, shard_layer
from reference.state import DecodeState
from reference.weights import RandomCheckpoint, all_weights
from reference.world import LocalWorld

LAYERS = {"mla": (0,), "kda": ()}  # which layer is MLA; all are MoE layers
PROMPT, NEXT = list(range(11)), 5  # 12 tokens over 16 context ranks: 4 hold none


class Tiled(RandomCheckpoint):
    """Large matrices repeat a million normal numbers, which costs a tenth; no row or slice repeats."""

    def _make(self, name, shape, dtype):
        if dtype is torch.uint8 or prod(shape) < 1 << 20:
            return super()._make(name, shape, dtype)
        noise = super()._make(name, (1_000_003,), torch.float32) - 1  # 0.1 times normal
        noise = (noise * 10 * shape[-1] ** -0.5).to(dtype)
        return noise.repeat(-(-prod(shape) // len(noise)))[: prod(shape)].view(shape)


def step(decoder) -> torch.Tensor:
    """Logits after a prompt and one decode step."""
    request = decoder.state.open()
    decoder.prefill(request, PROMPT)
    return decoder.decode([request], [NEXT]).act["vocab_logits"].double()


ONE = replace(k3, experts=1, topk=1, vocab=256)
IDS = torch.zeros(1, 1, dtype=torch.int32)
BASE = "block_sparse_moe.experts.0."


@pytest.fixture(scope="module")
def expert():
    """The tensors of one expert, and what enters it."""
    g, tensors = torch.Generator().manual_seed(1), {}
    for name, shape in (("w1", (3072, 3584)), ("w3", (3072, 3584)), ("w2", (3584, 3072))):
        packed, scale = mxfp4.quant(torch.randn(shape, generator=g) * shape[1] ** -0.5)
        tensors |= {f"{BASE}{name}.weight_packed": packed, f"{BASE}{name}.weight_scale": scale}
    return tensors, torch.randn(1, 3584, generator=g)


def stack(held, names, kind):
    return torch.cat([held[f"{BASE}{n}.weight_{kind}"] for n in names])[None]


def inner_columns(held, z, num=exact):
    x = dict(z=z.to(num.storage(torch.bfloat16)), ids=IDS)
    x |= dict(w13=stack(held, ("w1", "w3"), "packed"), w13_scale=stack(held, ("w1", "w3"), "scale"))
    return moe.EXPERTS_UP.call(x, {}, num)["m"]


def through(held, m, num=exact):
    w2 = dict(w2=stack(held, ("w2",), "packed"), w2_scale=stack(held, ("w2",), "scale"))
    return moe.EXPERTS_DOWN.call(dict(m=m, ids=IDS) | w2, {}, num)["y"]


def test_experts_of_true_width_over_16_ranks(expert):
    """3072 = 16 x 192 inner columns, each rank's padded to 256: the partial sums add up to the whole."""
    tensors, z = expert
    inner, got = inner_columns(tensors, z), []
    want = through(tensors, inner)
    for rank in range(16):
        held = shard_layer(tensors, ONE, Mesh(16).at(rank))
        m = inner_columns(held, z)
        y = through(held, m)
        assert m.shape[-1] == 256 and not m[..., 192:].any()
        assert (m[..., :192] - inner[..., 192 * rank : 192 * (rank + 1)]).abs().max() < 1e-12
        got.append(y)
    assert (sum(got) - want).norm() < 1e-12 * want.norm()
    assert (sum(got[:-1]) - want).norm() > 0.1 * want.norm()


@pytest.mark.parametrize("num", (exact, fused), ids=lambda num: num.mode)
def test_the_pad_contributes_exactly_zero(expert, num):
    """Bit for bit, and twice over: its inner columns are zero whatever multiplies them, and its weights are zero
    whatever they multiply."""
    tensors, z = expert
    held, g = shard_layer(tensors, ONE, Mesh(16).at(5)), torch.Generator().manual_seed(2)
    m = inner_columns(held, z, num)
    want = through(held, m, num)
    noise = {name: t.clone() for name, t in held.items()}
    codes, scales = (noise[f"{BASE}w2.weight_{kind}"] for kind in ("packed", "scale"))
    codes[:, 96:] = torch.randint(0, 256, codes[:, 96:].shape, generator=g, dtype=torch.uint8)
    scales[:, 6:] = 127
    full = m.clone()
    full[..., 192:] = torch.randn(full[..., 192:].shape, generator=g).to(m.dtype)
    assert not m[..., 192:].any() and m[..., :192].all()
    assert torch.equal(through(noise, m, num), want) and torch.equal(through(held, full, num), want)
    assert not torch.equal(through(noise, full, num), want)


SHARED = {  # by ranks, of which some hold no token of 12
    2: dict(interleave=16, sequence=True), 4: dict(interleave=4, reduce="two_stage"),
    8: dict(interleave=2, tail=2, lse_base="2"), 16: dict(tail=0, split_latent=True, home="all_to_all"),
}  # fmt: skip


@cache
def one_device(kind: str):
    """The configuration, the source, and the logits of one device by mode."""
    config = replace(k3, name=kind, vocab=256, layers=1, mla_layers=LAYERS[kind], dense_layers=0, experts=2, topk=2)
    source = Tiled(config, 4)
    model = Model(config, all_weights(source, config))
    sizes = dict(slots=2, pages=8, page_size=2)
    return config, source, {num: step(Decoder(model, DecodeState(config, num=num, **sizes))) for num in (exact, fused)}


@pytest.mark.parametrize("ranks", SHARED)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_true_width_over_ranks(kind, ranks):
    """Float64: 1e-12, measured 7e-15. Production rounding: at most twice the single device's error, for the reason
    given in test_world_rounding.py."""
    if not os.environ.get("K3_SLOW"):
        pytest.skip("a minute and 8 GB: set K3_SLOW=1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config, source, one = one_device(kind)
    world = LocalWorld(ranks, ranks, **SHARED[ranks])
    held = [int(local_length(torch.tensor(12), ranks, world.mesh.interleave, r)) for r in range(ranks)]
    assert sum(held) == 12 and 0 in held
    weights = rank_weights(source, config, world.mesh, world.ranks)
    assert weights[0]["moe.w13", 0].shape[1] == 2 * max(3072 // ranks, 256)
    sizes, want, got = dict(slots=2, pages=8, page_size=max(2, world.mesh.interleave)), one[exact], {}
    for num in (exact, fused):
        got[num] = step(RankedDecoder(config, weights, world, WorldState(config, world, num=num, **sizes)))
    torch.set_num_threads(threads)
    far = lambda t: float((t - want).norm() / want.norm())  # noqa: E731
    assert far(got[exact]) < 1e-12
    assert 1e-4 < far(got[fused]) <= 2 * far(one[fused])
