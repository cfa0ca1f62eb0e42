"""The plain decoder: walks the plan with the law. Prefill in chunks, then one token per request and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Config
from .numerics import Numerics, fused
from .plan import Plan, Step, Workspace, plan
from .stage import ContractError
from .state import DecodeState, Request, step_index

PREFILL_CHUNK = 1024


@dataclass(frozen=True)
class Sampling:
    """How a request picks tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off; noise is keyed by seed."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ContractError(f"{self}: allowed are temperature >= 0, top_k >= 0, 0 < top_p <= 1")


GREEDY = Sampling()


@dataclass(frozen=True)
class Model:
    """A configuration and its weights: (name, layer) -> tensor, layer None for the top level."""

    config: Config
    weights: Mapping[tuple[str, int | None], Tensor]

    def to(self, device: torch.device | str) -> "Model":
        return Model(self.config, {k: t.to(device) for k, t in self.weights.items()})


class Decoder:
    """Runs plans over one state with the law in one precision mode. Subclasses override `execute`."""

    def __init__(self, model: Model, state: DecodeState, num: Numerics | None = None):
        self.model, self.state, self.num = model, state, num or state.num
        self.config = model.config

    def execute(self, step: Step, tensors: dict[str, Tensor], made: Plan) -> None:
        step.stage.apply(tensors, step.attrs, self.num, prefill=made.prefill)

    def workspace(self, made: Plan) -> Workspace:
        return Workspace(made, self.model.weights, self.state.tensors, self.num, self.state.device)

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        """One walk through the plan. The workspace holds every buffer, `tokens` and `vocab_logits` among them."""
        space = self.workspace(made)
        space.index = index
        with torch.no_grad():
            for step in made.steps:
                self.execute(step, space.tensors(step), made)
        return space

    def prefill(self, request: Request, ids: Sequence[int], sampling: Sampling = GREEDY,
                allowed: Tensor | None = None) -> Workspace:  # fmt: skip
        """Feed a prompt in chunks; the workspace of the last chunk holds the first sampled token."""
        if not ids:
            raise ContractError("a prompt needs at least one token")
        space = None
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = list(ids[start : start + PREFILL_CHUNK])
            index = step_index(self.state, [request], part, prefill=True)
            index |= sampling_index([sampling], 1, allowed, self.state.device)
            space = self.run(plan(self.config, len(part), prefill=True, masked=allowed is not None), index)
            request.length += len(part)
        return space

    def decode(self, requests: Sequence[Request], ids: Sequence[int], samplings: Sequence[Sampling] | None = None,
               allowed: Tensor | None = None, rows: int | None = None) -> Workspace:  # fmt: skip
        """One token per request. `rows` pads the batch with null rows; allowed is a bool mask [rows, vocab]."""
        index = step_index(self.state, list(requests), list(ids), rows=rows)
        n = rows or len(requests)
        index |= sampling_index(samplings or [GREEDY] * len(requests), n, allowed, self.state.device)
        space = self.run(plan(self.config, n, masked=allowed is not None), index)
        for r in requests:
            r.length += 1
        return space

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int, samplings: Sequence[Sampling] | None = None
    ) -> list:
        """Continuations of `steps` tokens, all prompts in one batch: list of token id lists."""
        samplings = samplings or [GREEDY] * len(prompts)
        requests = [self.state.open() for _ in prompts]
        last = [int(self.prefill(r, p, s).act["tokens"]) for r, p, s in zip(requests, prompts, samplings, strict=True)]
        out = [[t] for t in last]
        for _ in range(steps - 1):
            last = self.decode(requests, last, samplings).act["tokens"].tolist()
            for tokens, t in zip(out, last, strict=True):
                tokens.append(t)
        for r in requests:
            self.state.close(r)
        return out


def sampling_index(samplings: Sequence[Sampling], rows: int, allowed: Tensor | None, device) -> dict[str, Tensor]:
    """The sampling parameters of a step as index tensors, padded rows greedy."""
    padded = [*samplings, *[GREEDY] * (rows - len(samplings))]

    def column(field, dtype):
        return torch.tensor([getattr(s, field) for s in padded], dtype=dtype).to(device)

    index = dict(temperature=column("temperature", torch.float32), top_k=column("top_k", torch.int32),
                 top_p=column("top_p", torch.float32), seed=column("seed", torch.int64))  # fmt: skip
    return index if allowed is None else index | dict(allowed=allowed.to(device))


__all__ = ["GREEDY", "Decoder", "Model", "Sampling", "fused"]
