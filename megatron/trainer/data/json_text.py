"""The text of a JSONL line, or its prompt and responses: the one reading of it that indexing and training share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dynamic_cp.json_text import unique_entries
from megatron.trainer.data.turns import TURNS, Parts, Turn, TurnError, parts_of, turns_of

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROMPT, RESPONSES, COMPLETION, CHOSEN, REJECTED = "prompt", "responses", "completion", "chosen", "rejected"
_OF_RECORDS = frozenset(("id", "uuid", "source", "dataset", "url", "meta", "metadata"))
"""Keys that say which record it is, or where it is from: they are not to be learned, whoever reads them."""
_FIELDS_OF_CHATS = ("messages", "conversations", "instruction")


class LineError(Exception):
    """A line without text. The message continues the name of the line: " is not JSON (...): ..."."""


class Question(NamedTuple):
    """A prompt and its responses, at least one."""

    prompt: Any
    responses: tuple[str, ...]


def object_of_line(line: bytes, example: str) -> dict[str, Any]:
    """Return the object of a line.

    Args:
        example: of such a line, for messages.

    Raises:
        LineError: no JSON object.
    """
    if line.startswith(BYTE_ORDER_MARK):
        line = line[len(BYTE_ORDER_MARK) :]
    try:
        value = json.loads(str(line, "utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise LineError(
            f" is not JSON ({error}): every line must be one object such as {example}; repair or remove the line"
        ) from error
    if not isinstance(value, dict):
        raise LineError(f" holds a JSON {type(value).__name__}, not an object: write one object per line")
    return value


def _several(name: str, times: int) -> LineError:
    return LineError(f" has the key {name!r} {times} times in one object: keep one of them")


_object = partial(unique_entries, refused=_several)


def refuse_preferences(value: Mapping[str, Any]) -> None:
    """Raise LineError where a record holds a preference: its answers are not all to be learned."""
    if CHOSEN in value and REJECTED in value:
        raise LineError(
            f" is a preference pair ({CHOSEN!r}, {REJECTED!r}), which no loss of pretrain_gpt.py trains: give chats of "
            "the chosen, or read pairs in a loop of your own (megatron.integrations.preferences)"
        )
    if COMPLETION in value and isinstance(value.get("label"), bool):
        raise LineError(
            f" is a preference ({COMPLETION!r}, 'label'), which no loss here trains: give the good ones without 'label'"
        )


def unread_keys(value: Mapping[str, Any], *read: str) -> tuple[str, ...]:
    """Return the keys of a record, but those of null, that have no effect though it is not known that they have none.

    Args:
        read: those that have one.
    """
    return tuple(
        key for key, entry in value.items() if key not in read and key not in _OF_RECORDS and entry is not None
    )


def is_chat(value: Mapping[str, Any]) -> bool:
    """Return whether a record can be read as a chat only."""
    return any(field in value for field in _FIELDS_OF_CHATS) or isinstance(value.get(PROMPT), list)


def content_of_line(line: bytes, json_key: str) -> tuple[str | Question | list[Turn], tuple[str, ...]]:
    """Return the text of a line, or its prompt and responses, or prompt and completion, or turns, all of them texts.

    Behind it are the line's `unread_keys`.

    Raises:
        LineError: no JSON object with a string under `json_key`, or with a prompt and responses, or turns; or with two.
    """
    value = object_of_line(line, f'{{"{json_key}": "..."}}')
    if RESPONSES in value and json_key != RESPONSES:
        question = question_of(value, json_key)
        if not isinstance(question.prompt, str):
            raise LineError(
                f": field {PROMPT!r} is a {type(question.prompt).__name__}, not a string: write it as one text"
                + (", or read it as messages with --sft" if isinstance(question.prompt, list) else "")
            )
        return question, unread_keys(value, PROMPT, RESPONSES)
    if TURNS in value and json_key != TURNS:
        if (other := next((name for name in (json_key, PROMPT) if name in value), None)) is not None:
            raise LineError(f" has {TURNS!r} and {other!r}: leave {other!r} out, or give it alone")
        try:
            return turns_of(value[TURNS]), unread_keys(value, TURNS)
        except TurnError as error:
            raise LineError(str(error)) from None
    if json_key not in value:
        refuse_preferences(value)
        prompt, completion = value.get(PROMPT), value.get(COMPLETION)
        if isinstance(prompt, str) and isinstance(completion, str):
            return Question(prompt, (completion,)), unread_keys(value, PROMPT, COMPLETION)
        raise LineError(
            f" has no field {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'none'}): "
            "name the text field with --json-key" + (", or read chats with --sft" if is_chat(value) else "")
        )
    text = value[json_key]
    if not isinstance(text, str):
        raise LineError(
            f": field {json_key!r} is a {type(text).__name__}, not a string: "
            "repair the line or name another field with --json-key"
        )
    return text, unread_keys(value, json_key)


def parts_of_line(turns: Sequence[Turn], lengths: Sequence[int]) -> Parts:
    """Return `turns.parts_of` of a line; LineError where that is no tree to train."""
    try:
        return parts_of(turns, lengths)
    except TurnError as error:
        raise LineError(str(error)) from None


def question_of(value: dict[str, Any], other: str) -> Question:
    """Return the prompt, of whatever type, and the responses of a line's object.

    Args:
        other: a field that the line must not have besides.

    Raises:
        LineError: no prompt, no responses, or ones that are no texts; or `other`.
    """
    shape = f"{{{PROMPT!r}: ..., {RESPONSES!r}: [...]}}"
    if other in value and other != PROMPT:
        raise LineError(f" has {RESPONSES!r} and {other!r}: leave {other!r} out, or give it alone")
    if PROMPT not in value:
        raise LineError(f" has {RESPONSES!r} but no {PROMPT!r}: write {shape}")
    responses = value[RESPONSES]
    if not isinstance(responses, list) or not responses:
        said = "an empty list" if isinstance(responses, list) else f"a {type(responses).__name__}"
        raise LineError(
            f": field {RESPONSES!r} is {said}: a list of at least 1 text is needed; repair or remove the line"
        )
    for number, response in enumerate(responses, 1):
        if not isinstance(response, str):
            raise LineError(
                f": response {number} of {len(responses)} is a {type(response).__name__}, not a string: repair or "
                "remove it"
            )
    return Question(value[PROMPT], tuple(responses))


def check_prompt(num_tokens: int) -> None:
    """Raise LineError where a prompt of so many tokens is too short: before the last one must be another."""
    if num_tokens < 2:
        raise LineError(f": its prompt has {num_tokens} tokens, at least 2 are needed: write a longer one")


def encode(text: str) -> bytes:
    """Return the UTF-8 bytes of a text.

    Raises:
        LineError: it has half of a surrogate pair, as JSON may: that is no character.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise LineError(
            f": character {error.start + 1} of its text is {half}, half of a surrogate pair (near "
            f"{text[max(0, error.start - 12) : error.start]!r}): write the whole character, or remove it"
        ) from error


def num_bytes(text: str) -> int:
    """Return len(encode(text))."""
    return len(text) if text.isascii() else len(encode(text))
