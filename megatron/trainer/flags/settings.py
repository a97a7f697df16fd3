"""A run's settings: frozen values, made once from checked flags, in groups; a function takes the groups that it reads.

Fields have the names of their flags, which are Megatron-LM's. What planning has to know, the parallel sizes among it,
is in `megatron.dynamic_cp.flags.settings`, which checkouts of Megatron-LM share, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

from megatron.dynamic_cp.flags.layer_needs import TransformerImpl
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.trainer.flags.batch_sizes import BatchSizes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is trained, and in which precision and kernels.

    Attributes:
        rotary_scaling_factor, yarn_original_max_position_embeddings and what follows: of YaRN; None: as
            `positions.YARN` says.
        expert_tensor_parallel_size: 1 with experts.
        q_lora_rank and what follows: of multi-latent attention; None without it, q_lora_rank also where queries are
            projected from the hidden states.
        transformer_impl: None: TransformerEngine's layers where they can be used (`layers.choose`).
        gradient_accumulation_fusion and its kin: None: on CUDA, where it can be had (`fusions.choose`).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    window_size: tuple[int, ...] | None
    window_attn_skip_freq: int | tuple[int, ...] | None
    window_sink_tokens: int
    max_position_embeddings: int
    position_embedding_type: str
    rotary_base: int
    rotary_percent: float
    rotary_interleaved: bool
    no_rope_freq: int | tuple[int, ...] | None
    rotary_seq_len_interpolation_factor: int | None
    use_rope_scaling: bool
    rope_scaling_factor: float
    rotary_scaling_factor: float | None
    yarn_original_max_position_embeddings: int | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    mscale: float | None
    mscale_all_dim: float | None
    yarn_correction_range_round_to_int: bool | None
    qk_layernorm: bool
    qk_l2_norm: bool
    attention_output_gate: bool
    softmax_type: str
    multi_latent_attention: bool
    q_lora_rank: int | None
    kv_lora_rank: int | None
    qk_head_dim: int | None
    qk_pos_emb_head_dim: int | None
    v_head_dim: int | None
    rope_type: str | None
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float
    normalization: str
    norm_epsilon: float
    swiglu: bool
    quick_geglu: bool
    activation_func_clamp_value: float | None
    glu_linear_offset: float
    disable_bias_linear: bool
    add_qkv_bias: bool
    num_experts: int | None
    expert_tensor_parallel_size: int | None
    moe_layer_freq: int | tuple[int, ...]
    moe_ffn_hidden_size: int | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_grouped_gemm: bool
    moe_router_load_balancing_type: str | tuple[str, ...]
    moe_router_topk: int
    moe_router_pre_softmax: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_router_score_function: str
    moe_router_dtype: str | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_aux_loss_coeff: float | tuple[float, ...]
    moe_z_loss_coeff: float | None
    untie_embeddings_and_output_weights: bool
    make_vocab_size_divisible_by: int
    init_method_std: float
    hidden_dropout: float
    bf16: bool
    fp8: str | None
    fp8_recipe: str | None
    fp32_residual_connection: bool
    use_cpu_initialization: bool
    attention_backend: str
    transformer_impl: TransformerImpl | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    recompute_method: str | None
    recompute_num_layers: int | None
    gradient_accumulation_fusion: bool | None
    bias_swiglu_fusion: bool | None
    bias_gelu_fusion: bool | None
    bias_dropout_fusion: bool | None
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """What overlaps with what on the ranks, and how these meet; how many there are for what is in `planning`."""

    distributed_backend: str | None
    stopped_process_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How long is trained, on how many samples a step, and when is evaluated.

    Attributes:
        train_samples: whole global batches; train_samples_left_out: what was asked for beyond them.
    """

    global_batch_size: int
    rampup_batch_size: tuple[int, ...] | None
    train_iters: int
    train_samples: int
    train_samples_left_out: int
    seed: int
    exit_interval: int | None
    exit_duration_in_mins: float | None
    eval_interval: int | None
    eval_iters: int

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every global batch."""
        return BatchSizes.of(self.global_batch_size, self.rampup_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer and the schedule of its learning rate, which is in samples."""

    optimizer: str
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_init: float
    lr_warmup_samples: int
    lr_decay_samples: int
    lr_wsd_decay_samples: int | None
    lr_wsd_decay_style: str
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool
    weight_decay: float
    clip_grad: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which samples there are, and who reads them; see `data.config.DataConfig`."""

    data_path: tuple[str, ...]
    data_glob: str
    data_cache_path: str | None
    json_key: str
    overlong: str
    split: str
    tokenizer_type: str
    tokenizer_model: str | None
    eod_id: int | None
    vocab_size: int | None
    sft: bool
    chat_template: str | None
    mock_data: bool
    varlen_mock_dataset_config_json: str | None
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is saved when and where, and what a run goes on from."""

    save: str | None
    save_interval: int | None
    async_save: bool
    load: str | None
    finetune: bool
    exit_on_missing_checkpoint: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    """Where figures go."""

    log_interval: int
    moe_per_layer_logging: bool
    tensorboard_dir: str | None
    wandb_project: str | None
    wandb_exp_name: str | None
    wandb_entity: str | None
    wandb_save_dir: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSettings:
    """Which iterations are recorded on which ranks, and how."""

    profile: bool
    profile_step_start: int
    profile_step_end: int
    profile_ranks: tuple[int, ...]
    use_pytorch_profiler: bool
    profile_dir: str | None
    pytorch_profiler_collect_shapes: bool
    pytorch_profiler_collect_callstack: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a command line says of a run.

    Attributes:
        arguments: every flag under its name, completed, read-only: what checkpoints, dumps and Weights & Biases keep.
    """

    model: ModelSettings
    parallel: ParallelSettings
    planning: PlanningSettings
    training: TrainingSettings
    optimizer: OptimizerSettings
    data: DataSettings
    checkpoints: CheckpointSettings
    logging: LoggingSettings
    profiling: ProfilingSettings
    arguments: Mapping[str, Any]


def settings_of(arguments: Mapping[str, Any], planning: PlanningSettings) -> Settings:
    """Return the settings that checked and completed arguments say."""
    values = {**arguments, **planning.completed_flags()}
    return Settings(
        model=_group(ModelSettings, values),
        parallel=_group(ParallelSettings, values),
        planning=planning,
        training=_group(TrainingSettings, values),
        optimizer=_group(OptimizerSettings, values),
        data=_group(DataSettings, values),
        checkpoints=_group(CheckpointSettings, values),
        logging=_group(LoggingSettings, values),
        profiling=_group(ProfilingSettings, values),
        arguments=MappingProxyType(values),
    )


def _group(group: type[T], values: Mapping[str, Any]) -> T:
    found = {field.name: values[field.name] for field in fields(group)}  # type: ignore[arg-type]
    return group(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
