"""The trainer: chunk form against the recurrence, the model against the law, export, data, and the order-3 model."""

import json
import random
import time
from dataclasses import replace

import pytest
import torch

from reference import mxfp4
from reference.checkpoint import Checkpoint
from reference.config import mini
from reference.decoder import Decoder as Law
from reference.decoder import Model
from reference.numerics import exact
from reference.state import DecodeState
from reference.weights import all_weights
from tools import train_mini
from tools.train_corpus import BASE, Order3, Stream
from tools.train_decode import Decoder, continuations, diversity
from tools.train_kda import CHUNK, UnitLowerInverse, kda_chunks
from tools.train_model import FakeMxfp4, Mini
from tools.train_report import export, layout, load
from tools.train_synth import MAKERS, documents

SMALL = replace(
    mini, name="small", hidden=32, layers=4, mla_layers=(1, 3), q_lora=32, dense_inter=64, experts=4, topk=2,
    expert_inter=32, latent=32, shared_inter=32, block=2,
)  # fmt: skip


def model(seed=0, **kw):
    return Mini(SMALL, device="cpu", act=torch.float64, master=torch.float64, seed=seed, **kw)


def kda_case(floor: float, repeated: bool, n=3, b=2, K=32):
    """q, k, v, beta, log-decay of three chunks; log-decays spread over (floor, 0), or all tokens alike."""
    g = torch.Generator().manual_seed(int(-floor * 100) + repeated)
    q, k, v, z = (torch.randn(n, b, CHUNK, K, generator=g, dtype=torch.float64) for _ in range(4))
    if repeated:
        q, k, v, z = (t[:1, :, :1].expand(n, b, CHUNK, K).clone() for t in (q, k, v, z))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    beta = torch.sigmoid(torch.randn(n, b, CHUNK, generator=g, dtype=torch.float64) + 6 * repeated)
    return [t.requires_grad_() for t in (q, k, v, beta, floor * torch.sigmoid(4 * z))]


def recurrence(q, k, v, beta, log_decay):
    """SPEC.md 5.5, one token after another; the same arguments, o [N, b, CHUNK, V]."""
    S, out = torch.zeros(q.shape[1], q.shape[-1], v.shape[-1], dtype=q.dtype), []
    for n in range(len(q)):
        for t in range(CHUNK):
            S = S * log_decay[n, :, t].exp().unsqueeze(-1)
            u = beta[n, :, t, None] * (v[n, :, t] - torch.einsum("bk,bkv->bv", k[n, :, t], S))
            S = S + k[n, :, t].unsqueeze(-1) * u.unsqueeze(-2)
            out.append(torch.einsum("bk,bkv->bv", q[n, :, t], S))
    return torch.stack(out).unflatten(0, (len(q), CHUNK)).transpose(1, 2)


def chunked(*case, dtype=torch.float64):
    own, read, S = kda_chunks(*case, dtype)
    return (own + read @ S).view_as(case[0])


@pytest.mark.parametrize("repeated", [False, True], ids=["mixed", "repeated"])
@pytest.mark.parametrize("floor", [-5.0, -1e-4])
def test_chunk_form_is_the_recurrence(floor, repeated):
    """Outputs and all five gradients, in float64, for fast and slow decays and for one token over and over."""
    case = kda_case(floor, repeated)
    want, got = recurrence(*case), chunked(*case)
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (got - want).abs().max() < 1e-11
    for a, b in zip(*(torch.autograd.grad((o * probe).sum(), case) for o in (want, got)), strict=True):
        assert (a - b).abs().max() < 1e-9 * max(1.0, float(a.abs().max()))
    late = [*case[:4], case[4].roll(1, 2)]  # mutant: each token decays by its neighbour's amount
    if not repeated:
        assert (chunked(*late) - want).abs().max() > 1e-6


def test_fastest_decay_is_finite_in_fp32():
    """Log-decays of exactly -5 for 64 tokens: sums of -320, whose exponentials fp32 cannot hold."""
    case = [t.detach().float().requires_grad_() for t in kda_case(-5.0, False)]
    case[4] = torch.full_like(case[4], -5.0, requires_grad=True)
    out = chunked(*case, dtype=torch.float32)
    want = recurrence(*(t.detach().double() for t in case))
    assert (out - want).abs().max() < 1e-5
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), case))


