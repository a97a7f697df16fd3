"""The model chunks of this rank, wrapped for data parallelism, and their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import get_standard_config_overrides as no_decay_of_vectors
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import ModelSettings, TransformerImpl
from dynamic_cp.pricing.edges import ddp_bucket_size
from dynamic_cp.types import DTYPES_OF, Topology
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.attention.torch_thd import prepare_kernel
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.flags.attention import set_sinks, set_window_rotary_base, yarn_attributes
from megatron.dynamic_cp.flags.experts import DISPATCHER
from megatron.dynamic_cp.flags.features import adapters_of, is_gated, latent_fields
from megatron.dynamic_cp.flags.fp8 import DEFAULT_RECIPE
from megatron.dynamic_cp.flags.linear_attention import set_pattern
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.flags.supported import check_supported, config_fields
from megatron.dynamic_cp.measuring import free_bytes
from megatron.dynamic_cp.model.adapters import train_adapters_only
from megatron.dynamic_cp.model.chunked_head import set_loss_chunk
from megatron.dynamic_cp.model.gpt import DynamicCPGPTModel, mtp_block_spec
from megatron.dynamic_cp.model.layer_parts import change_outputs, quick_gelu, squared_relu, tanh_gelu
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.self_attention import use_one_rotary_table
from megatron.trainer.flags.settings import OptimizerSettings, Settings
from megatron.trainer.setup.fusions import CONFIG_FIELDS, NOTHING, Fusions
from megatron.trainer.setup.planned_runtime import PlannedRuntime, check_state_fits

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""The dtypes that megatron-core's optimizer takes; it has FP8 as uint8."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """The model of this rank and what trains it: chunks as they are saved, as the schedule gets them (`wrapped` for
    data parallelism), and what each reads of a micro-batch (`needs`)."""

    config: TransformerConfig
    chunks: Sequence[DynamicCPGPTModel]
    wrapped: Sequence[DistributedDataParallel]
    needs: Sequence[ChunkNeeds]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build(settings: Settings, runtime: PlannedRuntime, fused: Fusions) -> Built:
    """Return the model of this rank with its optimizer. DynamicCPError on every rank if a feature is not supported, or
    kernels give wrong results. Collective."""
    device, impl = runtime.device, runtime.layers.impl
    if impl == "local" and settings.model.moe_grouped_gemm:
        raise InvalidInputError(
            "--moe-grouped-gemm is for TransformerEngine's layers, the layers of this run are local: leave it out"
        )
    if device.type == "cpu":
        run_on_all_ranks(lambda: _check_host_holds(settings.model, runtime), device)
    config = transformer_config(settings.model, settings.planning, device, fused)
    if impl == "local":
        has_ranges = settings.planning.has_windows or runtime.has_masks
        run_on_all_ranks(lambda: prepare_kernel(config, device, ranges=has_ranges), device)
    chunks = build_chunks(settings.model, config, runtime.model_shape.vocab_size, impl)
    bucket_size = ddp_bucket_size(runtime.topology.num_lanes, runtime.settings.static_cp_size)
    wrapped = wrap_chunks(settings, config, chunks, bucket_size, device)
    optimizer = build_optimizer(settings, config, wrapped)
    return Built(
        config=config,
        chunks=chunks,
        wrapped=wrapped,
        needs=[ChunkNeeds.of(chunk) for chunk in chunks],
        optimizer=optimizer,
        scheduler=build_scheduler(settings.optimizer, optimizer),
    )


def _check_host_holds(model: ModelSettings, runtime: PlannedRuntime) -> None:
    """Refuse a model that does not fit into this rank's host, before any of its ranks allocates memory."""
    per_node = runtime.topology.ranks_per_node
    first = torch.distributed.get_rank() // per_node * per_node
    has_table = model.position_embedding_type == "learned_absolute"
    check_state_fits(
        runtime.problem,
        range(first, min(first + per_node, runtime.topology.world_size)),
        free_bytes(runtime.device, swaps=True),
        model.max_position_embeddings if has_table else 0,
    )


def transformer_config(
    model: ModelSettings, planning: PlanningSettings, device: torch.device, fused: Fusions = NOTHING
) -> TransformerConfig:
    """Return megatron-core's configuration, checked against the supported features."""
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    topology, recompute = planning.topology, planning.recompute
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    config = kind(
        **config_fields(model),
        **latent_fields(model),
        activation_func=_activation(model),
        gated_linear_unit=is_gated(model),
        is_hybrid_model=bool(model.hybrid_override_pattern),
        expert_model_parallel_size=topology.ep_size,
        expert_tensor_parallel_size=None if model.num_experts is None else model.expert_tensor_parallel_size,
        attention_dropout=0.0,
        attention_backend=AttnBackend[model.attention_backend],
        fp8_recipe=model.fp8_recipe or DEFAULT_RECIPE,  # type: ignore[arg-type]  # one of four, as checked
        params_dtype=dtype,
        pipeline_dtype=torch.float32 if model.fp32_residual_connection else dtype,
        **_of_stages(topology),
        use_cpu_initialization=model.use_cpu_initialization or device.type == "cpu",
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_modules=[name for name in planning.recompute_modules if name != "gdn_norm_out"],  # 0.19 knows it
        gradient_accumulation_fusion=fused.gradient_accumulation,
        bias_activation_fusion=fused.activation,
        bias_dropout_fusion=fused.dropout,
        cross_entropy_fusion_impl=model.cross_entropy_fusion_impl or "native",
        # Sums of gradients over tokens, divided by the whole job's count, are exact for any mixture of CP sizes.
        calculate_per_token_loss=True,
        # megatron-core accepts micro-batches with different lengths only with this dispatcher, even without experts.
        moe_token_dispatcher_type=DISPATCHER,
    )
    config.recompute_modules = list(planning.recompute_modules)
    set_sinks(config, model.window_sink_tokens)
    set_window_rotary_base(config, model.window_rotary_base)
    set_pattern(config, model.hybrid_override_pattern)
    set_loss_chunk(config, planning.loss_chunk_tokens)
    for name, value in yarn_attributes(model).items():
        setattr(config, name, value)  # megatron-core has no fields for them
    check_supported(config, also_allowed=CONFIG_FIELDS)
    return config


