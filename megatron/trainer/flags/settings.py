"""A run's settings: frozen values in groups, made once from checked flags; a function takes the groups that it reads.

A field that is a flag is its row of the table (`dynamic_cp.models.table`), under Megatron-LM's name.
`PlanningSettings`, shared with checkouts of Megatron-LM, is the only place of what planning has to know, parallel sizes
included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.flags import ModelSettings
from dynamic_cp.models.table import FRACTION, NOT_NEGATIVE, POSITIVE, REQUIRED, flag, said
from dynamic_cp.types import DTYPES_OF
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.trainer.data.config import OVERLONG_POLICIES, TOKENIZERS


class BatchSizes(NamedTuple):
    """Sizes of all global batches of a run.

    They begin with `start` samples and grow to `full` by `increment`, in equal shares of the first `ramp_samples`
    samples. Without a ramp, `start` is `full`.
    """

    full: int
    start: int
    increment: int
    ramp_samples: int

    @classmethod
    def of(cls, global_batch_size: int, rampup: Sequence[int] | None) -> BatchSizes:
        """Return the sizes for --global-batch-size and --rampup-batch-size; InvalidInputError if they do not fit."""
        if rampup is None:
            return cls(global_batch_size, global_batch_size, 1, 0)
        given = f"--rampup-batch-size {' '.join(map(str, rampup))}"
        if len(rampup) != 3 or min(rampup) < 1:
            raise InvalidInputError(
                f"{given} has {len(rampup)} numbers, 3 of at least 1 are needed: samples of the first global batch, by "
                "how much they grow, and samples until they are --global-batch-size"
            )
        start, increment, ramp_samples = rampup
        if start >= global_batch_size or (global_batch_size - start) % increment:
            raise InvalidInputError(
                f"{given} grows from {start} by {increment}, which never gives --global-batch-size "
                f"{global_batch_size}: change one of them"
            )
        return cls(global_batch_size, start, increment, ramp_samples)

    def at(self, consumed_samples: int) -> int:
        """Return the samples of the global batch that comes after `consumed_samples`.

        Source: megatron-core 0.16.1's `RampupBatchsizeNumMicroBatchesCalculator`, with its rounding (0.19.2 has none).
        """
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        samples_per_increment = self.ramp_samples / ((self.full - self.start) // self.increment)
        return self.start + int(consumed_samples / samples_per_increment) * self.increment

    def iterations_in(self, num_samples: int) -> tuple[int, int]:
        """Return the number of whole global batches in `num_samples`, and their samples."""
        return self._walk(num_samples, None)

    def samples_of(self, num_iterations: int) -> int:
        """Return the samples of the first `num_iterations` global batches."""
        return self._walk(None, num_iterations)[1]

    def _walk(self, most_samples: int | None, most_iterations: int | None) -> tuple[int, int]:
        iterations = samples = 0
        while True:
            size = self.at(samples)
            if most_samples is not None and samples + size > most_samples:
                return iterations, samples
            if iterations == most_iterations:
                return iterations, samples
            if size == self.full:  # from here on all have this size
                more = (most_samples - samples) // size if most_samples is not None else 0
                more = most_iterations - iterations if most_iterations is not None else more
                return iterations + more, samples + more * size
            iterations, samples = iterations + 1, samples + size


T = TypeVar("T")

DYNAMIC_CP = "dynamic context parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """What overlaps on the ranks, and how ranks meet; their numbers are in `planning`."""

    tensor_model_parallel_size: InitVar[int] = flag("TP size", 1, within=POSITIVE)
    pipeline_model_parallel_size: InitVar[int] = flag("PP size", 1, within=POSITIVE)
    expert_model_parallel_size: InitVar[int] = flag(
        "neighbouring ranks of a stage that share the experts of a layer: 1, 2, 4, ...",
        1,
        within=POSITIVE,
        metavar="EP",
    )
    num_layers_per_virtual_pipeline_stage: InitVar[int | None] = flag(
        "layers of a model chunk: interleaves the pipeline", within=POSITIVE
    )
    num_virtual_stages_per_pipeline_rank: InitVar[int | None] = flag(
        "the same as a number of chunks per rank", within=POSITIVE
    )
    sequence_parallel: InitVar[bool] = flag("split activations of norms and dropout over tensor-parallel ranks")
    use_distributed_optimizer: InitVar[bool] = flag("shard the optimizer over the lanes")
    grad_reduce_in_bf16: InitVar[bool] = flag(
        "with --bf16: gradients are added up, kept and reduced in bfloat16; the optimizer's step copies its share of "
        "them to float32"
    )
    overlap_grad_reduce: InitVar[bool] = flag("reduce gradients during the backward pass")
    overlap_param_gather: InitVar[bool] = flag("gather parameters during the forward pass")
    distributed_timeout_minutes: InitVar[float] = flag(
        "a collective that takes longer ends the job", 10.0, within=POSITIVE
    )
    stopped_process_timeout: float = flag(
        "seconds after which a stopped process of a rank (SIGSTOP) is killed; 0: never",
        5.0,
        within=NOT_NEGATIVE,
        metavar="S",
    )
    distributed_backend: str | None = flag(
        "gloo trains on CPU ranks; default: nccl, or gloo where torch is built without CUDA",
        group="dynamic context parallelism",
        choices=("nccl", "gloo"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How long to train, on how many samples a step, and when to evaluate.

    `train_samples` are whole global batches, `train_samples_left_out` those asked for beyond them; `without_effect` has
    sentences about given flags that change nothing.
    """

    train_samples_left_out: int
    without_effect: tuple[str, ...]
    micro_batch_size: InitVar[int] = flag("always 1: a micro-batch is a pack of samples", 1)
    global_batch_size: int = flag("samples of one step; default: one per lane", within=POSITIVE)
    rampup_batch_size: tuple[int, ...] | None = flag(
        "START INCREMENT SAMPLES: global batches begin with START samples and grow by INCREMENT, in equal shares of "
        "the first SAMPLES samples, up to --global-batch-size",
        metavar="N",
    )
    train_iters: int = flag("iterations of the whole run, including those before a resume", within=POSITIVE)
    train_samples: int = flag("samples of the whole run, instead of --train-iters", within=POSITIVE)
    seed: int = flag("seed of weights, order of samples and mock data", 1234)
    exit_interval: int | None = flag("save and exit at every iteration that is a multiple of this", within=POSITIVE)
    exit_duration_in_mins: float | None = flag("save and exit after this time", within=NOT_NEGATIVE)
    eval_interval: int | None = flag("iterations between evaluations; default: only at the end", within=POSITIVE)
    eval_iters: int = flag("global batches of one evaluation; 0, the default: no evaluation", within=NOT_NEGATIVE)
    recompute_granularity: InitVar[str | None] = flag(
        "what is computed again in backward: whole layers, or core attention", choices=("full", "selective")
    )
    recompute_modules: InitVar[tuple[str, ...] | None] = flag(
        "with --recompute-granularity selective: core_attn (attention with its exchange), mlp, layernorm (both norms "
        "of a layer, local layers only), moe (router and experts with their exchange), gdn_norm_out (gate and norm of "
        "a gated delta net); default: core_attn",
        metavar="NAME",
    )
    recompute_activations: InitVar[bool] = flag("same as --recompute-granularity selective")

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes.of(self.global_batch_size, self.rampup_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, and the schedule of its learning rate in samples."""

    optimizer: str = flag("AdamW", "adam", choices=("adam",))
    lr: float = flag("largest learning rate", REQUIRED, within=POSITIVE)
    min_lr: float = flag("where the decay ends", 0.0, within=NOT_NEGATIVE)
    lr_decay_style: str = flag(
        "shape of the decay", "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_warmup_init: float = flag("learning rate before the warm-up", 0.0, within=NOT_NEGATIVE)
    lr_warmup_iters: InitVar[int | None] = flag("iterations of the warm-up", within=NOT_NEGATIVE)
    lr_warmup_samples: int = flag("the same in samples", within=NOT_NEGATIVE)
    lr_warmup_fraction: InitVar[float | None] = flag("share of the decay", within=FRACTION)
    lr_decay_iters: InitVar[int | None] = flag("default: the whole run", within=POSITIVE)
    lr_decay_samples: int = flag("the same in samples", within=POSITIVE)
    lr_wsd_decay_iters: InitVar[int | None] = flag("iterations of WSD's last part", within=NOT_NEGATIVE)
    lr_wsd_decay_samples: int | None = flag("the same in samples", within=NOT_NEGATIVE)
    lr_wsd_decay_style: str = flag(
        "shape of WSD's last part", "exponential", choices=("linear", "cosine", "exponential")
    )
    override_opt_param_scheduler: bool = flag(
        "after loading, keep the schedule of the command line", name="--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        "after loading, keep the schedule of the checkpoint", name="--use-checkpoint-opt_param-scheduler"
    )
    weight_decay: float = flag("of AdamW", 0.01, within=NOT_NEGATIVE)
    clip_grad: float = flag("largest norm of the gradient; 0 does not clip", 1.0, within=NOT_NEGATIVE)
    adam_beta1: float = flag("of AdamW", 0.9, within=FRACTION)
    adam_beta2: float = flag("of AdamW", 0.999, within=FRACTION)
    adam_eps: float = flag("of AdamW", 1e-08)
    use_precision_aware_optimizer: InitVar[bool] = flag(
        "with --bf16 and --use-distributed-optimizer: TransformerEngine's FusedAdam (CUDA) keeps its state in the "
        "dtypes below, and of a float32 master weight the half that the bfloat16 weight lacks"
    )
    main_grads_dtype: InitVar[str] = flag(
        "with it: of gradients; bf16: as --grad-reduce-in-bf16", "fp32", choices=DTYPES_OF["main_grads_dtype"]
    )
    main_params_dtype: InitVar[str] = flag("with it: of master weights", "fp32", choices=DTYPES_OF["main_params_dtype"])
    exp_avg_dtype: InitVar[str] = flag("with it: of the first moment", "fp32", choices=DTYPES_OF["exp_avg_dtype"])
    exp_avg_sq_dtype: InitVar[str] = flag(
        "with it: of the second moment", "fp32", choices=DTYPES_OF["exp_avg_sq_dtype"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which samples there are, and who reads them; see `data.config.DataConfig`."""

    data_path: tuple[str, ...] = flag(
        "[WEIGHT] PATH ...: folders, JSONL, JSON or parquet files, .bin/.idx prefixes", []
    )
    num_workers: int = flag(
        "processes per rank that read and pack the samples of coming steps; 0: the rank does it inside the step",
        1,
        within=NOT_NEGATIVE,
    )
    data_glob: str = flag("files of a folder in --data-path", "**/*")
    data_cache_path: str | None = flag(
        "where tokens of data are kept; default: beside the data, or else in the user's cache folder", metavar="DIR"
    )
    json_key: str = flag("text field of a JSONL line", "text")
    overlong: str = flag(
        "documents longer than --seq-length: refuse, cut, leave out, or split into consecutive pieces; default: "
        "split, with --sft error",
        choices=OVERLONG_POLICIES,
    )
    split: str = flag("shares of training, validation and test documents", "969,30,1")
    tokenizer_type: str = flag("text to tokens", "ByteTokenizer", choices=TOKENIZERS)
    tokenizer_model: str | None = flag("local folder with the tokenizer.json of HuggingFaceTokenizer", metavar="DIR")
    eod_id: int | None = flag("token that ends a document of .bin/.idx data, if it has one; or instead of eos_token")
    vocab_size: int | None = flag("token ids of .bin/.idx data; text tokenizers know theirs", within=POSITIVE)
    sft: bool = flag("records are chats (docs/how-to/data.md); loss only on what the assistant wrote")
    chat_template: str | None = flag("with --sft: Jinja, or chatml; default: the tokenizer's own", metavar="FILE|NAME")
    mock_data: bool = flag("random tokens")
    varlen_mock_dataset_config_json: str | None = flag("lengths of --mock-data", metavar="JSON|FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What is saved, when and where, and what a run resumes from."""

    save: str | None = flag("folder of checkpoints", metavar="DIR")
    save_interval: int | None = flag("iterations between checkpoints; the last one is always saved", within=POSITIVE)
    load: str | None = flag("resume from here; starts from scratch if the folder has no checkpoint", metavar="DIR")
    async_save: bool = flag("write checkpoints in processes beside the training; the run waits for the last")
    ckpt_format: InitVar[str] = flag("megatron-core's distributed checkpoint", "torch_dist", choices=("torch_dist",))
    finetune: bool = flag("load the weights only and start at iteration 0")
    exit_on_missing_checkpoint: bool = flag("end with an error if --load has no checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSettings:
    moe_per_layer_logging: bool = flag("router losses of each layer, to TensorBoard and W&B", None, group="experts")
    log_interval: int = flag("iterations that one log line averages", 1, within=POSITIVE)
    tensorboard_dir: str | None = flag("losses, times and facts of the plans as scalars", metavar="DIR")
    wandb_project: str | None = flag("also log to this project of Weights & Biases", metavar="NAME")
    wandb_exp_name: str | None = flag("the run's name there", metavar="NAME")
    wandb_entity: str | None = flag("whose project it is; default: the logged-in user's", metavar="NAME")
    wandb_save_dir: str | None = flag("where wandb keeps its files; default: wandb in --save", metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSettings:
    """Which iterations are recorded on which ranks, and how."""

    profile: bool = flag("record some iterations: NVTX ranges and the CUDA profiler's range, for nsys")
    profile_step_start: int = flag("record after this iteration", 10, within=NOT_NEGATIVE, metavar="N")
    profile_step_end: int = flag("... up to this one", 12, metavar="N")
    profile_ranks: tuple[int, ...] = flag("ranks that record; default: 0", [0], metavar="RANK")
    use_pytorch_profiler: bool = flag("with --profile: write a trace of torch.profiler instead")
    profile_dir: str | None = flag("where the traces go; default: --tensorboard-dir", metavar="DIR")
    pytorch_profiler_collect_shapes: bool = flag("shapes of operands in the trace")
    pytorch_profiler_collect_callstack: bool = flag("Python call stacks in the trace")


TABLE: Mapping[type, str] = {
    TrainingSettings: "training",
    OptimizerSettings: "optimizer",
    ParallelSettings: "parallelism",
    DataSettings: "data",
    CheckpointSettings: "checkpoints",
    ProfilingSettings: "profiling",
    PlanningSettings: DYNAMIC_CP,
    ModelSettings: "model",
    LoggingSettings: "logging",
}
"""All flags: classes of settings -> the usual group of their flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a command line says of a run; `arguments` has every flag by name, completed, for records."""

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
    names = group.__dataclass_fields__  # type: ignore[attr-defined]
    return group(**{name: values[name] for name in names} | said(values, group))
