"""The pool of a plan as JSON and as text: what `plans.serialize` puts beside the micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.serialize import Fields, checked
from dynamic_cp.pool.plan import pool_of
from dynamic_cp.pool.tasks import PoolTasks, Tasks, parse_tasks
from dynamic_cp.types import Plan

_SIDES = {"F": "forward", "B": "backward"}
_TICK = re.compile(r"[FB]\d+")
_SETTINGS = ("tile_tokens", "relay_servers")


def pool_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the pool of a plan as what JSON can hold."""
    texts = _texts_of_ticks(plan, placements=True)
    return {**settings(plan), **{side: texts[letter] for letter, side in _SIDES.items()}}


def settings(plan: Plan) -> dict[str, int]:
    """Return what a pool has but tasks; plans without relays keep the digests that they had before there were any."""
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
    """Yield a line for each tick; placements: its tasks, which `parse` reads, else how many there are, for people."""
    for letter, texts in _texts_of_ticks(plan, placements=placements).items():
        yield from (f"{letter}{index} | {text}" for index, text in enumerate(texts))


def parse(given: dict[str, Any], rows: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the rows of micro-batches, and the pool of a plan as what JSON can hold; InvalidInputError names a line.

    Args:
        given: settings of the plan's first line, of which those of the pool are taken out.
        rows: all other lines.
    """
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
    """Return the texts of ticks by the letter of their side; with chunks the tasks of an earlier tick are its name."""
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
