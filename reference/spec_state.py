"""State of requests under speculation, which the caller owns beside a DecodeState (SPEC.md 10.4, 15)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .decoder import GREEDY, Sampling
from .draft_config import DraftConfig, fits
from .stage import ContractError, bf16, f32, i32, i64
from .state import DecodeState, Request

FORMS = ("slots", "record")


@dataclass(eq=False)
class Speculated:
    """A request under speculation. tokens: generated so far, the last of them the anchor. slots: one per token of a
    verification (record form: one); the state that counts is in slots[accepted - 1], its window at that offset.

    allowed(tokens) gives the bool mask [vocab] of what may follow the generated tokens (structured output).
    """

    request: Request
    slots: list[int]
    sampling: Sampling = GREEDY
    allowed: Callable[[Sequence[int]], Tensor] | None = None
    tokens: list[int] = field(default_factory=list)
    accepted: int = 1


class SpecState:
    """What speculation adds to a DecodeState: windows of 3 + S inputs, replay records, the draft's caches.

    conv_long [slots, 3 + S, 3C] bf16 per KDA layer; record form: record_u [slots, H, 1 + S, 128] fp32 and record_kg
    [slots, H, 1 + S, 256] bf16; draft_cache [pages, page_size, 576] bf16 per draft layer, addressed by the same pages
    as the target's. form "slots" takes 1 + S slots of the base state for a request.
    """

    def __init__(self, base: DecodeState, *, form: str = "slots", drafts: int = 7, draft: DraftConfig | None = None):
        if form not in FORMS or drafts < 1:
            raise ContractError(f"form {form!r} with {drafts} drafts: allowed are {', '.join(FORMS)}, 1 and more")
        if base.config.kda_state != "fp32":  # one rounding a step here, one a commit there: other tokens
            raise ContractError(f"speculation over a {base.config.kda_state} KDA state; allowed is fp32")
        if draft is not None:
            fits(draft, base.config)
            if draft.block != drafts:
                raise ContractError(f"draft {draft.name} drafts {draft.block} tokens; the state is made for {drafts}")
        self.base, self.form, self.drafts, self.draft = base, form, drafts, draft
        self.num, self.device = base.num, base.device
        c, extra = base.config, {}
        for (name, layer), t in base.tensors.items():
            if name == "conv":
                extra["conv_long", layer] = (len(t), 3 + drafts, t.shape[2]), bf16
                if form == "record":
                    extra["record_u", layer] = (len(t), c.heads, 1 + drafts, 128), f32
                    extra["record_kg", layer] = (len(t), c.heads, 1 + drafts, 256), bf16
        pages = next(len(t) for (name, _), t in base.tensors.items() if name == "cache")
        for layer in range(draft.layers if draft else 0):
            extra["draft_cache", layer] = (pages, base.page_size, draft.kv_row), bf16
        self.own = {k: torch.zeros(s, dtype=self.num.storage(d), device=self.device) for k, (s, d) in extra.items()}

    @property
    def configs(self) -> tuple:
        return self.base.config, self.draft

    @property
    def tensors(self) -> dict:
        return self.base.tensors | self.own

    def open(self, sampling: Sampling = GREEDY, allowed=None) -> Speculated:
        """A new request with the slots it needs, all or none of them."""
        more = self.drafts if self.form == "slots" else 0
        if len(self.base.free_slots) < 1 + more:
            raise ContractError(f"{1 + more} slots wanted, {len(self.base.free_slots)} free")
        request = self.base.open()
        return Speculated(
            request, [request.slot, *(self.base.free_slots.pop() for _ in range(more))], sampling, allowed
        )

    def adopt(self, r: Speculated) -> None:
        """Take over a request whose state plain steps left in the base state."""
        for key, t in self.own.items():
            if key[0] == "conv_long":
                t[r.request.slot, :3] = self.base.tensors["conv", key[1]][r.request.slot]
        r.accepted = 1

    def settle(self, r: Speculated) -> None:
        """Put the state that counts where plain steps expect it: slot and window of the request."""
        for (name, layer), t in self.own.items():
            if name == "conv_long":
                self.base.tensors["conv", layer][r.request.slot] = t[r.request.slot, r.accepted - 1 : r.accepted + 2]
        if self.form == "slots":
            for (name, _), t in self.base.tensors.items():
                if name == "recurrent":
                    t[r.request.slot] = t[r.slots[r.accepted - 1]]
        self.adopt(r)

    def close(self, r: Speculated) -> None:
        self.base.free_slots += r.slots[1:]
        self.base.close(r.request)
        r.slots = []


def token_rows(state: SpecState, live: Sequence[Speculated], rows: int, per: int) -> dict[str, Tensor]:
    """Index tensors of `per` consecutive tokens for each request, the first at its length; null rows behind."""
    size, width = state.base.page_size, max(len(r.request.pages) for r in live)
    position, mapping, table = [], [], []
    for r in live:
        pages = r.request.pages
        at = range(r.request.length, r.request.length + per)
        position += at
        mapping += [pages[p // size] * size + p % size for p in at]
        table += [pages + [0] * (width - len(pages))] * per
    pad = (rows - len(live)) * per
    tensor = lambda x, dtype: torch.tensor(x, dtype=dtype).to(state.device)  # noqa: E731
    return dict(
        position=tensor(position + [0] * pad, i64), slot_mapping=tensor(mapping + [0] * pad, i64),
        block_table=tensor(table + [[0] * width] * pad, i32), lens=tensor([p + 1 for p in position] + [0] * pad, i32),
    )  # fmt: skip
