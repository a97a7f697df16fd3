"""What the lines of JSONL files are read into: documents as tokens, of which some may not be learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.json_text import Question, check_prompt, content_of_line, encode, parts_of_line
from megatron.trainer.data.tokenizer import TextTokenizer
from megatron.trainer.data.turns import Parts, Turn


class Document(NamedTuple):
    """A text or a chat as tokens, or a prompt and its responses one after the other, or the turns of a tree.

    Attributes:
        tokens: int64 [n], a text with its end of document.
        is_target: which of them are learned, bool [n]; None: all.
        answers: tokens of each response, or of each part of a tree behind the first; none where there is neither.
        depths: of each part of a tree; none: 1 for each response.
        unread: `json_text.unread_keys` of its line, of the first document of a line.
    """

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_] | None = None
    answers: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()

    def measures(self) -> tuple[int, ...]:
        """Return what `scan.scan_lines` needs: the first learned token is one after the beginning."""
        if self.is_target is None:
            return (len(self.tokens),)
        learned = self.is_target[1:]
        depths = self.depths or (1,) * len(self.answers)
        return Parts(len(self.tokens), 1 + int(learned.argmax()), int(learned.sum()), self.answers, depths).measures()


class LineReader(Protocol):
    """What reads the lines of a data set. Pickles."""

    def read(self, line: bytes) -> list[Document]:
        """Return the documents of a line; LineError where it is malformed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Reads the text field of JSONL lines as tokens and the end of document; prompts with responses and trees, too.

    A prompt is tokenized by itself and has no end; each response has one, which is learned with it.
    """

    tokenizer: TextTokenizer
    json_key: str

    def read(self, line: bytes) -> list[Document]:
        """Return the one document of a line.

        Raises:
            LineError: there is neither a text nor a prompt with responses, nor turns.
        """
        content, unread = content_of_line(line, self.json_key)
        if isinstance(content, str):
            return [Document(self._ended(content), unread=unread)]
        document = self.question(content) if isinstance(content, Question) else self._tree(content)
        return [document._replace(unread=unread)]

    def question(self, content: Question) -> Document:
        """Return a prompt and its responses, all of them texts; LineError where the prompt is too short."""
        prompt = self.tokenizer.encode(encode(content.prompt))
        check_prompt(len(prompt))
        responses = [self._ended(response) for response in content.responses]
        tokens = np.concatenate([prompt, *responses])
        return Document(tokens, np.arange(len(tokens)) >= len(prompt), tuple(map(len, responses)))

    def _tree(self, turns: list[Turn]) -> Document:
        tokens = [self._ended(one.text) if one.ends else self.tokenizer.encode(encode(one.text)) for one in turns]
        lengths = [*map(len, tokens)]
        parts = parts_of_line(turns, lengths)
        is_target = np.repeat([one.learned for one in turns], lengths)
        return Document(np.concatenate(tokens), is_target, parts.lengths, parts.depths)

    def _ended(self, text: str) -> NDArray[np.int64]:
        return np.append(self.tokenizer.encode(encode(text)), self.tokenizer.eod)
