"""Read PTX: one entry function to a Program.

Understood: labels and registers scoped by the braces of inline assembly, vector operands, guards, `bra`, `brx.idx`,
every load, store, atomic, asynchronous copy and prefetch of PTX ISA 9. Any other instruction with a memory operand, and
any call, becomes a doubt that the rules report.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import PurePath

from .forms import Form
from .program import LOAD, LOCAL_MEMORY, Access, Inst, Literal, Move, Operand, Program, Unreadable, link, split
from .values import LOADED, LOCAL, NUMBER, SHARED, UNKNOWN, Value, origin, parameter

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_PIECE = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<loc>\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*)"
    r"|(?P<label>[\w$]+):(?!:)|(?P<inst>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_NAME = re.compile(r"(?<![\w$.%])[%$A-Za-z_][\w$]*")
NAMES = re.compile(f"({_NAME.pattern})")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_FLOAT = re.compile(r"(?:b?f16(?:x2)?|tf32|f32(?:x2)?|f64|e\dm\d(?:x\d)?)$")
_NO_RESULT = {"bar", "barrier", "bra", "brx", "nanosleep", "call"}  # with a register first that is only read
# Instructions with a memory operand that never reach global memory.
_ON_CHIP = {
    "mbarrier", "ldmatrix", "stmatrix", "mapa", "getctarank", "isspacep", "tcgen05", "wgmma", "clusterlaunchcontrol",
    "fence", "applypriority", "prefetch", "st", "tensormap",
}  # fmt: skip
_SPACES = ("global", "shared", "local", "param", "const")


@dataclass
class _Scope:
    suffix: str
    registers: dict[str, str]  # declared types by name
    numbered: dict[str, str]  # by the prefix of numbered registers
    memory: dict[str, int]  # variables in shared or local memory, by origin
    known: dict[str, Operand | None]  # what names were found to be, seen from here


class Reader:
    """Reads one function, statement by statement; a subclass may keep more of each than the checks need."""

    def __init__(self, parameters: dict[str, Value], module: dict[str, int], files: dict[str, str]):
        self.parameters, self.files = parameters, files
        self.scopes = [_Scope("", {}, {}, module, {})]
        self.types: dict[str, str] = {}  # of the registers met so far, as declared: "b32", "pred"
        self.opened = 0
        self.insts: list[Inst] = []
        self.labels: dict[str, int] = {}
        self.jumps: list[tuple[Inst, str, list[str]]] = []  # instruction, label, suffixes of the scopes it can see
        self.tables: dict[str, list[str]] = {}
        self.source = ""

    def open(self) -> None:
        self.opened += 1
        self.scopes.append(_Scope(f"@{self.opened}", {}, {}, {}, {}))

    def close(self) -> None:
        self.scopes.pop()

    def operand(self, name: str) -> Operand | None:
        """A register by its unique name, the address of a variable or parameter, or None for anything else."""
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            if kind := scope.registers.get(name) or scope.numbered.get(prefix):
                self.types[name + scope.suffix] = kind
                return name + scope.suffix
            if name in scope.memory:
                return origin(scope.memory[name])
        return self.parameters.get(name)

    def declare(self, text: str) -> None:
        words, scope = text.split(), self.scopes[-1]
        scope.known.clear()
        if words[0] == ".reg":
            for item in text.split(None, 2)[2].split(","):
                name, _, count = item.strip().partition("<")
                kind = words[1].lstrip(".")
                (scope.numbered if count else scope.registers)[name] = kind
                if count and name[-1:].isdigit():  # no prefix that `operand` would find
                    scope.registers |= {f"{name}{n}": kind for n in ("", *range(int(count.rstrip(">"))))}
        elif words[0] in (".shared", ".local"):
            name = re.search(r"([\w$]+)\s*(?:\[[^]]*\])?$", text)[1]
            scope.memory[name] = SHARED if words[0] == ".shared" else LOCAL

    def statement(self, text: str, line: int) -> None:
        text = " ".join(text.split())
        if text.startswith(".branchtargets"):
            table = next(reversed(self.labels))
            self.tables[table] = re.findall(r"[\w$]+", text.removeprefix(".branchtargets"))
        elif text.startswith("."):
            self.declare(text)
        elif text:
            self.insts.append(self.instruction(text, line))

    def instruction(self, text: str, line: int) -> Inst:
        guard, op, rest = parted(text)
        pieces, registers, known = NAMES.split(guard + rest), [], self.scopes[-1].known
        for i in range(1, len(pieces), 2):
            name = pieces[i]
            if name not in known:
                known[name] = self.operand(name)
            if (found := known[name]) is not None:
                pieces[i] = found
                if found.__class__ is str:
                    registers.append(found)
                    pieces[i] = None
        inst = form(op, bool(guard), tuple(pieces)).fill(registers, line, text, self.source)
        self.jump(inst, op, rest)
        return inst

    def jump(self, inst: Inst, op: str, rest: str) -> None:
        """If it is one, its label is to be found once all are known. rest: the operands."""
        if _parts(op)[0] in ("bra", "brx"):
            self.jumps.append((inst, split(rest)[-1], [s.suffix for s in self.scopes]))


def parted(text: str) -> tuple[str, str, str]:
    """An instruction's guard with the blanks behind it, its name and its operands."""
    guard, body = "", text
    if m := _GUARD.match(text):
        guard, body = m[0], text[m.end() :]
    op, _, rest = body.partition(" ")
    return guard, op, rest


