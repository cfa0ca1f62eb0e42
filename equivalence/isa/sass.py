"""Read SASS as nvdisasm prints it, from a cubin (`-c -g`) or from bare code (`-b`): one function to a Program.

Written from the output for sm_90a, sm_100a and sm_103a. A memory instruction, an indirect jump, a call or a
convergence barrier that is not understood becomes a doubt that the rules report.
"""

import re
from functools import cache, lru_cache
from pathlib import PurePath

from .cubin import Parameters
from .forms import Form
from .program import LOAD, LOCAL_MEMORY, Access, Inst, Move, Operand, Program, Unreadable, link, split
from .sass_flow import TARGET, calls, converge
from .values import LOADED, NUMBER, UNKNOWN, Value, origin, parameter

_AT = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_INST = re.compile(r"\s+(?:@(!?)(U?P\w+)\s+)?([A-Z]\w*(?:\.\w+)*)\s*(.*?)\s*;")
_NOTE = re.compile(r"\s*\(\*.*?\*\)")
_RESULT = re.compile(r"U?R\d+(?:\.reuse)?")
_LABEL = re.compile(r"\s*([.$\w]+):\s*$")
_LINE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')
_REGISTER = re.compile(r"(?<![\w.])(U?R)(\d+)\b")
_PREDICATE = re.compile(r"(!?)(U?P(?:\d+|T))$")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(?:(U?R\w+)(?:\.\w+)*\+?)?(-?0x[0-9a-f]+)?\]")
_DOUBLE = re.compile(r"D(?:ADD|MUL|FMA)|F(?:ADD|MUL|FMA)2")
_NUMBERED = re.compile(r"(?<![\w.])(U?[RP])(\d+)\b")
_NAMES_CODE = re.compile(r"[`$\"]|\.L_")  # labels and functions, whose names may look like registers
STAND_IN = 10000  # the first number that stands for another; the next stands for the next, as operands of 64 bits
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")

# A first register that is only read, or predicates alone as results.
_NO_RESULT = re.compile(
    r"\w*SETP2?|U?PLOP3|FCHK|BAR|WARPSYNC|BRXU?|JMXU?|RET|NANOSLEEP|DEPBAR|USETMAXREG|R2PR?|R2B|BRA|CALL|EXIT|KILL"
)
_FLOAT = re.compile(r"(?!FSEL|FLO)(?:F|H|D[AFM]|MUFU|I2F|UF|UI2F|IMMA|[QO]MMA|BMMA)\w*")
_KINDS = {
    "LDG": "load", "LD": "load", "LDGSTS": "load", "LDGMC": "load", "STG": "store", "ST": "store", "ATOM": "atomic",
    "ATOMG": "atomic", "RED": "atomic", "REDG": "atomic", "REDGMC": "atomic", "UBLKCP": "copy", "UBLKRED": "copy",
    "UBLKPF": "prefetch", "UTMALDG": "load", "UTMASTG": "store", "UTMAREDG": "atomic", "UTMAPF": "prefetch",
}  # fmt: skip
# Instructions with a memory operand that never reach global memory.
_ON_CHIP = re.compile(
    r"U?LDS|U?STS|U?ATOMS|LDSM|STSM|LDC|ULDC|LDCU|LDL|STL|SYNCS|ARRIVES|STAS|REDAS|LDTM|STTM|LDT|STT|UTC\w+|UCGABAR\w*|"
    r"[HQIB]GMMA|UTMACCTL|UTMACMDFLUSH|CCTLL|LDGDEPBAR|MAPA|BRXU?|JMXU?"
)
_ON_CHIP_LOADS = {"LDS", "ULDS", "LDSM", "ATOMS", "UATOMS", "LDTM", "LDT", "SYNCS"}
_SELECTS = {"SEL", "USEL", "FSEL", "IMNMX", "VIMNMX", "UIMNMX", "UVIMNMX"}


_CHIP = {
    "STS|STSM|U?ATOMS": "write", "U?LDS|LDSM": "look", r"[HQIB]GMMA|UTC\w*MMA|UTCCP|UTMASTG|UTMAREDG": "read",
    "UTMALDG": "overwrite", "STAS|REDAS": "remote", "UCGABAR_ARV": "cluster arrive", "UCGABAR_WAIT": "cluster wait",
    "BAR": "barrier",
}  # fmt: skip


def _constant(text: str, parameters: Parameters, byte: int = 0) -> Value:
    """A constant-bank operand, `byte` bytes further on: a parameter, any of them if indexed, or a number."""
    m = _CONSTANT.search(text)
    if not m or m[1] != "0x0":
        return origin(LOADED)
    if m[2] and m[2] not in ("RZ", "URZ"):
        return frozenset().union(*map(parameter, parameters.pointers))
    index = parameters.at(int(m[3] or "0", 16) + byte)
    return NUMBER if index is None else parameter(index)


