"""The interpreter's two back ends against float64 and against each other, and what they refuse."""

import re
from types import SimpleNamespace

import pytest
import test_fast_attn_res as residual
import test_fast_kda as recurrence
import test_fast_linear as gemm
import torch

from equivalence.simt import Fault, Unsupported, compiler, launch, native
from equivalence.simt.lanes import HELPERS
from equivalence.simt.machine import Machine
from equivalence.simt.native import HERE, compile_ptx
from equivalence.simt.opcodes import CAST, PURE, bits
from equivalence.simt.parse import read
from equivalence.simt.runner import _bind
from equivalence.simt.translate import translate
from fast import attn_res, kda
from fast.kernel import pick
from fast.linear import linear_kernel
from reference.stage import ContractError

needs_compiler = pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
BACKENDS = [pytest.param("native", marks=needs_compiler), "numpy"]


def execute(kernel, tensors: dict, run: str, target: str = "sm_90a") -> None:
    launch(kernel, [_bind(kernel, arg, tensors) for arg in kernel.args], run=run, target=target)


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("run", BACKENDS)
def test_kda(run, target):
    t = recurrence.hostile(2, 2, nulls=1)
    want = recurrence.oracle(t)
    execute(pick(kda.kda_decode, t, {})[0], t, run, target)
    recurrence.compare(t, want)


@pytest.mark.parametrize(
    "run, form",
    [("numpy", form) for form in gemm.FORMS]
    + [pytest.param("native", form, marks=needs_compiler) for form in ("fma-tail", "split-bulk", "mma-async")],
)
def test_linear(run, form):
    M, N, K, cfg = gemm.FORMS[form]
    t = gemm.hostile(M, N, K)
    exact, bound = gemm.oracle(t)
    execute(linear_kernel(cfg, M, N, K, t["x"].stride(0), t["out"].stride(0)), t, run)
    gemm.compare(t["out"], exact, bound)


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 192, 2, 2, 4), (1, 7168, 5, -1, 8)], ids=["one-cta", "cluster"])
def test_attn_res(run, shape):
    T, D, nb, write, B = shape
    t = residual.hostile(T, D, nb, write, B=B)
    kernel = pick(attn_res.attn_res, t, dict(nb=nb, write=write))[0]
    config = next(c for c in kernel.constants if isinstance(c, attn_res.Config))
    want, bound = residual.wanted(t, nb, write, residual.depth_of(config, D))
    execute(kernel, t, run)
    residual.compare(t, want, bound)


