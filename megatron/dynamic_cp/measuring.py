"""What a run measures of itself: named spans of the code for a profiler, NVTX ranges in Nsight Systems or ranges in a
trace of torch.profiler; free memory; and how long CPU ranks would take if the machine did nothing else.

    with span("ring step %d of %d", step, size):
        ...

Spans are off by default; one then costs a function call (about 0.2 us) and formats nothing. `record_with` switches them
on for this process, including threads of the autograd engine. docs/how-to/operate.md lists them, but for `naming the
checkpoint` of --async-save, which runs once its files are written.

If all cores that ranks may use are busy, the ranks lose exactly the time that other programs take. The system counts
the busy seconds of cores; those that the ranks did not spend went to others, including the hypervisor.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynamic_cp.types import Topology

Open = Callable[[str], AbstractContextManager[Any]]


class _Off:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()
_open: Open | None = None


def record_with(opener: Open | None) -> None:
    """Open every span with `opener(label)` from now on, such as NVTX or PYTORCH; None: record none."""
    global _open
    _open = opener


def span(label: str, *values: object) -> AbstractContextManager[Any]:
    """Return a context manager that records its body as `label % values`."""
    if _open is None:
        return _OFF
    return _open(label % values if values else label)


def bucket_span(what: str, params: Any) -> AbstractContextManager[Any]:
    """Return the span of `what` (such as "forward"), with a micro-batch's CP size, exchange and tokens per rank."""
    if _open is None:
        return _OFF
    num_tokens = sum(params.padded_seqlens) // params.local_cp_size
    return _open(f"{what}, cp {params.local_cp_size} {params.cp_comm_type}, {num_tokens} tokens")


def attention_backward(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Return the backward function of an autograd Function, whose context has `params`, with a span around it."""

    @functools.wraps(backward)
    def recorded(ctx: Any, grad: Tensor) -> Any:
        with bucket_span("attention backward", ctx.params):
            return backward(ctx, grad)

    return recorded


NVTX: Open = torch.cuda.nvtx.range
PYTORCH: Open = torch.profiler.record_function


_IDLE = (3, 4)
"""Columns of /proc/stat in which a core has nothing to do: idle, and waiting for a disk (proc(5))."""
_COLUMNS = 8
"""Further columns are parts of these: guests."""
_IDLE_SHARE = 0.1
"""Share of the cores: if this much was idle, no process lacked CPU time."""


def free_bytes(device: torch.device, *, swaps: bool = False) -> int | None:
    """Return the free bytes of the device, for a CPU with `swaps` its free swap, too; None if they cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counted = ("MemAvailable:", "SwapFree:") if swaps else ("MemAvailable:",)
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(counted)) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment on this rank's machine: seconds of a clock, CPU time of this process, and busy and idle seconds of the
    cores that it may use since the machine started, 0 where the system does not say."""

    wall_s: float
    process_s: float
    busy_s: float
    idle_s: float

    @classmethod
    def now(cls) -> Moment:
        busy_s, idle_s = _cores_s()
        return cls(wall_s=time.perf_counter(), process_s=time.process_time(), busy_s=busy_s, idle_s=idle_s)


def alone_s(elapsed_s: float, own_s: float, busy_s: float, idle_s: float) -> float:
    """Return the seconds of `elapsed_s` without what other programs took from the ranks of a machine. `own_s` is the
    CPU time of its ranks meanwhile, `busy_s` and `idle_s` are of all their cores."""
    all_s = busy_s + idle_s
    if all_s <= 0:
        return elapsed_s
    crowded = max(0.0, 1 - idle_s / (_IDLE_SHARE * all_s))
    taken_s = crowded * max(0.0, busy_s - own_s)
    return elapsed_s * (1 - taken_s / all_s)


def share_of_others(started: Moment, own_s: float, topology: Topology) -> float | None:
    """Return the share of the cores that other processes took from the ranks since `started`; `own_s` is the CPU time
    of all ranks. None for ranks on several machines, and where the system does not say."""
    now = Moment.now()
    elapsed_s, busy_s, idle_s = now.wall_s - started.wall_s, now.busy_s - started.busy_s, now.idle_s - started.idle_s
    if topology.world_size > topology.ranks_per_node or busy_s + idle_s <= 0:
        return None
    return 1 - alone_s(elapsed_s, own_s, busy_s, idle_s) / elapsed_s


def _cores_s() -> tuple[float, float]:
    """Return (busy, idle) seconds of the cores that this process may use; 0, 0 where there is no /proc/stat."""
    if not hasattr(os, "sched_getaffinity"):
        return 0.0, 0.0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith("cpu")]
    except (OSError, ValueError):
        return 0.0, 0.0
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = np.array([row[1 : 1 + _COLUMNS] for row in rows if row[0] in mine], np.float64).reshape(-1, _COLUMNS)
    idle_s = float(ticks[:, _IDLE].sum()) / os.sysconf("SC_CLK_TCK")
    return float(ticks.sum()) / os.sysconf("SC_CLK_TCK") - idle_s, idle_s
