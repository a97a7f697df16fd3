"""What every source of documents offers, and how reading errors reach the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError


class Source(Protocol):
    """Documents with known lengths. Pickles and forks without open files: they are opened where they are read.

    Attributes:
        lengths: int64 [documents], tokens of each document with its end of document.
    """

    lengths: NDArray[np.int64]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document; DataError when it is not what the index says."""
        ...

    def document_name(self, document: int) -> str:
        """Return what to call a document in a message."""
        ...

    def describe(self) -> str:
        """Return the kind and number of documents and what was left out, in a few words."""
        ...


@runtime_checkable
class TargetedSource(Source, Protocol):
    """Documents of which only some tokens are learned: chats.

    Attributes:
        first_targets: int64 [documents], the first token after the beginning that is learned.
    """

    first_targets: NDArray[np.int64]

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return what `read` does, and which of these tokens are learned."""
        ...


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError of the block into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror or error}; "
            "check that it exists and that this user may read it",
            path=path,
        ) from error


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return "1 file", "2 files"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
