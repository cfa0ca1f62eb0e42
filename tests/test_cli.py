"""The command line, in process: verdicts, exit codes, JSON, and one clear line for every wrong argument. No GPU."""

import json
import os
import time
from multiprocessing import active_children

import pytest
import torch
from typer.testing import CliRunner

from equivalence.cases import SMALL
from reference.checkpoint import write
from reference.weights import random_checkpoint_tensors
from tools.check import Checked, Part, _beside, no_compiler
from tools.cli import app
from tools.common import one_line
from tools.generate import _swap

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


def k3(*args) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="k3")
    return result.exit_code, result.stdout, result.stderr


def test_check_judges_what_it_can(tmp_path):
    file = tmp_path / "check.json"
    code, text, _ = k3("check", "--model", "tiny", "--tokens", 2, "--prompts", "edge-empty,edge-one-byte", "--no-order",
                       "--json", file)  # fmt: skip
    parts = {p["name"]: p for p in json.loads(file.read_text())["parts"]}
    assert code == 0 and "fused against exact" in text
    assert [p["verdict"] for n, p in parts.items() if n.startswith("reference")] == ["equal"] * 3


@pytest.mark.parametrize("verdicts, require, code", [
    ("equal", False, 0), ("equal disagreement", False, 1), ("could", False, 2), ("equal could", False, 0),
    ("equal could", True, 2), ("disagreement could", True, 1), ("", False, 2), ("equal unproven", False, 2),
    ("equal could unproven", False, 2), ("disagreement unproven", False, 1),
])  # fmt: skip
def test_exit_codes(verdicts, require, code):
    """could: there is no GPU; unproven: what could have been judged here was not."""
    names = {"could": "could not judge", "unproven": "could not judge"}
    parts = [Part("twins" if v == "could" else "reference", names.get(v, v), "", absent=v == "could")
             for v in verdicts.split()]  # fmt: skip
    assert Checked(parts, require).exit_code == code


def test_order_proves_a_kernel_and_writes_json():
    code, text, _ = k3("order", "--kernel", "kda_decode-t1-h2", "--target", "sm_103a", "--scope", "all", "--json", "-")
    found = json.loads(text)  # nothing else is on standard output
    assert code == 0 and [r["verdict"] for r in found["reports"]] == ["proved"]


def test_generate_is_replayable_and_swaps(tmp_path):
    made = []
    for swap in ("2:kda.decode=reference@0-1", "*=reference"):
        file = tmp_path / "text.json"
        code, _, _ = k3("generate", "--model", "tiny", "--prompt", "ab", "--tokens", 5, "--swap", swap, "--json", file)
        made.append(json.loads(file.read_text())["tokens"])
        assert code == 0
    assert made[0] == made[1] and len(made[0]) == 5
    assert _swap("20:linear=fast@1")[0] == 20 and _swap("linear=fast")[0] == 0


def test_bisect_without_a_twin_cannot_judge():
    code, text, _ = k3("bisect", "--model", "tiny", "--steps", 1, "--prompts", "edge-one-byte")
    assert code == 2 and "no unit of this plan is served by a twin here" in text


@pytest.mark.parametrize("args, text", [
    (("check", "--model", "none"), "model 'none': allowed are mini, deep, tiny and checkpoint folders"),
    (("check", "--prompts", "none"), "prompt 'none': allowed are ids and kinds"),
    (("check", "--device", "cuda"), "device 'cuda': no CUDA GPU is visible"),
    (("check", "--device", "tpu"), "device 'tpu': allowed are auto, cpu, cuda, cuda:N"),
    (("check", "--follow", "neither"), "follow 'neither': allowed are reference, twin"),
    (("check", "--device", f"cuda:{10**30}"), "allowed are auto, cpu, cuda, cuda:N"),
    (("doctor", "--json", "/"), "Is a directory"),
    (("generate", "--model", "tiny", "--prompt", "x", "--top-k", str(2**31)), "top_k < 2^31"),
    (("generate", "--model", "tiny", "--prompt", "x", "--tokens", 10**11), "can't allocate memory"),
    (("check", "--checkpoint", "x", "--record", "a", "--json", "./a"), "--json ./a would replace the file of --record"),
    (("generate", "--model", "tiny"), "generate takes either --prompt or --prompt-id"),
    (("generate", "--model", "tiny", "--prompt", "x", "--swap", "nothing=fast"), "'nothing' is no stage and no twin"),
    (("generate", "--model", "tiny", "--prompt", "x", "--backend", "quick"), "decode_backend 'quick': allowed are"),
    (("generate", "--model", "tiny", "--prompt", "x", "--temperature", "-1"), "temperature >= 0"),
    (("bisect", "--model", "tiny", "--on", "logits"), "bisect on 'logits': allowed are outputs, state"),
    (("bisect", "--model", "tiny", "--fault", "kda.none@1"), "fault 'kda.none': allowed are"),
    (("order", "--target", "sm_80"), "target 'sm_80': allowed are sm_90a, sm_100a, sm_103a"),
    (("order", "--kernel", "zzz"), "no kernel name contains 'zzz'"),
    (("order", "--scope", "some"), "scope 'some': allowed are forms, batch1, all"),
    (("bench",), "bench needs a CUDA GPU"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_code_2(args, text):
    code, _, errors = k3(*args)
    lines = [line for line in errors.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and text in lines[0]


def test_a_model_of_nan_is_never_equal(tmp_path):
    """Law and twin agree on NaN; that is no comparison. Lockstep, prefill and the whole verdict say so."""

    def spoilt():
        for name, t in random_checkpoint_tensors(SMALL["tiny"], 0):
            yield name, torch.full_like(t, torch.nan) if name.endswith("embed_tokens.weight") else t

    write(tmp_path / "nan", SMALL["tiny"], spoilt())
    file = tmp_path / "out.json"
    code, _, _ = k3("check", "--model", tmp_path / "nan", "--prompts", "edge-one-byte", "--tokens", 1, "--no-order",
                    "--json", file)  # fmt: skip
    assert code == 2 and {p["verdict"] for p in json.loads(file.read_text())["parts"]} == {"could not judge"}


def test_a_fault_that_nothing_could_look_for_is_no_success():
    good = Part("reference", "equal", "")
    assert Checked([good, no_compiler([])]).exit_code == 0
    assert Checked([good, no_compiler(["kda.beta@0"])]).exit_code == 2


@pytest.mark.parametrize("work, error, text", [
    (os._exit, ChildProcessError, "the process of _exit ended with 9 and without a result"), (int, ValueError, "'9x'"),
])  # fmt: skip
def test_a_second_process_that_ends_early_is_not_waited_for(work, error, text):
    with pytest.raises(error, match=text), _beside(work, 9 if work is os._exit else "9x") as result:
        result()
    with pytest.raises(KeyError), _beside(time.sleep, 600):
        raise KeyError
    assert not active_children()


def test_no_tokens_are_no_verdict():
    assert k3("check", "--model", "tiny", "--tokens", -3, "--no-order")[0] == 2


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_crash_is_no_disagreement(error):
    with pytest.raises(SystemExit) as ended, one_line():
        raise error
    assert ended.value.code == 2
