"""The text of a JSONL line: the one reading of it that indexing and training share."""

from __future__ import annotations

import json
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line without text. The message continues the name of the line: " is not JSON (...): ..."."""


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
        value = json.loads(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise LineError(
            f" is not JSON ({error}): every line must be one object such as {example}; repair or remove the line"
        ) from error
    if not isinstance(value, dict):
        raise LineError(f" holds a JSON {type(value).__name__}, not an object: write one object per line")
    return value


def text_of_line(line: bytes, json_key: str) -> str:
    """Return the text field of a line.

    Raises:
        LineError: no JSON object with a string under `json_key`.
    """
    value = object_of_line(line, f'{{"{json_key}": "..."}}')
    if json_key not in value:
        raise LineError(
            f" has no field {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'none'}): "
            "name the text field with --json-key" + (", or read chats with --sft" if "messages" in value else "")
        )
    text = value[json_key]
    if not isinstance(text, str):
        raise LineError(
            f": field {json_key!r} is a {type(text).__name__}, not a string: "
            "repair the line or name another field with --json-key"
        )
    return text


def encode(text: str) -> bytes:
    """Return the UTF-8 bytes of a text; JSON may hold half of a surrogate pair."""
    return text.encode("utf-8", errors="surrogatepass")


def num_bytes(text: str) -> int:
    """Return len(encode(text))."""
    return len(text) if text.isascii() else len(encode(text))
