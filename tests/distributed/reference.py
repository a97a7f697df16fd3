"""The judge of the parity suite: stock megatron-core in one process, an unpacked, unpadded sequence at a time
(SBHD)."""

import ast
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions import fused_softmax
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_token_prediction, utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from dynamic_cp.types import Sample
from megatron.dynamic_cp.flags.linear_attention import set_pattern
from megatron.dynamic_cp.model.layer_parts import TorchNorm
from megatron.dynamic_cp.repairs import patches, releases
from tests.distributed.harness import initialize_model_parallel
from tests.distributed.token_by_token import with_linear_layers

VOCAB_SIZE = 256
HIDDEN_SIZE = 128
MAX_POSITIONS = 1024
FIRST_MASKED_ID = 900
"""From this sample on only the first eighth of the tokens has a loss."""


class ModelVariant(NamedTuple):
    name: str
    config: Mapping[str, Any] = MappingProxyType({})
    tied: bool = False
    position_embedding: str = "rope"
    model: Mapping[str, Any] = MappingProxyType({})  # arguments of GPTModel
    yarn: Mapping[str, Any] = MappingProxyType({})  # flags
    dense_layers: int = 0  # before those with experts
    pattern: str = ""  # of halves of layers


def settings(*texts: str) -> dict[str, Any]:
    """Return what "name=value name=value" says, the last one of a name; a value is Python's, or a word."""
    return {name: _value(value) for text in texts for name, value in (word.split("=") for word in text.split())}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def variant(name: str, *config: str, **others: Any) -> ModelVariant:
    return ModelVariant(name, settings(*config), **others)


# Llama-like: RoPE, RMS norm, SwiGLU, grouped-query attention.
_NO_NORMS = "normalization=RMSNorm num_query_groups=2 gated_linear_unit=True"
_LLAMA = f"{_NO_NORMS} qk_layernorm=True"
LLAMA = variant("llama", _LLAMA)
LLAMA_TIED = variant("llama_tied", _LLAMA, tied=True)
# As many heads as lanes, and a KV head for four of them.
LLAMA_8_HEADS = variant("llama_8_heads", _LLAMA, "num_attention_heads=8")
# GPT-2-like: learned positions, layer norm, biases, multi-head attention.
_LEARNED = "learned_absolute"
GPT2 = variant("gpt2", "normalization=LayerNorm", position_embedding=_LEARNED)
NO_POSITIONS = variant("no_positions", "normalization=RMSNorm", position_embedding="none")
# RoPE on half of the channels, interleaved pairs, as GPT-J.
PARTIAL_ROPE = variant("partial_rope", "normalization=RMSNorm rotary_interleaved=True")

# Every feature of attention and positions alone, and together those that can be.
_FP32_RESIDUAL, _OFFSET = "fp32_residual_connection=True", "softmax_type=learnable"
_GATED = "attention_output_gate=True"
_L2_NORMS, _UNROTATED = f"{_NO_NORMS} qk_l2_norm=True", f"{_LLAMA} no_rope_freq=2"
_SCALED = {"rope_scaling": True, "rope_scaling_factor": 16.0}
_INTERPOLATED = {"seq_len_interpolation_factor": 4}
_YARN = settings("rotary_scaling_factor=8.0 yarn_original_max_position_embeddings=128")
# In float32, where only the way of adding differs.
FP32_RESIDUAL = variant("fp32_residual", _LLAMA, _FP32_RESIDUAL)
FP32_RESIDUAL_GPT2 = variant(
    "fp32_residual_gpt2", "normalization=LayerNorm", _FP32_RESIDUAL, position_embedding=_LEARNED
)
# A score that all tokens see besides, learned or 0.
LEARNED_OFFSET = variant("learned_offset", _LLAMA, _OFFSET)
OFF_BY_ONE = variant("off_by_one", _LLAMA, "softmax_type=off-by-one")
GATED = variant("gated", _LLAMA, _GATED)
L2_NORMS = variant("l2_norms", _L2_NORMS)
SCALED = variant("scaled", _LLAMA, model=_SCALED)
INTERPOLATED = variant("interpolated", _LLAMA, model=_INTERPOLATED)
UNROTATED = variant("unrotated", _UNROTATED)
YARN = variant("yarn", _LLAMA, position_embedding="yarn", yarn=_YARN)
_ALL = f"{_L2_NORMS} no_rope_freq=2 qk_layernorm=False {_GATED}"
ALL_BUT_YARN = variant("all_but_yarn", _ALL, _OFFSET, model={**_SCALED, **_INTERPOLATED})
# What TransformerEngine's layers have of that.
ALL_OF_ENGINE = variant("all_of_engine", _ALL, "softmax_type=vanilla", model={**_SCALED, **_INTERPOLATED})
ALL_WITH_YARN = variant(
    "all_with_yarn", f"{_UNROTATED} {_OFFSET} {_GATED}", position_embedding="yarn", tied=True,
    yarn=_YARN | settings("mscale=0.8 mscale_all_dim=0.3 yarn_correction_range_round_to_int=False"),
)  # fmt: skip

