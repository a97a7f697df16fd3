"""Families of Hugging Face as rows: what all models of one have, which entries are flags, which change nothing.

`hugging_face` reads a config.json by these rows, and `written` writes one by the same. Defaults are those of
`configuration_<model_type>.py` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dynamic_cp.decide.config_json.entries import SIZES, Entries

MODULES, MODULES_AGAIN = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""Modules that predict further tokens, which transformers leaves out of hybrids: the entry that is read, and the one
that published configs of Qwen3.5 have for the modules in their files."""
SLIDING, WHOLE = "sliding_attention", "full_attention"
"""Entries of layer_types."""
TANH_GELU = "gelu_pytorch_tanh"
PATTERN = "hybrid_override_pattern"
"""Entry of Nemotron-H that has the symbols of its layers."""


class Row(NamedTuple):
    """An entry, the flag or field of `ModelShape` that it is ("not NAME" if it says the opposite), its default (None:
    it must be there) and the type of its value."""

    entry: str
    name: str
    default: Any = None
    kind: type = int

    @property
    def flag(self) -> str:
        return self.name.removeprefix("not ")

    def read(self, config: Entries) -> Any:
        if self.kind is bool:
            return self.turned(bool(config.get(self.entry, self.default)))
        if self.kind is float:
            return float(config.number(self.entry, self.default))
        return config.whole(self.entry, SIZES, self.default)

    def turned(self, value: Any) -> Any:
        """Return the entry of a value of the flag, and back."""
        return value if self.flag == self.name else not value


class ExpertEntries(NamedTuple):
    """Entries of the number of experts, the width of one and that of shared ones ("": there are none); and the layers
    that have some: all, from first_k_dense_replace on, or those that mlp_only_layers leaves."""

    number: str
    width: str = "moe_intermediate_size"
    shared: str = ""
    layers: Literal["all", "later", "not listed"] = "all"


class Routing(NamedTuple):
    """How routers choose, where a config may say otherwise: their scores, values of topk_method, number
    of best experts of a group by which groups are chosen, and default of routed_scaling_factor."""

    score: str
    chooses: tuple[str | None, ...]
    best_of_group: int
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the models of one model_type have, beside what all have: RMSNorm, a gate in each MLP, RoPE.

    Attributes:
        called: class of transformers; "": no config of it is written.
        has: flag, or field of `ModelShape` -> its value in all models.
        defaults: entry -> what a config without it says, where that is the family's own.
        rows: its own entries that are flags.
        known: entries besides that are read or refused, or change nothing.
        biases: what attention_bias is about: linear layers, with mlp_bias; all by itself; what a row says; nothing.
        kv_heads: what num_key_value_heads may be: said; left out, which is all heads; anything, it is all heads.
        divided: head_dim may be left out.
        windows: which layers have one where layer_types is missing: none, and sliding_window is refused; none, whatever
            it says; all; those from max_window_layers on; all but every N-th of sliding_window_pattern.
        asked: there are windows only where use_sliding_window says so.
        rotated, base: share of a head that rotates, and base of RoPE, where a config has none.
        partly_rotated: transformers reads partial_rotary_factor.
        act: entry of the activation, and what is written there.
        epsilon: entry of that in norms, and what it is where a config has none.
        differs: why no run trains its layers.
        linear: rows of layers with linear attention; kind: of these; entries: what a list of layers may have.
    """

    called: str = ""
    has: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    rows: tuple[Row, ...] = ()
    known: frozenset[str] = frozenset()
    biases: Literal["with mlp_bias", "of all", "a row", "none"] = "with mlp_bias"
    kv_heads: Literal["said", "or left out", "all"] = "said"
    divided: bool = True
    windows: Literal["refused", "none", "all", "last", "most"] = "all"
    asked: bool = False
    experts: ExpertEntries | None = None
    routing: Routing | None = None
    has_latents: bool = False
    rotated: float = 1.0
    base: int = 10000
    partly_rotated: bool = False
    act: tuple[str, str] = ("hidden_act", "silu")
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    differs: str = ""
    is_encoder: bool = False
    linear: tuple[Row, ...] = ()
    kind: str = ""
    entries: tuple[str, ...] = ()


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _linear(entries: str) -> tuple[Row, ...]:
    """Return the rows of entries and their defaults, in the order of the fields of `LinearAttention`."""
    fields = ("num_heads", "num_groups", "key_size", "value_size", "kernel_size")
    pairs = zip((entry.split("=") for entry in entries.split()), fields, strict=True)
    return tuple(Row(key, f"linear_attention.{name}", int(value)) for (key, value), name in pairs)


_TIED = {"tie_word_embeddings": True}
_NORMS = {"qk_layernorm": True}
_SUM_1 = Row("norm_topk_prob", "not moe_router_pre_softmax", False, bool)
"""Softmax over all experts, of which some are chosen; normalized to sum 1 it is the softmax over the chosen ones."""
FACTORS = ("residual_multiplier", "embedding_multiplier", "logits_scaling")
"""Entries of Granite, and flags."""
LATENT_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Entry -> field of `ModelShape`."""
_ONE_TENSOR = ExpertEntries("num_local_experts", "intermediate_size")
_SHARED_OF_QWEN = ExpertEntries("num_experts", shared="shared_expert_intermediate_size", layers="not listed")
_OF_DEEPSEEK = ExpertEntries("n_routed_experts", shared="n_shared_experts", layers="later")
_LAYERS = ("linear_attention", "mamba", "full_attention", "attention")
_NORMS_BEHIND = "norms behind attention and MLP alone, and of all heads together"

