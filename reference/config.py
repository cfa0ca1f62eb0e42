"""Model configurations: the real K3, the shapes one tensor-parallel rank sees, and two small models.

Source: SPEC.md section 1 (fields), section 12.3 and 13 (what a rank holds).
"""

from dataclasses import dataclass, replace
from math import isfinite

CACHES, KDA_STATES = ("bf16", "fp8"), ("fp32", "bf16")


@dataclass(frozen=True)
class Config:
    """One model, and how its state is kept. Widths are element counts; layer indices are 0-based.

    mla_cache, kda_state, cache_scale, query_scale choose the variants of SPEC.md 15; a checkpoint does not know them.
    Raises ValueError for a value that is not allowed.
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    mla_layers: tuple[int, ...]  # every other layer is KDA
    heads: int  # KDA heads and MLA heads alike
    q_lora: int
    dense_inter: int  # MLP width of the first `dense_layers` layers
    experts: int
    topk: int
    expert_inter: int
    latent: int  # width the routed experts work in
    shared_inter: int  # all shared experts together, one MLP
    block: int  # layers per attention-residual block
    kda_dim: int = 128  # K = V = head width of KDA
    conv: int = 4  # taps of the short convolution
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64  # present, never rotated
    v_dim: int = 128
    dense_layers: int = 1
    gate_floor: float = -5.0  # lower bound of the KDA log-decay
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    eps: float = 1e-5
    lora_eps: float = 1e-5  # the two MLA LoRA norms; 1e-6 in the published modelling code (SPEC.md 18.1)
    l2_eps: float = 1e-6
    bos: int = 163584
    eos: int = 163586
    pad: int = 163839
    mla_cache: str = "bf16"  # of MLA cache rows; "fp8": e4m3 with a scale per layer, the query likewise (SPEC.md 6)
    kda_state: str = "fp32"  # of the recurrent state between steps; "bf16" rounds it once a step (SPEC.md 5.8)
    cache_scale: float = 1.0  # fp8: what a stored 1.0 stands for, unless the weights say otherwise
    query_scale: float = 1.0

    def __post_init__(self):
        for name, allowed in (("mla_cache", CACHES), ("kda_state", KDA_STATES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
        for name in ("cache_scale", "query_scale"):
            value = getattr(self, name)
            if not (isfinite(value) and 2.0**-126 <= value < 2.0**128):  # it is kept in fp32
                raise ValueError(f"{name} {value!r}: allowed are finite numbers above 0")

    @property
    def kda_width(self) -> int:
        return self.heads * self.kda_dim

    @property
    def kv_row(self) -> int:
        return self.kv_lora + self.rope

    @property
    def q_dim(self) -> int:
        return self.nope + self.rope

    @property
    def blocks(self) -> int:
        return -(-self.layers // self.block)

    @property
    def in_proj_width(self) -> int:
        """Columns of the fused KDA projection q|k|v|g|f_a|b, padded to a multiple of 16 (SPEC.md 5.1)."""
        return -(-(4 * self.kda_width + self.kda_dim + self.heads) // 16) * 16

    @property
    def softmax_scale(self) -> float:
        return self.q_dim**-0.5

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers


def _every_fourth(layers: int) -> tuple[int, ...]:
    """0-based MLA layers of K3's pattern: every fourth layer, and the last."""
    return tuple(sorted({*range(3, layers, 4), layers - 1}))


k3 = Config(
    "k3", vocab=163840, hidden=7168, layers=93, mla_layers=_every_fourth(93), heads=96, q_lora=1536,
    dense_inter=33792, experts=896, topk=16, expert_inter=3072, latent=3584, shared_inter=6144, block=12,
)  # fmt: skip

mini = Config(
    "mini", vocab=272, hidden=192, layers=13, mla_layers=_every_fourth(13), heads=2, q_lora=64,
    dense_inter=256, experts=32, topk=4, expert_inter=64, latent=96, shared_inter=64, block=4,
    bos=256, eos=257, pad=258,
)  # fmt: skip

deep = Config(
    "deep", vocab=272, hidden=64, layers=93, mla_layers=_every_fourth(93), heads=1, q_lora=32,
    dense_inter=64, experts=8, topk=2, expert_inter=32, latent=32, shared_inter=32, block=12,
    bos=256, eos=257, pad=258,
)  # fmt: skip

MIN_EXPERT_SHARD = 256  # narrowest slice of an expert a rank may hold; TP16's 192 is padded with zeros (SPEC.md 8.3)


def k3_rank(tp: int) -> Config:
    """The model one of `tp` ranks holds: heads, MLP widths and vocabulary divided, latent and hidden kept.

    Raises ValueError for a tp that does not divide the 96 heads or is not a served size.
    """
    if tp not in (1, 2, 4, 8, 16):
        raise ValueError(f"tp = {tp}: allowed are 1, 2, 4, 8, 16")
    shard = max(k3.expert_inter // tp, MIN_EXPERT_SHARD)
    return replace(
        k3, name=f"k3-tp{tp}", vocab=k3.vocab // tp, heads=k3.heads // tp, dense_inter=k3.dense_inter // tp,
        expert_inter=shard, shared_inter=k3.shared_inter // tp,
    )  # fmt: skip


CONFIGS = {c.name: c for c in (k3, mini, deep, k3_rank(8), k3_rank(16))}
