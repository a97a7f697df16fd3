"""JSONL files of chats as documents: the texts of each by a template, learned where its assistant wrote them. A prompt
with responses is one document, too.
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.trainer.data import hugging_face, tokenizer
from megatron.trainer.data.chat import ChatReader
from megatron.trainer.data.chat_format import ChatFormat
from megatron.trainer.data.chat_template import TEMPLATES, why_no_template, why_no_templates
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.hugging_face import HuggingFaceTokenizer
from megatron.trainer.data.json_text import LineError
from megatron.trainer.data.length_index import LengthIndex
from megatron.trainer.data.line_table import LineTable
from megatron.trainer.data.questions import Questions
from megatron.trainer.data.source import count
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer

CHAT_DATE = "chat date"
"""What a checkpoint calls the date that templates wrote, so that a run which goes on writes it again."""


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
    name, template, tool_template = _template(config.chat_template, folder)
    variables = tuple(sorted(hugging_face.special_tokens(folder).items())) if folder is not None else ()
    for text in (template, tool_template or ""):
        wrong = why_no_template(text)
        if wrong is not None:
            raise InvalidInputError(
                f"{name} is not a Jinja template, {wrong}: fix it or name another with --chat-template"
            )
    chat_format = ChatFormat(
        name=name,
        template=template,
        tool_template=tool_template,
        variables=variables,
        date=config.chat_date or date.today().isoformat(),
    )
    return ChatReader(tokenizer=tokenizer, chat_format=chat_format)


def _template(wanted: str | None, folder: str | None) -> tuple[str, str, str | None]:
    """Return the name and the text of a template, and the text of another one for chats with tools."""
    names = ", ".join(TEMPLATES)
    if wanted is None:
        if folder is None:
            return "the template chatml", TEMPLATES["chatml"], None
        own = hugging_face.chat_templates(folder)
        if "default" not in own:
            raise InvalidInputError(
                f"the tokenizer of {folder} has no chat template: name a file or {names} with --chat-template"
            )
        return f"the chat template of {folder}", own["default"], own.get("tool_use")
    if wanted in TEMPLATES:
        return f"the template {wanted}", TEMPLATES[wanted], None
    if not os.path.isfile(wanted):
        raise InvalidInputError(f"--chat-template {wanted} is neither a file nor one of {names}: give one of them")
    try:
        return f"the chat template {wanted}", Path(wanted).read_text(encoding="utf-8"), None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--chat-template {wanted} cannot be read: {error}") from error


def chat_request(reader: ChatReader) -> dict[str, str]:
    """Return what decides the lengths of chats besides their contents: among it which rules make a chat's texts."""
    return {"kind": "chat", "tokenizer": repr(reader.tokenizer), **_template_identity(reader.chat_format), "texts": "2"}


def chat_identity(config: DataConfig) -> dict[str, str]:
    """Return what two runs on chats must share besides the tokenizer; nothing without --sft."""
    reader = build_chat_reader(config, tokenizer.build(config))
    return {} if reader is None else _template_identity(reader.chat_format)


def _template_identity(chat_format: ChatFormat) -> dict[str, str]:
    written = chat_format.written_date
    return {"chat template": chat_format.digest} | ({} if written is None else {CHAT_DATE: written})


class ChatLines:
    """The texts of chats, without an end of document of their own: one of each line, or several that stay together.

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
            texts = self._reader.read(self._lines.read(document))
            tokens, is_target, answers = texts[document - self._lines.first(document)]
        except (LineError, IndexError) as error:
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

    def first_of_line(self, document: int) -> int:
        """Return the first document of the line of `document`."""
        return self._lines.first(document)

    def describe(self) -> str:
        """Return the number of chats, of their texts, of blank lines, and of tokens that are learned."""
        num_chats, num_texts, chat_format = self._lines.num_lines, len(self.lengths), self._reader.chat_format
        words = f"{self._name}: {count(num_chats, 'chat')} by {chat_format.name}"
        if num_texts > num_chats:
            words += f" in {num_texts} texts, since it writes earlier answers otherwise once later messages follow"
        if chat_format.unwritten:
            words += f" without the {chat_format.unwritten!r} that ends its generation prompt"
        words += "" if chat_format.written_date is None else f" with the date {chat_format.written_date}"
        words += f", loss on the {self._num_targets} of {int(self.lengths.sum())} tokens that assistants wrote"
        words += f", {count(self._num_blank, 'blank line')} skipped" if self._num_blank else ""
        return words + self._questions.describe()
