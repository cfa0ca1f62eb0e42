"""A kernel is an object: one `Kernel` per variant, compiled for any target without a GPU, launched on torch's stream.

Twins are built from Kernels and nothing else launches. A Kernel's tensors have static layouts, so each one is a bare
8-byte pointer in PTX, in the order of `args`: the order checkers and the interpreter bind them by position and role.
A kernel that must know how many tokens there are takes that number after them (`Kernel.counts`).

THE RULE for every kernel launched with PDL (reasons: reading PTX and SASS of all three targets):
- no `.nc` load at all, of anything: ptxas moves those across griddepcontrol.wait, barriers and acquire loads;
- weights: `L1::no_allocate` loads or cp.async, before `cute.arch.griddepcontrol_wait()`;
- everything else (activations, state, index, scratch): plain loads, after the wait, and every warp waits itself.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from reference.stage import STAGES, ContractError, Role, Twin

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
CUTLASS_TYPES = {
    torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32", torch.int32: "Int32",
    torch.int64: "Int64", torch.uint8: "Uint8", torch.float8_e4m3fn: "Float8E4M3FN",
}  # fmt: skip
PARAMETERS = {  # kind and size in PTX
    (".b64", ""): "pointer", (".u64", ""): "pointer", (".align 8 .b8", "[8]"): "pointer",
    (".b32", ""): "number", (".u32", ""): "number",
}  # fmt: skip
TOKEN_AXES = ("T", "M")  # names of the batch axis in stages
PDL_ATTRIBUTE, CLUSTER_ATTRIBUTE = 6, 4  # cudaLaunchAttributeID


@dataclass(frozen=True)
class Arg:
    """One tensor parameter. shape, stride: elements (stride None: row-major). align: bytes, divides the address.

    rows: a name for the length of the first axis if the code is the same for every length; equal names, equal lengths.
    """

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    align: int = 16
    rows: str | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        return self.stride or tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def fake(self, lengths: dict):
        """The compile-time stand-in, without memory: static but for a first axis in `lengths`, symbols by name."""
        import cutlass
        from cutlass.cute.runtime import make_fake_tensor

        dtype = getattr(cutlass, CUTLASS_TYPES[self.dtype])
        shape = (lengths[self.rows], *self.shape[1:]) if self.rows else self.shape
        return make_fake_tensor(dtype, shape, self.strides, assumed_align=self.align)

    def check(self, tensor: Tensor | None, kernel: str) -> Tensor:
        """The tensor itself, if its layout is the compiled one. Raises ContractError otherwise; copies nothing."""
        if tensor is None:
            raise ContractError(f"{kernel}: tensor {self.name!r} is missing")
        strides = [(s, w) for s, w, n in zip(tensor.stride(), self.strides, tensor.shape, strict=False) if n > 1]
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype or any(s != w for s, w in strides):
            raise ContractError(
                f"{kernel}: {self.name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"allowed is {self.dtype} {self.shape} with strides {self.strides}"
            )
        if not tensor.is_meta and tensor.data_ptr() % self.align:
            raise ContractError(
                f"{kernel}: {self.name} starts at {tensor.data_ptr():#x}; allowed are multiples of {self.align} bytes"
            )
        return tensor


@dataclass(frozen=True)
class Kernel:
    """One compiled variant of one @cute.kernel.

    entry(*tensors in the order of args, *constants, stream) is a @cute.jit function that launches exactly one kernel.
    grid, block: CTAs and threads per axis. smem: bytes of dynamic shared memory. cluster: CTAs per axis, or None.
    All four and pdl are checked against what the compiled host code passes to the driver.
    archs: the targets it is for; a twin may have another kernel in its place on the others.
    token_axis: the axis of the grid that the host code makes as long as the args' rows "T", or one CTA for each
    `token_span` of them, if their length is no part of the code. counts: whether the kernel gets that length, as an
    Int32 behind the pointers.
    """

    name: str
    entry: Callable
    args: tuple[Arg, ...]
    constants: tuple = ()
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    smem: int = 0
    cluster: tuple[int, int, int] | None = None
    pdl: bool = True
    token_axis: int | None = None
    token_span: int = 1
    counts: bool = False
    archs: tuple[str, ...] = ARCHS

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ValueError(f"kernel name {self.name!r}: allowed are letters, digits and _ . -")
        tokens = self.lengths.get("T")
        if self.counts and tokens is None:
            raise ValueError(f'{self.name}: counts the rows "T", which no arg has')
        ctas = tokens and -(-tokens // self.token_span)
        if self.token_axis is not None and self.grid[self.token_axis] != ctas:
            raise ValueError(f"{self.name}: grid {self.grid} for {self.lengths}; axis {self.token_axis} must be {ctas}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The parameters behind the pointers, each an Int32."""
        return (self.lengths["T"],) if self.counts else ()

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths that are no part of the code, by name (Arg.rows). Raises ValueError if one has two values."""
        found: dict[str, int] = {}
        for arg in self.args:
            if arg.rows and found.setdefault(arg.rows, arg.shape[0]) != arg.shape[0]:
                raise ValueError(f"{self.name}: {arg.name} has {arg.shape[0]} rows; allowed is {found[arg.rows]}")
        return found

    @property
    def code(self) -> "Kernel":
        """What is compiled: equal for kernels that differ only in name and in `lengths`."""
        args = tuple(replace(a, shape=(0, *a.shape[1:]), stride=a.strides) if a.rows else a for a in self.args)
        grid = tuple(0 if i == self.token_axis else n for i, n in enumerate(self.grid))
        return replace(self, name="code", args=args, grid=grid, token_axis=None)

    def compile(self, target: str) -> "Build":
        """PTX, cubin and the host function for one of `archs`. Needs no GPU; cached per (kernel, target).

        Raises NotImplementedError for another target.
        """
        if target not in self.archs:
            raise NotImplementedError(f"{self.name}: target {target!r}; allowed are {', '.join(self.archs)}")
        key = self, target
        if key not in _builds:
            code = self.code, target
            if code not in COMPILED:
                COMPILED[code] = _compile(self, target)
            _builds[key] = replace(COMPILED[code], kernel=self)
        return _builds[key]

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on torch's current stream of the tensors' device.

        Raises RuntimeError if the first launch on a device, which compiles and loads, happens in a graph capture.
        """
        checked = [arg.check(t, self.name) for arg, t in zip(self.args, tensors, strict=True)]
        device = checked[0].device
        build = self.compile(device_arch(device))
        if (self, device) not in _launched and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.name} is not loaded yet; launch it once before capturing a CUDA graph")
        build.function(*checked)
        _launched.add((self, device))


