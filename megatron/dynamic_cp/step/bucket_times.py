"""Seconds that each micro-batch takes on each model chunk of this rank, forward and backward, and over the job.

    times = BucketTimes(model, stage=..., lane=..., device=...)
    run_schedule(..., forward_step_func=times.forward_step)     # every step
    own = times.end_step()                                      # after something that waited for the device
    observations = times.gather()                               # now and then; collective

Forward lasts from the moment the micro-batch is there to the end of the chunk, loss included, without waiting for a
pipeline neighbour. Backward lasts from the first gradient (a hook on the chunk's output) to the end of this call of the
autograd engine (its final callback), recomputation included. The measurement never waits: on CUDA it records events and
reads them after the step, on CPU it reads the clock; about 30 microseconds per micro-batch. A rank also waits for its
CP peers. The last lane waits least, so the smallest time over lanes and TP ranks is the time of the bucket.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Variable

from dynamic_cp.errors import DisagreementError
from dynamic_cp.learning.observations import Observation
from dynamic_cp.pricing.work import squared_tokens
from dynamic_cp.types import TRAITS, ModelShape, Sample
from megatron.dynamic_cp.agreement.verify import collective_device
from megatron.dynamic_cp.step import schedule

ForwardStep = Callable[[Iterator[dict[str, Any]], torch.nn.Module], tuple[Tensor, Callable[..., Any]]]
Mark = Any
"""A moment: seconds on CPU, an event of the stream on CUDA."""

_KEYS = (
    *("step", "micro_batch", "stage", "chunk", "first_lane", "cp_size", "exchange", "inner_cp_size"),
    *("tokens", "tokens_squared", "num_states"),
)
"""Columns that are the same on all ranks that share a bucket on a chunk."""
_COLUMNS = (*_KEYS, "forward_s", "backward_s")
_EXCHANGES = tuple(TRAITS)
"""A mechanism's place here is its number in a row of figures."""


@dataclass(slots=True)
class _Timed:
    """One micro-batch on one chunk: its `_KEYS` behind the step, and start and end of both passes."""

    micro_batch: int
    chunk: int
    keys: tuple[float, ...]
    forward: list[Mark]
    backward: list[Mark]


