"""Several ranks in production rounding: every sum within its bound, whole steps as far off as one device is."""

from dataclasses import replace

import pytest
import torch
from test_world import MESHES, mesh_id
from torchrun_worker import WIDE, ranked, single_state, sources, walk

from equivalence.compare import half_ulp
from reference import comm, moe
from reference.decoder import Decoder, Model
from reference.mxfp4 import decode
from reference.numerics import exact, fused
from reference.ranks import RankedDecoder
from reference.stage import bf16
from reference.weights import all_weights
from reference.world import LocalWorld


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sums of one shape have one order only with one thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole():
    return all_weights(sources(), WIDE)


INPUTS = {"kda.o_proj": "heads", "mla.o_proj": "heads", "mlp.down": "inner", "moe.shared_down": "shared_inner"}


class Bounded(RankedDecoder):
    """Compares every all-reduce with the single-device law in float64, on the ranks' own inputs.

    Bound of an element: half a unit in the last place of each bf16 partial and of the result, and n 2^-24 of the sum
    of magnitudes for a sum of n terms in fp32. `worst`: the largest error in units of it, by the stage summed up.
    """

    whole, previous = None, None

    def arguments(self, steps):
        made, step, before = super().arguments(steps), steps[0], self.previous
        self.previous = step
        if step.stage is comm.ALL_REDUCE and before.stage.name != "embed.shard":
            want, sizes, slack, terms = (self.routed if before.stage is moe.FINALIZE else self.summed)(before)
            got = step.stage.call(made[0], step.attrs, self.num)["out"].double()
            slack = slack + half_ulp(made[0]["parts"].double(), bf16).sum(0)
            bound = slack + half_ulp(torch.maximum(got.abs(), want.abs()), bf16) + terms * 2.0**-24 * sizes
            name = before.stage.name
            self.worst[name] = max(self.worst.get(name, 0.0), float(((got - want).abs() / bound).max()))
        return made

    def summed(self, step):
        """A row-parallel projection: want, sum of magnitudes, other roundings, terms."""
        x = torch.cat([s.act[INPUTS[step.stage.name]] for s in self.spaces.values()], -1).double()
        w = self.whole[f"{step.stage.name}.w", step.layer].double()
        return x @ w.mT, x.abs() @ w.abs().mT, 0.0, w.shape[1]

    def routed(self, step):
        """The routed experts, whole, from the ranks' inner activations; each rank rounds each expert's output too."""
        own = WIDE.expert_inter // self.world.mesh.tp
        m = torch.cat([s.act["m"][..., :own] for s in self.spaces.values()], -1).double()
        ids, weights = (self.spaces[0].act[f"expert_{k}"] for k in ("ids", "weights"))
        packed, scale = (self.whole[f"moe.{k}", step.layer][ids.long()] for k in ("w2", "w2_scale"))
        w2, weights = decode(packed, scale, torch.float64), weights.double()[..., None]

        def through(m, w):
            return (torch.einsum("tai,tali->tal", m, w) * weights).sum(1)

        slack = sum((half_ulp(s.act["y"].double(), bf16) * weights).sum(1) for s in self.spaces.values())
        return through(m, w2), through(m.abs(), w2.abs()), slack, m.shape[-1] + ids.shape[1]


def sums(options: dict, whole: dict) -> dict[str, float]:
    decoder = ranked(LocalWorld(**options), fused, kind=Bounded)
    decoder.whole, decoder.worst = whole, {}
    walk(decoder)
    return decoder.worst


SHARED = [dict(tp=n) for n in (2, 4, 8, 16)] + [dict(tp=n, dcp=n) for n in (2, 4, 8, 16)]


@pytest.mark.parametrize("options", SHARED, ids=mesh_id)
def test_every_sum_is_within_its_rounding_bound(options, whole):
    worst = sums(options, whole)
    assert set(worst) == {*INPUTS, "moe.finalize"} and max(worst.values()) <= 1


def test_truncation_breaks_the_rounding_bound(whole, monkeypatch):
    """An error of one unit in the last place instead of half a unit."""

    def truncated(parts, accumulate, num):
        return (num.up(parts).sum(0).view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()

    monkeypatch.setattr(comm, "add_up", truncated)
    assert max(sums(dict(tp=2), whole).values()) > 1


EVEN = replace(WIDE, name="even", experts=8, topk=8)  # every expert always: no route can flip


@pytest.fixture(scope="module")
def even():
    """The single device in float64 and in production rounding, on a model without routes to flip."""
    model = Model(EVEN, all_weights(sources(EVEN), EVEN))
    return [walk(Decoder(model, single_state(num, EVEN))) for num in (exact, fused)]


def rms(got: list, want: list) -> float:
    return float(torch.cat([(a.double() - b).flatten() for a, b in zip(got, want, strict=True)]).square().mean().sqrt())


FITTING = [*SHARED[4:], *(m for m in MESHES if m["tp"] <= EVEN.experts and m not in SHARED[4:])]


@pytest.mark.parametrize("options", FITTING, ids=mesh_id)
def test_whole_steps_err_as_the_single_device_does(options, even):
    """A sum over ranks rounds its partials too: their errors add up to one rounding more where there was one, so the
    RMS error grows by sqrt(2) at most; 2 leaves room for a small sample, and is what a twin may show on a row."""
    got = walk(ranked(LocalWorld(**options), fused, EVEN))
    assert rms(got, even[0]) <= 2 * rms(even[1], even[0])


def test_partials_of_6_bits_break_the_ratio(even, monkeypatch):
    """Two of bf16's 8 significant bits cut off: up to 8 times the error of its rounding."""
    law = comm.add_up

    def coarse(parts, accumulate, num):
        return law((parts.view(torch.int16) & ~3).view(torch.bfloat16), accumulate, num)

    monkeypatch.setattr(comm, "add_up", coarse)
    assert rms(walk(ranked(LocalWorld(2), fused, EVEN)), even[0]) > 2 * rms(even[1], even[0])
