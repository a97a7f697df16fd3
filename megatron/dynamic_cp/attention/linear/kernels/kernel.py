"""What a kernel of linear attention is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.dynamic_cp.attention.linear.recurrence import Steps
from megatron.dynamic_cp.attention.linear.runs import Runs

Convolve = Callable[[Tensor, Tensor, "Tensor | None", Runs], Tensor]


class Scan(Protocol):
    """The recurrence of runs."""

    def __call__(
        self, steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Return what tokens find [T, heads, value size], and the state behind each run [runs, heads, key, value].

        Args:
            state: before each run; None: zeros.
            only_state: what tokens find is of no interest, and may be None.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """How runs are computed; autograd differentiates both.

    Attributes:
        convolve: (x_TC, weight [C, kernel size], bias [C] or None, runs) -> each channel convolved with the tokens
            before it in its run, and SiLU.
        scan: the recurrence.
    """

    name: str
    convolve: Convolve
    scan: Scan
