"""The score: which checker catches which mutant, and what they say of clean kernels."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context

from equivalence.isa import cubin
from equivalence.order import TARGETS, check_builds

from . import checkers
from .catalog import CATALOG
from .entry import FAMILIES, HOISTED, LAW, ORDERING, QUALITY, STATE, STATIC, Mutant
from .scenes import BASES, tensors
from .stream import Stream

SHARE = 8  # mutants of one base that a process takes at a time: they share the clean kernel's runs
DEMANDS = (("ordering", "caught", 0.95), ("ordering", "static", 0.80), ("hoisted load", "caught", 1.0))
HOIST_COUNT = re.compile(r"\bLDG\S*CONSTANT\S*")


@dataclass
class Judged:
    """One mutant. seen: per checker and target. same: targets on which it compiles to the clean kernel's code.
    hoisted: per target, non-coherent loads that SASS has in front of its first wait, counted in the text."""

    name: str
    family: str
    catalog: str
    text: str
    targets: tuple[str, ...]
    expected: tuple[str, ...]
    seen: list[checkers.Seen] = field(default_factory=list)
    same: tuple[str, ...] = ()
    hoisted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    broken: str = ""

    @property
    def judged(self) -> tuple[str, ...]:
        """The targets it was judged on: where it is a fault; wrong values are looked for on the first alone."""
        return self.targets[:1] if self.family == STATE else self.targets

    def by(self, checker: str) -> bool:
        """Whether a checker catches it on every target that it was asked about."""
        mine = [s for s in self.seen if s.checker == checker and s.target in self.judged]
        return bool(mine) and all(s.caught for s in mine)

    @property
    def caught(self) -> bool:
        return bool(self.judged) and all(any(s.caught for s in self.seen if s.target == t) for t in self.judged)

    @property
    def missing(self) -> list[str]:
        """Checkers that should have caught it and did not."""
        return [c for c in self.expected if not self.by(c)]

    def as_dict(self) -> dict:
        more = dict(caught=self.caught, caught_by=[c for c in checkers_of(self) if self.by(c)], missing=self.missing)
        return {**asdict(self), **more}


def checkers_of(judged: Judged) -> list[str]:
    return list(dict.fromkeys(s.checker for s in judged.seen))


@dataclass
class Alarm:
    """Something that a checker said of a clean kernel."""

    base: str
    target: str
    checker: str
    text: str


@dataclass
class Score:
    """alarms: what was said of clean kernels, in so many order proofs and interpreted schedules. cpu: seconds of all
    processes. part: only some mutants were asked for, and shares of them would say nothing."""

    judged: list[Judged]
    alarms: list[Alarm]
    proofs: int
    schedules: int
    cpu: float
    part: bool = False

    @property
    def mutants(self) -> list[Judged]:
        return [j for j in self.judged if j.targets]

    @property
    def survivors(self) -> list[Judged]:
        return [j for j in self.mutants if not j.caught]

    def share(self, family: str, what: str) -> tuple[int, int]:
        """(caught by some checker or by the order proof alone, how many there are)."""
        mine = [j for j in self.mutants if j.family == family]
        return sum(j.caught if what == "caught" else j.by(STATIC) for j in mine), len(mine)

    def demands(self) -> list[tuple[str, bool]]:
        """What is asked of the checkers, and whether it is met."""
        n, caught = len(self.mutants), len(self.mutants) - len(self.survivors)
        out = [(f"{caught} of {n} caught by some checker (asked: all)", 0 < n == caught)] if self.part else []
        for family, what, least in () if self.part else DEMANDS:
            got, n = self.share(family, what)
            by = "some checker" if what == "caught" else "the order proof alone"
            text = f"{family}: {got} of {n} caught by {by} ({got / max(n, 1):.0%}; asked: {least:.0%})"
            out.append((text, bool(n) and got >= least * n))
        text = f"false alarms: {len(self.alarms)} in {self.proofs} proofs and {self.schedules} schedules (asked: 0)"
        return [*out, (text, not self.alarms and self.proofs + self.schedules > 0)]

    @property
    def surprises(self) -> list[str]:
        """Entries whose edit does not compile, and catches that a checker used to make and did not."""
        gone = [f"{j.name}: no kernel any more: {j.broken}" for j in self.judged if j.broken]
        return gone + [f"{j.name}: not caught by {', '.join(j.missing)}" for j in self.judged if j.missing]

    def as_dict(self) -> dict:
        families = {
            f: dict(zip(("caught", "mutants"), self.share(f, "caught"), strict=True), static=self.share(f, STATIC)[0])
            for f in FAMILIES
        }
        return dict(
            mutants=len(self.mutants), caught=sum(j.caught for j in self.mutants),
            caught_static=sum(j.by(STATIC) for j in self.mutants), false_alarms=len(self.alarms),
            survivors=[j.name for j in self.survivors], families=families,
            demands=[dict(text=t, met=m) for t, m in self.demands()], surprises=self.surprises,
            alarms=[asdict(a) for a in self.alarms], proofs=self.proofs, schedules=self.schedules, cpu_seconds=self.cpu,
            entries=[j.as_dict() for j in self.judged],
        )  # fmt: skip


@cache
def _clean(base: str, targets: tuple[str, ...]) -> checkers.Built:
    return checkers.build(None, base, targets)


def judge(entries: Sequence[Mutant], targets: Sequence[str], repeats: int) -> list[Judged]:
    """Ask every checker that can see the family of each mutant; the order proof takes all of them at once. Those of a
    kernel that is for none of the targets are left out.

    Schedules run on the first target, and on the others where the order proof is silent; equal PTX runs once.
    """
    entries = [e for e in entries if checkers.served(e.base, targets)]
    built, out = [_build(e, targets) for e in entries], []
    for entry, made in zip(entries, built, strict=True):
        if made.broken:
            out.append(Judged(entry.name, entry.family, entry.catalog, entry.text, tuple(targets), ()))
            out[-1].broken = made.broken
    entries = [e for e, made in zip(entries, built, strict=True) if not made.broken]
    built = [made for made in built if not made.broken]
    shown = checkers.static(entries, built, targets)
    above = _lifted(entries, built, targets)
    for entry, made, seen, hoisted in zip(entries, built, shown, above, strict=True):
        began = checkers.spent()
        faulty = tuple(t for t in entry.targets if t in targets)
        one = Judged(entry.name, entry.family, entry.catalog, entry.text, faulty, tuple(sorted(entry.expected)), seen)
        one.hoisted = hoisted
        if not made.refused:
            clean = _clean(entry.base, tuple(targets))
            mine = tuple(made.builds)
            one.same = tuple(t for t in mine if checkers.same_code(made, clean, t))
            if entry.family == STATE:
                one.seen += [checkers.law(entry, made, mine[0])] if BASES[entry.base].stages else []
            elif entry.family != QUALITY:
                silent = [s.target for s in seen if not s.caught]
                asked = [t for t in mine if t in silent or t == mine[0]]
                one.seen += list(_schedules(entry, made, asked, repeats))
        one.seconds = checkers.spent() - began + made.seconds + sum(s.seconds for s in seen if s.checker == STATIC)
        out.append(one)
    return out


def _build(entry: Mutant, targets: Sequence[str]) -> checkers.Built:
    try:
        return checkers.build(entry, entry.base, targets)
    except Exception as error:  # whatever the compiler thinks of the edit: one bad entry must not hide the others
        return checkers.Built(None, broken=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _lifted(entries, built, targets: Sequence[str]) -> list[dict[str, int]]:
    """For hoisted loads, `lifted` of each target's SASS; nothing for others."""
    out: list[dict[str, int]] = [{} for _ in entries]
    for target in targets:
        asked = [n for n, e in enumerate(entries) if e.family == HOISTED and target in built[n].builds]
        builds = [built[n].builds[target] for n in asked]
        texts = cubin.disassemble([(b.cubin, b.symbol) for b in builds], target) if builds else []
        for n, text in zip(asked, texts, strict=True):
            out[n][target] = lifted(text)
    return out