def _operand(text: str, parameters: Parameters) -> Operand:
    return _constant(text, parameters) if "c[" in text or "cx[" in text else _register(text)


@lru_cache(1 << 14)
def _register(text: str) -> Operand:
    m = _REGISTER.search(text)
    return m[1] + m[2] if m else NUMBER


@lru_cache(1 << 14)
def _predicate(text: str) -> tuple[bool, str] | None:
    """Whether a predicate operand is negated, and its name."""
    m = _PREDICATE.match(text)
    return (bool(m[1]), m[2]) if m else None


@lru_cache(1 << 14)
def _run(first: str, count: int) -> tuple[str, ...]:
    kind, number = re.fullmatch(r"(U?R)(\d+)", first).groups()
    return tuple(f"{kind}{int(number) + i}" for i in range(count))


def _address(memory: str) -> tuple[Operand, ...]:
    """The registers of a memory operand, both halves of a pair; the descriptor before it is no part of the address."""
    inside = memory[memory.rindex("[") + 1 :]
    out: list[Operand] = []
    for kind, number in _REGISTER.findall(inside):
        pair = f"{kind}{number}.64" in inside or (kind == "UR" and ".64" not in inside)
        out += _run(kind + number, 2 if pair else 1)
    return tuple(out) or (NUMBER,)


@cache
def _width(parts: tuple[str, ...]) -> int:
    """Registers that one result fills."""
    base = parts[0]
    if base == "CS2R":
        return 1 if "32" in parts else 2
    if base == "LDSM":
        return 4 if "4" in parts else 2 if "2" in parts else 1
    if {"128", "256"} & set(parts) or base.endswith("MMA"):
        return 4  # the 256-bit loads name two results of four
    wide = {"64", "WIDE", "F64"} & set(parts) or _DOUBLE.match(base)
    return 2 if wide else 1


def _access(inst: Inst, parts: tuple[str, ...], memory: list[str]) -> Access | None:
    """The access to global memory, if any; sets the doubt of a memory instruction that is not known."""
    base, kind = parts[0], _KINDS.get(parts[0])
    if base == "CCTL":
        prefetched = {"PF1": "load", "PF1.5": "load", "PF2": "prefetch"}
        kind = next((prefetched[p] for p in parts if p in prefetched), None)
        if kind is None:
            return None
    if kind is None:
        if base in ("TEX", "TLD", "TLD4", "SULD", "SUST", "SURED", "SUATOM") or (
            memory and not _ON_CHIP.fullmatch(base)
        ):
            inst.doubt = "a memory instruction that the checker does not know"
        return None
    if kind == "copy":
        ends = [p for p in parts if p in ("S", "G")]
        if ends == ["S", "S"]:
            return None
        if ends not in (["S", "G"], ["G", "S"]):
            inst.doubt = "a bulk copy between spaces that the checker does not know"
            return None
        kind = "load" if ends[1] == "G" else "store" if base == "UBLKCP" else "atomic"
        memory = memory[ends.index("G") :]
    elif base == "LDGSTS":
        memory = memory[1:]
    elif base.startswith("UTMA"):  # descriptor, coordinates and shared address: which is which differs by instruction
        return Access(kind, tuple(o for m in memory for o in _address(m)))
    if not memory:
        inst.doubt = "no address where the checker expects one"
        return None
    return Access(kind, _address(memory[0]), coherent="CONSTANT" not in parts)


def _slots(memory: str, count: int) -> list[str]:
    """Names for the words of local memory at an address: by offset where it is the stack pointer plus a constant."""
    m = _STACK.fullmatch(memory)
    return [f"stack+{int(m[1] or '0', 16) + 4 * i}" if m else LOCAL_MEMORY for i in range(count)]


@cache
def _results(base: str) -> str:
    """What an instruction makes: "none" (no register), "float", or "" for what may be an address."""
    return "none" if _NO_RESULT.fullmatch(base) else "float" if _FLOAT.fullmatch(base) else ""


