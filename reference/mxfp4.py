"""MXFP4: 4-bit E2M1 codes, two per byte, with one power-of-two scale (E8M0) per 32 inputs (SPEC.md 12.2).

w[n, k] = VALUES[code[n, k]] * 2^(scale[n, k // 32] - 127). Byte j holds input 2j in its low nibble, 2j + 1 in its high
nibble. Scale byte 0xFF is NaN and refused. Any leading dimensions may precede [N, K].
"""

from functools import lru_cache

import torch
from torch import Tensor

GROUP = 32  # inputs that share one scale
NAN_SCALE = 0xFF
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; codes 8..15 are their negatives
VALUES = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)))
PAIRS = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), -1)  # [256 bytes, 2]: low nibble, high nibble
SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(NAN_SCALE)] + [float("nan")], dtype=torch.float64)
LARGEST = 6.0 * 2.0**125  # largest magnitude whose dequantised value is finite in bf16
FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def dequant(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """packed [.., N, K/2] u8, scale [.., N, K/32] u8 -> [.., N, K] in `dtype`, exactly.

    Raises ValueError for shapes that do not belong together, for a NaN scale (0xFF), and for a value that does not fit
    into `dtype` (scale bytes 253 and 254 with large codes); the message names the row and the group.
    """
    if dtype not in FLOATS:
        raise ValueError(f"MXFP4 to {dtype}: allowed are bfloat16, float32, float64")
    _check_pair(packed, scale)
    _refuse(scale == NAN_SCALE, scale, "scale byte", "0xFF is NaN")
    w = decode(packed, scale, dtype)
    if dtype is not torch.float64:
        overflows = w.isinf().unflatten(-1, (-1, GROUP)).any(-1)
        _refuse(overflows, scale, "scale byte", f"a code times 2^(byte - 127) overflows {dtype}")
    return w


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequant` without its checks, for weights that were checked when they were loaded; never waits for the device."""
    values = _table(PAIRS, packed.device, dtype)[packed.int()].flatten(-2)  # [.., N, K]
    scales = _table(SCALES, packed.device, dtype)[scale.int()]  # [.., N, K/32]
    return (values.unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)


@lru_cache
def _table(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return values.to(device, dtype)


def quant(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [.., N, K] float, K a multiple of 32 -> packed [.., N, K/2] u8, scale [.., N, K/32] u8.

    Scale: the smallest power of two (at least 2^-127) that brings the largest magnitude of the group to at most 6, so
    nothing saturates. Codes: nearest, ties to the even code. What dequant returns quantises to the same values.
    Raises ValueError for NaN, infinity, and magnitudes above 6 * 2^125, naming the row and the group.
    """
    if w.dtype not in FLOATS:
        raise ValueError(f"{w.dtype} to MXFP4: allowed are bfloat16, float32, float64")
    if w.ndim < 2 or w.shape[-1] % GROUP or not w.shape[-1]:
        raise ValueError(f"shape {tuple(w.shape)} to MXFP4: allowed are [.., N, K] with K a multiple of {GROUP}")
    x = w.detach().to(torch.float64 if w.dtype is torch.float64 else torch.float32).unflatten(-1, (-1, GROUP))
    top = x.abs().amax(-1)  # [.., N, K/32]; NaN propagates
    _refuse(~(top <= LARGEST), top, "largest magnitude", "allowed are finite values up to 6 * 2^125")
    mantissa, exponent = torch.frexp(top)  # top = mantissa * 2^exponent, and 6 = 0.75 * 2^3
    scale = ((exponent - torch.where(mantissa <= 0.75, 3, 2)).clamp_min(-127) + 127).masked_fill(top == 0, 0)
    a = x.abs() / _table(SCALES, x.device, x.dtype)[scale][..., None]  # by a power of two: exact
    # The grid has steps 0.5, 1 and 2; within each, the parity of the step count is the parity of the code.
    code = torch.where(a < 2, (a * 2).round(), torch.where(a < 4, a.round() + 2, (a / 2).round() + 4))
    code = (code.to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.to(torch.uint8)


def fake_quant(w: Tensor) -> Tensor:
    """w [.., N, K] float -> the same shape and dtype with every value on the MXFP4 grid. Carries no gradient."""
    return dequant(*quant(w), w.dtype)


def _check_pair(packed: Tensor, scale: Tensor) -> None:
    for name, t in (("packed codes", packed), ("scales", scale)):
        if t.dtype is not torch.uint8:
            raise ValueError(f"MXFP4 {name} are {t.dtype}: allowed is uint8")
    *lead, width = packed.shape
    want = (*lead, width * 2 // GROUP)
    if packed.ndim < 2 or width % (GROUP // 2) or not width or tuple(scale.shape) != want:
        raise ValueError(
            f"MXFP4 codes {tuple(packed.shape)} with scales {tuple(scale.shape)}: "
            f"allowed are [.., N, K/2] with [.., N, K/{GROUP}]"
        )


def _refuse(bad: Tensor, shown: Tensor, what: str, rule: str) -> None:
    """Raise ValueError if any entry of bad [.., N, groups] is set, naming the first one."""
    if not bad.any():
        return
    where = tuple(bad.nonzero()[0].tolist())
    *lead, row, group = where
    batch = f"matrix {tuple(lead)}, " if lead else ""
    raise ValueError(f"MXFP4 {what} {shown[where].item()} at {batch}row {row}, group {group}: {rule}")
