"""Prompts: the files' schema, what kinds there are, and the builders' exactness, determinism and needles."""

import base64
import dataclasses
import hashlib
import json
import unicodedata
import zlib

import pytest

from golden import prompts
from golden.build import BUILDERS, DEPTHS, _fill
from golden.grammar import GRAMMAR
from golden.prompts import FOLDER, PromptError, get, load, long_context
from reference.config import deep, k3, mini

ALL = load()
KINDS = {"agent", "bytes", "edge", "json", "language", "long", "math", "qa", "repeat", "retrieval", "story"}
SCRIPTS = {"CJK", "ARABIC", "DEVANAGARI", "HIRAGANA", "CYRILLIC", "GREEK", "LATIN", "HANGUL", "HEBREW", "THAI"}
RECORD = {"id": "qa-one", "kind": "qa", "note": "a note", "text": "one"}


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def folder_with(tmp_path, content: str | bytes, name: str = "qa.json"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path


# The stored prompts


def test_kinds_and_numbers():
    assert {p.kind for p in ALL} == KINDS
    assert len(ALL) >= 44
    assert len({p.id for p in ALL}) == len({p.data for p in ALL}) == len(ALL)


@pytest.mark.parametrize("prompt", ALL, ids=str)
def test_tokens_are_bos_and_bytes(prompt):
    for config in (mini, deep):
        tokens = prompt.tokens(config)
        assert tokens[0] == config.bos
        assert bytes(tokens[1:]) == prompt.data
        assert max(tokens) < config.vocab
    assert len(prompt.data) <= 3000
    assert prompt.max_tokens >= 1024
    assert prompt.id.isascii() and " " not in prompt.id


def test_lengths_around_windows_and_pages():
    lengths = {len(p.tokens(mini)) for p in ALL if p.kind == "edge"}
    assert {1, 2, 3, 4, 15, 16, 17, 64, 65, 128, 129} <= lengths


def test_scripts_of_the_language_prompts():
    text = "".join(p.data.decode() for p in ALL if p.kind == "language")
    found = {unicodedata.name(c, "?").split()[0] for c in text if c.isalpha()}
    assert found >= SCRIPTS


def test_hostile_bytes_are_there():
    data = b"".join(p.data for p in ALL if p.kind == "bytes")
    assert set(data) == set(range(256))
    for part in (b"\0\0", b"\r\n", b"\t \t", b"\xff\xfe", "\u200d".encode(), b"\xc0\xaf", b"\x1b["):
        assert part in data
    assert any(not valid_utf8(p.data) for p in ALL)
    assert max(len(line) for line in data.split(b"\n")) > 2500


def valid_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_repeats_have_short_periods():
    for name, period in (("sixteen-same", 1), ("run-of-zeros", 1), ("two-letters", 2), ("period-four", 4)):
        data = get(f"repeat-{name}").data
        assert data[period:] == data[:-period]
    assert len(get("repeat-sixteen-same").data) == 16


def test_stored_text_shows_every_character():
    """Invisible and direction-changing characters are stored as base64, so that a review sees what a file holds."""
    for path in FOLDER.glob("*.json"):
        for char in path.read_text("utf-8"):
            assert char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Co", "Zl", "Zp"), (path.name, char)


def test_one_kind_and_one_prompt():
    assert {p.kind for p in load(["qa", "math"])} == {"qa", "math"}
    assert get("edge-empty").data == b""


# Hostile files and requests


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "not JSON at line 1 column 1"),
        (json.dumps([RECORD])[:-9], "not JSON"),
        (b"[\xff]", "not UTF-8"),
        ("{}", "must be a list"),
        ("[]", "must be a list of at least one record"),
        ("[" * 100_000, "recursion"),
        ('["text"]', "must be an object"),
        ('[{"id": "qa-one", "id": "qa-two"}]', "'id' stands twice"),
        ([{**RECORD, "seed": 1}], "unknown field 'seed'"),
        ([{**RECORD, "note": ""}], "no 'note'"),
        ([{k: v for k, v in RECORD.items() if k != "kind"}], "no 'kind'"),
        ([{**RECORD, "kind": "math"}], "this file holds 'qa'"),
        ([{**RECORD, "id": "math-one"}], "must be 'qa-'"),
        ([{**RECORD, "id": "qa-One two"}], "'qa-One two'"),
        ([{**RECORD, "id": "qa-one\n"}], "must be 'qa-'"),
        ([RECORD, RECORD], "stands in qa.json too"),
        ([{**RECORD, "base64": "AA=="}], "exactly one of"),
        ([{k: v for k, v in RECORD.items() if k != "text"}], "exactly one of"),
        ([{**RECORD, "text": 5}], "text is 5; it must be a string or a list of lines"),
        ([{**RECORD, "text": ["a", None]}], "text holds None"),
        ([{**RECORD, "text": "\ud800"}], "lone surrogate at 0"),
        ([{**RECORD, "max_tokens": 0}], "max_tokens = 0"),
        ([{**RECORD, "max_tokens": True}], "max_tokens is True"),
        ([{**RECORD, "max_tokens": 1.5}], "must be a whole number"),
        ([{**RECORD, "times": 0}], "times = 0"),
        ([{**RECORD, "times": 10**12}], "allowed are fewer than 1048576"),
        ('[{"times": ' + "9" * 5000 + "}]", "integer string conversion"),
    ],
)
def test_wrong_files_give_one_line(tmp_path, content, says):
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    with pytest.raises(PromptError) as error:
        load(folder=folder_with(tmp_path, content))
    text = one_line(error)
    assert says in text and "qa.json" in text