class _Names:
    """What the names in an operand are. Registers stand for any others, by their order in the text."""

    def __init__(self, known: dict[str, Operand]):
        self.known = known
        self.operand = known.get

    def operands(self, text: str) -> tuple[Operand, ...]:
        return tuple(o for o in map(self.operand, _NAME.findall(text)) if o is not None)

    def registers(self, text: str) -> tuple[str, ...]:
        return tuple(o for o in self.operands(text) if isinstance(o, str))


@lru_cache(1 << 15)
def form(op: str, guarded: bool, pieces: tuple) -> Form:
    """pieces: the guard and the operands; every second one a name: a value, None for a register, or text."""
    known, stand_ins, texts = {}, {}, list(pieces)
    for i in range(1, len(pieces), 2):
        if not isinstance(pieces[i], str):
            texts[i] = name = f"%{i}"
            known[name] = name if pieces[i] is None else pieces[i]
            if pieces[i] is None:
                stand_ins[name] = len(stand_ins)
    names, body, guard = _Names(known), "".join(texts), None
    if guarded:
        m = _GUARD.match(body)
        guard, body = (names.registers(m[2])[0], not m[1]), body[m.end() :]
    return Form(_instruction(names, op, split(body), guard), stand_ins)


def _instruction(names: _Names, op: str, operands: list[str], guard: Literal | None) -> Inst:
    parts = _parts(op)
    inst = Inst(0, op, f"{op} {', '.join(operands)}", "", guard)
    if parts[0] in ("bra", "brx"):
        inst.falls = parts[0] == "bra" and guard is not None
    elif parts[0] in ("ret", "exit", "trap"):
        inst.falls, inst.exits = guard is not None, parts[0] != "trap"
    elif parts[0] == "call":
        inst.doubt = "the call is not followed"
    _memory(names, inst, parts, operands)
    inst.sync = _sync(parts, inst.access.order if inst.access else "")
    inst.chip = _chip(parts)
    result = bool(operands) and not operands[0].startswith("[") and (parts[0] not in _NO_RESULT or "red" in parts)
    inst.reads = tuple(r for o in operands[result:] for r in names.registers(o))
    if result:
        inst.writes = names.registers(operands[0])
        inst.moves = _moves(names, inst, parts, operands)
    if _space(parts) in ("shared", "local") and parts[0] in ("st", "ld", "atom", "red"):
        _on_chip(names, inst, parts, operands)
    return inst


@cache
def _parts(op: str) -> tuple[str, ...]:
    return tuple(op.split("."))


@cache
def _space(parts: tuple[str, ...]) -> str:
    return next((p.partition("::")[0] for p in parts[1:] if p.partition("::")[0] in _SPACES), "generic")


@cache
def _float(parts: tuple[str, ...]) -> bool:
    return any(map(_FLOAT.match, parts))


def _order(parts: tuple[str, ...], default: str) -> str:
    return next((p for p in parts if p in ("relaxed", "volatile", "mmio", "acquire", "release", "acq_rel")), default)


