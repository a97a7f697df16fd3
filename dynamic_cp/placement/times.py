"""How long the programmes of a placement take: every lane's end, with what its transfers and its neighbours cost it.

A lane computes its divisions one after the other. What division t + 1 fetches from its own node travels while it
computes division t, what t + 2 fetches from other nodes, too; results go back while later divisions compute. Links to
other nodes and links inside the node work at the same time, each sends and receives one round after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, NUM_ROUNDS, Messages


class Link(NamedTuple):
    """Links of one kind.

    Attributes:
        free_s: [lane] when its link is free.
        latency_s: of a round; bytes_per_s: of a link.
    """

    free_s: Floats
    latency_s: float
    bytes_per_s: float


@compiled
def lane_ends_s(messages: Messages, attention_s: Floats, latency_s: float, inside: float, across: float) -> Floats:
    """Return when each lane is done with one direction, in seconds after all of them began.

    Example:
        Lane 1 fetches 100 bytes while it computes for 3 s: they are there after 10.5 s. It computes with them until
        16.5 s and gives 50 bytes back, which lane 0 has after 22 s.

        >>> rounds = [1, 1], [ACROSS, DELIVER], [0, 1], [1, 0]
        >>> messages = Messages(*map(np.array, rounds), np.array([100.0, 50.0]))
        >>> lane_ends_s(messages, np.array([[4.0, 3.0], [0.0, 6.0]]), 0.5, 1e9, 10.0).tolist()
        [22.0, 16.5]

    Args:
        messages: of that direction, in the order of `messages_of`.
        attention_s: [division, lane] what its kernels take.
        latency_s: of a round that has messages.
        inside, across: bytes per second of a lane's links in its node, and to other nodes.
    """
    num_divisions, num_lanes = attention_s.shape
    ends = _ends_of_rounds(messages, num_divisions)
    across_nodes = Link(np.zeros(num_lanes), latency_s, across)
    in_node = Link(np.zeros(num_lanes), latency_s, inside)
    arrived = np.zeros((2, num_divisions + 2, num_lanes))
    begun, now, returned = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(num_lanes)
    _exchange(messages, 0, ends[ACROSS + 1], begun, across_nodes, arrived[ACROSS, 0])
    # A link serves rounds in the order in which lanes begin them: what later divisions fetch goes before what this one
    # gives back.
    for division in range(-1, num_divisions):
        if division >= 0:
            for lane in range(num_lanes):
                begun[lane] = max(now[lane], arrived[ACROSS, division, lane], arrived[INSIDE, division, lane])
                now[lane] = begun[lane] + attention_s[division, lane]
        if division + 1 < num_divisions:
            slot = NUM_ROUNDS * (division + 1) + INSIDE
            posted = np.maximum(begun, arrived[ACROSS, division + 1])
            _exchange(messages, ends[slot], ends[slot + 1], posted, in_node, arrived[INSIDE, division + 1])
        if division + 2 < num_divisions:
            slot = NUM_ROUNDS * (division + 2) + ACROSS
            _exchange(messages, ends[slot], ends[slot + 1], begun, across_nodes, arrived[ACROSS, division + 2])
        if division < 0:
            continue
        collected = now.copy()
        slot = NUM_ROUNDS * division + COLLECT
        _exchange(messages, ends[slot], ends[slot + 1], now, in_node, collected)
        delivered = collected.copy()
        slot = NUM_ROUNDS * division + DELIVER
        _exchange(messages, ends[slot], ends[slot + 1], collected, across_nodes, delivered)
        for lane in range(num_lanes):
            returned[lane] = max(returned[lane], delivered[lane])
    return np.maximum(now, returned)


@compiled
def _ends_of_rounds(messages: Messages, num_divisions: int) -> Ints:
    """Return where the messages of each round of each division begin, and at the end how many there are."""
    ends = np.zeros(num_divisions * NUM_ROUNDS + 1, np.int64)
    for index in range(len(messages.division)):
        ends[messages.division[index] * NUM_ROUNDS + messages.round[index] + 1] = index + 1
    for slot in range(1, len(ends)):
        ends[slot] = max(ends[slot], ends[slot - 1])
    return ends


@compiled
def _exchange(messages: Messages, first: int, end: int, posted: Floats, link: Link, done: Floats) -> None:
    """Let the messages first .. end - 1 travel; set `done`, and when the link is free, of the lanes that take part."""
    if first == end:
        return
    senders, receivers, num_bytes = messages.sender, messages.receiver, messages.num_bytes
    free, latency_s, bytes_per_s = link
    num_lanes = len(posted)
    sent, received, start = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(num_lanes)
    for index in range(first, end):
        sent[senders[index]] += num_bytes[index]
        received[receivers[index]] += num_bytes[index]
    for lane in range(num_lanes):
        start[lane] = max(posted[lane], free[lane])
    for lane in range(num_lanes):
        if sent[lane] > 0.0 or received[lane] > 0.0:
            free[lane] = start[lane] + max(sent[lane], received[lane]) / bytes_per_s
    for index in range(first, end):
        # A message is there when both its sender and its receiver got through all of theirs.
        sender, receiver = senders[index], receivers[index]
        done[receiver] = max(done[receiver], max(free[sender], free[receiver]) + latency_s)
