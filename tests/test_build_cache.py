"""The cache of builds: what comes from it is what was put there, and nothing else ever comes from it."""

import errno
import functools
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import async_kernels
import pytest
from typer.testing import CliRunner

import fast.lower as lowering
from equivalence.order import mutant
from equivalence.order.check import check_builds, check_kernels, prove
from fast import attn_res, build_cache
from fast.kernel import ARCHS, Asm, Kernel
from fast.lower import lower
from tools.cli import app

TARGETS = ARCHS[:2]


def kernel(module=attn_res, T: int = 1) -> Kernel:
    tensors, attrs = attn_res.attn_res_cases(batches=(T,))[-1]
    return module.attn_res.pick(**tensors, **attrs)[0]


@cache
def compiled() -> tuple:
    return tuple(lower(kernel(), TARGETS, fresh=True))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(build_cache, "changed", lambda: None)  # somebody may be editing while the tests run
    build_cache._opened.cache_clear()
    build_cache._say_once.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def filled(folder):
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    return folder


def here() -> Path:
    """The folder that holds, or would hold, the entries of `kernel`."""
    return build_cache._places(kernel(), TARGETS[:1])[1][TARGETS[0]].parent


def entries(folder) -> list:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def facts(build) -> tuple:
    return build.target, build.ptx, build.cubin, build.symbol, build.asm, build.launch, build.kernel


def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(lowering, "_traced", lambda *a: pytest.fail("compiled"))


def test_a_hit_is_the_build(folder, monkeypatch):
    first = [facts(b)[:-1] for b in compiled()]
    made = lower(kernel(), TARGETS, fresh=False)
    assert [b.kept for b in made] == [False, False] and len(entries(folder)) == 2
    nothing_is_compiled(monkeypatch)
    kept = lower(replace(kernel(), name="again"), TARGETS[::-1], fresh=False)[::-1]
    assert [b.kept for b in kept] == [True, True] and {b.kernel.name for b in kept} == {"again"}
    assert [facts(b)[:-1] for b in kept] == [facts(b)[:-1] for b in made] == first
    assert check_builds([replace(b, kernel=kernel()) for b in kept]) == check_builds(made)


def test_a_hit_is_checked_like_a_compiled_kernel(filled, monkeypatch):
    """The length of the token axis is no part of the code, but stated; what a fixed one is compared with is kept."""
    fixed = {b.target: replace(b, launch=b.launch | dict(grid=(*b.launch["grid"][:1], 1, 1))) for b in compiled()}
    build_cache.store(kernel(), fixed)
    nothing_is_compiled(monkeypatch)
    lower(kernel(), TARGETS, fresh=False)
    with pytest.raises(ValueError, match=r"states grid .* launches"):
        lower(replace(kernel(T=2), constants=kernel().constants), TARGETS, fresh=False)


def test_proofs_say_what_was_compiled(folder):
    twice = [kernel(), replace(kernel(), name="again")]  # one code
    proofs = [prove(twice, targets, fresh=False) for targets in (TARGETS[:1], TARGETS, TARGETS)]
    assert [(p.compiled, p.kept) for p in proofs] == [(1, 0), (1, 0), (0, 1)]
    again = prove(twice, TARGETS)
    assert (again.compiled, again.kept) == (1, 0)
    assert proofs[1].reports == proofs[2].reports == again.reports and len(again.reports) == 4


def test_the_command_says_what_was_compiled(folder):
    def order(*options) -> str:
        return CliRunner().invoke(app, ["order", "--kernel", "kda_decode-t1-h2", "--target", "sm_90a", *options]).output

    made = ("1 compiled now, 0 from the cache of builds", "0 compiled now, 1 from the cache of builds")
    assert made[0] in order("--fresh", "--scope", "all") and entries(folder) == []
    assert made[0] in order("--scope", "all") and made[1] in order("--scope", "all")
    assert made[0] in order("--fresh", "--scope", "all")
    assert "--fresh goes with neither --score nor --toolchain" in order("--fresh", "--score")


