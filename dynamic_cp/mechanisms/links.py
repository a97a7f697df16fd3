"""Which link the exchange of every aligned group of lanes uses, and whether inner groups lie in one node each."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.types import ACROSS_NODES, IN_NODE, Bucket, Topology


class Links(NamedTuple):
    """The links of all aligned groups; `k` is log2 of the CP size.

    Attributes:
        of_group: [k, first lane >> k] -> ACROSS_NODES where the group spans nodes on any stage, else IN_NODE.
        used: k -> the links that groups of that size have.
    """

    of_group: Ints
    used: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=64)
def lanes_in_one_node(topology: Topology) -> int:
    """Return the largest power of two that divides the lanes of a node and whose aligned groups each lie in one node.

    The largest inner group; 1 where not even pairs do.
    """
    used = links_of(topology).used
    size = 1
    while topology.lanes_per_node % (2 * size) == 0 and used[min(size.bit_length(), len(used) - 1)] == (IN_NODE,):
        size *= 2
    return size


@lru_cache(maxsize=64)
def links_of(topology: Topology) -> Links:
    """Return `topology.spans_nodes` of every aligned group at once."""
    num_lanes = topology.num_lanes
    links = np.zeros((num_lanes.bit_length(), num_lanes), np.int64)
    used: list[tuple[int, ...]] = [(IN_NODE,)]
    for k in range(1, num_lanes.bit_length()):
        blocks = num_lanes >> k
        first_lanes = np.arange(blocks, dtype=np.int64) << k
        for stage in topology.stages_that_differ:
            links[k, :blocks] |= topology.spans_nodes_on(stage, first_lanes, 1 << k)
        num_across = int(links[k, :blocks].sum())
        used.append(((IN_NODE,) if num_across < blocks else ()) + ((ACROSS_NODES,) if num_across else ()))
    links.flags.writeable = False
    return Links(links, tuple(used))


def why_inner_groups_are_split(bucket: Bucket, topology: Topology) -> str | None:
    """Return why the inner groups of a bucket do not lie in one node each, with the remedy; None where they do."""
    inner, node = bucket.inner_cp_size, topology.lanes_per_node
    if node % inner:
        return f"inner_cp_size {inner} does not divide the {node} lanes of a node: use an inner size that does, or p2p"
    for first in bucket.lanes[::inner]:
        if topology.spans_nodes(first, inner):
            return (
                f"the inner group of lanes {first}-{first + inner - 1} lies on more than one node of {node} lanes: "
                "use a smaller inner_cp_size, or p2p"
            )
    return None
