"""Which mechanisms plans may use where samples bring masks of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS, masks_are_served_by
from dynamic_cp.types import ModelShape, PlanOptions, Sample


def options_serving(samples: Iterable[Sample], model: ModelShape, options: PlanOptions) -> PlanOptions:
    """Return `options` with those of its mechanisms that serve the masks of `samples`, or for one lane if none does.

    Raises:
        UnsupportedFeatureError: none does, and a sample is too long for one lane, or plans must use several; or the
            model's attention is not causal.
    """
    samples = tuple(samples)
    masked = next((sample for sample in samples if sample.mask is not None), None)
    if masked is None:
        return options
    what = masked.mask_in_words
    if not model.causal_attention:
        raise UnsupportedFeatureError(
            f"{what}, but tokens of this model attend to all of their sample: give samples no masks",
            sample_id=masked.sample_id,
        )
    if options.max_cp_size == 1:
        return options
    serving = tuple(name for name in options.cp_comm_types if MECHANISMS[name].serves_masks)
    longest = max(sample.seqlen for sample in samples)
    if not serving and options.min_cp_size == 1 and longest <= options.max_tokens_per_rank:
        return replace(options, max_cp_size=1)
    if not serving:
        several, remedy = f"plans use at least {options.min_cp_size}", "lower --min-dynamic-cp-size to 1"
        if options.min_cp_size == 1:
            several = f"the longest of its batch has {longest} tokens, a lane holds {options.max_tokens_per_rank}"
            remedy = "raise --max-seqlen-per-dp-cp-rank"
        raise UnsupportedFeatureError(
            f"{what}, which {' '.join(options.cp_comm_types)} cannot serve on several lanes, and {several}: allow "
            f"{masks_are_served_by()} (--cp-comm-type), or {remedy}",
            sample_id=masked.sample_id,
            cp_comm_types=options.cp_comm_types,
        )
    return replace(options, cp_comm_types=serving)
