"""What `--swap` and `--fault` ask for, refused where no layer of the model could give it."""

import re
from collections.abc import Sequence

from equivalence.faults import FAULTS, inject
from fast.selection import Selection, nowhere, twins
from reference.config import Config
from reference.plan import plan
from reference.stage import ContractError


def refuse_nowhere(swap: str, faults: Sequence[str], config: Config) -> None:
    """Raises ContractError for a rule or fault whose layers lack its stage: what they are, and which have it."""
    for spec in faults:
        if not re.fullmatch(r"[^@]*(@[0-9]+(-[0-9]+)?)?", spec):
            raise ContractError(f"fault {spec!r}: the form is NAME[@LAYER[-LAYER]]; names are {', '.join(FAULTS)}")
    steps, selection = plan(config, 1).steps, _parsed(swap)
    known = twins() | inject(faults, Selection())[1]
    for rule in selection.rules:
        at = "" if rule.layers is None else "@" + "-".join(map(str, dict.fromkeys(rule.layers)))
        if why := nowhere(rule, known, steps):
            text = f"swap '{rule.target}={rule.implementation}{at}' matches nothing in {config.name}"
            raise ContractError(f"{text}, whose layers are 0-{config.layers - 1}: {why}")
    for spec in faults:
        injected, extra = inject([spec], Selection())
        whys = [nowhere(rule, twins() | extra, steps) for rule in injected.rules]
        if all(whys):
            text = f"fault {spec!r} matches no stage of {config.name}, whose layers are 0-{config.layers - 1}"
            raise ContractError(f"{text}: {whys[0]}")


def _parsed(swap: str) -> Selection:
    """The selection; of a fault in place of a swap the message says where it belongs."""
    try:
        return Selection.parse(swap)
    except ContractError as error:
        name = swap.partition("@")[0].strip()
        if name in FAULTS:
            raise ContractError(f"{error}; {name} is a fault, which check and bisect take as --fault {swap}") from None
        raise