@dataclass(frozen=True)
class Asm:
    """Inline assembly as the compiler gets it. effects: declared to have side effects. source: file:line."""

    text: str
    constraints: str
    effects: bool
    source: str


@dataclass(frozen=True, eq=False)
class Build:
    """What a Kernel compiled to. Everything is in memory; `sass` is None without nvdisasm (package or PATH).

    function: launches it; None where only the code was asked for (lower.py). asm: the inline assembly in its source.
    launch: what the host code passes to the driver. kept: whether it comes from the cache of builds (build_cache.py).
    """

    kernel: Kernel
    target: str
    ptx: str
    cubin: bytes
    symbol: str
    function: Callable | None = field(repr=False)
    asm: tuple["Asm", ...] = ()
    launch: dict = field(default_factory=dict, repr=False)
    kept: bool = False

    @cached_property
    def sass(self) -> str | None:
        tool = _nvdisasm()
        if tool is None:
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


_builds: dict[tuple[Kernel, str], Build] = {}
COMPILED: dict[tuple[Kernel, str], Build] = {}  # by Kernel.code
_launched: set[tuple[Kernel, torch.device]] = set()


def _compile(kernel: Kernel, target: str) -> Build:
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir
    from cutlass.cute.runtime import make_fake_stream

    # A folder per compilation: the DSL names its files after the types, cut short, so two variants may share a name.
    with tempfile.TemporaryDirectory() as folder:
        options = cute.KeepPTX(), cute.KeepCUBIN(), cute.GPUArch(target), cute.EnableTVMFFI(True), DumpDir(folder)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        lengths = {name: cute.sym_int32() for name in kernel.lengths}
        asm: list[Asm] = []
        made = cute.compile[options](
            kernel.entry, *(a.fake(lengths) for a in kernel.args), *kernel.constants, stream,
            trace_finalize_hooks=lambda dsl, module, name: asm.extend(inline_asm(module)),
        )  # fmt: skip
        ptx, cubin = made.__ptx__, made.__cubin__
    symbol = check_ptx(kernel, ptx)
    launch = launched(str(made.ir_module))
    check_launch(kernel, launch)
    return Build(kernel, target, ptx, cubin, symbol, made, tuple(asm), launch)


