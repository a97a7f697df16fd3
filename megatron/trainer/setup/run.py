"""From settings to everything a training loop needs, in an order that lets errors appear early and cheaply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import Hardware, Sample
from megatron.dynamic_cp.agreement.verify import check_same_digest, run_on_all_ranks, run_on_rank_zero
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper, StepData
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.flags import features
from megatron.dynamic_cp.flags.exclusions import MASKS, refuse_pairs
from megatron.dynamic_cp.flags.experts import may_place
from megatron.dynamic_cp.flags.shape import layer_needs, model_shape
from megatron.dynamic_cp.step.schedule import forward_step, run_schedule
from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.checkpoints.checkpoint_files import SaveLock
from megatron.trainer.checkpoints.loading import saved_data_identity
from megatron.trainer.checkpoints.state import Trainable
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import SampleStream, Splits, build_splits
from megatron.trainer.data.chat_reader import CHAT_DATE, chat_identity
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.index_once import index_once
from megatron.trainer.ending.exits import closing
from megatron.trainer.flags import derive
from megatron.trainer.flags.settings import LoggingSettings, Settings
from megatron.trainer.reporting.log import Scalars
from megatron.trainer.setup import fusions, layers, model
from megatron.trainer.setup.initialize import initialize, seed, set_up_logging
from megatron.trainer.setup.planned_runtime import PlannedRuntime, first_hardware
from megatron.trainer.setup.warm_up import warm_up_device

logger = logging.getLogger(__name__)


def data_config(settings: Settings) -> DataConfig:
    """Return the data's part of the settings; DynamicCPError if it is missing or contradicts itself."""
    data = settings.data
    names = {field.name for field in fields(DataConfig)} & {field.name for field in fields(data)}
    return DataConfig(
        **{name: getattr(data, name) for name in names},
        cache_path=data.data_cache_path,
        seq_length=settings.planning.seq_length,
        seed=settings.training.seed,
        mock=data.mock_data,
        tokenizer=data.tokenizer_type,
        varlen_mock_config=data.varlen_mock_dataset_config_json,
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The samples of a run, the number of token ids, and the rows of the embedding table for them."""

    config: DataConfig
    splits: Splits
    num_token_ids: int
    vocab_rows: int


def load_data(settings: Settings, device: torch.device) -> RunData:
    """Return the data, which rank 0 indexes. DynamicCPError on every rank if they cannot be read, ranks see different
    samples, or none are left to evaluate on. Collective."""
    config = data_config(settings)
    if config.sft:
        config = replace(config, chat_date=run_on_rank_zero(lambda: _chat_date(settings)))
    entries = index_once(config, device)
    splits = run_on_all_ranks(lambda: build_splits(config, entries), device)
    fingerprint = run_on_all_ranks(splits.train.fingerprint, device)
    check_same_digest(fingerprint, "the training data of --data-path", device)
    if settings.training.eval_iters > 0 and splits.valid is None:
        raise DataError(
            f"--eval-iters is {settings.training.eval_iters}, but --split {config.split} leaves no validation data: "
            "give its second number a share or set --eval-iters 0"
        )
    num_token_ids = tokenizer.build(config).vocab_size
    vocab_rows = derive.padded_vocab_size(
        num_token_ids, settings.model.make_vocab_size_divisible_by, settings.planning.topology.tp_size
    )
    return RunData(config=config, splits=splits, num_token_ids=num_token_ids, vocab_rows=vocab_rows)


def _chat_date(settings: Settings) -> str:
    """Return the date that templates write: the resumed run's, or today's."""
    checkpoints = settings.checkpoints
    goes_on = checkpoints.load is not None and not checkpoints.finetune
    saved = saved_data_identity(checkpoints.load) if goes_on else {}
    return str(saved.get(CHAT_DATE, date.today().isoformat()))


def data_identity(config: DataConfig, splits: Splits) -> dict[str, Any]:
    """Return the values that runs on the same samples share: lengths, order, probes of contents, but no path."""
    return {
        "seed": config.seed,
        "split": config.split,
        "seq_length": config.seq_length,
        "overlong": config.overlong,
        "tokenizer": tokenizer.identity(config),
        **chat_identity(config),
        "samples and their order (hash)": splits.train.fingerprint(),
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    settings: Settings
    runtime: PlannedRuntime
    splits: Splits
    config: TransformerConfig
    model: Sequence[DistributedDataParallel]
    needs: Sequence[ChunkNeeds]
    trainable: Trainable
    scalars: Scalars
    save_lock: SaveLock | None

    @property
    def optimizer(self) -> MegatronOptimizer:
        return self.trainable.optimizer

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        return self.trainable.scheduler

    def iterator_wrapper(
        self, stream: SampleStream, name: str, hardware_of: Callable[[int], Hardware] | None = None
    ) -> DataIteratorWrapper:
        """Return a wrapper that plans global batches of `stream` and builds this rank's micro-batches; close it."""
        return DataIteratorWrapper(
            plan_source=self.runtime.plan_source(name, hardware_of),
            read_sample=stream.read,
            groups=self.runtime.groups,
            chunks=self.needs,
            device=self.runtime.device,
            num_workers=self.settings.data.num_workers,
            verify=self.settings.planning.verify,
            may_place=may_place(self.settings.model),
        )

    def run_schedule(
        self,
        data: StepData,
        wrapper: DataIteratorWrapper,
        *,
        forward_only: bool,
        forward_step_func: Callable[..., Any] = forward_step,
    ) -> list[dict[str, Any]]:
        """Run the step that `wrapper` built; return what the loss function logged, [] before the last stage."""
        return run_schedule(
            self.model,
            data,
            self.settings.planning.seq_length,
            forward_only=forward_only,
            rank_tokens=wrapper.rank_tokens,
            verify_messages=self.settings.planning.verify == "full",
            forward_step_func=forward_step_func,
        )

    def close(self) -> None:
        self.runtime.close()
        self.scalars.close()
        if self.save_lock is not None:
            self.save_lock.close()


def set_up(settings: Settings) -> Run:
    """Build the run of `settings`; DynamicCPError on every rank if that fails. Collective."""
    device = initialize(settings)
    set_up_logging()
    save_lock = _take_folders(settings)
    layer_choice = layers.choose(
        layer_needs(settings.model, settings.planning),
        device,
        fused_adam=settings.planning.data_parallel.state.use_precision_aware_optimizer,
    )
    fused = fusions.choose(settings.model, device)
    for choice in (layer_choice, fused):
        logger.info("%s", choice.describe())
    hardware = first_hardware(settings.planning, device, layer_choice)
    data = load_data(settings, device)
    if data.splits.train.has_masks:
        layer_choice.check_masks(MASKS)
        refuse_pairs(MASKS, SimpleNamespace(**settings.arguments))
    runtime = PlannedRuntime.agree(
        settings.planning,
        arguments={**settings.arguments, **fused.completed_flags(settings.model)},
        device=device,
        layers=layer_choice,
        model_shape=model_shape(settings.model, data.vocab_rows, settings.planning.pipeline_layers),
        hardware=hardware,
        has_masks=data.splits.train.has_masks,
    )
    built = model.build(settings, runtime, fused)
    if checked := runtime.check_attention(built.chunks):
        logger.info("%s", checked)
    if device.type == "cuda":
        warm_up_device(runtime, built)
    if settings.model.hidden_dropout > 0:
        seed(settings.training.seed, runtime.groups.lane)
    run = Run(
        settings=settings,
        runtime=runtime.start(),
        splits=data.splits,
        config=built.config,
        model=built.wrapped,
        needs=built.needs,
        trainable=_trainable(settings, runtime, built, data),
        scalars=_scalars(settings.logging, runtime.arguments),
        save_lock=save_lock,
    )
    _log_choices(run)
    try:
        logger.info("%s", run.runtime.warm_up(_masked_batch(run.splits.train, settings)))
    except BaseException:
        with closing(run):
            raise
    return run


def _masked_batch(stream: SampleStream, settings: Settings) -> Sequence[Sample]:
    """Return the first global batch if samples may have masks; one that cannot be planned then shows at the start."""
    return stream.global_batch(0, settings.training.batch_sizes.at(0)) if stream.has_masks else ()


def _take_folders(settings: Settings) -> SaveLock | None:
    """Check on rank 0 that the run's folders can be written, or raise on all; return the lock of --save. Collective."""
    save, tensorboard_dir = settings.checkpoints.save, settings.logging.tensorboard_dir
    profiling = settings.profiling
    profile_dir = profiling.profile_dir if profiling.use_pytorch_profiler else None
    if save is not None:
        run_on_rank_zero(lambda: checkpoint_files.probe_writable(save))
    for flag, folder in (("--tensorboard-dir", tensorboard_dir), ("--profile-dir", profile_dir)):
        if folder is not None:
            run_on_rank_zero(partial(checkpoint_files.probe_writable, folder, flag, InvalidInputError))
    return None if save is None else SaveLock(save)


def _trainable(settings: Settings, runtime: PlannedRuntime, built: model.Built, data: RunData) -> Trainable:
    topology, vocab_rows = runtime.topology, runtime.model_shape.vocab_size
    return Trainable(
        chunks=built.chunks,
        wrapped=built.wrapped,
        optimizer=built.optimizer,
        scheduler=built.scheduler,
        identity={
            "model": derive.model_identity(settings.model, vocab_rows),
            "data": data_identity(data.config, data.splits),
            **features.identity_of_adapters(settings.model),
        },
        arguments={**runtime.arguments, "padded_vocab_size": vocab_rows, derive.TOKEN_IDS: data.num_token_ids},
        layout={"tp": topology.tp_size, "pp": topology.pp_size, "vp": topology.vp_size, "lanes": topology.num_lanes},
        has_dropout=settings.model.hidden_dropout > 0,
        gathers_params=settings.planning.data_parallel.overlap_param_gather,
    )


def _scalars(settings: LoggingSettings, arguments: Mapping[str, Any]) -> Scalars:
    """Return rank 0's writer of figures, a silent one on other ranks. Collective, because it may fail on rank 0."""
    scalars = [Scalars()]

    def start() -> None:
        options = None
        if settings.wandb_project:
            options = {
                "project": settings.wandb_project,
                "name": settings.wandb_exp_name,
                "entity": settings.wandb_entity,
                "dir": settings.wandb_save_dir,
                "config": dict(arguments),
            }
        scalars[0] = Scalars(settings.tensorboard_dir, options, per_layer=settings.moe_per_layer_logging)

    run_on_rank_zero(start)
    return scalars[0]


def _log_choices(run: Run) -> None:
    """Log what was chosen automatically or follows from several flags."""
    training, topology = run.settings.training, run.runtime.topology
    if training.train_samples_left_out:
        logger.info(
            "--train-samples is rounded down to %d, %d iterations of %s%d samples: %d are left out",
            training.train_samples,
            training.train_iters,
            "" if training.rampup_batch_size is None else "at last ",
            training.global_batch_size,
            training.train_samples_left_out,
        )
    for sentence in training.without_effect:
        logger.info("%s", sentence)
    for stream in (run.splits.train, run.splits.valid, run.splits.test):
        if stream is not None:
            logger.info("data, %s", stream.describe())
    parameters = [parameter for chunk in run.trainable.chunks for parameter in chunk.parameters()]
    num_parameters = sum(parameter.numel() for parameter in parameters)
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    logger.info(
        "%d ranks = TP %d x PP %d (VPP %d) x %d lanes%s, %s; %d parameters on rank 0%s",
        topology.world_size,
        topology.tp_size,
        topology.pp_size,
        topology.vp_size,
        topology.num_lanes,
        "" if run.settings.model.num_experts is None else f", experts shared by EP {topology.ep_size}",
        run.runtime.device,
        num_parameters,
        "" if num_trained == num_parameters else f", of which {num_trained} of adapters are trained",
    )
    for line in run.runtime.describe():
        logger.info("%s", line)
