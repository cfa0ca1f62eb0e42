"""Every kernel that a decode step launches is proved on every target. Needs no GPU, but many cores: use pytest -n."""

import pytest

from fast import production_kernels

from .check import TARGETS, prove

KERNELS = list({kernel.code: kernel for kernel in production_kernels()}.values())  # one of each code
SHARE = 8  # kernels per case: nvdisasm starts once per case and target


@pytest.mark.parametrize("start", range(0, len(KERNELS), SHARE), ids=lambda start: KERNELS[start].name)
def test_production_kernels_are_proved(start):
    reports = prove(KERNELS[start : start + SHARE], TARGETS).reports
    assert [line for r in reports if r.verdict != "proved" for line in r.lines()] == []
