"""From parsed arguments to settings: fills in values that follow from others and checks values against each other.

Every rank finds the same error without communicating. Nothing else changes parsed arguments.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import ROTARY
from dynamic_cp.models.table import POSITIVE, check_ranges, destination_of, flag_of, said
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.types import (
    EVERY_LAYER,
    STATIC_POLICIES,
    DataParallel,
    RecomputedLayers,
    StateDtypes,
    Topology,
    chunk_tokens,
    is_power_of_two,
)
from megatron.dynamic_cp.flags import experts, features, linear_attention
from megatron.dynamic_cp.flags.attention import YARN, check_norms, check_positions, windows_of
from megatron.dynamic_cp.flags.exclusions import CHUNKS, POOL, STATIC_POLICY, refuse_pairs, without_effect
from megatron.dynamic_cp.flags.features import (
    adapters_of,
    check_activation,
    check_adapters,
    check_latent_attention,
    check_multi_token,
    check_outputs,
    complete_latent_attention,
    named_activation,
)
from megatron.dynamic_cp.flags.fp8 import check_fp8, complete_fp8, token_alignment
from megatron.dynamic_cp.flags.layout import STAGE_FLAGS, is_given, pipeline_layers, with_exchange_sizes
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.flags.supported import recompute_modules
from megatron.trainer.flags.environment import environment_number
from megatron.trainer.flags.settings import TABLE, BatchSizes, Settings, settings_of


def checked_settings(args: argparse.Namespace) -> Settings:
    """Return the settings that `args` say, completing `args`; DynamicCPError if two values disagree."""
    check_ranges(args, *TABLE)
    args.without_effect = without_effect(args, *TABLE)
    args.eval_iters = args.eval_iters or 0
    check_micro_batch_size(args.micro_batch_size)
    args.overlong = args.overlong or ("error" if args.sft else "split")
    _complete_model(args)
    _complete_model_parallel(args)
    _complete_experts(args)
    _complete_recompute(args)
    linear_attention.check_linear_attention(args)
    args.mtp_num_layers = args.mtp_num_layers or None  # only None makes megatron-core build no modules
    check_multi_token(args)
    check_adapters(args)
    check_outputs(args)
    planning = planning_settings(args)
    if args.global_batch_size is None:
        args.global_batch_size = planning.topology.num_lanes
    _complete_schedule(args)
    _complete_fusions(args)
    _check_logging(args)
    _check_profiling(args)
    return settings_of(vars(args), planning)


def check_micro_batch_size(size: int | None) -> None:
    """Raise InvalidInputError unless --micro-batch-size is 1 or not given."""
    if size not in (None, 1):
        raise InvalidInputError(
            f"--micro-batch-size is {size}, it must be 1: a micro-batch is a pack of samples, "
            "--max-seqlen-per-dp-cp-rank sets its size"
        )


def _divides(divisor: int, value: int, what: str, by: str, remedy: str) -> None:
    if value % divisor:
        raise InvalidInputError(f"{what} {value} is not a multiple of {by} {divisor}: {remedy}")


def _divides_flag(args: argparse.Namespace, by: str, name: str, remedy: str) -> None:
    _divides(getattr(args, by), getattr(args, name) or 0, flag_of(name), flag_of(by), remedy)


def _complete_sizes(args: argparse.Namespace) -> None:
    if args.kv_channels is None:
        _divides_flag(args, "num_attention_heads", "hidden_size", "change one of them or give --kv-channels")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.group_query_attention:
        if args.num_query_groups is None:
            raise InvalidInputError("--group-query-attention needs --num-query-groups")
    elif args.num_query_groups is not None and args.num_query_groups != args.num_attention_heads:
        raise InvalidInputError(
            f"--num-query-groups {args.num_query_groups} differs from --num-attention-heads "
            f"{args.num_attention_heads}: add --group-query-attention"
        )
    else:
        args.num_query_groups = args.num_attention_heads
    remedy = "every KV head serves the same number of query heads"
    _divides_flag(args, "num_query_groups", "num_attention_heads", remedy)
    if args.ffn_hidden_size is None:
        if args.swiglu and args.hidden_size < 24:
            raise InvalidInputError(
                f"--hidden-size {args.hidden_size} is too small for the default of --ffn-hidden-size with --swiglu, "
                "8/3 of it in multiples of 64: give --ffn-hidden-size, or a --hidden-size of at least 24"
            )
        args.ffn_hidden_size = args.hidden_size * 8 // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise InvalidInputError(
            f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length {args.seq_length}: "
            "raise it or shorten the samples"
        )


def _complete_model(args: argparse.Namespace) -> None:
    complete_latent_attention(args)
    linear_attention.complete_linear_attention(args)
    _complete_sizes(args)
    if not 0 < args.rotary_percent <= 1:
        raise InvalidInputError(f"--rotary-percent is {args.rotary_percent}, it must be in (0, 1]")
    complete_fp8(args)
    check_fp8(args)
    if args.fp32_residual_connection and not args.bf16:
        raise InvalidInputError("--fp32-residual-connection says what stays in float32: add --bf16, or leave it out")
    check_norms(args)
    check_positions(args)
    check_latent_attention(args)
    check_activation(args)
    for name in YARN if args.rope_type != "yarn" and args.position_embedding_type != "yarn" else ():
        if getattr(args, name) is not None:
            raise InvalidInputError(
                f"{flag_of(name)} is for --position-embedding-type yarn, this model has "
                f"{args.position_embedding_type}: leave one of them out"
            )
    width = int(args.kv_channels * args.rotary_percent)
    rotates_heads = args.position_embedding_type in ROTARY and not args.multi_latent_attention
    if rotates_heads and (width < 2 or width % 2):
        raise InvalidInputError(
            f"RoPE rotates {width} of {args.kv_channels} channels of a head (--kv-channels * --rotary-percent "
            f"{args.rotary_percent}), it needs an even number of at least 2: change one of them"
        )


def _complete_model_parallel(args: argparse.Namespace) -> None:
    tp_size, pp_size = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.world_size % (tp_size * pp_size):
        raise InvalidInputError(
            f"world size {args.world_size} is not a multiple of TP * PP = {tp_size} * {pp_size} = {tp_size * pp_size}: "
            "start another number of ranks or change --tensor-model-parallel-size or --pipeline-model-parallel-size"
        )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        _divides_flag(args, "tensor_model_parallel_size", name, "lower TP")
    if args.multi_latent_attention:
        # megatron-core splits the outputs of the down projections, latents included, over the ranks.
        of_keys = args.kv_lora_rank + args.qk_pos_emb_head_dim
        _divides(tp_size, of_keys, "--kv-lora-rank + --qk-pos-emb-head-dim", "--tensor-model-parallel-size", "lower TP")
        _divides_flag(args, "tensor_model_parallel_size", "q_lora_rank", "lower TP")
    args.sequence_parallel = args.sequence_parallel and tp_size > 1
    _complete_chunks(args)


def _complete_chunks(args: argparse.Namespace) -> None:
    """Set the virtual stages of a pipeline, and check that layers can be divided among them."""
    pp_size = args.pipeline_model_parallel_size
    per_stage, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    args.virtual_pipeline_model_parallel_size = None
    if per_stage is not None and stages is not None:
        raise InvalidInputError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {stages} "
            "say the same: give one of them"
        )
    for flag in STAGE_FLAGS:
        if pp_size < 2 and is_given(args, flag):
            raise InvalidInputError(
                f"{flag} shares layers over pipeline stages, --pipeline-model-parallel-size is {pp_size}: drop the "
                "flag or raise PP"
            )
    own = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if per_stage is not None and own != (None, None):
        raise InvalidInputError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} is the same for all stages, and one has a number of "
            "layers of its own: give --num-virtual-stages-per-pipeline-rank instead"
        )
    num_shared = args.num_layers + args.account_for_embedding_in_pipeline_split
    num_shared += args.account_for_loss_in_pipeline_split
    if per_stage is not None or stages is not None:
        if pp_size < 2:
            raise InvalidInputError(
                f"virtual pipeline stages need --pipeline-model-parallel-size >= 2, it is {pp_size}: "
                f"drop the flag or raise PP"
            )
        if per_stage is not None:
            _divides(
                pp_size * per_stage,
                num_shared,
                "--num-layers",
                "PP * --num-layers-per-virtual-pipeline-stage",
                "change one of them",
            )
            stages = num_shared // (pp_size * per_stage)
        if stages is not None and stages > 1:
            args.virtual_pipeline_model_parallel_size = stages
    chunks = pp_size * (args.virtual_pipeline_model_parallel_size or 1)
    if not pipeline_layers(args):
        _divides(chunks, args.num_layers, "--num-layers", "PP * virtual stages", "every model chunk has the same depth")


def _complete_experts(args: argparse.Namespace) -> None:
    """Complete and check the flags of experts.

    DEVIATION: each expert is whole on its rank, where Megatron-LM splits it as tensor parallelism does. Reason: parts
    of experts make small products, and plans are made for whole experts. Recovery: none.
    """
    for name, default in experts.DEFAULTS.items():
        value = getattr(args, name)
        if args.num_experts is None and value is not None:
            raise InvalidInputError(f"{flag_of(name)} is for layers with experts: give --num-experts, or leave it out")
        setattr(args, name, default if value is None else value)
    if args.num_experts is not None:
        if args.expert_tensor_parallel_size is None:
            args.expert_tensor_parallel_size = 1
        if args.moe_ffn_hidden_size is None:
            args.moe_ffn_hidden_size = args.ffn_hidden_size
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            value = getattr(args, name)
            if isinstance(value, list) and len(value) == 1:  # Megatron-LM gives it to megatron-core so
                setattr(args, name, value[0])
    elif args.expert_tensor_parallel_size is not None:
        raise InvalidInputError("--expert-tensor-parallel-size is for experts: give --num-experts, or leave it out")
    experts.check_experts(args)


def planning_settings(args: argparse.Namespace, *, auto_places: bool = True) -> PlanningSettings:
    """Return how a run is planned: the lanes, their token limit and CP sizes.

    Args:
        args: of this trainer, or of a checkout under this trainer's names; a limit of "auto" is found later.
        auto_places: as in `PlanningSettings`.

    Raises DynamicCPError: sizes that do not fit the lanes, or a --seq-length that no group can hold."""
    topology = Topology(
        num_lanes=args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size),
        tp_size=args.tensor_model_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        vp_size=args.virtual_pipeline_model_parallel_size or 1,
        ranks_per_node=environment_number("LOCAL_WORLD_SIZE", args.world_size),
        sequence_parallel=args.sequence_parallel,
        ep_size=getattr(args, "expert_model_parallel_size", None) or 1,
        token_alignment=token_alignment(args),
    )
    if topology.tp_size < topology.ranks_per_node < topology.world_size:
        _divides(
            topology.tp_size,
            topology.ranks_per_node,
            "the number of ranks of a node (LOCAL_WORLD_SIZE)",
            "--tensor-model-parallel-size",
            "some TP groups would cross nodes, change one of them",
        )
    _check_cp_sizes(args, topology)
    limit = args.max_seqlen_per_dp_cp_rank
    of_flags = said(vars(args), PlanningSettings)
    of_flags["max_tokens_per_rank"] = None if limit == "auto" else _default_limit(args) if limit is None else limit
    of_flags["loss_chunk_tokens"] = chunk_tokens(args.loss_chunk_tokens, topology.tp_size)
    settings = PlanningSettings(
        **of_flags,
        topology=topology,
        seq_length=args.seq_length,
        recompute=args.recompute_granularity or "none",
        recompute_modules=recompute_modules(args),
        recompute_layers=_recomputed_layers(args, topology),
        bytes_per_element=2 if args.bf16 else 4,
        fp32_residual=args.fp32_residual_connection,
        fp8=args.fp8 is not None,
        data_parallel=DataParallel(
            distributed_optimizer=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            state=_state_dtypes(args),
            adapters=adapters_of(args),
        ),
        exchange_timeout_s=60 * args.distributed_timeout_minutes,
        has_windows=windows_of(args).are_there,
        has_latents=features.has_latents(args),
        auto_places=auto_places and experts.may_place(args) and topology.expert_lanes == 1,
        pipeline_layers=pipeline_layers(args),
    )
    if args.static_cp_policy != STATIC_POLICIES[0]:
        refuse_pairs(STATIC_POLICY, args, value=args.static_cp_policy)
    if args.dynamic_cp_pool != "off":
        refuse_pairs(POOL, args, value=args.dynamic_cp_pool)
    if settings.loss_chunk_tokens:
        refuse_pairs(CHUNKS, args, value=args.loss_chunk_tokens)
    settings = with_exchange_sizes(settings, args.num_attention_heads // topology.tp_size)
    linear_attention.check_state_exchange(args, settings.state_exchange)
    if settings.max_tokens_per_rank is None:  # --seq-length is checked once memory is known
        return settings
    if limit is not None and not limit > 0:
        raise InvalidInputError(f"--max-seqlen-per-dp-cp-rank is {limit}, it must be {POSITIVE.text}")

    from dynamic_cp.search.search import check_feasible  # late, because numpy is not needed for wrong flags

    check_feasible(settings.seq_length, topology, settings.used(settings.options()))
    return settings


def _state_dtypes(args: argparse.Namespace) -> StateDtypes:
    """Return the dtypes of gradients and of the optimizer's state, checked against the weights' bytes."""
    state = StateDtypes(**{field.name: getattr(args, field.name) for field in fields(StateDtypes)})
    state.check_weights(2 if args.bf16 else 4)
    return state


def _check_cp_sizes(args: argparse.Namespace, topology: Topology) -> None:
    static = args.context_parallel_size
    if topology.num_lanes % static or not is_power_of_two(static):
        raise InvalidInputError(
            f"--context-parallel-size {static} does not fit {topology.num_lanes} lanes (world size / (TP * PP)): "
            f"give a power of two that divides {topology.num_lanes}"
        )
    for name in ("min_dynamic_cp_size", "max_dynamic_cp_size"):
        value = getattr(args, name)
        if value is not None and (not is_power_of_two(value) or value > topology.max_cp_size):
            raise InvalidInputError(
                f"{flag_of(name)} is {value}: give a power of two up to {topology.max_cp_size}, the largest group of "
                f"{topology.num_lanes} lanes"
            )
    largest = args.max_dynamic_cp_size or topology.max_cp_size
    if args.min_dynamic_cp_size > largest:
        raise InvalidInputError(
            f"--min-dynamic-cp-size {args.min_dynamic_cp_size} is above the largest CP size {largest}: lower it"
        )


def _default_limit(args: argparse.Namespace) -> int:
    """Return the padded tokens per rank of one sample of --seq-length at the static CP size."""
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    static_cp_size = args.context_parallel_size
    return padded_seqlens((args.seq_length,), static_cp_size, multiple)[0] // static_cp_size


def _complete_schedule(args: argparse.Namespace) -> None:
    """Complete the lengths of the run and of the learning-rate schedule, in samples."""
    if (args.train_iters is None) == (args.train_samples is None):
        raise InvalidInputError(
            f"--train-iters is {args.train_iters} and --train-samples is {args.train_samples}: give exactly one"
        )
    sizes = BatchSizes.of(args.global_batch_size, args.rampup_batch_size)
    if args.train_iters is None:
        args.train_iters, whole_batches = sizes.iterations_in(args.train_samples)
        if args.train_iters == 0:
            raise InvalidInputError(
                f"--train-samples {args.train_samples} is less than --global-batch-size {sizes.start}: raise it"
                if args.rampup_batch_size is None
                else f"--train-samples {args.train_samples} is less than the {sizes.start} that --rampup-batch-size "
                "begins with: raise it"
            )
    else:
        whole_batches = sizes.samples_of(args.train_iters)
    args.train_samples_left_out = 0 if args.train_samples is None else args.train_samples - whole_batches
    args.train_samples = whole_batches

    args.lr_decay_samples = _samples(args, "lr_decay", default=args.train_samples)
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters is not None or args.lr_warmup_samples is not None:
            raise InvalidInputError("--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples")
        args.lr_warmup_samples = int(args.lr_warmup_fraction * args.lr_decay_samples)
    else:
        args.lr_warmup_samples = _samples(args, "lr_warmup", default=0)
    args.lr_wsd_decay_samples = _samples(args, "lr_wsd_decay", default=None)
    _check_schedule(args)


def _samples(args: argparse.Namespace, name: str, default: Any) -> Any:
    """Return --NAME-samples, or --NAME-iters in samples, or the default."""
    iters, samples = getattr(args, f"{name}_iters"), getattr(args, f"{name}_samples")
    if iters is not None and samples is not None:
        raise InvalidInputError(
            f"{flag_of(name)}-iters {iters} and {flag_of(name)}-samples {samples} say the same: give one of them"
        )
    if iters is not None and name == "lr_wsd_decay":  # the last iterations, after any ramp
        return iters * args.global_batch_size
    if iters is not None:
        return BatchSizes.of(args.global_batch_size, args.rampup_batch_size).samples_of(iters)
    return default if samples is None else samples


def _check_schedule(args: argparse.Namespace) -> None:
    if args.lr_warmup_samples >= args.lr_decay_samples:
        raise InvalidInputError(
            f"the warm-up takes {args.lr_warmup_samples} samples, the whole decay {args.lr_decay_samples}: "
            "shorten the warm-up"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_samples is None:
        raise InvalidInputError("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_samples > args.lr_decay_samples:
        raise InvalidInputError(
            f"the WSD decay takes {args.lr_wsd_decay_samples} samples, the whole decay {args.lr_decay_samples}: "
            "lower --lr-wsd-decay-iters or --lr-wsd-decay-samples"
        )
    if not max(args.min_lr, args.lr_warmup_init) <= args.lr:
        raise InvalidInputError(
            f"--lr {args.lr} is below --min-lr {args.min_lr} or --lr-warmup-init {args.lr_warmup_init}: raise it"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise InvalidInputError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
        )


def _complete_recompute(args: argparse.Namespace) -> None:
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise InvalidInputError("--recompute-activations is selective: drop it or --recompute-granularity full")
        args.recompute_granularity = "selective"
    if args.recompute_modules is not None and args.recompute_granularity != "selective":
        raise InvalidInputError(
            f"--recompute-modules {' '.join(args.recompute_modules)} says what to recompute selectively: add "
            "--recompute-granularity selective, or leave it out"
        )
    if args.recompute_granularity == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
    elif args.recompute_method is not None or args.recompute_num_layers is not None:
        raise InvalidInputError("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise InvalidInputError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")


def _complete_fusions(args: argparse.Namespace) -> None:
    """Refuse fusions that the model has no use for, and complete that of the loss. Others depend on the device."""
    own = named_activation(args)
    for flag in ("--bias-swiglu-fusion", "--bias-gelu-fusion") if own else ():
        if getattr(args, destination_of(flag)):
            raise InvalidInputError(f"{flag} is not for this model, which has {own}: leave it out")
    for flag, other, is_there in (
        ("--bias-swiglu-fusion", "--bias-gelu-fusion", args.swiglu),
        ("--bias-gelu-fusion", "--bias-swiglu-fusion", not args.swiglu),
    ):
        if getattr(args, destination_of(flag)) and not is_there:
            raise InvalidInputError(
                f"{flag} is not for this model, which has {'SwiGLU' if args.swiglu else 'GELU'}: "
                f"take {other} or {'drop' if args.swiglu else 'add'} --swiglu"
            )
    if args.bias_gelu_fusion and args.disable_bias_linear:
        raise InvalidInputError("--bias-gelu-fusion needs biases: drop it or --disable-bias-linear")
    if not args.cross_entropy_loss_fusion:
        if args.cross_entropy_fusion_impl is not None:
            raise InvalidInputError(
                f"--cross-entropy-fusion-impl {args.cross_entropy_fusion_impl} says which fused loss: "
                "add --cross-entropy-loss-fusion or drop it"
            )
        return
    args.cross_entropy_fusion_impl = args.cross_entropy_fusion_impl or "native"
    if args.cross_entropy_fusion_impl == "native" and not args.bf16:
        raise InvalidInputError(
            "--cross-entropy-loss-fusion with --cross-entropy-fusion-impl native rounds the gradients of logits to "
            "bfloat16: add --bf16, or drop it"
        )


def _check_logging(args: argparse.Namespace) -> None:
    if args.tensorboard_dir is not None and find_spec("tensorboard") is None:
        raise InvalidInputError("--tensorboard-dir needs the package tensorboard: install it or drop the flag")
    _check_utf8(args, "tensorboard_dir", "TensorBoard's writer")
    if not args.wandb_project:  # an empty name is Megatron-LM's "off"
        return
    if find_spec("wandb") is None:
        raise InvalidInputError("--wandb-project needs the package wandb: install it or drop the flag")
    if not args.wandb_exp_name:
        raise InvalidInputError(f"--wandb-project {args.wandb_project} needs --wandb-exp-name, the run's name: give it")
    if args.wandb_save_dir is None:
        if args.save is None:
            raise InvalidInputError("--wandb-project without --save needs --wandb-save-dir: give one of the two")
        args.wandb_save_dir = os.path.join(args.save, "wandb")


def _check_utf8(args: argparse.Namespace, name: str, writer: str) -> None:
    """Raise if a name is not UTF-8: the file system takes its half surrogates, `writer` does not."""
    value = getattr(args, name)
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{flag_of(name)} {value!r} is not UTF-8, {writer} needs that: name another folder"
        ) from error


def _check_profiling(args: argparse.Namespace) -> None:
    if args.use_pytorch_profiler and not args.profile:
        raise InvalidInputError("--use-pytorch-profiler says how to profile: add --profile or drop it")
    if not args.profile:
        return
    if args.use_pytorch_profiler:
        _check_utf8(args, "profile_dir", "torch's profiler")
    if args.profile_step_end <= args.profile_step_start:
        raise InvalidInputError(
            f"--profile-step-end {args.profile_step_end} is not above --profile-step-start {args.profile_step_start}: "
            "no iteration would be recorded, raise it"
        )
    for rank in args.profile_ranks:
        if not 0 <= rank < args.world_size:
            raise InvalidInputError(
                f"--profile-ranks has {rank}, the job has ranks 0 to {args.world_size - 1}: name some of them"
            )
    if args.use_pytorch_profiler and args.profile_dir is None and args.tensorboard_dir is None:
        raise InvalidInputError("--use-pytorch-profiler has no folder to write to: give --profile-dir")
    if args.profile_step_start >= args.train_iters:
        raise InvalidInputError(
            f"--profile-step-start is {args.profile_step_start}, the run ends with iteration {args.train_iters}: "
            "no iteration would be recorded, lower it"
        )


def _recomputed_layers(args: argparse.Namespace, topology: Topology) -> RecomputedLayers:
    """Return which layers full recomputation repeats, checked against those of the model chunks."""
    if args.recompute_granularity != "full":
        return EVERY_LAYER
    layers = RecomputedLayers(args.recompute_method or "uniform", args.recompute_num_layers or 1)
    even = args.num_layers / (topology.pp_size * topology.vp_size)
    layers.check([number for stage in pipeline_layers(args) for number in stage] or [even])
    return layers
