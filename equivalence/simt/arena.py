"""The memory that kernels may touch: where tensors lie, and one copy of all of it."""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

GAP = 256  # bytes between tensors in the arena: an access past an end meets no other tensor


def spans(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """First byte and size in bytes of the memory that each tensor's elements lie in, gaps between rows included."""
    out = []
    for t in tensors:
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        out.append((t.data_ptr(), (last + 1) * t.element_size() if t.numel() else 0))
    return out


class Arena:
    """One copy of all tensors' memory: overlapping tensors share bytes. Real addresses stay what kernels see.

    Memory that only weights lie in comes last, from `hot` on: nothing writes it, so that it need not be kept twice.
    """

    def __init__(self, tensors: Sequence[Tensor], weights: Sequence[Tensor] = ()):
        self.tensors = tensors
        self.starts, self.ends = merged(spans([*tensors, *weights]))
        sizes, hot = self.ends - self.starts, np.searchsorted(self.starts, [a for a, n in spans(tensors) if n], "right")
        self.order = np.argsort(~np.isin(np.arange(len(sizes)) + 1, hot), kind="stable")  # as they lie in `mem`
        # The same remainder modulo GAP as the real address, so that views of words stay aligned.
        rooms = ((sizes + 2 * GAP - 1) // GAP * GAP)[self.order]
        self.at = np.empty_like(self.starts)
        self.at[self.order] = np.cumsum(np.concatenate([[0], rooms]))[:-1]
        self.at += self.starts % GAP + GAP
        self.hot = int(rooms[: len(np.unique(hot))].sum()) + GAP
        self.mem = np.zeros(int(rooms.sum()) + 2 * GAP, np.uint8)
        for view, place in self._views():
            self.mem[place : place + len(view)] = view

    def _views(self):
        for start, end, at in zip(self.starts.tolist(), self.ends.tolist(), self.at.tolist(), strict=True):
            yield np.frombuffer((ctypes.c_uint8 * (end - start)).from_address(start), np.uint8), at

    def write_back(self) -> None:
        for view, place in self._views():
            view[:] = self.mem[place : place + len(view)]

    def address(self, offset: int) -> int:
        i = self.order[max(0, int(np.searchsorted(self.at[self.order], offset, "right")) - 1)]
        return int(self.starts[i] + offset - self.at[i])


def merged(intervals: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted disjoint (starts, ends) of (start, size) intervals."""
    out: list[list[int]] = []
    for start, size in sorted(i for i in intervals if i[1]):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], start + size)
        else:
            out.append([start, start + size])
    return tuple(np.array(out, np.int64).reshape(-1, 2).T)