_GLM = Family(
    has={"rotary_interleaved": True}, rows=(Row("attention_bias", "add_qkv_bias", True, bool),), biases="a row",
    windows="refused", rotated=0.5, partly_rotated=True,
)  # fmt: skip
_GEMMA = Family(
    has={"apply_layernorm_1p": True, "geglu": True}, defaults=_TIED, known=names("hidden_activation"),
    windows="refused", act=("hidden_act", TANH_GELU),
)  # fmt: skip
_GEMMA_2 = replace(
    _GEMMA, known=_GEMMA.known | {"query_pre_attn_scalar"}, windows="most",
    defaults={**_TIED, "sliding_window_pattern": 2}, differs="scores and logits that are capped",
)  # fmt: skip
_LATENTS = Family(
    has=_NORMS, kv_heads="all", experts=_OF_DEEPSEEK, has_latents=True,
    known=names(
        """n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok first_k_dense_replace
        moe_layer_freq n_group topk_group topk_method norm_topk_prob routed_scaling_factor scoring_func seq_aux
        aux_loss_alpha ep_size qk_head_dim rope_interleave"""
    ),
)  # fmt: skip
_V3 = replace(_LATENTS, routing=Routing("sigmoid", ("noaux_tc", None), best_of_group=2, scaling=2.5))
_DELTA = Family(
    has={**_NORMS, "apply_layernorm_1p": True, "attention_output_gate": True}, kv_heads="or left out", rotated=0.25,
    partly_rotated=True, experts=_SHARED_OF_QWEN, biases="none", kind="gated_delta_net",
    entries=("linear_attention", "full_attention"),
    linear=_linear(
        "linear_num_value_heads=32 linear_num_key_heads=16 linear_key_head_dim=128 linear_value_head_dim=128 "
        "linear_conv_kernel_dim=4"
    ),
)  # fmt: skip
_MAMBA = Family(
    kv_heads="or left out", kind="mamba2", entries=_LAYERS, biases="none",
    differs="its layers were never compared with those of transformers",
    linear=_linear("mamba_n_heads=128 mamba_n_groups=1 mamba_d_state=256 mamba_d_head=0 mamba_d_conv=4"),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "llama": Family(called="LlamaForCausalLM", kv_heads="or left out", windows="refused"),
    "mistral": Family(called="MistralForCausalLM"),
    "qwen2": Family(called="Qwen2ForCausalLM", has={"add_qkv_bias": True}, windows="last", asked=True),
    "qwen3": Family(called="Qwen3ForCausalLM", has=_NORMS, divided=False, windows="last", asked=True),
    "phi3": Family(
        kv_heads="or left out", partly_rotated=True, known=names("original_max_position_embeddings")
    ),
    "smollm3": Family(
        called="SmolLM3ForCausalLM", defaults=_TIED, base=2000000, asked=True,
        known=names("no_rope_layers no_rope_layer_interval"),
    ),
    "glm": replace(_GLM, called="GlmForCausalLM"),
    "glm4": replace(_GLM, called="Glm4ForCausalLM", has={**_GLM.has, "sandwich_norm": True}),
    "granite": Family(
        called="GraniteForCausalLM", rows=tuple(Row(name, name, 1.0, float) for name in FACTORS), windows="refused",
        known=names("attention_multiplier"),
    ),
    "olmo2": Family(windows="refused", differs=_NORMS_BEHIND),
    "olmo3": Family(differs=_NORMS_BEHIND),
    "gemma": replace(_GEMMA, called="GemmaForCausalLM"),
    "gemma2": _GEMMA_2,
    "gemma3_text": replace(
        _GEMMA_2, called="Gemma3ForCausalLM", has={**_GEMMA.has, **_NORMS, "sandwich_norm": True}, differs="",
        defaults={**_TIED, "sliding_window_pattern": 6}, known=_GEMMA_2.known | {"rope_local_base_freq"},
    ),
    "mixtral": Family(called="MixtralForCausalLM", experts=_ONE_TENSOR),
    "qwen2_moe": Family(
        called="Qwen2MoeForCausalLM", rows=(_SUM_1, Row("qkv_bias", "add_qkv_bias", True, bool)), windows="last",
        asked=True, experts=_SHARED_OF_QWEN,
    ),
    "qwen3_moe": Family(
        called="Qwen3MoeForCausalLM", has=_NORMS, rows=(_SUM_1,), divided=False, windows="last", asked=True,
        experts=ExpertEntries("num_experts", layers="not listed"),
    ),
    "deepseek": Family(experts=_OF_DEEPSEEK),
    "deepseek_v2": replace(
        _LATENTS, called="DeepseekV2ForCausalLM",
        routing=Routing("softmax", ("greedy", "group_limited_greedy", None), best_of_group=1, scaling=1.0),
    ),
    "deepseek_v3": replace(_V3, called="DeepseekV3ForCausalLM"),
    "kimi_k2": _V3,
    "gpt_oss": Family(
        called="GptOssForCausalLM", has={"softmax_type": "learnable", "quick_geglu": True, "glu_linear_offset": 1.0},
        rows=(Row("swiglu_limit", "activation_func_clamp_value", 7.0, float),), divided=False, biases="of all",
        experts=_ONE_TENSOR, known=names("swiglu_alpha experts_per_token initial_context_length"),
    ),
    "qwen3_next": replace(_DELTA, called="Qwen3NextForCausalLM", rows=(_SUM_1._replace(default=True),)),
    "qwen3_5_text": replace(_DELTA, called="Qwen3_5ForCausalLM", experts=None),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), _DELTA),
    "nemotron_h": Family(
        called="NemotronHForCausalLM", act=("mlp_hidden_act", "relu2"),
        has={"squared_relu": True, "position_embedding_type": "none", "gated_linear_unit": False},
        kv_heads="or left out", biases="none", epsilon=("layer_norm_epsilon", 1e-5), kind="mamba2",
        entries=(*_LAYERS, "mlp", "moe"),
        experts=ExpertEntries("n_routed_experts", shared="moe_shared_expert_intermediate_size"),
        routing=Routing("sigmoid", (), best_of_group=2, scaling=1.0),
        linear=_linear("mamba_num_heads=128 n_groups=8 ssm_state_size=128 mamba_head_dim=64 conv_kernel=4"),
    ),
    "granitemoehybrid": replace(
        _MAMBA, experts=ExpertEntries("num_local_experts", "intermediate_size", "shared_intermediate_size")
    ),
    "bamba": replace(_MAMBA, rotated=0.5, epsilon=("rms_norm_eps", 1e-5)),
    "bert": Family(
        has={"gated_linear_unit": False}, defaults=_TIED, kv_heads="all", windows="none", is_encoder=True
    ),
    "modernbert": Family(defaults=_TIED, kv_heads="all", windows="none", is_encoder=True),
}  # fmt: skip
"""model_type -> its family. Decoders have a gate and an up projection in each MLP, whatever their hidden_act."""
SAME_AS = {"kimi_k2": "deepseek_v3"}
"""model_type -> the one whose layers it has."""
TEXTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""model_type of a language model with a vision tower around it -> of the language model, in its text_config."""
