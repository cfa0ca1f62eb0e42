"""What one lane computes, over rows of lanes in numpy: every helper of `opcodes`, by name, in HELPERS.

Arguments are arrays of the types that `opcodes` names: unsigned words viewed as int or float; bf16 and f16 raw uint16;
pred bool. The same definitions in C are in arithmetic.h.
"""

from collections.abc import Callable

import numpy as np

DTYPES = {
    **{f"{k}{w}": np.dtype(f"{n}{w}") for k, n in (("u", "uint"), ("s", "int")) for w in (8, 16, 32, 64)},
    "f32": np.dtype("float32"), "bf16": np.dtype("uint16"), "f16": np.dtype("uint16"), "pred": np.dtype(bool),
}  # fmt: skip
u8, u16, u32, u64, f32, f64 = np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64
NAN32 = np.array([0x7FFFFFFF], u32).view(f32)[0]
HELPERS: dict[str, Callable] = {}


def _helper(fn: Callable) -> Callable:
    HELPERS[fn.__name__] = fn
    return fn


def _integers() -> None:
    import operator as op

    compare = dict(eq=op.eq, ne=op.ne, lt=op.lt, le=op.le, gt=op.gt, ge=op.ge)
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        w, signed = int(t[1:]), t[0] == "s"
        both = {f"{n}_{t}": f for n, f in compare.items()}
        both |= {f"{n}_{t}": f for n, f in dict(add=op.add, sub=op.sub, mul=op.mul, min=np.minimum, max=np.maximum,
                                                 div=_div, rem=_rem).items()}  # fmt: skip
        both |= {f"mad_{t}": lambda a, b, c: a * b + c, f"shr_{t}": _shr, f"mulhi_{t}": _mulhi}
        if w < 64:
            wide = DTYPES[f"{t[0]}{2 * w}"]
            both[f"mulwide_{t}"] = lambda a, b, d=wide: a.astype(d) * b.astype(d)
            both[f"madwide_{t}"] = lambda a, b, c, d=wide: a.astype(d) * b.astype(d) + c
        both |= {f"neg_{t}": op.neg, f"abs_{t}": np.abs} if signed else {}
        if not signed:
            both |= {f"and_{t}": op.and_, f"or_{t}": op.or_, f"xor_{t}": op.xor, f"not_{t}": op.invert,
                     f"shl_{t}": _shl, f"selp_{t}": lambda a, b, p: np.where(p, a, b)}  # fmt: skip
        HELPERS.update(both)
    logic = dict(and_pred=op.and_, or_pred=op.or_, xor_pred=op.xor, not_pred=op.invert, mov_pred=lambda a: a)
    HELPERS.update(logic)


def _shl(a, n):
    w = a.dtype.itemsize * 8
    return np.where(n < w, a << np.minimum(n, w - 1).astype(a.dtype), a.dtype.type(0))


def _shr(a, n):
    w = a.dtype.itemsize * 8
    beyond = (a >> a.dtype.type(w - 1)) if a.dtype.kind == "i" else a.dtype.type(0)
    return np.where(n < w, a >> np.minimum(n, w - 1).astype(a.dtype), beyond)


def _mulhi(a, b):
    w = a.dtype.itemsize * 8
    if w < 64:
        wide = np.int64 if a.dtype.kind == "i" else u64
        return (a.astype(wide) * b.astype(wide) >> wide(w)).astype(a.dtype)
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], a.dtype)


def _div(a, b):
    """Towards zero; by zero all ones; the smallest number by -1 is itself."""
    one = np.where(b == 0, b.dtype.type(1), b)
    q = (a - np.fmod(a, one)) // one
    return np.where(b == 0, ~np.zeros_like(a), q).astype(a.dtype)


def _rem(a, b):
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


_integers()


@_helper
def lop3(a, b, c, t):
    r = np.zeros_like(a)
    for i in range(8):
        term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        r |= np.where(t >> u32(i) & u32(1), term, u32(0))
    return r


