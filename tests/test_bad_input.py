"""Bad input, from a wrong world to a torn file: one line names the value, and no byte of state changes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import golden
from reference import dcp
from reference.attn_res import POST, PRE
from reference.checkpoint import INDEX, Checkpoint, write
from reference.config import Config, deep, mini
from reference.decoder import Decoder, Model, Sampling
from reference.draft_config import mini_draft
from reference.kda import RECURRENCE
from reference.layout import CONFIG, CheckpointError
from reference.mla import ATTENTION, CACHE_WRITE, CACHE_WRITE_FP8
from reference.numerics import exact, fused
from reference.ranks import RankedDecoder, WorldState
from reference.shard import Mesh, rank_config, rank_weights
from reference.spec_state import SpecState
from reference.speculate import SpeculativeDecoder
from reference.stage import ContractError, bf16, f8
from reference.state import DecodeState, Request
from reference.weights import RandomCheckpoint, all_weights, random_checkpoint_tensors
from reference.world import LocalWorld, TorchWorld

small = replace(deep, name="small", layers=3, mla_layers=(1,), block=2, heads=2, experts=4, expert_inter=64,
                shared_inter=64)  # fmt: skip
i32 = torch.int32


@pytest.fixture(scope="module")
def model():
    return Model(small, all_weights(RandomCheckpoint(small, 1), small))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "model"
    write(folder, small, random_checkpoint_tensors(small, 1), shard_bytes=1 << 18)
    return folder


@pytest.fixture(scope="module")
def ranks():
    world = LocalWorld(2)
    return world, rank_weights(RandomCheckpoint(small, 1), small, world.mesh, world.ranks)


@pytest.fixture(scope="module")
def x(model, checkpoint, ranks, tmp_path_factory):
    """Everything a caller may hold: a decoder with two requests, speculation, ranks, a checkpoint."""
    d = Decoder(model, DecodeState(small, slots=5, pages=9, page_size=4, order=1))
    one, two = d.state.open(), d.state.open()
    d.prefill(one, [256, *b"bad"])
    d.prefill(two, [65])
    spec = SpecState(DecodeState(small, slots=18, pages=9, page_size=4, order=2))
    s = SpeculativeDecoder(model, spec, SimpleNamespace(taps=(), observe=lambda *a: None))
    r = s.prefill([256, *b"in"])
    world, weights = ranks
    state = WorldState(small, world, slots=3, pages=5, page_size=4)
    ranked = RankedDecoder(small, weights, world, state)
    ranked.prefill(state.open(), [1, 2])
    return SimpleNamespace(d=d, one=one, two=two, s=s, r=r, world=world, weights=weights, ranked=ranked, model=model,
                           folder=checkpoint, work=tmp_path_factory)  # fmt: skip


def stage_args(**other) -> dict:
    """Arguments of attention over 3 pages of 4 rows, two tokens."""
    return dict(q_lat=torch.zeros(2, 2, 576).to(bf16), block_table=torch.tensor([[1], [2]], dtype=i32),
                lens=torch.tensor([4, 1], dtype=i32), cache=torch.zeros(3, 4, 576).to(bf16),
                o_lat=torch.zeros(2, 2, 512).to(bf16), lse=torch.zeros(2, 2)) | other  # fmt: skip


def rows(**other) -> dict:
    return dict(kv_c=torch.zeros(2, 512).to(bf16), k_pe=torch.zeros(2, 64).to(bf16),
                slot_mapping=torch.tensor([5, 6]), cache=torch.zeros(3, 4, 576).to(bf16)) | other  # fmt: skip


def narrow(**other) -> dict:
    return rows(cache=rows()["cache"].to(f8)) | other


def steps(slots) -> dict:
    wide = lambda *s: torch.zeros(*s)  # noqa: E731
    return dict(q=wide(2, 2, 128), k=wide(2, 2, 128), v=wide(2, 2, 128), raw_g=wide(2, 256).to(bf16),
                b=wide(2, 2).to(bf16), A_log=wide(2), dt_bias=wide(256), recurrent=wide(4, 2, 128, 128),
                o=wide(2, 2, 128), slots=torch.tensor(slots, dtype=i32))  # fmt: skip


def bank(stage, **attrs) -> None:
    t = dict(prefix=torch.zeros(1, 64).to(bf16), blocks=torch.zeros(1, 8, 64).to(bf16), w_norm=torch.ones(64).to(bf16),
             w_proj=torch.ones(64).to(bf16), out=torch.zeros(1, 64).to(bf16))  # fmt: skip
    stage.apply(t, attrs, fused)


def with_weight(x, key, t) -> None:
    held = dict(x.model.weights)
    if t is None:
        del held[key]
    else:
        held[key] = t
    Decoder(Model(small, held), x.d.state).decode([x.one], [65])


def moved(request: Request, **fields) -> Request:
    return replace(request, **fields)


def edited(x, file: str, edit) -> Path:
    """The checkpoint in another folder with one file changed: edit(bytes) -> bytes."""
    folder = x.work.mktemp("edited")
    for f in x.folder.iterdir():
        (folder / f.name).write_bytes(edit(f.read_bytes()) if f.name == file else f.read_bytes())
    return folder


def text_field(name, value):
    def edit(raw):
        obj = json.loads(raw)
        obj["text_config"][name] = value
        return json.dumps(obj).encode()

    return edit


SHARD = "model-00001-of-"


def shard_cut(x):
    name = next(f.name for f in x.folder.iterdir() if f.name.startswith(SHARD))
    Checkpoint(edited(x, name, lambda raw: raw[: len(raw) // 2])).layer(0)


def shard_of_noise(x):
    name = next(f.name for f in x.folder.iterdir() if f.name.startswith(SHARD))
    Checkpoint(edited(x, name, lambda raw: raw[:8] + bytes(len(raw) - 8))).layer(0)


fp8_scale = torch.tensor([0.5])
draft = lambda *shape, value=0: torch.full(shape, value, dtype=torch.int64)  # noqa: E731
mask = torch.zeros(1, small.vocab, dtype=torch.bool)
TABLE = {
    # Worlds and meshes.
    "world size": (lambda x: LocalWorld(3), "mesh: tp = 3; allowed are 1, 2, 4, 8, 16"),
    "heads": (lambda x: rank_config(mini, Mesh(4)), "mini: heads = 2 over 4 ranks; allowed are multiples of 4"),
    "context ranks": (lambda x: LocalWorld(2, 4), "mesh: dcp = 4 with tp = 2; allowed are divisors of tp"),
    "LSE base of a mesh": (lambda x: LocalWorld(2, 2, lse_base="10"), "mesh: lse_base = '10'; allowed are 'e', '2'"),
    "LSE base of a merge": (lambda x: dcp.shares(torch.zeros(2, 1), "10", fused),
                            "LSE base '10'; allowed are 'e', '2'"),
    "rank": (lambda x: Mesh(2).at(2), "mesh: rank 2; allowed are 0..1"),
    "interleave": (lambda x: WorldState(small, LocalWorld(2, 2, interleave=3), slots=2, pages=2, page_size=4),
                   "pages of 4 rows with interleave 3; allowed are divisors of the page size"),
    "processes": (lambda x: TorchWorld(2, device="cpu"), "1 processes for tp = 2; allowed is torchrun with 2"),
    "weights of one rank": (lambda x: RankedDecoder(small, {0: x.weights[0]}, x.world, x.ranked.state),
                            "weights of ranks [0]; allowed are those here, [0, 1]"),
    "context group": (lambda x: x.world.members(0, "ep"), "group 'ep'; allowed are 'tp', 'dcp'"),
    # Batches.
    "token beyond the vocabulary": (lambda x: x.d.decode([x.one], [272]), "token id 272; allowed are 0..271"),
    "negative token": (lambda x: x.d.prefill(x.two, [1, -1]), "token id -1; allowed are 0..271"),
    "request twice": (lambda x: x.d.decode([x.one, x.one], [1, 2]),
                      "the request of slot {one} occurs more than once in a step; requests must differ"),
    "two requests in one slot": (lambda x: x.d.decode([x.one, moved(x.two, slot=x.one.slot)], [1, 2]),
                                 "the request of slot {one} occurs more than once in a step; requests must differ"),
    "closed request": (lambda x: x.d.decode([moved(x.one, slot=0)], [1]),
                       "slot 0 belongs to no open request; allowed are requests that are not closed"),
    "slot beyond the state": (lambda x: x.d.decode([moved(x.one, slot=9)], [1]), "slot 9; allowed are 1..4"),
    "negative position": (lambda x: x.d.decode([moved(x.one, length=-3)], [1]),
                          "the request of slot {one} holds -3 tokens; allowed are 0 and more"),
    "page beyond the cache": (lambda x: x.d.decode([moved(x.one, pages=[9, 1])], [1]),
                              "page 9 of slot {one}; allowed are 1..8"),
    "null page": (lambda x: x.d.decode([moved(x.one, pages=[0, 1])], [1]), "page 0 of slot {one}; allowed are 1..8"),
    "shared page": (lambda x: x.d.decode([x.one, moved(x.two, pages=x.one.pages[:1])], [1, 2]),
                    "page {page} occurs twice in a step; pages of requests must differ"),
    "prompt beyond the cache": (lambda x: x.d.prefill(x.two, [1] * 40), "10 pages wanted for 41 tokens, 6 free"),
    "more requests than rows": (lambda x: x.d.decode([x.one, x.two], [1, 2], rows=1),
                                "2 requests do not fit into 1 rows"),
    "mask without a token": (lambda x: x.d.decode([x.one], [1], allowed=mask),
                             "row 0 of the mask allows no token; at least one is needed"),
    "sampling": (lambda x: x.d.decode([x.one], [1], [Sampling(top_p=2.0)]), "allowed are a finite temperature >= 0"),
    # Models, weights, modes.
    "state of another model": (lambda x: Decoder(Model(replace(small, experts=8), {}), x.d.state),
                               "state of small has experts = 4; allowed is 8, that of small"),
    "state of another cache": (lambda x: Decoder(Model(replace(small, mla_cache="fp8"), {}), x.d.state),
                               "state of small has mla_cache = 'bf16'; allowed is 'fp8', that of small"),
    "draft over a plain state": (lambda x: Decoder(Model(mini_draft, {}), x.d.state),
                                 "state of small; allowed is that of mini-dspark"),
    "mode": (lambda x: Decoder(x.model, x.d.state, exact),
             "mode 'exact' over a state kept in 'fused'; allowed is the state's"),
    "missing weight": (lambda x: with_weight(x, ("head.w_norm", None), None),
                       "head.norm: weight 'head.w_norm' is missing"),
    "narrow weight": (lambda x: with_weight(x, ("moe.latent_up.w", 2), torch.zeros(32, 32).to(bf16)),
                      "02.moe.latent_up: moe.latent_up.w has D = 32; allowed is 64"),
    "weight of another dtype": (lambda x: with_weight(x, ("kda.A_log", 2), torch.zeros(2).to(bf16)),
                                "02.kda.recurrence: kda.A_log is torch.bfloat16 with 1 axes; "
                                "allowed is torch.float32 with 1"),
    # Stages.
    "block table": (lambda x: ATTENTION.check(stage_args(block_table=torch.tensor([[1], [3]], dtype=i32))),
                    "mla.attention: block_table holds 3; allowed are 0..2"),
    "negative block": (lambda x: ATTENTION.check(stage_args(block_table=torch.tensor([[1], [-1]], dtype=i32))),
                       "mla.attention: block_table holds -1; allowed are 0..2"),
    "lengths beyond the table": (lambda x: ATTENTION.check(stage_args(lens=torch.tensor([4, 5], dtype=i32))),
                                 "mla.attention: lens holds 5; the block table has room for 4 rows"),
    "cache row beyond the pages": (lambda x: CACHE_WRITE.check(rows(slot_mapping=torch.tensor([5, 12]))),
                                   "mla.cache_write: slot_mapping holds 12; allowed are rows 0..11"),
    "cache row twice": (lambda x: CACHE_WRITE.check(rows(slot_mapping=torch.tensor([5, 5]))),
                        "mla.cache_write: slot_mapping holds slot 5 more than once; live slots must differ"),
    "live slot twice": (lambda x: RECURRENCE.check(steps([3, 3])),
                        "kda.recurrence: slots holds slot 3 more than once; live slots must differ"),
    "dtype of a scale": (lambda x: CACHE_WRITE_FP8.check(narrow(cache_scale=fp8_scale.half())),
                         "mla.cache_write_fp8: cache_scale is torch.float16; allowed is torch.float32"),
    "scale of zero": (lambda x: CACHE_WRITE_FP8.check(narrow(cache_scale=0 * fp8_scale)),
                      "mla.cache_write_fp8: cache_scale holds 0.0; allowed are finite numbers above 0"),
    "blocks beyond the bank": (lambda x: bank(POST, nb=9, write=-1),
                               "attn_res: nb = 9, write = -1 with 8 slots; allowed are 0..8 and -1..7"),
    "write beyond the bank": (lambda x: bank(PRE, nb=8, write=8),
                              "attn_res: nb = 8, write = 8 with 8 slots; allowed are 0..8 and -1..7"),
    # Speculation.
    "draft longer than the block": (lambda x: x.s.verify([x.r], draft(1, 8), None),
                                    "draft has shape (1, 8); allowed are 1 rows of at most 7 tokens"),
    "draft beyond the vocabulary": (lambda x: x.s.verify([x.r], draft(1, 7, value=272), None),
                                    "draft holds 272; allowed are tokens 0..271 and -1 for padding"),
    "draft of another model": (lambda x: SpecState(x.d.state, draft=mini_draft),
                               "draft mini-dspark: hidden = 192; small has 64"),
    "draft of another length": (lambda x: SpecState(x.d.state, drafts=5, draft=replace(
                                    mini_draft, hidden=64, taps=(0, 2))),
                                "draft mini-dspark drafts 7 tokens; the state is made for 5"),
    "speculated request twice": (lambda x: x.s.verify([x.r, x.r], draft(2, 7), None),
                                 "a request is closed, has no token yet, or occurs twice"),
    "form": (lambda x: SpecState(x.d.state, form="tree"), "form 'tree' with 7 drafts: allowed are slots, record"),
    # Files.
    "truncated index": (lambda x: Checkpoint(edited(x, INDEX, lambda raw: raw[: len(raw) // 2])), "no JSON ("),
    "index without tensors": (lambda x: Checkpoint(edited(x, INDEX, lambda raw: b'{"weight_map": {}}')),
                              "names 0 tensors; config.json asks for 48 of experts alone"),
    "truncated shard": (shard_cut, "truncated or no safetensors file"),
    "corrupted shard": (shard_of_noise, "truncated or no safetensors file"),
    "token ids beyond the vocabulary": (lambda x: Checkpoint(edited(x, CONFIG, text_field("eos_token_id", 272))),
                                        "text_config.eos_token_id is 272; allowed is below vocab_size = 272"),
    "number of layers": (lambda x: Checkpoint(edited(x, CONFIG, text_field("num_hidden_layers", 4))),
                         "full_attn_layers and kda_layers do not name each layer 1..4 once"),
    "no checkpoint": (lambda x: Checkpoint(Path(golden.__file__).parent / "prompts"),
                      "config.json: the file is missing"),
}  # fmt: skip


def held(x) -> dict:
    """Every byte of state there is, and who owns what."""
    states = dict(plain=x.d.state, speculated=x.s.state.base, ranks=x.ranked.state)
    out = {name: s.digest() for name, s in states.items() if name != "ranks"}
    tensors = {("ranks", *k): t for k, t in x.ranked.state.tensors.items()} | {
        ("own", *k): t for k, t in x.s.state.own.items()
    }
    out |= {key: t.view(torch.uint8).numpy().tobytes() for key, t in tensors.items()}
    out["free"] = {name: (sorted(s.free_slots), sorted(s.free_pages)) for name, s in states.items()}
    requests = (x.one, x.two, x.r.request)
    return out | dict(owners=[(r.slot, list(r.pages), r.length) for r in requests], tokens=list(x.r.tokens))


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_named_and_changes_nothing(x, name):
    call, text = TABLE[name]
    before = held(x)
    with pytest.raises((ContractError, CheckpointError, ValueError)) as raised:
        call(x)
    told = str(raised.value)
    assert text.format(one=x.one.slot, page=x.one.pages[0]) in told and "\n" not in told
    assert held(x) == before


def test_the_table_is_long_enough_and_the_fixture_is_good(x):
    """A step that is allowed changes what `held` sees, in all three states."""
    assert len(TABLE) >= 25
    before = held(x)
    x.d.decode([x.one, x.two], [65, 66], rows=3)
    x.s.verify([x.r], draft(1, 7, value=65), None)
    x.ranked.decode([Request(x.ranked.state.open().slot)], [3])
    after = held(x)
    assert after["plain"] != before["plain"] and after["speculated"] != before["speculated"]
    assert any(after[k] != before[k] for k in before if k[0] == "ranks") and isinstance(small, Config)
