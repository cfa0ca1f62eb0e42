"""R14: kernels of one shape share a run, others never; the short ways find what the long way finds."""

import numpy as np
import pytest
from test_order_shared import CASES, OTHER, RING, SYNC, WRITE, kernel, text
from test_order_shared_broken import BROKEN, lines

from equivalence.simt import batch, onchip
from equivalence.simt.clocks import Clocks
from equivalence.simt.onchip import found
from equivalence.simt.parse import read
from equivalence.simt.races import Races
from equivalence.simt.shadow import PARTS, Units
from equivalence.simt.shape import lean, specials
from equivalence.simt.skeleton import skeleton
from equivalence.simt.translate import translate
from fast import production_kernels
from fast.lower import lower

WAITED = RING.replace("BYTES", "512").replace("PARITY", "0")
MEET = f"{WRITE} bar.sync 1, 64; {OTHER}"
NEAR = f"xor.b32 %r10, %r2, 0; add.s32 %r11, %r3, %r10; {WRITE} ld.shared.b32 %r9, [%r11];"
BY_CTA = f"mov.u32 %r15, %ctaid.x; setp.eq.u32 %p6, %r15, 3; {WRITE} @%p6 bra $N; {SYNC} $N: {OTHER}"
BY_RANK = BY_CTA.replace("%ctaid.x", "%cluster_ctarank").replace("%r15, 3", "%r15, 1")
OUT = (f"{WRITE} fence.proxy.async.shared::cta; {SYNC} @!%p1 bra $E; "
       "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 256; cp.async.bulk.commit_group; "
       "cp.async.bulk.wait_group 0; $E:")  # fmt: skip