def test_every_byte_and_version_counts(tmp_path, monkeypatch):
    root = tmp_path / "root"
    for package in build_cache.SOURCES:
        shutil.copytree(build_cache.ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build_cache, "ROOT", root)
    cached = build_cache.sources, build_cache.contents, build_cache.imports, build_cache.facts, build_cache.digest

    def digest() -> str:
        for function in cached:
            function.cache_clear()
        return build_cache.digest(frozenset({"fast.attn_res"}))

    def patched(target, name: str, value) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return digest()

    def parts(**change):
        """The installed parts of the compiler, one of them changed."""
        made = [SimpleNamespace(name=d.name, version=d.version, read_text=d.read_text)
                for d in build_cache.distributions()]  # fmt: skip
        next(d for d in made if d.name == "nvidia-cutlass-dsl-libs-base").__dict__.update(change)
        return lambda: made

    try:
        first, seen = digest(), []
        assert digest() == first == patched(build_cache, "distributions", parts())
        for name in ("fast/device.py", "fast/attn_res.py", "fast/lower.py", "reference/config.py"):
            text = (root / name).read_bytes()
            (root / name).write_bytes(text[:-1] + b" ")
            seen.append(digest())
            (root / name).write_bytes(text)
            assert digest() == first
        for name in ("fast/kda.py", "fast/__init__.py", "reference/drafters.py"):
            (root / name).write_bytes((root / name).read_bytes() + b" ")
        assert digest() == first
        (root / "fast" / "device.py").rename(root / "fast" / "devices.py")
        seen.append(digest())
        (root / "fast" / "devices.py").rename(root / "fast" / "device.py")
        seen.append(patched(build_cache, "distributions", parts(version="4.8.2")))
        seen.append(patched(build_cache, "distributions", parts(read_text=lambda name: "other files")))
        seen.append(patched(build_cache, "_library", lambda: Path(__file__)))
        seen.append(patched(build_cache.sys, "version", "3.13.0"))
        monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90")
        seen.append(digest())
        assert len({first, *seen}) == 1 + len(seen)
    finally:
        for function in cached:
            function.cache_clear()


def test_another_digest_target_or_code_misses(filled, monkeypatch):
    assert build_cache.load(kernel(), ARCHS).keys() == set(TARGETS)
    assert build_cache.load(replace(kernel(), name="again"), ARCHS).keys() == set(TARGETS)
    assert build_cache.load(replace(kernel(), smem=16), ARCHS) == {}
    monkeypatch.setattr(build_cache, "digest", lambda named: "0" * 32)
    assert build_cache.load(kernel(), ARCHS) == {}


def test_only_who_asks_uses_it(filled, monkeypatch):
    """A process whose globals are not those of the files: by default it writes nothing and reads nothing."""
    before = {path: path.read_bytes() for path in entries(filled)}
    monkeypatch.setattr(attn_res, "EPS", 0.5)
    entry = kernel().entry
    wrapper = functools.wraps(entry)(lambda *a: entry(*a))
    assert lower(kernel(), TARGETS[:1])[0].ptx != compiled()[0].ptx
    monkeypatch.setattr(sys.modules[entry.__module__], entry.__qualname__, wrapper)
    monkeypatch.setattr(build_cache, "load", lambda *a: pytest.fail("read"))
    monkeypatch.setattr(build_cache, "store", lambda *a: pytest.fail("written"))
    assert not lower(kernel(T=2), TARGETS[:1])[0].kept
    assert prove([kernel(T=2)], TARGETS[:1]).kept == 0 and check_kernels([kernel(T=2)], TARGETS[:1])
    assert {path: path.read_bytes() for path in entries(filled)} == before


def test_mutants_and_kernels_of_tests_are_not_kept(folder):
    WAIT = "    cute.arch.griddepcontrol_wait()\n"
    broken = kernel(mutant(attn_res, [(WAIT, "    if token > 0:\n    " + WAIT)]))
    assert broken.entry.__module__.startswith("fast.") and broken.code != kernel().code
    for one in (broken, async_kernels.PEEK):
        assert not any(b.kept for _ in range(2) for b in lower(one, TARGETS[:1], fresh=False))
    assert entries(folder) == []


@dataclass(frozen=True)
class Config:
    """Like one of fast/, but what its methods do is not in the digest."""

    warps: int = 4


@pytest.mark.parametrize("change", [
    dict(constants=(Config(),)), dict(constants=(lambda: 1,)), dict(constants=([1],)),
    dict(entry=lambda *a: None), dict(entry=async_kernels.PEEK.entry),
])  # fmt: skip
def test_what_the_digest_does_not_cover_is_not_kept(folder, change):
    one = replace(kernel(), **change)
    build_cache.store(one, {b.target: b for b in compiled()})
    assert entries(folder) == [] and build_cache.load(one, TARGETS) == {}


def test_writers_of_one_entry_do_not_disturb_each_other(folder, capsys):
    """Two versions of an entry, long enough that a write is no single step; readers see one or the other, whole."""
    launch = compiled()[0].launch
    versions = [SimpleNamespace(ptx=c * 300_000, cubin=bytes([n]) * 500_000, launch=launch, asm=(Asm(c, c, True, ""),))
                for n, c in enumerate("ab")]  # fmt: skip
    build_cache.store(kernel(), {"sm_90a": versions[0]})

    def work(n: int) -> set:
        seen = set()
        for _ in range(20):
            if n < 4:
                build_cache.store(kernel(), {"sm_90a": versions[n % 2]})
            else:
                (entry,) = build_cache.load(kernel(), ["sm_90a"]).values()
                seen.add((entry.ptx, entry.cubin))
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = set().union(*pool.map(work, range(8)))
    assert seen and seen <= {(v.ptx, v.cubin) for v in versions}
    assert len(entries(folder)) == 1 and capsys.readouterr().err == ""


