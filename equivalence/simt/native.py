"""Compile generated C with the system compiler and run it in place on tensors' memory."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .emit_c import source
from .parse import read
from .translate import translate

HERE = Path(__file__).parent
HEADERS = ("arithmetic.h", "machine.h", "wgmma.h")
GENERATOR = ("emit_c.py", "translate.py", "translate_async.py", "ir.py", "opcodes.py", "parse.py")
FLAGS = ("-O2", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-w")
FAULTS = (
    "", "address outside the tensors", "misaligned address", "address outside shared memory",
    "no such barrier, or it was not initialised", "more arrivals than the barrier expects",
    "needs a lane of the warp that is not there", "deadlock: lanes wait for what never comes", "trap",
    "out of memory", "needs a warpgroup of four whole warps", "lanes of a warp differ in a descriptor or in scale-d",
    "matrix descriptor with a base offset or unknown bits",
)  # fmt: skip
DEADLOCK = 7


class Fault(RuntimeError):
    """A kernel did what a GPU would stop it for, or what it leaves undefined. The message names the PTX line."""


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("params", ctypes.c_uint64 * 64), ("spans", _Span * 64), ("count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("cluster", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32), ("fault", ctypes.c_int32), ("line", ctypes.c_int32), ("address", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64), ("cta", ctypes.c_uint32 * 3), ("thread", ctypes.c_uint32),
    )  # fmt: skip


@cache
def compiler() -> str | None:
    """The system's C compiler: $CC, else the first of cc, gcc and clang on PATH; None without one."""
    named = os.environ.get("CC")
    return next((path for name in ([named] if named else ["cc", "gcc", "clang"]) if (path := shutil.which(name))), None)


@cache
def _identity() -> str:
    """What the code depends on besides the PTX: generator, runtime, compiler, and the instructions of this CPU."""
    made = subprocess.run([compiler(), "-march=native", "-dM", "-E", "-x", "c", os.devnull], capture_output=True)
    texts = [made.stdout, " ".join(FLAGS).encode()]
    texts += [(HERE / name).read_bytes() for name in (*HEADERS, *GENERATOR)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME (or ~/.cache)/k3-twice/simt."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "k3-twice" / "simt"


@dataclass(frozen=True, eq=False)
class Native:
    """One compiled kernel. dynamic: address where its dynamic shared memory starts."""

    dynamic: int
    run: ctypes._CFuncPtr = field(repr=False)

    def __call__(
        self, words: Sequence[int], spans: Sequence[tuple[int, int]], grid, block, cluster, smem: int, name: str
    ) -> int:
        """Run a whole grid; returns the number of (warp, block) pairs executed. words: the parameters. Raises Fault."""
        launch = _Launch()
        launch.params[: len(words)] = words
        for i, span in enumerate(spans):
            launch.spans[i] = _Span(*span)
        launch.count, launch.smem = len(spans), self.dynamic + smem
        launch.grid[:], launch.block[:], launch.cluster[:] = grid, block, cluster
        if self.run(ctypes.byref(launch)):
            raise _fault(launch, name)
        return launch.blocks


def _fault(launch: _Launch, name: str) -> Fault:
    where = f"{name}: CTA {tuple(launch.cta)} thread {launch.thread}"
    if launch.fault == DEADLOCK:
        how = "at a barrier before" if launch.address else "in"
        return Fault(f"{where}: {FAULTS[DEADLOCK]} ({how} block {launch.line})")
    return Fault(f"{where}: PTX line {launch.line}: {FAULTS[launch.fault]} ({launch.address:#x})")


def normal(ptx: str) -> str:
    """PTX without comments and with the kernel's name replaced, so that equal code has equal text."""
    symbol = re.search(r"\.entry\s+([\w$]+)", ptx)
    text = re.sub(rf"\b{re.escape(symbol[1])}", "kernel", ptx) if symbol else ptx
    return "\n".join(line.partition("//")[0].rstrip() for line in text.splitlines())


@cache
def compile_ptx(ptx: str) -> Native:
    """Translate and compile, or load what an earlier process compiled. Raises Unsupported, Unreadable."""
    text = normal(ptx)
    name = hashlib.sha256((_identity() + text).encode()).hexdigest()[:32]
    folder = cache_folder()
    library = folder / f"{name}.so"
    code = None
    if not library.exists():
        code = translate(read(text))
        _build(source(code), library)
    listing = code.listing if code else read(text)
    run = ctypes.CDLL(str(library)).run
    run.argtypes, run.restype = (ctypes.POINTER(_Launch),), ctypes.c_int
    return Native(listing.dynamic, run)


def _build(text: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        file, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        file.write_text(text)
        command = [compiler(), *FLAGS, f"-I{HERE}", "-o", str(made), str(file), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler()} cannot compile a kernel: {' '.join(done.stderr.split())[:500]}")
        made.replace(library)  # at once, so that no other process loads half a file
