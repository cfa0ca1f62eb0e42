"""What each checker says of one mutant: the order proof, the worst order with the race detector, and the law."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from equivalence.judge import Judge, Place
from equivalence.order import QUALITY, check_builds, mutant
from fast.kernel import Build, Kernel
from fast.lower import lower
from reference.numerics import exact, fused
from reference.stage import STAGES, Role

from .entry import LAW, RACES, STATE, STATIC, VALUES, Mutant
from .entry import QUALITY as QUALITY_FAMILY
from .scenes import BASES, tensors
from .stream import Ran, Stream

WARPS = ("together", "random", "last")  # schedules in turn; a run's number is the seed of "random"
NEVER_WAITS = "launched with PDL, but never waits"  # fast.kernel refuses such a kernel when it is compiled


@dataclass
class Seen:
    """What one checker saw of one mutant on one target. hits: of `runs` repetitions. first: the first thing it said."""

    checker: str
    target: str
    hits: int
    runs: int
    seconds: float
    first: str = ""

    @property
    def caught(self) -> bool:
        return self.hits > 0


@dataclass
class Built:
    """A kernel for some targets. refused: why fast.kernel would not build it. broken: why the edit is no kernel."""

    kernel: Kernel | None
    builds: dict[str, Build] = field(default_factory=dict)
    refused: str = ""
    broken: str = ""
    seconds: float = 0.0


def spent() -> float:
    """CPU seconds of this process and of the tools it ran."""
    return sum(os.times()[:4])


def served(base: str, targets: Sequence[str]) -> tuple[str, ...]:
    """Those of the targets that a base is for."""
    return tuple(t for t in targets if t in BASES[base].targets)


def build(entry: Mutant | None, base: str, targets: Sequence[str]) -> Built:
    """Compile a mutant, or the clean kernel for None, for the targets that its base is for.

    Raises what the compiler raises, but for a wait that is gone.
    """
    began, b = spent(), BASES[base]
    module = b.original if entry is None else mutant(b.original, entry.edits)
    kernel = b.kernel(module, tensors(base))
    try:
        builds = {b.target: b for b in lower(kernel, served(base, targets))}
    except ValueError as error:
        if NEVER_WAITS not in str(error):
            raise
        return Built(kernel, refused=str(error), seconds=spent() - began)
    return Built(kernel, builds, seconds=spent() - began)


def static(entries: Sequence[Mutant], built: Sequence[Built], targets: Sequence[str]) -> list[list[Seen]]:
    """The order proof of PTX and SASS of several mutants at once. A quality mutant counts as caught by any finding,
    others by a verdict."""
    began = spent()
    asked = [(n, t) for n, made in enumerate(built) for t in made.builds]
    reports = dict(zip(asked, check_builds([built[n].builds[t] for n, t in asked]), strict=True))
    each, out = (spent() - began) / max(len(asked), 1), []
    for n, (entry, made) in enumerate(zip(entries, built, strict=True)):
        out.append([])
        for t in served(entry.base, targets):
            if made.refused:
                out[n].append(Seen(STATIC, t, 1, 1, 0.0, f"refused: {made.refused}"))
                continue
            found = [f for f in reports[n, t].findings if f.severity != QUALITY or entry.family == QUALITY_FAMILY]
            out[n].append(Seen(STATIC, t, int(bool(found)), 1, each, str(found[0]) if found else ""))
    return out


@cache
def clean_stream(base: str, target: str) -> tuple[Stream, Ran]:
    """The memory of a base, and what its clean kernel leaves there in plain order."""
    made = build(None, base, [target])
    stream = Stream(made.kernel, tensors(base))
    return stream, stream.run(made.kernel, made.builds[target].ptx, "plain")


def dynamic(base: str, made: Built, target: str, repeats: int, first_seed: int = 0) -> list[Seen]:
    """Worst orders of the interpreter: what the race detector reports, and whether any byte comes out otherwise."""
    stream, clean = clean_stream(base, target)
    races, values = Seen(RACES, target, 0, repeats, 0.0), Seen(VALUES, target, 0, repeats, 0.0)
    began = spent()
    for n in range(repeats):
        warps = WARPS[n % len(WARPS)]
        ran = stream.run(made.kernel, made.builds[target].ptx, "adversarial", warps, first_seed + n)
        wrong = ran.fault
        for name in ("memory", "handed") if not wrong else ():
            bad = (getattr(ran, name) != getattr(clean, name)).nonzero()
            if len(bad) and not wrong:
                wrong = f"{len(bad)} bytes of {where(stream, int(bad[0]))} differ from the plain order's"
        for seen, what in ((races, ran.reports[0] if ran.reports else ""), (values, wrong)):
            seen.hits += bool(what)
            seen.first = seen.first or (what and f"{what} (warps {warps}, seed {first_seed + n})")
    races.seconds = values.seconds = (spent() - began) / 2
    return [races, values]


def where(stream: Stream, byte: int) -> str:
    """The argument a byte of the image belongs to; the one that starts last before it, if several share a storage."""
    starts = {
        stream.places[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size(): name
        for name, t in stream.tensors.items()
        if name not in stream.weights
    }
    return starts[max((at for at in starts if at <= byte), default=min(starts))]


def law(entry: Mutant, made: Built, target: str) -> Seen:
    """One launch in plain order against the law: values inside the bounds of `equivalence.compare`, every other byte
    as it was, and, where the kernel promises it, a row alone with the bits it has in its batch."""
    began, b = spent(), BASES[entry.base]
    stream = Stream(made.kernel, tensors(b.name))
    ran = stream.run(made.kernel, made.builds[target].ptx, "plain")
    wrong = ran.fault or against_law(b, stream, ran) or (entry.family == STATE and _alone(b, made, target, ran)) or ""
    return Seen(LAW, target, int(bool(wrong)), 1, spent() - began, wrong)


def against_law(b, stream: Stream, ran: Ran) -> str:
    before, judge = stream.views(stream.staged.clone()), Judge(torch.device("cpu"))
    true, ref = (_evaluate(b, before, num) for num in (exact, fused))
    specs = {s.name: s for stage in b.stages for s in STAGES[stage].tensors}
    live = torch.ones(len(before["out"]), dtype=torch.bool)
    untouched, staged = ran.memory.clone(), stream.staged.clone()
    for name, value in ref.items():
        if name not in ran.tensors:
            continue  # it only flows between the stages of the span
        spec, got = specs[name], ran.tensors[name]
        rows = before[spec.rows].long() if spec.rows else None
        twin = got if rows is None else got[rows.clamp_min(0)]
        alive = live if rows is None else rows > 0
        judge.add(Place(b.name, 0, None, b.stages, name), twin, value.to(spec.dtype), true[name], alive)
        for image in (untouched, staged):
            view = stream.views(image)[name]
            if rows is None:
                view.zero_()
            else:
                view[rows[rows > 0]] = 0
    judge.forbid(Place(b.name, 1, None, b.stages, "memory"), untouched != staged,
                 lambda byte: f"{where(stream, byte)} changed where it may not")  # fmt: skip
    judge.flush()
    bad = [f for f in judge.findings() if not f.ok]
    return f"{bad[0].place.tensor}: {bad[0].reasons[0]}" if bad else ""


def _evaluate(b, before: dict[str, Tensor], num) -> dict[str, Tensor]:
    """The law of a span: everything it writes; a state as the new rows of its index."""
    pool, made = dict(before), {}
    for name in b.stages:
        stage = STAGES[name]
        given = {n: pool[n] for n, s in stage.by_name.items() if s.role is not Role.OUTPUT and n in pool}
        values = stage.call(given, {k: b.attrs[k] for k in stage.attrs}, num)
        made |= values
        pool |= {n: v for n, v in values.items() if stage.by_name[n].role is Role.OUTPUT}
    return made


def _alone(b, made: Built, target: str, ran: Ran) -> str:
    """A row by itself against the same row of the batch, bit for bit."""
    if b.alone is None:
        return ""
    row, given = b.alone(tensors(b.name))
    single = b.kernel(sys.modules[made.kernel.entry.__module__], given)
    stream = Stream(single, given)
    got = stream.run(single, lower(single, [target])[0].ptx, "plain")
    slot = int(given["slots"][0])
    pairs = [(got.tensors["out"][0], ran.tensors["out"][row])]
    pairs += [(got.tensors[n][slot], ran.tensors[n][slot]) for n in ("conv", "recurrent")]
    same = all(torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)) for x, y in pairs)
    return got.fault or ("" if same else f"row {row} has other bits alone than in its batch")


def same_code(made: Built, clean: Built, target: str) -> bool:
    """Whether a mutant compiled to the clean kernel's PTX."""
    return body(made.builds[target]) == body(clean.builds[target])


def body(build: Build) -> str:
    """PTX without names, target and line numbers."""
    lines = build.ptx.replace(build.symbol, "kernel").splitlines()
    skipped = (".loc", ".file", ".target", ".version", "//")
    kept = (line.partition("//")[0].rstrip() for line in lines if not line.lstrip().startswith(skipped))
    return "\n".join(line for line in kept if line)
