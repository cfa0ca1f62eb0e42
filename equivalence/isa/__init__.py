"""Reading compiled kernels: PTX and disassembled SASS as one `Program` of instructions, paths, moves and accesses.

The order proof (`equivalence.order`) asks questions of both texts; the interpreter (`equivalence.simt`) executes PTX
that this room has read.
"""

from .program import Unreadable

__all__ = ["Unreadable"]
