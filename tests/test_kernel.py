"""Kernel objects: what compiles, what the checks refuse, how a twin's arguments are bound."""

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from cutlass.memory import SmemAllocator

import fast
import fast.kernel as kernel_module
from fast.device import WARP, any_rows, load, load_weight, span, store, to_f32, warp_sum
from fast.kernel import ARCHS, Arg, Kernel, launch, pick
from reference.stage import STAGES, ContractError, Role, Stage, Twin, activation, output, weight

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() in kernel_module.CAPABILITIES
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU of sm_90/sm_100/sm_103")
N, WARPS = 256, 4


@cute.kernel
def scale_kernel(mW: cute.Tensor, mX: cute.Tensor, mCount: cute.Tensor, mY: cute.Tensor, c: cutlass.Constexpr):
    """y = c x w / sum(x) of one row per block, and one more call counted."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    partial = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
    w = load_weight(span(mW, thread * 2, 2))
    cute.arch.griddepcontrol_wait()
    x = to_f32(load(span(mX, row * mX.stride[0] + thread * 2, 2)))
    partial[thread // WARP] = warp_sum(x[0] + x[1])
    cute.arch.sync_threads()
    total = Float32(0.0)
    for i in cutlass.range_constexpr(WARPS):
        total += partial[i]
    y = cute.make_rmem_tensor(2, Float32)
    y.store(w.load() * x.load() * (c / total))
    store(span(mY, row * N + thread * 2, 2), y)
    if thread == 0:
        mCount[row] = mCount[row] + 1


@cute.jit
def scale(mW, mX, mCount, mY, c: cutlass.Constexpr, stream: cuda.CUstream):
    scale_kernel(mW, mX, mCount, mY, c).launch(
        grid=[mX.shape[0], 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
    )


@cute.jit
def scale_twice(mW, mX, mCount, mY, c: cutlass.Constexpr, stream: cuda.CUstream):
    scale(mW, mX, mCount, mY, c, stream)
    scale(mW, mX, mCount, mY, c + 1, stream)


@cute.jit
def scale_clustered(mW, mX, mCount, mY, c: cutlass.Constexpr, stream: cuda.CUstream):
    scale_kernel(mW, mX, mCount, mY, c).launch(
        grid=[mX.shape[0], 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, cluster=[2, 1, 1]
    )


@cute.kernel
def eager_kernel(mX: cute.Tensor, mY: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    mY[thread] = mX[thread]


@cute.jit
def eager(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
    eager_kernel(mX, mY).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream, use_pdl=True)


SCALE = Stage(
    "test.scale", "0", axes=dict(T="tokens", N=N),
    tensors=(weight("w", "N", torch.float32), activation("x", "T N", strides="rows"), output("y", "T N")),
)  # fmt: skip
del STAGES["test.scale"]  # only tests that ask for the fixture `stage` see it


def made(rows: int = 2, stride: int = N, c: float = 3.0, name: str = "scale") -> Kernel:
    args = (
        Arg("w", Role.WEIGHT, torch.float32, (N,)),
        Arg("x", Role.ACTIVATION, torch.bfloat16, (rows, N), (stride, 1), align=4),
        Arg("count", Role.SCRATCH, torch.int32, (rows,)),
        Arg("y", Role.OUTPUT, torch.bfloat16, (rows, N)),
    )
    return Kernel(name, scale, args, (c,), grid=(rows, 1, 1), block=(WARPS * WARP, 1, 1), smem=WARPS * 4)


def scale_twin(batch=(1, 4)) -> Twin:
    return Twin("test.scale", (("test.scale",),), ARCHS, batch, lambda w, x, y: (made(x.shape[0], x.stride(0)),))


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setitem(STAGES, "test.scale", SCALE)


def tensors(rows: int = 2, pad: int = 0, device="cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.full((rows, N + pad), float("nan"), dtype=torch.bfloat16)
    x[:, :N] = torch.rand(rows, N, generator=generator) + 1
    w, y = torch.randn(N, generator=generator), torch.full((rows, N), float("nan"), dtype=torch.bfloat16)
    return dict(w=w.to(device), x=x.to(device)[:, :N], y=y.to(device))


def test_compiles_for_every_target_without_a_gpu():
    for target in ARCHS:
        build = made().compile(target)
        assert f".target {target}" in build.ptx and f".entry {build.symbol}(" in build.ptx
        assert build.cubin[:4] == b"\x7fELF"
        assert "ACQBULK" in build.sass
        assert made().compile(target) is build


def test_variants_with_equal_type_names_keep_their_own_code():
    long = 1.0 + 2.0**-20
    builds = [made(c=c).compile("sm_90a") for c in (long, long + 2.0**-20)]
    assert builds[0].ptx != builds[1].ptx and builds[0].cubin != builds[1].cubin


@cute.jit
def scale_any(mW, mX, mCount, mY, c: cutlass.Constexpr, stream: cuda.CUstream):
    rows, (mX, mCount, mY) = mX.shape[0], map(any_rows, (mX, mCount, mY))
    scale_kernel(mW, mX, mCount, mY, c).launch(
        grid=[rows, 1, 1], block=[WARPS * WARP, 1, 1], stream=stream, use_pdl=True
    )


def made_any(rows: int) -> Kernel:
    kernel = made(rows)
    args = tuple(a if a.name == "w" else replace(a, rows="T") for a in kernel.args)
    return replace(kernel, name=f"any{rows}", entry=scale_any, args=args, token_axis=0)


def test_kernels_of_any_number_of_rows_share_their_code():
    two, three = (made_any(rows).compile("sm_90a") for rows in (2, 3))
    assert two.cubin is three.cubin and two.function is three.function and three.kernel == made_any(3)
    assert made_any(2).code == made_any(3).code != made(2).code
    body, static = (b.ptx.replace(b.symbol, "") for b in (two, made(2).compile("sm_90a")))
    assert body == static
    for change, message in (
        (dict(token_axis=None), r"states grid \(2, 1, 1\), its entry launches \(None, 1, 1\)"),
        (dict(entry=scale), r"in PTX are pointer, .align 8 .b8\[16\], .*\[16\]; allowed are 4 pointers"),
        (dict(counts=True), "in PTX are pointer, pointer, pointer, pointer; allowed are 4 pointers and a number"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(made_any(2), **change).compile("sm_90a")
    with pytest.raises(ValueError, match=r"grid \(3, 1, 1\) for \{'T': 2\}; axis 0 must be 2"):
        replace(made_any(2), grid=(3, 1, 1))
    args = tuple(replace(a, shape=(5, *a.shape[1:])) if a.name == "y" else a for a in made_any(2).args)
    with pytest.raises(ValueError, match="y has 5 rows; allowed is 2"):
        replace(made_any(2), args=args)


def test_loads_follow_the_rule():
    for target in ARCHS:
        build = made().compile(target)
        before, after = build.ptx.split("griddepcontrol.wait")
        assert before.count("ld.global") == before.count("ld.global.L1::no_allocate") == 1
        assert ".nc" not in build.ptx and "CONSTANT" not in build.sass and "ld.global" in after


@pytest.mark.parametrize(
    "change", [dict(grid=(3, 1, 1)), dict(block=(64, 1, 1)), dict(smem=0), dict(cluster=(1, 1, 1)), dict(pdl=False)]
)
def test_a_misstated_launch_is_refused(change):
    (field,) = change
    with pytest.raises(ValueError, match=f"states {field} .*, its entry launches"):
        replace(made(), **change).compile("sm_90a")


def test_clusters_and_plain_launches_are_seen():
    kernel = replace(made(), entry=scale_clustered, cluster=(2, 1, 1), pdl=False)
    assert kernel.compile("sm_90a").symbol
    with pytest.raises(ValueError, match=r"states cluster \(1, 1, 1\), its entry launches \(2, 1, 1\)"):
        replace(kernel, cluster=(1, 1, 1)).compile("sm_90a")


def test_one_kernel_per_entry():
    with pytest.raises(ValueError, match="launches 2 kernels; allowed is 1"):
        replace(made(), entry=scale_twice).compile("sm_90a")


def test_pdl_demands_a_wait():
    args = Arg("x", Role.ACTIVATION, torch.float32, (32,)), Arg("y", Role.OUTPUT, torch.float32, (32,))
    with pytest.raises(ValueError, match="never waits"):
        Kernel("eager", eager, args).compile("sm_90a")


@pytest.mark.parametrize("target", ["sm_90", "sm_120a", "native"])
def test_other_targets_are_refused(target):
    with pytest.raises(NotImplementedError, match=f"target '{target}'; allowed are sm_90a, sm_100a, sm_103a"):
        made().compile(target)


def test_names_are_file_names():
    with pytest.raises(ValueError, match="allowed are letters"):
        made(name="scale t1")


def test_layouts_are_demanded_not_copied():
    arg = Arg("x", Role.ACTIVATION, torch.bfloat16, (2, N), (N + 8, 1), align=8)
    x = tensors(2, 8)["x"]
    assert arg.check(x, "k") is x
    row = torch.empty(1, N, dtype=torch.bfloat16).as_strided((1, N), (5, 1))
    assert replace(arg, shape=(1, N)).check(row, "k") is row  # the stride of one row is never used
    wrong = {
        "missing": None,
        "strides": x.contiguous(),
        "float32": x.float(),
        r"\(1, 256\)": x[:1],
        "multiples of 8 bytes": torch.empty(2 * N + 32, dtype=torch.bfloat16)[1:].as_strided((2, N), (N + 8, 1)),
    }
    for message, tensor in wrong.items():
        with pytest.raises(ContractError, match=message):
            arg.check(tensor, "k")


def test_pick_looks_at_layouts_only(stage):
    meta = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for n, t in tensors(3, 8).items()}
    (kernel,) = pick(scale_twin(), meta, {})
    assert kernel == made(3, N + 8)
    assert pick(scale_twin(), tensors(3, 8), {})[0] is kernel


@pytest.mark.parametrize("rows", [0, 5])
def test_batches_outside_the_range_are_refused(stage, rows):
    with pytest.raises(NotImplementedError, match=f"x has {rows} tokens; allowed are 1..4"):
        pick(scale_twin(), tensors(rows), {})


def test_no_launch_on_a_cpu_or_another_chip(stage, monkeypatch):
    with pytest.raises(NotImplementedError, match="device cpu"):
        launch(scale_twin(), tensors(), {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(NotImplementedError, match="sm_80; allowed are sm_90a"):
        kernel_module.device_arch(torch.device("cuda"))


def test_scratch_is_zeroed_once_and_private(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one, two = made(name="one"), made(name="two")
    cpu = torch.device("cpu")
    first = kernel_module._bind(one, one.args[2], {}, cpu)
    assert first.dtype == torch.int32 and first.tolist() == [0, 0]
    first += 1
    assert kernel_module._bind(one, one.args[2], {}, cpu) is first and first.tolist() == [1, 1]
    assert kernel_module._bind(two, two.args[2], {}, cpu).tolist() == [0, 0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel_module._bind(one, one.args[2], {}, cpu) is first
    with pytest.raises(RuntimeError, match="three has no scratch yet; launch it once before capturing"):
        kernel_module._bind(made(name="three"), one.args[2], {}, cpu)


def test_production_kernels_have_names_of_their_own():
    """A report names kernels, so two variants never share a name; every one takes part in PDL."""
    kernels = fast.production_kernels((1, 64))
    assert len({k.name for k in kernels}) == len(kernels) > 8
    assert all(k.pdl for k in kernels)


def check_scaled(args: dict[str, torch.Tensor]) -> None:
    x, w = args["x"].double(), args["w"].double()
    want = 3 * x * w / x.sum(1, keepdim=True)
    # One bf16 rounding, 2^-8, and an fp32 sum of 256 positive terms in 2 + 5 + 4 steps, 11 * 2^-24.
    assert ((args["y"].double() - want).abs() <= want.abs() * (2.0**-8 + 2.0**-20)).all()


@needs_gpu
def test_launches_eagerly_and_in_a_graph(stage):
    args = tensors(3, 8, "cuda")
    assert launch(scale_twin(), args, {}) == ("scale",)
    check_scaled(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(scale_twin(), args, {})
    args["x"].copy_(args["x"] * 2 + 1)
    args["y"].fill_(float("nan"))
    graph.replay()
    check_scaled(args)
    (kernel,) = pick(scale_twin(), args, {})
    assert kernel_module._bind(kernel, kernel.args[2], {}, args["x"].device).tolist() == [2, 2, 2]


@needs_gpu
def test_launch_follows_the_current_stream(stage):
    args = tensors(2, 0, "cuda")
    launch(scale_twin(), tensors(2, 0, "cuda"), {})  # compiled before the sleep, which does not last that long
    assert args["y"].isnan().all()  # its kernels loaded, too
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second: other processes may hold the GPU meanwhile
        launch(scale_twin(), args, {})
    assert args["y"].isnan().all()  # the default stream sees nothing yet: the launch waits behind the sleep
    stream.synchronize()
    check_scaled(args)


@needs_gpu
def test_first_launch_inside_a_capture_is_refused(stage):
    args = tensors(4, 16, "cuda")
    with pytest.raises(RuntimeError, match="launch it once before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        launch(scale_twin(), args, {})
