"""The skinny GEMM twin against float64 and exact integers, its compiled code on every target, and what it refuses."""

import re
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from equivalence import simt
from equivalence.order.check import check
from fast import linear
from fast.kernel import ARCHS, CAPABILITIES, launch, pick
from fast.linear import DirectConfig, FmaConfig, MmaConfig, WgmmaConfig, linear_kernel
from reference.config import deep, k3_rank, mini
from reference.stage import ContractError, Role

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() in CAPABILITIES
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU of sm_90/sm_100/sm_103")
bf16, POISON = torch.bfloat16, -7.0
FORMS = {  # configurations that together take every path: ring reused, odd fragments, last tile early, K past a sweep
    "fma": (2, 200, 768, FmaConfig(2, 1, 4, 9)),
    "fma-tail": (3, 72, 336, FmaConfig(1, 2, 4, 4)),
    "direct": (20, 72, 128, DirectConfig(16, 4)),
    "mma-bulk": (5, 72, 768, MmaConfig(48, 1, 1, 4, 192, 3, 2, True)),
    "mma-async": (20, 72, 256, MmaConfig(32, 1, 2, 2, 32, 5, 3, False)),
    "split-bulk": (17, 56, 960, MmaConfig(32, 3, 1, 2, 192, 1, 2, True)),
    "split-async": (24, 96, 240, MmaConfig(48, 5, 3, 1, 48, 1, 3, False)),
    "wgmma": (20, 72, 512, WgmmaConfig(1, 1, 4, 2, 3, 2)),
    "wgmma-few": (5, 136, 1024, WgmmaConfig(1, 3, 2, 2, 2, 2)),
    "wgmma-team": (40, 64, 768, WgmmaConfig(1, 2, 4, 4, 2, 4, 2)),
    "wgmma-split": (33, 136, 1024, WgmmaConfig(2, 3, 2, 2, 2, 1)),
}
HOPPER = [form for form, (*_, cfg) in FORMS.items() if isinstance(cfg, WgmmaConfig)]  # sm_90a alone
LAUNCHED = [f for f in FORMS if f not in HOPPER or (GPU and torch.cuda.get_device_capability() == (9, 0))]


