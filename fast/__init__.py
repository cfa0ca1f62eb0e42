"""The twins: CuTe DSL kernels that serve the stages of `reference` on sm_90a, sm_100a and sm_103a.

Importing this package registers every twin.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from reference.config import deep, k3, mini

from . import attn_res, kda, linear
from .kernel import Kernel, pick

BATCHES = tuple(range(1, 65))  # all that the twins serve


def production_kernels(batches: Sequence[int] = BATCHES) -> list[Kernel]:
    """Every kernel that a decode step of the real model (one rank of TP8 or TP16) or a small model launches, once.

    Those of all targets: a kernel names its own in `archs`.
    """
    return list(dict.fromkeys(kernel for tokens in batches for kernel in _launched(tokens)))


def apart(batches: Sequence[int] = BATCHES) -> list[int]:
    """Of batch sizes whose steps run the same code throughout, the first. Steps of the others differ from it in how
    many rows there are, and in nothing else."""
    first: dict[tuple, int] = {}
    for tokens in batches:
        first.setdefault(tuple(kernel.code for kernel in _launched(tokens)), tokens)
    return list(first.values())


def forms(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each form: the first with its entry function, block and cluster. Batch sizes and the like differ in
    constants only."""
    first: dict[tuple, Kernel] = {}
    for kernel in kernels:
        first.setdefault((kernel.entry, kernel.block, kernel.cluster), kernel)
    return list(first.values())


@cache
def _launched(tokens: int) -> tuple[Kernel, ...]:
    """The kernels of every call that differs, in one order for all numbers of tokens."""
    return tuple(kernel for twin, tensors, attrs in _calls(tokens) for kernel in pick(twin, tensors, attrs))


def _calls(tokens: int) -> Iterator[tuple]:
    """(twin, meta tensors, attributes) of the calls that differ."""
    for tensors in kda.kda_cases((tokens,)).values():
        yield kda.kda_decode, tensors, {}
    for tensors in linear.linear_cases((tokens,)).values():
        yield linear.linear, tensors, {}
    for config in (k3, mini, deep):
        for tensors, attrs in attn_res.attn_res_cases(config, (tokens,)):
            yield attn_res.attn_res, tensors, attrs
