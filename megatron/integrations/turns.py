"""A tree of turns as one sample: its loss and gradients are those of its branches trained apart.

    root = Turn(tokens=system_and_task, learned=False, children=(Turn(tokens=first_try), Turn(tokens=other_try, ...)))
    sample, mask = tree_of_turns(root)

Every turn is there once. It sees itself and the turns on the way to it, and its positions go on from theirs. The last
token before several turns is there once for each of them, as in `shared_question`. A learned token counts once for each
branch that has it, as it would in the branches apart, so a mean over tokens is theirs, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import Tree
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, sample_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Tokens, and what goes on from them.

    Attributes:
        tokens: at least 1, ends of turns and documents among them.
        learned: whether the tokens have a loss, for all or for each; 1 and 0 are true and false.
        children: the turns that go on from it; none: a branch ends here.
    """

    tokens: Sequence[int] | NDArray[np.int64]
    learned: bool | Sequence[bool] | NDArray[np.bool_] = True
    children: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        tokens, learned = _array("tokens", self.tokens), _array("learned", self.learned)
        if tokens.ndim != 1 or not tokens.size or learned.shape not in ((), tokens.shape):
            raise InvalidInputError(
                f"a turn has tokens of shape {tokens.shape} and 'learned' of shape {learned.shape}: at least 1 token, "
                "and true, false or one entry for each token are needed"
            )
        if tokens.dtype.kind not in "iu" or learned.dtype.kind not in "biu" or (learned != learned.astype(bool)).any():
            raise InvalidInputError(
                f"a turn has tokens of {tokens.dtype} and 'learned' of {learned.dtype} ({self.learned!r:.40}): tokens "
                "are whole numbers, 'learned' is true or false"
            )

    @classmethod
    def read(cls, value: Mapping[str, Any], name: str = "turn") -> Turn:
        """Return the turn of {"tokens": [...], "learned": true, "children": [...]}; only tokens are needed.

        A null counts as a missing key, as tables have it. InvalidInputError for a missing or unknown key names the
        turn: `turn.2.1` is the first child of the root's second child.
        """
        # Without recursion: a long talk is a deep tree.
        waiting, found = [(name, value)], []
        while waiting:
            place, of_turn = waiting.pop()
            given = {key: of for key, of in of_turn.items() if of is not None} if isinstance(of_turn, Mapping) else {}
            children = given.get("children", [])
            if "tokens" not in given or given.keys() - cls.__slots__ or not isinstance(children, list | tuple):
                has = ", ".join(map(repr, given)) if isinstance(of_turn, Mapping) else type(of_turn).__name__
                raise InvalidInputError(
                    f"{place} has {has or 'nothing'}: give 'tokens', and maybe 'learned' and 'children', a list"
                )
            found.append((place, given))
            waiting += ((f"{place}.{number}", child) for number, child in enumerate(children, 1))
        made: list[Turn] = []  # turns behind this one that have no parent yet
        for place, given in reversed(found):
            number = len(given.get("children", ()))
            children = tuple(made[len(made) - number :])
            del made[len(made) - number :]
            try:
                made.append(cls(tokens=given["tokens"], learned=given.get("learned", True), children=children))
            except InvalidInputError as error:
                raise InvalidInputError(f"{place}: {error}") from None
        return made[0]


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # lists among numbers, or lists of different lengths
        lists = [(index, type(entry).__name__) for index, entry in enumerate(values, 1) if np.iterable(entry)]
        where = "".join(f", of which number {index} is a {kind}" for index, kind in lists[:1])
        raise InvalidInputError(f"a turn has {len(values)} {name!r}{where}: give one list of numbers") from None


class _Segment(NamedTuple):
    """Turns that follow each other without a branching."""

    depth: int
    tokens: list[NDArray[np.int64]]
    is_target: list[NDArray[np.bool_]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def tree_of_turns(root: Turn) -> tuple[SampleTokens, Tree | None]:
    """Return the sample's tokens and its mask, None where nothing branches; at least 2 tokens come before branching."""
    segments = _segments(root)
    first = segments[0].num_tokens
    if first < 2:
        raise InvalidInputError(
            f"a tree has {first} tokens before its first branching, at least 2 are needed: begin with what all share"
        )
    document = np.concatenate([tokens for one in segments for tokens in one.tokens])
    is_target = np.concatenate([targets for one in segments for targets in one.is_target])
    mask = None
    if len(segments) > 1:
        lengths = (first - 1, *(one.num_tokens for one in segments[1:]))
        mask = Tree(lengths, tuple(one.depth for one in segments))
    return sample_of(document, is_target, mask), mask


def _segments(root: Turn) -> list[_Segment]:
    segments: list[_Segment] = []
    waiting = [(root, 0, True)]
    while waiting:
        turn, depth, begins = waiting.pop()
        if begins:
            segments.append(_Segment(depth, [], []))
        tokens = np.asarray(turn.tokens, np.int64)
        segments[-1].tokens.append(tokens)
        segments[-1].is_target.append(np.broadcast_to(np.asarray(turn.learned, np.bool_), tokens.shape))
        branches = len(turn.children) > 1
        waiting += ((child, depth + branches, branches) for child in reversed(turn.children))
    return segments
