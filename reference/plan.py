"""A decode step is data: the ordered steps of the model, and which named buffer feeds which argument.

Every runner walks this list; nobody writes the order of the model a second time. Source: SPEC.md 2 and 4.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import attn_res, embed, head, kda, mla, mlp, moe, sample
from . import kda_prefill as kda_prefill  # registers the prefill laws
from .config import Config
from .numerics import Numerics
from .shard import Seat
from .stage import ContractError, Stage, bf16, f32, i32, i64


@dataclass(frozen=True)
class Ref:
    """Where an argument comes from: a buffer of the step, a weight, a state tensor or an index tensor.

    cols: columns of a 2-D buffer; rows: the last n rows of it. Space "tp" or "dcp": the buffer of every rank of the
    group, stacked in rank order, which only a world can resolve.
    """

    space: str  # "act", "weight", "state", "index"; "tp", "dcp"
    name: str
    layer: int | None = None
    cols: tuple[int, int] | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Step:
    """One stage at one place of the model. `key` names it in reports, e.g. "07.kda.conv"; some have no layer.

    tag tells apart stages that occur several times in a layer: collectives carry the name of the stage they complete.
    """

    layer: int | None
    stage: Stage
    bind: Mapping[str, Ref]
    attrs: Mapping
    tag: str = ""

    @property
    def key(self) -> str:
        name = f"{self.stage.name}.{self.tag}" if self.tag else self.stage.name
        return name if self.layer is None else f"{self.layer:02d}.{name}"


@dataclass(frozen=True, eq=False)  # one object per (config, tokens, kind): identity is equality
class Plan:
    config: Config
    tokens: int
    prefill: bool
    steps: tuple[Step, ...]
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def act(name, cols=None, rows=None):
    return Ref("act", name, cols=cols, rows=rows)


def ix(name):
    return Ref("index", name)


@cache
def plan(
    config: Config, tokens: int, *, prefill: bool = False, masked: bool = False, world: Seat | None = None
) -> Plan:
    """The steps of one decode step (`tokens` rows, one per request) or of a prefill (`tokens` tokens of one request).

    masked: the step takes an `allowed` mask over the vocabulary (structured output). world: the plan of one rank of
    several, with collectives in it.
    """
    if tokens < 1:
        raise ValueError(f"plan for {tokens} tokens: allowed are 1 and more")
    if world is not None:
        from .rank_plan import rank_plan  # it rewrites what this function makes

        return rank_plan(config, tokens, world, prefill=prefill, masked=masked)
    c, steps = config, []

    def add(layer, stage, attrs=None, **bind):
        steps.append(Step(layer, stage, {k: r for k, r in bind.items() if r is not None}, attrs or {}))

    add(None, embed.EMBED, ids=ix("ids"), w=Ref("weight", "embed.w"), prefix=act("prefix"))
    for layer in range(c.layers):
        _layer(c, layer, add)
    w = lambda name: Ref("weight", name)  # noqa: E731
    add(None, attn_res.FINAL, dict(nb=c.blocks, write=-1), prefix=act("prefix"), blocks=act("blocks"), out=act("x"),
        delta=act("delta"), w_norm=w("attn_res.final.w_norm"), w_proj=w("attn_res.final.w_proj"))  # fmt: skip
    rows = 1 if prefill else None
    add(None, head.NORM, x=act("x", rows=rows), w_norm=w("head.w_norm"), out=act("normed"))
    add(None, head.LOGITS, x=act("normed"), w=w("head.logits.w"), out=act("vocab_logits"))
    sampling = {name: ix(name) for name in ("temperature", "top_k", "top_p", "seed", "position")}
    allowed = ix("allowed") if masked else None
    add(None, sample.SAMPLE, logits=act("vocab_logits"), allowed=allowed, tokens=act("tokens"), **sampling)
    return Plan(c, tokens, prefill, tuple(steps), _buffers(c, tokens, 1 if prefill else tokens))


def _layer(c: Config, layer: int, add) -> None:
    w = lambda name: Ref("weight", name, layer)  # noqa: E731
    write = layer % c.block == 0
    nb = -(-layer // c.block)
    norms = lambda which: {k: w(f"attn_res.{which}.{k}") for k in ("w_norm", "w_proj", "w_out")}  # noqa: E731
    add(layer, attn_res.PRE, dict(nb=nb, write=layer // c.block if write else -1), prefix=act("prefix"),
        blocks=act("blocks"), delta=act("delta") if layer else None, out=act("x"), **norms("pre"))  # fmt: skip
    # At a write layer the running sum restarts: the attention output is the new prefix (SPEC.md 4.2).
    attended = act("prefix" if write else "delta")
    (_mla if c.is_mla(layer) else _kda)(c, layer, add, w, attended)
    add(layer, attn_res.POST, dict(nb=nb + write, write=-1), prefix=act("prefix"), blocks=act("blocks"),
        delta=None if write else act("delta"), out=act("h"), **norms("post"))  # fmt: skip
    (_dense if c.is_dense(layer) else _moe)(c, layer, add, w)


def _kda(c: Config, layer: int, add, w, out: Ref) -> None:
    C, H = c.kda_width, c.heads
    proj = lambda a, b: act("proj", cols=(a, b))  # noqa: E731
    slots, state = ix("slots"), lambda name: Ref("state", name, layer)
    add(layer, kda.IN_PROJ, x=act("x"), w=w("kda.in_proj.w"), out=act("proj"))
    add(layer, kda.GATE_PROJ, x=proj(4 * C, 4 * C + 128), w=w("kda.gate_proj.w"), out=act("raw_g"))
    add(layer, kda.CONV, x=proj(0, 3 * C), conv_weight=w("kda.conv_weight"), slots=slots, conv=state("conv"),
        q=act("q"), k=act("k"), v=act("v"))  # fmt: skip
    recurrence = kda.RECURRENCE_BF16 if c.kda_state == "bf16" else kda.RECURRENCE
    add(layer, recurrence, q=act("q"), k=act("k"), v=act("v"), raw_g=act("raw_g"),
        b=proj(4 * C + 128, 4 * C + 128 + H), A_log=w("kda.A_log"), dt_bias=w("kda.dt_bias"), slots=slots,
        recurrent=state("recurrent"), o=act("o"))  # fmt: skip
    add(layer, kda.OUT_NORM, o=act("o"), gate=proj(3 * C, 4 * C), w_o_norm=w("kda.w_o_norm"), out=act("heads"))
    add(layer, kda.O_PROJ, x=act("heads"), w=w("kda.o_proj.w"), out=out)


def _mla(c: Config, layer: int, add, w, out: Ref) -> None:
    Q, L, cache = c.q_lora, c.kv_lora, Ref("state", "cache", layer)
    qkv = lambda a, b: act("qkv", cols=(a, b))  # noqa: E731
    add(layer, mla.QKV_A, x=act("x"), w=w("mla.qkv_a.w"), out=act("qkv"))
    add(layer, mla.LORA_NORM, dict(eps=c.lora_eps), q_a=qkv(0, Q), kv_a=qkv(Q, Q + L), w_q_norm=w("mla.w_q_norm"),
        w_kv_norm=w("mla.w_kv_norm"), q_c=act("q_c"), kv_c=act("kv_c"))  # fmt: skip
    add(layer, mla.Q_B, x=act("q_c"), w=w("mla.q_b.w"), out=act("q_heads"))
    add(layer, mla.ABSORB, q=act("q_heads"), w_uk=w("mla.w_uk"), q_lat=act("q_lat"))
    write, attend, scales, both = mla.CACHE_WRITE, mla.ATTENTION, {}, {}
    if c.mla_cache == "fp8":
        write, attend, scales = mla.CACHE_WRITE_FP8, mla.ATTENTION_FP8, dict(cache_scale=w("mla.cache_scale"))
        both = scales | dict(query_scale=w("mla.query_scale"))
    add(layer, write, kv_c=act("kv_c"), k_pe=qkv(Q + L, Q + c.kv_row), slot_mapping=ix("slot_mapping"), cache=cache,
        **scales)  # fmt: skip
    add(layer, attend, dict(scale=c.softmax_scale), q_lat=act("q_lat"), block_table=ix("block_table"),
        lens=ix("lens"), cache=cache, o_lat=act("o_lat"), lse=act("lse"), **both)  # fmt: skip
    add(layer, mla.V_UP, o_lat=act("o_lat"), w_uv=w("mla.w_uv"), v=act("v_heads"))
    add(layer, mla.GATE_PROJ, x=act("x"), w=w("mla.gate_proj.w"), out=act("gate"))
    add(layer, mla.OUT_GATE, v=act("v_heads"), gate=act("gate"), out=act("heads"))
    add(layer, mla.O_PROJ, x=act("heads"), w=w("mla.o_proj.w"), out=out)


def _dense(c: Config, layer: int, add, w) -> None:
    add(layer, mlp.GATE_UP, x=act("h"), w=w("mlp.gate_up.w"), out=act("inner"))
    add(layer, mlp.DOWN, x=act("inner"), w=w("mlp.down.w"), out=act("delta"))


def _moe(c: Config, layer: int, add, w) -> None:
    ids = act("expert_ids")
    add(layer, moe.ROUTER, x=act("h"), w=w("moe.router.w"), logits=act("router_logits"))
    add(layer, moe.TOPK, dict(topk=c.topk), logits=act("router_logits"), bias=w("moe.bias"), ids=ids,
        weights=act("expert_weights"))  # fmt: skip
    add(layer, moe.LATENT_DOWN, x=act("h"), w=w("moe.latent_down.w"), out=act("z"))
    add(layer, moe.EXPERTS_UP, z=act("z"), ids=ids, w13=w("moe.w13"), w13_scale=w("moe.w13_scale"), m=act("m"))
    add(layer, moe.EXPERTS_DOWN, m=act("m"), ids=ids, w2=w("moe.w2"), w2_scale=w("moe.w2_scale"), y=act("y"))
    add(layer, moe.FINALIZE, y=act("y"), weights=act("expert_weights"), out=act("latent"))
    add(layer, moe.LATENT_NORM, x=act("latent"), w_latent_norm=w("moe.w_latent_norm"), out=act("latent_normed"))
    add(layer, moe.SHARED_UP, x=act("h"), w=w("moe.shared_up.w"), out=act("shared_inner"))
    add(layer, moe.SHARED_DOWN, x=act("shared_inner"), w=w("moe.shared_down.w"), out=act("shared"))
    add(layer, moe.LATENT_UP, x=act("latent_normed"), w=w("moe.latent_up.w"), routed=act("routed"))
    add(layer, moe.COMBINE, routed=act("routed"), shared=act("shared"), out=act("delta"))


def _buffers(c: Config, T: int, R: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    D, C, H, A = c.hidden, c.kda_width, c.heads, c.topk
    bf = dict(
        prefix=(T, D), blocks=(T, c.blocks, D), delta=(T, D), x=(T, D), h=(T, D), heads=(T, C),
        proj=(T, c.in_proj_width), raw_g=(T, C),
        qkv=(T, c.q_lora + c.kv_row), q_c=(T, c.q_lora), kv_c=(T, c.kv_lora), q_heads=(T, H * c.q_dim),
        q_lat=(T, H, c.kv_row), o_lat=(T, H, c.kv_lora), v_heads=(T, C), gate=(T, C),
        inner=(T, c.dense_inter), z=(T, c.latent), m=(T, A, c.expert_inter), y=(T, A, c.latent), latent=(T, c.latent),
        latent_normed=(T, c.latent), shared_inner=(T, c.shared_inter), shared=(T, D),
        normed=(R, D), vocab_logits=(R, c.vocab),
    )  # fmt: skip
    full = dict(q=(T, H, 128), k=(T, H, 128), v=(T, H, 128), o=(T, H, 128), lse=(T, H), routed=(T, D),
                router_logits=(T, c.experts), expert_weights=(T, A))  # fmt: skip
    table = {name: (shape, bf16) for name, shape in bf.items()} | {name: (shape, f32) for name, shape in full.items()}
    return table | dict(expert_ids=((T, A), i32), tokens=((R,), i64))


class Workspace:
    """The buffers of one plan, and the resolution of its references to tensors.

    weights: (name, layer) -> tensor; state: DecodeState.tensors; index: name -> tensor, replaced before each step.
    """

    def __init__(self, plan: Plan, weights: Mapping, state: Mapping, num: Numerics, device: torch.device | str):
        self.plan, self.weights, self.state, self.num = plan, weights, state, num
        self.index: dict[str, Tensor] = {}
        self.act = {
            name: torch.zeros(shape, dtype=num.storage(dtype), device=device)
            for name, (shape, dtype) in plan.buffers.items()
        }

    def resolve(self, ref: Ref) -> Tensor:
        if ref.space == "act":
            t = self.act[ref.name]
            t = t if ref.cols is None else t[:, ref.cols[0] : ref.cols[1]]
            return t if ref.rows is None else t[-ref.rows :]
        if ref.space == "weight":
            return self.weights[ref.name, ref.layer]
        return self.state[ref.name, ref.layer] if ref.space == "state" else self.index[ref.name]

    def tensors(self, step: Step) -> dict[str, Tensor]:
        """The arguments of a step by name."""
        return {name: self.resolve(ref) for name, ref in step.bind.items()}


def check_weights(made: Plan, weights: Mapping, where: str = "", mesh: str = "") -> None:
    """Hold weights against the buffers of a plan. Raises ContractError naming step, weight, axis and sizes."""
    for step in made.steps:
        dims = {axis: size for axis, size in step.stage.axes.items() if isinstance(size, int)}
        order = sorted(step.bind.items(), key=lambda bound: bound[1].space)  # buffers before weights
        for name, ref in order:
            spec = step.stage.by_name[name]
            if ref.space == "act" and ref.rows is None:
                shape = made.buffers[ref.name][0]
                shape = shape if ref.cols is None else (shape[0], ref.cols[1] - ref.cols[0])
            elif ref.space == "weight":
                t = weights.get((ref.name, ref.layer))
                if t is None:
                    raise ContractError(f"{where}{step.key}: weight {ref.name!r} is missing")
                if t.dtype != spec.dtype or t.ndim != len(spec.axes):
                    found = f"{ref.name} is {t.dtype} with {t.ndim} axes"
                    raise ContractError(f"{where}{step.key}: {found}; allowed is {spec.dtype} with {len(spec.axes)}")
                shape = t.shape
            else:
                continue
            for axis, size in zip(spec.axes, shape, strict=True):
                want = dims.setdefault(axis, size)
                if want != size:
                    found = f"{ref.name} has {axis} = {size}"
                    raise ContractError(f"{where}{step.key}: {found}; allowed{mesh} is {want}")
