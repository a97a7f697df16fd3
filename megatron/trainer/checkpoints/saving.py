"""Writing checkpoints: the files of all ranks, then a manifest, then the name (checkpoint_files.py).

A process of each rank writes its files (writer_process.py). Training waits for it, or with --async-save goes on, and
between two iterations all ranks hear whether the last of them is done. Then they name and report the checkpoint in
lock-step. Until then the folder is a `.partial` one, which nothing reads.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_rank_zero
from megatron.dynamic_cp.measuring.nvtx import span
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.checkpoints import checkpoint_files, interchange, optimizer_state
from megatron.trainer.checkpoints.content_hash import FileRecord
from megatron.trainer.checkpoints.disk import reporting
from megatron.trainer.checkpoints.state import Position, Trainable, rng_state, sharded_model, sharded_rng
from megatron.trainer.checkpoints.writer_process import WriterProcess

logger = logging.getLogger(__name__)

_FIRST_LOOK_UP_S, _LOOK_UP_S = 0.002, 0.05


@dataclass(frozen=True, kw_only=True)
class _Unnamed:
    """A checkpoint whose files are being written."""

    folder: Path
    iteration: int
    run: dict[str, Any]
    started_s: float
    blocked_s: float


class Saver:
    """Writes checkpoints of a run below `save_dir` (None: none); a crash at any time leaves the previous one in place.

    Args:
        in_background: go on with the run while files are written.
    """

    def __init__(self, trainable: Trainable, save_dir: str | None, *, in_background: bool) -> None:
        self._trainable = trainable
        self._save_dir = save_dir
        self._in_background = in_background
        self._writer = WriterProcess()
        self._unnamed: _Unnamed | None = None

    def save(self, position: Position, *, wait: bool) -> None:
        """Write checkpoint `position.iteration`, after waiting for one that is still being written; collective.

        Args:
            wait: return when it has its name, also if saving is in the background.

        Raises:
            CheckpointError: a rank cannot write this one or the previous one; the same on every rank.
        """
        assert self._save_dir is not None
        save_dir = self._save_dir
        self.finish()
        started_s = time.perf_counter()
        trainable, in_background = self._trainable, self._in_background and not wait
        if trainable.gathers_params:
            for chunk in trainable.wrapped:
                chunk.disable_forward_pre_hook(param_sync=True)
        partial = run_on_rank_zero(lambda: str(checkpoint_files.begin(save_dir, position.iteration)), Path)
        run = _run_values(trainable, position)
        with self._reporting(position.iteration):
            self._writer.start(self._request(partial, position))
        if trainable.gathers_params:
            for chunk in trainable.wrapped:
                chunk.enable_forward_pre_hook()
        self._unnamed = _Unnamed(
            folder=partial,
            iteration=position.iteration,
            run=run,
            started_s=started_s,
            blocked_s=time.perf_counter() - started_s,
        )
        if in_background:
            logger.info("writing %s beside the training", partial)
        else:
            self.finish()

    @property
    def has_unnamed(self) -> bool:
        """Whether a checkpoint waits for its name; the same on all ranks."""
        return self._unnamed is not None

    def is_writing(self) -> bool:
        """Return whether this rank's files are still being written; to be exchanged before `finish`."""
        return self._writer.is_writing()

    def finish(self) -> None:
        """Name the checkpoint that is being written, after waiting for the files of all ranks; collective.

        Raises:
            CheckpointError: a rank could not write; the same on every rank.
        """
        if self._unnamed is None:
            return
        waits_since_s = time.perf_counter()
        iteration = self._unnamed.iteration
        try:
            with self._reporting(iteration), span("naming the checkpoint"):
                # All ranks ask until the last is done, so that no collective is open for as long as a disk takes.
                pause_s = _FIRST_LOOK_UP_S
                while not self._writer.finalized():
                    time.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, _LOOK_UP_S)
        except BaseException:
            self._unnamed = None
            raise
        self._name(time.perf_counter() - waits_since_s)

    def _name(self, waited_s: float = 0.0) -> None:
        """Name and report the checkpoint whose files are written; collective."""
        assert self._unnamed is not None
        unnamed, self._unnamed = self._unnamed, None
        named_since_s = time.perf_counter()
        files = _of_all_ranks(self._writer.files)
        folder = run_on_rank_zero(
            lambda: str(checkpoint_files.commit(unnamed.folder, unnamed.iteration, unnamed.run, files))
        )
        now_s = time.perf_counter()
        held_up_s = unnamed.blocked_s + waited_s + now_s - named_since_s
        logger.info("saved %s in %.1f s, training waited %.1f s", folder, now_s - unnamed.started_s, held_up_s)

    def _request(self, partial: Path, position: Position) -> AsyncRequest:
        """Return how megatron-core writes the state of this rank, after planning that with the others."""
        state = sharded_model(self._trainable)
        state["optimizer"] = optimizer_state.sharded_for_save(self._trainable.optimizer, state)
        state["rng"] = sharded_rng(rng_state())
        state |= interchange.values_for_megatron_lm(
            self._trainable.arguments,
            position.iteration,
            position.consumed_samples,
            self._trainable.scheduler.state_dict(),
            position.coefficients,
        )
        self._writer.expect_results()
        return dist_checkpointing.save(
            state,
            str(partial),
            TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            async_sharded_save=True,
            content_metadata=dict(interchange.CONTENT_METADATA),
            **({"async_strategy": "mcore"} if releases.ASYNC_STRATEGIES.here else {}),
        )

    def _reporting(self, iteration: int) -> Any:
        assert self._save_dir is not None
        what = f"--save {self._save_dir}: checkpoint {iteration}"
        return reporting(what, self._save_dir, "written", "free space or choose another")


def _of_all_ranks(files: dict[str, FileRecord]) -> dict[str, FileRecord]:
    """Return what all ranks wrote; collective.

    Args:
        files: what this rank wrote, by name.
    """
    united: dict[str, FileRecord] = {}
    for message in all_gather_bytes(json.dumps(files).encode(), collective_device()):
        united |= json.loads(message)
    return united


def _run_values(trainable: Trainable, position: Position) -> dict[str, Any]:
    """Return what the manifest says of the run at this moment."""
    return {
        "iteration": position.iteration,
        "consumed_samples": position.consumed_samples,
        "coefficients": position.coefficients,
        "scheduler": trainable.scheduler.state_dict(),
        "optimizer_kind": optimizer_state.kind(trainable.optimizer),
        "identity": dict(trainable.identity),
        "layout": dict(trainable.layout),
    }
