"""Attention residuals: a learned softmax mix of finished blocks and the running prefix, then the layer's norm.

Source: SPEC.md 4. One primitive serves before attention, before the MLP, and after the last layer.
"""

import torch

from .linear import rms_norm
from .stage import Constraint, ContractError, Stage, activation, output, weight

EPS = 1e-5


def _bank_fits(tensors, dims):
    return None if dims["B"] <= 8 else f"blocks has B = {dims['B']} slots; allowed are 1..8"


def _stage(name: str, *, has_out_norm: bool) -> Stage:
    return Stage(
        name,
        "4",
        axes=dict(T="tokens in this step", D="hidden size", B="slots of the residual bank"),
        tensors=(
            activation("prefix", "T D", mutated=True),
            activation("blocks", "T B D", mutated=True),
            weight("w_norm", "D"),
            weight("w_proj", "D"),
            activation("delta", "T D", optional=True),
            *([weight("w_out", "D", optional=True)] if has_out_norm else []),
            output("out", "T D"),
        ),
        constraints=(Constraint("B <= 8", _bank_fits),),
        attrs=dict(nb="finished blocks that are read", write="bank slot the updated prefix goes to, -1 for none"),
        flops=lambda d, attrs: (6 * (attrs["nb"] + 1) + 8) * d["T"] * d["D"],
        traffic=lambda d, attrs: 2 * d["D"] * (d["T"] * (attrs["nb"] + 4 + (attrs["write"] >= 0)) + 3),
    )


PRE = _stage("attn_res.pre", has_out_norm=True)
POST = _stage("attn_res.post", has_out_norm=True)
FINAL = _stage("attn_res.final", has_out_norm=False)


@PRE.law
@POST.law
@FINAL.law
def attn_res(prefix, blocks, w_norm, w_proj, delta=None, w_out=None, *, nb, write, num):
    """prefix, delta [T, D]; blocks [T, B, D]; w_* [D] -> out [T, D], and prefix and blocks as they stand afterwards."""
    if not (0 <= nb <= (B := blocks.shape[1]) and -1 <= write < B):
        raise ContractError(f"attn_res: nb = {nb}, write = {write} with {B} slots; allowed are 0..{B} and -1..{B - 1}")
    p = prefix if delta is None else num.round(num.up(prefix) + num.up(delta))
    v = num.up(torch.cat([blocks[:, :nb], p[:, None]], dim=1))  # [T, nb + 1, D], the prefix last
    rstd = (v.square().mean(-1) + EPS).rsqrt()
    logits = rstd * (v * (num.up(w_norm) * num.up(w_proj))).sum(-1)  # [T, nb + 1]
    mixed = num.chain((logits.softmax(-1)[..., None] * v).sum(1))  # the raw v, not the normalised ones
    out = mixed if w_out is None else rms_norm(mixed, w_out, EPS, num)
    slot = torch.arange(blocks.shape[1], device=blocks.device)[:, None] == write
    return dict(out=num.round(out), prefix=p, blocks=torch.where(slot, p[:, None], blocks))
