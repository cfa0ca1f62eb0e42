"""What a checkpoint holds: tensor names, shapes and dtypes, and the fields of config.json (SPEC.md 1, 12.1)."""

import torch

from .config import Config
from .mxfp4 import GROUP

CONFIG = "config.json"
PREFIX = "language_model.model."
HEAD = "language_model.lm_head.weight"
A_LOG_PAD = 128  # A_log is stored with zeros up to a multiple of this

Table = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. One line that names the file and, where there is one, the tensor or field."""


def short(value: object) -> str:
    """repr of a value from a file, cut to one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def expected(config: Config) -> Table:
    """Every text tensor of a checkpoint of `config`: name -> (shape, dtype).

    Raises ValueError for widths that MXFP4 cannot pack.
    """
    table = {full_name(name): spec for name, spec in top_table(config).items()}
    for layer in range(config.layers):
        table |= {full_name(name, layer): spec for name, spec in layer_table(config, layer).items()}
    return table


def full_name(name: str, layer: int | None = None) -> str:
    """The stored name of a tensor of a layer, or of one outside the layers."""
    if layer is not None:
        return f"{PREFIX}layers.{layer}.{name}"
    return HEAD if name == "lm_head.weight" else PREFIX + name


def top_table(config: Config) -> Table:
    """The tensors outside the layers, by name without prefix (SPEC.md 12.1)."""
    V, D = config.vocab, config.hidden
    return _dense({
        "lm_head": (V, D), "embed_tokens": (V, D), "norm": (D,), "output_attn_res_norm": (D,),
        "output_attn_res_proj": (1, D),
    })  # fmt: skip


def layer_table(config: Config, layer: int) -> Table:
    """The tensors of one layer, by name without prefix (SPEC.md 12.1)."""
    D, I = config.hidden, config.dense_inter
    table = _dense({
        "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attention_res_norm": (D,),
        "self_attention_res_proj": (1, D), "mlp_res_norm": (D,), "mlp_res_proj": (1, D),
    })  # fmt: skip
    attention = _mla_table(config) if config.is_mla(layer) else _kda_table(config)
    table |= {f"self_attn.{name}": spec for name, spec in attention.items()}
    if config.is_dense(layer):
        return table | _dense({"mlp.gate_proj": (I, D), "mlp.up_proj": (I, D), "mlp.down_proj": (D, I)})
    return table | {f"block_sparse_moe.{name}": spec for name, spec in _moe_table(config).items()}


