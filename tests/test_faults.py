"""Named faults: each edit still fits its kernel, changes the compiled code, and leaves the true twin alone."""

import pytest

from equivalence.faults import FAULTS, inject
from fast.kda import kda_decode, kda_tensors
from fast.kernel import pick
from fast.selection import Rule, Selection
from reference.stage import TWINS, ContractError


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_another_kernel(name):
    tensors = kda_tensors(2, 2, 5, 1168)
    (true,), before = pick(kda_decode, tensors, {}), TWINS["kda.decode"]
    broken = FAULTS[name].implementation()
    (kernel,) = pick(broken.twin, tensors, {})
    assert broken.name == f"fault:{name}" and TWINS["kda.decode"] is before and before is kda_decode
    assert kernel.entry is not true.entry and kernel.compile("sm_90a").ptx != true.compile("sm_90a").ptx


def test_inject_serves_the_layers_it_names():
    selection, extra = inject(["kda.decay_sign@6", "kda.gate@2-3"], Selection.parse("linear=reference"))
    assert list(extra) == ["fault:kda.decay_sign", "fault:kda.gate"]
    assert selection.rules[0] == Rule("linear", "reference")
    assert Rule("kda.conv", "fault:kda.decay_sign", (6, 6)) in selection.rules
    assert Rule("kda.out_norm", "fault:kda.gate", (2, 3)) in selection.rules
    with pytest.raises(ContractError, match=r"fault 'kda.none': allowed are kda.decay_sign, "):
        inject(["kda.none@1"], Selection())
