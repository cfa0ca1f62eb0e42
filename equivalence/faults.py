"""Named faults: twins broken on purpose, made from the true kernel's source by a small edit.

They show that lockstep and bisection find what they are for. A fault serves the layers that a selection gives it:
"kda.decode=fault:kda.decay_sign@6".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from fast.selection import Fast, Rule, Selection
from reference.stage import ContractError, Twin

from .order.mutate import mutant


@dataclass(frozen=True)
class Fault:
    """A broken copy of a twin. module: file stem in fast/; twin: the attribute holding it; edits: (old, new) texts."""

    name: str
    module: str
    twin: str
    edits: tuple[tuple[str, str], ...]
    text: str

    def implementation(self) -> Fast:
        """The broken twin, under the name "fault:..."; the registered one is left alone."""
        copy = mutant(import_module(f"fast.{self.module}"), self.edits)
        twin: Twin = getattr(copy, self.twin)
        return Fast(replace(twin, name=f"fault:{self.name}"))


FAULTS = {
    f.name: f
    for f in (
        Fault(
            "kda.decay_sign", "kda", "kda_decode",
            (("exp_near_zero(law.FLOOR * sigmoid(", "cute.math.exp(-law.FLOOR * sigmoid("),),
            "the log-decay has the wrong sign",
        ),
        Fault(
            "kda.beta", "kda", "kda_decode",
            (("u = beta * (shared[V, v]", "u = (shared[V, v]"),),
            "the delta rule forgets beta",
        ),
        Fault(
            "kda.gate", "kda", "kda_decode",
            (("* norm_w[i] * sigmoid(gate[i].to(Float32))", "* norm_w[i] * silu(gate[i].to(Float32))"),),
            "the output gate is a SiLU instead of a sigmoid",
        ),
        Fault(
            "kda.window", "kda", "kda_decode",
            (("window[None, j + 1])", "window[None, j])"),),
            "the convolution window does not move on (seen from the next token on)",
        ),
    )
}  # fmt: skip


def inject(specs: Sequence[str], selection: Selection) -> tuple[Selection, dict[str, Fast]]:
    """Read "NAME@LAYER[-LAYER]" and serve those layers by the fault: (selection, implementations by name).

    Raises ContractError for an unknown fault.
    """
    extra: dict[str, Fast] = {}
    for spec in specs:
        name, _, layers = spec.partition("@")
        if name not in FAULTS:
            raise ContractError(f"fault {name!r}: allowed are {', '.join(FAULTS)}")
        made = FAULTS[name].implementation()
        extra[made.name] = made
        span = Selection.parse(f"*={made.name}{'@' + layers if layers else ''}").rules[0]
        rules = tuple(Rule(stage, made.name, span.layers) for spanned in made.spans for stage in spanned)
        selection = Selection((*selection.rules, *rules))
    return selection, extra
