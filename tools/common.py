"""What the subcommands share: exit codes, the model and prompts a user names, and JSON output."""

import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import typer
import typer.core
from rich.console import Console
from safetensors import SafetensorError

EQUAL, DISAGREEMENT, UNJUDGED = 0, 1, 2
console = Console(stderr=True, highlight=False)
out = Console(highlight=False, soft_wrap=True)

EXPECTED = (
    ValueError, NotImplementedError, OSError, ImportError, MemoryError, torch.OutOfMemoryError, SafetensorError,
)  # fmt: skip
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # of the RuntimeError that torch raises

MODEL = typer.Option("mini", help="mini, deep (random weights, 93 layers), or a folder in the published layout.")
JSON = typer.Option(None, "--json", metavar="FILE", help="Also write the result as JSON; - is standard output.")
DEVICE = typer.Option("auto", help="auto, cpu, cuda or cuda:N.")
PROMPTS = typer.Option(None, "--prompts", help="Prompt ids or kinds, comma separated (default: see the command).")


def device(name: str) -> torch.device:
    """The device a user names; auto takes the first GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r}: allowed are auto, cpu, cuda, cuda:N")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r}: allowed are auto, cpu, cuda, cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: no CUDA GPU is visible")
    return chosen


def prompts(names: str | None, default: Sequence[str] = ()):
    """Prompts by id (built ones too) or kind; None takes `default`, and an empty default all of them."""
    from golden.prompts import PromptError, get, load

    every = load()
    wanted = [n.strip() for n in names.split(",")] if names else list(default)
    chosen = [p for p in every if not wanted or p.id in wanted or p.kind in wanted]
    chosen += [get(n) for n in wanted if n.startswith("long-") and n not in {p.id for p in every}]
    known = {p.id for p in every} | {p.kind for p in every} | {p.id for p in chosen}
    missing = [n for n in wanted if n not in known]
    if missing:
        raise PromptError(
            f"prompt {missing[0]!r}: allowed are ids and kinds ({', '.join(sorted({p.kind for p in every}))})"
        )
    return chosen


def whole_numbers(text: str, name: str) -> list[int]:
    """ "1,2,64" as numbers from 1. Raises ValueError naming the option, the part and what is allowed."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) < 1:
            raise ValueError(f"{name} {text!r}: {part!r} is no whole number from 1; allowed are such, comma separated")
    return [int(part) for part in parts]


def serving(swap: str, faults: Sequence[str], config, steps: Sequence | None = None) -> tuple:
    """What `--swap` and `--fault` ask of a model: (Selection, implementations by name), as `faults.inject` gives them.

    steps: what is run (default: a whole decode step of `config`). Raises ContractError for a rule or fault that changes
    nothing in it.
    """
    from equivalence.faults import inject
    from fast.selection import Selection, twins
    from reference.plan import plan

    steps = plan(config, 1).steps if steps is None else steps
    selection, known = Selection.parse(swap), twins() | inject(faults, Selection())[1]
    check_swaps(selection, known, config, steps)
    for spec in faults:
        injected, extra = inject([spec], Selection())
        if not any(_matched(rule, extra, steps) for rule in injected.rules):
            raise ValueError(
                f"fault {spec!r} matches no stage of {config.name}, whose layers are 0-{config.layers - 1}"
            )
    return inject(faults, selection)


def check_swaps(selection, known: Mapping, config, steps: Sequence | None = None) -> None:
    """Refuse rules that change nothing in a decode step: no such stage there, or nothing that could serve it.

    Raises ContractError naming the rule and what exists.
    """
    from reference.plan import plan
    from reference.stage import TWINS, ContractError

    steps = plan(config, 1).steps if steps is None else steps
    for rule in selection.rules:
        found = _matched(rule, known, steps)
        at = "" if rule.layers is None else "@" + "-".join(map(str, dict.fromkeys(rule.layers)))
        text = f"swap '{rule.target}={rule.implementation}{at}'"
        if not found:
            first, last = rule.layers or (0, config.layers - 1)
            inside = (s.stage.name for s in steps if rule.layers is None or s.layer in range(first, last + 1))
            there = ", ".join(dict.fromkeys(inside)) or "nothing"
            raise ContractError(
                f"{text} matches nothing in {config.name}; layers are 0-{config.layers - 1}, there is {there}"
            )
        able = [rule.implementation] if rule.implementation in known else list(TWINS)
        serves = {stage for name in able for span in known[name].spans for stage in span}
        if rule.implementation != "reference" and not serves & found:
            raise ContractError(f"{text} changes nothing; {rule.implementation} serves {', '.join(sorted(serves))}")


