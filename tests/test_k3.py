"""The launcher, over a stand-in for Python that records what it was asked instead of installing."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

K3 = Path(__file__).parent.parent / "tools" / "k3"
PROGRAMS = "bash cat chmod cp cut dirname env find flock mkdir mv readlink rm sha256sum sleep tail".split()
FAKE = """#!/usr/bin/env bash
case "$*" in
    *version_info*) exit 0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo venv >>"$LOG" ;;
    *tomllib*) echo "typer>=0.15,<1"; echo "ruff>=0.8" ;;
    *"-m pip install"*) echo pip "${@:9}" >>"$LOG"; sleep "${PIP_SECONDS:-0}"; exit "${PIP_EXIT:-0}" ;;
    "-P -m tools.cli "*) echo "cli ${*:4} in $PWD with $PYTHONPATH"; exit "${CLI_EXIT:-0}" ;;
esac
"""


@pytest.fixture
def tree(tmp_path):
    """A repository with a space in its path, and a PATH that holds the stand-in and a few programs."""
    root, programs = tmp_path / "a repo", tmp_path / "bin"
    (root / "tools").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(K3, root / "tools" / "k3")
    (root / "pyproject.toml").write_text("[project]\n")
    for name in PROGRAMS:
        (programs / name).symlink_to(shutil.which(name))
    fake = programs / "python3.12"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    return root


def start(tree, *args, call=None, cwd=None, **env):
    env = {"PATH": str(tree.parent / "bin"), "LOG": str(tree.parent / "log"), **env}
    call = call or tree / "tools" / "k3"
    return subprocess.Popen(
        [call, *args], cwd=cwd or tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(tree, *args, **kw):
    process = start(tree, *args, **kw)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def log(tree) -> list[str]:
    path = tree.parent / "log"
    return path.read_text().splitlines() if path.exists() else []


TORCH = "" if Path("/dev/nvidia0").exists() else "torch==2.13.0 "
INSTALL = ["venv", f"pip {TORCH}typer>=0.15,<1 ruff>=0.8"]


def test_the_first_use_installs_and_the_second_does_not(tree):
    code, out, err = run(tree, "check", "two words")
    assert (code, out) == (0, f"cli check two words in {tree} with {tree}\n")
    assert "making .venv with python3.12" in err and log(tree) == INSTALL
    code, out, err = run(tree, "test", CLI_EXIT="1", PYTHONPATH="/other")
    assert (code, out, err) == (1, f"cli test in {tree} with {tree}:/other\n", "")
    assert log(tree) == INSTALL


def test_a_changed_project_file_updates(tree):
    run(tree, "check")
    (tree / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "updating .venv" in run(tree, "check")[2]
    assert log(tree) == [*INSTALL, INSTALL[1]]


@pytest.mark.skipif(not TORCH, reason="this machine has a GPU, so the launcher never asks for the CPU build")
def test_a_gpu_takes_the_range_of_the_project(tree):
    smi = tree.parent / "bin" / "nvidia-smi"
    run(tree, "check")
    smi.write_text("#!/usr/bin/env bash\necho 'GPU 0: H200'\n")
    smi.chmod(0o755)
    assert "updating .venv (cuda)" in run(tree, "check")[2]
    assert log(tree)[-1] == "pip typer>=0.15,<1 ruff>=0.8"
    smi.unlink()  # a CUDA build also serves a machine without a GPU
    assert run(tree, "check")[2] == ""


def test_links_and_other_folders(tree, tmp_path):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "first").symlink_to(tree / "tools" / "k3")
    (elsewhere / "second").symlink_to("first")
    code, out, _ = run(tree, "check", call=elsewhere / "second", cwd=elsewhere)
    assert (code, out) == (0, f"cli check in {elsewhere} with {tree}\n")
    assert run(tree, "check", call="../a repo/tools/k3", cwd=elsewhere)[1] == out


def test_a_failed_set_up_is_said_and_done_again(tree):
    code, out, err = run(tree, "check", PIP_EXIT="1")
    assert (code, out) == (2, "") and "pip could not install the dependencies" in err
    assert run(tree, "check")[0] == 0
    assert [line.split()[0] for line in log(tree)] == ["venv", "pip", "venv", "pip"]


def test_a_killed_set_up_is_done_again(tree):
    process = subprocess.Popen(
        [tree / "tools" / "k3", "check"], env={"PATH": str(tree.parent / "bin"), "LOG": str(tree.parent / "log"),
        "PIP_SECONDS": "30"}, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while len(log(tree)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait()
    leftover = tree / ".venv" / "leftover"
    leftover.touch()
    assert run(tree, "check")[0] == 0
    assert not leftover.exists() and len(log(tree)) == 4


def test_uses_at_the_same_time_install_once(tree):
    processes = [start(tree, "check", PIP_SECONDS="1") for _ in range(4)]
    results = [(p.communicate(timeout=60), p.returncode) for p in processes]
    assert [code for _, code in results] == [0] * 4
    assert len(log(tree)) == 2
    assert any("waiting for it" in err for (_, err), _ in results)


def test_no_python(tree):
    (tree.parent / "bin" / "python3.12").unlink()
    code, _, err = run(tree, "check")
    assert code == 2 and err.startswith("k3: no Python 3.11 or 3.12 on PATH")


def test_a_path_with_a_colon(tree):
    other = tree.rename(tree.parent / "a:repo")
    code, _, err = run(other, "check")
    assert code == 2 and "a path with a colon" in err and err.count("\n") == 1


def test_a_named_python_is_used_as_it_is(tree):
    code, _, err = run(tree, "check", K3_PYTHON="nothing")
    assert code == 2 and err == "k3: K3_PYTHON=nothing does not run or is not Python 3.11 or 3.12\n"
    code, _, err = run(tree, "check", K3_PYTHON=sys.executable)
    assert code == 1 and "No module named tools.cli" in err  # this interpreter has all; the tree is a stand-in
    assert not (tree / ".venv").exists()


def test_a_named_python_that_lacks_something(tree):
    bare = tree.parent / "bare"
    bare.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    code, _, err = run(tree, "check", K3_PYTHON=str(bare))
    assert code == 2 and f"K3_PYTHON={bare} lacks torch, numpy, typer, rich; install them there" in err
