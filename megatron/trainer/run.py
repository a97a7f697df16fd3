"""From arguments to everything a training loop needs, in the order in which it can fail cheaply."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import Hardware, Topology
from megatron.dynamic_cp.data_iterator_wrapper import DataIteratorWrapper, StepData
from megatron.dynamic_cp.loss import forward_step
from megatron.dynamic_cp.micro_batches import ChunkNeeds
from megatron.dynamic_cp.verify import check_same_digest, run_on_all_ranks, run_on_rank_zero
from megatron.trainer import checkpoint_files, derive, fusions, layers, model, start_calibration
from megatron.trainer.checkpointing import Trainable, saved_calibration
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import SampleStream, Splits, build_splits
from megatron.trainer.data.chat_lines import chat_identity
from megatron.trainer.data.config import DataConfig
from megatron.trainer.index_once import index_once
from megatron.trainer.initialize import initialize, seed, set_up_logging
from megatron.trainer.log import Scalars
from megatron.trainer.planned_runtime import PlannedRuntime, first_hardware
from megatron.trainer.step import run_schedule
from megatron.trainer.warm_up import warm_up_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same during a run."""

    args: argparse.Namespace
    runtime: PlannedRuntime
    splits: Splits
    config: TransformerConfig
    model: Sequence[DistributedDataParallel]
    needs: Sequence[ChunkNeeds]
    trainable: Trainable
    scalars: Scalars

    @property
    def optimizer(self) -> MegatronOptimizer:
        """The optimizer of all model chunks."""
        return self.trainable.optimizer

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        """The schedule of learning rate and weight decay; its steps are samples."""
        return self.trainable.scheduler

    def iterator_wrapper(
        self, stream: SampleStream, name: str, hardware_of: Callable[[int], Hardware] | None = None
    ) -> DataIteratorWrapper:
        """Return what plans global batches of `stream` and builds this rank's micro-batches of them; close it."""
        return DataIteratorWrapper(
            plan_source=self.runtime.plan_source(name, hardware_of),
            read_sample=stream.read,
            groups=self.runtime.groups,
            chunks=self.needs,
            device=self.runtime.device,
            num_workers=self.args.num_workers,
            verify=self.args.dynamic_cp_verify,
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
            self.args.seq_length,
            forward_only=forward_only,
            rank_tokens=wrapper.rank_tokens,
            verify_messages=self.args.dynamic_cp_verify == "full",
            forward_step_func=forward_step_func,
        )

    def close(self) -> None:
        """End the planner and flush what is logged."""
        self.runtime.close()
        self.scalars.close()


