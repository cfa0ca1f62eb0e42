"""R14: what the skeleton of a kernel shows of shared memory, whatever the data. Small PTX, clean and broken."""

from types import SimpleNamespace

import pytest

from equivalence.mutants import checkers
from equivalence.mutants.catalog import CATALOG
from equivalence.order import ERROR, check_builds
from equivalence.simt.machine import code
from equivalence.simt.onchip import found
from equivalence.simt.skeleton import skeleton

HEAD = """.version 9.0
.target sm_90a
.visible .entry k(.param .b64 in, .param .b64 out)
.reqntid THREADS, 1, 1
{
  .reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<9>;
  .shared .align 128 .b8 buf[1024];
  ld.param.b64 %rd1, [in];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, buf;
  add.s32 %r4, %r3, %r2;
  xor.b32 %r5, %r2, 128;
  add.s32 %r6, %r3, %r5;
  setp.eq.u32 %p1, %r1, 0;
  ld.global.b32 %r7, [%rd1];
  setp.gt.s32 %p2, %r7, 0;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.b32 %r8, [%rd3];
  setp.gt.s32 %p3, %r8, 0;
"""
WRITE, READ, OTHER = "st.shared.b32 [%r4], %r7;", "ld.shared.b32 %r9, [%r4];", "ld.shared.b32 %r9, [%r6];"
SYNC = "bar.sync 0;"
RING = """
  mov.u32 %r20, buf;
  @!%p1 bra $READY;
  mbarrier.init.shared.b64 [%r20], 1;
  fence.mbarrier_init.release.cluster;
$READY:
  bar.sync 0;
  add.s32 %r21, %r20, 256;
  @!%p1 bra $WAIT;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r20], BYTES;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd1], 512, [%r20];
$WAIT:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r20], PARITY;
  @!%p4 bra $WAIT;
  add.s32 %r22, %r21, %r2;
  ld.shared.b32 %r9, [%r22];
"""
# name -> (body, kinds found)
CASES = {
    "own bytes": (f"{WRITE} {READ}", set()),
    "a neighbour's bytes, behind a barrier": (f"{WRITE} {SYNC} {OTHER}", set()),
    "a neighbour's bytes": (f"{WRITE} {OTHER}", {"race"}),
    "a barrier of the warp for another warp": (f"{WRITE} bar.warp.sync -1; {OTHER}", {"race"}),
    "overwritten while read": (f"{WRITE} {SYNC} {OTHER} {WRITE}", {"race"}),
    "nothing in shared memory": ("add.s32 %r9, %r7, 1;", set()),
    "a barrier under a condition on data that all share": (
        f"@!%p2 bra $END; {WRITE} {SYNC} {OTHER} $END:", set()),
    "a barrier that the data may skip": (f"{WRITE} @!%p2 bra $END; {SYNC} $END: {OTHER}", {"race"}),
    "a barrier that each thread's data may skip": (f"{WRITE} @!%p3 bra $END; {SYNC} $END: {READ}", {"doubt"}),
    "a loop as long as the data says": (f"$L: {WRITE} {SYNC} {OTHER} {SYNC} @%p2 bra $L;", {"doubt"}),
    "a loop that loads how long it lasts": (
        f"$L: ld.global.b32 %r7, [%rd1]; setp.gt.s32 %p2, %r7, 0; {WRITE} {SYNC} {OTHER} {SYNC} @%p2 bra $L;",
        {"doubt"}),
    "the same without its last barrier": (
        f"$L: ld.global.b32 %r7, [%rd1]; setp.gt.s32 %p2, %r7, 0; {WRITE} {SYNC} {OTHER} @%p2 bra $L;",
        {"doubt", "race"}),
    "an address out of memory": ("and.b32 %r10, %r7, 252; add.s32 %r11, %r3, %r10; ld.shared.b32 %r9, [%r11];",
                                 {"doubt"}),
    "an address that a thread's branch decides": (
        "mov.b64 %rd4, %rd1; @!%p1 bra $N; add.s64 %rd4, %rd1, 8; $N: ld.global.b32 %r12, [%rd4]; "
        f"setp.gt.s32 %p5, %r12, 0; @!%p5 bra $END; {SYNC} $END:", {"doubt"}),
    "a barrier for half of the threads": (f"@%p1 bra $END; bar.sync 1, 64; {SYNC} $END:", {"stuck"}),
    "a copy that is waited for": (RING.replace("BYTES", "512").replace("PARITY", "0"), set()),
    "a copy that one thread waits for, and a barrier": (
        RING.replace("BYTES", "512").replace("PARITY", "0").replace("$WAIT:", "$WAIT: @!%p1 bra $S;")
        .replace("@!%p4 bra $WAIT;", "@!%p4 bra $WAIT; $S: bar.sync 0;"), set()),
    "a wait for the wrong parity": (RING.replace("BYTES", "512").replace("PARITY", "1"), {"race"}),
    "fewer bytes than are sent": (RING.replace("BYTES", "256").replace("PARITY", "0"), {"stuck"}),
    "a copy that nobody waits for": (
        RING.partition("$WAIT:")[0].replace("BYTES", "512") + "$WAIT:", {"race"}),
}  # fmt: skip


