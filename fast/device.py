"""Device-side pieces the kernels share. Plain functions, inlined while a @cute.kernel is traced.

Loads follow the rule of kernel.py: `load_weight` (L1::no_allocate) for weights, before the wait; `load` for the rest,
after it. Neither emits `.nc`.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64

WARP = 32


def span(tensor: cute.Tensor, offset, n: int) -> cute.Tensor:
    """`n` consecutive elements that start `offset` elements after the tensor's first; n divides offset.

    Offsets are 64-bit: a state of many slots has more than 2^31 elements.
    """
    step = cute.assume(Int64(offset), divby=n)
    return cute.make_tensor(tensor.iterator + step, cute.make_layout(n))


def any_rows(tensor: cute.Tensor, most: int = 64) -> cute.Tensor:
    """In host code: a tensor of up to `most` rows in a static layout, so that the kernel gets a bare pointer."""
    layout = cute.make_layout((most, *tensor.shape[1:]), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)


def load(src: cute.Tensor) -> cute.Tensor:
    """A span of 2, 4, 8 or 16 bytes to registers, in one plain instruction."""
    return _load(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), src.element_type, num_bits_per_copy=_bits(src)), src)


def load_weight(src: cute.Tensor, lines: bool = False) -> cute.Tensor:
    """A span of 4, 8 or 16 bytes of a weight to registers, not kept in L1: each weight is read once per kernel.

    lines: L2 fetches the whole line of 128 bytes, of which this kernel reads the rest next.
    """
    hint = dict(l2_prefetch_size=cute.nvgpu.L2PrefetchSize.SIZE_128B) if lines else {}
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        src.element_type,
        num_bits_per_copy=_bits(src),
        l1c_evict_priority=cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE,
        **hint,
    )
    return _load(atom, src)


def store(dst: cute.Tensor, values: cute.Tensor) -> None:
    """Registers to a span of 2, 4, 8 or 16 bytes, converted to its type (round to nearest even), in one instruction."""
    made = cute.make_rmem_tensor(dst.layout, dst.element_type)
    made.store(values.load().to(dst.element_type))
    cute.copy(
        cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dst.element_type, num_bits_per_copy=_bits(dst)), made, dst
    )


def to_f32(values: cute.Tensor) -> cute.Tensor:
    """Registers of any type as fp32 registers."""
    made = cute.make_rmem_tensor(values.layout, Float32)
    made.store(values.load().to(Float32))
    return made


def warp_sum(x: Float32, lanes: int = WARP) -> Float32:
    """Sum over aligned groups of `lanes` lanes; every lane gets it, and every lane of the warp must call."""
    return cute.arch.warp_reduction_sum(x, threads_in_group=lanes)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x)): exp to 2 ulp, reciprocal to 1 ulp. 0 and 1 at the infinities, NaN for NaN."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp(-x))


def silu(x: Float32) -> Float32:
    return x * sigmoid(x)


def rsqrt(x: Float32) -> Float32:
    """To 2 ulp, for normal positive x."""
    return cute.math.rsqrt(x, fastmath=True)


def _bits(tensor: cute.Tensor) -> int:
    return tensor.element_type.width * cute.size(tensor)


def _load(atom: cute.CopyAtom, src: cute.Tensor) -> cute.Tensor:
    made = cute.make_rmem_tensor(src.layout, src.element_type)
    cute.copy(atom, src, made)
    return made
