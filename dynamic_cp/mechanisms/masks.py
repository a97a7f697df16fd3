"""Which mechanisms plans may use where samples bring masks of their own, or layers have windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS, serving_masks, serving_windows
from dynamic_cp.types import CpCommType, ModelShape, PlanOptions, Sample


def options_serving(samples: Iterable[Sample], model: ModelShape, options: PlanOptions) -> PlanOptions:
    """Return `options` with those of its mechanisms that serve the masks of `samples` and the windows of `model`, or
    for one lane if none does.

    Raises:
        UnsupportedFeatureError: none does, and a sample is too long for one lane, or plans must use several; or samples
            bring masks and the model's attention is not causal, or has windows through which they are no such masks.
    """
    samples = tuple(samples)
    masked = next((sample for sample in samples if sample.mask is not None), None)
    if masked is None and model.window is None:
        return options
    if masked is None:
        return _options_of(serving_windows, model.windows_in_words, samples, options)
    what = masked.mask_in_words
    if not model.causal_attention:
        raise UnsupportedFeatureError(
            f"{what}, but tokens of this model attend to all of their sample: give samples no masks",
            sample_id=masked.sample_id,
        )
    if model.window is None:
        return _options_of(serving_masks, what, samples, options, sample_id=masked.sample_id)
    for sample in samples:
        reason = sample.mask_in(model.window).why_unfit(sample.seqlen)
        if reason is not None:
            raise UnsupportedFeatureError(
                f"{sample.mask_in_words}, but {model.windows_in_words}: {reason}", sample_id=sample.sample_id
            )
    what = f"{what}, and {model.windows_in_words}"
    return _options_of(_serving_both, what, samples, options, sample_id=masked.sample_id)


def _serving_both(names: Iterable[CpCommType] = tuple(MECHANISMS)) -> tuple[CpCommType, ...]:
    """Return those of `names` that serve samples with masks in layers with windows."""
    return serving_masks(serving_windows(names))


def _options_of(
    serving: Callable[..., tuple[CpCommType, ...]],
    what: str,
    samples: Sequence[Sample],
    options: PlanOptions,
    **details: object,
) -> PlanOptions:
    """Return `options` with those of its mechanisms that are `serving`, or for one lane if none is."""
    if options.max_cp_size == 1:
        return options
    served = serving(options.cp_comm_types)
    longest = max(sample.seqlen for sample in samples)
    if served:
        return replace(options, cp_comm_types=served)
    if options.min_cp_size == 1 and longest <= options.max_tokens_per_rank:
        return replace(options, max_cp_size=1)
    several, remedy = f"plans use at least {options.min_cp_size}", "lower --min-dynamic-cp-size to 1"
    if options.min_cp_size == 1:
        several = f"the longest of its batch has {longest} tokens, a lane holds {options.max_tokens_per_rank}"
        remedy = "raise --max-seqlen-per-dp-cp-rank"
    raise UnsupportedFeatureError(
        f"{what}, which {' '.join(options.cp_comm_types)} cannot serve on several lanes, and {several}: allow "
        f"{' or '.join(serving())} (--cp-comm-type), or {remedy}",
        cp_comm_types=options.cp_comm_types,
        **details,
    )
