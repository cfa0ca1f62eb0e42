"""Decode context parallelism: N ranks share a request's sequence; where tokens lie, how partial attention merges.

Token t lies on rank (t div I) mod N of its group, I the interleave. A logical page spans page size * N tokens; every
rank of the group holds its part of it under the same page number. Source: SPEC.md 11.
"""

from math import log2

import torch
from torch import Tensor

from .comm import ORDER, add_up
from .numerics import Numerics
from .shard import Seat
from .stage import ContractError, Stage, activation, f32, output

LOG2_E = log2(2.718281828459045)
BASES = {"e": (torch.exp, torch.log), "2": (torch.exp2, torch.log2)}


def owner(t: Tensor, N: int, I: int) -> Tensor:
    """The rank of a group on which tokens t lie."""
    return t // I % N


def local_index(t: Tensor, N: int, I: int) -> Tensor:
    """The place of tokens t among those of their rank."""
    return t // (I * N) * I + t % I


def local_length(length: Tensor, N: int, I: int, rank: int) -> Tensor:
    """How many of the first `length` tokens lie on a rank."""
    base = length // (I * N) * I
    return base + (length - base * N - rank * I).clamp(0, I)


def localize(index: dict[str, Tensor], seat: Seat, page_rows: int) -> dict[str, Tensor]:
    """The index tensors of a step as one rank sees them.

    lens counts the rank's own rows; slot_mapping leads a token of another rank to the null row 0. page_rows: cache rows
    of a page on one rank. Raises ContractError if the interleave does not divide them.
    """
    N, I = seat.mesh.dcp, seat.mesh.interleave
    if page_rows % I:
        raise ContractError(f"pages of {page_rows} rows with interleave {I}; allowed are divisors of the page size")
    if N == 1:
        return index
    page, at = index["slot_mapping"] // (page_rows * N), index["slot_mapping"] % (page_rows * N)
    mine = (owner(at, N, I) == seat.dcp_rank) & (page > 0)
    row = torch.where(mine, page * page_rows + local_index(at, N, I), 0)
    return index | dict(slot_mapping=row, lens=local_length(index["lens"], N, I, seat.dcp_rank))


AXES = dict(
    W="ranks of the group", T="tokens in this step", H="local heads", Y="heads of the group", L="latent width",
    R="query width",
)  # fmt: skip
BASE = "base of the LSE, e or 2"

GATHER_HEADS = Stage(
    "dcp.gather_heads",
    "11",
    axes=AXES,
    tensors=(activation("parts", "W T H R"), output("q_lat", "T Y R")),
)


@GATHER_HEADS.law
def gather_heads(parts, *, num):
    """The query heads of the group side by side: [W, T, H, 576] -> [T, W * H, 576]."""
    return dict(q_lat=torch.cat(parts.unbind(), 1))


TO_BASE_2 = Stage(
    "dcp.to_base_2",
    "11",
    axes=AXES,
    tensors=(activation("lse", "T Y", f32), output("lse_2", "T Y", f32)),
)


@TO_BASE_2.law
def to_base_2(lse, *, num):
    """A natural LSE in base 2, as kernels that work with exp2 give it: [T, Y]."""
    return dict(lse_2=num.up(lse) * LOG2_E)


def shares(lses: Tensor, base: str, num: Numerics) -> tuple[Tensor, Tensor]:
    """lses [W, ...] in `base` -> the weight of each rank, summing to 1 or all 0, and the merged LSE [...] in `base`.

    NaN and +inf count as -inf: an empty shard. The weights are normalised by their own sum, as in attention.
    """
    if base not in BASES:
        raise ContractError(f"LSE base {base!r}; allowed are {', '.join(map(repr, BASES))}")
    power, log = BASES[base]
    lses = num.up(lses)
    lses = torch.where(lses.isnan() | (lses == torch.inf), -torch.inf, lses)
    top = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)
    w = power(lses - top)
    total = w.sum(0)
    return w / total.clamp_min(torch.finfo(w.dtype).tiny), top + log(total)


def weighted(o: Tensor, w: Tensor, num: Numerics) -> Tensor:
    """o [..., L] times w [...]; where w is 0 the output counts as 0, whatever it holds."""
    return torch.where((w > 0)[..., None], num.up(o) * w[..., None], 0)


def _heads(t: Tensor, ranks: int, rank: int, dim: int) -> Tensor:
    n = t.shape[dim] // ranks
    return t.narrow(dim, rank * n, n)


WEIGH = Stage(
    "dcp.weigh",
    "11",
    axes=AXES,
    tensors=(
        activation("o", "T Y L"),
        activation("lses", "W T Y", f32),
        output("out", "T Y L"),
        output("lse", "T H", f32),
    ),
    attrs=dict(base=BASE, rank="this rank of the group"),
    flops=lambda d, attrs: d["T"] * d["Y"] * d["L"],
)


@WEIGH.law
def weigh(o, lses, *, base, rank, num):
    """This rank's output by its share of the whole, rounded: [T, Y, L]; and the merged LSE of the own heads [T, H]."""
    w, lse = shares(lses, base, num)
    return dict(out=num.round(weighted(o, w[rank], num)), lse=_heads(lse, len(lses), rank, 1))


SCATTER_HEADS = Stage(
    "dcp.scatter_heads",
    "11",
    axes=AXES,
    tensors=(activation("parts", "W T Y L"), output("o_lat", "T H L")),
    attrs=dict(accumulate=ORDER, rank="this rank of the group"),
    flops=lambda d, attrs: d["T"] * d["Y"] * d["L"],
    traffic=lambda d, attrs: 2 * d["T"] * d["L"] * (d["Y"] + d["H"]),
)


@SCATTER_HEADS.law
def scatter_heads(parts, *, accumulate, rank, num):
    """Reduce-scatter over heads: the weighted partials [W, T, Y, L] of the own heads, added up: [T, H, L]."""
    return dict(o_lat=add_up(_heads(parts, len(parts), rank, 2), accumulate, num))


MERGE = Stage(
    "dcp.merge",
    "11",
    axes=AXES,
    tensors=(
        activation("parts", "W T Y L"),
        activation("lses", "W T Y", f32),
        output("o_lat", "T H L"),
        output("lse", "T H", f32),
    ),
    attrs=dict(base=BASE, rank="this rank of the group"),
    flops=lambda d, attrs: 2 * d["T"] * d["Y"] * d["L"],
    traffic=lambda d, attrs: d["T"] * (d["Y"] + d["H"]) * (2 * d["L"] + 4),
)


@MERGE.law
def merge(parts, lses, *, base, rank, num):
    """All-to-all: outputs and LSEs of the own heads from every rank, merged with one rounding: [T, H, L], [T, H]."""
    w, lse = shares(_heads(lses, len(lses), rank, 2), base, num)
    total = weighted(_heads(parts, len(parts), rank, 2), w, num)
    return dict(o_lat=num.round(sum(total.unbind())), lse=lse)
