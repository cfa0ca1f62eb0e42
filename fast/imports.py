"""Which sources can decide what a module does: those it imports and those they import, found by reading, not running.

All import statements count, also those inside functions. The __init__ of a package runs before its submodules, but a
module computes with what it imports itself: so __init__ counts only where a name may be taken from the package, as by
`from fast import X`, by `from . import x` where x is no submodule or __init__ binds it, and by `import fast.x`, which
counts as all of fast/. The other way into a module is to change what it holds from outside, so a source that is seen to
do so (it assigns to, or calls a method like `update` of, something it imported) counts in every closure.

Not seen are changes through another name (`t = TUNED; t[0] = 1`) or by a function that is called (the registries of
reference.stage, which no kernel reads while it is traced).
"""

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

# Ways to get at a module without an import statement. One string, for this source is read as well.
DYNAMIC = frozenset("__import__ import_module exec_module load_module modules exec eval runpy pkgutil imp".split())
MUTATORS = frozenset(
    "add append clear discard extend insert pop popitem remove reverse setdefault sort update "
    "appendleft extendleft popleft difference_update intersection_update symmetric_difference_update move_to_end "
    "__setattr__ __delattr__ __setitem__ __delitem__ __ior__ __iadd__".split()
)


class Unresolved(Exception):
    """A source whose imports cannot all be found by reading it; says where and why."""


@dataclass(frozen=True)
class Import:
    """`from module import name as local`, after `level` dots; name is None for `import module`. named: what has to be a
    module."""

    line: int
    level: int
    module: str
    name: str | None
    local: str
    named: str


@dataclass(frozen=True)
class Reading:
    """Of a source, whatever its name. binds: its functions, classes and variables. changes: variables whose attributes
    or items it changes. dynamic: (line, word) that may import anything, or None."""

    imports: tuple[Import, ...]
    binds: frozenset[str]
    changes: frozenset[str]
    dynamic: tuple[int, str] | None


@dataclass(frozen=True)
class Source:
    """Of a module. needs: the modules that it imports. why_not: why this is unknown. meddles: changes other modules."""

    path: str
    needs: frozenset[str] = frozenset()
    why_not: str = ""
    meddles: bool = False


class Imports:
    """Of all sources of some packages."""

    def __init__(self, files: Mapping[str, bytes]):
        """files: the contents by path, as "fast/kda.py"."""
        self._paths: dict[str, str] = {}  # by the name of the module
        self._readings: dict[str, Reading] = {}
        self._sources: dict[str, Source] = {}
        twice = set()
        for path in files:
            name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            if self._paths.setdefault(name, path) != path:
                twice.add(name)
        self._packages = {name.partition(".")[0] for name in self._paths}
        for name, path in self._paths.items():
            try:
                self._readings[name] = read(files[path])
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # it cannot run, nor meddle
                self._sources[name] = Source(path, why_not=f"{path} does not parse: {type(error).__name__}")
        for name in twice:
            self._sources[name] = Source(self._paths[name], why_not=f"{name} has two sources", meddles=True)
        for name in self._readings.keys() - twice:
            self._sources[name] = self._resolved(name, self._readings[name])

    def closure(self, modules: Iterable[str]) -> set[str]:
        """The paths of all sources that can decide what these modules do. Raises Unresolved if that is unknown."""
        found: set[str] = set()
        left = [*modules, *(name for name, source in self._sources.items() if source.meddles)]
        while left:
            if (name := left.pop()) not in found:
                self._exists(name)
                if why := self._sources[name].why_not:
                    raise Unresolved(why)
                found.add(name)
                left += self._sources[name].needs
        return {self._paths[name] for name in found}

    def _resolved(self, name: str, reading: Reading) -> Source:
        path, bound = self._paths[name], {}
        package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
        line, word = reading.dynamic or (0, "")
        try:
            if word:
                raise Unresolved(f"{word!r} may import anything")
            for one in reading.imports:
                line = one.line
                bound.setdefault(one.local, set()).update(self._imported(one, package))
        except Unresolved as error:
            return Source(path, why_not=f"{path}:{line}: {error}", meddles=True)
        return Source(path, frozenset().union(*bound.values()), meddles=not reading.changes.isdisjoint(bound))

    def _imported(self, one: Import, package: str) -> set[str]:
        """The modules of these packages that decide what an import gives: empty for one from elsewhere."""
        base = _absolute(one, package)
        if base.partition(".")[0] not in self._packages:
            return set()
        self._exists(one.named or base)
        if one.name is None:
            return self._under(base.partition(".")[0])
        if one.name == "*":
            raise Unresolved("a star may import anything")
        self._exists(base)
        found = self._under(f"{base}.{one.name}")
        return found if found and not self._binds(base, one.name) else found | {base}

    def _under(self, name: str) -> set[str]:
        """The module, and all modules of it if it is a package: they can be reached through it."""
        return {n for n in self._paths if n == name or n.startswith(f"{name}.")}

    def _exists(self, name: str) -> None:
        if name not in self._paths:
            raise Unresolved(f"there is no source of {name}")

    def _binds(self, package: str, name: str) -> bool:
        """Whether a package's __init__ may give a submodule's name to something else."""
        if (reading := self._readings.get(package)) is None or reading.dynamic:
            return True
        told = {i.local for i in reading.imports if _absolute(i, package) != package or i.name != i.local}
        return name in told | reading.binds or any(i.name == "*" for i in reading.imports)


