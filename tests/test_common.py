"""What the subcommands share: files that cannot be written, rules that match nothing, valid JSON, one-line errors."""

import io
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from equivalence.cases import SMALL
from fast.selection import Selection, twins
from reference.stage import ContractError
from tools.cli import app
from tools.common import check_swaps, check_target, prompts, replacing, serving, whole_numbers, write_json
from tools.generate import Shown

tiny = SMALL["tiny"]  # KDA in layers 0-2, MLA in 3 and 4


def test_a_file_that_cannot_be_written_is_found_before_the_work(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("as it was")
    for target in (None, "-", str(tmp_path / "new.json"), str(old), "/dev/null"):
        check_target(target)
    assert old.read_text() == "as it was" and [p.name for p in tmp_path.iterdir()] == ["old.json"]
    for target in (str(tmp_path / "no" / "x.json"), str(tmp_path)):
        with pytest.raises(OSError):
            check_target(target)
    link = tmp_path / "link.json"  # it leads nowhere yet
    link.symlink_to("later.json")
    check_target(str(link))
    assert link.is_symlink() and not link.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("as it was")
    old.chmod(0o640)
    link.symlink_to("old.json")
    with pytest.raises(ZeroDivisionError), replacing(old) as work:
        work.write_text("half of it")
        raise ZeroDivisionError
    with monkeypatch.context() as patch:  # a full disk
        patch.setattr("pathlib.Path.write_text", lambda path, text: path.write_bytes(text.encode()[:5]) and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_json(dict(a=1), str(old))
    assert old.read_text() == "as it was" and sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "old.json"]
    write_json(dict(a=1), str(link))
    assert json.loads(old.read_text()) == dict(a=1) and link.is_symlink() and old.stat().st_mode & 0o777 == 0o640
    write_json(dict(a=1), str(tmp_path / "new.json"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "new.json", "old.json"]


def test_a_pipe_is_written_to_as_it_stands(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_target(str(tmp_path / "pipe"))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_json(dict(a=1), str(tmp_path / "pipe"))
        assert json.loads(read.result(timeout=20)) == dict(a=1)


@pytest.mark.parametrize("command", ["check", "bisect", "order", "generate", "bench", "doctor", "traces", "adversary",
                                     "stand-in"])  # fmt: skip
def test_every_command_refuses_it_at_once(command, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.doctor.report", lambda: pytest.fail("the work had begun"))
    argument = [str(tmp_path / "w")] if command == "stand-in" else []
    result = CliRunner().invoke(app, [command, *argument, "--json", str(tmp_path / "no" / "x.json")], prog_name="k3")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "No such file or directory" in result.stderr
    assert str(tmp_path / "no" / "x.json") in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("args, text", [
    (["check", "--nope"], "No such option"), (["nope"], "No such command"), (["check", "--tokens", "x"], "--tokens"),
    (["bench", "--tokens", "a,b"], "tokens 'a,b': 'a' is no whole number from 1"),
    (["bench", "--tokens", "4,0"], "tokens '4,0': '0' is no whole number from 1"),
])  # fmt: skip
def test_usage_errors_are_one_line(args, text):
    result = CliRunner().invoke(app, args, prog_name="k3")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and text in result.stderr


def test_no_arguments_show_the_help():
    result = CliRunner().invoke(app, [], prog_name="k3")
    assert result.exit_code == 0 and "Usage" in result.stdout


def test_json_is_valid_whatever_the_numbers(tmp_path):
    file = tmp_path / "out.json"
    write_json({"runs": [{"ratio": math.inf}, {"ratio": 1.5}], "worst": (math.nan, -math.inf)}, str(file))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(file.read_text(), parse_constant=refuse)
    assert found == {"runs": [{"ratio": "inf"}, {"ratio": 1.5}], "worst": ["nan", "-inf"]}


@pytest.mark.parametrize("text, what", [
    ("kda.conv=reference@3-4", "swap 'kda.conv=reference@3-4' matches nothing in tiny; layers are 0-4, there is "),
    ("linear=fast,attn_res=reference@5", "swap 'attn_res=reference@5' matches nothing in tiny; layers are 0-4, there"),
    ("mla.attention=reference@0", "swap 'mla.attention=reference@0' matches nothing in tiny"),
    ("kda.conv=linear", "swap 'kda.conv=linear' changes nothing; linear serves "),
    ("mla.nope=fast", "'mla.nope' is no stage and no twin"),
    ("linear=quick", "implementation 'quick': allowed are fast, reference"),
])  # fmt: skip
def test_swaps_that_match_nothing_are_refused(text, what):
    with pytest.raises(ContractError) as error:
        check_swaps(Selection.parse(text), twins(), tiny)
    assert what in str(error.value)


@pytest.mark.parametrize("text", ["", "*=reference", "kda.conv=reference@2-4", "linear=fast@3"])
def test_swaps_that_match_are_kept(text):
    check_swaps(Selection.parse(text), twins(), tiny)


def test_faults_that_match_nothing_are_refused():
    selection, extra = serving("kda.decode=fault:kda.beta@0", ["kda.beta@1"], tiny)
    assert len(selection.rules) == 4 and list(extra) == ["fault:kda.beta"]
    with pytest.raises(ValueError, match=r"fault 'kda\.beta@3' matches no stage of tiny, whose layers are 0-4"):
        serving("", ["kda.beta@1", "kda.beta@3"], tiny)


def test_numbers_and_prompts():
    assert whole_numbers("1, 2,64", "tokens") == [1, 2, 64]
    for text in ("", "1,,2", "-1", "1.5", "9" * 20):
        with pytest.raises(ValueError, match="no whole number from 1"):
            whole_numbers(text, "tokens")
    assert [p.id for p in prompts("edge-empty,long-agent-4096-s0")] == ["edge-empty", "long-agent-4096-s0"]
    with pytest.raises(ValueError, match="4096"):
        prompts("long-agent-17-s0")


@pytest.mark.parametrize("data, want", [
    ("aé漢🙂".encode(), "aé漢🙂"), (b"a\xff\xc3", "a\ufffd\ufffd"), (b"\xe6\xbca", "\ufffda"),
    ([97, 256, 300, 98], "ab"),
])  # fmt: skip
def test_text_is_shown_as_utf8_as_soon_as_it_is_complete(data, want):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    shown = Shown(stream)
    for i, token in enumerate(data):
        shown.add(token)
        so_far = stream.buffer.getvalue().decode()
        assert want.startswith(so_far) and (i or data[0] != 97 or so_far == "a")
    shown.end()
    assert stream.buffer.getvalue().decode() == want


def test_a_terminal_of_few_characters_shows_question_marks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    shown = Shown(stream)
    for token in "é!".encode():
        shown.add(token)
    assert stream.buffer.getvalue() == b"?!"
