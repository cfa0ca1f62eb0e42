"""The skinny projection y = x Wᵀ that most stages of a decode step are (SPEC.md 13), and RMSNorm."""

from torch import Tensor

from .numerics import Numerics
from .stage import Stage, activation, output, weight


def project(x: Tensor, w: Tensor, num: Numerics) -> Tensor:
    """x [M, K] times w [N, K] transposed, in the compute type, not yet rounded: [M, N]."""
    return num.up(x) @ num.up(w).mT


def rms_norm(x: Tensor, w: Tensor, eps: float, num: Numerics) -> Tensor:
    """x [..., D] in the compute type, w [D]: x / rms(x) * w. The unfused chain rounds x / rms(x) before the weight."""
    return num.chain(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()) * num.up(w)


def linear_stage(name: str, spec: str) -> Stage:
    """A projection with one rounding: x [M, K] bf16, w [N, K] bf16 -> out [M, N] bf16, accumulated in fp32."""
    stage = Stage(
        name,
        spec,
        axes=dict(M="tokens in this step", N="output features", K="input features"),
        tensors=(activation("x", "M K", strides="rows"), weight("w", "N K"), output("out", "M N", strides="rows")),
        flops=lambda d, attrs: 2 * d["M"] * d["N"] * d["K"],
    )

    @stage.law
    def law(x, w, *, num):
        return dict(out=num.round(project(x, w, num)))

    return stage
