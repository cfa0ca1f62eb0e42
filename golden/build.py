"""Deterministic text for long contexts: grammar-made prose, logs and code, with needles at stated depths.

Everything follows from the seed through `random.Random.random()`, whose sequence Python keeps across versions.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .grammar import GRAMMAR, PLACES

_SYMBOL = re.compile(r"\{(\w+)\}")
DEPTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Needle:
    """A fact hidden in a context.

    depth: share of the filler text that stands before it, 0..1. offset: byte where its line begins; as a token index,
    bos included, offset + 1. line: its text. question, answer: what is asked for at the end, and the expected bytes.
    """

    depth: float
    offset: int
    line: str
    question: str
    answer: str


class Source:
    """A stream of choices from one seed; the same on every machine and Python."""

    def __init__(self, label: str):
        self._random = random.Random(label).random
        self.bound: dict[str, str] = {}  # rules that have one fixed expansion for now

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def pick(self, options: Sequence):
        return options[self.below(len(options))]

    def sample(self, options: Sequence, n: int) -> list:
        """n different options, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(n)]

    def expand(self, symbol: str) -> str:
        """One sentence of the grammar. `{d4}` is a number of four digits, `{x7}` seven hexadecimal digits."""
        return _SYMBOL.sub(lambda m: self._symbol(m[1]), self.pick(GRAMMAR[symbol]))

    def _symbol(self, name: str) -> str:
        if name in self.bound:
            return self.bound[name]
        if name in GRAMMAR:
            return self.expand(name)
        digits = "0123456789abcdef" if name[0] == "x" else "0123456789"
        first = self.pick(digits[1:])
        return first + "".join(self.pick(digits) for _ in range(int(name[1:]) - 1))


def retrieval(size: int, seed: int) -> tuple[bytes, tuple[Needle, ...]]:
    """`size` bytes: prose, log lines and code about coastal stations; nine of them have a code to be found."""
    source = Source(f"retrieval/{seed}")
    places = source.sample(PLACES, len(DEPTHS))
    codes = [source.expand("code") for _ in places]
    facts = [
        (f"The release code of {place} is {code}.\n", f"What is the release code of {place}?", code)
        for place, code in zip(places, codes, strict=True)
    ]
    head = "These are the papers of the harbour office. Some stations have a release code. Remember each code.\n\n"
    tail = "\nAnswer from the papers above, one line for each question.\n" + _questions(facts) + "Answers:\n"
    return _assemble(head, _mixture(source), facts, DEPTHS, tail, size)


def agent(size: int, seed: int) -> tuple[bytes, tuple[Needle, ...]]:
    """`size` bytes: a coding transcript whose tool output is diffs, test logs, listings and stack traces."""
    source = Source(f"agent/{seed}")
    depths = (0.0, 0.5, 1.0)
    builds = source.sample(range(1000, 10000), len(depths))
    names = [source.expand("artifact") for _ in depths]
    facts = [
        (f"ci: build {build} stored its artifact as {name}\n", f"Under which name did build {build} store it?", name)
        for build, name in zip(builds, names, strict=True)
    ]
    head = source.expand("agent_head") + "\n\n"
    ask = "\n[output cut]\n\nuser: Before we go on, from the output above:\n"
    tail = ask + _questions(facts) + "\nassistant:"
    return _assemble(head, _rounds(source), facts, depths, tail, size)


def repeat(size: int, seed: int) -> tuple[bytes, tuple[Needle, ...]]:
    """`size` bytes: one block of 384 bytes over and over; in the middle, one line that stands nowhere else."""
    source = Source(f"repeat/{seed}")
    block, _ = _fill(_mixture(source), 384)
    code = source.expand("code")
    facts = [(f"This copy differs: its mark is {code}.\n", "What is the mark of the copy that differs?", code)]
    tail = "\nThe same block stands above many times.\n" + _questions(facts) + "Answer: "

    def copies() -> Iterator[str]:
        while True:
            yield block

    return _assemble("", copies(), facts, (0.5,), tail, size)


BUILDERS: dict[str, Callable[[int, int], tuple[bytes, tuple[Needle, ...]]]] = {
    "retrieval": retrieval,
    "agent": agent,
    "repeat": repeat,
}


def _assemble(head, units: Iterator[str], facts, depths: Sequence[float], tail: str, size: int):
    """Head, filler with the facts at their depths, tail: exactly `size` ASCII bytes, and the needles."""
    filler = size - len(head) - len(tail) - sum(len(line) for line, _, _ in facts)
    if filler < len(facts):
        raise ValueError(f"{size} bytes hold no filler beside the {len(facts)} needles and their questions")
    text, needles, done, rest = head, [], 0, ""
    for depth, (line, question, answer) in zip(depths, facts, strict=True):
        upto = round(depth * filler)
        piece, rest = _fill(units, upto - done, rest)
        text, done = text + piece, upto
        needles.append(Needle(depth, len(text), line.rstrip("\n"), question, answer))
        text += line
    piece, _ = _fill(units, filler - done, rest)
    return (text + piece + tail).encode("ascii"), tuple(needles)


def _fill(units: Iterator[str], size: int, rest: str = "") -> tuple[str, str]:
    """Exactly `size` characters of units, the last a newline; and what was left over of the last unit.

    The piece is cut at the last line end or blank that fits, and padded with dots, so that no word is torn.
    """
    if size == 0:
        return "", rest
    parts, have = [rest], len(rest)
    while have < size:
        parts.append(next(units))
        have += len(parts[-1])
    text = "".join(parts)
    cut = max(text.rfind("\n", 0, size), text.rfind(" ", 0, size))
    kept = text[:cut] if cut >= 0 else ""
    return kept + "." * (size - 1 - len(kept)) + "\n", text[cut + 1 :]


def _questions(facts) -> str:
    return "".join(f"{i}. {question}\n" for i, (_, question, _) in enumerate(facts, 1))


def _mixture(source: Source) -> Iterator[str]:
    """Paragraphs of prose, then a run of log lines, a table or a piece of code, without end."""
    while True:
        for _ in range(2 + source.below(3)):
            yield " ".join(source.expand("prose") for _ in range(3 + source.below(4))) + "\n"
        shape = source.pick(("log", "log", "row", "code_block", "letter"))
        for _ in range(1 if shape in ("code_block", "letter") else 4 + source.below(8)):
            yield source.expand(shape) + "\n"
        yield "\n"


def _rounds(source: Source) -> Iterator[str]:
    """Turns of a coding transcript without end: a thought, a command, its output, now and then a word of the user."""
    while True:
        source.bound = {"module": source.pick(GRAMMAR["module"])}
        source.bound["file"] = source.expand("file")
        if source.below(5) == 0:
            yield f"user: {source.expand('wish')}\n\n"
        yield f"assistant: {source.expand('thought')}\n\n"
        tool = source.pick(("tests", "diff", "listing", "trace", "build_log", "search"))
        yield f"tool: $ {source.expand(tool + '_command')}\n"
        for _ in range(1 if tool == "trace" else 5 + source.below(14)):
            yield source.expand(tool) + "\n"
        yield source.expand(tool + "_end") + "\n\n"
