"""The files of a checkpoint, written and hashed by a process that the rank forks, whether training waits or goes on.

Forked and not spawned: it sees the tensors as they are at that moment and has nothing to import. Tensors of the host
are copied on write. Those of a device are copied to page-locked memory before, which the processes share: the rank
keeps it until the files are written, or torch would put something else into it (as in NVIDIA/Megatron-LM#2288).

The process does not touch CUDA, nothing else runs in it, and it leaves signals to its rank. It dies with its rank,
because it holds the rank's connections: peers would take a dead rank for alive. The rank looks whether it lives instead
of waiting for its word: it may be killed where memory is short.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from dynamic_cp.search.planner_process import die_with_parent
from megatron.dynamic_cp.data.prefetch import keep_what_forks_inherit
from megatron.trainer.checkpoints.content_hash import FileRecord, HashedFile
from megatron.trainer.ending.exits import EXIT_SIGNALS


class WriteResults:
    """What the process says at its end, through a file in memory: of any size, and gone with the last that has it open.

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
    filesystem_async._results_queue = WriteResults()
    return filesystem_async._results_queue


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
        """What this rank wrote for the request that was finalized last, by name."""
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
