"""What is attacked: kernels with seeded, hostile inputs; the same kernels without PDL; and controls that are broken.

A control is the same kernel with its wait moved below its loads of produced tensors. It must be caught, in every run:
that shows that producer and consumer did overlap, with this grid and this use of registers and shared memory.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equivalence.order.mutate import mutant
from fast.kernel import Arg, Kernel
from reference.stage import ContractError, Role

WAIT = "    cute.arch.griddepcontrol_wait()\n"
TRIGGER = "    cute.arch.griddepcontrol_launch_dependents()\n"
_ATTN_LOADED = "    if cutlass.const_expr(mDelta is not None):\n        rP = _rounded"
_KDA_LOADED = f"{TRIGGER}    gOut"
_FMA_LOADED = "    stage_x(x, sx, cfg.warps * WARP)\n    cute.arch.sync_threads()\n"
_MMA_LOADED = "    stage, phase = Int32(0), Int32(0)\n    for i in cutlass.range(cfg.stages,"
_WGMMA_LOADED = "wid - cfg.warps_n, cfg)\n"
_DIRECT_LOADED = "\n    atom = cute.make_mma_atom("
# module -> (edits that move the wait below the first loads, tensors that then are stale)
LATE_WAITS: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "fast.attn_res": (((WAIT + TRIGGER, TRIGGER), (_ATTN_LOADED, WAIT + _ATTN_LOADED)), ("prefix",)),
    "fast.kda": (
        ((f"{WAIT}    slot =", "    slot ="), (_KDA_LOADED, WAIT + _KDA_LOADED)), ("x", "raw_g", "b", "slots", "gate")
    ),
    "fast.linear_fma": (((f"{WAIT}    stage_x", "    stage_x"), (_FMA_LOADED, _FMA_LOADED + WAIT)), ("x",)),
    "fast.linear_mma": (
        ((f"{WAIT}    for i in cutlass.range(ahead", "    for i in cutlass.range(ahead"),
         (_MMA_LOADED, WAIT + _MMA_LOADED)), ("x",),
    ),
    "fast.linear_direct": (
        ((f"{WAIT}    first =", "    first ="), (_DIRECT_LOADED, "\n" + WAIT + _DIRECT_LOADED)), ("x",),
    ),
    "fast.linear_wgmma": (
        ((f"    {WAIT}        layout", "        layout"), (_WGMMA_LOADED, f"{_WGMMA_LOADED}    {WAIT}")), ("x",)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Kernels of one span in stream order. values: every tensor but outputs and scratch, on the CPU; wrong: legal but
    wrong values of index tensors. padding [T]: rows that no request owns; unowned: slots of a state likewise."""

    name: str
    kernels: tuple[Kernel, ...]
    values: dict[str, Tensor]
    wrong: dict[str, Tensor] = field(default_factory=dict)
    padding: Tensor | None = None
    unowned: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return next(a.shape[0] for k in self.kernels for a in k.args if a.role is Role.OUTPUT)


def _normal(scale: float = 1.0, mean: float = 0.0) -> Callable:
    return lambda arg, kernel, g: mean + scale * torch.randn(arg.shape, generator=g)


def _gemm_weight(arg: Arg, kernel: Kernel, g) -> Tensor:
    return torch.randn(arg.shape, generator=g) * arg.shape[-1] ** -0.5


def _proj(arg: Arg, kernel: Kernel, g) -> Tensor:
    return torch.randn(arg.shape, generator=g) * (4 / math.sqrt(arg.shape[-1]))


def _rates(arg: Arg, kernel: Kernel, g) -> Tensor:
    return (1 + 15 * torch.rand(arg.shape, generator=g)).log()


def _bank(arg: Arg, kernel: Kernel, g) -> Tensor:
    """NaN in the blocks that the call must not read."""
    made = torch.randn(arg.shape, generator=g)
    made[:, kernel.constants[0] :] = math.nan
    return made


VALUES = {
    "w": _gemm_weight, "w_proj": _proj, "w_norm": _normal(0.1, 1.0), "w_out": _normal(0.1, 1.0), "A_log": _rates,
    "blocks": _bank, "conv_weight": _normal(0.5), "gate": _normal(2.0), "raw_g": _normal(1.5),
}  # fmt: skip


