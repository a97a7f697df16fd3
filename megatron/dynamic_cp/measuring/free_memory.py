"""How much memory is free where this process runs."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device, *, swaps: bool = False) -> int | None:
    """Return the free memory of the device, swaps: of a CPU with its free swap; None if it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counted = ("MemAvailable:", "SwapFree:") if swaps else ("MemAvailable:",)
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(counted)) or None