def set_up(args: argparse.Namespace) -> Run:
    """Build the run of `args`; collective.

    Raises:
        DynamicCPError: the same on every rank.
    """
    device = initialize(args)
    set_up_logging()
    is_calibrated = start_calibration.is_wanted(args, device)
    _probe_folders(args)
    logger.info("%s", layers.choose(args, device).describe())
    logger.info("%s", fusions.choose(args, device).describe())
    hardware = first_hardware(args, device)
    data = _data(args, device)
    vocab_rows = derive.padded_vocab_size(
        data.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    runtime = PlannedRuntime.agree(args, device=device, hardware=hardware, vocab_rows=vocab_rows)
    built = model.build(args, vocab_rows, runtime.topology.num_lanes, device)
    if device.type == "cuda":
        warm_up_device(args, built.config, built.chunks, built.wrapped, runtime.groups, device)
    calibration = None
    if is_calibrated:
        measured, calibration = start_calibration.calibrate(runtime, built, lambda: _saved_calibration(args))
        runtime = runtime.measured(measured)
    if args.hidden_dropout > 0:
        seed(args.seed, runtime.groups.lane)
    run = Run(
        args=args,
        runtime=runtime.start(),
        splits=data.splits,
        config=built.config,
        model=built.wrapped,
        needs=built.needs,
        trainable=_trainable(args, runtime.topology, built, data, vocab_rows, calibration),
        scalars=_scalars(args),
    )
    _log_choices(run)
    try:
        logger.info("%s", run.runtime.warm_up())
    except BaseException:
        run.close()
        raise
    return run


def _probe_folders(args: argparse.Namespace) -> None:
    """Check that rank 0 can write where the run will; collective.

    Raises:
        DynamicCPError: the same on every rank.
    """
    if args.save is not None:
        run_on_rank_zero(lambda: checkpoint_files.probe_writable(args.save))
    if args.tensorboard_dir is not None:
        run_on_rank_zero(
            lambda: checkpoint_files.probe_writable(args.tensorboard_dir, "--tensorboard-dir", InvalidInputError)
        )
    if args.use_pytorch_profiler and args.profile_dir is not None:
        run_on_rank_zero(lambda: checkpoint_files.probe_writable(args.profile_dir, "--profile-dir", InvalidInputError))


def _trainable(
    args: argparse.Namespace,
    topology: Topology,
    built: model.Built,
    data: _Data,
    vocab_rows: int,
    calibration: Mapping[str, Any] | None,
) -> Trainable:
    return Trainable(
        chunks=built.chunks,
        wrapped=built.wrapped,
        optimizer=built.optimizer,
        scheduler=built.scheduler,
        identity={
            "model": derive.model_identity(args, vocab_rows),
            "data": _data_identity(data.config, data.splits),
        },
        arguments={**vars(args), "padded_vocab_size": vocab_rows},
        layout={"tp": topology.tp_size, "pp": topology.pp_size, "vp": topology.vp_size, "lanes": topology.num_lanes},
        has_dropout=args.hidden_dropout > 0,
        gathers_params=args.overlap_param_gather,
        calibration=calibration,
    )


def _scalars(args: argparse.Namespace) -> Scalars:
    """Return what rank 0 writes figures to, a silent one on the other ranks; collective, because it may fail there."""
    scalars = [Scalars()]

    def start() -> None:
        options = None
        if args.wandb_project:
            options = {
                "project": args.wandb_project,
                "name": args.wandb_exp_name,
                "entity": args.wandb_entity,
                "dir": args.wandb_save_dir,
                "config": dict(vars(args)),
            }
        scalars[0] = Scalars(args.tensorboard_dir, options)

    run_on_rank_zero(start)
    return scalars[0]


def _saved_calibration(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the checkpoint that the run goes on from has kept; a new run that takes only its weights has none."""
    return None if args.load is None or args.finetune else saved_calibration(args.load)


def data_config(args: argparse.Namespace) -> DataConfig:
    """Return what the data flags say."""
    return DataConfig(
        data_path=tuple(args.data_path),
        data_glob=args.data_glob,
        cache_path=args.data_cache_path,
        json_key=args.json_key,
        split=args.split,
        seq_length=args.seq_length,
        overlong=args.overlong,
        seed=args.seed,
        mock=args.mock_data,
        tokenizer=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        sft=args.sft,
        chat_template=args.chat_template,
        vocab_size=args.vocab_size,
        eod_id=args.eod_id,
        varlen_mock_config=args.varlen_mock_dataset_config_json,
    )


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The samples of a run, and how many token ids they may have."""

    config: DataConfig
    splits: Splits
    vocab_size: int


def _data(args: argparse.Namespace, device: torch.device) -> _Data:
    """Return the data, which rank 0 indexes and all must see alike."""
    config = data_config(args)
    entries = index_once(config, device)
    splits = run_on_all_ranks(lambda: build_splits(config, entries), device)
    fingerprint = run_on_all_ranks(splits.train.fingerprint, device)
    check_same_digest(fingerprint, "the training data of --data-path", device)
    if args.eval_iters > 0 and splits.valid is None:
        raise DataError(
            f"--eval-iters is {args.eval_iters}, but --split {args.split} leaves no validation data: "
            "give its second number a share or set --eval-iters 0"
        )
    return _Data(config=config, splits=splits, vocab_size=tokenizer.build(config).vocab_size)


def _data_identity(config: DataConfig, splits: Splits) -> dict[str, Any]:
    """Return what two runs must share to see the same samples: lengths, order, probes of the contents; not the path."""
    return {
        "seed": config.seed,
        "split": config.split,
        "seq_length": config.seq_length,
        "overlong": config.overlong,
        "tokenizer": tokenizer.identity(config),
        **chat_identity(config),
        "samples and their order (hash)": splits.train.fingerprint(),
    }


def _log_choices(run: Run) -> None:
    """Say what was chosen automatically or follows from several flags."""
    args, topology = run.args, run.runtime.topology
    if args.train_samples_left_out:
        logger.info(
            "--train-samples is rounded down to %d, %d iterations of %d samples: %d are left out",
            args.train_samples,
            args.train_iters,
            args.global_batch_size,
            args.train_samples_left_out,
        )
    for stream in (run.splits.train, run.splits.valid, run.splits.test):
        if stream is not None:
            logger.info("data, %s", stream.describe())
    num_parameters = sum(parameter.numel() for chunk in run.trainable.chunks for parameter in chunk.parameters())
    logger.info(
        "%d ranks = TP %d x PP %d (VPP %d) x %d lanes, %s; %d parameters on rank 0",
        topology.world_size,
        topology.tp_size,
        topology.pp_size,
        topology.vp_size,
        topology.num_lanes,
        run.runtime.device,
        num_parameters,
    )
    for line in run.runtime.describe():
        logger.info("%s", line)