@pytest.mark.parametrize("blob", ["AAA", "AA==\n", "A*==", "=AAA"])
def test_wrong_base64_gives_one_line(tmp_path, blob):
    record = {"id": "qa-one", "kind": "qa", "note": "n", "base64": blob}
    with pytest.raises(PromptError, match="base64 does not decode"):
        load(folder=folder_with(tmp_path, json.dumps([record])))


def test_a_right_file_loads(tmp_path):
    blob = {"id": "qa-two", "kind": "qa", "note": "n", "times": 3, "base64": base64.b64encode(b"\xff\0").decode()}
    lines = {**RECORD, "id": "qa-three", "text": ["a", "", "b"], "max_tokens": 7}
    got = load(folder=folder_with(tmp_path, json.dumps([RECORD, blob, lines])))
    assert [p.data for p in got] == [b"one", b"\xff\0" * 3, b"a\n\nb"]
    assert [p.max_tokens for p in got] == [1024, 1024, 7]


def test_missing_folders_kinds_and_ids(tmp_path):
    with pytest.raises(PromptError, match="no prompt files"):
        load(folder=tmp_path)
    (tmp_path / "qa.json").mkdir()
    with pytest.raises(PromptError, match="cannot be read"):
        load(folder=tmp_path)
    with pytest.raises(PromptError, match="no prompts of kind 'poem'; kinds are agent, bytes"):
        load(["poem"])
    with pytest.raises(PromptError, match="no prompt 'qa-nothing'; there are qa-"):
        get("qa-nothing")
    with pytest.raises(PromptError, match="no long context of kind 'poem'"):
        get("long-poem-4096-s0")


def test_other_vocabularies_are_refused():
    with pytest.raises(PromptError, match=r"'k3' has bos = 163584.*whose bos is 256"):
        ALL[0].tokens(k3)


# Long contexts


def stated_offsets(prompt: prompts.Prompt) -> list[int]:
    """Where the needles must be: the heading, the needles before, and the stated share of the filler."""
    lines = [len(n.line) + 1 for n in prompt.needles]
    if len(lines) == 1:  # no heading; the question begins with this sentence
        head, filler = 0, prompt.data.rindex(b"\nThe same block") - lines[0]
    else:  # depths 0 and 1 bound the filler
        head = prompt.needles[0].offset
        filler = prompt.needles[-1].offset - head - sum(lines[:-1])
    return [head + round(n.depth * filler) + sum(lines[:i]) for i, n in enumerate(prompt.needles)]