def _memory(names: _Names, inst: Inst, parts: tuple[str, ...], operands: list[str]) -> None:
    """Set the access (or the doubt) of an instruction that may touch global memory."""
    base, space = parts[0], _space(parts)
    at = names.operands

    def access(kind: str, operand: int, default: str = "weak") -> Access:
        return Access(kind, at(operands[operand]), "nc" not in parts, _order(parts, default), not _float(parts))

    off = space in ("shared", "local", "param", "const") or ("async" in parts and space != "global")
    if base in ("ld", "st", "atom", "red") and off:
        return
    if base == "ld":
        inst.access = access("load", 1)
    elif base == "ldu":
        inst.access = Access("load", at(operands[1]), coherent=False)
    elif base == "st" and "bulk" not in parts:
        inst.access = access("store", 0)
    elif base in ("atom", "red"):
        inst.access = access("atomic", base == "atom", "relaxed")
    elif base == "multimem":
        kind, operand = ("load", 1) if "ld_reduce" in parts else ("store" if "st" in parts else "atomic", 0)
        inst.access = access(kind, operand)
    elif (base == "prefetch" and "tensormap" not in parts and space != "local") or base == "prefetchu":
        # Into L2 it is harmless for any tensor; a line of L1 could be stale when the load after the wait hits it.
        inst.access = access("prefetch" if any(p.startswith("L2") for p in parts) else "load", 0)
    elif base == "discard" or (base == "tensormap" and space == "global"):
        inst.access = access("store", 0)
    elif base == "cp":
        _copy(inst, parts, operands, access)
    elif base not in _ON_CHIP and ("[" in inst.text or base in ("tex", "tld4", "suld", "sust", "sured")):
        inst.doubt = "an instruction with a memory operand that the checker does not know"


def _copy(inst: Inst, parts: tuple[str, ...], operands: list[str], access) -> None:
    """cp.async, cp.async.bulk (plain and tensor), cp.reduce.async.bulk and the bulk prefetches."""
    if not operands or not any(o.startswith("[") for o in operands) or "mbarrier" in parts[1:3]:
        return  # commit and wait groups, mbarrier arrivals
    spaces = [p.partition("::")[0] for p in parts if p.partition("::")[0] in ("global", "shared")]
    if "prefetch" in parts:
        inst.access = access("prefetch", 0)
    elif spaces == ["shared", "global"]:
        inst.access = access("load", 1)
    elif spaces == ["global", "shared"]:
        inst.access = access("atomic" if "reduce" in parts else "store", 0)
    elif spaces not in (["shared", "shared"], ["shared"]):
        inst.doubt = "a copy between spaces that the checker does not know"


def _on_chip(names: _Names, inst: Inst, parts: tuple[str, ...], operands: list[str]) -> None:
    """Data through shared or local memory: each is one variable, which only grows."""
    memory = f"{_space(parts)} memory"
    if parts[0] != "st":
        inst.reads += (memory,)
    if parts[0] != "ld":
        inst.writes += (memory,)
    if parts[0] == "st" and memory == LOCAL_MEMORY:
        inst.moves = (Move(memory, names.operands(operands[1]) or (NUMBER,)),)


@cache
def _sync(parts: tuple[str, ...], order: str) -> frozenset[str]:
    """What an instruction orders; order: of its access. Fences and flags of one CTA order nothing between CTAs, so they
    do not count."""
    base, wide = parts[0], "cta" not in parts  # without a scope it is the GPU
    if base == "griddepcontrol":
        return frozenset({"wait" if "wait" in parts else "trigger"})
    if base in ("bar", "barrier"):
        return frozenset({"barrier"})
    if base == "membar" or (base == "fence" and {"acq_rel", "sc"} & set(parts)):
        return frozenset({"acquire", "release"}) if wide else frozenset()
    if wide:
        return frozenset(
            {"acquire": {"acquire"}, "release": {"release"}, "acq_rel": {"acquire", "release"}}.get(order, ())
        )
    return frozenset()


@cache
def _chip(parts: tuple[str, ...]) -> str:
    """What an instruction does to shared memory and its barriers (program.CHIP)."""
    base, far = parts[0], "shared::cluster" in parts
    spaces = [p.partition("::")[0] for p in parts if p.partition("::")[0] in ("global", "shared")]
    if base in ("st", "red", "atom", "stmatrix") and (spaces == ["shared"] or base == "stmatrix"):
        return "remote" if "async" in parts or far else "write"
    if base == "ldmatrix" or (base == "ld" and spaces == ["shared"] and not far):
        return "look"
    if "wait_group" in parts and (base == "wgmma" or "bulk" in parts):
        return "drained"
    if base == "cp" and "bulk" in parts and "prefetch" not in parts and spaces:
        return "overwrite" if spaces[0] == "shared" else "read"
    if (base == "wgmma" and "mma_async" in parts) or (base == "tcgen05" and {"mma", "cp"} & set(parts)):
        return "read"
    if base == "mbarrier" or (base == "cp" and "mbarrier" in parts):
        steps = {"init": "init", "arrive": "arrive", "try_wait": "wait", "test_wait": "wait"}
        step = next((steps[p] for p in parts if p in steps), "")
        return "remote" if far and step == "arrive" else step
    if base in ("bar", "barrier"):
        if "cluster" in parts:
            return f"cluster {'wait' if 'wait' in parts else 'arrive'}"
        return "" if "warp" in parts else "barrier"
    if base == "fence" and "mbarrier_init" in parts:
        return "init fence"
    return "fence" if base == "fence" and {"proxy", "async"} <= set(parts) and "global" not in parts else ""


