"""Seconds of a forward and a backward pass, with as little disturbance as possible.

    CUDA                    median over calls, by events
    CPU, one thread         CPU seconds of the process, which exclude other programs; a low quantile over calls
    CPU, several threads    the same by the wall clock
    operations that wait    by the wall clock, a low quantile over windows
    whole micro-batches     by the wall clock until the last rank is done; the median over windows, a usual step's time

If N measuring ranks share C < N cores, CPU seconds are multiplied by N / C, because in a step all ranks are busy. Ranks
share caches and hyperthreads while they measure, so the results include that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dynamic_cp.arrays import Floats
from dynamic_cp.decide.calibration.measurements import Measurement
from megatron.dynamic_cp.agreement.verify import collective_device

Forward = Callable[[], Any]
Backward = Callable[[Any], Any]

_WARM_UP_CALLS = 3
_LOW_QUANTILE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Something to measure.

    Attributes:
        row: what it is; its seconds are filled in.
        forward, backward: the passes; backward gets what forward returned.
        num_calls: calls of forward per window, on all ranks; 0: as many as the window holds.
        waits: whether it waits for other ranks.
        as_in_a_step: take the usual time, disturbances included.
        takes_part: whether this rank's seconds count.
    """

    row: Measurement
    forward: Forward
    backward: Backward | None = None
    num_calls: int = 0
    waits: bool = False
    as_in_a_step: bool = False
    takes_part: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """How long and how often to measure.

    Attributes:
        window_s: seconds of a window; calls go on until it is over, on all ranks.
        num_windows: windows of a measurement.
        alone: no other rank measures.
        ranks_per_core: measuring ranks per core, at least 1.
    """

    device: torch.device
    window_s: float
    num_windows: int
    alone: bool
    ranks_per_core: float = 1.0

    def measure(self, probes: Sequence[Probe], tell: Callable[[str], None] = lambda text: None) -> list[Measurement]:
        """Return the rows of `probes` with their seconds. Collective over all ranks. Probes take turns window by
        window, so a disturbance of a second hits one window of several probes, not all windows of one.
        """
        for probe in probes:
            for _ in range(_WARM_UP_CALLS if self.device.type == "cuda" else 1):
                _backward_of(probe)(probe.forward())
        windows: list[list[Floats]] = [[] for _ in probes]
        for window in range(self.num_windows):
            for index, probe in enumerate(probes):
                tell(f"{window * len(probes) + index + 1} of {self.num_windows * len(probes)}")
                windows[index].append(self._window(probe))
        return [self._row(probe, found) for probe, found in zip(probes, windows, strict=True)]

    def _row(self, probe: Probe, windows: list[Floats]) -> Measurement:
        """Return the row with the seconds of its windows, each [calls, forward | backward]."""
        on_gpu = self.device.type == "cuda"
        quantile = 0.5 if on_gpu or probe.as_in_a_step else _LOW_QUANTILE
        if self.alone or on_gpu:
            seconds = np.quantile(np.concatenate(windows), quantile, axis=0)
            seconds = seconds if self.alone else mean_over_ranks(seconds, probe.takes_part)
        else:
            means = np.stack([window.mean(axis=0) for window in windows])
            means = max_over_ranks(means) if probe.as_in_a_step else mean_over_ranks(means, probe.takes_part)
            shared = self.ranks_per_core if self._in_cpu_seconds(probe) else 1.0
            seconds = shared * np.quantile(means, quantile, axis=0)
        return replace(probe.row, forward_s=float(seconds[0]), backward_s=float(seconds[1]) if probe.backward else 0.0)

    def _window(self, probe: Probe) -> Floats:
        self._start_together()
        now = time.process_time if self._in_cpu_seconds(probe) else time.perf_counter
        if probe.num_calls:
            started = now()
            for _ in range(probe.num_calls):
                probe.forward()
            self._finish()
            return np.array([[(now() - started) / probe.num_calls, 0.0]])
        if self.device.type == "cuda":
            return self._on_gpu(probe.forward, _backward_of(probe))
        return self._on_cpu(probe.forward, _backward_of(probe), now)

    def _in_cpu_seconds(self, probe: Probe) -> bool:
        return self.device.type == "cpu" and torch.get_num_threads() == 1 and not (probe.waits or probe.as_in_a_step)

    def _start_together(self) -> None:
        self._finish()
        if not self.alone:
            dist.barrier()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _on_cpu(self, forward: Forward, backward: Backward, now: Callable[[], float]) -> Floats:
        calls = []
        ends = time.perf_counter() + self.window_s
        while not calls or time.perf_counter() < ends:
            started = now()
            output = forward()
            middle = now()
            backward(output)
            calls.append((middle - started, now() - middle))
        return np.array(calls)

    def _on_gpu(self, forward: Forward, backward: Backward) -> Floats:
        """Time by events; the host waits only at the end. At least 3 calls, at most 50 or what the window holds."""
        marks = []
        ends = time.perf_counter() + self.window_s
        while len(marks) < 3 or (time.perf_counter() < ends and len(marks) < 50):
            three = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            three[0].record()
            output = forward()
            three[1].record()
            backward(output)
            three[2].record()
            marks.append(three)
            if len(marks) % 8 == 0:
                three[2].synchronize()  # so that the window ends in time
        self._finish()
        return np.array([[a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3] for a, b, c in marks])


def _backward_of(probe: Probe) -> Backward:
    return probe.backward or (lambda output: None)


def max_over_ranks(seconds: Floats) -> Floats:
    """Return the largest of `seconds` on any rank, element by element. Collective."""
    found = torch.from_numpy(seconds.copy()).to(collective_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return np.asarray(found.cpu().numpy())


def mean_over_ranks(seconds: Floats, takes_part: bool) -> Floats:
    """Return the mean of `seconds` over the ranks that take part, at least one, on all ranks. Collective."""
    mine = np.append(seconds.ravel(), 1.0) if takes_part else np.zeros(seconds.size + 1)
    total = torch.from_numpy(mine).to(collective_device())
    dist.all_reduce(total)
    sums = total.cpu().numpy()
    return np.asarray(sums[:-1] / sums[-1]).reshape(seconds.shape)
