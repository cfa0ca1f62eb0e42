"""The attention-residual kernel against float64, its compiled code on every target, and what it refuses."""

import math
import re
from itertools import product

import pytest
import torch

from fast import attn_res as twin
from fast.kernel import ARCHS, CAPABILITIES, launch, pick
from reference.attn_res import EPS, PRE
from reference.config import k3
from reference.numerics import exact, fused, unfused
from reference.stage import ContractError, Role

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() in CAPABILITIES
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU of sm_90/sm_100/sm_103")
KINDS = ("plain", "dominant", "huge", "tiny", "mixed scales", "equal", "cancelling")
U = 2.0**-24  # unit roundoff of fp32


def hostile(T: int, D: int, nb: int, write: int, *, add=True, norm=True, kind="plain", B=8, device="cpu") -> dict:
    """Arguments in padded storage: NaN in the padding, in `out` and in every bank slot the call must not read."""
    assert kind in KINDS
    g = torch.Generator().manual_seed(1000 * T + D + nb + KINDS.index(kind))

    def padded(*shape):
        store = torch.full((*(n + 1 for n in shape[:-1]), shape[-1] + 8), math.nan, dtype=torch.bfloat16, device=device)
        return store[tuple(slice(n) for n in shape)]

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    t = dict(prefix=padded(T, D), blocks=padded(T, B, D), out=padded(T, D))
    t |= {name: torch.empty(D, dtype=torch.bfloat16, device=device) for name in ("w_norm", "w_proj")}
    t |= dict(delta=padded(T, D)) if add else {}
    t |= dict(w_out=torch.empty(D, dtype=torch.bfloat16, device=device)) if norm else {}
    scale = {"huge": 2.0**40, "tiny": 2.0**-40}.get(kind, 1.0)
    for name in set(t) - {"out", "blocks"}:
        t[name].copy_(1 + normal(D, scale=0.1) if name in ("w_norm", "w_out") else normal(*t[name].shape, scale=scale))
    t["w_proj"].copy_(normal(D, scale=4 / math.sqrt(D)))
    blocks = normal(T, nb, D, scale=scale)
    if kind == "dominant" and nb:
        blocks[:, nb // 2] += 3 * math.sqrt(D) * t["w_proj"].cpu().float()
    if kind == "mixed scales":
        blocks *= 2.0 ** torch.arange(-32, 32, 8)[:nb, None]
    if kind == "equal":
        if add:
            t["delta"].zero_()
        blocks[:] = t["prefix"].cpu().float()[:, None]
    if kind == "cancelling":
        blocks[:, 1::2] = -blocks[:, : nb // 2 * 2 : 2]
    t["blocks"][:, :nb].copy_(blocks)
    return t


def wanted(t: dict, nb: int, write: int, depth: int, eps: float = EPS) -> tuple[dict, torch.Tensor]:
    """Float64 results (prefix and blocks with their bf16 rounding), and the largest error `out` may have.

    depth: additions any term of a sum over the hidden size passes through. To first order, with L = rstd * sum |v w|:
    a logit is off by (1.5 depth + 8) U L, a softmax weight by a ((1 - a) d + sum of the others' a d), the mix by that
    times |v|, the norm by the mix's error in its direction; rounding adds half a bf16 ulp.
    """
    x = {name: value.cpu() for name, value in t.items()}
    p = x["prefix"] if "delta" not in x else (x["prefix"].double() + x["delta"].double()).bfloat16()
    blocks = x["blocks"].clone()
    if write >= 0:
        blocks[:, write] = p
    v = torch.cat([x["blocks"][:, :nb], p[:, None]], 1).double()
    w = x["w_norm"].double() * x["w_proj"].double()
    rstd = (v.square().mean(-1) + eps).rsqrt()
    logit = rstd * (v * w).sum(-1)
    a = logit.softmax(-1)[..., None]  # [T, nb + 1, 1]
    off = (1.5 * depth + 8) * U * rstd * (v * w).abs().sum(-1) + 3 * U * (logit.amax(-1, True) - logit) + 4 * U
    off = off[..., None]
    share_off = a * ((1 - 2 * a) * off + (a * off).sum(1, True)) + 16 * U * a
    mix, mix_off = (a * v).sum(1), ((share_off + 10 * U * a) * v.abs()).sum(1)
    if nb == 0:
        mix_off.zero_()
    if "w_out" in x:
        square = mix.square().mean(-1, True) + eps
        norm_off = (mix.abs() * mix_off).mean(-1, True) / square + (depth / 2 + 8) * U
        w_out = x["w_out"].double()
        mix, mix_off = mix * square.rsqrt() * w_out, (mix_off + mix.abs() * norm_off) * square.rsqrt() * w_out.abs()
    bound = 1.05 * mix_off
    bound = bound + 2.0 ** ((mix.abs() + bound).clamp_min(2.0**-126).log2().floor() - 8)
    return dict(out=mix, prefix=p, blocks=blocks), bound


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int16)


def compare(got: dict, want: dict, bound: torch.Tensor) -> None:
    """Prefix and bank bit for bit, except that a NaN is a NaN; `out` finite and within its bound."""
    for name in ("prefix", "blocks"):
        same = (bits(got[name]) == bits(want[name])) | (got[name].cpu().isnan() & want[name].isnan())
        assert same.all(), f"{name} differs in {int((~same).sum())} elements, first {(~same).nonzero()[0].tolist()}"
    assert want["out"].isfinite().all()
    error = (got["out"].cpu().double() - want["out"]).abs().nan_to_num(nan=math.inf) / bound
    assert (error <= 1).all(), f"out is off by {float(error.max()):.3g} of its bound"


def run(t: dict, nb: int, write: int, kernel=None) -> dict:
    """Launch; check that nothing outside prefix, blocks and out changed, not even padding; return those three."""
    before = {n: (v if v._base is None else v._base).clone() for n, v in t.items()}
    if kernel:
        kernel(*(t[a.name] for a in kernel.args))
    else:
        launch(twin.attn_res, t, dict(nb=nb, write=write))
    for name, old in before.items():
        now = t[name] if t[name]._base is None else t[name]._base
        changed = bits(now) != bits(old)
        if name in ("prefix", "blocks", "out"):
            changed[tuple(slice(n) for n in t[name].shape)] = False
        assert not changed.any(), f"{name} changed where it may not"
    return {name: t[name].cpu() for name in ("prefix", "blocks", "out")}


def depth_of(config: twin.Config, D: int) -> int:
    return config.loads(D) * config.vec + 5 + config.warps + config.cluster


VARIANTS = [
    (nb, add, norm, write)
    for nb, add, norm in product(range(9), (False, True), (False, True))
    for write in (-1, min(nb, 7))
]  # at nb = 8 the write goes to a block that is also read


def variant_id(v) -> str:
    return f"nb{v[0]}" + "-add" * v[1] + "-norm" * v[2] + f"-w{v[3]}" * (v[3] >= 0)


# ---------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("kind", KINDS)
def test_bound_accepts_the_fused_law_and_rejects_one_more_rounding(kind):
    """The fused law rounds where the kernel does; the unfused one also rounds the mix before the norm."""
    for nb in (1, 4, 8):
        t = hostile(7, 192, nb, -1, kind=kind)
        want, bound = wanted(t, nb, -1, depth=24)
        read = {n: v for n, v in t.items() if n != "out"}
        compare(PRE.call(read, dict(nb=nb, write=-1), fused), want, bound)
        with pytest.raises(AssertionError, match="out is off"):
            compare(PRE.call(read, dict(nb=nb, write=-1), unfused), want, bound)


def test_bound_rejects_an_error_just_beyond_it():
    t = hostile(3, 64, 4, 4)
    want, bound = wanted(t, 4, 4, depth=9)
    compare(want | dict(out=want["out"] + 0.99 * bound), want, bound)
    for off in (1.01, -1.01, math.inf, math.nan):
        wrong = want["out"].clone()
        wrong[2, 5] += off * bound[2, 5]
        with pytest.raises(AssertionError, match="out is off"):
            compare(want | dict(out=wrong), want, bound)
    for name in ("prefix", "blocks"):
        wrong = want[name].clone()
        wrong.view(torch.int16)[1, 0] ^= 1
        with pytest.raises(AssertionError, match=name):
            compare(want | {name: wrong}, want, bound)


def test_bound_sees_eps_and_the_number_of_sources():
    t = hostile(3, 192, 4, -1, kind="tiny")
    want, bound = wanted(t, 4, -1, depth=24)
    for wrong, _ in (wanted(t, 4, -1, 24, eps=1e-6), wanted(t, 3, -1, 24)):
        with pytest.raises(AssertionError, match="out is off"):
            compare(wrong, want, bound)


def test_float64_results_are_those_of_the_exact_law():
    t = hostile(3, 64, 5, 5, add=False)
    want, _ = wanted(t, 5, 5, depth=9)
    law = PRE.call({n: v.double() for n, v in t.items() if n != "out"}, dict(nb=5, write=5), exact)
    assert (law["out"] - want["out"]).abs().max() < 1e-13
    assert torch.equal(law["blocks"][:, :6], want["blocks"][:, :6].double())


def test_one_kernel_per_distinct_call_of_a_decode_step():
    cases = twin.attn_res_cases()
    kernels = [pick(twin.attn_res, t | dict(out=t["out"]), attrs) for t, attrs in cases]
    assert all(len(k) == 1 for k in kernels) and len({k[0].name for k in kernels}) == len(cases)
    # l = 0; 7 later write layers; nb 1..8 between; after attention nb 1..8, and again at the 8 write layers; the end
    assert len(cases) == 1 + 7 + 8 - 8 + 8 + 8 + 1
    for (kernel,), (tensors, attrs) in zip(kernels, cases, strict=True):
        assert {a.name for a in kernel.args} == set(tensors) and kernel.pdl
        weights = {a.name for a in kernel.args if a.role is Role.WEIGHT}
        assert weights == {"w_norm", "w_proj", "w_out"} & set(tensors)
        assert kernel.grid == ((8 if attrs["nb"] > 1 else 1), 1, 1)


@pytest.mark.parametrize("D", [64, 192, k3.hidden])
def test_every_batch_has_a_config(D):
    for T, nb in product(range(1, 65), range(9)):
        config = twin.choose_config(T, D, nb)
        assert config in twin.candidates(T, D, nb)
        assert config.cluster * config.threads * config.vec * config.loads(D) == D
        assert T * config.cluster <= twin.SMS
    assert {twin.choose_config(T, k3.hidden, 8).cluster for T in range(1, 65)} == {2, 4, 8}


def test_batches_of_one_config_share_their_code():
    (tensors, attrs) = twin.attn_res_cases()[-1]
    kernels = {}
    for T in range(1, 65):
        rows = {n: v.new_empty(T, *v.shape[1:]) if v.ndim > 1 else v for n, v in tensors.items()}
        (kernels[T],) = pick(twin.attn_res, rows, attrs)
    assert [T for T in range(2, 65) if kernels[T].code != kernels[T - 1].code] == [17, 33]
    assert kernels[1].compile("sm_90a").cubin is kernels[16].compile("sm_90a").cubin


@pytest.mark.parametrize("sources", range(1, 10))
def test_folded_sums_have_homes_of_their_own(sources):
    """Squares in the lower half-warp, dots 16 lanes above."""
    homes = [twin._home(i, 2 * sources) for i in range(2 * sources)]
    assert len(set(homes)) == 2 * sources and max(homes[:sources]) < 16
    assert homes[sources:] == [lane + 16 for lane in homes[:sources]]


def order(code: str, wait: str, load: str) -> tuple[list[str], list[str]]:
    """Global loads before and after the only wait."""
    before, after = re.split(wait, code)
    return re.findall(load, before), re.findall(load, after)


@pytest.mark.parametrize(
    "T, D, nb, target",
    [(1, 7168, 8, arch) for arch in ARCHS]
    + [(64, 7168, 8, "sm_90a"), (64, 7168, 8, "sm_103a"), (1, 7168, 1, "sm_90a"), (1, 192, 4, "sm_103a")],
)
def test_compiled_code(T, D, nb, target):
    """Weights above the wait and nothing else, no .nc, no spill, and no more registers than the estimate."""
    tensors = {n: t.to("meta") for n, t in hostile(T, D, nb, -1).items()}
    (kernel,) = pick(twin.attn_res, tensors, dict(nb=nb, write=-1))
    build, config = kernel.compile(target), twin.choose_config(T, D, nb)
    loads = config.loads(D)
    for code, wait, load, weight in (
        (build.ptx, r"griddepcontrol\.wait;", r"ld\.global\S*", "L1::no_allocate"),
        (build.sass, r"\bACQBULK\b", r"\bLDG\S*", ".NA"),
    ):
        before, after = order(code, wait, load)
        assert len(before) == 3 * loads and all(weight in x for x in before)
        assert len(after) == (nb + 2) * loads and not any(weight in x for x in after)
    assert ".nc" not in build.ptx and "CONSTANT" not in build.sass and ".local" not in build.ptx
    assert not re.search(r"\b(LDL|STL)\b", build.sass)
    assert max(map(int, re.findall(r"\bR(\d+)\b", build.sass))) < config.registers(D, nb)
    late = build.ptx.replace("griddepcontrol.wait;", "", 1).replace("ret;", "griddepcontrol.wait; ret;", 1)
    assert len(order(late, r"griddepcontrol\.wait;", r"ld\.global\S*")[0]) == (nb + 5) * loads


def test_refusals():
    t = {n: v.to("meta") for n, v in hostile(2, 64, 2, -1).items()}
    ok = dict(nb=2, write=-1)
    pick(twin.attn_res, t, ok)

    def wide(D):
        return {n: torch.empty(*v.shape[:-1], D, dtype=v.dtype, device="meta") for n, v in t.items()}

    for change, attrs, message in (
        ({}, dict(nb=9, write=-1), r"nb = 9, write = -1, B = 8; allowed are 0\.\.B"),
        ({}, dict(nb=2, write=8), r"write = 8, B = 8; allowed are 0\.\.B, -1\.\.B-1"),
        (wide(96), ok, "D = 96; allowed are multiples of 64"),
        (wide(7104), ok, "D = 7104; allowed"),
        (dict(w_norm=t["w_norm"].float()), ok, "w_norm is torch.float32; allowed is torch.bfloat16"),
        (
            dict(delta=torch.empty(2, 65, dtype=torch.bfloat16, device="meta")[:, :64]),
            ok,
            r"delta has strides \(65, 1\)",
        ),
        (dict(out=t["out"][:1]), ok, "out has T = 1; allowed is 2"),
    ):
        with pytest.raises(ContractError, match=message):
            pick(twin.attn_res, t | change, attrs)
    many = {n: v.to("meta") for n, v in hostile(65, 64, 2, -1).items()}
    with pytest.raises(NotImplementedError, match=r"prefix has 65 tokens; allowed are 1\.\.64"):
        pick(twin.attn_res, many, ok)
    with pytest.raises(ContractError, match=r"threads=896.*allowed are those of candidates"):
        twin.make_kernel(wide(7168), 8, -1, twin.Config(1, 896, 8))


# ---------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
@pytest.mark.parametrize("D", [64, 192, 7168])
def test_every_variant(D, variant):
    nb, add, norm, write = variant
    T = 1 + (7 * VARIANTS.index(variant)) % 64
    t = hostile(T, D, nb, write, add=add, norm=norm, device="cuda")
    want, bound = wanted(t, nb, write, depth_of(twin.choose_config(T, D, nb), D))
    compare(run(t, nb, write), want, bound)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 2, 16, 17, 33, 64])