def test_source_that_changed_under_the_process(filled, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("K3_CACHE", str(filled))
    assert abs(time.time_ns() - build_cache.started()) < 24 * 3600e9
    monkeypatch.setattr(build_cache, "started", lambda: (build_cache.ROOT / "fast/device.py").stat().st_ctime_ns - 1)
    assert build_cache.load(kernel(), TARGETS) == {}
    told = capsys.readouterr().err
    assert "changed while this process ran: builds are neither read nor kept" in told and told.count("\n") == 1
    monkeypatch.setattr(build_cache, "started", lambda: max(p.stat().st_ctime_ns for p in build_cache.sources()))
    assert build_cache.load(kernel(), TARGETS).keys() == set(TARGETS)


def test_switched_off_and_misnamed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for off in ("off", "OFF"):
        monkeypatch.setenv("K3_CACHE", off)
        build_cache.store(kernel(), {b.target: b for b in compiled()})
        assert build_cache.load(kernel(), TARGETS) == {} and list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for wrong in ("", " ", "kept", "./kept", "Off", "~nobody-of-this-name/kept", str(tmp_path / "file")):
        monkeypatch.setenv("K3_CACHE", wrong)
        told = f"K3_CACHE is {wrong!r}; allowed are the absolute path of a folder and 'off'"
        with pytest.raises(ValueError) as error:
            build_cache.load(kernel(), TARGETS)
        assert str(error.value) == told
        assert told in CliRunner().invoke(app, ["order", "--kernel", "kda_decode-t1-h2"]).output.replace("\n", " ")


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("K3_CACHE", "~/kept")
    assert build_cache.folder() == tmp_path / "kept"


def test_a_folder_that_cannot_be_written_to_is_named(folder, capsys):
    folder.mkdir()
    here().write_text("no folder")
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    told = capsys.readouterr().err
    assert "cache of builds: cannot write to" in told and told.count("\n") == 1


@pytest.mark.parametrize("folders, left", [(1, 1), (4, 3), (6, 5), (24, 6)])
def test_old_states_of_the_sources_are_removed(folder, monkeypatch, folders, left):
    hour = 3600
    monkeypatch.setattr(build_cache, "FOLDERS", folders)
    for n, age in enumerate([hour / 2, 2 * hour, 3 * hour, 4 * hour, 5 * hour, 360 * hour]):
        made = folder / f"{n:032d}"
        made.mkdir(parents=True)
        (made / "entry.sm_90a").write_text("")
        os.utime(made, (time.time() - age,) * 2)
    (folder / "notes").mkdir()
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert {p.name for p in folder.iterdir()} == {here().name, "notes", *(f"{n:032d}" for n in range(left))}
    build_cache._opened.cache_clear()
    os.utime(here(), (0, 0))  # long unused, but the present one
    build_cache._opened.cache_clear()
    assert build_cache.load(kernel(), TARGETS).keys() == set(TARGETS)
    assert here().stat().st_mtime > time.time() - hour


@pytest.mark.parametrize("name", ["thesis" + "x" * 26, "A" * 32, "0" * 31, "0" * 33])
def test_folders_of_others_stay(folder, monkeypatch, name):
    monkeypatch.setattr(build_cache, "FOLDERS", 1)
    other, link = folder / name, folder / ("a" * 32)
    other.mkdir(parents=True)
    link.symlink_to(other)
    (folder / ("b" * 32)).write_text("no folder")
    (folder / ("c" * 32)).mkdir()  # ours
    for path in (other, link, folder / ("b" * 32), folder / ("c" * 32)):
        os.utime(path, (0, 0), follow_symlinks=False)
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert {p.name for p in folder.iterdir()} == {name, "a" * 32, "b" * 32, here().name}


@pytest.mark.parametrize("where", ["os.utime", "os.listdir", "Path.lstat", "shutil.rmtree"])
def test_a_folder_that_is_only_readable_or_vanishes(filled, where, monkeypatch):
    old, present = filled / ("0" * 32), here()
    old.mkdir()
    monkeypatch.setattr(build_cache, "FOLDERS", 1)
    os.utime(old, (0, 0))
    build_cache._opened.cache_clear()
    asked = []

    def refuse(path, *a, **k):
        asked.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    holder, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(Path if holder == "Path" else getattr(build_cache, holder), name, refuse)
        assert here() == present
    assert asked and old.exists() == (where != "os.utime")
    assert build_cache.load(kernel(), TARGETS).keys() == set(TARGETS)
