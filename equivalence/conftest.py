"""Workers of pytest-xdist spread over the visible GPUs; without one, twin cases skip and say why."""

import json
import os
from pathlib import Path

import pytest
import torch

from fast.kernel import CAPABILITIES

NEEDS = "needs a CUDA GPU of sm_90/sm_100/sm_103: none visible"


def pytest_addoption(parser):
    parser.addoption("--equivalence-report", metavar="FOLDER", help="write the report of each case there, as JSON")


def worker_index() -> int:
    """The number of this xdist worker, 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(scope="session")
def gpu() -> str:
    """A CUDA device that the twins serve, one of the visible ones by worker. Skips without one."""
    devices = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) in CAPABILITIES]
    if not devices:
        pytest.skip(NEEDS)
    index = devices[worker_index() % len(devices)]
    torch.cuda.set_device(index)
    return f"cuda:{index}"


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
