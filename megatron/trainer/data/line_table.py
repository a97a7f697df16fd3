"""Where the lines of JSONL files are, and what to call them."""

from __future__ import annotations

import numpy as np

from megatron.trainer.data.file_table import FileTable
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.source import reading


class LineTable:
    """The lines that are not blank, in order, as documents.

    Args:
        root: what precedes the names of the files.
        index: made by `json_lines.index_json_lines`.
    """

    def __init__(self, root: str, index: LengthIndex) -> None:
        self._paths = [root + file for file in FileTable.from_columns(index.columns).list_names()]
        self._offsets_bytes = index.columns["offsets_bytes"]
        self._file_documents = index.columns["file_documents"]
        self._blanks, self._file_blanks = index.columns["blanks"], index.columns["file_blanks"]

    def read(self, document: int) -> bytes:
        """Return a line."""
        path = self.path(document)
        with reading(path), open(path, "rb") as file:
            file.seek(self._offsets_bytes[document])
            return file.readline()

    def path(self, document: int) -> str:
        """Return the file of a line."""
        return self._paths[self._file(document)]

    def _file(self, document: int) -> int:
        return int(np.searchsorted(self._file_documents, document, side="right")) - 1

    def name(self, document: int) -> str:
        """Return the file and line number."""
        file = self._file(document)
        blanks = self._blanks[self._file_blanks[file] : self._file_blanks[file + 1]]
        num_blank = int(np.searchsorted(blanks, document, side="right"))
        return f"{self._paths[file]} line {document - int(self._file_documents[file]) + num_blank + 1}"
