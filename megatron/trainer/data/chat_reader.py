"""Finds the template that reads the chats of a run, and says what two runs on chats must share."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from dynamic_cp.errors import InvalidInputError
from megatron.trainer.data import hugging_face, tokenizer
from megatron.trainer.data.chat_template import TEMPLATES, why_no_template, why_no_templates
from megatron.trainer.data.config import DataConfig
from megatron.trainer.data.hugging_face import HuggingFaceTokenizer
from megatron.trainer.data.tokenizer import TextTokenizer, Tokenizer

if TYPE_CHECKING:
    from megatron.trainer.data.chat import ChatReader
    from megatron.trainer.data.chat_format import ChatFormat

CHAT_DATE = "chat date"
"""A checkpoint's name for the date that templates wrote; a resumed run writes the same date."""


def build_chat_reader(config: DataConfig, tokenizer: Tokenizer) -> ChatReader | None:
    """Return the reader of chats, None without --sft. InvalidInputError if the template is missing or does not compile,
    the tokenizer cannot read text, or jinja2 is missing or too old."""
    if not config.sft:
        return None
    if not isinstance(tokenizer, TextTokenizer):
        raise InvalidInputError(
            f"--sft needs a tokenizer that reads text, --tokenizer-type is {config.tokenizer}: use HuggingFaceTokenizer"
        )
    from megatron.trainer.data.chat import ChatReader
    from megatron.trainer.data.chat_format import ChatFormat

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
    """Return the name and the text of a template, and the text of the one for chats with tools if there is one."""
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
    """Return what decides the lengths of chats besides their contents; "texts" is the version of the rules."""
    return {"kind": "chat", "tokenizer": repr(reader.tokenizer), **_template_identity(reader.chat_format), "texts": "3"}


def chat_identity(config: DataConfig) -> dict[str, str]:
    """Return what two runs on chats must share besides the tokenizer; empty without --sft."""
    reader = build_chat_reader(config, tokenizer.build(config))
    return {} if reader is None else _template_identity(reader.chat_format)


def _template_identity(chat_format: ChatFormat) -> dict[str, str]:
    written = chat_format.written_date
    return {"chat template": chat_format.digest} | ({} if written is None else {CHAT_DATE: written})
