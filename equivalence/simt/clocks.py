"""Who knows of whose accesses: a vector clock per lane of a grid, over the lanes of its cluster.

Each clock has four rows: of accesses; of those that a fence.proxy.async has put before asynchronous ones in shared
memory; likewise in global memory; and of mbarrier.init, which fence.mbarrier_init and a relaxed cluster barrier hand
on. What a lane knows of other clusters, by flags in global memory, is in `far`.
"""

import numpy as np

ROWS = {"shared": 1, "global": 2, "mbarrier": 3}
# What one lane may hand to another: clocks [4, lanes of a cluster] by cluster, and the grids seen as ended.
Known = tuple[dict[int, np.ndarray], np.ndarray]


def merged(*known: Known | None) -> Known | None:
    have = [k for k in known if k is not None]
    if len(have) < 2:
        return have[0] if have else None
    rows, seen = dict(have[0][0]), have[0][1]
    for some, ended in have[1:]:
        for cluster, row in some.items():
            rows[cluster] = np.maximum(rows[cluster], row) if cluster in rows else row
        seen = seen | ended
    return rows, seen


class Clocks:
    """lanes: of the grid. width: lanes of a cluster. entry: grids that every lane knows to have ended."""

    def __init__(self, lanes: int, width: int, entry: np.ndarray):
        every = np.arange(lanes)
        self.width, self.cluster, self.at = width, every // width, every % width
        self.row = np.zeros((lanes, 4, width), np.int32)
        self.row[every, 0, self.at] = 1
        self.seen = np.tile(entry, (lanes, 1))
        self.far: dict[int, dict[int, np.ndarray]] = {}
        self.released: dict[int, tuple[Known, str]] = {}  # by the last fence: what a relaxed store hands on, and scope
        self.acquired: dict[int, list[tuple[Known, int]]] = {}  # what relaxed loads saw, and of which CTA
        self.arrived: dict[tuple[int, int], Known] = {}  # cluster barriers

    def now(self, I):
        return self.row[I, 0, self.at[I]]

    def tick(self, I) -> None:
        self.row[I, 0, self.at[I]] += 1

    def snapshot(self, lane: int) -> Known:
        """What the lane knows; its later accesses are not part of it."""
        known = {int(self.cluster[lane]): self.row[lane].copy(), **self.far.get(lane, {})}, self.seen[lane].copy()
        self.tick(lane)
        return known

    def snapshots(self, I) -> list[Known]:
        """`snapshot` of each lane; lanes of one warp that arrive by one instruction hand on what any of them knows."""
        out: dict[int, Known] = {}
        for warp in np.unique(I // 32).tolist():
            lanes = I[I // 32 == warp]
            if len(lanes) == 1 or self.far:
                out.update((lane, self.snapshot(lane)) for lane in lanes.tolist())
                continue
            row = {int(self.cluster[lanes[0]]): self.row[lanes].max(0)}
            out.update(dict.fromkeys(lanes.tolist(), (row, self.seen[lanes].any(0))))
            self.tick(lanes)
        return [out[lane] for lane in I.tolist()]

    def given(self, I, release: bool) -> Known:
        """What these lanes of one cluster hand on at a barrier, together."""
        return merged(*(self.snapshot(lane) if release else self.initialised(lane) for lane in I.tolist()))

    def initialised(self, lane: int) -> Known:
        """What a relaxed arrival hands on: the mbarriers that a fence.mbarrier_init has published."""
        row = np.zeros_like(self.row[lane])
        row[3] = self.row[lane, 3]
        return {int(self.cluster[lane]): row}, np.zeros_like(self.seen[lane])

    def absorb(self, lane: int, known: Known | None) -> None:
        if known is None:
            return
        others = {c: row for c, row in known[0].items() if c != self.cluster[lane]}
        if (own := known[0].get(int(self.cluster[lane]))) is not None:
            np.maximum(self.row[lane], own, out=self.row[lane])
        if others:
            self.far[lane] = merged((self.far.get(lane, {}), known[1]), (others, known[1]))[0]
        self.seen[lane] |= known[1]

    def absorb_all(self, I, known: Known | None) -> None:
        """`absorb` by lanes that may be of several clusters."""
        for cluster in np.unique(self.cluster[I]).tolist() if known else ():
            lanes = I[self.cluster[I] == cluster]
            if set(known[0]) <= {cluster}:
                for some in np.split(lanes, np.flatnonzero(np.diff(lanes) > 1) + 1):
                    for row in known[0].values():
                        view = self.row[some[0] : some[-1] + 1]
                        np.maximum(view, row, out=view)
                self.seen[lanes] |= known[1]
                continue
            for lane in lanes.tolist():
                self.absorb(lane, known)

    def join_warps(self, ws) -> None:
        """`meet` of all lanes of each of these warps."""
        for w in ws.tolist():
            self.meet(np.arange(32 * w, 32 * w + 32))

    def meet(self, I) -> None:
        """A barrier of these lanes of one cluster: afterwards each knows what any of them knew."""
        self.join(I)
        lanes = I.tolist() if self.far or self.released or self.acquired else []
        if far := [(self.far[i], self.seen[I[0]]) for i in lanes if i in self.far]:
            self.far.update(dict.fromkeys(lanes, merged(*far)[0]))
        if fenced := [self.released[i] for i in lanes if i in self.released]:
            wide = [f for f in fenced if f[1] != "cta"] or fenced
            self.released.update(dict.fromkeys(lanes, (merged(*(f[0] for f in wide)), wide[0][1])))
        if loads := [x for i in lanes for x in self.acquired.get(i, [])]:
            self.acquired.update({i: list(loads) for i in lanes})

    def join(self, I) -> None:
        """The part of `meet` about these lanes' own clocks."""
        lanes = slice(I[0], I[-1] + 1) if I[-1] - I[0] + 1 == len(I) else I  # a view, where they follow each other
        self.row[lanes] = self.row[lanes].max(0)
        self.seen[lanes] = self.seen[lanes].any(0)
        self.tick(I)

    def fence(self, I, scope: str) -> None:
        for lane in I.tolist():
            rest = []
            for known, cta in self.acquired.pop(lane, []):
                if scope != "cta" or cta < 0:
                    self.absorb(lane, known)
                else:
                    rest.append((known, cta))
            if rest:
                self.acquired[lane] = rest
            self.released[lane] = self.snapshot(lane), scope

    def proxy_fence(self, I, spaces) -> None:
        for space in spaces:
            r = ROWS[space]
            self.row[I, r] = np.maximum(self.row[I, r], self.row[I, 0])
            for lane in [i for i in I.tolist() if i in self.far] if self.far else ():
                self.far[lane] = {c: _fenced(row, r) for c, row in self.far[lane].items()}
        self.tick(I)

    def unordered(self, I, actor, epoch, proxy=0, together: bool = False):
        """Which accesses (lane `actor` of this grid at `epoch`) lane I does not know; one of each per element.

        proxy: a row of the clocks. together: I are the first lanes of warps, and what any lane of the warp knows
        counts.
        """
        local, r = actor % self.width, proxy
        if together:
            column, index = np.unique(local, return_inverse=True)
            warps, which = np.unique(I, return_inverse=True)
            rows = self.row[warps[:, None, None] + np.arange(32)[:, None], r, column].max(1)
            out = rows[which, index] < epoch
        else:
            out = self.row[I, r, local] < epoch
        for k in np.flatnonzero(actor // self.width != self.cluster[I]).tolist():
            row = self.far.get(int(I[k]), {}).get(int(actor[k]) // self.width)
            out[k] = row is None or row[r, local[k]] < epoch[k]
        return out

    def know(self, I, actor: int, epoch: int, rows) -> bool:
        """Whether each lane knows of one of its cluster at `epoch`, by any of these rows of the clocks."""
        return bool((self.row[I[:, None], rows, actor % self.width] >= epoch).any(1).all())


def _fenced(row: np.ndarray, r: int) -> np.ndarray:
    row = row.copy()
    np.maximum(row[r], row[0], out=row[r])
    return row
