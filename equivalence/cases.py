"""The run matrix: which prompts are decoded together, for how long, and in which mode.

All prompts are used. The shortest go into the widest batches and the longest into the narrowest, so that the exact
attention over padded block tables stays affordable. Every batch but the single row has null rows, in between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fast.kernel import device_arch
from fast.selection import Implementation, Selection
from golden import prompts as golden
from reference.checkpoint import Checkpoint
from reference.config import CONFIGS, Config, deep
from reference.decoder import Model
from reference.stage import ContractError
from reference.state import DecodeState, Request
from reference.weights import RandomCheckpoint, all_weights

from .free_running import FreeRunning
from .judge import Finding, Place
from .lockstep import Lockstep
from .report import Result

ROWS = (64, 33, 16, 8, 5, 3, 2, 1)
COVER = (64, 33, 3, 2, 1)
STEPS = 1024
PAGE = 16
ALIGN = 64  # bytes, as torch allocates on a CPU
MODES = ("lockstep", "accumulate", "free")
GOLDEN = Path(golden.FOLDER).parent
tiny = replace(deep, name="tiny", layers=5, mla_layers=(3, 4), block=4)  # every kind of layer, affordable on a CPU
SMALL = CONFIGS | {"tiny": tiny}


@dataclass(frozen=True)
class Case:
    """One run. mode: "lockstep" (every unit from the reference's values), "accumulate" (states drift apart),
    "free" (whole decoders). rows: of the batch; prompts: their ids, at most `rows`; steps: decoded tokens."""

    mode: str
    rows: int
    prompts: tuple[str, ...]
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.mode}-rows{self.rows}-requests{len(self.prompts)}-tokens{self.steps}"


def requests_in(rows: int) -> int:
    """How many requests share a batch of `rows`; the others are null rows."""
    return rows - (rows > 1) - (rows > 8) - (rows > 32)


def batches() -> dict[int, tuple[str, ...]]:
    """Prompt ids for each batch size. The sizes in `COVER` share out all prompts, shortest first; the others take
    prompts of all lengths again."""
    ids = [p.id for p in sorted(golden.load(), key=lambda p: (len(p.data), p.id))]
    out, at = {}, 0
    for rows in COVER:
        out[rows] = tuple(ids[at : at + requests_in(rows)])
        at += requests_in(rows)
    if at < len(ids) or not all(out.values()):
        raise ContractError(f"{len(ids)} prompts; batches of {COVER} rows have room for {at}, and none may be empty")
    for rows in sorted(set(ROWS) - set(COVER)):
        n = requests_in(rows)
        out[rows] = tuple(ids[i * len(ids) // n] for i in range(n))
    return out


def cases() -> list[Case]:
    """What a GPU runs: every batch size in lockstep, some with states or whole decoders running freely. Sizes that
    decode prompts a second time decode fewer tokens."""
    table = batches()
    wanted = [("lockstep", rows) for rows in ROWS] + [("free", rows) for rows in (64, 33, 1)] + [("accumulate", 8)]
    again = STEPS // 4
    return [Case(m, rows, table[rows], again if m == "lockstep" and rows not in COVER else STEPS) for m, rows in wanted]


@cache
def load_model(name: str, device: str = "cpu") -> tuple[Model, str]:
    """A model and where its weights come from: a checkpoint folder, or the name of a small configuration.

    "mini" and "deep" are read from golden/<name> where that folder exists; otherwise, and for "tiny", the weights are
    random (seed 0), and the second value says so. Raises ContractError for an unknown name.
    """
    folder = GOLDEN / name if name in SMALL else Path(name)
    if (folder / "config.json").exists():
        source = Checkpoint(folder)
        config, text = source.config, f"checkpoint {folder.name}"
    elif name in ("mini", "deep", "tiny"):
        config, text = SMALL[name], "random, seed 0"
        source = RandomCheckpoint(config, 0)
    else:
        raise ContractError(f"model {name!r}: allowed are mini, deep, tiny and checkpoint folders")
    weights = {key: aligned(t) for key, t in all_weights(source, config).items()}
    return Model(config, weights).to(device), text


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy where it begins at an odd place of a mapped file: kernels load 16 bytes at once."""
    return t if t.data_ptr() % ALIGN == 0 else t.clone()


def prompt_tokens(ids: Sequence[str], config: Config) -> list[list[int]]:
    known = {p.id: p for p in golden.load()}
    return [(known[i] if i in known else golden.get(i)).tokens(config) for i in ids]


def open_requests(decoder, tokens: Sequence[Sequence[int]], progress=None) -> tuple[list[Request], list[int]]:
    """Prefill one request per prompt, then poison all that no request owns: (requests, their first tokens)."""
    requests, last = [], []
    for i, prompt in enumerate(tokens):
        requests.append(decoder.state.open())
        last.append(int(decoder.prefill(requests[-1], prompt).act["tokens"]))
        if progress:
            progress(i + 1, len(tokens), "prefill")
    decoder.state.poison(keep=requests)
    return requests, last


def make_state(config: Config, lengths: Sequence[int], steps: int, device, *, order: int = 1) -> DecodeState:
    """A state with spare slots and pages, in permuted order. lengths: of the prompts, in tokens."""
    pages = sum(-(-(n + steps) // PAGE) for n in lengths) + 4
    return DecodeState(config, slots=len(lengths) + 3, pages=pages, page_size=PAGE, device=device, order=order)


def drive(decoder, requests: list[Request], last: list[int], steps: int, rows: int, progress=None) -> list[list[int]]:
    """Decode `steps` tokens with a batch padded to `rows`: the tokens of each step."""
    out = []
    for step in range(steps):
        last = decoder.tokens(decoder.decode(requests, last, rows=rows))[: len(requests)].tolist()
        out.append(last)
        if progress:
            progress(step + 1, steps, "decode")
    return out


def run(
    case: Case, model: str = "mini", device: str = "cpu", *, selection: Selection | None = None,
    extra: Mapping[str, Implementation] | None = None, graphs: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> Result:  # fmt: skip
    """Run one case and judge it. Raises ContractError for an unknown mode or model."""
    if case.mode not in MODES:
        raise ContractError(f"mode {case.mode!r}: allowed are {', '.join(MODES)}")
    loaded, source = load_model(model, device)
    tokens = prompt_tokens(case.prompts, loaded.config)
    state = make_state(loaded.config, [len(t) for t in tokens], case.steps, device)
    options = dict(selection=selection, extra=extra, graphs=graphs, capacity=case.steps)
    if case.mode == "free":
        decoder = FreeRunning(loaded, state, **options)
    else:
        decoder = Lockstep(loaded, state, follow="reference" if case.mode == "lockstep" else "twin", **options)
    weights = checksum(loaded)
    requests, last = open_requests(decoder, tokens, progress)
    drive(decoder, requests, last, case.steps, case.rows, progress)
    if case.mode == "free":
        decoder.finish(requests)
    findings = decoder.findings()
    for (name, layer), sum_ in checksum(loaded).items():
        if sum_ != weights[name, layer]:
            place = Place("weights", 1 << 30, layer, (), name)
            findings.append(Finding(place, "exact", bad=1, reasons=["was changed"]))
    about = dict(mode=case.mode, model=loaded.config.name, weights=source, rows=case.rows, requests=len(requests),
                 tokens=case.steps, device=_device_name(device), target=_target(device))  # fmt: skip
    return Result(about, findings, list(decoder.served.values()), dict(decoder.refused), decoder.ledger())


def checksum(model: Model) -> dict:
    """A sum of bits per weight, position included."""
    out = {}
    for key, t in model.weights.items():
        words = t.contiguous().view(torch.uint8).flatten().long()
        out[key] = (words * (torch.arange(len(words), device=t.device) % 65521 + 1)).sum()
    return {k: int(v) for k, v in zip(out, torch.stack(list(out.values())).tolist(), strict=True)}


def _device_name(device: str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _target(device: str) -> str:
    try:
        return device_arch(torch.device(device))
    except NotImplementedError:
        return "none"
