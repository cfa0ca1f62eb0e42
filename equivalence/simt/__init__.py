"""Run the kernels' PTX on a CPU.

    launch(kernel, tensors)           # one launch, in place on CPU tensors
    FastDecoder(..., extra=interpreted())  # twins served by the interpreter, in lockstep with the law or alone

Rooms: `parse` reads PTX (with the order checker's reader), `opcodes` describes what one lane computes, `translate`
makes blocks of operations. Two back ends execute those: `emit_c` and `native` as compiled C, for results; `lanes`,
`operations`, `copies`, `warpgroup` and `machine` in numpy, where order can be varied and watched.

What is exact: integers, moves, fp32 add, mul and fma (rounded once, also downwards), conversions, packed and mixed
forms. What a GPU approximates is here the double-precision result, rounded once (`opcodes`); mma adds in double. So a
run agrees with a GPU to the last few bits of fp32, not bit for bit.
What plain runs do not show: order. Kernels of a stream run one after the other, asynchronous copies land at once.
`watch(launches)` shows it: several launches of one stream in the order that is worst for them (`machine`), with a
detector of accesses that nothing orders (`races`, which says what it cannot see). A mutant's fault then shows in
values, as the memory of before, or in a report; weak memory itself is not executed, and SASS may differ from PTX.
"""

from .native import Fault, compiler
from .parse import Unsupported
from .races import Race
from .runner import BACKENDS, TARGET, Interpreted, backend, interpreted, launch, watch

__all__ = [
    "BACKENDS", "TARGET", "Fault", "Interpreted", "Race", "Unsupported", "backend", "compiler", "interpreted", "launch",
    "watch",
]  # fmt: skip