@_helper
def prmt(a, b, s):
    w, r = a.astype(u64) | b.astype(u64) << u64(32), np.zeros_like(a)
    for i in range(4):
        n = s >> u32(4 * i) & u32(15)
        v = (w >> (n & u32(7)).astype(u64) * u64(8) & u64(255)).astype(u32)
        r |= np.where(n & u32(8), np.where(v & u32(128), u32(255), u32(0)), v) << u32(8 * i)
    return r


def _low(n):
    """A mask of the n lowest of 32 bits."""
    return np.where(n >= 32, u32(0xFFFFFFFF), (u32(1) << np.minimum(n, 31).astype(u32)) - u32(1))


@_helper
def bfe_u32(a, at, n):
    return _shr(a, at & u32(255)) & _low(n & u32(255))


@_helper
def bfe_s32(a, at, n):
    at, n = at & u32(255), n & u32(255)
    x = a.astype(np.int64) >> np.minimum(at, 63).astype(np.int64)
    up = np.where((n < 32) & (at + n < 32), 64 - n.astype(np.int64), 32)
    return np.where(n == 0, 0, x << up >> up).astype(np.int32)


@_helper
def bfi(a, b, at, n):
    at, n = at & u32(255), n & u32(255)
    mask = _shl(_low(n), at)
    return b & ~mask | _shl(a, at) & mask


HELPERS |= {
    "popc": lambda a: np.bitwise_count(a).astype(u32),
    "clz": lambda a: (32 - np.frexp(a.astype(f64))[1]).astype(u32),
    "brev": lambda a: sum((a >> u32(i) & u32(1)) << u32(31 - i) for i in range(32)),
    "shfl_wrap": lambda a, b, n: np.where(n & u32(31), _shl(b, n & u32(31)) | _shr(a, u32(32) - (n & u32(31))), b),
    "shfr_wrap": lambda a, b, n: np.where(n & u32(31), _shr(a, n & u32(31)) | _shl(b, u32(32) - (n & u32(31))), a),
    "mapa": lambda a, rank: a & u32(0xFFFFFF) | rank << u32(24),
}


def _pack(kind, *parts):
    step = kind.itemsize * 8 // len(parts)
    return sum(p.astype(kind) << kind.type(step * i) for i, p in enumerate(parts))


for _w, _n in ((16, 2), (32, 2), (32, 4), (64, 2), (64, 4)):
    HELPERS[f"pack{_n}_u{_w}"] = lambda *parts, d=DTYPES[f"u{_w}"]: _pack(d, *parts)
    HELPERS[f"part_u{_w}_u{_w // _n}"] = lambda a, at, d=DTYPES[f"u{_w // _n}"]: _shr(a, at).astype(d)

# ---- floating point


def odd(x, error):
    """A double that rounds to any narrower type as x + error would (error: below half an ulp of x)."""
    w = x.view(np.int64)
    step = np.where((error != 0) & np.isfinite(x) & (w & 1 == 0), np.where((error > 0) == (x > 0), 1, -1), 0)
    return (w + step).view(f64)


def two_sum(a, b):
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


def exact_fma(a, b, c):
    """a * b + c in double, rounded to odd; a * b must be exact in double."""
    return odd(*two_sum(a.astype(f64) * b.astype(f64), c.astype(f64)))


@_helper
def fma_rn(a, b, c):
    return exact_fma(a, b, c).astype(f32)


@_helper
def fma_rm(a, b, c):
    s, error = two_sum(a.astype(f64) * b.astype(f64), c.astype(f64))
    r = s.astype(f32)
    below = np.isfinite(s) & ((r > s) | ((r == s) & (error < 0)))
    return np.where(below, np.nextafter(r, f32(-np.inf)), r)


def _sign(a, b, both):
    """Zeros of either sign: bits combined so that min is -0 and max is +0."""
    return both(a.view(u32), b.view(u32)).view(f32)


@_helper
def min_f32(a, b):
    r = np.where(a == b, _sign(a, b, np.bitwise_or), np.fmin(a, b))
    return np.where(np.isnan(a) & np.isnan(b), NAN32, r)


@_helper
def max_f32(a, b):
    r = np.where(a == b, _sign(a, b, np.bitwise_and), np.fmax(a, b))
    return np.where(np.isnan(a) & np.isnan(b), NAN32, r)


