"""Every instruction that computes one value per lane from values of the same lane: PTX name -> helper and types.

Both back ends implement each helper (`lanes.py` in numpy, `runtime.h` in C), so an instruction is described once.
A type names how bits are read: u, s, f and a width; bf16 and f16 are 16 raw bits; b is u; f32x2, bf16x2 raw bits.

What is approximate on a GPU is here the double-precision result rounded once: ex2, lg2, rcp, rsqrt, sqrt, sin, cos,
tanh with `.approx`, and div with `.approx` or `.full`. `.ftz` flushes subnormal operands and results of those to zero.
A fma rounds once, in every form. mma adds the products of one instruction and its accumulator in double precision and
rounds once; tensor cores may truncate.
"""

from functools import cache
from typing import NamedTuple

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
BITS = ("b16", "b32", "b64")
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "lo": "lt", "ls": "le", "hi": "gt",
           "hs": "ge"}  # fmt: skip
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
APPROXIMATE = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
PACKED = {"f32x2": "u64", "bf16x2": "u32", "f16x2": "u32", "bf16": "bf16", "f16": "f16"}
CAST = "cast"  # the helper that converts between the integer types, and integers to f32, as C does


class Pure(NamedTuple):
    """helper(args) -> result; the types are those its operands are read and its result is written as."""

    helper: str
    args: tuple[str, ...]
    result: str


def _integers() -> dict[str, Pure]:
    out = {}
    for t in INTEGERS:
        for op in ("add", "sub", "min", "max", "div", "rem"):
            out[f"{op}.{t}"] = Pure(f"{op}_{t}", (t, t), t)
        out[f"mul.lo.{t}"] = Pure(f"mul_{t}", (t, t), t)
        out[f"mul.hi.{t}"] = Pure(f"mulhi_{t}", (t, t), t)
        out[f"mad.lo.{t}"] = Pure(f"mad_{t}", (t, t, t), t)
        if t[1:] != "64":
            wide = f"{t[0]}{2 * int(t[1:])}"
            out[f"mul.wide.{t}"] = Pure(f"mulwide_{t}", (t, t), wide)
            out[f"mad.wide.{t}"] = Pure(f"madwide_{t}", (t, t, wide), wide)
        for op in ("neg", "abs") if t[0] == "s" else ():
            out[f"{op}.{t}"] = Pure(f"{op}_{t}", (t,), t)
        out[f"shr.{t}"] = Pure(f"shr_{t}", (t, "u32"), t)
    for b in BITS:
        u = f"u{b[1:]}"
        for op in ("and", "or", "xor"):
            out[f"{op}.{b}"] = Pure(f"{op}_{u}", (u, u), u)
        out[f"not.{b}"] = Pure(f"not_{u}", (u,), u)
        out[f"shl.{b}"] = Pure(f"shl_{u}", (u, "u32"), u)
        out[f"shr.{b}"] = Pure(f"shr_{u}", (u, "u32"), u)
    u3 = ("u32", "u32", "u32")
    out |= {
        "lop3.b32": Pure("lop3", (*u3, "u32"), "u32"),
        "prmt.b32": Pure("prmt", u3, "u32"),
        "bfe.u32": Pure("bfe_u32", u3, "u32"),
        "bfe.s32": Pure("bfe_s32", ("s32", "u32", "u32"), "s32"),
        "bfi.b32": Pure("bfi", (*u3, "u32"), "u32"),
        "popc.b32": Pure("popc", ("u32",), "u32"),
        "clz.b32": Pure("clz", ("u32",), "u32"),
        "brev.b32": Pure("brev", ("u32",), "u32"),
        "shf.l.wrap.b32": Pure("shfl_wrap", u3, "u32"),
        "shf.r.wrap.b32": Pure("shfr_wrap", u3, "u32"),
    }
    return out


