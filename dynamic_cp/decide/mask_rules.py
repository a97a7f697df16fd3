"""Rules that give a sample its mask by its length alone, as texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import CAUSAL, Mask, SharedQuestion, Tree, counted, parse_mask
from dynamic_cp.types.branches import naming
from dynamic_cp.types.counts import require_at_least

logger = logging.getLogger(__name__)

MaskRule = Callable[[int], Mask | None]
"""Tokens of a sample -> its mask; None: that of the model's layers."""


def parse_mask_rule(text: str) -> MaskRule:
    """Return the rule that gives samples of known length their masks.

    Args:
        text: a mask, `shared_question:4x0.2` for 4 equal answers to a prompt of a share of 0.2 of the tokens, or
            `tree:2x4x0.2` for the same at several levels: behind 0.2 of the tokens 2 equal parts, of each of which
            0.2 are there before 4 equal branches. Samples that are too short for that have the mask of the layers,
            and with `causal` all have.

    Raises:
        InvalidInputError: it is none; says what is needed.
    """
    name, _, rest = text.partition(":")
    *counts, share = rest.split("x")
    if counts and name in _SHARES:
        try:
            with naming(text):
                return _SharesOf(name, tuple(map(int, counts)), float(share))
        except ValueError as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"mask {text!r} has no {_SHARES[name]}") from None
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
        raise InvalidInputError(f"mask {text} fits no sample: {rule.why_too_short(max(seqlens))}")
    logger.warning(
        "mask %s: %d of %s have no mask of their own, they are too short for it (%d tokens at most)",
        text,
        len(too_short),
        counted(len(masks), "sample"),
        max(too_short),
    )
    return masks


_SHARES = {
    SharedQuestion.name: "answers x share: use shared_question:4x0.2",
    Tree.name: "branches x share: use tree:2x4x0.2",
}
"""Rules with shares -> what their texts need."""


@dataclass(frozen=True, slots=True)
class _SharesOf:
    """The rule for equal branches behind a prompt that is a share of the sample; they may branch again in that way."""

    name: str
    counts: tuple[int, ...]
    prompt_share: float

    def __post_init__(self) -> None:
        if self.name == SharedQuestion.name and len(self.counts) > 1:
            raise ValueError("answers do not branch")
        require_at_least(1, num_answers=min(self.counts))
        if not 0.0 < self.prompt_share < 1.0:
            raise InvalidInputError(
                f"the prompt has a share of {self.prompt_share} of the tokens, more than 0 and less than 1 is needed"
            )

    def __call__(self, seqlen: int) -> Mask | None:
        lengths, depths = zip(*self._segments(seqlen, 0), strict=True)
        if min(lengths) < 1:
            return None
        return Tree(lengths, depths) if self.name == Tree.name else SharedQuestion(lengths[0], lengths[1:])

    def _segments(self, num_tokens: int, depth: int) -> Iterator[tuple[int, int]]:
        """Yield length and depth of each segment of a part of a sample."""
        if depth == len(self.counts):
            yield num_tokens, depth
            return
        prompt = int(num_tokens * self.prompt_share)
        yield prompt, depth
        num_parts = self.counts[depth]
        part, rest = divmod(num_tokens - prompt, num_parts)
        if not part:  # too short: yield no more
            yield 0, depth + 1
            return
        for index in range(num_parts):
            yield from self._segments(part + (rest if index == num_parts - 1 else 0), depth + 1)

    def why_too_short(self, longest: int) -> str:
        """Return why even the longest sample cannot have it, with its numbers and a remedy."""
        prompt = int(longest * self.prompt_share)
        if not prompt:
            return f"a prompt of {self.prompt_share} of the {longest} tokens of the longest is empty: raise the share"
        most, behind = self.counts[0], longest - prompt
        if len(self.counts) > 1:
            return (
                f"the longest has {longest} tokens, {behind} of them for {' x '.join(map(str, self.counts))} "
                "branches: ask for fewer"
            )
        return (
            f"the longest has {longest} tokens, {behind} of them for {most} answers: ask for {behind} answers or fewer"
        )
