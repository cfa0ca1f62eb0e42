"""A stream of three launches around the kernel under test, for the interpreter's worst order.

handover -> kernel -> handover. The first writes everything that the kernel may read but weights, and triggers before
it does; until then that memory holds poison. The second reads all of it afterwards, and waits. So a load or store of
the kernel that does not wait meets the memory of before, or overtakes its producer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from equivalence.simt import Fault
from equivalence.simt.machine import Machine
from fast.kernel import Kernel
from reference.stage import Role

POISON = 0x7FC0  # NaN in bf16 and, twice, in fp32; indices are null, so that a run goes on
PIECE, BLOCK = 256, 128  # bytes that a thread copies, threads
MOVE = "ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd4+{0}];\n  st.global.v4.b32 [%rd5+{0}], {{%r5, %r6, %r7, %r8}};"
HANDOVER = """
.version 9.0
.target sm_90a
.visible .entry handover(.param .b64 source, .param .b64 to)
.reqntid 128, 1, 1
{
  .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<6>;
  griddepcontrol.launch_dependents;
  griddepcontrol.wait;
  ld.param.b64 %rd1, [source];
  ld.param.b64 %rd2, [to];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  shl.b32 %r3, %r2, 7;
  add.s32 %r4, %r3, %r1;
  setp.ge.u32 %p1, %r4, PIECES;
  @%p1 bra $END;
  mul.wide.u32 %rd3, %r4, 256;
  add.s64 %rd4, %rd1, %rd3;
  add.s64 %rd5, %rd2, %rd3;
  MOVES
$END:
  ret;
}""".replace("MOVES", "\n  ".join(MOVE.format(at) for at in range(0, PIECE, 16)))


@dataclass
class Ran:
    """reports: races in words. fault: what stopped the run, or "". memory, handed: bytes afterwards, and as the last
    launch read them. tensors: the arguments, as views of memory."""

    reports: list[str]
    fault: str
    memory: Tensor
    handed: Tensor
    tensors: dict[str, Tensor] = field(repr=False)


class Stream:
    """The memory of one base's arguments, laid out once: weights apart, the rest in one image that is handed over."""

    def __init__(self, kernel: Kernel, tensors: Mapping[str, Tensor]):
        self.tensors, self.places, size = dict(tensors), {}, 0
        weights = {a.name for a in kernel.args if a.role is Role.WEIGHT}
        for name, t in self.tensors.items():
            store = t.untyped_storage()
            if name not in weights and store.data_ptr() not in self.places:
                self.places[store.data_ptr()] = size
                size += -(-store.nbytes() // PIECE) * PIECE
        self.weights, self.size = weights, size
        self.indices = {a.name for a in kernel.args if a.role is Role.INDEX}
        self.staged = torch.zeros(size, dtype=torch.uint8)
        for name in self.tensors:
            if name not in weights:  # with padding: the whole storage
                raw = torch.empty(0, dtype=torch.uint8).set_(self.tensors[name].untyped_storage())
                at = self.places[raw.data_ptr()]
                self.staged[at : at + raw.numel()] = raw

    def views(self, image: Tensor) -> dict[str, Tensor]:
        """The arguments with their shapes and strides, weights copied, the rest in an image."""
        made = {}
        for name, t in self.tensors.items():
            if name in self.weights:
                made[name] = t.clone()
                continue
            store = t.untyped_storage()
            at = self.places[store.data_ptr()]
            raw = image[at : at + store.nbytes()].view(t.dtype)
            made[name] = raw.as_strided(t.shape, t.stride(), raw.storage_offset() + t.storage_offset())
        return made

    def run(self, kernel: Kernel, ptx: str, order: str, warps: str = "together", seed: int = 0) -> Ran:
        """The three launches in one order of the interpreter; races are watched in the adversarial one."""
        image = torch.full((self.size // 2,), POISON, dtype=torch.int16).view(torch.uint8)
        handed, tensors = torch.zeros_like(image), self.views(image)
        for name in self.indices:
            tensors[name].zero_()
        pieces = self.size // PIECE
        args = (SimpleNamespace(name="source"), SimpleNamespace(name="to"))
        hand = SimpleNamespace(name="handover", args=args, grid=(-(-pieces // BLOCK), 1, 1), block=(BLOCK, 1, 1),
                               cluster=None, smem=0, pdl=True)  # fmt: skip
        text = HANDOVER.replace("PIECES", str(pieces))
        machine = Machine(order, warps, races=order == "adversarial", seed=seed)
        fault = ""
        try:
            machine.run([(hand, text, [self.staged.clone(), image]),
                         (kernel, ptx, [tensors[a.name] for a in kernel.args]),
                         (hand, text, [image, handed])])  # fmt: skip
        except Fault as error:
            fault = str(error)
        return Ran(list(map(str, machine.reports)), fault, image, handed, tensors)
