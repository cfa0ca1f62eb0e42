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

KINDS = (dict(kda="KDA", mla="MLA"), dict(mlp="a dense MLP", moe="a mixture of experts"))  # what makes up a layer


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


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 4] -> "0-2, 4"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join("-".join(map(str, dict.fromkeys(run))) for run in runs)


def nowhere(rule: Rule, known: Mapping[str, Implementation], steps: Sequence[Step]) -> str | None:
    """Why a rule covers none of these steps: what its layers are, and which layers have its stages. None: it covers
    some. Raises ContractError for an unknown target."""
    stages = _stages(rule.target, known)
    if any(rule.covers(s, stages) for s in steps):
        return None
    there = [s for s in steps if s.stage.name in stages]
    if not there:
        return f"no layer has {rule.target}"
    layers = {s.layer for s in there} - {None}
    if not layers:
        return f"{rule.target} belongs to no layer; allowed without @"
    first, last = rule.layers
    kinds = {s.stage.name.partition(".")[0] for s in steps if s.layer is not None and first <= s.layer <= last}
    asked = f"layer {first} is" if first == last else f"layers {first}-{last} are"
    what = f"there is no layer {first}"
    if kinds:
        what = f"{asked} {' with '.join(' and '.join(told[k] for k in told if k in kinds) for told in KINDS)}"
    names = dict.fromkeys(s.stage.name for s in there)
    covers = "" if rule.target in names else f" ({', '.join(names)})"
    return f"{what}; {rule.target}{covers} is in layer{'s' * (len(layers) > 1)} {ranges(layers)}"


@dataclass(frozen=True)
class Unit:
    """Consecutive steps served by one implementation (None: the law, always one step) and why it serves them."""

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
    cut = _Cut(plan, selection.choose(plan.steps, known), known, device)
    units, i = [], 0
    while i < len(plan.steps):
        unit = cut.unit(i)
        units.append(unit)
        i += len(unit.steps)
    return units


class _Cut:
    """One plan and what was chosen for its steps."""

    def __init__(self, plan: Plan, chosen: Sequence[str], known: Mapping[str, Implementation], device: torch.device):
        self.plan, self.chosen, self.device = plan, chosen, device
        self.names = tuple(s.stage.name for s in plan.steps)
        self.usual = tuple(s.stage.base or s.stage.name for s in plan.steps)  # what a twin of the usual state matches
        # Longest first: the spans that begin with a stage, and those that hold it, with where it stands in them.
        self.beginning: dict[str, list[tuple[tuple[str, ...], Implementation]]] = {}
        self.holding: dict[str, list[tuple[tuple[str, ...], Implementation, int]]] = {}
        every = ((span, impl) for impl in known.values() for span in impl.spans)
        for span, impl in sorted(every, key=lambda c: -len(c[0])):
            self.beginning.setdefault(span[0], []).append((span, impl))
            for at in reversed(range(len(span))):
                self.holding.setdefault(span[at], []).append((span, impl, at))
        self.reasons: dict[int, str | None] = {}  # why an implementation (its id) cannot serve the plan

    def unfit(self, impl: Implementation) -> str | None:
        if id(impl) not in self.reasons:
            self.reasons[id(impl)] = impl.unfit(self.plan, self.device)
        return self.reasons[id(impl)]

    def unit(self, i: int) -> Unit:
        for span, impl in self.beginning.get(self.names[i], ()):
            picks = self.chosen[i : i + len(span)]
            if self.names[i : i + len(span)] == span and all(_takes(impl, p) for p in picks) and not self.unfit(impl):
                reason = "no rule says otherwise" if set(picks) == {"fast"} else "selected"
                return Unit(self.plan.steps[i : i + len(span)], impl, reason)
        return Unit((self.plan.steps[i],), None, self.why_law(i))

    def why_law(self, i: int) -> str:
        """Why no implementation serves a step: the reason of the longest span, wherever in it the step stands."""
        chosen = self.chosen[i]
        if chosen == "reference":
            return "selected"
        for span, impl, at in self.holding.get(self.usual[i], ()):
            if at <= i and self.usual[i - at : i - at + len(span)] == span and _takes(impl, chosen):
                return self.why_not(span, impl, i - at)
        return "no twin" if chosen == "fast" else f"{chosen} is selected and has no such stage"

    def why_not(self, span: tuple[str, ...], impl: Implementation, first: int) -> str:
        """Why an implementation does not serve the steps from `first` on, whose usual names are those of its span."""
        names, picks = self.names[first : first + len(span)], self.chosen[first : first + len(span)]
        if names != span:
            return f"{impl.name} has no form for {next(n for n in names if n not in span)}"
        others = [f"{n}={p}" for n, p in zip(names, picks, strict=True) if not _takes(impl, p)]
        together = f"{impl.name} serves {', '.join(span)} only together"
        if others:
            together += f", and the rules say {', '.join(others)}"
        unfit = self.unfit(impl)
        return f"{together}; {unfit}" if others and unfit else unfit or together


def _takes(impl: Implementation, pick: str) -> bool:
    return pick == impl.name or (pick == "fast" and impl.name in TWINS)


def span_refs(steps: Sequence[Step], arguments: Iterable[str]) -> dict:
    """The references of a span's arguments by name; a name bound to two different places is a ContractError."""
    refs = {}
    for step in steps:
        for name, ref in step.bind.items():
            if name in arguments and refs.setdefault(name, ref) != ref:
                raise ContractError(f"{step.key}: argument {name!r} is {ref} here and {refs[name]} earlier in the span")
    return refs