def _schedules(entry: Mutant, made: checkers.Built, targets: Sequence[str], repeats: int) -> list[checkers.Seen]:
    known: dict[str, list] = {}
    for target in targets:
        text = checkers.body(made.builds[target])
        seen = known.get(text) or checkers.dynamic(entry.base, made, target, repeats)
        if text in known:
            seen = [checkers.Seen(s.checker, target, s.hits, s.runs, 0.0, s.first) for s in seen]
        known.setdefault(text, seen)
        yield from seen


def lifted(sass: str) -> int:
    """Non-coherent loads in front of the first wait, in the order of the disassembly's lines."""
    return len(HOIST_COUNT.findall(sass.partition("ACQBULK")[0]))


def clean(base: str, targets: Sequence[str], schedules: int) -> tuple[list[Alarm], int, int]:
    """Everything the checkers say of a clean kernel: (alarms, proofs, schedules run)."""
    if not (targets := checkers.served(base, targets)):
        return [], 0, 0
    made, alarms = _clean(base, targets), []
    for target, report in zip(targets, check_builds([made.builds[t] for t in targets]), strict=True):
        alarms += [Alarm(base, target, STATIC, str(f)) for f in report.findings]
    for n, target in enumerate(targets):
        share = len(range(n, schedules, len(targets)))
        for s in checkers.dynamic(base, made, target, share) if share else ():
            alarms += [Alarm(base, target, s.checker, f"{s.hits} of {s.runs}: {s.first}")] if s.caught else []
    if BASES[base].stages:
        stream = Stream(made.kernel, tensors(base))
        wrong = checkers.against_law(BASES[base], stream, stream.run(made.kernel, made.builds[targets[0]].ptx, "plain"))
        alarms += [Alarm(base, targets[0], LAW, wrong)] if wrong else []
    return alarms, len(targets), schedules


