"""The verdict of a run: what was compared, what was not and why, as a table, as JSON, and as an exit code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fast.decoder import Explained

from .judge import Finding, first_bad

EXIT = {"equal": 0, "disagreement": 1, "could not judge": 2}


@dataclass
class Result:
    """A run and what came of it.

    about: what ran (mode, model, source of weights, rows, requests, tokens, device, compile target). served: the last
    witness of each unit. refused: unit key -> why its implementation could not run. ledger: counts of discrete
    choices that differ, inside and outside the error.
    """

    about: Mapping[str, object]
    findings: Sequence[Finding]
    served: Sequence[Explained]
    refused: Mapping[str, str] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)

    @property
    def first(self) -> Finding | None:
        return first_bad(self.findings)

    @property
    def judged(self) -> int:
        """Units that an implementation served."""
        return sum(e.served_by != "reference" for e in self.served)

    @property
    def hollow(self) -> list[str]:
        """Tensors of which nothing was compared: no row was live, no value finite, or too few for what is bounded."""
        return [f"{f.place.key} {f.place.tensor}" for f in self.findings if f.hollow]

    @property
    def verdict(self) -> str:
        if self.first:
            return "disagreement"
        whole = self.judged and not self.refused and not self.hollow and self.about.get("tokens", 0) > 0
        return "equal" if whole else "could not judge"

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def statement(self) -> str:
        """The verdict in a sentence or three."""
        if self.first:
            return f"disagreement: {describe(self.first)}"
        kernels = {k for e in self.served for k in e.kernels}
        text = f"{self.judged} of {len(self.served)} units served by twins ({len(kernels)} kernels)"
        if self.verdict == "equal":
            return f"equal: {text} stay within the reference's own error over {self.about['tokens']} tokens"
        if self.refused:
            return f"could not judge: {text}; " + "; ".join(sorted(set(self.refused.values())))
        if self.hollow:
            many = f"{len(self.hollow)} tensors nothing or too little was compared"
            return f"could not judge: {text}; of {many}: {self.hollow[0]}"
        return f"could not judge: {text}"

    @property
    def unserved(self) -> dict[str, list[str]]:
        """Why the law served what no twin did: reason -> stages."""
        reasons: dict[str, list[str]] = {}
        for e in self.served:
            if e.served_by == "reference":
                stages = reasons.setdefault(e.reason or "no twin", [])
                stages += [s for s in e.stages if s not in stages]
        return reasons

    def as_dict(self) -> dict:
        """Everything, as JSON values."""
        first = self.first
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "statement": self.statement,
            "about": dict(self.about),
            "first_bad": finding_dict(first) if first else None,
            "units": [
                dict(key=e.key, stages=list(e.stages), served_by=e.served_by, kernels=list(e.kernels),
                     state=list(e.state), reason=e.reason)
                for e in self.served
            ],
            "not_judged": self.unserved,
            "refused": dict(self.refused),
            "ledger": dict(self.ledger),
            "findings": [finding_dict(f) for f in self.findings],
        }  # fmt: skip

    def print(self, console: Console | None = None) -> None:
        console = console or Console()
        console.print(self.table())
        if self.ledger:
            console.print("ledger: " + ", ".join(f"{k} {v}" for k, v in self.ledger.items()))
        for reason, stages in self.unserved.items():
            console.print(f"not judged ({reason}): {', '.join(stages)}", markup=False)
        console.print(self.statement, markup=False, style="green" if self.verdict == "equal" else "bold red")

    def table(self) -> Table:
        """One line per stage or span: the worst of all layers."""
        title = ", ".join(f"{k} {v}" for k, v in self.about.items())
        table = Table(title=title, title_justify="left")
        for name in ("stages", "units", "row RMS / reference's", "element / bound", "run RMS / reference's", "slope"):
            table.add_column(name, justify="left" if name == "stages" else "right")
        table.add_column("first bad")
        groups: dict[tuple, list[Finding]] = {}
        for f in self.findings:
            groups.setdefault(f.place.stages or (f.place.key,), []).append(f)
        for stages, found in groups.items():
            values = [f for f in found if f.check == "value"]
            bad = first_bad(found)
            slopes = [f.slope for f in values if f.slope is not None]
            table.add_row(
                " + ".join(stages), str(len({f.place.key for f in found})), _worst(f.worst_row for f in values),
                _worst(f.worst_element for f in values), _worst(f.pooled for f in values), _worst(slopes),
                describe(bad) if bad else "", style="red" if bad else None,
            )  # fmt: skip
        return table


def _worst(values) -> str:
    values = list(values)
    return f"{max(values):.3g}" if values else ""


def describe(f: Finding) -> str:
    """A finding in words: where, when, what."""
    when = "over the run" if f.first_token is None else f"token {f.first_token}"
    text = f"{when}, {f.place.key}, {f.place.tensor}: {'; '.join(f.reasons)}"
    if f.check == "value":
        w = f.worst
        text += (
            f" (worst at token {w['token']}, index {w['index']}: twin {w['twin']:.6g}, reference {w['reference']:.6g}, "
            f"exact {w['exact']:.6g}, {w['ulp']:.3g} ULP apart)"
        )
    return text


def finding_dict(f: Finding) -> dict:
    """A finding as JSON values; `drift` holds [first token, twin's error, reference's error], windows doubling."""
    made = dict(
        key=f.place.key, layer=f.place.layer, stages=list(f.place.stages), tensor=f.place.tensor, check=f.check,
        ok=f.ok, reasons=f.reasons, first_token=f.first_token, bad=f.bad, compared=f.compared,
    )  # fmt: skip
    if f.check == "exact":
        return made | dict(worst=f.worst)
    drift = []
    for k in range(len(f.curve).bit_length()):
        part = f.curve[(1 << k) - 1 : (2 << k) - 1].double()
        if len(part):
            drift.append([(1 << k) - 1, *part.square().mean(0).sqrt().tolist()])
    return made | dict(
        dtype=f.dtype, bounds=None if f.bounds is None else [_finite(b) for b in vars(f.bounds).values()],
        worst_row=_finite(f.worst_row), worst_element=_finite(f.worst_element), pooled=_finite(f.pooled),
        slope=f.slope, error=f.error, reference_error=f.reference_error, drift=drift,
        worst={k: _finite(v) for k, v in f.worst.items()},
    )  # fmt: skip


def _finite(value):
    """JSON has no infinities: they and NaN become text."""
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A terminal bar; yields a callback (done, total, text) that runs take as `progress`."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
