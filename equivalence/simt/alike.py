"""Clocks for lanes that act alike: one per class of lanes of each warp, where `clocks` has one per lane.

Lanes of a warp are in one class if they take part in the same events: arrive, wait, fence and meet by the same
instruction each time. Then any other lane knows as much of each of them, and they differ only in what they know of
themselves: `own`. An event that parts a class raises `Finer`, and the run starts again with smaller classes, so that
what is known is exact. One grid of one cluster.
"""

import numpy as np

from .clocks import ROWS, Clocks, Known

ALL = np.arange(32)  # a class of its own for each lane
ONE = np.minimum(ALL, 1)  # the first lane, which is often elected, and the others


class Finer(Exception):
    """Some lanes of a class act without the others. classes: by lane of a warp, smaller ones."""

    def __init__(self, classes: np.ndarray):
        super().__init__(f"{classes.max() + 1} classes")
        self.classes = classes


class Alike(Clocks):
    """classes: number of the class of each lane of a warp.

    row[c, :, d]: what a lane of class c knows of any lane of class d but itself; for a class of one, of itself.
    """

    def __init__(self, lanes: int, classes: np.ndarray):
        super().__init__(0, 1, np.zeros(1, bool))
        self.classes, self.per = classes, int(classes.max()) + 1
        self.warps, self.count = lanes // 32, lanes // 32 * self.per
        self.of = (np.arange(self.warps)[:, None] * self.per + classes).ravel()
        self.of_actor = np.append(0, self.of)  # by lane + 1, as accesses are noted
        self.size = np.tile(np.bincount(classes), self.warps)
        self.row = np.zeros((self.count, 4, self.count), np.int32)
        self.own = np.zeros((self.count, 4), np.int32)
        self.cluster, self.seen = np.zeros(lanes, np.int64), np.zeros((lanes, 1), bool)
        self._tick(np.arange(self.count))

    def _of(self, I):
        """The classes of these lanes, each of which must be whole."""
        found = self.of[I] if len(I) == 1 else np.flatnonzero(np.bincount(self.of[I], minlength=self.count))
        if self.size[found].sum() != len(I):
            raise Finer(self._parted(I))
        return found

    def _parted(self, I) -> np.ndarray:
        inside = np.zeros(len(self.of), bool)
        inside[I] = True
        masks = np.unique(inside.reshape(-1, 32), axis=0)
        return np.unique(np.vstack([self.classes, masks]), axis=1, return_inverse=True)[1].ravel()

    def _each(self, I) -> None:
        if (self.size[self.of[I]] > 1).any():
            raise Finer(ALL)

    def _tick(self, c) -> None:
        self.own[c, 0] += 1
        self._single(c)

    def _single(self, c) -> None:
        one = c[self.size[c] == 1]
        self.row[one, :, one] = self.own[one]

    def _together(self, c):
        """What any lane of these classes knows: [4, classes]."""
        known = self.row[c].max(0) if len(c) > 1 else self.row[c[0]].copy()
        known[:, c] = np.maximum(known[:, c], self.own[c].T)
        return known

    def _of_each(self, c):
        """What any lane of each of these groups of classes knows: [groups, 4, classes]."""
        known, at = self.row[c].max(1) if c.shape[1] > 1 else self.row[c[:, 0]], np.arange(len(c))[:, None]
        known[at, :, c] = np.maximum(known[at, :, c], self.own[c])
        return known

    def now(self, I):
        return self.own[self.of[I], 0]

    def tick(self, I) -> None:
        self._tick(self._of(I))

    def given(self, I, release: bool = True) -> Known:
        """What these lanes hand on at once: all that they know, or the mbarriers that they know of alone."""
        c = self._of(I)
        known = self._together(c)
        if release:
            self._tick(c)
        else:
            known[:3] = 0
        return {0: known}, self.seen[0]

    def snapshot(self, lane: int) -> Known:
        return self.given(np.array([lane]))

    def snapshots(self, I) -> list[Known]:
        if len(I) == 1:
            return [self.given(I)]
        ws, counts = np.unique(I // 32, return_counts=True)
        c = self._of(I)
        if len(c) % len(ws) or (c.reshape(len(ws), -1) // self.per != ws[:, None]).any():
            return [known for lanes in np.split(I, counts.cumsum()[:-1]) for known in [self.given(lanes)] * len(lanes)]
        seen = self.seen[0]
        known = [({0: row}, seen) for row in self._of_each(c.reshape(len(ws), -1))]
        self._tick(c)
        return [one for one, n in zip(known, counts.tolist(), strict=True) for one in [one] * n]

    def series(self, lane: int, count: int) -> list[Known]:
        """What a lane hands on by each of so many copies that follow each other: `snapshot` again and again."""
        (c,) = self._of(np.array([lane]))
        rows = np.repeat(self._together(np.array([c]))[None], count, 0)
        rows[:, 0, c] += np.arange(count, dtype=np.int32)
        self.own[c, 0] += count
        self._single(np.array([c]))
        return [({0: row}, self.seen[0]) for row in rows]

    def absorb(self, lane: int, known: Known | None) -> None:
        self.absorb_all(np.array([lane]), known)

    def absorb_all(self, I, known: Known | None) -> None:
        if known is None or not len(I):
            return
        c, row = self._of(I), known[0][0]
        self.row[c] = np.maximum(self.row[c], row)
        self.own[c] = np.maximum(self.own[c], row[:, c].T)

    def join(self, I) -> None:
        c = self._of(I)
        known = self._together(c)
        self.row[c], self.own[c] = known, known[:, c].T
        self._tick(c)

    def join_warps(self, ws) -> None:
        """`meet` of all lanes of each of these warps."""
        if self.released or self.acquired:
            for w in ws.tolist():
                self.meet(np.arange(32 * w, 32 * w + 32))
            return
        c, at = ws[:, None] * self.per + np.arange(self.per), np.arange(len(ws))[:, None]
        known = self._of_each(c)
        self.row[c], self.own[c] = known[:, None], known[at, :, c]
        self._tick(c.ravel())

    def fence(self, I, scope: str) -> None:
        self._each(I)
        super().fence(I, scope)

    def proxy_fence(self, I, spaces) -> None:
        c = self._of(I)
        for r in (ROWS[space] for space in spaces):
            self.row[c, r] = np.maximum(self.row[c, r], self.row[c, 0])
            self.own[c, r] = np.maximum(self.own[c, r], self.own[c, 0])
        self._tick(c)

    def unordered(self, I, actor, epoch, proxy=0, together: bool = False):
        if together:
            ws, which = np.unique(I // 32, return_inverse=True)
            out = self.of_warps(ws, proxy)[which, self.of[actor]] < epoch
            return out
        known = self.row[self.of[I], proxy, self.of[actor]]
        return np.where(I == actor, self.own[self.of[I], proxy], known) < epoch

    def of_warps(self, ws, r: int):
        """What any lane of each warp knows: [warps, classes]."""
        c = ws[:, None] * self.per + np.arange(self.per)
        known, at = self.row[c, r].max(1), np.arange(len(ws))[:, None]
        known[at, c] = np.maximum(known[at, c], self.own[c, r])
        return known

    def know(self, I, actor: int, epoch: int, rows) -> bool:
        actors, epochs = np.full(len(I), actor), np.full(len(I), epoch)
        return not np.logical_and.reduce([self.unordered(I, actors, epochs, r) for r in rows]).any()

    def all_know(self, I, actor, epoch, r: int = 0, besides=False) -> bool:
        """Whether each lane knows of the accesses of its row: actor (lane + 1, 0 for none), epoch and besides (what is
        taken as known) are [..., lanes, cells]."""
        c = self.of[I]
        if len(I) == 1:
            table = self.row[c[0], r].take(self.of_actor)
            table[I[0] + 1] = self.own[c[0], r]
            return bool(((table.take(actor) >= epoch) | besides).all())
        known = self.row.ravel().take(((c * 4 + r) * self.count)[:, None] + self.of_actor.take(actor)) >= epoch
        known |= besides
        if known.all():
            return True
        own = (actor == I[:, None] + 1) & (self.own[c, r][:, None] >= epoch)
        return bool((known | own).all())

    def warps_know(self, ws, actor, epoch, r: int = 0, besides=False) -> bool:
        """`all_know` for whole warps: what any lane of one knows counts."""
        known = self.of_warps(ws, r)[np.arange(len(ws))[:, None], self.of_actor.take(actor)] >= epoch
        return bool((known | besides).all())
