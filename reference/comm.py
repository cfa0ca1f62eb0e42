"""Collectives as stages: their arithmetic, in stated order and rounding; how bytes travel is the world's business.

`parts` holds one buffer of every rank of a group, in rank order. Sums run over the ranks 0, 1, ... in the compute type.
With accumulate = "fp32" there is one rounding, at the end; with "bf16" one after every addition.
Source: SPEC.md 5.7, 8.5, 8.6.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .numerics import Numerics
from .stage import Stage, activation, bf16, f32, output

AXES = dict(W="ranks", T="rows of a part", D="columns of a part", M="rows of the result", N="columns of the result")
ORDER = "fp32: rounded once; bf16: rounded after every addition"


def add_up(parts: Tensor, accumulate: str, num: Numerics) -> Tensor:
    """parts [W, ...] summed in rank order -> [...], rounded."""
    total = num.up(parts[0])
    for part in parts[1:]:
        total = total + num.up(part)
        if accumulate == "bf16":
            total = num.up(num.round(total))
    return num.round(total)


ALL_REDUCE = Stage(
    "comm.all_reduce",
    "5.7",
    axes=AXES,
    tensors=(activation("parts", "W T D"), output("out", "T D")),
    attrs=dict(accumulate=ORDER),
    flops=lambda d, attrs: d["W"] * d["T"] * d["D"],
)


@ALL_REDUCE.law
def all_reduce(parts, *, accumulate, num):
    """One-shot: every rank adds all parts itself, so all ranks hold the same bits. [W, T, D] -> [T, D]."""
    return dict(out=add_up(parts, accumulate, num))


REDUCE_SCATTER = Stage(
    "comm.reduce_scatter",
    "8.6",
    axes=AXES,
    tensors=(activation("parts", "W T D"), output("out", "M N")),
    attrs=dict(accumulate=ORDER, rank="whose slice", axis="0: rows, 1: columns"),
    flops=lambda d, attrs: d["T"] * d["D"],
    traffic=lambda d, attrs: 2 * (d["T"] * d["D"] + d["M"] * d["N"]),
)


@REDUCE_SCATTER.law
def reduce_scatter(parts, *, accumulate, rank, axis, num):
    """The sum of one of W slices: [W, T, D] -> [ceil(T / W), D] or [T, D / W]. Rows beyond T are zero."""
    n = -(-parts.shape[1 + axis] // len(parts))
    mine = parts.narrow(1 + axis, (at := min(rank * n, parts.shape[1 + axis])), min(n, parts.shape[1 + axis] - at))
    out = add_up(mine, accumulate, num)
    return dict(out=out if axis else pad(out, (0, 0, 0, n - len(out))))


def _gather(name: str, dtype: torch.dtype) -> Stage:
    stage = Stage(
        name,
        "8.6",
        axes=AXES,
        tensors=(activation("parts", "W T D", dtype), output("out", "M N", dtype)),
        attrs=dict(axis="0: rows, 1: columns", rows="rows of the result"),
    )

    @stage.law
    def law(parts, *, axis, rows, num):
        """The parts side by side in rank order: [W, T, D] -> [W * T, D], of which the first `rows`, or [T, W * D]."""
        return dict(out=torch.cat(parts.unbind(), axis)[:rows])

    return stage


ALL_GATHER = _gather("comm.all_gather", bf16)
ALL_GATHER_F32 = _gather("comm.all_gather_f32", f32)
