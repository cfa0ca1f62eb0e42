"""One whole decode step as one stream of launches joined by programmatic dependent launch, and watched.

Twins are their real kernels. Every other unit is a stand-in that copies what the law computed into the unit's outputs;
it triggers first and waits, so that its follower may start before anything is stored. Activations are NaN before the
step, and the state is that of the step's start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from fast.decoder import Explained, FastDecoder
from fast.kernel import pick
from fast.selection import Unit, span_refs
from reference.decoder import Model
from reference.plan import Plan, Workspace
from reference.stage import ContractError, Role
from reference.state import DecodeState, Request

from .machine import Machine
from .races import Race
from .runner import Interpreted, _bind, interpreted, launch

POISON = 0x7FC1  # a NaN in every bf16 or fp32 word
SAME = 2.0**-7  # two roundings to bf16: the back ends round approximate functions alike but for the last bit of fp32
COPY = """
.version 9.0
.target sm_90a
.visible .entry law(.param .b64 source, .param .b64 to)
.reqntid 256, 1, 1
{{
  .reg .pred %p<2>; .reg .b16 %rs<2>; .reg .b32 %r<9>; .reg .b64 %rd<8>;
  griddepcontrol.launch_dependents;
  griddepcontrol.wait;
  ld.param.b64 %rd1, [source];
  ld.param.b64 %rd2, [to];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mad.lo.s32 %r3, %r2, 256, %r1;
  setp.ge.u32 %p1, %r3, {words};
  @%p1 bra $END;
  div.u32 %r4, %r3, {columns};
  rem.u32 %r5, %r3, {columns};
  mad.lo.s32 %r6, %r4, {stride}, %r5;
  mul.wide.u32 %rd3, %r3, 2;
  add.s64 %rd4, %rd1, %rd3;
  mul.wide.u32 %rd5, %r6, 2;
  add.s64 %rd6, %rd2, %rd5;
  ld.global.b16 %rs1, [%rd4];
  st.global.b16 [%rd6], %rs1;
$END:
  ret;
}}"""


def stand_in(name: str, to: Tensor) -> tuple:
    """(kernel, PTX, tensors) of a launch that stores the present values of `to`, rows of any stride, later."""
    source = to.contiguous().clone()
    rows, wide = (1, to.numel()) if to.is_contiguous() else (len(to), to.numel() // len(to))
    words, stride = to.numel() * to.element_size() // 2, (wide if rows == 1 else to.stride(0)) * to.element_size() // 2
    if to.numel() * to.element_size() % 2 or (rows > 1 and not to[0].is_contiguous()):
        raise ContractError(f"{name}: {to.dtype} {tuple(to.shape)} with strides {to.stride()}: allowed are dense rows")
    args = SimpleNamespace(name="source", role=Role.WEIGHT), SimpleNamespace(name=name, role=Role.OUTPUT)
    kernel = SimpleNamespace(name=name, args=args, grid=(-(-words // 256), 1, 1), block=(256, 1, 1), cluster=None,
                             smem=0, pdl=True)  # fmt: skip
    return kernel, COPY.format(words=words, columns=words // rows, stride=stride), [source, to]


class Recorder(FastDecoder):
    """A decoder served by interpreted twins that can record the launches of a step."""

    def __init__(self, model: Model, state: DecodeState, **options):
        super().__init__(model, state, backend="latency_specialized", extra=interpreted(), **options)
        self.launches: list[tuple] | None = None

    def workspace(self, made: Plan) -> Workspace:
        space = super().workspace(made)
        for t in space.act.values() if not made.prefill else ():
            t.view(torch.int16).fill_(POISON)
        return space

    def serve(self, unit: Unit, space: Workspace) -> Explained:
        if self.launches is None or unit.implementation is None:
            explained = super().serve(unit, space)
            for step in unit.steps if self.launches is not None else ():
                for name, ref in step.bind.items():
                    if step.stage.by_name[name].written:
                        self.launches.append(stand_in(f"{unit.key}.{name}", space.resolve(ref)))
            return explained
        served: Interpreted = unit.implementation
        tensors = {n: space.resolve(r) for n, r in span_refs(unit.steps, served.arguments).items()}
        for kernel in pick(served.twin, tensors, unit.attrs, served.target):
            bound = [arg.check(_bind(kernel, arg, tensors), kernel.name) for arg in kernel.args]
            launch(kernel, bound, target=served.target)
            self.launches.append((kernel, kernel.compile(served.target).ptx, bound))
        return Explained(unit.key, tuple(s.stage.name for s in unit.steps), served.name, (), (), "")


@dataclass(frozen=True)
class Watched:
    """grids: launches of the step, stand-ins included; twins: those of them that are kernels. different: what does
    not have the values of the step in plain order."""

    grids: int
    twins: int
    reports: list[Race]
    different: list[str]


def watch_step(
    decoder: Recorder, requests: Sequence[Request], tokens: Sequence[int], *, rows: int | None = None,
    races: bool = True, warps: str = "together", seed: int = 0, edit: Callable[[int, str], str] = lambda i, ptx: ptx,
) -> Watched:  # fmt: skip
    """Decode one token for each request, then run the step's launches again in the adversarial order, NaN before.

    edit(index, ptx) may change the PTX of a launch of that second run, to make a mutant. Leaves the state after the
    step, as that run made it.
    """
    before = {key: t.clone() for key, t in decoder.state.tensors.items()}
    decoder.launches = []
    space = decoder.decode(requests, tokens, rows=rows)
    launches, decoder.launches = decoder.launches, None
    memory = {name: t for name, t in space.act.items()} | {f"{n}.{i}": t for (n, i), t in decoder.state.tensors.items()}
    want = {name: t.clone() for name, t in memory.items()}
    for t in space.act.values():
        t.view(torch.int16).fill_(POISON)
    for key, t in before.items():
        decoder.state.tensors[key].copy_(t)
    machine = Machine("adversarial", warps, races=races, seed=seed)
    machine.run([(kernel, edit(i, ptx), bound) for i, (kernel, ptx, bound) in enumerate(launches)])
    different = [name for name, t in memory.items() if not _same(t, want[name])]
    twins = sum(not isinstance(kernel, SimpleNamespace) for kernel, _, _ in launches)
    return Watched(len(launches), twins, machine.reports, different)


def _same(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return True
    a, b = a.double(), b.double()
    return bool((a.isnan() == b.isnan()).all()) and float((a - b).nan_to_num(0).norm()) <= SAME * float(
        b.nan_to_num(0).norm()
    )
