"""A whole decode step of `mini` as one stream, and a thousand schedules of single forms: minutes, so on request."""

import itertools
import os

import pytest
import test_fast_attn_res as residual
import test_fast_kda as recurrence
import test_fast_linear as gemm
import torch

from equivalence.cases import load_model, make_state, open_requests, prompt_tokens
from equivalence.simt import compiler, watch
from equivalence.simt.step import Recorder, stand_in, watch_step
from fast import attn_res, kda
from fast.kernel import pick
from fast.linear import linear_kernel
from reference.stage import ContractError

slow = pytest.mark.skipif(not os.environ.get("K3_SLOW"), reason="minutes: set K3_SLOW=1")
needs_compiler = pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
SCHEDULES = 1000


def test_a_stand_in_stores_rows_of_any_stride():
    from equivalence.simt.machine import Machine

    wide = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    part, want = wide[:, 2:7], wide.clone()
    made = stand_in("part", part)
    wide.fill_(float("nan"))
    Machine("adversarial").run([made])
    assert torch.equal(part, want[:, 2:7]) and wide[:, :2].isnan().all() and wide[:, 7:].isnan().all()
    with pytest.raises(ContractError, match="allowed are dense rows"):
        stand_in("columns", torch.zeros(4, 6).T)


@pytest.fixture(scope="module")
def decoder():
    model, _ = load_model("mini")
    tokens = prompt_tokens(("edge-one-byte", "edge-two-bytes"), model.config)
    made = Recorder(model, make_state(model.config, [len(t) for t in tokens], 8, "cpu"))
    return made, *open_requests(made, tokens)


@slow
@needs_compiler
@pytest.mark.parametrize("warps", ["together", "random", "last"])
def test_a_whole_step_has_no_race(decoder, warps):
    watched = watch_step(*decoder, rows=3, warps=warps)
    print(f"\n{watched.grids} grids, {watched.twins} of them twins, in one stream")
    assert watched.twins > 70 and not watched.reports and not watched.different


@slow
@needs_compiler
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_twin_of_a_step_that_does_not_wait_is_found(decoder, which):
    """The first, the second, and the last twin of the step."""
    twins = []

    def edit(index: int, ptx: str) -> str:
        if ".entry law(" not in ptx:
            twins.append(index)
        return ptx

    watch_step(*decoder, rows=3, races=False, edit=edit)
    bad = twins[which]
    watched = watch_step(
        *decoder, rows=3, edit=lambda i, ptx: ptx.replace("griddepcontrol.wait;", "") if i == bad else ptx
    )
    assert watched.reports and watched.different


def forms() -> dict:
    """One small launch, twice, of every form of the twins: its kernel and tensors."""
    made = {}
    for form, (M, N, K, cfg) in gemm.FORMS.items():
        M, N = min(M, 9), min(N, -(-getattr(cfg, "rows", 16) // 8) * 8)
        t = gemm.hostile(M, N, K)
        made[f"linear {form}"] = [(linear_kernel(cfg, M, N, K, t["x"].stride(0), t["out"].stride(0)), t)] * 2
    for heads in (1, 2):
        t = recurrence.hostile(2, heads)
        made[f"kda.decode {heads}"] = [(pick(kda.kda_decode, t, {}, "sm_90a")[0], t)] * 2
    for D, write in ((192, 2), (7168, -1)):
        t = residual.hostile(1, D, 2, write)
        made[f"attn_res {D}"] = [(pick(attn_res.attn_res, t, dict(nb=2, write=write), "sm_90a")[0], t)] * 2
    return made


@slow
def test_a_thousand_schedules_have_no_false_alarm():
    """Random subsets of warps, by seed; every form in turn."""
    counts = dict.fromkeys(cases := forms(), 0)
    for seed, name in zip(range(SCHEDULES), itertools.cycle(cases), strict=False):
        reports = watch(cases[name], warps="random", seed=seed)
        assert not reports, f"{name}, seed {seed}: {reports[0]}"
        counts[name] += 1
        if (seed + 1) % (10 * len(cases)) == 0 or seed + 1 == SCHEDULES:
            print(f"{seed + 1} schedules without a report: {counts}", flush=True)
