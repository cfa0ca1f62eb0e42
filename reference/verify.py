"""Verification of drafted tokens: which are kept, and the one token that follows them (SPEC.md 10.3, 18.8).

Of a request the target sees S + 1 rows [anchor, d_1 .. d_S]; row i gives the distribution of the token after its own.
Every rule returns tokens [R, S + 1], the kept drafts and the token that follows, -1 behind them, and their count,
1..S + 1. A draft of -1 is padding: it is rejected, and so are all behind it. Probabilities are float64 as in `sample`;
at temperature 0 they are one-hot, so that every rule is then greedy.

`standard` and `block` draw their noise from streams keyed by (seed, position of the first draft), not by the token's
own position: the block rule looks at drafts behind the ones it keeps, and a position drafted again needs fresh noise.
"""

import torch
from torch import Tensor

from .numerics import Numerics
from .sample import gumbel, keep
from .stage import Constraint, Stage, activation, f32, i32, i64, index, output

STREAMS = dict(draft=0x2F3A6B1D4C5E7981, accept=0x5D1B3C7E9A2F4861, follow=0x1C9E5A3B7D2F6E41)
START = 0x3C6EF372FE94F82B  # odd: distinct starts give distinct streams


def stream(seed: Tensor, start: Tensor, use: str) -> Tensor:
    """The seed [R] of one use of noise in the block that starts at position `start` [R]."""
    return seed + STREAMS[use] + start * START


def uniform(seed: Tensor, position: Tensor, n: int) -> Tensor:
    """Uniform numbers in (0, 1]: [R, n] float64, from the noise of `sample`."""
    return (-(-gumbel(seed, position, n)).exp()).exp()


def chances(logits: Tensor, temperature: Tensor, top_k=None, top_p=None, allowed: Tensor | None = None) -> Tensor:
    """What `sample` draws from: logits [M, N] of one request's rows or one per row -> probabilities [M, N] float64."""
    x = logits.double()
    x = x if allowed is None else x.masked_fill(~allowed, -torch.inf)
    hot = x / temperature.double().clamp_min(1e-6)[:, None]
    hot = hot if top_k is None else hot.masked_fill(~keep(hot, top_k, top_p), -torch.inf)
    one = torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature[:, None] > 0, hot.softmax(-1), one)


def gather(p: Tensor, draft: Tensor) -> Tensor:
    """p [R, S.., N] at the drafted tokens [R, S]; 0 for padding."""
    picked = p[:, : draft.shape[1]].gather(-1, draft.clamp_min(0)[..., None])[..., 0]
    return torch.where(draft >= 0, picked, 0)