@cache
def read(data: bytes) -> Reading:
    """Read a source. Raises what `ast.parse` raises."""
    imports, binds, changes, dynamic = [], set(), set(), None
    for node in ast.walk(ast.parse(data)):
        imports += _imports(node)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            binds.add(node.id)
        elif not isinstance(node, ast.alias):
            binds.add(getattr(node, "name", None))  # of a function, a class, or what is caught or matched
        changes.update(_changed(node))
        if dynamic is None and (word := next((w for w in _words(node) if w in DYNAMIC), None)):
            dynamic = getattr(node, "lineno", 1), word
    return Reading(tuple(imports), frozenset(binds - {None}), frozenset(changes), dynamic)


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(node.lineno, node.level, node.module or "", alias.name, alias.asname or alias.name, "")
    if isinstance(node, ast.Import):
        for alias in node.names:
            parent, _, last = alias.name.rpartition(".")
            if alias.asname and parent:  # takes `last` from its package
                yield Import(node.lineno, 0, parent, last, alias.asname, alias.name)
            else:
                local = alias.asname or alias.name.partition(".")[0]
                yield Import(node.lineno, 0, alias.name, None, local, alias.name)


def _absolute(one: Import, package: str) -> str:
    """The module that is named, as seen from a package. Raises Unresolved outside of it."""
    parts = package.split(".")
    if one.level > len(parts):
        raise Unresolved("a relative import leaves the package")
    return ".".join([*(parts[: len(parts) - one.level + 1] if one.level else ()), *filter(None, [one.module])])


def _words(node: ast.AST) -> list[str]:
    """The names that stand in a node itself, also in quotes; those of variables only if they are builtins."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        named = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return [word for name in named for word in name.split(".")]
    if isinstance(node, ast.Name):
        return [node.id] if hasattr(builtins, node.id) else []
    return [word for word in (getattr(node, "attr", None), getattr(node, "value", None)) if isinstance(word, str)]


def _changed(node: ast.AST) -> Iterator[str]:
    """The variables whose values, attributes or items a node changes."""
    places: list[ast.AST | None] = []
    if isinstance(node, ast.AugAssign):
        places = [node.target]
    elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        places = [node]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        places = [node.func.value]
        if isinstance(node.func.value, ast.Name) and hasattr(builtins, node.func.value.id):  # as dict.update(table, ..)
            places += node.args[:1]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        places = node.args[:1]
    for at in places:
        while isinstance(at, ast.Attribute | ast.Subscript | ast.Call):
            at = at.value if not isinstance(at, ast.Call) else at.args[0] if at.args else None  # a call: vars(module)
        if isinstance(at, ast.Name):
            yield at.id
