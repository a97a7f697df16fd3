"""Masks: which keys of its sequence a token attends to.

Layers have one (CAUSAL, or FULL), and a sample may bring its own, as text

    full                          every token sees the whole sample
    lambda:64,4096                the first 64 tokens (the sink), and the last 4096 up to itself (the window)
    causal_blockwise:256,2,1      the first block of 256 tokens, and those of the last 2 blocks' length up to itself;
                                  tokens of the last block see all before them
    shared_question:100,30,50     answers of 30 and of 50 tokens to a prompt of 100, which both see besides themselves
    ranges:<base64>               any two ranges of keys per token (`KeyRanges`)

A token always sees itself, and at most two ranges of keys. Work is counted in pairs of a token and a key that it sees.
In a layer with a window it sees of those what its window shows, by positions (`Windowed`).

Sources: lambda from Han et al. 2024 (arXiv 2308.16137), causal_blockwise and shared_question with these shapes from DCP
(arXiv 2510.10620, section 7).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import require_at_least

if TYPE_CHECKING:  # numpy takes longer to import than `dynamic-cp --help` may
    import numpy as np
    from numpy.typing import NDArray

    Ranges = NDArray[np.int32]
    Positions = NDArray[np.int64]


BEGIN, END, SECOND_BEGIN, SECOND_END = range(4)
"""Columns of `Mask.key_ranges`."""


class Rectangle(NamedTuple):
    """Neighbouring queries against neighbouring keys of one sequence.

    Attributes:
        first_row, num_rows: the queries.
        first_column, num_columns: the keys.
        causal: whether it is an aligned square whose i-th query sees keys 0..i; otherwise all queries see all keys.
    """

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    causal: bool

    @classmethod
    def square(cls, first: int, size: int, *, causal: bool) -> Rectangle:
        """Return that of the tokens from `first` on against themselves."""
        return cls(first, size, first, size, causal)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of a sequence its tokens attend to; a kind of mask is a subclass, its fields the numbers of its text.

    Attributes:
        name: of the kind.
    """

    name: ClassVar[str]

    def why_unfit(self, seqlen: int) -> str | None:
        """Return why a sample of `seqlen` tokens cannot have it, with both numbers and a remedy; None where it can."""
        return None

    def num_pairs(self, seqlen: int) -> int:
        """Return the pairs of a token with a key that it sees, in a sequence of `seqlen` tokens."""
        raise NotImplementedError

    def key_ranges(self, seqlen: int) -> Ranges:
        """Return the keys that each token of a sequence sees, int32 [token, (BEGIN, END, SECOND_BEGIN, SECOND_END)].

        They go from a begin to before an end; the second range lies behind the first, and is empty where one says all.
        """
        raise NotImplementedError

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...] | None:
        """Return it as few rectangles, which any attention kernel computes; None where it is not made of few."""
        return None

    def positions(self, seqlen: int) -> Positions | None:
        """Return the position of each token for rotary embedding, int64 [seqlen]; None: as the tokens lie."""
        return None

    def within(self, seqlen: int) -> Mask:
        """Return what a sequence of `seqlen` tokens has of it: the causal mask where that hides nothing more."""
        return self

    def density(self, seqlen: int) -> float:
        """Return its work over that of the causal mask: 1.0 for the causal mask itself, exactly.

        Kernels work in tiles, of which the causal mask fills half on the diagonal. So the pair of a token with itself
        counts half, here as in `Causal.pairs_per_token2`.
        """
        return self.squared_tokens(seqlen) / (seqlen * seqlen)

    def squared_tokens(self, seqlen: int) -> int:
        """Return the square of the length of a causal sequence that is as much work, counted as for `density`."""
        return 2 * self.num_pairs(seqlen) - seqlen

    def __str__(self) -> str:
        """Return its text, which `parse_mask` reads."""
        numbers = ",".join(map(str, astuple(self)))
        return f"{self.name}:{numbers}" if numbers else self.name


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A token attends to itself and those before it.

    Attributes:
        pairs_per_token2: pairs per squared token of a sequence, those on the diagonal counted half.
    """

    name = "causal"
    pairs_per_token2: ClassVar[float] = 0.5

    def num_pairs(self, seqlen: int) -> int:
        return _triangle(seqlen)

    def key_ranges(self, seqlen: int) -> Ranges:
        return _up_to_itself(seqlen)

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...]:
        return (Rectangle.square(0, seqlen, causal=True),)


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """A token attends to all of its sequence.

    Attributes:
        pairs_per_token2: pairs per squared token of a sequence.
    """

    name = "full"
    pairs_per_token2: ClassVar[float] = 1.0

    def num_pairs(self, seqlen: int) -> int:
        return seqlen * seqlen

    def key_ranges(self, seqlen: int) -> Ranges:
        ranges = _up_to_itself(seqlen)
        ranges[:, END] = seqlen
        return ranges

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...]:
        return (Rectangle.square(0, seqlen, causal=False),)


@dataclass(frozen=True, slots=True)
class Lambda(Mask):
    """A token attends to the first tokens, and to those of a window that ends with itself.

    Attributes:
        sink, window: tokens; window >= 1.
    """

    name = "lambda"
    pairs_per_token2: ClassVar[float] = Causal.pairs_per_token2  # of layers with a window, whose density counts it
    sink: int
    window: int

    def __post_init__(self) -> None:
        require_at_least(0, sink=self.sink)
        require_at_least(1, window=self.window)

    def num_pairs(self, seqlen: int) -> int:
        most = self.sink + self.window
        return _triangle(min(seqlen, most)) + max(0, seqlen - most) * most

    def key_ranges(self, seqlen: int) -> Ranges:
        return _sink_and_window(seqlen, self.sink, self.window)

    def within(self, seqlen: int) -> Mask:
        """Where nothing lies beyond the window, it is the causal mask."""
        return CAUSAL if seqlen <= self.sink + self.window else self

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...] | None:
        return CAUSAL.rectangles(seqlen) if self.within(seqlen) == CAUSAL else None


@dataclass(frozen=True, slots=True)
class CausalBlockwise(Mask):
    """A token attends to the first blocks, and to a window of some blocks; tokens of the last block to all before them.

    Attributes:
        block_size: tokens of a block; the last one may be shorter.
        num_local_blocks: length of the window before the token.
        num_sink_blocks: first blocks that all tokens see.
    """

    name = "causal_blockwise"
    block_size: int
    num_local_blocks: int
    num_sink_blocks: int = 1

    def __post_init__(self) -> None:
        require_at_least(0, num_sink_blocks=self.num_sink_blocks)
        require_at_least(1, block_size=self.block_size, num_local_blocks=self.num_local_blocks)

    def num_pairs(self, seqlen: int) -> int:
        start = self._start_of_last_block(seqlen)
        return self._sparse.num_pairs(start) + _triangle(seqlen) - _triangle(start)

    def key_ranges(self, seqlen: int) -> Ranges:
        ranges = _up_to_itself(seqlen)
        start = self._start_of_last_block(seqlen)
        ranges[:start] = self._sparse.key_ranges(start)
        return ranges

    @property
    def _sparse(self) -> Lambda:
        """The mask of the tokens before the last block."""
        return Lambda(self.num_sink_blocks * self.block_size, self.num_local_blocks * self.block_size + 1)

    def _start_of_last_block(self, seqlen: int) -> int:
        return (seqlen - 1) // self.block_size * self.block_size


@dataclass(frozen=True, slots=True)
class SharedQuestion(Mask):
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
                "tokens, at least 1 answer of 1 token is needed: leave out empty answers",
                answers=self.answers,
            )

    def why_unfit(self, seqlen: int) -> str | None:
        total = self.prompt + sum(self.answers)
        if total == seqlen:
            return None
        return f"prompt and answers have {total} tokens, the sample {seqlen}: both must be equal"

    def num_pairs(self, seqlen: int) -> int:
        own = sum(_triangle(answer) + answer * self.prompt for answer in self.answers)
        return _triangle(self.prompt) + own

    def key_ranges(self, seqlen: int) -> Ranges:
        ranges = _up_to_itself(seqlen)
        start = self.prompt + self.answers[0]  # the first answer touches the prompt: one range
        for answer in self.answers[1:]:
            ranges[start : start + answer, SECOND_BEGIN] = start
            ranges[start : start + answer, SECOND_END] = ranges[start : start + answer, END]
            ranges[start : start + answer, END] = self.prompt
            start += answer
        return ranges

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...]:
        squares = [Rectangle.square(0, self.prompt, causal=True)]
        for answer in self.answers:
            squares.append(Rectangle.square(squares[-1].first_row + squares[-1].num_rows, answer, causal=True))
        return (*squares, Rectangle(self.prompt, seqlen - self.prompt, 0, self.prompt, False))

    def positions(self, seqlen: int) -> Positions:
        """Every answer goes on from the end of the prompt."""
        positions = _up_to_itself(seqlen)[:, END].astype("int64") - 1
        start = self.prompt
        for answer in self.answers:
            positions[start : start + answer] -= start - self.prompt
            start += answer
        return positions

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, (self.prompt, *self.answers)))}"


@dataclass(frozen=True, slots=True)
class KeyRanges(Mask):
    """Any mask of at most two ranges of keys per token.

    Attributes:
        content: bytes of `key_ranges`, little-endian.
    """

    name = "ranges"
    content: bytes

    @classmethod
    def of(cls, ranges: Ranges) -> KeyRanges:
        """Return the mask of `ranges`.

        Raises:
            InvalidInputError: they are no `Mask.key_ranges`, or a token does not see itself.
        """
        if ranges.ndim != 2 or ranges.shape[1] != 4:
            raise InvalidInputError(f"key ranges have the shape {ranges.shape}, [tokens, 4] is needed")
        begin, end, second, last = ranges.T
        own = _up_to_itself(len(ranges))[:, END] - 1
        ordered = (begin >= 0) & (begin <= end) & (second <= last) & ((second == last) | (end <= second))
        inside = (end <= len(ranges)) & (last <= len(ranges))
        sees_itself = ((begin <= own) & (own < end)) | ((second <= own) & (own < last))
        (wrong,) = (~(ordered & inside & sees_itself)).nonzero()
        if wrong.size:
            row = int(wrong[0])
            raise InvalidInputError(
                f"token {row} of {len(ranges)} has the key ranges {ranges[row].tolist()}: give begin, end, begin, end "
                f"with ends up to {len(ranges)}, the second range behind the first, and the token itself in one",
                token=row,
            )
        return cls(ranges.astype("<i4").tobytes())

    def why_unfit(self, seqlen: int) -> str | None:
        rows = len(self.content) // 16
        return None if rows == seqlen else f"there are key ranges of {rows} tokens, the sample has {seqlen}"

    def num_pairs(self, seqlen: int) -> int:
        begin, end, second, last = _ranges_in(self.content).T
        return int((end - begin + last - second).sum())

    def key_ranges(self, seqlen: int) -> Ranges:
        return _ranges_in(self.content)

    def __str__(self) -> str:
        return f"{self.name}:{base64.urlsafe_b64encode(zlib.compress(self.content)).decode()}"


@dataclass(frozen=True, slots=True)
class Windowed(Mask):
    """What a layer with a window sees of a sample's own mask: keys whose positions lie in the window or in its sink.

    Where positions begin anew, as with every answer to a prompt, the window reaches back over them into the prompt.
    Samples bring `mask` and layers have `window`, so it has no text that is read.
    """

    name = "windowed"
    mask: Mask
    window: Lambda

    def why_unfit(self, seqlen: int) -> str | None:
        reason = self.mask.why_unfit(seqlen)
        if reason is not None:
            return reason
        if isinstance(self.mask, Full):
            return "its tokens see later ones, and a window ends with the token itself: use a mask that looks back"
        most = _most_ranges_through(self.mask, self.window, seqlen)
        if most <= 2:
            return None
        return (
            f"through a window of {self.window.window} tokens and a sink of {self.window.sink} a token sees {most} "
            "ranges of keys, at most 2 are supported: leave out the sink (--window-sink-tokens), or the mask"
        )

    def num_pairs(self, seqlen: int) -> int:
        return _num_pairs_through(self.mask, self.window, seqlen)

    def key_ranges(self, seqlen: int) -> Ranges:
        return _ranges_through(self.mask, self.window, seqlen)[0]

    def positions(self, seqlen: int) -> Positions | None:
        return self.mask.positions(seqlen)

    def within(self, seqlen: int) -> Mask:
        """Where no key is too far away, it is the mask itself."""
        positions = self.mask.positions(seqlen)
        longest = seqlen if positions is None else int(positions.max()) + 1
        is_whole = longest <= self.window.window and not isinstance(self.mask, Full)
        return self.mask.within(seqlen) if is_whole else self

    def __str__(self) -> str:
        return f"{self.mask} through {self.window}"


CAUSAL, FULL = Causal(), Full()


def parse_mask(text: str) -> Mask:
    """Return the mask whose `str` is `text`.

    Raises:
        InvalidInputError: it is none; says what is needed.
    """
    name, _, rest = text.partition(":")
    if name == KeyRanges.name:
        try:
            return KeyRanges.of(_ranges_in(zlib.decompress(base64.urlsafe_b64decode(rest))))
        except (binascii.Error, zlib.error, ValueError) as error:
            raise InvalidInputError(f"mask {text[:40]!r} holds no key ranges ({error}): write it by str()") from None
    words = rest.split(",") if rest else []
    if all(word.isdecimal() for word in words):
        numbers = tuple(map(int, words))
        if name in _NUM_NUMBERS and len(numbers) in _NUM_NUMBERS[name]:
            return _KINDS[name](*numbers)
        if name == SharedQuestion.name and len(numbers) > 1:
            return SharedQuestion(numbers[0], numbers[1:])
    raise InvalidInputError(f"mask {text[:40]!r} is unknown: use {_EXAMPLES}", mask=text)


_KINDS: dict[str, Callable[..., Mask]] = {one.name: one for one in (Causal, Full, Lambda, CausalBlockwise)}
_NUM_NUMBERS = {"causal": (0,), "full": (0,), "lambda": (2,), "causal_blockwise": (2, 3)}
_EXAMPLES = "causal, full, lambda:64,4096, causal_blockwise:256,2 or shared_question:100,30,50"


@lru_cache(maxsize=65536)
def _num_pairs_through(mask: Mask, window: Lambda, seqlen: int) -> int:
    begin, end, second, last = _ranges_through(mask, window, seqlen)[0].T
    return int((end - begin + last - second).sum())


@lru_cache(maxsize=65536)
def _most_ranges_through(mask: Mask, window: Lambda, seqlen: int) -> int:
    return _ranges_through(mask, window, seqlen)[1] if window.sink else 2


def _ranges_through(mask: Mask, window: Lambda, seqlen: int) -> tuple[Ranges, int]:
    """Return (the first two ranges of keys that each token sees through a window, how many the most have).

    Positions in a range go up by 1 from key to key, so that a window leaves of it its end, and a sink its beginning.
    """
    import numpy as np

    ranges = mask.key_ranges(seqlen).astype(np.int64)
    positions = mask.positions(seqlen)
    if positions is None:
        positions = np.arange(seqlen)
    begin, end = ranges[:, ::2], ranges[:, 1::2]
    first = positions[np.minimum(begin, seqlen - 1)]
    size = end - begin
    until = begin + np.clip(window.sink - first, 0, size)
    since = np.maximum(begin + np.clip(positions[:, None] - window.window + 1 - first, 0, size), until)
    parts = np.stack([begin, until, since, end], axis=2).reshape(seqlen, 4, 2)
    found, count = np.zeros((seqlen, 5, 2), np.int64), np.zeros(seqlen, np.int64)
    rows = np.arange(seqlen)
    for part in range(4):
        low, high = parts[:, part].T
        there = low < high
        # What begins where the one before ends is one with it; slot 0 stays empty.
        is_new = there & ((count == 0) | (found[rows, count, 1] != low))
        count += is_new
        found[rows[is_new], count[is_new], 0] = low[is_new]
        found[rows[there], count[there], 1] = high[there]
    return found[:, 1:3].reshape(seqlen, 4).astype(np.int32), int(count.max())


def _triangle(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


def _ranges_in(content: bytes) -> Ranges:
    import numpy as np

    return np.frombuffer(content, "<i4").reshape(-1, 4).astype(np.int32)


def _up_to_itself(seqlen: int) -> Ranges:
    import numpy as np

    ranges = np.zeros((seqlen, 4), np.int32)
    ranges[:, END] = np.arange(1, seqlen + 1)
    return ranges


def _sink_and_window(seqlen: int, sink: int, window: int) -> Ranges:
    ranges = _up_to_itself(seqlen)
    first = sink + window  # tokens before see all before them: there the window touches the sink
    ranges[first:, SECOND_BEGIN] = ranges[first:, END] - window
    ranges[first:, SECOND_END] = ranges[first:, END]
    ranges[first:, END] = sink
    return ranges
