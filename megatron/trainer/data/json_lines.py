"""JSONL files as documents, found through an index: texts, chats, and prompts with responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.types import Branches
from megatron.trainer.data.json_text import LineError
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_reader import Document, TextReader
from megatron.trainer.data.line_table import LineTable
from megatron.trainer.data.questions import Questions
from megatron.trainer.data.scan import UNREAD
from megatron.trainer.data.source import Source, count
from megatron.trainer.data.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from megatron.trainer.data.chat import ChatReader


class JsonLines(Source):
    """One document per line: a text, a prompt with its responses, or a chat. Blank lines are counted.

    A chat is several documents, which stay together, where its template writes earlier answers otherwise once later
    messages follow.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `indexing.index_json_lines`.
        reader: reads the lines as they were indexed.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, reader: TextReader | ChatReader) -> None:
        self._name, self._reader = name, reader
        self._lines = LineTable(root, index)
        self._questions = Questions(index)
        self._counts = index.counts
        self.lengths = index.columns["lengths"]
        self.has_masks = self._questions.has_masks
        self.first_targets = index.columns.get("first_targets")
        if self.first_targets is None:
            self.first_targets = self._questions.first_targets()

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document, reading only its line."""
        return self._read(document).tokens[start:stop]

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return what `read` does, and which of these tokens are an assistant's, or no prompt's; None: all."""
        tokens, is_target, *_ = self._read(document)
        if self.first_targets is None:
            return tokens[start:stop], None
        return tokens[start:stop], (np.ones(len(tokens), np.bool_) if is_target is None else is_target)[start:stop]

    def _read(self, document: int) -> Document:
        """Return a document that is as its index says.

        Raises:
            DataError: it is not.
        """
        try:
            of_line = self._reader.read(self._lines.read(document))
            found = of_line[document - self._lines.first(document)]
        except (LineError, IndexError) as error:
            raise self._lines.changed_line(document) from error
        num_tokens, indexed = len(found.tokens), int(self.lengths[document])
        if num_tokens != indexed:
            if not isinstance(self._reader, TextReader):
                raise self._lines.changed_line(document, num_tokens, indexed, "tokens")
            unit = "bytes" if isinstance(self._reader.tokenizer, ByteTokenizer) else "tokens"
            raise self._lines.changed_line(document, num_tokens - 1, indexed - 1, f"{unit} of text")
        if (found.answers, found.depths or (1,) * len(found.answers)) != self._questions.parts(document):
            raise self._lines.changed_line(document)
        return found

    def mask(self, document: int, num_predicted: int) -> Branches | None:
        """Return the mask of the first tokens of a document."""
        return self._questions.mask(document, num_predicted)

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents."""
        return self._questions.identity()

    def document_name(self, document: int) -> str:
        """Return the file and line number."""
        return self._lines.name(document)

    def first_of_line(self, document: int) -> int:
        """Return the first document of the line of `document`."""
        return self._lines.first(document)

    def describe(self) -> str:
        """Return the number of lines and of blank ones, of prompts and responses, and what of them is not read."""
        num_blank, chats = self._counts["blank lines"], self._reader
        words = f"{self._name}: "
        if not isinstance(chats, TextReader):
            words += self._describe_chats(chats)
        else:
            words += count(len(self.lengths), "JSON line")
        words += (f", {count(num_blank, 'blank line')} skipped" if num_blank else "") + self._questions.describe()
        unread = [
            f"{key.removeprefix(UNREAD)!r} ({num_lines})"
            for key, num_lines in self._counts.items()
            if key.startswith(UNREAD)
        ]
        return words + (f", keys without effect (lines): {', '.join(unread)}" if unread else "")

    def _describe_chats(self, reader: ChatReader) -> str:
        num_chats, num_texts, chat_format = self._lines.num_lines, len(self.lengths), reader.chat_format
        words = f"{count(num_chats, 'chat')} by {chat_format.name}"
        if num_texts > num_chats:
            words += f" in {num_texts} texts, since it writes earlier answers otherwise once later messages follow"
        if chat_format.unwritten:
            words += f" without the {chat_format.unwritten!r} that ends its generation prompt"
        words += "" if chat_format.written_date is None else f" with the date {chat_format.written_date}"
        num_targets = self._counts["tokens of assistants"]
        return f"{words}, loss on the {num_targets} of {int(self.lengths.sum())} tokens that assistants wrote"
