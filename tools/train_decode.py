"""One decode step of a trained model with caches, token by token: for the generation check after training."""

from itertools import pairwise

import torch
from torch import Tensor

from .train_model import HALO, Mini, gated_output, kda_inputs, mla_inputs, normed, up


class Decoder:
    """Recurrent states and caches of `batch` sequences of at most `length` tokens. Weights are taken once.

    step(tokens [B]) -> logits [B, vocab] for the tokens at the next position. Works in place without waiting for the
    device, so a step can be captured into a CUDA graph.
    """

    def __init__(self, model: Mini, batch: int, length: int):
        cfg, self.model = model.cfg, model
        self.w = {
            k: v.detach() if isinstance(v, Tensor) else [t.detach() for t in v] for k, v in model.weights().items()
        }
        like = self.w["embed_tokens.weight"]
        wide = up(like).dtype
        self.pos = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.slots = torch.arange(length, device=like.device)
        self.states = []
        for l in range(cfg.layers):
            if cfg.is_mla(l):
                shapes = [((batch, length, cfg.heads, d), like.dtype) for d in (cfg.q_dim, cfg.v_dim)]
            else:
                state = ((batch, cfg.heads, cfg.kda_dim, cfg.kda_dim), wide)
                shapes = [((batch, HALO, 3 * cfg.kda_width), like.dtype), state]
            self.states.append([torch.zeros(s, dtype=d, device=like.device) for s, d in shapes])
        self.kda = {l: model.kda_weights(self.w, l) for l in range(cfg.layers) if not cfg.is_mla(l)}

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        w = self.w
        h, _ = self.model.layers(w, self.model.embed(w, tokens), self._attend)
        self.pos += 1
        return up(normed(h, w["norm.weight"], self.model.cfg.eps) @ w["lm_head.weight"].T)

    def _attend(self, w: dict, l: int, x: Tensor) -> Tensor:
        return self._mla(w, l, x) if self.model.cfg.is_mla(l) else self._kda(l, x)

    def _kda(self, l: int, x: Tensor) -> Tensor:
        cfg, (halo, S), C = self.model.cfg, self.states[l], self.model.cfg.kda_width
        w_in, conv, gates, (o_norm, w_o) = self.kda[l]
        proj = (x @ w_in.T).unsqueeze(1)
        q, k, v, log_decay, beta = (t.squeeze(2) for t in kda_inputs(proj, halo, conv, *gates, cfg))
        halo.copy_(torch.cat([halo[:, 1:], proj[..., : 3 * C]], 1))
        S.mul_(log_decay.exp().unsqueeze(-1))  # [B, H, K, V]
        u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ S).squeeze(-2))
        S.add_(k.unsqueeze(-1) * u.unsqueeze(-2))
        o = (q.unsqueeze(-2) @ S).squeeze(-2)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + cfg.eps) * o_norm
        return gated_output(o.flatten(1), proj[:, 0, 3 * C : 4 * C], w_o)

    def _mla(self, w: dict, l: int, x: Tensor) -> Tensor:
        cfg, (keys, values) = self.model.cfg, self.states[l]
        inputs, w_o = self.model.mla_weights(w, l)
        q, k, v, gate = mla_inputs(x, inputs, cfg)
        keys.index_copy_(1, self.pos, k.unsqueeze(1))
        values.index_copy_(1, self.pos, v.unsqueeze(1))
        scores = up(torch.einsum("bhd,bthd->bht", q, keys)) * cfg.softmax_scale
        a = scores.masked_fill(self.slots > self.pos, float("-inf")).softmax(-1)
        o = torch.einsum("bht,bthd->bhd", a.to(values.dtype), values)
        return gated_output(o.flatten(1), gate, w_o)


def continuations(model: Mini, prompts: list[bytes], tokens: int, *, graph: bool) -> list[list[int]]:
    """Greedy continuations of `tokens` tokens each, after [bos] + prompt. graph: capture the step on the device."""
    cfg, device = model.cfg, model.bias.device
    longest = 1 + max(map(len, prompts))
    total = longest + tokens
    given = torch.full((total, len(prompts)), -1, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        given[: 1 + len(prompt), i] = torch.tensor([cfg.bos, *prompt])
    given = given.to(device)
    made, last = torch.zeros_like(given), torch.zeros_like(given[0])
    decoder = Decoder(model, len(prompts), total)

    def advance():
        forced = given.index_select(0, decoder.pos)[0]
        token = torch.where(forced >= 0, forced, last)
        made.index_copy_(0, decoder.pos, token.unsqueeze(0))
        last.copy_(decoder.step(token).argmax(-1))

    steps = total
    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                advance()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            advance()
        advance, steps = captured.replay, total - 3
    for _ in range(steps):
        advance()
    rows = made.T.tolist()
    return [row[1 + len(p) : 1 + len(p) + tokens] for row, p in zip(rows, prompts, strict=True)]


def diversity(tokens: list[int]) -> dict:
    """How varied a continuation is: distinct tokens, longest run of one token, share of distinct 8-grams."""
    run = longest = 1
    for a, b in pairwise(tokens):
        run = run + 1 if a == b else 1
        longest = max(longest, run)
    grams = {tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)}
    return {"distinct_tokens": len(set(tokens)), "longest_run": longest, "distinct_8grams": len(grams)}
