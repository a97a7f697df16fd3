"""How TP, PP, VPP and EP may split a model: which splits of its layers flags can say, and which of them is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

from dynamic_cp.types import ModelShape, PipelineLayers

_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"

_LEVEL = 1.25
"""Most that the heaviest stage may have over the mean for a split to be tried unasked: the others wait for it."""


class StageSplit(NamedTuple):
    """Layers of the stages, and the flags that say so."""

    layers: PipelineLayers
    flags: tuple[str, ...]


@cache
def best_split(num_layers: int, pp_size: int, vp_size: int, num_modules: int = 0) -> StageSplit | None:
    """Return the split whose heaviest stage has fewest layers, an even one where it is as good; None: there is none.

    Of equally good ones it is that with the smallest chunks, then the fewest flags, then the lightest last stage.

    Args:
        num_modules: of multi-token prediction, which count as layers of the last stage.

    Limits: layers count alike, and what the first stage keeps for more micro-batches is not looked at."""

    def heaviness(split: StageSplit) -> tuple[int, int, int, int]:
        layers = split.layers or ((num_layers // (pp_size * vp_size),) * vp_size,) * pp_size
        last = sum(layers[-1])
        heaviest = max(last + num_modules, *map(sum, layers))
        return heaviest, max(map(max, layers)), len(split.flags), last

    return min(_splits(num_layers, pp_size, vp_size), key=heaviness, default=None)


def is_level(num_layers: int, pp_size: int, vp_size: int) -> bool:
    """Return whether a split leaves the other stages little to wait for."""
    split = best_split(num_layers, pp_size, vp_size)
    return split is not None and max(map(sum, split.layers), default=0) * pp_size <= _LEVEL * num_layers


def flags_of(layers: PipelineLayers) -> tuple[str, ...] | None:
    """Return the flags that say `layers`, None if none do."""
    if not layers or len({number for stage in layers for number in stage}) == 1:
        return ()
    splits = _splits(sum(map(sum, layers)), len(layers), len(layers[0]))
    return min((one.flags for one in splits if one.layers == layers), key=len, default=None)


def in_words(layers: PipelineLayers) -> str:
    """Return the layers of the stages, such as `3x16+13 layers`; "" for ()."""
    runs = [(number, len(list(same))) for number, same in groupby(map(sum, layers))]
    words = "+".join(f"{times}x{number}" if times > 1 else str(number) for number, times in runs)
    return f"{words} layers" if words else ""


def _splits(num_layers: int, pp_size: int, vp_size: int) -> Iterator[StageSplit]:
    """Yield all splits that flags can say; some can be said in several ways."""
    chunks = pp_size * vp_size
    if num_layers % chunks == 0:
        yield StageSplit((), ())
    if pp_size == 1:
        return
    yield from _with_own_numbers(num_layers, pp_size, vp_size)
    for flags in ((_LOSS,), (_EMBEDDING,), (_EMBEDDING, _LOSS)):
        of_chunk, left = divmod(num_layers + len(flags), chunks)
        if of_chunk and not left:
            stages = [[of_chunk] * vp_size for _ in range(pp_size)]
            stages[0][0] -= _EMBEDDING in flags
            stages[-1][-1] -= _LOSS in flags
            yield StageSplit(tuple(map(tuple, stages)), flags)


def _with_own_numbers(num_layers: int, pp_size: int, vp_size: int) -> Iterator[StageSplit]:
    def split(first: int | None, middle: int, last: int | None) -> StageSplit:
        stages = [middle] * pp_size
        flags = []
        if first is not None:
            stages[0] = first
            flags.append(f"{_FIRST} {first}")
        if last is not None:
            stages[-1] = last
            flags.append(f"{_LAST} {last}")
        return StageSplit(tuple((number // vp_size,) * vp_size for number in stages), tuple(flags))

    if num_layers % vp_size:  # every stage has a multiple of it
        return
    for middle in range(vp_size, num_layers // (pp_size - 1) + 1, vp_size):
        if own := num_layers - (pp_size - 1) * middle:
            yield split(None, middle, own)
            yield split(own, middle, None)
    if pp_size == 2:
        return
    for middle in range(vp_size, num_layers // (pp_size - 2) + 1, vp_size):
        rest = num_layers - (pp_size - 2) * middle
        for last in range(vp_size, rest, vp_size):
            yield split(rest - last, middle, last)


def in_stages(model: ModelShape, pp_size: int, vp_size: int) -> ModelShape:
    """Return the model split by `best_split`; itself if an even split is as good, layers are set, or none fits."""
    split = best_split(model.num_layers, pp_size, vp_size, model.mtp_num_layers)
    if model.pipeline_layers or split is None or not split.layers:
        return model
    return replace(model, pipeline_layers=split.layers)


def why_no_split(
    model: ModelShape, *, tp_size: int, pp_size: int, vp_size: int, ranks_per_node: int, ep_size: int = 1
) -> str | None:
    """Return why TP, PP, VPP and EP cannot split the model, None if they can. Stages may differ in their layers."""
    if tp_size > ranks_per_node:
        return "TP beyond a node"
    if any(size % tp_size for size in (model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size)):
        return "TP does not divide heads, KV heads or the MLP"
    if ranks_per_node % tp_size:
        return "TP does not divide the GPUs of a node, so that some groups would cross nodes"
    linear = model.linear_attention
    if linear is not None and (linear.num_heads % tp_size or linear.num_groups % tp_size):
        return "TP does not divide heads or groups of linear attention"
    if vp_size > 1 and pp_size == 1:
        return "VPP without a pipeline"
    if model.pipeline_layers:
        if pp_size > 1 and (pp_size, {vp_size}) != (len(model.pipeline_layers), set(map(len, model.pipeline_layers))):
            return "PP x VPP is not what the model's pipeline_layers are for"
    elif best_split(model.num_layers, pp_size, vp_size) is None:
        return "PP x VPP cannot share out the layers"
    return model.why_no_expert_split(ep_size=ep_size, tp_size=tp_size)
