"""The command line, in process: verdicts, exit codes, JSON, and one clear line for every wrong argument. No GPU."""

import json
import os
import time
from multiprocessing import active_children

import pytest
import torch
from typer.testing import CliRunner

from equivalence.cases import SMALL
from equivalence.simt import compiler
from fast.decoder import Explained
from reference.checkpoint import write
from reference.weights import random_checkpoint_tensors
from tools.check import Checked, Part, _beside, no_compiler
from tools.cli import app
from tools.common import one_line
from tools.generate import _swap, explained

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
    assert _swap("20:linear=fast@1", SMALL["tiny"])[0] == 20 and _swap("linear=fast", SMALL["tiny"])[0] == 0


def test_explain_says_who_serves_each_stage_and_why():
    """Of a span that is taken apart, of all others, and after a prefill alone."""
    call = ("generate", "--model", "tiny", "--prompt", "ab", "--explain", "--tokens")
    code, text, _ = k3(*call, 2, "--swap", "kda.conv=reference@0")
    lines = {line.split("  ")[1]: " ".join(line.split()) for line in text.splitlines() if line.startswith("  ")}
    assert code == 0 and lines["kda.conv @0"] == "kda.conv @0 reference selected"
    assert "only together, and the rules say kda.conv=reference; device cpu: kernels run" in lines["kda.recurrence @0"]
    assert all("reference device cpu: kernels run on" in lines[f"kda.{s} @1-2"] for s in ("conv", "recurrence"))
    assert lines["moe.topk @1-4"] == "moe.topk @1-4 reference no twin"
    _, text, _ = k3(*call, 1)
    assert "token 0 came from the prefill" in text and "prefill is served by the reference" in text
    _, text, _ = k3(*call, 2, "--backend", "reference")
    assert text.count("the reference backend is selected") == text.count("reference  ") > 20


def test_explain_names_kernels():
    units = [Explained(f"{i:02d}.kda.decode", (), "kda.decode", ("k1", "k2"), (), "selected") for i in (0, 1, 4)]
    made = explained([*units, Explained("embed", (), "reference", (), (), "no twin")])
    assert [" ".join(line.split()) for line in made] == [
        "kda.decode @0-1, 4 kda.decode selected (k1, k2)", "embed reference no twin",
    ]  # fmt: skip


BISECT = ("bisect", "--model", "tiny", "--steps", 1, "--prompts", "edge-one-byte")


@pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
def test_bisect_interprets_the_twins(tmp_path):
    code, text, _ = k3(*BISECT)
    assert code == 0 and "1 prompts; executed by the PTX interpreter, sm_90a code, not on a GPU" in text
    file = tmp_path / "found.json"
    code, text, _ = k3(*BISECT, "--steps", 4, "--fault", "kda.beta@1", "--json", file)
    found = json.loads(file.read_text())
    assert (code, found["key"], found["layer"]) == (1, "01.fault:kda.beta", 1) and "not on a GPU" in found["text"]
    code, text, _ = k3(*BISECT, "--swap", "*=reference")
    assert code == 2 and "served by a twin here: the rules give all to the reference" in text


def test_bisect_without_a_compiler_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("tools.bisect.compiler", lambda: None)
    code, text, _ = k3(*BISECT)
    assert code == 2 and "the PTX interpreter lacks a C compiler" in text and "k3 order" in text


def test_help_names_what_may_be_given():
    assert {"tiny", "[@LAYERS]"} <= set(k3("check", "--help")[1].replace(",", "").replace("TION[", "TION [").split())
    commands = k3("--help")[1]
    assert all(f"\n  {name} " in commands for name in report_commands())


def report_commands() -> list[str]:
    return list(json.loads(k3("doctor", "--json", "-")[1])["commands"])


@pytest.mark.parametrize("ended, code", [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (-9, 2)])
def test_test_takes_paths_and_its_code_is_ours(monkeypatch, ended, code):
    calls = []
    monkeypatch.setattr("tools.cli.subprocess.call", lambda call, **_: calls.append(call[3:]) or ended)
    for args in ([], ["tests/test_cli.py", "-x"], ["tests/test_cli.py::test_x"], ["-k", "cli"], ["-k", "tests"]):
        assert k3("test", *args)[0] == code
    assert calls == [
        ["tests", "-n", "auto"], ["tests/test_cli.py", "-x"], ["tests/test_cli.py::test_x"], ["tests", "-k", "cli"],
        ["tests", "-k", "tests"],
    ]  # fmt: skip


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
    (("check", "--swap", "kda.beta@3"), "kda.beta is a fault, which check and bisect take as --fault kda.beta@3"),
    (("check", "--swap", "kda.conv=reference@3"), "layer 3 is MLA with a mixture of experts; kda.conv is in"),
    (("check", "--fault", "kda.beta@3"), "fault 'kda.beta@3' matches no stage of mini, whose layers are 0-12: layer 3"),
    (("bisect", "--swap", "mlp.down=fast@1"), "layer 1 is KDA with a mixture of experts; mlp.down is in layer 0"),
    (("generate", "--prompt", "x", "--swap", "9:attn_res=reference@13"), "there is no layer 13; attn_res ("),
    (("generate", "--model", "tiny", "--prompt", "x", "--tokens", 3, "--swap", "3:linear=reference"),
     "a swap from token 3 on would never come; allowed are tokens 0-2"),
    (("check", "--prompts", ""), "no prompt is named; allowed are ids and kinds"),
    (("adversary", "--part", "table, none"), "part 'none': allowed are table, watchdog, kernels, crossval"),
    (("adversary", "--batch", "1,65"), "batch 65: allowed are 1 to 64"),
    (("check", "--fault", "kda.beta@x"), "fault 'kda.beta@x': the form is NAME[@LAYER[-LAYER]]; names are kda.decay"),
    (("generate", "--model", "tiny", "--prompt-id", ""), "prompt id '' names 0 prompts; allowed is the id of one"),
    (("generate", "--model", "tiny", "--prompt-id", "agent"), "prompts; allowed is the id of one"),
    (("adversary",), "no CUDA GPU is visible: adversary needs one; `k3 order` and `k3 check` do not"),
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
