"""Fused KDA decode: conv update, L2 norm, gates, delta rule and gated norm in one launch (SPEC.md 5.2-5.6).

Plan. One CTA owns one (token, head): its 128x128 fp32 state, 64 KB, is read once into registers and written once.
In a warp 8 lanes share a state row (16 of 128 k each, 16-byte accesses), so a dot product over k is 3 shuffles.
While the state is in flight, warps 0-2 make q, k, v (conv, SiLU, L2 norm) and warp 3 the decay, in shared memory.
One pass reads the state for both products: with S the decayed state, o = (S + u k) q = S q + u (k q).
Bound: the state's bytes; for few tokens the chain of latencies slots -> state -> norm.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int64
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from reference import kda as law
from reference.config import deep, k3, k3_rank, mini
from reference.stage import Role, twin

from .device import WARP, any_rows, load, load_weight, rsqrt, sigmoid, silu, span, store, warp_sum
from .kernel import ARCHS, Arg, Kernel

DIM = k3.kda_dim  # K = V
TAPS = k3.conv
VEC = 4  # elements of one access: 16 bytes of fp32, 8 bytes of bf16
SHARE = 8  # lanes of a warp that share a state row
STEPS = DIM // (SHARE * VEC)  # accesses of a lane per state row
Q, K, V, DECAY, OUT = range(5)  # rows of the shared memory, and which warp fills them


@dataclass(frozen=True)
class Config:
    """warps: per CTA, at least 4; each lane holds 512 / warps elements of the state."""

    warps: int

    @property
    def rows(self) -> int:
        """State rows per lane."""
        return DIM * SHARE // (self.warps * WARP)


def choose_config(tokens: int, heads: int) -> Config:
    """Estimated, not measured: up to one CTA per SM (132 on H200) 16 warps, for the shorter loops of each lane; beyond
    that 8 warps of at most 128 registers, so that two CTAs, 128 KB of state in flight, share an SM."""
    return Config(16 if tokens * heads <= 132 else 8)


def load_state(gS: cute.Tensor, warp, lane, rows: int) -> cute.Tensor:
    """The lane's part of the state [VEC, STEPS, rows]: every access is issued before the first use."""
    rS = cute.make_rmem_tensor((VEC, STEPS, rows), Float32)
    for r in range(rows):
        for j in range(STEPS):
            rS[None, j, r].store(load(span(gS, _place(warp, lane, rows, r, j), VEC)).load())
    return rS


def store_state(gS: cute.Tensor, rS: cute.Tensor, warp, lane, rows: int) -> None:
    for r in range(rows):
        for j in range(STEPS):
            store(span(gS, _place(warp, lane, rows, r, j), VEC), rS[None, j, r])


def _row(warp, lane, rows: int, r: int):
    """The r-th state row of a lane."""
    return (warp * rows + r) * (WARP // SHARE) + lane // SHARE


def _place(warp, lane, rows: int, r: int, j: int):
    """Where a lane's j-th access to its r-th row starts: 8 neighbouring lanes read 128 contiguous bytes."""
    return _row(warp, lane, rows, r) * DIM + j * SHARE * VEC + lane % SHARE * VEC


def convolve(taps: cute.Tensor, window: cute.Tensor) -> cute.Tensor:
    """SiLU of the 4-tap convolution of the lane's VEC channels; taps and window are [VEC, TAPS], oldest first."""
    y = cute.make_rmem_tensor(VEC, Float32)
    for i in range(VEC):
        acc = Float32(0.0)
        for j in range(TAPS):
            acc += taps[i, j] * window[i, j].to(Float32)
        y[i] = silu(acc)
    return y


def decays(raw_g: cute.Tensor, bias: cute.Tensor, a_log: Float32) -> cute.Tensor:
    """exp(-5 sigmoid(exp(A_log) (raw_g + dt_bias))) of the lane's VEC channels."""
    rate = cute.math.exp(a_log)
    decay = cute.make_rmem_tensor(VEC, Float32)
    for i in range(VEC):
        decay[i] = exp_near_zero(law.FLOOR * sigmoid(rate * (raw_g[i].to(Float32) + bias[i])))
    return decay


def exp_near_zero(x: Float32) -> Float32:
    """exp of x <= 0 to 2 ulp, and to 1 ulp from -1/16 on: a decay near one multiplies the state once per token, so its
    error adds up over its whole time constant. The series' next term is below 1e-8 there."""
    series = 1.0 + x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24))))
    return select_(x > -1 / 16, series, cute.math.exp(x))


def squares(x: cute.Tensor) -> Float32:
    """Sum of squares over the warp."""
    return warp_sum((x.load() * x.load()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0))


