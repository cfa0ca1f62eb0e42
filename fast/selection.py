"""Which implementation serves which (layer, stage), as a value that may change between any two tokens.

A selection is a list of rules, the last matching rule wins: "kda.decode=reference@3-7, attn_res=fast". The left side
names a stage, a twin (all the stages it covers) or `*`; the right side `fast`, `reference`, or an implementation that
the caller registered (a mutant, say); `@` limits the rule to layers (0-based, inclusive).
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from reference.plan import Plan, Step
from reference.stage import STAGES, TWINS, ContractError, Twin

from .kernel import device_arch, launch


class Implementation(Protocol):
    """Anything that can serve a span of stages in place of the law."""

    name: str
    spans: tuple[tuple[str, ...], ...]
    arguments: tuple[str, ...]  # names of the tensors and attributes it takes

    def unfit(self, plan: Plan, device: torch.device) -> str | None:
        """Why it cannot serve this plan on this device, or None."""

    def run(self, tensors: Mapping[str, Tensor], attrs: Mapping) -> tuple[str, ...]:
        """Serve one span, writing into the tensors; returns what really ran, for the witness."""


@dataclass(frozen=True)
class Fast:
    """A registered twin as an implementation."""

    twin: Twin

    @property
    def name(self) -> str:
        return self.twin.name

    @property
    def spans(self) -> tuple[tuple[str, ...], ...]:
        return self.twin.covers

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.twin.pick).parameters)

    def unfit(self, plan: Plan, device: torch.device) -> str | None:
        low, high = self.twin.batch
        if plan.prefill:
            return "prefill is served by the reference"
        if not low <= plan.tokens <= high:
            return f"batch {plan.tokens}: {self.name} serves {low}..{high}"
        try:
            arch = self.arch(device)
        except NotImplementedError as error:
            return str(error)
        return None if arch in self.twin.archs else f"{arch}: {self.name} serves {', '.join(self.twin.archs)}"

    def arch(self, device: torch.device) -> str:
        """The target that runs on a device. Raises NotImplementedError for a device that none does."""
        return device_arch(device)

    def run(self, tensors: Mapping[str, Tensor], attrs: Mapping) -> tuple[str, ...]:
        return launch(self.twin, tensors, attrs)


@dataclass(frozen=True)
class Rule:
    target: str
    implementation: str
    layers: tuple[int, int] | None = None

    def covers(self, step: Step, stages: frozenset[str]) -> bool:
        inside = self.layers is None or (step.layer is not None and self.layers[0] <= step.layer <= self.layers[1])
        return inside and step.stage.name in stages


@dataclass(frozen=True)
class Selection:
    """An ordered list of rules. Empty: every stage that a twin can serve is served by it."""

    rules: tuple[Rule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Selection":
        """Read "TARGET=IMPLEMENTATION[@LAYER[-LAYER]], ...". Raises ContractError naming the bad part."""
        rules = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            m = re.fullmatch(r"([\w.*]+)=([\w.:-]+?)(?:@(\d+)(?:-(\d+))?)?", part)
            if not m:
                raise ContractError(f"swap {part!r}: the form is STAGE=IMPLEMENTATION[@LAYER[-LAYER]]")
            target, implementation, first, last = m.groups()
            layers = None if first is None else (int(first), int(last or first))
            if layers and layers[0] > layers[1]:
                raise ContractError(f"swap {part!r}: layers {layers[0]}-{layers[1]} are empty")
            rules.append(Rule(target, implementation, layers))
        return cls(tuple(rules))

    def swap(self, target: str, implementation: str, layers: tuple[int, int] | None = None) -> "Selection":
        """This selection with one more rule at its end."""
        return replace(self, rules=(*self.rules, Rule(target, implementation, layers)))

    def choose(self, steps: Iterable[Step], known: Mapping[str, Implementation]) -> list[str]:
        """The implementation's name for each step. Raises ContractError for an unknown target or implementation."""
        steps = list(steps)
        chosen = ["fast"] * len(steps)
        for rule in self.rules:
            stages = _stages(rule.target, known)
            if rule.implementation not in ("fast", "reference", *known):
                allowed = ", ".join(("fast", "reference", *sorted(known)))
                raise ContractError(f"implementation {rule.implementation!r}: allowed are {allowed}")
            for i, step in enumerate(steps):
                if rule.covers(step, stages):
                    chosen[i] = rule.implementation
        return chosen


def _stages(target: str, known: Mapping[str, Implementation]) -> frozenset[str]:
    if target == "*":
        return frozenset(STAGES)
    if target in known:
        return frozenset(s for span in known[target].spans for s in span)
    if target in STAGES:
        return frozenset((target,))
    raise ContractError(f"{target!r} is no stage and no twin; twins: {', '.join(known)}; stages: {', '.join(STAGES)}")


@dataclass(frozen=True)
class Unit:
    """Consecutive steps served by one implementation (None: the law, always one step) and why the law serves them."""

    steps: tuple[Step, ...]
    implementation: Implementation | None
    reason: str = ""

    @property
    def key(self) -> str:
        """Where it stands, e.g. "07.kda.decode"."""
        step = self.steps[0]
        name = step.stage.name if len(self.steps) == 1 else self.implementation.name
        return name if step.layer is None else f"{step.layer:02d}.{name}"

    @property
    def attrs(self) -> dict:
        return {k: v for s in self.steps for k, v in s.attrs.items()}


def twins() -> dict[str, Implementation]:
    """Every registered twin by name."""
    return {name: Fast(t) for name, t in TWINS.items()}


def divide(plan: Plan, selection: Selection, known: Mapping[str, Implementation], device: torch.device) -> list[Unit]:
    """Cut a plan into units: the longest span that one implementation serves, else the law, with the reason."""
    chosen = selection.choose(plan.steps, known)
    units, i = [], 0
    while i < len(plan.steps):
        unit = _unit(plan, i, chosen, known, device)
        units.append(unit)
        i += len(unit.steps)
    return units


def _unit(plan: Plan, i: int, chosen: Sequence[str], known: Mapping[str, Implementation], device: torch.device) -> Unit:
    steps = plan.steps[i : i + 8]
    names = tuple(s.stage.name for s in steps)
    bases = tuple(s.stage.base or s.stage.name for s in steps)  # what a twin of the usual state would match
    reason = "no twin"
    spans = [(span, impl) for impl in known.values() for span in impl.spans]
    for span, impl in sorted(spans, key=lambda c: len(c[0]), reverse=True):
        n = len(span)
        if names[:n] != span:
            if bases[:n] == span:
                reason = f"{impl.name} has no form for {next(a for a in names if a not in span)}"
            continue
        picks = set(chosen[i : i + n])
        if picks == {impl.name} or (picks == {"fast"} and impl.name in TWINS):
            reason = impl.unfit(plan, device) or ""
            if not reason:
                return Unit(plan.steps[i : i + n], impl)
        elif "reference" in picks:
            reason = "selected" if len(picks) == 1 else "another stage of the span is served by the reference"
    return Unit((plan.steps[i],), None, reason)


def span_refs(steps: Sequence[Step], arguments: Iterable[str]) -> dict:
    """The references of a span's arguments by name; a name bound to two different places is a ContractError."""
    refs = {}
    for step in steps:
        for name, ref in step.bind.items():
            if name in arguments and refs.setdefault(name, ref) != ref:
                raise ContractError(f"{step.key}: argument {name!r} is {ref} here and {refs[name]} earlier in the span")
    return refs
