"""What is refused by name: flags of features that are not supported, and any other field of a configuration.

Needs neither torch nor megatron-core, so that a wrong flag is reported immediately.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models.flags import GATED_DELTA_NET, MEANINGS
from dynamic_cp.models.table import destination_of
from dynamic_cp.types import RECOMPUTE_MODULES, RecomputeModule
from megatron.dynamic_cp.flags.attention import check_norms, windows_of
from megatron.dynamic_cp.flags.experts import DEFAULTS, check_experts, num_experts
from megatron.dynamic_cp.flags.features import (
    OF_QUICK_GEGLU,
    YARN_FIELDS,
    check_activation,
    check_latent_attention,
    check_multi_token,
    has_biases,
    is_quick_geglu,
)
from megatron.dynamic_cp.flags.fp8 import check_fp8
from megatron.dynamic_cp.flags.linear_attention import check_linear_attention, kind_of
from megatron.dynamic_cp.flags.shape import said


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A feature of Megatron-LM outside the supported list: its flag, and the same switch in TransformerConfig, if any.
    `off` are values of flag and field that switch it off; a field is also off when it is None or False.
    """

    flag: str
    reason: str
    field: str | None = None
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """Return whether `value` (of the field, or a word of the command line) leaves the feature off."""
        if value is None or value is False:
            return True
        try:
            return float(value) in {float(off) for off in self.off}
        except (TypeError, ValueError):
            return value in self.off

    def error(self) -> UnsupportedFeatureError:
        where = f" (TransformerConfig.{self.field})" if self.field else ""
        return UnsupportedFeatureError(f"{self.flag}{where} is not supported: {self.reason}; leave it out")


_UNTESTED = "it is not among the features that were checked with a CP group per micro-batch"
_FSDP = "parameters are replicated or sharded by DDP and the distributed optimizer only"
_DROPPED = "every token reaches its experts; which ones a full expert would drop follows the packing"
_MOE_OVERLAP = "router and experts run one after the other"
_MOE_FUSED = "padding is never sent to experts, which fused kernels expect"
_MOE_TESTING = "it is for measuring, training with it learns nothing"
_GRAPHS = "shapes change with every micro-batch"
_OFFLOAD = "activations and weights stay on their device"
_PRECISION = "train in fp32 or --bf16"
_ALONE = "each document already is a sequence of its own"


def _field(flag: str, reason: str, field: str = "", off: tuple[Any, ...] = ()) -> Unsupported:
    return Unsupported(flag, reason, field or destination_of(flag), off)


