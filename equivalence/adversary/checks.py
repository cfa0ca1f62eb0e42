"""What else may go wrong although every order is right: baked inputs, padding that leaks, slots of others, taken SMs.

Each check takes a runner (see `attack`) and returns a Verdict, equal, wrong or could not judge; None where the subject
has nothing of the kind.
"""

from typing import Protocol

import torch
from torch import Tensor

from .attack import Verdict
from .image import Image
from .subjects import Subject

FILL = 1.0  # finite contents of rows and slots that are NaN otherwise


class Replayer(Protocol):
    def plain(self, start: Tensor) -> Tensor: ...

    def replay(self, start: Tensor) -> Tensor: ...


def _first(image: Image, differs: Tensor) -> str:
    return image.locate(int(differs.nonzero()[0]))


def replay(made: Subject, other: Subject, image: Image, runner: Replayer, truth: Tensor) -> Verdict:
    """A graph captured on one set of inputs, replayed on another, must follow: the bits of a launch on the other."""
    changed = image.truth(other.values).to(truth.device)
    first, second = runner.plain(truth), runner.plain(changed)
    if torch.equal(first, second):
        return Verdict(made.name, "replay", "could not judge", text="both inputs give the same bits")
    for start, wanted, what in ((truth, first, "captured"), (changed, second, "changed"), (truth, first, "restored")):
        differs = runner.replay(start) != wanted
        if differs.any():
            return Verdict(made.name, "replay", "wrong", (_first(image, differs),), text=f"on the {what} inputs")
    return Verdict(made.name, "replay", "equal", runs=3)


def padding(made: Subject, image: Image, runner: Replayer, truth: Tensor) -> Verdict | None:
    """Rows that no request owns hold NaN, then numbers: every other bit must be the same."""
    if made.padding is None or not made.padding.any():
        return None
    rows = made.padding.nonzero()[:, 0].to(truth.device)
    inputs = [n for n in image.by_row(made.tokens) if n in made.values]
    beside = ~image.rows(made.tokens, rows)
    results = []
    for fill in (float("nan"), FILL):
        start = truth.clone()
        for name in inputs:
            image.view(start, name)[rows] = fill
        results.append(runner.plain(start))
    differs = (results[0] != results[1]) & beside
    if differs.any():
        where = _first(image, differs)
        return Verdict(made.name, "padding", "wrong", (where,), text=f"NaN in padding rows of {', '.join(inputs)}")
    return Verdict(made.name, "padding", "equal", runs=2, text=f"{len(rows)} of {made.tokens} rows")


def unowned(made: Subject, image: Image, runner: Replayer, truth: Tensor) -> Verdict | None:
    """Slots that no request owns, the null slot too, hold NaN, then numbers: they must keep those bits, and nothing
    else may change."""
    if not made.unowned:
        return None
    marks = torch.zeros_like(truth)
    for name, free in made.unowned.items():
        image.view(marks, name)[free.to(truth.device)] = 1
    mine = marks != 0
    results = []
    for fill in (float("nan"), FILL):
        start = truth.clone()
        for name, free in made.unowned.items():
            image.view(start, name)[free.to(truth.device)] = fill
        results.append(runner.plain(start))
        differs = (results[-1] != start) & mine
        if differs.any():
            return Verdict(made.name, "unowned", "wrong", (_first(image, differs),), text="an unowned slot was written")
    differs = (results[0] != results[1]) & ~mine
    if differs.any():
        return Verdict(made.name, "unowned", "wrong", (_first(image, differs),), text="an unowned slot was read")
    slots = sum(int(free.sum()) for free in made.unowned.values())
    return Verdict(made.name, "unowned", "equal", runs=2, text=f"{slots} slots of {', '.join(made.unowned)}")


def occupied(made: Subject, runner, expected: Tensor, sms: int) -> Verdict:
    """A late producer and the kernels while a neighbour on another stream holds half of the SMs, then all but one.

    Whether they end beside the neighbour is told, not judged: a cluster needs several free SMs. Raises Hang.
    """
    told = []
    for free in (sms // 2, 1):
        right, beside = runner.occupied(free, expected)
        if not right:
            return Verdict(made.name, "occupier", "wrong", text=f"with {free} free SMs")
        told.append(f"{free} free SMs: ended {'beside' if beside else 'after'} the neighbour")
    return Verdict(made.name, "occupier", "equal", runs=2, text="; ".join(told))
