"""Kimi K3 decode, twice: judge the twins against the law, and run them.

Exit codes: 0 equal (or fine), 1 disagreement, 2 could not judge. `k3 doctor` says what this machine can run.
"""

import os
import subprocess
import sys
from pathlib import Path

import typer

from .common import (
    DEVICE,
    DISAGREEMENT,
    EQUAL,
    JSON,
    UNJUDGED,
    OneLine,
    console,
    one_line,
    out,
    whole_numbers,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
# Plain help: markup would take "[@LAYERS]" for a tag, and its tables cut long words.
app = typer.Typer(
    cls=OneLine, add_completion=False, help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
MODEL = typer.Option(
    "mini",
    help="mini (trained, 13 layers), deep (93) and tiny (5) with random weights, or a folder in the published layout.",
)


def _prompts(default: str):
    told = f"Ids or kinds of golden/prompts/, comma separated (default: {default})."
    return typer.Option(None, "--prompts", help=told, callback=_named)


def _named(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise typer.BadParameter("no prompt is named; allowed are ids and kinds, or leave it out")
    return text


SHORTEST = "the shortest of each kind"


@app.command(short_help="Do the twins equal the reference on real prompts?")
def check(
    model: str = MODEL, prompts: str = _prompts(SHORTEST),
    tokens: int = typer.Option(None, min=1, help="Decoded tokens per prompt (default: what the machine can bear)."),
    swap: str = typer.Option("", help="Which implementation serves what: STAGE=IMPLEMENTATION[@LAYERS], ..."),
    fault: list[str] = typer.Option([], help="Inject a fault: NAME@LAYER (see equivalence/faults.py)."),
    follow: str = typer.Option("reference", help="Trajectory: reference (kernel error) or twin (errors accumulate)."),
    order: bool = typer.Option(True, help="Also prove the ordering of one kernel of each form for all targets."),
    require_twins: bool = typer.Option(False, help="Exit with 2 if the twins could not run here."),
    checkpoint: str = typer.Option(None, help="Go through this checkpoint folder layer by layer, whatever its size."),
    layers: str = typer.Option(None, help="With --checkpoint: FIRST-LAST, such as 0-11 (default: all)."),
    rank_shapes: str = typer.Option(None, help="With --checkpoint: judge what one rank holds, such as tp8."),
    rank: int = typer.Option(0, help="With --rank-shapes: which rank, from 0."),
    record: str = typer.Option(None, metavar="FILE", help="With --checkpoint: keep what leaves the last layer."),
    recorded: str = typer.Option(None, metavar="FILE", help="With --checkpoint: go on from such a file."),
    device: str = DEVICE, json: str = JSON,
):  # fmt: skip
    """Do the twins equal the reference on real prompts? One verdict, per layer and stage."""
    with one_line(json):
        options = dict(layers=layers, rank_shapes=rank_shapes, rank=rank or None, record=record, recorded=recorded)
        for name, file in (("record", record), ("recorded", recorded)):
            if file and json not in (None, "-") and os.path.realpath(json) == os.path.realpath(file):
                raise ValueError(f"--json {json} would replace the file of --{name}; name another file")
        if checkpoint is not None:
            result = _check_checkpoint(
                checkpoint, model, options, prompts, tokens, swap, fault, follow, order, device, require_twins
            )
        else:
            _only_with_checkpoint(options)
            from .check import run

            result = run(model, prompts, tokens, swap, fault, follow, order, device, require_twins)
        write_json(result.as_dict(), json)
    raise typer.Exit(result.exit_code)


def _check_checkpoint(checkpoint: str, model: str, options: dict, *rest):
    if model != "mini":
        raise ValueError(f"check takes either --checkpoint or --model, not {checkpoint!r} and {model!r}")
    from .check_checkpoint import run

    return run(checkpoint, *(options | dict(rank=options["rank"] or 0)).values(), *rest)


def _only_with_checkpoint(options: dict) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: allowed only with --checkpoint")


@app.command(short_help="Which layer and stage makes a model run leave the reference?")
def bisect(
    model: str = MODEL, prompts: str = _prompts(f"agent, math; without a GPU {SHORTEST}; the first 8 are taken"),
    steps: int = typer.Option(None, min=1, help="Decoded tokens per run (default: 32; without a GPU 8)."),
    on: str = typer.Option("outputs", help="What is watched: outputs or state."),
    swap: str = typer.Option("", help="The serving under suspicion: STAGE=IMPLEMENTATION[@LAYERS], ..."),
    fault: list[str] = typer.Option([], help="Inject a fault: NAME@LAYER (see equivalence/faults.py)."),
    device: str = DEVICE, json: str = JSON,
):  # fmt: skip
    """Which layer and stage makes a model run leave the reference? Finds it by swapping twins; without a GPU these run
    in the PTX interpreter."""
    with one_line(json):
        from . import bisect as command

        found = command.run(model, prompts, steps, on, swap, fault, device)
        write_json(found.as_dict(), json)
    raise typer.Exit({"equal": EQUAL, "disagreement": DISAGREEMENT}.get(found.verdict, UNJUDGED))


@app.command()
def order(
    kernel: str = typer.Option("", help="Only kernels whose name contains this."),
    target: list[str] = typer.Option([], help="sm_90a, sm_100a, sm_103a (default: all three)."),
    scope: str = typer.Option("batch1", help="forms: one kernel of each; batch1: also all of one request; all."),
    score: bool = typer.Option(
        False, "--score", help="Judge known mutants (--kernel: part of their names) instead; what is caught?"
    ),
    schedules: int = typer.Option(240, min=1, help="With --score: runs of the clean kernels."),
    toolchain: list[str] = typer.Option([], help="Prove with the CuTe DSL in this folder, too; repeatable."),
    fresh: bool = typer.Option(False, "--fresh", help="Compile all kernels now, without the cache of builds."),
    json: str = JSON,
):  # fmt: skip
    """Prove for every kernel and target that no load or store is reachable before the wait it depends on. No GPU."""
    with one_line(json):
        if fresh and (score or toolchain):
            raise ValueError("--fresh goes with neither --score nor --toolchain; allowed is K3_CACHE=off")
    if score or toolchain:
        from . import score as command

        raise typer.Exit(command.main(kernel, target, scope, score, schedules, toolchain, json))
    with one_line(json):
        from . import order as command

        result = command.run(kernel, target, scope, fresh)
        write_json(result.as_dict() if json else {}, json)  # seconds, over all kernels
    raise typer.Exit(result.exit_code)


@app.command(short_help="Attack kernels on this GPU: late producers, hostile memory.")
def adversary(
    part: str = typer.Option("table,watchdog,kernels,crossval", help="What is judged: some of these, comma separated."),
    kernel: str = typer.Option("", help="Only kernels whose name contains this."),
    batch: str = typer.Option("1,3,64", help="Batch sizes, 1 to 64."),
    repeats: int = typer.Option(20, min=1, help="Attacks of each poison and stall."),
    stall: list[int] = typer.Option([0, 2, 10, 100, 1000], min=0, help="Stalls of the producer, in us; repeatable."),
    json: str = JSON,
):  # fmt: skip
    """Attack kernels on this GPU: late producers, hostile memory, a busy neighbour; and compare the interpreter."""
    with one_line(json):
        from . import adversary as command

        result = command.run(
            [p.strip() for p in part.split(",")], whole_numbers(batch, "batch"), kernel, repeats, stall
        )
        write_json(result.as_dict(), json)
    raise typer.Exit(result.exit_code)


@app.command()
def generate(
    prompt: str = typer.Option(None, help="Text to go on from."),
    prompt_id: str = typer.Option(None, help="A prompt of golden/prompts/ instead, by its id."),
    tokens: int = typer.Option(256, min=1, help="Generated tokens, at most."), model: str = MODEL, device: str = DEVICE,
    backend: str = typer.Option("latency_specialized", help="latency_specialized or reference."),
    swap: list[str] = typer.Option(
        [], help="[TOKEN:]STAGE=IMPLEMENTATION[@LAYERS]; from that token (from 0) on; repeatable."
    ),
    temperature: float = typer.Option(0.0, help="0: the likeliest token."),
    top_k: int = typer.Option(0, help="Draw from this many tokens; 0: from all."),
    top_p: float = typer.Option(1.0, help="Draw from the likeliest that have this probability together."),
    seed: int = typer.Option(0, help="Of the draws."),
    explain: bool = typer.Option(False, help="Say afterwards who served each stage of the last step, and why."),
    json: str = JSON,
):  # fmt: skip
    """Generate text, swapping implementations between tokens."""
    with one_line(json):
        from . import generate as command

        result = command.run(
            prompt, prompt_id, tokens, model, device, backend, swap, (temperature, top_k, top_p, seed), explain,
            quiet=json == "-",
        )  # fmt: skip
        write_json(result, json)


@app.command(short_help="Our twins, their peers and the memory floor, on this GPU.")
def bench(
    stage: str = typer.Option("", help="Only stages whose name contains this."),
    tokens: str = typer.Option("1,2,4,8,16,32,64", help="Batch sizes, 1 to 64."),
    save: bool = typer.Option(True, help="Write the rows to tools/bench/results/."), json: str = JSON,
):  # fmt: skip
    """Our twins, their peers and the memory floor, side by side on this GPU."""
    with one_line(json):
        from .bench import run

        result = run(stage, whole_numbers(tokens, "tokens"), save)
        write_json(result, json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context):
    """The unit tests (pytest tests/); further arguments go to pytest. 0: passed, 1: some failed, 2: none were run."""
    arguments = context.args or ["-n", "auto"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a worker per core already
    named = any((ROOT / a.partition("::")[0]).exists() and ("/" in a or a.endswith(".py")) for a in arguments)
    call = [sys.executable, "-m", "pytest", *([] if named else ["tests"]), *arguments]
    raise typer.Exit({0: EQUAL, 1: DISAGREEMENT}.get(subprocess.call(call, cwd=ROOT, env=environment), UNJUDGED))


@app.command(short_help="Write a checkpoint whose weights break kernels.")
def stand_in(
    folder: str = typer.Argument(help="A new or empty folder."),
    shape: str = typer.Option("short", help="short (13 layers), deep (93), rank (true widths of one of 8 ranks)."),
    statistics: str = typer.Option("all", help="all, none, or of outliers, decays, keys, queries, router, scales."),
    seed: int = typer.Option(0, min=0), json: str = JSON,
):  # fmt: skip
    """Write a checkpoint in the published layout whose weights have the statistics that break kernels."""
    with one_line(json):
        from . import stand_in as command

        result = command.run(folder, shape, statistics, seed)
        write_json(result, json)


@app.command(short_help="What the law makes of fixed prompts, against the record.")
def traces(write: bool = typer.Option(False, help="Keep what the law makes now."), json: str = JSON):
    """What the law makes of fixed prompts, against the recorded traces: 0 the same, 1 changed."""
    with one_line(json):
        from .traces import main

        code = main(write, json)
    raise typer.Exit(code)


@app.command()
def doctor(json: str = JSON):
    """What this machine can run, and what is missing."""
    with one_line(json):
        from .doctor import render, report

        found = report()
        if json != "-":
            out.print(render(found), markup=False)
        write_json(found, json)
    raise typer.Exit(found["exit"])


__all__ = ["app", "console"]

if __name__ == "__main__":
    app(prog_name="k3")
