"""Which sources are in the key of a kernel's builds: all that can decide its code, and those alone."""

import sys
from functools import cache
from pathlib import Path

import pytest
from test_build_cache import ARCHS, TARGETS, compiled, entries, filled, folder, here, kernel  # noqa: F401

from fast import build_cache, forms, production_kernels
from fast.imports import Imports, Unresolved
from fast.lower import lower

EVERY = {"fast/lower.py", "fast/kernel.py", "fast/build_cache.py", "fast/imports.py", "fast/device.py",
         "reference/stage.py", "reference/numerics.py"}  # fmt: skip
FAMILIES = {
    "kda": {"fast/kda.py", "reference/kda.py", "reference/linear.py", "reference/config.py"},
    "attn_res": {"fast/attn_res.py", "reference/attn_res.py", "reference/config.py", "reference/plan.py",
                 "reference/rank_plan.py", "reference/moe.py", "reference/kda_prefill.py"},
    "linear_fma": {"fast/linear_fma.py"},
    "linear_mma": {"fast/linear_mma.py"},
    "linear_direct": {"fast/linear_direct.py", "fast/linear_mma.py"},
    "linear_wgmma": {"fast/linear_wgmma.py", "fast/linear_mma.py"},
}  # fmt: skip
NEVER = {"fast/__init__.py", "fast/decoder.py", "fast/selection.py", "fast/linear.py", "fast/linear_tuned.py",
         "reference/__init__.py", "reference/decoder.py", "reference/draft.py"}  # fmt: skip
OWN = {f"fast/{family}.py" for family in FAMILIES}


@cache
def families() -> dict:
    """A kernel of each module that has an entry."""
    return {k.entry.__module__.removeprefix("fast."): k for k in reversed(forms(production_kernels((1, 4, 16, 64))))}


def decided_by(kernel) -> set[str]:
    named: set[str] = set()
    build_cache.text(kernel.code, named)
    return build_cache.deciding(named)


