"""Loads a checkpoint with megatron-core's distributed checkpoints, whatever layout of ranks saved it.

The manifest has the position: iteration, consumed samples, learning-rate schedule and the identity of the data.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dynamic_cp.errors import CheckpointError
from dynamic_cp.models.flags import ROTARY
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks, run_on_rank_zero
from megatron.dynamic_cp.flags.attention import STRETCHED
from megatron.trainer.checkpoints import checkpoint_files, interchange, manifest, safe_loading
from megatron.trainer.checkpoints.checkpoint_files import reporting
from megatron.trainer.checkpoints.state import (
    LoadRequest,
    Position,
    Trainable,
    load_weights,
    set_rng_state,
    sharded_model,
    sharded_rng,
    without_adapters,
    without_extra_states,
)
from megatron.trainer.flags.derive import FEATURES, TOKEN_IDS

logger = logging.getLogger(__name__)


def load(trainable: Trainable, load_dir: str, *, finetune: bool, required: bool) -> Position | None:
    """Load the latest checkpoint below `load_dir` and return its position; None if there is none. Collective.

    Args:
        finetune: load the weights only and begin at iteration 0; imported weights are always loaded so.
        required: a folder without a checkpoint is an error; otherwise the run starts afresh.

    Raises CheckpointError: damaged, missing, or of another model, data set or seed; on every rank."""
    found = run_on_rank_zero(lambda: _find(load_dir, required, trainable.identity["model"], finetune), _found)
    if found is None:
        logger.info("no checkpoint in %s: starting afresh", load_dir)
        return None
    folder, run = found
    is_imported = run["optimizer_kind"] is None
    saved = _checked_vocabulary(trainable, run["identity"], folder) if is_imported else run["identity"]
    weights_only = finetune or is_imported
    has_adapters = _has_adapters(trainable.identity, saved, folder, weights_only)
    if finetune:
        _check_weights_fit(trainable.identity["model"], saved["model"], folder)
    else:
        _check_identity({part: trainable.identity[part] for part in saved}, saved, folder)
    _check_imported_flags(trainable.arguments, run.get("flags", {}), folder, finetune)
    if (folder / manifest.NAME).exists():
        _verify(folder)
    state = without_extra_states(sharded_model(trainable))
    if not has_adapters:
        state = without_adapters(state)
    same_layout = run["layout"] == trainable.layout
    request = None
    if not weights_only:
        request = LoadRequest(trainable.optimizer, state, run["optimizer_kind"])
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
        iteration=run["iteration"], consumed_samples=run["consumed_samples"], coefficients=run.get("coefficients")
    )
    logger.info("loaded %s: iteration %d, %d consumed samples", folder, position.iteration, position.consumed_samples)
    return position


def saved_data_identity(load_dir: str) -> dict[str, Any]:
    """Return the data identity of the latest checkpoint, {} without one; CheckpointError if damaged. For rank 0."""
    folder = checkpoint_files.latest(load_dir)
    if folder is None or not (folder / manifest.NAME).exists():
        return {}
    found: dict[str, Any] = manifest.read_manifest(folder).run["identity"].get("data", {})
    return found


def _find(
    load_dir: str, required: bool, model: Mapping[str, Any], weights_only: bool
) -> tuple[str, dict[str, Any]] | None:
    """Return the folder of the latest checkpoint with its manifest's run values, or Megatron-LM's in that form."""
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
    if value is None:
        return None
    folder, run = value
    return Path(folder), run


def _verify(folder: Path) -> None:
    """Compare all files' hashes, each rank its share; CheckpointError on every rank if one differs. Collective."""
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
    """Check each named part; both arguments map part -> {name: value}."""
    for part, values in own.items():
        # A feature that only one model has is named in that model only.
        more = FEATURES & saved.get(part, {}).keys() - values.keys() if part == "model" else ()
        for name in (*values, *sorted(more)):
            value, saved_value = values.get(name), saved.get(part, {}).get(name)
            if saved_value != value:
                raise CheckpointError(
                    f"{folder} was saved with {part} {name} = {saved_value!r}, this run has {value!r}: "
                    + ("use the same model" if part == "model" else "use the same, or --finetune to start anew")
                )


def _check_weights_fit(own: Mapping[str, Any], saved: Mapping[str, Any], folder: Path) -> None:
    """Check the model of weights that begin a new run; positions may reach further where no weight depends on that."""
    free = ["rotary_base", *sorted(STRETCHED & (own.keys() | saved.keys()))]
    if own["position_embedding_type"] != "learned_absolute":
        free.append("max_position_embeddings")
    if {own["position_embedding_type"], saved.get("position_embedding_type")} <= set(ROTARY):
        free.append("position_embedding_type")
    for name in free:
        if saved.get(name) != own.get(name):
            logger.info("--finetune: %s was %s, it is %s now", name, saved.get(name), own.get(name))
    kept, saved_kept = ({name: of[name] for name in of if name not in free} for of in (own, saved))
    _check_identity({"model": kept}, {"model": saved_kept}, folder)


def _checked_vocabulary(trainable: Trainable, saved: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the identity of imported weights with the run's vocabulary rows; CheckpointError if these do not fit."""
    num_rows, imported = trainable.identity["model"]["vocab_size"], saved["model"]["vocab_size"]
    num_token_ids = trainable.arguments[TOKEN_IDS]
    if not num_token_ids <= imported <= num_rows:
        raise CheckpointError(
            f"{folder} has {imported} token ids, this run has {num_token_ids} in {num_rows} rows: give "
            f"--vocab-size {imported}, with NullTokenizer also --eod-id"
        )
    return {**saved, "model": {**saved["model"], "vocab_size": num_rows}}


def _has_adapters(own: Mapping[str, Any], saved: Mapping[str, Any], folder: Path, weights_only: bool) -> bool:
    """Return whether the checkpoint has this run's adapters. CheckpointError if it has others, or none although the run
    goes on with its optimizer; with weights only, adapters begin anew."""
    ours, theirs = own.get("adapters"), saved.get("adapters")
    if ours == theirs:
        return ours is not None
    if ours is None or theirs is not None or not weights_only:
        remedy = "give the same, or merge them first (dynamic-cp weights export, import)"
        raise CheckpointError(
            f"{folder} was saved with {_in_words(theirs)}, this run has {_in_words(ours)}: "
            + (remedy if theirs is not None else "add --finetune to begin with its weights")
        )
    return False


def _in_words(adapters: Mapping[str, Any] | None) -> str:
    if adapters is None:
        return "no adapters"
    return f"adapters of rank {adapters['rank']}, alpha {adapters['alpha']}, of {' '.join(adapters['modules'])}"


def _check_imported_flags(own: Mapping[str, Any], imported: Mapping[str, Any], folder: Path, finetune: bool) -> None:
    """Check the flags that decide what imported weights compute but show in no weight's shape."""
    for name, value in imported.items():
        ours = list(own[name]) if isinstance(own[name], tuple) else own[name]
        if ours == value:
            continue
        if not finetune:
            raise CheckpointError(
                f"{folder} was imported with {name} = {value!r}, this run has {ours!r}: give the flags of "
                f"{folder.parent / 'model.flags'}, or --finetune to go on with another model"
            )
        logger.info("--finetune: %s was %s, it is %s now", name, value, ours)


def _load_scheduler(scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> None:
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as error:
        raise CheckpointError(
            f"the learning-rate schedule differs from the checkpoint's ({error}): give the same flags, "
            "--override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
        ) from None
