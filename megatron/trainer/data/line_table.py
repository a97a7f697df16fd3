"""Where the lines of JSONL files are, and what to call them."""

from __future__ import annotations

import os

import numpy as np

from dynamic_cp.errors import DataError
from megatron.trainer.data.file_table import FileTable, FileWatch
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.source import reading
from megatron.trainer.data.unpacked import line_name


class LineTable:
    """The lines that are not blank, in order: one document of each, or several of one after the other.

    Args:
        root: what precedes the names of the files.
        index: made by `json_lines.index_json_lines`.

    Raises:
        DataError: a file that has changed since it was indexed; see `FileWatch`.
    """

    def __init__(self, root: str, index: LengthIndex) -> None:
        self._index = index
        table = FileTable.from_columns(index.columns)
        self._root, self._names = root, table.list_names()
        self._paths = [root + file for file in self._names]
        self._watch = FileWatch(table, range(len(table)), self._paths)
        self._offsets_bytes = index.columns["offsets_bytes"]
        self._file_documents = index.columns["file_documents"]
        self._blanks, self._file_blanks = index.columns["blanks"], index.columns["file_blanks"]
        self._continued = index.columns.get("continued", np.zeros(0, np.int64))

    @property
    def num_lines(self) -> int:
        """Lines that are not blank."""
        return len(self._offsets_bytes) - len(self._continued)

    def read(self, document: int) -> bytes:
        """Return a line.

        Raises:
            DataError: its file cannot be read, or has changed since it was indexed; or the index has.
        """
        self._index.check_unchanged()
        number = self._file(document)
        path = self._paths[number]
        with reading(path), open(path, "rb") as file:
            self._watch.check(number, path, os.fstat(file.fileno()))
            file.seek(self._offsets_bytes[document])
            return file.readline()

    def changed_line(self, document: int, found: int | None = None, indexed: int = 0, unit: str = "") -> DataError:
        """Return the error of a line that is not as it was indexed.

        Args:
            found: its length now, in `unit`; None when it cannot be read, as it could then.
            indexed: its length then.
        """
        how = "is no longer the line that" if found is None else f"has {found} {unit} but had {indexed} when it"
        return DataError(
            f"{self.name(document)} {how} was indexed: the data must not change during a run; restart to index it again"
        )

    def path(self, document: int) -> str:
        """Return the file of a line."""
        return self._paths[self._file(document)]

    def first(self, document: int) -> int:
        """Return the first document of the line of `document`."""
        place = int(np.searchsorted(self._continued, document, side="right"))
        while place and self._continued[place - 1] == document:
            document, place = document - 1, place - 1
        return document

    def _file(self, document: int) -> int:
        return int(np.searchsorted(self._file_documents, document, side="right")) - 1

    def name(self, document: int) -> str:
        """Return the file and line number."""
        file = self._file(document)
        first = int(self._file_documents[file])
        num_continued = np.searchsorted(self._continued, [first, document + 1])
        blanks = self._blanks[self._file_blanks[file] : self._file_blanks[file + 1]]
        num_blank = int(np.searchsorted(blanks, document, side="right"))
        number = document - first - int(np.diff(num_continued)[0]) + num_blank + 1
        return line_name(self._root, self._names[file], number)