UNSUPPORTED: tuple[Unsupported, ...] = (
    _field("--fp16", _PRECISION),
    _field("--fp8-param-gather", "weights are kept in bfloat16", field="fp8_param"),
    _field("--fp4-format", "matrix products are in bfloat16, or by --fp8-format in FP8", field="fp4"),
    _field("--moe-expert-capacity-factor", _DROPPED, off=(-1,)),
    *(_field(flag, _DROPPED) for flag in ("--moe-pad-expert-input-to-capacity", "--moe-token-dropping")),
    *(_field(flag, _MOE_OVERLAP) for flag in ("--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm")),
    *(_field(flag, _MOE_FUSED) for flag in ("--moe-permute-fusion", "--moe-router-fusion")),
    _field("--moe-use-legacy-grouped-gemm", "--moe-grouped-gemm takes TransformerEngine's"),
    _field("--moe-enable-deepep", "--moe-token-dispatcher-type is alltoall"),
    _field("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules moe takes its place"),
    _field("--moe-input-jitter-eps", "what is drawn would follow the packing"),
    _field("--moe-router-force-load-balancing", _MOE_TESTING),
    *(_field(f"--moe-{what}", _UNTESTED) for what in ("apply-probs-on-input", "latent-size", "enable-routing-replay")),
    *(_field(f"--moe-router-padding-for-{what}", _PRECISION) for what in ("quantization", "fp8")),
    _field("--moe-router-topk-limited-devices", "--moe-router-num-groups and --moe-router-group-topk take its place"),
    Unsupported("--moe-use-upcycling", "--load takes checkpoints of the same model"),
    Unsupported("--hybrid-attention-ratio", "--hybrid-override-pattern names the layers one by one", off=(0,)),
    _field("--hybrid-context-parallel", "--dynamic-cp takes its place"),
    _field(
        "--hierarchical-context-parallel-sizes",
        "--cp-comm-type a2a+p2p takes its place, with sizes from --dynamic-cp-inner-sizes",
    ),
    *(Unsupported(f"--use-{kind}", _FSDP) for kind in ("custom-fsdp", "megatron-fsdp", "torch-fsdp2")),
    Unsupported("--num-distributed-optimizer-instances", "the lanes form one optimizer instance", off=(1,)),
    Unsupported("--use-tp-pp-dp-mapping", "it puts neighbouring lanes on different nodes"),
    *(_field(flag, _GRAPHS) for flag in ("--enable-cuda-graph", "--external-cuda-graph")),
    _field("--cuda-graph-impl", _GRAPHS, off=("none",)),
    _field("--tp-comm-overlap", "its buffers have one fixed length"),
    _field("--cpu-offloading", _OFFLOAD),
    _field("--cpu-offloading-num-layers", _OFFLOAD, off=(0,)),
    Unsupported("--optimizer-cpu-offload", _OFFLOAD),
    _field("--fine-grained-activation-offloading", _OFFLOAD),
    _field("--attention-dropout", "the block-wise attention has no dropout (set it to 0)", off=(0.0,)),
    _field("--qk-clip", _UNTESTED),
    _field("--apply-query-key-layer-scaling", "it needs fp16 training"),
    _field("--heterogeneous-layers-config-path", _UNTESTED, field="heterogeneous_block_specs"),
    _field("--use-kitchen-config-file", _UNTESTED, field="use_kitchen"),
    Unsupported("--yaml-cfg", "flags come from the command line; pretrain_gpt.py of this project also reads @FILE"),
    *(Unsupported(f"--reset-{what}", _ALONE) for what in ("position-ids", "attention-mask")),
)

# Fields of TransformerConfig that may differ from a plain config: those tested against stock megatron-core, what
# follows from them, and what changes neither a tensor nor a schedule.
_FIELDS = (
    "activation_func gated_linear_unit attention_dropout attention_backend "
    "init_method output_layer_init_method embedding_init_method embedding_init_method_std "
    "perform_initialization use_cpu_initialization fp8_recipe "
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "sequence_parallel async_tensor_model_parallel_allreduce "
    "expert_tensor_parallel_size "  # follows the tensor-parallel size, also without experts
    "variable_seq_lengths moe_token_dispatcher_type overlap_p2p_comm batch_p2p_comm batch_p2p_sync "
    "recompute_granularity recompute_modules "
    "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
    "timers barrier_with_L1_time config_logger_dir deterministic_mode"
)
_LATER = ("num_experts", "quick_geglu")
ALLOWED = frozenset(
    {
        *(one.config.removeprefix("not ") for one in MEANINGS.values() if one.config and one.needs not in _LATER),
        *YARN_FIELDS,
        *("is_hybrid_model", "hetereogenous_dist_checkpoint"),
        *_FIELDS.split(),
    }
) - {"cross_entropy_loss_fusion"}
# Also allowed for a model with experts.
_ALLOWED_OF_EXPERTS = frozenset({"num_moe_experts", "expert_model_parallel_size", *DEFAULTS})
# Either of two precisions, compared by name, because this module does not import torch.
_DTYPE_FIELDS = frozenset({"params_dtype", "pipeline_dtype", "autocast_dtype"})


def config_fields(flags: Any) -> dict[str, Any]:
    """Return the fields of TransformerConfig that this trainer's completed flags set."""
    values, found = said(flags), {}
    for name, means in MEANINGS.items():
        if means.config and means.is_met(values):
            value = not values[name] if means.config.startswith("not ") else values[name]
            is_by_layer = isinstance(value, tuple) and name != "window_size"  # a pair
            found[means.config.removeprefix("not ")] = list(value) if is_by_layer else value
    return found


