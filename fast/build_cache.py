"""Builds on disk: what `lower` made of the kernels of this package, so that a proof need not compile them again.

An entry is found by what it was made from: the sources of fast/ and reference/ that can decide the kernel's code, the
compiler, Python, the target, and `Kernel.code` written as text. Those sources are the closure, over import statements
(imports.py), of the modules that the text names and of what lowers; all of both folders where that cannot be told. Only
kernels are kept whose entry and constants come from modules of these two folders; an edited copy of a module
(equivalence.order.mutate) and a kernel of a test are not. What judges is never kept: checks of the launch and the order
proof run anew on what was read.

The key takes files for what runs; nothing looks at the memory of the process. The cache is therefore used only where it
is asked for with fresh=False, and `k3 order` and the order proof of `k3 check` alone ask. A process that patches
globals of fast/ or wraps an entry neither reads nor writes an entry, unless it runs one of these two itself. What can
still file a wrong build:
- a module that changes at run time what another one holds, in a way that imports.py does not see;
- a source edited to equal size and mtime, where Python itself runs the stale .pyc;
- a package folder that is swapped for another under a running process: the files in it are not younger;
- site-packages patched without a change of RECORD and of the library's size.
`k3 order --fresh` and K3_CACHE=off use no entry; a stale .pyc misleads them as well.

The folder is .cache/k3 in the repository, or the one that K3_CACHE names: an absolute path ("~" is expanded), or "off"
for no cache. In it, entries made from the same sources lie in one folder, six for a state of the repository. An entry
is a line of SHA-256, a line of JSON, and the bytes of PTX and cubin. One that is damaged, of another form or no file
counts as absent, and stderr says so; the next one takes its place. The checksum finds accidents; who can write there
can forge entries.
"""

import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from types import FunctionType, NoneType

import torch

from .imports import Imports, Unresolved

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("fast", "reference")  # packages that decide what a kernel's code is
LOWERING = ("fast.lower", "fast.kernel", "fast.build_cache")  # modules that decide it for every kernel
COMPILER = "nvidia-cutlass-dsl"
SETTINGS = ("CUTE_", "CUTLASS_")  # environment variables that the compiler reads
FORM = 3  # of an entry
PARTS = {"of": str, "target": str, "ptx": int, "cubin": int, "asm": list, "launch": dict}  # of its line of JSON
LAUNCH = {"grid": (tuple,), "block": (tuple,), "smem": (int, NoneType), "cluster": (tuple, NoneType), "pdl": (bool,)}
STATE = re.compile("[0-9a-f]{32}")  # name of a folder: a state of some sources
FOLDERS = 24  # that are kept: those of four states of the repository, which hold 30 MB each
SPARED = 3600  # seconds after its last use for which no folder is removed: another process may be using it
PLAIN = (NoneType, bool, int, float, str, tuple)


@dataclass(frozen=True)
class Entry:
    """What a kernel compiled to. asm: (text, constraints, effects, source) of each. launch: `kernel.launched`."""

    ptx: str
    cubin: bytes
    asm: tuple[tuple[str, str, bool, str], ...]
    launch: dict


class Unkept(TypeError):
    """A kernel that has no canonical text, and is therefore compiled every time."""


def folder() -> Path | None:
    """Where entries are kept; None with K3_CACHE=off."""
    named = os.environ.get("K3_CACHE", str(ROOT / ".cache" / "k3"))
    if named in ("off", "OFF"):
        return None
    path = os.path.expanduser(named)
    if not os.path.isabs(path) or (os.path.exists(path) and not os.path.isdir(path)):
        raise ValueError(f"K3_CACHE is {named!r}; allowed are the absolute path of a folder and 'off'")
    return Path(path)


def load(kernel, targets: Sequence[str]) -> dict[str, Entry]:
    """The entries for a kernel, by target, as far as there are any."""
    of, paths = _places(kernel, targets)
    found = {target: _read(path, of, target) for target, path in paths.items()}
    return {target: entry for target, entry in found.items() if entry}


