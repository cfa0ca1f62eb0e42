"""Whole decoders side by side on the same tokens. Twins need a GPU; the law's own cases do not."""

import pytest
import torch

from reference.decoder import Decoder
from reference.numerics import exact
from reference.state import DecodeState

from .cases import Case, cases, load_model, run
from .law_twin import every_stage, served_by


@pytest.mark.parametrize("case", [c for c in cases() if c.mode == "free"], ids=str)
def test_twins(case, gpu, keep_report):
    keep_report(case, run(case, "mini", gpu))


def test_the_law_runs_as_itself(keep_report):
    case = Case("free", 5, ("edge-empty", "edge-one-byte", "edge-two-bytes"), 22)
    keep_report(f"law-{case}", run(case, "tiny", **served_by(*every_stage())))


def prefill_and_decode(model, prompt, split: int):
    """Logits after the prompt, and the request's state rows, with the last tokens of the prompt decoded one by one."""
    state = DecodeState(model.config, slots=3, pages=8, num=exact, order=2)
    decoder, request = Decoder(model, state), state.open()
    space = decoder.prefill(request, prompt[:split])
    state.poison(keep=[request])
    for token in prompt[split:]:
        space = decoder.decode([request], [token])
    rows = [t[request.slot] if n != "cache" else t[request.pages].flatten(0, 1)[: len(prompt)]
            for (n, _), t in state.tensors.items()]  # fmt: skip
    return [space.act["vocab_logits"], *rows]


def test_decoding_equals_prefill():
    """The chunked law and the token law are one function: in float64 they agree to its own rounding.

    1e-9: unit roundoff 1.1e-16, sums of up to 1e3 terms, five layers with gains of up to 1e2.
    """
    model, _ = load_model("tiny")
    prompt = [256, *b"prefill, then decode: the same thing twice"]
    whole, apart = (prefill_and_decode(model, prompt, n) for n in (len(prompt), 17))
    for a, b in zip(whole, apart, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-9
    moved = prefill_and_decode(model, [*prompt[:16], prompt[17], prompt[16], *prompt[18:]], 17)
    assert float((moved[0] - whole[0]).norm() / whole[0].norm()) > 1e-9
    assert torch.isfinite(whole[0]).all()
