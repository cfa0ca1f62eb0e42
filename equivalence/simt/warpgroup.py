"""Matrix multiplication by warpgroups (wgmma), over the lanes I (sorted) of a Grid.

Each warp multiplies its 16 of the 64 rows of A, as late as the wait for it: A and B are read then, and until then the
accumulators hold NaN. A warpgroup is four consecutive warps of a CTA; its warps must issue the same multiplications.
"""

from collections import deque

import numpy as np

from .ir import Op, Reg
from .lanes import cvt_f32_bf16, cvt_f32_f16

UNITS = np.array([1, 8, 4, 2])  # 16-byte units of a row of the swizzling pattern, by the descriptor's mode
FIELDS = 0xC000_3FFF_3FFF_3FFF  # bits of a descriptor that may be set: no base offset
FIRST = np.array([0, 8])  # columns where units start
NAN = np.uint32(0x7FC00000)


def places(descriptors, rows, transposed: bool, columns=np.arange(16)):
    """Byte addresses [warps, rows, columns] of elements (row, k) in a CTA's shared memory.

    descriptors: uint64 [warps]. rows: [warps, rows], along M or N. transposed: neighbours in memory differ in the row.
    columns: each k. Eight neighbours make a unit of 16 bytes, aligned.
    Source: PTX ISA 9.0, matrix descriptor and canonical layouts; offsets there are from the start address, and the
    swizzle exchanges bits 4..6 of the whole address.
    """
    d = np.asarray(descriptors, np.uint64)
    start, lead, stride = ((d >> np.uint64(s) & np.uint64(0x3FFF)).astype(np.int64) * 16 for s in (0, 16, 32))
    start, lead, stride = (x[:, None, None] for x in (start, lead, stride))
    units = UNITS[(d >> np.uint64(62)).astype(np.int64)][:, None, None]
    r, k = np.asarray(rows)[:, :, None], columns
    plain = units == 1
    if transposed:
        far = np.where(plain, r // 8 * stride + k // 8 * lead, r // 8 // units * lead + k // 8 * stride)
        at = far + r // 8 % units * 16 + k % 8 * 16 * units + r % 8 * 2
    else:
        at = r // 8 * stride + r % 8 * 16 * units + np.where(plain, k // 8 * lead, k // 8 * 16) + k % 8 * 2
    a = start + at
    return a ^ (a >> 7 & units - 1) << 4


def warps_of(I):
    """The warps of lanes I (sorted)."""
    ws = I // 32
    return ws[np.concatenate(([True], ws[1:] != ws[:-1]))]


class Flight:
    """The multiplications that nobody has waited for, and the registers that they use."""

    def __init__(self, g):
        ops = [op for block in g.code.blocks for op in block.ops if op.kind == "wgmma"]
        collective = any(op.kind[:2] == "wg" for block in g.code.blocks for op in block.ops)
        outs = {r.name for op in ops for r in op.out}
        used = outs | {
            a.source.name for op in ops for a in op.args[2:] if isinstance(a.source, Reg) and len(op.args) == 6
        }
        warps, self.g = g.size // 32, g
        self.number = {name: i for i, name in enumerate(used)}
        self.counts, self.users = (np.zeros((len(used), warps), np.int32) for _ in range(2))  # per register and warp
        self.writes = np.full((len(used), warps), -1, np.int32)
        self.uses = dict(zip(used, self.counts, strict=True))  # unfinished multiplications, per warp
        self.user = dict(zip(used, self.users, strict=True))  # PTX lines
        self.dirty = dict(zip(used, self.writes, strict=True))
        self.rows = {id(op): np.array([[self.number[name]] for name in self.names(op)]) for op in ops}
        self.sums = {name: np.zeros(g.size, np.uint32) for name in outs}  # accumulators while they are in use
        self.groups = [deque([[]]) for _ in range(warps if collective else 0)]  # per warp, the last one is open
        self.issued = np.zeros(warps, np.int64)  # number of the sequence of lines, of those in `sequences`
        self.sequences: dict[tuple[int, int], int] = {}
        self.last = np.zeros(warps, np.int64)

    def issue(self, op: Op, I) -> None:
        g, ws = self.g, warps_of(I)
        g.whole(op, I)
        if len(I) != 32 * len(ws) or (ws % g.warps // 4 * 4 + 4 > g.warps).any():
            raise g.fault(op.line, int(I[0]), "needs a warpgroup of four whole warps")
        scale, *descriptors = (g.read(a, I).reshape(-1, 32) for a in op.args[: 2 + (len(op.args) == 3)])
        for v in (scale, *descriptors):
            if (v != v[:, :1]).any():
                raise g.fault(op.line, int(I[0]), "lanes of a warp differ in a descriptor or in scale-d")
        for v in descriptors:
            if (bad := v[:, 0] & ~np.uint64(FIELDS)).any():
                raise g.fault(
                    op.line, int(I[0]), "matrix descriptor with a base offset or unknown bits", int(bad.max())
                )
        offsets = self.operands(op, ws, [d[:, 0] for d in descriptors])
        if g.machine.races:
            g.machine.races.wgmma(g, op, ws, offsets)
        self.hide(op, ws, I)
        rows = self.rows[id(op)]
        self._count(rows, ws, 1)
        self.users[rows, ws] = op.line
        for w in ws.tolist():
            self.issued[w] = self.sequences.setdefault((int(self.issued[w]), op.line), len(self.sequences) + 1)
        self.last[ws] = op.line
        for i, w in enumerate(ws.tolist()):
            self.groups[w][-1].append((op, scale[i, 0], *(o[i] for o in offsets)))

    def _count(self, rows, ws, by: int) -> None:
        if len(rows) == len(set(rows[:, 0].tolist())):
            self.counts[rows, ws] += by
        else:
            np.add.at(self.counts, (rows, ws), by)  # a register counts as often as it is named

    def touch(self, name: str, I, write: bool) -> None:
        """Another instruction reads or writes a register that multiplications use."""
        ws = warps_of(I)
        if self.g.machine.races:
            self.g.machine.races.register(self.g, self.g.line, name, ws, write)
        if write:
            self.dirty[name][ws] = self.g.line

    def fence(self, ws) -> None:
        self.writes[:, ws] = 0

    @staticmethod
    def names(op: Op) -> list[str]:
        a = op.args[2:] if len(op.args) == 6 else ()
        return [r.name for r in op.out] + [x.source.name for x in a if isinstance(x.source, Reg)]

    def commit(self, I) -> None:
        for w in warps_of(I).tolist():
            self.groups[w].append([])

    def wait(self, op: Op, I) -> None:
        self.g.whole(op, I)
        ready = {}
        for w in warps_of(I).tolist() if self.groups else ():
            mine = self.groups[w]
            ready[w] = deque(x for _ in range(max(0, len(mine) - 1 - op.more["keep"])) for x in mine.popleft())
        while ready := {w: q for w, q in ready.items() if q}:
            first = next(iter(ready.values()))[0][0]
            at = [w for w, q in ready.items() if q[0][0] is first]
            self.land(first, np.array(at), [ready[w].popleft()[1:] for w in at])
        if self.g.machine.races:
            self.g.machine.races.warps(self.g, warps_of(I))

    def operands(self, op: Op, ws, descriptors):
        """Offsets in `smem`, in bytes, of the units of 16 bytes of B and of A, unless A is in registers: [warps, N, 2]
        and [warps, 16, 2], if transposed [warps, N / 8, 16] and [warps, 2, 16]."""
        g, n = self.g, op.more["n"]
        rows = np.broadcast_to(np.arange(n), (len(ws), n)), ws[:, None] % g.warps % 4 * 16 + np.arange(16)
        out = []
        for d, r, trans in zip(descriptors, rows, op.more["trans"][::-1], strict=False):
            a = places(d, r[:, ::8], True) if trans else places(d, r, False, FIRST)
            bad = (a.min((1, 2)) < 1024) | (a.max((1, 2)) + 16 > g.code.listing.dynamic + g.kernel.smem)
            if bad.any():
                i = int(np.flatnonzero(bad)[0])
                raise g.fault(op.line, int(ws[i]) * 32, "address outside shared memory", int(a[i].max()) + 14)
            out.append(a + (ws // g.warps * g.smem_bytes)[:, None, None])
        return out

    def hide(self, op: Op, ws, I) -> None:
        """Set the accumulators aside."""
        for r in op.out:
            lanes = I[np.repeat(self.uses[r.name][ws] == 0, 32)]
            self.sums[r.name][lanes] = self.g.registers[r.name][lanes]
            self.g.registers[r.name][I] = NAN

    def land(self, op: Op, ws, entries) -> None:
        lanes = (ws[:, None] * 32 + np.arange(32)).ravel()
        scale, *offsets = (np.array(v) for v in zip(*entries, strict=True))
        D = self.multiply(op, lanes, scale, offsets)
        self._count(self.rows[id(op)], ws, -1)
        self.show(op, ws, lanes, D)
        if self.g.machine.races:
            self.g.machine.races.wgmma_done(self.g, op, ws, offsets)

    def multiply(self, op: Op, lanes, scale, offsets):
        """The sums [warps, 16, N]."""
        g, n, up = self.g, op.more["n"], cvt_f32_bf16 if op.more["type"] == "bf16" else cvt_f32_f16
        offsets = [_elements(o, t) for o, t in zip(offsets, op.more["trans"][::-1], strict=False)]
        B, *A = (up(g.smem.view(np.uint16)[o // 2]).astype(np.float64) for o in offsets)
        A = A[0] if A else _fragments([g.read(a, lanes) for a in op.args[2:]], up)
        C = np.zeros((len(A), 16, n))
        for name, rows, columns in _quarters(op):
            C[:, rows, columns] = self.sums[name][lanes].view(np.float32).reshape(-1, 8, 4)
        sign = op.more["signs"][0] * op.more["signs"][1]
        return (sign * (A @ B.transpose(0, 2, 1)) + np.where(scale[:, None, None], C, 0)).astype(np.float32)

    def show(self, op: Op, ws, lanes, D) -> None:
        """Put sums where they belong: into registers, unless other multiplications still use those."""
        for name, rows, columns in _quarters(op):
            self.sums[name][lanes] = np.ascontiguousarray(D[:, rows, columns]).view(np.uint32).ravel()
            done = lanes[np.repeat(self.uses[name][ws] == 0, 32)]
            self.g.registers[name][done] = self.sums[name][done]

    def finish(self) -> None:
        """Fault if the warps of a warpgroup did not issue the same multiplications."""
        g = self.g
        groups = self.issued.reshape(g.ctas, g.warps)[:, : g.warps // 4 * 4].reshape(-1, 4)
        if (groups != groups[:, :1]).any():
            w = int(np.argmax(self.last))
            raise g.fault(int(self.last[w]), 32 * w, "needs a warpgroup of four whole warps")


class Unmultiplied(Flight):
    """Multiplications whose results nobody looks at."""

    def hide(self, op: Op, ws, I) -> None:
        pass

    def multiply(self, op: Op, lanes, scale, offsets) -> None:
        for a in op.args[2:] if len(op.args) == 6 else ():
            self.g.read(a, lanes)  # which may touch what another one uses

    def show(self, op: Op, ws, lanes, D) -> None:
        pass


def _elements(units, transposed: bool):
    """Offsets of elements [warps, rows, 16] from those of their units."""
    ways = units[..., None] + np.arange(0, 16, 2)
    ways = ways.transpose(0, 1, 3, 2) if transposed else ways
    return ways.reshape(len(units), -1, 16)


def _quarters(op: Op) -> list[tuple[str, slice, slice]]:
    """Each accumulator with its rows and columns."""
    return [(r.name, slice(i // 2 % 2 * 8, i // 2 % 2 * 8 + 8), slice(i // 4 * 8 + i % 2, i // 4 * 8 + 8, 2))
            for i, r in enumerate(op.out)]  # fmt: skip


def _fragments(words, up):
    """A [warps, 16, 16] from its four registers."""
    A = np.empty((len(words[0]) // 32, 16, 16))
    for i, r in enumerate(words):
        A[:, 8 * (i & 1) :, 8 * (i >> 1) :][:, :8, :8] = up(np.ascontiguousarray(r).view(np.uint16)).reshape(-1, 8, 8)
    return A


def _wgmma(g, op: Op, I) -> None:
    g.flight.issue(op, I)


def _commit(g, op: Op, I) -> None:
    g.flight.commit(I)


def _wait(g, op: Op, I) -> None:
    g.flight.wait(op, I)


def _fence(g, op: Op, I) -> None:
    g.whole(op, I)
    g.flight.fence(warps_of(I))


WARPGROUP = {"wgmma": _wgmma, "wg_commit": _commit, "wg_wait": _wait, "wg_fence": _fence}
