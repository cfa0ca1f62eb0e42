"""What a mutant is: one small edit of a true kernel, the fault it makes, and who should see it."""

from dataclasses import dataclass

from equivalence.order import TARGETS

ORDERING, HOISTED, STATE, QUALITY = "ordering", "hoisted load", "state", "quality"
FAMILIES = (ORDERING, HOISTED, STATE, QUALITY)

STATIC = "static"  # the order proof of PTX and SASS
RACES = "races"  # the happens-before detector of the interpreter
VALUES = "values"  # results of the interpreter's worst order against those of the clean kernel in plain order
LAW = "law"  # results in plain order against the law
CHECKERS = (STATIC, RACES, VALUES, LAW)
OWN = "own"


@dataclass(frozen=True)
class Mutant:
    """A named edit. name: "base: what was done".

    family: of FAMILIES. catalog: the public fault it repeats ("M4": one warp role without its wait), or "own".
    base: the kernel that is broken, of `scenes.BASES`. edits: (old, new) texts for `equivalence.order.mutate`.
    expected: the checkers that see it today; a test holds them to it. targets: where it is a fault.
    findings: for the pattern kernels, exactly what the order proof finds: (rule, tensor), quality in brackets.
    """

    name: str
    family: str
    catalog: str
    edits: tuple[tuple[str, str], ...]
    expected: frozenset[str]
    text: str
    targets: tuple[str, ...] = TARGETS
    findings: frozenset[tuple[str, str]] | None = None

    def __post_init__(self):
        if self.family not in FAMILIES or not self.expected <= set(CHECKERS) or ": " not in self.name:
            raise ValueError(f"mutant {self.name!r}: family {self.family!r}, expected {sorted(self.expected)}")

    @property
    def base(self) -> str:
        return self.name.partition(": ")[0]


def made(family: str, catalog: str, name: str, edits, expected: str, text: str, **more) -> Mutant:
    """A Mutant from handwritten parts; expected: names of checkers, separated by spaces."""
    return Mutant(name, family, catalog, tuple(map(tuple, edits)), frozenset(expected.split()), text, **more)
