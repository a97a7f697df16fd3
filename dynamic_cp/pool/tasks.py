"""Tasks: which server computes the attention of which queries, for all documents of a tick.

A *server* is a rank in its role of computing attention: lane `server % num_lanes` of stage `server // num_lanes`. A
*task* is a run of queries of a sample with all keys up to their own, and the server that computes it. Tasks are also
tiles of a placement (`Tasks.placement`) in which one lane computes all tiles of a home's queries, so code for
placements serves both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.mechanisms.transfers import lanes_in_one_node
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.pool.ticks import Tick, tick_order
from dynamic_cp.types import Plan, Sample, Topology
from dynamic_cp.types.counts import counted, require_at_least
from dynamic_cp.types.placement import HOLDER, SAMPLE, START, STOP, Placement

Int32s = NDArray[np.int32]

SERVER, NANO_BATCH = 4, 5
"""Columns of `Tasks.rows`, behind those of homes (`types.placement`)."""

TASKS_PER_DOCUMENT = 2
"""Most ranges of one document that a server computes in a nano-batch: some kernels copy the keys for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Queries by holder and server; compared by content, not to be changed once made. `rows` are int32 [row, (SAMPLE,
    START, STOP, HOLDER, SERVER, NANO_BATCH)], in the order of samples and tokens: one server holds them, one computes
    them. Tokens of nano-batch 0 come before those of 1; without nano-batches all are 0."""

    rows: Int32s
    columns: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if len(self.rows.shape) != 2 or self.rows.shape[1] != self.columns:
            raise InvalidInputError(
                f"rows of tasks have the shape {self.rows.shape}, [number, {self.columns}] is needed: give sample, "
                "start, stop, holder, server and nano-batch of each"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tasks):
            return NotImplemented
        return self.rows.shape == other.rows.shape and bool((self.rows == other.rows).all())

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __repr__(self) -> str:
        return f"<Tasks: {self.describe()}>"

    def describe(self) -> str:
        """Return their size in a few words; `str` has all of them."""
        return f"{counted(self.num_tasks, 'task')}{' in two nano-batches' if self.num_nano_batches > 1 else ''}"

    @property
    def num_nano_batches(self) -> int:
        """1, or 2 if layers run in two nano-batches."""
        return int(self.rows[:, NANO_BATCH].max(initial=0)) + 1

    @property
    def num_tasks(self) -> int:
        """Runs of neighbouring queries that one server computes in one nano-batch."""
        return len(runs_of(self.rows))

    @property
    def tokens(self) -> Ints:
        return (self.rows[:, STOP] - self.rows[:, START]).astype(np.int64)

    def placement(self) -> Placement:
        """Return the same as homes and tiles, a row with all of its sample up to itself; nano-batches are divisions."""
        rows = self.rows.astype(np.int64)
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(rows[:, SAMPLE])) + 1]) if len(rows) else np.zeros(0, int)
        counts = np.diff(firsts, append=len(rows))
        first_of = np.repeat(firsts, counts)
        number = np.arange(len(rows)) - first_of + 1
        queries = np.repeat(np.arange(len(rows)), number)
        offset = np.arange(len(queries)) - np.repeat(np.cumsum(number) - number, number)
        keys = first_of[queries] + offset
        tiles = np.stack([queries, keys, rows[queries, SERVER], rows[queries, NANO_BATCH]], axis=1)
        return Placement(self.rows[:, : HOLDER + 1].astype(np.int32), tiles.astype(np.int32))

    def __str__(self) -> str:
        """Return their text, which `parse_tasks` reads: sample.start.stop.holder.server.nano_batch, and so on."""
        return ",".join(".".join(map(str, row)) for row in self.rows.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTasks:
    """Who computes the attention of a plan with a pool: the extension of such a plan, whose micro-batches are one
    bucket over all lanes each, with homes and no tiles.

    Attributes:
        tile_tokens: tasks are cut at multiples of it.
        forward, backward: [tick] -> tasks over servers; samples are counted over its micro-batches, by stage.
        relay_servers: neighbours that receive what several of them use once, through one of them; 0: those of a node.
    """

    kind: ClassVar[str] = "pool"

    tile_tokens: int
    forward: tuple[Tasks, ...]
    backward: tuple[Tasks, ...]
    relay_servers: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, tile_tokens=self.tile_tokens)
        require_at_least(0, relay_servers=self.relay_servers)

    @property
    def num_nano_batches(self) -> int:
        """1, or 2 if layers run in two nano-batches."""
        return max((one.num_nano_batches for one in (*self.forward, *self.backward)), default=1)

    def describe(self) -> str:
        """Return its size in a few words."""
        return f"{counted(sum(one.num_tasks for one in self.forward), 'task')} forward"


_TEXT = re.compile(r"\d+(?:\.\d+){5}(?:,\d+(?:\.\d+){5})*")


def parse_tasks(text: str) -> Tasks:
    """Return the tasks whose `str` is `text`; raise InvalidInputError if it is none."""
    if _TEXT.fullmatch(text) is None:
        raise InvalidInputError(
            f"tasks {text[:40]!r} are none: write sample.start.stop.holder.server.nano_batch,... with whole numbers"
        )
    rows = np.array([list(map(int, row.split("."))) for row in text.split(",")], dtype=object)
    largest = max(map(int, rows.ravel()))
    if largest > np.iinfo(np.int32).max:
        raise InvalidInputError(f"tasks {text[:40]!r} have the number {largest}, at most {2**31 - 1} is possible")
    return Tasks(rows.astype(np.int32))


def runs_of(rows: Ints | Int32s) -> Ints:
    """Return [run, (sample, start, stop, server, nano-batch)]: neighbouring rows that share those."""
    if not len(rows):
        return np.zeros((0, 5), np.int64)
    same = (rows[1:, (SAMPLE, SERVER, NANO_BATCH)] == rows[:-1, (SAMPLE, SERVER, NANO_BATCH)]).all(axis=1)
    begins = np.concatenate([[0], np.flatnonzero(~same) + 1])
    ends = np.append(begins[1:], len(rows)) - 1
    return np.concatenate(
        [rows[begins][:, (SAMPLE, START)], rows[ends][:, [STOP]], rows[begins][:, (SERVER, NANO_BATCH)]], axis=1
    ).astype(np.int64)


_SERVER, _NANO_BATCH = 3, 4
"""Columns of tasks without their holder, behind SAMPLE, START and STOP."""


def tasks_of(homes: Ints, tasks: Sequence[Ints]) -> Tasks:
    """Return the tasks of each nano-batch, cut where homes are, int64 [home, (sample, start, stop, holder)] by sample
    and start. `tasks`: [nano-batch] -> int64 [task, (sample, start, stop, server)], each token once over all."""
    with_nano_batch = np.concatenate(
        [np.insert(of_nano_batch, 4, nano_batch, axis=1) for nano_batch, of_nano_batch in enumerate(tasks)]
    )
    with_nano_batch = with_nano_batch[np.lexsort((with_nano_batch[:, START], with_nano_batch[:, SAMPLE]))]
    return Tasks(_overlaid(homes, with_nano_batch).astype(np.int32))


@compiled
def _overlaid(homes: Ints, tasks: Ints) -> Ints:
    """Return [row, 6] of both tilings of the samples, in the order of samples and tokens."""
    rows = np.empty((len(homes) + len(tasks), 6), np.int64)
    count, home, task = 0, 0, 0
    while home < len(homes) and task < len(tasks):
        start, stop = max(homes[home, START], tasks[task, START]), min(homes[home, STOP], tasks[task, STOP])
        server, nano_batch = tasks[task, _SERVER], tasks[task, _NANO_BATCH]
        rows[count] = homes[home, SAMPLE], start, stop, homes[home, HOLDER], server, nano_batch
        count += 1
        if homes[home, STOP] == stop:
            home += 1
        if tasks[task, STOP] == stop:
            task += 1
    return rows[:count]


def pool_of(plan: Plan) -> PoolTasks:
    assert isinstance(plan.extension, PoolTasks), "the plan has no pool"
    return plan.extension


def ticks_of(plan: Plan) -> Iterator[tuple[Tick, Tasks]]:
    """Yield each tick with its tasks, in the order in which they run."""
    pool, topology = pool_of(plan), plan.topology
    for tick in tick_order(topology.pp_size, topology.vp_size, plan.num_microbatches):
        yield tick, (pool.forward if tick.kind == KINDS[0] else pool.backward)[tick.number]


def micro_batches_of(plan: Plan, tick: Tick) -> list[tuple[int, int]]:
    """Return (stage, micro-batch) of what a tick runs, by stage."""
    pp_size, vp_size = plan.topology.pp_size, plan.topology.vp_size
    units = [tick.unit(stage, pp_size, vp_size, plan.num_microbatches) for stage in range(pp_size)]
    return [(stage, unit.micro_batch) for stage, unit in enumerate(units) if unit is not None]


def samples_of(plan: Plan, tick: Tick) -> list[Sample]:
    """Return the samples of a tick, as its tasks count them."""
    rows = (row for _, row in micro_batches_of(plan, tick))
    return [sample for row in rows for sample in plan.micro_batches[row].buckets[0].samples]


def num_shifts(topology: Topology) -> int:
    """Return the number of stages by which a tick can be shifted and stay the same; 1: none, or there are no chunks."""
    are_alike = topology.vp_size > 1 and topology.num_lanes % lanes_in_one_node(topology) == 0
    return topology.pp_size if are_alike else 1


def shifted_tasks(tasks: Tasks, num_samples: Sequence[int], shift: int, topology: Topology) -> Tasks:
    """Return the tasks of a tick when its micro-batches are `shift` stages further on; `num_samples`: [stage] of the
    other tick."""
    pp_size = topology.pp_size
    now = np.cumsum([0, *num_samples])
    moved = [
        np.arange(now[stage], now[stage + 1]) for stage in ((earlier + shift) % pp_size for earlier in range(pp_size))
    ]
    rows = tasks.rows.astype(np.int64)
    rows[:, SAMPLE] = np.concatenate(moved)[rows[:, SAMPLE]]
    servers = (HOLDER, SERVER)
    rows[:, servers] = (rows[:, servers] + shift * topology.num_lanes) % (pp_size * topology.num_lanes)
    return Tasks(rows[np.lexsort((rows[:, START], rows[:, SAMPLE]))].astype(np.int32))


def shifted_programmes(programmes: Sequence[list[Any]], shift: int, topology: Topology) -> list[list[Any]]:
    """Return [server] -> `Programme.as_json` when micro-batches are `shift` stages further on; servers must number
    samples alike."""
    num_servers, ahead = topology.pp_size * topology.num_lanes, shift * topology.num_lanes

    def side(peers: list[Any]) -> list[Any]:
        return sorted(([(peer + ahead) % num_servers, entries] for peer, entries in peers), key=lambda one: one[0])

    found = []
    for server in range(num_servers):
        held, tiles, exchanges, *rest = programmes[(server - ahead) % num_servers]
        moved = [[division, when, side(sends), side(receives)] for division, when, sends, receives in exchanges]
        found.append([held, tiles, moved, *rest])
    return found
