"""The draft model against a dense float64 reading of SPEC.md 10.1 and 10.2, and its configuration and checkpoint."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from reference.config import deep, k3, mini
from reference.decoder import GREEDY, Decoder, Model, sampling_index
from reference.draft import ADD_NORM, GATE_UP, MARKOV, NORM, ROTATE, TAP, tapped
from reference.draft_config import draft_table, draft_weights, fits, k3_draft, mini_draft, random_draft
from reference.drafters import DSpark
from reference.layout import CheckpointError
from reference.numerics import exact, fused
from reference.plan import plan
from reference.sample import gumbel
from reference.spec_state import SpecState, token_rows
from reference.stage import ContractError
from reference.state import DecodeState, step_index
from reference.verify import stream
from reference.weights import RandomCheckpoint, all_weights, top_weights

small = replace(deep, name="small", layers=5, mla_layers=(3, 4), block=4)
draft = replace(mini_draft, name="small-draft", vocab=small.vocab, hidden=small.hidden, taps=(0, 2, 4), layers=2)


@pytest.fixture(scope="module")
def model():
    return Model(small, all_weights(RandomCheckpoint(small, 1), small))


def test_published_numbers():
    assert abs(k3_draft.softmax_scale - 0.130861) < 1e-6
    table = draft_table(k3_draft)
    assert len(table) == 68
    own = sum(math.prod(shape) for name, (shape, _) in table.items() if name != "embed_tokens.weight")
    whole = own + math.prod(table["embed_tokens.weight"][0])
    assert round(own / 1e9, 2) != 3.56 and round(whole / 1e9, 2) == 3.56  # the stored embedding counts
    assert k3_draft.taps == (2, 23, 47, 71, 89) and k3_draft.block == 7 and k3_draft.mask == 163837
    fits(k3_draft, k3)
    fits(mini_draft, mini)


def test_frequencies_are_yarn():
    """A pair that turns more than 32 times in 32768 positions keeps its speed, one that turns less than once is 32
    times slower; in between the share of the slow one grows by equal steps."""
    plain = 50000.0 ** (-np.arange(32) / 32)
    got, turns = np.array(k3_draft.frequencies()), 32768 * plain / (2 * math.pi)
    assert got == pytest.approx(np.where(turns > 32, plain, np.where(turns < 1, plain / 32, got)), rel=1e-12)
    share = (plain - got) / (plain - plain / 32)
    inner = np.flatnonzero((share > 0) & (share < 1))
    low, high = inner[0] - 1, inner[-1] + 1
    assert (turns[low + 1] < 32 < turns[low]) and (turns[high] < 1 < turns[high - 1])
    assert np.diff(share[low : high + 1]) == pytest.approx(1 / (high - low), rel=1e-9)
    assert 0 < low < high < 32


def test_rotation_is_a_complex_product_and_sees_distances_only():
    f = k3_draft.frequencies()
    x = torch.randn(3, 2 * 192, dtype=torch.float64)
    turn = lambda at, x=x: ROTATE.call(  # noqa: E731
        dict(x=x, position=torch.tensor(at)), dict(width=192, frequencies=f), exact)["out"].view(3, 2, 192)  # fmt: skip
    at, heads = [0, 5, 900_000], x.view(3, 2, 192)
    got = turn(at)
    assert torch.equal(got[..., :128], heads[..., :128]) and torch.equal(got[0], heads[0])
    for t, h, i in ((1, 0, 0), (1, 1, 31), (2, 0, 7), (2, 1, 20)):
        pair = heads[t, h, 128 + 2 * i : 130 + 2 * i]
        want = complex(*pair.tolist()) * complex(math.cos(at[t] * f[i]), math.sin(at[t] * f[i]))
        assert complex(*got[t, h, 128 + 2 * i : 130 + 2 * i].tolist()) == pytest.approx(want, abs=1e-12)
    one, two = turn([10, 10, 10]), turn([3, 3, 3])
    shifted, shifted2 = turn([1010] * 3), turn([1003] * 3)
    assert (one * two).sum(-1) == pytest.approx((shifted * shifted2).sum(-1).numpy(), abs=1e-9)
    assert ((one * two).sum(-1) - (one * shifted2).sum(-1)).abs().max() > 1e-3


def dense(tensors, taps, anchor, target, c, block_at=None):
    """Base logits [block, N] in float64, not absorbed, no cache: keys and values per head from kv_b_proj."""
    w = {k: t.double().numpy() for k, t in tensors.items()}
    norm = lambda x, n: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[n + ".weight"]  # noqa: E731
    L, H = len(taps), c.heads
    at = np.arange(L + c.block)

    def turned(pe, position):
        z = (pe[..., 0::2] + 1j * pe[..., 1::2]) * np.exp(1j * position[:, None, None] * np.array(c.frequencies()))
        return np.stack([z.real, z.imag], -1).reshape(pe.shape)

    context = norm(taps.numpy() @ w["context_proj.weight"].T, "context_norm")
    h = target["embed.w"].double().numpy()[[anchor] + [c.mask] * (c.block - 1)]
    for i in range(c.layers):
        p = f"layers.{i}."
        x = norm(h, p + "input_layernorm")
        kv = np.concatenate([context, x]) @ w[p + "self_attn.kv_a_proj_with_mqa.weight"].T
        latent = norm(kv[:, :512], p + "self_attn.kv_a_layernorm")
        kv_b = (latent @ w[p + "self_attn.kv_b_proj.weight"].T).reshape(L + c.block, H, 256)
        k_pe = turned(kv[:, None, 512:], at).repeat(H, 1)
        k, v = np.concatenate([kv_b[..., :128], k_pe], -1), kv_b[..., 128:]
        q_c = norm(x @ w[p + "self_attn.q_a_proj.weight"].T, p + "self_attn.q_a_layernorm")
        q = (q_c @ w[p + "self_attn.q_b_proj.weight"].T).reshape(c.block, H, 192)
        q = np.concatenate([q[..., :128], turned(q[..., 128:], at[L:])], -1)
        s = np.einsum("qhd,khd->hqk", q, k) * c.softmax_scale
        a = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("hqk,khd->qhd", a / a.sum(-1, keepdims=True), v).reshape(c.block, H * 128)
        h = h + o @ w[p + "self_attn.o_proj.weight"].T
        x = norm(h, p + "post_attention_layernorm")
        gate = x @ w[p + "mlp.gate_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return norm(h, "final_norm") @ target["head.logits.w"].double().numpy().T


def proposer(num=exact, seed=0):
    base = DecodeState(small, slots=20, pages=30, num=num, order=4)
    state = SpecState(base, draft=draft)
    target = top_weights(RandomCheckpoint(small, 1), small)
    tensors = random_draft(draft, seed)
    weights = draft_weights(tensors, draft, {(n, None): t for n, t in target.items()})
    return state, DSpark(draft, weights, state), tensors, target


def feed(state, drafter, r, taps, keep=None):
    """Show the drafter the taps of the next len(taps) tokens of r."""
    state.base.reserve((r.request, r.request.length + len(taps)))
    rows = token_rows(state, [r], 1, len(taps))
    mapping = rows["slot_mapping"] if keep is None else torch.where(keep, rows["slot_mapping"], 0)
    drafter.observe(taps, rows["position"], mapping)


def test_a_block_equals_the_dense_model():
    """Contexts of 20 and 3 tokens in one batch with a null row, caches filled with NaN elsewhere; after a first block
    one context grows over the rows that the block left. float64: 1e-11 of logits of size 4."""
    state, drafter, tensors, target = proposer()
    g = torch.Generator().manual_seed(0)
    live, taps = [state.open(), state.open()], [torch.randn(n, 192, generator=g).double() for n in (20, 3)]
    for t in state.own.values():
        t[:] = torch.nan
    for r, t, token in zip(live, taps, (7, 200), strict=True):
        feed(state, drafter, r, t)
        r.request.length, r.tokens = len(t), [token]

    def check():
        state.base.reserve(*((r.request, r.request.length + 8) for r in live))
        got, logits = drafter.propose(live, 3, replay=True)
        assert got.shape == (3, 7) and logits.shape == (21, small.vocab)
        w1, w2 = (tensors[f"markov_head.markov_{n}.weight"].double().numpy() for n in ("w1", "w2"))
        for i, (r, t) in enumerate(zip(live, taps, strict=True)):
            base, before = dense(tensors, t, r.tokens[-1], target, draft), r.tokens[-1]
            for k in range(7):
                z = base[k] + w2 @ w1[before]
                assert logits[7 * i + k].numpy() == pytest.approx(z, abs=1e-11)
                before = int(z.argmax())
                assert before == int(got[i, k])

    check()
    more = torch.randn(8, 192, generator=g).double()
    feed(state, drafter, live[0], more, torch.arange(8) < 5)  # three of the eight were rejected
    taps[0] = torch.cat([taps[0], more[:5]])
    live[0].request.length, live[0].tokens = 25, [7, 31]
    check()
    with pytest.raises(AssertionError):  # a tap of another layer order is seen
        taps[0] = taps[0].roll(64, dims=1)
        check()


def test_rejected_rows_are_written_nowhere():
    state, drafter, _, _ = proposer(fused)
    r = state.open()
    feed(state, drafter, r, torch.randn(8, 192).bfloat16())
    before = {k: t.clone() for k, t in state.own.items()}
    feed(state, drafter, r, torch.randn(8, 192).bfloat16(), torch.zeros(8, dtype=torch.bool))
    assert all(torch.equal(t, before[k]) for k, t in state.own.items())


@pytest.mark.parametrize("replay", (True, False))
def test_drafting_replays_its_noise(replay):
    """Drawn tokens are the argmax of logits / T plus noise of the token's position, or of the block alone."""
    R, K, N = 3, 4, 11
    g = torch.Generator().manual_seed(1)
    x = dict(base=torch.randn(R * K, N, generator=g).bfloat16(), w1=torch.randn(N, 2, generator=g).bfloat16(),
             w2=torch.randn(N, 2, generator=g).bfloat16(), anchor=torch.tensor([3, 0, 10]),
             temperature=torch.tensor([0.7, 0.0, 1.5]), seed=torch.tensor([5, 5, 6]),
             position=torch.tensor([9, 9, 12]))  # fmt: skip
    got = MARKOV.call(x, dict(replay=replay), fused)
    for r in range(R):
        before, seed, start = int(x["anchor"][r]), x["seed"][r : r + 1], x["position"][r : r + 1]
        for k in range(K):
            z = x["base"][r * K + k].float() + x["w2"].float() @ x["w1"][before].float()
            assert (got["draft_logits"][r * K + k] - z).abs().max() < 1e-5
            noise = gumbel(seed if replay else stream(seed, start, "draft"), start + k, N)[0]
            T = float(x["temperature"][r])
            before = int((got["draft_logits"][r * K + k].double() / T + noise if T else z).argmax())
            assert before == int(got["draft"][r, k])


