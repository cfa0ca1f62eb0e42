"""A checkpoint of any size through law and twins, one layer at a time, on one device.

Tokens are given, so layers can be the outer loop: the law takes the hidden states of all tokens through a layer, and
its implementations are judged in lockstep on the decoded ones, as `lockstep` does for a whole model. Only one layer's
weights and state are in memory. What enters and leaves a layer is a `recording.Hidden`.

With a mesh, the law still runs the whole layer; judged is what one rank holds of it, in the shapes of production. Where
that rank's plan waits for other ranks, it receives the whole layer's value, as it would after the collective.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from types import SimpleNamespace

import torch
from torch import Tensor

from fast.decoder import Explained
from fast.selection import Implementation, Selection, Unit
from reference.checkpoint import Checkpoint
from reference.config import Config
from reference.decoder import GREEDY, PREFILL_CHUNK, Decoder, Model, sampling_index
from reference.layout import full_name, top_table
from reference.numerics import exact, fused
from reference.plan import Plan, Step, Workspace, plan
from reference.shard import Mesh, Seat, rank_config, shard_layer
from reference.stage import ContractError
from reference.state import DecodeState, Request, step_index
from reference.weights import layer_weights, top_weights
from reference.world import GROUPS

from .arena import ArenaSpace
from .cases import PAGE, aligned
from .judge import Finding, Place
from .lockstep import Lockstep, row_order
from .recording import Hidden, passed
from .report import Result

EMBED, HEAD = "embed", "head"
Piece = int | str  # a layer, or what stands before and after the layers
CARRIED = ("prefix", "delta", "blocks")
AGREEING = 18  # tokens that are prefilled and decoded: a chunk of KDA's and two more
OUT = ("kda.o_proj", "mla.o_proj")  # where the attention of a layer ends
WHOLE = {"embed.shard": "embed", "moe.finalize_chain": "moe.finalize"}  # a rank's stage -> whose value it is a part of


@dataclass
class Serving:
    """Who serves the stages in one lockstep run beside others: a name, and what `FastDecoder` takes."""

    name: str
    selection: Selection | None = None
    extra: Mapping[str, Implementation] | None = None
    findings: list[Finding] = field(default_factory=list)
    served: dict[str, Explained] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)

    def result(self, about: Mapping) -> Result:
        return Result(about, self.findings, list(self.served.values()), self.refused, self.ledger)


def pieces(config: Config, first: int, last: int) -> list[Piece]:
    """The layers first..last, the embedding before layer 0 and the head behind the last one."""
    if not 0 <= first <= last < config.layers:
        raise ContractError(f"layers {first}-{last}; allowed are 0-{config.layers - 1} in rising order")
    return [EMBED] * (first == 0) + list(range(first, last + 1)) + [HEAD] * (last == config.layers - 1)


def piece_plan(config: Config, tokens: int, piece: Piece, *, prefill: bool = False, seat: Seat | None = None) -> Plan:
    """The steps of one piece, and the buffers they use. seat: those of one rank."""
    made = plan(config, tokens, prefill=prefill, world=seat)
    start = next(i for i, s in enumerate(made.steps) if s.layer is not None)
    if isinstance(piece, int):
        steps = [s for s in made.steps if s.layer == piece]
    else:
        steps = [s for i, s in enumerate(made.steps) if s.layer is None and (i < start) == (piece == EMBED)]
    used = {ref.name for s in steps for ref in s.bind.values() if ref.space in ("act", *GROUPS)} | set(CARRIED)
    return replace(made, steps=tuple(steps), buffers={name: b for name, b in made.buffers.items() if name in used})


def piece_weights(checkpoint: Checkpoint, piece: Piece, device, seat: Seat | None = None) -> dict:
    """(name, layer) -> tensor on `device`: the weights of one piece, or what a rank holds of them. Reads no others."""
    whole = checkpoint.config
    if isinstance(piece, int):
        tensors = checkpoint.layer(piece)
    else:
        names = [n for n in top_table(whole) if n.startswith("embed_tokens") == (piece == EMBED)]
        tensors = {n: checkpoint.tensor(full_name(n)) for n in names}
    config = rank_config(whole, seat.mesh) if seat else whole
    if seat:
        tensors = shard_layer(tensors, whole, seat)
    if isinstance(piece, int):
        made = layer_weights(SimpleNamespace(layer=lambda i: tensors), config, piece)
        return {(name, piece): aligned(t.to(device)) for name, t in made.items()}
    absent = {n: next(iter(tensors.values())) for n in top_table(whole) if n not in tensors}
    made = top_weights(SimpleNamespace(top=lambda: tensors | absent), config)
    if piece == EMBED:
        return {("embed.w", None): made["embed.w"].to(device)}
    return {(name, None): aligned(t.to(device)) for name, t in made.items() if name != "embed.w"}


def piece_state(config: Config, piece: Piece, lengths: Sequence[int], device) -> tuple[DecodeState, list[Request]]:
    """The state of one layer, permuted and with spare slots and pages, and a request with its pages for each length."""
    layer = {EMBED: 0, HEAD: config.layers - 1}.get(piece, piece)
    pages = sum(-(-n // PAGE) for n in lengths) + 4
    state = DecodeState(config, slots=len(lengths) + 3, pages=pages, page_size=PAGE, device="meta", order=1)
    state.tensors = {k: torch.zeros_like(t, device=device) for k, t in state.tensors.items() if k[1] == layer}
    requests = [state.open() for _ in lengths]
    state.reserve(*zip(requests, lengths, strict=True))
    return state, requests


class _Fed:
    """A workspace whose collectives receive the whole layer's value as their only part. entering, whole: set before a
    walk; hidden states by name, and the values by the stage that makes them."""

    entering: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]

    def enter(self, entering: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self.whole = whole
        for name, t in entering.items():
            target = self.act[name][:, : t.shape[1]] if name == "blocks" else self.act[name]
            target.copy_(t)

    def tensors(self, step: Step) -> dict[str, Tensor]:
        whole = self.whole.get(WHOLE.get(step.tag, step.tag))
        return {n: whole[None] if ref.space in GROUPS else self.resolve(ref) for n, ref in step.bind.items()}


class FedSpace(_Fed, Workspace):
    pass


class FedArena(_Fed, ArenaSpace):
    pass


class Law(Decoder):
    """The law over one piece, in the mode of its state. keep: stages whose outputs a walk returns, by name."""

    keep: frozenset[str] = frozenset()

    def walk(self, made: Plan, index: dict, entering: Mapping, whole: Mapping = {}) -> tuple[Workspace, dict]:
        space = FedSpace(made, self.model.weights, self.state.tensors, self.num, self.state.device)
        space.index = index
        space.enter(entering, whole)
        kept = {}
        with torch.no_grad():
            for step in made.steps:
                tensors = space.tensors(step)
                self.execute(step, tensors, made)
                if step.stage.name in self.keep:
                    kept[step.stage.name] = next(tensors[n] for n in tensors if step.stage.by_name[n].written).clone()
        return space, kept


class Streamed(Lockstep):
    """Lockstep over one piece: hidden states enter each walk, collectives are fed."""

    entering: Mapping[str, Tensor] = {}
    whole: Mapping[str, Tensor] = {}

    def workspace(self, made: Plan) -> Workspace:
        if made not in self._eager:
            args = self.model.weights, self.state.tensors, fused, self.state.device
            space = self._eager[made] = FedArena(made, *args)
            space.mirror = FedArena(made, self.model.weights, self.twin_state.tensors, *args[2:])
        space = self._eager[made]
        space.enter(self.entering, self.whole)
        return space

    def units(self, plan: Plan) -> list[Unit]:
        made = []
        for unit in super().units(plan):
            if any(ref.space in GROUPS for s in unit.steps for ref in s.bind.values()):
                made += [Unit((s,), None, "other ranks' parts come from the whole layer's law") for s in unit.steps]
            else:
                made.append(unit)
        return made


class Stream:
    """Takes hidden states through a checkpoint piece by piece and judges servings on the way.

    hidden: where it begins. mesh, rank: whose share of each layer is judged; None: the whole. follow: as in lockstep.
    """

    def __init__(self, checkpoint: Checkpoint, hidden: Hidden, device="cpu", *, mesh: Mesh | None = None, rank: int = 0,
                 follow: str = "reference"):  # fmt: skip
        self.checkpoint, self.config, self.hidden, self.device = checkpoint, checkpoint.config, hidden, device
        self.seat, self.follow = mesh and mesh.at(rank), follow
        self.local = rank_config(self.config, mesh) if mesh else self.config
        self.walked = 0
        self.gaps: dict[int, float] = {}

    def through(self, piece: Piece, servings: Sequence[Serving] = ()) -> None:
        """The law through one piece; the servings are judged on the decoded tokens, and prefill against decode, whose
        distance goes to `gaps`. Advances `hidden` past a layer."""
        if isinstance(piece, int) and piece != self.hidden.layer:
            raise ContractError(f"layer {piece} after hidden states entering layer {self.hidden.layer}")
        run = _Run(self, piece)
        law = run.decoder(self.config, None)
        if self.seat and servings:
            law.keep = run.kept_stages()
        steps = list(run.law(law))
        if servings and isinstance(piece, int):
            self.gaps[piece] = run.gap(law.model)
        if servings:
            run.judge(law if not self.seat else None, steps, servings)
            self.walked += len(run.plan(1).steps) + 1
        if piece == HEAD:
            return
        self.hidden = run.after
        if piece != EMBED:
            self.hidden.passed = passed(self.checkpoint, piece)


@dataclass
class Fed:
    """One walk of the law: which requests, how many tokens, its index tensors, and what its kept stages made."""

    index: dict[str, Tensor]
    entering: dict[str, Tensor]
    prefill: bool
    kept: dict[str, Tensor]


class _Run:
    """One piece of a stream."""

    def __init__(self, stream: Stream, piece: Piece):
        self.stream, self.piece, self.before, self.device = stream, piece, stream.hidden, stream.device
        self.after = self.before if piece in (EMBED, HEAD) else self.before.leaving(stream.config)
        self.lengths = [len(ids) for ids in self.before.tokens]
        self._plans: dict[tuple, Plan] = {}

    def plan(self, tokens: int, prefill: bool = False, seat: Seat | None = None) -> Plan:
        key = tokens, prefill, seat
        if key not in self._plans:
            self._plans[key] = piece_plan(self.stream.config, tokens, self.piece, prefill=prefill, seat=seat)
        return self._plans[key]

    def kept_stages(self) -> frozenset[str]:
        steps = self.plan(1, seat=self.stream.seat).steps
        return frozenset(WHOLE.get(s.tag, s.tag) for s in steps if s.tag)

    def decoder(self, config: Config, seat: Seat | None) -> Law:
        state, self.requests = piece_state(config, self.piece, self.lengths, self.device)
        weights = piece_weights(self.stream.checkpoint, self.piece, self.device, seat)
        return Law(Model(config, weights), state)

    def law(self, law: Law) -> Iterator[Fed]:
        """Prefill each request, then decode; writes the states that leave. Yields what servings need of each walk."""
        hidden, n = self.before, self.before.decoded
        for request, ids, start in zip(self.requests, hidden.tokens, hidden.starts, strict=True):
            for at in range(0, len(ids) - n, PREFILL_CHUNK):
                part = ids[at : min(at + PREFILL_CHUNK, len(ids) - n)]
                index = step_index(law.state, [request], part, prefill=True)
                yield self._walk(law, index, torch.arange(start + at, start + at + len(part)), True)
                request.length += len(part)
        law.state.poison(keep=self.requests)
        self.prefilled = law.state.clone()
        for step in range(n):
            ids = [ids[len(ids) - n + step] for ids in hidden.tokens]
            rows = torch.tensor([s + r.length for s, r in zip(hidden.starts, self.requests, strict=True)])
            yield self._walk(law, step_index(law.state, self.requests, ids), rows, False)
            for request in self.requests:
                request.length += 1

    def _walk(self, law: Law, index: dict, rows: Tensor, prefill: bool) -> Fed:
        count = 1 if prefill else len(self.requests)
        entering = {name: getattr(self.before, name)[rows].to(self.device) for name in CARRIED}
        if self.piece == EMBED:
            entering = {}
        space, kept = law.walk(self.plan(len(rows), prefill), self._greedy(index, count), entering)
        for name in CARRIED if self.piece != HEAD else ():
            target = getattr(self.after, name)
            target[rows] = (space.act[name][:, : target.shape[1]] if name == "blocks" else space.act[name]).cpu()
        return Fed(index, entering, prefill, kept)

    def _greedy(self, index: dict, count: int) -> dict[str, Tensor]:
        return index | sampling_index([GREEDY] * count, count, None, self.device)

    def gap(self, model: Model) -> float:
        """The attention of this layer over the first tokens of the longest request, prefilled in one go and decoded one
        by one, in float64: the largest relative distance of output and state, infinite where one is not finite."""
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        n, start = min(self.lengths[longest], AGREEING), self.before.starts[longest]
        seen = []
        for parts in ([n], [1] * n):
            state, (request,) = piece_state(model.config, self.piece, [n], self.device)
            law, outs, at = Law(model, state.to(exact)), [], 0
            law.keep = frozenset(OUT)
            for count in parts:
                made, ids = _until_out(self.plan(count, count > 1)), self.before.tokens[longest][at : at + count]
                index = step_index(law.state, [request], ids, prefill=count > 1)
                rows = slice(start + at, start + at + count)
                entering = {name: getattr(self.before, name)[rows].to(self.device) for name in CARRIED}
                outs += law.walk(made, self._greedy(index, 1), entering)[1].values()
                request.length, at = request.length + count, at + count
            left = [t[request.pages if key[0] == "cache" else request.slot] for key, t in law.state.tensors.items()]
            seen.append([torch.cat(outs), *left])
        far = [float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(*seen, strict=True)]
        return max(far) if all(map(isfinite, far)) else inf

    def judge(self, law: Law | None, steps: Sequence[Fed], servings: Sequence[Serving]) -> None:
        """Lockstep of each serving over the decoded tokens. law: the whole layer's, None where a rank is judged."""
        stream, seat, state = self.stream, self.stream.seat, self.prefilled
        model = law.model if law else None
        if law is None:
            rank = self.decoder(stream.local, seat)
            for fed in (f for f in steps if f.prefill):
                made = self.plan(len(fed.index["ids"]), True, seat)
                rank.walk(made, self._greedy(fed.index, 1), fed.entering, fed.kept)
            rank.state.poison(keep=self.requests)
            model, state = rank.model, rank.state
        rows = len(self.requests) + 1
        made = self.plan(rows, seat=seat)
        order, _ = row_order(rows, state.device)
        for serving in servings:
            decoder = Streamed(model, state.clone(), selection=serving.selection, extra=serving.extra, graphs=False,
                               follow=stream.follow, capacity=self.before.decoded)  # fmt: skip
            weights = {key: _sum(t) for key, t in model.weights.items()}
            for fed in (f for f in steps if not f.prefill):
                decoder.entering = {name: _null_row(t)[order] for name, t in fed.entering.items()}
                decoder.whole = {name: _null_row(t)[order] for name, t in fed.kept.items()}
                decoder.run(made, self._greedy({name: _null_row(t) for name, t in fed.index.items()}, rows))
            self._collect(serving, decoder, [k for k, t in model.weights.items() if weights[k] != _sum(t)])

    def _collect(self, serving: Serving, decoder: Streamed, changed: Sequence[tuple]) -> None:
        offset = self.stream.walked
        for f in decoder.findings():
            f.place = replace(f.place, ordinal=f.place.ordinal + offset)
            serving.findings.append(f)
        for name, layer in changed:
            place = Place("weights", offset, layer, (), name)
            serving.findings.append(Finding(place, "exact", bad=1, reasons=["was changed"]))
        serving.served |= decoder.served
        serving.refused |= decoder.refused
        for name, count in decoder.ledger().items():
            serving.ledger[name] = serving.ledger.get(name, 0) + count


