"""Workers of pytest-xdist spread over the visible GPUs; without one, twin cases skip and say why."""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from fast.kernel import CAPABILITIES

from .turns import Turns

NEEDS = "needs a CUDA GPU of sm_90/sm_100/sm_103: none visible"


def pytest_addoption(parser):
    parser.addoption("--equivalence-report", metavar="FOLDER", help="write the report of each case there, as JSON")


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: measures time on a GPU, so that no other test may use it meanwhile")


def worker_index() -> int:
    """The number of this xdist worker, 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@cache
def device() -> int | None:
    """The GPU of this worker: one that the twins serve."""
    devices = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) in CAPABILITIES]
    return devices[worker_index() % len(devices)] if devices else None


@cache
def turns() -> Turns | None:
    return None if device() is None else Turns(str(torch.cuda.get_device_properties(device()).uuid))


@pytest.fixture(scope="session")
def gpu() -> str:
    """A CUDA device that the twins serve, one of the visible ones by worker. Skips without one."""
    if device() is None:
        pytest.skip(NEEDS)
    torch.cuda.set_device(device())
    return f"cuda:{device()}"


def _alone(item) -> bool:
    return item is not None and "gpu" in item.fixturenames and item.get_closest_marker("alone") is not None


def pytest_collection_modifyitems(items):
    """Those that need a GPU alone come first: later, they would wait for the longest of the others."""
    items.sort(key=lambda item: not _alone(item))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """A test on a GPU, with its set-up, takes its turn; one that is alone hands it on to the next that is."""
    if "gpu" not in item.fixturenames or turns() is None:
        yield
        return
    global kept
    if not kept:
        turns().take(_alone(item))
    yield
    kept = _alone(item) and _alone(nextitem)
    if not kept:
        turns().give()


kept = False  # whether this worker is still alone


@pytest.fixture
def keep_report(request):
    """Write a Result where --equivalence-report asks for it, and fail with its statement unless it says equal."""

    def judge(case, result):
        folder = request.config.getoption("--equivalence-report")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{case}.json").write_text(json.dumps(result.as_dict(), indent=1))
        assert result.verdict == "equal", result.statement

    return judge
