"""The lanes that a placement is for, and which of them are near each other."""

from __future__ import annotations

from typing import NamedTuple


class Lanes(NamedTuple):
    """Neighbouring lanes, or the inner groups of a bucket that take their place.

    Attributes:
        number: of the bucket.
        first: place of its first one among all; decides where nodes begin.
        of_node: of a node.
    """

    number: int
    first: int
    of_node: int
