"""Which CP sizes and inner sizes the exchanges of a run can have, found before anything is built.

Pure functions of settings; neither torch nor megatron-core is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of, serving_windows
from dynamic_cp.types import CHOOSES_INNER_SIZE, is_placed, is_power_of_two
from megatron.dynamic_cp.flags.settings import PlanningSettings


def with_exchange_sizes(settings: PlanningSettings, query_heads: int) -> PlanningSettings:
    """Return `settings` with the sizes that its exchanges can have, checked against heads and nodes.

    Where no `max_cp_size` was given and the one exchange of the run cannot serve the largest group, it becomes the
    largest that it can serve.

    Args:
        query_heads: of a tensor-parallel rank.

    Raises:
        InvalidInputError: an inner size or a CP size that the exchange cannot have; the message has both numbers.
        UnsupportedFeatureError: the exchange does not serve layers with windows.
    """
    from dynamic_cp.mechanisms.transfers import lanes_in_one_node  # here: it imports numpy

    exchange, exchanges = settings.cp_comm_type, settings.exchanges
    node_lanes = lanes_in_one_node(settings.topology)
    largest = settings.largest_cp_size
    _check_serves_windows(settings, largest)
    wanted = settings.inner_cp_sizes
    if wanted is not None:
        _check_inner_sizes(wanted, exchanges, query_heads, node_lanes, largest)
    sharing = Sharing((query_heads, 1), node_lanes, wanted, settings.has_windows, settings.has_latents)
    if wanted is not None:
        settings = replace(settings, inner_cp_sizes=tuple(sorted(set(wanted))))
    if exchange == "auto" or (rule := MECHANISMS[exchange].size_rule(sharing)) is None:
        return settings

    def serves(cp_size: int) -> bool:
        return bool(attentions_of((exchange,), cp_size, sharing))

    always = sharing.serves_always
    sizes = [1 << k for k in range(1, largest.bit_length())]
    served = [size for size in sizes if serves(size)]
    for flag, cp_size in (
        ("--context-parallel-size", settings.static_cp_size),
        ("--min-dynamic-cp-size", settings.min_cp_size),
        ("--max-dynamic-cp-size", settings.max_cp_size or 1),
    ):
        if cp_size > 1 and not serves(cp_size):
            raise InvalidInputError(
                f"{flag} {cp_size} is a size that --cp-comm-type {exchange} cannot serve "
                f"({rule}): use {' or '.join(map(str, [1, *served]))}, --cp-comm-type {always} or auto",
                cp_size=cp_size,
                query_heads=query_heads,
                lanes_per_node=node_lanes,
            )
    if sizes and not served:
        raise InvalidInputError(
            f"--cp-comm-type {exchange} can serve none of the CP sizes 2 to {largest} "
            f"({rule}): use --cp-comm-type {always} or auto",
            largest=largest,
            query_heads=query_heads,
            lanes_per_node=node_lanes,
        )
    if served and settings.max_cp_size is None:
        return replace(settings, max_cp_size=served[-1])
    return settings


def _check_serves_windows(settings: PlanningSettings, largest: int) -> None:
    most = largest if settings.policy == "dynamic" else settings.static_cp_size
    if settings.has_windows and most > 1 and not serving_windows(settings.exchanges):
        others = [name for name in serving_windows() if settings.auto_places or not is_placed(name)] + ["auto"]
        raise UnsupportedFeatureError(
            f"--cp-comm-type {settings.cp_comm_type} does not serve layers with a window (--window-size), and CP sizes "
            f"up to {most} are allowed: use --cp-comm-type {' or '.join(others)}, or "
            "--max-dynamic-cp-size 1",
            cp_comm_type=settings.cp_comm_type,
            largest=most,
        )


def _check_inner_sizes(
    sizes: Sequence[int], exchanges: tuple[str, ...], query_heads: int, node_lanes: int, largest: int
) -> None:
    if not set(CHOOSES_INNER_SIZE) & set(exchanges):
        choosers = " or ".join(CHOOSES_INNER_SIZE)
        raise InvalidInputError(
            f"--dynamic-cp-inner-sizes {' '.join(map(str, sizes))} is for {choosers}, --cp-comm-type allows "
            f"{' '.join(exchanges)}: add --cp-comm-type {choosers} or auto, or drop the flag"
        )
    for size in sizes:
        reason = None
        if not is_power_of_two(size) or size == 1:
            reason = "it is not 2, 4, 8, ..."
        elif size >= largest:
            reason = f"it must be below the largest CP size, {largest}"
        elif query_heads % size:
            reason = f"it does not divide the {query_heads} query heads of a tensor-parallel rank"
        elif node_lanes % size:
            reason = f"it does not divide the blocks of {node_lanes} lanes that lie in one node"
        if reason is not None:
            raise InvalidInputError(
                f"--dynamic-cp-inner-sizes {size} is not possible: {reason}; give another size, or drop the flag to "
                "allow every possible one",
                inner_cp_size=size,
                query_heads=query_heads,
                lanes_per_node=node_lanes,
                largest=largest,
            )
