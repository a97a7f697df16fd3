"""What a micro-batch is placed for, and the lanes of a placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least


class Lanes(NamedTuple):
    """Neighbouring lanes of a bucket, or the inner groups that take their place; `first` is the index of the first one
    among all, which decides where nodes (of `of_node` lanes) begin."""

    number: int
    first: int
    of_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Lanes, bytes and how even placements have to be.

    Attributes:
        node_lanes: lanes of a node: neighbours, from 0 on; the last node may have fewer.
        row_bytes, column_bytes: per token whose queries are computed elsewhere, of queries there and outputs back; per
            token whose keys are read elsewhere, of keys and values.
        token_tolerance, work_tolerance: share by which a lane may hold more tokens than the mean (at least the mean,
            rounded up), and more touched pairs of attention, as far as whole tiles allow.
    """

    num_lanes: int
    node_lanes: int
    row_bytes: int
    column_bytes: int
    token_tolerance: float = 0.05
    work_tolerance: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(1, num_lanes=self.num_lanes, node_lanes=self.node_lanes)
        require_at_least(1, row_bytes=self.row_bytes, column_bytes=self.column_bytes)
        for name, value in (("token_tolerance", self.token_tolerance), ("work_tolerance", self.work_tolerance)):
            if not value >= 0.0:
                raise InvalidInputError(f"{name} is {value}, at least 0 is needed: give a share such as 0.05")

    def most_tokens(self, num_tokens: int) -> int:
        """Return the tokens that a lane may hold if there are `num_tokens` in all."""
        mean_up = -(-num_tokens // self.num_lanes)
        return max(mean_up, int(num_tokens / self.num_lanes * (1.0 + self.token_tolerance)))