def _floats() -> dict[str, Pure]:
    f, out = "f32", {}
    for op in ("add", "sub", "mul"):
        for rounding in ("", ".rn"):
            out[f"{op}{rounding}.f32"] = Pure(f"{op}_f32", (f, f), f)
            for t, u in PACKED.items():
                out[f"{op}{rounding}.{t}"] = Pure(f"{op}_{t}", (u, u), u)
    for t, u in PACKED.items():
        out[f"fma.rn.{t}"] = Pure(f"fma_{t}", (u, u, u), u)
    for half in ("bf16", "f16"):
        for op in ("add", "sub"):
            for rounding in ("", ".rn"):
                out[f"{op}{rounding}.f32.{half}"] = Pure(f"{op}_f32_{half}", (half, f), f)
        out[f"fma.rn.f32.{half}"] = Pure(f"fma_f32_{half}", (half, half, f), f)
    for op in ("min", "max"):
        out[f"{op}.f32"] = Pure(f"{op}_f32", (f, f), f)
        out[f"{op}.NaN.f32"] = Pure(f"{op}nan_f32", (f, f), f)
    out |= {f"{op}.f32": Pure(f"{op}_f32", (f,), f) for op in ("neg", "abs")}
    out |= {f"fma.{r}.f32": Pure(f"fma_{r}", (f, f, f), f) for r in ("rn", "rm")}
    out |= {f"{op}.rn.f32": Pure(f"{op}_rn", (f,) * n, f) for op, n in (("div", 2), ("rcp", 1), ("sqrt", 1))}
    for op in APPROXIMATE:
        out[f"{op}.approx.f32"] = Pure(f"{op}_approx", (f,), f)
        out[f"{op}.approx.ftz.f32"] = Pure(f"{op}_approx_ftz", (f,), f)
    for kind in ("approx", "full"):
        out[f"div.{kind}.f32"] = Pure("div_rn", (f, f), f)
    return out


def _selects() -> dict[str, Pure]:
    out = {f"{op}.pred": Pure(f"{op}_pred", ("pred", "pred"), "pred") for op in ("and", "or", "xor")}
    out["not.pred"] = Pure("not_pred", ("pred",), "pred")
    for t in (*INTEGERS, *BITS, "f32"):
        u = f"u{t[1:]}"
        out[f"selp.{t}"] = Pure(f"selp_{u}", (u, u, "pred"), u)
        out[f"mov.{t}"] = Pure(CAST, (u,), u)
        read = u if t[0] == "b" else t
        for name, op in COMPARE.items():
            out[f"setp.{name}.{t}"] = Pure(f"{op}_{read}", (read, read), "pred")
    for name in UNORDERED:
        out[f"setp.{name}.f32"] = Pure(f"{name}_f32", ("f32", "f32"), "pred")
    out["mov.pred"] = Pure("mov_pred", ("pred",), "pred")
    return out


def _conversions() -> dict[str, Pure]:
    out = {}
    whole = ("u8", "s8", *INTEGERS)
    out |= {f"cvt.{d}.{s}": Pure(CAST, (s,), d) for d in whole for s in whole}
    out |= {f"cvt.rn.f32.{s}": Pure(CAST, (s,), "f32") for s in whole}
    for r in ("rzi", "rni", "rmi", "rpi"):
        for d in ("s32", "u32", "s64", "u64"):
            out[f"cvt.{r}.{d}.f32"] = Pure(f"cvt_{r}_{d}", ("f32",), d)
        out[f"cvt.{r}.f32.f32"] = Pure(f"cvt_{r}_f32", ("f32",), "f32")
    for sat in ("cvt.sat.f32.f32", "cvt.rn.sat.f32.f32"):
        out[sat] = Pure("saturate", ("f32",), "f32")
    for half in ("bf16", "f16"):
        out[f"cvt.f32.{half}"] = Pure(f"cvt_f32_{half}", (half,), "f32")
        out[f"cvt.rn.{half}.f32"] = Pure(f"cvt_{half}_f32", ("f32",), half)
        out[f"cvt.rn.{half}x2.f32"] = Pure(f"cvt_{half}x2_f32", ("f32", "f32"), "u32")
    for small, raw in (("e4m3x2", "u16"), ("e5m2x2", "u16"), ("e2m1x2", "u8")):
        out[f"cvt.rn.satfinite.{small}.f32"] = Pure(f"cvt_{small}_f32", ("f32", "f32"), raw)
        out[f"cvt.rn.f16x2.{small}"] = Pure(f"cvt_f16x2_{small}", (raw,), "u32")
    return out


PURE: dict[str, Pure] = _integers() | _floats() | _selects() | _conversions()


@cache
def bits(kind: str) -> int:
    """Width of a type: "f32" -> 32, "bf16x2" -> 32, "pred" -> 1."""
    if kind == "pred":
        return 1
    one, _, two = kind.partition("x")
    return int("".join(c for c in one.removeprefix("bf").lstrip("bfsu") if c.isdigit())) * int(two or 1)