def _slots(rows: int, pool: int, g) -> tuple[Tensor, Tensor]:
    """Permuted slots, some rows of three null (0 and -1); and, for every live row, the slot after the right one."""
    slots = (torch.randperm(pool - 1, generator=g)[:rows] + 1).int()
    nulls = torch.randperm(rows, generator=g)[: rows // 3 if rows < 16 else 3]
    slots[nulls] = torch.tensor([0, -1, 0] * rows, dtype=torch.int32)[: len(nulls)]
    return slots, torch.where(slots > 0, slots % (pool - 1) + 1, slots)


def subject(kernel: Kernel, seed: int = 0) -> Subject:
    """A kernel with seeded inputs. Raises NotImplementedError for an index tensor whose legal values are not known."""
    g = torch.Generator().manual_seed(1000 * seed + 7)
    values, wrong, unowned, padding = {}, {}, {}, None
    for arg in kernel.args:
        if arg.role is Role.INDEX and arg.name == "slots":
            pool = next(a.shape[0] for a in kernel.args if a.role is Role.STATE)
            values["slots"], wrong["slots"] = _slots(arg.shape[0], pool, g)
            padding = values["slots"] <= 0
            free = torch.ones(pool, dtype=torch.bool)
            free[values["slots"].clamp_min(0).long()] = False
            free[0] = True
            unowned = {a.name: free for a in kernel.args if a.role is Role.STATE}
        elif arg.role is Role.INDEX:
            raise NotImplementedError(f"{kernel.name}: no legal values are known for the index tensor {arg.name!r}")
    for arg in kernel.args:
        if arg.role not in (Role.INDEX, Role.OUTPUT, Role.SCRATCH):
            values[arg.name] = VALUES.get(arg.name, _normal())(arg, kernel, g).to(arg.dtype)
    for name, free in unowned.items():
        values[name][free] = math.nan
    made = Subject(kernel.name, (kernel,), values, wrong, padding, unowned)
    if padding is None and made.tokens > 1:
        rows = torch.arange(made.tokens)
        made = replace(made, padding=rows >= made.tokens - -(-made.tokens // 4))
    return made


def edited(kernel: Kernel, edits: tuple[tuple[str, str], ...], mark: str, **changes) -> Kernel:
    """The kernel from an edited copy of its module. Raises EditError for an edit that does not fit."""
    copy = mutant(sys.modules[kernel.entry.__module__], edits)
    return replace(kernel, name=f"{kernel.name}.{mark}", entry=getattr(copy, kernel.entry.__name__), **changes)


def without_pdl(kernel: Kernel) -> Kernel:
    """The same kernel, launched after its predecessors have ended."""
    return edited(kernel, (("use_pdl=True", "use_pdl=False"),), "no_pdl", pdl=False)


def control(kernel: Kernel) -> tuple[Kernel, tuple[str, ...]] | None:
    """The kernel with its wait below its first loads, and the tensors it then reads stale; None: no edit is known."""
    if kernel.entry.__module__ not in LATE_WAITS:
        return None
    edits, stale = LATE_WAITS[kernel.entry.__module__]
    return edited(kernel, edits, "late_wait"), tuple(n for n in stale if n in {a.name for a in kernel.args})


def with_kernels(made: Subject, change: Callable[[Kernel], Kernel]) -> Subject:
    """The same inputs for changed kernels."""
    return replace(made, kernels=tuple(change(k) for k in made.kernels))


def production(batch: int, target: str) -> list[Kernel]:
    """One production kernel of each form for a target, at one batch size."""
    from fast import forms, production_kernels

    return forms(k for k in production_kernels((batch,)) if target in k.archs)


def find(name: str, batch: int, target: str) -> Kernel:
    """One of `production` by name. Raises ContractError for another name."""
    for kernel in production(batch, target):
        if kernel.name == name:
            return kernel
    raise ContractError(f"kernel {name!r}: no form at batch {batch} for {target} has that name")
