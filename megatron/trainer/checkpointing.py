"""What a checkpoint holds, and loading it with megatron-core's distributed checkpoints; any layout loads any other's.

A checkpoint holds weights, optimizer state, random states and, in its manifest, the position: iteration, consumed
samples, learning-rate schedule and what the data is. saving.py writes it; checkpoint_files.py has the folders and their
integrity.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from dynamic_cp.errors import CheckpointError
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks, run_on_rank_zero
from megatron.trainer import checkpoint_files, interchange, manifest, optimizer_state, safe_loading
from megatron.trainer.disk import explain_refused_write, is_refused_write
from megatron.trainer.extra_states import load_weights, without_extra_states

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Position:
    """Where in the run we are.

    Attributes:
        coefficients: `Coefficients.to_dict` of the cost model, None where it has not been refined.
    """

    iteration: int = 0
    consumed_samples: int = 0
    coefficients: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """What a checkpoint saves and loads.

    Attributes:
        chunks: unwrapped model chunks of this pipeline stage.
        wrapped: the same, wrapped for data parallelism.
        identity: JSON values that must be equal when a run goes on: model, data, seed.
        arguments: flags of the run under Megatron-LM's names, for a Megatron-LM that loads its checkpoints.
        layout: JSON values that decide whether random states fit: TP, PP, lanes.
        has_dropout: whether random states matter.
        gathers_params: weights are gathered by the next forward pass and stale until then.
        calibration: JSON values of what was measured before the first iteration; None where nothing was.
    """

    chunks: Sequence[torch.nn.Module]
    wrapped: Sequence[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    identity: Mapping[str, Any]
    arguments: Mapping[str, Any]
    layout: Mapping[str, int]
    has_dropout: bool
    gathers_params: bool
    calibration: Mapping[str, Any] | None = None


def load(trainable: Trainable, load_dir: str, *, finetune: bool, required: bool) -> Position:
    """Load the latest checkpoint below `load_dir` and return its position; collective.

    Args:
        finetune: load the weights only and begin at iteration 0.
        required: a folder without a checkpoint is an error; otherwise the run starts afresh.

    Raises:
        CheckpointError: damaged, missing, or of another model, data set or seed; the same on every rank.
    """
    found = run_on_rank_zero(lambda: _find(load_dir, required, trainable.identity["model"], finetune), _found)
    if found is None:
        logger.info("no checkpoint in %s: starting afresh", load_dir)
        return Position()
    folder, run = found
    if finetune:
        _check_weights_fit(trainable.identity["model"], run["identity"]["model"], folder)
    else:
        _check_identity({part: trainable.identity[part] for part in run["identity"]}, run["identity"], folder)
    if (folder / manifest.NAME).exists():
        _verify(folder)
    state = without_extra_states(sharded_model(trainable))
    same_layout = run["layout"] == trainable.layout
    request = None
    if not finetune:
        request = optimizer_state.LoadRequest(trainable.optimizer, state, run["optimizer_kind"])
        state["optimizer_state"] = request.tensors
        if same_layout:
            state["rng"] = sharded_rng(None)
    with reporting(f"--load {load_dir}: {folder.name}", load_dir, "read", "resume from an older checkpoint or another"):
        loaded = safe_loading.load(state, folder)
    for index, chunk in enumerate(trainable.chunks):
        load_weights(chunk, loaded[f"model{index}"] if len(trainable.chunks) > 1 else loaded["model"])
    if request is None:
        trainable.optimizer.reload_model_params()
        logger.info("loaded the weights of %s", folder)
        return Position()
    request.apply(loaded["optimizer_state"], run["iteration"])
    _load_scheduler(trainable.scheduler, run["scheduler"])
    if same_layout:
        set_rng_state(loaded["rng"])
    elif "data" not in run["identity"]:
        if dist.get_rank() == 0:
            logger.warning(
                "%s is Megatron-LM's: weights, optimizer, schedule and position are taken over, the order of its data "
                "and its random states are not: training goes on with sample %d of this run's own order",
                folder,
                run["consumed_samples"],
            )
    elif trainable.has_dropout and dist.get_rank() == 0:
        logger.warning(
            "the checkpoint was saved as %s, this run is %s: random states do not fit, dropout goes on differently",
            run["layout"],
            dict(trainable.layout),
        )
    position = Position(
        iteration=run["iteration"],
        consumed_samples=run["consumed_samples"],
        coefficients=run.get("coefficients"),  # checkpoints from before there were any
    )
    logger.info("loaded %s: iteration %d, %d consumed samples", folder, position.iteration, position.consumed_samples)
    return position


def saved_calibration(load_dir: str) -> dict[str, Any] | None:
    """Return the `calibration` of the latest checkpoint below `load_dir`, None where there is none; for rank 0.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    folder = checkpoint_files.latest(load_dir)
    if folder is None or not (folder / manifest.NAME).exists():
        return None
    found: dict[str, Any] | None = manifest.read_manifest(folder).run.get("calibration")
    return found


