"""`k3 bisect`: search for the first (layer, stage) that makes a model run leave the reference.

Without a GPU the twins' PTX runs in the interpreter, on fewer and shorter prompts.
"""

from equivalence.bisect import Bisection, bisect
from equivalence.simt import TARGET, compiler, interpreted
from fast.selection import Selection, divide, twins
from reference.plan import plan

from . import check
from .common import console, out, serving
from .common import device as named_device
from .common import prompts as named_prompts
from .swaps import refuse_nowhere

DEFAULT = ("agent", "math")
STEPS = {"cuda": 32, "cpu": 8}
MOST = 8  # prompts
NO_COMPILER = (
    "no CUDA GPU is used, and the PTX interpreter lacks a C compiler (cc, gcc or clang on PATH, or $CC); "
    "`k3 order` needs neither"
)


def run(
    model: str, prompts: str | None, steps: int | None, on: str, swap: str, faults: list[str], device: str
) -> Bisection:
    """Search on the device; on a CPU with interpreted twins. steps and prompts: None for what the device can bear."""
    from equivalence.cases import load_model

    where = named_device(device)
    loaded, _ = load_model(model, str(where))
    cpu, steps = where.type == "cpu", steps or STEPS[where.type]
    chosen = (check._shortest_of_each_kind() if cpu and not prompts else named_prompts(prompts, DEFAULT))[:MOST]
    refuse_nowhere(swap, faults, loaded.config)
    selection, extra = serving(swap, faults, loaded.config)
    how = f"; executed by the PTX interpreter, {TARGET} code, not on a GPU" if cpu else ""
    if cpu and not compiler():
        found = Bisection("could not judge", NO_COMPILER, 0, 0)
    else:
        extra = interpreted(extra) if cpu else extra
        with console.status("bisecting") as status:
            found = bisect(
                loaded, [p.tokens(loaded.config) for p in chosen], steps=steps, on=on, selection=selection,
                extra=extra, device=where, progress=lambda text: status.update(f"model run: {text}"),
            )  # fmt: skip
        if found.units:
            found.text += f"; {len(chosen)} prompts{how}"
        else:
            found.text += f": {why_none(loaded.config, len(chosen), selection, extra, where)}"
    for r in found.runs:
        out.print(f"{'bad ' if r.bad else 'good'} {r.ratio:10.3g} x the reference's own error   {r.served}")
    out.print(f"{found.verdict}: {found.text} ({found.model_runs} model runs for {found.units} units)", markup=False)
    return found


def why_none(config, rows: int, selection: Selection, extra, device) -> str:
    """Why the law serves what twins could."""
    units = divide(plan(config, rows), selection, twins() | dict(extra or {}), device)
    reasons = dict.fromkeys(u.reason for u in units if u.reason != "no twin")
    told = ["the rules give all to the reference" if r == "selected" else r for r in reasons] or ["no twin fits"]
    return "; ".join(told) + ("; --device cpu interprets the twins" if device.type == "cuda" else "")