class BucketTimes:
    """Times the micro-batches of this rank, which has `stage` and `lane` and computes on `device`. Windows of `shape`
    count in the squared tokens. `forward_step` runs one micro-batch; `gather` sees the latest `keep_steps` steps."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        *,
        stage: int,
        lane: int,
        device: torch.device,
        shape: ModelShape,
        forward_step: ForwardStep = schedule.forward_step,
        keep_steps: int = 4,
    ) -> None:
        self._chunk_of = {id(chunk): index for index, chunk in enumerate(model)}
        self._stage, self._lane = stage, lane
        self._on_gpu = device.type == "cuda"
        self._forward_step = forward_step
        self._shape = shape
        self._timed: list[_Timed] = []
        self._num_started: defaultdict[int, int] = defaultdict(int)
        self._steps: deque[NDArray[np.float64]] = deque(maxlen=keep_steps)
        self._num_steps = 0
        self._origin: tuple[Mark, float] | None = None

    def forward_step(
        self, data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Run and time the next micro-batch, as megatron-core's schedules call it; evaluation is not timed."""
        if not torch.is_grad_enabled():
            return self._forward_step(data_iterator, model)
        started: list[_Timed] = []

        def watched() -> Iterator[dict[str, Any]]:
            for batch in data_iterator:
                started.append(self._start(self._chunk_of[id(model)], batch["packed_seq_params"]))
                yield batch

        output, loss_func = self._forward_step(watched(), model)
        (timed,) = started
        timed.forward[1:] = [self._mark()]
        hook = output.register_hook(partial(self._start_backward, timed))

        def timed_loss(*args: Any, **kwargs: Any) -> Any:
            """Only for the last stage: the loss belongs to its forward pass, and backward starts from it."""
            outputs = loss_func(*args, **kwargs)
            timed.forward[1:] = [self._mark()]
            hook.remove()
            outputs[0].register_hook(partial(self._start_backward, timed))
            return outputs

        return output, timed_loss

    def spans(self) -> list[list[Any]]:
        """Return [chunk, micro-batch, "F" or "B", start, seconds] of every pass since the last `end_step`. Starts are
        seconds since 1970 by this host's clock; those of several hosts agree as well as their clocks do."""
        if self._origin is None:
            return []
        mark, wall_s = self._origin
        return [
            [timed.chunk, timed.micro_batch, kind, wall_s + self._seconds((mark, marks[0])), self._seconds(marks)]
            for timed in self._timed
            for kind, marks in (("F", timed.forward), ("B", timed.backward))
            if len(marks) == 2
        ]

    def end_step(self) -> list[Observation]:
        """Return this rank's times since the last call, waits for CP peers included, and keep them for `gather`. Call
        it where the host has waited for the device anyway; otherwise on CUDA it waits for the last backward pass."""
        rows = np.array([self._row(timed) for timed in self._timed], np.float64).reshape(-1, len(_COLUMNS))
        self._steps.append(rows)
        self._num_steps += 1
        self._timed.clear()
        self._num_started.clear()
        self._origin = None
        return _observations(rows)

    def gather(self, max_observations: int = 4096) -> list[Observation]:
        """Return the times of all buckets of the kept steps, the least over the ranks that share one; then forget them.
        The same list on every rank; of more than `max_observations` an even selection. Collective over the job: 104
        bytes per rank, micro-batch, chunk and step. Raises DisagreementError: ranks have timed different numbers of
        micro-batches; on every rank."""
        mine = np.concatenate([*self._steps, np.zeros((0, len(_COLUMNS)))])
        self._steps.clear()
        device = collective_device()
        extremes = torch.tensor([len(mine), -len(mine)], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        most, least = extremes.tolist()
        fewest = -least
        if most != fewest:
            raise DisagreementError(
                f"ranks timed {fewest} to {most} micro-batches: all must call BucketTimes for the same steps"
            )
        gathered = torch.empty((dist.get_world_size() * len(mine), len(_COLUMNS)), dtype=torch.float64, device=device)
        if len(mine):
            dist.all_gather_into_tensor(gathered, torch.from_numpy(mine).to(device))
        rows = least_of_equal_keys(gathered.cpu().numpy())
        if len(rows) > max_observations:
            rows = rows[np.linspace(0, len(rows) - 1, max_observations).astype(np.int64)]
        return _observations(rows)

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _start(self, chunk: int, params: Any) -> _Timed:
        if self._origin is None:
            self._origin = self._mark(), time.time()
        micro_batch, cp_size = self._num_started[chunk], params.local_cp_size
        keys = (
            *(micro_batch, self._stage, chunk, self._lane // cp_size * cp_size, cp_size),
            *(_EXCHANGES.index(params.cp_comm_type), params.inner_cp_size),
            *(sum(params.padded_seqlens), _tokens_squared(params, self._shape), _num_states(params)),
        )
        timed = _Timed(micro_batch, chunk, keys, [self._mark()], [])
        self._num_started[chunk] += 1
        self._timed.append(timed)
        return timed

    def _start_backward(self, timed: _Timed, _: Tensor) -> None:
        timed.backward = [self._mark()]
        # The engine calls this when the whole backward pass that the hook belongs to is done.
        Variable._execution_engine.queue_callback(lambda: timed.backward.append(self._mark()))

    def _row(self, timed: _Timed) -> list[float]:
        """Return the columns, NaN for a pass that did not end."""
        return [self._num_steps, *timed.keys, self._seconds(timed.forward), self._seconds(timed.backward)]

    def _seconds(self, marks: Sequence[Mark]) -> float:
        if len(marks) != 2:
            return float("nan")
        start, end = marks
        if not self._on_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end) / 1e3)


def _num_states(params: Any) -> float:
    """Return as how many samples a micro-batch counts whose states are passed on, 0: none are; branches count, too."""
    if params.state_exchange != "states":
        return 0.0
    if params.masked_samples is None:
        return float(len(params.seqlens))
    from dynamic_cp.plans.stretches import states_of_sample  # few jobs pass on states of branches

    return sum(states_of_sample(sample, params.local_cp_size) for sample in params.masked_samples)


def _tokens_squared(params: Any, shape: ModelShape) -> int:
    samples = params.masked_samples
    if samples is None and shape.window is not None:
        samples = [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(params.seqlens)]
    if samples is None:
        return sum(seqlen * seqlen for seqlen in params.padded_seqlens)
    return round(squared_tokens(samples, params.padded_seqlens, shape))


def least_of_equal_keys(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one row for each bucket on each chunk, sorted, with the least seconds of its ranks (NaN if all are)."""
    if not len(rows):
        return rows
    keys, place = np.unique(rows[:, : len(_KEYS)], axis=0, return_inverse=True)
    least = np.full((len(keys), rows.shape[1] - len(_KEYS)), np.nan)
    np.fmin.at(least, place.reshape(-1), rows[:, len(_KEYS) :])
    return np.concatenate([keys, least], axis=1)


def _observations(rows: NDArray[np.float64]) -> list[Observation]:
    columns = [dict(zip(_COLUMNS, row, strict=True)) for row in rows.tolist()]
    counts = ("cp_size", "first_lane", "inner_cp_size", "tokens", "tokens_squared", "stage", "chunk")
    return [
        Observation(
            cp_comm_type=_EXCHANGES[int(column["exchange"])],
            **{name: int(column[name]) for name in counts},
            **{name: column[name] for name in ("forward_s", "backward_s", "num_states")},
        )
        for column in columns
    ]