class _Refuse(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, *, feature: Unsupported, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self.feature = feature

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values or not all(self.feature.is_off(value) for value in values):
            raise self.feature.error()


def add_refusals(parser: argparse.ArgumentParser) -> None:
    """Make a parser refuse the flags of UNSUPPORTED, each with its reason."""
    for feature in UNSUPPORTED:
        parser.add_argument(feature.flag, nargs="*", action=_Refuse, feature=feature, help=argparse.SUPPRESS)


def recompute_modules(config: Any) -> tuple[RecomputeModule, ...]:
    """Return what selective recomputation repeats by flags or a configuration, each once; else megatron-core's default.
    Raises UnsupportedFeatureError: a module that such a model lacks or that is not supported, or an MLP with bias.
    """
    given = getattr(config, "recompute_modules", None)
    names = ["core_attn"] if given is None else list(dict.fromkeys(given))
    has_experts = num_experts(config) is not None
    has_norm = kind_of(config) == GATED_DELTA_NET
    absent = {"moe_act", "mla_up_proj", *(() if has_experts else ["moe"]), *(() if has_norm else ["gdn_norm_out"])}
    possible = [name for name in RECOMPUTE_MODULES if name not in absent]
    for name in names:
        if name not in possible:
            raise UnsupportedFeatureError(
                f"--recompute-modules {name} is not supported: a {'' if has_experts else 'dense '}model "
                f"{'with experts ' if has_experts else ''}has {', '.join(possible)}; give some of them"
            )
    if "mlp" in names and getattr(config, "recompute_granularity", None) == "selective" and has_biases(config):
        raise UnsupportedFeatureError(
            "--recompute-modules mlp is not supported with biases: megatron-core recomputes the MLP's bias as well, "
            "which so becomes its own input: backward never ends; add --disable-bias-linear, or leave mlp out"
        )
    return tuple(names)


def check_supported(config: Any, also_allowed: frozenset[str] = frozenset()) -> None:
    """Check a TransformerConfig: nothing of the table is on, and only fields in ALLOWED differ from a plain config.

    The plain config has the same layers, width and heads. Without this, a field that our modules do not read, such as a
    norm's, would be ignored silently. `also_allowed` names more fields that may differ. Raises UnsupportedFeatureError:
    an unsupported feature is on, or a field has a value nobody checked; the message names it. Raises InvalidInputError:
    windows, norms, experts, activations, latents, linear attention or multi-token modules that do not fit.
    """
    for feature in UNSUPPORTED:
        if feature.field is not None and not feature.is_off(getattr(config, feature.field, None)):
            raise feature.error()
    windows_of(config)
    check_norms(config)
    check_experts(config)
    check_activation(config)
    check_latent_attention(config)
    check_linear_attention(config)
    check_multi_token(config)
    check_fp8(config)
    recompute_modules(config)
    plain = type(config)(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads
    )
    allowed = ALLOWED | also_allowed | _DTYPE_FIELDS
    if num_experts(config) is not None:
        allowed |= _ALLOWED_OF_EXPERTS
    if is_quick_geglu(config):
        allowed |= OF_QUICK_GEGLU
    wanted = {f.name: getattr(plain, f.name) for f in fields(config) if f.name not in allowed}
    # The planner simulates this order of model chunks, and a loss is a sum over tokens, divided once per step.
    wanted["microbatch_group_size_per_vp_stage"] = config.pipeline_model_parallel_size
    wanted["calculate_per_token_loss"] = True
    for name, default in wanted.items():
        value = getattr(config, name)
        if value != default:
            raise UnsupportedFeatureError(
                f"TransformerConfig.{name} is {value!r}, only {default!r} is supported: {_UNTESTED}; leave it out"
            )
    _check_dtypes(config, plain)


def _check_dtypes(config: Any, plain: Any) -> None:
    if config.fp32_residual_connection and str(config.pipeline_dtype) not in ("None", "torch.float32"):
        raise UnsupportedFeatureError(
            f"--fp32-residual-connection with TransformerConfig.pipeline_dtype {config.pipeline_dtype}: stages send "
            "each other the residual, set it to torch.float32"
        )
    for name in sorted(_DTYPE_FIELDS):
        value = getattr(config, name)
        if str(value) not in ("None", "torch.float32", "torch.bfloat16"):
            raise UnsupportedFeatureError(
                f"TransformerConfig.{name} is {value}, its default is {getattr(plain, name)}: {_PRECISION}"
            )
