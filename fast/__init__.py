"""The twins: CuTe DSL kernels that serve the stages of `reference` on sm_90a, sm_100a and sm_103a.

Importing this package registers every twin.
"""

from collections.abc import Iterable, Iterator

from reference.config import deep, k3, mini

from . import attn_res, kda, linear
from .kernel import Kernel, pick

BATCHES = (1, 2, 3, 4, 8, 16, 32, 64)


def production_kernels(batches: tuple[int, ...] = BATCHES) -> list[Kernel]:
    """Every kernel that a decode step of the real model (one rank of TP8 or TP16) or a small model launches, once.

    Those of all targets: a kernel names its own in `archs`.
    """
    return list(
        dict.fromkeys(kernel for twin, tensors, attrs in _calls(batches) for kernel in pick(twin, tensors, attrs))
    )


def forms(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each form: the first with its entry function, block and cluster. Batch sizes and the like differ in
    constants only."""
    first: dict[tuple, Kernel] = {}
    for kernel in kernels:
        first.setdefault((kernel.entry, kernel.block, kernel.cluster), kernel)
    return list(first.values())


def _calls(batches: tuple[int, ...]) -> Iterator[tuple]:
    """(twin, meta tensors, attributes) of the calls that differ."""
    for tensors in kda.kda_cases(batches).values():
        yield kda.kda_decode, tensors, {}
    for tensors in linear.linear_cases(batches).values():
        yield linear.linear, tensors, {}
    for config in (k3, mini, deep):
        for tensors, attrs in attn_res.attn_res_cases(config, batches):
            yield attn_res.attn_res, tensors, attrs
