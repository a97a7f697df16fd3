"""What servers send each other for tasks: the transfers of a placement, without its many tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.transport import NUM_ROUNDS, Fetches, Messages, fetches_used
from dynamic_cp.pool.tasks import NANO_BATCH, SERVER, Tasks
from dynamic_cp.types import ACROSS_NODES, IN_NODE
from dynamic_cp.types.placement import COLUMN, HOLDER, ROW, SAMPLE, START, Lanes

_TURN_TOKENS = 128
"""Most rows are cut at multiples of this: neighbouring ones of a holder have different relays."""


class Servers(NamedTuple):
    """Servers that share tasks; `of_node` neighbours share a node's link, `of_relay` neighbours receive what several of
    them use once, through one that hands it on. The first server begins both."""

    number: int
    of_node: int
    of_relay: int


def relay_order(tasks: Tasks) -> Ints:
    """Return [row] -> number by which servers take turns as relays, the same for the same tasks on other servers."""
    rows = tasks.rows.astype(np.int64)
    return rows[:, HOLDER] + rows[:, START] // _TURN_TOKENS


def fetches_of_tasks(tasks: Tasks, relay_servers: int) -> Fetches:
    """Return `transport.fetches_of` of `tasks.placement()`, with relays in `relay_order`; `relay_servers` is
    `Servers.of_relay`."""
    rows = tasks.rows.astype(np.int64)
    num_rows = len(rows)
    holder, server, nano_batch = rows[:, HOLDER], rows[:, SERVER], rows[:, NANO_BATCH]
    own = (server * 2 + ROW) * num_rows + np.arange(num_rows)
    away = holder != server
    # The last row of each (sample, server, nano-batch) asks for all rows of the sample up to itself.
    begins = np.concatenate([[True], rows[1:, SAMPLE] != rows[:-1, SAMPLE]])
    first_of = np.maximum.accumulate(np.where(begins, np.arange(num_rows), 0))
    key = (first_of * (int(server.max(initial=0)) + 1) + server) * 2 + nano_batch
    order = np.argsort(key, kind="stable")
    last = order[np.append(key[order][1:] != key[order][:-1], True)]
    number = last - first_of[last] + 1
    asking = np.repeat(last, number)
    column = np.arange(len(asking)) - np.repeat(np.cumsum(number) - number, number) + first_of[asking]
    missing = holder[column] != server[asking]
    asking, column = asking[missing], column[missing]
    used = np.concatenate([own[away], (server[asking] * 2 + COLUMN) * num_rows + column])
    lanes = Lanes(int(max(holder.max(initial=0), server.max(initial=0))) + 1, 0, relay_servers)
    divisions = np.concatenate([nano_batch[away], nano_batch[asking]])
    return fetches_used(holder, tasks.tokens, used, divisions, lanes, relay_order(tasks))


def bytes_of_rounds(messages: Messages, servers: Servers, num_divisions: int) -> Floats:
    """Return [division, round, link, sent or received, server] bytes; link is IN_NODE or ACROSS_NODES."""
    across = messages.sender // servers.of_node != messages.receiver // servers.of_node
    place = (messages.division * NUM_ROUNDS + messages.round) * 2 + np.where(across, ACROSS_NODES, IN_NODE)
    size = num_divisions * NUM_ROUNDS * 2 * servers.number
    sides = [
        np.bincount(place * servers.number + ends, messages.num_bytes, size).reshape(
            num_divisions, NUM_ROUNDS, 2, servers.number
        )
        for ends in (messages.sender, messages.receiver)
    ]
    return np.stack(sides, axis=3).astype(np.float64)


def fetched_tokens(tasks: Tasks, num_servers: int) -> Ints:
    """Return int64 [ROW or COLUMN, server]: tokens whose queries, or keys and values, a server fetches in all."""
    fetches = fetches_of_tasks(tasks, 1)  # relays fetch nothing that they do not use
    counted = np.bincount(fetches.kind * num_servers + fetches.lane, tasks.tokens[fetches.home], 2 * num_servers)
    return counted.reshape(2, num_servers).astype(np.int64)
