"""How many layers the stages of a pipeline have, as Megatron-LM's flags say it; a pure function of flags.

The first or the last stage may have a number of its own, which all its model chunks share evenly; or the embedding, or
the LM head with the loss, counts as a layer of the first or the last chunk.
"""

from __future__ import annotations

from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.table import destination_of
from dynamic_cp.types import PipelineLayers

_OWN = {"--decoder-first-pipeline-num-layers": 0, "--decoder-last-pipeline-num-layers": -1}
_COUNTED = {"--account-for-embedding-in-pipeline-split": 0, "--account-for-loss-in-pipeline-split": -1}
FLAGS = (*_OWN, *_COUNTED)


def is_given(flags: Any, flag: str) -> bool:
    """Return whether one of `FLAGS` is on."""
    return _value(flags, flag) not in (None, False)


def pipeline_layers(flags: Any) -> PipelineLayers:
    """Return the layers of every chunk of every stage.

    Args:
        flags: of this trainer or of a checkout, with the number of virtual stages found.

    Raises:
        InvalidInputError: layers that the other stages cannot share evenly.
    """
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
            f"{_said(flags)} leave {left} of --num-layers {flags.num_layers} for {others} more stages of "
            f"--pipeline-model-parallel-size {pp_size}, which share them evenly: change one of them",
            num_layers=flags.num_layers,
            pp_size=pp_size,
        )
    stages = [left // others if others else 0] * pp_size
    for place, number in own.items():
        stages[place] = number
    for number in stages:
        if number % vp_size:
            raise InvalidInputError(
                f"{_said(flags)} give a stage {number} layers, which its {vp_size} virtual stages cannot share evenly: "
                "change one of them",
                num_layers=number,
                vp_size=vp_size,
            )
    return tuple((number // vp_size,) * vp_size for number in stages)


def _with_counted(flags: Any, counted: list[int], pp_size: int, vp_size: int) -> PipelineLayers:
    total = flags.num_layers + len(counted)
    if total % (pp_size * vp_size):
        raise InvalidInputError(
            f"{_said(flags)} make --num-layers {flags.num_layers} {total}, which {pp_size} stages of {vp_size} chunks "
            "cannot share evenly: change one of them",
            num_layers=flags.num_layers,
            chunks=pp_size * vp_size,
        )
    chunks = [[total // (pp_size * vp_size)] * vp_size for _ in range(pp_size)]
    for place in counted:
        chunks[place][place] -= 1
    return tuple(map(tuple, chunks))


def _said(flags: Any) -> str:
    given = [flag for flag in FLAGS if is_given(flags, flag)]
    return " and ".join(flag if flag in _COUNTED else f"{flag} {_value(flags, flag)}" for flag in given)


def _value(flags: Any, flag: str) -> Any:
    return getattr(flags, destination_of(flag), None)
