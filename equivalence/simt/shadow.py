"""What the race detector keeps of memory: the last accesses of each cell of 2 bytes.

In shared memory most accesses are to whole units of 16 bytes. All cells of a unit are then alike, and the first of them
stands for all (`Units`), until an access touches a part of the unit: that splits it for good, into parts of that size.
"""

import numpy as np

CELL = 2  # bytes
UNIT = 16  # bytes
PARTS = UNIT // CELL
LEVELS = {16: 0, 8: 1, 4: 2, 2: 3, 1: 3}  # by the bytes of a part


class Accesses:
    """Per cell: lane + 1 (0: none), its clock then, PTX line, and whether it is relaxed or stronger."""

    def __init__(self, n: int):
        self.actor, self.epoch, self.line = (np.zeros(n, np.int32) for _ in range(3))
        self.strong, self.any_strong = np.zeros(n, bool), False

    def put(self, cells, actor, epoch, line, strong) -> None:
        self.actor[cells], self.epoch[cells], self.line[cells] = actor + 1, epoch, line
        if strong or self.any_strong:
            self.strong[cells], self.any_strong = strong, True


class Shadow:
    """size: bytes of the memory. readers: reads that are kept of a cell; those of a cell lie together."""

    def __init__(self, size: int, readers: int):
        self.size, self.readers, n = size, readers, self.count(size)
        self.write, self.reads, self.user = Accesses(n), Accesses(n * readers), Accesses(n)
        self.proxy, self.pending = np.zeros(n, bool), np.zeros(n, bool)
        self.barriers = np.zeros(n, np.int32)  # PTX line of the mbarrier.init of a live mbarrier
        self.using = np.zeros(n, np.int16)  # how many operands of unfinished work, by `user`

    def count(self, size: int) -> int:
        return size // CELL + 1

    def cells(self, offsets, n):
        """The cells [..., cells] of accesses of n bytes each at offsets [...]; of several n, the largest."""
        n = n if isinstance(n, int) else int(np.max(n))
        return (np.asarray(offsets)[..., None] + np.arange(0, max(n, CELL), CELL)) // CELL

    def address(self, cell: int) -> int:
        """The offset of a cell's first byte."""
        return cell * CELL


class Units(Shadow):
    """The first cells of all units lie together, then the second ones, and so on. levels: into how many parts a unit is
    split, as a power of two. Only the first cell of each part is kept."""

    def __init__(self, size: int, readers: int):
        self.units = -(-size // UNIT)
        self.levels = np.zeros(self.units, np.int8)
        super().__init__(size, readers)

    def count(self, size: int) -> int:
        return self.units * PARTS

    def cells(self, offsets, n):
        """As of Shadow; the first cells of the parts that are touched."""
        n, offsets = max(n if isinstance(n, int) else int(np.max(n)), CELL), np.asarray(offsets)
        if not offsets.size:
            return super().cells(offsets, n)
        odd = int(np.bitwise_or.reduce(offsets, axis=None)) | n | UNIT
        need = LEVELS[odd & -odd]
        if not need:
            units = offsets[..., None] // UNIT + np.arange(n // UNIT)
        else:
            units = (offsets[..., None] + np.arange(0, n, UNIT >> need)) // UNIT
        levels = self.levels.take(units)
        low, need = int(levels.min()), max(need, int(levels.max()))
        if not need:
            return units
        if low < need:
            self._divide(units, need)
        at = offsets[..., None] + np.arange(0, n, UNIT >> need)
        return at // UNIT + at % UNIT // CELL * self.units

    def _divide(self, units, level: int) -> None:
        inside = np.zeros(self.units, bool)
        inside[units] = True
        for old in range(level):
            new = np.flatnonzero(inside & (self.levels == old))
            self.levels[new] = level
            new = new[self._touched(new)]  # the cells of others are all alike
            for part in range(0, PARTS, PARTS >> level) if len(new) else ():
                if whole := part % (PARTS >> old):
                    self._copy(part - whole, part, new)

    def _touched(self, units):
        """Whether there was any access to them, or a barrier in them."""
        out = np.zeros(len(units), bool)
        for kept in (self.write.actor, self.user.actor, self.reads.actor, self.barriers):
            out |= kept.reshape(PARTS, self.units, -1)[:, units].any((0, 2))
        return out

    def _copy(self, one: int, other: int, units) -> None:
        """The state of one part of these units becomes that of another."""
        for of in (self, self.write, self.user, self.reads):
            for kept in vars(of).values():
                if isinstance(kept, np.ndarray) and kept is not self.levels:
                    parts = kept.reshape(PARTS, self.units, -1)
                    parts[other, units] = parts[one, units]

    def address(self, cell: int) -> int:
        return cell % self.units * UNIT + cell // self.units * CELL
