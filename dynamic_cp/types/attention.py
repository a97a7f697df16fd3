"""How the lanes of a CP group compute attention together, as a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, cast, get_args

from dynamic_cp.errors import UnsupportedFeatureError

CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p", "blocks", "latent"]


class Traits(NamedTuple):
    """What values and flags have to know of a mechanism; `dynamic_cp.mechanisms` has a model of each.

    Attributes:
        inner: how many lanes of a group exchange heads: none with another ("one"), "all", as many as the planner
            chooses ("chosen": more than one, fewer than all), or "any" number of them that it chooses, none among them.
        is_placed: its buckets say which lane holds what (`Bucket.placement`); they may span any neighbouring lanes.
        needs_latents: only multi-latent attention has it; packers compare it by its closed form, too.
    """

    inner: Literal["one", "all", "chosen", "any"]
    is_placed: bool = False
    needs_latents: bool = False


TRAITS: Mapping[CpCommType, Traits] = {
    "p2p": Traits("one"),
    "a2a": Traits("all"),
    "all_gather": Traits("one"),
    "a2a+p2p": Traits("chosen"),
    "blocks": Traits("any", is_placed=True),
    "latent": Traits("one", needs_latents=True),
}
"""Mechanism -> what it is; the one table of their names."""

RING_ALONE: tuple[CpCommType, ...] = ("p2p",)
"""What is allowed where nothing is said."""

BY_PLACEMENT: CpCommType = "blocks"
"""The mechanism of a bucket that is made with a placement."""


def is_placed(name: str) -> bool:
    """Return whether a value of --cp-comm-type is a mechanism whose buckets have a placement."""
    traits = TRAITS.get(cast(CpCommType, name))
    return traits is not None and traits.is_placed


def needs_latents(name: str) -> bool:
    """Return whether a value of --cp-comm-type is a mechanism that only multi-latent attention has."""
    traits = TRAITS.get(cast(CpCommType, name))
    return traits is not None and traits.needs_latents


CHOOSES_INNER_SIZE = tuple(name for name, traits in TRAITS.items() if traits.inner in ("chosen", "any"))
"""Mechanisms that do not imply `Bucket.inner_cp_size`."""

CP_COMM_TYPES: tuple[CpCommType, ...] = tuple(
    name for name in get_args(CpCommType) if not is_placed(name) and not needs_latents(name)
)
"""Mechanisms that packers compare by their closed forms, of every model."""

UNPLACED: tuple[CpCommType, ...] = (*CP_COMM_TYPES, *filter(needs_latents, TRAITS))
"""Mechanisms whose buckets are CP groups that share out tokens evenly."""

AUTO = "auto"
"""Instead of a mechanism: the planner chooses."""

CHOICES: tuple[str, ...] = (AUTO, *UNPLACED, *filter(is_placed, TRAITS))
"""Values of --cp-comm-type."""


def check_latents(names: Collection[CpCommType], kv_lora_rank: int) -> None:
    """Refuse exchanges that are of latents only, of a model without them.

    Raises:
        UnsupportedFeatureError: `kv_lora_rank` is 0.
    """
    if all(map(needs_latents, names)) and not kv_lora_rank:
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(names)} exchanges the latents of multi-latent attention, and kv_lora_rank of "
            "this model is 0: use p2p or auto (--cp-comm-type)",
            cp_comm_types=tuple(names),
        )


IN_NODE, ACROSS_NODES = 0, 1
"""The link of a group of lanes."""


class Attention(NamedTuple):
    """How the lanes of a CP group compute attention together; `dynamic_cp.mechanisms` has a model of each mechanism.

    Attributes:
        cp_comm_type: the mechanism.
        inner_cp_size: as in `Bucket`.
    """

    cp_comm_type: CpCommType = "p2p"
    inner_cp_size: int = 1

    @property
    def chooses_inner_size(self) -> bool:
        """Whether the mechanism and the CP size leave the inner size open; where any is possible, 1 goes unsaid."""
        traits = TRAITS.get(self.cp_comm_type)
        kind = None if traits is None else traits.inner
        return kind == "chosen" or (kind == "any" and self.inner_cp_size > 1)

    def __str__(self) -> str:
        """Return what plans and reports call it: `a2a`, or with the inner size that it chooses `a2a+p2p/8`."""
        return f"{self.cp_comm_type}/{self.inner_cp_size}" if self.chooses_inner_size else self.cp_comm_type
