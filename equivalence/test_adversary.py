"""The adversary on a GPU: the hazard shows where the proof says, every kernel withstands it, every control falls."""

import os

import pytest
import torch

from fast import production_kernels

from . import crossval
from .adversary import REPEATS, STALLS_US, jobs, table, watchdog
from .adversary.attack import attack, baseline, judge
from .adversary.gpu import Gpu, overlaps
from .adversary.image import Image
from .adversary.subjects import control, subject, with_kernels, without_pdl

STEMS = ("kda_decode", "linear", "attn_res")


def here() -> str:
    from fast.kernel import device_arch

    return device_arch(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_kernels_withstand(stem, batch, gpu):
    rows = [r for _, some in watchdog.run(jobs(here(), (batch,), stem), min(4, os.cpu_count())) for r in some]
    assert len(rows) >= 3 and not [r for r in rows if r["verdict"] != "equal"]


@pytest.mark.alone
@pytest.mark.parametrize("stem", STEMS)
def test_a_broken_wait_is_named(stem, gpu):
    """The wait below the first loads: stale, by name, at every stall that a launch does not hide; right without PDL."""
    kernel = next(k for k in production_kernels((3,)) if stem in k.name and here() in k.archs)
    made = subject(kernel)
    image = Image(made.kernels)
    truth = image.truth(made.values).to(gpu)
    expected = baseline(made, image, Gpu(made, image, truth, gpu), truth)
    broken, stale = control(kernel)
    trials = attack(
        made, image, Gpu(with_kernels(made, lambda _: broken), image, truth, gpu), truth, expected, (10, 1000)
    )
    verdict = judge(made.name, trials, (10, 1000), (), "")
    assert verdict.verdict == "stale" and set(stale) <= set(verdict.tensors)
    assert all(trials[stall][name].wrong == REPEATS for stall in (10, 1000) for name in stale)
    off = with_kernels(made, lambda _: without_pdl(broken))
    for some in attack(made, image, Gpu(off, image, truth, gpu), truth, expected, (10, 1000)).values():
        assert not any(t.wrong for t in some.values())


@pytest.mark.alone
def test_the_table(gpu):
    rows = table.table()
    assert table.verdict(rows, here(), REPEATS) == "reproduced", "\n".join(table.lines(rows, REPEATS))
    assert table.proof_agrees(rows) in (True, None)


@pytest.mark.alone
def test_a_dependent_begins_before_the_end_of_its_producer(gpu):
    for seen in overlaps(STALLS_US, gpu):
        assert seen.passed >= -1, "the clock ticks in steps of up to a microsecond"
        assert seen.stall < 10 or seen.ahead > seen.stall / 2


@pytest.mark.alone
def test_a_hang_is_a_verdict(gpu):
    cases = [dict(part="barrier", target=here(), occupied=occupied) for occupied in (False, True, False)]
    found = dict(watchdog.run(cases))
    assert [found[n][0]["verdict"] for n in range(3)] == ["equal", "hang", "equal"]


@pytest.mark.parametrize("batch", [1, 3])
def test_interpreter_and_gpu_agree(batch, gpu):
    rows = crossval.run((batch,), gpu)
    assert rows and not [r for r in rows if not r.equal], "\n".join(crossval.lines(rows))
