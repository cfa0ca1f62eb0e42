"""Bisection by swapping: which (layer, stage) makes a model run leave its reference?

All runs decode the same tokens over the same prefilled state, with the expert routes of the fused reference forced, so
that a run differs from another only by who served which unit. A run's error is measured against `exact` and divided by
the fused reference's own error; prefixes of units (layer-major) are served by their twins, the rest by the law.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from fast.decoder import FastDecoder
from fast.selection import Implementation, Rule, Selection, Unit
from reference.decoder import Model
from reference.numerics import exact, fused
from reference.plan import plan

from .forced import RoutedFast, Trace, follow, prepare, reference_run

CLEAN = 2.0  # times the reference's own error: what a run served by correct twins may show (see `ratio`)
OBSERVED = ("outputs", "state")


@dataclass
class Run:
    """One model run of the search: which units their twins served, and the error relative to the reference's own."""

    served: str
    ratio: float
    bad: bool


@dataclass
class Bisection:
    """The verdict. layer and stages of the first bad unit are None when all runs agree or blame is not unique."""

    verdict: str  # "equal", "disagreement", "could not judge"
    text: str
    units: int
    model_runs: int
    key: str | None = None
    layer: int | None = None
    stages: tuple[str, ...] = ()
    runs: list[Run] = field(default_factory=list)

    def as_dict(self) -> dict:
        return asdict(self)


def error(trace: Trace, truth: Trace, on: str) -> float:
    """Root mean square of the difference to the exact run, relative to its own size; inf where it is not finite.

    on: "outputs" (the logits of all tokens) or "state" (the worst state tensor at the end; slots and pages that hold
    NaN on purpose in both runs are left out).
    """
    pairs = [(trace.logits, truth.logits)]
    if on == "state":
        pairs = [(trace.state.tensors[k], t) for k, t in truth.state.tensors.items()]
    return max(_relative(a.double(), b.double()) for a, b in pairs)


def _relative(a: Tensor, b: Tensor) -> float:
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def bisect(
    model: Model, prompts: Sequence[Sequence[int]], *, steps: int = 32, on: str = "outputs",
    selection: Selection | None = None, extra: Mapping[str, Implementation] | None = None,
    device: torch.device | str = "cpu", progress=lambda text: None,
) -> Bisection:  # fmt: skip
    """Find the first unit whose implementation makes `on` leave the reference.

    selection: the serving under suspicion (default: every twin). Model runs: 3 to establish truth, noise and suspicion,
    ceil(log2(units)) to search, 2 to confirm (the unit alone is bad; everything but the unit is good).
    """
    if on not in OBSERVED:
        raise ValueError(f"bisect on {on!r}: allowed are {', '.join(OBSERVED)}")
    selection = selection or Selection()
    state, requests, tokens = prepare(model, prompts, steps, device)
    served = _served(model, state, len(prompts), selection, extra)
    if not served:
        return Bisection("could not judge", "no unit of this plan is served by a twin here", 0, 0)

    progress("reference")
    reference = reference_run(model, state, requests, tokens, fused)
    progress("exact")
    truth = reference_run(model, state, requests, tokens, exact, reference.routes)
    own = error(reference, truth, on)
    if not math.isfinite(own) or not truth.logits.isfinite().all():
        return Bisection("could not judge", f"the reference's own {on} are not finite", len(served), 2)
    search = _Search(model, state, requests, tokens, reference.routes, truth, own, selection, extra, on, progress)

    everything = search.run(served, "every twin")
    if everything.ratio <= CLEAN:
        text = f"{on} of {steps} tokens stay within {everything.ratio:.2f} of the reference's own error"
        return search.result("equal", text, len(served))
    search.limit = max(CLEAN, math.sqrt(everything.ratio)) if math.isfinite(everything.ratio) else CLEAN
    low, high = 0, len(served)  # serving `low` units is good, serving `high` is bad
    while high - low > 1:
        middle = (low + high) // 2
        if search.run(served[:middle], f"the first {middle} units").bad:
            high = middle
        else:
            low = middle
    return _confirm(search, served, served[high - 1], on)


def _confirm(search: "_Search", served: list[Unit], suspect: Unit, on: str) -> Bisection:
    alone = search.run([suspect], f"{suspect.key} alone")
    others = search.run([u for u in served if u is not suspect], f"all but {suspect.key}")
    if not alone.bad:
        text = f"{on} part when {suspect.key} joins the units before it, not when it is served alone"
        return search.result("disagreement", text, len(served))
    more = "; further units are bad too" if others.bad else ""
    text = f"{on} first part at {suspect.key}: {alone.ratio:.3g} times the reference's own error{more}"
    layer, stages = suspect.steps[0].layer, tuple(s.stage.name for s in suspect.steps)
    return search.result("disagreement", text, len(served), key=suspect.key, layer=layer, stages=stages)


def _served(model, state, rows, selection, extra) -> list[Unit]:
    decoder = FastDecoder(model, state, backend="latency_specialized", selection=selection, extra=extra)
    return [u for u in decoder.units(plan(model.config, rows)) if u.implementation]


@dataclass
class _Search:
    model: Model
    state: object
    requests: Sequence
    tokens: Tensor
    routes: list
    truth: Trace
    own: float
    selection: Selection
    extra: Mapping[str, Implementation] | None
    on: str
    progress: object
    limit: float = CLEAN
    runs: list[Run] = field(default_factory=list)

    def run(self, units: Sequence[Unit], text: str) -> Run:
        """One model run with exactly these units served by their implementations."""
        self.progress(text)
        rules = [Rule("*", "reference")]
        for u in units:
            layers = None if u.steps[0].layer is None else (u.steps[0].layer,) * 2
            rules += [Rule(s.stage.name, u.implementation.name, layers) for s in u.steps]
        decoder = RoutedFast(
            self.model, self.state.clone(), backend="latency_specialized", selection=Selection(tuple(rules)),
            extra=self.extra, graphs=False,
        )  # fmt: skip
        trace = follow(decoder, self.requests, self.tokens, self.routes)
        ran = {e.key for e in decoder.explain() if e.served_by != "reference"}
        missing = [u.key for u in units if u.key not in ran]
        if missing:
            raise RuntimeError(f"{missing[0]} was to be served by its twin and was not")
        # An exact reference (own error 0) is possible for a bit-exact chain; then any error is bad.
        off = error(trace, self.truth, self.on)
        ratio = off / self.own if self.own else (math.inf if off else 0.0)
        self.runs.append(Run(text, ratio, ratio > self.limit))
        return self.runs[-1]

    def result(self, verdict: str, text: str, units: int, **found) -> Bisection:
        return Bisection(verdict, text, units, 2 + len(self.runs), runs=self.runs, **found)
