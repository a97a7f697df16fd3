"""Seconds of a forward and a backward pass, as little disturbed as can be.

On CUDA events, on CPU the clock. What is reported:

    CUDA                           median over calls
    CPU, one rank                  a low quantile over calls: what another program delayed does not count
    CPU, several ranks at once     means over windows in which all ranks compute, then a low quantile over windows.
                                   Ranks that share cores wait for one another, and that belongs to a step; the fastest
                                   single calls would be those that had a core for themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Forward = Callable[[], Any]
Backward = Callable[[Any], Any]

_WARM_UP_CALLS = 3
_LOW_QUANTILE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """How long and how often to measure.

    Attributes:
        device: where the passes run.
        window_s: of one window; calls go on until it is over, on all ranks.
        num_windows: windows of a measurement.
        alone: no other rank measures.
    """

    device: torch.device
    window_s: float
    num_windows: int
    alone: bool

    def passes(self, forward: Forward, backward: Backward | None = None) -> tuple[float, float]:
        """Return the seconds of `forward()` and of `backward(what forward returned)`, in turns as in training.

        Collective over all ranks, if there are several.
        """
        run_backward = backward or (lambda _: None)
        for _ in range(_WARM_UP_CALLS if self.device.type == "cuda" else 1):
            run_backward(forward())
        if self.device.type == "cuda":
            windows = [self._window_on_gpu(forward, run_backward) for _ in range(self.num_windows)]
        else:
            windows = [self._window_on_cpu(forward, run_backward) for _ in range(self.num_windows)]
        if self.alone:
            calls = np.concatenate(windows)
            quantile = 0.5 if self.device.type == "cuda" else _LOW_QUANTILE
            seconds = np.quantile(calls, quantile, axis=0)
        else:
            middle = np.median if self.device.type == "cuda" else np.mean
            of_windows = torch.tensor(np.stack([middle(window, axis=0) for window in windows]), dtype=torch.float64)
            seconds = np.quantile(mean_over_ranks(of_windows), _LOW_QUANTILE, axis=0)
        return float(seconds[0]), float(seconds[1]) if backward is not None else 0.0

    def turns(self, run: Callable[[], Any], num_turns: int) -> float:
        """Return the seconds of `run()` where all ranks must call it equally often. Collective."""
        run()
        found = []
        for _ in range(self.num_windows):
            self._start_together()
            started = time.perf_counter()
            for _ in range(num_turns):
                run()
            self._finish()
            found.append((time.perf_counter() - started) / num_turns)
        if self.alone:
            return float(np.quantile(found, _LOW_QUANTILE))
        return float(np.quantile(mean_over_ranks(torch.tensor(found, dtype=torch.float64)), _LOW_QUANTILE))

    def _start_together(self) -> None:
        self._finish()
        if not self.alone:
            dist.barrier()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _window_on_cpu(self, forward: Forward, backward: Backward) -> np.ndarray:
        calls = []
        self._start_together()
        ends = time.perf_counter() + self.window_s
        while not calls or time.perf_counter() < ends:
            started = time.perf_counter()
            output = forward()
            middle = time.perf_counter()
            backward(output)
            calls.append((middle - started, time.perf_counter() - middle))
        return np.array(calls)

    def _window_on_gpu(self, forward: Forward, backward: Backward) -> np.ndarray:
        """Record events only; the host waits at the end. A few calls at least, at most as many as the window holds."""
        marks = []
        self._start_together()
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


def mean_over_ranks(seconds: torch.Tensor) -> np.ndarray:
    """Return the mean of `seconds` over all ranks, on each of them. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    total = seconds.to(device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).cpu().numpy()
