"""Run kernels and twins on CPU tensors, in place."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fast.kernel import Kernel, pick
from fast.selection import Fast, twins
from reference.stage import ContractError, Role

from . import native
from .arena import spans
from .races import Race

TARGET = "sm_90a"
BACKENDS = ("native", "numpy")


def backend() -> str:
    """What runs kernels here: "native" with a C compiler, else "numpy", with a warning that says so."""
    if native.compiler():
        return "native"
    warnings.warn("no C compiler on PATH: kernels run in numpy, which takes about 30 times as long", stacklevel=2)
    return "numpy"


def launch(
    kernel: Kernel, tensors: Mapping[str, Tensor] | Sequence[Tensor], *, target: str = TARGET, run: str | None = None
) -> None:
    """Execute one launch of a kernel on CPU tensors, written in place, from the PTX compiled for `target`.

    tensors: by name, or in the order of kernel.args, scratch included. run: "native" or "numpy"; None: what is there.
    Raises ContractError for another layout, Unsupported for an instruction, Fault for an access outside the tensors, a
    misaligned one, a deadlock, or a warp-wide instruction without its lanes.
    """
    if isinstance(tensors, Mapping):
        tensors = [tensors.get(arg.name) for arg in kernel.args]
    if len(tensors) != len(kernel.args):
        raise ContractError(f"{kernel.name}: {len(tensors)} tensors; allowed are {len(kernel.args)}")
    checked = [arg.check(t, kernel.name) for arg, t in zip(kernel.args, tensors, strict=True)]
    for arg, t in zip(kernel.args, checked, strict=True):
        if t.device.type != "cpu":
            raise ContractError(f"{kernel.name}: {arg.name} is on {t.device}; the interpreter runs on cpu tensors")
    run = run or backend()
    if run not in BACKENDS:
        raise ContractError(f"run {run!r}: allowed are {', '.join(BACKENDS)}")
    ptx = kernel.compile(target).ptx
    if run == "native":
        made = native.compile_ptx(ptx)
        cluster = kernel.cluster or (1, 1, 1)
        words = [*(t.data_ptr() for t in checked), *kernel.numbers]
        made(words, spans(checked), kernel.grid, kernel.block, cluster, kernel.smem, kernel.name)
    else:
        from .machine import Machine

        Machine().run([(kernel, ptx, checked)])


def watch(
    launches: Sequence[tuple[Kernel, Mapping[str, Tensor]]], *, target: str = TARGET, warps: str = "together",
    seed: int = 0, edit: Callable[[int, str], str] = lambda index, ptx: ptx,
) -> list[Race]:  # fmt: skip
    """Run launches of one stream in the adversarial order (`machine`), in place, and return the races found.

    edit(index, ptx) may change the PTX of a launch, to make a mutant. Raises as `launch` does.
    """
    from .machine import Machine

    made = []
    for i, (kernel, tensors) in enumerate(launches):
        bound = [arg.check(_bind(kernel, arg, tensors), kernel.name) for arg in kernel.args]
        made.append((kernel, edit(i, kernel.compile(target).ptx), bound))
    machine = Machine("adversarial", warps, races=True, seed=seed)
    machine.run(made)
    return machine.reports


@dataclass(frozen=True)
class Interpreted(Fast):
    """A twin served on the CPU by the interpreter: an Implementation for selections and the equivalence engine."""

    target: str = TARGET

    def arch(self, device: torch.device) -> str:
        if device.type != "cpu":
            raise NotImplementedError(f"the interpreter runs on the CPU, not on {device}")
        return self.target

    def run(self, tensors: Mapping[str, Tensor], attrs: Mapping) -> tuple[str, ...]:
        kernels = pick(self.twin, tensors, attrs, self.target)
        for kernel in kernels:
            launch(kernel, [_bind(kernel, arg, tensors) for arg in kernel.args], target=self.target)
        return tuple(f"{k.name} ({self.target} PTX, interpreted)" for k in kernels)


def interpreted(extra: Mapping[str, Fast] | None = None, target: str = TARGET) -> dict[str, Interpreted]:
    """Every registered twin, and those of `extra` (mutants, say), by the names that selections know."""
    return {name: Interpreted(fast.twin, target) for name, fast in {**twins(), **(extra or {})}.items()}


_scratch: dict[tuple[Kernel, str], Tensor] = {}
_aligned: dict[tuple, tuple[weakref.ref, int, Tensor]] = {}


def _bind(kernel: Kernel, arg, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor of an argument; scratch is zeroed once and kept, as on a GPU.

    A weight that lies at an odd address on the CPU, as a mapped checkpoint may, is copied once to an aligned one: on a
    GPU it would be a copy, too. Its layout, and all other tensors, stay as they are.
    """
    if arg.role is Role.SCRATCH:
        if (kernel, arg.name) not in _scratch:
            _scratch[kernel, arg.name] = torch.zeros(arg.shape, dtype=arg.dtype)
        return _scratch[kernel, arg.name]
    tensor = tensors.get(arg.name)
    if arg.role is not Role.WEIGHT or tensor is None or tensor.data_ptr() % arg.align == 0:
        return tensor
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    owner, version, copy = _aligned.get(key, (None, 0, None))
    if owner is None or owner() is not tensor or version != tensor._version:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        _aligned[key] = weakref.ref(tensor), tensor._version, copy
    return copy
