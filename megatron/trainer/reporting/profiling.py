"""`--profile`: records the iterations after --profile-step-start up to --profile-step-end on --profile-ranks.

    nsys profile -s none -t nvtx,cuda --capture-range=cudaProfilerApi --capture-range-end=stop ... --profile

marks the CUDA profiler's range and names work by NVTX ranges (`megatron.dynamic_cp.measuring`). With
`--use-pytorch-profiler`, torch.profiler writes a trace with these names instead, on CPU ranks, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from dynamic_cp.errors import InvalidInputError
from megatron.dynamic_cp import measuring
from megatron.trainer.flags.settings import ProfilingSettings

logger = logging.getLogger(__name__)


class Profiling:
    """Starts and stops the profiler between iterations; does nothing without --profile and on other ranks."""

    def __init__(self, settings: ProfilingSettings, tensorboard_dir: str | None, device: torch.device) -> None:
        """Raises InvalidInputError, the same on every rank, for NVTX ranges on a CPU, which nothing could record."""
        if settings.profile and not settings.use_pytorch_profiler and device.type == "cpu":
            raise InvalidInputError("--profile on CPU ranks has no CUDA profiler to mark: add --use-pytorch-profiler")
        self._first, self._last = settings.profile_step_start + 1, settings.profile_step_end
        self._folder = settings.profile_dir or tensorboard_dir
        self._record_shapes = settings.pytorch_profiler_collect_shapes
        self._with_stack = settings.pytorch_profiler_collect_callstack
        self._uses_pytorch = settings.use_pytorch_profiler
        self._wanted = settings.profile and dist.get_rank() in settings.profile_ranks
        self._recording: contextlib.ExitStack | None = None
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """Announce that `iteration` comes next. A resumed run may begin after the first iteration to profile."""
        if self._wanted and self._first <= iteration <= self._last and self._recording is None:
            self._wanted = False
            self._recording = contextlib.ExitStack()
            profiler = self._pytorch(iteration) if self._uses_pytorch else _cuda()
            self._recording.enter_context(profiler)
            self._recording.enter_context(_spans(measuring.PYTORCH if self._uses_pytorch else measuring.NVTX))
        self._iteration = iteration

    def end(self, iteration: int) -> None:
        """Announce that `iteration` is over."""
        if iteration >= self._last:
            self.close()

    def close(self) -> None:
        """Stop the recording and write the trace, if there is one."""
        if self._recording is not None:
            recording, self._recording = self._recording, None
            recording.close()

    @contextlib.contextmanager
    def _pytorch(self, first: int) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities, record_shapes=self._record_shapes, with_stack=self._with_stack
        )
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            path = trace_path(self._folder, dist.get_rank(), first, self._iteration)
            _export(profiler, path)


def trace_path(folder: str, rank: int, first: int, last: int) -> Path:
    """Return the trace file of a rank's iterations `first` to `last`, with a name that TensorBoard's profiler finds."""
    return Path(folder) / f"rank{rank:05d}_iterations_{first}-{last}.pt.trace.json"


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    """Write a trace. Only warn of an error, because peers do not see it and train on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        path.stat()  # torch does not report a failed write
    except OSError as error:
        logger.warning("the profile of rank %d cannot be written: %s", dist.get_rank(), error)
    else:
        logger.info("wrote the profile %s", path)


@contextlib.contextmanager
def _cuda() -> Iterator[None]:
    """Mark the range that `nsys profile --capture-range=cudaProfilerApi` captures."""
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()


@contextlib.contextmanager
def _spans(opener: measuring.Open) -> Iterator[None]:
    """Record spans with `opener`, and megatron-core's backward passes as spans, too."""
    backward_step = schedules.backward_step

    @functools.wraps(backward_step)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with measuring.span("backward pass"):
            return backward_step(*args, **kwargs)

    schedules.backward_step = recorded
    measuring.record_with(opener)
    try:
        yield
    finally:
        measuring.record_with(None)
        schedules.backward_step = backward_step
