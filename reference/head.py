"""Final norm and logits (SPEC.md 9)."""

from .linear import linear_stage, rms_norm
from .stage import Stage, activation, output, weight

EPS = 1e-5

NORM = Stage(
    "head.norm",
    "9",
    axes=dict(R="sampled rows", D="hidden size"),
    tensors=(activation("x", "R D", strides="rows"), weight("w_norm", "D"), output("out", "R D")),
    flops=lambda d, attrs: 4 * d["R"] * d["D"],
)

LOGITS = linear_stage("head.logits", "9")


@NORM.law
def norm(x, w_norm, *, num):
    return dict(out=num.round(rms_norm(num.up(x), w_norm, EPS, num)))
