"""Faults that tests plant: something else takes the place of a function, for a while or for the life of a rank."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

Plant = Callable[[], AbstractContextManager[Any]]


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Have the function beneath take the place of `owner.name`, which it gets as its first argument."""

    def plant_of(change: Callable[..., Any]) -> Plant:
        @functools.wraps(change)
        def plant() -> AbstractContextManager[Any]:
            original = getattr(owner, name)
            return mock.patch.object(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))

        return plant

    return plant_of