def _dense(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> Table:
    return {f"{name}.weight": (shape, dtype) for name, shape in shapes.items()}


def _kda_table(config: Config) -> Table:
    D, C, H, K, f32 = config.hidden, config.kda_width, config.heads, config.kda_dim, torch.float32
    square = {f"{name}_proj": (C, D) for name in "qkvg"}
    small = {"b_proj": (H, D), "f_a_proj": (K, D), "f_b_proj": (C, K), "o_proj": (D, C)}
    fp32 = {**{f"{name}_conv1d": (C, 1, config.conv) for name in "qkv"}, "o_norm": (K,)}
    bare = {"A_log": ((-(-H // A_LOG_PAD) * A_LOG_PAD,), f32), "dt_bias": ((C,), f32)}
    return _dense(square | small) | _dense(fp32, f32) | bare


def _mla_table(config: Config) -> Table:
    D, H, Q, L = config.hidden, config.heads, config.q_lora, config.kv_lora
    return _dense({
        "q_a_proj": (Q, D), "q_a_layernorm": (Q,), "q_b_proj": (H * config.q_dim, Q),
        "kv_a_proj_with_mqa": (config.kv_row, D), "kv_a_layernorm": (L,),
        "kv_b_proj": (H * (config.nope + config.v_dim), L), "g_proj": (H * config.v_dim, D),
        "o_proj": (D, H * config.v_dim),
    })  # fmt: skip


def _moe_table(config: Config) -> Table:
    D, E, I, L, S = config.hidden, config.experts, config.expert_inter, config.latent, config.shared_inter
    if I % GROUP or L % GROUP:
        raise ValueError(f"expert width {I}, latent width {L}: allowed are multiples of {GROUP} (MXFP4 groups)")
    table = _dense({
        "gate": (E, D), "routed_expert_down_proj": (L, D), "routed_expert_norm": (L,), "routed_expert_up_proj": (D, L),
        "shared_experts.gate_proj": (S, D), "shared_experts.up_proj": (S, D), "shared_experts.down_proj": (D, S),
    })  # fmt: skip
    table["gate.e_score_correction_bias"] = ((E,), torch.float32)
    for expert in range(E):
        for name, rows, width in (("w1", I, L), ("w3", I, L), ("w2", L, I)):
            table[f"experts.{expert}.{name}.weight_packed"] = ((rows, width // 2), torch.uint8)
            table[f"experts.{expert}.{name}.weight_scale"] = ((rows, width // GROUP), torch.uint8)
    return table


FIELDS = {  # published name -> ours
    "vocab_size": "vocab", "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "q_lora_rank": "q_lora", "kv_lora_rank": "kv_lora", "qk_nope_head_dim": "nope", "qk_rope_head_dim": "rope",
    "v_head_dim": "v_dim", "intermediate_size": "dense_inter", "first_k_dense_replace": "dense_layers",
    "num_experts": "experts", "num_experts_per_token": "topk", "moe_intermediate_size": "expert_inter",
    "routed_expert_hidden_size": "latent", "attn_res_block_size": "block", "activation_situ_beta": "situ_beta",
    "activation_situ_linear_beta": "situ_linear_beta", "rms_norm_eps": "eps", "bos_token_id": "bos",
    "eos_token_id": "eos", "pad_token_id": "pad",
}  # fmt: skip
LINEAR_FIELDS = {"head_dim": "kda_dim", "short_conv_kernel_size": "conv", "gate_lower_bound": "gate_floor"}
OWN_FIELDS = {"name": "name", "lora_eps": "lora_eps", "l2_eps": "l2_eps"}
OWN = "k3_twice"  # section for what the published fields cannot say; absent from the published file
JSON_KINDS = {dict: "an object", list: "a list", str: "a text"}
MAY_BE_ZERO = {"first_k_dense_replace", "bos_token_id", "eos_token_id", "pad_token_id"}
NEGATIVE = {"gate_lower_bound"}
REQUIRED = {"hidden_act": "situ", "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True}
IMPLIED = {  # may be absent; another value is another model
    "model_type": "kimi_linear", "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "moe_renormalize": True, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
NO_EFFECT = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache",
    "max_position_embeddings", "model_max_length", "rope_theta", "rope_scaling", "quantization_config",
}  # fmt: skip


def config_to_json(config: Config) -> dict:
    """`config` as the contents of config.json. Raises ValueError if shared experts are no whole number of experts."""
    shared, rest = divmod(config.shared_inter, config.expert_inter)
    if rest or not shared:
        raise ValueError(f"shared width {config.shared_inter}: allowed are multiples of {config.expert_inter}")
    mla = [layer + 1 for layer in config.mla_layers]
    kda = [layer + 1 for layer in range(config.layers) if not config.is_mla(layer)]
    linear = {name: getattr(config, ours) for name, ours in LINEAR_FIELDS.items()} | {
        "num_heads": config.heads, "use_full_rank_gate": True, "full_attn_layers": mla, "kda_layers": kda,
    }  # fmt: skip
    text = REQUIRED | IMPLIED | {name: getattr(config, ours) for name, ours in FIELDS.items()}
    text |= {"num_key_value_heads": config.heads, "num_shared_experts": shared, "linear_attn_config": linear}
    own = {name: getattr(config, ours) for name, ours in OWN_FIELDS.items()}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text, OWN: own,
    }  # fmt: skip


def config_from_json(obj: object, file: str = CONFIG) -> Config:
    """The contents of config.json as a Config. Raises CheckpointError naming the field that is wrong.

    Only `text_config` and our own optional section count; what else the file says is about vision or serving.
    """
    if not isinstance(obj, dict):
        raise CheckpointError(f"{file}: holds {short(obj)}; allowed is an object")
    root = _Section(obj, f"{file}: ")
    text = root.section("text_config")
    linear = text.section("linear_attn_config")
    own = root.section(OWN) if OWN in obj else _Section({"name": "k3"}, "")
    made = text.numbers(FIELDS) | linear.numbers(LINEAR_FIELDS)
    made |= own.numbers({name: ours for name, ours in OWN_FIELDS.items() if name in own.values})
    made["shared_inter"] = text.take("num_shared_experts", int) * made["expert_inter"]
    if made["topk"] > made["experts"]:
        text.fail("num_experts_per_token", f"is {made['topk']}; allowed is at most num_experts = {made['experts']}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if made[FIELDS[name]] >= made["vocab"]:
            text.fail(name, f"is {made[FIELDS[name]]}; allowed is below vocab_size = {made['vocab']}")
    text.demand(REQUIRED | {"num_key_value_heads": made["heads"]})
    text.demand({name: value for name, value in IMPLIED.items() if name in text.values})
    linear.demand({"num_heads": made["heads"], "use_full_rank_gate": True})
    mla, kda = (linear.take(name, list) for name in ("full_attn_layers", "kda_layers"))
    if not _numbers_each_once(mla + kda, made["layers"]):
        linear.fail("full_attn_layers and kda_layers", f"do not name each layer 1..{made['layers']} once")
    text.only({*FIELDS, *REQUIRED, *IMPLIED, *NO_EFFECT, "num_key_value_heads", "num_shared_experts", linear.name})
    linear.only({*LINEAR_FIELDS, "num_heads", "use_full_rank_gate", "full_attn_layers", "kda_layers"})
    own.only(set(OWN_FIELDS))
    return Config(**made, mla_layers=tuple(sorted(i - 1 for i in mla)))


def _numbers_each_once(found: list, count: int) -> bool:
    return len(found) == count and all(type(i) is int for i in found) and sorted(found) == list(range(1, count + 1))


class _Section:
    """One JSON object of config.json. `path` is what precedes a field's name in a message."""

    def __init__(self, values: dict, path: str, name: str = ""):
        self.values, self.path, self.name = values, path, name

    def fail(self, field: str, problem: str):
        raise CheckpointError(f"{self.path}{field} {problem}")

    def section(self, name: str) -> "_Section":
        return _Section(self.take(name, dict), f"{self.path}{name}.", name)

    def numbers(self, fields: dict[str, str]) -> dict:
        """Config arguments for published fields, each of the type that Config declares."""
        return {ours: self.take(name, Config.__dataclass_fields__[ours].type) for name, ours in fields.items()}

    def take(self, name: str, kind: type):
        if name not in self.values:
            self.fail(name, "is missing")
        value, low = self.values[name], int(name not in MAY_BE_ZERO)
        if kind is int and not (type(value) is int and low <= value < 2**31):
            self.fail(name, f"is {short(value)}; allowed is a whole number from {low} to 2147483647")
        if kind is float:
            sign = -1 if name in NEGATIVE else 1
            if not (type(value) in (int, float) and 1e-30 <= sign * value <= 1e30):  # float32 holds it, and its inverse
                self.fail(name, f"is {short(value)}; allowed is a finite number {'below' if sign < 0 else 'above'} 0")
        if kind in JSON_KINDS and not isinstance(value, kind):
            self.fail(name, f"is {short(value)}; allowed is {JSON_KINDS[kind]}")
        return float(value) if kind is float else value

    def demand(self, wanted: dict) -> None:
        """Fields that must be there with one value. True is not 1, but 1 is 1.0."""
        for name, value in wanted.items():
            if name not in self.values:
                self.fail(name, f"is missing; allowed is {value!r}")
            found = self.values[name]
            if isinstance(found, bool) is not isinstance(value, bool) or found != value:
                self.fail(name, f"is {short(found)}; allowed is {value!r}")

    def only(self, known: set[str]) -> None:
        for name in sorted(self.values.keys() - known):
            self.fail(short(name), "is unknown")
