"""The pool of a plan as text: for files, beside the micro-batches, and for each server, what it does in every tick.

`plans.serialize` writes the first; the second travels to the servers. A programme's numbers are small and repeat from
tick to tick, so their JSON is compressed (docs/figures/attention.md has its bytes). With model chunks a server does
the same in several ticks: that is there once, and other ticks have its number.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dynamic_cp.errors import DisagreementError, InvalidInputError
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.plans.serialize import Fields, checked
from dynamic_cp.pool.legal import servers_of
from dynamic_cp.pool.tasks import (
    PoolTasks,
    Tasks,
    micro_batches_of,
    num_shifts,
    parse_tasks,
    pool_of,
    samples_of,
    shifted_programmes,
    shifted_tasks,
    ticks_of,
)
from dynamic_cp.pool.ticks import Tick
from dynamic_cp.pool.traffic import relay_order
from dynamic_cp.types import Plan, Sample
from dynamic_cp.types.placement import Lanes

_SIDES = {"F": "forward", "B": "backward"}
_TICK = re.compile(r"[FB]\d+")
_SETTINGS = ("tile_tokens", "relay_servers")


def pool_to_dict(plan: Plan) -> dict[str, Any]:
    texts = _texts_of_ticks(plan, placements=True)
    return {**settings(plan), **{side: texts[letter] for letter, side in _SIDES.items()}}


def settings(plan: Plan) -> dict[str, int]:
    """Return what a pool has besides tasks; without relays it is as before there were any, so that digests stay."""
    pool = pool_of(plan)
    return {"tile_tokens": pool.tile_tokens} | ({"relay_servers": pool.relay_servers} if pool.relay_servers else {})


def pool_from_dict(data: object) -> PoolTasks:
    """Return the pool that `pool_to_dict` made `data` from; InvalidInputError names the first thing that is wrong."""
    relays = ("relay_servers",) if isinstance(data, Mapping) and "relay_servers" in data else ()
    pool = Fields(data, "pool", ("tile_tokens", *relays, *_SIDES.values()))
    known: dict[str, Tasks] = {}
    sides: dict[str, tuple[Tasks, ...]] = {}
    for letter, side in _SIDES.items():
        for index, entry in enumerate(pool.get(side, list)):
            text = checked(entry, str, f"pool.{side}[{index}]")
            if _TICK.fullmatch(text) is None:
                known[f"{letter}{index}"] = parse_tasks(text)
            elif text in known:
                known[f"{letter}{index}"] = known[text]
            else:
                raise InvalidInputError(
                    f"pool.{side}[{index}] has the tasks of tick {text}, which is none of the {len(known)} before it: "
                    "give a file that `plan --output` wrote (--json is more)"
                )
        sides[side] = tuple(known[name] for name in known if name[0] == letter)
    relay_servers = pool.get("relay_servers", int) if relays else 0
    return PoolTasks(tile_tokens=pool.get("tile_tokens", int), relay_servers=relay_servers, **sides)


def lines(plan: Plan, placements: bool) -> Iterator[str]:
    """Yield a line for each tick: with `placements` its tasks, which `parse` reads, else how many there are, for
    people."""
    for letter, texts in _texts_of_ticks(plan, placements=placements).items():
        yield from (f"{letter}{index} | {text}" for index, text in enumerate(texts))


def parse(given: dict[str, Any], rows: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the rows of micro-batches, and the pool of a plan as JSON's types; InvalidInputError names a line. The
    pool's settings are taken out of `given`, those of the plan's first line; `rows` are all other lines."""
    num_rows = sum(row[:1] not in _SIDES for row in rows)
    sides: dict[str, list[str]] = {letter: [] for letter in _SIDES}
    for number, row in enumerate(rows[num_rows:], num_rows + 2):
        match = re.fullmatch(r"([FB])(\d+) \| (\S+)", row.strip())
        if match is None or int(match[2]) != len(sides[match[1]]):
            raise InvalidInputError(f"line {number} is {row[:60]!r}: a tick looks like 'F0 | 0.0.40.0.0.0' (tasks)")
        sides[match[1]].append(match[3])
    numbers = {name: given.pop(name) for name in _SETTINGS if name in given}
    return rows[:num_rows], {**numbers, **{_SIDES[letter]: texts for letter, texts in sides.items()}}


def _texts_of_ticks(plan: Plan, *, placements: bool) -> dict[str, list[str]]:
    """Return the texts of ticks by the letter of their side; with chunks, tasks of an earlier tick are given by its
    name."""
    pool = pool_of(plan)
    known: dict[Tasks, str] = {}
    texts: dict[str, list[str]] = {letter: [] for letter in _SIDES}
    for letter, side in _SIDES.items():
        of_side: tuple[Tasks, ...] = getattr(pool, side)
        for index, tasks in enumerate(of_side):
            name = f"{letter}{index}"
            earlier = known.setdefault(tasks, name) if plan.topology.vp_size > 1 else name
            own = str(tasks) if placements else tasks.describe()
            texts[letter].append(own if earlier == name else earlier)
    return texts


class ServerTick(NamedTuple):
    """One tick of one server: its programme, and the samples of which it holds or computes anything, as the programme
    numbers them."""

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
"""[server] JSON of its programme; [server] (sample_id, length) of the samples, as the programme numbers them."""


class _Programmes:
    """Makes the programmes of each tick once: with chunks the same micro-batches meet again."""

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
    """Return what `encode_ticks` wrote for a server; raise DisagreementError if the text is none."""
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
