"""DSpark's draft model: context from the target's taps, a block of masked tokens, the Markov correction.

Five MLA layers with rotation, pre-norm residuals and a SiLU MLP. Positions: L rows are in the caches, the anchor (the
last sampled token) stands at L and the drafts at L + 1 .. L + 7. Source: SPEC.md 10.1, 10.2.
"""

from dataclasses import replace
from functools import cache

import torch
from torch.nn.functional import silu

from . import embed, head, mla
from .draft_config import DraftConfig
from .linear import linear_stage, project, rms_norm
from .plan import Plan, Ref, Step, act, ix
from .sample import sample
from .stage import Stage, activation, bf16, f32, i64, index, output, weight
from .verify import stream

ROWS = dict(T="rows", D="hidden size")
TAP = Stage(
    "draft.tap",
    "10.1",
    axes=ROWS,
    tensors=(activation("prefix", "T D"), activation("delta", "T D"), output("out", "T D", strides="rows")),
    flops=lambda d, attrs: d["T"] * d["D"],
)


@TAP.law
def tap(prefix, delta, *, num):
    """The block-partial residual sum after a layer, its MLP output included: what the next layer will add up, too."""
    return dict(out=num.round(num.up(prefix) + num.up(delta)))


CONTEXT_PROJ = linear_stage("draft.context_proj", "10.2")
Q_A, KV_A, Q_B = (linear_stage(f"draft.{name}", "10.1") for name in ("q_a", "kv_a", "q_b"))
O_PROJ, DOWN = (linear_stage(f"draft.{name}", "10.1") for name in ("o_proj", "down"))
NORM = Stage(
    "draft.norm",
    "10.1",
    axes=ROWS,
    tensors=(activation("x", "T D", strides="rows"), weight("w_norm", "D"), output("out", "T D")),
    attrs=dict(eps="1e-5"),
    flops=lambda d, attrs: 4 * d["T"] * d["D"],
)


@NORM.law
def norm(x, w_norm, *, eps, num):
    return dict(out=num.round(rms_norm(num.up(x), w_norm, eps, num)))


ADD_NORM = Stage(
    "draft.add_norm",
    "10.1",
    axes=ROWS,
    tensors=(
        activation("hidden", "T D", mutated=True),
        activation("delta", "T D"),
        weight("w_norm", "D"),
        output("out", "T D"),
    ),
    attrs=dict(eps="1e-5"),
    flops=lambda d, attrs: 5 * d["T"] * d["D"],
)


@ADD_NORM.law
def add_norm(hidden, delta, w_norm, *, eps, num):
    """The residual sum, rounded, and its norm."""
    h = num.round(num.up(hidden) + num.up(delta))
    return dict(hidden=h, out=num.round(rms_norm(num.up(h), w_norm, eps, num)))


ROTATE = Stage(
    "draft.rotate",
    "10.1",
    axes=dict(T="rows", Y="heads * width"),
    tensors=(activation("x", "T Y", strides="rows"), index("position", "T", i64), output("out", "T Y")),
    attrs=dict(width="of a head, whose last dimensions rotate", frequencies="radians per position of each pair"),
    flops=lambda d, attrs: 3 * d["T"] * d["Y"],
)


@ROTATE.law
def rotate(x, position, *, width, frequencies, num):
    """Rotate the last 2 * len(frequencies) dims of every head, pairs interleaved (2i, 2i + 1). Angles are float64."""
    angle = position.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64, device=x.device)
    cos, sin = num.up(angle.cos())[:, None], num.up(angle.sin())[:, None]  # [T, 1, pairs]
    still, turned = x.unflatten(-1, (-1, width)).split([width - 2 * len(frequencies), 2 * len(frequencies)], dim=-1)
    a, b = num.up(turned).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return dict(out=torch.cat([still, num.round(turned).to(x.dtype)], dim=-1).flatten(1))


GATE_UP = Stage(
    "draft.gate_up",
    "10.1",
    axes=dict(T="rows", D="input features", G="2I", I="inner width"),
    tensors=(activation("x", "T D"), weight("w", "G D"), output("out", "T I")),
    flops=lambda d, attrs: 2 * d["T"] * d["G"] * d["D"],
)


@GATE_UP.law
def gate_up(x, w, *, num):
    """silu(gate) * up, gate rows first."""
    gate, up = num.chain(project(x, w, num)).chunk(2, dim=-1)
    return dict(out=num.round(silu(gate) * up))


