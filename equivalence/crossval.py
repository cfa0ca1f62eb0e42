"""Interpreter against GPU: every form of every production kernel, the same seeded inputs, bit by bit.

    rows = run(batches)         # needs a GPU and a C compiler; interpreters share the CPU cores

Cases. "random": seeded normals. "whole": small whole numbers, whose products and sums are exact in fp32 in any order.
A tensor's bound is stated by `bound`: 0 means bit for bit. Where it is not 0, these differ between the two: tensor
cores truncate where the interpreter adds in double, and ex2, rcp and rsqrt are approximate on the GPU and the rounded
double here; everything else, fused multiply-adds and the order of additions included, is the same.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from math import prod
from multiprocessing import get_context

import torch
from torch import Tensor

from fast.kernel import Kernel, device_arch
from reference.stage import Role

from .adversary.image import Image
from .adversary.subjects import Subject, find, production, subject
from .compare import half_ulp
from .simt import backend, launch

BATCHES = (1, 3, 8, 64)
CASES = ("random", "whole")


@dataclass(frozen=True)
class Bound:
    """|GPU - interpreter| <= ulps of the dtype at the value + rows x the row's largest value + mass x sum |x w|."""

    ulps: float = 0.0
    rows: float = 0.0
    mass: float = 0.0
    why: str = "bit for bit"

    @property
    def exact(self) -> bool:
        return not (self.ulps or self.rows or self.mass)


EXACT = Bound()


def bound(kernel: Kernel, name: str, case: str) -> Bound:
    """What a tensor may differ by, from the kernel's form.

    fma: fp32 fused multiply-adds and additions in one order. Tensor cores: a sum of K exact products is off by at most
    K 2^-23 sum |x w| where it is truncated, then half a bf16 ULP on either side. kda: u is off by a few fp32 roundings
    of a sum of 128, 16 x 2^-24 of its row on either side; out carries that through the norm. attn_res: three
    approximations of 2 ulp in a softmax weight, and one in the norm.
    """
    module = kernel.entry.__module__.removeprefix("fast.")
    if module == "linear_fma" or name not in ("out", "recurrent") or (case == "whole" and module.startswith("linear")):
        return EXACT
    if module in ("linear_mma", "linear_direct", "linear_wgmma"):
        K = next(a.shape[-1] for a in kernel.args if a.name == "w")
        return Bound(1, 0, K * 2.0**-23, "1 ULP + K 2^-23 sum|x w|")
    if name == "recurrent":
        return Bound(0, 32 * 2.0**-24, 0, "32 x 2^-24 of the row's largest")
    return Bound(1, 2.0**-17, 0, "1 ULP + 2^-17 of the row's largest")


@dataclass
class Row:
    """One tensor of one kernel in one case. ulps: largest difference in ULP of its dtype; of_bound: in its bound."""

    kernel: str
    case: str
    tensor: str
    dtype: str
    ulps: float
    differ: int
    of_bound: float
    bound: str
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return self.of_bound <= 1


def inputs(kernel: Kernel, case: str) -> Subject:
    """Seeded inputs. "whole": numbers of -4..4 in every bf16 tensor of a GEMM; NaN where nothing may be read."""
    made = subject(kernel, seed=2)
    if case == "whole":
        g = torch.Generator().manual_seed(3)
        for t in made.values.values():
            if t.dtype == torch.bfloat16:
                t.copy_(torch.randint(-4, 5, t.shape, generator=g))
    return made


def cases(kernel: Kernel) -> tuple[str, ...]:
    return CASES if kernel.entry.__module__.startswith("fast.linear") else CASES[:1]


def _tensors(made: Subject, image: Image, words: Tensor, device) -> list[Tensor]:
    kernel = made.kernels[0]
    weights = {a.name: made.values[a.name].to(device) for a in kernel.args if a.role is Role.WEIGHT}
    return [weights[a.name] if a.name in weights else image.view(words, a.name) for a in kernel.args]


def interpret(made: Subject, target: str) -> Tensor:
    """The words after a kernel in the interpreter."""
    image = Image(made.kernels)
    words = image.truth(made.values)
    launch(made.kernels[0], _tensors(made, image, words, "cpu"), target=target)
    return words


def on_gpu(made: Subject, device: str) -> Tensor:
    """The words after a kernel on the GPU."""
    image = Image(made.kernels)
    words = image.truth(made.values).to(device)
    made.kernels[0](*_tensors(made, image, words, device))
    torch.cuda.synchronize()
    return words.cpu()


