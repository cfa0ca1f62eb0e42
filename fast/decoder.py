"""The specialised decoder: walks the same plan, serves spans by twins, captures decode steps into CUDA graphs.

`backend="latency_specialized"` is opt-in. It serves decode-only steps of 1 to 64 rows on sm_90a, sm_100a and sm_103a;
everything else (prefill, larger batches, another chip) falls back to the law and says so in `explain()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.decoder import Decoder, Model
from reference.numerics import fused
from reference.plan import Plan, Workspace
from reference.stage import ContractError
from reference.state import DecodeState

from .selection import Implementation, Selection, Unit, divide, span_refs, twins

BACKENDS = ("reference", "latency_specialized")


@dataclass(frozen=True)
class Explained:
    """What served one unit of the last step."""

    key: str
    stages: tuple[str, ...]
    served_by: str
    kernels: tuple[str, ...]
    state: tuple[str, ...]  # state tensors the unit may change
    reason: str  # why this implementation


class FastDecoder(Decoder):
    """A decoder whose stages can be swapped between any two tokens, under CUDA graphs too.

    extra: further implementations by name, for selections to use. graphs: capture decode steps (CUDA only).
    """

    def __init__(
        self, model: Model, state: DecodeState, *, backend: str = "reference", selection: Selection | None = None,
        extra: Mapping[str, Implementation] | None = None, graphs: bool = True,
    ):  # fmt: skip
        if backend not in BACKENDS:
            raise ContractError(f"decode_backend {backend!r}: allowed are {', '.join(BACKENDS)}")
        if state.num != fused:
            raise ContractError(f"twins run in the `fused` mode; the state is kept in `{state.num.mode}`")
        super().__init__(model, state, fused)
        self.backend, self.selection = backend, selection or Selection()
        self.known = twins() | dict(extra or {})
        self.graphs = graphs and state.device.type == "cuda"
        self._spaces: dict[tuple, Workspace] = {}
        self._captured: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._seen: set[tuple] = set()
        self._explained: dict[tuple, list[Explained]] = {}
        self._last: tuple | None = None

    def swap(self, target: str, implementation: str, layers: tuple[int, int] | None = None) -> None:
        """From the next token on, let `implementation` serve `target` (a stage, a twin or `*`) in these layers."""
        selection = self.selection.swap(target, implementation, layers)
        selection.choose((), self.known)  # raises for an unknown name before anything changes
        self.selection = selection

    def explain(self) -> list[Explained]:
        """Per unit of the last step: who served it and why, with which kernels, what state it may change."""
        return self._explained.get(self._last, [])

    def units(self, plan: Plan) -> list[Unit]:
        """How this plan is cut and served under the present selection."""
        if self.backend == "reference":
            return [Unit((step,), None, "the reference backend is selected") for step in plan.steps]
        return divide(plan, self.selection, self.known, self.state.device)

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        if made.prefill or not self.graphs:
            space = self.workspace(made)
            space.index = index
            self._last = (made, self.selection)
            self._walk(made, space)
            return space
        index = _bucketed(index)
        shape = made, index["block_table"].shape[1]
        if shape not in self._spaces:
            self._spaces[shape] = self.workspace(made)
            self._spaces[shape].index = {name: t.clone() for name, t in index.items()}
        space = self._spaces[shape]
        for name, t in index.items():
            space.index[name].copy_(t)
        key = self._last = (*shape, self.selection)
        if key in self._captured:
            self._captured[key].replay()
        elif key not in self._seen:  # the first step compiles and allocates; it cannot be captured
            self._seen.add(key)
            self._walk(made, space)
        else:
            self._captured[key] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._walk(made, space)
            graph.replay()
        return space

    def _walk(self, made: Plan, space: Workspace) -> None:
        explained = []
        with torch.no_grad():
            for unit in self.units(made):
                explained.append(self.serve(unit, space))
        self._explained[self._last] = explained

    def serve(self, unit: Unit, space: Workspace) -> Explained:
        """Run one unit on the workspace's tensors."""
        kernels, served_by = (), "reference"
        if unit.implementation is None:
            step = unit.steps[0]
            self.execute(step, space.tensors(step), space.plan)
        else:
            served_by = unit.implementation.name
            refs = span_refs(unit.steps, unit.implementation.arguments)
            kernels = unit.implementation.run({n: space.resolve(r) for n, r in refs.items()}, unit.attrs)
        touched = (f"{r.name}.{r.layer}" for s in unit.steps for n, r in s.bind.items()
                   if r.space == "state" and s.stage.by_name[n].written)  # fmt: skip
        return Explained(
            unit.key, tuple(s.stage.name for s in unit.steps), served_by, kernels, tuple(touched), unit.reason
        )


def _bucketed(index: dict[str, Tensor]) -> dict[str, Tensor]:
    """Block table widened to the next power of two with null pages, so that few graphs serve all lengths."""
    table = index["block_table"]
    width = 1 << (table.shape[1] - 1).bit_length()
    return index | dict(block_table=torch.nn.functional.pad(table, (0, width - table.shape[1])))
