"""`k3 check --checkpoint`: a checkpoint of any size, layer by layer, law against twins on one device.

On a GPU the twins are judged. Without one, each stage of the law in its two rounding modes is held against float64, and
the twins' PTX is interpreted; the report says what did not run. Everywhere the law's prefill is held against its decode
steps: the state that decoding starts from comes from it. `--record` leaves the hidden states behind the last
layer in a file, from which `--recorded` goes on, so that a checkpoint can be gone through in pieces.
"""

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from equivalence import recording
from equivalence.law_twin import every_stage, served_by
from equivalence.recording import Hidden
from equivalence.report import Result, progress_bar
from equivalence.rounding import budget_excess
from equivalence.simt import TARGET, compiler, interpreted
from equivalence.streamed import AGREEING, Serving, piece_plan, pieces, stream
from reference.checkpoint import Checkpoint
from reference.config import Config
from reference.layout import layer_table
from reference.moe import GATHER_ELEMENTS
from reference.numerics import fused, unfused
from reference.shard import Mesh, rank_config
from reference.stage import ContractError

from . import check
from .check import Checked, Part
from .common import check_target, console, out, serving
from .common import device as named_device
from .common import prompts as named_prompts
from .doctor import free_memory
from .tokenizer import tokenizer

TOKENS = {"cuda": 64, "cpu": 4}
CONTEXT = {"cuda": 512, "cpu": 24}  # tokens of a prompt that are prefilled, at most
PROMPTS = {"cuda": 11, "cpu": 3}
MODES = (fused, unfused)


def run(
    folder: str, layers: str | None, rank_shapes: str | None, rank: int, record: str | None, recorded: str | None,
    prompts: str | None, tokens: int | None, swap: str, faults: Sequence[str], follow: str, order: bool, device: str,
    require_twins: bool,
) -> Checked:  # fmt: skip
    """Judge layers of a checkpoint folder. Every refusal comes before the first weight is read."""
    from equivalence.lockstep import FOLLOW

    if follow not in FOLLOW:
        raise ValueError(f"follow {follow!r}: allowed are {', '.join(FOLLOW)}")
    where, checkpoint = named_device(device), Checkpoint(folder)
    config = checkpoint.config
    mesh = parse_mesh(rank_shapes, rank)
    first, last = parse_layers(layers, config)
    seat = mesh and mesh.at(rank)
    steps = [s for piece in pieces(config, first, last) for s in piece_plan(config, 1, piece, seat=seat).steps]
    chosen = serving(swap, faults, rank_config(config, mesh) if mesh else config, steps)
    if record:
        _check_record(record, last, config)
    hidden, told = _begin(checkpoint, recorded, prompts, tokens, where.type)
    if hidden.layer > first:
        text = f"{recorded}: its hidden states enter layer {hidden.layer}; allowed is at most the first one judged"
        raise ContractError(f"{text}, {first}")
    alone = _span(hidden.layer, first - 1) if hidden.layer < first else None
    if alone:
        told += f"; layer{'s' * ('-' in alone)} {alone} by the law alone, not judged"
    servings, extra_parts = _servings(where, faults, *chosen)
    check_memory(config, rank_config(config, mesh) if mesh else config, (hidden.layer, last), len(hidden.tokens) + 1,
                 free_bytes(where), str(where))  # fmt: skip
    gaps: dict[int, float] = {}
    with progress_bar(console) as progress:
        left = stream(checkpoint, hidden, first, last, servings, where, mesh=mesh, rank=rank, follow=follow, gaps=gaps,
                      progress=progress)  # fmt: skip
    if record:
        recording.write(record, left, checkpoint)
    named = torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)
    about = dict(mode=f"layer by layer, {follow} leads", model=config.name, weights=f"checkpoint {Path(folder).name}",
                 layers=_span(first, last), shapes=f"rank {rank} of {mesh.tp}" if mesh else "whole",
                 rows=len(hidden.tokens) + 1, requests=len(hidden.tokens), tokens=hidden.decoded,
                 device=named) | (dict(law_alone=alone) if alone else {})  # fmt: skip
    parts = [_part(s, s.result(about), about, told) for s in servings] + extra_parts
    if gaps:
        parts.append(_prefill(gaps, min(AGREEING, max(map(len, hidden.tokens)))))
    if where.type != "cuda":
        parts.append(check._not_run(where))
    if order:
        parts.append(check._order())
    checked = Checked(parts, require_twins)
    for part in parts:
        colour = {"equal": "green", "disagreement": "bold red"}.get(part.verdict, "yellow")
        out.print(f"{part.verdict:16s} {part.name}: {part.text}", style=colour, markup=False)
    if record:
        out.print(f"{record} holds the hidden states that enter layer {left.layer}", markup=False)
    return checked


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def parse_mesh(text: str | None, rank: int) -> Mesh | None:
    """ "tp8" -> the mesh of 8 ranks; None for None. Raises ValueError for anything else, and for a rank outside."""
    if text is None:
        if rank:
            raise ValueError(f"rank {rank} without --rank-shapes: allowed together with tp2, tp4, tp8, tp16")
        return None
    m = re.fullmatch(r"tp([0-9]{1,3})", text)
    if not m:
        raise ValueError(f"rank shapes {text!r}: allowed are tp1, tp2, tp4, tp8, tp16")
    mesh = Mesh(int(m[1]))
    mesh.at(rank)  # raises for a rank that is not there
    return mesh


