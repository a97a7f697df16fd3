"""Rules that give samples of known length their masks: for plans of lengths alone, from the command or as arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import counted, require_at_least
from dynamic_cp.types.masks import CAUSAL, Mask, SharedQuestion, parse_mask

logger = logging.getLogger(__name__)

MaskRule = Callable[[int], Mask | None]
"""Tokens of a sample -> its mask; None: that of the model's layers."""


def parse_mask_rule(text: str) -> MaskRule:
    """Return the rule that gives samples of known length their masks.

    Args:
        text: a mask, or `shared_question:4x0.2` for 4 equal answers to a prompt of a share of 0.2 of the tokens.
            Samples that are too short for that have the mask of the layers, and with `causal` all have.

    Raises:
        InvalidInputError: it is none; says what is needed.
    """
    name, _, rest = text.partition(":")
    count, by, share = rest.partition("x")
    if name == SharedQuestion.name and by:
        try:
            numbers = int(count), float(share)
        except ValueError:
            raise InvalidInputError(f"mask {text!r} has no answers x share: use {name}:4x0.2", mask=text) from None
        return _SharesOf(*numbers)
    mask = None if text == CAUSAL.name else parse_mask(text)
    return lambda _seqlen: mask


def masks_by_rule(text: str, seqlens: Sequence[int]) -> list[Mask | None]:
    """Return the mask of each sample by the rule `text`, as `parse_mask_rule`; says how many are too short for it.

    Raises:
        InvalidInputError: `text` is no rule, or all samples are too short for it.
    """
    rule = parse_mask_rule(text)
    masks = [rule(seqlen) for seqlen in seqlens]
    too_short = [seqlen for seqlen, mask in zip(seqlens, masks, strict=True) if mask is None]
    if not isinstance(rule, _SharesOf) or not too_short:
        return masks
    if len(too_short) == len(masks):
        raise InvalidInputError(f"mask {text} fits no sample: {rule.why_too_short(max(seqlens))}", mask=text)
    logger.warning(
        "mask %s: %d of %s have no mask of their own, they are too short for it (%d tokens at most)",
        text,
        len(too_short),
        counted(len(masks), "sample"),
        max(too_short),
    )
    return masks


@dataclass(frozen=True, slots=True)
class _SharesOf:
    """The rule for answers of equal length to a prompt that is a share of the sample."""

    num_answers: int
    prompt_share: float

    def __post_init__(self) -> None:
        require_at_least(1, num_answers=self.num_answers)
        if not 0.0 < self.prompt_share < 1.0:
            raise InvalidInputError(
                f"the prompt has a share of {self.prompt_share} of the tokens, more than 0 and less than 1 is needed"
            )

    def __call__(self, seqlen: int) -> Mask | None:
        prompt = int(seqlen * self.prompt_share)
        answer, rest = divmod(seqlen - prompt, self.num_answers)
        if not prompt or not answer:
            return None
        return SharedQuestion(prompt, (answer,) * (self.num_answers - 1) + (answer + rest,))

    def why_too_short(self, longest: int) -> str:
        """Return why even the longest sample cannot have it, with its numbers and a remedy."""
        prompt = int(longest * self.prompt_share)
        if not prompt:
            return f"a prompt of {self.prompt_share} of the {longest} tokens of the longest is empty: raise the share"
        return (
            f"the longest has {longest} tokens, {longest - prompt} of them for {self.num_answers} answers: ask for "
            f"{longest - prompt} answers or fewer"
        )
