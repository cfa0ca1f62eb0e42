"""R14 against broken kernels that are hard to see. OPEN: what it still calls clean; what is mended must leave OPEN."""

import re

import pytest
from test_order_shared import OTHER, RING, SYNC, WRITE, kernel, text

from equivalence.simt import Unsupported
from equivalence.simt.onchip import found

WAITED = RING.replace("BYTES", "512").replace("PARITY", "0")
LOOP = (
    "mov.u32 %r10, 0; $L: ld.global.b32 %r11, [%rd1]; setp.gt.s32 %p5, %r11, 0; {} "
    "add.u32 %r10, %r10, 1; setp.lt.u32 %p6, %r10, ROUNDS; @%p6 bra $L;"
)
EVEN = "and.b32 %r12, %r10, 1; setp.eq.u32 %p7, %r12, 0;"
BARRIER = """@!%p1 bra $I; mbarrier.init.shared.b64 [%r3], 32; fence.mbarrier_init.release.cluster; $I: bar.sync 0;
  setp.ge.u32 %p5, %r1, 32; @%p5 bra $P;
$A: mbarrier.try_wait.parity.shared.b64 %p6, [%r3], 0; @!%p6 bra $A;
$B: mbarrier.try_wait.parity.shared.b64 %p7, [%r3], 1; @!%p7 bra $B;
  bra $E;
$P: mbarrier.arrive.shared.b64 _, [%r3]; bar.warp.sync -1; mbarrier.arrive.shared.b64 _, [%r3];
$E:"""
# name -> (body, threads, more of the kernel)
BROKEN = {
    # waits and barriers
    "a wait that is not repeated": (WAITED.replace("@!%p4 bra $WAIT;", ""), 64, {}),
    "a barrier of 32 for two warps": (f"{WRITE} bar.sync 1, 32; {OTHER}", 64, {}),
    "a barrier in both sides of a split warp": (f"@%p1 bra $A; {SYNC} bra $E; $A: {SYNC} $E:", 64, {}),
    "half of each warp at a barrier": (
        "and.b32 %r10, %r1, 16; setp.eq.u32 %p5, %r10, 0; @!%p5 bra $E; bar.sync 1, 32; $E:", 64, {}),
    "a cluster barrier arrived at twice": (
        "barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;", 64, dict(cluster=(2, 1, 1))),
    "a barrier of 40 threads": ("bar.sync 1, 40;", 64, {}),
    "a barrier that is the seventeenth": ("bar.sync 16, 64;", 64, {}),
    "a condition that a loop makes anew, and another line last": (
        "$L: ld.global.b32 %r10, [%rd1]; setp.gt.s32 %p5, %r10, 0; "
        f"{WRITE} {SYNC} {OTHER} {SYNC} @%p5 bra $L; setp.lt.s32 %p5, %r7, 9; @%p5 bra $E; {SYNC} $E:", 64, {}),
    "a cluster barrier waited for without an arrival": ("barrier.cluster.wait;", 64, dict(cluster=(2, 1, 1))),
    "a phase that may pass twice before it is seen": (BARRIER, 64, {}),
    "a store over an mbarrier": (
        WAITED.replace("$WAIT:", "@!%p1 bra $WAIT; st.shared.b32 [%r20], %r7; $WAIT:"), 64, {}),
    "a flag that is acquired and not looked at": (
        "@!%p1 bra $C; st.shared.b32 [%r3+512], %r7; st.release.cta.shared.b32 [%r3+768], 1; bra $E; "
        "$C: ld.acquire.cta.shared.b32 %r10, [%r3+768]; ld.shared.b32 %r11, [%r3+512]; $E:", 64, {}),
    # data
    "two rounds of a loop that fall alike": (
        LOOP.format(f"@!%p5 bra $N; {WRITE} {SYNC} {OTHER} $N:").replace("ROUNDS", "2"), 64, {}),
    "the same with a barrier where it falls otherwise": (
        LOOP.format(f"{EVEN} @!%p5 bra $S; @!%p7 bra $R; {WRITE} bra $E; $R: {OTHER} bra $E; $S: {SYNC} $E:")
        .replace("ROUNDS", "4"), 64, {}),
    "the third round of a loop as long as the data says": (
        f"mov.u32 %r10, 0; $L: ld.global.b32 %r11, [%rd1]; setp.gt.s32 %p5, %r11, 0; setp.ne.u32 %p6, %r10, 2; "
        f"@%p6 bra $N; {WRITE} {OTHER} $N: add.u32 %r10, %r10, 1; @%p5 bra $L;", 64, {}),
    "a combined predicate in a loop": (
        LOOP.format(f"setp.lt.and.s32 %p7, %r11, 100, %p5; @!%p7 bra $S; {WRITE} bra $E; $S: {OTHER} $E:")
        .replace("ROUNDS", "4"), 64, {}),
    "a flag that threads poll with a barrier between": (
        f"$L: ld.acquire.gpu.global.b32 %r10, [%rd1]; setp.eq.u32 %p5, %r10, 0; {SYNC} @%p5 bra $L;", 64, {}),
    "peers of a cluster whose own shared memory decides": (
        f"mov.u32 %r10, %cluster_ctarank; mul.wide.u32 %rd4, %r10, 4; add.s64 %rd5, %rd1, %rd4; @!%p1 bra $N; "
        f"ld.global.b32 %r11, [%rd5]; st.shared.b32 [%r3], %r11; $N: {SYNC} ld.shared.b32 %r12, [%r3]; "
        "setp.gt.s32 %p5, %r12, 0; @!%p5 bra $E; barrier.cluster.arrive; barrier.cluster.wait; $E:",
        64, dict(cluster=(2, 1, 1))),
    "a condition on a pointer": (
        f"and.b64 %rd4, %rd1, 16; setp.ne.u64 %p5, %rd4, 0; {WRITE} @!%p5 bra $N; bra $M; $N: {SYNC} $M: {OTHER}",
        64, {}),
    "an address that each thread's data chooses by a branch": (
        f"mov.u32 %r10, 0; @%p3 bra $A; bra $E; $A: mov.u32 %r10, 128; $E: add.s32 %r11, %r4, %r10; "
        f"st.shared.b32 [%r11], %r7; {SYNC}", 64, {}),
    "an address that a loop counts as long as the data says": (
        "mov.u32 %r10, 0; $L: add.u32 %r10, %r10, 128; ld.global.b32 %r11, [%rd1]; setp.gt.s32 %p5, %r11, 0; "
        f"@%p5 bra $L; add.s32 %r12, %r4, %r10; st.shared.b32 [%r12], %r7; {SYNC}", 64, {}),
    "an address that each thread's loop counts": (
        "mov.u32 %r10, 0; $L: add.u32 %r10, %r10, 128; ld.global.b32 %r11, [%rd3]; setp.gt.s32 %p5, %r11, 0; "
        f"@%p5 bra $L; add.s32 %r12, %r4, %r10; st.shared.b32 [%r12], %r7; {SYNC}", 64, {}),
    "a count of what the data says in four rounds": (
        "mov.u32 %r12, 0; " + LOOP.format("@!%p5 bra $S; add.u32 %r12, %r12, 1; $S:").replace("ROUNDS", "4")
        + f"setp.eq.u32 %p7, %r12, 4; {WRITE} @%p7 bra $N; {SYNC} $N: {OTHER}", 64, {}),
    # the detector
    "reads of four warps behind those of four others": (
        "setp.lt.u32 %p5, %r1, 128; @!%p5 bra $B; ld.shared.b32 %r9, [%r3]; bra $E; $B: ld.shared.b32 %r9, [%r3]; "
        "bar.sync 1, 128; setp.ne.u32 %p6, %r1, 128; @%p6 bra $E; st.shared.b32 [%r3], %r7; $E:", 256, {}),
}  # fmt: skip
OPEN = ("a phase that may pass twice before it is seen", "reads of four warps behind those of four others")


def lines(body: str) -> str:
    """One instruction a line: what is found once for each line is found for each instruction."""
    return re.sub(r"(\$\w+:|;)\s*", r"\1\n  ", body)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_found(name):
    body, threads, more = BROKEN[name]
    assert bool(found(kernel(threads, **more), text(lines(body), threads))) == (name not in OPEN)


def test_a_predicate_combined_with_its_old_value_is_refused():
    body = f"setp.ge.u32 %p5, %r1, 0; setp.lt.or.u32 %p5, %r1, 0, %p5; {WRITE} @!%p5 bra $S; {OTHER} $S:"
    with pytest.raises(Unsupported, match="combined with itself"):
        found(kernel(), text(lines(body)))


@pytest.mark.xfail(strict=True, reason="the negation of a condition counts as another condition")
def test_a_negated_condition_is_no_other_one():
    body = "not.pred %p5, %p2; @%p2 st.shared.b32 [%r4], %r7; @%p5 ld.shared.b32 %r9, [%r6];"
    assert not found(kernel(), text(lines(body)))
