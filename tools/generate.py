"""`k3 generate`: text from the model, with implementations swapped between tokens."""

import codecs
import os
import re
import sys

from fast.decoder import FastDecoder
from fast.selection import Selection
from reference.decoder import Sampling
from reference.stage import ContractError
from reference.state import DecodeState

from .common import check_swaps, out, prompts
from .common import device as named_device
from .tokenizer import BYTE_LEVEL

PAGE = 16


def run(prompt, prompt_id, tokens, model, device, backend, swaps, sampling, explain, quiet) -> dict:
    """Returns prompt, text, tokens, the selection after each swap, and what served the last token."""
    from equivalence.cases import load_model

    where = named_device(device)
    loaded, _ = load_model(model, str(where))
    config = loaded.config
    if (prompt is None) == (prompt_id is None):
        raise ContractError("generate takes either --prompt or --prompt-id")
    if config.bos != BYTE_LEVEL:
        raise ContractError(f"generate speaks bytes; {config.name} has bos = {config.bos}, allowed is {BYTE_LEVEL}")
    ids = prompts(prompt_id)[0].tokens(config) if prompt_id else [config.bos, *os.fsencode(prompt)]
    schedule = sorted((_swap(text) for text in swaps), key=lambda s: s[0])
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
    served = [vars(e) for e in decoder.explain()]
    if explain and not quiet:
        out.print()
        for e in served:
            out.print(f"{e['key']:24s} {e['served_by']:12s} {' '.join(e['kernels']) or e['reason']}")
    text = bytes(t for t in made if t < 256).decode("utf-8", "replace")
    if not quiet:
        out.print()
    return dict(
        prompt=bytes(t for t in ids if t < 256).decode("utf-8", "replace"), text=text, tokens=made, served=served
    )


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


def _swap(text: str) -> tuple[int, Selection]:
    m = re.match(r"(\d+):(.*)", text)
    return (int(m[1]), Selection.parse(m[2])) if m else (0, Selection.parse(text))
