"""How far a precision mode of the law may be from `exact`: one rounding budget per stage.

A stage that rounds n times between its inputs and its bf16 outputs has an error of at most n roundings; fp32 outputs
stay within the floor of fp32 sums.

One rounding to bf16 moves x by r x. r is uniform up to half a ULP / |x|, which is u = 2^-8 where |x| is a power of two
and u / 2 just below one: r^2 is u^2 at most, and u^2 / 3 at most in the mean. The squared relative error of a tensor is
the mean of r^2 with the weights w = x^2 / sum x^2. It varies as that of 1 / sum w^2 = (sum x^2)^2 / sum x^4 equal
elements would: N, the effective sample. N is a third of the elements of a normal, and 4 where four channels carry the
energy of a row. Hoeffding: the mean is above u^2 (1/3 + t) with a probability of exp(-2 N t^2) at most.
Spread energy: N is at least SAMPLE / 3, as that of SAMPLE normals, and one in FEW of the elements. The budget is
u / sqrt(3). Over an octave the mean of r^2 is 0.46 u^2 / 3, 29 standard deviations away; 5 if 30 rows are the same and
N is 23.
Concentrated energy: t is that of ODDS, and N counts for one row only. Others may hold the same numbers, as those of
equal tokens do, and a channel may be near the same power of two in all of them. The budget ends at u, which no error of
one rounding passes: it is u where N / rows is below 15.
Where the budget is wide, the RMS tells little. So in addition, where a stage rounds once, each element is within half
a ULP and what fp32 adds to it: within NEAREST halves, the middle of one rounding and two. Of elements that are rounded
twice with equal errors one in 16 is beyond, whatever carries the energy. Not so in ROWWISE: there fp32 errs by more
than the floor, and in all of a row at once, which small elements feel. A score of 800 is off by 800 x 2^-24, and so is
its weight, relative to itself; in KDA's state it is the error of u.
"""

from math import log

from .compare import FLOOR, SAMPLE

UNIT = 2.0**-8  # the greatest relative error of one rounding to bf16
ROUNDING = UNIT / 3**0.5  # its RMS where the value is a power of two
ODDS = 1e-6  # of a tensor that is over its budget by chance
NEAREST = 1.5
FEW = 64
# Roundings between a stage's inputs and its bf16 outputs, where there are more than one: (fused, unfused).
ROUNDINGS = {
    "attn_res.pre": (2, 4), "attn_res.post": (2, 4), "attn_res.final": (2, 4), "kda.out_norm": (1, 3),
    "mla.lora_norm": (1, 2), "mla.out_gate": (1, 2), "mlp.gate_up": (1, 3), "moe.shared_up": (1, 3),
    "moe.experts_up": (1, 3), "moe.latent_norm": (1, 2), "head.norm": (1, 2),
}  # fmt: skip
ROWWISE = {"mla.attention", "mla.attention_fp8", "kda.recurrence_bf16"}
CHAINED = {"q", "k", "v", "o", "routed"}  # fp32 tensors that the unfused chain stores as bf16


def one_rounding(effective: float, rows: int, elements: int) -> float:
    """The relative RMS error that one rounding may make of a tensor of so many elements. effective: N of all rows."""
    if effective >= max(SAMPLE / 3, elements / FEW):
        return ROUNDING
    return UNIT * min(1.0, 1 / 3 + (-log(ODDS) * rows / max(2 * effective, 1e-100)) ** 0.5) ** 0.5


def budget_excess(result, which: int) -> dict[str, float]:
    """Error of each stage's tensors in units of its rounding budget, where that is exceeded. which: 1 for `unfused`."""
    over = {}
    for f in result.findings:
        if f.check != "value":
            continue
        stage, bf16 = f.place.stages[-1], f.dtype == "bfloat16" or (which and f.place.tensor in CHAINED)
        roundings = ROUNDINGS.get(stage, (1, 1))[which]
        excess = f.error / (roundings * one_rounding(f.effective, f.rows, f.compared) if bf16 else FLOOR)
        if f.dtype == "bfloat16" and roundings == 1 and stage not in ROWWISE:
            excess = max(excess, f.halves / NEAREST)
        if excess > 1:
            over[f"{f.place.key} {f.place.tensor}"] = excess
    return over
