"""Command-line flags of dynamic context parallelism, the features that are refused and the settings that are allowed.

Importing this module needs neither torch nor megatron-core, so that a wrong flag is reported immediately.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.models import catalog
from dynamic_cp.setting import STATIC_POLICIES
from dynamic_cp.types import (
    CHOICES,
    NOISE_MARGIN,
    POOL_USES,
    RECOMPUTE_MODULES,
    SEARCH_EFFORTS,
    RecomputeModule,
)
from megatron.dynamic_cp.flags.activation import OF_QUICK_GEGLU, check_activation, has_biases, is_quick_geglu
from megatron.dynamic_cp.flags.experts import DEFAULTS, check_experts, num_experts
from megatron.dynamic_cp.flags.fp8 import check_fp8
from megatron.dynamic_cp.flags.latent_attention import FIELDS as LATENT_FIELDS
from megatron.dynamic_cp.flags.latent_attention import check_latent_attention
from megatron.dynamic_cp.flags.multi_token import check_multi_token
from megatron.dynamic_cp.flags.positions import check_norms
from megatron.dynamic_cp.flags.windows import windows_of

VERIFY_MODES = ("digest", "full", "off")


def add_dynamic_cp_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of dynamic context parallelism to `parser` and refuse those of unsupported features; return their
    group.
    """
    group = parser.add_argument_group("dynamic context parallelism")
    group.add_argument(
        "--dynamic-cp",
        "--dynamic-context-parallel",
        dest="dynamic_cp",
        action="store_true",
        help="choose a CP size for every bucket of every micro-batch, from its samples; without this flag it is always "
        "--context-parallel-size",
    )
    group.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="C",
        help="CP size without --dynamic-cp, and of the static plan that --dynamic-cp falls back to; must divide world "
        "size / (TP * PP)",
    )
    group.add_argument(
        "--static-cp-policy",
        choices=STATIC_POLICIES,
        default=STATIC_POLICIES[0],
        help="packing without --dynamic-cp: static fills packs in sample order and never returns to an earlier one, as "
        "Megatron's dp_balanced does (next-fit); balanced spreads the work by the cost model",
    )
    group.add_argument(
        "--max-seqlen-per-dp-cp-rank",
        type=tokens_or_auto,
        metavar="N|auto",
        help="most padded tokens of a rank in one micro-batch; auto: as many as fit in the memory that "
        "--dynamic-cp-hardware states, with samples of --seq-length (the CPU hardware file states none); default: what "
        "--seq-length needs at --context-parallel-size. A limit that does not fit in memory is refused",
    )
    group.add_argument(
        "--min-dynamic-cp-size", type=int, default=1, metavar="CP", help="smallest CP size (1, 2, 4, ...)"
    )
    group.add_argument(
        "--max-dynamic-cp-size", type=int, metavar="CP", help="largest CP size; default: the largest the job allows"
    )
    group.add_argument(
        "--dynamic-cp-hardware",
        metavar="NAME|FILE",
        help="hardware of the cost and memory model: "
        f"{', '.join(catalog.hardware_names())} or a file like those; default: on CPU ranks cpu, otherwise h100",
    )
    group.add_argument(
        "--dynamic-cp-search",
        choices=SEARCH_EFFORTS,
        default="fast",
        help="effort of the planner: fast takes milliseconds; thorough takes about ten times as long, for better plans "
        "of a pipeline; exact proves each plan the fastest, of tiny batches only, and needs pulp",
    )
    group.add_argument(
        "--dynamic-cp-lookahead",
        type=int,
        default=2,
        metavar="K",
        help="plan K global batches ahead, in the planner process beside rank 0; with 0 each step waits for its plan",
    )
    group.add_argument(
        "--dynamic-cp-plan-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait for a plan; then the step runs the static plan (CP size --context-parallel-size, or the "
        "smallest that holds --seq-length), with a warning",
    )
    group.add_argument(
        "--dynamic-cp-strict",
        action="store_true",
        help="end the run if the planner fails or takes too long, instead of running the static plan",
    )
    group.add_argument(
        "--dynamic-cp-refine",
        type=int,
        default=0,
        metavar="N",
        help="correct the cost model every N iterations, from the measured times of buckets (bounded, logged, saved); "
        "0: never",
    )
    group.add_argument(
        "--dynamic-cp-dump",
        metavar="DIR",
        help="write every plan and every iteration to DIR; `dynamic-cp report --run DIR` shows them",
    )
    group.add_argument(
        "--dynamic-cp-replay",
        metavar="DIR",
        help="take the plans from a dump instead of planning: the run repeats the recorded one bit for bit",
    )
    group.add_argument(
        "--dynamic-cp-verify",
        choices=VERIFY_MODES,
        default="digest",
        help="digest: compare the plan's digest over all ranks in each step; full: also judge the whole plan and the "
        "messages of the pipeline on every rank, and follow each token from its sample to its shard; off: neither",
    )
    group.add_argument(
        "--cp-comm-type",
        choices=CHOICES,
        default="auto",
        help="exchange inside a CP group: p2p is a ring; a2a an all-to-all of heads; all_gather one all-gather of keys "
        "and values; a2a+p2p an all-to-all inside a node and a ring across nodes; latent: a ring of the latents of "
        "multi-latent attention, which each lane projects up; blocks: each tile of attention on a "
        "lane of its own choice; auto: the planner chooses for every bucket, among those that the attention of this "
        "run has, blocks only where samples bring masks or layers have windows; p2p alone needs the fewest "
        "communicators",
    )
    group.add_argument(
        "--window-sink-tokens",
        type=int,
        default=0,
        metavar="N",
        help="first tokens of each sequence that layers with a window (--window-size) see besides it",
    )
    group.add_argument(
        "--dynamic-cp-inner-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="lanes inside a node that exchange heads in a2a+p2p and blocks: groups are built for these sizes only; "
        "default: all powers of two that divide the lanes of a node and the query heads of a tensor-parallel rank",
    )
    group.add_argument(
        "--dynamic-cp-pool",
        choices=POOL_USES,
        default="off",
        help="with a pipeline: servers of all stages compute attention, in ticks in which all stages go forward or all "
        "go back; auto: in global batches in which that is faster by simulation; always: in all of them. Off by "
        "default: it has not run on a GPU",
    )
    group.add_argument(
        "--dynamic-cp-noise-margin",
        type=float,
        default=NOISE_MARGIN,
        metavar="SHARE",
        help="by which ticks of a pool last longer than planned, because every layer waits for the slowest server",
    )
    group.add_argument(
        "--dynamic-cp-ping-pong",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="in ticks of a pool layers run in two nano-batches of a rank's tokens: one computes while what attention "
        "needs of the other travels; without it every layer waits for its exchange",
    )
    group.add_argument(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        help="gloo trains on CPU ranks; default: nccl, or gloo where torch is built without CUDA",
    )
    for feature in UNSUPPORTED:
        parser.add_argument(feature.flag, nargs="*", action=_Refuse, feature=feature, help=argparse.SUPPRESS)
    return group