def parse_layers(text: str | None, config: Config) -> tuple[int, int]:
    """ "0-11" or "5" -> first and last; None: all. Raises ValueError for other forms and layers that are not there."""
    if text is None:
        return 0, config.layers - 1
    m = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    if not m:
        raise ValueError(f"layers {text!r}: the form is FIRST-LAST, such as 0-11, or one layer")
    first, last = int(m[1]), int(m[2] or m[1])
    pieces(config, first, last)  # raises for layers that do not exist
    return first, last


def _check_record(file: str, last: int, config: Config) -> None:
    if last == config.layers - 1:
        raise ContractError(f"record {file}: nothing follows layer {last}, the last of {config.name}")
    recording.refuse_existing(file)
    check_target(file)


def free_bytes(where: torch.device) -> int:
    return torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else int(free_memory() * 2**30)


def check_memory(whole: Config, judged: Config, layers: tuple[int, int], rows: int, free: int, device: str) -> None:
    """Refuse what cannot fit: the weights of a layer, its widest matrix in float64 and float32, and the experts that
    the law dequantises at once. An estimate from the shapes; `rows` are decoded together. Raises MemoryError."""
    kinds = {(whole.is_mla(i), whole.is_dense(i)): i for i in range(layers[1], layers[0] - 1, -1)}
    for layer in sorted(kinds.values()):
        tables = [layer_table(config, layer) for config in {whole, judged}]
        held = sum(prod(shape) * dtype.itemsize for table in tables for shape, dtype in table.values())
        widest = max(prod(shape) for shape, dtype in layer_table(judged, layer).values() if dtype is not torch.uint8)
        experts = 0 if judged.is_dense(layer) else rows * judged.topk * 2 * judged.expert_inter * judged.latent
        need = held + 12 * widest + 20 * min(experts, GATHER_ELEMENTS)
        if need > free:
            gib = [f"{n / 2**30:.1f} GiB" for n in (need, free)]
            raise MemoryError(
                f"layer {layer} of {whole.name} needs about {gib[0]} on {device}, where {gib[1]} are free"
            )


def _begin(checkpoint, recorded, prompts, tokens, kind: str) -> tuple[Hidden, str]:
    """The hidden states to go on from, and a sentence about them."""
    if recorded:
        if prompts or tokens:
            raise ValueError("prompts and tokens come from the recording; --recorded excludes --prompts and --tokens")
        hidden = recording.read(recorded, checkpoint)
        sure = (
            "" if hidden.verified else f", whose layer {hidden.layer - 1} could not be compared: its shard is not here"
        )
        many = f"{len(hidden.tokens)} prompts, {hidden.decoded} decoded tokens of each"
        return hidden, f"{many}; hidden states of {recorded} entering layer {hidden.layer}{sure}"
    encode, name = tokenizer(checkpoint.folder, checkpoint.config)
    chosen = (named_prompts(prompts) if prompts else check._shortest_of_each_kind())[: PROMPTS[kind]]
    decoded = tokens or TOKENS[kind]
    fed = []
    for prompt in chosen:
        ids = encode(prompt.data)
        ids = ids * (-(-(decoded + 1) // len(ids)))  # a short prompt repeats itself
        fed.append(ids[: CONTEXT[kind] + decoded])
    hidden = Hidden.empty(checkpoint.config, fed, decoded, [p.id for p in chosen])
    return hidden, f"{len(fed)} prompts, {decoded} decoded tokens of each, tokens from {name}"


def _servings(where, faults, selection, extra) -> tuple[list[Serving], list[Part]]:
    """Who is judged here, and what cannot be."""
    if where.type == "cuda":
        return [Serving("twins", selection, extra)], []
    made = [Serving(f"reference, {num.mode} against exact", **served_by(*every_stage(num))) for num in MODES]
    if compiler():
        return [*made, Serving("interpreted twins", selection, interpreted(extra))], []
    return made, [check.no_compiler(faults)]


def _prefill(gaps: dict[int, float], tokens: int) -> Part:
    """The law's prefill against its decode steps, in float64, as `check.run` says it of a whole model."""
    layer, worst = max(gaps.items(), key=lambda item: item[1])
    text = f"attention of {len(gaps)} layer{'s' * (len(gaps) > 1)} over {tokens} tokens of a prompt: output and state "
    text += f"differ by {worst:.1e} at most, in layer {layer}, in float64 (allowed {check.AGREE:.0e})"
    details = dict(gaps={str(layer): gap for layer, gap in gaps.items()}, tokens=tokens)
    return Part("reference, prefill against decode", "equal" if worst <= check.AGREE else "disagreement", text, details)


def _part(one: Serving, result: Result, about: dict, told: str) -> Part:
    mode = next((i for i, num in enumerate(MODES) if one.name.startswith(f"reference, {num.mode} ")), None)
    where = f"{about['model']} ({about['weights']}), layers {about['layers']}, {about['shapes']}; {told}"
    if mode is None:
        if one.name == "twins":
            result.print(out)
        how = f"; executed by the PTX interpreter, {TARGET} code, not on a GPU" if one.name != "twins" else ""
        return Part(one.name, result.verdict, f"{result.statement}; {where}{how}", result.as_dict())
    over = budget_excess(result, mode)
    judged = [f for f in result.findings if f.check == "value"]
    if result.hollow or not judged:
        verdict, text = "could not judge", f"nothing was compared of {(result.hollow or ['any tensor'])[0]}"
    elif over:
        key, excess = max(over.items(), key=lambda item: item[1])
        verdict, text = "disagreement", f"{key} is {excess:.3g} times over its rounding budget"
    else:
        verdict, text = "equal", f"{len(judged)} tensors of {result.judged} stages stay within their roundings"
    return Part(one.name, verdict, f"{text}; {where}", result.as_dict())
