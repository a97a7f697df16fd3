"""Lines {"turns": {"text": ..., "learned": ..., "children": [...]}}: trees of turns, which share what is above them.

Only the standard library is imported, as in `scan`. A null is taken for a key that is missing, as tables have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TURNS = "turns"
_KEYS = ("text", "learned", "children")


class TurnError(Exception):
    """A turn that is none; the message is behind the name of the line."""


class Turn(NamedTuple):
    """A turn of a tree.

    Attributes:
        text: of it.
        learned: whether it is.
        depth: how often what is above it branches.
        begins: it is one of several that go on from the turn above it, or the first of all.
        ends: none goes on from it: an end of document is behind it.
    """

    text: str
    learned: bool
    depth: int
    begins: bool
    ends: bool


class Parts(NamedTuple):
    """A tree as one document: parts that begin where it branches.

    Attributes:
        length: tokens of all.
        first_target: the first that is learned, behind the beginning.
        num_targets: how many are.
        lengths, depths: of each part but the first.
    """

    length: int
    first_target: int
    num_targets: int
    lengths: tuple[int, ...]
    depths: tuple[int, ...]

    def measures(self) -> tuple[int, ...]:
        """Return what `scan.scan_lines` needs."""
        of_parts = (number for part in zip(self.lengths, self.depths, strict=True) for number in part)
        return self.length, self.first_target, self.num_targets, *of_parts


def turns_of(value: Any) -> list[Turn]:
    """Return the turns of a tree, depth first.

    Raises:
        TurnError: a turn without text, or with an unknown key; or nothing is learned.
    """
    found: list[Turn] = []
    waiting: list[tuple[str, Any, int, bool]] = [("1", value, 0, True)]
    while waiting:
        name, given, depth, begins = waiting.pop()
        turn = _checked(name, given)
        children = turn.get("children", [])
        found.append(Turn(turn["text"], turn.get("learned", True), depth, begins, not children))
        branches = len(children) > 1
        below = [(f"{name}.{number}", child, depth + branches, branches) for number, child in enumerate(children, 1)]
        waiting += reversed(below)
    if not any(turn.learned for turn in found):
        raise TurnError(f": none of its {len(found)} turns is learned: leave 'learned' out where one is")
    return found


def _checked(name: str, given: Any) -> dict[str, Any]:
    """Return a turn without its nulls."""
    turn = {key: entry for key, entry in given.items() if entry is not None} if isinstance(given, Mapping) else {}
    if not isinstance(turn.get("text"), str) or turn.keys() - set(_KEYS):
        has = ", ".join(map(repr, turn)) if isinstance(given, Mapping) else type(given).__name__
        raise TurnError(
            f": turn {name} has {has or 'nothing'}: give a string 'text', and maybe 'learned' and 'children'"
        )
    children = turn.get("children", [])
    if not isinstance(children, list) or not isinstance(turn.get("learned", True), bool):
        raise TurnError(f": turn {name}: 'learned' is true or false, 'children' a list of turns")
    if children and not turn["text"]:
        raise TurnError(f": turn {name} has an empty text and {len(children)} behind it: only the last of a branch may")
    return turn


def parts_of(turns: Sequence[Turn], lengths: Sequence[int]) -> Parts:
    """Return what the tree is as one document; without a branching its parts are before and from the first target on.

    Args:
        lengths: tokens of each turn.

    Raises:
        TurnError: fewer than 2 tokens before the first branching; or nothing but the first token is learned; or more
            levels than masks have.
    """
    parts: list[list[int]] = []
    first_target = num_targets = length = 0
    for turn, num_tokens in zip(turns, lengths, strict=True):
        if turn.begins:
            parts.append([0, turn.depth])
        parts[-1][0] += num_tokens
        learned = num_tokens - (not length) if turn.learned else 0  # nothing predicts the first of all
        if learned and not num_targets:
            first_target = max(length, 1)
        num_targets += learned
        length += num_tokens
    if parts[0][0] < 2 or not num_targets:
        raise TurnError(
            f": its turns have {parts[0][0]} tokens before they branch, and {num_targets} learned ones behind the "
            "first: at least 2 and 1 are needed"
        )
    if len(parts) == 1:
        return Parts(length, first_target, num_targets, (length - first_target,), (1,))
    from dynamic_cp.types.branches import MOST_LEVELS  # only here: it takes longer than the rest

    if (levels := 1 + max(depth for _, depth in parts)) > MOST_LEVELS:
        raise TurnError(
            f": its turns have {levels} levels, at most {MOST_LEVELS} are supported: cut it in several lines"
        )
    return Parts(length, first_target, num_targets, *map(tuple, zip(*parts[1:], strict=True)))
