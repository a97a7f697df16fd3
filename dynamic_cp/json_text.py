"""Reads JSON files that people write or copy; errors say in words what is wrong, with the line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynamic_cp.errors import InvalidInputError

_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def unique_entries(entries: Sequence[tuple[str, Any]], refused: Callable[[str, int], Exception]) -> dict[str, Any]:
    """Return an object of JSON; raise `refused(name, times)` for the first name that it has several times."""
    value = dict(entries)
    if len(value) < len(entries):
        counts = Counter(name for name, _ in entries)
        raise refused(*next(item for item in counts.items() if item[1] > 1))
    return value


def parse_json(where: str, content: str | bytes, remedy: str) -> Any:
    """Return what the JSON `content` holds, without a byte-order mark; errors name it by `where` and end with `remedy`.
    Raises InvalidInputError: no UTF-8, empty, no JSON, nested too deep, or an entry is there twice."""

    def refused(why: str) -> InvalidInputError:
        return InvalidInputError(f"{where} is not JSON: {why}: {remedy}")

    def twice(name: str, _times: int) -> InvalidInputError:
        return InvalidInputError(f"{where} has {name!r} twice in one object: keep one of them")

    if isinstance(content, bytes):
        if b"\0" in content:
            raise refused("it is binary")
        try:
            content = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise refused(f"byte 0x{error.object[error.start]:02x} in line {line} is not UTF-8") from error
    if not content.strip():
        raise refused("it is empty")
    try:
        return json.loads(content, object_pairs_hook=partial(unique_entries, refused=twice))
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:].removesuffix(" starting at")
        raise refused(f"{what} in line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise refused("it is nested too deep") from error
    except InvalidInputError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise refused(str(error)) from error


def in_words(kind: type) -> str:
    """Return what JSON calls a value of a Python type."""
    return _WORDS[kind]


def is_kind(value: object, kind: type) -> bool:
    """Return whether `value` is a `kind` of JSON, where true is no number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def value_in_words(value: object) -> str:
    """Return a JSON value as a message names it: short ones as they are, an object or a list by its kind."""
    if isinstance(value, dict | list):
        return in_words(type(value))
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