def hostile(M: int, N: int, K: int, device="cpu", whole: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """x and out are slices of wider rows, x surrounded by NaN and out by POISON. whole: small integers only.

    Products and sums of small integers are exact in fp32, in any order, so the result has one right value.
    """
    generator = torch.Generator().manual_seed(seed + 100 * M + N + K)
    rows = torch.full((M, K + 40), float("nan"), dtype=bf16)
    x, out = rows[:, 16 : 16 + K], torch.full((M, N + 24), POISON, dtype=bf16)[:, 8 : 8 + N]
    w = torch.empty(N, K, dtype=bf16)
    for t in (x, w):
        draw = (
            torch.randint(-8, 9, t.shape, generator=generator) if whole else torch.randn(t.shape, generator=generator)
        )
        t.copy_(draw)
    out.fill_(float("nan"))
    moved = {
        n: t._base.to(device).as_strided(t.shape, t.stride(), t.storage_offset()) for n, t in dict(x=x, out=out).items()
    }
    return moved | dict(w=w.to(device))


def oracle(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact product in float64, and the largest error allowed.

    An fp32 sum of K exact products is off by at most K u sum|x w|, u = 2^-23: tensor cores truncate where fp32 rounds.
    The one rounding to bf16 adds 2^-8 of what it rounds.
    """
    x, w = t["x"].cpu().double(), t["w"].cpu().double()
    exact, mass = x @ w.mT, x.abs() @ w.abs().mT
    sums = x.shape[1] * 2.0**-23 * mass
    return exact, sums + 2.0**-8 * (exact.abs() + sums)


def compare(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    error = (got.double() - exact).abs()
    assert got.isfinite().all(), f"not finite at {got.isfinite().logical_not().nonzero()[0].tolist()}"
    assert (error <= bound).all(), f"error is {float((error / bound).max()):.3g} of its bound"


def surroundings(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The columns beside out."""
    wide = t["out"]._base if t["out"]._base is not None else t["out"]
    return torch.cat([wide[:, :8], wide[:, 8 + t["out"].shape[1] :]], 1)


def run(t: dict[str, torch.Tensor], kernel=None) -> torch.Tensor:
    """Launch the twin, or one kernel; check inputs and surroundings; return out on the CPU."""
    before = {n: t[n].clone() for n in ("x", "w")}
    if kernel is None:
        launch(linear.linear, t, {})
    else:
        kernel(t["x"], t["w"], t["out"])
    assert (surroundings(t) == POISON).all(), "columns beside out were written"
    bits = torch.int16  # NaN included
    assert all(torch.equal(t[n].view(bits), old.view(bits)) for n, old in before.items()), "an input changed"
    return t["out"].cpu()


def made(form: str, device="cpu", **kw):
    """One of FORMS: its kernel and hostile arguments."""
    M, N, K, cfg = FORMS[form]
    t = hostile(M, N, K, device, **kw)
    return linear_kernel(cfg, M, N, K, t["x"].stride(0), t["out"].stride(0)), t


def test_bound_accepts_one_rounding_and_rejects_just_beyond():
    t = hostile(3, 24, 256)
    exact, bound = oracle(t)
    compare((t["x"].float() @ t["w"].float().mT).bfloat16(), exact, bound)
    for sign in (1, -1):
        mutant = exact.clone()
        mutant[1, 7] += sign * 0.999 * bound[1, 7]
        compare(mutant, exact, bound)
        mutant[1, 7] = exact[1, 7] + sign * 1.001 * bound[1, 7]
        with pytest.raises(AssertionError, match="of its bound"):
            compare(mutant, exact, bound)
    mutant[1, 7] = float("nan")
    with pytest.raises(AssertionError, match=r"not finite at \[1, 7\]"):
        compare(mutant, exact, bound)


def test_whole_numbers_are_exact_in_any_order():
    t = hostile(2, 16, 7168, whole=True)
    exact, _ = oracle(t)
    assert exact.abs().max() < 2**24
    x, w = t["x"].float(), t["w"].float()
    backwards = sum((x[:, k, None] * w[None, :, k].mT.flatten()[None] for k in range(7167, -1, -1)), torch.zeros(2, 16))
    assert torch.equal(backwards.double(), exact)


def test_every_production_case_has_one_legal_kernel():
    cases = linear.linear_cases()
    assert len(cases) == 4 * 7 * 8
    for (case, t), arch in product(cases.items(), ARCHS):
        (kernel,) = pick(linear.linear, t, {}, arch)
        M, K = t["x"].shape
        N, cfg = t["w"].shape[0], kernel.constants[0]
        assert linear.why_not(cfg, M if isinstance(cfg, FmaConfig) else linear.bucket(M), N, K) is None, case
        assert not isinstance(cfg, WgmmaConfig) or arch == "sm_90a", case
        assert kernel.pdl and kernel.smem <= 232448 and kernel.args[0].strides == t["x"].stride()
        assert [a.role for a in kernel.args] == [Role.ACTIVATION, Role.WEIGHT, Role.OUTPUT]


@pytest.mark.parametrize("M", [1, 7, 64])
@pytest.mark.parametrize("N, K", [(16, 16), (24, 48), (1000, 272), (6288, 7168), (8448, 7168), (7168, 4224)])
def test_candidates_are_legal_and_dropped_ones_have_a_reason(M, N, K):
    kept, dropped = linear.candidates(M, N, K)
    others = set(linear.candidates(M, N, K, "sm_103a")[0])
    assert others == {cfg for cfg in kept if not isinstance(cfg, WgmmaConfig)}
    for cfg in (c for c in kept if isinstance(c, WgmmaConfig)):
        blocks = K // (32 * cfg.depth)
        assert cfg.depth % cfg.width == K % (32 * cfg.depth) == 0 and blocks >= cfg.splits and cfg.smem(M) <= 232448
        assert cfg.threads * (4 * cfg.fragments(M) + 8 * cfg.depth) < 65536
    assert kept and not set(kept) & set(dropped) and all(dropped.values())
    assert all(cfg.depth * cfg.rows <= 28 for cfg in kept if isinstance(cfg, FmaConfig))
    for cfg in (c for c in kept if isinstance(c, MmaConfig)):
        chunks = [(s + 1) * (K // cfg.bk) // cfg.splits - s * (K // cfg.bk) // cfg.splits for s in range(cfg.splits)]
        assert sum(chunks) * cfg.bk == K and min(chunks) >= 1 and cfg.smem(M) <= 232448
        width, pieces, step = cfg.copies
        assert width * pieces == cfg.bk and step * pieces == cfg.producers * (1 if cfg.bulk else 32)
        assert cfg.pitch // 8 % 2 == 1  # an odd number of 16-byte columns: eight rows use all 32 banks once
    assert any(isinstance(cfg, FmaConfig) for cfg in kept) == (M <= linear.FMA_TOKENS)


def test_every_measured_configuration_is_legal():
    for table, arch in ((linear.TUNED, "sm_100a"), (linear.HOPPER, "sm_90a")):
        for (N, K), rows in table.items():
            for M, cfg in rows.items():
                assert linear.why_not(cfg, M, N, K) is None and M in linear.BUCKETS, (N, K, M)
                assert linear.choose_config(M, N, K, arch) == cfg
                assert isinstance(cfg, WgmmaConfig) == (table is linear.HOPPER)


@pytest.mark.parametrize("form, target", [(f, t) for f in FORMS for t in ARCHS if f not in HOPPER or t == "sm_90a"])
def test_weights_and_nothing_else_are_read_before_the_wait(form, target):
    kernel, _ = made(form)
    build = kernel.compile(target)
    report = check(build)
    assert report.verdict == "proved" and not report.findings, report.lines()
    early = {a.tensors for a in report.accesses if a.before_wait and a.kind != "store"}
    assert early == {"w"}
    assert ".nc" not in build.ptx and "CONSTANT" not in build.sass
    assert not re.search(r"\b(LDL|STL)\b", build.sass)


def test_why_not_names_the_rule_that_a_configuration_breaks():
    good = MmaConfig(32, 2, 1, 4, 192, 2, 2, True)
    assert linear.why_not(good, 8, 4096, 768) is None
    for change, reason in {
        ("rows", 40): "warps or stages do not divide the tile",
        ("bk", 128): "bulk copies of short rows",
        ("bulk", False): "producers do not copy whole rows at once",
        ("splits", 9): "more than eight splits, or fewer chunks than splits or stages",
        ("stages", 3): "more than eight splits, or fewer chunks than splits or stages",
    }.items():
        assert linear.why_not(replace(good, **dict([change])), 8, 4096, 768) == reason, change
    assert linear.why_not(good, 8, 40960, 768) == "more than one wave"
    assert linear.why_not(good, 8, 512, 768) == "SMs idle"
    assert linear.why_not(DirectConfig(16, 4), 64, 1536, 144) == "K is no whole number of loads"
    assert linear.why_not(DirectConfig(16, 4), 64, 1536, 512) == "operands do not fit in registers"
    assert linear.why_not(DirectConfig(16, 4), 8, 1536, 128) == "whole groups of tokens idle"


def test_refusals():
    def t(M, N, K, pad_x=0, pad_out=0):
        make = lambda rows, width, pad: torch.empty(rows, width + pad, dtype=bf16, device="meta")[:, :width]  # noqa: E731
        return dict(x=make(M, K, pad_x), w=make(N, K, 0), out=make(M, N, pad_out))

    for case, wrong in {
        (0, 64, 64): r"x has 0 tokens; allowed are 1\.\.64",
        (65, 64, 64): r"x has 65 tokens; allowed are 1\.\.64",
        (4, 64, 72): "K = 72; allowed are multiples of 16",
        (4, 60, 64): "N = 60; allowed are multiples of 8 from 16 on",
        (4, 8, 64): "N = 8; allowed are multiples of 8 from 16 on",
        (4, 64, 64, 4): "x has row stride 68; allowed are multiples of 8",
        (4, 64, 64, 0, 2): "out has row stride 66; allowed are multiples of 8",
    }.items():
        with pytest.raises(NotImplementedError, match=f"linear: {wrong}"):
            pick(linear.linear, t(*case), {})
    good = t(4, 64, 64)
    with pytest.raises(ContractError, match=r"x \(4, 64\), w \(64, 32\), out \(4, 64\) disagree"):
        pick(linear.linear, good | dict(w=t(4, 64, 32)["w"]), {})
    kernel, arguments = made("fma")
    with pytest.raises(ContractError, match=r"x starts at 0x[0-9a-f]+; allowed are multiples of 16 bytes"):
        kernel.args[0].check(arguments["x"]._base[:, 15 : 15 + 768], kernel.name)


@needs_gpu
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "normal"])
@pytest.mark.parametrize("form", LAUNCHED)
def test_every_form_against_float64(form, whole):
    kernel, t = made(form, "cuda", whole=whole)
    exact, bound = oracle(t)
    got = run(t, kernel)
    compare(got, exact, bound)
    if whole:
        assert torch.equal(got, exact.bfloat16())


@needs_gpu
@pytest.mark.parametrize("M", range(1, 65))
def test_every_batch(M):
    t = hostile(M, 384, 512, "cuda", whole=True)
    exact, _ = oracle(t)
    assert torch.equal(run(t), exact.bfloat16())


@needs_gpu
@pytest.mark.parametrize("stage", linear.linear_shapes(mini))
@pytest.mark.parametrize("config", [k3_rank(8), k3_rank(16), mini, deep], ids=lambda c: c.name)
def test_production_shapes(config, stage):
    N, K = linear.linear_shapes(config)[stage]
    for M in (1, 2, 3, 5, 8, 13, 17, 24, 25, 33, 48, 49, 64) if config.name == "k3-tp8" else (1, 3, 17, 41, 64):
        t = hostile(M, N, K, "cuda", whole=True)
        exact = (t["x"].double() @ t["w"].double().mT).cpu()
        assert torch.equal(run(t), exact.bfloat16()), M
        t = hostile(M, N, K, "cuda")
        compare(run(t), *oracle(t))


@needs_gpu
@pytest.mark.parametrize("form", LAUNCHED)
def test_replays_are_bit_equal_and_tokens_do_not_mix(form):
    kernel, t = made(form, "cuda")
    first = run(t, kernel).clone()
    for _ in range(20):
        assert torch.equal(run(t, kernel), first)
    t["x"][1:] = float("nan")  # a token's NaN stays in its row
    got = run(t, kernel)
    assert torch.equal(got[0], first[0]) and got[1:].isnan().all()


@needs_gpu
def test_chain_in_a_graph_reads_what_its_predecessor_wrote():
    """Each projection prefetches its weights while the one before still runs; x is poisoned before every replay."""
    sizes = [7168, 1536, 7168, 2112, 7168]
    for M in (1, 3, 8, 64):
        generator = torch.Generator().manual_seed(M)
        w = [torch.randn(n, k, generator=generator).div(k**0.5).to("cuda", bf16) for k, n in pairwise(sizes)]
        x = [torch.randn(M, n, generator=generator).to("cuda", bf16) for n in sizes]

        def step(wait=lambda: None, w=w, x=x):
            for i, weights in enumerate(w):
                launch(linear.linear, dict(x=x[i], w=weights, out=x[i + 1]), {})
                wait()

        step(torch.cuda.synchronize)
        want = [t.clone() for t in x[1:]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(5):
            for t in x[1:]:
                t.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(x[1:], want, strict=True))


def test_all_tokens_of_a_bucket_share_their_code():
    """Those that a bucket serves are the ones behind the bucket before; fma counts the tokens in its code."""
    for (M, after), (N, K) in product(pairwise((0, *linear.BUCKETS)), ((2112, 7168), (7168, 768), (192, 256))):
        for arch in ARCHS:
            made = [linear_kernel(linear.choose_config(m, N, K, arch), m, N, K, K, N) for m in range(M + 1, after + 1)]
            assert all(isinstance(k.constants[0], FmaConfig) or k.code == made[-1].code for k in made)
            assert [k.numbers for k in made if k.counts] == [(k.args[0].shape[0],) for k in made if k.counts]


@pytest.mark.parametrize("form", [f for f in FORMS if "fma" not in f])
def test_every_token_count_of_one_code(form):
    """In the interpreter, which faults where a token past the last is read; results are the exact ones."""
    M, N, K, cfg = FORMS[form]
    lowest = max(n for n in (0, *linear.BUCKETS) if n < M) + 1
    for tokens in {lowest, lowest + 1, linear.bucket(M) - 1, linear.bucket(M)}:
        t = hostile(tokens, N, K, whole=True)
        kernel = linear_kernel(cfg, tokens, N, K, t["x"].stride(0), t["out"].stride(0))
        simt.launch(kernel, t, target=kernel.archs[0])
        assert torch.equal(t["out"], oracle(t)[0].bfloat16()) and (surroundings(t) == POISON).all(), tokens


@pytest.mark.parametrize("M", [1, 3, 8, 16, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(7168, 6288), (16, 16), (24, 6288), (65536, 16)])
def test_awkward_sizes_have_a_configuration(M, N, K):
    """K of 16 times a prime leaves stages of 16 columns; the kernel is slow, but there is one."""
    for arch in ("sm_90a", "sm_103a"):
        cfg = linear.choose_config(M, N, K, arch)
        kernel = linear.linear_kernel(cfg, M, N, K, K, N)
        assert kernel.smem <= linear.SMEM and kernel.block[0] <= 1024


def test_a_tile_of_more_rows_than_weights_is_refused():
    with pytest.raises(ValueError, match=r"N = 24; allowed for MmaConfig\(.* are multiples of 8 from 48 on"):
        linear.linear_kernel(linear.MmaConfig(48, 1, 1, 8, 256, 4, 1, True), 1, 24, 7168, 7168, 24)
    with pytest.raises(ValueError, match="N = 8; allowed for DirectConfig"):
        linear.linear_kernel(linear.DirectConfig(8, 1), 1, 8, 128, 128, 8)


@pytest.mark.parametrize("M", [3, 16])
def test_an_awkward_size_is_right(M):
    """In the interpreter, within one bf16 rounding of the sum and fp32 rounding of K terms in any order."""
    N, K = 24, 6288
    generator = torch.Generator().manual_seed(M)
    x, w = (torch.randn(n, K, generator=generator).to(torch.bfloat16) for n in (M, N))
    out = torch.full((M, N), torch.nan, dtype=torch.bfloat16)
    for kernel in linear.linear.pick(x, w, out):
        simt.launch(kernel, [x, w, out.fill_(torch.nan)], target=kernel.archs[0])
        true, mass = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
        bound = 2.0**-8 * true.abs() + (1 + 2.0**-8) * K * 2.0**-24 * mass
        assert ((out.double() - true).abs() <= bound).all()
        short = x[:, :-16].double() @ w[:, :-16].double().T
        assert not ((short - true).abs() <= bound).all(), "a step that is left out is seen"
