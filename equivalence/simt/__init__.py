"""Run the kernels' PTX on a CPU.

    launch(kernel, tensors)           # one launch, in place on CPU tensors
    watch(launches)                   # several launches of one stream in the worst order, with a race detector
    FastDecoder(..., extra=interpreted())  # twins served by the interpreter, in lockstep with the law or alone

Rooms: `parse` reads PTX (as `equivalence.isa` does), `opcodes` describes what one lane computes, `translate` and
`translate_async` make blocks of operations. Two back ends execute those: `emit_c` and `native` as compiled C, for
results; `lanes`, `operations`, `copies`, `warpgroup`, `grid` and `machine` in numpy, where order can be varied.
`races`, `shadow` and `clocks` detect what nothing orders. `step` makes one stream of a whole decode step. `skeleton`
and `onchip` leave the data out: what is left shows who meets whom in shared memory, whatever is computed (rule R14 of
the proof); `shape` tells which kernels that is the same for, `alike` and `batch` keep its runs short. `forms` has what
is made of an instruction once for all that differ in registers alone.

What runs: all that the twins use, which is sm_90a, sm_100a and sm_103a code without tensor maps, tcgen05 and multimem;
of sm_90a also wgmma m64nNk16 of bf16 or fp16 (A from registers or shared memory, both majors, all swizzles). Anything
else is an `Unsupported` error before the kernel starts.

What is exact: integers, moves, fp32 add, mul and fma (rounded once, also downwards), conversions, packed and mixed
forms. What a GPU approximates is here the double-precision result, rounded once (`opcodes`); mma and wgmma add in
double. So a run agrees with a GPU to the last few bits of fp32, not bit for bit.

What the C back end does not show: order. Kernels run one after the other, asynchronous work is done when issued.
The numpy back end does asynchronous work as late as its wait: copies land, wgmma and bulk stores read then, and
accumulators hold NaN until then. In the adversarial order a grid starts as soon as its predecessor has triggered, lanes
that have not waited read memory as it was before, and non-coherent loads that may be lifted read it as at entry.

What the detector sees, in whatever order a run took: accesses of global and shared memory, by lane (of one warp, too),
across CTAs and clusters by flags and barriers, and across all grids of a stream; generic accesses that no
fence.proxy.async puts before wgmma and bulk copies; registers and operands of unfinished wgmma; mbarriers used by
lanes that cannot know of their init. `races` lists the rules, and what it may miss.
What it does not see: paths that a run did not take (conditions on data, polls that happened to succeed: vary `warps`
and `seed`); copies' own later reading of global memory; system scope as apart from GPU scope; another stream. Weak
memory is detected, not executed; ptxas may order SASS otherwise than PTX, which the order proof (`order`) reads.
"""

from .native import Fault, compiler
from .parse import Unsupported
from .races import Race
from .runner import BACKENDS, TARGET, Interpreted, backend, interpreted, launch, watch

__all__ = [
    "BACKENDS", "TARGET", "Fault", "Interpreted", "Race", "Unsupported", "backend", "compiler", "interpreted", "launch",
    "watch",
]  # fmt: skip
