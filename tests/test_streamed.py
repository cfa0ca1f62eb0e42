"""Layer by layer is the whole model: hidden states, ranks, pieces over a recording, and faults that are found."""

import shutil
from pathlib import Path

import pytest
import torch
from stand_ins import PROMPTS, small, stand_in

from equivalence import recording, streamed
from equivalence.cases import load_model
from equivalence.law_twin import LawTwin, every_stage, served_by
from equivalence.recording import Hidden
from equivalence.rounding import budget_excess
from equivalence.streamed import HEAD, Serving, Stream, piece_plan, pieces, stream
from reference.checkpoint import Checkpoint, CheckpointError
from reference.decoder import Decoder, Model
from reference.numerics import fused, unfused
from reference.shard import Mesh
from reference.stage import ContractError
from reference.state import DecodeState
from reference.weights import all_weights

DECODED = 2


def begin(checkpoint=None, decoded=DECODED) -> Hidden:
    return Hidden.empty((checkpoint or stand_in()).config, PROMPTS, decoded, ["a", "b", "c"])


@pytest.fixture(scope="module")
def whole() -> Hidden:
    """What leaves the last layer after one go."""
    return stream(stand_in(), begin(), 0, small.layers - 1, [])


def same(a: Hidden, b: Hidden) -> bool:
    fields = "prefix", "delta", "blocks"
    return a.layer == b.layer and all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields)


def test_the_plan_is_cut_into_pieces_without_rest():
    todo = pieces(small, 0, small.layers - 1)
    for seat in (None, Mesh(2).at(1)):
        steps = [s.key for piece in todo for s in piece_plan(small, 3, piece, seat=seat).steps]
        assert steps == [s.key for s in streamed.plan(small, 3, world=seat).steps]
    assert pieces(small, 1, 2) == [1, 2] and pieces(small, 5, 5) == [5, HEAD]
    for first, last in ((2, 1), (0, 6), (-1, 2)):
        with pytest.raises(ContractError, match="allowed are 0-5"):
            pieces(small, first, last)


def test_hidden_states_are_those_of_the_decoder(whole):
    """Bit for bit: the same laws on the same values, only in another order."""
    checkpoint = stand_in()
    state = DecodeState(small, slots=6, pages=30, order=1)
    decoder = Decoder(Model(small, all_weights(checkpoint, small)), state)
    requests = [state.open() for _ in PROMPTS]
    for request, ids in zip(requests, PROMPTS, strict=True):
        decoder.prefill(request, ids[:-DECODED])
    for step in range(-DECODED, 0):
        act = decoder.decode(requests, [ids[step] for ids in PROMPTS]).act
    last = [start + len(ids) - 1 for start, ids in zip(whole.starts, whole.tokens, strict=True)]
    assert torch.equal(whole.delta[last], act["delta"]) and torch.equal(whole.blocks[last], act["blocks"])
    moved = (whole.prefix[last].float() + whole.delta[last].float()).bfloat16()
    assert torch.equal(moved, act["prefix"])  # attn_res.final adds the last delta


def test_pieces_over_recordings_are_one_go(whole, tmp_path):
    checkpoint, hidden = stand_in(), begin()
    for first, last in ((0, 0), (1, 3), (4, 5)):
        left = stream(checkpoint, hidden, first, last, [])
        recording.write(tmp_path / str(first), left, checkpoint)
        hidden = recording.read(tmp_path / str(first), checkpoint)
        assert same(left, hidden) and hidden.tokens == list(PROMPTS) and hidden.verified
    assert same(hidden, whole) and hidden.prompts == ["a", "b", "c"]


@pytest.mark.parametrize("which, num, tp, rank", [(0, fused, 2, 1), (1, unfused, None, 0)])
def test_the_law_keeps_its_budget_under_hostile_statistics(which, num, tp, rank):
    """A layer of each kind, KDA + dense, KDA + MoE, MLA + MoE, and the embedding before them."""
    serving = Serving(num.mode, **served_by(*every_stage(num)))
    left = stream(stand_in(), begin(decoded=1), 0, 1, [serving], mesh=tp and Mesh(tp), rank=rank)
    left = stream(stand_in(), left, 3, 3, [serving], mesh=tp and Mesh(tp), rank=rank)
    assert same(
        left, stream(stand_in(), begin(decoded=1), 0, 3, [])
    )  # a rank is judged beside the whole, which goes on
    result = serving.result(dict(tokens=1))
    assert not budget_excess(result, which) and not result.hollow and not result.refused
    assert {f.place.layer for f in result.findings} == {0, 1, 3, None}
    assert num is unfused or result.verdict == "equal"


