"""Several ranks against one device: whole steps in float64, orders of sums, torchrun, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun_worker import WIDE, digests, ranked, single_state, sources, walk

from equivalence.compare import half_ulp
from reference import comm
from reference.decoder import Decoder, Model
from reference.numerics import exact, fused, unfused
from reference.plan import plan
from reference.ranks import RankedDecoder, WorldState
from reference.shard import Mesh, rank_weights
from reference.stage import ContractError, bf16
from reference.weights import all_weights
from reference.world import LocalWorld, TorchWorld

MESHES = [
    dict(tp=2), dict(tp=4), dict(tp=8), dict(tp=16),
    dict(tp=2, dcp=2), dict(tp=4, dcp=4, interleave=4), dict(tp=8, dcp=8, lse_base="2", home="all_to_all"),
    dict(tp=16, dcp=16), dict(tp=16, dcp=4, interleave=2, home="all_to_all"),
    dict(tp=8, tail=0, split_router=True, split_latent=True), dict(tp=16, tail=0, finalize="bf16", squares="fp32"),
    dict(tp=4, tail=2, reduce="two_stage"), dict(tp=8, tail=2, split_router=True),
    dict(tp=4, reduce="two_stage", accumulate="bf16"), dict(tp=2, tail=0, reduce="two_stage"),
    dict(tp=4, split_router=True, split_latent=True), dict(tp=4, sequence=True), dict(tp=8, sequence=True, dcp=2),
    dict(tp=4, experts="expert"), dict(tp=16, experts="expert", tail=0, split_latent=True),
]  # fmt: skip
LIMIT = 1e-12  # float64 reassociation over 4 layers; measured 3e-15


def mesh_id(options: dict) -> str:
    return "-".join(f"{k}{v}" for k, v in options.items())


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


@pytest.fixture(scope="module")
def single(whole):
    decoder = Decoder(Model(WIDE, whole), single_state(exact))
    return walk(decoder), decoder.state


def distance(got: list, want: list) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("options", MESHES, ids=mesh_id)
def test_ranks_equal_one_device_in_float64(options, single):
    decoder = ranked(LocalWorld(**options), exact)
    assert distance(walk(decoder), single[0]) < LIMIT
    for space in decoder.spaces.values():  # every rank ends with the same logits and samples the same tokens
        assert torch.equal(space.act["vocab_logits"], decoder.spaces[0].act["vocab_logits"])
        assert torch.equal(space.act["tokens"], decoder.spaces[0].act["tokens"])


def test_the_limit_is_sharp(single):
    off = [t * (1 + 1.5 * LIMIT) for t in single[0]]
    assert distance(off, single[0]) > LIMIT


@pytest.mark.parametrize("options", (dict(tp=4), dict(tp=4, dcp=2, interleave=2)), ids=mesh_id)
def test_state_of_the_ranks_is_the_state_of_one_device(options, single):
    decoder = ranked(LocalWorld(**options), exact)
    walk(decoder)
    mesh, mine = decoder.world.mesh, [decoder.state.of(rank) for rank in decoder.world.ranks]
    slots = [2, 3, 1]  # live ones; `order` gives both states the same
    for (name, layer), want in single[1].tensors.items():
        if name == "recurrent":
            got = torch.cat([t[name, layer] for t in mine], 1)
        elif name == "conv":
            got = torch.cat([t[name, layer].unflatten(-1, (3, -1)) for t in mine], -1).flatten(-2)
        else:
            continue
        live = [i for i in slots if want[i].isfinite().all()]
        assert len(live) == 2 and (got[live] - want[live]).norm() < LIMIT * want[live].norm(), name
    for rank in decoder.world.ranks:  # caches of different context groups are replicas
        for (name, layer), t in mine[rank].items():
            if name == "cache":
                assert torch.equal(t.nan_to_num(), mine[rank % mesh.dcp][name, layer].nan_to_num())


MUTANTS = {
    "a rank is left out": lambda patch: patch.setattr(
        comm, "add_up", lambda parts, accumulate, num: num.round(num.up(parts[:-1]).sum(0))
    ),
    "columns in reversed rank order": lambda patch: patch.setattr(
        comm.ALL_GATHER, "fn", lambda parts, axis, rows, num: dict(out=torch.cat(parts.unbind()[::-1], axis)[:rows])
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, single, monkeypatch):
    MUTANTS[name](monkeypatch)
    assert not distance(walk(ranked(LocalWorld(2), exact)), single[0]) < LIMIT


@pytest.mark.parametrize("num", (fused, unfused), ids=lambda num: num.mode)
def test_one_rank_is_the_single_device_bit_for_bit(num, whole):
    """Collectives of one rank round what is rounded already: inserting them changes nothing."""
    want = walk(Decoder(Model(WIDE, whole), single_state(num)))
    got = walk(ranked(LocalWorld(1), num))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_plans_of_ranks_line_up_and_the_plain_plan_has_no_collective():
    assert not [s.key for s in plan(WIDE, 2).steps if s.stage.name.startswith(("comm.", "dcp.")) or s.tag]
    assert {r.space for s in plan(WIDE, 2).steps for r in s.bind.values()} == {"act", "weight", "state", "index"}
    for options in MESHES:
        mesh = Mesh(**options)
        keys = [[s.key for s in plan(WIDE, 2, world=mesh.at(rank)).steps] for rank in range(mesh.tp)]
        assert all(k == keys[0] for k in keys) and len(set(keys[0])) == len(keys[0])
        assert plan(WIDE, 2, world=mesh.at(0)) is plan(WIDE, 2, world=Mesh(**options).at(0))


class Checked(RankedDecoder):
    """Holds every argument of every step against its stage's contract."""

    def execute(self, step, tensors, made):
        if not made.prefill:
            step.stage.check(tensors, num=self.num)
        super().execute(step, tensors, made)


