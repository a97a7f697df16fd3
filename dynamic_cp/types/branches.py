"""Masks of samples whose branches share prefixes: one prompt with several answers, or trees of turns; and the texts of
all masks (`parse_mask`).

Segments lie depth first. Each continues an earlier segment, its parent; several may continue the same one. A token sees
the segments from the root to its own, and its own up to itself. A branch is a path from the root to a leaf: a sample is
worth as many samples as it has branches. Source of shared_question's shapes: DCP (arXiv 2510.10620, section 7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least
from dynamic_cp.types.masks import (
    Causal,
    CausalBlockwise,
    Full,
    KeyRanges,
    Lambda,
    Mask,
    Rectangle,
    triangle,
    up_to_itself,
)

if TYPE_CHECKING:
    from dynamic_cp.types.masks import Positions, Ranges

MOST_LEVELS = 128
"""Levels that a tree may have; each costs one more kernel call."""


class Segment(NamedTuple):
    """A segment of a sample.

    Attributes:
        parent: index of the segment that it continues; -1 for the first segment.
        start, stop, end: its tokens, and the end of all segments that continue it, directly or not (`stop` if none do).
        position, num_branches: position of its first token along its branch; number of branches that contain it.
    """

    parent: int
    start: int
    stop: int
    end: int
    position: int
    num_branches: int

    @property
    def num_tokens(self) -> int:
        """Number of its own tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Branches(Mask):
    """Segments that share prefixes; a subclass says how long they are and which continues which."""

    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (tokens of each segment, number of segments before it on its branch), depth first."""
        raise NotImplementedError

    def segments(self) -> list[Segment]:
        """Return the segments, depth first."""
        parents: list[int] = []
        starts, positions = [0], list[int]()
        path: list[int] = []
        lengths, depths = self.shape()
        for place, (length, depth) in enumerate(zip(lengths, depths, strict=True)):
            del path[depth:]
            parents.append(path[-1] if path else -1)
            positions.append(positions[path[-1]] + lengths[path[-1]] if path else 0)
            starts.append(starts[-1] + length)
            path.append(place)
        ends, branches = starts[1:], [0] * len(parents)
        for place in reversed(range(len(parents))):
            branches[place] = max(1, branches[place])
            if (parent := parents[place]) >= 0:
                ends[parent] = max(ends[parent], ends[place])
                branches[parent] += branches[place]
        return [*map(Segment._make, zip(parents, starts, starts[1:], ends, positions, branches, strict=False))]

    def paths(self) -> list[list[int]]:
        """Return the segments of each branch, root first."""
        paths: list[list[int]] = []
        path: list[int] = []
        for place, (depth, following) in enumerate(pairwise((*self.shape()[1], 0))):
            path = [*path[:depth], place]
            if following <= depth:
                paths.append(path)
        return paths

    def why_unfit(self, seqlen: int) -> str | None:
        total = sum(self.shape()[0])
        return None if total == seqlen else f"its segments have {total} tokens, the sample {seqlen}: both must be equal"

    def num_pairs(self, seqlen: int) -> int:
        return sum(triangle(one.num_tokens) + one.num_tokens * one.position for one in self.segments())

    def key_ranges(self, seqlen: int) -> Ranges:
        """Adjoining segments of a branch make one range."""
        import numpy as np

        seen: list[list[tuple[int, int]]] = []
        segments = self.segments()
        for segment in segments:
            before = seen[segment.parent] if segment.parent >= 0 else []
            if before and before[-1][1] == segment.start:
                seen.append([*before[:-1], (before[-1][0], segment.stop)])
            else:
                seen.append([*before, (segment.start, segment.stop)])
        ranges = np.zeros((seqlen, 2 * max(2, *map(len, seen))), np.int32)
        own = up_to_itself(seqlen)[:, 1]
        for segment, of_segment in zip(segments, seen, strict=True):
            rows = slice(segment.start, segment.stop)
            ranges[rows, : 2 * len(of_segment)] = np.array(of_segment).reshape(-1)
            ranges[rows, 2 * len(of_segment) - 1] = own[rows]
        return ranges

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...]:
        segments = self.segments()
        squares = (Rectangle.square(one.start, one.num_tokens, causal=True) for one in segments)
        behind = (
            Rectangle(one.stop, one.end - one.stop, one.start, one.num_tokens, False)
            for one in segments
            if one.end > one.stop
        )
        return (*squares, *behind)

    def positions(self, seqlen: int) -> Positions:
        """Every segment continues the positions of its parent."""
        import numpy as np

        positions = np.arange(seqlen)
        for segment in self.segments():
            positions[segment.start : segment.stop] += segment.position - segment.start
        return positions


@dataclass(frozen=True, slots=True)
class SharedQuestion(Branches):
    """Answers to one prompt, which is there once: tokens of an answer attend to the prompt and to their own answer.

    A sample of them is worth as many samples of prompt and answer.

    Attributes:
        prompt: its tokens, before those of the answers.
        answers: tokens of each answer.
    """

    name = "shared_question"
    prompt: int
    answers: tuple[int, ...]

    def __post_init__(self) -> None:
        require_at_least(1, prompt=self.prompt)
        if not self.answers or min(self.answers) < 1:
            raise InvalidInputError(
                f"shared_question has {len(self.answers)} answers, the shortest of {min(self.answers, default=0)} "
                "tokens, at least 1 answer of 1 token is needed: leave out empty answers"
            )

    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.prompt, *self.answers), (0, *(1 for _ in self.answers))

    def why_unfit(self, seqlen: int) -> str | None:
        total = self.prompt + sum(self.answers)
        if total == seqlen:
            return None
        return f"prompt and answers have {total} tokens, the sample {seqlen}: both must be equal"

    def num_pairs(self, seqlen: int) -> int:
        own = sum(triangle(answer) + answer * self.prompt for answer in self.answers)
        return triangle(self.prompt) + own

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, (self.prompt, *self.answers)))}"


@dataclass(frozen=True, slots=True)
class Tree(Branches):
    """Turns that branch at several levels; its text has behind each segment, in parentheses, those that go on from it.

    Attributes:
        lengths: tokens of each segment, depth first.
        depths: segments before each one on its branch: 0, then from 1 to one more than that of the segment before.
    """

    name = "tree"
    lengths: tuple[int, ...]
    depths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.depths) or not self.lengths:
            raise InvalidInputError(
                f"a tree has {len(self.lengths)} lengths and {len(self.depths)} depths: give both for every segment, "
                "at least for one"
            )
        require_at_least(1, **{f"segment {place}": length for place, length in enumerate(self.lengths)})
        for place, (before, depth) in enumerate(pairwise((-1, *self.depths))):
            if not min(place, 1) <= depth <= before + 1:
                raise InvalidInputError(
                    f"segment {place} of a tree has the depth {depth} behind one of {before}: the first has 0, others "
                    "from 1 to one more than the segment before"
                )
        if (levels := max(self.depths) + 1) > MOST_LEVELS:
            raise InvalidInputError(
                f"a tree has {levels} levels, at most {MOST_LEVELS} are supported: join segments behind which only one "
                "goes on, or cut it in several samples"
            )

    @classmethod
    def parse(cls, text: str) -> Tree | None:
        """Return the tree whose text behind its name is `text`; None if it is not one."""
        lengths, depths, depth = [], [], 0
        for marks, number in re.findall(r"(\D*)(\d+)", text):
            depth += marks.count("(") - marks.count(")")
            depths.append(depth)
            lengths.append(int(number))
        if not lengths or _text_of(lengths, depths) != text:
            return None
        return cls(tuple(lengths), tuple(depths))

    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.lengths, self.depths

    def __str__(self) -> str:
        return f"{self.name}:{_text_of(self.lengths, self.depths)}"


def sees_prefixes(mask: Mask | None) -> bool:
    """Return whether every token sees exactly its branch up to itself, as states of linear attention need."""
    return mask is None or isinstance(mask, (Causal, Branches))


def _text_of(lengths: Sequence[int], depths: Sequence[int]) -> str:
    parts = [str(lengths[0])]
    for length, (before, depth) in zip(lengths[1:], pairwise(depths), strict=True):
        parts.append(f"({length}" if depth > before else f"{')' * (before - depth)},{length}")
    return "".join(parts) + ")" * depths[-1]


_KINDS: dict[str, Callable[..., Mask]] = {one.name: one for one in (Causal, Full, Lambda, CausalBlockwise)}
_NUM_NUMBERS = {"causal": (0,), "full": (0,), "lambda": (2,), "causal_blockwise": (2, 3)}
_EXAMPLES = "causal, full, lambda:64,4096, causal_blockwise:256,2, shared_question:100,30,50 or tree:100(30(20,40),50)"


def parse_mask(text: str) -> Mask:
    """Return the mask whose `str` is `text`.

    Raises:
        InvalidInputError: it is none; says what is needed.
    """
    name, _, rest = text.partition(":")
    if name == KeyRanges.name:
        return KeyRanges.parse(rest)
    if name == Tree.name and (tree := Tree.parse(rest)) is not None:
        return tree
    words = rest.split(",") if rest else []
    if all(word.isdecimal() for word in words):
        numbers = tuple(map(int, words))
        with naming(text):
            if name in _NUM_NUMBERS and len(numbers) in _NUM_NUMBERS[name]:
                return _KINDS[name](*numbers)
            if name == SharedQuestion.name and len(numbers) > 1:
                return SharedQuestion(numbers[0], numbers[1:])
    raise InvalidInputError(f"mask {text[:40]!r} is unknown: use {_EXAMPLES}")


@contextmanager
def naming(text: str) -> Iterator[None]:
    """Make errors of the body name `text`, the mask that it is about."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"mask {text[:40]!r}: {error}") from error