def odd(t: torch.Tensor) -> torch.Tensor:
    """The same values and layout, two bytes after a multiple of 16."""
    size = (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
    room = torch.empty(size + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 2
    return room[start : start + size].view(t.dtype).as_strided(t.shape, t.stride(), start // t.element_size()).copy_(t)


def test_a_weight_at_an_odd_address_is_copied_once_and_nothing_else():
    kernel, t = gemm.made("fma-tail")
    exact, bound = gemm.oracle(t)
    t["w"] = odd(t["w"])
    assert t["w"].data_ptr() % 16 == 2
    for _ in range(2):
        execute(kernel, t, "numpy")
        gemm.compare(t["out"], exact, bound)
    weight = next(arg for arg in kernel.args if arg.name == "w")
    one = _bind(kernel, weight, t)
    assert one is _bind(kernel, weight, t) and one.data_ptr() % 16 == 0 and torch.equal(one, t["w"])
    t["w"].mul_(2)
    assert torch.equal(_bind(kernel, weight, t), t["w"]), "a weight that changed is copied again"
    t["x"] = odd(t["x"])
    with pytest.raises(ContractError, match="x starts at"):
        execute(kernel, t, "numpy")


# ---------------------------------------------------------------- single instructions


def program(body: str, registers: str = "") -> str:
    """PTX of one warp that reads word i of x into %rd9 (64 bits) and stores %rd0 to word i of y."""
    return f"""
.version 9.0
.target sm_90a
.shared .align 8 .b8 buffer[8];
.visible .entry one(.param .b64 x, .param .b64 y)
.reqntid 32, 1, 1
{{
  .reg .b32 %r<9>; .reg .b64 %rd<12>; .reg .pred %p<9>; .reg .b16 %rs<9>;
  {registers}
  ld.param.b64 %rd1, [x];
  ld.param.b64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 8;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  {body}
  ret;
}}"""


def run_one(ptx: str, x: torch.Tensor, run: str, size: int = 32) -> torch.Tensor:
    y = torch.zeros(size, dtype=torch.int64)
    one = SimpleNamespace(name="one", args=(SimpleNamespace(name="x"), SimpleNamespace(name="y")), grid=(1, 1, 1),
                          block=(32, 1, 1), cluster=None, smem=0, pdl=False)  # fmt: skip
    if run == "numpy":
        Machine().run([(one, ptx, [x, y])])
    else:
        spans = [(t.data_ptr(), 8 * t.numel()) for t in (x, y)]
        compile_ptx(ptx)([x.data_ptr(), y.data_ptr()], spans, one.grid, one.block, (1, 1, 1), 0, "one")
    return y


def test_every_helper_exists_in_both_languages():
    header = (HERE / "arithmetic.h").read_text()
    for name in {p.helper for p in PURE.values()} - {CAST}:
        assert name in HELPERS, name
    small = [
        p.helper for op, p in PURE.items() if op in ("fma.rn.f32", "prmt.b32", "cvt.rn.bf16x2.f32", "fma.rn.f32x2")
    ]
    assert len(small) == 4 and all(re.search(rf"\b{name}\(", header) for name in small)


def hostile_words() -> torch.Tensor:
    """32 x 3 words: random bits, and fp32 pairs with zeros, subnormals, infinities, NaN and ties among them."""
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 3e38, float("inf"), -float("inf"), float("nan"), 0.5, 2.5]
    )
    g = torch.Generator().manual_seed(3)
    pairs = torch.randn(96, 2, generator=g) * 2.0 ** torch.randint(-20, 20, (96, 2), generator=g)
    pick = torch.randint(0, len(special), (96, 2), generator=g)
    pairs = torch.where(torch.rand(96, 2, generator=g) < 0.4, special[pick], pairs)
    words = pairs.contiguous().view(torch.int64)[:, 0]
    noise = torch.randint(-(2**63), 2**63 - 1, (96,), generator=g)
    return torch.where(torch.arange(96) % 3 == 2, noise, words)


def body_of(ops: list[str]) -> str:
    """Each instruction on (x[i], x[i + 32], x[i + 64]); its result to y[32 n + i]."""
    lines = ["ld.global.b64 %rd6, [%rd4];", "ld.global.b64 %rd7, [%rd4+256];", "ld.global.b64 %rd8, [%rd4+512];"]
    for n, op in enumerate(ops):
        known, operands = PURE[op], []
        for i, kind in enumerate(known.args):
            wide = max(bits(kind), 16) if kind != "pred" else 1
            name = {1: f"%p{i}", 16: f"%rs{i}", 32: f"%r{3 + i}", 64: f"%rd{6 + i}"}[wide]
            if kind == "pred":
                lines += [f"cvt.u32.u64 %r3, %rd{6 + i};", "and.b32 %r3, %r3, 1;", f"setp.ne.b32 {name}, %r3, 0;"]
            elif wide < 64:
                lines.append(f"cvt.u{wide}.u64 {name}, %rd{6 + i};")
            operands.append(name)
        out = {1: "%p8", 8: "%rs8", 16: "%rs8", 32: "%r8", 64: "%rd10"}[bits(known.result)]
        lines.append(f"{op} {out}, {', '.join(operands)};")
        if known.result == "pred":
            lines.append("selp.b32 %r8, 1, 0, %p8;")
        wide = {1: 32, 8: 16}.get(bits(known.result), bits(known.result))
        source = {16: "%rs8", 32: "%r8", 64: "%rd10"}[wide]
        lines += [f"cvt.u64.u{wide} %rd11, {source};", f"st.global.b64 [%rd5+{256 * n}], %rd11;"]
    return "\n  ".join(lines)


FLOAT_OPS = [op for op in PURE if re.search(r"f32|f16|e\dm\d", op) and not op.startswith(("mov", "selp", "setp"))]


@needs_compiler
def test_both_back_ends_compute_the_same_bits():
    """Every other floating-point instruction and some of the others, on hostile words; all of them take a minute."""
    ops = FLOAT_OPS[::2] + [op for op in PURE if op not in FLOAT_OPS][::6]
    x, ptx = hostile_words(), program(body_of(ops))
    a, b = (run_one(ptx, x, run, 32 * len(ops)).reshape(-1, 32) for run in ("native", "numpy"))
    for op, one, two in zip(ops, a, b, strict=True):
        if "f32" in PURE[op].result or "f32x2" in op:  # other formats have one NaN
            one, two = (v.view(torch.float32) for v in (one, two))
            assert torch.equal(one.isnan(), two.isnan()), op
            one, two = (v.nan_to_num(0, torch.inf, -torch.inf).view(torch.int32) for v in (one, two))
        assert torch.equal(one, two), f"{op}: {(one != two).nonzero()[0].item()}"


@pytest.mark.parametrize("run", BACKENDS)
def test_fma_rounds_once(run):
    """a b + c just above a tie of fp32: through a double it would land on the tie and go to even."""
    a, b, c = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60
    exact = a * b  # 1 + 2^-11 + 2^-24: a tie between two floats, which c breaks upwards
    body = ("ld.global.b64 %rd6, [%rd4]; mov.b64 {%r3, %r4}, %rd6; ld.global.b32 %r5, [%rd4+256];\n"
            "fma.rn.f32 %r6, %r3, %r4, %r5; fma.rm.f32 %r7, %r3, %r4, %r5; mov.b64 %rd7, {%r6, %r7};\n"
            "st.global.b64 [%rd5], %rd7;")  # fmt: skip
    x = torch.zeros(64, 2)
    x[:32], x[32:, 0] = torch.tensor([a, b]), c
    got = run_one(program(body), x.view(torch.int64)[:, 0].contiguous(), run).view(torch.float32).reshape(-1, 2)[0]
    assert got.tolist() == [exact + 2.0**-24, exact - 2.0**-24]


# ---------------------------------------------------------------- refusals


def test_unknown_instructions_name_themselves_and_their_line():
    with pytest.raises(Unsupported, match=r"PTX line 1\d: add\.rz\.f32 %r3, %r3, %r3: not executed"):
        translate(read(program("add.rz.f32 %r3, %r3, %r3;")))
    with pytest.raises(Unsupported, match=r"PTX line 1\d: ld\.b32 .*generic"):
        translate(read(program("ld.b32 %r3, [%rd4];")))


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("body, text", [
    ("ld.global.b64 %rd6, [%rd4+8];", r"thread 31: PTX line 1\d: address outside the tensors"),
    ("st.global.b64 [%rd5+4], %rd4;", r"PTX line 1\d: misaligned address"),
    ("ld.shared.b32 %r3, [%r1+99996];", r"PTX line 1\d: "),
    ("setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $A;\nshfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;\n$A:",
     r"needs a lane of the warp that is not there"),
    ("mov.b32 %r2, 2; mbarrier.init.shared.b64 [buffer], %r2;\n"
     "$A: mbarrier.try_wait.parity.shared.b64 %p1, [buffer], 0;\n@!%p1 bra $A;", "deadlock"),
])  # fmt: skip
def test_faults_name_their_line(run, body, text):
    with pytest.raises(Fault, match=text):
        run_one(program(body), torch.zeros(32, dtype=torch.int64), run)


def test_without_a_compiler_numpy_serves_and_says_so(monkeypatch):
    from equivalence import simt

    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.warns(UserWarning, match="no C compiler"):
        assert simt.backend() == "numpy"
