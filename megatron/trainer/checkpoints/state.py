"""What a checkpoint holds: weights, optimizer state, random states, and where in the run we are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.trainer.checkpoints import optimizer_state


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


def sharded_model(trainable: Trainable) -> dict[str, Any]:
    """Return the weights of this rank as megatron-core saves and loads them."""
    chunks = trainable.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: chunk.sharded_state_dict(metadata=optimizer_state.SHARDING)
        for name, chunk in zip(names, chunks, strict=True)
    }


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