# name -> (body, what is changed in it, to what), or (body, clean kernel, broken kernel)
PAIRS = {
    "threads of a barrier": (MEET, "1, 64", "1, 32"),
    "number of a barrier": (MEET, "bar.sync 1,", "bar.sync 16,"),
    "bytes that are expected": (WAITED, "], 512;", "], 256;"),
    "bytes that are copied": (WAITED, "[%rd1], 512", "[%rd1], 528"),
    "parity": (WAITED, "[%r20], 0;", "[%r20], 1;"),
    "where an mbarrier is": (WAITED, "complete_tx::bytes [%r21], [%rd1], 512, [%r20]",
                             "complete_tx::bytes [%r21], [%rd1], 512, [%r20+8]"),
    "arrivals of an mbarrier": (WAITED, "init.shared.b64 [%r20], 1", "init.shared.b64 [%r20], 2"),
    "offset of a load": (f"{WRITE} ld.shared.b32 %r9, [%r4+0];", "+0]", "+4]"),
    "bytes of a load": (f"{WRITE} ld.shared.b32 %r9, [%r4];", "b32 %r9", "v2.b32 {%r9, %r10}"),
    "bytes of a store": (f"{WRITE}", "b32 [%r4], %r7", "v2.b32 [%r4], {%r7, %r7}"),
    "a constant": (NEAR, "%r2, 0", "%r2, 4"),
    "an operation": (NEAR, "xor.b32 %r10, %r2, 0", "and.b32 %r10, %r2, 0"),
    "a guard": (f"{WRITE} {SYNC} @%p1 st.shared.b32 [%r3], %r7;", "@%p1 st", "@!%p1 st"),
    "a barrier": (MEET, "bar.sync 1, 64", "bar.warp.sync -1"),
    "the space of a fence": (OUT, "async.shared::cta", "async.global"),
    "groups that are waited for": (OUT + f"{SYNC} {WRITE}", "wait_group 0", "wait_group 1"),
    "threads of a CTA": (MEET, {}, dict(block=(96, 1, 1))),
    "CTAs of a grid": (BY_CTA, dict(grid=(3, 1, 1)), dict(grid=(4, 1, 1))),
    "an axis of a grid": (BY_CTA, dict(grid=(1, 4, 1)), dict(grid=(4, 1, 1))),
    "CTAs of a cluster": (BY_RANK, dict(cluster=(1, 1, 1)), dict(cluster=(2, 1, 1))),
    "shared memory": ("ld.shared.b32 %r9, [%r3+1024];", dict(smem=1024), dict(smem=0)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def runs(monkeypatch) -> list:
    """The runs that a test made; none is known before."""
    made, machine = [], onchip._machine
    monkeypatch.setattr(onchip, "_clean", set())
    monkeypatch.setattr(onchip, "_machine", lambda *a: made.append(a) or machine(*a))
    return made


@pytest.mark.parametrize("name", PAIRS)
def test_the_clean_one_does_not_stand_for_the_broken_one(name):
    body, old, new = PAIRS[name]
    if isinstance(old, dict):
        clean, broken = ((kernel(**more), text(body)) for more in (old, new))
    else:
        assert old in body
        clean, broken = ((kernel(), text(some)) for some in (body, body.replace(old, new)))
    for _ in range(2):
        assert not found(*clean) and found(*broken)
    onchip._clean.clear()
    assert found(*broken) and not found(*clean)


def test_names_lines_and_data_do_not_count(runs):
    body = f"{WRITE} {SYNC} {OTHER} mul.lo.s32 %r9, %r9, 3;"
    other = text(f"mul.lo.s32 %r9, %r7, %r7;\n{body} add.s32 %r9, %r9, 1;").replace("%r4", "%r29")
    assert not found(kernel(), text(body)) and not found(kernel(grid=(9, 9, 1)), other)
    assert len(runs) == 1


def test_a_branch_about_global_memory_alone_does_not_count(runs):
    ask = "mov.u32 %r15, %ctaid.x; setp.eq.u32 %p6, %r15, 3;"
    body = f"{ask} {WRITE} {SYNC} {OTHER} @%p6 bra $E; st.global.b32 [%rd3], %r9; $E:"
    assert not found(kernel(), text(body)) and len(runs) == 1  # the last CTA is like the first
    assert not found(kernel(grid=(9, 9, 1)), text(body)) and len(runs) == 1


def test_a_loop_stays(monkeypatch):
    monkeypatch.setattr(onchip, "STEPS", 1000)
    body = "mov.u32 %r10, 0; $L: add.u32 %r10, %r10, 1; setp.lt.u32 %p6, %r10, 5; @%p6 bra $L;"
    (one,) = found(kernel(), text(f"{WRITE} {body.replace('lt', 'ge').replace('5', '0')}"))
    assert one.kind == "doubt" and "no end" in one.text
    small = lean(skeleton(translate(read(text(body)))).code)
    assert [op.kind for block in small.blocks for op in block.ops].count("jump") == 1
    assert not specials(small)


def test_a_finding_has_the_lines_of_its_own_text():
    for shift in ("", "\n\n\n", "mul.lo.s32 %r9, %r7, %r7;\n"):
        broken = text(f"{shift}{WRITE}\n{OTHER}")
        (one,) = found(kernel(), broken)
        assert "ld.shared" in broken.splitlines()[one.line - 1]
        assert f"PTX line {one.line - 1}" in one.text


def test_attn_res_with_and_without_a_barrier(runs):
    """Two kernels of one shape; in the text of one a barrier is dropped."""
    names = [f"attn_res-t1-d7168-b8-nb2-{form}-c8x224x4" for form in ("norm", "add-norm")]
    kernels = {k.name: k for k in production_kernels((1,)) if k.name in names}
    one, two = ((kernels[name], lower(kernels[name], ["sm_100a"])[0].ptx) for name in names)
    broken = two[0], two[1].replace("bar.sync", "// bar.sync", 1)
    assert broken[1] != two[1]
    assert not found(*one) and len(runs) > 0
    count = len(runs)
    assert not found(*two) and len(runs) == count
    assert {f.kind for f in found(*broken)} == {"race"}
    onchip._clean.clear()
    want = found(*broken)
    assert want and not found(*one) and not found(*two) and found(*broken) == want


LONG = {name: (body, 64, {}) for name, (body, _) in CASES.items()} | BROKEN


@pytest.mark.parametrize("name", LONG)
def test_the_long_way_finds_the_same(name, monkeypatch):
    """With a clock for each lane, and every access looked at by itself: same findings, and same shadow at the end."""
    body, threads, more = LONG[name]
    monkeypatch.setattr(onchip, "STEPS", 1000)
    shadows, end = [], Races.end
    monkeypatch.setattr(Races, "end", lambda self, g: (shadows.append(g.shadow), end(self, g)))
    short = found(kernel(threads, **more), text(lines(body), threads))
    onchip._clean.clear()
    monkeypatch.setattr(batch, "batched", lambda code: code)
    monkeypatch.setattr(onchip._OnChip, "_quiet", lambda *a: False)
    monkeypatch.setattr(onchip._OnChip, "_clocks", lambda _, g: Clocks(g.size, g.size, g.entry))
    half = len(shadows)
    assert found(kernel(threads, **more), text(lines(body), threads)) == short
    for a, b in zip(shadows[:half], shadows[half:], strict=True):
        for x, y in ((a.write, b.write), (a.reads, b.reads), (a, b)):
            assert all(np.array_equal(v, getattr(y, n)) for n, v in vars(x).items() if isinstance(v, np.ndarray))


def spread(kept: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The state of every cell, where only the first of each part of a unit is kept."""
    parts = kept.reshape(PARTS, len(levels), -1)
    size = PARTS >> levels.astype(np.int64)
    return parts[np.arange(PARTS)[:, None] // size * size, np.arange(len(levels))]


@pytest.mark.parametrize("name", LONG)
def test_units_are_split_as_if_they_had_always_been(name, monkeypatch):
    body, threads, more = LONG[name]
    monkeypatch.setattr(onchip, "STEPS", 1000)
    shadows, end, init = [], Races.end, Units.__init__
    monkeypatch.setattr(Races, "end", lambda self, g: (shadows.append(g.shadow), end(self, g)))
    want = found(kernel(threads, **more), text(lines(body), threads))
    onchip._clean.clear()
    half = len(shadows)
    monkeypatch.setattr(Units, "__init__", lambda self, *a: (init(self, *a), self.levels.fill(3))[0])
    assert found(kernel(threads, **more), text(lines(body), threads)) == want
    for a, b in zip(shadows[:half], shadows[half:], strict=True):
        for x, y in ((a.write, b.write), (a.reads, b.reads), (a.user, b.user), (a, b)):
            for n, v in vars(x).items():
                if isinstance(v, np.ndarray) and n != "levels":
                    assert np.array_equal(spread(v, a.levels), spread(getattr(y, n), b.levels)), n
