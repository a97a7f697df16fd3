"""What servers send each other for tasks: the transfers of a placement, without its many tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.sent import TokenBytes
from dynamic_cp.placement.transport import ACROSS, COLUMN, DELIVER, ROW, Fetches, Messages, fetches_used
from dynamic_cp.types import ACROSS_NODES, IN_NODE
from dynamic_cp.types.tasks import HALF, HOLDER, SAMPLE, SERVER, Tasks


def fetches_of_tasks(tasks: Tasks, node_servers: int) -> Fetches:
    """Return what `transport.fetches_of` says of `tasks.placement()`.

    Args:
        node_servers: servers of a node; the first server begins one.
    """
    rows = tasks.rows.astype(np.int64)
    num_rows = len(rows)
    holder, server, half = rows[:, HOLDER], rows[:, SERVER], rows[:, HALF]
    own = (server * 2 + ROW) * num_rows + np.arange(num_rows)
    away = holder != server
    # The last row of each (sample, server, half) asks for all rows of the sample up to itself.
    begins = np.concatenate([[True], rows[1:, SAMPLE] != rows[:-1, SAMPLE]])
    first_of = np.maximum.accumulate(np.where(begins, np.arange(num_rows), 0))
    key = (first_of * (int(server.max(initial=0)) + 1) + server) * 2 + half
    order = np.argsort(key, kind="stable")
    last = order[np.append(key[order][1:] != key[order][:-1], True)]
    number = last - first_of[last] + 1
    asking = np.repeat(last, number)
    column = np.arange(len(asking)) - np.repeat(np.cumsum(number) - number, number) + first_of[asking]
    missing = holder[column] != server[asking]
    asking, column = asking[missing], column[missing]
    used = np.concatenate([own[away], (server[asking] * 2 + COLUMN) * num_rows + column])
    return fetches_used(holder, used, np.concatenate([half[away], half[asking]]), 0, node_servers)


def server_bytes(messages: Messages, num_servers: int) -> Floats:
    """Return [link, sent or received, server] bytes; link is IN_NODE or ACROSS_NODES."""
    is_across = (messages.round == ACROSS) | (messages.round == DELIVER)
    total = np.zeros((2, 2, num_servers))
    for link, chosen in ((IN_NODE, ~is_across), (ACROSS_NODES, is_across)):
        for side, servers in enumerate((messages.sender, messages.receiver)):
            total[link, side] = np.bincount(servers[chosen], messages.num_bytes[chosen], num_servers)
    return total


def bytes_of_tasks(
    tasks: Tasks, directions: Sequence[int], num_servers: int, node_servers: int, of_token: TokenBytes
) -> Floats:
    """Return [direction, link, sent or received, server] bytes of all layers that `of_token` is of.

    Args:
        tasks: that are sent for.
        directions: forward (0), backward (1), or both.
        num_servers: that share them; node_servers: of a node.
        of_token: what a token takes.
    """
    fetches = fetches_of_tasks(tasks, node_servers)
    sides = (of_token.messages(fetches, tasks.tokens, backward=direction == 1) for direction in directions)
    return np.array([server_bytes(messages, num_servers) for messages in sides])


def fetched_tokens(tasks: Tasks, num_servers: int, node_servers: int) -> Ints:
    """Return int64 [ROW or COLUMN, server]: tokens whose queries, or keys and values, a server fetches in all."""
    fetches = fetches_of_tasks(tasks, node_servers)
    counted = np.bincount(fetches.kind * num_servers + fetches.lane, tasks.tokens[fetches.home], 2 * num_servers)
    return counted.reshape(2, num_servers).astype(np.int64)
