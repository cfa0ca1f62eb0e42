"""The shipped checkpoint over ranks: two share it, by heads and by context; four cannot, for it has two heads."""

import pytest
import torch
from torchrun_worker import SHIPPED, differing, ranked, single_state, walk

from reference.decoder import Decoder, Model
from reference.numerics import exact
from reference.shard import Mesh, rank_config
from reference.stage import ContractError
from reference.weights import all_weights
from reference.world import LocalWorld

LIMIT = 1e-12  # float64 reassociation over 13 layers


@pytest.fixture(scope="module")
def single():
    model = Model(SHIPPED.config, all_weights(SHIPPED, SHIPPED.config))
    return walk(Decoder(model, single_state(exact, SHIPPED.config)))


@pytest.mark.parametrize("options", (dict(tp=2), dict(tp=2, dcp=2, tail=0)), ids=str)
def test_two_ranks_are_one_device(single, options):
    got = walk(ranked(LocalWorld(**options), exact, SHIPPED.config, source=SHIPPED))
    far = [float((a - b).norm() / b.norm()) for a, b in zip(got, single, strict=True)]
    assert len(far) == 4 and max(far) < LIMIT
    assert max(float((a * (1 + 2 * LIMIT) - b).norm() / b.norm()) for a, b in zip(got, single, strict=True)) > LIMIT
    assert all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(got, single, strict=True))


@pytest.mark.parametrize("tp", (4, 8, 16))
def test_more_ranks_are_refused(tp):
    with pytest.raises(ContractError, match=f"mini: heads = 2 over {tp} ranks; allowed are multiples of {tp}"):
        rank_config(SHIPPED.config, Mesh(tp))


def test_the_comparison_of_processes_names_what_differs():
    assert differing(dict(a="1", b="2"), dict(a="1", b="3", c="4")) == ["b", "c"] and not differing({}, {})
