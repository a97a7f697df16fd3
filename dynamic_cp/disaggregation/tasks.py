"""Tasks: which server computes the attention of which queries, for all documents of a tick.

A *server* is a rank's place as one that computes attention: lane `server % num_lanes` of stage `server // num_lanes`.
A *task* is a run of queries of a sample with all keys up to their own, and the server that computes it. Tasks are tiles
of a placement (`Tasks.placement`) in which each home's queries have one lane for all their tiles: what proves, counts
and runs placements does so with tasks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Placement, counted

SAMPLE, START, STOP, HOLDER, SERVER, HALF = range(6)
"""Columns of `Tasks.rows`."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Queries by holder and server; compared by content, not to be changed once made.

    Attributes:
        rows: int32 [row, 6], in the order of samples and tokens: sample, first token, token after the last, server that
            holds them, server that computes them, half. Where layers run in two halves, tokens of the first one (0) go
            before those of the second (1); else all are 0.
    """

    rows: NDArray[np.int32]
    columns: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if len(self.rows.shape) != 2 or self.rows.shape[1] != self.columns:
            raise InvalidInputError(
                f"rows of tasks have the shape {self.rows.shape}, [number, {self.columns}] is needed: give sample, "
                "start, stop, holder, server and half of each"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tasks):
            return NotImplemented
        return np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __repr__(self) -> str:
        return f"<Tasks: {self.describe()}>"

    def describe(self) -> str:
        """Return in some words how large they are; `str` has all of them."""
        return f"{counted(self.num_tasks, 'task')}{' in two halves' if self.num_halves > 1 else ''}"

    @property
    def num_halves(self) -> int:
        """1, or 2 where layers run in two halves."""
        return int(self.rows[:, HALF].max(initial=0)) + 1

    @property
    def num_tasks(self) -> int:
        """Runs of neighbouring queries that one server computes in one half."""
        return len(runs_of(self.rows))

    @property
    def tokens(self) -> Ints:
        """[row] -> its tokens."""
        return (self.rows[:, STOP] - self.rows[:, START]).astype(np.int64)

    def held_tokens(self, num_servers: int) -> list[int]:
        """Return how many tokens each server holds."""
        held = np.bincount(self.rows[:, HOLDER], self.tokens, num_servers)
        return [int(tokens) for tokens in held]

    def placement(self) -> Placement:
        """Return the same as homes and tiles, each row with all of its sample up to itself; halves are divisions."""
        rows = self.rows.astype(np.int64)
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(rows[:, SAMPLE])) + 1]) if len(rows) else np.zeros(0, int)
        counts = np.diff(firsts, append=len(rows))
        first_of = np.repeat(firsts, counts)
        number = np.arange(len(rows)) - first_of + 1
        queries = np.repeat(np.arange(len(rows)), number)
        offset = np.arange(len(queries)) - np.repeat(np.cumsum(number) - number, number)
        keys = first_of[queries] + offset
        tiles = np.stack([queries, keys, rows[queries, SERVER], rows[queries, HALF]], axis=1)
        return Placement(self.rows[:, : HOLDER + 1].astype(np.int32), tiles.astype(np.int32))

    def __str__(self) -> str:
        """Return their text, which `parse_tasks` reads: sample.start.stop.holder.server.half, and so on."""
        return ",".join(".".join(map(str, row)) for row in self.rows.tolist())


_TEXT = re.compile(r"\d+(?:\.\d+){5}(?:,\d+(?:\.\d+){5})*")


def parse_tasks(text: str) -> Tasks:
    """Return the tasks whose `str` is `text`.

    Raises:
        InvalidInputError: it is none.
    """
    if _TEXT.fullmatch(text) is None:
        raise InvalidInputError(
            f"tasks {text[:40]!r} are none: write sample.start.stop.holder.server.half,... with whole numbers"
        )
    rows = np.array([list(map(int, row.split("."))) for row in text.split(",")], dtype=object)
    largest = max(map(int, rows.ravel()))
    if largest > np.iinfo(np.int32).max:
        raise InvalidInputError(f"tasks {text[:40]!r} have the number {largest}, at most {2**31 - 1} is possible")
    return Tasks(rows.astype(np.int32))


def runs_of(rows: Ints | NDArray[np.int32]) -> Ints:
    """Return [run, (sample, start, stop, server, half)]: neighbouring rows of one sample, server and half."""
    if not len(rows):
        return np.zeros((0, 5), np.int64)
    same = (rows[1:, (SAMPLE, SERVER, HALF)] == rows[:-1, (SAMPLE, SERVER, HALF)]).all(axis=1)
    begins = np.concatenate([[0], np.flatnonzero(~same) + 1])
    ends = np.append(begins[1:], len(rows)) - 1
    return np.concatenate(
        [rows[begins][:, (SAMPLE, START)], rows[ends][:, [STOP]], rows[begins][:, (SERVER, HALF)]], axis=1
    ).astype(np.int64)


def tasks_of(homes: Ints, tasks: Sequence[Ints]) -> Tasks:
    """Return the tasks of each half, cut where homes are.

    Args:
        homes: int64 [home, (sample, start, stop, holder)], by sample and start.
        tasks: [half] -> int64 [task, (sample, start, stop, server)], of all halves each token once.
    """
    with_half = np.concatenate([np.insert(of_half, 4, half, axis=1) for half, of_half in enumerate(tasks)])
    with_half = with_half[np.lexsort((with_half[:, 1], with_half[:, 0]))]
    return Tasks(_overlaid(homes, with_half).astype(np.int32))


@compiled
def _overlaid(homes: Ints, tasks: Ints) -> Ints:
    """Return [row, 6] of both tilings of the samples, in the order of samples and tokens."""
    rows = np.empty((len(homes) + len(tasks), 6), np.int64)
    count, home, task = 0, 0, 0
    while home < len(homes) and task < len(tasks):
        start, stop = max(homes[home, 1], tasks[task, 1]), min(homes[home, 2], tasks[task, 2])
        rows[count] = homes[home, 0], start, stop, homes[home, 3], tasks[task, 3], tasks[task, 4]
        count += 1
        if homes[home, 2] == stop:
            home += 1
        if tasks[task, 2] == stop:
            task += 1
    return rows[:count]
