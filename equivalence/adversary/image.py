"""All that a step produces and writes in one buffer of 32-bit words, so that one comparison of bits sees everything.

Weights lie elsewhere: they are constant since load. Each tensor keeps its strides; what lies between its rows and
between tensors is part of the buffer, and is poisoned.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fast.kernel import Arg, Kernel
from reference.stage import ContractError, Role

from .kernels import CHUNK

# NaN in bf16 and fp32, absurd as an integer; which one is found says how it came there.
STALE = 0x7FC17FC1  # what stood in a tensor before its producer wrote
LATE = 0x7FC27FC2  # what the producer leaves in outputs: found there, the kernel stored before it was safe
BESIDE = 0x7FC37FC3  # padding, gaps, unowned slots
ALIGN = 64  # words


class Image:
    """The layout of the tensors of kernels in `words` int32."""

    def __init__(self, kernels: Iterable[Kernel]):
        self.args: dict[str, Arg] = {}
        for kernel in kernels:
            for arg in kernel.args:
                if arg.role is Role.WEIGHT:
                    continue
                known = self.args.setdefault(arg.name, arg)
                if (known.shape, known.strides, known.dtype) != (arg.shape, arg.strides, arg.dtype):
                    raise ContractError(f"{kernel.name}: {arg.name} has another layout than in the kernel before")
        self.starts, at = {}, ALIGN
        for name, arg in self.args.items():
            self.starts[name] = at
            at += -(-self._bytes(arg) // (4 * ALIGN)) * ALIGN + ALIGN
        self.size = max(CHUNK, 1 << (at - 1).bit_length())  # few sizes, so few producers to compile

    @staticmethod
    def _bytes(arg: Arg) -> int:
        return (sum((n - 1) * s for n, s in zip(arg.shape, arg.strides, strict=True)) + 1) * arg.dtype.itemsize

    def region(self, words: Tensor, name: str) -> Tensor:
        """The words of a tensor and of the gaps between its rows."""
        return words[self.starts[name] :][: -(-self._bytes(self.args[name]) // 4)]

    def view(self, words: Tensor, name: str) -> Tensor:
        """The tensor itself, as the kernels take it."""
        arg = self.args[name]
        return words[self.starts[name] :].view(arg.dtype).as_strided(
            arg.shape, arg.strides, (words.storage_offset() + self.starts[name]) * 4 // arg.dtype.itemsize
        )  # fmt: skip

    def names(self, *roles: Role) -> tuple[str, ...]:
        return tuple(n for n, a in self.args.items() if a.role in roles)

    @property
    def produced(self) -> tuple[str, ...]:
        """What a kernel may read only after its wait: everything but weights and what it only writes."""
        return tuple(n for n, a in self.args.items() if a.role is not Role.OUTPUT)

    def truth(self, values: dict[str, Tensor]) -> Tensor:
        """The words once the producers are done: true values, zeroed scratch, LATE in outputs, BESIDE elsewhere."""
        words = torch.full((self.size,), BESIDE, dtype=torch.int32)
        for name, arg in self.args.items():
            if arg.role is Role.OUTPUT:
                self.region(words, name).fill_(LATE)
            elif arg.role is Role.SCRATCH:
                self.view(words, name).zero_()
            else:
                self.view(words, name).copy_(values[name])
        return words

    def start(self, truth: Tensor, stale: Iterable[str], wrong: dict[str, Tensor]) -> Tensor:
        """The words before the producers: NaN in the stale tensors and in outputs; indices get legal, wrong values."""
        words = truth.clone()
        for name in self.names(Role.OUTPUT):
            self.region(words, name).fill_(STALE)
        for name in stale:
            if name in wrong:
                self.view(words, name).copy_(wrong[name])
            else:
                self.region(words, name).fill_(STALE)
        return words

    def locate(self, word: int) -> str:
        """The tensor that a word belongs to, or what it lies behind."""
        name = max((n for n, s in self.starts.items() if s <= word), key=self.starts.get, default=None)
        if name is None:
            return "the guard before the first tensor"
        at = word - self.starts[name]
        return name if 4 * at < self._bytes(self.args[name]) else f"the guard behind {name}"

    def rows(self, tokens: int, rows: Tensor) -> Tensor:
        """Which words [size] bool lie in `rows` of the activations and outputs that have one row per token."""
        marks = torch.zeros(self.size, dtype=torch.int32, device=rows.device)
        for name in self.by_row(tokens):
            self.view(marks, name)[rows] = 1
        return marks != 0

    def by_row(self, tokens: int) -> tuple[str, ...]:
        wanted = (Role.ACTIVATION, Role.OUTPUT)
        return tuple(n for n, a in self.args.items() if a.role in wanted and a.shape[0] == tokens)