def store(kernel, builds: Mapping) -> None:
    """Keep Builds, by target. Writers of the same one do not disturb each other, nor readers."""
    of, paths = _places(kernel, list(builds))
    for target, path in paths.items():
        try:
            _write(path, of, target, builds[target])
        except OSError as error:
            _say_once(f"cannot write to {path.parent}: {error.strerror}; what is compiled is not kept")


def _read(path: Path, of: str, target: str) -> Entry | None:
    try:
        data = _bytes(path)
        sums, _, body = data.partition(b"\n")
        if sums != hashlib.sha256(body).hexdigest().encode():
            raise ValueError("its checksum differs")
        told, entry = _parsed(body)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _say(f"cannot read {path}: {error.strerror}; compiled anew")
    except (ValueError, RecursionError) as error:
        return _say(f"{path} is damaged: {' '.join(str(error).split())}; compiled anew")
    if told != (of, target):
        return _say(f"{path} is the entry of another kernel; compiled anew")
    return entry


def _bytes(path: Path) -> bytes:
    """The contents of a regular file; ValueError for anything else. A pipe does not block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no regular file")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _parsed(body: bytes) -> tuple[tuple[str, str], Entry]:
    """(of, target) and the Entry; ValueError for anything that `_write` does not write."""
    head, _, code = body.partition(b"\n")
    told = json.loads(head.decode())
    if not isinstance(told, dict) or {name: type(v) for name, v in told.items()} != PARTS:
        raise ValueError(f"its line of JSON does not hold {', '.join(PARTS)} and nothing else, of their types")
    if min(told["ptx"], told["cubin"]) < 0 or told["ptx"] + told["cubin"] != len(code):
        raise ValueError(f"it tells {told['ptx']} + {told['cubin']} bytes of code and holds {len(code)}")
    if wrong := [a for a in told["asm"] if not isinstance(a, list) or [type(v) for v in a] != [str, str, bool, str]]:
        raise ValueError(f"inline assembly is {wrong[0]!r:.80}")
    launch = {name: tuple(v) if isinstance(v, list) else v for name, v in told["launch"].items()}
    if launch.keys() != LAUNCH.keys() or not all(_fits(launch[name], kinds) for name, kinds in LAUNCH.items()):
        raise ValueError(f"the launch is {launch!r:.80}")
    return (told["of"], told["target"]), Entry(
        code[: told["ptx"]].decode(), code[told["ptx"] :], tuple(map(tuple, told["asm"])), launch
    )


def _fits(value, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and (type(value) is not tuple or all(n is None or type(n) is int for n in value))


def _write(path: Path, of: str, target: str, build) -> None:
    ptx, asm = build.ptx.encode(), [astuple(a) for a in build.asm]
    told = dict(of=of, target=target, ptx=len(ptx), cubin=len(build.cubin), asm=asm, launch=build.launch)
    body = json.dumps(told).encode() + b"\n" + ptx + build.cubin
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        if stat.S_ISDIR(_mode(path)):
            shutil.rmtree(path)  # nothing else has an entry's name
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _mode(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_mode
    return 0


def text(value, named: set[str] | None = None) -> str:
    """A value in canonical text: equal for equal values, in every process. Raises Unkept for one that has none.

    named: gets the modules that define what the text names."""
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) in PLAIN:
        if isinstance(value, tuple):
            return f"({''.join(f'{text(v, named)},' for v in value)})"
        return value.hex() if isinstance(value, float) else repr(value)
    thing = value if isinstance(value, type | FunctionType) else type(value)
    if not ours(thing):
        raise Unkept(f"{value!r}: allowed are plain values and what modules of {' and '.join(SOURCES)} define")
    if named is not None:
        named.add(thing.__module__)
    name = f"{thing.__module__}.{thing.__qualname__}"
    if thing is value:
        return name
    if isinstance(value, Enum) and thing.__members__.get(value.name) is value:
        return f"{name}.{value.name}"
    if is_dataclass(value) and not isinstance(value, PLAIN):
        held = (f"{f.name}={text(getattr(value, f.name), named)}" for f in fields(value))
        return f"{name}({', '.join(held)})"
    raise Unkept(f"{value!r} has no canonical text")


def ours(thing) -> bool:
    """Whether a function or class is the one that a source file of fast/ or reference/ defines under its name."""
    module = inspect.getmodule(thing)
    package, _, stem = getattr(module, "__name__", "").partition(".")
    if package not in SOURCES or getattr(module, thing.__qualname__, None) is not thing:
        return False
    return Path(module.__file__ or "").resolve() == ROOT / package / f"{stem or '__init__'}.py"


def _places(kernel, targets: Sequence[str]) -> tuple[str, dict[str, Path]]:
    """What the entries are made from, and where they are or would be: nowhere if the kernel may not be kept."""
    at, named = folder(), set()
    if at is None or not ours(kernel.entry):
        return "", {}
    try:
        said = text(kernel.code, named)
    except Unkept:
        return "", {}
    if late := changed():
        _say_once(f"{late} changed while this process ran: builds are neither read nor kept")
        return "", {}
    made_from = digest(frozenset(named))
    here, name = _opened(at, made_from), _hash(said)[:32]
    return f"{made_from} {said}", {t: here / f"{name}.{t}" for t in targets}


@cache
def _opened(at: Path, made_from: str) -> Path:
    """The folder of a state of some sources, marked as used; those that were not used for longest are removed.

    Both as far as possible: the cache may be only readable, and another process may be removing the same folders."""
    here = at / made_from
    with suppress(OSError):
        os.utime(here)
    now = time.time()
    for n, (used, path) in enumerate(sorted(_states(at, but=here), reverse=True), 2):
        if n > FOLDERS and now - used > SPARED:
            with suppress(OSError):
                shutil.rmtree(path, ignore_errors=True)
    return here


def _states(at: Path, but: Path) -> list[tuple[float, Path]]:
    """(last use, folder) of each other state; no link, and no folder with another kind of name."""
    found = []
    with suppress(OSError):
        for path in (at / name for name in os.listdir(at) if STATE.fullmatch(name)):
            with suppress(OSError):
                if path != but and stat.S_ISDIR((status := path.lstat()).st_mode):
                    found.append((status.st_mtime, path))
    return found


@cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(path for package in SOURCES for path in (ROOT / package).rglob("*.py")))


def changed() -> str | None:
    """A source file that is younger than this process: what runs may not be what the file says."""
    late = (p for p in sources() if not p.exists() or p.stat().st_ctime_ns > started())
    return next((str(p.relative_to(ROOT)) for p in late), None)


@cache
def started() -> int:
    """When this process started, in nanoseconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


