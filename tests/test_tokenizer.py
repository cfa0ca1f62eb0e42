"""Prompts as tokens: bytes, a tiktoken-style file beside the weights, tokenizer.json, and what is refused."""

import base64
import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
from stand_ins import small

from golden.prompts import load
from tools.tokenizer import Ranked, TokenizerError, tokenizer

worded = replace(small, name="worded", vocab=400, bos=390, eos=391, pad=392)
WORDS = [b"he", b"ll", b"llo", b"hello", b" hello", "é".encode(), b"12", b"  "]


def ranked(folder, words=WORDS, skip=()):
    tokens = [bytes([b]) for b in range(256) if b not in skip] + words
    lines = [f"{base64.b64encode(t).decode()} {rank}" for rank, t in enumerate(tokens)]
    file = folder / "tiktoken.model"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_bytes_need_no_file(tmp_path):
    encode, name = tokenizer(tmp_path, small)
    assert encode(b"a\xff") == [256, 97, 255] and name == "bytes"


def test_pairs_of_lowest_rank_are_joined_first(tmp_path):
    ranked(tmp_path)
    encode, name = tokenizer(tmp_path, worded)
    assert name == "tiktoken.model"
    assert encode(b"hello hello") == [390, 256 + 3, 256 + 4]
    assert encode(b"hell") == [390, 256, 257]  # "he", "ll": "hello" is a token, "hell" is none
    assert encode(b"llllo") == [390, 257, 258]  # the left pair of equal rank goes first
    assert encode("né123".encode()) == [390, 110, 256 + 5, 256 + 6, ord("3")]


def test_long_pieces_take_no_longer_by_the_byte(tmp_path):
    """A run of one letter is one piece; a search over the whole of it for each join would take minutes."""
    made = Ranked(ranked(tmp_path, [b"a" * 2**k for k in range(1, 9)]))
    start = time.process_time()
    assert made.encode(b"a" * 100_003) == [256 + 7] * 390 + [256 + 7 - 1, 256 + 4, 256 + 0, 97]
    assert time.process_time() - start < 10


def test_every_prompt_keeps_its_bytes(tmp_path):
    made = Ranked(ranked(tmp_path))
    back = {rank: token for token, rank in made.ranks.items()}
    for prompt in load():
        assert b"".join(back[i] for i in made.encode(prompt.data)) == prompt.data, prompt.id


@pytest.mark.parametrize("content, text", [
    ("aGU= 1 2\n", "line 1 is no base64 token and rank"), ("!! 1\n", "line 1 is no base64 token and rank"),
    ("aGU= -7\n", "line 1 is no base64 token and rank"), ("aGU= 0\naGU= 1\n", "line 2 repeats a token"),
    ("aGU= 0\n", "byte 0x00 has no token"), ("é\n", "no tiktoken file"),
])  # fmt: skip
def test_broken_files_are_one_line(content, text, tmp_path):
    (tmp_path / "k3.tiktoken").write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=text) as error:
        tokenizer(tmp_path, worded)
    assert "\n" not in str(error.value) and "k3.tiktoken" in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model", "k3.tiktoken"])
@pytest.mark.parametrize("make, text", [(os.mkfifo, "is no regular file"), (os.mkdir, "is a folder")])
def test_what_is_no_file_is_refused_at_once(name, make, text, tmp_path):
    """A named pipe would be waited for; beside it lies a file that would do."""

    def late(*_):
        raise TimeoutError("still reading")

    (tmp_path / "z.tiktoken").write_bytes(ranked(tmp_path).read_bytes())
    (tmp_path / "tiktoken.model").unlink()
    make(tmp_path / name)
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    try:
        with pytest.raises(TokenizerError, match=f"{name}: {text}; allowed are files") as error:
            tokenizer(tmp_path, worded)
        assert "\n" not in str(error.value)
        assert tokenizer(tmp_path, small)[1] == "bytes"  # which needs none
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(TokenizerError, match=r"no tokenizer beside the weights; worded has 400 tokens and needs"):
        tokenizer(tmp_path, worded)
    monkeypatch.setattr("tools.tokenizer.find_spec", lambda name: None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="needs the package tokenizers, which is not installed"):
        tokenizer(tmp_path, worded)
    ranked(tmp_path)  # a tiktoken file beside it will do
    assert tokenizer(tmp_path, worded)[1] == "tiktoken.model"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    ranked(tmp_path)
    encode, _ = tokenizer(tmp_path, replace(worded, vocab=258, bos=0))
    assert encode(b"he") == [0, 256]
    with pytest.raises(TokenizerError, match=r"gives token 259; allowed are 0\.\.257 of worded"):
        encode(b"hello")


def test_tokenizer_json(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    vocab = {"h": 0, "i": 1, "hi": 2}
    model = dict(type="BPE", vocab=vocab, merges=[["h", "i"]])
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(version="1.0", added_tokens=[], model=model)))
    encode, name = tokenizer(tmp_path, worded)
    assert encode(b"hih") == [390, 2, 0] and name == "tokenizer.json" and "tokenizers" in sys.modules
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        tokenizer(tmp_path, worded)
