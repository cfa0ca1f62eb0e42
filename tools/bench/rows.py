"""What is timed: for each stage and case the least bytes, our twin, and the peers (or why a peer is missing)."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fast import attn_res, kda, linear
from fast.kernel import launch
from reference.config import k3, k3_rank
from reference.stage import STAGES

from .timing import copies

Calls = list[Callable[[], object]]


@dataclass
class Row:
    """One line of the bench. peers: name -> calls, or the reason why it is not there."""

    stage: str
    case: str
    bytes: int
    ours: Calls
    peers: dict[str, Calls | str] = field(default_factory=dict)


def _fla() -> str | None:
    return None if importlib.util.find_spec("fla") else "fla-core is not installed"


def _normal(*shape, dtype=torch.bfloat16, scale=1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def linear_rows(tokens) -> Iterator[Row]:
    """The KDA and MLA projections of one TP8 rank; the peer is cuBLAS through torch.mm."""
    for stage, (N, K) in linear.linear_shapes(k3_rank(8)).items():
        if stage == "mla.o_proj":  # the shape of kda.o_proj
            continue
        for M in tokens:
            sets = [
                dict(x=_normal(M, K), w=_normal(N, K, scale=K**-0.5), out=_normal(M, N))
                for _ in range(copies(2 * N * K))
            ]
            yield Row(
                stage, f"m{M}-n{N}-k{K}", STAGES[stage].bytes(sets[0], {}),
                [lambda t=t: launch(linear.linear, t, {}) for t in sets],
                {"cublas": [lambda t=t: torch.mm(t["x"], t["w"].T, out=t["out"]) for t in sets]},
            )  # fmt: skip


def kda_rows(tokens) -> Iterator[Row]:
    """The fused decode step of one TP8 (12 heads) and TP16 (6 heads) rank; the peer is fla's three launches."""
    for config in (k3_rank(8), k3_rank(16)):
        H = config.heads
        for T in tokens:
            state_bytes = 2 * T * H * 128 * 128 * 4
            sets = [_kda_set(T, H, config.in_proj_width) for _ in range(copies(state_bytes))]
            least = state_bytes + T * H * 128 * 2 * (3 + 2 * 9 + 3)
            peers = {"fla": _fla() or [_fla_chain(t) for t in sets]}
            yield Row(
                "kda.decode", f"t{T}-h{H}", least, [lambda t=t: launch(kda.kda_decode, t, {}) for t in sets], peers
            )


def _kda_set(T: int, H: int, row: int) -> dict[str, torch.Tensor]:
    t = kda.kda_tensors(T, H, T + 1, row, device="cuda")
    for tensor in t.values():
        if tensor.is_floating_point():
            tensor.normal_()
    t["recurrent"].mul_(0.1)
    t["slots"].copy_(torch.randperm(T, device="cuda") + 1)
    return t


def _fla_chain(t: dict[str, torch.Tensor]) -> Callable[[], object]:
    """fla-core's decode path: convolution update, recurrence in place by state index, gated norm.

    Its recurrence wants q, k and v dense; it reads copies made beforehand, so that the split costs the peer nothing.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    T, H = t["b"].shape
    C = H * 128
    window = _normal(T, 3 * C, 4)
    taps = t["conv_weight"].T.contiguous().bfloat16()
    norm = t["w_o_norm"]
    pool = torch.randn(T + 1, H, 128, 128, device="cuda") * 0.1
    slots = t["slots"]
    starts = torch.arange(T + 1, device="cuda", dtype=torch.int32)
    raw_g, b, gate = (t[n].contiguous() for n in ("raw_g", "b", "gate"))
    q, k, v = (part.reshape(1, T, H, 128).contiguous() for part in t["x"].split(C, dim=-1))

    def call():
        causal_conv1d_update(t["x"], window, weight=taps, activation="silu")
        o, _ = fused_recurrent_kda_fwd(
            q, k, v, raw_g.view(1, T, H, 128), b.view(1, T, H), A_log=t["A_log"], dt_bias=t["dt_bias"],
            initial_state=pool, inplace_final_state=True, state_v_first=True, cu_seqlens=starts,
            ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        )  # fmt: skip
        return rms_norm_gated(o.view(T, H, 128), gate.view(T, H, 128), norm, None, activation="sigmoid", eps=1e-5)

    return call


def attn_res_rows(tokens) -> Iterator[Row]:
    """The widest mix (8 blocks and the prefix) and the narrowest, with delta and output norm."""
    yield from (_attn_res_row(T, nb) for nb in (1, 8) for T in tokens)


def _attn_res_row(T: int, nb: int) -> Row:
    D, attrs = k3.hidden, dict(nb=nb, write=-1)
    least, sets = 2 * D * (T * (nb + 4) + 3), []
    for _ in range(copies(least)):
        t = {n: _normal(T, D) for n in ("prefix", "delta", "out")} | dict(w_norm=_normal(D), w_out=_normal(D))
        sets.append(t | dict(blocks=_normal(T, 8, D), w_proj=_normal(D, scale=D**-0.5)))
    ours = [lambda t=t: launch(attn_res.attn_res, t, attrs) for t in sets]
    peers = {"fla": _fla() or [_fla_attn_res(t, nb) for t in sets], "compiled": _compiled(sets, nb)}
    return Row("attn_res", f"t{T}-nb{nb}", least, ours, peers)


def _fla_attn_res(t: dict[str, torch.Tensor], nb: int) -> Callable[[], object]:
    from fla.ops.attnres.fused import fused_attnres

    blocks = [t["blocks"][:, j].contiguous() for j in range(nb)]

    def call():
        torch.add(t["prefix"], t["delta"], out=t["out"])
        return fused_attnres(
            t["w_proj"], [*blocks, t["out"]], t["w_norm"], output_rms_weight=t["w_out"], rms_eps=1e-5
        )  # fmt: skip

    return call


def _law(prefix, blocks, w_norm, w_proj, delta, w_out, nb):
    p = (prefix.float() + delta.float()).bfloat16()
    v = torch.cat([blocks[:, :nb], p[:, None]], 1).float()
    logits = (v.square().mean(-1) + 1e-5).rsqrt() * (v * (w_norm.float() * w_proj.float())).sum(-1)
    mixed = (logits.softmax(-1)[..., None] * v).sum(1)
    return (mixed * (mixed.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w_out.float()).bfloat16(), p


def _compiled(sets: list[dict[str, torch.Tensor]], nb: int) -> Calls:
    """The law in one text, compiled for this case alone: beyond eight cases torch.compile would run it eagerly."""
    torch.compiler.reset()
    law, names = torch.compile(_law, dynamic=False), ("prefix", "blocks", "w_norm", "w_proj", "delta", "w_out")
    return [lambda t=t: law(*(t[n] for n in names), nb) for t in sets]


ROWS = {"linear": linear_rows, "kda.decode": kda_rows, "attn_res": attn_res_rows}
