"""Ticks: phases of all pipeline stages, in the order in which a pool of servers runs them.

In a forward tick f, stage s runs micro-batch f - s; in a backward tick b, micro-batch b - (pp_size - 1 - s). A stage
without one only serves. `pipeline.ticks` has lists of them and what would hang.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal["F", "B"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Tick(NamedTuple):
    """A phase of all stages; prints as `F3`."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}{self.number}"

    def micro_batch(self, stage: int, pp_size: int, num_microbatches: int) -> int | None:
        """Return what `stage` runs in it; None: it only serves."""
        behind = stage if self.kind == KINDS[0] else pp_size - 1 - stage
        found = self.number - behind
        return found if 0 <= found < num_microbatches else None


def tick_order(pp_size: int, num_microbatches: int) -> tuple[Tick, ...]:
    """Return all ticks in the order in which they run: pp_size forward ones, then backward and forward in turn."""
    count = num_microbatches + pp_size - 1
    forwards, backwards = ([Tick(kind, number) for number in range(count)] for kind in KINDS)
    ahead = min(pp_size, count)
    turns = [tick for pair in zip(backwards, forwards[ahead:], strict=False) for tick in pair]
    return (*forwards[:ahead], *turns, *backwards[count - ahead :])