def standard(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """p, q [R, S + 1, N], q zero where nothing was drafted; draft [R, S].

    Chances [R, S] that draft i is kept, given those before it, and weights [R, S + 1, N] of the token that follows.
    """
    at_p, at_q = gather(p, draft), gather(q, draft)
    return torch.where(at_q > 0, at_p / at_q.clamp_min(1e-300), 0).clamp_max(1), (p - q).clamp_min(0)


def block(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """The same for block verification: chances [R, S] that the kept drafts end at i rather than before it, looking from
    the last one backwards."""
    at_p, at_q = gather(p, draft), gather(q, draft)
    ratio = torch.where(at_q > 0, at_p / at_q.clamp_min(1e-300), 0)
    P = [torch.ones_like(ratio[:, 0])]
    for r in ratio.unbind(1):
        P.append((P[-1] * r).clamp_max(1))
    P = torch.stack(P, dim=1)  # [R, S + 1]
    weights = (P[..., None] * p - q).clamp_min(0)
    R = weights.sum(-1)
    h = R / (R + (1 - P)).clamp_min(1e-300)  # behind the last draft q is 0, so R = P and h = P
    return h[:, 1:], weights


def _draft_exists(tensors, dims):
    draft, size = tensors["draft"], dims.get("N", 2**62)
    bad = draft[(draft < -1) | (draft >= size)]
    return f"draft holds {int(bad[0])}; allowed are tokens 0..{size - 1} and -1 for padding" if len(bad) else None


def _rows_fit(tensors, dims):
    R, S = dims["R"], dims["S"]
    wrong = dims["F"] != S + 1 or dims.get("T", R * (S + 1)) != R * (S + 1) or dims.get("Z", R * S) != R * S
    return (
        f"S = {S} drafts of R = {R} requests with {dims.get('T')} target, {dims.get('Z')} draft rows and room for "
        f"F = {dims['F']} tokens; allowed are R * (S + 1), R * S and S + 1"
    ) if wrong else None  # fmt: skip


def _stage(name: str, *tensors) -> Stage:
    axes = dict(R="requests", S="drafted tokens per request", F="S + 1", T="R * (S + 1)", Z="R * S", N="vocabulary")
    return Stage(
        f"verify.accept.{name}",
        "10.3",
        axes,
        (index("draft", "R S", i64), *tensors, output("tokens", "R F", i64), output("count", "R", i32)),
        (Constraint("F = S + 1", _rows_fit), Constraint("draft < N", _draft_exists, reads_values=True)),
    )


RANDOM = (
    activation("logits", "T N", strides="rows"),
    activation("draft_logits", "Z N", f32),
    index("temperature", "R", f32),
    index("top_k", "R", i32),
    index("top_p", "R", f32),
    index("seed", "R", i64),
    index("position", "R", i64),
    index("allowed", "T N", torch.bool, optional=True),
)
GREEDY = _stage("greedy", activation("target", "T", i64))
STANDARD, BLOCK = _stage("standard", *RANDOM), _stage("block", *RANDOM)
SYNTHETIC = _stage("synthetic", activation("target", "T", i64), index("seed", "R", i64), index("position", "R", i64))


def emit(draft: Tensor, kept: Tensor, follow: Tensor) -> dict[str, Tensor]:
    """The first kept [R] drafts, then follow [R], then -1."""
    at = torch.arange(draft.shape[1] + 1, device=draft.device)
    tokens = torch.cat([draft, follow[:, None]], dim=1)
    tokens = torch.where(at < kept[:, None], tokens, torch.where(at == kept[:, None], follow[:, None], -1))
    return dict(tokens=tokens, count=(kept + 1).to(torch.int32))


def leading(good: Tensor) -> Tensor:
    """How many entries of each row [R, S] are true before the first that is not."""
    return good.long().cumprod(-1).sum(-1)


@GREEDY.law
def greedy(draft, target, *, num: Numerics):
    """Keep drafts while they are the tokens that `sample` takes from the target's rows: target [R * (S + 1)].

    With the target's own noise this replays random sampling, too, token for token.
    """
    target = target.unflatten(0, (len(draft), -1))
    kept = leading(draft == target[:, :-1])
    return emit(draft, kept, target.gather(1, kept[:, None])[:, 0])


def distributions(logits, draft, draft_logits, temperature, top_k, top_p, allowed) -> tuple[Tensor, Tensor]:
    """p and q [R, S + 1, N]: target chances after temperature and masks, draft chances at the same temperature."""
    R, S = draft.shape
    each = lambda t, n: t.repeat_interleave(n)  # noqa: E731
    p = chances(logits, *(each(t, S + 1) for t in (temperature, top_k, top_p)), allowed).unflatten(0, (R, S + 1))
    q = chances(draft_logits, each(temperature, S)).unflatten(0, (R, S))
    one = torch.zeros_like(q).scatter(-1, draft.clamp_min(0)[..., None], 1.0)
    q = torch.where(temperature[:, None, None] > 0, q, one)  # a greedy draft is certain of its token
    drafted = (draft >= 0).long().cumprod(-1).bool()
    return p, torch.cat([torch.where(drafted[..., None], q, 0), torch.zeros_like(p[:, :1])], dim=1)


def _follow(weights, p, kept, seed, position) -> Tensor:
    """Draw the token behind the kept drafts; where the weights vanish (p = q) it comes from p."""
    pick = lambda t: t.gather(1, kept[:, None, None].expand(-1, 1, t.shape[-1]))[:, 0]  # noqa: E731
    w, p = pick(weights), pick(p)
    w = torch.where(w.sum(-1, keepdim=True) > 0, w, p)
    return (w.log() + gumbel(stream(seed, position, "follow"), position, w.shape[-1])).argmax(-1)


@STANDARD.law
def accept_standard(draft, logits, draft_logits, temperature, top_k, top_p, seed, position, allowed=None, *, num):
    """Keep draft i with chance min(1, p / q), up to the first that is not kept."""
    p, q = distributions(logits, draft, draft_logits, temperature, top_k, top_p, allowed)
    chance, weights = standard(p, q, draft)
    kept = leading(uniform(stream(seed, position, "accept"), position, draft.shape[1]) <= chance)
    return emit(draft, kept, _follow(weights, p, kept, seed, position))


@BLOCK.law
def accept_block(draft, logits, draft_logits, temperature, top_k, top_p, seed, position, allowed=None, *, num):
    """Keep drafts up to the last whose joint test succeeds."""
    p, q = distributions(logits, draft, draft_logits, temperature, top_k, top_p, allowed)
    h, weights = block(p, q, draft)
    good = uniform(stream(seed, position, "accept"), position, draft.shape[1]) <= h
    kept = (good * torch.arange(1, draft.shape[1] + 1, device=draft.device)).amax(-1)
    return emit(draft, kept, _follow(weights, p, kept, seed, position))


@SYNTHETIC.law
def accept_synthetic(draft, target, seed, position, *, rates, num):
    """For benches: keep draft i with chance rates[i] whatever it says (padding excepted), then the target's token."""
    u = uniform(stream(seed, position, "accept"), position, draft.shape[1])
    kept = leading((u <= torch.tensor(rates, dtype=u.dtype, device=u.device)) & (draft >= 0))
    return emit(draft, kept, target.unflatten(0, (len(draft), -1)).gather(1, kept[:, None])[:, 0])


END = Stage(
    "verify.end",
    "10.3",
    axes=dict(R="requests", F="tokens per request"),
    tensors=(
        index("limit", "R", i32),
        activation("tokens", "R F", i64, mutated=True),
        activation("count", "R", i32, mutated=True),
    ),
)


@END.law
def end(limit, tokens, count, *, num):
    """Keep at most limit [R] tokens: a structured output that a draft completes goes on with nothing. What was drawn
    behind is dropped, after the rule has judged all drafts, so that the distribution of the others stays."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    return dict(tokens=torch.where(at < limit[:, None], tokens, -1), count=torch.minimum(count, limit))


def synthetic_rate(mean: float, drafts: int) -> float:
    """The equal chance per draft under which 1 + kept drafts have this mean: solves sum_{i<=S} a^i = mean."""
    if not 1 <= mean <= drafts + 1:
        raise ValueError(f"mean accepted length {mean} with {drafts} drafts: allowed are 1..{drafts + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(drafts + 1)) < mean else (low, a)
    return high