def _matched(rule, known: Mapping, steps: Sequence) -> set[str]:
    """Stages of these steps that a rule covers."""
    from fast.selection import Selection

    Selection((rule,)).choose((), known)  # raises for an unknown target or implementation
    marked = Selection((replace(rule, implementation="reference"),))
    chosen = marked.choose(steps, known)
    return {s.stage.name for s, name in zip(steps, chosen, strict=True) if name == "reference"}


def check_target(target: str | None) -> None:
    """Refuse a file for JSON that cannot be written, before any work; leaves no trace. Raises OSError."""
    if target in (None, "-"):
        return
    path = Path(os.path.realpath(target))  # of a link that leads nowhere the target is tried, and the link kept
    if _direct(path):
        return  # opening it has effects
    if path.exists() or not path.parent.exists():
        with path.open("a"):
            pass
    try:
        with replacing(path) as work:
            work.touch(exist_ok=False)
            work.unlink()
    except OSError as error:
        text = f"{error.strerror}; a new file is written beside it first"
        raise type(error)(error.errno, text, str(path)) from None


def _direct(path: Path) -> bool:
    """A pipe or device cannot be replaced by a file: it is written to as it stands."""
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def replacing(target: str | Path) -> Iterator[Path]:
    """A file beside `target` that is to be written. At the end it takes the place of `target`, or if the work failed
    nothing has changed. A link keeps leading where it led. Raises OSError."""
    path = Path(os.path.realpath(target))
    if _direct(path):
        yield path
        return
    work = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        yield work
        if work.exists():
            if path.exists():
                shutil.copymode(path, work)
            os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def write_json(result: dict, target: str | None) -> None:
    """JSON to a file, which is replaced whole or not at all, or, for "-", to standard output. Numbers that JSON lacks
    become text."""
    if target is None:
        return
    text = json.dumps(_valid(result), indent=1, allow_nan=False, default=str)
    if target == "-":
        print(text)
    else:
        with replacing(target) as work:
            work.write_text(text + "\n")


def _valid(value):
    """The value with NaN and infinities as the report writes them."""
    if isinstance(value, dict):
        return {k: _valid(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        from equivalence.report import _finite

        return _finite(value)
    return value


def complain(error: object) -> None:
    """One line on standard error."""
    console.print(f"k3: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)


class OneLine(typer.core.TyperGroup):
    """The command group, whose usage errors are one line and exit code 2 like all others."""

    def main(self, args: Sequence[str] | None = None, *rest, standalone_mode: bool = True, **kwargs):
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(args, *rest, standalone_mode=False, **kwargs)
        except Exception as error:
            if not standalone_mode or not (hasattr(error, "format_message") or isinstance(error, typer.Abort)):
                raise
            complain(error.format_message() if hasattr(error, "format_message") else "aborted")
            sys.exit(UNJUDGED)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else EQUAL)
        return code


@contextmanager
def one_line(target: str | None = None):
    """A user's mistake or missing part ends in one line and exit code 2, a defect of ours in a traceback and 2.

    target: where JSON will go; refused at once if it cannot. Standard output is JSON's alone if that is "-": all else
    goes to standard error.
    """
    try:
        check_target(target)
        out.stderr = target == "-"
        yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, EXPECTED) or NO_MEMORY in str(error):
            complain(error)
        else:  # a crash is no verdict: Python's own exit code would say "disagreement"
            traceback.print_exc()
        sys.exit(UNJUDGED)
    finally:
        out.stderr = False
