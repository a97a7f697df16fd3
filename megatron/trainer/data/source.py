"""The interface of every source of documents, and reading errors for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import Branches


class Source:
    """Documents with known lengths. Can be pickled and forked, because files are opened only where they are read.

    Methods after `describe` concern documents that are learned in part or have masks; by default there are none.

    Attributes:
        lengths: int64 [documents], tokens of each document with its end of document.
        first_targets: int64 [documents], index of the first learned token after token 0; None: all are learned.
        has_masks: some documents have several branches, which do not attend to each other.
    """

    lengths: NDArray[np.int64]
    first_targets: NDArray[np.int64] | None = None
    has_masks = False

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document; DataError if it differs from the index."""
        raise NotImplementedError

    def document_name(self, document: int) -> str:
        """Return what messages call a document."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the kind and number of documents and what was left out, in a few words."""
        raise NotImplementedError

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return what `read` does, and which of these tokens are learned (None: all)."""
        return self.read(document, start, stop), None

    def mask(self, document: int, num_predicted: int) -> Branches | None:
        """Return the mask of the sample that predicts the first tokens of a document; None if it is causal."""
        return None

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents; b"" if there are none."""
        return b""

    def first_of_line(self, document: int) -> int:
        """Return the first document of the line of `document`; the answers of a chat belong to one split."""
        return document


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an OSError of the block into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror or error}; "
            "check that it exists and that this user may read it"
        ) from error


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return "1 file", "2 files"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