def kernel(threads: int = 64, **more) -> SimpleNamespace:
    return SimpleNamespace(**dict(name="k", grid=(4, 1, 1), block=(threads, 1, 1), cluster=None, smem=0) | more)


def text(body: str, threads: int = 64) -> str:
    return f"{HEAD.replace('THREADS', str(threads))}  {body}\n  ret;\n}}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name):
    body, kinds = CASES[name]
    assert {f.kind for f in found(kernel(), text(body))} == kinds


def test_the_line_is_that_of_the_later_access():
    body = f"{WRITE}\n  {OTHER}"
    (one,) = found(kernel(), text(body))
    assert text(body).splitlines()[one.line - 1].strip().startswith("ld.shared")
    assert "write, then read" in one.text


def test_one_warp_needs_a_barrier_too():
    body = WRITE + " xor.b32 %r13, %r2, 4; add.s32 %r14, %r3, %r13; {} ld.shared.b32 %r9, [%r14];"
    assert {f.kind for f in found(kernel(32), text(body.format(""), 32))} == {"race"}
    assert not found(kernel(32), text(body.format("bar.warp.sync -1;"), 32))


def test_the_last_cluster_is_looked_at():
    """CTA 3 of 4 takes another way, without the barrier."""
    body = f"mov.u32 %r15, %ctaid.x; setp.eq.u32 %p6, %r15, 3; {WRITE} @%p6 bra $N; {SYNC} $N: {OTHER}"
    assert {f.kind for f in found(kernel(), text(body))} == {"race"}
    assert not found(kernel(grid=(3, 1, 1)), text(body))


def test_peers_of_a_cluster_may_not_choose_apart():
    body = "mov.u32 %r15, %ctaid.x; mul.wide.u32 %rd5, %r15, 4; add.s64 %rd6, %rd1, %rd5; ld.global.b32 %r16, [%rd6];"
    body += f" setp.gt.s32 %p7, %r16, 0; @!%p7 bra $N; {SYNC} $N:"
    assert not found(kernel(), text(body))
    assert {f.kind for f in found(kernel(cluster=(2, 1, 1)), text(body))} == {"doubt"}


def test_arithmetic_on_data_is_cut_away():
    made = code(text(f"mul.lo.s32 %r9, %r7, %r7; mul.lo.s32 %r9, %r9, 3; {WRITE}"))[0]
    bones = skeleton(made)
    kept = [op.text.split()[0] for block in bones.code.blocks for op in block.ops]
    assert "mul.lo.s32" not in kept and "ld.global.b32" not in kept and "st.shared.b32" in kept
    assert not bones.choices and not bones.unsure and not bones.doubts


def test_reports_carry_it():
    entries = CATALOG["BULK: activations not waited for"], None
    builds = [checkers.build(entry, "BULK", ["sm_103a"]).builds["sm_103a"] for entry in entries]
    broken, clean = check_builds(builds)
    assert {(f.rule, f.severity, f.where[:4]) for f in broken.findings} == {("R14", ERROR, "PTX ")}
    assert clean.verdict == "proved"
