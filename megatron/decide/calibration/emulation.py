"""A ring on one rank: the code of one position in a larger ring, with each transfer replaced by its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.dynamic_cp.attention.mechanisms import ring
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


@dataclass
class EmulatedRing(DynamicPackedSeqParams):
    """Says that it is a place in a larger ring."""

    place: tuple[int, int] = (1, 0)

    @property
    def ring_size(self) -> int:
        """Ranks of the ring."""
        return self.place[0]

    @property
    def ring_rank(self) -> int:
        """This rank's place."""
        return self.place[1]


def emulated(params: DynamicPackedSeqParams, cp_size: int, cp_rank: int) -> EmulatedRing:
    """Return `params` as those of rank `cp_rank` of `cp_size`; its lengths are those of the whole group."""
    return EmulatedRing(**vars(params), place=(cp_size, cp_rank))


@contextmanager
def no_transfers() -> Iterator[None]:
    """Let ring attention keep what it would send."""
    start = ring._start_shift
    ring._start_shift = _Stays  # type: ignore[assignment]
    try:
        yield
    finally:
        ring._start_shift = start


class _Stays:
    """A shift that brings what it took away."""

    def __init__(self, tensor: Tensor, *_: Any) -> None:
        self._tensor = tensor.contiguous()

    def wait(self) -> Tensor:
        return self._tensor
