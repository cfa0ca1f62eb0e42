"""The plain decoder: walks the plan with the law. Prefill in chunks, then one token per request and step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral

import torch
from torch import Tensor

from .config import Config
from .numerics import Numerics, fused
from .plan import Plan, Step, Workspace, check_weights, plan
from .stage import ContractError
from .state import DecodeState, Request, admit, step_index

PREFILL_CHUNK = 1024


@dataclass(frozen=True)
class Sampling:
    """How a request picks tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off; noise is keyed by seed."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        real = 0 <= self.temperature < 2.0**128 and 2.0**-126 <= self.top_p <= 1  # they are kept in fp32
        whole = isinstance(self.top_k, Integral) and isinstance(self.seed, Integral)
        if not (real and whole and 0 <= self.top_k < 2**31 and -(2**63) <= self.seed < 2**63):
            raise ContractError(
                f"{self}: allowed are a finite temperature >= 0, 0 <= top_k < 2^31, 0 < top_p <= 1, a 64-bit seed"
            )


GREEDY = Sampling()


@dataclass(frozen=True)
class Model:
    """A configuration and its weights: (name, layer) -> tensor, layer None for the top level."""

    config: Config
    weights: Mapping[tuple[str, int | None], Tensor]

    def to(self, device: torch.device | str) -> "Model":
        return Model(self.config, {k: t.to(device) for k, t in self.weights.items()})


class Decoder:
    """Runs plans over one state with the law in one precision mode. Subclasses override `execute`.

    Raises ContractError for a state of another model or mode, and before the first step for weights that do not fit.
    """

    def __init__(self, model: Model, state: DecodeState, num: Numerics | None = None):
        if model.config not in state.configs:
            raise ContractError(f"state of {_difference(state.configs[0], model.config)}")
        if num not in (None, state.num):
            raise ContractError(f"mode {num.mode!r} over a state kept in {state.num.mode!r}; allowed is the state's")
        self.model, self.state, self.num = model, state, state.num
        self.config, self._checked = model.config, False

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

    def ready(self) -> None:
        """Raise ContractError, the first time, for weights that do not fit the model."""
        if not self._checked:
            check_weights(plan(self.config, 1), self.model.weights)
            self._checked = True

    def prefill(self, request: Request, ids: Sequence[int], sampling: Sampling = GREEDY,
                allowed: Tensor | None = None) -> Workspace:  # fmt: skip
        """Feed a prompt in chunks; the workspace of the last chunk holds the first sampled token."""
        ids = list(ids)
        if not ids:
            raise ContractError("a prompt needs at least one token")
        self.ready()
        check_sampling([sampling], 1, 1, allowed, self.config.vocab)
        admit(self.state, [request], ids)
        self.state.reserve((request, request.length + len(ids)))  # all chunks or none
        space = None
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = ids[start : start + PREFILL_CHUNK]
            index = step_index(self.state, [request], part, prefill=True)
            index |= sampling_index([sampling], 1, allowed, self.state.device)
            space = self.run(plan(self.config, len(part), prefill=True, masked=allowed is not None), index)
            request.length += len(part)
        return space

    def decode(self, requests: Sequence[Request], ids: Sequence[int], samplings: Sequence[Sampling] | None = None,
               allowed: Tensor | None = None, rows: int | None = None) -> Workspace:  # fmt: skip
        """One token per request. `rows` pads the batch with null rows; allowed is a bool mask [rows, vocab]."""
        self.ready()
        n, samplings = rows or len(requests), samplings or [GREEDY] * len(requests)
        check_sampling(samplings, len(requests), n, allowed, self.config.vocab)
        index = step_index(self.state, list(requests), list(ids), rows=rows)
        index |= sampling_index(samplings, n, allowed, self.state.device)
        space = self.run(plan(self.config, n, masked=allowed is not None), index)
        for r in requests:
            r.length += 1
        return space

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int, samplings: Sequence[Sampling] | None = None
    ) -> list:
        """Continuations of `steps` tokens, all prompts in one batch: list of token id lists. Closes what it opened."""
        samplings = samplings or [GREEDY] * len(prompts)
        if steps < 1 or len(samplings) != len(prompts):
            raise ContractError(f"{len(prompts)} prompts, {len(samplings)} samplings, {steps} steps: steps start at 1")
        requests = []
        try:
            for _ in prompts:
                requests.append(self.state.open())
            fed = zip(requests, prompts, samplings, strict=True)
            last = [int(self.prefill(r, p, s).act["tokens"]) for r, p, s in fed]
            out = [[t] for t in last]
            for _ in range(steps - 1):
                last = self.decode(requests, last, samplings).act["tokens"].tolist()
                for tokens, t in zip(out, last, strict=True):
                    tokens.append(t)
        finally:
            for r in requests:
                self.state.close(r)
        return out


def _difference(found: Config, wanted: Config) -> str:
    """What tells two configurations apart, as the end of a message."""
    if type(found) is type(wanted):
        for f in fields(found):
            a, b = getattr(found, f.name), getattr(wanted, f.name)
            if a != b and f.name != "name":
                return f"{found.name} has {f.name} = {a!r}; allowed is {b!r}, that of {wanted.name}"
    return f"{found.name}; allowed is that of {wanted.name}"


def check_sampling(samplings: Sequence[Sampling], requests: int, rows: int, allowed: Tensor | None, vocab: int) -> None:
    """Raise ContractError unless each request has a sampling and `allowed` is a bool mask that leaves it a token."""
    if len(samplings) != requests:
        raise ContractError(f"{len(samplings)} samplings for {requests} requests")
    if allowed is None:
        return
    if allowed.dtype is not torch.bool or tuple(allowed.shape) != (rows, vocab):
        raise ContractError(f"allowed is {allowed.dtype} {tuple(allowed.shape)}; allowed is torch.bool {(rows, vocab)}")
    empty = (~allowed[:requests].any(-1)).nonzero().flatten().tolist()
    if empty:
        raise ContractError(f"row {empty[0]} of the mask allows no token; at least one is needed")


def sampling_index(samplings: Sequence[Sampling], rows: int, allowed: Tensor | None, device) -> dict[str, Tensor]:
    """The sampling parameters of a step as index tensors, padded rows greedy."""
    padded = [*samplings, *[GREEDY] * (rows - len(samplings))]

    def column(field, dtype):
        return torch.tensor([getattr(s, field) for s in padded], dtype=dtype).to(device)

    index = dict(temperature=column("temperature", torch.float32), top_k=column("top_k", torch.int32),
                 top_p=column("top_p", torch.float32), seed=column("seed", torch.int64))  # fmt: skip
    return index if allowed is None else index | dict(allowed=allowed.to(device))


__all__ = ["GREEDY", "Decoder", "Model", "Sampling", "fused"]
