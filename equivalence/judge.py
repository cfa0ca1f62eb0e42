"""Statistics of a run, kept on the device: what was compared, what was worst, and which token was the first bad one.

A walk adds samples and bit-exact checks; `flush` stacks those of equal shape over the layers and updates a few
tensors that were allocated before. Nothing waits for the device until `findings`, so a walk can be captured whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from .compare import BOUNDS, SAMPLE, Bounds, drifts, measure, pooled_ratio, slope, ulps
from .lanes import Lanes

NEVER = -1
UNBOUNDED = 1e100  # a multiple that bounds no row and no element: only the run is judged
LANES = 4  # groups of tensors are independent: a captured walk judges four at a time


@dataclass(frozen=True)
class Place:
    """Where a tensor was compared: the unit's key and ordinal in the walk, its layer, its stages, the tensor."""

    key: str
    ordinal: int
    layer: int | None
    stages: tuple[str, ...]
    tensor: str


@dataclass
class Finding:
    """What a run found about one tensor of one unit.

    check: "value" (bounds of `compare`) or "exact" (bits). reasons: why it is no equality, empty when it is one.
    bad: rows or elements that broke a bound; first_token: the first one, None if never. worst_row: RMS error of the
    worst row relative to the reference's, limit `bounds.rms`; worst_element: relative to its own bound, limit 1.
    worst: token, index in the tensor, the values of twin, reference and exact there, and their distance in ULP.
    effective: how many elements carry the energy, (sum of x^2)^2 / sum of x^4 of the exact values, in so many `rows`.
    halves: the greatest error of an element in units of half a ULP and the floor.
    """

    place: Place
    check: str
    compared: int = 0
    bad: int = 0
    first_token: int | None = None
    reasons: list[str] = field(default_factory=list)
    dtype: str = ""
    bounds: Bounds | None = None
    worst_row: float = 0.0
    worst_element: float = 0.0
    worst: dict = field(default_factory=dict)
    pooled: float = 0.0
    slope: float | None = None
    error: float = 0.0
    reference_error: float = 0.0
    curve: Tensor | None = None
    effective: float = 0.0
    rows: int = 0
    halves: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def hollow(self) -> bool:
        """Nothing was compared by value, or too little where only the error of a run is bounded."""
        needed = SAMPLE if self.bounds and self.bounds.rms >= UNBOUNDED else 1
        return self.check == "value" and self.compared < needed


def _refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("statistics of a new shape in a graph capture; walk once before capturing")


