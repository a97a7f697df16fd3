"""The documents of an index: text files, and lines of JSONL that are texts, chats, or prompts with responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import DataError
from dynamic_cp.types import Branches, SharedQuestion, Tree
from megatron.trainer.data.files import FileTable
from megatron.trainer.data.index_file import TOKENS, DataIndex
from megatron.trainer.data.records import UNITS
from megatron.trainer.data.source import Source, count
from megatron.trainer.data.tokenizing import UNREAD

if TYPE_CHECKING:
    from megatron.trainer.data.chat_format import ChatFormat


class StoredDocuments(Source):
    """The documents of an entry of --data-path. Their tokens are in the index; the files themselves are not read.

    Columns of the index beside those of `files.FileTable`, int64:
        tokens: of all documents, concatenated (uint16 or int32).
        lengths, first_tokens: [D], tokens of each document, and of all before it.
        file_documents: [F + 1], documents before each file.
        file_blanks: [F + 1], blank lines before each file; this and the following only for files of lines.
        file_units: [F], index in `records.UNITS` of what a record is called.
        learned, first_targets: these and others as in `tokenizing.TokenizedLines`; missing if everything is learned.

    Args:
        name: what messages call all of them.
        root: what precedes the names of the files.
        vocab_size: token ids are below it.
        chat_format: what wrote the texts of chats; None: they are no chats.
    """

    def __init__(
        self, name: str, root: str, index: DataIndex, vocab_size: int, chat_format: ChatFormat | None = None
    ) -> None:
        columns, none = index.columns, np.zeros(0, np.int64)
        self._name, self._root, self._index, self._vocab_size = name, root, index, vocab_size
        self._chat_format = chat_format
        self._names = FileTable.from_columns(columns).list_names()
        self._file_documents = columns["file_documents"]
        self._continued = columns.get("continued", none)
        self._questions = Questions(index)
        self.lengths = columns["lengths"]
        self.has_masks = self._questions.has_masks
        self.first_targets = columns.get("first_targets")

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a document; DataError if the index is damaged or was written since."""
        self._index.check_unchanged()
        first = int(self._index.columns["first_tokens"][document])
        stop = min(stop, int(self.lengths[document]))
        tokens = self._index.columns[TOKENS][first + start : first + stop].astype(np.int64)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise DataError(
                f"{self._index.path} is damaged: {self.document_name(document)} has a token outside of the "
                f"{self._vocab_size} of the vocabulary there; remove the file, and the data are indexed again"
            )
        return tokens

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        """Return what `read` does, and which of these tokens are learned (None: all)."""
        tokens = self.read(document, start, stop)
        learned = self._index.columns.get("learned")
        if learned is None:
            return tokens, None
        first = int(self._index.columns["first_tokens"][document]) + start
        num_edges = np.searchsorted(learned, np.arange(first, first + len(tokens)), side="right")
        return tokens, num_edges % 2 == 1

    def mask(self, document: int, num_predicted: int) -> Branches | None:
        return self._questions.mask(document, num_predicted)

    def identity(self) -> bytes:
        return self._questions.identity()

    def document_name(self, document: int) -> str:
        """Return the path of a text file, or the file and the number of a line, entry or row."""
        columns = self._index.columns
        file = int(np.searchsorted(self._file_documents, document, side="right")) - 1
        path = self._root + self._names[file]
        if "file_units" not in columns:
            return path
        first = int(self._file_documents[file])
        num_continued = np.searchsorted(self._continued, [first, document + 1])
        blanks = columns["blanks"][columns["file_blanks"][file] : columns["file_blanks"][file + 1]]
        num_blank = int(np.searchsorted(blanks, document, side="right"))
        number = document - first - int(np.diff(num_continued)[0]) + num_blank + 1
        return f"{path} {UNITS[columns['file_units'][file]]} {number}"

    def first_of_line(self, document: int) -> int:
        place = int(np.searchsorted(self._continued, document, side="right"))
        while place and self._continued[place - 1] == document:
            document, place = document - 1, place - 1
        return document

    def describe(self) -> str:
        """Return how many documents of which kind there are, and what was left out or is not read."""
        counts = self._index.counts
        if self._index.request["kind"] == "text":
            words = f"{self._name}: {count(len(self.lengths), 'text file')}"
            for what in ("binary file", "special file"):
                words += f", {count(counts[f'{what}s'], what)} left out" if counts[f"{what}s"] else ""
            num_replaced = counts["files not UTF-8"]
            return words + (f", {num_replaced} not UTF-8 and read with replacement characters" if num_replaced else "")
        lines = count(len(self.lengths), "JSON line") if self._chat_format is None else self._chats(self._chat_format)
        num_blank = counts["blank lines"]
        words = f"{self._name}: {lines}" + (f", {count(num_blank, 'blank line')} skipped" if num_blank else "")
        words += self._questions.describe()
        unread = [
            f"{key.removeprefix(UNREAD)!r} ({num_lines})" for key, num_lines in counts.items() if key.startswith(UNREAD)
        ]
        return words + (f", keys without effect (lines): {', '.join(unread)}" if unread else "")

    def _chats(self, chat_format: ChatFormat) -> str:
        num_texts = len(self.lengths)
        num_chats = num_texts - len(self._continued)
        words = f"{count(num_chats, 'chat')} by {chat_format.name}"
        if num_texts > num_chats:
            words += f" in {num_texts} texts, since it writes earlier answers otherwise once later messages follow"
        if chat_format.unwritten:
            words += f" without the {chat_format.unwritten!r} that ends its generation prompt"
        words += "" if chat_format.written_date is None else f" with the date {chat_format.written_date}"
        num_targets = self._index.counts["learned tokens"]
        return f"{words}, loss on the {num_targets} of {int(self.lengths.sum())} tokens that assistants wrote"


