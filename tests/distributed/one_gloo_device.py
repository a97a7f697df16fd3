"""All process groups of a rank share one gloo device: torch makes one for each, whose thread wakes 100 times a second.
The ranks of tests/faults and of every run of the real command keep torch's way."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

_NUM_THREADS = 2
"""Of each group, as torch has it."""


class _SharingProcessGroup(ProcessGroupGloo):
    _device = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        cls = type(self)
        cls._device = cls._device or ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [cls._device], _NUM_THREADS, timeout
        super().__init__(store, rank, size, options)


def share() -> None:
    """Have all groups that this process makes from now on share a device."""
    distributed_c10d.ProcessGroupGloo = _SharingProcessGroup
