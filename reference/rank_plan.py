"""The plan of one of several ranks: the plan of a smaller model, with collectives put between its steps.

The order of the model is written once, in plan.py; here each stage that needs other ranks is followed, preceded or
replaced. References in the spaces "tp" and "dcp" mean the named buffer of every rank of that group, in rank order.
Source: SPEC.md 3, 5.7, 8.5, 8.6, 9, 11.
"""

from collections.abc import Mapping
from dataclasses import replace

from . import comm, dcp, rank_stages
from .config import Config
from .plan import Plan, Ref, Step, act, plan
from .shard import Seat, rank_config
from .stage import bf16, f32, i32


def rank_plan(config: Config, tokens: int, seat: Seat, *, prefill: bool, masked: bool) -> Plan:
    """The steps of one rank; `config` is the whole model's, that of the plan the rank's. Ranks' steps line up."""
    local = rank_config(config, seat.mesh)
    base = plan(local, tokens, prefill=prefill, masked=masked)
    made = _Rewrite(config, base, seat)
    for step in base.steps:
        made.take(step)
    return replace(base, steps=tuple(made.steps), buffers=made.buffers)


class _Rewrite:
    """Takes the steps of the smaller model one by one and emits those of the rank."""

    def __init__(self, whole: Config, base: Plan, seat: Seat):
        self.whole, self.base, self.seat, self.mesh = whole, base, seat, seat.mesh
        self.tp, self.rank = seat.mesh.tp, seat.rank
        self.steps: list[Step] = []
        self.buffers = dict(base.buffers)
        self.moved: dict[str, str] = {}  # buffer -> the one that other stages read in its stead
        T, c, mesh = base.tokens, base.config, self.mesh
        self.resize("router_logits", (T, whole.experts))
        self.own = -(-T // self.tp) if mesh.sequence else T  # rows whose residuals this rank keeps
        if mesh.sequence:
            for name in ("prefix", "delta", "x", "h", "latent", "latent_normed", "shared", "routed"):
                self.resize(name, (self.own, *self.buffers[name][0][1:]))
            self.resize("blocks", (self.own, c.blocks, c.hidden))
        if mesh.tail == 0:
            self.resize("shared", (T, c.hidden // self.tp))
        if mesh.tail != 1:
            self.resize("routed", (T, c.hidden // self.tp))

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        self.buffers[name] = (shape, self.buffers[name][1])

    def buffer(self, name: str, shape: tuple[int, ...], dtype=bf16) -> str:
        self.buffers[name] = (shape, dtype)
        return name

    def emit(self, layer, stage, attrs: Mapping | None = None, tag: str = "", **bind: Ref) -> None:
        self.steps.append(Step(layer, stage, bind, attrs or {}, tag))

    def take(self, step: Step) -> None:
        bind = {}
        for name, ref in step.bind.items():
            read = not step.stage.by_name[name].written
            moved = self.moved.get(ref.name) if read and ref.space == "act" else None
            bind[name] = replace(ref, name=moved) if moved and not step.stage.name.startswith("attn_res") else ref
        step = replace(step, bind=bind)
        rule = RULES.get(step.stage.name)
        if rule:
            rule(self, step)
        else:
            self.steps.append(step)

    def redirect(self, step: Step, name: str, part: str, shape=None, dtype=bf16) -> Ref:
        """Emit the step with one output in a buffer of partial results; returns where the whole is expected."""
        target = step.bind[name]
        self.buffer(part, shape or self.buffers[target.name][0], dtype)
        self.steps.append(replace(step, bind=step.bind | {name: act(part)}))
        return target

    def reduce(self, layer, part: str, out: Ref) -> None:
        """Partial sums of all ranks -> their sum, by the mesh's rule; in sequence mode the own rows of it."""
        parts, order, tag = Ref("tp", part), dict(accumulate=self.mesh.accumulate), self.steps[-1].stage.name
        if self.mesh.sequence:
            self.emit(layer, comm.REDUCE_SCATTER, order | dict(rank=self.rank, axis=0), tag, parts=parts, out=out)
        elif self.mesh.reduce == "one_shot":
            self.emit(layer, comm.ALL_REDUCE, order, tag, parts=parts, out=out)
        else:
            rows, width = self.buffers[part][0]
            slice_ = self.buffer(f"{part}_slice", (rows, width // self.tp))
            attrs = order | dict(rank=self.rank, axis=1)
            self.emit(layer, comm.REDUCE_SCATTER, attrs, tag, parts=parts, out=act(slice_))
            self.gather(layer, slice_, out, tag, axis=1)

    def gather(self, layer, part: str, out: Ref, tag: str = "", *, axis: int, stage=comm.ALL_GATHER) -> None:
        tag = tag or self.steps[-1].stage.name
        rows = self.base.tokens if axis == 0 else self.buffers[part][0][0]
        self.emit(layer, stage, dict(axis=axis, rows=rows), tag, parts=Ref("tp", part), out=out)

    # What happens to each stage that needs other ranks.

    def embed(self, step: Step) -> None:
        part = self.buffer("prefix_part", (self.base.tokens, self.whole.hidden))
        first = self.rank * self.base.config.vocab
        self.emit(None, rank_stages.EMBED_SHARD, dict(first=first), ids=step.bind["ids"], w=step.bind["w"],
                  out=act(part))  # fmt: skip
        self.reduce(None, part, step.bind["prefix"])

    def row_parallel(self, step: Step) -> None:
        out = self.redirect(step, "out", "part", (self.base.tokens, self.whole.hidden))
        self.reduce(step.layer, "part", out)

    def residual(self, step: Step) -> None:
        """attn_res works on the own rows; everything after it on all rows."""
        self.steps.append(step)
        if self.mesh.sequence:
            out = step.bind["out"]
            whole = self.buffer(f"{out.name}_all", (self.base.tokens, self.whole.hidden))
            self.moved[out.name] = whole
            self.gather(step.layer, out.name, act(whole), axis=0)

    def attention(self, step: Step) -> None:
        if self.mesh.dcp == 1:
            return self.steps.append(step)
        N, c, T, rank = self.mesh.dcp, self.base.config, self.base.tokens, self.seat.dcp_rank
        heads = N * c.heads
        q, o = self.buffer("q_all", (T, heads, c.kv_row)), self.buffer("o_all", (T, heads, c.kv_lora))
        lse = self.buffer("lse_all", (T, heads), f32)
        self.emit(step.layer, dcp.GATHER_HEADS, parts=Ref("dcp", "q_lat"), q_lat=act(q))
        bind = step.bind | dict(q_lat=act(q), o_lat=act(o), lse=act(lse))
        self.steps.append(replace(step, bind=bind))
        if self.mesh.lse_base == "2":
            natural, lse = lse, self.buffer("lse_2", (T, heads), f32)
            self.emit(step.layer, dcp.TO_BASE_2, lse=act(natural), lse_2=act(lse))
        attrs, home = dict(base=self.mesh.lse_base, rank=rank), {k: step.bind[k] for k in ("o_lat", "lse")}
        if self.mesh.home == "all_to_all":
            return self.emit(step.layer, dcp.MERGE, attrs, parts=Ref("dcp", o), lses=Ref("dcp", lse), **home)
        part = self.buffer("o_weighted", (T, heads, c.kv_lora))
        self.emit(step.layer, dcp.WEIGH, attrs, o=act(o), lses=Ref("dcp", lse), out=act(part), lse=home["lse"])
        attrs = dict(accumulate=self.mesh.accumulate, rank=rank)
        return self.emit(step.layer, dcp.SCATTER_HEADS, attrs, parts=Ref("dcp", part), o_lat=home["o_lat"])

    def router(self, step: Step) -> None:
        if not self.mesh.split_router:
            return self.steps.append(step)
        shape = (self.base.tokens, self.whole.experts // self.tp)
        out = self.redirect(step, "logits", "router_part", shape, f32)
        return self.gather(step.layer, "router_part", out, axis=1, stage=comm.ALL_GATHER_F32)

    def topk(self, step: Step) -> None:
        self.steps.append(step)
        if self.mesh.experts == "tensor":
            return
        shape, count = (self.base.tokens, self.whole.topk), self.base.config.experts
        ids, weights = self.buffer("own_ids", shape, i32), self.buffer("own_weights", shape, f32)
        chosen = {name: step.bind[name] for name in ("ids", "weights")}
        self.emit(step.layer, rank_stages.OWN_EXPERTS, dict(first=self.rank * count, count=count), **chosen,
                  own_ids=act(ids), own_weights=act(weights))  # fmt: skip
        self.moved |= {chosen["ids"].name: ids, chosen["weights"].name: weights}

    def latent_down(self, step: Step) -> None:
        if not self.mesh.split_latent:
            return self.steps.append(step)
        out = self.redirect(step, "out", "z_part", (self.base.tokens, self.whole.latent // self.tp))
        return self.gather(step.layer, "z_part", out, axis=1)

    def finalize(self, step: Step) -> None:
        if self.mesh.finalize == "bf16":
            step = replace(step, stage=rank_stages.FINALIZE_CHAIN)
        out = self.redirect(step, "out", "latent_part", (self.base.tokens, self.whole.latent))
        self.reduce(step.layer, "latent_part", out)

    def latent_norm(self, step: Step) -> None:
        older = self.mesh.tail == 0 and self.mesh.squares == "bf16"
        self.steps.append(replace(step, stage=rank_stages.NORM_SQUARES) if older else step)

    def shared_down(self, step: Step) -> None:
        out = self.redirect(step, "out", "shared_part", (self.base.tokens, self.whole.hidden))
        if self.mesh.tail == 1:
            self.reduce(step.layer, "shared_part", out)
        elif self.mesh.tail == 0:
            attrs = dict(accumulate=self.mesh.accumulate, rank=self.rank, axis=1)
            tag, parts = step.stage.name, Ref("tp", "shared_part")
            self.emit(step.layer, comm.REDUCE_SCATTER, attrs, tag, parts=parts, out=out)

    def combine(self, step: Step) -> None:
        out, T = step.bind["out"], self.base.tokens
        if self.mesh.tail == 1:
            self.steps.append(step)
        elif self.mesh.tail == 0:
            self.redirect(step, "out", "delta_slice", (T, self.whole.hidden // self.tp))
            self.gather(step.layer, "delta_slice", out, axis=1)
        else:
            part = self.buffer("part", (T, self.whole.hidden))
            self.emit(step.layer, rank_stages.FOLD, dict(rank=self.rank), routed=step.bind["routed"],
                      shared=act("shared_part"), out=act(part))  # fmt: skip
            self.reduce(step.layer, part, out)

    def logits(self, step: Step) -> None:
        rows = self.buffers["normed"][0][0]
        out = self.redirect(step, "out", "vocab_part", (rows, self.base.config.vocab))
        self.resize(out.name, (rows, self.whole.vocab))
        self.gather(None, "vocab_part", out, axis=1)


RULES = {
    "embed": _Rewrite.embed, "kda.o_proj": _Rewrite.row_parallel, "mla.o_proj": _Rewrite.row_parallel,
    "mlp.down": _Rewrite.row_parallel, "attn_res.pre": _Rewrite.residual, "attn_res.post": _Rewrite.residual,
    "attn_res.final": _Rewrite.residual, "mla.attention": _Rewrite.attention,
    "mla.attention_fp8": _Rewrite.attention, "moe.router": _Rewrite.router,
    "moe.topk": _Rewrite.topk, "moe.latent_down": _Rewrite.latent_down, "moe.finalize": _Rewrite.finalize,
    "moe.latent_norm": _Rewrite.latent_norm, "moe.shared_down": _Rewrite.shared_down,
    "moe.combine": _Rewrite.combine, "head.logits": _Rewrite.logits,
}  # fmt: skip
