"""What each kind of operation does to a Grid, for the lanes I (sorted) that execute it."""

import numpy as np

from .copies import COPIES
from .ir import Op
from .lanes import DTYPES, HELPERS, cvt_f32_bf16, cvt_f32_f16
from .opcodes import CAST, bits
from .warpgroup import WARPGROUP

PARKED, EXITED = 1 << 24, 1 << 28
BAR, CLUSTER, PDL, WARP = range(4)  # what a parked lane waits for
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def _pure(g, op: Op, I) -> None:
    if op.out[0] is None:
        return
    values = [g.read(a, I) for a in op.args]
    helper = op.more["helper"]
    g.write(
        op.out[0], op.result, I, values[0].astype(DTYPES[op.result]) if helper == CAST else HELPERS[helper](*values)
    )


def _load(g, op: Op, I) -> None:
    size, n = bits(op.result) // 8, len(op.out)
    if op.more["space"] == "param":
        at = op.at.base.bits + op.at.offset
        data = np.broadcast_to(g.params[at : at + size * n], (len(I), size * n))
    elif op.more["space"] == "global":
        o = g.global_at(op, I, g.address(op.at, I), size * n)
        data = g.load_global(op, I, o, size * n)
    else:
        o = g.shared_at(op, I, g.address(op.at, I), size * n, size * n)
        data = g.smem[o[:, None] + np.arange(size * n)]
    if g.machine.races and op.more["space"] != "param":
        g.machine.races.access(g, op, I, o, size * n, False)
    words = np.ascontiguousarray(data).view(UNSIGNED[size * 8])
    for i, out in enumerate(op.out):
        g.write(out, op.result, I, np.ascontiguousarray(words[:, i]).view(DTYPES[op.result]))


def _store(g, op: Op, I) -> None:
    data = g.bytes_of(op, I)
    n = data.shape[1]
    if op.more["space"] == "global":
        o = g.global_at(op, I, g.address(op.at, I), n)
        g.store_global(I, o, data)
    else:
        o = g.shared_at(op, I, g.address(op.at, I), n, n)
        g.smem[o[:, None] + np.arange(n)] = data
    if g.machine.races:
        g.machine.races.access(g, op, I, o, n, True, data)


ATOMICS = {
    "add": lambda x, a, b: x + a, "min": lambda x, a, b: min(x, a), "max": lambda x, a, b: max(x, a),
    "and": lambda x, a, b: x & a, "or": lambda x, a, b: x | a, "xor": lambda x, a, b: x ^ a, "exch": lambda x, a, b: a,
    "cas": lambda x, a, b: b if x == a else x, "inc": lambda x, a, b: x * 0 if x >= a else x + x.dtype.type(1),
    "dec": lambda x, a, b: a if x == 0 or x > a else x - x.dtype.type(1),
}  # fmt: skip


def _atom(g, op: Op, I) -> None:
    kind, size = DTYPES[op.result], bits(op.result) // 8
    is_global = op.more["space"] == "global"
    a = g.address(op.at, I)
    o = g.global_at(op, I, a, size) if is_global else g.shared_at(op, I, a, size, size)
    values = [g.read(x, I) for x in op.args]
    old = np.empty(len(I), kind)
    for k in range(len(I)):  # one lane after the other: values, clocks and shadow in the same order
        one = slice(int(o[k]), int(o[k]) + size)
        memory = g.machine.arena.mem if is_global else g.smem
        x = old[k] = memory[one].view(kind)[0]
        new = ATOMICS[op.more["op"]](x, values[0][k], values[1][k] if len(values) > 1 else None)
        memory[one] = np.array([new], kind).view(np.uint8)
        if g.stale is not None and is_global and one.start < g.machine.arena.hot:
            g.stale[one] = memory[one]
        if g.machine.races:
            g.machine.races.atomic(g, op, I[k : k + 1], o[k : k + 1], size)
    g.write(op.out[0], op.result, I, old)


# ---- warps


def _shfl(g, op: Op, I) -> None:
    a, b, c = (g.read(x, I) for x in op.args)
    lane, n = (I % 32).astype(np.int64), (b & np.uint32(31)).astype(np.int64)
    seg, clamp = (c >> np.uint32(8)).astype(np.int64) & 31, c.astype(np.int64) & 31
    low, mode = lane & seg, op.more["mode"]
    high = low | (clamp & ~seg)
    j = {"idx": low | (n & ~seg), "bfly": lane ^ n, "up": lane - n, "down": lane + n}[mode]
    valid = j >= high if mode == "up" else j <= high
    source = I - lane + np.where(valid, j, lane)
    rows, inside = np.zeros(g.size, np.uint32), np.zeros(g.size, bool)
    rows[I], inside[I] = a, True
    if not inside[source].all():
        k = int(np.flatnonzero(~inside[source])[0])
        raise g.fault(op.line, int(I[k]), "needs a lane of the warp that is not there", int(source[k] % 32))
    g.write(op.out[0], "u32", I, rows[source])
    g.write(op.out[1], "pred", I, valid)


