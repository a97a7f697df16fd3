"""What one server of a pool does in every tick of a plan, as text that travels to it.

Numbers of a programme are small and repeat from tick to tick, so their JSON is compressed
(docs/figures/disaggregated.md has its bytes). With model chunks a server does the same in several ticks: that stands
there once, and the others have its number.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, NamedTuple

from dynamic_cp.errors import DisagreementError
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.placement.lanes import Lanes
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.pool.legal import servers_of
from dynamic_cp.pool.plan import micro_batches_of, pool_of, samples_of, ticks_of
from dynamic_cp.pool.shifts import num_shifts, shifted_programmes, shifted_tasks
from dynamic_cp.pool.tasks import Tasks
from dynamic_cp.pool.ticks import Tick
from dynamic_cp.pool.traffic import relay_order
from dynamic_cp.types import Plan, Sample


class ServerTick(NamedTuple):
    """One tick of one server.

    Attributes:
        programme: what it computes, sends and receives.
        samples: of which it holds or computes anything, as the programme numbers them.
    """

    programme: Programme
    samples: tuple[Sample, ...]


class ServerTicks(NamedTuple):
    """[tick] what a server does, forward and backward."""

    forward: tuple[ServerTick, ...]
    backward: tuple[ServerTick, ...]


def encode_ticks(plan: Plan) -> list[tuple[str, ...]]:
    """Return [lane][stage] texts of a plan with a pool, for `decode_ticks`."""
    topology = plan.topology
    found: list[dict[str, list[Any]]] = [{kind: [] for kind in KINDS} for _ in range(plan.num_servers)]
    made = _Programmes(plan)
    known: list[dict[tuple[Tasks, tuple[int, ...]], int]] = [{} for _ in range(plan.num_servers)]
    for tick, tasks in sorted(ticks_of(plan), key=lambda one: (one[0].kind != KINDS[0], one[0].number)):
        for server, (programme, own) in enumerate(zip(*made.of_tick(tick, tasks), strict=True)):
            count = len(known[server])
            earlier = known[server].setdefault((tasks, tuple(number for number, _ in own)), count)
            is_new = earlier == count or topology.vp_size == 1
            found[server][tick.kind].append([programme, own] if is_new else earlier)
    texts = [_text([one[kind] for kind in KINDS]) for one in found]
    return [tuple(texts[lane :: topology.num_lanes]) for lane in range(topology.num_lanes)]


_Parts = tuple[list[list[Any]], list[list[list[int]]]]
"""[server] JSON of its programme; [server] (identity, length) of the samples, as the programme numbers them."""


class _Programmes:
    """Programmes of ticks, each made once: with chunks the same micro-batches meet again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_shifts = num_shifts(plan.topology)
        self._relay_servers = servers_of(plan.topology, pool_of(plan).relay_servers).of_relay
        self._made: dict[tuple[str, tuple[int, ...]], tuple[Tasks, _Parts]] = {}

    def of_tick(self, tick: Tick, tasks: Tasks) -> _Parts:
        """Return what each server does in a tick, and the samples that it knows."""
        plan, topology = self._plan, self._plan.topology
        rows = dict(micro_batches_of(plan, tick))
        on = tuple(rows.get(stage, -1) for stage in range(topology.pp_size))
        for shift in range(self._num_shifts):
            earlier, parts = self._made.get((tick.kind, on[shift:] + on[:shift]), (None, None))
            if earlier is None or parts is None:
                continue
            counts = [0 if row < 0 else len(plan.micro_batches[row].buckets[0].samples) for row in on]
            if shifted_tasks(earlier, counts, shift, topology) == tasks:
                programmes, own = parts
                first = plan.num_servers - shift * topology.num_lanes
                return shifted_programmes(programmes, shift, topology), own[first:] + own[:first]
        placement, samples = tasks.placement(), samples_of(plan, tick)
        made = programmes_of(placement, samples, Lanes(plan.num_servers, 0, self._relay_servers), relay_order(tasks))
        programmes = [one.as_json() for one in made]
        own = [
            [[samples[number].sample_id, samples[number].seqlen] for number in placement.samples_of(server)]
            for server in range(plan.num_servers)
        ]
        self._made[tick.kind, on] = tasks, (programmes, own)
        return programmes, own


def _text(data: list[Any]) -> str:
    return base64.b85encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode())).decode()


def decode_ticks(text: str) -> ServerTicks:
    """Return what `encode_ticks` wrote of a server.

    Raises:
        DisagreementError: it is none.
    """
    try:
        known: list[ServerTick] = []
        forward, backward = json.loads(zlib.decompress(base64.b85decode(text)))
        return ServerTicks(*(tuple(_tick(data, known) for data in side) for side in (forward, backward)))
    except (ValueError, TypeError, LookupError, zlib.error) as error:
        raise DisagreementError(
            f"a server's part of the plan is {text[:40]!r}, which is none ({type(error).__name__}: {error}): all ranks "
            "must run the same version; restart the job"
        ) from error


def _tick(data: Any, known: list[ServerTick]) -> ServerTick:
    """Return what a server does in a tick; `known`: all before it, of which it may be one."""
    if isinstance(data, int):
        return known[data]
    programme, samples = data
    known.append(
        ServerTick(
            Programme.read(programme), tuple(Sample(sample_id=number, seqlen=seqlen) for number, seqlen in samples)
        )
    )
    return known[-1]