@pytest.mark.parametrize("options", [m for m in MESHES if m["tp"] <= 4], ids=mesh_id)
def test_every_step_keeps_its_contract(options):
    walk(ranked(LocalWorld(**options), fused, kind=Checked))


def test_orders_and_roundings_of_a_sum():
    """Two-stage equals one-shot bit for bit; a running bf16 sum and another rank order do not."""
    parts = torch.randn(8, 5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    one = comm.ALL_REDUCE.call(dict(parts=parts), dict(accumulate="fp32"), fused)["out"]
    slices = [
        comm.REDUCE_SCATTER.call(dict(parts=parts), dict(accumulate="fp32", rank=r, axis=1), fused)["out"]
        for r in range(8)
    ]
    two = comm.ALL_GATHER.call(dict(parts=torch.stack(slices)), dict(axis=1, rows=5), fused)["out"]
    assert torch.equal(one, two)
    want = parts.double().sum(0)

    def excess(got):
        bound = half_ulp(torch.maximum(got.double().abs(), want.abs()), bf16) + 8 * 2.0**-24 * parts.double().abs().sum(
            0
        )
        return float(((got.double() - want).abs() / bound).max())

    chain = comm.ALL_REDUCE.call(dict(parts=parts), dict(accumulate="bf16"), fused)["out"]
    turned = comm.ALL_REDUCE.call(dict(parts=parts.flip(0)), dict(accumulate="bf16"), fused)["out"]
    assert excess(one) <= 1 < excess(chain) and not torch.equal(chain, turned)
    running = parts[0]
    for part in parts[1:]:
        running = running + part
    assert torch.equal(chain, running)


def test_slices_by_rows_are_ragged_at_the_end():
    """5 rows over 4 ranks: slices of 2, 2, 1 and 0 rows, filled up with zeros, and put together again."""
    parts = torch.randn(4, 5, 3, dtype=torch.float64)
    attrs = dict(accumulate="fp32", axis=0)
    slices = [comm.REDUCE_SCATTER.call(dict(parts=parts), attrs | dict(rank=r), exact)["out"] for r in range(4)]
    assert [len(s) for s in slices] == [2] * 4 and not slices[2][1].any() and not slices[3].any()
    whole = comm.ALL_GATHER.call(dict(parts=torch.stack(slices)), dict(axis=0, rows=5), exact)["out"]
    assert torch.equal(whole, parts[0] + parts[1] + parts[2] + parts[3])


TORCHRUN = [
    dict(tp=2, dcp=2, tail=0, split_router=True, split_latent=True),
    dict(tp=4, dcp=2, interleave=2, home="all_to_all", lse_base="2", tail=2, reduce="two_stage"),
]  # fmt: skip
WORKER = Path(__file__).with_name("torchrun_worker.py")


def torchrun(ranks: int, options: dict, folder: Path) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(WORKER), json.dumps(options), str(folder)]  # fmt: skip
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)


