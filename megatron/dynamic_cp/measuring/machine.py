"""The machine of a rank: how much memory is free, and how long CPU ranks would take if it did nothing else.

If all cores that ranks may use are busy, the ranks lose exactly the time that other programs take. The system counts
the busy seconds of cores; those that the ranks did not spend went to others, including the hypervisor.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dynamic_cp.types import Topology

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
    cores that it may use since the machine started, 0 where the system does not say.
    """

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
    CPU time of its ranks meanwhile, `busy_s` and `idle_s` are of all their cores.
    """
    all_s = busy_s + idle_s
    if all_s <= 0:
        return elapsed_s
    crowded = max(0.0, 1 - idle_s / (_IDLE_SHARE * all_s))
    taken_s = crowded * max(0.0, busy_s - own_s)
    return elapsed_s * (1 - taken_s / all_s)


def share_of_others(started: Moment, own_s: float, topology: Topology) -> float | None:
    """Return the share of the cores that other processes took from the ranks since `started`; `own_s` is the CPU time
    of all ranks. None for ranks on several machines, and where the system does not say.
    """
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
