"""How equal is equal: a twin's error against `exact`, judged by the error the fused reference makes on that activation.

For every tensor, in this order: (a) non-finite values stand at the same places as the reference's; (b) the root mean
square (RMS) error of each row is at most `rms` times the reference's on that row; (c) each element is within half a
unit in the last place (ULP) of the storage dtype, plus `element` times the reference's error, which is the RMS error of
its row or, on a row where the reference errs at all, of one rounding of this element if that is larger; for fp32 it is
the greatest error of the row; (d) over a run the RMS error is at most `pooled` times the reference's. (b), (c) and (d)
add a floor. Nothing here waits for the device.

Where the numbers come from.
Floor, 16 x 2^-24 of the row's RMS: what approximate fp32 instructions may add to a whole row at once, where the
reference is exact by luck: ex2.approx 2^-22 (4 units of 2^-24), rounding its argument, |x| <= 5 (5), rcp.approx 2^-23
(2), rsqrt.approx 2^-22.9 (2.2), three fp32 roundings at 2^-24 or less (3).
bf16: a twin that keeps the production rounding points rounds nearly every element as the reference does: ratio 1. One
rounding more makes it sqrt(2). Per row 2 (noise of a short row, and three roundings more are too many); over a run
the midpoint in power between none and one, sqrt(1.5). Per element 3: rounding errors are uniform, their maximum is
sqrt(3) times their RMS, and half a ULP comes on top.
e4m3: one rounding, as in bf16.
fp32: an elementary operation of the reference is within half a ULP, 0.29 in RMS; ex2.approx and rsqrt.approx are
within 2: ratio 2 / 0.29 = 7, so 8, between RMS errors and between the greatest errors. Another order of summation has
errors of the same law.
Rows. A row has to be a sample. In a state row of KDA most of the error is one number, the error of u, times the key,
and a channel has the error of its decay in common; the reference's error of one state row is near zero by luck now and
then, and no multiple of it bounds a twin. So the contract says how many trailing axes are one row (`Tensor_.sample`):
for that state the head's 128 x 128. On an H200 mini shows 1.0 there in lockstep, and 2.0 where states drift apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 16 * 2.0**-24
NARROW = 64  # rows with fewer elements are no sample: their errors are pooled over the tensor and its layers
SAMPLE = 2048  # elements from which (d) is judged: the ratio of two such RMS errors is known to about 2 %
SLOPE = 0.25  # halfway between errors that grow like the reference's (0) and a bias against a random walk (1/2)
DIGITS = {torch.bfloat16: 8, torch.float32: 24, torch.float8_e4m3fn: 4}  # significant bits
NORMAL = {torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float8_e4m3fn: 2.0**-6}  # the least one


@dataclass(frozen=True)
class Bounds:
    """Multiples of the reference's RMS error that a twin may show: per row, per element, over a run. peak: `element`
    multiplies the reference's greatest error of the row instead."""

    rms: float
    element: float
    pooled: float
    peak: bool = False


