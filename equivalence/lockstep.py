"""Lockstep: every served unit of every decode step against the law, on the law's own inputs.

For each unit the decoder evaluates the span's law twice, in `exact` and in `fused`, with values that flow between the
stages of the span without touching a buffer. The implementation runs on copies: its inputs are the same bits, all
else, outputs and unread buffers alike, is poisoned with NaN. Outputs and new state rows are compared by value; every
other word of memory, inputs, guards, neighbours' slots and pages and the null slot must keep its bits.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from fast.decoder import Explained, FastDecoder
from fast.selection import Implementation, Selection, Unit, span_refs
from reference.decoder import Model
from reference.moe import weigh
from reference.numerics import Numerics, exact, fused
from reference.plan import Plan, Ref, Step, Workspace
from reference.stage import ContractError, Role, bf16, f32, scatter_rows
from reference.state import DecodeState

from .arena import ArenaSpace
from .compare import BOUNDS, FLOOR, routes
from .judge import Finding, Judge, Place
from .lanes import Lanes

FOLLOW = ("reference", "twin")
ROUTER = "moe.topk"


def evaluate(steps: Sequence[Step], space: Workspace, num: Numerics, state: Mapping) -> dict[Ref, Tensor]:
    """The law of a span in one precision mode, nothing written: reference -> complete value, or new rows of a state.

    Inputs come from `space` (its state from `state`) unless an earlier step of the span made them; those stay in the
    mode's own precision. Raises ContractError where a span writes a part of a buffer.
    """
    made: dict[Ref, Tensor] = {}
    stored: dict[Ref, Tensor] = {}  # state tensors as earlier steps of the span left them

    def fetch(ref: Ref) -> tuple[Tensor, bool]:
        """The value, and whether the span made it."""
        if ref.space == "state":
            return (stored[ref], True) if ref in stored else (state[ref.name, ref.layer], False)
        value = made.get(Ref("act", ref.name)) if ref.space == "act" else None
        if value is None:
            return space.resolve(ref), False
        value = value if ref.cols is None else value[:, ref.cols[0] : ref.cols[1]]
        return (value if ref.rows is None else value[-ref.rows :]), True

    for i, step in enumerate(steps):
        got = {name: fetch(ref) for name, ref in step.bind.items()}
        args = {name: t for name, (t, _) in got.items()}
        if any(chained for _, chained in got.values()):
            for name, t in args.items():
                spec = step.stage.by_name[name]
                if spec.role is Role.STATE and spec.mutated and t.dtype == bf16:
                    args[name] = t.to(num.storage(bf16))  # a law may cast what it stores to the state's dtype
        for name, value in step.stage.call(args, step.attrs, num).items():
            spec, ref = step.stage.by_name[name], step.bind[name]
            if ref.space == "act" and (ref.cols or ref.rows):
                raise ContractError(f"{step.key}: {name} is a part of the buffer {ref.name}; allowed are whole buffers")
            made[ref] = value
            if spec.rows and any(ref in later.bind.values() for later in steps[i + 1 :]):
                stored[ref] = args[name].to(num.storage(spec.dtype), copy=True)
                scatter_rows(stored[ref], args[spec.rows], value, paged=spec.paged)
    return made


class Scattered(FastDecoder):
    """A decoder that permutes the rows of a batch, so that null rows stand among live ones. Prefill is the law's."""

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        if made.prefill:
            space = self.workspace(made)
            space.index = index
            with torch.no_grad():
                for step in made.steps:
                    self.execute(step, space.tensors(step), made)
            return space
        order = row_order(made.tokens, self.state.device)[0]
        return super().run(made, {name: t[order] for name, t in index.items()})

    def tokens(self, space: Workspace) -> Tensor:
        """The tokens of the trajectory, in the order of the requests, null rows last."""
        found = self.leader(space).act["tokens"]
        return found[row_order(len(found), found.device)[1]]

    def leader(self, space: Workspace) -> Workspace:
        """The workspace whose tokens are decoded next."""
        return space


