"""The static order check: which loads and stores of a kernel may run before the wait that makes them safe.

A kernel launched with programmatic dependent launch (PDL) starts while its predecessors still run. What they write may
be read, and what they read may be overwritten, only after `griddepcontrol.wait`. The compiler knows nothing of that: it
may move a load marked non-coherent above the wait, so a kernel that is right in source can be wrong in SASS, on one
chip and not on another. This check compiles a `fast.kernel.Kernel` for a target (no GPU needed), reads its PTX and its
SASS, traces the address of every global access to a kernel parameter, and so to a tensor and its role.

    reports = check_kernels(kernels)          # every kernel for sm_90a, sm_100a and sm_103a
    print(*reports[0].lines(), sep="\\n")      # verdict, then one line per finding

Verdicts: "proved"; "findings": a rule is broken; "unproven": something could not be followed, which is never a pass.
Findings of severity "quality" cost time only.

    R1  no non-coherent load (.nc, CONSTANT) of anything but a weight; of a weight it is a quality finding
    R2  PTX: no load of anything but a weight is reached before the wait
    R3  SASS: the same
    R4  (unproven) every address is traced, every instruction understood, PTX and SASS touch the same tensors
    R5  every path of every thread to its end passes the wait
    R6  no store or atomic is reached before the wait
    R7  (quality) weights are in flight before the wait, in PTX and still in SASS
    R8  nothing is stored to a weight
    R9  a flag or ticket that decides a branch is read with acquire, or a fence follows, before produced data is loaded;
        no loop is left whose condition is never computed inside it
    R10 between a store and the relaxed flag or counter that announces it stands a release or a fence
    R11 between an ordinary access of shared memory and one of the asynchronous proxy (bulk copies, wgmma, tcgen05)
        stands a proxy fence; what the proxy reads is overwritten only after a wait for it (`proxies`)
    R12 over the kernels of a step, each has waited for every kernel whose data it meets (`chain`; not part of a report)
    R13 inline assembly that accesses memory or orders accesses has side effects, and a memory clobber if it orders
    R14 accesses of shared memory by different threads are ordered by a barrier, a phase or a wait for copies, whatever
        the data; no wait is without end (`shared`; unproven where addresses depend on data)

Scratch counts as produced: the previous launch of the same kernel wrote it. Prefetches into L2 are free for any tensor.

How it sees. Both texts become one `Program`: instructions, the paths between them, and per instruction what it moves,
accesses and orders (`equivalence.isa`). `trace` follows addresses to a fixed point; `paths` answers questions
about paths: "reached before the wait" means that some path from the entry arrives without having passed a wait, under
guards and branches, whatever the order of lines. A barrier after a wait in another warp does not count: each thread
waits itself. `rules`, `proxies` and `chain` ask; `check` reports; `mutate` breaks kernels on purpose, to show that each
rule can fail. R13 reads the program as it was traced, before anything was moved: a load in assembly without side
effects leaves no mark in PTX. Where there is a finding the kernel is compiled once more with line information, which
changes no instruction, and the finding names the line of its source.

What is compiled once. Kernels of one code (`Kernel.code`: another batch, another number of slots) are one proof. A
kernel is traced once for all targets if a first kernel of its entry gave one trace for all; PTX and SASS are made and
read for each target. The proof lowers without a host function; PTX and cubin are, byte for byte, those of
`Kernel.compile`. Nothing is kept between processes.

What it cannot see.
- Data. A path that never runs (a branch on a value that is always true) is a path; two guards that always agree are
  unrelated unless they are the same predicate. Both err towards a finding.
- Pointers that come out of memory: arrays of peer pointers, pointers handed through shared memory, tensor maps of TMA.
  These are unproven. A number loaded from memory and added to a parameter is taken as an index into that tensor.
- Whether a role is true. A weight that a predecessor writes passes all rules but R12, which sees the kernels of a step
  and not what is written outside of it.
- Which tensors a flag guards. R9 and R10 ask for acquire and release at the flag; that a load belongs below the flag,
  and was lifted above it before PTX was written, they cannot tell. Loads written with `invariant=True` or as inline
  assembly without side effects are what compilers lift: the first is R1, the second R13.
- Proxies over global memory (what a kernel stores and its own bulk copies then load), bounds of global memory, races
  between threads in global memory but for flags (R9, R10).
- Of R14, which is a run of all threads of one cluster on unknown data: SASS; clusters but the first and the last;
  conditions on data about barriers that fall differently in lanes of one CTA, or that a loop meets again, and flags in
  shared memory (all unproven); a phase that can pass twice before a slow thread looks; more unordered reads of a place
  than the detector keeps; values, so that two lanes of a warp that store at one place at once are not seen.
- Other kernels than those of a decode step as `reference.plan` lists them; stages of the law count as one kernel each.
- A relaxed counter used as a work queue, without data behind it, is a false alarm of R9.
"""

from ..isa.cubin import ToolMissing
from ..isa.program import Unreadable
from .check import TARGETS, Report, check_builds, check_kernels
from .mutate import EditError, mutant
from .rules import ERROR, QUALITY, UNPROVEN, Finding

__all__ = [
    "ERROR", "QUALITY", "TARGETS", "UNPROVEN", "EditError", "Finding", "Report", "ToolMissing", "Unreadable",
    "check_builds", "check_kernels", "mutant",
]  # fmt: skip
