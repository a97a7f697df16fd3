"""Which whole numbers are allowed, and how they are written."""

from __future__ import annotations

from numbers import Integral

from dynamic_cp.errors import InvalidInputError

MAX_COUNT = 2**31 - 1
"""Largest length, size or count: cu_seqlens and the planner's sums are integers of fixed width."""

MOST_LAYERS = 100_000
"""Largest number of layers: each has entries in lists."""
_MOST = {"num_layers": MOST_LAYERS, "mtp_num_layers": MOST_LAYERS}


def is_power_of_two(value: int) -> bool:
    """Return whether `value` is 1, 2, 4, 8, ..."""
    return value >= 1 and value & (value - 1) == 0


def largest_power_of_two(value: int) -> int:
    """Return the largest power of two that is <= `value` (`value` >= 1)."""
    return 1 << (value.bit_length() - 1)


def counted(number: int, noun: str) -> str:
    """Return `1 sample` or `2 samples`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def require_at_least(minimum: int, **values: int) -> None:
    """Raise InvalidInputError unless all are integers from `minimum` to MAX_COUNT (layers: MOST_LAYERS)."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise InvalidInputError(f"{name} is {value!r}, an integer is needed")
        most = _MOST.get(name, MAX_COUNT)
        if not minimum <= value <= most:
            raise InvalidInputError(
                f"{name} is {value}, the {'smallest' if value < minimum else 'largest'} allowed value is "
                f"{minimum if value < minimum else most}: give {minimum} <= {name} <= {most}"
            )
