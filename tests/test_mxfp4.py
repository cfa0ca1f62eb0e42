"""MXFP4 against exact fractions: every code, every scale, every rounding boundary."""

from fractions import Fraction
from math import inf, nan, nextafter

import pytest
import torch

from reference import mxfp4
from reference.mxfp4 import FLOATS, GROUP, LARGEST, dequant, fake_quant, quant

GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]  # SPEC.md 12.2, by code
FINITE_SCALES = 253  # scale bytes 0..252 keep every code finite in bf16 and fp32


def value(code: int, scale: int) -> Fraction:
    return (-1) ** (code >> 3) * GRID[code & 7] * Fraction(2) ** (scale - 127)


def every_code(scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row per scale byte, with every byte 0..255 once: packed [scales, 256], scale [scales, 16]."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(scales, 1)
    return packed, torch.arange(scales, dtype=torch.uint8)[:, None].expand(-1, 16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code_under_every_scale_is_exact(dtype):
    scales = 255 if dtype is torch.float64 else FINITE_SCALES
    w = dequant(*every_code(scales), dtype)
    assert w.dtype is dtype and w.shape == (scales, 512)
    for row in (0, 1, 2, 63, 126, 127, 128, 251, 252):
        want = [value(code, row) for byte in range(256) for code in (byte & 15, byte >> 4)]  # low nibble first
        assert [Fraction(x) for x in w[row].tolist()] == want
    assert torch.equal(w.double(), dequant(*every_code(scales), torch.float64))
    assert w[127, 16].signbit() and w[127, 16] == 0  # byte 8: its low code is -0


def test_leading_dimensions_and_strides():
    packed = torch.randint(0, 256, (3, 2, 5, 64), dtype=torch.uint8)
    scale = torch.randint(100, 150, (3, 2, 5, 4), dtype=torch.uint8)
    w = dequant(packed, scale)
    assert w.shape == (3, 2, 5, 128)
    assert torch.equal(w[2, 1], dequant(packed[2, 1], scale[2, 1]))
    wide, wide_scale = packed.new_full((3, 2, 5, 80), 0x77), scale.new_full((3, 2, 5, 9), 0xFF)
    wide[..., :64], wide_scale[..., 2:6] = packed, scale  # unread neighbours are NaN
    assert torch.equal(w, dequant(wide[..., :64], wide_scale[..., 2:6]))
    padded = torch.full((3, 2, 5, 200), nan, dtype=torch.bfloat16)
    padded[..., 3:131] = w
    for got, want in zip(quant(padded[..., 3:131]), quant(w), strict=True):
        assert torch.equal(got, want)


# Quantisation ---------------------------------------------------------------------------------------------------------


def groups() -> torch.Tensor:
    """Float64 rows of two groups: random ones, then every midpoint and its neighbours at three scales."""
    rng = torch.Generator().manual_seed(1)
    spread = (
        torch.randn(40, 64, generator=rng, dtype=torch.float64)
        * torch.logspace(-30, 30, 40, dtype=torch.float64)[:, None]
    )
    edges = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    near = [y for x in edges for y in (x, nextafter(x, inf), nextafter(x, -inf)) if abs(y) <= 6]
    group = torch.tensor([*near, 6.0, 6.0, 6.0], dtype=torch.float64)  # the top of the grid is in: the scale is 1
    signed = torch.cat((group, -group))
    edge_rows = [signed * 2.0**e for e in (-100, 0, 100)]
    tops = torch.zeros(4, 64, dtype=torch.float64)  # where the scale changes
    tops[:, 0] = torch.tensor([6.0, nextafter(6.0, inf), 3.0, nextafter(3.0, inf)])
    tops[:, 40] = torch.tensor([2.0**-131, 6 * 2.0**-127, LARGEST, 0.0])
    return torch.cat((spread, torch.stack(edge_rows), tops))


def check_quant(quantise) -> None:
    """Nearest value, ties to the even code, under the smallest scale that fits: by exact comparison."""
    w = groups()
    packed, scale = quantise(w)
    assert packed.shape == (len(w), 32) and scale.shape == (len(w), 2)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    for row, row_codes, row_scales in zip(w.tolist(), codes.tolist(), scale.tolist(), strict=True):
        for g, byte in enumerate(row_scales):
            part = slice(g * GROUP, (g + 1) * GROUP)
            top = max(abs(Fraction(x)) for x in row[part])
            assert byte == next(s for s in range(255) if top <= 6 * Fraction(2) ** (s - 127))
            for x, code in zip(row[part], row_codes[part], strict=True):
                size = abs(Fraction(x)) / Fraction(2) ** (byte - 127)
                assert code & 7 == min(range(8), key=lambda c: (abs(GRID[c] - size), c % 2))
                assert code >> 3 == int(str(x).startswith("-"))


def test_quantises_to_the_nearest_value_ties_to_even():
    check_quant(quant)


def _moved(w, at: float, toward: float):
    """Breaks a tie by moving the values at it by one ULP."""
    return quant(torch.where(w == at, nextafter(at, toward), w))


def _changed(w, packed=lambda p: p, scale=lambda s: s):
    codes, scales = quant(w)
    return packed(codes), scale(scales)


MUTANTS = {
    "ties away from zero": lambda w: _moved(w, 0.25, inf),
    "ties towards zero": lambda w: _moved(w, 0.75, 0),
    "high nibble first": lambda w: _changed(w, packed=lambda p: (p << 4) | (p >> 4)),
    "scale one power too large": lambda w: (quant(w / 2)[0], quant(w)[1]),
    "scale one power too small where that saturates": lambda w: _changed(w, scale=lambda s: s - (s > 127).to(s.dtype)),
    "sign of zero lost": lambda w: quant(w + 0.0),
    "one code off by one": lambda w: _changed(w, packed=lambda p: p ^ (torch.arange(32) == 17).to(p.dtype)),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_check_rejects(mutant):
    with pytest.raises(AssertionError):
        check_quant(mutant)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_was_dequantised_quantises_to_the_same_values(dtype):
    w = dequant(*every_code(FINITE_SCALES), dtype)
    back = dequant(*quant(w), dtype)
    assert torch.equal(back, w) and torch.equal(back.signbit(), w.signbit())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_quantisation_keeps_dtype_and_is_idempotent(dtype):
    w = (torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(2)) * 0.02).to(dtype).requires_grad_()
    once = fake_quant(w)
    assert once.dtype is dtype and once.shape == w.shape and not once.requires_grad
    assert torch.equal(fake_quant(once), once) and not torch.equal(once, w)


def test_decode_never_reads_a_value(monkeypatch):
    """Reading one would make the host wait for the device; the checked form has to."""

    def forbidden(self):
        raise RuntimeError("a value was read")

    packed, scale = every_code(FINITE_SCALES)
    want = dequant(packed, scale)
    for name in ("__bool__", "item", "tolist", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    got = mxfp4.decode(packed, scale, torch.bfloat16)
    with pytest.raises(RuntimeError, match="a value was read"):
        dequant(packed, scale)
    monkeypatch.undo()
    assert torch.equal(got, want)


# Refusals -------------------------------------------------------------------------------------------------------------


def codes(*shape, fill=0x11):
    return torch.full(shape, fill, dtype=torch.uint8)


def with_entry(t: torch.Tensor, where: tuple[int, ...], entry) -> torch.Tensor:
    t = t.clone()
    t[where] = entry
    return t


SCALES = codes(2, 3, 4, fill=127)
FINITE = "allowed are finite values up to 6 * 2^125"
BAD_PAIRS = {
    "nan-scale": (codes(2, 3, 64), with_entry(SCALES, (1, 2, 3), 0xFF),
                  "MXFP4 scale byte 255 at matrix (1,), row 2, group 3: 0xFF is NaN"),
    "overflow": (codes(3, 64, fill=0x40), with_entry(SCALES[0], (1, 2), 254),
                 "MXFP4 scale byte 254 at row 1, group 2: a code times 2^(byte - 127) overflows torch.bfloat16"),
    "scale-width": (codes(3, 64), codes(3, 5),
                    "MXFP4 codes (3, 64) with scales (3, 5): allowed are [.., N, K/2] with [.., N, K/32]"),
    "half-a-group": (codes(3, 24), codes(3, 1),
                     "MXFP4 codes (3, 24) with scales (3, 1): allowed are [.., N, K/2] with [.., N, K/32]"),
    "flat": (codes(64), codes(4), "MXFP4 codes (64,) with scales (4,): allowed are [.., N, K/2] with [.., N, K/32]"),
    "signed": (codes(3, 64).char(), codes(3, 4), "MXFP4 packed codes are torch.int8: allowed is uint8"),
    "float-scale": (codes(3, 64), torch.ones(3, 4), "MXFP4 scales are torch.float32: allowed is uint8"),
}  # fmt: skip


@pytest.mark.parametrize(("packed", "scale", "text"), BAD_PAIRS.values(), ids=BAD_PAIRS)
def test_dequant_refuses(packed, scale, text):
    with pytest.raises(ValueError) as error:
        dequant(packed, scale)
    assert str(error.value) == text


def test_scales_253_and_254_serve_small_codes():
    scale = torch.tensor([[253, 254]], dtype=torch.uint8)
    assert dequant(codes(1, 32, fill=0x33), scale).isfinite().all()  # 1.5 * 2^127
    assert dequant(codes(1, 32, fill=0x77), scale, torch.float64).isfinite().all()


W = torch.ones(3, 64)
BAD_WEIGHTS = {
    "nan": (with_entry(W, (2, 40), nan), f"MXFP4 largest magnitude nan at row 2, group 1: {FINITE}"),
    "minus-infinity": (with_entry(W[None], (0, 1, 3), -inf),
                       f"MXFP4 largest magnitude inf at matrix (0,), row 1, group 0: {FINITE}"),
    "beyond-bf16": (with_entry(W.double(), (0, 63), nextafter(LARGEST, inf)),
                    f"MXFP4 largest magnitude {nextafter(LARGEST, inf)} at row 0, group 1: {FINITE}"),
    "width": (torch.ones(3, 48), "shape (3, 48) to MXFP4: allowed are [.., N, K] with K a multiple of 32"),
    "empty": (torch.ones(3, 0), "shape (3, 0) to MXFP4: allowed are [.., N, K] with K a multiple of 32"),
    "integers": (W.int(), "torch.int32 to MXFP4: allowed are bfloat16, float32, float64"),
    "half": (W.half(), "torch.float16 to MXFP4: allowed are bfloat16, float32, float64"),
}  # fmt: skip


@pytest.mark.parametrize(("w", "text"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_quant_refuses(w, text):
    with pytest.raises(ValueError) as error:
        quant(w)
    assert str(error.value) == text


def test_dequant_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"^MXFP4 to torch.float16: allowed are bfloat16, float32, float64$"):
        dequant(codes(3, 64), SCALES[0], torch.float16)
