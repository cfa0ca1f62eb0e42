"""The real twins, executed from their PTX on the CPU, against the law on real prompts; and a broken one, found."""

import pytest

from equivalence.cases import Case, run
from equivalence.faults import inject
from equivalence.simt import compiler, interpreted
from fast.selection import Selection

pytestmark = pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
CASE = Case("lockstep", 3, ("edge-one-byte", "edge-two-bytes"), 2)


def test_twins_equal_the_law():
    result = run(CASE, "mini", extra=interpreted())
    assert result.verdict == "equal", result.statement
    assert {"attn_res", "kda.decode", "linear"} <= {e.served_by for e in result.served} and not result.refused
    assert all("interpreted" in k for e in result.served for k in e.kernels)


@pytest.mark.parametrize("fault", ["kda.beta", "kda.window"])
def test_a_broken_twin_is_found(fault):
    selection, extra = inject([f"{fault}@1"], Selection.parse("*=reference"))
    result = run(CASE, "mini", selection=selection, extra=interpreted(extra))
    bad = {f.place.key for f in result.findings if not f.ok}
    assert result.verdict == "disagreement" and bad == {f"01.fault:{fault}"}, result.statement
