"""All mechanisms by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynamic_cp.mechanisms.all_gather import AllGather
from dynamic_cp.mechanisms.all_to_all import AllToAll
from dynamic_cp.mechanisms.blocks import Blocks
from dynamic_cp.mechanisms.latent_ring import LatentRing
from dynamic_cp.mechanisms.mechanism import Mechanism, Sharing
from dynamic_cp.mechanisms.ring import Ring
from dynamic_cp.mechanisms.two_levels import TwoLevels
from dynamic_cp.types import TRAITS, Attention, CpCommType

MECHANISMS: Mapping[CpCommType, Mechanism] = {
    one.name: one for one in (Ring(), AllGather(), AllToAll(), TwoLevels(), Blocks(), LatentRing())
}
"""Name -> mechanism, for every name that a bucket may have."""


def serving_masks(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    """Return those of `names` that serve samples with masks of their own on several lanes."""
    return tuple(name for name in names if MECHANISMS[name].serves_masks)


def masks_are_served_by() -> str:
    """Return the mechanisms that serve samples with masks of their own, for words."""
    return " or ".join(serving_masks())


def serving_windows(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    """Return those of `names` that serve layers with windows on several lanes."""
    return tuple(name for name in names if TRAITS[name].serves_windows)


def attentions_of(names: Iterable[CpCommType], cp_size: int, sharing: Sharing) -> list[Attention]:
    """Return the ways in which a group of `cp_size` lanes can compute attention by the mechanisms of these names."""
    if sharing.has_windows and cp_size > 1:
        names = serving_windows(names)
    return [Attention(name, inner) for name in names for inner in MECHANISMS[name].inner_sizes(cp_size, sharing)]


def chosen_inner_sizes(names: Iterable[CpCommType], largest: int, sharing: Sharing) -> tuple[int, ...]:
    """Return the inner sizes that plans may choose in groups of up to `largest` lanes, ascending; () where none may."""
    ways = attentions_of(names, largest, sharing)
    return tuple(sorted({way.inner_cp_size for way in ways if way.chooses_inner_size}))
