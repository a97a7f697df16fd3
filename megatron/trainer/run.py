"""From arguments to everything a training loop needs, in the order in which it can fail cheaply."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from dynamic_cp.catalog import load_hardware
from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import Hardware, ModelShape, Topology
from megatron.dynamic_cp.arguments import cp_comm_types
from megatron.dynamic_cp.attention.torch_thd import prepare_kernel
from megatron.dynamic_cp.data_iterator_wrapper import DataIteratorWrapper, StepData
from megatron.dynamic_cp.loss import forward_step
from megatron.dynamic_cp.micro_batches import ChunkNeeds
from megatron.dynamic_cp.plan_dump import WARM_UP, RunDump
from megatron.dynamic_cp.planner import Planner
from megatron.dynamic_cp.planning import PlanSource, warm_up
from megatron.dynamic_cp.process_groups import DynamicCPGroups
from megatron.dynamic_cp.verify import check_same_digest, run_on_all_ranks, run_on_rank_zero
from megatron.trainer import (
    checkpoint_files,
    derive,
    fusions,
    layers,
    memory,
    model,
    planners,
    start_calibration,
)
from megatron.trainer.checkpointing import Trainable, saved_calibration
from megatron.trainer.data import tokenizer
from megatron.trainer.data.build import SampleStream, Splits, build_splits
from megatron.trainer.data.chat_lines import chat_identity
from megatron.trainer.data.config import DataConfig
from megatron.trainer.index_once import index_once
from megatron.trainer.initialize import initialize, seed, set_up_logging
from megatron.trainer.log import Scalars
from megatron.trainer.step import run_schedule
from megatron.trainer.warm_up import warm_up_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same during a run."""

    args: argparse.Namespace
    device: torch.device
    topology: Topology
    model_shape: ModelShape
    hardware: Hardware
    groups: DynamicCPGroups
    planner: Planner | None
    dump: RunDump | None
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
            plan_source=self.plan_source(name, hardware_of),
            read_sample=stream.read,
            groups=self.groups,
            chunks=self.needs,
            device=self.device,
            num_workers=self.args.num_workers,
            verify=self.args.dynamic_cp_verify,
        )

    def plan_source(self, name: str, hardware_of: Callable[[int], Hardware] | None = None) -> PlanSource:
        """Return where this rank gets plans from.

        Args:
            name: unique in the job.
            hardware_of: see `PlanSource`.
        """
        return PlanSource(
            self.planner,
            topology=self.topology,
            lane=self.groups.lane,
            name=name,
            lookahead=self.args.dynamic_cp_lookahead,
            timeout_s=self.args.dynamic_cp_plan_timeout,
            hardware_of=hardware_of,
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
        if self.planner is not None:
            self.planner.close()
        self.scalars.close()


def set_up(args: argparse.Namespace) -> Run:
    """Build the run of `args`; collective.

    Raises:
        DynamicCPError: the same on every rank.
    """
    device = initialize(args)
    set_up_logging()
    is_calibrated = start_calibration.is_wanted(args, device)
    if args.save is not None:
        run_on_rank_zero(lambda: checkpoint_files.probe_writable(args.save))
    if args.tensorboard_dir is not None:
        run_on_rank_zero(
            lambda: checkpoint_files.probe_writable(args.tensorboard_dir, "--tensorboard-dir", InvalidInputError)
        )
    if args.use_pytorch_profiler and args.profile_dir is not None:
        run_on_rank_zero(lambda: checkpoint_files.probe_writable(args.profile_dir, "--profile-dir", InvalidInputError))
    layer_choice = layers.choose(args, device)
    logger.info("%s", layer_choice.describe())
    logger.info("%s", fusions.choose(args, device).describe())
    hardware_name = args.dynamic_cp_hardware or ("cpu" if device.type == "cpu" else "h100")
    hardware = run_on_rank_zero(lambda: asdict(_hardware(args, hardware_name)), lambda found: Hardware(**found))
    data_config, vocab_size, splits = _data(args, device)
    topology = derive.topology(args)
    vocab_rows = derive.padded_vocab_size(vocab_size, args.make_vocab_size_divisible_by, topology.tp_size)
    model_shape = derive.model_shape(args, vocab_rows)
    is_auto = args.max_seqlen_per_dp_cp_rank == "auto"
    # Every rank would find the same; rank 0 says it for all, so that none can differ or fail alone.
    args.max_seqlen_per_dp_cp_rank = run_on_rank_zero(
        lambda: memory.max_tokens_per_rank(args, model_shape, hardware), int
    )
    dump, recorded = planners.dump_and_replay(args, topology)
    groups = DynamicCPGroups.build(
        topology,
        timeout_s=60 * args.distributed_timeout_minutes,
        min_cp_size=args.min_dynamic_cp_size,
        max_cp_size=args.max_dynamic_cp_size,
        exchanges=cp_comm_types(args),
        inner_sizes=args.dynamic_cp_inner_sizes,
        query_heads=args.num_attention_heads // topology.tp_size,
        device=device,
    )
    config = model.transformer_config(args, device)
    if args.transformer_impl == "local":
        run_on_all_ranks(lambda: prepare_kernel(config, device), device)
    chunks = model.build_chunks(args, config, vocab_rows)
    wrapped = model.wrap_chunks(args, config, chunks, topology.num_lanes, device)
    optimizer = model.build_optimizer(args, config, wrapped)
    scheduler = model.build_scheduler(args, optimizer)
    if device.type == "cuda":
        warm_up_device(args, config, chunks, wrapped, groups, device)
    needs = model.chunk_needs(chunks)
    calibration = None
    if is_calibrated:
        machine = start_calibration.Machine(
            args=args,
            device=device,
            topology=topology,
            model_shape=model_shape,
            groups=groups,
            wrapped=wrapped,
            needs=needs,
        )
        hardware, calibration = start_calibration.calibrate(machine, hardware, lambda: _saved_calibration(args))
        hardware_name = hardware.name
    if args.hidden_dropout > 0:
        seed(args.seed, groups.lane)
    run = Run(
        args=args,
        device=device,
        topology=topology,
        model_shape=model_shape,
        hardware=hardware,
        groups=groups,
        planner=planners.start(args, topology, model_shape, hardware, recorded, dump),
        dump=dump,
        splits=splits,
        config=config,
        model=wrapped,
        needs=needs,
        trainable=Trainable(
            chunks=chunks,
            wrapped=wrapped,
            optimizer=optimizer,
            scheduler=scheduler,
            identity={"model": derive.model_identity(args, vocab_rows), "data": _data_identity(data_config, splits)},
            arguments={**vars(args), "padded_vocab_size": vocab_rows},
            layout={
                "tp": topology.tp_size,
                "pp": topology.pp_size,
                "vp": topology.vp_size,
                "lanes": topology.num_lanes,
            },
            has_dropout=args.hidden_dropout > 0,
            gathers_params=args.overlap_param_gather,
            calibration=calibration,
        ),
        scalars=_scalars(args),
    )
    _log_choices(run, hardware_name)
    if is_auto:
        logger.info("the limit of padded tokens is what the memory of hardware %s holds", hardware_name)
    if args.dynamic_cp_replay is not None:
        logger.info("plans are those of %s", args.dynamic_cp_replay)
    else:
        try:
            ready_s = warm_up(run.plan_source(WARM_UP), args.seq_length)
        except BaseException:
            run.close()
            raise
        logger.info("planner ready after %.1f s, %s search", ready_s, args.dynamic_cp_search)
    return run


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


def _hardware(args: argparse.Namespace, name: str) -> Hardware:
    hardware = load_hardware(name)
    memory.check_memory_is_known(args, hardware)  # before the data are indexed
    return hardware


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


def _data(args: argparse.Namespace, device: torch.device) -> tuple[DataConfig, int, Splits]:
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
    return config, tokenizer.build(config).vocab_size, splits


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


def _log_choices(run: Run, hardware_name: str) -> None:
    """Say what was chosen automatically or follows from several flags."""
    args = run.args
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
        run.topology.world_size,
        run.topology.tp_size,
        run.topology.pp_size,
        run.topology.vp_size,
        run.topology.num_lanes,
        run.device,
        num_parameters,
    )
    logger.info("%s", run.groups.describe())
    logger.info(
        "policy %s, %d padded tokens per rank and micro-batch, hardware %s for the cost model",
        derive.policy(args),
        args.max_seqlen_per_dp_cp_rank,
        hardware_name,
    )
