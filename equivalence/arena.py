"""The buffers of a step in one allocation, so that "nothing else was touched" is one comparison of bits.

Every buffer starts at a multiple of 256 bytes and is followed by at least 256 bytes of guard words. All words, guards
included, begin as a pattern that reads as NaN in bf16 and fp32 and as an absurd number in int32 and int64.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from reference.numerics import Numerics
from reference.plan import Plan, Ref, Workspace

WORD = torch.int16
POISON = 0x7FC1
ALIGN = 128  # words


class ArenaSpace(Workspace):
    """A workspace whose buffers are views of `words` [n] int16."""

    def __init__(self, made: Plan, weights, state, num: Numerics, device: torch.device):
        super().__init__(made, weights, state, num, device)
        self.starts, total = {}, ALIGN
        for name, t in self.act.items():
            self.starts[name] = total
            total += -(-t.numel() * t.element_size() // (2 * ALIGN)) * ALIGN + ALIGN
        self.words = torch.full((total,), POISON, dtype=WORD, device=device)
        self.act = {
            name: self.words[self.starts[name] :][: t.numel() * t.element_size() // 2].view(t.dtype).view(t.shape)
            for name, t in self.act.items()
        }
        self.poison = torch.full_like(self.words, POISON)
        self._masks: dict[tuple, Tensor] = {}

    def mask(self, refs: Iterable[Ref], *, inside: bool = True) -> Tensor:
        """Which words [n] bool lie in the buffers or columns named by `refs`, or which do not."""
        refs = frozenset(refs)
        if (refs, inside) not in self._masks:
            where = torch.zeros(len(self.words), dtype=torch.bool)
            for ref in refs:
                t = self.act[ref.name]
                wide = t.element_size() // 2
                part = where[self.starts[ref.name] :][: t.numel() * wide].view(*t.shape, wide)
                part = part if ref.cols is None else part[:, ref.cols[0] : ref.cols[1]]
                (part if ref.rows is None else part[-ref.rows :]).fill_(True)
            self._masks[refs, inside] = (where == inside).to(self.words.device)
        return self._masks[refs, inside]

    def locate(self, word: int) -> str:
        """A word in words: buffer, row and element of it, or the guard behind a buffer."""
        name = max((n for n, s in self.starts.items() if s <= word), key=lambda n: self.starts[n], default=None)
        if name is None:
            return "the guard before the first buffer"
        t = self.act[name]
        at = (word - self.starts[name]) * 2 // t.element_size()
        if at >= t.numel():
            return f"the guard behind {name}, {at - t.numel()} elements past its end"
        return f"{name}{[int(i) for i in torch.unravel_index(torch.tensor(at), t.shape)]}"