@pytest.mark.parametrize("options", TORCHRUN, ids=mesh_id)
def test_torchrun_equals_the_local_world_bit_for_bit(options, tmp_path):
    """Logits, all buffers of the last step and all state of every rank, in production rounding, over gloo."""
    done = torchrun(options["tp"], options, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    decoder = ranked(LocalWorld(**options), fused)
    logits = walk(decoder)
    for rank in decoder.world.ranks:
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found.pop("error") == (
            f"rank 1 runs {Mesh(options['tp'], lse_base='2')}; allowed is that of rank 0, {Mesh(options['tp'])}"
        )
        assert found == digests(decoder, rank, logits)
    logits[-1][0, 0] += 2**-6  # one unit in the last place of one logit
    assert digests(decoder, rank, logits) != found


def bad_worlds():
    """call(state, world, weights) and the text it must raise with."""
    x = torch.zeros(2)
    return [
        (lambda s, w, r: LocalWorld(3), "mesh: tp = 3; allowed are 1, 2, 4, 8, 16"),
        (lambda s, w, r: LocalWorld(True), "mesh: tp = True; allowed are 1, 2, 4, 8, 16"),
        (lambda s, w, r: LocalWorld(4, 3), "mesh: dcp = 3; allowed are 1, 2, 4, 8, 16"),
        (lambda s, w, r: LocalWorld(2, 4), "mesh: dcp = 4 with tp = 2; allowed are divisors of tp"),
        (lambda s, w, r: LocalWorld(2, 2, lse_base="10"), "mesh: lse_base = '10'; allowed are 'e', '2'"),
        (lambda s, w, r: LocalWorld(2, 2, lse_base=2), "mesh: lse_base = 2; allowed are 'e', '2'"),
        (lambda s, w, r: LocalWorld(2, interleave=0), "mesh: interleave = 0; allowed are whole numbers from 1"),
        (lambda s, w, r: LocalWorld(2, tail=3), "mesh: tail = 3; allowed are 0, 1, 2"),
        (lambda s, w, r: LocalWorld(2, home="ring"), "mesh: home = 'ring'; allowed are 'reduce_scatter', 'all_to_all'"),
        (lambda s, w, r: LocalWorld(2, accumulate="fp16"), "mesh: accumulate = 'fp16'; allowed are 'fp32', 'bf16'"),
        (lambda s, w, r: LocalWorld(2, reduce="tree"), "mesh: reduce = 'tree'; allowed are 'one_shot', 'two_stage'"),
        (
            lambda s, w, r: LocalWorld(2, sequence=True, tail=0),
            "mesh: sequence with tail = 0, reduce = 'one_shot'; allowed are 1 and 'one_shot'",
        ),
        (lambda s, w, r: w.mesh.at(2), "mesh: rank 2; allowed are 0..1"),
        (lambda s, w, r: w.exchange({0: x}, "tp"), "exchange with tensors of ranks [0]; allowed are [0, 1]"),
        (lambda s, w, r: w.exchange({0: x, 1: x}, "pp"), "group 'pp'; allowed are 'tp', 'dcp'"),
        (
            lambda s, w, r: RankedDecoder(WIDE, {0: r[0]}, w, s),
            "weights of ranks [0]; allowed are those here, [0, 1]",
        ),
        (
            lambda s, w, r: RankedDecoder(WIDE, r, LocalWorld(1), s),
            "weights of ranks [0, 1]; allowed are those here, [0]",
        ),
        (
            lambda s, w, r: RankedDecoder(WIDE, r, LocalWorld(2, split_router=True), s),
            f"state of wide, {Mesh(2)}; allowed is wide, {Mesh(2, split_router=True)}",
        ),
        (
            lambda s, w, r: (tailed := LocalWorld(2, tail=0))
            and RankedDecoder(WIDE, r, tailed, WorldState(WIDE, tailed, slots=2, pages=2)),
            "rank 0, 01.moe.latent_up: moe.latent_up.w has D = 64; allowed on this mesh is 32",
        ),
        (
            lambda s, w, r: RankedDecoder(WIDE, {0: r[0], 1: {}}, w, s),
            "rank 1, embed.shard: weight 'embed.w' is missing",
        ),
        (
            lambda s, w, r: WorldState(WIDE, LocalWorld(2, 2, interleave=3), slots=2, pages=2, page_size=4),
            "pages of 4 rows with interleave 3; allowed are divisors of the page size",
        ),
        (
            lambda s, w, r: RankedDecoder(WIDE, r, w, s).prefill(s.open(), [272]),
            "token id 272; allowed are 0..271",
        ),
        (lambda s, w, r: TorchWorld(2, device="cpu"), "1 processes for tp = 2; allowed is torchrun with 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, text", bad_worlds(), ids=range(len(bad_worlds())))
def test_bad_worlds_raise_and_change_nothing(call, text, small):
    state, world, weights = small
    before = state.clone()
    with pytest.raises(ContractError) as raised:
        call(state, world, weights)
    assert str(raised.value) == text
    assert not state.changed(before) and state.free_pages == before.free_pages


@pytest.mark.parametrize("name, value, text", [
    ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'; allowed is a whole number, as torchrun sets it"),
    ("RANK", "5", "RANK is 5; allowed are 0..0"),
])  # fmt: skip
def test_a_bad_environment_is_named(name, value, text, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ContractError) as raised:
        TorchWorld(1, device="cpu")
    assert str(raised.value) == text


@pytest.fixture(scope="module")
def small():
    world = LocalWorld(2)
    state = WorldState(WIDE, world, slots=30, pages=4, page_size=4)
    return state, world, rank_weights(sources(), WIDE, world.mesh, world.ranks)
