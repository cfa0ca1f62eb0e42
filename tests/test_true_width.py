"""One layer at K3's true widths over 16 ranks: tails, the expert pad from 192 to 256, empty context shards."""

import os
from dataclasses import replace
from math import prod

import pytest
import torch

from reference import moe, mxfp4
from reference.config import k3
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


def test_experts_of_true_width_over_16_ranks():
    """3072 = 16 x 192 inner columns, each rank's padded to 256: the partial sums add up to the whole."""
    config = replace(k3, experts=1, topk=1, vocab=256)
    g, ids, mesh = torch.Generator().manual_seed(1), torch.zeros(1, 1, dtype=torch.int32), Mesh(16)
    tensors = {}
    for name, shape in (("w1", (3072, 3584)), ("w3", (3072, 3584)), ("w2", (3584, 3072))):
        base = f"block_sparse_moe.experts.0.{name}.weight"
        packed, scale = mxfp4.quant(torch.randn(shape, generator=g) * shape[1] ** -0.5)
        tensors |= {f"{base}_packed": packed, f"{base}_scale": scale}
    z = torch.randn(1, 3584, generator=g).double()

    def run(held):
        def stack(names, kind):
            return torch.cat([held[f"block_sparse_moe.experts.0.{n}.weight_{kind}"] for n in names])[None]

        up, down = ("w1", "w3"), ("w2",)
        x = dict(z=z, ids=ids, w13=stack(up, "packed"), w13_scale=stack(up, "scale"))
        m = moe.EXPERTS_UP.call(x, {}, exact)["m"]
        y = dict(m=m, ids=ids, w2=stack(down, "packed"), w2_scale=stack(down, "scale"))
        return m, moe.EXPERTS_DOWN.call(y, {}, exact)["y"]

    (inner, want), got = run(tensors), []
    for rank in range(16):
        m, y = run(shard_layer(tensors, config, mesh.at(rank)))
        assert m.shape[-1] == 256 and not m[..., 192:].any()
        assert (m[..., :192] - inner[..., 192 * rank : 192 * (rank + 1)]).abs().max() < 1e-12
        got.append(y)
    assert (sum(got) - want).norm() < 1e-12 * want.norm()
    assert (sum(got[:-1]) - want).norm() > 0.1 * want.norm()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_true_width_over_16_ranks(kind):
    """Float64: 1e-12, measured 7e-15. Production rounding: at most twice the single device's error (test_world.py)."""
    if not os.environ.get("K3_SLOW"):
        pytest.skip("2 minutes and 8 GB: set K3_SLOW=1")
    config = replace(k3, name=kind, vocab=256, layers=1, mla_layers=LAYERS[kind], dense_layers=0, experts=2, topk=2)
    source, threads = Tiled(config, 4), torch.get_num_threads()
    torch.set_num_threads(1)
    size, got = dict(slots=2, pages=8, page_size=2), {}
    model = Model(config, all_weights(source, config))
    for num in (exact, fused):
        got["one", num.mode] = step(Decoder(model, DecodeState(config, num=num, **size)))
    world = LocalWorld(16, 16, tail=0, split_latent=True, home="all_to_all")
    del model
    weights = rank_weights(source, config, world.mesh, world.ranks)
    assert weights[0]["moe.w13", 0].shape[1] == 512
    for num in (exact, fused):
        got["ranks", num.mode] = step(RankedDecoder(config, weights, world, WorldState(config, world, num=num, **size)))
    torch.set_num_threads(threads)
    want = got["one", "exact"]
    error = {key: float((t - want).norm() / want.norm()) for key, t in got.items()}
    assert error["ranks", "exact"] < 1e-12
    assert 1e-4 < error["ranks", "fused"] <= 2 * error["one", "fused"]
