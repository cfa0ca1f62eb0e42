"""State that lives across steps, in the production layouts, owned by the caller and shared by both twins.

Source: SPEC.md 15. Slot 0 and page 0 are null: padded rows point at them, and no step may change them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from .config import Config
from .numerics import Numerics, fused
from .stage import ContractError, bf16, f8, f32

PAGED = {"cache"}  # named by layer; the rest is addressed by slot


@dataclass
class Request:
    """One sequence being decoded: its KDA slot, its cache pages in order, and how many tokens the state holds."""

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class DecodeState:
    """KDA state and convolution windows by slot, latent cache by page.

    recurrent [slots, H, 128 (V), 128 (K)] fp32 and conv [slots, 3, 3C] bf16 per KDA layer; cache [pages, page_size,
    576] bf16 per MLA layer (float64 throughout in `exact`). The configuration may ask for a bf16 recurrent state or an
    e4m3 cache. `order` permutes slots and pages, so that neighbours in memory are not neighbours in a batch.
    """

    def __init__(self, config: Config, *, slots: int, pages: int, page_size: int = 16, num: Numerics = fused,
                 device: torch.device | str = "cpu", order: int | None = None):  # fmt: skip
        if slots < 2 or pages < 2 or page_size < 1:
            raise ContractError(
                f"state with slots={slots}, pages={pages}, page_size={page_size}: allowed are 2, 2, 1 up"
            )
        self.config, self.page_size, self.num = config, page_size, num
        self.slots, self.pages = slots, pages
        self.tensors: dict[tuple[str, int], Tensor] = {}
        shapes = {
            "recurrent": (slots, config.heads, 128, 128),
            "conv": (slots, config.conv - 1, 3 * config.kda_width),
            "cache": (pages, page_size, config.kv_row),
        }
        for layer in range(config.layers):
            for name in ("cache",) if config.is_mla(layer) else ("recurrent", "conv"):
                dtype = num.storage(self.dtype(name))
                self.tensors[name, layer] = torch.zeros(shapes[name], dtype=dtype, device=device)
        shuffle = torch.Generator().manual_seed(order or 0)
        ids = (lambda n: (torch.randperm(n - 1, generator=shuffle) + 1).tolist()) if order is not None else (
            lambda n: list(range(n - 1, 0, -1)))  # fmt: skip
        self.free_slots, self.free_pages = ids(slots), ids(pages)

    @property
    def configs(self) -> tuple:
        """The models whose state this is."""
        return (self.config,)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def dtype(self, name: str) -> torch.dtype:
        """What production keeps a state tensor in."""
        return dict(
            recurrent=bf16 if self.config.kda_state == "bf16" else f32, conv=bf16,
            cache=f8 if self.config.mla_cache == "fp8" else bf16,
        )[name]  # fmt: skip

    def open(self) -> Request:
        """A new request with a zeroed slot. Raises ContractError when every slot is taken."""
        if not self.free_slots:
            raise ContractError("no free slot: close a request or make the state with more slots")
        request = Request(self.free_slots.pop())
        for (name, _), t in self.tensors.items():
            if name not in PAGED:
                t[request.slot] = 0
        return request

    def reserve(self, *wanted: tuple[Request, int]) -> None:
        """Give each request the pages it needs to hold that many tokens; all or nothing."""
        missing = [max(0, -(-length // self.page_size) - len(request.pages)) for request, length in wanted]
        if sum(missing) > len(self.free_pages):
            raise ContractError(
                f"{sum(missing)} pages wanted for {sum(n for _, n in wanted)} tokens, {len(self.free_pages)} free"
            )
        for (request, _), pages in zip(wanted, missing, strict=True):
            request.pages += [self.free_pages.pop() for _ in range(pages)]

    def close(self, request: Request) -> None:
        """Give slot and pages back; the request cannot be used again. Raises ContractError for one that is closed."""
        admit(self, [request])
        self.free_slots.append(request.slot)
        self.free_pages += request.pages
        request.slot, request.pages = 0, []

    def clone(self) -> "DecodeState":
        """The same contents in other memory; allocation lists are copied too."""
        twin = object.__new__(type(self))
        twin.__dict__ = dict(self.__dict__, tensors={k: t.clone() for k, t in self.tensors.items()})
        twin.free_slots, twin.free_pages = list(self.free_slots), list(self.free_pages)
        return twin

    def to(self, num: Numerics) -> "DecodeState":
        """A copy in another mode's storage dtypes."""
        twin = self.clone()
        twin.num = num
        for key, t in twin.tensors.items():
            dtype = num.storage(self.dtype(key[0]))
            twin.tensors[key] = num.round8(num.up(t)) if dtype is f8 else t.to(dtype)
        return twin

    def poison(self, keep: list[Request] = ()) -> None:
        """Fill every slot and page that no request of `keep` owns with NaN, the null slot and page included."""
        slots, pages = {r.slot for r in keep}, {p for r in keep for p in r.pages}
        for (name, _), t in self.tensors.items():
            owned = pages if name in PAGED else slots
            t[[i for i in range(t.shape[0]) if i not in owned]] = torch.nan

    def digest(self) -> dict[str, list[str]]:
        """A hash per slot and per page: {"recurrent.3": ["9f..", ...], ...}."""
        out = {}
        for (name, layer), t in self.tensors.items():
            raw = t.detach().cpu().contiguous().view(torch.uint8).flatten(1).numpy()
            out[f"{name}.{layer}"] = [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in raw]
        return out

    def changed(self, before: "DecodeState") -> dict[str, list[int]]:
        """Slots and pages whose bits differ from an earlier clone (NaN equals the same NaN)."""
        out = {}
        for key, t in self.tensors.items():
            a, b = (x.contiguous().view(torch.uint8).flatten(1) for x in (t, before.tensors[key]))
            rows = (a != b).any(1).nonzero().flatten().tolist()
            if rows:
                out[f"{key[0]}.{key[1]}"] = rows
        return out


