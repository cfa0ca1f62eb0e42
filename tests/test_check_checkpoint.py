"""`k3 check --checkpoint` without a GPU: verdicts, pieces over recordings, rank shapes, and refusals of one line."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import small, stand_in
from typer.testing import CliRunner

from equivalence.cases import GOLDEN
from equivalence.simt import compiler
from reference.checkpoint import Checkpoint, write
from reference.config import k3 as k3_config
from reference.config import k3_rank
from reference.layout import CONFIG
from reference.weights import random_checkpoint_tensors
from tools import check_checkpoint
from tools.cli import app

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
QUICK = ("--no-order", "--tokens", 1, "--prompts", "edge-one-byte,edge-two-bytes")


def k3(*args) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="k3")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def law_only(monkeypatch):
    """No interpreted twins: compiling kernels takes most of the time."""
    monkeypatch.setattr(check_checkpoint, "compiler", lambda: None)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Hidden states entering layer 2 of the stand-in."""
    file = tmp_path_factory.mktemp("recordings") / "two.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_checkpoint, "_servings", lambda *args: ([], []))
        code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", "0-1", "--record", file, *QUICK)
    assert code == 2 and not errors.strip() and file.exists()  # nothing was judged, which is no success
    return file


def test_the_shipped_checkpoint(law_only, tmp_path):
    file = tmp_path / "out.json"
    code, text, _ = k3("check", "--checkpoint", GOLDEN / "mini", "--layers", "0-1", *QUICK, "--json", file)
    parts = {p["name"]: p for p in json.loads(file.read_text())["parts"]}
    assert code == 0 and [p["verdict"] for n, p in parts.items() if n.startswith("reference")] == ["equal"] * 3
    assert parts["interpreted twins"]["verdict"] == parts["twins"]["verdict"] == "could not judge"
    about = parts["reference, fused against exact"]["details"]["about"]
    assert about["layers"] == "0-1" and "law_alone" not in about and "by the law alone" not in text
    assert "2 prompts, 1 decoded tokens of each, tokens from bytes" in text


@pytest.mark.skipif(not compiler(), reason="needs a C compiler: cc, gcc or clang on PATH, or $CC")
def test_interpreted_twins_meet_the_shapes_of_a_rank(record, tmp_path):
    file = tmp_path / "out.json"
    which = "--checkpoint", stand_in().folder, "--layers", "2", "--recorded", record
    shapes = "--rank-shapes", "tp2", "--rank", 1
    code, _, _ = k3("check", *which, *shapes, "--swap", "*=reference,kda.decode=fast", "--no-order", "--json", file)
    parts = {p["name"]: p for p in json.loads(file.read_text())["parts"]}
    twins = parts["interpreted twins"]
    assert code == 0 and twins["verdict"] == "equal" and "rank 1 of 2" in twins["text"]
    served = {u["key"]: u["kernels"] for u in twins["details"]["units"] if u["served_by"] == "kda.decode"}
    assert list(served) == ["02.kda.decode"] and "h1" in served["02.kda.decode"][0]
    reasons = twins["details"]["not_judged"]
    assert reasons["other ranks' parts come from the whole layer's law"] == ["comm.all_reduce"]


def test_a_fault_ends_with_1(record, law_only, monkeypatch):
    """The interpreter is left out here; the fault is a law that errs in one stage."""
    from equivalence.law_twin import LawTwin, served_by

    def spoil(values, tensors):
        values["out"] = values["out"] * 1.01

    wrong = served_by(LawTwin("wrong", ("kda.out_norm",), spoil=spoil))
    serving = check_checkpoint.Serving("interpreted twins", **wrong)
    monkeypatch.setattr(check_checkpoint, "_servings", lambda *args: ([serving], []))
    code, text, _ = k3("check", "--checkpoint", stand_in().folder, "--layers", "2", "--recorded", record, "--no-order")
    assert code == 1 and "02.kda.out_norm" in text


def test_a_model_with_words_needs_its_tokenizer(tmp_path, law_only):
    write(tmp_path / "w", small, random_checkpoint_tensors(small, 0))
    config = json.loads((tmp_path / "w" / CONFIG).read_text())
    config["text_config"]["bos_token_id"] = 3
    (tmp_path / "w" / CONFIG).write_text(json.dumps(config))
    code, _, errors = k3("check", "--checkpoint", tmp_path / "w", "--layers", 0, *QUICK)
    assert code == 2 and errors.count("\n") == 1 and "no tokenizer beside the weights" in errors


