"""Sampling: distribution, replay from (seed, position), masks, top-k, top-p, ties (SPEC.md 9)."""

import math

import torch

from reference.numerics import fused
from reference.sample import SAMPLE, gumbel, keep


def draw(logits, rows=1, **kw):
    """Tokens for `rows` positions of one distribution."""

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    args = dict(
        logits=logits.expand(rows, -1), temperature=column(kw.get("temperature", 1.0), torch.float32),
        top_k=column(kw.get("top_k", 0), torch.int32), top_p=column(kw.get("top_p", 1.0), torch.float32),
        seed=column(kw.get("seed", 7), torch.int64), position=kw.get("position", torch.arange(rows)),
        allowed=kw.get("allowed"),
    )  # fmt: skip
    return SAMPLE.call(args, {}, fused)["tokens"]


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]]).bfloat16()
    assert draw(logits, temperature=0.0).tolist() == [1]
    assert draw(logits, temperature=0.0, allowed=torch.tensor([[True, False, True, True]])).tolist() == [3]


def test_frequencies_follow_the_softmax():
    """200,000 draws: each frequency within 5 standard deviations of its probability; a temperature of 1.1 is not."""
    n, logits = 200_000, torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    p = logits[0].double().softmax(-1)
    sigma = (p * (1 - p) / n).sqrt()

    def off(temperature):
        return float(((draw(logits, n, temperature=temperature).bincount(minlength=5) / n - p).abs() / sigma).max())

    assert off(1.0) < 5 < off(1.1)


def test_noise_is_gumbel_and_keyed_by_seed_and_position():
    seed, position = torch.tensor([3, 3, 4]), torch.tensor([10, 11, 10])
    noise = gumbel(seed, position, 50_000)
    # Mean is Euler's constant, variance pi^2 / 6; both within 5 standard errors of 50,000 values.
    assert all(abs(float(row.mean()) - 0.5772157) < 5 * 1.2825 / 50_000**0.5 for row in noise)
    assert all(abs(float(row.var()) - math.pi**2 / 6) < 5 * 3.44 / 50_000**0.5 for row in noise)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(noise[[a, b]])[0, 1])) < 5 / 50_000**0.5
    assert torch.equal(gumbel(seed[2:], position[2:], 50_000)[0], noise[2])


def test_a_row_draws_the_same_alone_and_in_a_batch():
    logits = torch.randn(1, 300)
    batch = draw(logits, 40)
    for row in (0, 17, 39):
        assert draw(logits, 1, position=torch.tensor([row])).item() == batch[row]


def test_top_k_and_top_p_keep_the_right_tokens():
    logits = torch.tensor([[4.0, 2.0, 4.0, 0.0]]).double()
    on = lambda k, p: keep(logits, torch.tensor([k]), torch.tensor([p]))[0].tolist()  # noqa: E731
    assert on(0, 1.0) == [True] * 4
    assert on(1, 1.0) == [True, False, False, False]  # a tie at the cut goes to the lower token
    assert on(2, 1.0) == [True, False, True, False]
    assert on(0, 0.4) == [True, False, False, False]  # 0.467 of the mass reaches 0.4
    assert on(0, 0.9) == [True, False, True, False]
    assert on(0, 0.95) == [True, True, True, False]
    assert on(3, 1e-9) == [True, False, False, False]


def test_noise_is_finite_where_all_bits_of_the_hash_are_set():
    """The one (seed, position) whose token 5 has 64 ones: its noise is the largest there is, and a mask still holds."""
    seed, position = torch.tensor([475772972140089410]), torch.tensor([7])
    noise = gumbel(seed, position, 16)
    assert noise.isfinite().all() and int(noise.argmax()) == 5
    allowed = torch.arange(16)[None] != 5
    assert draw(torch.zeros(1, 16), seed=int(seed), position=position, allowed=allowed).item() != 5


def test_masked_tokens_never_appear():
    logits, allowed = torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.bool)
    allowed[0, [5, 60]] = True
    assert set(draw(logits, 500, allowed=allowed.expand(500, -1)).tolist()) == {5, 60}
