"""R12: chains of kernels, made by hand and cut from the plan of a small model."""

from dataclasses import replace

import pytest

from equivalence.order import chain
from equivalence.order.chain import Launch, check_chain
from equivalence.order.check import Report, Seen
from fast import apart, production_kernels
from reference.config import k3_rank, mini
from reference.plan import plan
from reference.stage import ContractError, Role
from tools.order import Result


def launch(key: str, reads="", writes="", early="", **kw) -> Launch:
    cells = [frozenset(("act", name, None) for name in names.split()) for names in (early, f"{reads} {early}", writes)]
    return Launch(key, key, **dict(dict(pdl=True, waits=True, patient=True, early=cells[0], reads=cells[1],
                                        writes=cells[2]) | kw))  # fmt: skip


def told(*launches: Launch) -> list[str]:
    return [f"{f.kernel} {f.tensor} {f.text}" for f in check_chain(launches)]


LAW = dict(pdl=False)
FIRST = launch("first", **LAW)  # every step begins with a stage of the law


def test_clean_chains():
    a, b, c = launch("a", "x", "y"), launch("b", "y", "z"), launch("c", "y z", "x")
    assert told(FIRST, a, b, c) == told(FIRST, a, launch("law", "y", "z", **LAW), c) == []
    eager = [replace(k, patient=False) for k in (a, b, c)]  # triggers at once, but everyone waits
    assert told(FIRST, *eager) == []
    assert told(FIRST, a, launch("b", "z", "v", early="w"), c) == []
    assert told(FIRST, a, replace(launch("b", "q", "r"), waits=False), launch("c", "r", "s")) == []  # meets nothing


def test_a_reader_that_does_not_wait():
    a, b = launch("a", "x", "y"), launch("b", "y", "z", waits=False)
    assert told(FIRST, a, b) == ["b y is read while a may still be running: this kernel does not wait"]
    assert told(FIRST, launch("a", "x", "y", **LAW), b)  # the law's kernel may have stored late
    assert told(FIRST, a, launch("law", "q", "r", **LAW), b) == []


@pytest.mark.parametrize("last", [launch("c", "y", "v"), launch("c", "y", "v", **LAW)])
def test_a_kernel_between_that_does_not_wait(last):
    a, b = launch("a", "x", "y"), launch("b", "q", "z", waits=False)
    assert told(FIRST, a, b, last) == ["c y is read while a may still be running: a kernel between did not wait"]
    assert told(FIRST, a, replace(b, waits=True), last) == []
    assert told(FIRST, a, b, launch("d", "z", "u"), last) != []  # one that waits further on does not mend it


def test_buffers_that_are_used_again():
    a, b = launch("a", "x", "y"), launch("b", "q", "z", waits=False)
    assert told(FIRST, a, b, launch("c", "z", "x")) == [
        "c x is overwritten while a may still be running: a kernel between did not wait"
    ]
    assert told(FIRST, a, b, launch("c", "z", "y"))


def test_what_is_read_before_the_wait_must_be_complete_at_the_start():
    a, reader = launch("a", "x", "w"), launch("c", "y", "z", early="w")
    assert told(FIRST, a, reader) == ["c w is read before the wait while a may still be running: "
                                      "it may only have triggered"]  # fmt: skip
    between = launch("b", "q", "r")
    assert told(FIRST, a, between, reader) == []
    assert told(FIRST, a, replace(between, patient=False), reader)


def test_a_broken_chain_is_a_disagreement():
    report = Report("a", "sm_90a", (), (), waits=True, patient=True)
    broken = check_chain([FIRST, launch("a", "x", "y"), launch("b", "y", "z", waits=False)], "sm_90a")
    assert [Result([report], chains).exit_code for chains in (None, [], broken)] == [0, 0, 1]
    assert Result([report], broken).as_dict()["chains"][0]["rule"] == "R12"


def report(kernel, target: str = "sm_103a", **kw) -> Report:
    """What the checker would say of a kernel that reads its weights early and waits, or does not."""
    seen = tuple(Seen("", "store" if a.role is Role.OUTPUT else "load", a.name, a.role is Role.WEIGHT, ())
                 for a in kernel.args)  # fmt: skip
    return Report(kernel.name, target, (), seen, **dict(waits=True, patient=False) | kw)


def test_steps_that_are_followed_once_stand_for_no_others():
    """Of three batch sizes and two targets one kernel of one of them does not wait: it is found, and nothing else."""
    batches, targets = (1, 2, 5), ("sm_100a", "sm_103a")
    kernels = [(k, t) for k in production_kernels(batches) for t in targets if t in k.archs]
    clean = [report(k, t) for k, t in kernels]
    assert chain.check_steps(batches, targets, clean) == (24, [])
    for batch, target in ((1, "sm_100a"), (5, "sm_103a")):
        name = next(k.name for k, _ in kernels if k.name.startswith(f"attn_res-t{batch}-d192-b4-nb1-add-norm-c"))
        broken = [replace(r, waits=False) if (r.kernel, r.target) == (name, target) else r for r in clean]
        _, found = chain.check_steps(batches, targets, broken)
        assert found and {f.target for f in found} == {target} and name in {f.kernel for f in found}
    with pytest.raises(KeyError):
        chain.check_steps(batches, targets, clean[:-1])


def test_the_number_of_tokens_changes_rows_alone():
    """So that one batch size can stand for others that run the same code (fast.apart)."""
    for config in (mini, k3_rank(8)):
        steps = [[(s.stage.name, s.layer, s.bind, s.attrs) for s in plan(config, T).steps] for T in (1, 7, 64)]
        assert steps[0] == steps[1] == steps[2]
        few, many = plan(config, 3).buffers, plan(config, 48).buffers
        assert few.keys() == many.keys()
        assert all((few[n][0][1:], few[n][1]) == (many[n][0][1:], many[n][1]) for n in few)


def test_of_batch_sizes_with_the_same_code_one_is_apart():
    codes = {T: {k.code for k in production_kernels((T,))} for T in (1, 5, 6, 9)}
    assert apart((1, 5, 6, 9)) == [1, 5, 9] and codes[5] == codes[6] and codes[1] != codes[5] != codes[9]
    assert {k.code for k in production_kernels()} == {k.code for k in production_kernels(apart())}


@pytest.mark.parametrize("config", [mini, k3_rank(8)], ids=lambda c: c.name)
def test_the_steps_of_models(config):
    """Every kernel of a step is among those that are proved; the chain is clean unless one of them does not wait."""
    made = plan(config, 4)
    units = chain.units(made, "sm_103a")
    kernels = {k.name: k for u in units for k in chain.kernels(made, u, "sm_103a")}
    assert set(kernels) <= {k.name for k in production_kernels((4,))} and len(kernels) > 15

    reports = {name: report(kernel) for name, kernel in kernels.items()}
    steps = chain.launches(made, "sm_103a", reports)
    assert len(steps) == len(units) and check_chain(steps) == []
    broken = next(u.key for u in units if u.key.endswith("attn_res.post"))
    name = next(s.kernel for s in steps if s.key == broken)
    reports[name] = report(kernels[name], waits=False)
    found = check_chain(chain.launches(made, "sm_103a", reports), "sm_103a")
    assert any(f.where == f"step {broken}" and f.tensor == "prefix" and f.target == "sm_103a" for f in found)
    assert all(f.severity == "error" and f.rule == "R12" for f in found)
    reports[name] = replace(report(kernels[name]), accesses=(Seen("", "load", "other", False, ()),))
    with pytest.raises(ContractError, match=rf"{name}: other is no tensor of .* and no scratch"):
        chain.launches(made, "sm_103a", reports)
