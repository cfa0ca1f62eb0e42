"""The attack and its verdict, for any runner: a GPU (`gpu`), or the interpreter in the tests.

A run: outputs and some produced tensors are poisoned; a producer lets the kernel start, stalls, and stores the true
values last, with poison of its own in the outputs. Only a kernel that neither loads nor stores before its wait ends
with the right bits everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from reference.stage import Role

from .image import LATE, Image
from .subjects import Subject

STALLS_US = (0, 2, 10, 100, 1000)
REPEATS = 20
CONFIDENCE = 0.95
ALL = "all"


class Hang(RuntimeError):
    """A launch has not ended before its deadline. Nothing more can be asked of this process's device."""


@dataclass(frozen=True)
class Trial:
    """runs: attempts; wrong: those with a wrong bit; where: the tensor of the first of them; late: it held LATE."""

    runs: int
    wrong: int = 0
    where: str = ""
    late: bool = False


class Runner(Protocol):
    """Runs one subject's kernels on words laid out by an Image. All words are CPU or device tensors of int32."""

    def plain(self, start: Tensor) -> Tensor:
        """The words after the kernels alone, with nothing unfinished before them."""

    def late(self, start: Tensor, stall_us: float, runs: int, expected: Tensor) -> Trial:
        """Attack `runs` times: words `start`, then the stalled producer of the truth, then the kernels. Raises Hang."""


def rate_bound(runs: int, confidence: float = CONFIDENCE) -> float:
    """The failure rate that `runs` runs without a failure exclude: (1 - rate)^runs = 1 - confidence, about 3 / runs."""
    return 1.0 if runs < 1 else 1 - (1 - confidence) ** (1 / runs)


@dataclass
class Verdict:
    """verdict: equal, stale, early store, wrong, hang, fault or could not judge. tensors: stale or stored early.

    real: stalls in us at which the overlap was shown. runs: attacks at those, each with another poison or repeat.
    """

    subject: str
    check: str
    verdict: str
    tensors: tuple[str, ...] = ()
    runs: int = 0
    real: tuple[float, ...] = ()
    text: str = ""
    counts: dict = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """Failure rate excluded at CONFIDENCE, if equal."""
        return rate_bound(self.runs)

    def as_dict(self) -> dict:
        return {**vars(self), "bound": self.bound, "confidence": CONFIDENCE}


def baseline(made: Subject, image: Image, runner: Runner, truth: Tensor) -> Tensor | str:
    """The right words, from a run with nothing to race with; or what is wrong with them: an output not fully written
    or not finite, or two runs that differ."""
    expected = runner.plain(truth)
    for name in image.names(Role.OUTPUT):
        if not (out := image.view(expected, name)).isfinite().all():
            late = bool((image.region(expected, name) == LATE).any())
            where = out.isfinite().logical_not().nonzero()[0].tolist()
            return f"{name} is {'not written' if late else 'not finite'} at {where} with nothing to race with"
    again = runner.plain(truth)
    return expected if bool((again == expected).all()) else "two runs with nothing to race with differ"


def attack(
    made: Subject, image: Image, runner: Runner, truth: Tensor, expected: Tensor,
    stalls: Sequence[float] = STALLS_US, repeats: int = REPEATS, targets: Sequence[tuple[str, ...]] | None = None,
) -> dict[float, dict[str, Trial]]:  # fmt: skip
    """Trials by stall and by what was stale: "" (outputs alone), each produced tensor alone, ALL."""
    produced = image.produced
    if targets is None:
        targets = [(), *((name,) for name in produced), *([produced] if len(produced) > 1 else [])]
    found: dict[float, dict[str, Trial]] = {}
    for stale in targets:
        start = image.start(truth, stale, made.wrong)
        key = ALL if len(stale) > 1 else "".join(stale)
        for stall in stalls:
            found.setdefault(stall, {})[key] = runner.late(start, stall, repeats, expected)
    return found


def judge(
    name: str, trials: dict[float, dict[str, Trial]], real: Sequence[float], off: Sequence[Trial], why: str
) -> Verdict:
    """The verdict. real: stalls whose overlap was shown; off: trials without PDL; why: how the overlap was shown."""
    counts = {stall: {key: t.wrong for key, t in some.items()} for stall, some in trials.items()}
    made = Verdict(name, "attack", "equal", real=tuple(real), text=why, counts=counts)
    every = [(key, t) for some in trials.values() for key, t in some.items()]
    made.runs = sum(t.runs for stall in real for t in trials[stall].values())
    alone = sorted({key for key, t in every if t.wrong and key not in ("", ALL)})
    early = sorted({t.where for key, t in every if t.wrong and key == ""})
    if broken := [t for t in off if t.wrong]:
        made.verdict, made.tensors = "wrong", (broken[0].where,)
        made.text = f"{broken[0].wrong} of {broken[0].runs} runs wrong without PDL: no question of order. {why}"
    elif early:
        late = any(t.late for key, t in every if key == "" and t.wrong)
        made.verdict, made.tensors = ("early store" if late else "wrong"), tuple(early)
    elif alone or any(t.wrong for _, t in every):
        made.verdict, made.tensors = "stale", tuple(alone) or (ALL,)
    elif not real:
        made.verdict = "could not judge"
        made.text = f"no stall was shown to overlap. {why}"
    return made