@pytest.mark.parametrize("args, text", [
    (("--checkpoint", "none"), "none/config.json: the file is missing"),
    (("--checkpoint", "STAND-IN", "--model", "deep"), "either --checkpoint or --model"),
    (("--layers", "0-3"), "--layers 0-3: allowed only with --checkpoint"),
    (("--rank-shapes", "tp8"), "--rank-shapes tp8: allowed only with --checkpoint"),
    (("--checkpoint", "STAND-IN", "--layers", "0-6"), "layers 0-6; allowed are 0-5"),
    (("--checkpoint", "STAND-IN", "--layers", "3-2"), "layers 3-2; allowed are 0-5"),
    (("--checkpoint", "STAND-IN", "--layers", "a"), "layers 'a': the form is FIRST-LAST"),
    (("--checkpoint", "STAND-IN", "--rank-shapes", "8"), "rank shapes '8': allowed are tp1, tp2"),
    (("--checkpoint", "STAND-IN", "--rank-shapes", "tp3"), "mesh: tp = 3; allowed are 1, 2, 4, 8, 16"),
    (("--checkpoint", "STAND-IN", "--rank-shapes", "tp4"), "small: heads = 2 over 4 ranks"),
    (("--checkpoint", "STAND-IN", "--rank-shapes", "tp2", "--rank", 2), "mesh: rank 2; allowed are 0..1"),
    (("--checkpoint", "STAND-IN", "--rank", 1), "rank 1 without --rank-shapes"),
    (("--checkpoint", "STAND-IN", "--follow", "none"), "follow 'none': allowed are"),
    (("--checkpoint", "STAND-IN", "--prompts", "none"), "prompt 'none': allowed are ids and kinds"),
    (("--checkpoint", "STAND-IN", "--layers", "0-2", "--swap", "mla.o_proj=reference"), "matches nothing in small"),
    (("--checkpoint", "STAND-IN", "--layers", "0-2", "--fault", "kda.beta@3"), "fault 'kda.beta@3' matches no stage"),
    (("--checkpoint", "STAND-IN", "--record", "r"), "record r: nothing follows layer 5, the last of small"),
    (("--checkpoint", "STAND-IN", "--layers", "0-2", "--record", f"STAND-IN/{CONFIG}"), "exists; a recording is not"),
    (("--checkpoint", "STAND-IN", "--layers", "0-2", "--record", "no/r"), "No such file or directory"),
    (("--checkpoint", "STAND-IN", "--layers", "2", "--recorded", "none"), "none: the recording is missing"),
    (("--checkpoint", "STAND-IN", "--layers", "2", "--recorded", f"STAND-IN/{CONFIG}"), "truncated or no"),
    (("--checkpoint", "STAND-IN", "--layers", "2", "--recorded", "STAND-IN/SHARD"), "format "),
    (("--checkpoint", "STAND-IN", "--recorded", "r", "--tokens", "2"), "--recorded excludes --prompts and --tokens"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_and_code_2(args, text, law_only):
    folder = str(stand_in().folder)
    shard = next(stand_in().folder.glob("*.safetensors")).name
    code, _, errors = k3("check", *(str(a).replace("STAND-IN", folder).replace("SHARD", shard) for a in args))
    assert code == 2 and errors.count("\n") == 1 and text in errors


def spoil(record, target, **changes):
    """A copy of the recording with other tensors (None: without) or metadata."""
    from safetensors import safe_open

    with safe_open(str(record), "pt") as file:
        meta = file.metadata()
    held = load_file(record)
    for name, value in changes.items():
        (meta if isinstance(value, str) else held)[name] = value
    save_file({n: t for n, t in held.items() if t is not None}, target, metadata=meta)


@pytest.mark.parametrize("changes, text", [
    (dict(format="other"), "format 'other'; allowed is 'k3-hidden-states-1'"),
    (dict(layer="7"), "enters layer 7; allowed are 0..6"), (dict(layer="x"), "broken (\"invalid literal"),
    (dict(decoded="99"), "99 decoded ones need 100"), (dict(prefix=None), "broken (\"'prefix'\")"),
    (dict(delta=torch.zeros(3, 64)), "delta is torch.float32 [3, 64]; allowed is torch.bfloat16 ["),
    (dict(lengths=torch.tensor([1])), "broken ("), (dict(checkpoint="0" * 64), "recorded with another checkpoint"),
    (dict(passed="0" * 64), "recorded with other weights of layer 1"),
    (dict(lengths=torch.tensor([1.0])), "lengths is torch.float32 [1]; allowed is torch.int64 with one axis"),
    (dict(lengths=None), "lengths is missing"), (dict(prompts="5"), "prompts are 5; allowed is a list of texts"),
    (dict(tokens=torch.full((4,), 999)), "token id 999; allowed are 0..271"),
])  # fmt: skip
def test_recordings_that_do_not_fit(record, changes, text, tmp_path):
    n = len(load_file(record)["tokens"])
    if "tokens" in changes:
        changes = dict(tokens=torch.full((n,), 999))
    spoil(record, tmp_path / "r", **changes)
    code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", 2, "--recorded", tmp_path / "r")
    assert code == 2 and errors.count("\n") == 1 and text in errors


def test_a_recording_cut_short(record, tmp_path):
    raw = record.read_bytes()
    for size in (0, 5, 100, len(raw) // 2, len(raw) - 1):
        (tmp_path / "r").write_bytes(raw[:size])
        code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", 2, "--recorded", tmp_path / "r")
        assert code == 2 and errors.count("\n") == 1 and "truncated or no safetensors file" in errors


def test_a_recording_of_other_weights(tmp_path):
    """Same names, same widths, other seed: the digest of the last layer's norms tells them apart."""
    other = stand_in(seed=1)
    assert Checkpoint(other.folder).config == small
    file = tmp_path / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_checkpoint, "_servings", lambda *args: ([], []))
        k3("check", "--checkpoint", other.folder, "--layers", "0", "--record", file, *QUICK)
    code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", 1, "--recorded", file)
    assert code == 2 and "recorded with other weights of layer 0" in errors


def test_layers_that_the_law_walks_alone_are_named(record, law_only, tmp_path):
    """A recording that enters layer 2, and layer 4 judged: 2 and 3 are gone through, and the report says so."""
    file = tmp_path / "out.json"
    which = "--checkpoint", stand_in().folder, "--layers", 4, "--recorded", record, "--no-order", "--json", file
    code, text, _ = k3("check", *which)
    fused, unfused, *_ = json.loads(file.read_text())["parts"]
    assert code == 0 and text.count("entering layer 2; layers 2-3 by the law alone, not judged") == 2
    for part in (fused, unfused):
        assert part["details"]["about"]["law_alone"] == "2-3"
        assert {key.split(".")[0] for key in part["details"]["units"][0]["key"].split()} == {"04"}
        assert {u["key"][:2] for u in part["details"]["units"]} == {"04"}
    code, text, _ = k3("check", "--checkpoint", stand_in().folder, "--layers", 1, *QUICK)
    assert code == 0 and "tokens from bytes; layer 0 by the law alone, not judged" in text


def test_a_chunk_form_that_errs_is_a_disagreement(record, law_only, monkeypatch):
    """Neither mode of the law nor a twin would show it: all of them start from the state that prefill left."""
    solve = torch.linalg.solve_triangular
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda *a, **kw: solve(*a, **kw) * (1 + 1e-8))
    which = "--checkpoint", stand_in().folder, "--layers", "2-3", "--recorded", record, "--no-order"
    code, text, _ = k3("check", *which)
    (line,) = [line for line in text.splitlines() if "prefill against decode" in line]
    assert code == 1 and line.startswith("disagreement") and "in layer 2, in float64 (allowed 1e-10)" in line
    assert text.count("disagreement") == 1


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("pipe", "a pipe or device"), (".", "a folder")):
        which = "--checkpoint", stand_in().folder, "--layers", 2, "--recorded", tmp_path / name
        code, _, errors = k3("check", *which)
        assert code == 2 and errors.count("\n") == 1 and f"is {kind}; allowed is a file" in errors


def test_layers_that_cannot_fit_are_refused(record, law_only, monkeypatch):
    """K3's layers whole: 16 GiB of experts each. A rank's share beside them needs little more."""
    for judged, low, high in ((k3_config, 19, 23), (k3_rank(8), 18, 22)):
        assert not fits(judged, low << 30) and fits(judged, high << 30)
    with pytest.raises(MemoryError, match=r"layer 1 of k3 needs about [0-9.]+ GiB on cpu, where 8.0 GiB are free"):
        check_checkpoint.check_memory(k3_config, k3_config, (0, 11), 2, 8 << 30, "cpu")
    monkeypatch.setattr(check_checkpoint, "free_bytes", lambda where: 1000)
    code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", 2, "--recorded", record)
    assert code == 2 and errors.count("\n") == 1 and "layer 2 of small needs about" in errors


def fits(judged, free: int) -> bool:
    try:
        check_checkpoint.check_memory(k3_config, judged, (0, 92), 12, free, "cuda")
    except MemoryError:
        return False
    return True


def test_layers_before_a_recording_are_refused(record):
    code, _, errors = k3("check", "--checkpoint", stand_in().folder, "--layers", 1, "--recorded", record, "--no-order")
    assert code == 2 and "hidden states enter layer 2; allowed is at most the first one judged, 1" in errors
