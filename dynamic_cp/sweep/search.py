"""Evaluates all settings, in several processes, and keeps those that no other beats in time and memory.

The result does not depend on the number of processes: settings are numbered, and ties go to the lower number.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.sweep.evaluate import Point, SweepJob, evaluate
from dynamic_cp.sweep.space import Refused, Setting, Space, layouts_of, settings_of
from dynamic_cp.types import CP_COMM_TYPES

_WORTH = 0.999
"""Choosing the exchange per bucket is another point only if it is faster than this factor."""

_CLOSE = 1.6
"""A layout this much slower than the fastest may still become it: what a hierarchy gains where one sample dominates."""

_WORTH_BYTES = 0.99
"""A slower setting is another point only if it needs less than this share of memory."""

Progress = Callable[[int, int, str], None]
_Evaluate = Callable[[Sequence[Setting], Callable[[], None]], list[Point | Refused]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep found.

    Attributes:
        front: settings that no other beats in both time and memory, the fastest first.
        num_evaluated: settings that were planned.
        refused: reason -> how many layouts or settings it ruled out, most frequent first.
    """

    front: tuple[Point, ...]
    num_evaluated: int
    refused: Mapping[str, int]

    @property
    def fastest(self) -> Point:
        """The recommended setting."""
        return self.front[0]


def sweep(
    space: Space,
    job: SweepJob,
    *,
    max_seqlen: int,
    limits: Sequence[int] | None = None,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> Sweep:
    """Return the best settings of `space` for `job`; the same for any `num_processes`.

    Args:
        space: values to try.
        job: batches, model, hardware.
        max_seqlen: longest sample that the run must hold (tokens).
        limits: limits of tokens per rank; None = follow from memory.
        num_processes: how many evaluate at once.
        progress: called with (done, all, what).

    Raises:
        MemoryLimitError: nothing fits; the message counts why.
        InvalidInputError: hardware without a size of memory.
    """
    refused: Counter[str] = Counter()
    settings: list[Setting] = []
    for layout in layouts_of(space, job.model):
        if isinstance(layout, Refused):
            refused[layout.reason] += 1
            continue
        found = settings_of(
            *layout,
            model=job.model,
            hardware=job.hardware,
            max_seqlen=max_seqlen,
            distributed_optimizer=job.distributed_optimizer,
            limits=limits,
            policy=job.policy,
        )
        if isinstance(found, Refused):
            refused[found.reason] += 1
        else:
            settings += found
    report = progress or (lambda done, total, text: None)
    with _evaluator(job, min(num_processes, len(settings))) as run:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            report(done, len(settings) + 1, "settings")

        report(0, len(settings) + 1, "settings")
        points = _points(run(settings, count), refused)
        front = pareto_front(points)
        before = {
            replace(point.setting, cp_comm_types=CP_COMM_TYPES): point.iteration_s
            for point in _worth_another_try(points)
        }
        free = _points(run(list(before), lambda: None), Counter())
        faster = [point for point in free if point.iteration_s < _WORTH * before[point.setting]]
        report(len(settings) + 1, len(settings) + 1, "settings")
    if not front:
        reasons = ", ".join(f"{reason} ({number})" for reason, number in refused.most_common())
        raise MemoryLimitError(
            f"none of the settings can run on {space.num_gpus} GPUs: {reasons or 'there are none'}; use more GPUs, "
            "shorter samples or another model",
            num_gpus=space.num_gpus,
        )
    return Sweep(
        front=pareto_front([*points, *faster]),
        num_evaluated=len(settings) + len(before),
        refused=dict(refused.most_common()),
    )


def _worth_another_try(points: Sequence[Point]) -> list[Point]:
    """Return the points that the exchange may put in front: the front, and the best limit of every close layout."""
    chosen = {point.setting: point for point in pareto_front(points)}
    layouts: set[object] = set()
    for point in sorted(points, key=lambda one: one.iteration_s):
        if point.iteration_s > _CLOSE * min(one.iteration_s for one in points):
            break
        layout = (point.setting.topology, point.setting.recompute)
        if layout not in layouts:
            layouts.add(layout)
            chosen.setdefault(point.setting, point)
    return list(chosen.values())


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points that no other equals or beats in both time and memory, the fastest first.

    A slower point is kept only if it saves memory that is worth a line.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.iteration_s, one.peak_bytes)):  # stable: ties keep their order
        if not front or point.peak_bytes < _WORTH_BYTES * front[-1].peak_bytes:
            front.append(point)
    return tuple(front)


def _points(results: Sequence[Point | Refused], refused: Counter[str]) -> list[Point]:
    for result in results:
        if isinstance(result, Refused):
            refused[result.reason] += 1
    return [result for result in results if isinstance(result, Point)]


@contextmanager
def _evaluator(job: SweepJob, num_processes: int) -> Iterator[_Evaluate]:
    """Yield a function that evaluates settings in order, here or in other processes."""
    if num_processes <= 1:
        yield lambda settings, count: [_counted(evaluate(setting, job), count) for setting in settings]
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads that draw the progress
    with _nothing_from_the_working_folder():
        pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_start, initargs=(job,))

        def run(settings: Sequence[Setting], count: Callable[[], None]) -> list[Point | Refused]:
            futures = [pool.submit(_evaluate_here, setting) for setting in settings]
            for _ in as_completed(futures):
                count()
            return [future.result() for future in futures]

        try:
            yield run
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _nothing_from_the_working_folder() -> Iterator[None]:
    """Have Python processes that are started meanwhile not look for modules there: it may be a folder of others' data.

    Limits: Python 3.10 looks there all the same, before it gets the path of this process.
    """
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _counted(result: Point | Refused, count: Callable[[], None]) -> Point | Refused:
    count()
    return result


_job: SweepJob | None = None
"""In a worker process: what it evaluates."""


def _start(job: SweepJob) -> None:
    global _job
    _job = job


def _evaluate_here(setting: Setting) -> Point | Refused:
    assert _job is not None
    return evaluate(setting, _job)