# Experts: as Qwen3-MoE; as DeepSeek-V3, in every other layer; one for each token beside a shared one.
_EXPERTS = """
    num_moe_experts=8 moe_ffn_hidden_size=64 moe_token_dispatcher_type=alltoall
    moe_aux_loss_coeff=0.3 moe_z_loss_coeff=0.05
"""
_SIGMOID = f"""
    {_EXPERTS} moe_layer_freq=2 moe_router_topk=4 moe_router_num_groups=4 moe_router_group_topk=2
    moe_router_score_function=sigmoid moe_router_topk_scaling_factor=2.5 moe_router_enable_expert_bias=True
    moe_router_dtype=fp32 moe_router_load_balancing_type=seq_aux_loss moe_shared_expert_intermediate_size=96
    moe_z_loss_coeff=None
"""
_TOP_1 = f"""
    {_LLAMA} {_EXPERTS} moe_router_topk=1 moe_router_pre_softmax=True moe_aux_loss_coeff=[0.1,0.2]
    moe_router_load_balancing_type=["aux_loss","seq_aux_loss"] moe_shared_expert_intermediate_size=96
    moe_shared_expert_gate=True moe_router_dtype=fp64
"""
MOE = variant("moe", _LLAMA, _EXPERTS)
MOE_SIGMOID = variant("moe_sigmoid", _LLAMA, _SIGMOID)
MOE_TOP_1 = variant("moe_top_1", _TOP_1)
# Experts alone, whatever their routers' losses.
MOE_PLAIN = variant("moe_plain", _LLAMA, _EXPERTS, "moe_aux_loss_coeff=0.0 moe_z_loss_coeff=None")
# No loss counts the tokens of a sample: where attention is placed, no lane could.
MOE_UNCOUNTED = variant("moe_uncounted", _LLAMA, _SIGMOID, "moe_aux_loss_coeff=0.0 moe_z_loss_coeff=0.05")
MOE_BIASED = variant("moe_biased", _LLAMA, _EXPERTS, "add_bias_linear=True")
# As gpt-oss: experts with biases, learned sinks, YaRN, clamped gates; windows are the layout's.
GPT_OSS = ModelVariant(
    "gpt_oss",
    {
        **settings(_NO_NORMS, _EXPERTS, _OFFSET, "add_bias_linear=True activation_func_clamp_value=1.0"),
        **settings("glu_linear_offset=1.0 moe_router_topk=4"),
        "activation_func": quick_gelu,
    },
    position_embedding="yarn",
    yarn=_YARN | {"yarn_correction_range_round_to_int": False},
)

