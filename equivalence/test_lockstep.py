"""Every served stage of every decode step against the law. Twins need a GPU; the law's own cases do not."""

import pytest

from reference.numerics import exact, fused, unfused

from .cases import Case, cases, run
from .law_twin import every_stage, served_by
from .rounding import budget_excess

SMALL = Case("lockstep", 5, ("edge-empty", "edge-one-byte", "edge-two-bytes"), 4)


@pytest.mark.parametrize("case", [c for c in cases() if c.mode != "free"], ids=str)
def test_twins(case, gpu, keep_report):
    keep_report(case, run(case, "mini", gpu))


@pytest.mark.parametrize("mode", ["lockstep", "accumulate"])
def test_the_law_equals_itself(mode, keep_report):
    """With NaN in every word that a stage may not read, and null rows between live ones."""
    case = Case(mode, SMALL.rows, SMALL.prompts, SMALL.steps)
    keep_report(f"law-{case}", run(case, "tiny", **served_by(*every_stage())))


@pytest.mark.parametrize("num", [fused, unfused, exact], ids=lambda n: n.mode)
def test_each_stage_rounds_as_often_as_it_says(num):
    result = run(SMALL, "tiny", **served_by(*every_stage(num)))
    assert len(result.findings) > 200
    assert not budget_excess(result, int(num == unfused))


def test_one_more_rounding_is_over_budget():
    def twice(values, tensors):
        for name, value in values.items():
            values[name] = ((value.float() * 1.37).bfloat16().float() / 1.37).bfloat16()

    twins = [t for t in every_stage(exact) if t.name == "law.kda.in_proj"]
    twins[0].spoil = twice
    over = budget_excess(run(SMALL, "tiny", **served_by(*twins)), 0)
    assert over and all(key.endswith("kda.in_proj out") for key in over)
