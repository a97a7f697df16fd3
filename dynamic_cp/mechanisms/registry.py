"""All mechanisms by name."""

from __future__ import annotations

from collections.abc import Mapping

from dynamic_cp.mechanisms.all_gather import AllGather
from dynamic_cp.mechanisms.all_to_all import AllToAll
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.ring import Ring
from dynamic_cp.mechanisms.two_levels import TwoLevels
from dynamic_cp.types import CpCommType

MECHANISMS: Mapping[CpCommType, Mechanism] = {one.name: one for one in (Ring(), AllGather(), AllToAll(), TwoLevels())}
"""Name -> mechanism, for every name that a bucket may have."""


def inner_sizes(
    exchange: CpCommType,
    cp_size: int,
    heads: tuple[int, int] | None,
    lanes_in_one_node: int,
    allowed: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Return the inner sizes with which a group can use an exchange, the largest first; () where it cannot.

    Args:
        exchange, cp_size: of the group, as in `Bucket`.
        heads, lanes_in_one_node, allowed: the attributes of `Sharing`.
    """
    return MECHANISMS[exchange].inner_sizes(cp_size, Sharing(heads, lanes_in_one_node, allowed))