def test_inverse_and_its_gradient():
    a = (torch.randn(2, CHUNK, CHUNK, dtype=torch.float64) * 0.3).tril(-1).requires_grad_()
    x = UnitLowerInverse.apply(a)
    eye = torch.eye(CHUNK, dtype=torch.float64)
    assert (x @ (eye + a) - eye).abs().max() < 1e-9 * x.abs().max()
    probe = torch.randn_like(x)
    (got,) = torch.autograd.grad((x * probe).sum(), a)
    (want,) = torch.autograd.grad((torch.linalg.inv(eye + a) * probe).sum(), a)
    assert (got - want.tril(-1)).abs().max() < 1e-9 * want.abs().max()


def test_sequence_pass_is_the_decode_step():
    """Whole model in float64: losses in chunk form equal those of decoding token by token."""
    m, B, T = model(), 2, 2 * CHUNK
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randint(0, 256, (B, T), generator=g) for _ in range(2))
    x[0, 20:90] = 65
    with torch.no_grad():
        ce, _, loads = m.losses(m.weights(), layout(x), layout(y))
    decoder = Decoder(m, B, T)
    logits = torch.stack([decoder.step(x[:, t]) for t in range(T)], 1)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(B, T)
    assert (ce.transpose(0, 1).reshape(B, T) - want).abs().max() < 1e-11
    assert (loads.sum(-1) == B * T * SMALL.topk).all()


def test_trained_model_is_the_law(tmp_path):
    """What is exported, run by the reference decoder in float64, gives the trainer's logits."""
    m = model(seed=2)
    with torch.no_grad():
        m.bias.copy_(torch.randn(m.bias.shape, generator=torch.Generator().manual_seed(1)).float() * 0.05)
    assert export(m, tmp_path / "made") < 16 << 20
    source = Checkpoint(tmp_path / "made")
    ids = [SMALL.bos, *b"the law and the law and the twin, 1234567890 \x00\xff", *b"a" * 30]
    state = DecodeState(SMALL, slots=3, pages=20, num=exact)
    want = Law(Model(SMALL, all_weights(source, SMALL)), state).prefill(state.open(), ids).act["vocab_logits"]

    def last(changed: Mini):
        decoder = Decoder(changed, 1, len(ids))
        return [decoder.step(torch.tensor([t])) for t in ids][-1]

    other = model(seed=5)
    load(other, tmp_path / "made")
    for got in (last(m), last(other)):
        assert (got - want).abs().max() < 1e-12  # first values are exact in fp32
    assert (last(model(seed=5)) - want).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="allowed are 16777216"):
        export(Mini(replace(SMALL, vocab=1 << 17), device="cpu", act=torch.float32), tmp_path / "large")