MARKOV = Stage(
    "draft.markov",
    "10.2",
    axes=dict(T="R * K", N="vocabulary", R="requests", K="drafted tokens", P="Markov rank"),
    tensors=(
        activation("base", "T N"),
        weight("w1", "N P"),
        weight("w2", "N P"),
        index("anchor", "R", i64),
        index("temperature", "R", f32),
        index("seed", "R", i64),
        index("position", "R", i64),
        output("draft", "R K", i64),
        output("draft_logits", "T N", f32),
    ),
    attrs=dict(replay="True: the noise of `sample` at the token's position; False: noise of this block alone"),
    flops=lambda d, attrs: 2 * d["T"] * d["N"] * d["P"],
)


@MARKOV.law
def markov(base, w1, w2, anchor, temperature, seed, position, *, replay, num):
    """base [R * K, N]: logits_k = base_k + W2 W1[token before]; position [R] is that of the first drafted token."""
    seed = seed if replay else stream(seed, position, "draft")
    off, one = torch.zeros_like(seed, dtype=torch.int32), torch.ones_like(temperature)
    token, tokens, logits = anchor, [], []
    for k, row in enumerate(num.up(base).unflatten(0, (len(anchor), -1)).unbind(1)):
        z = row + num.chain(project(w1[token], w2, num))
        token = sample(z, temperature, off, one, seed, position + k, num=num)["tokens"]
        tokens.append(token)
        logits.append(z)
    return dict(draft=torch.stack(tokens, 1), draft_logits=torch.stack(logits, 1).flatten(0, 1))


@cache
def tapped(made: Plan, taps: tuple[int, ...]) -> Plan:
    """A target plan that also leaves its tapped sums [T, taps * D] in buffer "taps"."""
    D, steps = made.config.hidden, []
    last = {s.layer: i for i, s in enumerate(made.steps)}
    for i, step in enumerate(made.steps):
        steps.append(step)
        for n, layer in enumerate(taps):
            if last[layer] == i:
                bind = dict(prefix=act("prefix"), delta=act("delta"), out=act("taps", cols=(n * D, n * D + D)))
                steps.append(Step(layer, TAP, bind, {}))
    buffers = dict(made.buffers) | dict(taps=((made.tokens, len(taps) * D), bf16))
    return replace(made, steps=tuple(steps), buffers=buffers)


class _Build:
    """Steps of a draft plan; weights and caches by the draft layer's number."""

    def __init__(self, config: DraftConfig):
        self.c, self.steps = config, []

    def add(self, layer, stage, attrs=None, **bind):
        self.steps.append(Step(layer, stage, bind, attrs or {}))

    def w(self, name, layer=None):
        return Ref("weight", f"draft.{name}", layer)

    def rows(self, layer: int, x: str) -> None:
        """Latent rows of x into the layer's cache."""
        c, L = self.c, self.c.kv_lora
        kv = lambda a, b: act("kv", cols=(a, b))  # noqa: E731
        self.add(layer, KV_A, x=act(x), w=self.w("kv_a", layer), out=act("kv"))
        self.add(layer, NORM, dict(eps=c.eps), x=kv(0, L), w_norm=self.w("w_kv_norm", layer), out=act("kv_c"))
        self.add(layer, ROTATE, dict(width=c.rope, frequencies=c.frequencies()), x=kv(L, c.kv_row),
                 position=ix("position"), out=act("k_pe"))  # fmt: skip
        self.add(layer, mla.CACHE_WRITE, kv_c=act("kv_c"), k_pe=act("k_pe"), slot_mapping=ix("slot_mapping"),
                 cache=Ref("state", "draft_cache", layer))  # fmt: skip

    def layer(self, i: int) -> None:
        """Attention over context and block, then the MLP; leaves the MLP's output in "delta"."""
        c, eps = self.c, dict(eps=self.c.eps)
        first = dict(x=act("prefix")) if i == 0 else dict(hidden=act("prefix"), delta=act("delta"))
        self.add(i, ADD_NORM if i else NORM, eps, w_norm=self.w("w_in", i), out=act("x"), **first)
        self.rows(i, "x")
        self.add(i, Q_A, x=act("x"), w=self.w("q_a", i), out=act("q_a"))
        self.add(i, NORM, eps, x=act("q_a"), w_norm=self.w("w_q_norm", i), out=act("q_c"))
        self.add(i, Q_B, x=act("q_c"), w=self.w("q_b", i), out=act("q_heads"))
        self.add(i, ROTATE, dict(width=c.q_dim, frequencies=c.frequencies()), x=act("q_heads"),
                 position=ix("position"), out=act("q_turned"))  # fmt: skip
        self.add(i, mla.ABSORB, q=act("q_turned"), w_uk=self.w("w_uk", i), q_lat=act("q_lat"))
        self.add(i, mla.ATTENTION, dict(scale=c.softmax_scale), q_lat=act("q_lat"), block_table=ix("block_table"),
                 lens=ix("lens"), cache=Ref("state", "draft_cache", i), o_lat=act("o_lat"), lse=act("lse"))  # fmt: skip
        self.add(i, mla.V_UP, o_lat=act("o_lat"), w_uv=self.w("w_uv", i), v=act("v_heads"))
        self.add(i, O_PROJ, x=act("v_heads"), w=self.w("o_proj", i), out=act("delta"))
        self.add(i, ADD_NORM, eps, hidden=act("prefix"), delta=act("delta"), w_norm=self.w("w_post", i), out=act("x"))
        self.add(i, GATE_UP, x=act("x"), w=self.w("gate_up", i), out=act("inner"))
        self.add(i, DOWN, x=act("inner"), w=self.w("down", i), out=act("delta"))


