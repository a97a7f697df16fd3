"""How the lanes of a CP group compute attention together, as a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, cast, get_args

from dynamic_cp.errors import UnsupportedFeatureError

CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p", "blocks", "latent"]


class Traits(NamedTuple):
    """What values and flags must know of a mechanism; `dynamic_cp.mechanisms` has a model of each.

    Attributes:
        inner: lanes that exchange heads: "one" (none is exchanged), "all" of the group, or a number that the planner
            chooses: "chosen" is more than one and fewer than all, "any" may be one.
        is_placed: its buckets say which lane holds what (`Bucket.placement`) and may span any neighbouring lanes.
        serves_windows: layers may have windows; a closed form then prices causal layers times the sample's density.
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
"""Mechanism -> its traits; the one table of their names."""
_PLACED: Collection[str] = frozenset(name for name, traits in TRAITS.items() if traits.is_placed)

RING_ALONE: tuple[CpCommType, ...] = ("p2p",)
"""The ring needs the fewest communicators, and a loop that knows a single CP group can run nothing else."""

BY_PLACEMENT: CpCommType = "blocks"
"""The mechanism of a bucket with a placement."""


def is_placed(name: str) -> bool:
    """Return whether a value of --cp-comm-type is a mechanism whose buckets have a placement."""
    return name in _PLACED


def needs_latents(name: str) -> bool:
    """Return whether a value of --cp-comm-type is a mechanism that only multi-latent attention has."""
    traits = TRAITS.get(cast(CpCommType, name))
    return traits is not None and traits.needs_latents


CHOOSES_INNER_SIZE = tuple(name for name, traits in TRAITS.items() if traits.inner in ("chosen", "any"))
"""Mechanisms that do not imply `Bucket.inner_cp_size`."""

CP_COMM_TYPES: tuple[CpCommType, ...] = tuple(
    name for name in get_args(CpCommType) if not is_placed(name) and not needs_latents(name)
)
"""Mechanisms that every model has and packers compare by their closed forms."""

UNPLACED: tuple[CpCommType, ...] = (*CP_COMM_TYPES, *filter(needs_latents, TRAITS))
"""Mechanisms whose buckets are CP groups that share tokens evenly."""

AUTO: Literal["auto"] = "auto"
"""In place of a mechanism: the planner chooses."""

AUTO_ALONE = (cast(CpCommType, AUTO),)
"""The default of `PlanOptions.cp_comm_types`: a `Problem` replaces it by the mechanisms of its model."""

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
    """Return the mechanisms that `wanted`, a value of --cp-comm-type, allows: with AUTO those that serve the whole job.

    AUTO places attention only where samples have masks or layers have windows: on causal data it gained 0.5% of a step
    at most (docs/figures/attention.md), and the room for fetched keys would be taken from tokens.

    Args:
        may_be_placed: False where the tokens of a bucket must stay on the lanes of one CP group.
        left_out: mechanisms that the layers of the run lack.
    """
    if wanted != AUTO:
        return (cast(CpCommType, wanted),)
    places = may_be_placed and (has_masks or has_windows)
    names = (*(UNPLACED if has_latents else CP_COMM_TYPES), *filter(is_placed, TRAITS if places else ()))
    serving = (name for name in names if TRAITS[name].serves_windows or not has_windows)
    return tuple(name for name in serving if name not in left_out)


def check_latents(names: Collection[CpCommType], kv_lora_rank: int) -> None:
    """Refuse exchanges that are of latents only, of a model without them. Raises UnsupportedFeatureError:
    `kv_lora_rank` is 0."""
    if all(map(needs_latents, names)) and not kv_lora_rank:
        raise UnsupportedFeatureError(
            f"cp_comm_types {' '.join(names)} exchanges the latents of multi-latent attention, and kv_lora_rank of "
            "this model is 0: use p2p or auto (--cp-comm-type)"
        )


IN_NODE, ACROSS_NODES = 0, 1
"""The links of a group of lanes."""


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
        """Whether text names the inner size: the mechanism does not imply it, and it is no default of 1."""
        traits = TRAITS.get(self.cp_comm_type)
        kind = None if traits is None else traits.inner
        return kind == "chosen" or (kind == "any" and self.inner_cp_size > 1)

    def __str__(self) -> str:
        """Return the name in plans and reports: `a2a`, or with a chosen inner size `a2a+p2p/8`."""
        return f"{self.cp_comm_type}/{self.inner_cp_size}" if self.chooses_inner_size else self.cp_comm_type
