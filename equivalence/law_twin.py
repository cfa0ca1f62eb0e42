"""The law as an implementation: what a correct twin looks like to the engine, and the base of seeded faults."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fast.selection import Rule, Selection
from reference.numerics import Numerics, fused
from reference.plan import Plan
from reference.stage import STAGES, ContractError, Role, scatter_rows


class LawTwin:
    """Serves a span by its law in one precision mode; values between its stages never touch a buffer.

    spoil(values, tensors) may change the law's values, by argument name, before they are written, and write to the
    tensors itself; it stands for a fault.
    """

    def __init__(self, name: str, span: Sequence[str], num: Numerics = fused, spoil: Callable | None = None):
        self.name, self.spans, self.num, self.spoil = name, (tuple(span),), num, spoil
        self.inner, made, mutated = set(), set(), set()
        for stage in map(STAGES.__getitem__, span):
            read = {t.name for t in stage.tensors if t.role is not Role.OUTPUT}
            if read & mutated:
                raise ContractError(f"{name}: a state passes from stage to stage in {span}; allowed are other spans")
            self.inner |= read & made
            made |= {t.name for t in stage.tensors if t.role is Role.OUTPUT}
            mutated |= {t.name for t in stage.tensors if t.mutated}
        names = dict.fromkeys(t.name for s in span for t in STAGES[s].tensors if t.name not in self.inner)
        self.arguments = (*names, *dict.fromkeys(a for s in span for a in STAGES[s].attrs))

    def unfit(self, plan: Plan, device: torch.device) -> str | None:
        return "prefill is served by the reference" if plan.prefill else None

    def run(self, tensors: Mapping[str, Tensor], attrs: Mapping) -> tuple[str, ...]:
        values: dict[str, Tensor] = {}
        for name in self.spans[0]:
            stage = STAGES[name]
            args = {t.name: (values if t.name in self.inner else tensors).get(t.name) for t in stage.tensors
                    if t.role is not Role.OUTPUT}  # fmt: skip
            own = {k: v for k, v in attrs.items() if k in stage.attrs}
            values |= stage.call({n: t for n, t in args.items() if t is not None}, own, self.num)
        if self.spoil:
            self.spoil(values, tensors)
        for name, value in values.items():
            if name in tensors:
                spec = next(STAGES[s].by_name[name] for s in self.spans[0] if name in STAGES[s].by_name)
                if spec.rows:
                    scatter_rows(tensors[name], tensors[spec.rows], value, paged=spec.paged)
                else:
                    tensors[name].copy_(value)
        return (f"law-{self.num.mode}",)


def served_by(*twins: LawTwin, layers: tuple[int, int] | None = None) -> dict:
    """Arguments `selection` and `extra` that let these implementations serve their spans, the law all else."""
    rules = [Rule("*", "reference")]
    for twin in twins:
        if len(twin.spans) != 1:
            raise ContractError(f"{twin.name} has {len(twin.spans)} spans; allowed is 1")
        rules += [Rule(stage, twin.name, layers) for stage in twin.spans[0]]
    return dict(selection=Selection(tuple(rules)), extra={t.name: t for t in twins})


def every_stage(num: Numerics = fused) -> list[LawTwin]:
    """One implementation for each stage of the model."""
    return [LawTwin(f"law.{name}", (name,), num) for name in STAGES]
