"""The race detector on small kernels: each is clean as written, and each edit of it is one known fault."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import test_simt_wgmma as warpgroup
import torch

from equivalence.simt import Fault
from equivalence.simt.machine import Machine

N = 64  # threads of a CTA: two warps
HEAD = """
.version 9.0
.target sm_90a
.extern .shared .align 1024 .b8 buffer[];
.visible .entry one(.param .b64 x, .param .b64 y)
.reqntid 64, 1, 1
{
  .reg .b32 %r<20>; .reg .b64 %rd<9>; .reg .pred %p<6>;
  ld.param.b64 %rd1, [x];
  ld.param.b64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mov.b32 %r2, buffer;
  shl.b32 %r3, %r1, 2;
  add.s32 %r4, %r2, %r3;
  xor.b32 %r5, %r4, 124;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  setp.eq.u32 %p1, %r1, 0;
  setp.lt.u32 %p2, %r1, 32;
  mov.b32 %r10, 1; mov.b32 %r11, 256;
"""
TAIL = """
  st.global.b32 [%rd5], %r6;
  ret;
}"""
# Every lane writes a word, and reads that of another lane of its warp.
EXCHANGE = "st.shared.b32 [%r4], %r1;\n bar.warp.sync -1;\n ld.shared.b32 %r6, [%r5];"
# Warp 0 reads a stage, one lane says so, warp 1 writes it.
HANDOVER = """
  st.shared.b32 [%r5], %r1;
  @%p1 mbarrier.init.shared.b64 [%r2+512], %r10;
  bar.sync 0;
  @!%p2 bra $WRITER;
  ld.shared.b32 %r6, [%r5+128];
  bar.warp.sync -1;
  @%p1 mbarrier.arrive.shared.b64 _, [%r2+512];
  bra $END;
$WRITER:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r2+512], 0;
  @!%p3 bra $WRITER;
  st.shared.b32 [%r4], %r1;
  mov.b32 %r6, %r1;
$END:
"""
# A bulk copy into a stage that was written and read before.
REFILL = """
  st.shared.b32 [%r4], %r1;
  bar.warp.sync -1;
  ld.shared.b32 %r7, [%r5];
  @%p1 mbarrier.init.shared.b64 [%r2+512], %r10;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @!%p1 bra $READ;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r2+512], %r11;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], %r11, [%r2+512];
$READ:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r2+512], 0;
  @!%p3 bra $READ;
  ld.shared.b32 %r6, [%r4];
"""
# A bulk copy to global memory, from a stage that is written again.
DRAIN = """
  st.shared.b32 [%r4], %r1;
  mov.b32 %r6, 7;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r11;
  @%p1 cp.async.bulk.commit_group;
  @%p1 cp.async.bulk.wait_group.read 0;
  bar.sync 0;
  st.shared.b32 [%r4], %r6;
"""
# A flag in shared memory: warp 0 writes, warp 1 spins.
FLAG = """
  mov.b32 %r9, 0;
  @%p1 st.shared.b32 [%r2+512], %r9;
  bar.sync 0;
  @!%p2 bra $SPIN;
  st.shared.b32 [%r4], %r1;
  mov.b32 %r6, %r1;
  bar.warp.sync -1;
  @%p1 st.release.cta.shared.b32 [%r2+512], %r10;
  bra $END;
$SPIN:
  ld.acquire.cta.shared.b32 %r8, [%r2+512];
  setp.ne.b32 %p3, %r8, 1;
  @%p3 bra $SPIN;
  ld.shared.b32 %r6, [%r4+-128];
