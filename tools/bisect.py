"""`k3 bisect`: search for the first (layer, stage) that makes a model run leave the reference."""

from equivalence.bisect import Bisection, bisect

from .common import console, out, serving
from .common import device as named_device
from .common import prompts as named_prompts

DEFAULT = ("agent", "math")


def run(model: str, prompts: str | None, steps: int, on: str, swap: str, faults: list[str], device: str) -> Bisection:
    from equivalence.cases import load_model

    where = named_device(device)
    loaded, _ = load_model(model, str(where))
    chosen = named_prompts(prompts, DEFAULT)[:8]
    selection, extra = serving(swap, faults, loaded.config)
    with console.status("bisecting") as status:
        found = bisect(
            loaded, [p.tokens(loaded.config) for p in chosen], steps=steps, on=on, selection=selection, extra=extra,
            device=where, progress=lambda text: status.update(f"model run: {text}"),
        )  # fmt: skip
    for r in found.runs:
        out.print(f"{'bad ' if r.bad else 'good'} {r.ratio:10.3g} x the reference's own error   {r.served}")
    out.print(f"{found.verdict}: {found.text} ({found.model_runs} model runs for {found.units} units)")
    return found