BOUNDS = {torch.bfloat16: Bounds(2.0, 3.0, 1.5**0.5), torch.float32: Bounds(8.0, 8.0, 8.0, peak=True)}
BOUNDS[torch.float8_e4m3fn] = BOUNDS[torch.bfloat16]


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of `dtype` (bf16, fp32 or e4m3) at the float64 values x, subnormals included."""
    power = (x.contiguous().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)  # 2^floor(log2 |x|)
    return power.clamp_min(NORMAL[dtype]) * 2.0 ** -DIGITS[dtype]


def ulps(a: float, b: float, dtype: torch.dtype) -> float:
    """Distance of two values in ULP of `dtype` at b; inf where only one of them is finite."""
    pair = torch.tensor([a, b], dtype=torch.float64)
    if not pair.isfinite().all():
        return 0.0 if a == b or (a != a and b != b) else float("inf")
    return float((pair[0] - pair[1]).abs() / (2 * half_ulp(pair[1:], dtype)[0]))


@dataclass(frozen=True)
class Measured:
    """E tensors of N rows. row: RMS error in units of its bound (b), [E, N], or [E, 1] for narrow rows. element: error
    in units of its bound (c), [E, N * W], inf where (a) is broken. sums [E, 3]: squared relative errors of the twin
    and the reference, summed over live rows, and the number of elements judged: live, and finite in all three.
    norms [E, 4]: sums of squares of twin's error, reference's error, exact value, and the sum of its fourth powers.
    halves [E]: greatest error of the twin in units of half a ULP of the exact value and the floor."""

    row: Tensor
    element: Tensor
    sums: Tensor
    norms: Tensor
    halves: Tensor


def measure(
    twin: Tensor, ref: Tensor, exact: Tensor, live: Tensor, bounds: Bounds, dtype: torch.dtype
) -> Measured:  # fmt: skip
    """Compare E tensors at once: twin and ref [E, N, W], exact float64, live [E, N] bool.

    dtype: what the tensors are stored as. Rows that are not live are left out. Everything stays on the device.
    """
    t, r, x, live = twin.double(), ref.double(), exact.double(), live[..., None]
    both = (t - r) * 0 == 0  # finite, both of them
    odd = live & ~(both | (t == r) | ((t != t) & (r != r)))
    judged = live & both & (x * 0 == 0)
    drop = ~judged
    t_err, r_err, x = ((t - x).masked_fill_(drop, 0.0), (r - x).masked_fill_(drop, 0.0), x.masked_fill(drop, 0.0))
    squares = torch.stack([v.square().sum(-1) for v in (t_err, r_err, x)])  # [3, E, N]
    width = twin.shape[-1]
    count = judged.sum((1, 2))  # [E]
    norms = torch.cat([squares.sum(-1).T, x.square().square().sum((1, 2))[:, None]], -1)
    if width < NARROW:
        squares = squares.sum(-1, keepdim=True)  # a tensor is one row; the yardstick comes from all layers
        total = count.sum().clamp_min(1)
        yard = (squares[1].sum() / total).sqrt().expand(len(twin), 1)
        greatest = r_err.abs().amax().expand(len(twin), 1)
        t_rms, x_rms = (squares[0::2] / count.clamp_min(1)[:, None]).sqrt()
    else:
        t_rms, yard, x_rms = (squares / width).sqrt()
        greatest = r_err.abs().amax(-1)
    floor = FLOOR * x_rms
    row = t_rms / (bounds.rms * yard + floor).clamp_min(1e-100)
    half, yard_ = half_ulp(x, dtype), yard[..., None]
    halves = (t_err.abs() / (half + floor[..., None])).amax((1, 2))
    own = greatest[..., None] if bounds.peak else torch.maximum(yard_, torch.where(yard_ > 0, half / 3**0.5, 0.0))
    allowed = half + torch.maximum(bounds.element * own, r_err.abs()) + FLOOR * x.abs() + floor[..., None]
    element = torch.where(odd, torch.inf, t_err.abs() / allowed).flatten(1)
    size = x_rms.clamp_min(1e-100).square()
    weight = count[:, None] if width < NARROW else live[..., 0] * width
    sums = torch.stack([(t_rms.square() / size * weight).sum(-1), (yard.square() / size * weight).sum(-1), count], -1)
    return Measured(row, element, sums, norms, halves)


def pooled_ratio(sums: Tensor, bounds: Bounds) -> float:
    """(d): RMS error of a run relative to the reference's, from the sums of `measure` added up; the floor is in it."""
    t, r, n = sums.tolist()
    return (t / max(r + n * (FLOOR / bounds.pooled) ** 2, 1e-300)) ** 0.5 if n else 0.0


def slope(curve: Tensor) -> tuple[float, float] | None:
    """How the twin's error drifts from the reference's: (slope, last ratio), or None below 64 tokens.

    curve [tokens, 2]: relative RMS error of twin and reference. Their ratio is taken over the windows of 8-15, 16-31,
    32-63 ... tokens, and a line is fitted to log2(ratio) over log2(token).
    """
    ratios = []
    for k in range(3, len(curve).bit_length()):
        part = curve[1 << k : min(2 << k, len(curve))].double()
        if len(part) < 1 << (k - 1):
            break
        t, r = part.square().mean(0).sqrt().tolist()
        ratios.append(max(t, FLOOR / 16) / max(r, FLOOR / 16))
    if len(curve) < 64:
        return None
    y = torch.tensor(ratios, dtype=torch.float64).log2()
    x = torch.arange(len(y), dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum()), ratios[-1]


def drifts(curve: Tensor) -> bool:
    """The rule on slopes: too steep, and no longer at the size of the reference's error."""
    fit = slope(curve)
    return fit is not None and fit[0] > SLOPE and fit[1] > 1.5**0.5


def routes(twin: Tensor, ref: Tensor, scores: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Expert sets of a twin against the reference's: (differs [T], illegal [T]), both bool.

    twin, ref [T, A] expert ids; scores [T, E] float64, what experts are chosen by; slack [T]: how wrong a score may
    be. A set is legal if its members exist, differ, and no expert left out scores more than twice the slack above the
    lowest member (the one may be too high, the other too low). A tie is legal in both readings.
    """
    experts = scores.shape[-1]
    exists = ((twin >= 0) & (twin < experts)).all(-1)
    safe = twin.long().clamp(0, experts - 1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, safe, True)
    wanted = torch.zeros_like(chosen).scatter(-1, ref.long(), True)
    distinct = chosen.sum(-1) == twin.shape[-1]
    left_out = scores.masked_fill(chosen, -torch.inf).amax(-1)
    lowest = scores.gather(-1, safe).amin(-1)
    differs = (chosen != wanted).any(-1) | ~exists
    inside = left_out - lowest <= 2 * slack  # False where anything is NaN: then only the reference's own set is legal
    return differs, ~exists | ~distinct | (differs & ~inside)
