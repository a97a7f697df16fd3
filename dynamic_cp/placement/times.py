"""How long the programmes of a placement take: every lane's end, with what its transfers and its neighbours cost it.

A lane computes its divisions one after the other. What division t + 1 fetches from its own node travels while it
computes division t, what t + 2 fetches from other nodes, too; results go back while later divisions compute. Links to
other nodes and links inside the node work at the same time, each sends and receives one round after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats
from dynamic_cp.placement.transport import Messages

_ACROSS, _INSIDE, _COLLECT, _DELIVER = 0, 1, 2, 3


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

    Args:
        messages: of that direction, in the order of `messages_of`.
        attention_s: [division, lane] what its kernels take.
        latency_s: of a round that has messages.
        inside, across: bytes per second of a lane's links in its node, and to other nodes.
    """
    num_divisions, num_lanes = attention_s.shape
    divisions, rounds = messages.division, messages.round
    ends = np.zeros((num_divisions * 4 + 1,), np.int64)
    for index in range(len(divisions)):
        ends[divisions[index] * 4 + rounds[index] + 1] = index + 1
    for slot in range(1, len(ends)):
        ends[slot] = max(ends[slot], ends[slot - 1])
    across_nodes = Link(np.zeros(num_lanes), latency_s, across)
    in_node = Link(np.zeros(num_lanes), latency_s, inside)
    arrived = np.zeros((2, num_divisions + 2, num_lanes))
    begun, now, returned = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(num_lanes)
    _exchange(messages, 0, ends[_ACROSS + 1], begun, across_nodes, arrived[_ACROSS, 0])
    # A link serves rounds in the order in which lanes begin them: what later divisions fetch goes before what this one
    # gives back.
    for division in range(-1, num_divisions):
        if division >= 0:
            for lane in range(num_lanes):
                begun[lane] = max(now[lane], arrived[_ACROSS, division, lane], arrived[_INSIDE, division, lane])
                now[lane] = begun[lane] + attention_s[division, lane]
        if division + 1 < num_divisions:
            slot = 4 * (division + 1) + _INSIDE
            posted = np.maximum(begun, arrived[_ACROSS, division + 1])
            _exchange(messages, ends[slot], ends[slot + 1], posted, in_node, arrived[_INSIDE, division + 1])
        if division + 2 < num_divisions:
            slot = 4 * (division + 2) + _ACROSS
            _exchange(messages, ends[slot], ends[slot + 1], begun, across_nodes, arrived[_ACROSS, division + 2])
        if division < 0:
            continue
        collected = now.copy()
        slot = 4 * division + _COLLECT
        _exchange(messages, ends[slot], ends[slot + 1], now, in_node, collected)
        delivered = collected.copy()
        slot = 4 * division + _DELIVER
        _exchange(messages, ends[slot], ends[slot + 1], collected, across_nodes, delivered)
        for lane in range(num_lanes):
            returned[lane] = max(returned[lane], delivered[lane])
    return np.maximum(now, returned)


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
