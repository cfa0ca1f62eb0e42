"""Free running: whole decoders side by side, fed the same tokens, each with its own activations and state.

The fused reference leads: its tokens feed all. `exact` tells how far each has gone; errors feed back through every
layer, so single tokens prove nothing, and the gates are the error of the run relative to the reference's, and its
slope; they hold for the logits of the head and of the routers. A discrete choice has to be the one that the twin's own
logits make, ties aside. Where it differs from the reference's, a ledger counts it, and the reference's experts are
forced, so that later layers stay comparable. (A margin in units of the reference's error at that token proves nothing:
that error is near zero by luck now and then.)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fast.decoder import Explained
from fast.selection import Implementation, Selection, Unit, span_refs
from reference.decoder import Model
from reference.moe import weigh
from reference.numerics import exact, fused
from reference.plan import Plan, Workspace
from reference.stage import ContractError
from reference.state import PAGED, DecodeState, Request

from .compare import FLOOR, Bounds, routes
from .judge import UNBOUNDED, Finding, Judge, Place
from .lockstep import ROUTER, Scattered

# Two trajectories with equal errors per step are two draws of one process: their ratio over a run is near 1. One more
# rounding per stage makes it sqrt(2), four times the noise power 2. Single rows and elements are judged only where the
# reference is exact (what prefill left in the cache); infinite bounds would multiply that 0.
FREE = Bounds(UNBOUNDED, UNBOUNDED, 2.0)


class FreeRunning(Scattered):
    """A decoder served by the twins, next to the fused law and the exact law. `state` is the twins' own."""

    def __init__(
        self, model: Model, state: DecodeState, *, selection: Selection | None = None,
        extra: Mapping[str, Implementation] | None = None, graphs: bool = True, capacity: int = 1024,
    ):  # fmt: skip
        super().__init__(model, state, backend="latency_specialized", selection=selection, extra=extra, graphs=graphs)
        self.judge, self.final = Judge(state.device, capacity), Judge(state.device, 1)
        self.start: DecodeState | None = None
        self.ref_state: DecodeState | None = None
        self.true_state: DecodeState | None = None
        zeros = torch.zeros(model.config.layers + 1, dtype=torch.int64, device=state.device)
        self.flips, self.illegal = zeros, zeros.clone()  # per layer; the last entry counts tokens
        self.served, self.refused = {}, {}

    def begin(self) -> None:
        """Take the state as it is for the start of all three trajectories; call after prefill and poisoning."""
        self.start, self.ref_state, self.true_state = self.state.clone(), self.state.clone(), self.state.to(exact)

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        if not made.prefill and self.ref_state is None:
            self.begin()
        return super().run(made, index)

    def workspace(self, made: Plan) -> Workspace:
        space = super().workspace(made)
        if not made.prefill:
            weights, device = self.model.weights, self.state.device
            space.ref = Workspace(made, weights, self.ref_state.tensors, fused, device)
            space.true = Workspace(made, weights, self.true_state.tensors, exact, device)
        return space

    def leader(self, space: Workspace) -> Workspace:
        return space.ref

    def _walk(self, made: Plan, space: Workspace) -> None:
        with torch.no_grad():
            space.ref.index = space.true.index = space.index
            live, chosen = space.index["slots"] > 0, {}
            for other in (space.ref, space.true):
                for step in made.steps:
                    tensors = other.tensors(step)
                    step.stage.apply(tensors, step.attrs, other.num)
                    if step.stage.name == ROUTER:
                        self._route_law(step.layer, tensors, other, chosen)
            explained, routers = [], []
            for unit in self.units(made):
                explained += self._serve(unit, space)
                if any(s.stage.name == ROUTER for s in unit.steps):
                    routers += self._route_twin(unit, space, live, chosen)
            twin, ref, true = (s.act["vocab_logits"] for s in (space, space.ref, space.true))
            self.judge.add(Place("logits", len(made.steps), None, ("head.logits",), "logits"), twin, ref, true, live,
                           FREE)  # fmt: skip
            if routers:
                triple = (torch.cat(part, -1) for part in zip(*routers, strict=True))
                self.judge.add(Place("routers", len(made.steps), None, ("moe.router",), "logits"), *triple, live, FREE)
            self._judge_tokens(len(made.steps) + 1, space, live & (space.index["temperature"] == 0))
            self.judge.flush()
        self._explained[self._last] = explained
        self.served |= {e.key: e for e in explained}

    def _serve(self, unit: Unit, space: Workspace) -> list[Explained]:
        """Serve a unit; by the law, with the reason, where its implementation turns out not to run."""
        if unit.key not in self.refused:
            try:
                return [self.serve(unit, space)]
            except (NotImplementedError, ContractError) as error:
                if unit.implementation is None:
                    raise
                self.refused[unit.key] = f"{unit.implementation.name} could not run: {error}"
        return [self.serve(Unit((step,), None, self.refused[unit.key]), space) for step in unit.steps]

    def _route_law(self, layer: int, tensors: dict, space: Workspace, chosen: dict) -> None:
        """Keep what the reference chose; make exact choose the same."""
        if space.num == fused:
            chosen[layer] = [tensors[name].clone() for name in ("ids", "weights", "logits")]
            return
        ids = chosen[layer][0]
        tensors["ids"].copy_(ids)
        tensors["weights"].copy_(weigh(tensors["logits"], ids, exact))
        chosen[layer].append(tensors["logits"].clone())

    def _route_twin(self, unit: Unit, space: Workspace, live: Tensor, chosen: dict) -> list[tuple[Tensor, ...]]:
        """Enter the twin's experts into the ledger and force the reference's where the sets differ. Returns the
        router's logits of twin, reference and exact, if the twin shows them."""
        step = next(s for s in unit.steps if s.stage.name == ROUTER)
        arguments = step.bind if unit.implementation is None else unit.implementation.arguments
        shown = span_refs(unit.steps, arguments)
        if "ids" not in shown:
            return []  # a span that keeps its choice to itself
        ids, weights, *logits = chosen[step.layer]
        mine, mine_weights = space.resolve(step.bind["ids"]), space.resolve(step.bind["weights"])
        own, bias = (space.resolve(step.bind[name]) for name in ("logits", "bias"))
        scores = torch.sigmoid((own if "logits" in shown else logits[0]).double()) + bias.double()
        differs, illegal = routes(mine, ids, scores, FLOOR * scores.abs().amax(-1))
        if "logits" not in shown:
            slack = FREE.pooled * (torch.sigmoid(logits[1]) + bias.double() - scores).abs().amax(-1)
            illegal = routes(mine, ids, scores, slack + FLOOR * scores.abs().amax(-1))[1]
        self.flips[step.layer] += (differs & live).sum()
        self.illegal[step.layer] += (illegal & live).sum()
        place = Place(unit.key, int(step.layer), step.layer, (ROUTER,), "ids")
        self.judge.forbid(place, illegal & live, lambda row: f"row {row} chose experts that its logits do not")
        mine_weights.copy_(torch.where(differs[:, None], weights, mine_weights))
        mine.copy_(torch.where(differs[:, None], ids, mine))
        return [(own.clone(), *logits)] if "logits" in shown else []

    def _judge_tokens(self, ordinal: int, space: Workspace, greedy: Tensor) -> None:
        """A greedy token has the greatest of the twin's own logits; where it is not the reference's, count it."""
        own, tokens, twin = space.act["vocab_logits"].double(), space.ref.act["tokens"], space.act["tokens"]
        exists = (twin >= 0) & (twin < own.shape[-1])
        slack, allowed = FLOOR * own.abs().amax(-1), space.index.get("allowed")
        own = own if allowed is None else own.masked_fill(~allowed, -torch.inf)
        chosen = own.gather(-1, twin.clamp(0, own.shape[-1] - 1)[:, None])[:, 0]
        illegal = greedy & (~exists | (own.amax(-1) - chosen > slack))
        self.flips[-1] += ((twin != tokens) & greedy).sum()
        self.illegal[-1] += illegal.sum()
        self.judge.forbid(Place("sample", ordinal, None, ("sample",), "tokens"), illegal,
                          lambda row: f"row {row} chose a token that its logits do not")  # fmt: skip

    def finish(self, requests: list[Request]) -> None:
        """Judge the final state: what the requests own by value, everything else by its bits. Call once."""
        slots, pages = [r.slot for r in requests], [p for r in requests for p in r.pages]
        for i, ((name, layer), mine) in enumerate(self.state.tensors.items()):
            owned = torch.tensor(pages if name in PAGED else slots, device=mine.device)
            rows = [s.tensors[name, layer][owned] for s in (self.state, self.ref_state, self.true_state)]
            place = Place(f"{layer:02d}.{name}", i, layer, ("state",), name)
            self.final.add(place, *rows, torch.ones(len(owned), dtype=torch.bool, device=mine.device), FREE)
            words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[mine.element_size()]
            old = self.start.tensors[name, layer]
            changed = mine.flatten(1).view(words).ne(old.flatten(1).view(words)).any(1)
            changed[owned] = False
            elsewhere = Place(f"{layer:02d}.{name}", i, layer, ("state",), f"{name} elsewhere")
            self.final.forbid(elsewhere, changed, lambda row, name=name: f"{name} entry {row} was changed")
        self.final.flush()

    def ledger(self) -> dict[str, int]:
        """Choices that differ from the reference's: all of them, and those outside the error."""
        flips, illegal = self.flips.tolist(), self.illegal.tolist()
        names = ("experts", sum(flips[:-1]), sum(illegal[:-1])), ("tokens", flips[-1], illegal[-1])
        return {k: v for n, f, i in names for k, v in ((f"{n} inside the error", f - i), (f"{n} outside", i))}

    def findings(self) -> list[Finding]:
        return self.judge.findings() + self.final.findings()
