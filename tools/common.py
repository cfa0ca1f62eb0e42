"""What the subcommands share: exit codes, the model and prompts a user names, and JSON output."""

import json
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import typer
from rich.console import Console

EQUAL, DISAGREEMENT, UNJUDGED = 0, 1, 2
console = Console(stderr=True, highlight=False)
out = Console(highlight=False, soft_wrap=True)

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
    """Prompts by id or kind; None takes `default`, and an empty default all of them."""
    from golden.prompts import PromptError, load

    every = load()
    wanted = [n.strip() for n in names.split(",")] if names else list(default)
    chosen = [p for p in every if not wanted or p.id in wanted or p.kind in wanted]
    known = {p.id for p in every} | {p.kind for p in every}
    missing = [n for n in wanted if n not in known]
    if missing:
        raise PromptError(
            f"prompt {missing[0]!r}: allowed are ids and kinds ({', '.join(sorted({p.kind for p in every}))})"
        )
    return chosen


def write_json(result: dict, target: str | None) -> None:
    """JSON to a file or, for "-", to standard output."""
    if target is None:
        return
    text = json.dumps(result, indent=1, allow_nan=True, default=str)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


@contextmanager
def one_line():
    """A user's mistake or missing part ends in one line and exit code 2, a defect of ours in a traceback and 2."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        console.print(f"k3: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(UNJUDGED)
    except (Exception, KeyboardInterrupt):  # a crash is no verdict: Python's own exit code would say "disagreement"
        traceback.print_exc()
        sys.exit(UNJUDGED)