@cache
def row_order(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A fixed permutation of a batch's rows, and its inverse."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    return order.to(device), order.argsort().to(device)


class Lockstep(Scattered):
    """A decoder that judges each served unit while it decodes. Prefill is the law's.

    follow="reference": every unit starts from the reference's values, so that errors are those of one kernel. "twin":
    activations are the reference's, but exact, fused and twin each keep their own state, so that errors accumulate.
    """

    def __init__(
        self, model: Model, state: DecodeState, *, selection: Selection | None = None,
        extra: Mapping[str, Implementation] | None = None, graphs: bool = True, follow: str = "reference",
        capacity: int = 1024,
    ):  # fmt: skip
        if follow not in FOLLOW:
            raise ContractError(f"follow {follow!r}: allowed are {', '.join(FOLLOW)}")
        super().__init__(model, state, backend="latency_specialized", selection=selection, extra=extra, graphs=graphs)
        self.follow, self.judge = follow, Judge(state.device, capacity)
        self.twin_state: DecodeState | None = None
        self.exact_state: DecodeState | None = None
        self.lanes = Lanes(state.device, 1)  # the exact law runs beside the fused law and the twin
        self._eager: dict[Plan, Workspace] = {}
        self.refused: dict[str, str] = {}  # unit key -> why its implementation could not run
        self.served: dict[str, Explained] = {}  # unit key -> the last witness
        self.legal = torch.zeros(model.config.layers, dtype=torch.int64, device=state.device)  # routes inside the error

    def begin(self) -> None:
        """Take the state as it is for the start of all three trajectories; call after prefill and poisoning."""
        self.twin_state = self.state.clone()
        if self.follow == "twin":
            self.exact_state = self.state.to(exact)

    def findings(self) -> list[Finding]:
        return self.judge.findings()

    def ledger(self) -> dict[str, int]:
        """Expert sets that differ from the reference's inside the error."""
        return {"experts inside the error": int(self.legal.sum())}

    def workspace(self, made: Plan) -> Workspace:
        if made.prefill:
            return super().workspace(made)
        if made in self._eager:
            return self._eager[made]
        space = ArenaSpace(made, self.model.weights, self.state.tensors, fused, self.state.device)
        space.mirror = ArenaSpace(made, self.model.weights, self.twin_state.tensors, fused, self.state.device)
        if not self.graphs:  # captured steps own a workspace for each width of the block table
            self._eager[made] = space
        return space

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        if not made.prefill and self.twin_state is None:
            self.begin()
        return super().run(made, index)

    def _walk(self, made: Plan, space: Workspace) -> None:
        explained = []
        with torch.no_grad():
            live = space.index["slots"] > 0
            space.mirror.index = {n: t.clone() for n, t in space.index.items()}
            for ordinal, unit in enumerate(self.units(made)):
                if unit.implementation is None or unit.key in self.refused:
                    explained += [self._law(step, unit, space) for step in unit.steps]
                else:
                    explained += self._check(unit, ordinal, space, live)
            for name, t in space.index.items():
                place = Place("index", len(made.steps), None, (), name)
                self.judge.forbid(place, (t != space.mirror.index[name]).flatten(), _told(f"index tensor {name}"))
            self.judge.flush()
        self._explained[self._last] = explained
        self.served |= {e.key: e for e in explained}

    def _law(self, step: Step, unit: Unit, space: Workspace) -> Explained:
        """Serve a step by the law alone; with follow="twin" on the three states."""
        states = {r for n, r in step.bind.items() if r.space == "state" and step.stage.by_name[n].written}
        if states and self.follow == "twin":
            for num, state in ((exact, self.exact_state), (fused, self.twin_state)):
                self._commit_state((step,), evaluate((step,), space, num, state.tensors), space, state)
        self.execute(step, space.tensors(step), space.plan)
        reason = self.refused.get(unit.key, unit.reason)
        return Explained(step.key, (step.stage.name,), "reference", (), tuple(map(_name, states)), reason)

    def _check(self, unit: Unit, ordinal: int, space: Workspace, live: Tensor) -> list[Explained]:
        refs = span_refs(unit.steps, unit.implementation.arguments)
        specs = {r: s.stage.by_name[n] for s in unit.steps for n, r in s.bind.items() if s.stage.by_name[n].written}
        written = [r for r in refs.values() if r in specs]
        states = [r for r in refs.values() if r.space == "state"]
        with self.lanes.lane(0):
            true_state = space.state if self.exact_state is None else self.exact_state.tensors
            true_values = evaluate(unit.steps, space, exact, true_state)
        before, olds, kernels = self._serve_copy(unit, refs, states, space)
        if kernels is None:
            self.lanes.join()
            return [self._law(step, unit, space) for step in unit.steps]
        ref_values = evaluate(unit.steps, space, fused, space.state)
        self.lanes.join()
        stages = tuple(s.stage.name for s in unit.steps)

        def place(tensor: str) -> Place:
            return Place(unit.key, ordinal, unit.steps[0].layer, stages, tensor)

        mirror = space.mirror
        elsewhere = space.mask((r for r in written if r.space == "act"), inside=False)
        changed = (mirror.words != before) & elsewhere
        self.judge.forbid(place("memory"), changed, lambda word: f"wrote {mirror.locate(word)}, which it may not")
        for ref in states:
            self._compare_state(unit, ref, specs.get(ref), space, olds[ref], ref_values, true_values, place)
        aligned = {r: (ref_values[r], true_values[r]) for r in written if r.space == "act"}
        same, own = live, None  # rows whose outputs are comparable, and what is so in all rows
        if ROUTER in stages:
            own = next(s for s in unit.steps if s.stage.name == ROUTER).bind["weights"]
            same = live & ~self._compare_routes(unit, aligned, space, ref_values, true_values, live, place)
        for ref, (ref_value, true_value) in aligned.items():
            spec, twin = specs[ref], mirror.resolve(ref)
            if spec.dtype.is_floating_point:
                values = (_kept(t, space, mirror) for t in (twin, ref_value.to(spec.dtype), true_value))
                self.judge.add(place(spec.name), *values, live if ref == own else same)
            elif not (ROUTER in stages and spec.name == "ids"):
                differs = (twin != ref_value).flatten(1) if twin.ndim > 1 else (twin != ref_value)[:, None]
                what = _told(f"{spec.name} element", "differs from the reference's")
                self.judge.forbid(place(spec.name), (differs & same[:, None]).flatten(), what)
        self._commit(unit.steps, ref_values, true_values, space)
        touched = tuple(map(_name, (r for r, s in specs.items() if r.space == "state")))
        return [Explained(unit.key, stages, unit.implementation.name, kernels, touched, "")]

    def _serve_copy(self, unit: Unit, refs: Mapping[str, Ref], states: Sequence[Ref], space: Workspace) -> tuple:
        """Run the implementation on copies: (words it found, states it found, kernels that ran or None)."""
        mirror, impl = space.mirror, unit.implementation
        inputs = space.mask(r for n, r in refs.items() if r.space == "act" and not _pure_output(unit, n))
        before = torch.where(inputs, space.words, space.poison)
        mirror.words.copy_(before)
        olds = {}
        for ref in states:
            mine, main = mirror.state[ref.name, ref.layer], space.state[ref.name, ref.layer]
            if self.follow == "reference":
                mine.copy_(main)
            olds[ref] = main if self.follow == "reference" else mine.clone()
        try:
            return before, olds, impl.run({n: mirror.resolve(r) for n, r in refs.items()}, unit.attrs)
        except (NotImplementedError, ContractError) as error:
            self.refused[unit.key] = f"{impl.name} could not run: {error}"
            for ref in states:
                mirror.state[ref.name, ref.layer].copy_(olds[ref])
            return before, olds, None

    def _compare_state(self, unit, ref, spec, space, old, ref_values, true_values, place) -> None:
        """New rows by value, every other row by its bits; spec is None for a state that the span only reads."""
        mine = space.mirror.state[ref.name, ref.layer]
        if spec is None:
            changed = _bits(mine).ne(_bits(old)).any(1)
            self.judge.forbid(place(f"{ref.name} elsewhere"), changed, _told(f"{ref.name} entry"))
            return
        rows = _rows(unit.steps, ref, spec, space)
        flat, flat_old = (t.flatten(0, 1) if spec.paged else t for t in (mine, old))
        new = flat[rows.clamp_min(0)]
        values = new, ref_values[ref].to(spec.dtype), true_values[ref]
        self.judge.add(place(spec.name), *values, rows > 0, axes=spec.sample)
        size = flat.shape[0]
        owned = torch.zeros(size + 1, dtype=torch.bool, device=rows.device)
        owned.index_fill_(0, torch.where(rows > 0, rows, size), True)
        changed = _bits(flat).ne(_bits(flat_old)).any(1) & ~owned[:size]
        what = f"{spec.name} row" if spec.paged else f"{spec.name} slot"
        self.judge.forbid(place(f"{spec.name} elsewhere"), changed, _told(what))

    def _compare_routes(self, unit, aligned, space, ref_values, true_values, live, place) -> Tensor:
        """Judge the expert sets; returns the rows [T] that legally chose others. Weights are compared for the twin's
        own choice: `aligned` gets the law's weights of those experts."""
        step = next(s for s in unit.steps if s.stage.name == ROUTER)
        ids, weights = step.bind["ids"], step.bind["weights"]
        if ids not in aligned:
            return torch.zeros_like(live)
        logits = [v.get(step.bind["logits"], space.resolve(step.bind["logits"])) for v in (ref_values, true_values)]
        theirs, scores = (torch.sigmoid(t.double()) + space.resolve(step.bind["bias"]).double() for t in logits)
        # A twin's scores may be off by as much as rms bounds allow it, and by the floor.
        slack = BOUNDS[f32].rms * (scores - theirs).abs().amax(-1) + FLOOR * scores.abs().amax(-1)
        twin = space.mirror.resolve(ids)
        differs, illegal = routes(twin, ref_values[ids], scores, slack)
        self.judge.forbid(place("ids"), illegal & live, _told("row", "chose experts outside the error"))
        self.legal[step.layer] += (differs & ~illegal & live).sum()
        if weights in aligned:
            chosen = twin.clamp(0, scores.shape[-1] - 1)
            aligned[weights] = tuple(weigh(t, chosen, num) for t, num in zip(logits, (fused, exact), strict=True))
        return differs

    def _commit(self, steps, ref_values, true_values, space) -> None:
        """The reference's values become the trajectory; with follow="twin" exact keeps its own state."""
        for ref, value in ref_values.items():
            if ref.space == "act":
                space.resolve(ref).copy_(value)
        self._commit_state(steps, ref_values, space, self.state)
        if self.exact_state is not None:
            self._commit_state(steps, true_values, space, self.exact_state)

    @staticmethod
    def _commit_state(steps, values, space, state: DecodeState) -> None:
        for step in steps:
            for name, ref in step.bind.items():
                spec = step.stage.by_name[name]
                if ref.space == "state" and spec.mutated:
                    rows = space.resolve(step.bind[spec.rows])
                    scatter_rows(state.tensors[ref.name, ref.layer], rows, values[ref], paged=spec.paged)


def _pure_output(unit: Unit, name: str) -> bool:
    """Whether every stage of the span that knows an argument only writes it."""
    return all(s.stage.by_name[name].role is Role.OUTPUT for s in unit.steps if name in s.stage.by_name)


def _rows(steps: Sequence[Step], ref: Ref, spec, space: Workspace) -> Tensor:
    step = next(s for s in steps if s.bind.get(spec.name) == ref and s.stage.by_name[spec.name].mutated)
    return space.resolve(step.bind[spec.rows]).long()


def _kept(t: Tensor, *spaces: ArenaSpace) -> Tensor:
    """The tensor itself, or a copy if it lies in buffers that change before the statistics are taken."""
    mine = t.untyped_storage().data_ptr()
    return t.clone() if any(s.words.untyped_storage().data_ptr() == mine for s in spaces) else t


def _bits(t: Tensor) -> Tensor:
    return t.flatten(1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def _name(ref: Ref) -> str:
    return f"{ref.name}.{ref.layer}"


def _told(what: str, how: str = "was changed"):
    return lambda index: f"{what} {index} {how}"
