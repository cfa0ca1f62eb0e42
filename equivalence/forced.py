"""Teacher-forced runs: the same tokens and, if wanted, the same expert routes through differently served decoders.

With tokens and routes fixed, the errors of two runs are comparable at every token, whatever was sampled or routed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fast.decoder import FastDecoder
from fast.selection import Unit
from reference.decoder import Decoder, Model
from reference.moe import weigh
from reference.numerics import Numerics
from reference.plan import Plan, Step
from reference.state import DecodeState, Request

ROUTER = "moe.topk"


@dataclass
class Trace:
    """What a run left: logits [tokens, rows, vocab], the final state, expert ids [rows, A] per token and layer."""

    logits: Tensor
    state: DecodeState
    routes: list[dict[int, Tensor]] = field(default_factory=list)


class _Routed(Decoder):
    """Records the experts that each layer chose, or forces recorded ones (their weights stay the run's own)."""

    routes: list[dict[int, Tensor]]
    forced: Sequence[dict[int, Tensor]] | None = None

    def execute(self, step: Step, tensors: dict[str, Tensor], made: Plan) -> None:
        super().execute(step, tensors, made)
        if step.stage.name != ROUTER:
            return
        if self.forced is not None:
            ids = self.forced[len(self.routes) - 1][step.layer]
            tensors["ids"].copy_(ids)
            tensors["weights"].copy_(weigh(tensors["logits"], ids, self.num))
        self.routes[-1][step.layer] = tensors["ids"].clone()


class RoutedReference(_Routed):
    pass


class RoutedFast(_Routed, FastDecoder):
    def serve(self, unit: Unit, space):
        if unit.implementation and any(s.stage.name == ROUTER for s in unit.steps):
            raise NotImplementedError(
                f"{unit.key}: routes cannot be forced inside a span; allowed are spans without {ROUTER}"
            )
        return super().serve(unit, space)


def follow(decoder: _Routed, requests: Sequence[Request], tokens: Tensor, forced: Sequence | None = None) -> Trace:
    """Feed tokens [n, rows] one step at a time. forced: routes of an earlier trace of the same tokens."""
    decoder.routes, decoder.forced = [], forced
    requests = [Request(r.slot, list(r.pages), r.length) for r in requests]
    logits = []
    for row in tokens.tolist():
        decoder.routes.append({})
        logits.append(decoder.decode(requests, row).act["vocab_logits"].clone())
    return Trace(torch.stack(logits), decoder.state, decoder.routes)


def prepare(model: Model, prompts: Sequence[Sequence[int]], steps: int, device: torch.device | str, *, order: int = 1):
    """Prefill the prompts with the law and decode greedily: (state after prefill, requests, tokens [steps, rows]).

    The state holds spare slots and pages; those that no prompt owns are NaN, so that reading them cannot pass.
    """
    size = 16
    pages = sum(-(-(len(p) + steps) // size) for p in prompts) + 8
    state = DecodeState(model.config, slots=len(prompts) + 3, pages=pages, page_size=size, device=device, order=order)
    decoder, requests, last = Decoder(model, state), [], []
    for prompt in prompts:
        requests.append(state.open())
        last.append(int(decoder.prefill(requests[-1], prompt).act["tokens"]))
    for r in requests:
        state.reserve((r, r.length + steps))
    state.poison(keep=requests)
    trial = Decoder(model, state.clone())
    running, tokens = [Request(r.slot, list(r.pages), r.length) for r in requests], [last]
    for _ in range(steps - 1):
        tokens.append(trial.decode(running, tokens[-1]).act["tokens"].tolist())
    return state, requests, torch.tensor(tokens)


def reference_run(model: Model, state: DecodeState, requests, tokens: Tensor, num: Numerics, forced=None) -> Trace:
    return follow(RoutedReference(model, state.to(num), num), requests, tokens, forced)