def test_hostile_values(T, kind):
    for nb in (1, 8):
        t = hostile(T, 7168, nb, nb - 1, kind=kind, device="cuda")
        want, bound = wanted(t, nb, nb - 1, depth_of(twin.choose_config(T, 7168, nb), 7168))
        compare(run(t, nb, nb - 1), want, bound)


@needs_gpu
@pytest.mark.parametrize("nb", [0, 3, 8])
@pytest.mark.parametrize("T", [1, 64])
def test_every_candidate(T, nb):
    for config in twin.candidates(T, 7168, nb):
        t = hostile(T, 7168, nb, -1, device="cuda")
        want, bound = wanted(t, nb, -1, depth_of(config, 7168))
        ordered = {n: t[n] for n in ("prefix", "blocks", "w_norm", "w_proj", "delta", "w_out", "out")}
        compare(run(t, nb, -1, twin.make_kernel(ordered, nb, -1, config)), want, bound)


@needs_gpu
def test_a_chain_in_a_graph_equals_the_chain_outside():
    """A step's calls in order, 20 replays: early starts must not read what the call before has not written yet."""
    t = hostile(3, 7168, 8, -1, device="cuda")
    calls = [(nb, nb if nb % 2 and nb < 8 else -1) for nb in range(9)] * 3

    def chain():
        for nb, write in calls:
            launch(twin.attn_res, t, dict(nb=nb, write=write))
            launch(twin.attn_res, t | dict(delta=t["out"], out=t["delta"]), dict(nb=8, write=-1))

    written = ("prefix", "blocks", "delta", "out")
    start = {n: t[n].clone() for n in written}
    chain()
    want = {n: bits(t[n]) for n in written}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for n in written:
            t[n].copy_(start[n])
        graph.replay()
        assert all(torch.equal(bits(t[n]), want[n]) for n in written)