def _of_stages(topology: Topology) -> dict[str, Any]:
    """Return the fields for the split of the model over ranks and for the exchange between stages."""
    interleaved = topology.vp_size > 1
    return {
        "tensor_model_parallel_size": topology.tp_size,
        "pipeline_model_parallel_size": topology.pp_size,
        "virtual_pipeline_model_parallel_size": topology.vp_size if interleaved else None,
        "sequence_parallel": topology.sequence_parallel,
        "variable_seq_lengths": topology.pp_size > 1,
        # With two stages, the batched exchange of interleaving matches messages in the wrong order on gloo.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _activation(model: ModelSettings) -> Callable[[torch.Tensor], torch.Tensor]:
    for is_on, function in (
        (model.quick_geglu, quick_gelu),
        (model.squared_relu, squared_relu),
        (model.geglu, tanh_gelu),
    ):
        if is_on:
            return function
    return torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu


def build_chunks(
    model: ModelSettings, config: TransformerConfig, vocab_rows: int, impl: TransformerImpl
) -> list[DynamicCPGPTModel]:
    chunks = []
    for index in range(config.virtual_pipeline_model_parallel_size or 1):
        vp_stage = None if config.virtual_pipeline_model_parallel_size is None else index
        chunks.append(
            DynamicCPGPTModel(
                config=config,
                transformer_layer_spec=gpt_block_spec(config, vp_stage, transformer_impl=impl),
                mtp_block_spec=mtp_block_spec(config, vp_stage, transformer_impl=impl),
                vocab_size=vocab_rows,
                max_sequence_length=model.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
                position_embedding_type=model.position_embedding_type,
                rotary_percent=model.rotary_percent,
                rotary_base=model.rotary_base,
                rope_scaling=model.use_rope_scaling,
                rope_scaling_factor=model.rope_scaling_factor,
                seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
                vp_stage=vp_stage,
            )
        )
        use_one_rotary_table(chunks[-1])
        change_outputs(chunks[-1], model)
        if (adapters := adapters_of(model)) is not None:
            train_adapters_only(chunks[-1], adapters)
    return chunks


def wrap_chunks(
    settings: Settings,
    config: TransformerConfig,
    chunks: Sequence[DynamicCPGPTModel],
    bucket_size: int,
    device: torch.device,
) -> list[DistributedDataParallel]:
    """Return the chunks on their device, in their precision, with gradient buffers over the lanes."""
    data_parallel = settings.planning.data_parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=data_parallel.state.gradient_bytes == 4,
        overlap_grad_reduce=data_parallel.overlap_grad_reduce,
        overlap_param_gather=data_parallel.overlap_param_gather,
        use_distributed_optimizer=data_parallel.distributed_optimizer,
        bucket_size=bucket_size,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        module = Float16Module(config, chunk.to(device)) if config.bf16 else chunk.to(device)
        # Later chunks finish their backward pass early, so buckets for their gradients gain nothing.
        wrapped.append(DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0))
    return wrapped


def build_optimizer(
    settings: Settings, config: TransformerConfig, model: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Return the optimizer of `model` and set the functions in `config` that megatron-core's schedules call."""
    ddp_config, state = model[0].ddp_config, settings.planning.data_parallel.state
    optimizer_config = OptimizerConfig(
        optimizer=settings.optimizer.optimizer,
        lr=settings.optimizer.lr,
        min_lr=settings.optimizer.min_lr,
        weight_decay=settings.optimizer.weight_decay,
        adam_beta1=settings.optimizer.adam_beta1,
        adam_beta2=settings.optimizer.adam_beta2,
        adam_eps=settings.optimizer.adam_eps,
        clip_grad=settings.optimizer.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
        use_precision_aware_optimizer=state.use_precision_aware_optimizer,
        **{name: _DTYPES[getattr(state, name)] for name in DTYPES_OF},
    )
    optimizer = get_megatron_optimizer(
        optimizer_config, list(model), config_overrides=no_decay_of_vectors(optimizer_config)
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return optimizer


def build_scheduler(settings: OptimizerSettings, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay. Its steps are samples."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_samples,
        lr_decay_steps=settings.lr_decay_samples,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.lr_decay_samples,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=settings.lr_wsd_decay_samples,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
