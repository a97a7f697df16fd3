"""How many layers the stages of a pipeline have, and which CP sizes and inner sizes the exchanges of a run can have.

The first or last stage may have its own number of layers, which its chunks share evenly; or the embedding, or the LM
head with the loss, counts as a layer of the first or last chunk. Pure functions, without torch and megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, attentions_of, serving_windows
from dynamic_cp.models.table import destination_of
from dynamic_cp.types import CHOOSES_INNER_SIZE, PipelineLayers, is_placed, is_power_of_two
from megatron.dynamic_cp.flags.settings import PlanningSettings

_OWN = {"--decoder-first-pipeline-num-layers": 0, "--decoder-last-pipeline-num-layers": -1}
_COUNTED = {"--account-for-embedding-in-pipeline-split": 0, "--account-for-loss-in-pipeline-split": -1}
STAGE_FLAGS = (*_OWN, *_COUNTED)


def is_given(flags: Any, flag: str) -> bool:
    """Return whether one of `STAGE_FLAGS` is on."""
    return _value(flags, flag) not in (None, False)


def pipeline_layers(flags: Any) -> PipelineLayers:
    """Return the layers of every chunk of every stage, () where all have the same number. Raises InvalidInputError:
    layers that the other stages cannot share evenly."""
    pp_size, vp_size = flags.pipeline_model_parallel_size, flags.virtual_pipeline_model_parallel_size or 1
    own = {place: _value(flags, flag) for flag, place in _OWN.items() if is_given(flags, flag)}
    counted = [place for flag, place in _COUNTED.items() if is_given(flags, flag)]
    if pp_size == 1 or not (own or counted):
        return ()
    if own and counted:
        first, second = (next(flag for flag in flags_ if is_given(flags, flag)) for flags_ in (_OWN, _COUNTED))
        raise InvalidInputError(f"{first} and {second} both say how many layers a stage has: give one of them")
    if counted:
        return _with_counted(flags, counted, pp_size, vp_size)
    left, others = flags.num_layers - sum(own.values()), pp_size - len(own)
    if left < 0 or (left % others if others else left) or (others and not left):
        raise InvalidInputError(
            f"{_said_stages(flags)} leave {left} of --num-layers {flags.num_layers} for {others} more stages of "
            f"--pipeline-model-parallel-size {pp_size}, which share them evenly: change one of them"
        )
    stages = [left // others if others else 0] * pp_size
    for place, number in own.items():
        stages[place] = number
    for number in stages:
        if number % vp_size:
            raise InvalidInputError(
                f"{_said_stages(flags)} give a stage {number} layers, which its {vp_size} virtual stages cannot share "
                "evenly: change one of them"
            )
    return tuple((number // vp_size,) * vp_size for number in stages)


def _with_counted(flags: Any, counted: list[int], pp_size: int, vp_size: int) -> PipelineLayers:
    total = flags.num_layers + len(counted)
    if total % (pp_size * vp_size):
        raise InvalidInputError(
            f"{_said_stages(flags)} make --num-layers {flags.num_layers} {total}, which {pp_size} stages of {vp_size} "
            "chunks cannot share evenly: change one of them"
        )
    chunks = [[total // (pp_size * vp_size)] * vp_size for _ in range(pp_size)]
    for place in counted:
        chunks[place][place] -= 1
    return tuple(map(tuple, chunks))


def _said_stages(flags: Any) -> str:
    given = [flag for flag in STAGE_FLAGS if is_given(flags, flag)]
    return " and ".join(flag if flag in _COUNTED else f"{flag} {_value(flags, flag)}" for flag in given)


def _value(flags: Any, flag: str) -> Any:
    return getattr(flags, destination_of(flag), None)


def with_exchange_sizes(settings: PlanningSettings, query_heads: int) -> PlanningSettings:
    """Return `settings` with the sizes that its exchanges can have, checked against heads and nodes. Without a given
    `max_cp_size`, it becomes the largest that the one exchange of the run can serve. `query_heads` are those of a
    tensor-parallel rank. Raises InvalidInputError: an inner size or a CP size that the exchange cannot have; the
    message has both numbers. Raises UnsupportedFeatureError: the exchange does not serve layers with windows."""
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
                f"({rule}): use {' or '.join(map(str, [1, *served]))}, --cp-comm-type {always} or auto"
            )
    if sizes and not served:
        raise InvalidInputError(
            f"--cp-comm-type {exchange} can serve none of the CP sizes 2 to {largest} "
            f"({rule}): use --cp-comm-type {always} or auto"
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
            f"up to {most} are allowed: use --cp-comm-type {' or '.join(others)}, or --max-dynamic-cp-size 1"
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
                "allow every possible one"
            )