# Two further tokens; unlike features above it has layers and losses of its own, so that it is trained apart from them.
_MTP = f"{_LLAMA} mtp_num_layers=2 mtp_loss_scaling_factor=0.3"
MTP = variant("mtp", _MTP)
MTP_TIED = variant("mtp_tied", _MTP, tied=True)
MTP_OFFSET = variant("mtp_offset", _MTP, _OFFSET)
# Later tokens have later positions, which their embeddings show.
MTP_GPT2 = variant("mtp_gpt2", "normalization=LayerNorm mtp_num_layers=3", position_embedding=_LEARNED)
# Modules of experts, and one that is dense as the last layer is.
MOE_MTP = variant("moe_mtp", _LLAMA, _EXPERTS, "mtp_num_layers=2", tied=True)
MOE_SIGMOID_MTP = variant("moe_sigmoid_mtp", _LLAMA, _SIGMOID, "mtp_num_layers=1")
# Logits of all words on each tensor-parallel rank; in one process they are gathered from nobody.
_ALL_WORDS = {"parallel_output": False}
GATHERED = variant("gathered", _LLAMA, model=_ALL_WORDS)
MTP_GATHERED = variant("mtp_gathered", _MTP, model=_ALL_WORDS)

# As DeepSeek-V2: values narrower than keys; with norms and YaRN, and without either and without narrow queries.
_LATENTS = """
    multi_latent_attention=True normalization=RMSNorm gated_linear_unit=True kv_lora_rank=48 qk_head_dim=16
    qk_pos_emb_head_dim=8 v_head_dim=16 kv_channels=24
"""
_LATENT = f"""
    {_LATENTS} q_lora_rank=64 qk_layernorm=True rope_type=yarn rotary_scaling_factor=8.0
    original_max_position_embeddings=128 mscale=0.8 mscale_all_dim=0.5
"""
LATENT = variant("latent", _LATENT)
LATENT_PLAIN = variant(
    "latent_plain",
    f"{_LATENTS} gated_linear_unit=False q_lora_rank=None rope_type=rope v_head_dim=20 rotary_base=500",
    tied=True,
)
LATENT_8_HEADS = variant("latent_8_heads", _LATENT, "num_attention_heads=8 mtp_num_layers=1")
# As DeepSeek-V3: a dense layer before those with experts, and a module with experts behind them.
DEEPSEEK = variant(
    "deepseek",
    f"{_LATENT} {_SIGMOID} moe_z_loss_coeff=0.05 mtp_num_layers=1 mtp_loss_scaling_factor=0.3",
    dense_layers=1,
)

# As Qwen3-Next: a gated delta net in every other layer, gated attention in the others; and with experts.
_RULE = """
    experimental_attention_variant=gated_delta_net linear_attention_freq=2 linear_num_key_heads=2
    linear_num_value_heads=4 linear_key_head_dim=16 linear_value_head_dim=24
"""
_DELTA = f"{_LLAMA} {_RULE} {_GATED}"
_PATTERN = "experimental_attention_variant=None is_hybrid_model=True"
DELTA = variant("delta", _DELTA)
DELTA_MOE = variant("delta_moe", _TOP_1, _RULE, _GATED)
# As Qwen3-Next is published: norms of 1 + weight, of queries and keys as well.
DELTA_1P = variant("delta_1p", _DELTA, "layernorm_zero_centered_gamma=True")
# Whose matrices have rows in whole 16s and 32s, which FP8 needs.
DELTA_16_HEADS = variant("delta_16_heads", _DELTA, "linear_num_value_heads=16 linear_value_head_dim=8")
# A module has full attention, as the last layer.
DELTA_MTP = variant("delta_mtp", _TOP_1, _RULE, _GATED, "mtp_num_layers=1 mtp_loss_scaling_factor=0.3")
# Where the last layer has linear attention, its modules have it, too.
DELTA_LAST = variant("delta_last", _DELTA, "linear_attention_freq=[0,1] mtp_num_layers=2", tied=True)
DELTA_HALVES = variant("delta_halves", _DELTA, _PATTERN, pattern="G-*G")
# What attention layers and residuals may have besides; windows are the layout's.
DELTA_MORE = variant("delta_more", _DELTA, _OFFSET, _FP32_RESIDUAL)
# Latent attention has no gate; as Kimi Linear with another delta rule.
_DELTA_LATENT = f"{_LATENT} {_RULE} attention_output_gate=False"
DELTA_LATENT = variant("delta_latent", _DELTA_LATENT)
HALVES_LATENT = variant("halves_latent", _DELTA_LATENT, _PATTERN, pattern="G-*G")
# As Nemotron-H: halves of layers, without positions.
_MAMBA = {
    **settings("normalization=RMSNorm num_query_groups=2 is_hybrid_model=True mamba_num_heads=8 mamba_num_groups=2"),
    **settings("mamba_head_dim=12 mamba_state_dim=16"),
    "activation_func": squared_relu,
}
MAMBA = ModelVariant("mamba", _MAMBA, position_embedding="none", pattern="M*-M")
# With the usual spread of weights one token is 3e-7 from another expert.
MAMBA_MOE = ModelVariant(
    "mamba_moe", settings(_EXPERTS, "init_method_std=0.021") | _MAMBA, position_embedding="none", pattern="ME*M"
)
MAMBA_MORE = ModelVariant(
    "mamba_more", _MAMBA | settings(_OFFSET, _FP32_RESIDUAL), position_embedding="none", pattern="M*-*M"
)