class _Values:
    """Running statistics of E tensors of one shape."""

    def __init__(self, places: Sequence[Place], like: Tensor, bounds: Bounds, axes: int, capacity: int):
        _refuse_capture()
        self.places, self.dtype, self.bounds, self.shape = places, like.dtype, bounds, tuple(like.shape)
        self.axes = axes
        n, device = len(places), like.device

        def zeros(*shape, dtype=torch.float64, value=0):
            return torch.full((n, *shape), value, dtype=dtype, device=device)

        self.row, self.element, self.values = zeros(), zeros(), zeros(3)
        self.at, self.token = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self.first, self.bad = zeros(dtype=torch.int64, value=NEVER), zeros(dtype=torch.int64)
        self.sums, self.norms, self.curve = zeros(3), zeros(4), zeros(capacity, 2, dtype=torch.float32)
        self.halves = zeros()

    def update(self, samples: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], clock: Tensor) -> None:
        twin, ref, exact, live = (torch.stack(list(s)) for s in zip(*samples, strict=True))
        of = twin.shape[: -self.axes]  # the shape of all rows
        rows = live.view(*live.shape, *[1] * (len(of) - 2)).expand(of).flatten(1)
        flat = [t.flatten(-self.axes).flatten(1, -2) for t in (twin, ref, exact)]
        seen = measure(*flat, rows, self.bounds, self.dtype)
        worst, at = seen.element.max(-1)
        better = worst > self.element
        each = torch.arange(len(at), device=at.device)
        values = torch.stack([t.flatten(1)[each, at].double() for t in flat], -1)
        for mine, new in ((self.at, at), (self.token, clock.expand_as(at)), (self.element, worst)):
            mine.copy_(torch.where(better, new, mine))
        self.values.copy_(torch.where(better[:, None], values, self.values))
        self.row.copy_(torch.maximum(self.row, seen.row.amax(-1)))
        broken = (seen.element.unflatten(1, (rows.shape[1], -1)) > 1).any(-1) | (seen.row > 1)
        count = broken.sum(-1)
        self.first.copy_(torch.where((count > 0) & (self.first < 0), clock, self.first))
        self.bad += count
        self.sums += seen.sums
        self.norms += seen.norms
        self.halves.copy_(torch.maximum(self.halves, seen.halves))
        size = seen.norms[:, 2].clamp_min(1e-100)
        rel = torch.stack([(seen.norms[:, i] / size).sqrt() for i in (0, 1)], -1).float()
        self.curve.index_copy_(1, clock.clamp_max(self.curve.shape[1] - 1), rel[:, None])

    def findings(self, tokens: int) -> list[Finding]:
        row, element, values, at, token, first, bad, sums, norms, curve, halves = (
            t.cpu() for t in (self.row, self.element, self.values, self.at, self.token, self.first, self.bad,
                              self.sums, self.norms, self.curve, self.halves)
        )  # fmt: skip
        errors = (norms[:, :2] / norms[:, 2:3].clamp_min(1e-100)).sqrt().tolist()
        effective = (norms[:, 2] / norms[:, 3].sqrt().clamp_min(1e-100)).square().tolist()
        width = prod(self.shape[-self.axes :])
        out = []
        for i, place in enumerate(self.places):
            one = curve[i, :tokens]
            fit, ratio = slope(one), pooled_ratio(sums[i], self.bounds)
            count = int(sums[i, 2])
            reasons = []
            if element[i] == torch.inf:
                reasons.append("non-finite values stand elsewhere than the reference's")
            elif element[i] > 1:
                reasons.append(f"an element is {element[i]:.3g} times its bound away from exact")
            if row[i] > 1:
                reasons.append(f"a row's RMS error is {row[i]:.3g} times its bound")
            if count >= SAMPLE and ratio > self.bounds.pooled:
                reasons.append(f"over the run the RMS error is {ratio:.3g} times the reference's own")
            if drifts(one):
                reasons.append(f"the error drifts away from the reference's with slope {fit[0]:.2f}")
            index = [int(n) for n in torch.unravel_index(at[i], self.shape)]
            t, r, x = values[i].tolist()
            worst = dict(token=int(token[i]), index=index, twin=t, reference=r, exact=x,
                         ulp=ulps(t, r, self.dtype), ulp_exact=ulps(t, x, self.dtype))  # fmt: skip
            out.append(Finding(
                place, "value", count, int(bad[i]), None if first[i] < 0 else int(first[i]), reasons,
                str(self.dtype).removeprefix("torch."), self.bounds, float(row[i]) * self.bounds.rms,
                float(element[i]), worst, ratio, fit and fit[0],
                *errors[i], one, effective[i], -(-count // width), float(halves[i]),
            ))  # fmt: skip
        return out


class _Bits:
    """Running statistics of E bit-exact checks over masks of one length."""

    def __init__(self, places: Sequence[Place], like: Tensor):
        _refuse_capture()
        self.places = places
        self.first, self.at, self.bad = (
            torch.full((len(places),), v, dtype=torch.int64, device=like.device) for v in (NEVER, 0, 0)
        )
        self.compared = 0

    def update(self, changed: Sequence[Tensor], clock: Tensor) -> None:
        stacked = torch.stack(list(changed))
        count = stacked.sum(-1)
        new = (count > 0) & (self.first < 0)
        self.at.copy_(torch.where(new, stacked.to(torch.int8).argmax(-1), self.at))
        self.first.copy_(torch.where(new, clock, self.first))
        self.bad += count

    def findings(self, tell: dict[Place, object]) -> list[Finding]:
        first, at, bad = self.first.tolist(), self.at.tolist(), self.bad.tolist()
        out = []
        for place, f, a, b in zip(self.places, first, at, bad, strict=True):
            finding = Finding(place, "exact", bad=b, first_token=None if f < 0 else f)
            if b:
                finding.reasons.append(tell[place](a))
                finding.worst = dict(token=f, index=[a])
            out.append(finding)
        return out


class Judge:
    """Collects the comparisons of a walk, and what came of all walks. capacity: tokens that the drift curves hold."""

    def __init__(self, device: torch.device, capacity: int = 1024):
        self.capacity, self.lanes = capacity, Lanes(device, LANES)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._values: dict[tuple, _Values] = {}
        self._bits: dict[tuple, _Bits] = {}
        self._tell: dict[Place, object] = {}
        self._samples: list[tuple[Place, Bounds, int, tuple]] = []
        self._masks: list[tuple[Place, Tensor]] = []

    def add(
        self, place: Place, twin: Tensor, ref: Tensor, exact: Tensor, live: Tensor, bounds: Bounds | None = None,
        axes: int = 1,
    ) -> None:  # fmt: skip
        """Compare a tensor [T, ...] by value; live [T] says which tokens count. Tensors are read at `flush`.

        axes: how many trailing axes make a row of `compare`.
        """
        twin, ref, exact = (t[:, None] if t.ndim == 1 else t for t in (twin, ref, exact.double()))
        self._samples.append((place, bounds or BOUNDS[twin.dtype], axes, (twin, ref, exact, live)))

    def forbid(self, place: Place, changed: Tensor, tell) -> None:
        """Require a mask [n] to be all False; tell(index) puts a breach into words."""
        self._tell[place] = tell
        self._masks.append((place, changed))

    def flush(self) -> None:
        """Account for one walk and move to the next token."""
        groups: dict[tuple, list] = {}
        for place, bounds, axes, sample in self._samples:
            key = place.stages, place.tensor, sample[0].shape, sample[0].dtype, bounds, axes
            groups.setdefault(key, []).append((place, sample))
        for i, (key, group) in enumerate(groups.items()):
            places = tuple(p for p, _ in group)
            if (key, places) not in self._values:
                self._values[key, places] = _Values(places, group[0][1][0], *key[-2:], self.capacity)
            with self.lanes.lane(i):
                self._values[key, places].update([s for _, s in group], self.clock)
        masks: dict[tuple, list] = {}
        for place, changed in self._masks:
            masks.setdefault(tuple(changed.shape), []).append((place, changed))
        for shape, group in masks.items():
            places = tuple(p for p, _ in group)
            if (shape, places) not in self._bits:
                self._bits[shape, places] = _Bits(places, group[0][1])
            self._bits[shape, places].update([m for _, m in group], self.clock)
        self.lanes.join()
        self._samples, self._masks = [], []
        self.clock += 1

    def findings(self) -> list[Finding]:
        """Everything found so far, in the order of the walk. Waits for the device."""
        tokens = int(self.clock)
        found = [f for v in self._values.values() for f in v.findings(min(tokens, self.capacity))]
        found += [f for b in self._bits.values() for f in b.findings(self._tell)]
        return sorted(found, key=lambda f: (f.place.ordinal, f.place.tensor, f.check))


def first_bad(findings: Sequence[Finding]) -> Finding | None:
    """The earliest (token, unit, tensor) that broke a bound; findings that only a whole run shows come last."""
    bad = [f for f in findings if not f.ok]
    late = 1 << 62
    return min(bad, key=lambda f: (late if f.first_token is None else f.first_token, f.place.ordinal), default=None)