def _moves(inst: Inst, parts: tuple[str, ...], operands: list[str], parameters: Parameters) -> tuple[Move, ...]:
    """What the result registers become."""
    base = parts[0]
    if base == "STL":
        slots, stored = _slots(operands[0], _width(parts)), _operand(operands[1], parameters)
        values = _run(stored, len(slots)) if isinstance(stored, str) else [stored] * len(slots)
        anywhere = slots[0] == LOCAL_MEMORY  # one variable for all of it, so it only grows
        return tuple(Move(s, (v, s) if anywhere else (v,), anywhere) for s, v in zip(slots, values, strict=True))
    first = next((i for i, o in enumerate(operands) if not _predicate(o)), None)
    if first is None or not _RESULT.fullmatch(operands[first]) or _results(base) == "none":
        return ()
    results = _run(operands[first].partition(".")[0], _width(parts))
    if "256" in parts and re.fullmatch(r"U?R\d+", operands[first + 1]):
        results = results + _run(operands[first + 1], 4)
    rest = operands[first + 1 :]
    if base in ("LDC", "ULDC", "LDCU"):
        return tuple(Move(r, (_constant(rest[0], parameters, 4 * i),)) for i, r in enumerate(results))
    if base == "LDL":
        return tuple(Move(r, (s,)) for r, s in zip(results, _slots(rest[0], len(results)), strict=True))
    if inst.access:
        return tuple(Move(r, (LOAD,)) for r in results)
    if base in _ON_CHIP_LOADS:
        sources: tuple[Operand, ...] = (origin(LOADED),)
    elif inst.doubt:
        sources = (origin(UNKNOWN),)
    elif base in _SELECTS:
        return tuple(Move(r, tuple(_operand(o, parameters) for o in rest[:2]), either=True) for r in results)
    elif _results(base) == "float":
        sources = (NUMBER,)
    else:
        sources = tuple(_operand(o, parameters) for o in rest) or (NUMBER,)
    return tuple(Move(r, sources) for r in results)


def _control(inst: Inst, parts: tuple[str, ...], operands: list[str], rest: str) -> None:
    """Set where control goes after a jump, an exit or a call."""
    base = parts[0]
    conditions = [o for o in operands if o not in ("PT", "UPT") and _predicate(o)]
    if base in ("BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU", "CALL"):
        listed = re.search(r"BRANCH_TARGETS\s+([^\"*]*)", rest)
        direct = operands[-1] if operands and not base.startswith(("BRX", "JMX")) else ""
        inst.targets = tuple(TARGET.findall(listed[1] if listed else direct))
        inst.falls = False
        if not inst.targets:
            inst.doubt = "the targets of the jump are not known"
    elif base in ("EXIT", "RET", "KILL") or (base == "BPT" and "TRAP" in parts):
        inst.falls, inst.exits = False, base == "EXIT"
    elif base == "WARPSYNC" and TARGET.search(rest):
        inst.targets = tuple(TARGET.findall(rest))
        return
    else:
        return
    if conditions and inst.guard is None and len(conditions) == 1 and not {"DIV", "CONV", "ANY"} & set(parts):
        negated, name = _predicate(conditions[0])
        inst.guard = name, not negated
    elif conditions or {"DIV", "CONV", "ANY"} & set(parts):
        inst.loose = True
    inst.falls = inst.guard is not None or inst.loose


def _vote(inst: Inst, parts: tuple[str, ...], operands: list[str]) -> tuple:
    """VOTE(U).ALL P, Q: where Q fails for a lane, P fails for the warp; .ANY: where Q holds, P holds."""
    if parts[0] not in ("VOTE", "VOTEU") or inst.guard or len(parts) != 2 or parts[1] not in ("ALL", "ANY"):
        return ()
    found = [p for o in operands if (p := _predicate(o)) and p[1] not in ("PT", "UPT")]
    if len(found) != 2 or found[0][0]:
        return ()
    (_, voted), (negated, asked) = found
    holds = parts[1] == "ANY"
    return (((asked, holds != negated), (voted, holds)),)


@cache
def _chip(parts: tuple[str, ...]) -> str:
    """What an instruction does to shared memory and its barriers (program.CHIP).

    fence.mbarrier_init and fence.proxy.async are one instruction here.
    """
    base, ends = parts[0], [p for p in parts if p in ("S", "G")]
    if base in ("UBLKCP", "UBLKRED"):
        return "overwrite" if ends[:1] == ["S"] else "read"
    if base == "SYNCS":
        steps = {"EXCH": "init", "ARRIVE": "arrive", "PHASECHK": "wait"}
        return next((steps[p] for p in parts if p in steps), "")
    if base == "FENCE":
        return "fence" if "ASYNC" in parts and ends != ["G"] else ""
    return next((does for names, does in _CHIP.items() if re.fullmatch(names, base)), "")


@cache
def _parts(op: str) -> tuple[str, ...]:
    return tuple(op.split("."))


class _Known:
    """Instructions read before, by their text and, where that names a constant bank, by where parameters lie."""

    def __init__(self, most: int):
        self.most, self.found = most, {}

    def instruction(self, text: str, parameters: Parameters) -> Inst | None:
        key = (text, parameters) if "c[" in text or "cx[" in text else text
        if key not in self.found:
            if len(self.found) >= self.most:
                self.found.clear()
            self.found[key] = _made(text, parameters if key is not text else None)
        return self.found[key]


