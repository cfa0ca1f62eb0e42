"""The plain decoder over several ranks: every rank walks its plan with its weights and state; worlds connect them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .config import Config
from .dcp import localize
from .decoder import Decoder, Model
from .numerics import Numerics, fused
from .plan import Plan, Step, Workspace, check_weights, plan
from .shard import rank_config
from .stage import ContractError
from .state import DecodeState
from .world import GROUPS, World


class WorldState(DecodeState):
    """The state of all ranks in this process, with one list of free slots and pages for all of them.

    tensors: (name, "layer@rank") -> what DecodeState has for a layer, as wide as the rank's share. page_rows: cache
    rows of a page on a rank; page_size: tokens a logical page spans, page_rows * dcp. Processes that make the same
    calls allocate alike.
    """

    def __init__(self, config: Config, world: World, *, slots: int, pages: int, page_size: int = 16,
                 num: Numerics = fused, order: int | None = None):  # fmt: skip
        local = rank_config(config, world.mesh)
        if page_size % world.mesh.interleave:
            raise ContractError(
                f"pages of {page_size} rows with interleave {world.mesh.interleave}; "
                "allowed are divisors of the page size"
            )
        super().__init__(local, slots=slots, pages=pages, page_size=page_size, num=num, device=world.device,
                         order=order)  # fmt: skip
        self.mesh, self.config, self.page_rows, self.page_size = (
            world.mesh,
            config,
            page_size,
            page_size * world.mesh.dcp,
        )
        self.tensors = {
            (name, f"{layer}@{rank}"): t if rank == world.ranks[0] else torch.zeros_like(t)
            for rank in world.ranks
            for (name, layer), t in self.tensors.items()
        }

    def of(self, rank: int) -> dict[tuple[str, int], Tensor]:
        """The state tensors of one rank by (name, layer), as a workspace takes them."""
        own = f"@{rank}"
        return {(n, int(at.removesuffix(own))): t for (n, at), t in self.tensors.items() if at.endswith(own)}


class RankedDecoder(Decoder):
    """A decoder whose steps run on every rank of this process. Prefill, decode and generate are the plain decoder's.

    weights: rank -> (name, layer) -> tensor, of `shard.rank_weights`. The workspace a step returns is that of the first
    rank here; `spaces` holds all of them. Raises ContractError if weights or state were made for other ranks or for
    another mesh.
    """

    def __init__(self, config: Config, weights: Mapping[int, Mapping], world: World, state: WorldState,
                 num: Numerics | None = None):  # fmt: skip
        held = tuple(sorted({int(at.split("@")[1]) for _, at in state.tensors}))
        for what, ranks in (("weights", tuple(weights)), ("state", held)):
            if ranks != world.ranks:
                raise ContractError(f"{what} of ranks {list(ranks)}; allowed are those here, {list(world.ranks)}")
        if state.mesh != world.mesh or state.config != config:
            raise ContractError(f"state of {state.config.name}, {state.mesh}; allowed is {config.name}, {world.mesh}")
        for rank, held in weights.items():
            check_weights(plan(config, 1, world=world.mesh.at(rank)), held, f"rank {rank}, ", " on this mesh")
        super().__init__(Model(config, weights[world.ranks[0]]), state, num)
        self.weights, self.world, self._checked = weights, world, True
        self.spaces: dict[int, Workspace] = {}

    def rank_plans(self, made: Plan, index: Mapping[str, Tensor]) -> dict[int, Plan]:
        masked, mesh = "allowed" in index, self.world.mesh
        return {
            rank: plan(made.config, made.tokens, prefill=made.prefill, masked=masked, world=mesh.at(rank))
            for rank in self.world.ranks
        }

    def run(self, made: Plan, index: dict[str, Tensor]) -> Workspace:
        """One walk through the plans of all ranks, step by step. `made` is the whole model's plan."""
        plans = self.rank_plans(made, index)
        self.spaces = {}
        for rank, own in plans.items():
            space = Workspace(own, self.weights[rank], self.state.of(rank), self.num, self.state.device)
            space.index = localize(index, self.world.mesh.at(rank), self.state.page_rows)
            self.spaces[rank] = space
        with torch.no_grad():
            for steps in zip(*(own.steps for own in plans.values()), strict=True):
                here = dict(zip(plans, steps, strict=True))
                for rank, tensors in self.arguments(here).items():  # all gathered before any rank writes
                    self.execute(here[rank], tensors, plans[rank])
        return self.spaces[self.world.ranks[0]]

    def arguments(self, steps: Mapping[int, Step]) -> dict[int, dict[str, Tensor]]:
        """The arguments of one step on every rank here, buffers of other ranks among them."""
        made: dict[int, dict[str, Tensor]] = {rank: {} for rank in steps}
        for name, ref in next(iter(steps.values())).bind.items():
            if ref.space in GROUPS:
                mine = {rank: self.spaces[rank].act[step.bind[name].name] for rank, step in steps.items()}
                for rank, parts in self.world.exchange(mine, ref.space).items():
                    made[rank][name] = parts
            else:
                for rank, step in steps.items():
                    made[rank][name] = self.spaces[rank].resolve(step.bind[name])
        return made
