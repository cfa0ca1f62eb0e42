"""Interpreter against GPU: what a difference in each tensor counts for, on words changed by hand."""

import torch

from equivalence import crossval as cross
from equivalence.adversary.image import Image
from fast import linear, production_kernels
from fast.linear import DirectConfig, linear_kernel


def crossed(case: str, name: str, change) -> dict:
    kernel = linear_kernel(DirectConfig(8, 1), 3, 24, 64, 72, 32)
    made = cross.inputs(kernel, case)
    words = cross.interpret(made, "sm_90a")
    other = words.clone()
    change(Image(made.kernels).view(other, name) if name else other)
    return {r.tensor: r for r in cross.compare(made, case, other, words)}


def test_crossval_bounds():
    def add(n):
        return lambda t: t.view(torch.int16).add_(n)

    same = crossed("random", "out", lambda t: None)
    assert (
        all(r.equal and r.ulps == 0 for r in same.values()) and cross.as_dict(list(same.values()))["verdict"] == "equal"
    )
    near, far = (crossed("random", "out", add(n))["out"] for n in (1, 3))
    assert near.equal and near.ulps == 1 and near.differ == 72
    assert not far.equal and far.ulps >= 3, "K 2^-23 sum |x w| is less than a bf16 ULP of most elements"
    assert not crossed("whole", "out", add(1))["out"].equal, "whole numbers: bit for bit"
    assert not crossed("random", "x", add(1))["x"].equal
    assert not crossed("random", "", lambda words: words[-1:].add_(1))["other bits"].equal
    nan = crossed("random", "out", lambda t: t[1:2].fill_(float("nan")))["out"]
    assert nan.of_bound == float("inf") and cross.as_dict([nan])["verdict"] == "disagreement"
    assert cross.as_dict([])["verdict"] == "could not judge" and "<-- outside" in cross.lines([nan])[1]
    fma = next(k for k in production_kernels((1,)) if k.entry is linear.fma_entry)
    assert cross.bound(fma, "out", "random").exact and cross.cases(fma) == ("random", "whole")