$END:
"""
WORDS = torch.arange(N, dtype=torch.int32)
CLEAN = {
    "exchange": (EXCHANGE, WORDS ^ 31),
    "handover": (HANDOVER, torch.cat([WORDS[32:] ^ 0, WORDS[32:]])),
    "refill": (REFILL, WORDS + 100),
    "drain": (DRAIN, torch.full((N,), 7, dtype=torch.int32)),
    "flag": (FLAG, torch.cat([WORDS[:32], WORDS[:32]])),
}
FAULTS = {
    "exchange: no warp barrier": ("exchange", "bar.warp.sync -1;", "", "write, then read, in one warp"),
    "exchange: a shuffle is no barrier": ("exchange", "bar.warp.sync -1;", "shfl.sync.idx.b32 %r7, %r1, 0, 31, -1;",
                                          "write, then read, in one warp"),
    "exchange: two lanes, one word": ("exchange", "shared.b32 [%r4]", "shared.b32 [%r2]",
                                     "two lanes write at once, in one warp"),
    "handover: no warp barrier": ("handover", "bar.warp.sync -1;", "", "read, then write"),
    "handover: no wait": ("handover", "@!%p3 bra $WRITER;", "", "read, then write"),
    "handover: no barrier after the init": ("handover", "bar.sync 0;\n", "", "mbarrier.init, then use"),
    "refill: no proxy fence": ("refill", "fence.proxy.async.shared::cta;", "",
                               "generic write, then asynchronous write without fence.proxy.async"),
    "refill: a fence of the other space": ("refill", "async.shared::cta;", "async.global;",
                                           "generic write, then asynchronous write without fence.proxy.async"),
    "refill: no barrier after the reads": ("refill", "fence.proxy.async.shared::cta;\n  bar.sync 0;",
                                           "bar.sync 0;\n fence.proxy.async.shared::cta;\n ld.shared.b32 %r7, [%r5];",
                                           "read, then write"),
    "refill: a load after the fence": (
        "refill", "fence.proxy.async.shared::cta;", "fence.proxy.async.shared::cta;\n ld.shared.b32 %r7, [%r5];",
        "generic read, then asynchronous write without fence.proxy.async",
    ),
    "refill: no wait": ("refill", "@!%p3 bra $READ;", "", "asynchronous write that nobody waited for, then read"),
    "drain: no proxy fence": ("drain", "fence.proxy.async.shared::cta;", "",
                              "generic write, then asynchronous read without fence.proxy.async"),
    "drain: no wait for reading": ("drain", "@%p1 cp.async.bulk.wait_group.read 0;", "",
                                   "operand that nobody waited for, then write"),
    "flag: relaxed": ("flag", "st.release.cta", "st.relaxed.cta", "write, then read"),
    "flag: plain": ("flag", "ld.acquire.cta.shared", "ld.shared", "write, then read"),
}  # fmt: skip


def execute(body: str, **options):
    """(y, x as it is afterwards, reports)."""
    x, y = WORDS + 100, torch.zeros(N, dtype=torch.int32)
    args = SimpleNamespace(name="x"), SimpleNamespace(name="y")
    one = SimpleNamespace(name="one", args=args, grid=(1, 1, 1), block=(N, 1, 1), cluster=None, smem=1024, pdl=False)
    machine = Machine(races=True, **options)
    machine.run([(one, HEAD + body + TAIL, [x, y])])
    return y, x, machine.reports


@pytest.mark.parametrize("order, warps", [("plain", "together"), ("adversarial", "random"), ("adversarial", "last")])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_kernel_has_no_report(name, order, warps):
    y, x, reports = execute(CLEAN[name][0], order=order, warps=warps)
    assert not reports, reports[0]
    assert torch.equal(y, CLEAN[name][1])
    assert torch.equal(x, WORDS if name == "drain" else WORDS + 100)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_reported(fault):
    name, old, new, kind = FAULTS[fault]
    assert CLEAN[name][0].count(old) == 1
    reports = []
    for warps in ("together", "last"):
        with suppress(Fault):
            reports += execute(CLEAN[name][0].replace(old, new), warps=warps)[2]
    assert kind in {r.kind for r in reports}, reports


def test_equal_words_of_one_warp_are_no_race():
    body = "@!%p2 bra $END;\n st.shared.b32 [%r2], {word};\n bar.warp.sync -1;\n ld.shared.b32 %r6, [%r2];\n$END:"
    assert not execute(body.format(word="%r2"))[2]
    assert {r.kind for r in execute(body.format(word="%r1"))[2]} == {"two lanes write at once, in one warp"}


# ---------------------------------------------------------------- wgmma


def multiply(fence="fence.proxy.async;", tail="", edit=lambda ptx: ptx):
    A, B, a, b, raw = warpgroup.form(128, 16, "00")
    ptx = edit(warpgroup.program(16, warpgroup.ready(a, b), len(raw), tail, fence))
    D, reports = warpgroup.execute(ptx, raw, 16, "numpy", races=True)
    return warpgroup.close(D, A, B), {r.kind for r in reports}, reports


@pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.shared::cta;",
                                   "bar.sync 0;\n fence.proxy.async.shared::cluster;"])  # fmt: skip
def test_a_fence_on_either_side_of_the_barrier_is_enough(fence):
    right, _, reports = multiply(fence)
    assert right and not reports


STORE = "mov.b32 %r9, 0; st.shared.b32 [%r3], %r9;"
WAITS = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("fence, tail, kind", [
    ("", "", "generic write, then asynchronous read without fence.proxy.async"),
    ("fence.proxy.async.global;", "", "generic write, then asynchronous read without fence.proxy.async"),
    ("fence.proxy.async;", STORE + WAITS, "operand that nobody waited for, then write"),
    ("fence.proxy.async;", "wgmma.wait_group.sync.aligned 1;", "register of an unfinished wgmma, then read"),
    ("fence.proxy.async;", "mov.b32 %d0, 0;" + WAITS, "register of an unfinished wgmma, then write"),
    ("fence.proxy.async;", WAITS + "mov.b32 %d0, 0;" + warpgroup.multiply(16, "%rd10") + WAITS,
     "register written, then wgmma without wgmma.fence"),
], ids=["no fence", "other space", "operand", "read", "write", "no wgmma.fence"])  # fmt: skip
def test_faults_of_a_warpgroup_are_reported(fence, tail, kind):
    assert kind in multiply(fence, tail)[1]


def test_a_barrier_before_the_fence_and_none_after_is_a_race():
    """A warp's own fence does not help what the others wrote without a barrier."""
    kinds = multiply("fence.proxy.async;", edit=lambda ptx: ptx.replace("bar.sync 0;", ""))[1]
    assert "write, then read" in kinds


def test_a_stage_may_be_refilled_after_the_wait():
    tail = WAITS + "bar.sync 0;" + STORE
    assert not multiply(tail=tail)[2]
    without = multiply(tail=WAITS + STORE)[1]
    assert without == {"read, then write"}, "other warps may still read"
