"""Mutants and their score: edits fit the kernels, each kind of fault is seen by whom it should be, numbers add up."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from equivalence.mutants import toolchain
from equivalence.mutants.catalog import CATALOG
from equivalence.mutants.checkers import Seen
from equivalence.mutants.entry import FAMILIES, HOISTED, LAW, ORDERING, RACES, STATE, STATIC, VALUES, made
from equivalence.mutants.scenes import BASES
from equivalence.mutants.score import Alarm, Judged, Score, clean, judge, lifted, score
from equivalence.order import TARGETS
from equivalence.order.mutate import edited
from tools import score as command

SMALL = ("sm_103a",)


@pytest.mark.parametrize("name", CATALOG)
def test_every_edit_fits_the_kernel_of_today(name):
    entry = CATALOG[name]
    source = Path(BASES[entry.base].original.__file__).read_text()
    assert edited(source, entry.edits, name) != source
    assert entry.text and (entry.expected or entry.family == ORDERING)


def test_the_catalog_holds_what_it_should():
    families = Counter(e.family for e in CATALOG.values())
    own = [e for e in CATALOG.values() if e.catalog == "own" and e.family == ORDERING and e.targets]
    assert set(families) == set(FAMILIES) and len(own) >= 20 and families[HOISTED] >= 8
    assert {"M1", "M2", "M3", "M4", "M5", "M6", "M9", "M11", "M15", "M16", "M17", "M20"} <= {
        e.catalog for e in CATALOG.values()
    }
    used = {e.base for e in CATALOG.values()}
    assert used == set(BASES), "a base without a mutant"
    with pytest.raises(ValueError, match="family 'speed'"):
        made("speed", "own", "kda: faster", [], "", "no family")


@pytest.mark.parametrize("name, checkers", [
    ("direct: x loaded above the wait", {STATIC, RACES, VALUES}),
    ("direct: x loaded invariant", {STATIC, RACES, VALUES}),
    ("direct: row tile repeated", {LAW}),
    ("SPLIT: barrier after the ticket dropped", {RACES, VALUES}),
    ("MAILBOX: relaxed flag", {STATIC}),
])  # fmt: skip
def test_one_of_each_kind_is_caught_by_whom_it_should(name, checkers):
    (judged,) = judge([CATALOG[name]], SMALL, 1)
    assert {c for c in (STATIC, RACES, VALUES, LAW) if judged.by(c)} >= checkers and judged.caught, judged.seen
    assert not judged.missing and not judged.same
    if judged.family == HOISTED:
        assert judged.hoisted["sm_103a"] >= 1


def test_a_kernel_of_one_target_is_judged_there_alone():
    entry = CATALOG["wgmma: proxy fence after the stores dropped"]
    (judged,) = judge([entry], ("sm_103a", "sm_90a"), 1)
    assert judged.targets == ("sm_90a",) == tuple({s.target for s in judged.seen}) and judged.by(STATIC)
    assert judge([entry], SMALL, 1) == [] and clean("wgmma", SMALL, 1) == ([], 0, 0)
    with pytest.raises(ValueError, match="target sm_103a: allowed for these mutants are sm_90a"):
        score("wgmma: ", SMALL)


def test_an_edit_that_is_no_kernel_hides_no_other():
    edits = [("    acc.fill(0.0)\n", "    acc.fill(nothing_like_that)\n")]
    bad = made(ORDERING, "own", "direct: no kernel", edits, STATIC, "a name that is not there")
    broken, good = sorted(judge([bad, CATALOG["direct: row tile repeated"]], SMALL, 1), key=lambda j: j.broken == "")
    assert "nothing_like_that" in broken.broken and not broken.caught and good.caught
    assert "no kernel any more" in Score([broken], [], 1, 1, 0.0).surprises[0]


def test_clean_kernels_raise_no_alarm_and_broken_ones_would(monkeypatch):
    assert clean("direct", SMALL, 3) == ([], 1, 3)
    from equivalence.mutants import score as module

    broken = module.checkers.build(CATALOG["direct: x loaded above the wait"], "direct", SMALL)
    monkeypatch.setattr(module, "_clean", lambda base, targets: broken)
    alarms, *_ = clean("direct", SMALL, 1)
    assert {STATIC, RACES, VALUES} <= {a.checker for a in alarms}


def test_loads_above_the_wait_are_counted_in_the_text():
    assert lifted("LDG.E.128.CONSTANT R4, [R2];\nACQBULK;\nLDG.E.CONSTANT R5, [R2];") == 1
    assert lifted("LDG.E.128.NA R4, [R2];\nACQBULK;") == 0


def judged_as(family: str, hits: dict[str, str], expected: tuple[str, ...] = ()) -> Judged:
    """A Judged whose checkers hit on the named targets: {"static": "sm_90a sm_100a"}."""
    seen = [Seen(c, t, int(t in where.split()), 1, 0.0) for c, where in hits.items() for t in TARGETS]
    return Judged("x: y", family, "own", "why", TARGETS, expected, seen)


def test_a_mutant_counts_only_if_it_is_caught_on_every_target():
    every, two = " ".join(TARGETS), "sm_90a sm_100a"
    assert judged_as(ORDERING, {STATIC: every}).by(STATIC)
    partly = judged_as(ORDERING, {STATIC: two, RACES: "sm_90a"}, (STATIC,))
    assert not partly.by(STATIC) and not partly.caught and partly.missing == [STATIC]
    assert judged_as(ORDERING, {STATIC: two, RACES: "sm_103a"}).caught
    assert judged_as(STATE, {LAW: "sm_90a"}).caught and not judged_as(STATE, {LAW: ""}).caught


def test_demands_are_judged_from_the_counts():
    every = " ".join(TARGETS)
    good = [judged_as(ORDERING, {STATIC: every}) for _ in range(16)]
    weak = [judged_as(ORDERING, {STATIC: "", RACES: every}) for _ in range(4)]
    hoisted = [judged_as(HOISTED, {STATIC: every})]
    assert [met for _, met in Score(good + weak + hoisted, [], 3, 9, 0.0).demands()] == [True] * 4
    lost = judged_as(ORDERING, {STATIC: "", RACES: ""})
    alarm = [Alarm("kda", "sm_90a", RACES, "write, then read")]
    bad = Score([*good[:2], *weak, lost, judged_as(HOISTED, {STATIC: ""})], alarm, 3, 9, 0.0)
    assert [met for _, met in bad.demands()] == [False] * 4
    told = bad.as_dict()
    assert (told["mutants"], told["caught"], told["caught_static"], told["false_alarms"]) == (8, 6, 2, 1)
    assert told["survivors"] == ["x: y", "x: y"]
    assert not any(met for _, met in Score([], [], 0, 0, 0.0).demands()), "nothing judged is nothing met"
    assert [met for _, met in Score(good + weak, [], 3, 9, 0.0, part=True).demands()] == [True] * 2
    assert not any(met for _, met in Score([], [], 0, 0, 0.0, part=True).demands())


def test_json_is_one_object_on_standard_output(monkeypatch, capsys):
    every = " ".join(TARGETS)
    result = Score([judged_as(f, {STATIC: every}) for f in (ORDERING, HOISTED)], [], 3, 9, 1.0)
    monkeypatch.setattr("equivalence.mutants.score.score", lambda *a, **kw: result)
    assert command.main("", [], "batch1", True, 9, [], "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert {"mutants", "caught", "caught_static", "false_alarms", "survivors", "entries"} <= set(told)
    result.alarms.append(Alarm("kda", "sm_90a", RACES, "write, then read"))
    assert command.main("", [], "batch1", True, 9, [], "-") == 1


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="no mutant's name contains 'flux'"):
        score("flux")
    with pytest.raises(ValueError, match="target 'sm_80': allowed are sm_90a"):
        score("direct", ["sm_80"])
    with pytest.raises(ValueError, match="holds no nvidia_cutlass_dsl/dsl_packages/cutlass"):
        toolchain.compare([str(tmp_path)])


def test_a_toolchain_that_cannot_compile_is_one_line_per_kernel(monkeypatch, tmp_path):
    kernels = {"kda": BASES["kda"].kernel, "fma": BASES["fma"].kernel}
    error = dict(version="4.2", kernels=[], error="ModuleNotFoundError: No module named 'cutlass.cute'")
    monkeypatch.setattr(toolchain, "_compiled", lambda *a: error)
    got = toolchain._prove(str(tmp_path), "", TARGETS, kernels)
    assert got.lines()[1:] == [f"  {n}: not compiled: {error['error']}" for n in kernels] and not got.proved
    one = [dict(name="kda", target="sm_90a", error="TypeError: no clobber")]
    monkeypatch.setattr(toolchain, "_compiled", lambda *a: dict(version="4.2", kernels=one))
    assert toolchain._prove("", "", TARGETS, kernels).unjudged == ["kda sm_90a: not compiled: TypeError: no clobber"]


@pytest.mark.skipif(not os.environ.get("K3_SLOW"), reason="five minutes: set K3_SLOW=1")
def test_the_whole_score():
    result = score()
    assert not result.surprises and not result.alarms, result.as_dict()
    assert all(met for _, met in result.demands()), result.demands()
