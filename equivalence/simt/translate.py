"""A Listing to Code: blocks of operations that both back ends emit, each with typed sources and destinations.

A block ends where lanes may part, wait or be overtaken: jumps, ends, barriers, waits for asynchronous work, and the
two halves of programmatic dependent launch. Whatever is not known here is an Unsupported error before anything runs.
"""

import re
from collections.abc import Sequence
from functools import cache

from .forms import Form
from .ir import Address, Block, Code, Const, Op, Read, Reg, Shared, Source, Special
from .opcodes import PURE, bits
from .parse import Line, Listing, Statement, Unsupported
from .translate_async import SCOPES, Asynchronous

SPECIALS = {
    **{f"%{n}.{axis}": f"{n}_{axis}" for n in ("tid", "ctaid", "ntid", "nctaid", "cluster_ctaid", "cluster_nctaid")
       for axis in "xyz"},
    "%laneid": "laneid", "%warpid": "warpid", "%cluster_ctarank": "cluster_ctarank",
    "%cluster_nctarank": "cluster_nctarank",
}  # fmt: skip
ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile")
LOAD_HINTS = {"L1::no_allocate", "L1::evict_last", "L1::evict_first", "L2::128B", "L2::256B", "L2::64B", "nc", "ca",
              "cg", "cs", "lu", "cv", "wb", "wt"}  # fmt: skip
ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
NOTHING = {"prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "pmevent", "setmaxnreg"}
ENDS = {"jump", "exit", "bar", "warp_sync", "cluster_wait", "mbar_wait", "cp_wait", "bulk_wait", "wg_wait", "pdl"}


def translate(listing: Listing) -> Code:
    """Raises Unsupported, naming the instruction and its PTX line."""
    work = _Translator(listing)
    made = [work.line(line) for line in listing.lines]
    last = len(made)
    ends = {i for i, line in enumerate(listing.lines) if line.form.ends}
    starts = sorted(i for i in {0, *listing.labels, *(i + 1 for i in ends)} if i < last)
    number = {start: n for n, start in enumerate(starts)}
    blocks = []
    for start, stop in zip(starts, [*starts[1:], last], strict=True):
        ops = tuple(op for some in made[start:stop] for op in some)
        for op in ops:
            if op.kind == "jump":
                if op.more["target"] not in number:
                    raise Unsupported(f"PTX line {op.line}: {op.text}: jumps past the end of the function")
                op.more["target"] = number[op.more["target"]]
        blocks.append(Block(ops, number.get(stop)))
    return Code(listing, tuple(work.registers.values()), tuple(blocks))


@cache
def register(name: str, kind: str) -> Reg:
    """name: unique in its function. kind: as declared, "b32" or "pred"."""
    return Reg(re.sub(r"\W", "_", name.replace("%", "r_")), 1 if kind == "pred" else int(kind[1:]))


class Made:
    """One operation of a form, which `fill` makes for the registers of a statement."""

    def __init__(self, op: Op, stand_ins: Sequence[Reg]):
        self.like, self.number = op, {r: i for i, r in enumerate(stand_ins)}
        self.guard = op.guard and (self.number[op.guard[0]], op.guard[1])
        self.out = [None if r is None else self.number[r] for r in op.out]
        self.args = [(self.number.get(a.source), a) for a in op.args]
        self.computed = any(i is not None for i, _ in self.args)
        self.at = self._base(op.at)
        self.places = [(k, i) for k, v in op.more.items() if isinstance(v, Address) if (i := self._base(v)) is not None]

    def _base(self, at: Address | None) -> int | None:
        return None if at is None else self.number.get(at.base)

    def fill(self, registers: Sequence[Reg], line: int, text: str) -> Op:
        like, guard, args, at, more = self.like, self.guard, self.like.args, self.like.at, dict(self.like.more)
        if self.computed:
            args = tuple([a if i is None else Read(registers[i], a.type) for i, a in self.args])
        if self.at is not None:
            at = Address(registers[self.at], at.offset)
        for name, i in self.places:
            more[name] = Address(registers[i], more[name].offset)
        return Op(
            like.kind, line, text, guard and (registers[guard[0]], guard[1]),
            tuple([None if i is None else registers[i] for i in self.out]), like.result, args, at, more,
        )  # fmt: skip


def _make(form: Form, line: Line) -> None:
    """Translate a form, once."""
    form.tried = True
    operands, guard = form.operands, form.guard
    listing = Listing("", "", [], form.registers, form.parameters, form.variables, 0, None)
    work = _Translator(listing)
    try:
        ops = work.statement(Statement(line.at, form.op, operands, guard, line.target))
    except Unsupported:
        return
    form.ends, form.jumps = any(op.kind in ENDS for op in ops), any(op.kind == "jump" for op in ops)
    form.made = [Made(op, list(work.registers.values())) for op in ops]


class _Translator(Asynchronous):
    def __init__(self, listing: Listing):
        self.listing = listing
        self.registers = {name: register(name, kind) for name, kind in listing.registers.items()}

    def line(self, line: Line) -> list[Op]:
        form = line.form
        if not form.tried:
            _make(form, line)
        if form.made is None:
            return self.statement(line.statement())  # which tells why it cannot be translated
        registers, text = [self.registers[name] for name in line.registers], form.text(line.registers)
        made = [one.fill(registers, line.at, text) for one in form.made]
        if form.jumps:
            made[0].more["target"] = line.target
        return made

    def statement(self, s: Statement) -> list[Op]:
        base = s.parts[0]
        if base == "mov" and "{" in "".join(s.operands):
            ops = self.move(s)
        elif s.op in PURE or base == "setp":
            ops = self.pure(s)
        elif base in NOTHING:
            ops = []
        elif method := getattr(self, f"op_{base}", None):
            ops = method(s)
            ops = [ops] if isinstance(ops, Op) else ops
        else:
            raise s.unsupported()
        return ops

    # ---- operands

    def reg(self, s: Statement, text: str) -> Reg | None:
        if text == "_":
            return None
        if text not in self.registers:
            raise s.unsupported(f"{text!r} is no register")
        return self.registers[text]

    def source(self, s: Statement, text: str, kind: str) -> Source:
        if text in self.registers:
            return self.registers[text]
        if text in SPECIALS:
            return Special(SPECIALS[text])
        if text in self.listing.shared:
            return Shared(self.listing.shared[text])
        if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return Const(int(m[1], 16))
        if m := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
            return Const(int(m[1], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0)
            return Const((value != 0) if kind == "pred" else value & ((1 << bits(kind)) - 1))
        raise s.unsupported(f"operand {text!r}")

    def read(self, s: Statement, text: str, kind: str) -> Read:
        source = self.source(s, text, kind)
        if isinstance(source, Reg) and (source.width == 1) != (kind == "pred"):
            raise s.unsupported(f"{text} is read as {kind}")
        if isinstance(source, Reg) and source.width < bits(kind):
            raise s.unsupported(f"{text} has {source.width} bits and is read as {kind}")
        return Read(source, kind)

    def guard(self, s: Statement) -> tuple[Reg, bool] | None:
        return s.guard and (self.registers[s.guard[0]], s.guard[1])

    def address(self, s: Statement, text: str) -> Address:
        m = re.fullmatch(r"\[\s*([%$\w@]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if not m:
            raise s.unsupported(f"address {text!r}")
        return Address(self.source(s, m[1], "u64"), int(m[2] or "0", 0))

    def vector(self, s: Statement, text: str) -> list[str]:
        return [t.strip() for t in text.strip("{} ").split(",")]

    def make(self, s: Statement, kind: str, **fields) -> Op:
        return Op(kind, s.line, f"{s.op} {', '.join(s.operands)}", self.guard(s), **fields)

    # ---- one lane

    def pure(self, s: Statement) -> list[Op]:
        op, operands, combine = s.op, list(s.operands), None
        if m := re.fullmatch(r"(setp\.\w+)\.(and|or|xor)(\.\w+)", op):
            op, combine = m[1] + m[3], m[2]
        if op not in PURE or "|" in operands[0]:
            raise s.unsupported()
        known = PURE[op]
        if len(operands) != 1 + len(known.args) + (combine is not None):
            raise s.unsupported("another number of operands")
        args = tuple(self.read(s, t, k) for t, k in zip(operands[1:], known.args, strict=False))
        out = self.reg(s, operands[0])
        if out and out.width < bits(known.result):
            raise s.unsupported(f"{operands[0]} is too narrow")
        made = [self.make(s, "pure", out=(out,), result=known.result, args=args, more={"helper": known.helper})]
        if combine:
            text = operands[-1]
            term = self.read(s, text.lstrip("!"), "pred")
            if text.startswith("!"):
                raise s.unsupported("a negated predicate operand")
            if text == operands[0]:
                raise s.unsupported("a predicate that is combined with itself")
            more = {"helper": f"{combine}_pred"}
            made.append(self.make(s, "pure", out=(out,), result="pred", args=(Read(out, "pred"), term), more=more))
        return made

    def move(self, s: Statement) -> list[Op]:
        """mov that packs or unpacks a vector."""
        width, (to, source) = int(re.sub(r"\D", "", s.parts[1])), s.operands
        if to.startswith("{"):
            parts = self.vector(s, to)
            part = width // len(parts)
            return [
                self.make(s, "pure", out=(self.reg(s, t),), result=f"u{part}",
                          args=(self.read(s, source, f"u{width}"), Read(Const(i * part), "u32")),
                          more={"helper": f"part_u{width}_u{part}"})
                for i, t in enumerate(parts)
            ]  # fmt: skip
        if source.startswith("{"):
            parts = self.vector(s, source)
            args = tuple(self.read(s, t, f"u{width // len(parts)}") for t in parts)
            helper = f"pack{len(parts)}_u{width}"
            return [
                self.make(s, "pure", out=(self.reg(s, to),), result=f"u{width}", args=args, more={"helper": helper})
            ]
        raise s.unsupported()

    # ---- memory

    def _space(self, s: Statement) -> str:
        for part in s.parts[1:]:
            if part.partition("::")[0] in ("global", "shared", "param"):
                return part.partition("::")[0]
        raise s.unsupported("generic and local addresses are not executed")

    def _vector(self, s: Statement) -> tuple[int, str]:
        count = next((int(p[1:]) for p in s.parts if re.fullmatch(r"v[248]", p)), 1)
        return count, f"u{re.sub(r'[^0-9]', '', s.parts[-1])}"

    def _ordering(self, s: Statement, known: set[str]) -> dict:
        """order and scope; raises for a modifier that is none of the known ones."""
        order = next((p for p in s.parts if p in ORDERS), "weak")
        scope = next((p for p in s.parts if p in SCOPES), "gpu")
        rest = set(s.parts[1:-1]) - known - LOAD_HINTS - {order, scope} - {"v2", "v4", "v8"}
        rest = {p for p in rest if p.partition("::")[0] not in ("global", "shared", "param")}
        if rest:
            raise s.unsupported(f"modifier .{sorted(rest)[0]}")
        return {"order": order, "scope": scope}

    def op_ld(self, s: Statement) -> Op:
        space, (_, kind) = self._space(s), self._vector(s)
        more = {"space": space, "nc": "nc" in s.parts, **self._ordering(s, set())}
        if space == "param":
            m = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", s.operands[1])
            if not m or m[1] not in self.listing.params:
                raise s.unsupported(f"address {s.operands[1]!r}")
            at = Address(Const(self.listing.params[m[1]]), int(m[2] or 0))
        else:
            at = self.address(s, s.operands[1])
        out = tuple(self.reg(s, t) for t in self.vector(s, s.operands[0]))
        signed = s.parts[-1][0] == "s" and any(r and r.width > bits(kind) for r in out)
        return self.make(s, "load", out=out, result=f"s{kind[1:]}" if signed else kind, at=at, more=more)

    def op_st(self, s: Statement) -> Op:
        if "async" in s.parts:
            if not s.op.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes"):
                raise s.unsupported()
            _, kind = self._vector(s)
            args = tuple(self.read(s, t, kind) for t in self.vector(s, s.operands[1]))
            return self.make(s, "st_async", at=self.address(s, s.operands[0]), args=args,
                             more={"bar": self.address(s, s.operands[2])})  # fmt: skip
        _, kind = self._vector(s)
        args = tuple(self.read(s, t, kind) for t in self.vector(s, s.operands[1]))
        more = {"space": self._space(s), **self._ordering(s, set())}
        return self.make(s, "store", at=self.address(s, s.operands[0]), args=args, more=more)

    def op_atom(self, s: Statement) -> Op:
        return self._atomic(s, s.operands[0], s.operands[1:])

    def op_red(self, s: Statement) -> Op:
        return self._atomic(s, "_", s.operands)

    def _atomic(self, s: Statement, to: str, operands) -> Op:
        kind, op = s.parts[-1], next((p for p in s.parts if p in ATOMICS), None)
        kind = f"u{kind[1:]}" if kind[0] == "b" else kind
        ordering = self._ordering(s, set(ATOMICS))
        if (
            op is None
            or kind not in ("u32", "s32", "u64", "s64", "f32")
            or (kind == "f32" and op not in ("add", "exch"))
        ):
            raise s.unsupported()
        args = tuple(self.read(s, t, kind) for t in operands[1:])
        if ordering["order"] == "weak":
            ordering["order"] = "relaxed"
        more = {"space": self._space(s), "op": op, **ordering}
        return self.make(
            s, "atom", out=(self.reg(s, to),), result=kind, at=self.address(s, operands[0]), args=args, more=more
        )

    # ---- a warp

    def op_shfl(self, s: Statement) -> Op:
        if s.parts[1] != "sync" or s.parts[2] not in ("idx", "bfly", "up", "down") or s.parts[3] != "b32":
            raise s.unsupported()
        to, _, valid = s.operands[0].partition("|")
        args = tuple(self.read(s, t, "u32") for t in s.operands[1:4])
        out = self.reg(s, to), self.reg(s, valid) if valid else None
        return self.make(s, "shfl", out=out, result="u32", args=args, more={"mode": s.parts[2]})

    def op_vote(self, s: Statement) -> Op:
        kind = s.parts[2]
        if s.parts[1] != "sync" or kind not in ("ballot", "any", "all"):
            raise s.unsupported()
        text = s.operands[1]
        args = (self.read(s, text.lstrip("!"), "pred"),)
        result = "u32" if kind == "ballot" else "pred"
        return self.make(s, "vote", out=(self.reg(s, s.operands[0]),), result=result, args=args,
                         more={"mode": kind, "negated": text.startswith("!")})  # fmt: skip

    def op_redux(self, s: Statement) -> Op:
        op, kind = s.parts[2], s.parts[-1]
        if (
            s.parts[1] != "sync"
            or op not in ("add", "min", "max", "and", "or", "xor")
            or kind not in ("u32", "s32", "b32")
        ):
            raise s.unsupported()
        kind = "u32" if kind == "b32" else kind
        return self.make(s, "redux", out=(self.reg(s, s.operands[0]),), result=kind,
                         args=(self.read(s, s.operands[1], kind),), more={"op": op})  # fmt: skip

    def op_activemask(self, s: Statement) -> Op:
        return self.make(s, "activemask", out=(self.reg(s, s.operands[0]),), result="u32")

    def op_elect(self, s: Statement) -> Op:
        leader, _, elected = s.operands[0].partition("|")
        return self.make(s, "elect", out=(self.reg(s, leader), self.reg(s, elected)), result="u32")

    def op_ldmatrix(self, s: Statement) -> Op:
        count = next((int(p[1]) for p in s.parts if re.fullmatch(r"x[124]", p)), None)
        if s.op.replace(".trans", "") != f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16":
            raise s.unsupported()
        out = tuple(self.reg(s, t) for t in self.vector(s, s.operands[0]))
        return self.make(s, "ldmatrix", out=out, result="u32", at=self.address(s, s.operands[1]),
                         more={"trans": "trans" in s.parts})  # fmt: skip

    def op_mma(self, s: Statement) -> Op:
        m = re.fullmatch(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(bf16|f16)\.\2\.f32", s.op)
        if not m:
            raise s.unsupported()
        d, a, b, c = (self.vector(s, t) for t in s.operands)
        args = tuple(self.read(s, t, "u32") for t in a + b) + tuple(self.read(s, t, "f32") for t in c)
        return self.make(s, "mma", out=tuple(self.reg(s, t) for t in d), result="f32", args=args,
                         more={"k": int(m[1]), "type": m[2]})  # fmt: skip

    # ---- control

    def op_bra(self, s: Statement) -> Op:
        return self.make(s, "jump", more={"target": s.target})

    def op_ret(self, s: Statement) -> Op:
        return self.make(s, "exit")

    op_exit = op_ret

    def op_trap(self, s: Statement) -> Op:
        return self.make(s, "trap")

    def op_bar(self, s: Statement) -> Op:
        if s.op == "bar.warp.sync":
            if s.operands[0] not in ("-1", "0xffffffff", "4294967295"):
                raise s.unsupported("allowed is the mask of all lanes, -1")
            return self.make(s, "warp_sync")
        if s.op == "barrier.cluster.wait" or s.op.startswith("barrier.cluster.wait."):
            return self.make(s, "cluster_wait", more={"acquire": True})
        if s.op.startswith("barrier.cluster.arrive"):
            return self.make(s, "cluster_arrive", more={"release": "relaxed" not in s.parts})
        if s.op not in ("bar.sync", "barrier.sync", "barrier.sync.aligned", "bar.cta.sync", "barrier.cta.sync"):
            raise s.unsupported()
        name = self.read(s, s.operands[0], "u32")
        count = self.read(s, s.operands[1], "u32") if len(s.operands) > 1 else Read(Const(0), "u32")
        return self.make(s, "bar", args=(name, count), more={"aligned": s.parts[0] == "bar" or "aligned" in s.parts})

    op_barrier = op_bar
