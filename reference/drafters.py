"""Who proposes tokens, and how well that goes: DSpark's draft model, running acceptance (SPEC.md 10.2)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .decoder import Decoder, Model, sampling_index
from .draft import block_plan, context_plan
from .draft_config import DraftConfig
from .plan import check_weights
from .spec_state import SpecState, Speculated, token_rows
from .stage import ContractError, i32, i64


class Drafter(Protocol):
    """What proposes tokens. taps: target layers whose sums it wants to see."""

    taps: tuple[int, ...]

    def observe(self, taps: Tensor, position: Tensor, slot_mapping: Tensor) -> None:
        """Sums [T, taps * D] at positions [T] are now context; rows with slot_mapping 0 are not."""

    def propose(self, live: Sequence[Speculated], rows: int, *, replay: bool) -> tuple[Tensor, Tensor | None]:
        """draft [rows, <= S] i64, -1 for none, and the logits [rows * S, N] fp32 it was drawn from."""


class DSpark:
    """The draft model as a drafter; its caches are the state's. weights: `draft_config.draft_weights`."""

    def __init__(self, config: DraftConfig, weights: dict, state: SpecState):
        if state.draft != config:
            raise ContractError(f"the state was made for draft {state.draft and state.draft.name}, not {config.name}")
        self.config, self.state, self.taps = config, state, config.taps
        check_weights(block_plan(config, 1, replay=True), weights)
        self.walk = Decoder(Model(config, weights), state).run

    def observe(self, taps, position, slot_mapping):
        index = dict(taps=taps, position=position, slot_mapping=slot_mapping)
        self.walk(context_plan(self.config, len(taps)), index)

    def propose(self, live, rows, *, replay):
        c, K, base, device = self.config, self.config.block, self.state.base, self.state.device
        where = token_rows(self.state, live, rows, K)
        anchors = [r.tokens[-1] for r in live] + [0] * (rows - len(live))
        where["lens"] = torch.tensor([(r.request.length + K) for r in live for _ in range(K)]
                                     + [0] * (K * (rows - len(live))), dtype=i32, device=device)  # fmt: skip
        columns = sampling_index([r.sampling for r in live], rows, None, base.device)
        first = [r.request.length + 1 for r in live] + [0] * (rows - len(live))
        anchor = torch.tensor(anchors, dtype=i64, device=device)
        ids = torch.cat([anchor[:, None], torch.full((rows, K - 1), c.mask, device=device)], dim=1).flatten()
        where |= dict(ids=ids, anchor=anchor, first=torch.tensor(first, dtype=i64, device=device), **columns)
        space = self.walk(block_plan(c, rows, replay=replay), where)
        return space.act["draft"], space.act["draft_logits"]


class Acceptance:
    """Running acceptance: `rates[i]` is the chance that draft i is kept, given those before it, over a window of about
    1 / (1 - decay) trials; a draft that was never tried counts as certain. `histogram[n]`: steps that kept n drafts."""

    def __init__(self, drafts: int, decay: float = 0.98):
        self.decay, self.tried, self.good = decay, [0.0] * drafts, [0.0] * drafts
        self.histogram = [0] * (drafts + 1)

    def record(self, kept: int, drafted: int) -> None:
        """One verification of `drafted` tokens that kept the first `kept`. Raises ContractError if that cannot be."""
        if not 0 <= kept <= drafted <= len(self.tried):
            raise ContractError(
                f"{kept} of {drafted} drafts kept; allowed are 0..{drafted} of at most {len(self.tried)}"
            )
        self.histogram[kept] += 1
        for i in range(min(kept + 1, drafted)):
            self.tried[i] = self.tried[i] * self.decay + 1
            self.good[i] = self.good[i] * self.decay + (i < kept)

    @property
    def rates(self) -> list[float]:
        return [g / t if t else 1.0 for g, t in zip(self.good, self.tried, strict=True)]

    def mean(self) -> float:
        """Tokens per step so far, the one that the target adds included."""
        return 1 + sum(n * c for n, c in enumerate(self.histogram)) / max(sum(self.histogram), 1)

    def best(self, cost: float) -> int:
        """How many tokens to draft (at least 1) for the most tokens per time, if each costs `cost` of a step."""
        total, chance, values = 1.0, 1.0, []
        for n, rate in enumerate(self.rates, start=1):
            chance *= rate
            total += chance
            values.append(total / (1 + cost * n))
        return values.index(max(values)) + 1
