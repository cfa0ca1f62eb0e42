"""The contract: what a decode stage is, and how a twin of it is registered.

A `Stage` is data first: axes, tensors with roles, constraints, bytes and flops; its law is a pure function. Both twins
are called the same way, with the same argument names, and write into tensors that the caller owns.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from .numerics import Numerics

bf16, f32, i32, i64, u8 = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8
f8 = torch.float8_e4m3fn


class Role(StrEnum):
    """What a tensor is to a step. The order checkers use it to say which loads may precede a wait."""

    WEIGHT = "weight"  # constant since load
    ACTIVATION = "activation"  # produced during the step
    STATE = "state"  # lives across steps, mutated
    INDEX = "index"  # block tables, slots, positions: produced by the host between steps
    SCRATCH = "scratch"  # private to a kernel; zero at first use, left zeroed or rewritten before it is read
    OUTPUT = "output"  # written by the stage


class ContractError(ValueError):
    """An argument breaks a stage's contract. The message names stage, tensor, value and what is allowed."""


@dataclass(frozen=True)
class Tensor_:
    """One argument: its axes by name, dtype, role, and the stride demand.

    `strides` is "dense" (row-major, no gaps) or "rows" (the first axis may have any stride, the rest is dense).
    `rows` names the index tensor that lists which rows of a state the step may touch, `paged` says that those rows
    count through the first two axes together; `mutated` marks a tensor that is read and written; `optional` one that
    may be None. `sample` trailing axes are one sample of rounding errors: a comparison judges them as one row.
    """

    name: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    role: Role
    strides: str = "dense"
    rows: str | None = None
    paged: bool = False
    mutated: bool = False
    optional: bool = False
    sample: int = 1

    @property
    def written(self) -> bool:
        return self.role is Role.OUTPUT or self.mutated


def _spec(role: Role, dtype: torch.dtype):
    def make(name: str, axes: str, dtype: torch.dtype = dtype, **kw) -> Tensor_:
        return Tensor_(name, tuple(axes.split()), dtype, role, **kw)

    return make


weight = _spec(Role.WEIGHT, bf16)
activation = _spec(Role.ACTIVATION, bf16)
index = _spec(Role.INDEX, i32)
output = _spec(Role.OUTPUT, bf16)


def state(name: str, axes: str, dtype: torch.dtype = bf16, *, rows: str, **kw) -> Tensor_:
    return Tensor_(name, tuple(axes.split()), dtype, Role.STATE, rows=rows, mutated=True, **kw)


def scatter_rows(target: Tensor, rows: Tensor, new: Tensor, *, paged: bool) -> None:
    """Write new[i] to row rows[i] of a state tensor; rows <= 0 are null and leave it as it was."""
    flat = target.flatten(0, 1) if paged else target
    at = rows.long().clamp_min(0)
    live = (rows > 0).view(-1, *[1] * (flat.ndim - 1))
    flat[at] = torch.where(live, new.to(flat.dtype), flat[at])


@dataclass(frozen=True)
class Constraint:
    """A rule about values or sizes. `broken(tensors, dims)` returns None or what is wrong and what is allowed."""

    text: str
    broken: Callable[[Mapping[str, Tensor], Mapping[str, int]], str | None]
    reads_values: bool = False  # True: needs tensor contents, so it is checked outside captured graphs


def unique_live(name: str) -> Constraint:
    """No two live rows share a slot: a slot id > 0 occurs at most once."""

    def broken(tensors, dims):
        live = tensors[name][tensors[name] > 0]
        values, counts = live.unique(return_counts=True)
        twice = values[counts > 1]
        return f"{name} holds slot {int(twice[0])} more than once; live slots must differ" if len(twice) else None

    return Constraint(f"live {name} differ", broken, reads_values=True)


def within(name: str, axis: str, low: int = -(2**31)) -> Constraint:
    """Every entry of an index tensor is below the size of `axis` (and at least `low`)."""

    def broken(tensors, dims):
        t = tensors[name]
        bad = t[(t >= dims[axis]) | (t < low)]
        return (
            f"{name} holds {int(bad.flatten()[0])}; allowed are {max(low, 0)}..{dims[axis] - 1}" if len(bad) else None
        )

    return Constraint(f"{name} < {axis}", broken, reads_values=True)


