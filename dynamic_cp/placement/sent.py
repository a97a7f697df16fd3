"""Bytes that the lanes of a placement send each other, by link, and how long its programmes take.

Prices are made of these bytes, and the runtime counts them. A fetched row brings queries, and backward also outputs,
their gradients and log-sum-exp; it gives back outputs with log-sum-exp, and backward the gradient of the queries. A
fetched column brings keys and values; backward gives their gradients back. What crosses to a node and is handed on
counts on both links. A lane computes its divisions one after the other. Meanwhile what division t + 1 fetches from its
own node, and t + 2 from other nodes, travels during division t; results go back while later divisions compute. Links to
other nodes and inside the node work at the same time; each sends and receives one round after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.transport import (
    ACROSS,
    COLLECT,
    DELIVER,
    INSIDE,
    NUM_ROUNDS,
    Fetches,
    Messages,
    fetches_of,
    messages_of,
)
from dynamic_cp.types import ACROSS_NODES, IN_NODE, Placement
from dynamic_cp.types.placement import Lanes


class TokenBytes(NamedTuple):
    """Bytes of one token of a rank, of one layer or of several.

    Attributes:
        query, kv, lse: queries (outputs and gradients take as many), keys and values (so do gradients), log-sum-exp.
        latent: the latents of keys and values; 0: without latent attention.
        narrow_kv: keys and values if values are not padded to the width of keys; 0: as kv.
    """

    query: float
    kv: float
    lse: float
    latent: float = 0.0
    narrow_kv: float = 0.0

    def messages(self, fetches: Fetches, tokens: Ints, *, backward: bool, is_kept: bool = False) -> Messages:
        """Return the transfers of a direction; `tokens`: of each home; `is_kept`: in backward, queries, keys and values
        are there already, as forward was just computed again."""
        query, kv, lse, *_ = self
        # (of a row, of a column)
        there = (3 * query + lse, kv) if backward else (query, kv)
        if is_kept:
            there = (2 * query + lse, 0.0)
        back = (query, kv) if backward else (query + lse, 0.0)
        return messages_of(fetches, tokens, np.array(there), np.array(back))


class Sent(NamedTuple):
    """Bytes from lane to lane, each pair once: sender and receiver [entry], num_bytes [forward or backward, entry]."""

    sender: Ints
    receiver: Ints
    num_bytes: Floats

    def of_lanes(self, nodes: Ints) -> Floats:
        """Return [direction, IN_NODE or ACROSS_NODES, lane] -> bytes that a lane sends; `nodes`: [lane] -> its node."""
        link = np.where(nodes[self.sender] == nodes[self.receiver], IN_NODE, ACROSS_NODES)
        place = link * len(nodes) + self.sender
        sums = [np.bincount(place, of_direction, 2 * len(nodes)) for of_direction in self.num_bytes]
        return np.array(sums, np.float64).reshape(2, 2, len(nodes))

    def between(self, groups: Ints) -> Floats:
        """Return [sender, receiver] -> bytes of both directions between groups; `groups`: [lane] -> its group."""
        num_groups = int(groups.max()) + 1
        place = groups[self.sender] * num_groups + groups[self.receiver]
        sums = np.bincount(place, self.num_bytes.sum(axis=0), num_groups**2)
        return sums.astype(np.float64).reshape(num_groups, num_groups)


def sent_by_lanes(placement: Placement, lanes: Lanes, of_token: TokenBytes) -> Sent:
    """Return what the lanes of a placement send in a forward and a backward pass, without what recomputation repeats;
    `of_token` are the bytes of a token in one layer or several."""
    fetches = fetches_of(placement, lanes)
    tokens = placement.tokens_of_homes
    forward, backward = (of_token.messages(fetches, tokens, backward=backward) for backward in (False, True))
    directions = zip((forward, backward), np.eye(2), strict=True)
    return added([Sent(one.sender, one.receiver, np.outer(which, one.num_bytes)) for one, which in directions])


def added(parts: Sequence[Sent]) -> Sent:
    """Return the sum of `parts`, in which the same two lanes may be several times."""
    if len(parts) == 1:
        return parts[0]
    sender, receiver = (np.concatenate([getattr(one, name) for one in parts]) for name in ("sender", "receiver"))
    num_bytes = np.concatenate([one.num_bytes for one in parts], axis=1)
    num_lanes = int(max(sender.max(initial=0), receiver.max(initial=0))) + 1
    pairs, place = np.unique(sender * num_lanes + receiver, return_inverse=True)
    sums = [np.bincount(place, of_direction, len(pairs)) for of_direction in num_bytes]
    return Sent(pairs // num_lanes, pairs % num_lanes, np.array(sums, np.float64))


class Link(NamedTuple):
    """Links of one kind: [lane] when its link is free, the latency of a round, and the bytes per second of a link."""

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
        attention_s: [division, lane] seconds of its kernels.
        inside, across: bytes per second of a lane's links in its node, and to other nodes.
    """
    num_divisions, num_lanes = attention_s.shape
    ends = _ends_of_rounds(messages, num_divisions)
    across_nodes = Link(np.zeros(num_lanes), latency_s, across)
    in_node = Link(np.zeros(num_lanes), latency_s, inside)
    arrived = np.zeros((2, num_divisions + 2, num_lanes))
    begun, now, returned = np.zeros(num_lanes), np.zeros(num_lanes), np.zeros(num_lanes)
    _exchange(messages, 0, ends[ACROSS + 1], begun, across_nodes, arrived[ACROSS, 0])
    # A link serves rounds in the order in which lanes begin them: fetches of later divisions go before what this one
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