def test_fake_quantisation_is_the_formats():
    """Bit for bit what mxfp4 stores, over magnitudes, ties, zeros and groups of zeros; identity for the gradient."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(3, 40, 64, generator=g) * torch.exp2(torch.randint(-20, 20, (3, 40, 1), generator=g).float())
    w[0, 0, :32] = 0
    w[0, 1] = torch.arange(64) / 4 - 8
    w.requires_grad_()
    out = FakeMxfp4.apply(w, mxfp4.SCALES.float())
    assert torch.equal(out, mxfp4.fake_quant(w))
    assert torch.equal(FakeMxfp4.apply(out, mxfp4.SCALES.float()), out)
    assert torch.equal(torch.autograd.grad(out.sum(), w)[0], torch.ones_like(w))


def test_optimizer_learns_and_balances():
    """A few steps on one batch lower the loss well below log(256); a gradient that is not finite changes nothing."""
    torch.manual_seed(0)
    m = Mini(SMALL, device="cpu", act=torch.float32)
    optimizer = train_mini.Optimizer(m)
    phase = train_mini.Phase(m, optimizer, 1, CHUNK)
    phase.x.copy_(torch.randint(97, 101, phase.x.shape))
    phase.y.copy_(phase.x + 1)
    optimizer.rate.fill_(3e-3)
    optimizer.bias_rate.fill_(1e-3)
    for _ in range(30):
        phase.step()
    assert phase.loss < 1.5 and optimizer.skipped == 0
    assert m.bias.abs().max() > 0 and m.bias.mean(-1).abs().max() < 1e-6
    before = {k: t.detach().clone() for k, t in m.masters.items()}
    grads = [torch.zeros_like(p) for p in optimizer.params]
    grads[1][3] = float("nan")
    optimizer.rate.zero_()
    optimizer.step(grads, torch.ones_like(m.bias))
    assert optimizer.skipped == 1 and all(torch.equal(before[k], t) for k, t in m.masters.items())


def test_order3_is_a_distribution_and_counts():
    text = torch.tensor(list(b"abracadabra, abracadabra; " * 20))
    fitted = Order3(text)
    for context in (b"abr", b"xyz", b"ab?"):
        rows = torch.stack([torch.tensor([*context, s]) for s in range(BASE)])
        total = sum(float(2 ** -fitted.bits(row)) for row in rows)
        assert abs(total - 1) < 1e-9
    assert fitted.bits(torch.tensor(list(b"abra"))) < 0.1 < 5 < fitted.bits(torch.tensor(list(b"abrx")))


def test_stream_rows_and_documents():
    docs = {"code": [b"a" * 300, b"b" * 200], "made": documents(20_000, ["some filler\ntext " * 40], 1)}
    stream = Stream.of(docs, mini)
    x, y = stream.sample(64, 128, torch.Generator().manual_seed(0))
    assert (x[:, 0] == mini.bos).all() and torch.equal(x[:, 1:], y[:, :-1])
    assert 0 <= int(x.min()) and int(y.max()) <= mini.bos
    assert all(int(stream.tokens[s]) == mini.bos for starts in stream.starts.values() for s in starts)
    assert docs["made"] == documents(20_000, ["some filler\ntext " * 40], 1)
    assert all(make(random.Random(3), ["x y\n" * 99]) for make in MAKERS.values())


def test_continuations_start_after_their_prompts():
    m = Mini(SMALL, device="cpu", act=torch.float32)
    both = continuations(m, [b"hello", b"a longer prompt"], 6, graph=False)
    assert [len(row) for row in both] == [6, 6]
    alone = continuations(m, [b"hello"], 6, graph=False)
    assert alone[0] == both[0]
    assert diversity([1, 1, 1, 2, 3, 4, 5, 6, 7]) == {"distinct_tokens": 7, "longest_run": 3, "distinct_8grams": 2}


def test_run_writes_checkpoints_and_log(tmp_path, monkeypatch):
    """The whole program on the CPU with a small configuration, a small corpus and a few seconds."""
    monkeypatch.setattr(train_mini, "mini", SMALL)
    monkeypatch.setattr(train_mini, "START", time.monotonic())
    small = "--device cpu --batch 2 --seq 64 --long-seq 128 --scale 0.002 --collect-seconds 4 --minutes 0.2"
    log = train_mini.main(
        [*small.split(), "--reserve", "3", "--eval-batches", "2", "--generate", "4", "--out", str(tmp_path)]
    )
    assert json.loads((tmp_path / "train_log.json").read_text()) == json.loads(json.dumps(log))
    assert (tmp_path / "train_log.json").stat().st_size < 64 << 10
    for folder in ("early", "final"):
        assert Checkpoint(tmp_path / folder).config == SMALL
    assert log["bits_per_byte"] < 9 and log["order3_bits_per_byte"] < 8 and log["every_expert_used"] in (True, False)
    assert len(log["decay_quantiles"]) == 2 and len(log["attn_res_mean_weights"]) == 2 * SMALL.layers


@pytest.mark.parametrize(
    ("words", "message"),
    [("--minutes 26", "at most 25"), ("--seq 100", "multiples of 64"), ("--minutes 0", "more than 0")],
)
def test_bad_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        train_mini.arguments([*words.split(), "--out", "x"])
    assert message in capsys.readouterr().err
