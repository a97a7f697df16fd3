"""Errors a user can cause. Each message gives what is wrong, the two numbers that disagree, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DynamicCPError(ValueError):
    """Base of every error that bad input can raise.

    Args:
        message: One line for the user: what, the two numbers, the remedy.
        **details: Attributes for programs: which sample, which place of a plan, how many bytes. Values and flags that
            are wrong are named in the message alone.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["details"][name]
        except KeyError:
            raise AttributeError(name) from None


class InvalidInputError(DynamicCPError):
    """A value, file or topology that contradicts itself or the others."""


class InfeasibleSampleError(DynamicCPError):
    """A sample that no allowed context-parallel size can hold within the token limit."""


class MemoryLimitError(DynamicCPError):
    """A plan or a token limit that needs more memory than the device has."""


class IllegalPlanError(DynamicCPError):
    """A plan that breaks a rule of `dynamic_cp.plans.validate.check_plan`."""


class DisagreementError(DynamicCPError):
    """Ranks of one job hold different plans or data."""


class UnsupportedFeatureError(DynamicCPError):
    """A configuration outside the supported list; the message names the flag."""


class DataError(DynamicCPError):
    """A data file or index that is missing, truncated or malformed."""


class CheckpointError(DynamicCPError):
    """A checkpoint that is missing, truncated or does not match this run."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'github'?)` with the nearest of `known`, or "" if none is near."""
    near = difflib.get_close_matches(name, tuple(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
