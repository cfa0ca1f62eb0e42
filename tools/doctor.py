"""What this machine has, what each command can do here, and what is missing.

Imports nothing at the top that a bare Python lacks, so that it also runs where the set-up is incomplete.
"""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12))
SERVED = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}  # compute capability -> the target compiled for
LEAST_DISK = 2.0  # GiB: below this an update of the environment does not fit
FINE, MISSING = 0, 2

# The module that proves a package works. The disassembler is a program: `disassembler` also takes one on PATH.
MODULES = {
    "torch": "torch", "numpy": "numpy", "nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi",
    "cuda-python": "cuda.bindings.driver", "nvidia-cuda-nvdisasm": None, "safetensors": "safetensors",
    "pytest": "pytest", "pytest-xdist": "xdist", "rich": "rich", "typer": "typer",
}  # fmt: skip
# Packages that the bench times beside us where they are installed.
PEERS = {
    "fla-core": "KDA, short convolution, gated norm, attention residuals", "flashinfer-python": "MLA, all-reduce",
    "humming-kernels": "MXFP4 experts", "quack-kernels": "norms, top-k", "flash-attn-res": "attention residuals",
}  # fmt: skip


def report() -> dict:
    """The facts as JSON values. `missing` lists what is needed and not there; `exit` is 2 where it is not empty."""
    facts = {
        "python": {"version": platform.python_version(), "ok": sys.version_info[:2] in PYTHONS, "path": sys.executable},
        "packages": [package(line) for line in requirements()],
        "gpus": gpus(),
        "cuda": cuda_build(),
        "nvdisasm": disassembler(),
        "compiler": compiler(),
        "peers": {name: installed(name) for name in PEERS},
        "memory_gib": free_memory(),
        "disk_gib": round(shutil.disk_usage(ROOT).free / 2**30, 1),
        "cores": len(os.sched_getaffinity(0)),
    }
    facts["missing"] = missing(facts)
    facts["commands"] = commands(facts)
    facts["exit"] = MISSING if facts["missing"] else FINE
    return facts


def requirements(path: Path = ROOT / "pyproject.toml") -> list[str]:
    return tomllib.loads(path.read_text("utf-8"))["project"]["dependencies"]


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package(line: str) -> dict:
    """One requirement of pyproject.toml: its version here, and what is wrong with it (None: nothing)."""
    name = line.split("[")[0].split(">")[0].split("=")[0].strip()
    found, wrong = installed(name), None
    if found is None:
        wrong = "not installed"
    elif not in_range(line, found):
        wrong = f"version {found}; needed is {line}"
    elif module := MODULES.get(name):
        wrong = import_fault(module)
    return {"name": name, "version": found, "needed": line, "wrong": wrong}


def import_fault(module: str) -> str | None:
    """Why a module does not import, in one line, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken binary raises whatever it likes
        return f"does not import: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def in_range(line: str, found: str) -> bool:
    """Whether a version meets a requirement; True where `packaging`, which comes with pytest, is not there to tell."""
    if importlib.util.find_spec("packaging") is None:
        return True
    from packaging.requirements import Requirement

    return Requirement(line).specifier.contains(found, prereleases=True)


def gpus() -> list[dict]:
    """Visible GPUs: index, name, capability, the target they are served with (None: not served), free memory in GiB."""
    if import_fault("torch"):
        return []
    import torch

    found = []
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        try:
            free = round(torch.cuda.mem_get_info(i)[0] / 2**30, 1)
        except RuntimeError:  # a GPU that another process holds alone
            free = None
        found.append(
            {
                "index": i,
                "name": torch.cuda.get_device_name(i),
                "capability": "sm_{}{}".format(*capability),
                "served": SERVED.get(capability),
                "free_gib": free,
            }
        )
    return found


def cuda_build() -> str | None:
    """The CUDA version torch was built with; None for a CPU build or no torch."""
    if import_fault("torch"):
        return None
    import torch

    return torch.version.cuda


def disassembler() -> dict:
    try:
        from equivalence.isa.cubin import nvdisasm

        path = nvdisasm()
        return {"path": path, "wrong": None if first_line([path, "--version"]) else "does not run"}
    except (ImportError, RuntimeError) as error:
        return {"path": None, "wrong": str(error)}


def compiler() -> dict:
    """The C compiler: $CC, else cc, gcc or clang. The PTX interpreter needs it, and peers that compile at run time."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if path := shutil.which(name):
            return {"path": path, "version": first_line([path, "--version"])}
    return {"path": None, "version": None}


