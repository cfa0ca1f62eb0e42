"""Speculative decoding: draft, verify 8 tokens per request in one batch of R * 8 rows, keep some, roll the rest back.

The verification step is the plan of a decode step with R * (S + 1) rows, whose two KDA stages that carry state are
exchanged for those of `kda_replay`, and which ends with a rule of `verify` and, in the record form, with `kda.commit`.
Before a step a request has `length` tokens in its state, and its last token, the anchor, is not among them.
Source: SPEC.md 10.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from . import kda_replay, verify
from .config import Config
from .decoder import GREEDY, PREFILL_CHUNK, Decoder, Model, Sampling, sampling_index
from .draft import tapped
from .drafters import Acceptance, Drafter
from .plan import Plan, Ref, Step, Workspace, act, ix, plan
from .spec_state import SpecState, Speculated, token_rows
from .stage import ContractError, i32, i64
from .state import step_index

EMPTY = "the mask behind {} tokens allows no token; at least one is needed"
RULES = dict(greedy=verify.GREEDY, standard=verify.STANDARD, block=verify.BLOCK, synthetic=verify.SYNTHETIC)


@cache
def verify_plan(config: Config, requests: int, drafts: int, *, form: str, rule: str, masked: bool = False,
                taps: tuple[int, ...] = (), rates: tuple[float, ...] = ()) -> Plan:  # fmt: skip
    """One verification: R * (S + 1) rows in, `kept` [R, S + 1] and `count` [R] out, state rolled to the kept ones."""
    T = requests * (1 + drafts)
    made, steps, commits = plan(config, T, masked=masked), [], []
    for step in made.steps:
        name, bind, layer = step.stage.name, dict(step.bind), step.layer
        own = lambda n, layer=layer: Ref("state", n, layer)  # noqa: E731
        if name == "kda.conv":
            bind |= dict(conv=own("conv_long"), accepted=ix("accepted"))
            step = replace(step, stage=kda_replay.CONV_VERIFY, bind=bind)
        elif name == "kda.recurrence" and form == "slots":
            bind |= dict(slots=ix("token_slots"), accepted=ix("accepted"))
            step = replace(step, stage=kda_replay.RECURRENCE_SLOTS, bind=bind)
        elif name == "kda.recurrence":
            records = dict(record_u=own("record_u"), record_kg=own("record_kg"))
            step = replace(step, stage=kda_replay.RECURRENCE_RECORD, bind=bind | records)
            kept = {n: bind[n] for n in ("A_log", "dt_bias", "slots", "recurrent")} | records
            kept |= dict(accepted=act("count"), conv=own("conv_long"))
            commits.append(Step(layer, kda_replay.COMMIT, kept, {}))
        elif name == "sample" and rule in ("standard", "block"):
            bind.pop("tokens")
            bind |= dict(draft=ix("draft"), draft_logits=ix("draft_logits"), tokens=act("kept"), count=act("count"))
            step = Step(None, RULES[rule], bind, {})
        steps.append(step)
    if rule in ("greedy", "synthetic"):
        bind = dict(draft=ix("draft"), target=act("tokens"), tokens=act("kept"), count=act("count"))
        bind |= dict(seed=ix("first_seed"), position=ix("first")) if rule == "synthetic" else {}
        steps.append(Step(None, RULES[rule], bind, dict(rates=rates) if rule == "synthetic" else {}))
    if masked:
        steps.append(Step(None, verify.END, dict(limit=ix("limit"), tokens=act("kept"), count=act("count")), {}))
    buffers = dict(made.buffers) | dict(kept=((requests, 1 + drafts), i64), count=((requests,), i32))
    return tapped(replace(made, steps=(*steps, *commits), buffers=buffers), taps)


class SpeculativeDecoder:
    """Drafts and verifies over one SpecState. rule: of `verify`; "greedy" replays plain decoding token for token.

    statistics: an Acceptance; cost: of one more drafted token relative to a step, None to draft all of them always.
    """

    def __init__(self, model: Model, state: SpecState, drafter: Drafter, *, rule: str = "greedy",
                 cost: float | None = None, rates: Sequence[float] = ()):  # fmt: skip
        if rule not in RULES or (rule == "synthetic") != (len(rates) == state.drafts):
            raise ContractError(
                f"rule {rule!r} with {len(rates)} rates: allowed are {', '.join(RULES)}; synthetic takes one per draft"
            )
        self.model, self.state, self.drafter = model, state, drafter
        self.rule, self.cost, self.rates = rule, cost, tuple(rates)
        self.statistics = Acceptance(state.drafts)
        target = Decoder(model, state)
        target.ready()
        self.walk = target.run

    def prefill(self, ids: Sequence[int], sampling: Sampling = GREEDY, allowed=None) -> Speculated:
        """Open a request and feed its prompt; its first token is sampled as plain decoding does."""
        if not ids:
            raise ContractError("a prompt needs at least one token")
        wrong = [i for i in ids if not 0 <= i < self.model.config.vocab]
        if wrong:
            raise ContractError(f"token id {wrong[0]}; allowed are 0..{self.model.config.vocab - 1}")
        mask = None if allowed is None else self._mask(allowed, [])[None]
        if mask is not None and not mask.any():
            raise ContractError(EMPTY.format(0))
        r, base = self.state.open(sampling, allowed), self.state.base
        try:
            base.reserve((r.request, len(ids)))
        except ContractError:
            self.state.close(r)
            raise
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = list(ids[start : start + PREFILL_CHUNK])
            index = step_index(base, [r.request], part, prefill=True)
            index |= sampling_index([sampling], 1, mask, base.device)
            made = plan(self.model.config, len(part), prefill=True, masked=mask is not None)
            space = self.walk(tapped(made, self.drafter.taps), index)
            position = torch.arange(start, start + len(part), device=base.device)
            self.drafter.observe(space.act["taps"], position, index["slot_mapping"])
            r.request.length += len(part)
        self.state.adopt(r)
        r.tokens.append(int(space.act["tokens"]))
        return r

    def step(self, live: Sequence[Speculated], rows: int | None = None) -> list[list[int]]:
        """Draft and verify once: the new tokens of each request, 1 to S + 1. `rows` pads the batch with null rows."""
        self._admit(live, rows)
        self._reserve(live)
        draft, logits = self.drafter.propose(live, rows or len(live), replay=self.rule == "greedy")
        if self.cost is not None:
            keep = self.statistics.best(self.cost)
            draft = torch.where(torch.arange(draft.shape[1], device=draft.device) < keep, draft, -1)
        return self.verify(live, draft, logits, rows)

    def _reserve(self, live: Sequence[Speculated]) -> None:
        self.state.base.reserve(*((r.request, r.request.length + 1 + self.state.drafts) for r in live))

    def _mask(self, allowed, tokens: Sequence[int]) -> Tensor:
        """What may follow these tokens. Raises ContractError for what is no mask over the vocabulary."""
        mask, want = allowed(tokens), (self.model.config.vocab,)
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or tuple(mask.shape) != want:
            found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ContractError(f"the mask behind {len(tokens)} tokens is {found}; allowed is torch.bool {want}")
        return mask

    def _admit(self, live: Sequence[Speculated], rows: int | None) -> None:
        """Raise ContractError for requests that cannot be stepped, or that nothing may follow."""
        if not live or (rows is not None and rows < len(live)):
            raise ContractError(f"{len(live)} requests in {rows} rows: allowed are 1 and more requests that fit")
        bad = [r.accepted for r in live if not 1 <= r.accepted <= 1 + self.state.drafts]
        if bad:
            raise ContractError(f"accepted count {bad[0]}; allowed are 1..{1 + self.state.drafts}")
        if any(not r.slots or not r.tokens for r in live) or len({id(r) for r in live}) < len(live):
            raise ContractError("a request is closed, has no token yet, or occurs twice")
        for r in live:
            if r.allowed is not None and not self._mask(r.allowed, r.tokens).any():
                raise ContractError(EMPTY.format(len(r.tokens)))

    def verify(self, live: Sequence[Speculated], draft: Tensor, logits: Tensor | None, rows: int | None = None) -> list:
        """Verify drafts [rows, <= S], -1 for padding, against the target; the new tokens of each request.

        Raises ContractError before anything changes.
        """
        S, R, c = self.state.drafts, rows or len(live), self.model.config
        if draft.ndim != 2 or draft.shape[0] != R or draft.shape[1] > S:
            raise ContractError(f"draft has shape {tuple(draft.shape)}; allowed are {R} rows of at most {S} tokens")
        wrong = draft[(draft < -1) | (draft >= c.vocab)]
        if len(wrong):
            raise ContractError(f"draft holds {int(wrong[0])}; allowed are tokens 0..{c.vocab - 1} and -1 for padding")
        if self.rule in ("standard", "block"):
            want = (R * draft.shape[1], c.vocab)
            if logits is None or tuple(logits.shape) != want:
                found = "none" if logits is None else tuple(logits.shape)
                raise ContractError(f"draft logits {found}; rule {self.rule} needs them, with shape {want}")
            logits = logits.unflatten(0, draft.shape)
            logits = torch.cat([logits, logits.new_zeros(R, S - draft.shape[1], c.vocab)], 1).flatten(0, 1)
        self._admit(live, rows)
        draft = torch.cat([draft, draft.new_full((R, S - draft.shape[1]), -1)], dim=1)
        allowed, limit = self._masks(live, draft)
        self._reserve(live)
        made = verify_plan(c, R, S, form=self.state.form, rule=self.rule, masked=allowed is not None,
                           taps=self.drafter.taps, rates=self.rates)  # fmt: skip
        space = self.walk(made, self._index(live, draft, logits, allowed, R) | limit)
        return self._keep(live, draft, space)

    def _masks(self, live, draft: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Masks [R * (S + 1), N] along each draft, all true behind a token that is forbidden or that nothing may
        follow, where nothing is kept; and `limit` [R], how many tokens there may be until nothing may follow."""
        if all(r.allowed is None for r in live):
            return None, {}
        R, Q = draft.shape[0], draft.shape[1] + 1
        masks, limit = torch.ones(R, Q, self.model.config.vocab, dtype=torch.bool), [Q] * R
        for n, (r, drafted) in enumerate(zip(live, draft.tolist(), strict=False)):
            tokens = list(r.tokens)
            for i in range(Q if r.allowed is not None else 0):
                mask = self._mask(r.allowed, tokens)
                if not mask.any():
                    limit[n] = i  # not 0: `_admit`
                    break
                masks[n, i] = mask
                if i == Q - 1 or drafted[i] < 0 or not mask[drafted[i]]:
                    break
                tokens.append(drafted[i])
        limit = torch.tensor(limit, dtype=i32, device=draft.device)
        return masks.flatten(0, 1).to(draft.device), dict(limit=limit)

    def _index(self, live, draft, logits, allowed, R) -> dict[str, Tensor]:
        state, Q = self.state, 1 + self.state.drafts
        index = token_rows(state, live, R, Q)
        tensor = lambda x, dtype: torch.tensor(x, dtype=dtype).to(state.device)  # noqa: E731
        pad = R - len(live)
        anchors = tensor([r.tokens[-1] for r in live] + [0] * pad, i64)
        index["ids"] = torch.cat([anchors[:, None], draft.clamp_min(0)], dim=1).flatten()
        index["slots"] = tensor([r.slots[0] for r in live] + [0] * pad, i32)
        index["accepted"] = tensor([r.accepted for r in live] + [1] * pad, i32)
        if state.form == "slots":
            index["token_slots"] = tensor([s for r in live for s in r.slots] + [0] * (pad * Q), i32)
        columns = sampling_index([r.sampling for r in live], R, None, state.device)
        first = tensor([r.request.length + 1 for r in live] + [0] * pad, i64)
        index |= dict(draft=draft, first=first, first_seed=columns["seed"], row_position=index["position"])
        if self.rule in ("standard", "block"):
            index |= columns | dict(draft_logits=logits, position=first)
        else:  # a row of its own for each sampled token
            index |= {n: t.repeat_interleave(Q) for n, t in columns.items()} | dict(position=index["position"] + 1)
        return index if allowed is None else index | dict(allowed=allowed)

    def _keep(self, live, draft, space: Workspace) -> list[list[int]]:
        """Move lengths, offsets and tokens; show the drafter what was kept."""
        Q, out = 1 + self.state.drafts, []
        counts = space.act["count"].tolist()[: len(live)]
        for r, kept, n, drafted in zip(live, space.act["kept"].tolist(), counts, draft.tolist(), strict=False):
            out.append(kept[:n])
            r.tokens += kept[:n]
            self.statistics.record(n - 1, [*drafted, -1].index(-1))
            r.accepted = n if self.state.form == "slots" else 1  # a commit leaves the window in front
        kept_rows = (torch.arange(Q, device=draft.device) < space.act["count"][:, None]).flatten()
        mapping = torch.where(kept_rows, space.index["slot_mapping"], 0)
        self.drafter.observe(space.act["taps"], space.index["row_position"], mapping)
        for r, n in zip(live, counts, strict=True):
            r.request.length += n
        return out

    def generate(self, prompts: Sequence[Sequence[int]], steps: int, samplings: Sequence[Sampling] | None = None,
                 allowed: Sequence | None = None) -> list[list[int]]:  # fmt: skip
        """Continuations of `steps` tokens, as `Decoder.generate`; requests leave the batch as they finish."""
        samplings, allowed = samplings or [GREEDY] * len(prompts), allowed or [None] * len(prompts)
        every = [self.prefill(p, s, a) for p, s, a in zip(prompts, samplings, allowed, strict=True)]
        while live := [r for r in every if len(r.tokens) < steps]:
            self.step(live)
        for r in every:
            self.state.close(r)
        return [r.tokens[:steps] for r in every]