def _moves(names: _Names, inst: Inst, parts: tuple[str, ...], operands: list[str]) -> tuple[Move, ...]:
    """What the registers of the first operand become."""
    base, space = parts[0], _space(parts)
    sources = tuple(o for text in operands[1:] for o in names.operands(text))
    if inst.access:
        sources = (LOAD,)
    elif base == "ld" and space == "param":
        words = operands[1].strip("[] ").partition("+")
        known = names.operand(words[0])
        sources = (NUMBER if known is None else known,)
    elif base == "ld" and space == "local":
        sources = (LOCAL_MEMORY,)
    elif base in ("ld", "atom", "ldmatrix") or (base == "tcgen05" and "ld" in parts):
        sources = (origin(LOADED),)
    elif inst.doubt:
        sources = (origin(UNKNOWN),)
    elif base in ("selp", "slct"):
        return tuple(Move(r, names.operands(", ".join(operands[1:3])) or (NUMBER,), either=True) for r in inst.writes)
    elif base in ("setp", "mma", "mbarrier") or (base not in ("mov", "shfl") and _float(parts)):
        sources = ()
    return tuple(Move(r, sources or (NUMBER,)) for r in inst.writes)


def read(ptx: str, symbol: str) -> Program:
    """The Program of `.entry symbol`. Raises Unreadable if it is not there or breaks off."""
    reader = scan(ptx, symbol)
    return Program("PTX", reader.insts, link(reader.insts, reader.labels), ordered=False)


def _blank(comment: re.Match) -> str:
    """As many blanks and lines as the comment has."""
    text = comment[0]
    return re.sub(r"[^\n]", " ", text) if "\n" in text else " " * len(text)


def scan(ptx: str, symbol: str, kind: type[Reader] = Reader) -> Reader:
    """The reader after `.entry symbol`. Raises Unreadable if it is not there or breaks off."""
    text = _COMMENT.sub(_blank, ptx)
    entry = re.search(rf"\.entry\s+{re.escape(symbol)}\s*\(", text)
    if not entry:
        raise Unreadable(f"the PTX has no .entry {symbol}")
    close = text.find(")", entry.end())
    if "{" not in text[close:] or close < 0:
        raise Unreadable(f"the PTX breaks off in the parameters of {symbol}")
    declared = re.findall(r"\.(\w+)\s+([\w$]+)\s*(?:\[(\d+)\])?\s*(?:,|$)", text[entry.end() : close])
    pointers = {
        name: parameter(i) if int(count or 1) * int(re.search(r"\d+$", kind)[0]) >= 64 else NUMBER
        for i, (kind, name, count) in enumerate(declared)
    }
    module = {
        name: SHARED for name in re.findall(r"\.shared\b[^;{}]*?([\w$]+)\s*(?:\[[^]]*\])?\s*;", text[: entry.start()])
    }
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.M))
    reader = kind(pointers, module, files)
    _body(reader, text, text.index("{", close) + 1)
    return reader


def _body(reader: Reader, text: str, at: int) -> None:
    line, end, match, statement = 1 + text.count("\n", 0, at), at, _PIECE.match, reader.statement
    while True:
        m = match(text, at)
        if not m:
            line += text.startswith("\n", at)
            raise Unreadable(f"PTX line {line}: cannot read {text[at : at + 60].strip()!r}")
        at, end = m.end(), at
        line += text.count("\n", end, at)
        kind = m.lastgroup
        if kind == "inst":
            try:
                statement(m["inst"], line)
            except (IndexError, StopIteration):
                raise Unreadable(f"PTX line {line}: cannot read {' '.join(m['inst'].split())!r}") from None
        elif kind == "open":
            reader.open()
        elif kind == "close":
            if len(reader.scopes) == 1:
                break
            reader.close()
        elif kind == "loc":
            reader.source = f"{PurePath(reader.files.get(m['file'], '?')).name}:{m['line']}"
        else:
            reader.labels[m["label"] + reader.scopes[-1].suffix] = len(reader.insts)
    _resolve(reader)


def _resolve(reader: Reader) -> None:
    """Jumps to labels of the innermost scope that has them; brx.idx to every label of its table."""
    for inst, label, suffixes in reader.jumps:
        names = reader.tables.get(label, [label])
        inst.targets = tuple(
            next((name + s for s in reversed(suffixes) if name + s in reader.labels), name) for name in names
        )
