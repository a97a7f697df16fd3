"""Text files as documents. With ByteTokenizer one byte is one token, so the size that the file system keeps is the
length; with another tokenizer all files are read and tokenized once.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from megatron.trainer.data.file_table import FileTable, FileWatch
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.source import Source, count, reading
from megatron.trainer.data.tokenizer import ByteTokenizer, TextTokenizer


class TextFiles(Source):
    """One document per text file: its tokens and the end of document.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `indexing.index_text_files`.

    Raises:
        DataError: a file that has changed since it was indexed; see `FileWatch`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, tokenizer: TextTokenizer) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._index = index
        table = FileTable.from_columns(index.columns)
        names = table.list_names()
        self._files = index.columns["files"]
        self._paths = [root + names[file] for file in self._files.tolist()]
        self._watch = FileWatch(table, self._files, self._paths)
        self._left_out = {
            "binary file": index.counts["binary files"],
            "special file": index.counts["special files"],
        }
        self._num_replaced = index.counts.get("files not UTF-8", 0)
        self.lengths = index.columns["lengths"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a file; with ByteTokenizer only those bytes are read."""
        self._index.check_unchanged()
        path, num_tokens = self._paths[document], int(self.lengths[document]) - 1
        by_bytes = isinstance(self._tokenizer, ByteTokenizer)
        with reading(path), open(path, "rb", buffering=0) as file:
            self._watch.check(int(self._files[document]), path, os.fstat(file.fileno()))
            if by_bytes:
                file.seek(start)
                text = file.read(min(stop, num_tokens) - start)
            else:
                text = file.readall()
        tokens = self._tokenizer.encode(text)
        if not by_bytes:
            if len(tokens) != num_tokens:
                raise DataError(
                    f"{path} has {len(tokens)} tokens but had {num_tokens} when it was indexed: the data must not "
                    "change during a run; restart to index it again"
                )
            tokens = tokens[start:stop]
        return np.append(tokens, self._tokenizer.eod) if stop > num_tokens else tokens

    def document_name(self, document: int) -> str:
        """Return the path of the file."""
        path: str = self._paths[document]
        return path

    def describe(self) -> str:
        """Return the number of text files and of those left out."""
        words = f"{self._name}: {count(len(self._paths), 'text file')}"
        for what, number in self._left_out.items():
            words += f", {count(number, what)} left out" if number else ""
        if self._num_replaced:
            words += f", {self._num_replaced} not UTF-8 and read with replacement characters"
        return words