def _ballot(g, I, p):
    rows = np.zeros(g.size, bool)
    rows[I] = p
    words = (rows.reshape(-1, 32) * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(1).astype(np.uint32)
    return words[I // 32]


def _vote(g, op: Op, I) -> None:
    p = g.read(op.args[0], I) ^ op.more["negated"]
    yes, mode = _ballot(g, I, p), op.more["mode"]
    every = _ballot(g, I, np.ones(len(I), bool))
    g.write(op.out[0], op.result, I, {"ballot": yes, "any": yes != 0, "all": yes == every}[mode])


def _redux(g, op: Op, I) -> None:
    f = dict(add=np.add, min=np.minimum, max=np.maximum, xor=np.bitwise_xor)
    f |= {"and": np.bitwise_and, "or": np.bitwise_or}
    v, first = g.read(op.args[0], I), np.flatnonzero(np.diff(I // 32, prepend=-1))
    r = f[op.more["op"]].reduceat(v, first)
    g.write(op.out[0], op.result, I, np.repeat(r, np.diff([*first, len(I)])))


def _activemask(g, op: Op, I) -> None:
    g.write(op.out[0], "u32", I, _ballot(g, I, np.ones(len(I), bool)))


def _elect(g, op: Op, I) -> None:
    first = np.flatnonzero(np.diff(I // 32, prepend=-1))
    leader = np.repeat(I[first] % 32, np.diff([*first, len(I)]))
    g.write(op.out[0], "u32", I, leader.astype(np.uint32))
    g.write(op.out[1], "pred", I, leader == I % 32)


def _ldmatrix(g, op: Op, I) -> None:
    g.whole(op, I)
    n = len(op.out)
    rows = I.reshape(-1, 32)[:, : 8 * n]
    a = g.address(op.at, I).reshape(-1, 32)[:, : 8 * n].ravel()
    o = g.shared_at(op, rows.ravel(), a, 16, 16)
    if g.machine.races:
        g.machine.races.shared_read(g, op, rows.ravel(), o, 16)
    tiles = g.smem[o[:, None] + np.arange(16)].view(np.uint16).reshape(-1, n, 8, 8)
    if op.more["trans"]:
        tiles = tiles.transpose(0, 1, 3, 2)
    words = np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, n, 32)
    for i, out in enumerate(op.out):
        g.write(out, "u32", I, words[:, i].ravel())


def _mma(g, op: Op, I) -> None:
    g.whole(op, I)
    k, up = op.more["k"], cvt_f32_bf16 if op.more["type"] == "bf16" else cvt_f32_f16
    values = [np.ascontiguousarray(g.read(a, I)).reshape(-1, 32) for a in op.args]
    a, b, c = values[: k // 4], values[k // 4 : k // 4 + k // 8], values[-4:]
    w = len(I) // 32
    A, B, C = np.empty((w, 16, k)), np.empty((w, k, 8)), np.empty((w, 16, 8))
    for i, r in enumerate(a):
        A[:, 8 * (i & 1) :, 8 * (i >> 1) :][:, :8, :8] = up(r.view(np.uint16)).reshape(w, 8, 8)
    for i, r in enumerate(b):
        B[:, 8 * i : 8 * i + 8] = up(r.view(np.uint16)).reshape(w, 8, 8).transpose(0, 2, 1)
    for i, r in enumerate(c):
        C[:, 8 * (i >> 1) :, (i & 1) :: 2][:, :8] = r.reshape(w, 8, 4)
    D = (A @ B + C).astype(np.float32)
    for i, out in enumerate(op.out):
        g.write(out, "f32", I, np.ascontiguousarray(D[:, 8 * (i >> 1) :, (i & 1) :: 2][:, :8]).reshape(-1))


# ---- control


def _jump(g, op: Op, I) -> None:
    g.pc[I] = op.more["target"]


def _exit(g, op: Op, I) -> None:
    g.pc[I] = EXITED


def _trap(g, op: Op, I) -> None:
    raise g.fault(op.line, int(I[0]), "trap")


def _park(g, I, why: int) -> None:
    g.pc[I] += PARKED
    g.why[I] = why


def _bar(g, op: Op, I) -> None:
    name, count = (g.read(a, I) for a in op.args)
    if (bad := (name > 15) | (count % 32 > 0)).any():
        k = int(np.flatnonzero(bad)[0])
        raise g.fault(
            op.line, int(I[k]), f"barrier {name[k]} of {count[k]} threads: allowed are 0 to 15, multiples of 32"
        )
    g.name_of_bar[I], g.count_of_bar[I], g.line_of_bar[I] = name, count, op.line if op.more["aligned"] else 0
    _park(g, I, BAR)


def _warp_sync(g, op: Op, I) -> None:
    _park(g, I, WARP)


def _cluster_arrive(g, op: Op, I) -> None:
    if g.between[I].any():
        raise g.fault(op.line, int(I[np.argmax(g.between[I])]), "arrives at the cluster's barrier twice without a wait")
    g.between[I] = True
    g.target[I] = g.cluster_phase[g.cluster[I]] + 1
    np.add.at(g.cluster_arrived, g.cluster[I], 1)
    if g.machine.races:
        g.machine.races.cluster_arrive(g, I, op.more["release"])
    g.settle_cluster()


def _cluster_wait(g, op: Op, I) -> None:
    if not g.between[I].all():
        raise g.fault(op.line, int(I[np.argmin(g.between[I])]), "waits at the cluster's barrier without having arrived")
    g.between[I] = False
    _park(g, I, CLUSTER)


def _pdl(g, op: Op, I) -> None:
    if op.more["wait"]:
        _park(g, I, PDL)
    else:
        g.triggered[I] = True


def _fence(g, op: Op, I) -> None:
    if g.machine.races:
        g.machine.races.fence(g, op, I)


OPERATIONS = {
    "pure": _pure, "load": _load, "store": _store, "atom": _atom, "shfl": _shfl, "vote": _vote, "redux": _redux,
    "activemask": _activemask, "elect": _elect, "ldmatrix": _ldmatrix, "mma": _mma, "jump": _jump, "exit": _exit,
    "trap": _trap, "bar": _bar, "warp_sync": _warp_sync, "cluster_arrive": _cluster_arrive,
    "cluster_wait": _cluster_wait, "pdl": _pdl, "fence": _fence, **COPIES, **WARPGROUP,
}  # fmt: skip
