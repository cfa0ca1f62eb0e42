"""Entries of the cache of builds that are damaged: each is absent, named in one line, and made anew."""

import hashlib
import json
import os
import shutil

import pytest
from test_build_cache import TARGETS, compiled, entries, facts, filled, folder, kernel  # noqa: F401

from fast import build_cache
from fast.lower import lower


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: data[:64], lambda data: b"",
    lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], lambda data: data + b"\0",
    lambda data: bytes([data[0] ^ 1]) + data[1:],
])  # fmt: skip
def test_a_damaged_entry_is_absent(filled, damage, capsys):  # noqa: F811
    path, other = entries(filled)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert build_cache.load(kernel(), TARGETS).keys() == {other.suffix[1:]}
    told = capsys.readouterr().err
    assert told == f"cache of builds: {path} is damaged: its checksum differs; compiled anew\n"
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert path.read_bytes() == good and build_cache.load(kernel(), TARGETS).keys() == set(TARGETS)


def line(change) -> object:
    """Of an entry: its line of JSON, changed, with the rest as it was."""
    return lambda told, code: json.dumps(change(told)).encode() + b"\n" + code


def launch(**change):
    return line(lambda told: told | dict(launch=told["launch"] | change))


@pytest.mark.parametrize("made", [
    lambda told, code: b"", lambda told, code: b"{\n" + code, lambda told, code: b"\xff\n" + code,
    lambda told, code: b"[" * 100_000 + b"\n" + code,
    lambda told, code: json.dumps(told).encode() + b"\n" + b"\xff" + code[1:],
    line(lambda told: [told]), line(lambda told: told | dict(more=1)),
    *(line(lambda told, name=name: {k: v for k, v in told.items() if k != name}) for name in build_cache.PARTS),
    *(line(lambda told, name=name: told | {name: None}) for name in build_cache.PARTS),
    line(lambda told: told | dict(ptx=True)), line(lambda told: told | dict(ptx=10**9)),
    line(lambda told: told | dict(ptx=-1, cubin=told["ptx"] + told["cubin"] + 1)),
    line(lambda told: told | dict(ptx=told["ptx"] + told["cubin"] + 1, cubin=-1)),
    line(lambda told: told | dict(cubin=told["cubin"] - 1)),
    line(lambda told: told | dict(asm=["abcd"])), line(lambda told: told | dict(asm=[["a", "b", True]])),
    line(lambda told: told | dict(asm=[["a", "b", 1, "c"]])),
    line(lambda told: told | dict(launch={})), launch(more=1), launch(grid=None), launch(grid=[1, 1.0, 1]),
    launch(block=128), launch(smem=[0]), launch(cluster=2), launch(pdl=1),
])  # fmt: skip
def test_an_entry_of_another_form_is_damaged(filled, made, capsys):  # noqa: F811
    path, other = entries(filled)
    good = path.read_bytes()
    head, _, code = good.partition(b"\n")[2].partition(b"\n")
    body = made(json.loads(head), code)
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert build_cache.load(kernel(), TARGETS).keys() == {other.suffix[1:]}
    told = capsys.readouterr().err
    assert told.startswith(f"cache of builds: {path} is damaged: ") and told.endswith("; compiled anew\n")
    assert told.count("\n") == 1 and len(told) < len(str(path)) + 250
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert path.read_bytes() == good


def full(path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text("")


def linked(path) -> None:
    """To a folder, which stays."""
    full(path.parent.parent / "other")
    path.symlink_to(path.parent.parent / "other")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, full, linked, lambda path: os.symlink("/dev/zero", path)])
def test_an_entry_that_is_no_file_is_damaged(filled, make, capsys):  # noqa: F811
    path, other = entries(filled)
    path.unlink()
    make(path)
    assert build_cache.load(kernel(), TARGETS).keys() == {other.suffix[1:]}
    assert capsys.readouterr().err == f"cache of builds: {path} is damaged: it is no regular file; compiled anew\n"
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert build_cache.load(kernel(), TARGETS).keys() == set(TARGETS) and capsys.readouterr().err == ""
    assert not path.is_symlink() and (make is not linked or (filled / "other" / "below" / "file").exists())


def test_a_damaged_entry_is_compiled_anew(filled):  # noqa: F811
    for path in entries(filled):
        path.write_bytes(path.read_bytes()[:-1])
    made = lower(kernel(), TARGETS, fresh=False)
    assert [b.kept for b in made] == [False, False] and [facts(b) for b in made] == [facts(b) for b in compiled()]
    assert [b.kept for b in lower(kernel(), TARGETS, fresh=False)] == [True, True]


def test_an_entry_in_the_wrong_place_is_absent(filled, capsys):  # noqa: F811
    path, other = entries(filled)
    shutil.copy(other, path)
    assert build_cache.load(kernel(), TARGETS).keys() == {other.suffix[1:]}
    assert capsys.readouterr().err == f"cache of builds: {path} is the entry of another kernel; compiled anew\n"
