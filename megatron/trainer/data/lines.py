"""Turns a line of JSONL into a document of tokens: a text, a prompt with responses, or a tree of turns.

A line {"turns": {"text": ..., "learned": ..., "children": [...]}} is a tree: branches share the turns above them. A
null in it counts as a missing key, because tables fill them so. `chat` reads chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dynamic_cp.json_text import unique_entries
from dynamic_cp.types.branches import MOST_LEVELS
from megatron.trainer.data.tokenizer import TextTokenizer

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROMPT, RESPONSES, COMPLETION, CHOSEN, REJECTED = "prompt", "responses", "completion", "chosen", "rejected"
TURNS = "turns"
_KEYS_OF_TURNS = ("text", "learned", "children")
_OF_RECORDS = frozenset(("id", "uuid", "source", "dataset", "url", "meta", "metadata"))
"""Keys that identify a record or its source. They are never learned and never reported as unread."""
_FIELDS_OF_CHATS = ("messages", "conversations", "instruction")


class LineError(Exception):
    """A malformed line. The message continues the name of the line: " is not JSON (...): ..."."""


class Question(NamedTuple):
    """A prompt and its responses, at least one."""

    prompt: Any
    responses: tuple[str, ...]


class Turn(NamedTuple):
    """A turn of a tree.

    Attributes:
        depth: number of branchings above it.
        begins: it is the root, or one of several children.
        ends: it has no children, so an end of document follows it.
    """

    text: str
    learned: bool
    depth: int
    begins: bool
    ends: bool


def object_of_line(line: bytes, example: str) -> dict[str, Any]:
    """Return the JSON object of a line; LineError, which shows `example`, if it holds none."""
    if line.startswith(BYTE_ORDER_MARK):
        line = line[len(BYTE_ORDER_MARK) :]
    try:
        value = _decoder.decode(str(line, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise LineError(
            f" is not JSON ({error}): every line must be one object such as {example}; repair or remove the line"
        ) from error
    if not isinstance(value, dict):
        raise LineError(f" holds a JSON {type(value).__name__}, not an object: write one object per line")
    return value


def _several(name: str, times: int) -> LineError:
    return LineError(f" has the key {name!r} {times} times in one object: keep one of them")


_decoder = json.JSONDecoder(object_pairs_hook=partial(unique_entries, refused=_several))


def refuse_preferences(value: Mapping[str, Any]) -> None:
    """Raise LineError if a record is a preference, because not all its answers are to be learned."""
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
    """Return the keys of a record that are neither null, nor in `read`, nor known to have no effect."""
    return tuple(
        key for key, entry in value.items() if key not in read and key not in _OF_RECORDS and entry is not None
    )


def is_chat(value: Mapping[str, Any]) -> bool:
    """Return whether a record can only be read as a chat."""
    return any(field in value for field in _FIELDS_OF_CHATS) or isinstance(value.get(PROMPT), list)


def question_of(value: dict[str, Any], other: str) -> Question:
    """Return the prompt, of whatever type, and the responses of a line's object. LineError if one is missing, a
    response is not a string, or the line has the field `other`, too."""
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


def _completion_of(value: dict[str, Any], json_key: str) -> Question:
    """Return the prompt and completion of a line without text; LineError if it has none."""
    refuse_preferences(value)
    prompt, completion = value.get(PROMPT), value.get(COMPLETION)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Question(prompt, (completion,))
    raise LineError(
        f" has no field {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'none'}): "
        "name the text field with --json-key" + (", or read chats with --sft" if is_chat(value) else "")
    )


def check_prompt(num_tokens: int) -> None:
    """Raise LineError if a prompt has fewer than two tokens: a token must precede its last one."""
    if num_tokens < 2:
        raise LineError(f": its prompt has {num_tokens} tokens, at least 2 are needed: write a longer one")


def encode(text: str) -> bytes:
    """Return the UTF-8 bytes of a text; LineError if it has half of a surrogate pair, which JSON can express."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise LineError(
            f": character {error.start + 1} of its text is {half}, half of a surrogate pair (near "
            f"{text[max(0, error.start - 12) : error.start]!r}): write the whole character, or remove it"
        ) from error


def turns_of(value: Any) -> list[Turn]:
    """Return a tree's turns, depth first; LineError if one lacks text or has an unknown key, or nothing is learned."""
    found: list[Turn] = []
    waiting: list[tuple[str, Any, int, bool]] = [("1", value, 0, True)]
    while waiting:
        name, given, depth, begins = waiting.pop()
        turn = _checked(name, given)
        children = turn.get("children", [])
        found.append(Turn(turn["text"], turn.get("learned", True), depth, begins, not children))
        branches = len(children) > 1
        below = [(f"{name}.{number}", child, depth + branches, branches) for number, child in enumerate(children, 1)]
        waiting += reversed(below)
    if not any(turn.learned for turn in found):
        raise LineError(f": none of its {len(found)} turns is learned: leave 'learned' out where one is")
    return found