@dataclass
class Stage:
    """One elementary decode operation.

    name: field name, e.g. "kda.recurrence". spec: section of SPEC.md. axes: name -> (meaning, or a constant int).
    base: the stage whose place this one takes in a model that keeps its state otherwise.
    law(**tensors, **attrs, num=) is pure: it returns a dict of written tensors, each complete (outputs) or, for a
    tensor with `rows`, only the new rows in the order of that index tensor.
    flops(dims, attrs): arithmetic operations of one call; bytes follow from the tensors unless `traffic` is given.
    """

    name: str
    spec: str
    axes: Mapping[str, str | int]
    tensors: tuple[Tensor_, ...]
    constraints: tuple[Constraint, ...] = ()
    attrs: Mapping[str, str] = field(default_factory=dict)  # static arguments and their meaning
    flops: Callable[[Mapping[str, int], Mapping], int] = lambda dims, attrs: 0
    traffic: Callable[[Mapping[str, int], Mapping], int] | None = None
    fn: Callable | None = None
    prefill_fn: Callable | None = None
    base: str = ""

    def __post_init__(self):
        if self.name in STAGES:
            raise ValueError(f"stage {self.name!r} is defined twice")
        STAGES[self.name] = self
        self.by_name = {t.name: t for t in self.tensors}

    def law(self, fn: Callable) -> Callable:
        self.fn = fn
        return fn

    def prefill(self, fn: Callable) -> Callable:
        """Register the law for many tokens of one request; stages without one treat tokens independently."""
        self.prefill_fn = fn
        return fn

    def dims(self, tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
        """Axis sizes read off the arguments, after checking names, ranks, dtypes, devices and agreement."""
        dims = {a: v for a, v in self.axes.items() if isinstance(v, int)}
        unknown = set(tensors) - set(self.by_name)
        if unknown:
            raise ContractError(
                f"{self.name}: unknown tensor {sorted(unknown)[0]!r}; it takes {', '.join(self.by_name)}"
            )
        for spec in self.tensors:
            t = tensors.get(spec.name)
            if t is None:
                if not spec.optional:
                    raise ContractError(f"{self.name}: tensor {spec.name!r} is missing")
                continue
            if t.ndim != len(spec.axes):
                raise ContractError(
                    f"{self.name}: {spec.name} has shape {tuple(t.shape)}; its axes are {' '.join(spec.axes)}"
                )
            for axis, size in zip(spec.axes, t.shape, strict=True):
                want = dims.setdefault(axis, int(axis) if axis.isdigit() else size)
                if want != size:
                    raise ContractError(f"{self.name}: {spec.name} has {axis} = {size}; allowed is {want}")
        return dims

    def check(self, tensors: Mapping[str, Tensor | None], *, num: Numerics | None = None, values: bool = True) -> dict:
        """Check arguments against the contract; return the axis sizes. The one checker of both twins.

        num: precision mode whose storage dtypes are expected (None: those of the contract, as twins need).
        values: also check constraints that read tensor contents (a device synchronisation).
        """
        dims = self.dims(tensors)
        for spec in self.tensors:
            t = tensors.get(spec.name)
            if t is None:
                continue
            want = num.storage(spec.dtype) if num else spec.dtype
            if t.dtype != want:
                raise ContractError(f"{self.name}: {spec.name} is {t.dtype}; allowed is {want}")
            inner = t[:1] if spec.strides == "rows" and t.ndim > 1 else t
            if num is None and not inner.is_contiguous():
                raise ContractError(
                    f"{self.name}: {spec.name} has strides {t.stride()} for shape {tuple(t.shape)}; allowed is "
                    + ("a dense row" if spec.strides == "rows" else "dense row-major")
                )
        for rule in self.constraints:
            if rule.reads_values and not values:
                continue
            wrong = rule.broken(tensors, dims)
            if wrong:
                raise ContractError(f"{self.name}: {wrong}")
        return dims

    def bytes(self, tensors: Mapping[str, Tensor | None], attrs: Mapping) -> int:
        """Least memory traffic of one call: each tensor once, touched state rows read and written once."""
        dims = self.dims(tensors)
        if self.traffic:
            return self.traffic(dims, attrs)
        total = 0
        for spec in self.tensors:
            t = tensors.get(spec.name)
            if t is None:
                continue
            size = t.element_size() * prod(t.shape)
            if spec.rows:
                size = size // prod(t.shape[: 1 + spec.paged]) * tensors[spec.rows].shape[0]
            total += size * (2 if spec.mutated else 1)
        return total

    def call(
        self, tensors: Mapping[str, Tensor | None], attrs: Mapping, num: Numerics, *, prefill: bool = False
    ) -> dict:
        """Evaluate the law without writing anything: name -> value, or the new rows for a state."""
        law = self.prefill_fn if prefill and self.prefill_fn else self.fn
        read = {n: t for n, t in tensors.items() if self.by_name[n].role is not Role.OUTPUT}
        return law(**read, **attrs, num=num)

    def apply(
        self, tensors: Mapping[str, Tensor | None], attrs: Mapping, num: Numerics, *, prefill: bool = False
    ) -> None:
        """Run the law and write its results into the caller's tensors. Null rows (index <= 0) leave state alone."""
        for name, value in self.call(tensors, attrs, num, prefill=prefill).items():
            spec, target = self.by_name[name], tensors[name]
            if spec.rows:
                scatter_rows(target, tensors[spec.rows], value, paged=spec.paged)
            else:
                target.copy_(value)


STAGES: dict[str, Stage] = {}


@dataclass(frozen=True)
class Twin:
    """A fast implementation of a span of consecutive stages.

    pick(**tensors, **attrs) looks only at shapes and strides (meta tensors do) and returns the kernels to launch, in
    order; each kernel's arguments are bound by name from the same tensors, scratch is the launcher's.
    """

    name: str
    covers: tuple[tuple[str, ...], ...]  # each entry one span it can serve
    archs: tuple[str, ...]
    batch: tuple[int, int]
    pick: Callable


TWINS: dict[str, Twin] = {}


def twin(name: str, covers: Iterable[Iterable[str]], archs: Iterable[str], batch: range) -> Callable:
    """Register a function as the `pick` of a twin; every covered name must be a stage."""

    def register(pick: Callable) -> Twin:
        spans = tuple(tuple(span) for span in covers)
        for stage in (s for span in spans for s in span):
            if stage not in STAGES:
                raise ValueError(f"twin {name!r} covers {stage!r}, which is no stage; stages are {', '.join(STAGES)}")
        if name in TWINS:
            raise ValueError(f"twin {name!r} is registered twice")
        TWINS[name] = made = Twin(name, spans, tuple(archs), (batch.start, batch.stop - 1), pick)
        return made

    return register