@cache
def digest(named: frozenset[str]) -> str:
    """What entries are made from whose text names things of these modules."""
    files = contents()
    return digest_of({path: files[path] for path in deciding(named)}, facts())


def deciding(named: Iterable[str]) -> set[str]:
    """The paths of the sources that can decide the code of a kernel whose text names things of these modules."""
    try:
        return imports().closure([*named, *LOWERING])
    except Unresolved as error:
        _say_once(f"{error}: every source of {' and '.join(SOURCES)} counts")
        return set(contents())


@cache
def imports() -> Imports:
    return Imports(contents())


@cache
def contents() -> dict[str, bytes]:
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sources()}


def digest_of(files: Mapping[str, bytes], others: list[str]) -> str:
    """Of the contents of files by name, and of further facts."""
    held = [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items())]
    return hashlib.sha256(json.dumps([held, others]).encode()).hexdigest()[:32]


@cache
def facts() -> list[str]:
    """What all entries of this process are made from besides sources: each installed part of the DSL with its files'
    hashes, the library in use (the driver decides between several), Python, and the settings from the environment."""
    parts = {d.name: d for d in reversed(list(distributions())) if d.name.startswith(COMPILER)}
    said = [f"{n} {d.version} {_hash(d.read_text('RECORD') or '')}" for n, d in sorted(parts.items())]
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)]
    used = _library()
    return [*said, f"{used.name} {used.stat().st_size}", *settings, sys.version, platform.machine(), f"form {FORM}"]


def _library() -> Path:
    from cutlass._mlir._mlir_libs import _cutlass_ir

    return Path(_cutlass_ir.__file__)


def _hash(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()


def _say(what: str) -> None:
    print(f"cache of builds: {what}", file=sys.stderr)


@cache
def _say_once(what: str) -> None:
    _say(what)
