"""Run by `toolchain`, as a script: compile our kernels with the CuTe DSL of a folder and write PTX and cubins as JSON.

Nothing of ours is imported before that folder is first on the path: our modules import cutlass. A module that our
kernels import and an old version lacks is stood in for by the same class from elsewhere in that version, and named in
the result: without it nothing could be said about the code generator.
"""

import base64
import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

STAND_INS = {"cutlass.memory": ("cutlass.utils", "SmemAllocator")}  # moved in 4.8


def stand_in() -> list[str]:
    """Provide what an old version has under another name; says what."""
    told = []
    for name, (where, what) in STAND_INS.items():
        try:
            import_module(name)
        except ModuleNotFoundError:
            module = ModuleType(name)
            setattr(module, what, getattr(import_module(where), what))
            sys.modules[name] = module
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
            told.append(f"{name} is missing; {where}.{what} stood in for it")
    return told


def compile_all(wanted: str, targets: list[str]) -> list[dict]:
    """PTX, cubin and symbol of every subject and target, or why not."""
    from equivalence.mutants.toolchain import subjects

    rows = []
    for name, kernel in subjects(wanted).items():
        for target in (t for t in targets if t in kernel.archs):
            row = dict(name=name, target=target)
            try:
                build = kernel.compile(target)
                row |= dict(ptx=build.ptx, symbol=build.symbol, cubin=base64.b64encode(build.cubin).decode())
                row["asm"] = [asdict(a) for a in build.asm]
            except Exception as error:
                text = " ".join(str(error).split()) or "no message"
                row["error"] = f"{type(error).__name__}: {text[:200]}"
            rows.append(row)
    return rows


def main(root: str, folders: str, result: str, wanted: str, *targets: str) -> None:
    sys.path[:0] = [root, *json.loads(folders)]
    import cutlass

    made = dict(version=getattr(cutlass, "__version__", "without a version"), stand_ins=stand_in())
    try:
        made["kernels"] = compile_all(wanted, list(targets))
    except ImportError as error:
        made |= dict(kernels=[], error=f"{type(error).__name__}: {error}")
    Path(result).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
