"""The plain decoder and its state: prefill against decode, padded batches, the plan, errors that change nothing."""

import pytest
import torch

from reference.config import CONFIGS, deep, k3, k3_rank, mini
from reference.decoder import Decoder, Model, Sampling
from reference.numerics import exact, fused
from reference.plan import plan
from reference.stage import ContractError
from reference.state import DecodeState, Request, step_index
from reference.weights import RandomCheckpoint, all_weights

PROMPTS = ([256, *b"def f(x):"], [256, *b"a"], [256, *b"\x00\xff repeated repeated repeated"])


@pytest.fixture(scope="module")
def model():
    return Model(mini, all_weights(RandomCheckpoint(mini, 1), mini))


def state(num=fused, **kw):
    return DecodeState(mini, slots=6, pages=40, num=num, **kw)


def test_prefill_equals_token_by_token(model):
    """In float64 chunk form, causal attention and grouped experts give the single steps' logits and state."""
    ids = PROMPTS[2] * 3
    one, two = state(exact, order=1), state(exact, order=1)
    a, b = one.open(), two.open()
    want = Decoder(model, one).prefill(a, ids).act["vocab_logits"]
    walker = Decoder(model, two)
    walker.prefill(b, ids[:1])
    for token in ids[1:]:
        got = walker.decode([b], [token]).act["vocab_logits"]
    assert (got - want).norm() < 1e-11 * want.norm()
    for key, t in one.tensors.items():
        assert (two.tensors[key] - t).norm() <= 1e-11 * t.norm(), key


def test_prompts_longer_than_a_chunk(model, monkeypatch):
    ids = PROMPTS[2]
    whole = Decoder(model, (a := state(exact))).prefill(a.open(), ids).act["vocab_logits"]
    monkeypatch.setattr("reference.decoder.PREFILL_CHUNK", 7)
    pieces = Decoder(model, (b := state(exact))).prefill(b.open(), ids).act["vocab_logits"]
    assert (whole - pieces).norm() < 1e-11 * whole.norm()


def test_padded_rows_and_poisoned_memory_change_nothing(model):
    def run(rows, poisoned, order):
        s = state(order=order)
        d, requests = Decoder(model, s), []
        for p in PROMPTS:
            requests.append(s.open())
            d.prefill(requests[-1], p)
        for r in requests:
            s.reserve((r, r.length + 3))
        if poisoned:
            s.poison(keep=requests)
        before = s.clone()
        for token in (65, 66, 67):
            logits = d.decode(requests, [token] * 3, rows=rows).act["vocab_logits"][:3]
        return logits, s.changed(before), requests

    want, _, _ = run(None, False, None)
    got, changed, requests = run(5, True, 9)
    assert (got.double() - want.double()).norm() < 2e-2 * want.double().norm()  # another batch: other GEMM blocking
    slots, pages = {r.slot for r in requests}, {p for r in requests for p in r.pages}
    for name, rows in changed.items():
        assert set(rows) <= (pages if name.startswith("cache") else slots), name


def test_block_zero_is_the_embedding(model):
    s = state()
    index = step_index(s, [s.open()], [65])
    index |= dict(temperature=torch.zeros(1), top_k=torch.zeros(1, dtype=torch.int32), top_p=torch.ones(1),
                  seed=torch.zeros(1, dtype=torch.int64))  # fmt: skip
    space = Decoder(model, s).run(plan(mini, 1), index)
    assert torch.equal(space.act["blocks"][0, 0], model.weights["embed.w", None][65])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda c: c.name)
def test_the_plan_follows_the_layer_pattern(config):
    steps = plan(config, 2).steps
    mla = [s.layer for s in steps if s.stage.name == "mla.attention"]
    assert tuple(mla) == config.mla_layers and len(
        [s for s in steps if s.stage.name == "kda.conv"]
    ) == config.layers - len(mla)
    writes = [(s.layer, s.attrs["write"]) for s in steps if s.stage.name == "attn_res.pre" and s.attrs["write"] >= 0]
    assert writes == [(b * config.block, b) for b in range(config.blocks)]
    assert [s.layer for s in steps if s.stage.name == "mlp.gate_up"] == [0]
    for step in steps:
        assert set(step.bind) <= set(step.stage.by_name), step.key
        required = {t.name for t in step.stage.tensors if not t.optional}
        assert required <= set(step.bind), step.key


def test_k3_is_the_published_pattern():
    assert k3.mla_layers == (*range(3, 92, 4), 92) and len(k3.mla_layers) == 24 and k3.blocks == 8
    pre = {s.layer: s.attrs for s in plan(k3, 1).steps if s.stage.name == "attn_res.pre"}
    assert [pre[i]["nb"] for i in (0, 1, 12, 13, 84, 85, 92)] == [0, 1, 1, 2, 7, 8, 8]
    assert pre[84] == dict(nb=7, write=7)
    assert (k3_rank(8).in_proj_width, k3_rank(16).in_proj_width, k3_rank(16).expert_inter) == (6288, 3216, 256)
    assert deep.mla_layers == k3.mla_layers and deep.block == k3.block
    with pytest.raises(ValueError, match="tp = 3: allowed are 1, 2, 4, 8, 16"):
        k3_rank(3)


def test_sampling_replays_and_differs_by_seed(model):
    def run(seed):
        return Decoder(model, state()).generate(PROMPTS[:2], 12, [Sampling(0.8, top_k=40, top_p=0.95, seed=seed)] * 2)

    assert run(1) == run(1) != run(2)


