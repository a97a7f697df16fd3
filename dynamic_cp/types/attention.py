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
        serves_windows: layers may have windows. A closed form is then that of causal layers by density.
    """

    inner: Literal["one", "all", "chosen", "any"]
    is_placed: bool = False
    needs_latents: bool = False
    serves_windows: bool = False


TRAITS: Mapping[CpCommType, Traits] = {
    "p2p": Traits("one"),
    "a2a": Traits("all", serves_windows=True),
    "all_gather": Traits("one", serves_windows=True),
    "a2a+p2p": Traits("chosen"),
    "blocks": Traits("any", is_placed=True, serves_windows=True),
    "latent": Traits("one", needs_latents=True),
}
"""Mechanism -> what it is; the one table of their names."""

RING_ALONE: tuple[CpCommType, ...] = ("p2p",)
"""What needs the fewest communicators, and all that loops have which know one CP group only."""

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

AUTO: Literal["auto"] = "auto"
"""Instead of a mechanism: the planner chooses."""

AUTO_ALONE = (cast(CpCommType, AUTO),)
"""`PlanOptions.cp_comm_types` where nothing is said: a `Problem` has the mechanisms of its model instead."""

CHOICES: tuple[str, ...] = (AUTO, *UNPLACED, *filter(is_placed, TRAITS))
"""Values of --cp-comm-type."""


def exchanges_of(
    wanted: str,
    *,
    has_windows: bool = False,
    has_masks: bool = False,
    has_latents: bool = False,
    may_be_placed: bool = True,
    left_out: Collection[CpCommType] = (),
) -> tuple[CpCommType, ...]:
    """Return the mechanisms that a value of --cp-comm-type allows; `auto` those that serve all of the job.

    Placed attention is among those of `auto` where samples bring masks of their own, or layers have windows: on causal
    data steps gained 0.5 % at most (docs/figures/blocks.md), and room for what it fetches would be taken from tokens.

    Args:
        wanted: the value, AUTO or a mechanism.
        has_windows: layers have windows.
        has_masks: samples bring masks of their own.
        has_latents: the model has multi-latent attention.
        may_be_placed: nothing needs the tokens of a bucket on the lanes of one CP group.
        left_out: what the layers of the run lack.
    """
    if wanted != AUTO:
        return (cast(CpCommType, wanted),)
    places = may_be_placed and (has_masks or has_windows)
    names = (*(UNPLACED if has_latents else CP_COMM_TYPES), *filter(is_placed, TRAITS if places else ()))
    serving = (name for name in names if TRAITS[name].serves_windows or not has_windows)
    return tuple(name for name in serving if name not in left_out)


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
