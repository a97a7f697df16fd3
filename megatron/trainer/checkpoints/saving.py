"""Writing checkpoints: the files of all ranks, then a manifest, then the name (checkpoint_files.py).

A process that each rank forks writes and hashes its files. Training waits for it, or with --async-save goes on, and
between two iterations all ranks hear whether the last of them is done. Then they name and report the checkpoint in
lock-step. Until then the folder is a `.partial` one, which nothing reads.

Forked and not spawned: the process sees the tensors as they are at that moment and has nothing to import. Tensors of
the host are copied on write. Those of a device are copied to page-locked memory before, which the processes share: the
rank keeps it until the files are written, or torch would put something else into it (as in NVIDIA/Megatron-LM#2288).

The process does not touch CUDA, nothing else runs in it, and it leaves signals to its rank. It dies with its rank,
because it holds the rank's connections: peers would take a dead rank for alive. The rank looks whether it lives instead
of waiting for its word: it may be killed where memory is short.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import queue
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from dynamic_cp.search.planner_process import die_with_parent
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_rank_zero
from megatron.dynamic_cp.data.prefetch import keep_what_forks_inherit
from megatron.dynamic_cp.measuring.nvtx import span
from megatron.dynamic_cp.repairs import releases
from megatron.trainer.checkpoints import checkpoint_files, interchange
from megatron.trainer.checkpoints.checkpoint_files import reporting
from megatron.trainer.checkpoints.manifest import FileRecord, HashedFile
from megatron.trainer.checkpoints.state import (
    Position,
    Trainable,
    optimizer_kind,
    rng_state,
    sharded_model,
    sharded_optimizer,
    sharded_rng,
)
from megatron.trainer.ending.exits import EXIT_SIGNALS

logger = logging.getLogger(__name__)


class WriteResults:
    """The results of the process, in a file in memory: of any size, and gone with the last that has it open.

    In place of megatron-core's queue, which lives in a manager process that imports the program anew and outlives a
    rank that is killed.

    Attributes:
        files: records of those that were written; {} until `get_nowait`.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as this

    def put(self, results: Any, files: Mapping[str, FileRecord] = MappingProxyType({})) -> None:
        """Write the results, or the exception that took their place."""
        pickle.dump((results, dict(files)), self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results that were put, or an exception when the process ended before that."""
        self._file.seek(0)
        try:
            results, self.files = pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("the process that wrote it ended before it was done: killed, or out of memory?")
        return results


def expect_results() -> WriteResults:
    """Have the next request of megatron-core bring its results in what is returned."""
    results = filesystem_async._results_queue = WriteResults()
    return results


class WriterProcess:
    """Writes at most one request at a time."""

    def __init__(self) -> None:
        self._calls = AsyncCallsQueue()
        self._results = WriteResults()
        self._staged: Any = None

    def expect_results(self) -> None:
        """Have the next request of megatron-core bring its results here."""
        self._results = expect_results()

    def start(self, request: AsyncRequest) -> None:
        """Copy what is on a device and start to write; on all ranks."""
        keep_what_forks_inherit()
        function = request.async_fn
        if function is not None:
            # A process of its own for every file, as megatron-core has it, could be killed unnoticed.
            transforms, *_ = function.args
            function = functools.partial(_write_all, os.getpid(), transforms)
        stage = request.preload_fn
        if stage is not None:

            def staged() -> Any:
                self._staged = stage()
                return self._staged

            request = request._replace(preload_fn=staged)
        self._calls.schedule_async_request(request._replace(async_fn=function))

    def is_writing(self) -> bool:
        """Return whether this rank's files are still being written."""
        if not self._calls.async_calls:
            return False
        caller = self._calls.async_calls[0].async_caller
        return not caller.is_current_async_call_done(blocking=False, no_dist=True)

    def finalized(self) -> bool:
        """Return whether all ranks have written their files; the first time that is so, finalize. Collective.

        Raises:
            CheckpointException: a rank could not write; on all ranks.
        """
        self._calls.maybe_finalize_async_calls(blocking=False)
        if self._calls.get_num_unfinalized_calls():
            return False
        self._staged = None
        return True

    @property
    def files(self) -> dict[str, FileRecord]:
        """Records of this rank's files of the request that was finalized last, by name."""
        return self._results.files


def _write_all(parent: int, transforms: list[Any], _rank: int, buckets: Sequence[Any], results: WriteResults) -> None:
    """Write this rank's files, in the forked process."""
    die_with_parent(parent)
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    opened: list[HashedFile] = []

    def open_hashed(path: str, _mode: str) -> HashedFile:
        opened.append(HashedFile(path))
        return opened[-1]

    filesystem_async.open = open_hashed  # type: ignore[attr-defined] of this process, which writes nothing else
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        started: queue.Queue[int] = queue.Queue()
        started.put(index)  # the function counts its files down in it
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcome, started, use_fsync=True)
        _, written_or_error = outcome.get()
        if isinstance(written_or_error, Exception):
            results.put(RuntimeError(f"{type(written_or_error).__name__}: {written_or_error}"), {})
            return
        written[index] = written_or_error
    results.put(written, {os.path.basename(file.name): file.record() for file in opened})


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
        """Return megatron-core's request to write the state of this rank, after planning it with the other ranks."""
        state = sharded_model(self._trainable)
        state["optimizer"] = sharded_optimizer(self._trainable.optimizer, state)
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
    """Return the files of all ranks; collective.

    Args:
        files: what this rank wrote, by name.
    """
    united: dict[str, FileRecord] = {}
    for message in all_gather_bytes(json.dumps(files).encode(), collective_device()):
        united |= json.loads(message)
    return united


def _run_values(trainable: Trainable, position: Position) -> dict[str, Any]:
    """Return the run values of the manifest, as they are at this moment."""
    return {
        "iteration": position.iteration,
        "consumed_samples": position.consumed_samples,
        "coefficients": position.coefficients,
        "scheduler": trainable.scheduler.state_dict(),
        "optimizer_kind": optimizer_kind(trainable.optimizer),
        "identity": dict(trainable.identity),
        "layout": dict(trainable.layout),
    }
