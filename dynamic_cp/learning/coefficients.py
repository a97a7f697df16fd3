"""Which coefficients the planner uses for which iteration of a run.

Plans are made ahead: the times of iterations up to k can change plans only from k + look-ahead + 1 on; the iterations
in between are already planned. A run that resumes in between must plan them again as they were, so the factors of both
stretches are saved, each with its first iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.learning.multipliers import Multipliers
from dynamic_cp.types import Hardware

_NONE = Multipliers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A hardware file and its refinements over a run.

    Attributes:
        base: the hardware file.
        changes: (first iteration that is planned with them, factors), ascending; before the first: the file as it is.
    """

    base: Hardware
    changes: tuple[tuple[int, Multipliers], ...] = ()

    def __post_init__(self) -> None:
        firsts = [first for first, _ in self.changes]
        if any(isinstance(first, bool) or not isinstance(first, int) or first < 1 for first in firsts):
            raise InvalidInputError(f"coefficients change at iterations {firsts}: these are counts >= 1")
        if firsts != sorted(set(firsts)):
            raise InvalidInputError(
                f"coefficients change at iterations {firsts}: each must be later than the one before"
            )

    def multipliers(self, iteration: int) -> Multipliers:
        """Return the factors with which `iteration` is planned."""
        return next((factors for first, factors in reversed(self.changes) if first <= iteration), _NONE)

    def hardware(self, iteration: int) -> Hardware:
        """Return the hardware with which `iteration` is planned."""
        return self.multipliers(iteration).apply(self.base)

    def changed(self, first_iteration: int, factors: Multipliers, *, oldest: int = 1) -> Coefficients:
        """Return these with other factors from `first_iteration` on.

        Args:
            oldest: first iteration that may still be asked for; what only earlier ones use is forgotten.

        Raises:
            InvalidInputError: they have changed at `first_iteration` or later already.
        """
        in_use = [first for first, _ in self.changes if first <= oldest]
        kept = tuple(change for change in self.changes if not in_use or change[0] >= in_use[-1])
        return Coefficients(base=self.base, changes=(*kept, (first_iteration, factors)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the base is not among them."""
        return {"changes": [[first, factors.to_dict()] for first, factors in self.changes]}

    @classmethod
    def from_dict(cls, base: Hardware, data: Mapping[str, Any]) -> Coefficients:
        """Return what `to_dict` wrote.

        Args:
            base: the run's hardware file. Another one than before is allowed: factors then correct that one.

        Raises:
            InvalidInputError: anything else than `to_dict` writes.
        """
        changes = data.get("changes") if isinstance(data, Mapping) else None
        if not isinstance(changes, list) or any(
            not isinstance(change, list | tuple) or len(change) != 2 or not isinstance(change[1], Mapping)
            for change in changes
        ):
            raise InvalidInputError(
                f"saved coefficients are {data!r}, a list of changes is needed: leave the refinement out"
            )
        return cls(base=base, changes=tuple((first, Multipliers.from_dict(factors)) for first, factors in changes))