def admit(state: DecodeState, requests: Sequence[Request], ids: Sequence[int] = ()) -> None:
    """Raise ContractError for token ids outside the vocabulary, closed requests, a request that occurs twice, and
    requests whose slot, pages or length cannot be."""
    bad = [i for i in ids if not isinstance(i, Integral) or not 0 <= i < state.config.vocab]
    if bad:
        raise ContractError(f"token id {bad[0]}; allowed are 0..{state.config.vocab - 1}")
    slots = [r.slot for r in requests]
    closed = [s for s in slots if s <= 0 or s in state.free_slots]
    if closed:
        raise ContractError(f"slot {closed[0]} belongs to no open request; allowed are requests that are not closed")
    if len(set(slots)) < len(slots):
        twice = next(s for s in slots if slots.count(s) > 1)
        raise ContractError(f"the request of slot {twice} occurs more than once in a step; requests must differ")
    for r in requests:
        if r.slot >= state.slots:
            raise ContractError(f"slot {r.slot}; allowed are 1..{state.slots - 1}")
        if not isinstance(r.length, Integral) or r.length < 0:
            raise ContractError(f"the request of slot {r.slot} holds {r.length} tokens; allowed are 0 and more")
        if r.pages and not (min(r.pages) > 0 and max(r.pages) < state.pages):
            wrong = next(p for p in r.pages if not 0 < p < state.pages)
            raise ContractError(f"page {wrong} of slot {r.slot}; allowed are 1..{state.pages - 1}")
    owned = [p for r in requests for p in r.pages]
    if len(set(owned)) < len(owned):
        twice = next(p for p in owned if owned.count(p) > 1)
        raise ContractError(f"page {twice} occurs twice in a step; pages of requests must differ")


def step_index(state: DecodeState, requests: list[Request], ids: list[int], *, rows: int | None = None,
               prefill: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """The index tensors of one step; pages for the new tokens are reserved here.

    Decode: one token per request, padded to `rows` with null rows. Prefill: all `ids` belong to the one request.
    Returns ids i64, slots i32, block_table i32 [T or 1, J], lens i32, slot_mapping i64, position i64 (of the token that
    follows), all on the state's device. Raises ContractError before anything changes.
    """
    if prefill and len(requests) != 1:
        raise ContractError(f"prefill takes one request at a time, got {len(requests)}")
    new = len(ids) if prefill else 1
    if not prefill and len(ids) != len(requests):
        raise ContractError(f"{len(ids)} token ids for {len(requests)} requests")
    if not requests or not ids:
        raise ContractError("a step needs at least one request and one token")
    pad = 0 if prefill or rows is None else rows - len(requests)
    if pad < 0:
        raise ContractError(f"{len(requests)} requests do not fit into {rows} rows")
    admit(state, requests, ids)
    state.reserve(*((r, r.length + new) for r in requests))
    width = max(len(r.pages) for r in requests)
    table = [r.pages + [0] * (width - len(r.pages)) for r in requests] + [[0] * width] * pad
    positions = [r.length + i for r in requests for i in range(new)]
    owners = [r for r in requests for _ in range(new)]
    size = state.page_size
    mapping = [r.pages[p // size] * size + p % size for r, p in zip(owners, positions, strict=True)]

    def tensor(values, dtype, null=0):
        return torch.tensor(values + [null] * pad, dtype=dtype).to(state.device)

    return dict(
        ids=tensor(list(ids), torch.int64),
        slots=tensor([r.slot for r in requests], torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32).to(state.device),
        lens=tensor([p + 1 for p in positions], torch.int32),
        slot_mapping=tensor(mapping, torch.int64),
        position=tensor([r.length + new for r in requests], torch.int64),
    )
