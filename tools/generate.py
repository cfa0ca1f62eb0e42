"""`k3 generate`: text from the model, with implementations swapped between tokens."""

import os
import re
import sys

from fast.decoder import FastDecoder
from fast.selection import Selection
from reference.decoder import Sampling
from reference.stage import ContractError
from reference.state import DecodeState

from .common import device as named_device
from .common import out, prompts

PAGE = 16


def run(prompt, prompt_id, tokens, model, device, backend, swaps, sampling, explain, quiet) -> dict:
    """Returns prompt, text, tokens, the selection after each swap, and what served the last token."""
    from equivalence.cases import load_model

    where = named_device(device)
    loaded, _ = load_model(model, str(where))
    config = loaded.config
    if (prompt is None) == (prompt_id is None):
        raise ContractError("generate takes either --prompt or --prompt-id")
    ids = prompts(prompt_id)[0].tokens(config) if prompt_id else [config.bos, *os.fsencode(prompt)]
    schedule = sorted((_swap(text) for text in swaps), key=lambda s: s[0])
    pages = -(-(len(ids) + tokens) // PAGE) + 2
    decoder = FastDecoder(
        loaded, DecodeState(config, slots=2, pages=pages, page_size=PAGE, device=where), backend=backend
    )
    for _, selection in schedule:
        selection.choose((), decoder.known)
    chosen = Sampling(*sampling)
    request, made = decoder.state.open(), []
    token = int(decoder.prefill(request, ids, chosen).act["tokens"])
    while True:
        made.append(token)
        if not quiet:
            sys.stdout.write(bytes(t for t in [token] if t < 256).decode("latin-1"))
            sys.stdout.flush()
        if len(made) == tokens or token == config.eos:
            break
        while schedule and schedule[0][0] <= len(made):
            decoder.selection = Selection((*decoder.selection.rules, *schedule.pop(0)[1].rules))
        token = int(decoder.decode([request], [token], [chosen]).act["tokens"])
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


def _swap(text: str) -> tuple[int, Selection]:
    m = re.match(r"(\d+):(.*)", text)
    return (int(m[1]), Selection.parse(m[2])) if m else (0, Selection.parse(text))
