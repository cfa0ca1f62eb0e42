"""`k3 adversary`: kernels under a late producer, hostile memory and a busy neighbour, and against the interpreter."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out

PARTS = ("table", "watchdog", "kernels", "crossval")
GOOD = ("equal", "reproduced")
WORKERS = 8
MOST = 64  # rows that twins serve


@dataclass
class Result:
    """rows: every verdict, as dictionaries with at least subject, check and verdict."""

    rows: list[dict] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        verdicts = {r["verdict"] for r in self.rows}
        if verdicts - {*GOOD, "could not judge"}:
            return DISAGREEMENT
        return UNJUDGED if "could not judge" in verdicts or not verdicts else EQUAL

    def as_dict(self) -> dict:
        return dict(verdict=self.exit_code, rows=self.rows)


def run(parts: Sequence[str], batches: Sequence[int], only: str, repeats: int, stalls: Sequence[float]) -> Result:
    """Judge on the first GPU; prints as results come. Raises NotImplementedError without a served GPU.

    parts: of PARTS. only: part of the kernel names wanted. repeats: attacks of each poison and stall; stalls in us.
    """
    from fast.kernel import device_arch

    unknown = [p for p in parts if p not in PARTS]
    if unknown:
        raise ValueError(f"part {unknown[0]!r}: allowed are {', '.join(PARTS)}")
    if repeats < 1 or not stalls or min(stalls) < 0:
        raise ValueError(f"repeats {repeats}, stalls {list(stalls)}: allowed are 1 or more, and times from 0 on")
    if max(batches) > MOST:
        raise ValueError(f"batch {max(batches)}: allowed are 1 to {MOST}")
    if not torch.cuda.is_available():
        raise NotImplementedError("no CUDA GPU is visible: adversary needs one; `k3 order` and `k3 check` do not")
    target = device_arch(torch.device("cuda", 0))
    result = Result()
    if "table" in parts:
        table(target, repeats, stalls, result)
    if "watchdog" in parts:
        watchdog(target, result)
    if "kernels" in parts:
        kernels(target, batches, only, repeats, stalls, result)
    if "crossval" in parts:
        crossval(batches, only, result)
    bad = [r for r in result.rows if r["verdict"] not in GOOD]
    out.print(f"adversary: {len(result.rows) - len(bad)} of {len(result.rows)} verdicts are good")
    return result


def table(target: str, repeats: int, stalls: Sequence[float], result: Result) -> None:
    """The control set and the clocks. Proof and measurement are judged apart."""
    from equivalence.adversary import watchdog as children

    job = dict(part="table", target=target, repeats=repeats, stalls=list(stalls))
    ((_, (row,)),) = children.run([job])
    for line in row.get("lines", [row.get("text", "")]):
        out.print(line, markup=False)
    for c in row.get("clocks", ()):
        out.print(
            f"stall {c['stall']:g} us: dependent began {c['ahead']:.1f} us before the producer's end, passed its wait "
            f"{c['passed']:.1f} us after it"
        )
    out.print(f"table: {row['verdict']}; static proof agrees: {row.get('proof_agrees')}")
    result.rows.append(row)
    if row.get("proof_agrees") is False:
        result.rows.append(dict(subject="gemv", check="proof", verdict="differs", text="proof of the control set"))


def watchdog(target: str, result: Result) -> None:
    """A grid barrier must end alone, and must be called a hang beside an occupier; the worker after it must live."""
    from equivalence.adversary import watchdog as children

    wanted = ("equal", "hang", "equal")
    cases = [dict(part="barrier", target=target, occupied=w == "hang") for w in wanted]
    found = {n: rows[0] for n, rows in children.run(cases)}
    said = [found[n]["verdict"] for n in range(len(cases))]
    good = tuple(said) == wanted
    text = f"grid barrier alone, beside an occupied SM, alone: {', '.join(said)}"
    verdict = "equal" if good else "could not judge"
    result.rows.append(dict(subject="grid barrier", check="watchdog", verdict=verdict, text=text, found=found))
    out.print(f"watchdog: {text}" + ("" if good else f"; wanted {', '.join(wanted)}"))


def kernels(target: str, batches, only: str, repeats: int, stalls, result: Result) -> None:
    """Every check of every form, in as many workers as there are cores to compile on."""
    from equivalence.adversary import jobs
    from equivalence.adversary import watchdog as children

    todo = jobs(target, batches, only, repeats, stalls)
    if not todo:
        raise ValueError(f"no kernel name contains {only!r}")
    done = 0
    for _, rows in children.run(todo, min(WORKERS, len(todo), os.cpu_count() or 1)):
        done += 1
        out.print(f"[{done}/{len(todo)}] {rows[0]['subject']}", markup=False)
        for row in rows:
            out.print("    " + told(row), markup=False)
        result.rows += rows


def told(row: dict) -> str:
    """One verdict in one line."""
    what = f" {', '.join(row['tensors'])}" if row.get("tensors") else ""
    runs = ""
    if row["check"] == "attack" and row["verdict"] == "equal":
        real = ", ".join(f"{s:g}" for s in row["real"])
        runs = f" in {row['runs']} runs at {real} us (failure rate < {row['bound']:.2%} at {row['confidence']:.0%})"
    return f"{row['check']:9} {row['verdict']}{what}{runs}" + (f"; {row['text']}" if row.get("text") else "")


def crossval(batches: Sequence[int], only: str, result: Result) -> None:
    """The same kernels in the interpreter, bit by bit."""
    from equivalence import crossval as cross

    head, *_ = cross.lines([])
    out.print(head, markup=False)
    tell = lambda rows: out.print("\n".join(cross.lines(rows)[1:]), markup=False)  # noqa: E731
    rows = cross.run(batches, only=only, tell=tell)
    if not rows:
        console.print(f"crossval: no kernel name contains {only!r}")
    found = cross.as_dict(rows)
    out.print(f"crossval: {found['verdict']}, {found['kernels']} kernels")
    result.rows.append(dict(subject="interpreter", check="crossval", **found, text=""))
