"""The kernels that mutants break, with hostile arguments and the stages they serve.

Shapes are small and take every path: a ring that is used twice, an odd number of fragments, K past a sweep, a cluster,
null slots between live ones. Padding, outputs and whatever may not be read hold NaN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from fast import kda, linear
from fast.kernel import ARCHS, Kernel
from fast.linear_direct import DirectConfig
from fast.linear_fma import FmaConfig
from fast.linear_mma import MmaConfig
from fast.linear_wgmma import WgmmaConfig
from reference.stage import Role

from . import patterns

NAN = float("nan")


@dataclass(frozen=True)
class Base:
    """A kernel to break. kernel(module, tensors) builds it from its module or from a broken copy.

    stages, attrs: the law of what it computes; none for patterns. alone: tensors of one row by itself, where the
    kernel promises that a row does not depend on its batch. targets: those it is for.
    """

    name: str
    module: str
    kernel: Callable[[ModuleType, dict[str, Tensor]], Kernel]
    tensors: Callable[[], dict[str, Tensor]]
    stages: tuple[str, ...] = ()
    attrs: Mapping = field(default_factory=dict)
    alone: Callable[[dict[str, Tensor]], tuple[int, dict[str, Tensor]]] | None = None
    targets: tuple[str, ...] = ARCHS

    @property
    def original(self) -> ModuleType:
        return import_module(self.module)


def _normal(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


# ---- kda: three rows, two of them null, one head


def _kda() -> dict[str, Tensor]:
    T, S = 3, 4
    t = kda.kda_tensors(T, 1, S, 672, device="cpu")
    t["x"]._base.fill_(NAN)
    for seed, name in enumerate(("x", "gate", "b", "conv", "conv_weight", "raw_g", "dt_bias", "recurrent", "w_o_norm")):
        t[name].copy_(_normal(t[name], seed) * (0.5 if name == "conv_weight" else 1))
    t["A_log"].fill_(1.5)
    t["out"].fill_(NAN)
    t["slots"].copy_(torch.tensor([0, 2, -1]))
    for name in ("conv", "recurrent"):
        t[name][[1, 3]] = NAN  # nobody's; slot 0 stays finite, so that a read of it shows in no NaN
    return t


def _kda_alone(t: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    rows = {n: v[1:2] if n in ("x", "raw_g", "b", "slots", "gate", "out") else v.clone() for n, v in t.items()}
    return 1, rows | {"out": rows["out"].clone()}


# ---- attn_res: a cluster of two, two tokens, two blocks of four, both sums


def _residual(D: int, blocks: int, nb: int) -> dict[str, Tensor]:
    def padded(*shape):
        return torch.full((*(n + 1 for n in shape[:-1]), shape[-1] + 8), NAN, dtype=torch.bfloat16)[
            tuple(slice(n) for n in shape)
        ]

    t = dict(prefix=padded(2, D), blocks=padded(2, blocks, D), out=padded(2, D), delta=padded(2, D))
    for seed, name in enumerate(("prefix", "delta")):
        t[name].copy_(_normal(t[name], seed))
    t["blocks"][:, :nb].copy_(_normal(t["blocks"][:, :nb], 2))
    for seed, name in enumerate(("w_norm", "w_out", "w_proj")):
        t[name] = (_normal(torch.empty(D), 10 + seed) * 0.1 + (name != "w_proj")).bfloat16()
    return {n: t[n] for n in ("prefix", "blocks", "w_norm", "w_proj", "delta", "w_out", "out")}


def _mix(config: tuple[int, int, int], nb: int, write: int):
    return lambda module, t: module.make_kernel(t, nb, write, module.Config(*config))


# ---- linear


def _gemm(M: int, N: int, K: int) -> dict[str, Tensor]:
    rows = torch.full((M, K + 24), NAN, dtype=torch.bfloat16)
    wide = torch.full((M, N + 24), NAN, dtype=torch.bfloat16)
    x, w = rows[:, 8 : 8 + K], torch.empty(N, K, dtype=torch.bfloat16)
    for seed, t in enumerate((x, w)):
        t.copy_(_normal(t, seed))
    return dict(x=x, w=w, out=wide[:, 8 : 8 + N])


def _projection(module: str, config, shape: tuple[int, int, int]) -> dict:
    entry = module.rpartition("_")[2] + "_entry"

    def kernel(broken: ModuleType, t: dict[str, Tensor]) -> Kernel:
        clean = linear.linear_kernel(config, *shape, t["x"].stride(0), t["out"].stride(0))
        return changed(clean, entry=getattr(broken, entry))

    targets = linear.WGMMA_ARCHS if isinstance(config, WgmmaConfig) else ARCHS
    return dict(module=module, kernel=kernel, tensors=lambda: _gemm(*shape), stages=("kda.o_proj",), targets=targets)


# ---- patterns


def _pattern(kernel: Kernel) -> dict[str, Tensor]:
    t = {}
    for seed, arg in enumerate(kernel.args):
        t[arg.name] = made = torch.zeros(arg.shape, dtype=arg.dtype)
        if arg.role is Role.OUTPUT:
            made.fill_(NAN)
        elif arg.role is Role.INDEX:
            made.copy_(torch.arange(made.numel()).roll(3))  # slot 0, which is null, in the middle
        elif made.is_floating_point():
            made.copy_(_normal(made, seed))
        elif arg.name == "flag":
            made.fill_(1)
    return t


def _bases() -> list[Base]:
    made = [
        Base("kda", "fast.kda", lambda m, t: m.kda_decode.pick(**t)[0], _kda,
             ("kda.conv", "kda.recurrence", "kda.out_norm"), alone=_kda_alone),
        Base("attn_res", "fast.attn_res", _mix((2, 64, 4), 2, 3), lambda: _residual(1024, 4, 2), ("attn_res.post",),
             dict(nb=2, write=3)),
        Base("attn_res full bank", "fast.attn_res", _mix((1, 64, 4), 4, 3), lambda: _residual(256, 4, 4),
             ("attn_res.post",), dict(nb=4, write=3)),
        Base("fma", **_projection("fast.linear_fma", FmaConfig(2, 1, 4, 4), (2, 56, 512))),
        Base("fma tail", **_projection("fast.linear_fma", FmaConfig(1, 2, 4, 4), (3, 24, 336))),
        Base("direct", **_projection("fast.linear_direct", DirectConfig(8, 2), (12, 40, 64))),
        Base("mma bulk", **_projection("fast.linear_mma", MmaConfig(16, 1, 1, 2, 192, 2, 2, True), (5, 24, 768))),
        Base("mma async", **_projection("fast.linear_mma", MmaConfig(32, 1, 2, 1, 32, 2, 2, False), (20, 40, 160))),
        Base("mma split", **_projection("fast.linear_mma", MmaConfig(32, 2, 1, 2, 192, 1, 1, True), (6, 32, 384))),
        Base("wgmma", **_projection("fast.linear_wgmma", WgmmaConfig(1, 1, 2, 1, 2, 2), (9, 72, 256))),
        Base("wgmma split", **_projection("fast.linear_wgmma", WgmmaConfig(1, 2, 2, 1, 2, 2, 2), (20, 64, 512))),
    ]  # fmt: skip
    for name in ("GEMV", "SCAN", "RING", "BULK", "SPLIT", "MAILBOX"):
        made.append(
            Base(name, patterns.__name__, lambda m, t, name=name: getattr(m, name),
                 lambda name=name: _pattern(getattr(patterns, name)))
        )  # fmt: skip
    return made


BASES: dict[str, Base] = {b.name: b for b in _bases()}


@cache
def tensors(base: str) -> dict[str, Tensor]:
    """The arguments of a base, to be copied before they are written."""
    return BASES[base].tensors()