def tokens_or_auto(text: str) -> int | str:
    """Return the value of --max-seqlen-per-dp-cp-rank; an argparse type."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor 'auto'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A feature of Megatron-LM outside the supported list.

    Attributes:
        flag: Megatron-LM's flag.
        field: the same switch in TransformerConfig, if there is one.
        off: values of flag and field that switch the feature off; a field is also off when it is None or False.
        reason: what stands in the way.
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
        """Return the error that names the flag."""
        where = f" (TransformerConfig.{self.field})" if self.field else ""
        return UnsupportedFeatureError(
            f"{self.flag}{where} is not supported: {self.reason}; leave it out", flag=self.flag, field=self.field
        )


_UNTESTED = "it is not among the features that were checked with a CP group per micro-batch"
_FSDP = "parameters are replicated or sharded by DDP and the distributed optimizer only"
_DROPPED = "every token reaches its experts; which ones a full expert would drop follows the packing"
_MOE_OVERLAP = "router and experts run one after the other"
_MOE_FUSED = "padding is never sent to experts, which fused kernels expect"
_MOE_TESTING = "it is for measuring, training with it learns nothing"
_GRAPHS = "shapes change with every micro-batch"
_OFFLOAD = "activations and weights stay on their device"
_ATTENTION = "attention is that of a softmax over causal scores"
_PRECISION = "train in fp32 or --bf16"

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(flag="--fp16", field="fp16", reason=_PRECISION),
    Unsupported(flag="--fp8-param-gather", field="fp8_param", reason="weights are kept in bfloat16"),
    Unsupported(flag="--fp4-format", field="fp4", reason="matrix products are in bfloat16, or by --fp8-format in FP8"),
    Unsupported(flag="--moe-expert-capacity-factor", field="moe_expert_capacity_factor", off=(-1,), reason=_DROPPED),
    Unsupported(flag="--moe-pad-expert-input-to-capacity", field="moe_pad_expert_input_to_capacity", reason=_DROPPED),
    Unsupported(flag="--moe-token-dropping", field="moe_token_dropping", reason=_DROPPED),
    Unsupported(flag="--moe-shared-expert-overlap", field="moe_shared_expert_overlap", reason=_MOE_OVERLAP),
    Unsupported(
        flag="--overlap-moe-expert-parallel-comm", field="overlap_moe_expert_parallel_comm", reason=_MOE_OVERLAP
    ),
    Unsupported(flag="--moe-permute-fusion", field="moe_permute_fusion", reason=_MOE_FUSED),
    Unsupported(flag="--moe-router-fusion", field="moe_router_fusion", reason=_MOE_FUSED),
    Unsupported(
        flag="--moe-use-legacy-grouped-gemm",
        field="moe_use_legacy_grouped_gemm",
        reason="--moe-grouped-gemm takes TransformerEngine's",
    ),
    Unsupported(
        flag="--moe-enable-deepep", field="moe_enable_deepep", reason="--moe-token-dispatcher-type is alltoall"
    ),
    Unsupported(
        flag="--moe-layer-recompute",
        field="moe_layer_recompute",
        reason="--recompute-granularity selective --recompute-modules moe takes its place",
    ),
    Unsupported(
        flag="--moe-input-jitter-eps", field="moe_input_jitter_eps", reason="what is drawn would follow the packing"
    ),
    Unsupported(flag="--moe-router-force-load-balancing", field="moe_router_force_load_balancing", reason=_MOE_TESTING),
    Unsupported(flag="--moe-apply-probs-on-input", field="moe_apply_probs_on_input", reason=_UNTESTED),
    Unsupported(flag="--moe-latent-size", field="moe_latent_size", reason=_UNTESTED),
    Unsupported(flag="--moe-enable-routing-replay", field="moe_enable_routing_replay", reason=_UNTESTED),
    Unsupported(
        flag="--moe-router-padding-for-quantization", field="moe_router_padding_for_quantization", reason=_PRECISION
    ),
    Unsupported(flag="--moe-router-padding-for-fp8", field="moe_router_padding_for_fp8", reason=_PRECISION),
    Unsupported(
        flag="--moe-router-topk-limited-devices",
        field="moe_router_topk_limited_devices",
        reason="--moe-router-num-groups and --moe-router-group-topk take its place",
    ),
    Unsupported(flag="--moe-use-upcycling", reason="--load takes checkpoints of the same model"),
    Unsupported(flag="--experimental-attention-variant", field="experimental_attention_variant", reason=_ATTENTION),
    Unsupported(flag="--linear-attention-freq", field="linear_attention_freq", reason=_ATTENTION),
    Unsupported(flag="--hybrid-override-pattern", field="is_hybrid_model", reason="state-space layers are sequential"),
    Unsupported(flag="--hybrid-attention-ratio", reason="state-space layers are sequential", off=(0,)),
    Unsupported(
        flag="--hybrid-context-parallel", field="hybrid_context_parallel", reason="--dynamic-cp takes its place"
    ),
    Unsupported(
        flag="--hierarchical-context-parallel-sizes",
        field="hierarchical_context_parallel_sizes",
        reason="--cp-comm-type a2a+p2p takes its place, with sizes from --dynamic-cp-inner-sizes",
    ),
    Unsupported(flag="--use-custom-fsdp", reason=_FSDP),
    Unsupported(flag="--use-megatron-fsdp", reason=_FSDP),
    Unsupported(flag="--use-torch-fsdp2", reason=_FSDP),
    Unsupported(flag="--num-distributed-optimizer-instances", off=(1,), reason="the lanes form one optimizer instance"),
    Unsupported(flag="--use-tp-pp-dp-mapping", reason="it puts neighbouring lanes on different nodes"),
    Unsupported(flag="--enable-cuda-graph", field="enable_cuda_graph", reason=_GRAPHS),
    Unsupported(flag="--external-cuda-graph", field="external_cuda_graph", reason=_GRAPHS),
    Unsupported(flag="--cuda-graph-impl", field="cuda_graph_impl", off=("none",), reason=_GRAPHS),
    Unsupported(flag="--tp-comm-overlap", field="tp_comm_overlap", reason="its buffers have one fixed length"),
    Unsupported(flag="--cpu-offloading", field="cpu_offloading", reason=_OFFLOAD),
    Unsupported(flag="--cpu-offloading-num-layers", field="cpu_offloading_num_layers", off=(0,), reason=_OFFLOAD),
    Unsupported(flag="--optimizer-cpu-offload", reason=_OFFLOAD),
    Unsupported(
        flag="--fine-grained-activation-offloading", field="fine_grained_activation_offloading", reason=_OFFLOAD
    ),
    Unsupported(
        flag="--attention-dropout",
        field="attention_dropout",
        off=(0.0,),
        reason="the block-wise attention has no dropout (set it to 0)",
    ),
    Unsupported(flag="--qk-clip", field="qk_clip", reason=_UNTESTED),
    Unsupported(
        flag="--apply-query-key-layer-scaling", field="apply_query_key_layer_scaling", reason="it needs fp16 training"
    ),
    Unsupported(flag="--heterogeneous-layers-config-path", field="heterogeneous_block_specs", reason=_UNTESTED),
    Unsupported(flag="--use-kitchen-config-file", field="use_kitchen", reason=_UNTESTED),
    Unsupported(flag="--reset-position-ids", reason="each document already is a sequence of its own"),
    Unsupported(flag="--reset-attention-mask", reason="each document already is a sequence of its own"),
)

# Fields of TransformerConfig that may differ from a plain config: the sizes and choices that are tested against stock
# megatron-core, what follows from them, and what changes neither a tensor nor a schedule.
ALLOWED = frozenset(
    {
        "num_layers",
        "mtp_num_layers",
        "mtp_loss_scaling_factor",
        *LATENT_FIELDS,
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "window_size",
        "window_attn_skip_freq",
        "softmax_type",
        "normalization",
        "fp32_residual_connection",
        "layernorm_epsilon",
        "qk_layernorm",
        "qk_l2_norm",
        "attention_output_gate",
        "no_rope_freq",
        "rotary_interleaved",
        "activation_func",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "hidden_dropout",
        "attention_dropout",
        "attention_backend",
        "init_method",
        "init_method_std",
        "output_layer_init_method",
        "embedding_init_method",
        "embedding_init_method_std",
        "perform_initialization",
        "use_cpu_initialization",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "sequence_parallel",
        "expert_tensor_parallel_size",  # follows the tensor-parallel size, also without experts
        "async_tensor_model_parallel_allreduce",
        "variable_seq_lengths",
        "moe_token_dispatcher_type",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "bf16",
        "fp8",
        "fp8_recipe",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "finalize_model_grads_func",
        "grad_scale_func",
        "no_sync_func",
        "grad_sync_func",
        "param_sync_func",
        "timers",
        "barrier_with_L1_time",
        "config_logger_dir",
        "deterministic_mode",
    }
)
# More of them for a model with experts.
_ALLOWED_OF_EXPERTS = frozenset({"num_moe_experts", "expert_model_parallel_size", *DEFAULTS})
# Any of the two precisions; compared by name, because this module does not import torch.
_DTYPE_FIELDS = frozenset({"params_dtype", "pipeline_dtype", "autocast_dtype"})


class _Refuse(argparse.Action):
    """Raises UnsupportedFeatureError when its flag is given with a value that switches the feature on."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, feature: Unsupported, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self.feature = feature

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values or not all(self.feature.is_off(value) for value in values):
            raise self.feature.error()


