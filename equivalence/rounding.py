"""How far a precision mode of the law may be from `exact`: one rounding budget per stage.

A stage that rounds n times between its inputs and its bf16 outputs has an RMS error of at most n roundings; fp32
outputs stay within the floor of fp32 sums. One rounding is 2^-8 at most and 2^-8 / sqrt(3) in RMS, but few elements are
no sample of it: below `SAMPLE` the maximum is the budget.
"""

from .compare import FLOOR, SAMPLE

ROUNDING = 2.0**-8 / 3**0.5  # RMS of one rounding to bf16 relative to the value, where that is a power of two
# Roundings between a stage's inputs and its bf16 outputs, where there are more than one: (fused, unfused).
ROUNDINGS = {
    "attn_res.pre": (2, 4), "attn_res.post": (2, 4), "attn_res.final": (2, 4), "kda.out_norm": (1, 3),
    "mla.lora_norm": (1, 2), "mla.out_gate": (1, 2), "mlp.gate_up": (1, 3), "moe.shared_up": (1, 3),
    "moe.experts_up": (1, 3), "moe.latent_norm": (1, 2), "head.norm": (1, 2),
}  # fmt: skip
CHAINED = {"q", "k", "v", "o", "routed"}  # fp32 tensors that the unfused chain stores as bf16


def budget_excess(result, which: int) -> dict[str, float]:
    """Relative RMS error of each stage's tensors in units of its rounding budget, where that is exceeded."""
    over = {}
    for f in result.findings:
        if f.check != "value":
            continue
        stage, bf16 = f.place.stages[-1], f.dtype == "bfloat16" or (which and f.place.tensor in CHAINED)
        one = ROUNDING if f.compared >= SAMPLE else ROUNDING * 3**0.5
        budget = ROUNDINGS.get(stage, (1, 1))[which] * one if bf16 else FLOOR
        if f.error > budget:
            over[f"{f.place.key} {f.place.tensor}"] = f.error / budget
    return over