def delta_rule(rS: cute.Tensor, shared: cute.Tensor, beta: Float32, warp, lane, rows: int) -> None:
    """Decay the state, add the outer product u k, and leave o [V], still unscaled by the norm, in shared memory."""
    sk = cute.make_rmem_tensor(rows, Float32)
    sq = cute.make_rmem_tensor(rows, Float32)
    keys = cute.make_rmem_tensor((VEC, STEPS), Float32)
    sk.fill(0.0)
    sq.fill(0.0)
    kq = Float32(0.0)
    for j in range(STEPS):
        at = j * SHARE * VEC + lane % SHARE * VEC
        decay, query = load(span(shared[DECAY, None], at, VEC)), load(span(shared[Q, None], at, VEC))
        keys[None, j].store(load(span(shared[K, None], at, VEC)).load())
        for i in range(VEC):
            kq += keys[i, j] * query[i]
            for r in range(rows):
                rS[i, j, r] = rS[i, j, r] * decay[i]
                sk[r] += rS[i, j, r] * keys[i, j]
                sq[r] += rS[i, j, r] * query[i]
    kq = warp_sum(kq, SHARE)
    for r in range(rows):
        v = _row(warp, lane, rows, r)
        u = beta * (shared[V, v] - warp_sum(sk[r], SHARE))
        shared[OUT, v] = warp_sum(sq[r], SHARE) + u * kq  # all lanes of the row write the same value
        for j in range(STEPS):
            for i in range(VEC):
                rS[i, j, r] = rS[i, j, r] + u * keys[i, j]


def gated_norm(o: cute.Tensor, gate: cute.Tensor, norm_w: cute.Tensor) -> cute.Tensor:
    """RMS norm over the head and the sigmoid gate, of the lane's VEC channels."""
    rstd = rsqrt(squares(o) / DIM + law.NORM_EPS)
    y = cute.make_rmem_tensor(VEC, Float32)
    for i in range(VEC):
        y[i] = o[i] * rstd * norm_w[i] * sigmoid(gate[i].to(Float32))
    return y


@cute.kernel
def kda_kernel(
    mX: cute.Tensor, mConv: cute.Tensor, mConvW: cute.Tensor, mRawG: cute.Tensor, mB: cute.Tensor, mA: cute.Tensor,
    mBias: cute.Tensor, mSlots: cute.Tensor, mState: cute.Tensor, mGate: cute.Tensor, mNormW: cute.Tensor,
    mOut: cute.Tensor, cfg: cutlass.Constexpr,
):  # fmt: skip
    heads = mA.shape[0]
    width = heads * DIM
    thread, _, _ = cute.arch.thread_idx()
    head, token, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    channel = head * DIM + lane * VEC
    shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout((5, DIM), stride=(DIM, 1)), 16)
    taps = cute.make_rmem_tensor((VEC, TAPS), Float32)
    window = cute.make_rmem_tensor((VEC, TAPS), BFloat16)

    # Weights, before the wait: warps 0-2 the taps of their channels, warp 3 the gate's bias.
    if warp < DECAY:
        for j in cutlass.range_constexpr(TAPS):
            taps[None, j].store(load_weight(span(mConvW, (j * 3 + warp) * width + channel, VEC)).load())
    elif warp == DECAY:
        taps[None, 0].store(load_weight(span(mBias, channel, VEC)).load())
    a_log = load_weight(span(mA, head, 1))[0]
    norm_w = load_weight(span(mNormW, lane * VEC, VEC))

    cute.arch.griddepcontrol_wait()
    slot = mSlots[token]
    beta = sigmoid(mB[token, head].to(Float32))
    gate = load(span(mGate, token * mGate.stride[0] + channel, VEC))
    if warp < DECAY:
        window[None, TAPS - 1].store(load(span(mX, token * mX.stride[0] + warp * width + channel, VEC)).load())
    elif warp == DECAY:
        window[None, 0].store(load(span(mRawG, token * width + channel, VEC)).load())
    cute.arch.griddepcontrol_launch_dependents()
    gOut = span(mOut, token * width + channel, VEC)

    if slot > 0:
        conv_at = Int64(slot) * ((TAPS - 1) * 3 * width) + warp * width + channel
        if warp < DECAY:
            for j in cutlass.range_constexpr(TAPS - 1):
                window[None, j].store(load(span(mConv, conv_at + j * 3 * width, VEC)).load())
        gS = span(mState, (Int64(slot) * heads + head) * (DIM * DIM), DIM * DIM)
        rS = load_state(gS, warp, lane, cfg.rows)
        if warp < DECAY:
            for j in cutlass.range_constexpr(TAPS - 1):
                store(span(mConv, conv_at + j * 3 * width, VEC), window[None, j + 1])
            y = convolve(taps, window)
            factor = Float32(1.0)
            if warp < V:
                factor = rsqrt(squares(y) + law.L2_EPS)
            if warp == Q:
                factor = factor * law.SCALE
            for i in cutlass.range_constexpr(VEC):
                y[i] = y[i] * factor
            store(span(shared[warp, None], lane * VEC, VEC), y)
        elif warp == DECAY:
            store(span(shared[DECAY, None], lane * VEC, VEC), decays(window[None, 0], taps[None, 0], a_log))
        cute.arch.sync_threads()
        delta_rule(rS, shared, beta, warp, lane, cfg.rows)
        store_state(gS, rS, warp, lane, cfg.rows)
        cute.arch.sync_threads()
        if warp == 0:
            store(gOut, gated_norm(load(span(shared[OUT, None], lane * VEC, VEC)), gate, norm_w))
    elif warp == 0:
        zero = cute.make_rmem_tensor(VEC, Float32)
        zero.fill(0.0)
        store(gOut, zero)