def recompute_modules(config: Any) -> tuple[RecomputeModule, ...]:
    """Return what selective recomputation repeats, each once; megatron-core's default where nothing is said.

    Args:
        config: flags or a configuration.

    Raises:
        UnsupportedFeatureError: modules of experts, the projections up of latent attention, or an MLP with bias.
    """
    given = getattr(config, "recompute_modules", None)
    names = ["core_attn"] if given is None else list(dict.fromkeys(given))
    has_experts = num_experts(config) is not None
    possible = [name for name in RECOMPUTE_MODULES if has_experts or name != "moe"]
    for name in names:
        if name not in possible:
            raise UnsupportedFeatureError(
                f"--recompute-modules {name} is not supported: a {'' if has_experts else 'dense '}model "
                f"{'with experts ' if has_experts else ''}has {', '.join(possible)}; give some of them",
                flag="--recompute-modules",
                name=name,
            )
    if "mlp" in names and getattr(config, "recompute_granularity", None) == "selective" and has_biases(config):
        raise UnsupportedFeatureError(
            "--recompute-modules mlp is not supported with biases: megatron-core recomputes the MLP's bias as well, "
            "which so becomes its own input: backward never ends; add --disable-bias-linear, or leave mlp out",
            flag="--recompute-modules",
            name="mlp",
        )
    return tuple(names)