def inline_asm(module) -> list[Asm]:
    """The different pieces of inline assembly of a traced module; their source where it was traced with line info."""
    from cutlass._mlir.ir import WalkResult

    found: dict[tuple, Asm] = {}

    def visit(op):
        if op.operation.name == "llvm.inline_asm":
            told = op.operation.attributes
            text, constraints = (told[name].value for name in ("asm_string", "constraints"))
            place = re.search(r'\("([^"]+)":(\d+):', str(op.operation.location))
            source = f"{Path(place[1]).name}:{place[2]}" if place else ""
            key = text, constraints, "has_side_effects" in told
            found.setdefault(key, Asm(*key, source))
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    return list(found.values())


def check_ptx(kernel: Kernel, ptx: str) -> str:
    """The entry's name, after checking that the PTX has one entry, one pointer per Arg, and the stated block."""
    symbols = re.findall(r"\.entry\s+(\w+)\s*\(", ptx)
    if len(symbols) != 1:
        raise ValueError(f"{kernel.name}: the entry launches {len(symbols)} kernels; allowed is 1")
    params = re.findall(r"\.param\s+([^,()]*?)\s*\w+_param_\d+(\[\d+\])?(?=[,\s])", ptx)
    kinds = [PARAMETERS.get((" ".join(kind.split()), size), f"{kind}{size}") for kind, size in params]
    if kinds != ["pointer"] * len(kernel.args) + ["number"] * kernel.counts:
        wanted = f"{len(kernel.args)} pointers" + " and a number" * kernel.counts
        raise ValueError(f"{kernel.name}: the parameters in PTX are {', '.join(kinds)}; allowed are {wanted}")
    if kernel.pdl and "griddepcontrol.wait" not in ptx:
        raise ValueError(f"{kernel.name}: launched with PDL, but never waits")
    return symbols[0]


def launched(host_ir: str) -> dict:
    """What the lowered host code passes to cudaLaunchKernelEx, by name of the Kernel's field; None for no constant."""
    call = host_ir.index("llvm.call @_cudaLaunchKernelEx(")
    stored = _stored_constants(host_ir[host_ir.rindex("llvm.func ", 0, call) : call])
    config = {path[1:]: value for path, value in stored.items()}
    attributes = {
        value: tuple(v for p, v in stored.items() if p[:-1] == (*path[:-1], "2") or p == (*path[:-1], "2"))
        for path, value in stored.items()
        if len(path) == 3 and path[1].startswith("%") and path[2] == "0"
    }
    return {
        "grid": tuple(config.get(("0", str(i))) for i in range(3)),
        "block": tuple(config.get(("1", str(i))) for i in range(3)),
        "smem": config.get(("2",)),
        "cluster": attributes.get(CLUSTER_ATTRIBUTE),
        "pdl": attributes.get(PDL_ATTRIBUTE) == (1,),
    }


def check_launch(kernel: Kernel, launch: dict) -> None:
    """Compare the stated launch configuration with the one that `launched` found."""
    real = dict(launch)
    if kernel.token_axis is not None and real["grid"][kernel.token_axis] is None:
        real["grid"] = tuple(kernel.grid[i] if i == kernel.token_axis else n for i, n in enumerate(real["grid"]))
    for name, value in real.items():
        if getattr(kernel, name) != value:
            raise ValueError(f"{kernel.name}: states {name} {getattr(kernel, name)}, its entry launches {value}")


