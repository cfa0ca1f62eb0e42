"""R11: clean kernels that cross between the proxies are proved, each missing fence is reported, in PTX and in SASS."""

from dataclasses import replace
from functools import cache

import async_kernels
import pytest
from test_order_readers import from_ptx, from_sass

import fast
from equivalence.order import check_kernels, mutant, proxies
from equivalence.order.rules import View
from fast import attn_res, linear_mma, linear_wgmma

FENCE = '        cute.arch.fence_proxy("async.shared", space="cta")\n'
STORE = "        stage[t] = mX[i * 256 + t] * 2.0\n"
DRAIN = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
INIT = "        cute.arch.mbarrier_init_fence()\n"
BOTH = {"PTX", "SASS"}
# name -> (edits, levels that report it); the last two are no faults
PUBLISH = {
    "no fence": ([(FENCE, "")], BOTH),
    "fence of one thread before the barrier": ([(FENCE, "        if t == 0:\n    " + FENCE)], BOTH),
    "fence before the stores": ([(STORE + FENCE, FENCE + STORE)], BOTH),
    "stage filled again before it is read": ([(DRAIN, "")], {"PTX"}),
    "as it stands": ([], set()),
    "fence of the thread that copies, after the barrier": (
        [(FENCE, ""), ("        if t == 0:\n", "        if t == 0:\n    " + FENCE)], set(),
    ),
}  # fmt: skip


def levels(report) -> set[str]:
    assert {f.rule for f in report.findings} in (set(), {"R11"}, {"R11", "R14"}), report.lines()
    return {f.where.split()[0] for f in report.findings if f.rule == "R11"}


@cache
def publish_reports() -> list:
    kernels = [replace(mutant(async_kernels, edits).PUBLISH, name=f"publish{n}")
               for n, (edits, _) in enumerate(PUBLISH.values())]  # fmt: skip
    return check_kernels(kernels, ("sm_90a", "sm_103a"))


@pytest.mark.parametrize("name", PUBLISH)
def test_bulk_stores(name):
    mine = [r for r in publish_reports() if r.kernel == f"publish{list(PUBLISH).index(name)}"]
    assert [levels(r) for r in mine] == [PUBLISH[name][1]] * 2


# name -> (module, what its names start with, edit, levels, what the first report is about); clean: test_order.py
FAST = {
    "no fence": (linear_wgmma, "linear_wgmma", (FENCE, ""), BOTH, "wgmma.mma_async"),
    "no wait": (linear_wgmma, "linear_wgmma", ("        warpgroup.wait_group(0)\n", ""), {"PTX"}, "st.shared"),
    "set-up of bulk copies": (linear_mma, "linear_mma", (INIT, ""), {"PTX"}, "cp.async.bulk"),
    "loads before the next bulk copy": (
        linear_mma,
        "linear_mma",
        ('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
        BOTH,
        "cp.async.bulk",
    ),
    "set-up of stores to peers": (attn_res, "attn_res", (INIT, ""), {"PTX"}, "st.async"),
}


@cache
def fast_reports() -> dict:
    made, kernels = {}, [k for k in fast.production_kernels((1, 16)) if "sm_90a" in k.archs]
    kernels = [k for k in kernels if getattr(k.constants[-1], "bulk", True)]
    for name, (module, start, edit, *_) in FAST.items():
        first = next(k for k in kernels if k.name.startswith(start) and (k.cluster or start == "linear_mma"))
        made[name] = replace(first, name="m", entry=getattr(mutant(module, [edit]), first.entry.__name__))
    return dict(zip(made, check_kernels(made.values(), ("sm_90a",)), strict=True))


@pytest.mark.parametrize("name", FAST)
def test_mutants_of_fast_kernels(name):
    report = fast_reports()[name]
    *_, wanted, op = FAST[name]
    assert levels(report) == wanted and report.findings[0].text.startswith(op)


@pytest.mark.parametrize(
    ("ptx", "sass", "chip"),
    [
        ("st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5}", "STS.128 [R2], R4", "write"),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}", "STSM.16.M88 [R2], R4", "write"),
        ("ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1]", "LDS.128 R4, [R2]", "look"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2, %r3}, [%r1]", "LDSM.16.M88.2 R4, [R2]", "look"),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]", "STAS [R2.64], R4, R6",
         "remote"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2", "UBLKCP.G.S [UR4], [UR8], UR11", "read"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3]",
         "UBLKCP.S.G [UR8], [UR4], UR11", "overwrite"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, {%r1}, %rd1, 1, 1, 1",
         "HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR8], R24", "read"),
        ("fence.proxy.async.shared::cta", "FENCE.VIEW.ASYNC.S", "fence"),
        ("fence.proxy.async", "FENCE.VIEW.ASYNC", "fence"),
        ("fence.proxy.async.global", "FENCE.VIEW.ASYNC.G", ""),
        ("fence.acq_rel.gpu", "MEMBAR.ALL.GPU", ""),
        ("mbarrier.init.shared.b64 [%r1], 1", "SYNCS.EXCH.64 URZ, [UR8], UR4", "init"),
        ("mbarrier.arrive.shared.b64 _, [%r1]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2], RZ", "arrive"),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2], R4", "wait"),
        ("barrier.cluster.arrive.relaxed", "UCGABAR_ARV", "cluster arrive"),
        ("barrier.cluster.wait", "UCGABAR_WAIT", "cluster wait"),
        ("bar.sync 0", "BAR.SYNC.DEFER_BLOCKING 0x0", "barrier"),
        ("bar.warp.sync -1", "WARPSYNC R4", ""),
        ("elect.sync %r1|%p1, -1", "ELECT P1, URZ, PT", ""),
        ("setmaxnreg.dec.sync.aligned.u32 40", "USETMAXREG.DEALLOC.CTAPOOL 0x28", ""),
    ],
)  # fmt: skip
def test_both_readers_know_what_touches_shared_memory(ptx, sass, chip):
    for inst in (from_ptx(ptx + "; ret;").insts[2], from_sass(sass, "EXIT").insts[0]):
        assert (inst.chip, inst.doubt) == (chip, ""), inst.text


@pytest.mark.parametrize("text, does", [
    ("st.b32 [%rd3], %r1", "write"), ("atom.add.u32 %r2, [%rd3], 1", "write"), ("ld.b32 %r1, [%rd3]", "look"),
    ("ld.b32 %r1, [%rd1]", ""), ("prefetch.global.L2 [%rd1]", ""),
])  # fmt: skip
def test_generic_addresses_of_shared_memory_count(text, does):
    body = f".shared .align 16 .b8 buf[64]; mov.u64 %rd4, buf; cvta.shared.u64 %rd3, %rd4; {text}; ret;"
    view = View(from_ptx(body))
    assert proxies._does(view, 4) == does
