"""KDA for training: the chunk form of the delta rule with per-channel decay (SPEC.md 5.5), in plain PyTorch.

Within a chunk of 64 tokens the rule is a unit lower-triangular system; between chunks it is one affine map of the state
per chunk, S' = D*S + R S + Q, so the sequential part costs two kernels per chunk. Decays enter as differences of
cumulative logs. Every exponent is <= 0, except in the 16-token diagonal blocks, which are anchored at their middle: a
log-decay is at least -5, so their exponents stay within +-40 and the masked products within e^80, finite in fp32.
"""

import torch
from torch import Tensor

CHUNK = 64  # tokens per step of the sequential scan
BLOCK = 16  # tokens per diagonal block, the width whose exponents fp32 can hold


def _join(diagonal: Tensor, below: Tensor) -> Tensor:
    """[n, 2m, s, s] diagonal blocks and [n, m, s, s] blocks below them -> [n, m, 2s, 2s] lower block-triangular."""
    d = diagonal.unflatten(1, (-1, 2))
    upper = torch.cat([d[:, :, 0], torch.zeros_like(below)], -1)
    return torch.cat([upper, torch.cat([below, d[:, :, 1]], -1)], -2)


def _scores(rows: list[Tensor], keys: Tensor, G: Tensor, mm: torch.dtype) -> list[Tensor]:
    """For each x of rows: P[i, j] = sum_d x_i[d] keys_j[d] exp(G_i[d] - G_j[d]), meaningful for i >= j.

    rows, keys, G: [n, CHUNK, K], G the inclusive cumulative log-decay. mm: dtype of the products' operands.
    Returns [n, CHUNK, CHUNK] each, zero above the diagonal blocks of width BLOCK.
    """
    count = len(rows)

    def product(left: list[Tensor], right: Tensor) -> Tensor:
        return (torch.cat(left, -2).to(mm) @ right.to(mm).transpose(-1, -2)).to(G.dtype)

    g = G.unflatten(1, (-1, BLOCK))
    anchor = g[:, :, BLOCK // 2 - 1 : BLOCK // 2]
    left = [x.unflatten(1, (-1, BLOCK)) * (g - anchor).exp() for x in rows]
    out = list(product(left, keys.unflatten(1, (-1, BLOCK)) * (anchor - g).exp()).chunk(count, -2))
    width = BLOCK
    while width < CHUNK:
        g = G.unflatten(1, (-1, 2, width))
        edge = g[:, :, 0, -1:]
        left = [x.unflatten(1, (-1, 2, width))[:, :, 1] * (g[:, :, 1] - edge).exp() for x in rows]
        below = product(left, keys.unflatten(1, (-1, 2, width))[:, :, 0] * (edge - g[:, :, 0]).exp())
        out = [_join(d, b) for d, b in zip(out, below.chunk(count, -2), strict=True)]
        width *= 2
    return [o[:, 0] for o in out]


def _invert(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower-triangular a [n, c, c], by block doubling: no intermediate exceeds the result."""
    c = a.shape[-1]
    if c > BLOCK:
        h = c // 2
        first, second = _invert(torch.cat([a[:, :h, :h], a[:, h:, h:]])).chunk(2)
        out = torch.zeros_like(a)
        out[:, :h, :h], out[:, h:, h:] = first, second
        out[:, h:, :h] = -(second @ a[:, h:, :h] @ first)
        return out
    index = torch.arange(c, device=a.device)
    x = torch.eye(c, dtype=a.dtype, device=a.device).expand_as(a)
    width = 1
    while width < c:
        pair = index // (2 * width)
        level = (pair[:, None] == pair) & (index[:, None] // width > index // width)
        x = torch.baddbmm(x, x @ (a * level), x, alpha=-1)
        width *= 2
    return x


class UnitLowerInverse(torch.autograd.Function):
    """X = (I + A)^-1 for strictly lower-triangular A [n, c, c]; dA = -X^T dX X^T below the diagonal."""

    @staticmethod
    def forward(ctx, a):
        x = _invert(a)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        xt = x.transpose(1, 2)
        return (xt @ grad @ xt).neg_().tril_(-1)


class ChunkScan(torch.autograd.Function):
    """States before each chunk: S[0] = 0, S[n+1] = D[n] * S[n] + R[n] @ S[n] + Q[n].

    D [N, b, K, 1], R [N, b, K, K], Q [N, b, K, V] -> S [N, b, K, V]. D stays out of the matrix product, so a decay near
    one is not rounded to the product's precision.
    """

    @staticmethod
    def forward(ctx, D, R, Q):
        S = torch.empty_like(Q)
        S[0].zero_()
        for n in range(len(Q) - 1):
            torch.addcmul(Q[n], D[n], S[n], out=S[n + 1])
            S[n + 1].baddbmm_(R[n], S[n])
        ctx.save_for_backward(D, R, S)
        return S

    @staticmethod
    def backward(ctx, grad):
        D, R, S = ctx.saved_tensors
        grad = grad.contiguous()
        dS = torch.empty_like(grad)
        dS[-1].copy_(grad[-1])
        for n in reversed(range(len(grad) - 1)):
            torch.addcmul(grad[n], D[n], dS[n + 1], out=dS[n])
            dS[n].baddbmm_(R[n].transpose(1, 2), dS[n + 1])
        dQ = torch.cat([dS[1:], torch.zeros_like(dS[:1])])
        dR = (dQ.flatten(0, 1) @ S.flatten(0, 1).transpose(1, 2)).view_as(R)
        return (dQ * S).sum(-1, keepdim=True), dR, dQ


def scores(q: Tensor, k: Tensor, beta: Tensor, G: Tensor, mm: torch.dtype) -> tuple[Tensor, Tensor]:
    """q, k, G [n, CHUNK, K], beta [n, CHUNK, 1] -> A (strictly lower) and M (lower), [n, CHUNK, CHUNK]."""
    kk, qk = _scores([k, q], k, G, mm)
    return (beta * kk).tril(-1), qk.tril()


def chunk_maps(q, k, v, beta, G, X, M):
    """Per chunk: the state map (D, R, Q) and the outputs' two parts, o = own + read @ S.

    q, k, v, G [n, CHUNK, K], beta [n, CHUNK, 1], X, M [n, CHUNK, CHUNK].
    """
    last = G[:, -1:]
    W, U = X @ (beta * k * G.exp()), X @ (beta * v)
    kd = (k * (last - G).exp()).transpose(1, 2)
    return last.exp().transpose(1, 2), -(kd @ W), kd @ U, q * G.exp() - M @ W, M @ U


def kda_chunks(q, k, v, beta, log_decay, mm, run=lambda f: f):
    """The delta rule over whole sequences from a zero state.

    q, k (normalised, q scaled), v, log_decay: [N, b, CHUNK, 128], beta [N, b, CHUNK]; N chunks in order, b = sequences
    times heads. mm: operand dtype of the score products. run: wraps the two pure parts (a compiler, or nothing).
    Returns what the output needs, flat over chunks: own, read [N*b, CHUNK, V], and S [N*b, K, V]; o = own + read @ S.
    """
    N = len(q)
    q, k, v, beta, log_decay = (t.flatten(0, 1) for t in (q, k, v, beta.unsqueeze(-1), log_decay))
    G = log_decay.cumsum(1)
    A, M = run(scores)(q, k, beta, G, mm)
    D, R, Q, read, own = run(chunk_maps)(q, k, v, beta, G, UnitLowerInverse.apply(A), M)
    S = ChunkScan.apply(*(t.unflatten(0, (N, -1)) for t in (D, R, Q)))
    return own, read, S.flatten(0, 1)