def test_every_family_is_listed():
    assert families().keys() == FAMILIES.keys()
    digests = {build_cache.digest(frozenset({f"fast.{family}"})) for family in FAMILIES}
    assert len(digests) == len(FAMILIES) and 4 * len(FAMILIES) <= build_cache.FOLDERS


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_that_decide_a_family(family):
    found = decided_by(families()[family])
    assert found >= EVERY | FAMILIES[family]
    assert not found & (NEVER | OWN - FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_while_a_kernel_is_traced_is_in_its_closure(family):
    """Seen by Python's profiler, which knows nothing of import statements."""
    ran, root = set(), f"{build_cache.ROOT}/"

    def note(frame, event, arg) -> None:
        ran.add(frame.f_code.co_filename)

    one = families()[family]
    sys.setprofile(note)
    try:
        lower(one, one.archs[:1])
    finally:
        sys.setprofile(None)
    ours = {str(Path(name).resolve()).removeprefix(root) for name in ran if name.startswith(root)}
    ours = {name for name in ours if name.startswith(("fast/", "reference/"))}
    assert {f"fast/{family}.py", "fast/lower.py", "fast/kernel.py"} <= ours <= decided_by(one)


@pytest.fixture
def edit(monkeypatch):
    """Append to sources, as far as the cache of builds can see."""
    cached, now = (build_cache.imports, build_cache.digest), dict(build_cache.contents())

    def forget() -> None:
        for function in cached:
            function.cache_clear()

    def change(**added: str) -> None:
        now.update({path: now.get(path, b"") + text.encode() for path, text in added.items()})
        forget()

    monkeypatch.setattr(build_cache, "contents", lambda: now)
    forget()
    yield change
    monkeypatch.undo()
    forget()


def hits() -> bool:
    return build_cache.load(kernel(), ARCHS).keys() == set(TARGETS)


OUTSIDE = ("fast/kda.py", "fast/linear_mma.py", "fast/__init__.py", "reference/drafters.py", "reference/new.py")


@pytest.mark.parametrize("path", OUTSIDE)
def test_an_edit_outside_the_closure_hits(filled, edit, path):  # noqa: F811
    edit(**{path: "# a comment\n"})
    assert hits()


@pytest.mark.parametrize("path", sorted(EVERY | FAMILIES["attn_res"]))
def test_an_edit_inside_the_closure_misses(filled, edit, path):  # noqa: F811
    assert hits()
    edit(**{path: "\n"})
    assert build_cache.load(kernel(), ARCHS) == {}
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    assert hits() and len(list(filled.iterdir())) == 2


@pytest.mark.parametrize("statement", [
    "from . import draft_config\n", "def f():\n    from .draft_config import fits\n",
    "if False:\n    import reference.draft_config as other\n", "from reference.draft_config import fits as f\n",
])  # fmt: skip
def test_a_new_import_in_a_leaf_is_followed(filled, edit, statement):  # noqa: F811
    edit(**{"reference/mxfp4.py": statement})  # a leaf of plan.py
    assert "reference/draft_config.py" in decided_by(kernel()) and not hits()
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    edit(**{"reference/draft_config.py": "# a comment\n"})
    assert not hits()


@pytest.mark.parametrize("path, text", [
    ("reference/mxfp4.py", "from .draft_config import *\n"), ("reference/mxfp4.py", "x = __import__('json')\n"),
    ("reference/mxfp4.py", "(\n"), ("fast/device.py", "from .gone import x\n"),
    ("fast/decoder.py", "from importlib import import_module\n"), ("fast/device/__init__.py", ""),
])  # fmt: skip
def test_without_an_answer_all_sources_count(filled, edit, capsys, path, text):  # noqa: F811
    edit(**{path: text})
    build_cache._say_once.cache_clear()
    assert decided_by(kernel()) == set(build_cache.contents()) and not hits()
    told = capsys.readouterr().err
    assert path.partition(".")[0].split("/")[1] in told and told.count("\n") == 1
    assert told.endswith(": every source of fast and reference counts\n")
    build_cache.store(kernel(), {b.target: b for b in compiled()})
    edit(**{"fast/kda.py": "# a comment\n"})
    assert not hits()


def test_a_source_that_does_not_parse_elsewhere_decides_nothing(filled, edit):  # noqa: F811
    edit(**{"reference/drafters.py": "(\n"})
    assert hits()


@pytest.mark.parametrize("statement", [
    "from . import device\ndevice.WARP = 16\n", "from .device import span as s\ns.a[0].b += 1\n",
    "import fast.device as d\ndef f():\n    setattr(d, 'WARP', 1)\n", "from . import device\ndel device.WARP\n",
    "from .device import TABLE\nTABLE |= {1: 2}\n", "from . import device\nvars(device)['WARP'] = 4\n",
    "from .device import TABLE\ndict.update(TABLE, {1: 2})\n",
    "from . import device\nobject.__setattr__(device, 'WARP', 4)\n",
    "from .device import TABLE\nTABLE.update({1: 2})\n", "from . import device\ndevice.TABLE.append(1)\n",
])  # fmt: skip
def test_who_changes_another_module_counts_everywhere(filled, edit, statement):  # noqa: F811
    edit(**{"fast/selection.py": statement})
    assert decided_by(kernel()) >= {"fast/selection.py", "reference/plan.py"} and not hits()


TREE = {
    "fast/__init__.py": b"from . import a, b\nfrom .c import made, made as d\n",
    **{f"fast/{name}.py": b"" for name in "abcdefg"},
    "fast/sub/__init__.py": b"", "fast/sub/deep.py": b"from ..g import x", "fast/sub/other.py": b"",
    "reference/__init__.py": b"", "reference/x.py": b"from . import y", "reference/y.py": b"from .x import z",
}  # fmt: skip
ALL = {"__init__", *"abcdefg", "sub/__init__", "sub/deep", "sub/other"}
INIT = {"__init__", "a", "b", "c"}  # what the package's own closure has of fast/, before what is asked for


@pytest.mark.parametrize("source, found", [
    ("import torch, fastest\nfrom torch import fast", set()),
    ("from . import a", {"a"}), ("from .a import x", {"a"}), ("from fast.a import x", {"a"}),
    ("from fast import a", {"a"}),
    ("from .a import (x,\n y)\nclass C:\n  def f(self):\n    from .b import z", {"a", "b"}),
    ("import fast.a as x", {"a"}),
    ("from . import x", INIT), ("from fast import made, g", INIT | {"g"}),
    ("from . import d", INIT | {"d"}),  # the package has another thing of this name
    ("from .sub.deep import x", {"sub/deep", "g"}), ("from .sub import other", {"sub/other"}),
    ("from .sub import x", {"sub/__init__"}), ("import fast.sub.deep as x", {"sub/deep", "g"}),
    ("from . import sub", {"sub/__init__", "sub/deep", "sub/other", "g"}),  # all can be reached through it
    ("import fast.a", ALL), ("import fast", ALL), ("import fast as x", ALL),
])  # fmt: skip
def test_forms_of_imports(source, found):
    assert Imports(TREE | {"fast/e.py": source.encode()}).closure(["fast.e"]) == {f"fast/{n}.py" for n in found | {"e"}}


def test_relative_imports_from_a_package_below_and_circles():
    tree = TREE | {
        "fast/sub/__init__.py": b"from .. import a\nfrom .other import x",
        "fast/sub/other.py": b"from . import q",
    }
    assert Imports(tree).closure(["fast.sub.other"]) == {f"fast/{n}.py" for n in ("a", "sub/__init__", "sub/other")}
    assert Imports(tree).closure(["reference.y"]) == {"reference/x.py", "reference/y.py"}


@pytest.mark.parametrize("source, why", [
    (b"from .a import *", "fast/e.py:1: a star may import anything"), (b"from torch import *", None),
    (b"from .sub import *", "a star may import anything"),
    (b"x = 1\ny = exec", "fast/e.py:2: 'exec' may import anything"), (b"import runpy", "'runpy' may import anything"),
    (b"import sys\nsys.modules", "'modules' may"), (b"from sys import modules as m", "'modules' may"),
    (b"import importlib as i\ni.import_module", "'import_module' may"),
    (b"f = getattr(i, 'import_module')", "'import_module' may"), (b"import fast.gone as x", "no source of fast.gone"),
    (b"from ... import x", "fast/e.py:1: a relative import leaves the package"),
    (b"from .gone import x", "e.py:1: there is no source of fast.gone"), (b"import fast.gone", "of fast.gone"),
    (b"(", "fast/e.py does not parse: SyntaxError"), (b"\0", "does not parse"), (b"\xff", "does not parse"),
    (b"(" * 10_000, "does not parse"), (b"modules = [1]; modules.x", None),
])  # fmt: skip
def test_what_cannot_be_told(source, why):
    found = Imports(TREE | {"fast/e.py": source})
    if why is None:
        assert found.closure(["fast.e"]) == {"fast/e.py"}
        return
    with pytest.raises(Unresolved) as error:
        found.closure(["fast.e"])
    assert why in str(error.value)
    for start in ("fast.gone", "torch"):
        with pytest.raises(Unresolved):
            Imports(TREE).closure([start])
