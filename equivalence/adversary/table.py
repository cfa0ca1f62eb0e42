"""The hazard, measured: five ways to load in one GEMV, four conditions, wrong runs of each; beside it the static proof.

The compiler of a target decides which of the five is broken there. On sm_90a it is one, NO_ALLOCATE weights with
invariant activations, and an ordinary test passes it every time: only a stall that the dependent sees makes it fail.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attack import REPEATS
from .gemv import VARIANTS, gemv
from .gpu import Gpu, wait
from .image import Image
from .subjects import subject

GAP_US = 50.0  # host time kept between two launches outside of a graph: tens of us, as a Python framework takes
CONDITIONS = {  # name -> (stall in us, in a graph)
    "no stall": (0, False), "10 us, stream": (10, False), "10 us, graph": (10, True), "1 ms, stream": (1000, False),
}  # fmt: skip
BROKEN = {"sm_90a": (("no_allocate", "invariant"),), "sm_103a": (("plain", "invariant"), ("no_allocate", "invariant"))}
SHOWS = ("10 us, graph", "1 ms, stream")  # conditions under which producer and dependent overlap


@dataclass(frozen=True)
class Row:
    """One variant: wrong runs by condition, and the proof by target: (verdict, activation loads above the wait in
    SASS, of how many); None without a disassembler."""

    weights: str
    activations: str
    wrong: dict[str, int]
    proof: dict[str, tuple[str, int, int] | None]

    def expected(self, target: str, repeats: int) -> dict[str, int]:
        broken = (self.weights, self.activations) in BROKEN[target]
        return {name: repeats if broken and name in SHOWS else 0 for name in CONDITIONS}

    def agrees(self, target: str, repeats: int) -> bool:
        """Whether the runs are what the proof's SASS says for this target: wrong where a load stands above the wait."""
        return self.wrong == self.expected(target, repeats)


def measure(weights: str, activations: str, repeats: int = REPEATS) -> dict[str, int]:
    """Wrong runs of `repeats` by condition, on the current GPU."""
    made = subject(gemv(weights, activations))
    image = Image(made.kernels)
    truth = image.truth(made.values)
    runner = Gpu(made, image, truth)
    expected = runner.plain(runner.truth)
    poisoned = image.start(runner.truth, image.produced, {})
    runner.graph(True)
    wrong = {}
    for name, (stall, graph) in CONDITIONS.items():
        if graph:
            wrong[name] = runner.late(poisoned, stall, repeats, expected).wrong
        else:
            wrong[name] = sum(not in_stream(runner, poisoned, stall, expected) for _ in range(repeats))
    return wrong


def in_stream(runner: Gpu, start: torch.Tensor, stall_us: float, expected: torch.Tensor) -> bool:
    """One run outside of a graph, with GAP_US between the launches: whether every bit is right."""
    runner.start.copy_(start)
    runner.arena.copy_(runner.start)
    runner.stall.fill_(int(stall_us * 1000))
    torch.cuda.synchronize()
    runner.producer(runner.stall, runner.truth, runner.arena, runner.times)
    end = time.perf_counter() + GAP_US / 1e6
    while time.perf_counter() < end:
        pass
    for kernel, tensors in runner.calls:
        kernel(*tensors)
    wait()
    return torch.equal(runner.arena, expected)


def proofs(targets: Sequence[str] = tuple(BROKEN)) -> dict[tuple[str, str], dict[str, tuple[str, int, int] | None]]:
    """What the static proof says of each variant for each target: (verdict, activation loads above the wait in SASS,
    all of them), or None where no disassembler is installed."""
    from equivalence.order import ToolMissing, check_kernels

    found: dict[tuple[str, str], dict] = {v: dict.fromkeys(targets) for v in VARIANTS}
    try:
        reports = iter(check_kernels([gemv(*v) for v in VARIANTS], targets))
    except ToolMissing:
        return found
    for variant in VARIANTS:
        for target in targets:
            report = next(reports)
            loads = [a for a in report.accesses if a.tensors == "x" and a.kind == "load" and a.where.startswith("SASS")]
            found[variant][target] = (report.verdict, sum(a.before_wait for a in loads), len(loads))
    return found


def table(repeats: int = REPEATS, measured: bool = True) -> list[Row]:
    """All five rows. measured: also run them, on the current GPU."""
    proved = proofs()
    return [Row(*v, measure(*v, repeats) if measured else {}, proved[v]) for v in VARIANTS]


def verdict(rows: Sequence[Row], target: str, repeats: int) -> str:
    """ "reproduced", "differs", or "could not judge" if the broken variant failed nowhere, so nothing overlapped."""
    broken = [r for r in rows if (r.weights, r.activations) in BROKEN.get(target, ())]
    if not broken or any(r.wrong.get(name, 0) < repeats for r in broken for name in SHOWS):
        return "could not judge"
    return "reproduced" if all(r.agrees(target, repeats) for r in rows) else "differs"


def proof_agrees(rows: Sequence[Row]) -> bool | None:
    """Whether the proof finds every variant with invariant activations, passes the others, and sees the loads above the
    wait exactly where BROKEN says; None without a disassembler."""
    if any(p is None for r in rows for p in r.proof.values()):
        return None
    return all(
        (verdict_ == "findings") == (r.activations == "invariant")
        and (above > 0) == ((r.weights, r.activations) in BROKEN[target])
        for r in rows
        for target, (verdict_, above, _) in r.proof.items()
    )


def lines(rows: Sequence[Row], repeats: int) -> list[str]:
    """The table as text."""
    head = f"{'weights / activations':26}" + "".join(f"{name:>15}" for name in CONDITIONS)
    out = [head + "".join(f"  {'proof ' + t:24}" for t in BROKEN)]
    for r in rows:
        wrong = "".join(f"{f'{r.wrong[n]} of {repeats}' if n in r.wrong else '-':>15}" for n in CONDITIONS)
        said = ("no disassembler" if p is None else f"{p[0]}, {p[1]} of {p[2]} above" for p in r.proof.values())
        out.append(f"{r.weights + ' / ' + r.activations:26}{wrong}" + "".join(f"  {s:24}" for s in said))
    return out
