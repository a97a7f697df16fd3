"""Bytes that the lanes of a placement send each other, by link: what prices are made of and the runtime counts.

A fetched row brings queries, and backward also outputs, their gradients and log-sum-exp; given back are outputs with
log-sum-exp, and backward the gradient of the queries. A fetched column brings keys and values; backward gives their
gradients back. What crosses to a node once and is handed on there counts on both links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.placement.lanes import Lanes
from dynamic_cp.placement.transport import Fetches, Messages, fetches_of, messages_of
from dynamic_cp.types import ACROSS_NODES, IN_NODE, Placement


class TokenBytes(NamedTuple):
    """Bytes of one token of a rank, of one layer or of several.

    Attributes:
        query: queries; as many are outputs, and the gradients of either.
        kv: keys and values; as many are their gradients.
        lse: log-sum-exp.
        latent: what keys and values are projected up from; 0: they are not.
        narrow_kv: keys and values where these are not padded to the width of keys; 0: as kv.
    """

    query: float
    kv: float
    lse: float
    latent: float = 0.0
    narrow_kv: float = 0.0

    def messages(self, fetches: Fetches, tokens: Ints, *, backward: bool, is_kept: bool = False) -> Messages:
        """Return the transfers of a direction.

        Args:
            fetches: of all lanes.
            tokens: of each home.
            is_kept: backward, queries, keys and values are there already: forward was just computed again.
        """
        query, kv, lse, *_ = self
        # (of a row, of a column)
        there = (3 * query + lse, kv) if backward else (query, kv)
        if is_kept:
            there = (2 * query + lse, 0.0)
        back = (query, kv) if backward else (query + lse, 0.0)
        return messages_of(fetches, tokens, np.array(there), np.array(back))


class Sent(NamedTuple):
    """Bytes from lane to lane, each two that send anything once.

    Attributes:
        sender, receiver: lanes of the bucket.
        num_bytes: [direction, entry], forward and backward.
    """

    sender: Ints
    receiver: Ints
    num_bytes: Floats

    def of_lanes(self, nodes: Ints) -> Floats:
        """Return [direction, link, lane] -> bytes that a lane sends, link being IN_NODE or ACROSS_NODES.

        Args:
            nodes: [lane] -> its node.
        """
        link = np.where(nodes[self.sender] == nodes[self.receiver], IN_NODE, ACROSS_NODES)
        place = link * len(nodes) + self.sender
        sums = [np.bincount(place, of_direction, 2 * len(nodes)) for of_direction in self.num_bytes]
        return np.array(sums, np.float64).reshape(2, 2, len(nodes))

    def between(self, groups: Ints) -> Floats:
        """Return [sender, receiver] -> bytes of both directions, among groups of lanes such as nodes.

        Args:
            groups: [lane] -> number of its group.
        """
        num_groups = int(groups.max()) + 1
        place = groups[self.sender] * num_groups + groups[self.receiver]
        sums = np.bincount(place, self.num_bytes.sum(axis=0), num_groups**2)
        return sums.astype(np.float64).reshape(num_groups, num_groups)


def sent_by_lanes(placement: Placement, lanes: Lanes, of_token: TokenBytes) -> Sent:
    """Return what the lanes of a placement send in a forward and a backward pass, without what recomputation repeats.

    Args:
        lanes: of the placement.
        of_token: what a token takes: of one layer, or of as many as the bytes are to be of.
    """
    fetches = fetches_of(placement, lanes)
    tokens = placement.tokens_of_homes
    forward, backward = (of_token.messages(fetches, tokens, backward=backward) for backward in (False, True))
    directions = zip((forward, backward), np.eye(2), strict=True)
    return added([Sent(one.sender, one.receiver, np.outer(which, one.num_bytes)) for one, which in directions])


def added(parts: Sequence[Sent]) -> Sent:
    """Return all that is sent in `parts`, in which the same two lanes may be several times."""
    if len(parts) == 1:
        return parts[0]
    sender, receiver = (np.concatenate([getattr(one, name) for one in parts]) for name in ("sender", "receiver"))
    num_bytes = np.concatenate([one.num_bytes for one in parts], axis=1)
    num_lanes = int(max(sender.max(initial=0), receiver.max(initial=0))) + 1
    pairs, place = np.unique(sender * num_lanes + receiver, return_inverse=True)
    sums = [np.bincount(place, of_direction, len(pairs)) for of_direction in num_bytes]
    return Sent(pairs // num_lanes, pairs % num_lanes, np.array(sums, np.float64))
