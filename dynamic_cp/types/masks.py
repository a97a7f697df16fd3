"""Masks: which keys of its sequence a token attends to.

Layers have one (CAUSAL, or FULL), and a sample may bring its own, as text:

    full                          every token sees the whole sample
    lambda:64,4096                the first 64 tokens (the sink), and the last 4096 up to itself (the window)
    causal_blockwise:256,2,1      the first block of 256 tokens, and those of the last 2 blocks' length up to itself;
                                  tokens of the last block see all before them
    shared_question:100,30,50     answers of 30 and of 50 tokens to a prompt of 100, which both see besides themselves
    tree:100(30(20,40),50)        the same with more levels: behind 100 tokens 50, or 30 and then 20 or 40
    ranges:<base64>               any two ranges of keys per token (`KeyRanges`)

A token always sees itself, and few ranges of keys; a layer's window hides some of them, by position (`Windowed`). Work
is counted in pairs of a token and a key that it sees. `branches` has shared_question and tree, and reads
texts. Sources: lambda from Han et al. 2024 (arXiv 2308.16137), causal_blockwise from DCP (arXiv 2510.10620, section 7).
"""

from __future__ import annotations

import base64
import binascii
import zlib
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
"""First columns of `Mask.key_ranges`."""


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
        """Return the rectangle of `size` tokens from `first` on against themselves."""
        return cls(first, size, first, size, causal)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of a sequence its tokens attend to; a kind of mask is a subclass, its fields the numbers of its text.

    Attributes:
        name: of the kind.
    """

    name: ClassVar[str]

    def why_unfit(self, seqlen: int) -> str | None:
        """Return why a sample of `seqlen` tokens cannot have it, with both numbers and a remedy; None if it can."""
        return None

    def num_pairs(self, seqlen: int) -> int:
        """Return the pairs of a token with a key that it sees, in a sequence of `seqlen` tokens."""
        raise NotImplementedError

    def key_ranges(self, seqlen: int) -> Ranges:
        """Return the keys that each token of a sequence sees, int32 [token, (BEGIN, END, SECOND_BEGIN, SECOND_END, …)]:
        half-open ranges, two or more, each behind the one before; unused ones are empty."""
        raise NotImplementedError

    def rectangles(self, seqlen: int) -> tuple[Rectangle, ...] | None:
        """Return it as few rectangles, which any attention kernel computes; None if it is not made of few."""
        return None

    def positions(self, seqlen: int) -> Positions | None:
        """Return the position of each token for rotary embedding, int64 [seqlen]; None: 0, 1, 2, …."""
        return None

    def within(self, seqlen: int) -> Mask:
        """Return an equal mask for `seqlen` tokens: the causal one if it hides nothing more than that."""
        return self

    def density(self, seqlen: int) -> float:
        """Return its work over that of the causal mask, which is exactly 1.0. The causal mask fills half of a diagonal
        tile of a kernel, so the pair of a token with itself counts half, as in `Causal.pairs_per_token2`."""
        return self.squared_tokens(seqlen) / (seqlen * seqlen)

    def squared_tokens(self, seqlen: int) -> int:
        """Return the squared length of a causal sequence with as much work, counted as for `density`."""
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
        return triangle(seqlen)

    def key_ranges(self, seqlen: int) -> Ranges:
        return up_to_itself(seqlen)

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
        ranges = up_to_itself(seqlen)
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
    pairs_per_token2: ClassVar[float] = Causal.pairs_per_token2  # the density of a sample counts the window
    sink: int
    window: int

    def __post_init__(self) -> None:
        require_at_least(0, sink=self.sink)
        require_at_least(1, window=self.window)

    def num_pairs(self, seqlen: int) -> int:
        most = self.sink + self.window
        return triangle(min(seqlen, most)) + max(0, seqlen - most) * most

    def key_ranges(self, seqlen: int) -> Ranges:
        return _sink_and_window(seqlen, self.sink, self.window)

    def within(self, seqlen: int) -> Mask:
        """It is the causal mask if nothing lies beyond the window."""
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
        return self._sparse.num_pairs(start) + triangle(seqlen) - triangle(start)

    def key_ranges(self, seqlen: int) -> Ranges:
        ranges = up_to_itself(seqlen)
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
        own = up_to_itself(len(ranges))[:, END] - 1
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

    @classmethod
    def parse(cls, text: str) -> KeyRanges:
        """Return the mask whose text is `text` behind its name, or raise InvalidInputError."""
        try:
            return cls.of(_ranges_in(zlib.decompress(base64.urlsafe_b64decode(text))))
        except (binascii.Error, zlib.error, ValueError) as error:
            raise InvalidInputError(
                f"mask {f'{cls.name}:{text}'[:40]!r} holds no key ranges ({error}): write it by str()"
            ) from None

    def why_unfit(self, seqlen: int) -> str | None:
        rows = len(self.content) // 16
        return None if rows == seqlen else f"there are key ranges of {rows} tokens, the sample has {seqlen}"

    def num_pairs(self, seqlen: int) -> int:
        return num_pairs_of(_ranges_in(self.content))

    def key_ranges(self, seqlen: int) -> Ranges:
        return _ranges_in(self.content)

    def __str__(self) -> str:
        return f"{self.name}:{base64.urlsafe_b64encode(zlib.compress(self.content)).decode()}"


@dataclass(frozen=True, slots=True)
class Windowed(Mask):
    """What a layer with a window sees of a sample's own mask: keys whose positions lie in the window or in its sink.
    Where positions begin anew, as with every answer to a prompt, the window reaches back over them into the prompt."""

    name = "windowed"
    mask: Mask
    window: Lambda

    def why_unfit(self, seqlen: int) -> str | None:
        reason = self.mask.why_unfit(seqlen)
        if reason is not None:
            return reason
        if isinstance(self.mask, Full):
            return "its tokens see later ones, and a window ends with the token itself: use a mask that looks back"
        return None

    def num_pairs(self, seqlen: int) -> int:
        return _num_pairs_through(self.mask, self.window, seqlen)

    def key_ranges(self, seqlen: int) -> Ranges:
        return _ranges_through(self.mask, self.window, seqlen)

    def positions(self, seqlen: int) -> Positions | None:
        return self.mask.positions(seqlen)

    def within(self, seqlen: int) -> Mask:
        """It is the mask itself if no key is too far away."""
        positions = self.mask.positions(seqlen)
        longest = seqlen if positions is None else int(positions.max()) + 1
        is_whole = longest <= self.window.window and not isinstance(self.mask, Full)
        return self.mask.within(seqlen) if is_whole else self

    def __str__(self) -> str:
        return f"{self.mask} through {self.window}"


CAUSAL, FULL = Causal(), Full()


@lru_cache(maxsize=65536)
def _num_pairs_through(mask: Mask, window: Lambda, seqlen: int) -> int:
    return num_pairs_of(_ranges_through(mask, window, seqlen))


def num_pairs_of(ranges: Ranges) -> int:
    """Return the number of pairs in ranges as of `Mask.key_ranges`."""
    return int(ranges[:, 1::2].sum(dtype="int64") - ranges[:, ::2].sum(dtype="int64"))


def _ranges_through(mask: Mask, window: Lambda, seqlen: int) -> Ranges:
    """Return the ranges of keys that each token sees through a window, as `Mask.key_ranges`. Positions go up by 1 from
    key to key of a range, so a window leaves its end, and a sink its beginning."""
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
    num_parts = ranges.shape[1]
    parts = np.stack([begin, until, since, end], axis=2).reshape(seqlen, num_parts, 2)
    found, count = np.zeros((seqlen, num_parts + 1, 2), np.int64), np.zeros(seqlen, np.int64)
    rows = np.arange(seqlen)
    for part in range(num_parts):
        low, high = parts[:, part].T
        there = low < high
        # A part that begins where the one before ends is joined to it; slot 0 stays empty.
        is_new = there & ((count == 0) | (found[rows, count, 1] != low))
        count += is_new
        found[rows[is_new], count[is_new], 0] = low[is_new]
        found[rows[there], count[there], 1] = high[there]
    most = max(2, int(count.max()))
    return found[:, 1 : most + 1].reshape(seqlen, 2 * most).astype(np.int32)


def triangle(num_tokens: int) -> int:
    """Return the pairs of a causal sequence."""
    return num_tokens * (num_tokens + 1) // 2


def _ranges_in(content: bytes) -> Ranges:
    import numpy as np

    return np.frombuffer(content, "<i4").reshape(-1, 4).astype(np.int32)


def up_to_itself(seqlen: int) -> Ranges:
    """Return the key ranges of a causal sequence."""
    import numpy as np

    ranges = np.zeros((seqlen, 4), np.int32)
    ranges[:, END] = np.arange(1, seqlen + 1)
    return ranges


def _sink_and_window(seqlen: int, sink: int, window: int) -> Ranges:
    ranges = up_to_itself(seqlen)
    first = sink + window  # tokens before it see all before them: the window touches the sink
    ranges[first:, SECOND_BEGIN] = ranges[first:, END] - window
    ranges[first:, SECOND_END] = ranges[first:, END]
    ranges[first:, END] = sink
    return ranges
