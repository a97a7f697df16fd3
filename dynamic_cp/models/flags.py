"""The table of a model's flags, under Megatron-LM's names. A flag has two rows: a field of `ModelSettings`, from which
the parser is made, and a `Meaning`, from which launch lines, the `architecture` of model files, the flags in
checkpoints and megatron-core's configuration are made."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dynamic_cp.models.table import FRACTION, LENGTH, NOT_NEGATIVE, POSITIVE, REQUIRED, expert_flag, flag, layer_pattern
from dynamic_cp.types.data_parallel import ADAPTED

TransformerImpl = Literal["local", "transformer_engine"]
TRANSFORMER_IMPLS: tuple[TransformerImpl, ...] = ("local", "transformer_engine")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
"""Values of --softmax-type: scores of keys alone, with one of 0 besides, or with a learned one for each head."""
ROTARY = ("rope", "yarn")
"""Values of --position-embedding-type that rotate queries and keys."""
ROPE_TYPES = ("rope", "yarn")
"""The same for latent attention, which has its own RoPE and YaRN."""
SCORE_FUNCTIONS = ("softmax", "sigmoid")
BALANCING = ("aux_loss", "seq_aux_loss", "none")
"""Values of --moe-router-load-balancing-type. Routers have losses of sequences only, so the first two are the same."""
GATED_DELTA_NET, MAMBA = "gated_delta_net", "mamba2"
ALIASES = {"gdn": GATED_DELTA_NET}
"""Value of --experimental-attention-variant in later releases -> its name in 0.16."""
FP8_FORMATS = ("e4m3", "hybrid")
FP8_ALIGNMENTS = MappingProxyType({"tensorwise": 16, "blockwise": 16, "mxfp8": 32, "delayed": 16})
"""Recipe -> what the rows of a product are a multiple of. Source: megatron-core 0.16.1, `get_fp8_align_size`."""
FP8_RECIPES, FP8_BLOCK = tuple(FP8_ALIGNMENTS), 128
WINDOW_PATTERN = "give a number, or 1 (window) and 0 (none) for each layer, such as [1,1,0]*4"
ROTATION_PATTERN = "give a number, or 1 (no rotation) and 0 (rotation) for each layer, such as [0,0,0,1]*4"
LINEAR_PATTERN = "give a number, or 1 (linear) and 0 (attention) for each layer, such as [1,1,1,0]*3"
EXPERTS_PATTERN = "give a number, or 1 (experts) and 0 (none) for each layer, such as [0]+[1]*3"

_ON_CUDA = "default: on CUDA, where it is available"


def _window_size(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not tokens before and after, such as 127,0") from None


def unknown_variant(name: str) -> str:
    """Return why no layers have this linear attention."""
    return f"{name!r} is not supported: {GATED_DELTA_NET} (or gdn) is possible; leave it out for attention alone"


def _variant(text: str) -> str:
    name = ALIASES.get(text, text)
    if name != GATED_DELTA_NET:
        raise argparse.ArgumentTypeError(unknown_variant(text))
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is trained, and in which precision and kernels. None stands for megatron-core's default in YaRN's settings
    (from rotary_scaling_factor on), and for no latent attention in its settings (from q_lora_rank on).

    Attributes:
        q_lora_rank: None: queries are projected from the hidden states.
        transformer_impl: None: TransformerEngine's layers if they can be used (`layers.choose`).
        gradient_accumulation_fusion and its kin: None: on CUDA, if available (`fusions.choose`).
        expert_tensor_parallel_size: 1 with experts.
    """

    num_layers: int = flag("layers of the transformer", REQUIRED, within=POSITIVE)
    hidden_size: int = flag("width of a token between layers", REQUIRED, within=POSITIVE)
    num_attention_heads: int = flag("query heads", REQUIRED, within=POSITIVE)
    ffn_hidden_size: int = flag("default: 4 * hidden, with --swiglu 8/3 * hidden (mod 64)", within=POSITIVE)
    kv_channels: int = flag("width of a head; default: hidden / heads", within=POSITIVE)
    group_query_attention: InitVar[bool] = flag("several query heads share each KV head")
    num_query_groups: int = flag("KV heads, with --group-query-attention", within=POSITIVE)
    seq_length: InitVar[int] = flag("longest sample in tokens", REQUIRED, within=LENGTH)
    max_position_embeddings: int = flag("default: --seq-length", within=POSITIVE)
    window_size: tuple[int, ...] | None = flag(
        "tokens before itself that a token attends to, a window; default: all", parse=_window_size, metavar="BEFORE,0"
    )
    window_attn_skip_freq: int | tuple[int, ...] | None = flag(
        "layers without the window: every N-th, or a list with 1 for each layer with it and 0 without, such as "
        "[1,1,0]*4; default: none",
        parse=layer_pattern(WINDOW_PATTERN),
        metavar="N|LIST",
    )
    position_embedding_type: str = flag(
        "how tokens know their positions", "learned_absolute", choices=("rope", "yarn", "learned_absolute", "none")
    )
    rotary_base: int = flag("base of RoPE's wavelengths", 10000, within=POSITIVE)
    window_rotary_base: int | None = flag(
        "base of RoPE's wavelengths in layers with a window; default: --rotary-base (local layers only)",
        within=POSITIVE,
    )
    rotary_percent: float = flag("share of a head's channels that RoPE rotates", 1.0)
    rotary_interleaved: bool = flag("rotate neighbouring channels instead of halves")
    no_rope_freq: int | tuple[int, ...] | None = flag(
        "layers without RoPE: every N-th, or a list with 1 for each layer without it and 0 with it, such as "
        "[0,0,0,1]*4; default: none",
        parse=layer_pattern(ROTATION_PATTERN),
        metavar="N|LIST",
    )
    rotary_seq_len_interpolation_factor: int | None = flag("RoPE: divide positions by this", metavar="N")
    use_rope_scaling: bool = flag("RoPE: lower the slow frequencies, as Llama 3.1, for samples beyond 8192")
    rope_scaling_factor: float = flag("with --use-rope-scaling: by how much", 8.0)
    rotary_scaling_factor: float | None = flag("YaRN: stretch positions by this, above 1")
    yarn_original_max_position_embeddings: int | None = flag(
        "YaRN: longest sample before positions were stretched; default: 4096", within=POSITIVE
    )
    yarn_beta_fast: float | None = flag("YaRN: turns from which on none is stretched; default: 32", within=POSITIVE)
    yarn_beta_slow: float | None = flag("YaRN: turns up to which all are stretched; default: 1", within=POSITIVE)
    mscale: float | None = flag("YaRN: weight of its concentration; default: 1", within=NOT_NEGATIVE)
    mscale_all_dim: float | None = flag(
        "YaRN: weight of what the concentration is divided by; default: 0", within=NOT_NEGATIVE
    )
    yarn_correction_range_round_to_int: bool | None = flag(
        "YaRN: round where stretching begins and ends to whole channels; default: yes"
    )
    qk_layernorm: bool = flag("normalize queries and keys")
    qk_l2_norm: bool = flag("normalize queries and keys without weights, as Llama 4")
    attention_output_gate: bool = flag("multiply what attention finds by a gate of its own, as Qwen3-Next")
    softmax_type: str = flag(
        "scores of keys alone; or one of 0, or a learned one for each head, beside them, as gpt-oss (local layers "
        "only)",
        SOFTMAX_TYPES[0],
        choices=SOFTMAX_TYPES,
    )
    multi_latent_attention: bool = flag("queries, keys and values are projected from narrow latents")
    q_lora_rank: int | None = flag("width of the latent of queries; default: none, no latent", within=POSITIVE)
    kv_lora_rank: int | None = flag("width of the latent of keys and values; default: 32", within=POSITIVE)
    qk_head_dim: int | None = flag("channels of a key that are not rotated; default: 128", within=POSITIVE)
    qk_pos_emb_head_dim: int | None = flag("channels of a key that are rotated; default: 64", within=POSITIVE)
    v_head_dim: int | None = flag("channels of a value; default: 128", within=POSITIVE)
    rope_type: str | None = flag(
        "with --multi-latent-attention: how positions are rotated; default: yarn with --rotary-scaling-factor above "
        "1, else rope",
        choices=ROPE_TYPES,
    )
    experimental_attention_variant: str | None = flag(
        "gated_delta_net (or gdn): linear attention in the place of attention in most layers, as Qwen3-Next",
        parse=_variant,
        metavar="NAME",
    )
    linear_attention_freq: int | tuple[int, ...] | None = flag(
        "with it: layers with linear attention: all but every N-th, or a list with 1 for each layer with it and 0 for "
        "attention, such as [1,1,1,0]*3",
        parse=layer_pattern(LINEAR_PATTERN),
        metavar="N|LIST",
    )
    linear_conv_kernel_dim: int = flag("tokens that its convolution sees; default: 4", within=POSITIVE)
    linear_key_head_dim: int = flag("width of a head of its queries and keys; default: 128", within=POSITIVE)
    linear_value_head_dim: int = flag("width of a head of its values; default: 128", within=POSITIVE)
    linear_num_key_heads: int = flag("heads of its queries and keys; default: 16", within=POSITIVE)
    linear_num_value_heads: int = flag("heads of its values; default: 32", within=POSITIVE)
    hybrid_override_pattern: str | None = flag(
        "a symbol for each of --num-layers, which is a half of a layer: M Mamba-2, G gated delta net, * attention, - "
        "MLP, E experts, as Nemotron-H",
        name="--hybrid-override-pattern --hybrid-layer-pattern",
        metavar="SYMBOLS",
    )
    mamba_state_dim: int = flag("with M: width of a state; default: 128", within=POSITIVE)
    mamba_head_dim: int = flag("with M: width of a head; default: 64", within=POSITIVE)
    mamba_num_groups: int = flag("with M: groups of heads that share keys and queries; default: 8", within=POSITIVE)
    mamba_num_heads: int = flag("with M: heads; default: as many as make 2 * hidden", within=POSITIVE)
    mtp_num_layers: int | None = flag(
        "modules behind the last layer, each predicts a token one place further on", within=NOT_NEGATIVE
    )
    mtp_loss_scaling_factor: float = flag("weight of the mean of their losses; with --mtp-num-layers", 0.1)
    normalization: str = flag("norm of the layers", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag("added to the variance in a norm", 1e-05)
    apply_layernorm_1p: bool = flag("norms multiply by 1 + their weights, which begin with 0")
    sandwich_norm: bool = flag("normalize what attention and MLP put out, too, as GLM-4 (local layers only)")
    residual_multiplier: float = flag(
        "factor of what attention and MLP put out, as Granite (local layers only)", 1.0, within=POSITIVE
    )
    embedding_multiplier: float = flag("factor of the embedding (local layers only)", 1.0, within=POSITIVE)
    logits_scaling: float = flag("logits are divided by this (local layers only)", 1.0, within=POSITIVE)
    softmax_scale: float | None = flag(
        "factor of the scores of attention; default: 1 / sqrt(kv-channels) (local layers only)", within=POSITIVE
    )
    swiglu: bool = flag("gated MLP with SiLU")
    squared_relu: bool = flag("MLP with the square of ReLU, as Nemotron")
    geglu: bool = flag("gated MLP with GELU in its form with tanh, as Gemma (local layers only)")
    quick_geglu: bool = flag("gated MLP with x * sigmoid(1.702 x), as gpt-oss (local layers only)")
    activation_func_clamp_value: float | None = flag(
        "with --quick-geglu: what is gated stays between -X and X, and its gate below X; default: no limits",
        metavar="X",
    )
    glu_linear_offset: float = flag(
        "with --quick-geglu: added to what is gated; 1 in gpt-oss; default: 0", 0.0, metavar="X"
    )
    disable_bias_linear: bool = flag("no biases in the linear layers")
    add_qkv_bias: bool = flag("biases in the QKV projection only")
    untie_embeddings_and_output_weights: bool = flag("separate output layer")
    make_vocab_size_divisible_by: int = flag(
        "the vocabulary is padded to a multiple of this times TP", 128, within=POSITIVE
    )
    init_method_std: float = flag("standard deviation of the initial weights", 0.02)
    hidden_dropout: float = flag(
        "dropout after attention and MLP; above 0 a resume is exact on the same layout only", 0.0, within=FRACTION
    )
    attention_backend: str = flag(
        "kernels of torch's attention: FlashAttention-2, cuDNN, or block-wise matrix products; auto logs its choice; "
        "passed on to TransformerEngine where its layers are used",
        "auto",
        choices=("auto", "flash", "fused", "unfused"),
    )
    bf16: bool = flag("bfloat16 weights and activations, float32 gradients and optimizer")
    fp32_residual_connection: bool = flag(
        "with --bf16: what attention and MLP add up stays in float32 from layer to layer (local layers only)"
    )
    fp8: str | None = flag(
        "with --bf16 and TransformerEngine's layers: their matrix products are in FP8; hybrid: gradients in e5m2; a "
        "rank's tokens are padded to multiples of 16, of 32 for mxfp8, times TP with sequence parallelism",
        name="--fp8-format=fp8",
        choices=FP8_FORMATS,
    )
    fp8_recipe: str | None = flag(
        "how products in FP8 are scaled; delayed (the default, as in Megatron-LM) follows what was packed before",
        choices=FP8_RECIPES,
    )
    use_cpu_initialization: bool = flag("initialise weights on the CPU (always so on CPU ranks)")
    transformer_impl: TransformerImpl | None = flag(
        "layers of megatron-core with torch's attention, or those of TransformerEngine; default: the latter where "
        "they can be used (installed, CUDA, --bf16), otherwise local",
        choices=TRANSFORMER_IMPLS,
    )
    gradient_accumulation_fusion: bool | None = flag(
        f"matrix products add weight gradients to their buffers; needs apex's kernel; {_ON_CUDA}"
    )
    bias_swiglu_fusion: bool | None = flag("compile bias and SwiGLU into one kernel; " + _ON_CUDA)
    bias_gelu_fusion: bool | None = flag(
        "compile bias and GELU into one kernel, which uses the tanh form of GELU; " + _ON_CUDA
    )
    bias_dropout_fusion: bool | None = flag("compile bias, dropout and residual into one kernel; " + _ON_CUDA)
    cross_entropy_loss_fusion: bool = flag("fewer passes over the logits in the loss")
    cross_entropy_fusion_impl: str | None = flag(
        "with --cross-entropy-loss-fusion: megatron-core's compiled one or TransformerEngine's; default: native",
        choices=("native", "te"),
    )
    num_experts: int | None = expert_flag("experts of a layer that has some; default: a dense model", within=POSITIVE)
    moe_layer_freq: int | tuple[int, ...] = expert_flag(
        "layers with experts: the first of every N, or a list with 1 for each layer that has some and 0 for a dense "
        "one, such as [0]+[1]*3; default: all",
        parse=layer_pattern(EXPERTS_PATTERN),
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int | None = expert_flag("of each expert; default: --ffn-hidden-size", within=POSITIVE)
    moe_shared_expert_intermediate_size: int | None = expert_flag(
        "of the expert that every token goes to; default: none", within=POSITIVE
    )
    moe_shared_expert_gate: bool = expert_flag("weigh the shared expert by a gate", None)
    moe_grouped_gemm: bool = expert_flag("all experts of a rank in one product (TransformerEngine's layers only)", None)
    moe_router_topk: int = expert_flag("experts of a token; default: 2", within=POSITIVE)
    moe_router_score_function: str = expert_flag("weights of experts; default: softmax", choices=SCORE_FUNCTIONS)
    moe_router_pre_softmax: bool = expert_flag("softmax over all experts, before some are chosen", None)
    moe_router_num_groups: int | None = expert_flag(
        "groups of experts that tokens are limited to some of", within=POSITIVE
    )
    moe_router_group_topk: int | None = expert_flag("groups of a token", within=POSITIVE)
    moe_router_topk_scaling_factor: float | None = expert_flag(
        "factor of the weights of chosen experts", within=POSITIVE
    )
    moe_router_dtype: str | None = expert_flag("default: that of activations", choices=("fp32", "fp64"))
    moe_router_enable_expert_bias: bool = expert_flag("shift the choice towards experts that had fewer tokens", None)
    moe_router_bias_update_rate: float = expert_flag("by how much in each step; default: 0.001", within=POSITIVE)
    moe_router_load_balancing_type: str | tuple[str, ...] = expert_flag(
        f"{', '.join(BALANCING)}; the first two are the same here: each sample has a loss; default: aux_loss",
        metavar="NAME",
    )
    moe_aux_loss_coeff: float | tuple[float, ...] = expert_flag("factor of it, one for each; default: 0", metavar="X")
    moe_z_loss_coeff: float | None = expert_flag("factor of the loss on large logits; default: 0")
    moe_token_dispatcher_type: InitVar[str | None] = expert_flag(
        "alltoall is the one supported", choices=("alltoall", "allgather", "flex")
    )
    lora_rank: int | None = flag(
        "train adapters of this rank beside frozen weights; start from a model with --load and --finetune, or from an "
        "imported one (local layers)",
        within=POSITIVE,
    )
    lora_alpha: float | None = flag(
        "with --lora-rank: what adapters add is multiplied by alpha / rank; default: the rank", within=POSITIVE
    )
    lora_target_modules: tuple[str, ...] | None = flag(
        "with --lora-rank: linear layers that have one; default: all of these that the model has, but beside experts "
        "no linear_fc1 and linear_fc2",
        choices=tuple(ADAPTED),
    )
    recompute_method: str | None = flag(
        "which layers, with full recomputation", group="training", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(
        "layers of a unit (uniform), or first ones of every model chunk (block); default: 1",
        group="training",
        within=POSITIVE,
    )
    expert_tensor_parallel_size: int | None = flag(
        "always 1 here, which is the default: whole experts", group="parallelism", metavar="1"
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        "layers of the first stage; the others share the rest evenly; default: as many as every stage",
        group="parallelism",
        within=POSITIVE,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        "layers of the last stage; the others share the rest evenly; default: as many as every stage",
        group="parallelism",
        within=POSITIVE,
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        "the embedding counts as a layer of its stage", group="parallelism"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        "LM head and loss count as a layer of their stage", group="parallelism"
    )
    window_sink_tokens: int = flag(
        "first tokens of each sequence that layers with a window (--window-size) see besides it",
        0,
        group="dynamic context parallelism",
        metavar="N",
    )


class Meaning(NamedTuple):
    """What a flag of a model is elsewhere; "=" is the flag's own name.

    Attributes:
        usual: what an `Architecture` holds if the flag is not given or None, such as 0 for no window; None: a model
            file must say it, or other flags decide it.
        shape: field of `ModelShape` that has the value, such as "experts.topk"; "": none has.
        entry: its name in the `architecture` of a model file, "not NAME" if that says the opposite; "": none.
        config: field of megatron-core's TransformerConfig that has the value, "not NAME" likewise; "": none has.
        needs: flag without which it says nothing, with values if only some count: "name=a|b". `linear_attention`, the
            kind of such layers, counts as a flag here.
        is_shown: a launch line names it even at its usual value.
        kept: whether runs that load each other's weights must share it: "on" if it is not as usual, "always" if what it
            needs is there, "": never.
    """

    usual: Any = None
    shape: str = ""
    entry: str = ""
    config: str = ""
    needs: str = ""
    is_shown: bool = False
    kept: str = ""

    def is_met(self, flags: Mapping[str, Any]) -> bool:
        name, _, values = self.needs.partition("=")
        found = flags.get(name)
        return not name or (found in values.split("|") if values else found not in (None, False, 0))


def _named(**rows: Meaning) -> dict[str, Meaning]:
    """Return the rows with the names that "=" stands for."""
    return {
        name: row._replace(**{part: value.replace("=", name) for part in _NAMES if (value := getattr(row, part))})
        for name, row in rows.items()
    }


_NAMES = ("shape", "entry", "config")
LATENTS, _EXPERTS, _YARN = "multi_latent_attention", "num_experts", "position_embedding_type=yarn"
_DELTA, MAMBA_LAYERS = "linear_attention=gated_delta_net", "linear_attention=mamba2"
_of_latents = partial(Meaning, shape="=", config="=", needs=LATENTS, is_shown=True, kept="always")
_of_delta = partial(Meaning, config="=", needs=_DELTA, is_shown=True, kept="always")
_of_mamba = partial(Meaning, config="=", needs=MAMBA_LAYERS, is_shown=True, kept="always")
_of_experts = partial(Meaning, config="=", needs=_EXPERTS, kept="always")
_of_yarn = partial(Meaning, entry="=", needs=_YARN, is_shown=True)
_beyond = partial(Meaning, entry="=", kept="on")
MEANINGS: Mapping[str, Meaning] = _named(
    num_layers=Meaning(shape="=", config="="),
    hidden_size=Meaning(shape="=", config="="),
    ffn_hidden_size=Meaning(shape="=", config="="),
    num_attention_heads=Meaning(shape="=", config="="),
    group_query_attention=Meaning(False),
    num_query_groups=Meaning(shape="=", config="="),
    multi_latent_attention=Meaning(kept="on"),
    kv_lora_rank=_of_latents(32),
    q_lora_rank=Meaning(shape="=", config="=", needs=LATENTS, kept="always"),
    qk_head_dim=_of_latents(128),
    qk_pos_emb_head_dim=_of_latents(64),
    v_head_dim=_of_latents(128),
    rope_type=Meaning(config="=", needs=LATENTS, kept="always"),
    kv_channels=Meaning(shape="=", config="="),
    squared_relu=_beyond(False),
    geglu=_beyond(False),
    quick_geglu=_beyond(False),
    glu_linear_offset=_beyond(0.0, config="=", needs="quick_geglu", is_shown=True),
    activation_func_clamp_value=_beyond(0.0, config="=", needs="quick_geglu"),
    swiglu=Meaning(False),
    sandwich_norm=Meaning(False, shape="=", kept="on"),
    attention_output_gate=Meaning(False, shape="=", config="=", kept="on"),
    window_size=Meaning(config="="),
    window_attn_skip_freq=Meaning(config="="),
    window_sink_tokens=Meaning(0, shape="="),
    experimental_attention_variant=Meaning(config="=", needs="linear_attention"),
    linear_attention_freq=Meaning(config="=", needs="linear_attention"),
    hybrid_override_pattern=Meaning(),
    linear_conv_kernel_dim=_of_delta(4, shape="linear_attention.kernel_size"),
    linear_key_head_dim=_of_delta(128, shape="linear_attention.key_size"),
    linear_value_head_dim=_of_delta(128, shape="linear_attention.value_size"),
    linear_num_key_heads=_of_delta(16, shape="linear_attention.num_groups"),
    linear_num_value_heads=_of_delta(32, shape="linear_attention.num_heads"),
    mamba_state_dim=_of_mamba(128, shape="linear_attention.key_size"),
    mamba_head_dim=_of_mamba(64, shape="linear_attention.value_size"),
    mamba_num_groups=_of_mamba(8, shape="linear_attention.num_groups"),
    mamba_num_heads=Meaning(shape="linear_attention.num_heads", config="=", needs=MAMBA_LAYERS, kept="always"),
    num_experts=Meaning(shape="experts.num_experts", config="num_moe_experts", needs=_EXPERTS, kept="always"),
    moe_router_topk=_of_experts(2, shape="experts.topk", is_shown=True),
    moe_ffn_hidden_size=_of_experts(shape="experts.ffn_hidden_size"),
    moe_shared_expert_intermediate_size=_of_experts(shape="experts.shared_ffn_hidden_size"),
    moe_shared_expert_gate=_of_experts(False, shape="experts.shared_gate"),
    moe_layer_freq=_of_experts(1, shape="experts.layer_freq"),
    moe_grouped_gemm=Meaning(False, config="=", needs=_EXPERTS),
    mtp_num_layers=Meaning(0, shape="=", config="=", kept="on"),
    mtp_loss_scaling_factor=Meaning(config="="),
    untie_embeddings_and_output_weights=Meaning(shape="not share_embeddings_and_output_weights"),
    vocab_size=Meaning(shape="="),
    make_vocab_size_divisible_by=Meaning(),
    normalization=Meaning(entry="=", config="=", is_shown=True),
    norm_epsilon=Meaning(entry="=", config="layernorm_epsilon", is_shown=True),
    apply_layernorm_1p=Meaning(False, entry="zero_centered_gamma", config="layernorm_zero_centered_gamma", kept="on"),
    position_embedding_type=Meaning(entry="=", is_shown=True),
    max_position_embeddings=Meaning(0, entry="=", is_shown=True),
    rotary_base=Meaning(10000, entry="=", needs="position_embedding_type=rope|yarn", is_shown=True),
    rotary_percent=Meaning(1.0, entry="=", needs="position_embedding_type=rope|yarn"),
    window_rotary_base=_beyond(0),
    rotary_interleaved=Meaning(False, entry="=", config="="),
    no_rope_freq=_beyond((), config="="),
    rotary_seq_len_interpolation_factor=Meaning(1, kept="on"),
    use_rope_scaling=_beyond(False),
    rope_scaling_factor=Meaning(8.0, entry="=", needs="use_rope_scaling", is_shown=True, kept="always"),
    rotary_scaling_factor=_of_yarn(1.0),
    yarn_original_max_position_embeddings=_of_yarn(4096),
    yarn_beta_fast=_of_yarn(32.0),
    yarn_beta_slow=_of_yarn(1.0),
    mscale=_of_yarn(1.0),
    mscale_all_dim=_of_yarn(0.0),
    yarn_correction_range_round_to_int=Meaning(True, entry="=", needs=_YARN),
    disable_bias_linear=Meaning(entry="not add_bias_linear", config="not add_bias_linear"),
    add_qkv_bias=Meaning(entry="=", config="="),
    qk_layernorm=Meaning(entry="=", config="="),
    qk_l2_norm=Meaning(False, config="=", kept="on"),
    softmax_type=_beyond("vanilla", config="="),
    residual_multiplier=_beyond(1.0),
    embedding_multiplier=_beyond(1.0),
    logits_scaling=_beyond(1.0),
    softmax_scale=_beyond(0.0, config="="),
    moe_router_score_function=_of_experts("softmax", entry="router_score_function"),
    moe_router_pre_softmax=_of_experts(False, entry="router_pre_softmax"),
    moe_router_num_groups=_of_experts(0, entry="router_num_groups"),
    moe_router_group_topk=_of_experts(0, entry="router_group_topk"),
    moe_router_topk_scaling_factor=_of_experts(1.0, entry="router_scaling_factor"),
    moe_router_enable_expert_bias=_of_experts(False, entry="router_expert_bias"),
    init_method_std=Meaning(0.02, entry="=", config="=", is_shown=True),
    moe_router_dtype=Meaning(config="=", needs=_EXPERTS),
    moe_router_bias_update_rate=Meaning(0.001, config="=", needs=_EXPERTS),
    moe_router_load_balancing_type=Meaning("aux_loss", config="=", needs=_EXPERTS),
    moe_aux_loss_coeff=Meaning(0.0, config="=", needs=_EXPERTS),
    moe_z_loss_coeff=Meaning(config="=", needs=_EXPERTS),
    moe_token_dispatcher_type=Meaning("alltoall", needs=_EXPERTS),
    hidden_dropout=Meaning(config="="),
    bf16=Meaning(config="="),
    fp32_residual_connection=Meaning(config="="),
    fp8=Meaning(config="="),
    cross_entropy_loss_fusion=Meaning(config="="),
    recompute_method=Meaning(config="="),
    recompute_num_layers=Meaning(config="="),
    decoder_first_pipeline_num_layers=Meaning(config="num_layers_in_first_pipeline_stage"),
    decoder_last_pipeline_num_layers=Meaning(config="num_layers_in_last_pipeline_stage"),
    account_for_embedding_in_pipeline_split=Meaning(config="="),
    account_for_loss_in_pipeline_split=Meaning(config="="),
)
"""Flag -> its meaning, in the order of launch lines."""
