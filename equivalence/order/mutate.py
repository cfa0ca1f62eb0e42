"""Break a kernel on purpose: import a copy of its module with a few lines of text changed.

Kernels have to live in a file, so the copy is written to a temporary folder that lasts as long as the process.
"""

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from reference.stage import TWINS


class EditError(ValueError):
    """The old text of an edit does not occur exactly once."""


def edited(source: str, edits: Sequence[tuple[str, str]], where: str) -> str:
    """The source with every (old, new) applied in turn. Raises EditError unless each old text occurs exactly once."""
    for old, new in edits:
        if (count := source.count(old)) != 1:
            raise EditError(f"{where}: {old.strip()!r} occurs {count} times; an edit needs text that occurs once")
        source = source.replace(old, new)
    return source


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mutants-")


@contextmanager
def _twins_aside() -> Iterator[None]:
    """The copy registers its twins again; keep them out of the real registry."""
    kept = dict(TWINS)
    TWINS.clear()
    try:
        yield
    finally:
        TWINS.clear()
        TWINS.update(kept)


def mutant(module: ModuleType, edits: Sequence[tuple[str, str]]) -> ModuleType:
    """A copy of an imported module with text edits, imported under a name of its own in the same package.

    Raises EditError for an edit that does not fit, and whatever the changed module raises.
    """
    path = Path(module.__file__)
    source = edited(path.read_text(), edits, path.name)
    name = f"{path.stem}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    full = f"{module.__package__}.{name}" if module.__package__ else name
    if full not in sys.modules:
        copy = Path(_folder().name) / f"{name}.py"
        copy.write_text(source)
        spec = importlib.util.spec_from_file_location(full, copy)
        made = importlib.util.module_from_spec(spec)
        sys.modules[full] = made
        try:
            with _twins_aside():
                spec.loader.exec_module(made)
        except BaseException:
            del sys.modules[full]
            raise
    return sys.modules[full]