def _flush(a):
    return np.where(np.abs(a) < f32(2.0**-126), np.copysign(f32(0), a), a)


def _floats() -> None:
    import operator as op

    arithmetic = dict(add=op.add, sub=op.sub, mul=op.mul)
    HELPERS.update({f"{n}_f32": f for n, f in arithmetic.items()})
    HELPERS.update(neg_f32=lambda a: (a.view(u32) ^ u32(1 << 31)).view(f32), abs_f32=np.abs)
    for n, f in (("min", min_f32), ("max", max_f32)):
        HELPERS[f"{n}nan_f32"] = lambda a, b, f=f: np.where(np.isnan(a) | np.isnan(b), NAN32, f(a, b))
    HELPERS.update(saturate=lambda a: np.where(a > 0, np.where(a < 1, a, f32(1)), f32(0)))
    HELPERS.update(div_rn=op.truediv, rcp_rn=lambda a: f32(1) / a, sqrt_rn=np.sqrt)
    wide = dict(ex2=np.exp2, lg2=np.log2, rcp=lambda a: 1 / a, rsqrt=lambda a: 1 / np.sqrt(a), sqrt=np.sqrt,
                sin=np.sin, cos=np.cos, tanh=np.tanh)  # fmt: skip
    for n, f in wide.items():
        HELPERS[f"{n}_approx"] = lambda a, f=f: f(a.astype(f64)).astype(f32)
        HELPERS[f"{n}_approx_ftz"] = lambda a, f=f: _flush(f(_flush(a).astype(f64)).astype(f32))
    compare = dict(eq=op.eq, lt=op.lt, le=op.le, gt=op.gt, ge=op.ge)
    HELPERS.update({f"{n}_f32": f for n, f in compare.items()})
    HELPERS.update(ne_f32=lambda a, b: (a < b) | (a > b), equ_f32=lambda a, b: ~((a < b) | (a > b)))
    HELPERS.update(neu_f32=op.ne, num_f32=lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    HELPERS.update(nan_f32=lambda a, b: np.isnan(a) | np.isnan(b))
    for n, negated in (("ltu", op.ge), ("leu", op.gt), ("gtu", op.le), ("geu", op.lt)):
        HELPERS[f"{n}_f32"] = lambda a, b, f=negated: ~f(a, b)
    for r, f in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
        HELPERS[f"cvt_{r}_f32"] = f
        for t in ("s32", "u32", "s64", "u64"):
            HELPERS[f"cvt_{r}_{t}"] = lambda a, f=f, d=DTYPES[t]: _to_integer(f(a.astype(f64)), d)


def _to_integer(x, kind):
    """Saturating; NaN gives 0, or the lowest bit pattern with only the sign for 64 bits."""
    info = np.iinfo(kind)
    bits = info.bits
    top, low = 2.0 ** (bits - (info.min < 0)), float(info.min)
    inside = (x >= low) & (x < top)
    r = np.where(inside, x, 0).astype(kind)
    r = np.where(x >= top, kind.type(info.max), np.where(x < low, kind.type(info.min), r))
    nan = kind.type(0) if bits == 32 else np.array([1 << 63], u64).view(kind)[0]
    return np.where(np.isnan(x), nan, r)


_floats()


@_helper
def cvt_f32_bf16(a):
    return (a.astype(u32) << u32(16)).view(f32)


@_helper
def cvt_bf16_f32(a):
    w = a.view(u32)
    return np.where(np.isnan(a), u32(0x7FFF), w + u32(0x7FFF) + (w >> u32(16) & u32(1)) >> u32(16)).astype(u16)


@_helper
def cvt_f32_f16(a):
    return np.where(np.isnan(a.view(np.float16)), NAN32, a.view(np.float16).astype(f32))


@_helper
def cvt_f16_f32(a):
    return np.where(np.isnan(a), u16(0x7FFF), a.astype(np.float16).view(u16))


def narrow(a, bias, m, most, beyond, nan, width):
    """Doubles to a float with m mantissa bits, to nearest even; codes above `most` become `beyond`."""
    sign = np.where(np.signbit(a), 1 << (width - 1), 0)
    x = np.where(np.isfinite(a), np.abs(a), 0)
    e = np.maximum(np.frexp(x)[1] - 1, 1 - bias)
    e = np.where(x == 0, 1 - bias, e)
    n = np.minimum(np.rint(np.ldexp(x, m - e)), 2.0**52)
    code = n.astype(np.int64) + ((e.astype(np.int64) + bias - 1) << m)
    code = np.where((code > most) | np.isinf(a), beyond, code)
    return np.where(np.isnan(a), nan, sign | code)


def _half(a):
    return np.where(np.isnan(a), u16(0x7FFF), a.astype(np.float16).view(u16))


def _brain(a):
    return narrow(a, 127, 7, 0x7F7F, 0x7F80, 0x7FFF, 16).astype(u16)


def _packed() -> None:
    kinds = dict(bf16=(cvt_f32_bf16, cvt_bf16_f32, _brain), f16=(cvt_f32_f16, cvt_f16_f32, _half))
    import operator as op

    for name, (up, down, rounded) in kinds.items():
        for n, f in dict(add=op.add, sub=op.sub, mul=op.mul).items():
            HELPERS[f"{n}_{name}"] = lambda a, b, f=f, up=up, down=down: down(f(up(a), up(b)))
        for n, f in dict(add=op.add, sub=op.sub).items():
            HELPERS[f"{n}_f32_{name}"] = lambda a, b, f=f, up=up: f(up(a), b)
        HELPERS[f"fma_{name}"] = lambda a, b, c, up=up, r=rounded: r(exact_fma(up(a), up(b), up(c)))
        HELPERS[f"fma_f32_{name}"] = lambda a, b, c, up=up: fma_rn(up(a), up(b), c)
        HELPERS[f"cvt_{name}x2_f32"] = lambda hi, lo, down=down: down(hi).astype(u32) << u32(16) | down(lo)
        for n in ("add", "sub", "mul", "fma"):
            HELPERS[f"{n}_{name}x2"] = lambda *a, f=HELPERS[f"{n}_{name}"]: _pairs(f, u32, u16, *a)
    for n in ("add", "sub", "mul"):
        HELPERS[f"{n}_f32x2"] = lambda *a, f=HELPERS[f"{n}_f32"]: _pairs(f, u64, f32, *a)
    HELPERS["fma_f32x2"] = lambda *a: _pairs(fma_rn, u64, f32, *a)


def _pairs(f, whole, half, *packed):
    """A helper of halves applied to both halves of packed words."""
    views = [np.ascontiguousarray(a).view(half) for a in packed]
    return np.ascontiguousarray(f(*views)).astype(half).view(whole)


_packed()
SMALL = {"e4m3x2": (7, 3, 0x7E, 0x7E, 0x7F, 8), "e5m2x2": (15, 2, 0x7B, 0x7B, 0x7F, 8), "e2m1x2": (1, 1, 7, 7, 7, 4)}


def _small() -> None:
    for name, form in SMALL.items():
        width, raw = form[-1], DTYPES[f"u{2 * form[-1]}"]

        def pack(hi, lo, form=form, width=width, raw=raw):
            return (narrow(hi.astype(f64), *form) << width | narrow(lo.astype(f64), *form)).astype(raw)

        codes = np.arange(1 << width)
        bias, m = form[0], form[1]
        e, frac = codes >> m & ((1 << (width - 1 - m)) - 1), codes & ((1 << m) - 1)
        size = np.where(e == 0, frac * 2.0 ** (1 - bias - m), (frac + 2.0**m) * 2.0 ** (e - bias - m))
        table = _half(np.where(codes >> (width - 1), -size, size))
        if name == "e4m3x2":
            table[[0x7F, 0xFF]] = 0x7FFF
        if name == "e5m2x2":
            table = (codes << 8).astype(u16)

        def unpack(a, table=table, width=width):
            low = (1 << width) - 1
            return table[a >> width].astype(u32) << u32(16) | table[a & low]

        HELPERS[f"cvt_{name}_f32"], HELPERS[f"cvt_f16x2_{name}"] = pack, unpack


with np.errstate(over="ignore"):
    _small()