def _until_out(made: Plan) -> Plan:
    """The steps of a layer up to the end of its attention: behind it a route may flip where two experts tie."""
    end = next(i for i, s in enumerate(made.steps) if s.stage.name in OUT)
    return replace(made, steps=made.steps[: end + 1])


def _null_row(t: Tensor) -> Tensor:
    """One more row: NaN, or 0 for the indices that lead to null slots and pages."""
    return torch.cat([t, torch.full_like(t[:1], torch.nan if t.is_floating_point() else 0)])


def _sum(t: Tensor) -> int:
    """A sum of bits."""
    return int(t.contiguous().view(torch.uint8).view(-1).sum(dtype=torch.int64))


def stream(
    checkpoint: Checkpoint, hidden: Hidden, first: int, last: int, servings: Sequence[Serving], device="cpu", *,
    mesh: Mesh | None = None, rank: int = 0, follow: str = "reference",
    gaps: dict[int, float] | None = None, progress: Callable[[int, int, str], None] | None = None,
) -> Hidden:  # fmt: skip
    """Through the layers up to `last`; the servings are judged from layer `first` on. Returns what leaves.

    Layers between `hidden` and `first` are the law's alone. gaps: takes the distance between prefill and decode of each
    layer that is judged. Raises ContractError for layers that do not exist or that
    were passed already, and CheckpointError for weights that are missing.
    """
    if hidden.layer > first:
        raise ContractError(
            f"hidden states enter layer {hidden.layer}; allowed is at most the first one judged, {first}"
        )
    made = Stream(checkpoint, hidden, device, mesh=mesh, rank=rank, follow=follow)
    judged, todo = pieces(checkpoint.config, first, last), pieces(checkpoint.config, hidden.layer, last)
    for i, piece in enumerate(todo):
        made.through(piece, servings if piece in judged else ())
        if progress:
            progress(i + 1, len(todo), str(piece))
    if gaps is not None:
        gaps |= made.gaps
    return made.hidden