def examine(name: str, batch: int, device: str, target: str) -> list[Row]:
    """A kernel in all its cases on both, for a process of its own."""
    torch.set_num_threads(1)
    kernel, rows = find(name, batch, target), []
    for case in cases(kernel):
        made = inputs(kernel, case)
        gpu, begin = on_gpu(made, device), time.monotonic()
        cpu = interpret(made, target)
        rows += compare(made, case, gpu, cpu, time.monotonic() - begin)
    return rows


def compare(made: Subject, case: str, gpu: Tensor, cpu: Tensor, seconds: float = 0.0) -> list[Row]:
    """A Row for every floating point tensor that is no weight, and one for all other bits."""
    kernel, image = made.kernels[0], Image(made.kernels)
    rows, seen = [], torch.zeros_like(gpu)
    for name, arg in image.args.items():
        if not arg.dtype.is_floating_point or arg.role is Role.SCRATCH:
            continue
        image.view(seen, name).fill_(1)
        limit = bound(kernel, name, case)
        a, b = (image.view(words, name) for words in (gpu, cpu))
        bits = {2: torch.int16, 4: torch.int32}[arg.dtype.itemsize]
        differs = a.contiguous().view(bits) != b.contiguous().view(bits)
        ulps, of_bound = 0.0, 0.0
        if differs.any():
            ulps, of_bound = _apart(a, b, differs, limit, made)
        dtype = str(arg.dtype).removeprefix("torch.")
        rows.append(Row(kernel.name, case, name, dtype, ulps, int(differs.sum()), of_bound, limit.why, seconds))
    other = int(((gpu != cpu) & (seen == 0)).sum())
    rows.append(
        Row(kernel.name, case, "other bits", "int32", float(other), other, float(other) * 2, "bit for bit", 0.0)
    )
    return rows


def _apart(a: Tensor, b: Tensor, differs: Tensor, limit: Bound, made: Subject) -> tuple[float, float]:
    """Largest difference of the elements that differ in bits: in ULP, and in the bound (inf: it must not differ)."""
    x, y = a.double(), b.double()
    both = x.isfinite() & y.isfinite()
    error = torch.where(differs, (x - y).abs(), 0.0)
    ulp = 2 * half_ulp(torch.where(both, y, 1.0), a.dtype)
    ulps = float(torch.where(both, error / ulp, torch.where(differs, torch.inf, 0.0)).max())
    if limit.exact or not bool(both[differs].all()):
        return ulps, float("inf")
    allowed = limit.ulps * ulp + limit.rows * torch.where(both, y.abs(), 0.0).amax(-1, keepdim=True)
    if limit.mass:
        allowed = allowed + limit.mass * (made.values["x"].abs().float() @ made.values["w"].abs().float().T).double()
    return ulps, float((error / allowed)[differs].max())


def kernels(target: str, batches: Sequence[int] = BATCHES) -> list[tuple[Kernel, int]]:
    """One kernel of each form for a target at each batch size, with the batch."""
    return [(k, batch) for batch in batches for k in production(batch, target)]


def run(
    batches: Sequence[int] = BATCHES, device: str = "cuda", jobs: int | None = None, only: str = "",
    tell: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:  # fmt: skip
    """Compare everything; `tell` gets each kernel's rows as they come. Raises NotImplementedError for another chip."""
    target = device_arch(torch.device(device))
    if backend() != "native":
        raise NotImplementedError("the interpreter takes hours for production kernels without a C compiler on PATH")
    wanted = sorted(((k, b) for k, b in kernels(target, batches) if only in k.name), key=_size)
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(examine, k.name, b, device, target) for k, b in wanted]):
            tell(made := future.result())
            rows += made
    return rows


def _size(work: tuple) -> int:
    """Longest first."""
    kernel, batch = work
    return -batch * sum(prod(a.shape) for a in kernel.args)


def lines(rows: Sequence[Row]) -> list[str]:
    """The table as text: kernel, case, tensor, differing elements, largest ULP, and the bound."""
    out = [f"{'kernel':46}{'case':8}{'tensor':12}{'dtype':10}{'differ':>9}{'max ULP':>10}{'of bound':>10}  bound"]
    for r in rows:
        mark = "" if r.equal else "  <-- outside"
        out.append(
            f"{r.kernel:46}{r.case:8}{r.tensor:12}{r.dtype:10}{r.differ:>9}{r.ulps:>10.3g}{r.of_bound:>10.3g}"
            f"  {r.bound}{mark}"
        )  # fmt: skip
    return out


def as_dict(rows: Sequence[Row]) -> dict:
    """For JSON: the verdict and every row."""
    return dict(
        verdict="equal" if rows and all(r.equal for r in rows) else "disagreement" if rows else "could not judge",
        kernels=len({r.kernel for r in rows}), rows=[asdict(r) | dict(equal=r.equal) for r in rows],
    )  # fmt: skip