def test_what_ranks_hold_adds_up_to_the_layer():
    """The cuts, the state and the values fed for other ranks are right: partial sums make the whole's rounded value."""
    checkpoint, parts = stand_in(()), {}
    stages = frozenset(("kda.o_proj", "moe.finalize", "moe.shared_down"))
    made = Stream(checkpoint, begin())
    for piece in ("embed", 0):
        made.through(piece)
    for rank in (None, 0, 1):
        stream_ = Stream(checkpoint, made.hidden, mesh=None if rank is None else Mesh(2), rank=rank or 0)
        run = streamed._Run(stream_, 1)
        law = run.decoder(small, None)
        law.keep = stages | (run.kept_stages() if rank is not None else stages)
        steps = list(run.law(law))
        if rank is None:
            parts[rank] = steps[0].kept
            continue
        local = run.decoder(stream_.local, stream_.seat)
        local.keep = stages
        made_plan = run.plan(len(steps[0].index["ids"]), True, stream_.seat)
        parts[rank] = local.walk(made_plan, run._greedy(steps[0].index, 1), steps[0].entering, steps[0].kept)[1]
    for stage in stages:
        want = parts[None][stage].double()
        got = parts[0][stage].double() + parts[1][stage].double()
        assert (got - want).norm() < 3 * 2**-9 * want.norm()  # three roundings to bf16
        assert (parts[0][stage].double() - want).norm() > 0.1 * want.norm()


def test_a_fault_in_one_layer_is_named():
    def spoil(values, tensors):
        values["out"] = values["out"] * 1.01

    right, wrong = (LawTwin(name, ("kda.out_norm",), fused, s) for name, s in (("right", None), ("wrong", spoil)))
    served = served_by(right, wrong)
    served["selection"] = served["selection"].swap("kda.out_norm", "right").swap("kda.out_norm", "wrong", (1, 1))
    serving = Serving("one fault", **served)
    stream(stand_in(), begin(decoded=1), 0, 2, [serving], mesh=Mesh(2))
    assert {f.place.key for f in serving.findings if not f.ok} == {"01.kda.out_norm"}
    by = {e.key: e.served_by for e in serving.served.values() if e.served_by != "reference"}
    assert by == {"00.kda.out_norm": "right", "01.kda.out_norm": "wrong", "02.kda.out_norm": "right"}


def test_weights_that_change_are_seen():
    def spoil(values, tensors):
        tensors["w_o_norm"][0] += 1

    serving = Serving("fault", **served_by(LawTwin("fault", ("kda.out_norm",), fused, spoil), layers=(1, 1)))
    stream(stand_in(), begin(), 0, 1, [serving])
    bad = [f for f in serving.findings if f.reasons == ["was changed"]]
    assert [(f.place.layer, f.place.tensor) for f in bad] == [(1, "kda.w_o_norm")]


def test_only_the_shards_of_the_layers_are_touched(tmp_path):
    checkpoint = stand_in()
    left = stream(checkpoint, begin(), 0, 2, [])
    recording.write(tmp_path / "r", left, checkpoint)
    folder = shutil.copytree(checkpoint.folder, tmp_path / "weights")
    needed = {shard for name, (shard, _) in checkpoint._stored.items() if ".layers.3." in name}
    gone = [f for f in Path(folder).glob("*.safetensors") if f.name not in needed]
    assert len(needed) < len(gone)
    for file in gone:
        file.unlink()
    part = Checkpoint(folder)
    hidden = recording.read(tmp_path / "r", part)
    assert not hidden.verified  # the shard of layer 2 is gone, too
    assert same(stream(part, hidden, 3, 3, []), stream(checkpoint, left, 3, 3, []))
    with pytest.raises(CheckpointError, match="the shard is missing"):
        stream(part, recording.read(tmp_path / "r", part), 3, 4, [])


def test_weights_start_where_kernels_can_load_them():
    """A mapped file puts tensors at odd places."""
    stored = [stand_in().tensor(name) for name in ("language_model.model.norm.weight", "language_model.lm_head.weight")]
    assert any(t.data_ptr() % 16 for t in [*stored, *stand_in().layer(3).values()])
    model, _ = load_model(str(stand_in().folder))
    for weights in (model.weights, streamed.piece_weights(stand_in(), 3, "cpu")):
        assert not [key for key, t in weights.items() if t.data_ptr() % 64]


def test_layers_come_in_order():
    checkpoint = stand_in()
    left = stream(checkpoint, begin(), 0, 1, [])
    with pytest.raises(ContractError, match="hidden states enter layer 2; allowed is at most the first one judged, 1"):
        stream(checkpoint, left, 1, 3, [])
    with pytest.raises(ContractError, match="layer 4 after hidden states entering layer 2"):
        Stream(checkpoint, left).through(4)
    serving = Serving("law", **served_by(LawTwin("law", ("mla.lora_norm",), fused)))
    stream(checkpoint, left, 3, 3, [serving])  # layer 2 by the law alone
    assert {f.place.layer for f in serving.findings} == {3, None}


@pytest.mark.parametrize("tokens, decoded, text", [
    ([[256]], 1, "request 0 has 1 tokens; 1 decoded ones need 2"), ([], 1, "0 requests, 1 decoded tokens"),
    ([[256, 1]], 0, "1 requests, 0 decoded tokens"),
])  # fmt: skip
def test_requests_need_tokens(tokens, decoded, text):
    with pytest.raises(ContractError, match=text):
        Hidden.empty(small, tokens, decoded)
