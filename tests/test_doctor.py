"""The doctor: what it finds here, and what it says of machines that are not here."""

import copy
import json
from importlib.metadata import distributions

import pytest

from fast.kernel import ARCHS, CAPABILITIES
from tools import doctor
from tools.cli import app

H200 = {"index": 0, "name": "H200", "capability": "sm_90", "served": "sm_90a", "free_gib": 139.0}
A100 = {"index": 0, "name": "A100", "capability": "sm_80", "served": None, "free_gib": 79.0}
COMMANDS = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
GPU_ONLY = {"adversary", "bench"}


@pytest.fixture
def good() -> dict:
    """A machine with everything."""
    packages = [{"name": n, "version": "1", "needed": n, "wrong": None} for n in doctor.MODULES]
    return {
        "python": {"version": "3.12.1", "ok": True, "path": "python"},
        "packages": packages,
        "gpus": [H200],
        "cuda": "13.0",
        "nvdisasm": {"path": "nvdisasm", "wrong": None},
        "compiler": {"path": "cc", "version": "cc 12"},
        "peers": dict.fromkeys(doctor.PEERS, "1"),
        "memory_gib": 100.0,
        "disk_gib": 50.0,
        "cores": 16,
    }


def judged(facts: dict) -> tuple[list[str], dict[str, str]]:
    missing = doctor.missing(facts)
    can = doctor.commands(facts)
    assert set(can) == COMMANDS and all(c["why"] and "\n" not in c["why"] for c in can.values())
    text = doctor.render({**facts, "missing": missing, "commands": can})
    assert all(line in text for line in missing)
    return missing, {name: c["can"] for name, c in can.items()}


def broken(facts: dict, name: str) -> dict:
    facts = copy.deepcopy(facts)
    next(p for p in facts["packages"] if p["name"] == name)["wrong"] = "not installed"
    return facts


def test_served_targets_are_those_of_the_kernels():
    assert doctor.SERVED == CAPABILITIES and set(doctor.SERVED.values()) == set(ARCHS)


def test_every_requirement_has_a_module_that_proves_it():
    assert {doctor.package(line)["name"] for line in doctor.requirements()} == set(doctor.MODULES)


def test_this_machine():
    """What pip does not know is missing, and nothing else."""
    facts = doctor.report()
    assert json.loads(json.dumps(facts)) == facts
    needed = {doctor.package(line)["name"] for line in doctor.requirements()}
    absent = {name for name in needed if not list(distributions(name=name))}
    assert {line.partition(":")[0] for line in facts["missing"]} == absent
    assert (facts["exit"] == 0) is ("Nothing that is needed is missing" in doctor.render(facts)) is (not absent)
    assert facts["memory_gib"] > 0 and facts["disk_gib"] > 0


def test_a_machine_with_everything(good):
    missing, can = judged(good)
    assert missing == [] and set(can.values()) == {"yes"}
    assert "all peers installed" in doctor.commands(good)["bench"]["why"]


def test_without_a_gpu(good):
    missing, can = judged({**good, "gpus": [], "cuda": None})
    assert missing == []
    assert can == {
        "check": "partly", "bisect": "partly", "order": "yes", "adversary": "no", "generate": "partly", "bench": "no",
        "test": "partly", "stand-in": "yes", "traces": "yes", "doctor": "yes",
    }  # fmt: skip


def test_what_check_judges_without_a_gpu(good):
    none = {**good, "gpus": [], "cuda": None}
    why = doctor.commands(none)["check"]["why"]
    assert "twins in the PTX interpreter" in why and "no twin on a GPU" in why
    assert "no C compiler" in doctor.commands({**none, "compiler": {"path": None, "version": None}})["check"]["why"]
    assert "interpreter" in doctor.commands(none)["bisect"]["why"]
    bare = doctor.commands({**none, "compiler": {"path": None, "version": None}})["bisect"]
    assert bare["can"] == "no" and "no C compiler" in bare["why"]
    assert all("could not judge" in doctor.commands(none)[name]["why"] for name in GPU_ONLY)


def test_a_gpu_that_is_not_served(good):
    facts = {**good, "gpus": [A100]}
    assert judged(facts)[1]["check"] == "partly"
    assert doctor.commands(facts)["check"]["why"].startswith("A100 (sm_80) is not served; served are sm_90a, sm_100a")
    assert judged({**good, "gpus": [A100, H200]})[1]["check"] == "yes"


def test_a_gpu_under_a_cpu_build_of_torch(good, monkeypatch):
    monkeypatch.setattr(doctor.Path, "exists", lambda self: str(self) == "/dev/nvidia0")
    assert doctor.why_no_gpu({**good, "gpus": [], "cuda": None}) == "there is an NVIDIA GPU, but torch is a CPU build"


@pytest.mark.parametrize(
    "name, stopped",
    [
        ("torch", COMMANDS - {"doctor"}),
        ("nvidia-cutlass-dsl", COMMANDS - {"doctor", "stand-in", "traces"}),
        ("pytest-xdist", {"test"}),
        ("pytest", {"test"}),
    ],
)
def test_a_package_that_is_missing(good, name, stopped):
    missing, can = judged(broken(good, name))
    assert missing == [f"{name}: not installed"]
    assert {c for c, can in can.items() if can == "no"} == stopped


def test_the_disassembler_may_come_from_elsewhere(good):
    assert judged(broken(good, "nvidia-cuda-nvdisasm"))[0] == []
    missing, can = judged({**good, "nvdisasm": {"path": None, "wrong": "nvdisasm is missing"}})
    assert missing == ["nvdisasm is missing"] and can["order"] == "no" and can["check"] == "yes"


def test_python_and_disk(good):
    old = {"version": "3.10.4", "ok": False, "path": "python"}
    missing, _ = judged({**good, "python": old, "disk_gib": 1.9})
    assert missing == ["Python 3.10.4; needed is 3.11 or 3.12", "disk: 1.9 GiB free; needed are 2.0"]
    assert judged({**good, "disk_gib": 2.0})[0] == []


def test_versions_and_imports(monkeypatch):
    assert doctor.package("numpy>=1.26,<3")["wrong"] is None
    assert doctor.package("numpy>=1.26,<2")["wrong"].endswith("; needed is numpy>=1.26,<2")
    assert doctor.package("no-such-package>=1")["wrong"] == "not installed"
    monkeypatch.setitem(doctor.MODULES, "numpy", "numpy.no_such_module")
    assert doctor.package("numpy>=1.26")["wrong"].startswith("does not import: ModuleNotFoundError: No module named")


def test_programs_that_do_not_run(tmp_path):
    assert doctor.first_line([str(tmp_path / "nothing")]) is None
    assert doctor.first_line(["false"]) is None
    assert doctor.first_line(["echo", "one\ntwo"]) == "one"
