"""Writes checkpoints: the files of all ranks, then the manifest, then the folder's name (checkpoint_files.py).

Each rank forks a process that writes and hashes its files. Training waits for it, or goes on with --async-save; between
two iterations all ranks then learn whether the last process is done, and name the checkpoint together. Until then the
folder is a `.partial` one, which is never read.

A forked process, unlike a spawned one, sees the tensors as they are at that moment and imports nothing. Host tensors
are copied on write. Device tensors are first copied to page-locked memory, which both processes share; the rank keeps
it until the files are written, or torch would reuse it (see NVIDIA/Megatron-LM#2288). The process does not touch CUDA
and leaves signals to its rank. It holds its rank's connections, so it dies with its rank; otherwise peers would take a
dead rank for alive. The rank checks whether it lives instead of waiting for a message, because it may be killed for
lack of memory.
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

from dynamic_cp import __version__
from dynamic_cp.search.planner_process import die_with_parent
from megatron.dynamic_cp.agreement.messages import all_gather_bytes
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_rank_zero
from megatron.dynamic_cp.data.prefetch import keep_what_forks_inherit
from megatron.dynamic_cp.measuring import span
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
    """The results of the process, in an anonymous file: of any size, and gone when nobody has it open.

    It replaces megatron-core's queue, which lives in a manager process that imports the program again and outlives a
    killed rank. `files` has the records of the written files after `get_nowait`, {} before.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as this

    def put(self, results: Any, files: Mapping[str, FileRecord] = MappingProxyType({})) -> None:
        """Write the results, or the exception that replaces them."""
        pickle.dump((results, dict(files)), self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results, or an exception if the process ended before it wrote them."""
        self._file.seek(0)
        try:
            results, self.files = pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("the process that wrote it ended before it was done: killed, or out of memory?")
        return results


def expect_results() -> WriteResults:
    """Return a new `WriteResults`, which takes the results of megatron-core's next request."""
    results = filesystem_async._results_queue = WriteResults()
    return results


class WriterProcess:
    """Writes at most one request at a time."""

    def __init__(self) -> None:
        self._calls = AsyncCallsQueue()
        self._results = WriteResults()
        self._staged: Any = None

    def expect_results(self) -> None:
        """Make this object receive the results of megatron-core's next request."""
        self._results = expect_results()

    def start(self, request: AsyncRequest) -> None:
        """Copy device tensors and start to write; on all ranks."""
        keep_what_forks_inherit()
        function = request.async_fn
        if function is not None:
            # megatron-core forks a process for every file, which could be killed unnoticed.
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
        if not self._calls.async_calls:
            return False
        caller = self._calls.async_calls[0].async_caller
        return not caller.is_current_async_call_done(blocking=False, no_dist=True)

    def finalized(self) -> bool:
        """Return whether all have written, and finalize once; CheckpointException on all if one cannot. Collective."""
        self._calls.maybe_finalize_async_calls(blocking=False)
        if self._calls.get_num_unfinalized_calls():
            return False
        self._staged = None
        return True

    @property
    def files(self) -> dict[str, FileRecord]:
        """Records of this rank's files of the last finalized request, by name."""
        return self._results.files


def _write_all(parent: int, transforms: list[Any], _rank: int, buckets: Sequence[Any], results: WriteResults) -> None:
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
        started.put(index)  # the writing function takes an item out for each file
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
    folder: Path
    iteration: int
    run: dict[str, Any]
    started_s: float
    blocked_s: float


class Saver:
    """Writes checkpoints of a run below `save_dir` (None: none). A crash at any time leaves the previous one in place.
    With `in_background` the run goes on while files are written."""

    def __init__(self, trainable: Trainable, save_dir: str | None, *, in_background: bool) -> None:
        self._trainable = trainable
        self._save_dir = save_dir
        self._in_background = in_background
        self._writer = WriterProcess()
        self._unnamed: _Unnamed | None = None

    def save(self, position: Position, *, wait: bool) -> None:
        """Write checkpoint `position.iteration`, after waiting for the previous one; collective.

        With `wait`, return only once it has its name, even if saving is in the background. CheckpointError on every
        rank if one cannot write this checkpoint or the previous one.
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
        """Return whether this rank's files are still being written; ranks exchange this before `finish`."""
        return self._writer.is_writing()

    def finish(self) -> None:
        """Wait for all ranks' files and name the checkpoint; CheckpointError on all ranks if one failed. Collective."""
        unnamed, self._unnamed = self._unnamed, None
        if unnamed is None:
            return
        waits_since_s = time.perf_counter()
        with self._reporting(unnamed.iteration), span("naming the checkpoint"):
            # All ranks poll until the last one is done, so that no collective stays open while a disk is slow.
            pause_s = _FIRST_LOOK_UP_S
            while not self._writer.finalized():
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LOOK_UP_S)
        files = _of_all_ranks(self._writer.files)
        folder = run_on_rank_zero(
            lambda: str(checkpoint_files.commit(unnamed.folder, unnamed.iteration, unnamed.run, files))
        )
        now_s = time.perf_counter()
        held_up_s = unnamed.blocked_s + now_s - waits_since_s
        logger.info("saved %s in %.1f s, training waited %.1f s", folder, now_s - unnamed.started_s, held_up_s)

    def _request(self, partial: Path, position: Position) -> AsyncRequest:
        """Return megatron-core's request to write this rank's state; the ranks plan it together."""
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
    united: dict[str, FileRecord] = {}
    for message in all_gather_bytes(json.dumps(files).encode(), collective_device()):
        united |= json.loads(message)
    return united


def _run_values(trainable: Trainable, position: Position) -> dict[str, Any]:
    return {
        "version": __version__,
        "iteration": position.iteration,
        "consumed_samples": position.consumed_samples,
        "coefficients": position.coefficients,
        "scheduler": trainable.scheduler.state_dict(),
        "optimizer_kind": optimizer_kind(trainable.optimizer),
        "identity": dict(trainable.identity),
        "layout": dict(trainable.layout),
    }
