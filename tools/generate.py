"""`k3 generate`: text from the model, with implementations swapped between tokens."""

import codecs
import os
import re
import sys

from fast.decoder import FastDecoder
from fast.selection import Selection, ranges
from reference.decoder import Sampling
from reference.stage import ContractError
from reference.state import DecodeState

from .common import check_swaps, out, prompts
from .common import device as named_device
from .swaps import refuse_nowhere
from .tokenizer import BYTE_LEVEL

PAGE = 16


def run(prompt, prompt_id, tokens, model, device, backend, swaps, sampling, explain, quiet) -> dict:
    """Returns prompt, text, tokens, the step that made the last one, and what served that step and why."""
    from equivalence.cases import load_model

    where = named_device(device)
    loaded, _ = load_model(model, str(where))
    config = loaded.config
    if (prompt is None) == (prompt_id is None):
        raise ContractError("generate takes either --prompt or --prompt-id")
    if config.bos != BYTE_LEVEL:
        raise ContractError(f"generate speaks bytes; {config.name} has bos = {config.bos}, allowed is {BYTE_LEVEL}")
    ids = _stored(prompt_id).tokens(config) if prompt is None else [config.bos, *os.fsencode(prompt)]
    schedule = sorted((_swap(text, config) for text in swaps), key=lambda s: s[0])
    if schedule and schedule[-1][0] >= tokens:
        raise ContractError(
            f"a swap from token {schedule[-1][0]} on would never come; allowed are tokens 0-{tokens - 1}"
        )
    pages = -(-(len(ids) + tokens) // PAGE) + 2
    decoder = FastDecoder(
        loaded, DecodeState(config, slots=2, pages=pages, page_size=PAGE, device=where), backend=backend
    )
    for _, selection in schedule:
        check_swaps(selection, decoder.known, config)
    chosen = Sampling(*sampling)
    request, made, shown = decoder.state.open(), [], Shown(sys.stdout)
    token = int(decoder.prefill(request, ids, chosen).act["tokens"])
    while True:
        made.append(token)
        if not quiet:
            shown.add(token)
        if len(made) == tokens or token == config.eos:
            break
        while schedule and schedule[0][0] <= len(made):
            decoder.selection = Selection((*decoder.selection.rules, *schedule.pop(0)[1].rules))
        token = int(decoder.decode([request], [token], [chosen]).act["tokens"])
    if not quiet:
        shown.end()
    served, step = decoder.explain(), "the prefill of the prompt" if len(made) == 1 else "a decode step of one row"
    if not quiet:
        out.print()
        if schedule:
            out.print(f"the text ended at token {len(made) - 1}, before the swap at token {schedule[0][0]}")
    if explain and not quiet:
        out.print("\n".join([f"token {len(made) - 1} came from {step}, served by", *explained(served)]), markup=False)
    text = bytes(t for t in made if t < 256).decode("utf-8", "replace")
    return dict(
        prompt=bytes(t for t in ids if t < 256).decode("utf-8", "replace"), text=text, tokens=made, step=step,
        served=[vars(e) for e in served],
    )  # fmt: skip


def explained(served: list) -> list[str]:
    """A line for each stage or twin and reason: which layers, who serves it there, with which kernels, and why."""
    groups: dict[tuple, list[str]] = {}
    for e in served:
        layer, _, name = e.key.partition(".")
        name, layers = (name, [layer]) if layer.isdigit() else (e.key, [])
        groups.setdefault((name, e.served_by, e.kernels, e.reason), []).extend(layers)
    return [
        f"  {name + (f' @{ranges(map(int, layers))}' if layers else ''):32} {by:12} {reason}"
        + (f" ({', '.join(kernels)})" if kernels else "")
        for (name, by, kernels, reason), layers in groups.items()
    ]


class Shown:
    """Byte tokens written as UTF-8 text as soon as a character is complete; what is no UTF-8 becomes U+FFFD."""

    def __init__(self, stream):
        self.stream, self.decoder = stream, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> None:
        self._write(self.decoder.decode(bytes([token] if token < 256 else [])))

    def end(self) -> None:
        """An unfinished character is written, too."""
        self._write(self.decoder.decode(b"", final=True))

    def _write(self, text: str) -> None:
        if text:
            encoding = self.stream.encoding or "utf-8"  # a terminal that cannot show a character gets a question mark
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
            self.stream.flush()


def _stored(name: str):
    found = prompts(name) if name.strip() else []
    if len(found) != 1:
        raise ContractError(f"prompt id {name!r} names {len(found)} prompts; allowed is the id of one")
    return found[0]


def _swap(text: str, config) -> tuple[int, Selection]:
    m = re.fullmatch(r"([0-9]{1,9}):(.*)", text)
    start, rules = (int(m[1]), m[2]) if m else (0, text)
    refuse_nowhere(rules, [], config)
    return start, Selection.parse(rules)
