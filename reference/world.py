"""How ranks meet: all of them in one process on one device, or one per process under torch.distributed.

A world moves buffers and does no arithmetic: each rank is handed the buffers of its group in rank order, and a stage of
comm.py or dcp.py adds them up. So every world gives the same bits, whatever its links. Source: SPEC.md 5.7, 8.6, 11.
"""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .shard import Mesh
from .stage import ContractError

GROUPS = ("tp", "dcp")
TIMEOUT = timedelta(minutes=10)


class World:
    """mesh: how the model is cut. ranks: those this process runs, in order. device: where their tensors live."""

    mesh: Mesh
    ranks: tuple[int, ...]
    device: torch.device

    def members(self, rank: int, group: str) -> range:
        """The ranks of a rank's group, in order. Raises ContractError for a group that does not exist."""
        if group not in GROUPS:
            raise ContractError(f"group {group!r}; allowed are {', '.join(map(repr, GROUPS))}")
        first, size = (0, self.mesh.tp) if group == "tp" else (rank - rank % self.mesh.dcp, self.mesh.dcp)
        return range(first, first + size)

    def exchange(self, mine: Mapping[int, Tensor], group: str) -> dict[int, Tensor]:
        """One tensor [...] of each rank here -> the group's tensors for each rank here, copied: [W, ...]."""
        raise NotImplementedError

    def _check(self, mine: Mapping[int, Tensor]) -> None:
        if tuple(mine) != self.ranks:
            raise ContractError(f"exchange with tensors of ranks {list(mine)}; allowed are {list(self.ranks)}")


class LocalWorld(World):
    """All ranks in this process on one device."""

    def __init__(self, tp: int, dcp: int = 1, *, device: torch.device | str = "cpu", **options):
        """options: the other fields of Mesh."""
        self.mesh, self.device = Mesh(tp, dcp, **options), torch.device(device)
        self.ranks = tuple(range(tp))

    def exchange(self, mine: Mapping[int, Tensor], group: str) -> dict[int, Tensor]:
        self._check(mine)
        made = {}
        for rank in self.ranks:
            members = self.members(rank, group)
            shared = members[0] in made  # laws write nothing, so a group reads one copy
            made[rank] = made[members[0]] if shared else torch.stack([mine[r] for r in members])
        return made


class TorchWorld(World):
    """One rank per process: gloo on CPUs, nccl on GPUs, over one node or several (torchrun sets the environment).

    Buffers travel as bytes through all_gather, so the order of the sums is ours and not the library's. The process
    group lives until `close`. Raises ContractError unless exactly `tp` processes of one mesh meet.
    """

    def __init__(self, tp: int, dcp: int = 1, *, device: torch.device | str | None = None, **options):
        """device: by default the GPU of this process's LOCAL_RANK, or the CPU where there is none."""
        self.mesh = Mesh(tp, dcp, **options)
        size = _number("WORLD_SIZE", 1)
        if size != tp:
            raise ContractError(f"{size} processes for tp = {tp}; allowed is torchrun with {tp}")
        rank = _number("RANK", 0)
        if rank >= size:
            raise ContractError(f"RANK is {rank}; allowed are 0..{size - 1}")
        self.ranks = (rank,)
        if device is None:
            device = f"cuda:{_number('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=TIMEOUT)
        contexts = [list(range(first, first + dcp)) for first in range(0, tp, dcp)]
        made = [dist.new_group(ranks) for ranks in contexts]  # every process makes every group
        self.groups = {"tp": dist.group.WORLD, "dcp": made[self.ranks[0] // dcp]}
        self.agree()

    def exchange(self, mine: Mapping[int, Tensor], group: str) -> dict[int, Tensor]:
        self._check(mine)
        (rank,) = self.ranks
        value, size = mine[rank], len(self.members(rank, group))
        raw = value.contiguous().view(-1).view(torch.uint8)  # gloo knows no bf16
        parts = [torch.empty_like(raw) for _ in range(size)]
        dist.all_gather(parts, raw, group=self.groups[group])
        return {rank: torch.stack(parts).view(value.dtype).view(size, *value.shape)}

    def close(self) -> None:
        dist.destroy_process_group()

    def agree(self) -> None:
        """Raise ContractError, after closing, unless the meshes of all processes are the same. All must call it."""
        text = torch.zeros(512, dtype=torch.uint8, device=self.device)
        raw = torch.frombuffer(bytearray(repr(self.mesh).encode()), dtype=torch.uint8)
        text[: len(raw)] = raw.to(self.device)
        seen = self.exchange({self.ranks[0]: text}, "tp")[self.ranks[0]].cpu()
        meshes = [bytes(row.tolist()).rstrip(b"\0").decode() for row in seen]
        for rank, mesh in enumerate(meshes):
            if mesh != meshes[0]:
                self.close()
                raise ContractError(f"rank {rank} runs {mesh}; allowed is that of rank 0, {meshes[0]}")


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ContractError(f"{name} is {text!r}; allowed is a whole number, as torchrun sets it")
    return int(text)