def bad_steps():
    full = Request(1, [3], 16 * 30)
    return [
        (lambda s, r: step_index(s, [r, r], [1]), "1 token ids for 2 requests"),
        (lambda s, r: step_index(s, [r], [272]), r"token id 272; allowed are 0\.\.271"),
        (lambda s, r: step_index(s, [r], [-1]), r"token id -1; allowed are 0\.\.271"),
        (lambda s, r: step_index(s, [r, r], [1, 2], rows=1), "2 requests do not fit into 1 rows"),
        (lambda s, r: step_index(s, [r, r], [1, 2], prefill=True), "prefill takes one request at a time, got 2"),
        (lambda s, r: step_index(s, [], []), "at least one request"),
        (lambda s, r: step_index(s, [Request(1, [], 16 * 60)], [1]), "61 pages wanted for 961 tokens, 39 free"),
        (lambda s, r: step_index(s, [full, Request(s.open().slot, [], 16 * 60)], [1, 2]), "pages wanted"),
        (lambda s, r: step_index(s, [r, Request(r.slot)], [1, 2]), "the request of slot 1 occurs more than once"),
        (lambda s, r: step_index(s, [Request(2)], [1]), "slot 2 belongs to no open request"),
        (lambda s, r: step_index(s, [Request(0)], [1]), "slot 0 belongs to no open request"),
        (lambda s, r: step_index(s, [r], [1.5]), r"token id 1\.5"),
        (lambda s, r: s.close(Request(2)), "slot 2 belongs to no open request"),
        (lambda s, r: Sampling(temperature=float("inf")), "finite temperature"),
        (lambda s, r: Sampling(top_k=2**31), r"top_k < 2\^31"),
        (lambda s, r: Sampling(top_p=1e-50), "0 < top_p <= 1"),
        (lambda s, r: Sampling(seed=2**63), "64-bit seed"),
        (lambda s, r: Sampling(temperature=-1.0), "temperature >= 0"),
        (lambda s, r: Sampling(temperature=float("nan")), "temperature >= 0"),
        (lambda s, r: Sampling(top_p=0.0), "0 < top_p <= 1"),
        (lambda s, r: DecodeState(mini, slots=1, pages=4), "slots=1, pages=4"),
        (lambda s, r: [s.open() for _ in range(9)], "no free slot"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, text", bad_steps(), ids=range(len(bad_steps())))
def test_bad_steps_raise_and_leave_pages_alone(call, text):
    s = state()
    r, pages = s.open(), list(s.free_pages)
    before = s.clone()
    with pytest.raises(ContractError, match=text):
        call(s, r)
    assert s.free_pages == pages and not s.changed(before)


def wrong_calls():
    mask = torch.ones(1, mini.vocab, dtype=torch.bool)
    return [
        (lambda d, r: d.decode([r], [1], [Sampling()] * 2), "2 samplings for 1 requests"),
        (lambda d, r: d.decode([r], [1], allowed=mask.int()), "allowed is torch.int32"),
        (lambda d, r: d.decode([r], [1], allowed=mask[0]), r"allowed is torch.bool \(1, 272\)"),
        (lambda d, r: d.decode([r], [1], rows=3, allowed=mask), r"allowed is torch.bool \(3, 272\)"),
        (lambda d, r: d.decode([r], [1], allowed=~mask), "row 0 of the mask allows no token"),
        (lambda d, r: d.prefill(r, [1] * 900), "pages wanted for 905 tokens"),
        (lambda d, r: d.prefill(r, [1] * 20 + [272]), "token id 272"),
        (lambda d, r: d.generate([[1], [272]], 2), "token id 272"),
        (lambda d, r: d.generate([[1]] * 9, 2), "no free slot"),
        (lambda d, r: d.generate([[1]], 0), "0 steps"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, text", wrong_calls(), ids=range(len(wrong_calls())))
def test_wrong_calls_leave_the_request_and_its_state(model, monkeypatch, call, text):
    """Nothing of an open request changes, and what was taken is given back; slots that were free may be rewritten."""
    monkeypatch.setattr("reference.decoder.PREFILL_CHUNK", 16)
    d = Decoder(model, state())
    r = d.state.open()
    d.prefill(r, [256, *b"some"])
    before, known = d.state.clone(), (r.slot, list(r.pages), r.length)
    with pytest.raises(ContractError, match=text):
        call(d, r)
    assert (r.slot, r.pages, r.length) == known
    assert sorted(d.state.free_slots) == sorted(before.free_slots)
    assert sorted(d.state.free_pages) == sorted(before.free_pages)
    for (name, layer), t in d.state.tensors.items():
        mine = r.pages if name == "cache" else [r.slot]
        assert torch.equal(t[mine], before.tensors[name, layer][mine])


def test_a_closed_request_is_spent():
    s = state()
    r = s.open()
    s.close(r)
    for call in (lambda: s.close(r), lambda: step_index(s, [r], [1])):
        with pytest.raises(ContractError, match="slot 0 belongs to no open request"):
            call()
    assert len({s.open().slot, s.open().slot}) == 2


def test_digest_names_the_changed_slot():
    s = state()
    before = s.digest()
    s.tensors["recurrent", 0][2, 1, 5, 7] = 1e-30
    after = s.digest()
    assert [i for i, (a, b) in enumerate(zip(before["recurrent.0"], after["recurrent.0"], strict=True)) if a != b] == [
        2
    ]
    assert {k for k in before if before[k] != after[k]} == {"recurrent.0"}