def check_supported(config: Any, also_allowed: frozenset[str] = frozenset()) -> None:
    """Check a TransformerConfig: nothing of the table is on, and only fields in ALLOWED differ from a plain config.

    The plain config has the same layers, width and heads. Without this a field that our modules do not read, such as a
    norm's or the attention's, would be ignored silently.

    Args:
        config: TransformerConfig.
        also_allowed: more fields that may differ.

    Raises:
        UnsupportedFeatureError: an unsupported feature is on, or a field has a value nobody checked; the message names
            the flag or the field with its value and its default.
        InvalidInputError: a window that cannot be, two norms of queries and keys, experts, activations, latents or
            modules of multi-token prediction that do not fit.
    """
    for feature in UNSUPPORTED:
        if feature.field is not None and not feature.is_off(getattr(config, feature.field, None)):
            raise feature.error()
    windows_of(config)
    check_norms(config)
    check_experts(config)
    check_activation(config)
    check_latent_attention(config)
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
                f"TransformerConfig.{name} is {value!r}, only {default!r} is supported: {_UNTESTED}; leave it out",
                field=name,
                value=repr(value),
            )
    if config.fp32_residual_connection and str(config.pipeline_dtype) not in ("None", "torch.float32"):
        raise UnsupportedFeatureError(
            f"--fp32-residual-connection with TransformerConfig.pipeline_dtype {config.pipeline_dtype}: stages send "
            "each other the residual, set it to torch.float32",
            flag="--fp32-residual-connection",
        )
    for name in sorted(_DTYPE_FIELDS):
        value = getattr(config, name)
        if str(value) not in ("None", "torch.float32", "torch.bfloat16"):
            raise UnsupportedFeatureError(
                f"TransformerConfig.{name} is {value}, its default is {getattr(plain, name)}: {_PRECISION}",
                field=name,
                value=repr(value),
            )