def _stored_constants(body: str) -> dict[tuple[str, ...], int]:
    """Integer constants that a piece of LLVM dialect stores, by (base pointer, *indices of getelementptr)."""
    constants, paths, stored = {}, {}, {}
    for line in body.splitlines():
        if m := re.match(r"\s*(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", line):
            constants[m[1]] = int(m[2])
        elif m := re.match(r"\s*(%\w+) = llvm\.getelementptr (%\w+)\[([^\]]*)\]", line):
            paths[m[1]] = (*paths.get(m[2], (m[2],)), *m[3].removeprefix("0, ").split(", "))
        elif (m := re.match(r"\s*llvm\.store (%\w+), (%\w+) :", line)) and m[1] in constants and m[2] in paths:
            stored[paths[m[2]]] = constants[m[1]]
    return stored


@cache
def _nvdisasm() -> str | None:
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    found = [p / "cu13" / "bin" / "nvdisasm" for p in map(Path, spec.submodule_search_locations)] if spec else []
    return next((str(p) for p in found if p.exists()), None) or shutil.which("nvdisasm")


def device_arch(device: torch.device) -> str:
    """The target of a CUDA device. Raises NotImplementedError for another chip or a CPU."""
    if device.type != "cuda":
        raise NotImplementedError(f"device {device}: kernels run on CUDA devices of {', '.join(ARCHS)}")
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        raise NotImplementedError(
            f"device {device} is sm_{capability[0]}{capability[1]}; allowed are {', '.join(ARCHS)}"
        )
    return CAPABILITIES[capability]


_picked: dict[tuple, tuple[Kernel, ...]] = {}
_scratch: dict[tuple[Kernel, str, torch.device], Tensor] = {}


def pick(
    twin: Twin, tensors: Mapping[str, Tensor | None], attrs: Mapping, arch: str | None = None
) -> tuple[Kernel, ...]:
    """The kernels a twin launches on `arch` for these shapes, strides and dtypes (meta tensors do), cached.

    Without arch: those of all targets.
    Raises NotImplementedError for a batch outside the twin's range.
    """
    laid = tuple((n, t.shape, t.stride(), t.dtype) for n, t in sorted(tensors.items()) if t is not None)
    key = twin.name, laid, tuple(sorted(attrs.items()))
    if key not in _picked:
        low, high = twin.batch
        for spec in (s for span in twin.covers for name in span for s in STAGES[name].tensors):
            t = tensors.get(spec.name)
            tokens = next((i for i, axis in enumerate(spec.axes) if axis in TOKEN_AXES), None)
            rows = low if t is None or tokens is None else t.shape[tokens]
            if not low <= rows <= high:
                raise NotImplementedError(f"{twin.name}: {spec.name} has {rows} tokens; allowed are {low}..{high}")
        _picked[key] = tuple(twin.pick(**tensors, **attrs))
    return tuple(kernel for kernel in _picked[key] if arch is None or arch in kernel.archs)


def launch(twin: Twin, tensors: Mapping[str, Tensor | None], attrs: Mapping) -> tuple[str, ...]:
    """Run a twin on torch's current stream; returns the names of the kernels that ran, in order.

    tensors: the covered stages' arguments by name, written in place. Scratch is allocated here: zeroed once, one per
    kernel and device, so launch once before capturing a CUDA graph. Raises ContractError for a layout that is not the
    compiled one, NotImplementedError for a chip or batch the twin does not serve.
    """
    every = pick(twin, tensors, attrs)
    device = next(t.device for t in tensors.values() if t is not None)
    arch = device_arch(device)
    if arch not in twin.archs:
        raise NotImplementedError(f"{twin.name}: {arch}; allowed are {', '.join(twin.archs)}")
    kernels = [kernel for kernel in every if arch in kernel.archs]
    for name, t in tensors.items():
        if t is not None and t.device != device:
            raise ContractError(f"{twin.name}: {name} is on {t.device}; allowed is {device}, where the first tensor is")
    for kernel in kernels:
        kernel(*(_bind(kernel, arg, tensors, device) for arg in kernel.args))
    return tuple(k.name for k in kernels)


def _bind(kernel: Kernel, arg: Arg, tensors: Mapping[str, Tensor | None], device: torch.device) -> Tensor | None:
    if arg.role is not Role.SCRATCH:
        return tensors.get(arg.name)
    key = kernel, arg.name, device
    if key not in _scratch:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{kernel.name} has no scratch yet; launch it once before capturing a CUDA graph")
        _scratch[key] = torch.zeros(arg.shape, dtype=arg.dtype, device=device)
    return _scratch[key]