VARIANTS = {one.name: one for one in list(vars().values()) if isinstance(one, ModelVariant)}
OF_HEADS = (".A_log", ".dt_bias", ".softmax_offset")
"""Ends of names of parameters with a number for each head, whose gradient is a sum over all tokens."""
HYBRIDS = tuple(one for one in VARIANTS.values() if one.pattern or "experimental_attention_variant" in one.config)


# As Megatron-LM names and fills them for megatron-core; not taken from the code under test.
YARN_FIELDS = {
    "rotary_scaling_factor": "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}
YARN_DEFAULTS = {
    "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}  # fmt: skip


def transformer_config(variant: ModelVariant, **overrides: Any) -> TransformerConfig:
    """Return the config of both sides; `overrides` are the parallel layout's."""
    activation = torch.nn.functional.silu if variant.config.get("gated_linear_unit") else torch.nn.functional.gelu
    values: dict[str, Any] = {
        "num_layers": 4, "hidden_size": HIDDEN_SIZE, "num_attention_heads": 4, "ffn_hidden_size": 256,
        "activation_func": activation, "add_bias_linear": not variant.config.get("gated_linear_unit", False),
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True,
        "calculate_per_token_loss": True, "context_parallel_size": 1,
    }  # fmt: skip
    kind = MLATransformerConfig if variant.config.get("multi_latent_attention") else TransformerConfig
    values |= {**variant.config, **overrides}
    if variant.dense_layers:
        dense = variant.dense_layers
        values["moe_layer_freq"] = [0] * dense + [1] * (values["num_layers"] - dense)
    modules = values.get("recompute_modules")
    if modules is not None:
        values["recompute_modules"] = [name for name in modules if name != "gdn_norm_out"]  # known since 0.19
    config = kind(**values)
    if modules is not None:
        config.recompute_modules = modules
    set_pattern(config, variant.pattern)
    for name, value in variant.yarn.items():  # fields that megatron-core has not, each with its default
        setattr(config, YARN_FIELDS[name], value)
    for name, value in YARN_DEFAULTS.items() if variant.yarn else ():
        if not hasattr(config, name):
            setattr(config, name, value)
    return config


def gpt_model(
    config: TransformerConfig, variant: ModelVariant, layer_spec: Any, kind: type[GPTModel] = GPTModel, **stage: Any
) -> GPTModel:
    """Return megatron-core's GPTModel, or ours, with `layer_spec`."""
    return kind(
        config=config, transformer_layer_spec=layer_spec, vocab_size=VOCAB_SIZE, max_sequence_length=MAX_POSITIONS,
        position_embedding_type=variant.position_embedding, rotary_percent=0.5 if variant is PARTIAL_ROPE else 1.0,
        share_embeddings_and_output_weights=variant.tied, **variant.model, **stage,
    )  # fmt: skip


@dataclass(frozen=True)
class SampleTokens:
    """Tokens of a sample as the data path hands them out."""

    tokens: Any
    labels: Any
    loss_mask: Any


def read_sample(sample: Sample) -> SampleTokens:
    """Return random tokens that depend on the sample only."""
    generator = torch.Generator().manual_seed(1000 + sample.sample_id)
    stream = torch.randint(1, VOCAB_SIZE, (sample.seqlen + 1,), generator=generator)
    loss_mask = torch.ones(sample.seqlen)
    if sample.sample_id >= FIRST_MASKED_ID:
        loss_mask[sample.seqlen // 8 :] = 0
    return SampleTokens(stream[:-1].numpy(), stream[1:].numpy(), loss_mask.numpy())


def window_mask(seqlen: int, window_size: tuple[int, int], sink_tokens: int = 0) -> torch.Tensor:
    """Return which keys megatron-core hides from each token of a layer with a window, [S, S], but for `sink_tokens`."""
    ones = torch.ones
    with mock.patch.object(torch, "ones", lambda *shape, device, **kwargs: ones(*shape, **kwargs)):
        hidden: torch.Tensor = utils.get_sliding_window_causal_mask(seqlen, seqlen, window_size)
    hidden[:, :sink_tokens] = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)[:, :sink_tokens]
    return hidden


class TwoWidths(torch.nn.Module):
    """Causal attention of keys and values of different widths, by its definition: megatron-core's local one has one."""

    def __init__(self, softmax_scale: float, config: Any, layer_number: int, **_unused: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        has_window = utils.is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = config.window_size if has_window else None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return [S, 1, heads * value width] of query and key [S, 1, heads, width]."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.softmax_scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.window_size is not None:
            hidden = fused_softmax.get_sliding_window_causal_mask(*hidden.shape, self.window_size)
        scores.masked_fill_(hidden, float("-inf"))
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


def weigh_later_tokens_as_others(num_tokens: Callable[[], int]) -> None:
    """Have the losses of modules count per token, as before megatron-core 0.17, which weighs packs otherwise."""
    roll = multi_token_prediction.roll_tensor
    multi_token_prediction.roll_tensor = lambda tensor, *args, **kwargs: (
        roll(tensor, *args, **kwargs)[0],
        torch.tensor(num_tokens()),
    )


class Cloned(RowParallelLinear):
    """megatron-core's matrix, whose output a bias may be added to in place: torch refuses that of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def stock_layer(config: TransformerConfig) -> Any:
    """Return the spec of megatron-core's own layer."""
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization, qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=config.multi_latent_attention,
    )  # fmt: skip
    if config.multi_latent_attention:
        patches.repair_latent_attention()
        spec.submodules.self_attention.submodules.core_attention = TwoWidths
    return spec


def stock_spec(variant: ModelVariant, config: TransformerConfig) -> Any:
    """Return megatron-core's layers, with linear attention by its definition."""
    spec = stock_layer(config)
    if config.num_moe_experts is not None:
        patches.repair_expert_routing()
        plain = copy.copy(config)
        plain.experimental_attention_variant = None  # since 0.19 it refuses what `with_linear_layers` puts in
        spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization=config.normalization)
        for layer in spec.layer_specs:
            if config.multi_latent_attention:
                layer.submodules.self_attention.submodules.core_attention = TwoWidths
            if config.add_bias_linear:
                mlp = layer.submodules.mlp
                submodules = mlp.keywords["submodules"] if releases.EXPERTS_BY_FUNCTION.here else mlp.submodules
                experts = submodules.experts
                # Already in 0.17 a function, though the layer's MLP is none yet.
                of_one = experts.keywords["submodules"] if hasattr(experts, "keywords") else experts.submodules
                of_one.linear_fc2 = Cloned
    if variant in HYBRIDS:
        layers = [stock_layer(config)] * config.num_layers if config.num_moe_experts is None else spec.layer_specs
        if variant.pattern:
            layers = [stock_layer(config), layers[-1]]
        norm = _use_norms_of_1_more(layers) if config.layernorm_zero_centered_gamma else WrappedTorchNorm
        spec = TransformerBlockSubmodules(with_linear_layers(layers, config), norm)
    return spec


def _use_norms_of_1_more(layers: list[Any]) -> type:
    """Have layers built with our norms of 1 + weight, which megatron-core's of torch are not; return the last one."""
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return TorchNorm


def reference_step(
    variant_name: str, samples: tuple[Sample, ...], num_layers: int,
    windows: Mapping[str, Any] = MappingProxyType({}), is_exact: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return {"initial", "gradients": name -> tensor, "losses": sample_id -> [S], "num_tokens"}; runs on one rank.

    "terms" of OF_HEADS say how large a gradient is about if those of samples do not cancel out. Hybrids are in float64
    if `is_exact`."""
    variant = VARIANTS[variant_name]
    initialize_model_parallel()
    of_config = dict(windows)
    if variant in HYBRIDS:
        of_config["fp32_residual_connection"] = False  # all of it is in float64
    sink_tokens = of_config.pop("window_sink_tokens", 0)
    fused_softmax.get_sliding_window_causal_mask = lambda rows, _, window_size: window_mask(
        rows, window_size, sink_tokens
    )
    config = transformer_config(variant, num_layers=num_layers, **of_config)
    torch.compiler.set_stance("force_eager")  # compiling for each length takes longer than all the rest
    spec = stock_spec(variant, config)
    num_tokens = []  # with a loss, of each sample so far
    if config.mtp_num_layers:
        weigh_later_tokens_as_others(lambda: num_tokens[-1])
    model = gpt_model(config, variant, spec, mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False))
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the symmetric start (norms at 1, biases at 0), where errors could hide.
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for bias in (buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")):
            bias.copy_(torch.randn_like(bias) * 0.05)
    if not (config.moe_router_enable_expert_bias or config.moe_router_num_groups):
        for router in (one for one in model.modules() if isinstance(one, TopKRouter)):
            router.gating = partial(_without_ties, router.gating, router.topk)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    if variant in HYBRIDS and is_exact:
        model.double()  # gradients of single heads are sums of terms that cancel: float32 alone is 2e-6 off
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.endswith(OF_HEADS)}
    for name, sums in squares.items():
        model.get_parameter(name).register_hook(partial(_add_square, sums))
    losses = {}
    for sample in samples:
        values = read_sample(sample)
        tokens, labels, mask = (torch.from_numpy(x)[None] for x in (values.tokens, values.labels, values.loss_mask))
        num_tokens.append(int(mask.sum()))
        token_losses = model(tokens, torch.arange(sample.seqlen)[None], None, labels=labels, loss_mask=mask)[0]
        losses[sample.sample_id] = token_losses.detach().clone()
        (token_losses * mask[0]).sum().backward()  # and what losses of multi-token prediction add to it
    gradients = {name: p.grad / sum(num_tokens) for name, p in model.named_parameters()}
    return {
        "initial": initial, "gradients": gradients, "losses": losses, "num_tokens": sum(num_tokens),
        "expert_biases": moved_expert_biases(model, config),
        "terms": {name: sums.sqrt() / sum(num_tokens) for name, sums in squares.items()},
    }  # fmt: skip


def _without_ties(gating: Callable[..., torch.Tensor], num_chosen: int, *given: torch.Tensor) -> torch.Tensor:
    logits = gating(*given)
    best = logits.detach().topk(num_chosen + 1).values
    gap = (best[..., -2] - best[..., -1]).min().item()
    assert gap > 1e-6, f"rounding decides which expert a token takes ({gap:.1e} between two): draw other weights"
    return logits


def _add_square(sums: torch.Tensor, of_sample: torch.Tensor) -> None:
    sums += of_sample.square()


def moved_expert_biases(model: GPTModel, config: TransformerConfig) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return name -> (values before, after the step), as in algorithm 1 of Wang et al. 2024 (arXiv 2408.15664)."""
    found = {}
    for name, module in model.named_modules():
        if getattr(module, "expert_bias", None) is not None:
            tokens, bias = module.local_tokens_per_expert, module.expert_bias
            moved = bias + config.moe_router_bias_update_rate * torch.sign(tokens.mean() - tokens)
            found[f"{name}.expert_bias"] = bias.clone(), moved
    return found
