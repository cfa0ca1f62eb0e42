"""The residual bank over the whole depth of K3: blocks are sums of layer outputs, and stay until the last layer.

A kernel once kept its output in the bank's last slot, free until layer 84 fills it; layers 85 to 92 then read a
clobbered block. Models of fewer layers never fill that slot.
"""

from dataclasses import replace

import pytest
import torch

from reference.config import Config, mini
from reference.config import deep as whole
from reference.decoder import Decoder, Model
from reference.numerics import exact
from reference.plan import Workspace
from reference.state import DecodeState
from reference.weights import RandomCheckpoint, all_weights

deep = replace(whole, experts=2)  # weights are made four times as fast; the bank does not care
SLOTS = 8  # of the production bank, whatever the depth
LIMIT = 1e-13  # sums of 25 float64 terms


class Summed(Decoder):
    """Keeps the residual blocks as sums of what the layers put out, independently of attn_res (SPEC.md 4.2)."""

    def workspace(self, made):
        D, T = made.config.hidden, made.tokens
        wide = replace(made, buffers=dict(made.buffers) | dict(blocks=((T, SLOTS, D), torch.bfloat16)))
        self.space, self.blocks = Workspace(wide, self.model.weights, self.state.tensors, self.num, "cpu"), []
        return self.space

    def execute(self, step, tensors, made):
        super().execute(step, tensors, made)
        name, c = step.stage.name, self.config
        if name == "embed":
            self.blocks.append(tensors["prefix"].clone())
        if name == "attn_res.pre" and step.attrs["write"] >= 0:
            self.blocks.append(torch.zeros_like(tensors["prefix"]))
        if name in ("kda.o_proj", "mla.o_proj", "mlp.down", "moe.combine"):
            self.blocks[-1] = self.blocks[-1] + tensors["out"]
        assert c.blocks >= len(self.blocks) - 1


class Reused(Summed):
    """Every attn_res leaves its output in the bank's last slot."""

    def execute(self, step, tensors, made):
        super().execute(step, tensors, made)
        if step.stage.name.startswith("attn_res"):
            tensors["blocks"][:, SLOTS - 1] = tensors["out"]


def cut(config: Config, layers: int) -> Config:
    return replace(config, layers=layers, mla_layers=tuple(i for i in config.mla_layers if i < layers))


@pytest.fixture(scope="module")
def weights():
    return {c.name: all_weights(RandomCheckpoint(c, 1), c) for c in (mini, deep)}


def run(kind: type, config: Config, weights: dict) -> tuple[list[int], torch.Tensor]:
    """Two tokens through the model: which blocks of the bank are not the sums of their layers, and the logits."""
    d = kind(Model(config, weights[config.name]), DecodeState(config, slots=2, pages=2, num=exact))
    logits = d.prefill(d.state.open(), [65, 66]).act["vocab_logits"]
    bank = d.space.act["blocks"]
    far = [(bank[:, k] - b).norm() > LIMIT * b.norm() for k, b in enumerate(d.blocks[: config.blocks])]
    return [k for k, wrong in enumerate(far) if wrong], logits


def test_blocks_are_sums_of_layers_until_the_end(weights):
    assert mini.blocks == 4 and run(Summed, mini, weights)[0] == []


def test_93_layers_see_that_the_last_slot_is_reused(weights):
    (want, logits), (bad, other) = (run(kind, deep, weights) for kind in (Summed, Reused))
    assert (want, bad) == ([], [7]) and (logits - other).norm() > 1e-3 * logits.norm()


@pytest.mark.parametrize("config, seen", [
    (cut(mini, 12), False), (cut(deep, 84), False), (cut(deep, 85), True),
], ids=lambda c: getattr(c, "layers", None))  # fmt: skip
def test_fewer_layers_do_not(weights, config, seen):
    """12 layers of mini and 84 of deep are the same to the bit with the fault; layer 84, the 85th, fills the slot."""
    (want, logits), (bad, other) = (run(kind, config, weights) for kind in (Summed, Reused))
    assert (want, bad) == ([], [7] if seen else []) and torch.equal(logits, other) is not seen
