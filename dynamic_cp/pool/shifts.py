"""What a tick is where the same micro-batches are some stages further on: the same on other servers.

With model chunks the micro-batches of a group meet once on every stage, in the same order around the ring of stages.
Servers of all stages are alike where no node holds parts of two, so neither tasks nor programmes are made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.pool.tasks import SERVER, Tasks
from dynamic_cp.types import Topology
from dynamic_cp.types.placement import HOLDER, SAMPLE, START


def num_shifts(topology: Topology) -> int:
    """Return on how many stages a tick may begin and be the same; 1: nothing is, or there are no chunks."""
    are_alike = topology.vp_size > 1 and topology.num_lanes % lanes_in_one_node(topology) == 0
    return topology.pp_size if are_alike else 1


def shifted_tasks(tasks: Tasks, num_samples: Sequence[int], shift: int, topology: Topology) -> Tasks:
    """Return tasks whose micro-batches are `shift` stages further on.

    Args:
        tasks: of a tick, samples counted by stage.
        num_samples: [stage] of the other tick.
    """
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
    """Return [server] what each does where micro-batches are `shift` stages further on.

    Args:
        programmes: [server] `Programme.as_json`; servers know the same samples by the same numbers.
    """
    num_servers, ahead = topology.pp_size * topology.num_lanes, shift * topology.num_lanes

    def side(peers: list[Any]) -> list[Any]:
        return sorted(([(peer + ahead) % num_servers, entries] for peer, entries in peers), key=lambda one: one[0])

    found = []
    for server in range(num_servers):
        held, tiles, exchanges, *rest = programmes[(server - ahead) % num_servers]
        moved = [[division, when, side(sends), side(receives)] for division, when, sends, receives in exchanges]
        found.append([held, tiles, moved, *rest])
    return found
