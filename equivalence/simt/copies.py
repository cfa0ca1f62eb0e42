"""Asynchronous copies and the barriers in shared memory that count them, over the lanes I (sorted) of a Grid.

Copies into shared memory read their bytes when issued; those land when somebody waits for them. Bulk copies out of
shared memory read it as late as the wait for reading, and their bytes land at the full wait, or at the grid's end.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np

from .ir import Op


def _cp_async(g, op: Op, I) -> None:
    n = op.more["bytes"]
    to = g.shared_at(op, I, g.address(op.at, I), n, n)
    size = np.minimum(g.read(op.args[0], I), n)
    data = np.zeros((len(I), n), np.uint8)
    some = np.flatnonzero(size > 0)
    if len(some):
        o = g.global_at(op, I[some], g.address(op.more["source"], I)[some], n)
        data[some] = g.load_global(op, I[some], o, n)
        if g.machine.races:
            g.machine.races.copied(g, op, I[some], o, n, False, "global", False)
    data[np.arange(n) >= size[:, None]] = 0
    if g.machine.races:
        g.machine.races.copied(g, op, I, to, n, True, "shared", False)
    g.open.append((I, to, data))


def _taken(g, I) -> list:
    """The open copies of these lanes; those of others stay open."""
    if all(lanes is I for lanes, _, _ in g.open):
        mine, g.open = g.open, []
        return mine
    mine, rest = [], []
    inside = np.zeros(g.size, bool)
    inside[I] = True
    for lanes, to, data in g.open:
        for mask, into in ((inside[lanes], mine), (~inside[lanes], rest)):
            if mask.any():
                into.append((lanes[mask], to[mask], data[mask]))
    g.open = rest
    return mine


def _by_lane(copies: list) -> dict[int, list]:
    """Copies sorted by lane; those of one size together, in their order."""
    out: dict[int, list] = {}
    for size in dict.fromkeys(data.shape[1] for _, _, data in copies):
        lanes, to, data = zip(*(c for c in copies if c[2].shape[1] == size), strict=True)
        if all(some is lanes[0] for some in lanes):
            lanes, to, data = (np.stack(a, 1) for a in (lanes, to, data))
            for k, lane in enumerate(lanes[:, 0].tolist()):
                out.setdefault(lane, []).append((lanes[k], to[k], data[k]))
            continue
        lanes, to, data = (np.concatenate(a) for a in (lanes, to, data))
        order = np.argsort(lanes, kind="stable")
        lanes, to, data = lanes[order], to[order], data[order]
        for part in np.split(np.arange(len(lanes)), np.flatnonzero(np.diff(lanes)) + 1):
            out.setdefault(int(lanes[part[0]]), []).append((lanes[part], to[part], data[part]))
    return out


def _land(g, copies: list) -> None:
    for n, some in groupby(copies, lambda copy: copy[2].shape[1]):
        _, to, data = zip(*some, strict=True)
        to = np.concatenate(to)
        g.put(to, data)
        if g.machine.races:
            g.machine.races.landed(g, to, n)


def _cp_commit(g, op: Op, I) -> None:
    own = _by_lane(_taken(g, I))
    for lane in I.tolist():
        g.groups.setdefault(lane, deque()).append(own.get(lane, []))


def _cp_wait(g, op: Op, I) -> None:
    if op.more["all"]:
        _cp_commit(g, op, I)
    for lane in I.tolist():
        groups = g.groups.get(lane, deque())
        while len(groups) > op.more["keep"]:
            _land(g, groups.popleft())


def _cp_arrive(g, op: Op, I) -> None:
    offsets = g.shared_at(op, I, g.address(op.at, I), 8, 8)
    taken = _taken(g, I)
    bars = g.mbars_of(op, I, offsets)
    if all(lanes is I for lanes, _, _ in taken):
        sizes = dict.fromkeys(data.shape[1] for _, _, data in taken)
        stacked = [[np.stack([c[i] for c in taken if c[2].shape[1] == n]) for i in range(3)] for n in sizes]
        _late(g, op, I, bars, 1, 0, lambda some: [_flat(*(x[:, some] for x in copies)) for copies in stacked])
    else:
        own = _by_lane(taken)
        _late(g, op, I, bars, 1, 0, lambda some: [c for lane in I[some].tolist() for c in own.get(lane, [])])


def _flat(lanes, to, data) -> tuple:
    return lanes.ravel(), to.ravel(), data.reshape(-1, data.shape[-1])


def _late(g, op: Op, I, bars: list, n: int, tx: int, copies: Callable) -> None:
    """Arrivals to come of lanes I, each at its barrier. Those that follow each other at one barrier with the same
    knowledge stay together. copies(a slice of I): theirs."""
    known, start = g.known(I), 0
    for end in range(1, len(I) + 1):
        if end == len(I) or bars[end] is not bars[start] or known[end] is not known[start]:
            some = slice(start, end)
            g.late(bars[start], op, I[some], copies(some), n, tx, known[start])
            start = end


def _bulk(g, op: Op, I) -> None:
    size = g.read(op.args[0], I).astype(np.int64)
    to = g.shared_at(op, I, g.address(op.at, I), 16, size, anywhere=True)
    bars = g.shared_at(op, I, g.address(op.more["bar"], I), 8, 8, anywhere=True)
    source = g.address(op.more["source"], I)
    g.aligned(op, I, size, 16)
    for k in range(len(I)):
        n, one = int(size[k]), I[k : k + 1]
        bar, copies = g.mbar(op, one, int(bars[k])), []
        if n:
            o = g.global_at(op, one, source[k : k + 1], 16)
            g.global_at(op, one, source[k : k + 1] + np.uint64(n - 16), 16)
            copies = [(one, to[k : k + 1], g.load_global(op, one, o, n))]
            if g.machine.races:
                g.machine.races.copied(g, op, one, o, n, False, "global", True)
                g.machine.races.copied(g, op, one, to[k : k + 1], n, True, "shared", True)
        g.late(bar, op, one, copies, 0, -n, *g.known(one))


def _bulk_store(g, op: Op, I) -> None:
    size = g.read(op.args[0], I).astype(np.int64)
    source = g.shared_at(op, I, g.address(op.more["source"], I), 16, size)
    to = g.address(op.at, I)
    g.aligned(op, I, size, 16)
    for k, lane in enumerate(I.tolist()):
        one, n = I[k : k + 1], int(size[k])
        if n:
            o = g.global_at(op, one, to[k : k + 1], 16)
            g.global_at(op, one, to[k : k + 1] + np.uint64(n - 16), 16)
            g.stores.setdefault(lane, deque([[]]))[-1].append(_Out(op, one, source[k : k + 1], o, n))
            if g.machine.races:
                g.machine.races.use(g, op, lane, int(source[k]), n)


class _Out:
    """One bulk copy to global memory. data: None until shared memory has been read."""

    def __init__(self, op: Op, lane, source, to, n: int):
        self.op, self.lane, self.source, self.to, self.n, self.data = op, lane, source, to, n, None

    def read(self, g) -> None:
        if self.data is None:
            self.data = g.smem[self.source[:, None] + np.arange(self.n)]
            if g.machine.races:
                g.machine.races.used(g, self.op, int(self.lane[0]), int(self.source[0]), self.n)

    def land(self, g) -> None:
        self.read(g)
        g.store_global(self.lane, self.to, self.data)
        if g.machine.races:
            g.machine.races.copied(g, self.op, self.lane, self.to, self.n, True, "global", True)


def _bulk_commit(g, op: Op, I) -> None:
    for lane in I.tolist():
        g.stores.setdefault(lane, deque([[]])).append([])


def _bulk_wait(g, op: Op, I) -> None:
    for lane in I.tolist():
        groups = g.stores.get(lane, deque([[]]))  # the last one is still open
        done = len(groups) - 1 - op.more["keep"]
        for copy in [c for group in list(groups)[: max(done, 0)] for c in group]:
            copy.read(g) if op.more["read"] else copy.land(g)
        for _ in range(0 if op.more["read"] else done):
            groups.popleft()


def finish(g) -> None:
    """Bulk copies that nobody waited for, at the end of the grid."""
    for copy in [c for groups in g.stores.values() for group in groups for c in group]:
        copy.land(g)


def _st_async(g, op: Op, I) -> None:
    data = g.bytes_of(op, I)
    n = data.shape[1]
    to = g.shared_at(op, I, g.address(op.at, I), n, n, anywhere=True)
    bars = g.shared_at(op, I, g.address(op.more["bar"], I), 8, 8, anywhere=True)
    if g.machine.races:
        g.machine.races.copied(g, op, I, to, n, True, "shared", False)
    _late(g, op, I, g.mbars_of(op, I, bars), 0, -n, lambda some: [(I[some], to[some], data[some])])


def _mbar_init(g, op: Op, I) -> None:
    offsets = g.shared_at(op, I, g.address(op.at, I), 8, 8)
    for lane, offset, n in zip(I.tolist(), offsets.tolist(), g.read(op.args[0], I).tolist(), strict=True):
        made = lane, int(g.clocks.now(lane)) if g.clocks else 0, op.line
        if g.machine.races:
            g.machine.races.barrier_made(g, op, offset, n > 0)
        users = np.zeros(g.size if g.machine.races else 0, bool)  # lanes
        g.mbars[offset] = dict(
            expected=n, left=n, tx=0, phase=0, late=deque(), known=None, last=None, done=None, made=made, users=users
        )


def _mbar_arrive(g, op: Op, I) -> None:
    offsets = g.shared_at(op, I, g.address(op.at, I), 8, 8, anywhere=True)
    counts, tx = (g.read(a, I).tolist() for a in op.args)
    bars, known = g.mbars_of(op, I, offsets), g.known(I)
    for lane, many, bar, n, t, own in _alike(I.tolist(), bars, counts, tx, known):
        if many > 1 and (t or not n or many * n > bar["left"]):
            for k in range(many):
                bar["tx"] += t
                g.arrive(op, lane + k, bar, n, 0, own if n else None)
            continue
        bar["tx"] += t
        g.arrive(op, lane, bar, many * n, 0, own if n else None)


def _alike(lanes: list, bars: list, counts: list, tx: list, known: list) -> Iterator[tuple]:
    """Arrivals of lanes that follow each other and are alike, together: (first lane, how many, what they share)."""
    start = 0
    for k in range(1, len(lanes) + 1):
        if k < len(lanes) and bars[k] is bars[start] and known[k] is known[start] and lanes[k] == lanes[k - 1] + 1:
            if counts[k] == counts[start] and tx[k] == tx[start]:
                continue
        yield lanes[start], k - start, bars[start], counts[start], tx[start], known[start]
        start = k


def _settle(g, bar: dict, phase: int) -> None:
    """Land what is on its way, until this phase is complete."""
    landed = []
    while bar["phase"] == phase and bar["late"]:
        own, lanes, copies, n, tx, known = bar["late"].popleft()
        many = len(lanes)
        if many > 1 and not _all_in_phase(bar, many, n, tx):
            alone = [(own, lanes[k : k + 1], _of_lane(copies, lane), n, tx, known) for k, lane in enumerate(lanes)]
            bar["late"].extendleft(reversed(alone))
            continue
        landed += copies
        g.arrive(own, int(lanes[0]), bar, many * n, many * tx, known)
    _land(g, landed)


def _all_in_phase(bar: dict, many: int, n: int, tx: int) -> bool:
    """Whether none but the last of so many arrivals can complete the phase or be too many."""
    if n:
        return many * n <= bar["left"]
    return bar["left"] > 0 or all(bar["tx"] + k * tx for k in range(1, many))


def _of_lane(copies: list, lane: int) -> list:
    return [tuple(x[mine] for x in copy) for copy in copies if (mine := copy[0] == lane).any()]


def _mbar_wait(g, op: Op, I) -> None:
    offsets = g.shared_at(op, I, g.address(op.at, I), 8, 8)
    parity, passed = g.read(op.args[0], I) & 1, np.zeros(len(I), bool)
    for offset in dict.fromkeys(offsets.tolist()):
        for p in (0, 1):
            some = np.flatnonzero((offsets == offset) & (parity == p))
            if not len(some):
                continue
            bar = g.mbar(op, I[some], offset)
            _settle(g, bar, p)
            if bar["phase"] != p:
                passed[some] = True
                if g.clocks:
                    g.clocks.absorb_all(I[some], bar["done"])
    g.failed[I[~passed]] = g.events
    g.write(op.out[0], "pred", I, passed)


COPIES = {
    "st_async": _st_async, "mbar_init": _mbar_init, "mbar_arrive": _mbar_arrive, "mbar_wait": _mbar_wait,
    "cp_async": _cp_async, "cp_commit": _cp_commit, "cp_wait": _cp_wait, "cp_arrive": _cp_arrive, "bulk": _bulk,
    "bulk_store": _bulk_store, "bulk_commit": _bulk_commit, "bulk_wait": _bulk_wait,
}  # fmt: skip
