"""What every source of documents offers, and how reading errors reach the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import SharedQuestion


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
    """Documents of which only some tokens are learned: chats, and responses to prompts.

    Attributes:
        first_targets: int64 [documents], the first token after the beginning that is learned.
    """

    first_targets: NDArray[np.int64]

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return what `read` does, and which of these tokens are learned."""
        ...


@runtime_checkable
class MaskedSource(TargetedSource, Protocol):
    """Documents of which some may be prompts with several responses, which do not attend to each other.

    Attributes:
        has_masks: some are.
    """

    has_masks: bool

    def mask(self, document: int, num_predicted: int) -> SharedQuestion | None:
        """Return the mask of the sample that predicts the first tokens of a document; None where it is causal."""
        ...

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents; nothing where there are no responses."""
        ...


@runtime_checkable
class LinedSource(Source, Protocol):
    """Documents of which several may be of one line: answers of a chat, which belong to one split."""

    def first_of_line(self, document: int) -> int:
        """Return the first document of the line of `document`."""
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