def first_line(command: Sequence[str]) -> str | None:
    """First line a program prints, or None where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0] if done.returncode == 0 and done.stdout else None


def free_memory() -> float:
    """Free main memory in GiB, as the kernel estimates it for a new program."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return round(int(line.split()[1]) / 2**20, 1)
    return round(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def missing(facts: Mapping) -> list[str]:
    """What is needed on every machine and is not there. A GPU is not: the commands say what they do without one."""
    lines = []
    if not facts["python"]["ok"]:
        lines.append(f"Python {facts['python']['version']}; needed is 3.11 or 3.12")
    for p in facts["packages"]:
        if p["wrong"] and MODULES.get(p["name"], p["name"]):
            lines.append(f"{p['name']}: {p['wrong']}")
    if facts["nvdisasm"]["wrong"]:
        lines.append(facts["nvdisasm"]["wrong"])
    if facts["disk_gib"] < LEAST_DISK:
        lines.append(f"disk: {facts['disk_gib']} GiB free; needed are {LEAST_DISK}")
    return lines


def commands(facts: Mapping) -> dict[str, dict]:
    """For each command: can ("yes", "partly", "no") and why, in plain words."""
    wrong = {p["name"] for p in facts["packages"] if p["wrong"]}
    served = [g for g in facts["gpus"] if g["served"]]
    no_gpu = why_no_gpu(facts)
    base = sorted(wrong & {"torch", "numpy", "safetensors", "rich", "typer"})
    kernels = sorted(wrong & {"nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python"})
    peers = [name for name, found in facts["peers"].items() if not found]
    on = f"on {len(served)} GPU{'s' * (len(served) != 1)}: " + ", ".join(sorted({g["served"] for g in served}))

    def command(needs: Sequence[str], gpu: bool, full: str, without: str | None = None, lacks: str = "") -> dict:
        if needs:
            return {"can": "no", "why": f"{', '.join(needs)} missing or broken"}
        if gpu and not served:
            return {
                "can": "partly" if without else "no",
                "why": f"{no_gpu}{lacks}; {without or 'it ends with code 2 (could not judge)'}",
            }
        return {"can": "yes", "why": full}

    interpreter = "twins in the PTX interpreter" if facts["compiler"]["path"] else "no twins, as there is no C compiler"
    cpu = "with --device cpu " if facts["gpus"] else ""  # of a GPU that is not served
    judged = f"{cpu}the law's roundings, prefill against decode, {interpreter}, order of loads; no twin on a GPU"
    bisected = f"{cpu}{interpreter}" if facts["compiler"]["path"] else None
    lacks = "" if facts["compiler"]["path"] else ", no C compiler for the PTX interpreter"
    no_order = kernels + ["nvdisasm"] * bool(facts["nvdisasm"]["wrong"])
    peer = f"peers not installed: {', '.join(peers)}" if peers else "all peers installed"
    tests = sorted(wrong & {"pytest", "pytest-xdist"})
    return {
        "check": command(base + kernels, True, f"twins against the reference {on}", judged),
        "bisect": command(base + kernels, True, f"layer by layer {on}", bisected, lacks),
        "order": command(base + no_order, False, f"every kernel for {', '.join(SERVED.values())}; needs no GPU"),
        "adversary": command(base + kernels, True, "late producers, hostile memory, a busy neighbour on the first GPU"),
        "generate": command(base + kernels, True, f"reference and twins {on}", "the reference alone"),
        "bench": command(base + kernels, True, f"{on}; {peer}"),
        "test": command(base + kernels + tests, True, "all unit tests", "unit tests; those that launch are skipped"),
        "stand-in": command(base, False, "writes 24 MB to 1 GB; needs no GPU"),
        "traces": command(base, False, "the law in float64 and its two roundings, on the CPU"),
        "doctor": {"can": "yes", "why": "this report"},
    }


def why_no_gpu(facts: Mapping) -> str:
    """Why no twin can be launched here; empty where one can."""
    if any(g["served"] for g in facts["gpus"]):
        return ""
    if facts["gpus"]:
        names = ", ".join(sorted({f"{g['name']} ({g['capability']})" for g in facts["gpus"]}))
        return f"{names} is not served; served are {', '.join(SERVED.values())}"
    if facts["cuda"] is None and Path("/dev/nvidia0").exists():
        return "there is an NVIDIA GPU, but torch is a CPU build"
    return "no GPU visible"


def render(facts: Mapping) -> str:
    """The report as text, one fact a line."""
    rows = [("Python", f"{facts['python']['version']}  {facts['python']['path']}")]
    for p in facts["packages"]:
        rows.append((p["name"], "  ".join(filter(None, (p["version"], p["wrong"])))))
    rows.append(("CUDA of torch", facts["cuda"] or "none (CPU build)"))
    for g in facts["gpus"]:
        serving = f"served as {g['served']}" if g["served"] else "not served"
        rows.append((f"GPU {g['index']}", f"{g['name']}, {g['capability']}, {serving}, {g['free_gib']} GiB free"))
    if not facts["gpus"]:
        rows.append(("GPU", why_no_gpu(facts)))
    rows.append(("nvdisasm", facts["nvdisasm"]["wrong"] or facts["nvdisasm"]["path"]))
    rows.append(("C compiler", facts["compiler"]["version"] or "none; check and bisect interpret no twins without one"))
    for name, found in facts["peers"].items():
        rows.append((f"peer {name}", f"{found or 'not installed'}  ({PEERS[name]})"))
    rows.append(("free", f"{facts['memory_gib']} GiB memory, {facts['disk_gib']} GiB disk, {facts['cores']} cores"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += ["", "What works here"]
    lines += [f"  {name:<9} {c['can']:<7} {c['why']}" for name, c in facts["commands"].items()]
    lines += ["", "Missing" if facts["missing"] else "Nothing that is needed is missing."]
    return "\n".join(lines + [f"  {line}" for line in facts["missing"]])