@cute.jit
def kda_entry(
    mX: cute.Tensor, mConv: cute.Tensor, mConvW: cute.Tensor, mRawG: cute.Tensor, mB: cute.Tensor, mA: cute.Tensor,
    mBias: cute.Tensor, mSlots: cute.Tensor, mState: cute.Tensor, mGate: cute.Tensor, mNormW: cute.Tensor,
    mOut: cute.Tensor, cfg: cutlass.Constexpr, stream: cuda.CUstream,
):  # fmt: skip
    tokens, (mX, mConv, mRawG, mB) = mX.shape[0], map(any_rows, (mX, mConv, mRawG, mB))
    mSlots, mState, mGate, mOut = map(any_rows, (mSlots, mState, mGate, mOut))
    kda_kernel(mX, mConv, mConvW, mRawG, mB, mA, mBias, mSlots, mState, mGate, mNormW, mOut, cfg).launch(
        grid=[mA.shape[0], tokens, 1], block=[cfg.warps * WARP, 1, 1], stream=stream, use_pdl=True
    )


@twin("kda.decode", [("kda.conv", "kda.recurrence", "kda.out_norm")], ARCHS, range(1, 65))
def kda_decode(x, conv, conv_weight, raw_g, b, A_log, dt_bias, slots, recurrent, gate, w_o_norm, out):
    """Any number of heads and slots. x [T, 3C], gate [T, C] and b [T, H] may be row-strided slices of the projection.

    Raises NotImplementedError if rows of x or gate start off 8 bytes.
    """
    (T, H), S = b.shape, recurrent.shape[0]
    C, cfg = H * DIM, choose_config(T, H)
    for name, t in (("x", x), ("gate", gate)):
        if T > 1 and t.stride(0) % VEC:
            raise NotImplementedError(
                f"kda.decode: {name} has row stride {t.stride(0)}; allowed are multiples of {VEC}"
            )
    bf16, f32 = torch.bfloat16, torch.float32
    args = (
        Arg("x", Role.ACTIVATION, bf16, (T, 3 * C), (x.stride(0), 1), align=8, rows="T"),
        Arg("conv", Role.STATE, bf16, (S, TAPS - 1, 3 * C), rows="S"),
        Arg("conv_weight", Role.WEIGHT, f32, (TAPS, 3 * C)),
        Arg("raw_g", Role.ACTIVATION, bf16, (T, C), rows="T"),
        Arg("b", Role.ACTIVATION, bf16, (T, H), (b.stride(0), 1), align=2, rows="T"),
        Arg("A_log", Role.WEIGHT, f32, (H,), align=4),
        Arg("dt_bias", Role.WEIGHT, f32, (C,)),
        Arg("slots", Role.INDEX, torch.int32, (T,), align=4, rows="T"),
        Arg("recurrent", Role.STATE, f32, (S, H, DIM, DIM), rows="S"),
        Arg("gate", Role.ACTIVATION, bf16, (T, C), (gate.stride(0), 1), align=8, rows="T"),
        Arg("w_o_norm", Role.WEIGHT, f32, (DIM,)),
        Arg("out", Role.OUTPUT, bf16, (T, C), rows="T"),
    )
    block, smem = (cfg.warps * WARP, 1, 1), 5 * DIM * 4
    return (Kernel(f"kda_decode-t{T}-h{H}", kda_entry, args, (cfg,), (H, T, 1), block, smem, token_axis=1),)


def kda_cases(tokens=(1, 2, 3, 4, 8, 16, 32, 64), slots: int = 65) -> dict[str, dict[str, torch.Tensor]]:
    """Production arguments without memory (meta tensors), by case id."""
    cases = {}
    for config in (k3_rank(8), k3_rank(16), mini, deep):
        for T in tokens:
            cases[f"t{T}-h{config.heads}"] = kda_tensors(T, config.heads, slots, config.in_proj_width)
    return cases


def kda_tensors(T: int, H: int, S: int, row: int, device="meta") -> dict[str, torch.Tensor]:
    """Uninitialised arguments of kda_decode; x, gate and b are slices of a projection with `row` columns."""
    C = H * DIM

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=device)

    proj, f32 = empty(T, row), torch.float32
    return dict(
        x=proj[:, : 3 * C], conv=empty(S, TAPS - 1, 3 * C), conv_weight=empty(TAPS, 3 * C, dtype=f32),
        raw_g=empty(T, C), b=proj[:, 4 * C + DIM : 4 * C + DIM + H], A_log=empty(H, dtype=f32),
        dt_bias=empty(C, dtype=f32), slots=empty(T, dtype=torch.int32), recurrent=empty(S, H, DIM, DIM, dtype=f32),
        gate=proj[:, 3 * C : 4 * C], w_o_norm=empty(DIM, dtype=f32), out=empty(T, C),
    )  # fmt: skip
