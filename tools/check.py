"""`k3 check`: one verdict on real prompts. With a GPU the twins are judged; without one, all that can be judged is.

Every part says "equal", "disagreement" or "could not judge"; the whole says 1 if any part disagrees, 2 if nothing
was judged or a part could not be though this machine has what it needs (or twins are required and did not run), else 0.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch

from .common import DISAGREEMENT, EQUAL, UNJUDGED, console, out, serving
from .common import device as named_device
from .common import prompts as named_prompts
from .swaps import refuse_nowhere

ROWS = {"cuda": 16, "cpu": 12}
TOKENS = {"cuda": 256, "cpu": 8}
INTERPRETED = 48  # tokens of each of eleven prompts, one of a kind, that interpreted twins decode: 528 in all
AGREE = 1e-10  # float64 prefill against float64 decode: reassociation of sums of some thousand terms


@dataclass
class Part:
    """One thing that was judged, or was not and why. absent: this machine lacks what it needs, so that nothing is said
    about what would have been judged."""

    name: str
    verdict: str
    text: str
    details: dict = field(default_factory=dict)
    absent: bool = False


@dataclass
class Checked:
    parts: list[Part]
    require_twins: bool = False

    @property
    def exit_code(self) -> int:
        verdicts = [p.verdict for p in self.parts]
        if "disagreement" in verdicts:
            return DISAGREEMENT
        twins = [p.verdict for p in self.parts if p.name.startswith("twins")]
        if "equal" not in verdicts or any(p.verdict != "equal" and not p.absent for p in self.parts):
            return UNJUDGED
        if self.require_twins and set(twins) != {"equal"}:
            return UNJUDGED
        return EQUAL

    def as_dict(self) -> dict:
        return dict(exit_code=self.exit_code, parts=[vars(p) for p in self.parts])


def run(model, prompts, tokens, swap, faults, follow, order, device, require_twins=False) -> Checked:
    """Judge the twins (GPU) or the reference's modes (CPU) on prompts, prefill against decode, and the order proof."""
    from equivalence.cases import load_model
    from equivalence.lockstep import FOLLOW

    if follow not in FOLLOW:
        raise ValueError(f"follow {follow!r}: allowed are {', '.join(FOLLOW)}")
    where = named_device(device)
    config = load_model(model, str(where))[0].config
    refuse_nowhere(swap, faults, config)
    serving(swap, faults, config)
    interpreted, tokens = tokens or min(INTERPRETED, 624 // config.layers), tokens or TOKENS[where.type]
    chosen = named_prompts(prompts) if prompts else _shortest_of_each_kind()
    ids = [p.id for p in chosen]
    if where.type == "cuda":
        parts = _twins(model, ids, tokens, swap, faults, follow, where)
    else:
        with _beside(_interpreted, model, ids, interpreted, swap, faults, follow) as twins:
            parts = [*_modes(model, ids, tokens), _prefill(model, ids[:3]), twins(), _not_run(where)]
    if order:
        parts.append(_order())
    checked = Checked(parts, require_twins)
    for part in parts:
        colour = {"equal": "green", "disagreement": "bold red"}.get(part.verdict, "yellow")
        out.print(f"{part.verdict:16s} {part.name}: {part.text}", style=colour, markup=False)
    return checked


def _shortest_of_each_kind() -> list:
    from golden.prompts import load

    shortest = {}
    for p in sorted(load(), key=lambda p: (len(p.data), p.id)):
        shortest.setdefault(p.kind, p)
    return list(shortest.values())


def _groups(ids: list[str], rows: int) -> list[list[str]]:
    return [ids[i : i + rows - 1] for i in range(0, len(ids), rows - 1)]


@contextmanager
def _beside(work, *arguments) -> Iterator[Callable[[], Part]]:
    """Run `work` in a second process, on half of the processors; yields what waits for its result or its error.

    The caller has the other half meanwhile. If it fails, the second process ends with it; if that one ends without a
    result, as when memory runs out, what waits raises ChildProcessError.
    """
    before, half, context = torch.get_num_threads(), max(1, (os.cpu_count() or 1) // 2), get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, half, work, arguments), daemon=True)

    def result() -> Part:
        try:
            made = ours.recv()
        except EOFError:
            child.join()
            text = f"the process of {work.__name__} ended with {child.exitcode} and without a result"
            raise ChildProcessError(text) from None
        if isinstance(made, Exception):
            raise made
        return made

    child.start()
    theirs.close()  # the child has the only other end: the pipe ends with it
    try:
        torch.set_num_threads(half)
        yield result
    finally:
        torch.set_num_threads(before)
        child.terminate()
        child.join()


def _answer(pipe, threads: int, work, arguments) -> None:
    torch.set_num_threads(threads)
    try:
        made = work(*arguments)
    except Exception as error:
        error.add_note(traceback.format_exc())
        made = error
    pipe.send(made)


def _twins(model, ids, tokens, swap, faults, follow, where) -> list[Part]:
    from equivalence.cases import Case
    from equivalence.cases import run as run_case
    from equivalence.faults import inject
    from equivalence.report import progress_bar
    from fast.selection import Selection

    selection, extra = inject(faults, Selection.parse(swap))
    parts = []
    for group in _groups(ids, ROWS["cuda"]):
        case = Case("lockstep" if follow == "reference" else "accumulate", len(group) + 1, tuple(group), tokens)
        with progress_bar(console) as progress:
            result = run_case(case, model, str(where), selection=selection, extra=extra, progress=progress)
        result.print(out)
        parts.append(Part(f"twins, {len(group)} prompts", result.verdict, result.statement, result.as_dict()))
    return parts


def _modes(model, ids, tokens) -> list[Part]:
    """Each stage of the reference in its two rounding modes against float64, on the inputs of a real decode."""
    from equivalence.cases import Case
    from equivalence.cases import run as run_case
    from equivalence.law_twin import every_stage, served_by
    from equivalence.report import progress_bar
    from equivalence.rounding import budget_excess
    from reference.numerics import fused, unfused

    group, parts = _groups(ids, ROWS["cpu"])[0], []
    case = Case("lockstep", len(group) + 1, tuple(group), tokens)
    for which, num in enumerate((fused, unfused)):
        with progress_bar(console) as progress:
            result = run_case(case, model, **served_by(*every_stage(num)), progress=progress)
        over = budget_excess(result, which)
        judged = [f for f in result.findings if f.check == "value"]
        about = f"{result.about['model']} ({result.about['weights']}), {len(group)} prompts, {tokens} tokens"
        if result.hollow or not judged:
            verdict, text = (
                "could not judge",
                f"{about}: nothing was compared of {(result.hollow or ['any tensor'])[0]}",
            )
        elif over:
            key, excess = max(over.items(), key=lambda item: item[1])
            verdict, text = "disagreement", f"{about}: {key} is {excess:.3g} times over its rounding budget"
        else:
            text = f"{about}: {len(judged)} tensors of {result.judged} stages stay within their roundings of float64"
            verdict = "equal"
        parts.append(Part(f"reference, {num.mode} against exact", verdict, text, result.as_dict()))
    return parts


def _prefill(model, ids) -> Part:
    """Chunked prefill against token-by-token decode, in float64."""
    from equivalence.cases import load_model, make_state, prompt_tokens
    from reference.decoder import Decoder
    from reference.numerics import exact

    loaded, _ = load_model(model)
    worst, count, name = 0.0, 0, "reference, prefill against decode"
    for tokens in prompt_tokens(ids, loaded.config):
        tokens = (tokens * 24)[:24]
        one = Decoder(loaded, make_state(loaded.config, [len(tokens)], 1, "cpu").to(exact))
        two = Decoder(loaded, one.state.clone())
        want = one.prefill(one.state.open(), tokens).act["vocab_logits"]
        request = two.state.open()
        got = two.prefill(request, tokens[:1])
        for token in tokens[1:]:
            got = two.decode([request], [token])
        pairs = [(got.act["vocab_logits"], want)] + [(two.state.tensors[k], t) for k, t in one.state.tensors.items()]
        for a, b in pairs:
            if not (a.isfinite().all() and b.isfinite().all()):
                return Part(name, "could not judge", f"not finite in float64 after {len(tokens)} tokens")
            worst = max(worst, float((a - b).norm() / b.norm().clamp_min(1e-300)))
        count += len(tokens)
    text = f"logits and state of {count} tokens differ by {worst:.1e} in float64 (allowed {AGREE:.0e})"
    return Part(name, "equal" if worst <= AGREE else "disagreement", text)


def _interpreted(model, ids, tokens, swap, faults, follow) -> Part:
    """The twins' PTX, executed on the CPU, in lockstep with the law: nothing about a GPU's order or last bits."""
    from equivalence.cases import Case
    from equivalence.cases import run as run_case
    from equivalence.faults import inject
    from equivalence.simt import TARGET, compiler, interpreted
    from fast.selection import Selection

    name = "interpreted twins"
    if not compiler():
        return no_compiler(faults)
    selection, extra = inject(faults, Selection.parse(swap))
    group, start = _groups(ids, ROWS["cpu"])[0], time.monotonic()
    case = Case("lockstep" if follow == "reference" else "accumulate", len(group) + 1, tuple(group), tokens)
    result = run_case(case, model, selection=selection, extra=interpreted(extra))
    text = f"{result.statement}, {len(group)} prompts, {len(group) * tokens} decoded tokens, in "
    text += f"{time.monotonic() - start:.0f} s; executed by the PTX interpreter, {TARGET} code, not on a GPU"
    return Part(name, result.verdict, text, result.as_dict())


def no_compiler(faults) -> Part:
    """Injected faults are there to be found: where nothing can, that is no success."""
    text = "no C compiler on PATH for the PTX interpreter (cc, gcc or clang, or $CC)"
    return Part("interpreted twins", "could not judge", text, absent=not faults)


def _not_run(where: torch.device) -> Part:
    import fast
    from fast.selection import twins

    names = ", ".join(twins())
    text = f"{names} did not run on a GPU: they need a CUDA GPU of sm_90/sm_100/sm_103, and this run is on {where}"
    return Part("twins", "could not judge", text, dict(twins=list(twins()), package=fast.__name__), absent=True)


def _order() -> Part:
    from .order import run as prove

    start = time.monotonic()
    result = prove("", [], "forms")
    verdict = {EQUAL: "equal", DISAGREEMENT: "disagreement"}.get(result.exit_code, "could not judge")
    proved = sum(r.verdict == "proved" for r in result.reports)
    text = f"{proved} of {len(result.reports)} (kernel, target) pairs proved, one kernel of each form, in "
    text += f"{time.monotonic() - start:.0f} s"
    return Part("order of loads and waits", verdict, text, result.as_dict())