_known = _Known(1 << 16)


def _made(text: str, parameters: Parameters | None) -> Inst | None:
    """One instruction; parameters: None where none is named."""
    m = _INST.match(text)
    if not m:
        return None
    if _NAMES_CODE.search(m[4]):
        return _instruction(m, parameters)
    pieces, registers = _NUMBERED.split(f"{m[2] or ''} {m[4]}"), {}
    for i in range(2, len(pieces), 3):
        if pieces[i] != "1" and (pieces[i][0] != "0" or pieces[i] == "0"):  # R1 is the stack pointer
            pieces[i] = registers.setdefault(pieces[i], len(registers))
    form, taken = _form(m[1], m[3], tuple(pieces), parameters)
    numbers = list(map(int, registers))
    return form.fill([f"{kind}{numbers[n] + more}" for kind, n, more in taken], 0, m[0].strip(" ;"))


@lru_cache(1 << 15)
def _form(negated: str, op: str, pieces: tuple, parameters: Parameters | None) -> tuple[Form, list]:
    """The form of an instruction, and of which registers it is: kind, which of the numbers in the text, how many
    further on. pieces: predicate and operands; of every three, the second is a kind, the third a number or R1's."""
    texts = [f"{STAND_IN * (p + 1)}" if isinstance(p, int) else p for p in pieces]
    predicate, _, rest = "".join(texts).partition(" ")
    guard = f"@{negated or ''}{predicate} " if predicate else ""
    inst = _instruction(_INST.match(f" {guard}{op} {rest} ;"), parameters)
    taken = {}
    for name in inst.registers():
        kind, number = re.fullmatch(r"(U?[RP])(\d+)|.*", name).groups()
        if kind and int(number) >= STAND_IN:
            which, more = divmod(int(number), STAND_IN)
            taken[name] = kind, which - 1, more
    return Form(inst, {name: i for i, name in enumerate(taken)}), list(taken.values())


def _instruction(m: re.Match, parameters: Parameters) -> Inst:
    negated, predicate, op, rest = bool(m[1]), m[2], m[3], m[4]
    inst = Inst(0, op, m[0].strip(" ;"))
    if predicate in ("PT", "UPT"):
        if negated:
            return inst  # never executed
    elif predicate:
        inst.guard = predicate, not negated
    parts, operands = _parts(op), split(_NOTE.sub("", rest) if "(*" in rest else rest)
    _control(inst, parts, operands, rest)
    memory = [o for o in operands if "[" in o and not re.match(r"[-|~]*cx?\[", o)] if "[" in rest else []
    inst.access = _access(inst, parts, memory)
    syncs = {"ACQBULK": "wait", "PREEXIT": "trigger", "BAR": "barrier"}
    inst.sync = frozenset({syncs[parts[0]]} if parts[0] in syncs else ())
    inst.chip = _chip(parts)
    inst.moves = _moves(inst, parts, operands, parameters)
    inst.implies = _vote(inst, parts, operands)
    if parts[0] in ("R2P", "R2UP"):
        inst.writes = tuple(f"{'U' * (parts[0] == 'R2UP')}P{i}" for i in range(8))
    elif not inst.targets and not inst.exits:
        inst.writes = tuple(p[1] for o in operands if (p := _predicate(o)) and not p[1].endswith("PT"))
    return inst


def read(sass: str, symbol: str, parameters: Parameters) -> Program:
    """The Program of one function: of a whole cubin's text, or of text that is nothing but the function.

    Raises Unreadable if it is not there or a line is not understood.
    """
    insts: list[Inst] = []
    labels: dict[str, int] = {}
    inside, source = ".text." not in sass, ""
    for line in sass.splitlines():
        if line.startswith((".text.", "\t.section", "//-----")):
            inside = line.strip() == f".text.{symbol}:"
        elif not inside:
            continue
        elif (m := _AT.match(line)) and (known := _known.instruction(line[m.end() :], parameters)):
            at = int(m[1], 16)
            labels[f"{at:#x}"] = len(insts)
            insts.append(known.again(at, source))
        elif m := _LABEL.match(line):
            labels[m[1]] = len(insts)
        elif m := _LINE.match(line):
            source = f"{PurePath(m[1]).name}:{m[2]}"
        elif "/*" in line and ";" in line:
            raise Unreadable(f"SASS line {line.strip()!r} is not understood")
    if not insts:
        raise Unreadable(f"the disassembly has no function {symbol}")
    edges = link(insts, labels)
    converge(insts, edges, labels)
    calls(insts, edges)
    first = insts[0].at
    for inst in insts:
        inst.at -= first
    return Program("SASS", insts, edges, ordered=True)