@contextlib.contextmanager
def reporting(what: str, folder: str, verb: str, remedy: str) -> Iterator[None]:
    """Turn what torch and the file system refuse into a CheckpointError, the same on every rank.

    A CheckpointException is no Exception. It is raised on all ranks, with its reasons on rank 0 only. An OSError, or
    torch's RuntimeError for a full disk, that gets here is one rank's own: that rank says it, the others end as if it
    had died.
    """
    flag = what.split()[0]
    try:
        yield
    except CheckpointException as error:
        causes = {rank: str(cause) for rank, (cause, _) in sorted(error.failures.items())}
        same = set(causes.values()) if len(causes) > 1 else set()
        own = same.pop() if len(same) == 1 else "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        reasons = run_on_rank_zero(lambda: explain_refused_write(own, folder))
        raise CheckpointError(f"{what} cannot be {verb} ({reasons}): {remedy} {flag}") from None
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_refused_write(error):
            raise
        reason = explain_refused_write(str(error), folder)
        raise CheckpointError(f"{what} cannot be {verb} ({reason}): {remedy} {flag}") from None


def _find(
    load_dir: str, required: bool, model: Mapping[str, Any], weights_only: bool
) -> tuple[str, dict[str, Any]] | None:
    """Return the folder of the latest checkpoint, and what its manifest says, or would say if it is Megatron-LM's."""
    folder = checkpoint_files.latest(load_dir)
    if folder is None:
        if required:
            raise CheckpointError(
                f"--load {load_dir} has no checkpoint ({checkpoint_files.TRACKER} is missing): "
                "check the path or drop --exit-on-missing-checkpoint"
            )
        return None
    theirs = interchange.read_run(folder, model, weights_only=weights_only)
    return str(folder), theirs or dict(manifest.read_manifest(folder).run)


def _found(value: list[Any] | None) -> tuple[Path, dict[str, Any]] | None:
    """Return what `_find` found, from JSON."""
    if value is None:
        return None
    folder, run = value
    return Path(folder), run


def _verify(folder: Path) -> None:
    """Read all files of a checkpoint once and compare their hashes; each rank reads its share. Collective.

    Raises:
        CheckpointError: a file is damaged; the same on every rank.
    """
    started_s = time.perf_counter()
    num_bytes = run_on_all_ranks(
        lambda: manifest.verify_files(
            folder, manifest.read_manifest(folder), share=dist.get_rank(), num_shares=dist.get_world_size()
        )
    )
    logger.info(
        "%s is as it was written: this rank compared %.2f GB in %.1f s",
        folder.name,
        num_bytes / 1e9,
        time.perf_counter() - started_s,
    )


def _check_identity(own: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    """Check each named part; both dicts are part -> {name: value}."""
    for part, values in own.items():
        for name, value in values.items():
            saved_value = saved.get(part, {}).get(name)
            if saved_value != value:
                raise CheckpointError(
                    f"{folder} was saved with {part} {name} = {saved_value!r}, this run has {value!r}: "
                    + ("use the same model" if part == "model" else "use the same, or --finetune to start anew"),
                    name=name,
                )


def _check_weights_fit(own: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    """Check the model of a checkpoint whose weights begin a new run: how far positions reach may change, if no weight
    depends on it, because training goes on to longer samples that way.
    """
    free = ["rotary_base"]
    if own["position_embedding_type"] != "learned_absolute":
        free.append("max_position_embeddings")
    for name in free:
        if saved.get(name) != own[name]:
            logger.info("--finetune: %s was %s, it is %s now", name, saved.get(name), own[name])
    kept = {name: value for name, value in own.items() if name not in free}
    _check_identity({"model": kept}, {"model": saved}, folder)


def sharded_model(trainable: Trainable) -> dict[str, Any]:
    """Return the weights of this rank as megatron-core saves and loads them."""
    chunks = trainable.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: chunk.sharded_state_dict(metadata=optimizer_state.SHARDING)
        for name, chunk in zip(names, chunks, strict=True)
    }


def _load_scheduler(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's ({error}): give the same flags, "
            "--override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
        ) from None


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's generators."""
    state = {"cpu": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring this rank's generators back to where `rng_state` found them."""
    torch.set_rng_state(state["cpu"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def sharded_rng(state: dict[str, Any] | None) -> ShardedObject:
    """Return `rng_state` as megatron-core saves it; None asks for what was saved."""
    return ShardedObject("rng_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
