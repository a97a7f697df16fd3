"""Reads checkpoints of Megatron-LM (core_v0.16.1, --ckpt-format torch_dist) and adds to ours what Megatron-LM reads.

Both programs save weights and optimizer with the same functions of megatron-core, so names are equal. Megatron-LM keeps
its arguments, iteration and schedule in the checkpoint's common part, this trainer in a manifest. So every checkpoint
of this trainer has both, and `--load` recognizes a folder with Megatron-LM's values alone.

Taken over are weights, optimizer state, learning-rate schedule, iteration and number of consumed samples; not the order
of the data (training goes on with this trainer's own sample of that number) nor random states.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from dynamic_cp.errors import CheckpointError
from dynamic_cp.models.flags import ROTARY
from megatron.dynamic_cp.flags.features import is_gated
from megatron.trainer.checkpoints import checkpoint_files, manifest, safe_loading
from megatron.trainer.checkpoints.state import SHARDING
from megatron.trainer.flags.derive import FEATURES, features_of

CONTENT_METADATA = {
    **SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""What Megatron-LM needs in order to ask for the optimizer's tensors by the right names."""
COEFFICIENTS = "dynamic_cp_coefficients"
"""Argument under which a checkout with --dynamic-cp keeps its cost model (`Coefficients.to_dict`)."""
_WRITTEN_BY = "written_by"
_THIS = "megatron-dynamic-cp"
_OTHER_CONTENT = (AttributeError, TypeError, ValueError)
"""What reading raises on values that it does not expect."""


def values_for_megatron_lm(
    arguments: Mapping[str, Any],
    iteration: int,
    consumed_samples: int,
    scheduler: Mapping[str, Any],
    coefficients: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the values that Megatron-LM reads beside weights and optimizer.

    Args:
        arguments: flags of this run under Megatron-LM's names.
        scheduler: state of the learning-rate schedule.
        coefficients: of the cost model; None: not refined.
    """
    args = argparse.Namespace(**arguments)
    args.iteration = iteration
    args.consumed_train_samples = consumed_samples
    args.consumed_valid_samples = args.skipped_train_samples = 0
    args.add_bias_linear = not args.disable_bias_linear
    args.no_save_optim = False
    args.no_save_rng = True  # ours have another form, so Megatron-LM goes on with its own
    setattr(args, _WRITTEN_BY, _THIS)
    setattr(args, COEFFICIENTS, coefficients)
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": dict(scheduler),
        "num_floating_point_operations_so_far": 0,
    }


def read_run(folder: Path, model: Mapping[str, Any], *, weights_only: bool) -> dict[str, Any] | None:
    """Return the run values of Megatron-LM's checkpoint `folder` in our manifest's form; None if it is not
    Megatron-LM's.

    Args:
        model: `derive.model_identity` of this run.
        weights_only: only weights are wanted.

    Raises CheckpointError: it is Megatron-LM's, of a kind that cannot be read."""
    if (folder / manifest.NAME).exists() or not (folder / "metadata.json").exists():
        return None
    try:
        common = safe_loading.read_common(folder)
    except CheckpointError:
        raise
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ImportError, *_OTHER_CONTENT) as error:
        raise CheckpointError(
            f"{folder} has no {manifest.NAME}, and its metadata.json or common.pt cannot be read as Megatron-LM's "
            f"({type(error).__name__}: {error}): resume from an older checkpoint by writing its iteration into "
            f"{checkpoint_files.TRACKER}"
        ) from error
    args = common.get("args") if isinstance(common, dict) else None
    if (
        not isinstance(args, argparse.Namespace)
        or "checkpoint_version" not in common
        or getattr(args, _WRITTEN_BY, None) == _THIS
    ):
        return None
    if not weights_only:
        _check_optimizer(folder, args, common)
    return {
        "iteration": common.get("iteration", 0),
        "consumed_samples": getattr(args, "consumed_train_samples", 0),
        "coefficients": getattr(args, COEFFICIENTS, None),
        "scheduler": common.get("opt_param_scheduler"),
        "optimizer_kind": _optimizer_kind(args),
        "identity": {"model": _model_identity(args, model)},
        "layout": {},
    }


def _check_optimizer(folder: Path, args: argparse.Namespace, common: Mapping[str, Any]) -> None:
    if "optimizer" not in common or "opt_param_scheduler" not in common:
        raise CheckpointError(
            f"{folder} of Megatron-LM has no optimizer state (--no-save-optim, or converted weights): "
            "load its weights with --finetune"
        )
    if getattr(args, "fp16", False):
        raise CheckpointError(f"{folder} of Megatron-LM was trained with --fp16: load its weights with --finetune")
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=dict(common)) or {}
    kind = metadata.get("distrib_optim_sharding_type")
    if _optimizer_kind(args) == "distributed" and kind != SHARDING["distrib_optim_sharding_type"]:
        raise CheckpointError(
            f"{folder} of Megatron-LM has its distributed optimizer as {kind}, fully_reshardable can be read: save it "
            "with --dist-ckpt-optim-fully-reshardable, or load its weights with --finetune"
        )


def _optimizer_kind(args: argparse.Namespace) -> str:
    if getattr(args, "use_distributed_optimizer", False):
        return "distributed"
    return "plain_16bit" if getattr(args, "bf16", False) else "plain_fp32"


def _model_identity(args: argparse.Namespace, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return `model` with the values of Megatron-LM's arguments, where they have one. Tensor shapes check the rest."""
    said = dict(vars(args))
    said["vocab_size"] = said.get("padded_vocab_size")
    if "swiglu" in said:
        said["gated_linear_unit"] = is_gated(args)
    if "add_bias_linear" in said:
        said["disable_bias_linear"] = not said["add_bias_linear"]
    if not said.get("group_query_attention", True):
        said["num_query_groups"] = said.get("num_attention_heads")
    left = set(model)
    if model["position_embedding_type"] != "learned_absolute":
        left.discard("max_position_embeddings")  # no weight and no angle depends on it
    if model["position_embedding_type"] not in ROTARY:
        left -= {"rotary_base", "rotary_percent", "rotary_interleaved"}
    if not model["disable_bias_linear"]:
        left.discard("add_qkv_bias")  # it has all biases, so Megatron-LM sets this flag itself
    always = {name: own for name, own in model.items() if name not in FEATURES}
    said_of = {name: said[name] if name in left and said.get(name) is not None else own for name, own in always.items()}
    return said_of | features_of(args)