def test_taps_are_what_the_next_layer_adds_up(model):
    """The tap after a layer is the prefix that the next layer's attention residual leaves, block restarts included."""
    seen = {}

    class Watching(Decoder):
        def execute(self, step, tensors, made):
            super().execute(step, tensors, made)
            if step.stage.name == "attn_res.pre" and step.layer:
                seen[step.layer - 1] = tensors["prefix"].clone()
            if step.stage.name == "attn_res.final":
                seen[small.layers - 1] = tensors["prefix"].clone()

    for num in (exact, fused):
        state = DecodeState(small, slots=3, pages=5, num=num)
        index = step_index(state, [state.open()], [256, *b"some text"], prefill=True)
        index |= sampling_index([GREEDY], 1, None, "cpu")
        taps = (0, 2, 3, 4)
        got = Watching(model, state).run(tapped(plan(small, 10, prefill=True), taps), index).act["taps"]
        for n, layer in enumerate(taps):
            assert torch.equal(got[:, n * 64 : n * 64 + 64], seen[layer])


def test_rounding_points_of_the_small_stages():
    g = torch.Generator().manual_seed(2)
    x, y, w = (torch.randn(*s, generator=g).bfloat16() for s in ((5, 64), (5, 64), (64,)))
    h = (x.float() + y.float()).bfloat16()
    unit = lambda t: t.double() / (t.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()  # noqa: E731
    assert torch.equal(TAP.call(dict(prefix=x, delta=y), {}, fused)["out"], h)
    got = ADD_NORM.call(dict(hidden=x, delta=y, w_norm=w), dict(eps=1e-5), fused)
    assert torch.equal(got["hidden"], h) and (got["out"].double() - unit(h)).abs().max() < 2**-7 * 2
    alone = NORM.call(dict(x=h, w_norm=w), dict(eps=1e-5), fused)["out"]
    assert torch.equal(got["out"], alone) and got["out"].dtype == torch.bfloat16
    m = torch.randn(20, 64, generator=g).bfloat16()
    gate, up = (x.double() @ m.double().T).chunk(2, -1)
    got = GATE_UP.call(dict(x=x, w=m), {}, exact)["out"]
    assert (got - gate * torch.sigmoid(gate) * up).abs().max() < 1e-12


def bad_drafts():
    good, target = random_draft(draft, 0), {("embed.w", None): None, ("head.logits.w", None): None}
    wide = good | {"context_norm.weight": torch.zeros(65).bfloat16()}
    full = good | {"final_norm.weight": torch.zeros(64)}
    base = DecodeState(small, slots=3, pages=3)
    narrow = {k: t for k, t in good.items() if k != "layers.1.mlp.up_proj.weight"}
    return [
        (lambda: draft_weights(narrow, draft, target), "tensor layers.1.mlp.up_proj.weight is missing"),
        (lambda: draft_weights(good | {"x": good["final_norm.weight"]}, draft, target), "tensor x is unknown"),
        (lambda: draft_weights(wide, draft, target), r"context_norm.weight is torch.bfloat16 \(65,\); allowed is"),
        (lambda: draft_weights(full, draft, target), r"final_norm.weight is torch.float32 \(64,\)"),
        (lambda: fits(k3_draft, small), "vocab = 163840; small has 272"),
        (lambda: fits(replace(draft, taps=(0, 5)), small), r"taps \(0, 5\); allowed are layers 0\.\.4"),
        (lambda: fits(replace(draft, mask=272), small), r"mask 272, block 7; allowed are 0\.\.271"),
        (lambda: SpecState(base, draft=draft, drafts=3), "drafts 7 tokens; the state is made for 3"),
        (lambda: SpecState(base, form="tree"), "form 'tree' with 7 drafts: allowed are slots, record"),
        (lambda: DSpark(draft, {}, SpecState(base)), "the state was made for draft None, not small-draft"),
        (lambda: ROTATE.check(dict(x=torch.zeros(2, 64).bfloat16(), position=torch.zeros(3, dtype=torch.int64),
                                   out=torch.zeros(2, 64).bfloat16())), "position has T = 3; allowed is 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("call, text", bad_drafts(), ids=range(len(bad_drafts())))
def test_bad_drafts_raise(call, text):
    with pytest.raises((CheckpointError, ContractError, ValueError), match=text):
        call()
