"""Code to C: one function per block, one loop over the lanes of a warp per operation."""

from .ir import Address, Block, Code, Const, Op, Read, Reg, Shared, Source, Special
from .opcodes import CAST, bits

MODES = {"idx": 0, "bfly": 1, "up": 2, "down": 3}
ATOMICS = {op: i for i, op in enumerate(("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))}
LEAVES = {"jump", "exit", "bar", "cluster_wait", "warp_sync"}  # operations that decide where lanes go
CALLS = ("ex2", "lg2", "sin", "cos", "tanh")  # helpers that call the C library: their loops are no vector code
FUSED = 16  # operations in one loop, at most
AXES = {"x": 0, "y": 1, "z": 2}


def source(code: Code) -> str:
    """The C of one kernel; exports int run(Launch *)."""
    fields = "".join(f"    {_register_type(r)} {r.name}[32];\n" for r in code.registers)
    include = '#include "wgmma.h"'
    groups = any(op.kind == "wgmma" for block in code.blocks for op in block.ops)
    blocks = []
    for n, block in enumerate(code.blocks):
        body = "\n    ".join([*_body(block), *_fall(block)])
        blocks.append(f"static void b{n}(void *v) {{\n    Regs *w = v;\n    const u32 *m = w->w.m;\n    {body}\n}}\n")
    names = ", ".join(f"b{n}" for n in range(len(code.blocks)))
    return (
        '#include "arithmetic.h"\n#include "machine.h"\n'
        f"{include if groups else ''}\n"
        f"typedef struct {{\n    Warp w;\n{fields}}} Regs;\n{''.join(blocks)}"
        f"static const Block blocks[] = {{{names}}};\n"
        "int run(Launch *L) { return run_grid(L, blocks, sizeof(Regs)); }\n"
    )


def _body(block: Block) -> list[str]:
    """Neighbouring operations of one lane share a loop, so that values stay in machine registers."""
    lines, loop = [], []

    def close() -> None:
        if loop:
            lines.append(f"LANES {{ {' '.join(loop)} }}")
            loop.clear()

    for op in block.ops:
        if op.kind == "pure" and op.guard is None and not op.more["helper"].startswith(CALLS):
            loop += [line.removeprefix("LANES ") for line in _pure(op, None)]
            if len(loop) >= FUSED:
                close()
        else:
            close()
            lines += _guarded(op, block.next)
    close()
    return lines


def _register_type(r: Reg) -> str:
    return "u32" if r.width == 1 else f"u{r.width}"


def _fall(block: Block) -> list[str]:
    """Send the lanes that the last operation left here to the next block, or to their end."""
    last, rest = block.ops[-1] if block.ops else None, "m[l]"
    if last and last.kind in LEAVES:
        if last.guard is None:
            return []
        rest = f"(m[l] & {_guard(last.guard[0], not last.guard[1])})"
    if block.next is None:
        return [f"{{ u32 k[32]; LANES k[l] = {rest}; leave(&w->w, k); }}"]
    return [f"LANES w->w.pc[l] = {rest} ? {block.next} : w->w.pc[l];"]


def _guard(register: Reg, when: bool) -> str:
    return f"{'' if when else '~'}w->{register.name}[l]"


def _guarded(op: Op, following: int | None) -> list[str]:
    lines = EMIT[op.kind](op, following)
    if op.guard is None or not lines:
        return lines
    mask = f"LANES k[l] = m[l] & {_guard(*op.guard)};"
    return [f"{{ u32 k[32]; {mask} {{ const u32 *m = k;", *lines, "} }"]


# ---- operands, as C expressions of lane l


def value(read: Read) -> str:
    raw = _raw(read.source, read.type)
    if read.type == "f32":
        return f"as_f32({raw})"
    return f"({read.type}){raw}"


def _raw(what: Source, kind: str) -> str:
    if isinstance(what, Reg):
        return f"w->{what.name}[l]"
    if isinstance(what, Const):
        if kind == "pred":
            return "~0u" if what.bits else "0u"
        return f"{what.bits}{'ull' if bits(kind) == 64 else 'u'}"
    if isinstance(what, Shared):
        return f"({what.offset}u | w->w.cta->rank << 24)"
    return _special(what)


def _special(what: Special) -> str:
    cta = "w->w.cta"
    name, _, axis = what.name.rpartition("_")
    at = AXES.get(axis)
    table = {
        "tid": f"w->w.tid[{at}][l]", "ctaid": f"{cta}->id[{at}]", "ntid": f"{cta}->launch->block[{at}]",
        "nctaid": f"{cta}->launch->grid[{at}]", "cluster_nctaid": f"{cta}->launch->cluster[{at}]",
        "cluster_ctaid": f"({cta}->id[{at}] % {cta}->launch->cluster[{at}])",
    }  # fmt: skip
    whole = {"laneid": "(u32)l", "warpid": "w->w.index", "cluster_ctarank": f"{cta}->rank",
             "cluster_nctarank": f"{cta}->cluster->size"}  # fmt: skip
    return whole[what.name] if what.name in whole else table[name]


def address(at: Address) -> str:
    base, width = _raw(at.base, "u64"), 64
    if isinstance(at.base, Reg):
        width = at.base.width
    elif isinstance(at.base, Shared):
        width = 32
    return f"(u64)(u{width})({base} + (u{width}){at.offset}ll)" if at.offset else f"(u64)({base})"


def put(out: Reg | None, kind: str, expression: str) -> str:
    """Write a value of a type to lane l of a register, extended to its width."""
    if out is None:
        return f"(void)({expression});"
    if kind == "f32":
        expression = f"bits_f32({expression})"
    elif kind[0] == "s" and bits(kind) < out.width:
        expression = f"(s{out.width})({kind})({expression})"
    return f"w->{out.name}[l] = {expression};"


def _blend(out: Reg, kind: str, expression: str) -> str:
    """`put` for executing lanes, without a branch."""
    target = f"w->{out.name}[l]"
    made = put(out, kind, expression).removeprefix(f"{target} = ").removesuffix(";")
    return f"{target} = m[l] ? ({_register_type(out)})({made}) : {target};"


def _array(read: Read, name: str) -> str:
    return f"u32 {name}[32]; LANES {name}[l] = {_raw(read.source, read.type)};"


def _pointer(out: Reg | None) -> str:
    return f"w->{out.name}" if out else "0"


# ---- one emitter per kind


def _pure(op: Op, _) -> list[str]:
    if op.out[0] is None:
        return []
    arguments, helper = ", ".join(map(value, op.args)), op.more["helper"]
    call = f"({op.result})({arguments})" if helper == CAST else f"{helper}({arguments})"
    return [f"LANES {_blend(op.out[0], op.result, call)}"]


def _load(op: Op, _) -> list[str]:
    size, n = bits(op.result) // 8, len(op.out)
    if op.more["space"] == "param":
        start = op.at.base.bits + op.at.offset
        return [_parameter(out, op.result, start + size * i) for i, out in enumerate(op.out)]
    parts = " ".join(
        f"memcpy(&t, p + {size * i}, {size}); {put(out, op.result, 't')}" for i, out in enumerate(op.out) if out
    )
    return [f"LANES if (m[l]) {{ {op.result} t; u8 *p = {_place(op, size * n)}; {parts} }}"]


def _parameter(out: Reg | None, kind: str, offset: int) -> str:
    word = f"w->w.cta->launch->params[{offset // 8}] >> {8 * (offset % 8)}"
    return f"LANES {_blend(out, kind, f'({kind})({word})')}"


def _place(op: Op, size: int, at: Address | None = None) -> str:
    where = address(at or op.at)
    if op.more.get("space", "shared") == "global":
        return f"global_at(&w->w, l, {where}, {size}, {op.line})"
    return f"shared_at(&w->w, l, {where}, {size}, {size}, 0, {op.line})"


def _store(op: Op, _) -> list[str]:
    kind = op.args[0].type
    size = bits(kind) // 8
    parts = " ".join(f"t = {value(a)}; memcpy(p + {size * i}, &t, {size});" for i, a in enumerate(op.args))
    return [f"LANES if (m[l]) {{ {kind} t; u8 *p = {_place(op, size * len(op.args))}; {parts} }}"]


def _st_async(op: Op, _) -> list[str]:
    kind = op.args[0].type
    size = bits(kind) // 8
    n = size * len(op.args)
    parts = " ".join(f"t = {value(a)}; memcpy(p + {size * i}, &t, {size});" for i, a in enumerate(op.args))
    place = f"shared_at(&w->w, l, {address(op.at)}, {n}, {n}, 1, {op.line})"
    done = f"mbar_update(&w->w, l, {address(op.more['bar'])}, 0, -{n}, {op.line});"
    return [f"LANES if (m[l]) {{ {kind} t; u8 *p = {place}; {parts} {done} }}"]


def _atom(op: Op, _) -> list[str]:
    size = bits(op.result) // 8
    second = value(op.args[1]) if len(op.args) > 1 else "0"
    call = f"atomic_{op.result}(p, {ATOMICS[op.more['op']]}, {value(op.args[0])}, {second})"
    return [f"LANES if (m[l]) {{ u8 *p = {_place(op, size)}; {put(op.out[0], op.result, call)} }}"]


def _shfl(op: Op, _) -> list[str]:
    arrays = " ".join(_array(a, f"t{i}") for i, a in enumerate(op.args))
    out, valid = map(_pointer, op.out)
    return [f"{{ {arrays} shfl(&w->w, m, {MODES[op.more['mode']]}, t0, t1, t2, {out}, {valid}, {op.line}); }}"]


def _vote(op: Op, _) -> list[str]:
    p = f"{'~' if op.more['negated'] else ''}{_raw(op.args[0].source, 'pred')}"
    result = {"ballot": "yes", "any": "yes ? ~0u : 0", "all": "yes == lanes_of(m) ? ~0u : 0"}[op.more["mode"]]
    return [f"{{ u32 t[32]; LANES t[l] = m[l] & ({p}); u32 yes = lanes_of(t), r = {result};",
            f"LANES {_blend(op.out[0], op.result, 'r')} }}"]  # fmt: skip


def _redux(op: Op, _) -> list[str]:
    kind = op.result
    start = {"add": "0", "or": "0", "xor": "0", "and": "~0u", "min": "INT32_MAX" if kind == "s32" else "~0u",
             "max": "INT32_MIN" if kind == "s32" else "0"}[op.more["op"]]  # fmt: skip
    helper = f"{op.more['op']}_{'u32' if op.more['op'] in ('and', 'or', 'xor') else kind}"
    return [f"{{ {kind} r = {start}; LANES if (m[l]) r = {helper}(r, {value(op.args[0])});",
            f"LANES {_blend(op.out[0], kind, 'r')} }}"]  # fmt: skip


def _activemask(op: Op, _) -> list[str]:
    return [f"{{ u32 r = lanes_of(m); LANES {_blend(op.out[0], 'u32', 'r')} }}"]


def _elect(op: Op, _) -> list[str]:
    lines = ["{ u32 first = __builtin_ctz(lanes_of(m) | 1u << 31);"]
    if op.out[0]:
        lines.append(f"LANES {_blend(op.out[0], 'u32', 'first')}")
    if op.out[1]:
        lines.append(f"LANES {_blend(op.out[1], 'pred', '(u32)l == first ? ~0u : 0')}")
    return [*lines, "}"]


def _ldmatrix(op: Op, _) -> list[str]:
    out = ", ".join(map(_pointer, op.out))
    return [f"{{ u64 at[32]; u32 *const out[] = {{{out}}}; whole(&w->w, m, {op.line}); LANES at[l] = {address(op.at)};",
            f"ldmatrix(&w->w, at, {len(op.out)}, {int(op.more['trans'])}, out, {op.line}); }}"]  # fmt: skip


def _mma(op: Op, _) -> list[str]:
    arrays, names = [], []
    for i, a in enumerate(op.args):
        if isinstance(a.source, Reg):
            names.append(f"w->{a.source.name}")
        else:
            arrays.append(_array(a, f"t{i}"))
            names.append(f"t{i}")
    out = ", ".join(map(_pointer, op.out))
    brain = int(op.more["type"] == "bf16")
    return [f"{{ {' '.join(arrays)} const u32 *const in[] = {{{', '.join(names)}}}; u32 *const out[] = {{{out}}};",
            f"whole(&w->w, m, {op.line}); mma({op.more['k']}, {brain}, in, out); }}"]  # fmt: skip


def _wgmma(op: Op, _) -> list[str]:
    scale, b, *a = (a.source for a in op.args)
    registers = len(a) == 4
    wide = [
        f"u64 {name}[32]; LANES {name}[l] = {_raw(what, kind)};"
        for name, what, kind in (("s", scale, "pred"), ("b", b, "u64"), ("a", b if registers else a[0], "u64"))
    ]
    arrays = [_array(x, f"t{i}") for i, x in enumerate(op.args[2:])] if registers else []
    source = "(const u32 *const[]){t0, t1, t2, t3}" if registers else "0"
    out, more = ", ".join(map(_pointer, op.out)), op.more
    form = f"{more['n']}, {int(more['type'] == 'bf16')}, {more['signs'][0] * more['signs'][1]}"
    form += f", {int(more['trans'][0])}, {int(more['trans'][1])}"
    return ["{", *wide, *arrays, f"u32 *const out[] = {{{out}}};",
            f"wgmma(&w->w, m, {form}, s, b, a, {source}, out, {op.line}); }}"]  # fmt: skip


def _jump(op: Op, _) -> list[str]:
    return [f"LANES w->w.pc[l] = m[l] ? {op.more['target']} : w->w.pc[l];"]


def _exit(op: Op, _) -> list[str]:
    return ["leave(&w->w, m);"]


def _trap(op: Op, _) -> list[str]:
    return [f"LANES if (m[l]) fail(&w->w, l, TRAP, {op.line}, 0);"]


def _bar(op: Op, following: int | None) -> list[str]:
    name, count = (_raw(a.source, "u32").replace("[l]", "[__builtin_ctz(lanes_of(m))]") for a in op.args)
    return [f"if (lanes_of(m)) bar_sync(&w->w, m, {name}, {count}, {following or 0}, {op.line});"]


def _warp_sync(op: Op, following: int | None) -> list[str]:
    return [f"warp_sync(&w->w, m, {following or 0});"]


def _cluster_arrive(op: Op, _) -> list[str]:
    return ["cluster_arrive(&w->w, m);"]


def _cluster_wait(op: Op, following: int | None) -> list[str]:
    return [f"cluster_wait(&w->w, m, {following or 0});"]


def _mbar_init(op: Op, _) -> list[str]:
    return [f"LANES if (m[l]) mbar_init(&w->w, l, {address(op.at)}, {value(op.args[0])}, {op.line});"]


def _mbar_arrive(op: Op, _) -> list[str]:
    arrivals, tx = map(value, op.args)
    lines = [f"LANES if (m[l]) mbar_update(&w->w, l, {address(op.at)}, 0, {tx}, {op.line});"]
    if tx == "(u32)0u":
        lines = []
    return [*lines, f"LANES if (m[l]) mbar_update(&w->w, l, {address(op.at)}, {arrivals}, 0, {op.line});"]


def _mbar_wait(op: Op, _) -> list[str]:
    call = f"mbar_passed(&w->w, l, {address(op.at)}, {value(op.args[0])}, {op.line})"
    return [f"LANES if (m[l]) {{ {put(op.out[0], 'pred', call)} }}"]


def _cp_async(op: Op, _) -> list[str]:
    """The copy at once: the earliest moment that is allowed."""
    size = op.more["bytes"]
    to = f"shared_at(&w->w, l, {address(op.at)}, {size}, {size}, 0, {op.line})"
    source = f"global_at(&w->w, l, {address(op.more['source'])}, {size}, {op.line})"
    return [f"LANES if (m[l]) {{ u32 n = {value(op.args[0])}; u8 *p = {to}; n = n > {size} ? {size} : n;",
            f"memset(p, 0, {size}); if (n) memcpy(p, {source}, n); }}"]  # fmt: skip


def _cp_arrive(op: Op, _) -> list[str]:
    return [f"LANES if (m[l]) mbar_update(&w->w, l, {address(op.at)}, 1, 0, {op.line});"]


def _bulk(op: Op, _) -> list[str]:
    to, source, bar = address(op.at), address(op.more["source"]), address(op.more["bar"])
    return [f"LANES if (m[l]) bulk(&w->w, l, {to}, {source}, {value(op.args[0])}, {bar}, {op.line});"]


def _bulk_store(op: Op, _) -> list[str]:
    to, source = address(op.at), address(op.more["source"])
    return [f"LANES if (m[l]) bulk_store(&w->w, l, {to}, {source}, {value(op.args[0])}, {op.line});"]


def _nothing(op: Op, _) -> list[str]:
    return []


EMIT = {
    "pure": _pure, "load": _load, "store": _store, "st_async": _st_async, "atom": _atom, "shfl": _shfl, "vote": _vote,
    "redux": _redux, "activemask": _activemask, "elect": _elect, "ldmatrix": _ldmatrix, "mma": _mma, "jump": _jump,
    "exit": _exit, "trap": _trap, "bar": _bar,
    "warp_sync": _warp_sync, "cluster_arrive": _cluster_arrive, "cluster_wait": _cluster_wait,
    "mbar_init": _mbar_init, "mbar_arrive": _mbar_arrive, "mbar_wait": _mbar_wait, "cp_async": _cp_async,
    "cp_commit": _nothing, "cp_wait": _nothing, "cp_arrive": _cp_arrive, "bulk": _bulk, "pdl": _nothing,
    "fence": _nothing, "bulk_store": _bulk_store, "bulk_commit": _nothing, "bulk_wait": _nothing, "wgmma": _wgmma,
    "wg_fence": _nothing, "wg_commit": _nothing, "wg_wait": _nothing,
}  # fmt: skip
