"""Stages of ranks read a second time, number by number with fp32 scalars and a rounding to bf16 made of integers."""

import numpy as np
import pytest
import torch

from reference import moe
from reference.numerics import fused
from reference.rank_stages import EMBED_SHARD, FINALIZE_CHAIN, FOLD, NORM_SQUARES, OWN_EXPERTS

f32 = np.float32


def narrow(x) -> f32:
    """The nearest bf16, ties to the even one: half of the 16 bits that go is added, and one more to odd codes."""
    bits = int(f32(x).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(f32)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(t):
    return t.float().numpy()


def test_the_rounding_is_bf16s():
    x = drawn(4000)
    x = torch.cat([x, x.bfloat16().float() + 2.0**-9 * x.bfloat16().float()])
    assert [narrow(v) for v in x.numpy()] == x.bfloat16().float().tolist()


def chain(y, w, *, backwards=False, whole=False, late=False):
    """One token's and channel's running sum. Misreadings: from the last expert on, products or sums not rounded."""
    order = range(len(y))[::-1] if backwards else range(len(y))
    total = f32(0)
    for n, a in enumerate(order):
        term = y[a] * w[a] if whole else narrow(y[a] * w[a])
        total = term if n == 0 else (total + term if late else narrow(total + term))
    return narrow(total)


def test_the_older_finalize_rounds_every_product_and_every_sum():
    y, w = drawn(3, 16, 24).bfloat16(), drawn(3, 16, seed=1).abs() / 8
    got = numbers(FINALIZE_CHAIN.call(dict(y=y, weights=w), {}, fused)["out"])

    def read(**odd):
        return np.array([[chain(numbers(y)[t, :, c], w.numpy()[t], **odd) for c in range(24)] for t in range(3)])

    assert np.array_equal(got, read())
    for odd in ("backwards", "whole", "late"):
        assert not np.array_equal(got, read(**{odd: True})), odd
    assert not np.array_equal(got, numbers(moe.FINALIZE.call(dict(y=y, weights=w), {}, fused)["out"]))


def test_tier_0_rounds_the_squares():
    """Of numbers whose squares lose most by rounding: the norm is off by nearly 2^-10, a quarter of a unit of bf16."""
    values = torch.arange(1, 2, 2.0**-7).bfloat16().float()
    lost = [float(abs(narrow(f32(v) * f32(v)) / (v * v) - 1)) for v in values]
    worst = values[int(np.argmax(lost))]
    assert max(lost) > 2**-9
    x, w = torch.full((2, 512), float(worst)).bfloat16(), (1 + 0.1 * drawn(512)).bfloat16()
    x[0, ::4] = 0.5  # or the result is the weight again, which is a bf16
    x[1] = drawn(512, seed=3).bfloat16()
    args = dict(x=x, w_latent_norm=w)
    got = numbers(NORM_SQUARES.call(args, {}, fused)["out"])
    for row, made in zip(numbers(x), got, strict=True):
        mean = sum(float(narrow(v * v)) for v in row) / 512
        assert [narrow(v / (mean + 1e-5) ** 0.5 * g) for v, g in zip(row.astype(float), numbers(w), strict=True)] == (
            made.tolist())  # fmt: skip
    assert not np.array_equal(got[0], numbers(moe.LATENT_NORM.call(args, {}, fused)["out"])[0])


@pytest.mark.parametrize("count", (1, 2, 8))
def test_every_choice_lies_on_one_rank(count):
    ids, weights = torch.tensor([[0, 7, 3], [5, 2, 6]], dtype=torch.int32), drawn(2, 3).abs()
    held = {}
    for rank in range(8 // count):
        attrs = dict(first=rank * count, count=count)
        got = OWN_EXPERTS.call(dict(ids=ids, weights=weights), attrs, fused)
        for t, a in ((t, a) for t in range(2) for a in range(3)):
            local, weight = int(got["own_ids"][t, a]), float(got["own_weights"][t, a])
            assert 0 <= local < count
            if weight:
                assert held.setdefault((t, a), (rank * count + local, weight)) == (rank * count + local, weight)
            else:
                assert local == 0
    assert held == {(t, a): (int(ids[t, a]), float(weights[t, a])) for t in range(2) for a in range(3)}


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_parts_of_the_embedding_add_up_without_rounding(ranks):
    w, ids = drawn(8, 5).bfloat16(), torch.tensor([7, 0, 3, 3, 4])
    own = 8 // ranks
    parts = [
        EMBED_SHARD.call(dict(ids=ids, w=w[r * own : r * own + own]), dict(first=r * own), fused)["out"]
        for r in range(ranks)
    ]
    for t, token in enumerate(ids.tolist()):
        for r, part in enumerate(parts):
            assert torch.equal(part[t], w[token] if r == token // own else torch.zeros(5).bfloat16())


def test_the_fold_touches_its_own_columns():
    routed, shared = drawn(3, 4), drawn(3, 16, seed=1).bfloat16()
    for rank in range(4):
        got = numbers(FOLD.call(dict(routed=routed, shared=shared), dict(rank=rank), fused)["out"])
        for t in range(3):
            for c in range(16):
                own = 4 * rank <= c < 4 * rank + 4
                was = numbers(shared)[t, c]
                assert got[t, c] == (narrow(was + routed.numpy()[t, c - 4 * rank]) if own else was)
