"""JSONL files of chats as documents: the text of each by a template, learned where its assistant wrote it. A prompt
with responses is one document, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.trainer.data import hugging_face, tokenizer
from megatron.trainer.data.chat import TEMPLATES, ChatFormat, ChatReader, why_no_templates
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.hugging_face import HuggingFaceTokenizer
from megatron.trainer.data.json_text import LineError
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_table import LineTable
from megatron.trainer.data.questions import Questions
from megatron.trainer.data.source import count
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer


def build_chat_reader(config: DataConfig, tokenizer: Tokenizer) -> ChatReader | None:
    """Return what reads the chats of `config`; None without --sft.

    Raises:
        InvalidInputError: no template, or one that does not compile; a tokenizer that cannot read text; no safe jinja2.
    """
    if not config.sft:
        return None
    if not isinstance(tokenizer, TextTokenizer):
        raise InvalidInputError(
            f"--sft needs a tokenizer that reads text, --tokenizer-type is {config.tokenizer}: use HuggingFaceTokenizer"
        )
    reason = why_no_templates()
    if reason is not None:
        raise InvalidInputError(f"--sft renders templates: {reason}: pip install 'megatron-dynamic-cp[tokenizers]'")
    folder = tokenizer.folder if isinstance(tokenizer, HuggingFaceTokenizer) else None
    name, template = _template(config.chat_template, folder)
    variables = tuple(sorted(hugging_face.special_tokens(folder).items())) if folder is not None else ()
    chat_format = ChatFormat(name=name, template=template, variables=variables)
    wrong = chat_format.check()
    if wrong is not None:
        raise InvalidInputError(f"{name} is not a Jinja template, {wrong}: fix it or name another with --chat-template")
    return ChatReader(tokenizer=tokenizer, chat_format=chat_format)


def _template(wanted: str | None, folder: str | None) -> tuple[str, str]:
    """Return the name and the text of a template."""
    names = ", ".join(TEMPLATES)
    if wanted is None:
        if folder is None:
            return "the template chatml", TEMPLATES["chatml"]
        own = hugging_face.chat_template(folder)
        if own is None:
            raise InvalidInputError(
                f"the tokenizer of {folder} has no chat template: name a file or {names} with --chat-template"
            )
        return f"the chat template of {folder}", own
    if wanted in TEMPLATES:
        return f"the template {wanted}", TEMPLATES[wanted]
    if not os.path.isfile(wanted):
        raise InvalidInputError(f"--chat-template {wanted} is neither a file nor one of {names}: give one of them")
    try:
        return f"the chat template {wanted}", Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--chat-template {wanted} cannot be read: {error}") from error


def chat_request(reader: ChatReader) -> dict[str, str]:
    """Return what decides the lengths of chats besides their contents."""
    return {"kind": "chat", "tokenizer": repr(reader.tokenizer), "template": reader.chat_format.digest}


def chat_identity(config: DataConfig) -> dict[str, str]:
    """Return what two runs on chats must share besides the tokenizer; nothing without --sft."""
    reader = build_chat_reader(config, tokenizer.build(config))
    return {} if reader is None else {"chat template": reader.chat_format.digest}


class ChatLines:
    """One document per line: the text of its chat, without an end of document of its own.

    Args:
        name: what to call all of them in messages.
        root: what precedes the names of the files.
        index: made by `json_lines.index_json_lines`.
    """

    def __init__(self, name: str, root: str, index: LengthIndex, reader: ChatReader) -> None:
        self._name = name
        self._lines = LineTable(root, index)
        self._reader = reader
        self._num_blank, self._num_targets = index.counts["blank lines"], index.counts["tokens of assistants"]
        self._questions = Questions(index)
        self.has_masks = self._questions.has_masks
        self.lengths = index.columns["lengths"]
        self.first_targets = index.columns["first_targets"]

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens start .. stop - 1 of a chat."""
        return self.read_targeted(document, start, stop)[0]

    def read_targeted(self, document: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return tokens start .. stop - 1 of a chat, and which of them its assistant wrote."""
        try:
            tokens, is_target, answers = self._reader.read(self._lines.read(document))
        except LineError as error:
            raise self._lines.changed_line(document) from error
        if len(tokens) != self.lengths[document]:
            raise self._lines.changed_line(document, len(tokens), int(self.lengths[document]), "tokens")
        if list(answers) != self._questions.answers(document):
            raise self._lines.changed_line(document)
        return tokens[start:stop], is_target[start:stop]

    def mask(self, document: int, num_predicted: int) -> SharedQuestion | None:
        """Return the mask of the first tokens of a line."""
        return self._questions.mask(document, num_predicted)

    def identity(self) -> bytes:
        """Return what decides the masks besides the lengths of lines."""
        return self._questions.identity()

    def document_name(self, document: int) -> str:
        """Return the file and line number."""
        return self._lines.name(document)

    def describe(self) -> str:
        """Return the number of chats, of blank lines, and of tokens that are learned."""
        words = f"{self._name}: {count(len(self.lengths), 'chat')} by {self._reader.chat_format.name}"
        words += f", loss on the {self._num_targets} of {int(self.lengths.sum())} tokens that assistants wrote"
        words += f", {count(self._num_blank, 'blank line')} skipped" if self._num_blank else ""
        return words + self._questions.describe()
