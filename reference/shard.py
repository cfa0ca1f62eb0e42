"""What each of several ranks holds: the mesh of ranks, the rank's configuration, and the cuts of every weight.

The model's text stays single-device. A rank's weights are those of a smaller model: checkpoint tensors are cut by name,
then fused like whole ones. Source: SPEC.md 12.3, 8.3 (the expert pad), 8.5 (tails), 11 (context parallelism).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import MIN_EXPERT_SHARD, Config
from .mxfp4 import GROUP
from .stage import ContractError
from .weights import Source, layer_weights, top_weights

ALLOWED = {
    "tp": (1, 2, 4, 8, 16), "dcp": (1, 2, 4, 8, 16), "lse_base": ("e", "2"), "tail": (0, 1, 2),
    "home": ("reduce_scatter", "all_to_all"), "reduce": ("one_shot", "two_stage"), "accumulate": ("fp32", "bf16"),
    "experts": ("tensor", "expert"), "finalize": ("fp32", "bf16"), "squares": ("bf16", "fp32"),
    "split_router": (False, True), "split_latent": (False, True), "sequence": (False, True),
}  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """How ranks share one model. Rank r belongs to the context group of the ranks r // dcp * dcp and up.

    tp: ranks. dcp: ranks that share the sequence of a request; they are tensor-parallel ranks too, so dcp divides tp.
    interleave: consecutive tokens of one context rank. lse_base: base of the attention's LSE.
    home: how partial attention comes back, as weighted partial sums or as (output, LSE) pairs.
    reduce: every rank adds all partials, or one slice each and gathers. accumulate: fp32 with one rounding, or rounded
    to bf16 after every addition. experts: cut by inner width, or whole experts a rank.
    tail: tier of SPEC.md 8.5. finalize, squares: its older weighted sum, and the rounding of its norm's squares.
    split_router, split_latent: one slice of the outputs a rank, then gathered. sequence: residuals cut by tokens.
    Raises ContractError for a value that is not allowed.
    """

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    lse_base: str = "e"
    home: str = "reduce_scatter"
    reduce: str = "one_shot"
    accumulate: str = "fp32"
    experts: str = "tensor"
    tail: int = 1
    finalize: str = "fp32"
    squares: str = "bf16"
    split_router: bool = False
    split_latent: bool = False
    sequence: bool = False

    def __post_init__(self):
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ContractError(f"mesh: {name} = {value!r}; allowed are {', '.join(map(repr, allowed))}")
        if type(self.interleave) is not int or self.interleave < 1:
            raise ContractError(f"mesh: interleave = {self.interleave!r}; allowed are whole numbers from 1")
        if self.tp % self.dcp:
            raise ContractError(f"mesh: dcp = {self.dcp} with tp = {self.tp}; allowed are divisors of tp")
        if self.sequence and (self.tail != 1 or self.reduce != "one_shot"):
            raise ContractError(
                f"mesh: sequence with tail = {self.tail}, reduce = {self.reduce!r}; allowed are 1 and 'one_shot'"
            )

    def at(self, rank: int) -> "Seat":
        return Seat(self, rank)


@dataclass(frozen=True)
class Seat:
    """One rank of a mesh."""

    mesh: Mesh
    rank: int

    def __post_init__(self):
        if type(self.rank) is not int or not 0 <= self.rank < self.mesh.tp:
            raise ContractError(f"mesh: rank {self.rank!r}; allowed are 0..{self.mesh.tp - 1}")

    @property
    def dcp_rank(self) -> int:
        return self.rank % self.mesh.dcp


def rank_config(config: Config, mesh: Mesh) -> Config:
    """The model one rank holds. Raises ContractError, naming the width, for one that the ranks cannot share.

    Experts cut by width are padded with zeros to 256 rows a rank at least (SPEC.md 8.3).
    """
    tp, whole = mesh.tp, mesh.experts == "expert"
    cuts = dict(heads=1, vocab=1, dense_inter=1, shared_inter=1)
    cuts |= {"experts": 1} if whole or mesh.split_router else {}
    cuts |= {} if whole else {"expert_inter": GROUP}
    cuts |= {"hidden": 1} if mesh.tail != 1 or mesh.reduce == "two_stage" else {}
    cuts |= {"latent": 1} if mesh.split_latent or mesh.reduce == "two_stage" else {}
    for name, unit in cuts.items():
        value = getattr(config, name)
        if value % (tp * unit):
            raise ContractError(
                f"{config.name}: {name} = {value} over {tp} ranks; allowed are multiples of {tp * unit}"
            )
    if tp == 1:
        return config
    return replace(
        config, name=f"{config.name}-tp{tp}", vocab=config.vocab // tp, heads=config.heads // tp,
        dense_inter=config.dense_inter // tp, shared_inter=config.shared_inter // tp,
        experts=config.experts // tp if whole else config.experts,
        expert_inter=config.expert_inter if whole else max(config.expert_inter // tp, MIN_EXPERT_SHARD),
    )  # fmt: skip


ROWS = {  # heads, channels, units
    "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_b_proj", "q_b_proj", "kv_b_proj", "q_conv1d", "k_conv1d",
    "v_conv1d", "dt_bias", "A_log", "gate_proj", "up_proj", "embed_tokens", "lm_head",
}  # fmt: skip
COLUMNS = {"o_proj", "down_proj"}  # inputs
WHOLE = {
    "norm", "output_attn_res_norm", "output_attn_res_proj", "input_layernorm", "post_attention_layernorm",
    "self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj", "o_norm", "f_a_proj",
    "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "e_score_correction_bias",
    "routed_expert_norm",
}  # fmt: skip


def cut(t: Tensor, tp: int, rank: int, dim: int) -> Tensor:
    """Slice `rank` of `tp` equal slices of t along dim, dense. Raises ContractError for a size tp does not divide."""
    if t.shape[dim] % tp:
        raise ContractError(f"shape {tuple(t.shape)} over {tp} ranks; allowed are multiples of {tp} in axis {dim}")
    n = t.shape[dim] // tp
    return t.narrow(dim, rank * n, n).contiguous()


def shard(name: str, t: Tensor, config: Config, seat: Seat) -> Tensor:
    """What a rank holds of a checkpoint tensor, by its name without prefix. Experts of other ranks are not asked for.

    Raises ContractError for a name that no rule covers.
    """
    tp, rank, mesh = seat.mesh.tp, seat.rank, seat.mesh
    parts = name.removesuffix(".weight").split(".")
    base = parts[-1]
    if ".experts." in name:
        return t if mesh.experts == "expert" or tp == 1 else _expert(parts[-2], base, t, seat)
    if base == "A_log":
        t = t[: config.heads]
    split = dict(
        gate=mesh.split_router, routed_expert_down_proj=mesh.split_latent, routed_expert_up_proj=mesh.tail != 1
    )
    if base in split:
        return cut(t, tp, rank, 0) if split[base] else t
    if base in WHOLE:
        return t
    if base in ROWS or base in COLUMNS:
        return cut(t, tp, rank, int(base in COLUMNS))
    raise ContractError(f"no rule cuts tensor {name!r}; rules are SPEC.md 12.3")


def _expert(matrix: str, kind: str, t: Tensor, seat: Seat) -> Tensor:
    """w1, w3 [I, L / n] by rows, w2 [L, I / n] by columns, n = 2 codes or 32 inputs a byte; zeros up to 256 of I."""
    dim, unit = int(matrix == "w2"), 1
    if dim:
        unit = 2 if kind == "weight_packed" else GROUP
    t = cut(t, seat.mesh.tp, seat.rank, dim)
    missing = MIN_EXPERT_SHARD // unit - t.shape[dim]
    if missing <= 0:
        return t
    shape = list(t.shape)
    shape[dim] = missing
    return torch.cat((t, t.new_zeros(shape)), dim)  # code 0 is 0 under any scale


def shard_layer(tensors: Mapping[str, Tensor], config: Config, seat: Seat) -> dict[str, Tensor]:
    """The tensors of one layer, or of the top, as one rank holds them; whole experts are renumbered from 0."""
    made, own = {}, config.experts // seat.mesh.tp
    for name, t in tensors.items():
        head, inside, rest = name.partition(".experts.")
        if inside and seat.mesh.experts == "expert":
            expert, _, tail = rest.partition(".")
            owner, local = divmod(int(expert), own)
            if owner != seat.rank:
                continue
            name = f"{head}{inside}{local}.{tail}"
        made[name] = shard(name, t, config, seat)
    return made


class _Held:
    """A source of tensors that are there already."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors

    def top(self) -> dict[str, Tensor]:
        return self.tensors

    def layer(self, layer: int) -> dict[str, Tensor]:
        return self.tensors


def rank_weights(
    source: Source, config: Config, mesh: Mesh, ranks: Iterable[int], device: torch.device | str = "cpu"
) -> dict[int, dict]:
    """Every weight of the given ranks: rank -> (name, layer) -> tensor on `device`. The source is read once, layer by
    layer."""
    local, seats = rank_config(config, mesh), [mesh.at(rank) for rank in ranks]
    made: dict[int, dict] = {seat.rank: {} for seat in seats}
    whole = source.top()
    for seat in seats:
        top = top_weights(_Held(shard_layer(whole, config, seat)), local)
        made[seat.rank] |= {(name, None): t.to(device) for name, t in top.items()}
    for layer in range(config.layers):
        whole = source.layer(layer)
        for seat in seats:
            held = layer_weights(_Held(shard_layer(whole, config, seat)), local, layer)
            made[seat.rank] |= {(name, layer): t.to(device) for name, t in held.items()}
    return made
