"""wgmma in the interpreter's two back ends, against float64, over operands laid out in shared memory by hand."""

from types import SimpleNamespace

import pytest
import torch

from equivalence.simt import Fault, Unsupported, compiler
from equivalence.simt.machine import Machine
from equivalence.simt.native import compile_ptx
from equivalence.simt.parse import read
from equivalence.simt.translate import translate

needs_compiler = pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
BACKENDS = [pytest.param("native", marks=needs_compiler), "numpy"]
K = 64
MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes of a row of the pattern -> the descriptor's mode


class Operand:
    """X [rows, K] in shared memory, rows of `width` bytes in the pattern; transposed: those run along the rows of X."""

    def __init__(self, X: torch.Tensor, width: int, transposed: bool):
        self.width, self.transposed, rows = width, transposed, len(X)
        lines = X.T if transposed else X  # [lines, elements of one line]
        n, length = lines.shape
        pad = -length % (width // 2)
        lines = torch.nn.functional.pad(lines, (0, pad))
        blocks = lines.reshape(n, -1, width // 16, 8).transpose(0, 1)  # [block, line, chunk, 8]
        line = torch.arange(n)
        turn = {16: 0 * line, 32: line // 4 % 2, 64: line // 2 % 4, 128: line % 8}[width]
        self.image = torch.empty_like(blocks)
        for c in range(width // 16):
            self.image[:, line, c ^ turn] = blocks[:, :, c]
        self.block, self.group = n * width, 8 * width  # bytes of a block and of eight lines
        if transposed:
            lead, stride = (self.group, self.block) if width == 16 else (self.block, self.group)
        else:
            lead, stride = self.block, self.group
        self.rows = rows
        self.descriptor = MODES[width] << 62 | stride // 16 << 32 | lead // 16 << 16

    def step(self, k: int) -> int:
        """Byte offset of columns 16 k."""
        if self.transposed:
            return 16 * k * self.width
        return 32 * k % self.width + 32 * k // self.width * self.block

    def bytes(self) -> torch.Tensor:
        raw = self.image.contiguous().view(torch.uint8).ravel()
        return torch.nn.functional.pad(raw, (0, -len(raw) % 2048))


def program(N: int, steps: list[str], size: int, tail: str = "", fence: str = "fence.proxy.async;") -> str:
    """PTX of one warpgroup: x to shared memory as it is, the steps, D to y in the order of lanes."""
    copies = "\n".join(
        f"  ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd4+{2048 * i}];\n"
        f"  st.shared.v4.b32 [%r3+{2048 * i}], {{%r4, %r5, %r6, %r7}};"
        for i in range(size // 2048)
    )
    stores = "\n".join(f"  st.global.b32 [%rd6+{4 * i}], %d{i};" for i in range(N // 2))
    return f"""
.version 9.0
.target sm_90a
.extern .shared .align 1024 .b8 buffer[];
.visible .entry one(.param .b64 x, .param .b64 y)
.reqntid 128, 1, 1
{{
  .reg .b32 %r<20>; .reg .b32 %d<128>; .reg .b64 %rd<20>; .reg .pred %p<5>;
  ld.param.b64 %rd1, [x];
  ld.param.b64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mov.b32 %r2, buffer;
  mul.wide.u32 %rd3, %r1, 16;
  add.s64 %rd4, %rd1, %rd3;
  shl.b32 %r3, %r1, 4;
  add.s32 %r3, %r3, %r2;
  mul.wide.u32 %rd5, %r1, {2 * N};
  add.s64 %rd6, %rd2, %rd5;
{copies}
  {fence}
  bar.sync 0;
  setp.ne.b32 %p1, 0, 1;
  setp.ne.b32 %p2, 0, 0;
  wgmma.fence.sync.aligned;
  {chr(10).join(steps)}
  wgmma.commit_group.sync.aligned;
  {tail or "wgmma.wait_group.sync.aligned 0;"}
{stores}
  ret;
}}"""


def descriptor(register: str, offset: int, constant: int) -> str:
    return (f"add.s32 %r8, %r2, {offset}; shr.u32 %r8, %r8, 4; and.b32 %r8, %r8, 16383; cvt.u64.u32 {register}, %r8;\n"
            f"  or.b64 {register}, {register}, {constant};")  # fmt: skip


def multiply(N: int, a: str, scale: str = "%p1", more: str = "1, 1, 0, 0", kind: str = "bf16") -> str:
    d = ", ".join(f"%d{i}" for i in range(N // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind} {{{d}}}, {a}, %rd11, {scale}, {more};"


def ready(a: Operand, b: Operand, more: str = "1, 1, 0, 0", twist: int = 0) -> list[str]:
    """The K / 16 steps of A B^T; the first one overwrites. twist: bits that are wrong in the descriptor of B."""
    start, steps = len(a.bytes()), []
    for k in range(K // 16):
        steps += [descriptor("%rd10", a.step(k), a.descriptor),
                  descriptor("%rd11", start + b.step(k), b.descriptor ^ twist),
                  multiply(b.rows, "%rd10", "%p1" if k else "%p2", more)]  # fmt: skip
    return steps


def execute(ptx: str, raw: torch.Tensor, N: int, run: str, **options) -> tuple[torch.Tensor, list]:
    """D [64, N], and the reports of the numpy back end."""
    y = torch.full((128, N // 2), float("nan"))
    args = SimpleNamespace(name="x"), SimpleNamespace(name="y")
    one = SimpleNamespace(name="one", args=args, grid=(1, 1, 1), block=(128, 1, 1), cluster=None, smem=len(raw) + 16384,
                          pdl=False)  # fmt: skip
    reports = []
    if run == "numpy":
        machine = Machine(**options)
        machine.run([(one, ptx, [raw, y])])
        reports = machine.reports
    else:
        spans = [(t.data_ptr(), t.numel() * t.element_size()) for t in (raw, y)]
        compile_ptx(ptx)([raw.data_ptr(), y.data_ptr()], spans, one.grid, one.block, (1, 1, 1), one.smem, "one")
    lane = torch.arange(128)
    rows = 16 * (lane // 32) + lane % 32 // 4
    D = torch.empty(64, N)
    for i in range(N // 2):
        D[rows + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2] = y[:, i]
    return D, reports


def operands(N: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, K, generator=g).bfloat16() for n in (64, N))


def close(D: torch.Tensor, A: torch.Tensor, B: torch.Tensor, sign: int = 1) -> bool:
    """Four roundings to fp32, each of a partial sum no larger than the sum of absolute products."""
    want, most = sign * A.double() @ B.double().T, A.double().abs() @ B.double().abs().T
    return bool(((D - want).abs() <= 4 * 2.0**-24 * most).all())


FORMS = [(16, 8, "00"), (32, 24, "00"), (64, 64, "00"), (128, 256, "00"), (16, 24, "11"), (32, 16, "01"),
         (64, 40, "10"), (128, 72, "11")]  # fmt: skip


def form(width: int, N: int, trans: str):
    A, B = operands(N)
    a, b = Operand(A, width, trans[0] == "1"), Operand(B, width, trans[1] == "1")
    return A, B, a, b, torch.cat([a.bytes(), b.bytes()])


@pytest.mark.parametrize("run, width, N, trans", [("numpy", *f) for f in FORMS] + [
    pytest.param("native", *FORMS[i], marks=needs_compiler) for i in (0, 2, 5, 7)])  # fmt: skip
def test_operands_in_every_layout(run, width, N, trans):
    A, B, a, b, raw = form(width, N, trans)
    more = f"1, -1, {trans[0]}, {trans[1]}"
    D, _ = execute(program(N, ready(a, b, more), len(raw)), raw, N, run)
    assert close(D, A, B, -1)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_a_wrong_mode_is_wrong(width):
    A, B, a, b, raw = form(width, 16, "00")
    for mode in set(MODES.values()) - {MODES[width]}:
        twist = (mode ^ MODES[width]) << 62
        assert not close(execute(program(16, ready(a, b, twist=twist), len(raw)), raw, 16, "numpy")[0], A, B), mode


@pytest.mark.parametrize("run", BACKENDS)
def test_a_in_registers(run):
    A, B, a, b, raw = form(128, 16, "00")
    lane = torch.arange(128)
    row, column = 16 * (lane // 32) + lane % 32 // 4, 2 * (lane % 4)
    words = [torch.stack([A[row + 8 * (i % 2), 16 * k + column + 8 * (i // 2) + h] for h in (0, 1)], 1).contiguous()
             for k in range(K // 16) for i in range(4)]  # fmt: skip
    flat = torch.stack([w.view(torch.int32)[:, 0] for w in words], 1).contiguous().view(torch.uint8).ravel()
    steps = []
    for k in range(K // 16):
        where = "mul.wide.u32 %rd12, %r1, 64; add.s64 %rd12, %rd12, %rd1;\n" if k == 0 else ""
        steps += [f"{where}ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd12+{len(raw) + 16 * k}];",
                  descriptor("%rd11", len(a.bytes()) + b.step(k), b.descriptor), "wgmma.fence.sync.aligned;",
                  multiply(16, "{%r10, %r11, %r12, %r13}", "%p1" if k else "%p2", "-1, -1, 0"),
                  "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"]  # fmt: skip
    ptx = program(16, steps, len(raw))
    D, _ = execute(ptx, torch.cat([raw, flat]), 16, run)
    assert close(D, A, B)


def test_what_is_read_before_the_wait_is_not_there():
    _, _, a, b, raw = form(128, 16, "00")
    ptx = program(16, ready(a, b), len(raw), tail="wgmma.wait_group.sync.aligned 1;")
    assert execute(ptx, raw, 16, "numpy")[0].isnan().all()


def test_operands_are_read_as_late_as_the_wait():
    A, B, a, b, raw = form(128, 16, "00")
    tail = "st.shared.b32 [%r3], 0; wgmma.wait_group.sync.aligned 0;"
    ptx = program(16, ready(a, b), len(raw), tail=tail.replace("0;", "%r2;", 1))
    assert not close(execute(ptx, raw, 16, "numpy")[0], A, B)


@pytest.mark.parametrize("run", BACKENDS)
@pytest.mark.parametrize("guard, text", [
    ("setp.lt.u32 %p3, %r1, 96;\n@!%p3 bra $SKIP;", "needs a warpgroup of four whole warps"),
    ("setp.lt.u32 %p3, %r1, 127;\n@!%p3 bra $SKIP;", "needs a"),
    ("or.b64 %rd11, %rd11, 562949953421312;", "matrix descriptor with a base offset"),
    ("cvt.u64.u32 %rd12, %r1;\nadd.s64 %rd11, %rd11, %rd12;", "lanes of a warp differ"),
    ("or.b64 %rd11, %rd11, 16383;", "address outside shared memory"),
])  # fmt: skip
def test_faults(run, guard, text):
    _, _, a, b, raw = form(128, 16, "00")
    steps = ready(a, b)
    steps[2:3] = [guard, steps[2], "$SKIP:"]
    with pytest.raises(Fault, match=text):
        execute(program(16, steps, len(raw)), raw, 16, run)


@pytest.mark.parametrize("old, new", [("m64n16k16", "m64n12k16"), ("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"),
                                      ("1, 1, 0, 0", "1, 2, 0, 0"), ("{%d0, %d1,", "{%d1, %d1,")])  # fmt: skip
def test_other_forms_are_refused(old, new):
    ptx = program(16, [multiply(16, "%rd10")], 2048).replace(old, new)
    with pytest.raises(Unsupported, match=r"PTX line \d+: wgmma"):
        translate(read(ptx))
