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
    begun = np.zeros((num_divisions + 1, num_lanes))
    free = np.zeros((2, num_lanes))
    arrived = np.zeros((2, num_divisions, num_lanes))
    returned = np.zeros(num_lanes)
    now = np.zeros(num_lanes)
    posted = np.zeros(num_lanes)
    for division in range(num_divisions):
        # What this division needs was asked for while earlier ones computed.
        for which in (_ACROSS, _INSIDE):
            for lane in range(num_lanes):
                posted[lane] = begun[max(division - 2 + which, 0), lane] if division - 2 + which >= 0 else 0.0
                if which == _INSIDE:
                    posted[lane] = max(posted[lane], arrived[0, division, lane])
            link = across if which == _ACROSS else inside
            _exchange(
                senders, receivers, num_bytes, ends[4 * division + which], ends[4 * division + which + 1],
                posted, free[which], latency_s, link, arrived[which, division],
            )  # fmt: skip
        for lane in range(num_lanes):
            begun[division, lane] = max(now[lane], arrived[0, division, lane], arrived[1, division, lane])
            now[lane] = begun[division, lane] + attention_s[division, lane]
        collected = now.copy()
        _exchange(
            senders, receivers, num_bytes, ends[4 * division + _COLLECT], ends[4 * division + _COLLECT + 1],
            now, free[_INSIDE], latency_s, inside, collected,
        )  # fmt: skip
        delivered = collected.copy()
        _exchange(
            senders, receivers, num_bytes, ends[4 * division + _DELIVER], ends[4 * division + _DELIVER + 1],
            collected, free[_ACROSS], latency_s, across, delivered,
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
