"""Placed attention: which lane of a bucket holds which tokens, and which lane computes which tile of scores.

A *home* is a run of neighbouring tokens of one sample and the lane that holds them: their queries, keys and values
start there, and their outputs and gradients end there. A *tile* is the queries of one home against the keys of a home
of the same sample, with the lane that computes it and the *division* (step of the lane's programme) in which it does:
attention of one division hides what is fetched for the next ones. Never change the arrays of a placement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.branches import parse_mask
from dynamic_cp.types.counts import counted, require_at_least
from dynamic_cp.types.masks import Mask

if TYPE_CHECKING:  # numpy takes longer to import than `dynamic-cp --help` may
    import numpy as np
    from numpy.typing import NDArray

    Int32s = NDArray[np.int32]
    Ints = NDArray[np.int64]


SAMPLE, START, STOP, HOLDER = range(4)
"""Columns of homes: the sample, its first token, the one after the last, and the lane that holds them."""
ROW, COLUMN, LANE, DIVISION = range(4)
"""Columns of tiles: the home of the queries, that of the keys, the lane that computes, and its division."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Homes and tiles of one bucket; lanes and samples are counted from the first one of the bucket. Where lanes
    exchange heads (`Bucket.inner_cp_size`), a lane here is an inner group: each of its lanes computes all tiles of the
    group for some of the heads, and holds an equal run of its tokens (`placed_share`).

    Attributes:
        homes: int32 [home, (SAMPLE, START, STOP, HOLDER)], in the order of samples and tokens.
        tiles: int32 [tile, (ROW, COLUMN, LANE, DIVISION)]; empty in plans with a pool, whose tasks say who computes.
        layer_masks: different masks of layers, if some have a window. Tiles are those of the first; layers with another
            one keep the homes (`dynamic_cp.placement.cuts`). (): one causal or full mask for all layers.
    """

    homes: Int32s
    tiles: Int32s
    layer_masks: tuple[Mask, ...] = ()
    columns: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for name in ("homes", "tiles"):
            shape = getattr(self, name).shape
            if len(shape) != 2 or shape[1] != self.columns:
                raise InvalidInputError(
                    f"{name} of a placement have the shape {shape}, [number, {self.columns}] is needed"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        tables = ((one.homes.tolist(), one.tiles.tolist(), one.layer_masks) for one in (self, other))
        return next(tables) == next(tables)

    def __hash__(self) -> int:
        return hash((self.homes.tobytes(), self.tiles.tobytes(), self.layer_masks))

    def __repr__(self) -> str:
        return f"<Placement: {self.describe()}>"

    def describe(self) -> str:
        """Return its size in a few words; `str` has all of it."""
        sizes = (len(self.homes), "home"), (len(self.tiles), "tile"), (self.num_divisions, "division")
        return ", ".join(counted(number, what) for number, what in sizes)

    @property
    def num_divisions(self) -> int:
        """Number of divisions of its lanes' programmes."""
        return int(self.tiles[:, DIVISION].max(initial=0)) + 1

    @property
    def tokens_of_homes(self) -> Ints:
        """int64 [home], tokens of each."""
        return (self.homes[:, STOP] - self.homes[:, START]).astype("int64")

    def home_tokens(self, num_lanes: int) -> list[int]:
        """Return the number of tokens that each lane holds."""
        import numpy as np

        tokens = np.zeros(num_lanes, np.int64)
        np.add.at(tokens, self.homes[:, HOLDER], self.tokens_of_homes)
        held: list[int] = tokens.tolist()
        return held

    def samples_of(self, lane: int) -> list[int]:
        """Return the samples of which a lane holds or computes anything, ascending."""
        held = self.homes[self.homes[:, HOLDER] == lane, SAMPLE].tolist()
        computed = self.homes[self.tiles[self.tiles[:, LANE] == lane, ROW], SAMPLE].tolist()
        return sorted({*held, *computed})

    def __str__(self) -> str:
        """Return its text, which `parse_placement` reads: homes, tiles, and masks of layers, as in
        `0.0.512.1,0.512.700.0/0.0.1.0,1.0.1.0,1.1.0.0`, `0.0.512.1/` (no tiles) or `.../causal/lambda:0,128`."""
        tables = (",".join(".".join(map(str, row)) for row in rows.tolist()) for rows in (self.homes, self.tiles))
        return "/".join((*tables, *map(str, self.layer_masks)))


_ROWS = r"\d+\.\d+\.\d+\.\d+(?:,\d+\.\d+\.\d+\.\d+)*"
_TEXT = re.compile(rf"({_ROWS})/((?:{_ROWS})?)((?:/[a-z]+(?::[\d,]+)?)*)")


def parse_placement(text: str) -> Placement:
    """Return the placement whose `str` is `text`, or raise InvalidInputError."""
    import numpy as np

    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidInputError(
            f"placement {text[:40]!r} is none: write homes as sample.start.stop.lane,... and after a / tiles as "
            "query home.key home.lane.division,..., and after more of them masks of layers"
        )
    *tables, masks = match.groups()
    homes, tiles = (
        np.array([row.split(".") for row in rows.split(",") if row]).astype(np.int64).reshape(-1, Placement.columns)
        for rows in tables
    )
    largest = int(max(homes.max(), tiles.max(initial=0)))
    if largest > np.iinfo(np.int32).max:
        raise InvalidInputError(f"placement {text[:40]!r} has the number {largest}, at most {2**31 - 1} is possible")
    return Placement(homes.astype(np.int32), tiles.astype(np.int32), tuple(map(parse_mask, masks.split("/")[1:])))
