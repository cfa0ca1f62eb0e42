"""The fused KDA decode kernel against a float64 loop, its compiled code on every target, and what it refuses."""

import math
import re

import pytest
import torch

from fast import kda
from fast.kernel import ARCHS, CAPABILITIES, launch, pick
from reference.stage import ContractError, Role

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() in CAPABILITIES
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU of sm_90/sm_100/sm_103")
DIM, WRITTEN = kda.DIM, ("conv", "recurrent", "out")


def projection_width(H: int) -> int:
    return -(-(4 * H * DIM + DIM + H) // 16) * 16


def hostile(T: int, H: int, device="cpu", nulls: int = 0, pad: int = 16) -> dict[str, torch.Tensor]:
    """Padded rows, permuted slots, null slots 0 and -1, NaN in the padding, in unowned slots and in `out`."""
    generator = torch.Generator().manual_seed(1000 * T + H)

    def normal(like, scale=1.0):
        return torch.randn(like.shape, generator=generator) * scale

    S = T + 3
    t = kda.kda_tensors(T, H, S, projection_width(H) + pad, device="cpu")
    t["x"]._base.fill_(float("nan"))
    scales = dict(x=1, gate=2, b=1, conv=1, conv_weight=0.5, raw_g=1.5, dt_bias=1, recurrent=1, w_o_norm=1)
    for name, scale in scales.items():
        t[name].copy_(normal(t[name], scale))
    t["A_log"].copy_((1 + 15 * torch.rand(H, generator=generator)).log())
    t["out"].fill_(float("nan"))
    t["slots"].copy_(torch.randperm(S - 1, generator=generator)[:T] + 1)
    t["slots"][torch.randperm(T, generator=generator)[:nulls]] = torch.tensor([0, -1] * T, dtype=torch.int32)[:nulls]
    unowned = torch.ones(S, dtype=torch.bool)
    unowned[t["slots"].clamp_min(0).long()] = False
    unowned[0] = True
    t["recurrent"][unowned] = t["conv"][unowned] = float("nan")
    proj = t["x"]._base.to(device)
    moved = {n: v.to(device) for n, v in t.items() if v._base is None}
    views = {n: proj.as_strided(v.shape, v.stride(), v.storage_offset()) for n, v in t.items() if v._base is not None}
    return moved | views


def oracle(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SPEC.md 5.2-5.6 in float64, one token and head at a time; null rows give zero and touch nothing."""
    t = {n: v.cpu().double() if v.is_floating_point() else v.cpu() for n, v in t.items()}
    conv, recurrent, out = t["conv"].clone(), t["recurrent"].clone(), torch.zeros_like(t["out"])
    H, C = len(t["A_log"]), t["raw_g"].shape[1]
    for row, slot in enumerate(t["slots"].tolist()):
        if slot <= 0:
            continue
        window = torch.cat([conv[slot], t["x"][row : row + 1]])
        conv[slot] = window[1:]
        y = (window * t["conv_weight"]).sum(0)
        y = y / (1 + (-y).exp())
        for h in range(H):
            at = slice(h * DIM, (h + 1) * DIM)
            q, k, v = y[:C][at], y[C : 2 * C][at], y[2 * C :][at]
            q = q / (q.square().sum() + 1e-6).sqrt() / math.sqrt(DIM)
            k = k / (k.square().sum() + 1e-6).sqrt()
            g = t["A_log"][h].exp() * (t["raw_g"][row, at] + t["dt_bias"][at])
            S = recurrent[slot, h] * (-5 / (1 + (-g).exp())).exp()
            S = S + torch.outer((v - S @ k) / (1 + (-t["b"][row, h]).exp()), k)
            recurrent[slot, h] = S
            o = S @ q
            o = o / (o.square().mean() + 1e-5).sqrt() * t["w_o_norm"]
            out[row, at] = o / (1 + (-t["gate"][row, at]).exp())
    return dict(conv=conv, recurrent=recurrent, out=out)


def bounds(want: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Largest error of fp32 arithmetic with one rounding of out, from the exact result.

    conv: copied, so none. recurrent: sums of 128 products of factors right to a few ulp, 16 * 2^-24 of a row's largest.
    out: its bf16 rounding, 2^-8 of each value, and that same error carried through the norm, 2^-17 of a head's largest.
    """
    state, heads = want["recurrent"].nan_to_num(0), want["out"].unflatten(1, (-1, DIM))
    return dict(
        conv=torch.zeros_like(want["conv"]),
        recurrent=(16 * 2.0**-24 * state.abs().amax(-1, keepdim=True)).expand_as(state),
        out=(heads.abs() * 2.0**-8 + heads.abs().amax(-1, keepdim=True) * 2.0**-17).flatten(1),
    )


def compare(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Non-finite positions first, then errors against `bounds`."""
    for name, bound in bounds(want).items():
        exact, value = want[name], got[name].double()
        assert torch.equal(value.isnan(), exact.isnan()), f"{name}: NaN where none may be, or none where one was"
        error = (value - exact).nan_to_num(0, posinf=math.inf, neginf=-math.inf).abs()
        assert (error <= bound).all(), f"{name}: error is {float((error / bound).nan_to_num(0).max()):.3g} of its bound"


def run(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Launch, check that no input changed, and return what was written, on the CPU."""
    before = {n: v.clone() for n, v in t.items() if n not in WRITTEN}
    launch(kda.kda_decode, t, {})
    for name, old in before.items():
        assert torch.equal(t[name], old), f"{name} changed"
    return {n: t[n].cpu() for n in WRITTEN}


def test_comparison_accepts_one_rounding_and_rejects_just_beyond():
    want = oracle(hostile(3, 2, nulls=1))
    compare(dict(conv=want["conv"], recurrent=want["recurrent"].float(), out=want["out"].bfloat16()), want)
    live = int(want["recurrent"][:, 0, 0, 0].isfinite().nonzero()[0, 0])
    row = int(want["out"][:, 0].nonzero()[0, 0])
    for name, index in dict(conv=(live, 0, 7), recurrent=(live, 1, 5, 9), out=(row, 3)).items():
        bound = bounds(want)[name][index]
        for error in (1.01 * bound + 2.0**-40, -1.01 * bound - 2.0**-40, math.inf, math.nan):
            mutant = {n: v.clone() for n, v in want.items()}
            mutant[name][index] += 0.99 * bound
            compare(mutant, want)
            mutant[name][index] = want[name][index] + error
            with pytest.raises(AssertionError, match=name):
                compare(mutant, want)


def test_oracle_leaves_null_and_unowned_rows_alone():
    t = hostile(5, 1, nulls=2)
    want = oracle(t)
    null = t["slots"] <= 0
    assert sorted(t["slots"][null].tolist()) == [-1, 0]
    assert (want["out"][null] == 0).all() and want["out"].isfinite().all()
    touched = set(t["slots"][~null].tolist())
    assert all(want["recurrent"][s].isnan().all() for s in range(8) if s not in touched)


def test_production_cases_have_one_kernel_each():
    cases = kda.kda_cases()
    names = [pick(kda.kda_decode, t, {})[0].name for t in cases.values()]
    assert names == [f"kda_decode-{case}" for case in cases] and len(set(names)) == 32
    (kernel,) = pick(kda.kda_decode, cases["t8-h12"], {})
    assert kernel.grid == (12, 8, 1) and kernel.pdl and kernel.cluster is None
    assert [a.name for a in kernel.args if a.role is Role.WEIGHT] == ["conv_weight", "A_log", "dt_bias", "w_o_norm"]


def test_batches_and_slots_of_one_config_share_their_code():
    kernels = {T: pick(kda.kda_decode, kda.kda_cases((T,), 7 + T)[f"t{T}-h12"], {})[0] for T in range(1, 65)}
    assert [T for T in range(2, 65) if kernels[T].code != kernels[T - 1].code] == [12]
    assert kernels[1].compile("sm_103a").cubin is kernels[11].compile("sm_103a").cubin


def test_every_batch_has_a_config_whose_state_covers_a_head():
    for T in range(1, 65):
        for H in (1, 2, 6, 12, 96):
            config = kda.choose_config(T, H)
            assert config.rows * kda.STEPS * kda.VEC * config.warps * 32 == DIM * DIM
            assert config.warps >= 4  # one warp each for q, k, v and the decay


def early_loads(ptx: str) -> list[str]:
    """Global loads in front of the only wait, in file order."""
    before, _ = ptx.split("griddepcontrol.wait;")
    return re.findall(r"ld\.global[\w.:]*", before)


@pytest.mark.parametrize("target", ARCHS)
@pytest.mark.parametrize("case", ["t1-h12", "t16-h12"])
def test_compiled_code(case, target):
    """Both configurations: weights and nothing else above the wait, no .nc, no spills, two 8-warp CTAs per SM."""
    (kernel,) = pick(kda.kda_decode, kda.kda_cases()[case], {})
    build = kernel.compile(target)
    loads = early_loads(build.ptx)
    assert len(loads) == 4 + 1 + 1 + 1  # taps; dt_bias, A_log, w_o_norm
    assert all("L1::no_allocate" in load for load in loads)
    assert build.ptx.count("no_allocate") == len(loads) and ".nc" not in build.ptx
    moved = build.ptx.replace("griddepcontrol.wait;", "", 1).replace("ret;", "griddepcontrol.wait; ret;", 1)
    assert len(early_loads(moved)) > len(loads)  # the same count on a kernel that waits at its end

    above, below = re.split(r"\bACQBULK\b", build.sass)
    assert re.findall(r"LDG\S*", above) and all(".NA" in load for load in re.findall(r"LDG\S*", above))
    assert "CONSTANT" not in build.sass and ".NA" not in below
    assert not re.search(r"\b(LDL|STL)\b", build.sass)
    registers = int.from_bytes(build.cubin[(at := build.cubin.index(b"\x04\x2f\x08\x00") + 8) : at + 4], "little")
    assert kernel.block[0] * registers * (65536 // (8 * 32 * 128) if kernel.block[0] == 256 else 1) <= 65536


def test_state_offsets_are_64_bit():
    """12 heads of 128 * 128 pass 2^31 at slot 10,923, so the slot is widened before it is scaled."""
    (kernel,) = pick(kda.kda_decode, kda.kda_cases(tokens=(1,), slots=20_000)["t1-h12"], {})
    body = kernel.compile("sm_90a").ptx.split("griddepcontrol.wait;")[1]
    slot = re.search(r"ld\.global\.b32\s+(%r\d+)", body)[1]
    uses = re.findall(rf"([a-z][\w.]+)\s+%\w+, {slot}\b", body)
    assert set(uses) == {"setp.lt.s32", "mul.wide.u32"}


def test_refusals():
    t = hostile(2, 1)
    with pytest.raises(NotImplementedError, match="x has row stride 657; allowed are multiples of 4"):
        pick(kda.kda_decode, t | dict(x=torch.empty(2, 657)[:, :384]), {})
    wide = kda.kda_tensors(65, 1, 4, 672)
    with pytest.raises(NotImplementedError, match=r"x has 65 tokens; allowed are 1\.\.64"):
        pick(kda.kda_decode, wide, {})
    (kernel,) = pick(kda.kda_decode, t, {})
    by_name = {a.name: a for a in kernel.args}
    for name, bad in dict(
        raw_g=torch.empty(2, 2 * DIM, dtype=torch.bfloat16)[:, :DIM],
        recurrent=t["recurrent"].double(),
        conv=t["conv"].transpose(1, 2),
        slots=t["slots"].long(),
        out=t["out"][:1],
    ).items():
        by_name[name].check(t[name], kernel.name)
        with pytest.raises(ContractError, match=f"kda_decode-t2-h1: {name} is"):
            by_name[name].check(bad, kernel.name)


@needs_gpu
@pytest.mark.parametrize("H", [1, 2, 6, 12])
@pytest.mark.parametrize("T", [1, 2, 3, 8, 23, 64])
def test_against_float64(T, H):
    t = hostile(T, H, "cuda", nulls=T // 3)
    want = oracle(t)
    compare(run(t), want)


@needs_gpu
def test_a_slot_beyond_2_31_elements():
    t = hostile(1, 12, "cuda")
    want, near, far = oracle(t), int(t["slots"][0]), 11_000
    for name in ("conv", "recurrent"):
        moved = torch.empty((far + 1, *t[name].shape[1:]), dtype=t[name].dtype, device="cuda")
        moved[far] = t[name][near]
        t[name], want[name] = moved, want[name][[near]]
    t["slots"][0] = far
    launch(kda.kda_decode, t, {})
    compare(dict(conv=t["conv"][[far]].cpu(), recurrent=t["recurrent"][[far]].cpu(), out=t["out"].cpu()), want)


@needs_gpu
def test_many_steps_do_not_drift():
    """The state is fed back 200 times, so an error that does not decay with the state would grow.

    Per step the decay is off by one ulp and its product and sum by half: 2 * 2^-24 relative, and once what one step may
    show. With ex2.approx alone for decays near one the bound broke on an H200.
    """
    t = hostile(4, 2, "cuda")
    want = {n: v.cpu() for n, v in t.items()}
    for _ in range(200):
        want |= oracle(want)
        got = run(t)
    largest = want["recurrent"].nan_to_num(0).abs().amax(-1, keepdim=True)
    error = (got["recurrent"].double() - want["recurrent"]).nan_to_num(0).abs()
    assert (error <= (2 * 200 + 64) * 2.0**-24 * largest).all()


@needs_gpu
def test_a_row_does_not_depend_on_its_batch():
    """Bit for bit, across both configurations, null neighbours or not."""
    t = hostile(64, 12, "cuda", nulls=20)
    row = int((t["slots"] > 0).nonzero()[17, 0])
    alone = {n: (v[row : row + 1] if n in ("x", "raw_g", "b", "slots", "gate") else v.clone()) for n, v in t.items()}
    alone["out"] = torch.full_like(t["out"][:1], float("nan"))
    batch, single, slot = run(t), run(alone), int(t["slots"][row])
    assert torch.equal(batch["out"][row], single["out"][0])
    assert torch.equal(batch["recurrent"][slot], single["recurrent"][slot])


@needs_gpu
def test_graph_replay_continues_from_the_state_it_finds():
    t = hostile(8, 12, "cuda", nulls=2)
    eager = {n: v.clone() if n in WRITTEN else v for n, v in t.items()}
    first, second = run(eager), run(eager)
    start = {n: t[n].clone() for n in WRITTEN}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kda.kda_decode, t, {})
    for n in WRITTEN:
        t[n].copy_(start[n])
    for want in (first, second):
        graph.replay()
        for n in WRITTEN:
            assert torch.equal(t[n].cpu().nan_to_num(7), want[n].nan_to_num(7)), n
    assert not torch.equal(first["out"], second["out"])
