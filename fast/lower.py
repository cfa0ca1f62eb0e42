"""PTX and cubin of a kernel for several targets at once, without a host function: what proofs read.

Tracing a kernel takes as long as compiling what was traced, and gives the same code for every target, apart from a
message in host code that names the target. That this holds for an entry is not assumed: the first time, it is traced
for every target and the device code compared. An entry whose traces differ is traced for each target every time.

With fresh=False, what was made of a kernel of this package stays in the cache of builds, and later processes that ask
for it find it there. By default the cache is neither read nor written.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from . import build_cache
from .kernel import COMPILED, Asm, Build, Kernel, check_launch, check_ptx, inline_asm, launched

_alike: dict[tuple[Callable, tuple[str, ...]], bool] = {}  # whether an entry's traces for these targets were equal


def lower(kernel: Kernel, targets: Sequence[str], lines: bool = False, fresh: bool = True) -> list[Build]:
    """A Build for each target: that of `kernel.compile` if there is one, else its PTX and cubin without a function.

    lines: with line information, made anew. It changes no instruction. fresh: without the cache of builds, which
    takes the files of fast/ for what runs (build_cache.py): False is for processes that patch nothing.
    Raises NotImplementedError for a target that the kernel is not for, ValueError for a launch that is misstated.
    """
    if wrong := [t for t in targets if t not in kernel.archs]:
        raise NotImplementedError(f"{kernel.name}: target {wrong[0]!r}; allowed are {', '.join(kernel.archs)}")
    if lines:
        return [build for target in targets for build in _traced(kernel, (target,), lines)[1]]
    made = {t: replace(COMPILED[kernel.code, t], kernel=kernel) for t in targets if (kernel.code, t) in COMPILED}
    if not fresh:
        kept = build_cache.load(kernel, [t for t in targets if t not in made])
        made |= {target: _checked(kernel, target, entry) for target, entry in kept.items()}
    new = {b.target: b for b in _lowered(kernel, tuple(t for t in targets if t not in made))}
    if new and not fresh:
        build_cache.store(kernel, new)
    return [(made | new)[target] for target in targets]


def _checked(kernel: Kernel, target: str, entry: build_cache.Entry) -> Build:
    symbol = check_ptx(kernel, entry.ptx)
    check_launch(kernel, entry.launch)
    asm = tuple(Asm(*of) for of in entry.asm)
    return Build(kernel, target, entry.ptx, entry.cubin, symbol, None, asm, entry.launch, kept=True)


def _lowered(kernel: Kernel, targets: tuple[str, ...]) -> list[Build]:
    if not targets:
        return []
    key = kernel.entry, targets
    if key not in _alike:
        traced = [_traced(kernel, (target,)) for target in targets]
        _alike[key] = len({code for code, _ in traced}) == 1
        return [build for _, (build,) in traced]
    if _alike[key]:
        return _traced(kernel, targets)[1]
    return [build for target in targets for build in _traced(kernel, (target,))[1]]


def _traced(kernel: Kernel, targets: tuple[str, ...], lines: bool = False) -> tuple[str, list[Build]]:
    """Trace for the first target, compile for all of them: the traced device code and the Builds."""
    import cutlass.cute as cute
    from cutlass._mlir.passmanager import PassManager
    from cutlass.base_dsl.compiler import DumpDir
    from cutlass.cute.runtime import make_fake_stream

    device_code, host_code, asm = "", {}, ()

    def compile_for_the_others(dsl, module, name: str) -> None:
        nonlocal asm, device_code
        asm = tuple(inline_asm(module))
        if len(targets) == 1:  # to be compared
            device_code = next(str(op) for op in module.body.operations if op.operation.name == "gpu.module")
        pipeline = dsl.preprocess_pipeline(dsl._get_pipeline(None), targets[0])
        for target in targets[1:]:
            copy = module.operation.clone()
            passes = PassManager.parse(pipeline.replace(targets[0], target))
            passes.enable_verifier(False)  # as the DSL does
            passes.run(copy)
            host_code[target] = functions(copy.regions[0].blocks[0].operations)

    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.KeepPTX(),
            cute.KeepCUBIN(),
            cute.GPUArch(targets[0]),
            DumpDir(folder),
            cute.GenerateLineInfo(lines),
        )
        lengths = {name: cute.sym_int32() for name in kernel.lengths}
        made = cute.compile[options](
            kernel.entry, *(a.fake(lengths) for a in kernel.args), *kernel.constants, make_fake_stream(),
            trace_finalize_hooks=compile_for_the_others,
        )  # fmt: skip
        host_code[targets[0]] = functions(made.ir_module.body.operations)
        files = {t: {p.suffix: p.read_bytes() for p in Path(folder).glob(f"*.{t}.*")} for t in targets}
    builds = []
    for target in targets:
        ptx = files[target][".ptx"].decode().rstrip("\0")
        symbol = check_ptx(kernel, ptx)
        launch = launched(host_code[target])
        check_launch(kernel, launch)
        builds.append(Build(kernel, target, ptx, files[target][".cubin"], symbol, None, asm, launch))
    return device_code, builds


def functions(operations) -> str:
    """The text of a lowered module's functions; the device code stands in a constant beside them, and is long."""
    return "\n".join(str(op) for op in operations if op.operation.name == "llvm.func")
