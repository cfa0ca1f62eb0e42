"""SiTU and the dense MLP of the first layer (SPEC.md 7)."""

import torch
from torch import Tensor

from .linear import linear_stage, project
from .numerics import Numerics
from .stage import Stage, activation, output, weight

BETA, LINEAR_BETA = 4.0, 25.0


def situ(gate: Tensor, up: Tensor) -> Tensor:
    """4 tanh(gate / 4) sigmoid(gate) * 25 tanh(up / 25): a gate that saturates at 4, an up branch clipped at 25."""
    return BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * (LINEAR_BETA * torch.tanh(up / LINEAR_BETA))


def gated_up(x: Tensor, w: Tensor, num: Numerics) -> Tensor:
    """x [..., K] through w [..., 2I, K], gate rows first, then SiTU: [..., I], rounded."""
    gate, up = num.chain(project(x, w, num)).chunk(2, dim=-1)
    return num.round(situ(gate, up))


def gate_up_stage(name: str, spec: str) -> Stage:
    """x [T, D], w [2I, D] (gate rows, then up rows) -> out [T, I]."""
    stage = Stage(
        name,
        spec,
        axes=dict(T="tokens in this step", D="input features", G="2I", I="inner width"),
        tensors=(activation("x", "T D"), weight("w", "G D"), output("out", "T I")),
        flops=lambda d, attrs: 2 * d["T"] * d["G"] * d["D"],
    )

    @stage.law
    def law(x, w, *, num):
        return dict(out=gated_up(x, w, num))

    return stage


GATE_UP = gate_up_stage("mlp.gate_up", "7")
DOWN = linear_stage("mlp.down", "7")
