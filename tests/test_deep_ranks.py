"""93 layers over ranks: the pattern of `deep` with 16 heads, so that 16 ranks can cut it, equals one device.

A minute for each mesh: K3_SLOW=1. The second prompt of the walk is one token, so most context ranks hold none of it.
"""

import os
from dataclasses import replace

import pytest
import torch
from torchrun_worker import WIDE, ranked, single_state, walk

from reference.config import deep
from reference.decoder import Decoder, Model
from reference.numerics import exact, fused
from reference.weights import RandomCheckpoint, all_weights
from reference.world import LocalWorld

LIMIT = 1e-12  # float64 reassociation over 93 layers; measured 4e-14
CUT = replace(WIDE, name="deep16", layers=deep.layers, mla_layers=deep.mla_layers, block=deep.block, experts=8, topk=8)
MESHES = (dict(tp=2, dcp=2), dict(tp=4, dcp=4, interleave=2), dict(tp=8, dcp=8), dict(tp=16), dict(tp=16, dcp=16))


@pytest.fixture(scope="module")
def single():
    """One device in float64 and in production rounding; every expert is always chosen, so no route can flip."""
    if not os.environ.get("K3_SLOW"):
        pytest.skip("minutes: set K3_SLOW=1")
    source = RandomCheckpoint(CUT, 1)
    model = Model(CUT, all_weights(source, CUT))
    return source, *(walk(Decoder(model, single_state(num, CUT))) for num in (exact, fused))


def distance(got: list, want: list) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("options", MESHES, ids=str)
def test_ranks_equal_one_device_in_float64(options, single):
    source, true, _ = single
    got = walk(ranked(LocalWorld(**options), exact, CUT, source=source))
    assert distance(got, true) < LIMIT < distance([t * (1 + 1.5 * LIMIT) for t in true], true)


@pytest.mark.parametrize("options", MESHES[-1:], ids=str)
def test_ranks_err_as_one_device_does(options, single):
    """A sum over ranks rounds its partials too, so the RMS error grows by sqrt(2) at most; 2 as for a twin's rows."""
    source, true, rounded = single
    got = walk(ranked(LocalWorld(**options), fused, CUT, source=source))

    def rms(mine: list) -> float:
        return float(torch.cat([(a.double() - b).flatten() for a, b in zip(mine, true, strict=True)]).square().mean())

    assert rms(got) ** 0.5 <= 2 * rms(rounded) ** 0.5