def _rows_buffers(c: DraftConfig, T: int) -> dict:
    shapes = dict(kv=(T, c.kv_row), kv_c=(T, c.kv_lora), k_pe=(T, c.rope))
    return {name: (shape, bf16) for name, shape in shapes.items()}


@cache
def context_plan(config: DraftConfig, tokens: int) -> Plan:
    """From index "taps" [T, taps * D] to rows of every draft cache. Rows at slot_mapping 0 are written nowhere."""
    b, D = _Build(config), config.hidden
    b.add(None, CONTEXT_PROJ, x=ix("taps"), w=b.w("context_proj"), out=act("projected"))
    b.add(None, NORM, dict(eps=config.eps), x=act("projected"), w_norm=b.w("context_norm"), out=act("context"))
    for i in range(config.layers):
        b.rows(i, "context")
    buffers = dict(projected=((tokens, D), bf16), context=((tokens, D), bf16)) | _rows_buffers(config, tokens)
    return Plan(config, tokens, False, tuple(b.steps), buffers)


@cache
def block_plan(config: DraftConfig, requests: int, *, replay: bool) -> Plan:
    """One draft step: [anchor, mask, ..] of every request -> draft [R, block] and draft_logits [R * block, N].

    The block's own rows go to positions L .. L + block - 1 of the caches, where the next context overwrites them; all
    of them are seen by every query, so that lens is L + block throughout.
    """
    b, c, T = _Build(config), config, requests * config.block
    b.add(None, embed.EMBED, ids=ix("ids"), w=Ref("weight", "embed.w"), prefix=act("prefix"))
    for i in range(c.layers):
        b.layer(i)
    b.add(None, ADD_NORM, dict(eps=c.eps), hidden=act("prefix"), delta=act("delta"), w_norm=b.w("final_norm"),
          out=act("x"))  # fmt: skip
    b.add(None, head.LOGITS, x=act("x"), w=Ref("weight", "head.logits.w"), out=act("base"))
    columns = {name: ix(name) for name in ("anchor", "temperature", "seed")}
    b.add(None, MARKOV, dict(replay=replay), base=act("base"), w1=b.w("w1"), w2=b.w("w2"), position=ix("first"),
          draft=act("draft"), draft_logits=act("draft_logits"), **columns)  # fmt: skip
    D, H = c.hidden, c.heads
    shapes = dict(prefix=(T, D), delta=(T, D), x=(T, D), q_a=(T, c.q_lora), q_c=(T, c.q_lora), inner=(T, c.inter),
                  q_heads=(T, H * c.q_dim), q_turned=(T, H * c.q_dim), q_lat=(T, H, c.kv_row),
                  o_lat=(T, H, c.kv_lora), v_heads=(T, H * c.v_dim), base=(T, c.vocab))  # fmt: skip
    buffers = {name: (shape, bf16) for name, shape in shapes.items()} | _rows_buffers(c, T)
    buffers |= dict(lse=((T, H), f32), draft=((requests, c.block), i64), draft_logits=((T, c.vocab), f32))
    return Plan(config, T, False, tuple(b.steps), buffers)
