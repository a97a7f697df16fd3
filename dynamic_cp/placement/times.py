"""How long the programmes of a placement take: every lane's end, with what its transfers and its neighbours cost it.

A lane computes its divisions one after the other. What division t + 1 fetches from its own node travels while it
computes division t, what t + 2 fetches from other nodes, too; results go back while later divisions compute. Links to
other nodes and links inside the node work at the same time, each sends and receives one round after the other.
"""

from __future__ import annotations

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.transport import Messages

_ACROSS, _INSIDE, _COLLECT, _DELIVER = 0, 1, 2, 3


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
    divisions, rounds, senders, receivers = messages.division, messages.round, messages.sender, messages.receiver
    num_bytes = messages.num_bytes
    ends = np.zeros((num_divisions * 4 + 1,), np.int64)
    for index in range(len(divisions)):
        ends[divisions[index] * 4 + rounds[index] + 1] = index + 1
    for slot in range(1, len(ends)):
        ends[slot] = max(ends[slot], ends[slot - 1])
    free = np.zeros((2, num_lanes))
    arrived = np.zeros((2, num_divisions + 2, num_lanes))
    begun, now, returned = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(num_lanes)
    _exchange(
        senders, receivers, num_bytes, 0, ends[_ACROSS + 1], begun, free[_ACROSS], latency_s, across,
        arrived[_ACROSS, 0],
    )  # fmt: skip
    # A link serves rounds in the order in which lanes begin them: what later divisions fetch goes before what this one
    # gives back.
    for division in range(-1, num_divisions):
        if division >= 0:
            for lane in range(num_lanes):
                begun[lane] = max(now[lane], arrived[_ACROSS, division, lane], arrived[_INSIDE, division, lane])
                now[lane] = begun[lane] + attention_s[division, lane]
        if division + 1 < num_divisions:
            slot = 4 * (division + 1) + _INSIDE
            _exchange(
                senders, receivers, num_bytes, ends[slot], ends[slot + 1],
                np.maximum(begun, arrived[_ACROSS, division + 1]), free[_INSIDE], latency_s, inside,
                arrived[_INSIDE, division + 1],
            )  # fmt: skip
        if division + 2 < num_divisions:
            slot = 4 * (division + 2) + _ACROSS
            _exchange(
                senders, receivers, num_bytes, ends[slot], ends[slot + 1], begun, free[_ACROSS], latency_s, across,
                arrived[_ACROSS, division + 2],
            )  # fmt: skip
        if division < 0:
            continue
        collected = now.copy()
        slot = 4 * division + _COLLECT
        _exchange(
            senders, receivers, num_bytes, ends[slot], ends[slot + 1], now, free[_INSIDE], latency_s, inside, collected
        )
        delivered = collected.copy()
        slot = 4 * division + _DELIVER
        _exchange(
            senders, receivers, num_bytes, ends[slot], ends[slot + 1], collected, free[_ACROSS], latency_s, across,
            delivered,
        )  # fmt: skip
        for lane in range(num_lanes):
            returned[lane] = max(returned[lane], delivered[lane])
    return np.maximum(now, returned)


@compiled
def _exchange(
    senders: Ints, receivers: Ints, num_bytes: Floats, first: int, end: int, posted: Floats, free: Floats,
    latency_s: float, bytes_per_s: float, done: Floats,
) -> None:  # fmt: skip
    """Let the messages first .. end - 1 travel; set `done` and `free` of the lanes that take part."""
    if first == end:
        return
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