def flaws(prompt: prompts.Prompt, tokens: int) -> list[str]:
    """What is wrong with a long context; used on good ones and on mutants."""
    found = []
    if len(prompt.tokens(mini)) != tokens:
        found.append("length")
    for n, offset in zip(prompt.needles, stated_offsets(prompt), strict=True):
        line = n.line.encode() + b"\n"
        if prompt.data[n.offset : n.offset + len(line)] != line:
            found.append(f"line at {n.depth}")
        if prompt.data.count(n.answer.encode()) != 1 or n.answer not in n.line:
            found.append(f"answer at {n.depth}")
        if n.question.encode() not in prompt.data[prompt.needles[-1].offset :]:
            found.append(f"question at {n.depth}")
        if n.offset != offset:
            found.append(f"depth {n.depth}")
    return found


@pytest.mark.parametrize("tokens", [4096, 8191, 32768, 131072])
@pytest.mark.parametrize("kind", list(BUILDERS))
def test_long_contexts_are_exact(kind, tokens):
    prompt = long_context(kind, tokens, seed=3)
    assert flaws(prompt, tokens) == []
    assert prompt.id == f"long-{kind}-{tokens}-s3"
    assert long_context(kind, tokens, seed=3) == get(prompt.id) == prompt
    assert long_context(kind, tokens, seed=4).data != prompt.data


def test_the_flaws_are_found():
    good = long_context("retrieval", 8192)
    assert [n.depth for n in good.needles] == list(DEPTHS)
    needle = good.needles[3]
    late = dataclasses.replace(needle, offset=needle.offset + 1)
    deeper = dataclasses.replace(needle, depth=needle.depth + 0.001)
    for wrong, found in ((late, ["line at 0.4", "depth 0.4"]), (deeper, ["depth 0.401"])):
        needles = (*good.needles[:3], wrong, *good.needles[4:])
        assert flaws(dataclasses.replace(good, needles=needles), 8192) == found
    twice = good.data + needle.answer.encode()
    assert flaws(dataclasses.replace(good, data=twice), 8192) == ["length", "answer at 0.4"]


@pytest.mark.parametrize(
    "kind, digest",
    [("retrieval", "8e5b192603d5695f"), ("agent", "2e555cc56a45cbac"), ("repeat", "5bf21181be992675")],
)
def test_a_seed_means_the_same_bytes_everywhere(kind, digest):
    assert hashlib.sha256(long_context(kind, 16384, seed=7).data).hexdigest()[:16] == digest


def test_generated_text_is_neither_noise_nor_repetition():
    """Measured: varied text compresses to 0.20 of its size, repeated blocks to 0.01; random letters would to 0.75."""
    share = {kind: len(zlib.compress(p.data)) / len(p.data) for kind in BUILDERS for p in [long_context(kind, 65536)]}
    assert 0.12 < share["retrieval"] < 0.4 and 0.12 < share["agent"] < 0.4
    assert share["repeat"] < 0.03
    lines = long_context("retrieval", 65536).data.split(b"\n")
    assert len(set(lines)) > 0.8 * len(lines)


def test_no_rule_is_left_unexpanded():
    data = b"".join(long_context(kind, 131072, seed=s).data for kind in ("retrieval", "agent") for s in range(2))
    assert not [rule for rule in GRAMMAR if b"{%s}" % rule.encode() in data]


def test_fill_is_exact_for_every_size():
    for size in range(1, 40):
        piece, rest = _fill(iter(["a word ", "", "longword\n", "x" * 30, "\n", "y" * 40]), size)
        assert len(piece) == size and piece.endswith("\n")
        assert "y" * 40 not in rest or size > 30


@pytest.mark.parametrize(
    "args, says",
    [
        (("poem", 4096), "no long context of kind 'poem'; kinds are retrieval, agent, repeat"),
        (("agent", 4095), "4095 tokens; allowed are 4096..1048576"),
        (("agent", 1048577), "1048577 tokens"),
        (("agent", 4096.0), "4096.0 tokens"),
        (("agent", 4096, -1), "seed -1; allowed are whole numbers from 0"),
        (("agent", 4096, "a"), "seed a"),
    ],
)
def test_wrong_requests_give_one_line(args, says):
    with pytest.raises(PromptError) as error:
        long_context(*args)
    assert says in one_line(error)
