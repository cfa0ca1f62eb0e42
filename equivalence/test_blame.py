"""One injected fault is named by lockstep and by bisection, and clean twins may be swapped while text is made."""

import math
import random

import pytest

from fast.decoder import FastDecoder
from fast.selection import Selection
from reference.numerics import exact, fused
from reference.state import Request

from .bisect import bisect
from .cases import Case, batches, load_model, prompt_tokens, run
from .faults import inject
from .forced import prepare, reference_run

SPAN = ("kda.conv", "kda.recurrence", "kda.out_norm")
IDS = batches()[3]
SWAPS, TOKENS = 20, 200
MARGIN = 8.0  # times the row's own error: what a legal change of the most likely token may bridge


@pytest.mark.parametrize("fault, layer, tensor", [("kda.decay_sign", 6, "recurrent"), ("kda.gate", 9, "out")])
def test_lockstep_names_layer_and_stage(gpu, fault, layer, tensor):
    selection, extra = inject([f"{fault}@{layer}"], Selection())
    result = run(Case("lockstep", 3, IDS, 8), "mini", gpu, selection=selection, extra=extra)
    place = result.first.place
    assert (result.verdict, place.layer, place.stages) == ("disagreement", layer, SPAN), result.statement
    bad = {(f.place.layer, f.place.stages) for f in result.findings if not f.ok}
    assert bad == {(layer, SPAN)} and tensor in {f.place.tensor for f in result.findings if not f.ok}


@pytest.mark.parametrize("fault, layer, on", [("kda.decay_sign", 6, "outputs"), ("kda.gate", 9, "state")])
def test_bisection_names_layer_and_stage(gpu, fault, layer, on):
    model, _ = load_model("mini", gpu)
    selection, extra = inject([f"{fault}@{layer}"], Selection())
    found = bisect(
        model, prompt_tokens(IDS, model.config), steps=24, on=on, selection=selection, extra=extra, device=gpu
    )
    assert (found.verdict, found.layer, found.stages) == ("disagreement", layer, SPAN), found.text
    assert found.model_runs <= math.ceil(math.log2(found.units)) + 6  # units: served (layer, stage) pairs


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_text_goes_on_through_random_swaps(gpu, graphs):
    """Each token is the law's, or differs where the law's own margin is inside the law's own error."""
    model, _ = load_model("mini", gpu)
    state, requests, tokens = prepare(model, prompt_tokens(IDS, model.config), TOKENS, gpu)
    law = reference_run(model, state, requests, tokens, fused)
    truth = reference_run(model, state, requests, tokens, exact, law.routes)
    own = (law.logits.double() - truth.logits).square().mean(-1).sqrt()  # [tokens, rows]
    decoder = FastDecoder(model, state.clone(), backend="latency_specialized", graphs=graphs)
    rows, rng, changed = [Request(r.slot, list(r.pages), r.length) for r in requests], random.Random(7), 0
    moments = set(rng.sample(range(1, TOKENS), SWAPS))
    for token in range(TOKENS):
        if token in moments:
            first = rng.randrange(model.config.layers)
            layers = first, rng.randrange(first, model.config.layers)
            decoder.swap(rng.choice(["kda.decode", "linear", "attn_res"]), rng.choice(["reference", "fast"]), layers)
        chosen = decoder.decode(rows, tokens[token].tolist()).act["vocab_logits"].argmax(-1)
        for row, (mine, theirs) in enumerate(zip(chosen.tolist(), law.logits[token].argmax(-1).tolist(), strict=True)):
            margin = float(law.logits[token, row, theirs] - law.logits[token, row, mine])
            changed += mine != theirs
            assert margin <= MARGIN * float(own[token, row]), f"token {token}, row {row}: {theirs} became {mine}"
    assert changed <= 0.02 * TOKENS * len(rows)
