"""The order proof under other versions of CuTe DSL: compiled in a child process, proved here.

Each version lives in a folder of its own, as `pip install --target FOLDER --no-deps` leaves it, with nvidia-cutlass-dsl
and its parts libs-base, libs-core and libs-cu13 of one version. The child puts that folder first on its path, compiles
one kernel of each form and the edits that the installed version turns into right code, and hands back PTX and cubin.
A kernel that does not compile there is one line, and unjudged.
"""

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from equivalence.order import QUALITY, TARGETS, check_builds
from fast.kernel import Asm, Build, Kernel

PACKAGES = ("nvidia_cutlass_dsl/dsl_packages", "nvidia_cutlass_dsl/python_packages")
ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "installed"
LIMIT = 3600  # seconds a child may take
EDITS = ("kda: wait without memory clobber", "kda: slots loaded by assembly without side effects")
CHILD = Path(__file__).with_name("compile_child.py")


@dataclass
class Toolchain:
    """What one version made of our kernels. stand_ins: what an old version lacks and had to be given. proved: how
    many kernels and targets; findings: lines. unjudged: what did not compile, and why. edits: what became of each edit
    that leaves room to the compiler."""

    folder: str
    version: str = "?"
    stand_ins: list[str] = field(default_factory=list)
    proved: int = 0
    findings: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    edits: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        head = f"CuTe DSL {self.version} ({self.folder}): {self.proved} proved"
        return [
            f"{head}, {len(self.findings)} findings, {len(self.unjudged)} unjudged",
            *(f"  {line}" for line in (*self.stand_ins, *self.findings, *self.unjudged, *self.edits)),
        ]

    def as_dict(self) -> dict:
        return asdict(self)


def subjects(wanted: str = "") -> dict[str, Kernel]:
    """What is compiled, by name: one kernel of each form for one request, and, named "edit ...", edits that leave
    room to the compiler, which another version may use."""
    from fast import forms, production_kernels

    from .catalog import CATALOG
    from .checkers import mutant
    from .scenes import BASES, tensors

    found = {k.name: k for k in forms(production_kernels((1,)))}
    for entry in map(CATALOG.get, EDITS):
        base = BASES[entry.base]
        found[f"edit {entry.name}"] = base.kernel(mutant(base.original, entry.edits), tensors(base.name))
    chosen = {name: kernel for name, kernel in found.items() if wanted in name}
    if not chosen:
        raise ValueError(f"no kernel name contains {wanted!r}")
    return chosen


def compare(folders: Sequence[str], wanted: str = "", targets: Sequence[str] = TARGETS) -> list[Toolchain]:
    """The installed CuTe DSL first, then that of each folder. Raises ValueError for a folder without one."""
    for folder in folders:
        if not any((Path(folder) / package / "cutlass").is_dir() for package in PACKAGES):
            raise ValueError(f"toolchain {folder!r}: holds no {PACKAGES[0]}/cutlass; install one with pip --target")
    kernels = subjects(wanted)
    return [_prove(folder, wanted, targets, kernels) for folder in (INSTALLED, *folders)]


def _prove(folder: str, wanted: str, targets: Sequence[str], kernels: dict[str, Kernel]) -> Toolchain:
    out, made = Toolchain(folder), _compiled(folder, wanted, targets)
    out.version, out.stand_ins, builds = made.get("version", "?"), made.get("stand_ins", []), []
    if "error" in made:
        out.unjudged += [f"{name}: not compiled: {made['error']}" for name in kernels]
    for row in made["kernels"]:
        if "error" in row:
            out.unjudged.append(f"{row['name']} {row['target']}: not compiled: {row['error']}")
        else:
            cubin = base64.b64decode(row["cubin"])
            asm = tuple(Asm(**a) for a in row["asm"])
            build = Build(kernels[row["name"]], row["target"], row["ptx"], cubin, row["symbol"], None, asm)
            builds.append((row["name"], build))
    for (name, build), report in zip(builds, check_builds([b for _, b in builds]), strict=True):
        told = [str(f) for f in report.findings if f.severity != QUALITY]
        if name.startswith("edit "):
            out.edits.append(f"{name} {build.target}: {told[0] if told else 'no fault'}")
        elif told:
            out.findings += told
        else:
            out.proved += 1
    return out


def _compiled(folder: str, wanted: str, targets: Sequence[str]) -> dict:
    """What the child wrote: version, stand_ins, kernels, and an error if our kernels do not even import there."""
    first = [] if folder == INSTALLED else [p for n in ("", *PACKAGES) if (p := Path(folder).resolve() / n).is_dir()]
    with tempfile.TemporaryDirectory() as work:
        result = Path(work) / "compiled.json"
        call = [sys.executable, "-P", CHILD, ROOT, json.dumps([str(p) for p in first]), result, wanted, *targets]
        child = subprocess.run(list(map(str, call)), cwd=work, capture_output=True, text=True, timeout=LIMIT)
        if result.exists():
            return json.loads(result.read_text())
        last = (child.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return dict(kernels=[], error=f"the compiling process ended with {child.returncode}: {last}")
