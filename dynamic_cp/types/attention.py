"""How the lanes of a CP group compute attention together, as a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, cast, get_args

from dynamic_cp.errors import UnsupportedFeatureError

CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p", "blocks", "latent"]
INNER_SIZES: Mapping[CpCommType, Literal["one", "all", "chosen", "any"]] = {
    "p2p": "one",
    "a2a": "all",
    "all_gather": "one",
    "a2a+p2p": "chosen",
    "blocks": "any",
    "latent": "one",
}
"""Mechanism -> how many lanes of a group exchange heads: none with another, all, as many as the planner chooses (more
than one, fewer than all), or any number of them that it chooses, none among them."""
CHOOSES_INNER_SIZE = tuple(name for name, inner in INNER_SIZES.items() if inner in ("chosen", "any"))
"""Mechanisms that do not imply `Bucket.inner_cp_size`."""

PLACED: tuple[CpCommType, ...] = ("blocks",)
"""Mechanisms whose buckets say which lane holds what (`Bucket.placement`); they may span any neighbouring lanes."""

OF_LATENTS: tuple[CpCommType, ...] = ("latent",)
"""Mechanisms that only multi-latent attention has; packers compare them by their closed forms, too."""

CP_COMM_TYPES: tuple[CpCommType, ...] = tuple(
    name for name in get_args(CpCommType) if name not in (*PLACED, *OF_LATENTS)
)
"""Mechanisms that packers compare by their closed forms, of every model."""

AUTO = "auto"
"""Instead of a mechanism: the planner chooses."""


def exchanges_of(name: str, *, is_sparse: bool = False, has_latents: bool = False) -> tuple[CpCommType, ...]:
    """Return the mechanisms that a value of --cp-comm-type allows.

    Args:
        name: the value, AUTO or a mechanism.
        is_sparse: whether samples bring masks of their own, or layers have windows. Otherwise `auto` leaves out placed
            attention: on causal data steps gained 0.5 % at most (docs/blocks.md), and room for what it fetches would be
            taken from tokens.
        has_latents: whether the model has multi-latent attention.
    """
    if name != AUTO:
        return (cast(CpCommType, name),)
    return (*CP_COMM_TYPES, *(OF_LATENTS if has_latents else ()), *(PLACED if is_sparse else ()))


def check_latents(names: Collection[CpCommType], kv_lora_rank: int) -> None:
    """Refuse exchanges that are of latents only, of a model without them.

    Raises:
        UnsupportedFeatureError: `kv_lora_rank` is 0.
    """
    if set(names) <= set(OF_LATENTS) and not kv_lora_rank:
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
        kind = INNER_SIZES.get(self.cp_comm_type)
        return kind == "chosen" or (kind == "any" and self.inner_cp_size > 1)

    def __str__(self) -> str:
        """Return what plans and reports call it: `a2a`, or with the inner size that it chooses `a2a+p2p/8`."""
        return f"{self.cp_comm_type}/{self.inner_cp_size}" if self.chooses_inner_size else self.cp_comm_type