def _checked(name: str, given: Any) -> dict[str, Any]:
    turn = {key: entry for key, entry in given.items() if entry is not None} if isinstance(given, Mapping) else {}
    if not isinstance(turn.get("text"), str) or turn.keys() - set(_KEYS_OF_TURNS):
        has = ", ".join(map(repr, turn)) if isinstance(given, Mapping) else type(given).__name__
        raise LineError(
            f": turn {name} has {has or 'nothing'}: give a string 'text', and maybe 'learned' and 'children'"
        )
    children = turn.get("children", [])
    if not isinstance(children, list) or not isinstance(turn.get("learned", True), bool):
        raise LineError(f": turn {name}: 'learned' is true or false, 'children' a list of turns")
    if children and not turn["text"]:
        raise LineError(f": turn {name} has an empty text and {len(children)} behind it: only the last of a branch may")
    return turn


class Document(NamedTuple):
    """A text, a chat, a prompt with its responses, or a tree of turns, as tokens one after the other.

    Attributes:
        tokens: int64 [n]; a text includes its end of document.
        is_target: bool [n], the learned tokens; None: all.
        answers: tokens of each response, or of each part of a tree after the first; empty for other documents.
        depths: of each part of a tree after the first; empty: 1 for each response.
        unread: `unread_keys` of the line; only its first document has them.
    """

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_] | None = None
    answers: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()


class LineReader(Protocol):
    """Reads the lines of a data set. Can be pickled."""

    def read(self, line: bytes) -> list[Document]:
        """Return the documents of a line; LineError if it is malformed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """Reads a JSONL line's text field as tokens with an end of document; also prompts with responses, and trees. A
    prompt is tokenized by itself, without an end. Each response has an end, which is learned."""

    tokenizer: TextTokenizer
    json_key: str

    def read(self, line: bytes) -> list[Document]:
        """Return the one document of a line. LineError if it is no JSON object, or has not exactly one of: a string
        under `json_key`, a prompt with responses or a completion, turns."""
        key = self.json_key
        value = object_of_line(line, f'{{"{key}": "..."}}')
        read: tuple[str, ...] = (key,)
        if RESPONSES in value and key != RESPONSES:
            question, read = question_of(value, key), (PROMPT, RESPONSES)
            if not isinstance(question.prompt, str):
                raise LineError(
                    f": field {PROMPT!r} is a {type(question.prompt).__name__}, not a string: write it as one text"
                    + (", or read it as messages with --sft" if isinstance(question.prompt, list) else "")
                )
            document = self.question(question)
        elif TURNS in value and key != TURNS:
            if (other := next((name for name in (key, PROMPT) if name in value), None)) is not None:
                raise LineError(f" has {TURNS!r} and {other!r}: leave {other!r} out, or give it alone")
            document, read = self._tree(turns_of(value[TURNS])), (TURNS,)
        elif key not in value:
            document, read = self.question(_completion_of(value, key)), (PROMPT, COMPLETION)
        elif isinstance(value[key], str):
            document = Document(self._ended(value[key]))
        else:
            raise LineError(
                f": field {key!r} is a {type(value[key]).__name__}, not a string: "
                "repair the line or name another field with --json-key"
            )
        return [document._replace(unread=unread_keys(value, *read))]

    def question(self, content: Question) -> Document:
        """Return a prompt with its responses, all strings; LineError if the prompt is too short."""
        prompt = self.tokenizer.encode(encode(content.prompt))
        check_prompt(len(prompt))
        responses = [self._ended(response) for response in content.responses]
        tokens = np.concatenate([prompt, *responses])
        return Document(tokens, np.arange(len(tokens)) >= len(prompt), tuple(map(len, responses)))

    def _tree(self, turns: list[Turn]) -> Document:
        """Return a tree; a part begins at each branch. Without a branch it is a prompt with one response."""
        tokens = [self._ended(one.text) if one.ends else self.tokenizer.encode(encode(one.text)) for one in turns]
        is_target = np.repeat([one.learned for one in turns], [*map(len, tokens)])
        parts: list[list[int]] = []  # tokens and depth of each
        for turn, own in zip(turns, tokens, strict=True):
            if turn.begins:
                parts.append([0, turn.depth])
            parts[-1][0] += len(own)
        num_targets = int(is_target[1:].sum())  # nothing predicts token 0
        if parts[0][0] < 2 or not num_targets:
            raise LineError(
                f": its turns have {parts[0][0]} tokens before they branch, and {num_targets} learned ones behind the "
                "first: at least 2 and 1 are needed"
            )
        if (levels := 1 + max(depth for _, depth in parts)) > MOST_LEVELS:
            raise LineError(
                f": its turns have {levels} levels, at most {MOST_LEVELS} are supported: cut it in several lines"
            )
        if len(parts) == 1:
            parts.append([len(is_target) - 1 - int(is_target[1:].argmax()), 1])
        sizes, depths = zip(*parts[1:], strict=True)
        return Document(np.concatenate(tokens), is_target, sizes, depths)

    def _ended(self, text: str) -> NDArray[np.int64]:
        return np.append(self.tokenizer.encode(encode(text)), self.tokenizer.eod)