def _judge_named(names: Sequence[str], targets: Sequence[str], repeats: int) -> tuple[list[Judged], float]:
    began = checkers.spent()
    return judge([CATALOG[n] for n in names], targets, repeats), checkers.spent() - began


def _clean_named(base: str, targets: Sequence[str], schedules: int) -> tuple[tuple, float]:
    began = checkers.spent()
    return clean(base, targets, schedules), checkers.spent() - began


def _shares(entries: Iterable[Mutant]) -> Iterator[list[str]]:
    by_base: dict[str, list[str]] = {}
    for entry in entries:
        by_base.setdefault(entry.base, []).append(entry.name)
    for names in by_base.values():
        yield from (names[i : i + SHARE] for i in range(0, len(names), SHARE))


def score(
    wanted: str = "", targets: Sequence[str] = TARGETS, *, schedules: int = 240, repeats: int = 2, jobs: int = 2,
    told: Callable[[str, Score], None] = lambda line, so_far: None,
) -> Score:  # fmt: skip
    """Judge every mutant whose name contains `wanted`, and the clean kernels they come from.

    schedules: interpreted runs of the clean kernels, over all of them. repeats: schedules per mutant and target.
    told: gets a line, and the score so far, whenever some are done. Raises ValueError for a name or target that is not
    there, EditError if a kernel has moved on from an edit.
    """
    if unknown := [t for t in targets if t not in TARGETS]:
        raise ValueError(f"target {unknown[0]!r}: allowed are {', '.join(TARGETS)}")
    named = [m for m in CATALOG.values() if wanted in m.name]
    if not named:
        raise ValueError(f"no mutant's name contains {wanted!r}")
    entries = [m for m in named if checkers.served(m.base, targets)]
    if not entries:
        allowed = dict.fromkeys(t for m in named for t in BASES[m.base].targets)
        raise ValueError(f"target {', '.join(targets)}: allowed for these mutants are {', '.join(allowed)}")
    bases = list(dict.fromkeys(m.base for m in entries))
    result, order = Score([], [], 0, 0, 0.0, part=bool(wanted)), {m.name: n for n, m in enumerate(entries)}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = {pool.submit(_judge_named, names, tuple(targets), repeats): None for names in _shares(entries)}
        for n, base in enumerate(bases):
            share = len(range(n, schedules, len(bases)))
            runs[pool.submit(_clean_named, base, tuple(targets), share)] = base
        try:
            for run in as_completed(runs):
                made, cpu = run.result()
                result.cpu += cpu
                if runs[run] is None:
                    result.judged += made
                    told(f"{len(result.judged)} of {len(entries)} mutants", result)
                else:
                    alarms, proofs, ran = made
                    result.alarms += alarms
                    result.proofs, result.schedules = result.proofs + proofs, result.schedules + ran
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    result.judged.sort(key=lambda j: (FAMILIES.index(j.family), order[j.name]))
    return result


__all__ = ["DEMANDS", "ORDERING", "Alarm", "Judged", "Score", "clean", "judge", "lifted", "score"]
