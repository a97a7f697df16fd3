"""Runs: rows of a lane that follow each other in a sample. A kernel computes all runs of a pack in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.layout.packed_seq_params import boundaries

Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Runs of rows, one after the other; nothing passes from one to the next.

    Attributes:
        lengths: rows of each, at least 1.
        cu_seqlens: their boundaries on the device, int32 [num_runs + 1].
        host_cu_seqlens: the same on the host.
        kept: what kernels derive from it, by name, filled by the first layer.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    host_cu_seqlens: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device) -> Runs:
        """Return runs of these lengths with their boundaries on `device`."""
        bounds = boundaries(lengths)
        return cls(
            lengths=tuple(lengths), cu_seqlens=to_device(bounds, device), host_cu_seqlens=torch.from_numpy(bounds)
        )

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned for the first layer."""
        if name not in self.kept:
            self.kept[name] = make()
        kept: Kept = self.kept[name]
        return kept