class Questions:
    """The prompts with responses, and the trees, among the documents of an index, and their masks. A prompt is followed
    by its responses. A tree is its parts, depth first: the part that all share, then as answers those that begin at
    branches. A document has one token more than its sample predicts."""

    def __init__(self, index: DataIndex) -> None:
        # Copies: global batches take masks from these, whatever happens to the file of the index.
        none = np.zeros(0, np.int64)
        self._lengths = np.array(index.columns["lengths"])
        self._documents, num_answers, self._answers, self._depths = (
            np.array(index.columns.get(name, none)) for name in ("questions", "num_answers", "answers", "depths")
        )
        self._first_answers = np.cumsum(np.concatenate([[0], num_answers]).astype(np.int64))
        self._targets = none
        if len(self._documents):
            targets = np.array(index.columns["first_targets"][self._documents])
            of_prompts = self._lengths[self._documents] - np.add.reduceat(self._answers, self._first_answers[:-1])
            if (self._depths > 1).any() or (targets != of_prompts).any():  # at least one is a tree
                self._targets = targets

    @property
    def has_masks(self) -> bool:
        """Whether a document has several branches, which must not attend to each other."""
        return len(self._answers) > len(self._documents)

    def parts(self, document: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and depth of each response, or part of a tree; empty for other documents."""
        place = int(np.searchsorted(self._documents, document))
        if place == len(self._documents) or self._documents[place] != document:
            return (), ()
        of_question = slice(*self._first_answers[place : place + 2].tolist())
        return tuple(self._answers[of_question].tolist()), tuple(self._depths[of_question].tolist())

    def mask(self, document: int, num_predicted: int) -> Branches | None:
        """Return the mask of the sample that predicts the first tokens of a document; None if it is causal."""
        answers, depths = self.parts(document)
        shared = int(self._lengths[document]) - sum(answers) - 1
        rest, kept = num_predicted - shared, []
        for answer in answers:
            if rest <= 0:
                break
            kept.append(min(answer, rest))
            rest -= answer
        depths = depths[: len(kept)]
        if depths == tuple(range(1, len(kept) + 1)):  # it does not branch
            return None
        return SharedQuestion(shared, tuple(kept)) if set(depths) == {1} else Tree((shared, *kept), (0, *depths))

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of documents; b"" without questions."""
        if not len(self._documents):
            return b""
        of_trees = (self._depths, self._targets) if len(self._targets) else ()
        return b"".join(one.tobytes() for one in (self._documents, self._answers, self._first_answers, *of_trees))

    def describe(self) -> str:
        """Return the numbers of prompts and responses or turns, for the description of a source."""
        if not len(self._documents):
            return ""
        prompts = count(len(self._documents), "prompt")
        what = ("response or turn", "responses or turns") if len(self._targets) else ("response",)
        responses = count(len(self._answers), *what)
        return f", {prompts} with {responses} of {self._answers.sum()} tokens"
