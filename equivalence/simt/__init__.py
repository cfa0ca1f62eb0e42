"""Run the kernels' PTX on a CPU.

    launch(kernel, tensors)           # one launch, in place on CPU tensors
    FastDecoder(..., extra=interpreted())  # twins served by the interpreter, in lockstep with the law or alone

Rooms: `parse` reads PTX (with the order checker's reader), `opcodes` describes what one lane computes, `translate`
makes blocks of operations. Two back ends execute those: `emit_c` and `native` as compiled C, for results; `lanes` and
`machine` in numpy, where order can be varied and watched.

What is exact: integers, moves, fp32 add, mul and fma (rounded once, also downwards), conversions, packed and mixed
forms. What a GPU approximates is here the double-precision result, rounded once (`opcodes`); mma adds in double. So a
run agrees with a GPU to the last few bits of fp32, not bit for bit.
What plain runs do not show: order. Kernels of a stream run one after the other, asynchronous copies land at once.
"""

from .launch import BACKENDS, TARGET, Interpreted, backend, interpreted, launch
from .native import Fault, compiler
from .parse import Unsupported

__all__ = ["BACKENDS", "TARGET", "Fault", "Interpreted", "Unsupported", "backend", "compiler", "interpreted", "launch"]
