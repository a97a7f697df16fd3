"""Chats: lines {"messages": [{"role": ..., "content": ...}, ...]} as tokens, and which of these are learned. Other
forms of chats become this one in `chat_records`.

    line -> parse_chats -> ChatFormat.texts -> ChatReader.read -> ChatLines

A line is one text where its template writes a turn in the same way whatever follows, else as many as it takes for each
answer to stand behind its own prompt (`chat_format`). Answers of weight 0 are not learned.

Lines {"prompt": ..., "responses": [...]} are as many chats, which have the prompt in common: the user's message as a
text, or messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.chat_format import ChatFormat, ChatText, Span, is_learned_answer
from megatron.trainer.data.chat_records import (
    MESSAGES,
    given_of,
    has_mark,
    messages_of,
    preference_of,
    prompt_of,
    unlearned,
    unread_of,
)
from megatron.trainer.data.lines import (
    PROMPT,
    RESPONSES,
    Document,
    LineError,
    check_prompt,
    encode,
    object_of_line,
    question_of,
)
from megatron.trainer.data.tokenizer import TextTokenizer


class Chats(NamedTuple):
    """What a line holds: one chat, or as many as it has responses.

    Attributes:
        messages: of each chat.
        given: what the line gives the template besides, such as `tools`.
        share_prompt: they end with the responses to one prompt.
        unread: `lines.unread_keys` of the line.
    """

    messages: list[list[dict[str, Any]]]
    given: Mapping[str, Any]
    share_prompt: bool
    unread: tuple[str, ...]


def parse_chats(line: bytes) -> Chats:
    """Return the chats of a line.

    Raises:
        LineError: no JSON object of a form that `chat_records` knows, or with a prompt and responses; a message without
            role or content, or no assistant to learn.
    """
    value = object_of_line(line, '{"messages": [...]}')
    given = given_of(value)
    if RESPONSES in value:
        question = question_of(value, MESSAGES)
        shared = unlearned(prompt_of(value))
        chats = [[*shared, {"role": "assistant", "content": response}] for response in question.responses]
        if has_mark([*question.responses]):
            raise LineError(f": field {RESPONSES!r} has the noncharacter U+FDD0, U+FDD1 or U+FDD2: remove it")
        return Chats(chats, given, True, unread_of(value, (PROMPT, RESPONSES)))
    messages, unread = messages_of(value)
    _check_learned(messages)
    return Chats([messages], given, False, unread)


def parse_preference(value: Mapping[str, Any]) -> Chats:
    """Return the chats of a preference, the chosen before the rejected.

    Raises:
        LineError: as `parse_chats`, and an answer that is none of the assistant's.
    """
    chats, unread = preference_of(value)
    for messages in chats:
        _check_learned(messages)
    return Chats(chats, given_of(value), True, unread)


def _check_learned(messages: Sequence[Mapping[str, Any]]) -> None:
    if not any(is_learned_answer(message) for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise LineError(f" has no assistant message to learn, {len(messages)} of {roles}: nothing of it can be learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReader:
    """Reads chat lines as tokens."""

    tokenizer: TextTokenizer
    chat_format: ChatFormat

    def read(self, line: bytes) -> list[Document]:
        """Return a line as tokens: as many documents as its template needs.

        Raises:
            LineError: a chat that is malformed, or of which tokens are part prompt and part answer.
        """
        chats = parse_chats(line)
        first, *others = [self.shared(chats)] if chats.share_prompt else self._documents(chats)
        return [first._replace(unread=chats.unread), *others]

    def shared(self, chats: Chats) -> Document:
        """Return chats that have their prompt in common as one document.

        Raises:
            LineError: the prompt is written otherwise in one of them, or a chat takes several texts.
        """
        documents = self._documents(chats)
        if len(documents) != len(chats.messages):
            raise LineError(
                f": {self.chat_format.name} writes earlier answers otherwise once later messages follow, so "
                f"{len(chats.messages)} chats are {len(documents)} texts: end the prompt before the last answer"
            )
        return self._joined(documents)

    def _documents(self, chats: Chats) -> list[Document]:
        texts = [text for messages in chats.messages for text in self.chat_format.texts(messages, chats.given)]
        return [self.tokens(text) for text in texts]

    def tokens(self, one: ChatText) -> Document:
        """Return the tokens of a text; LineError where one is part prompt and part answer."""
        text, spans = one
        whole = self.tokenizer.encode(encode(text))
        is_target = np.zeros(len(whole), dtype=np.bool_)
        places = [place for span in spans for place in (span.start, span.stop)]
        ends = self._token_ends(text, places, spans, whole)
        for first, end in zip(ends[::2], ends[1::2], strict=True):
            is_target[first:end] = True
        if not is_target[1:].any():
            raise LineError(f": {self.chat_format.name} gives no assistant's token of its {len(whole)}")
        return Document(whole, is_target)

    def _joined(self, chats: Sequence[Document]) -> Document:
        """Return chats that have their prompt in common as one; what follows a response is of no use to it."""
        learned = [np.asarray(chat.is_target, np.bool_) for chat in chats]
        firsts = [int(is_target.argmax()) for is_target in learned]
        prompt = chats[0].tokens[: firsts[0]]
        check_prompt(len(prompt))
        for number, (chat, first) in enumerate(zip(chats, firsts, strict=True), 1):
            if not np.array_equal(chat.tokens[:first], prompt):
                raise LineError(
                    f": {self.chat_format.name} writes the prompt of response {number} in another way than that of "
                    "response 1, so they cannot share it: give them lines of their own"
                )
        stops = [len(is_target) - int(is_target[::-1].argmax()) for is_target in learned]
        responses = [slice(first, stop) for first, stop in zip(firsts, stops, strict=True)]
        return Document(
            np.concatenate([prompt, *(chat.tokens[part] for chat, part in zip(chats, responses, strict=True))]),
            np.concatenate(
                [np.zeros(len(prompt), np.bool_), *(own[part] for own, part in zip(learned, responses, strict=True))]
            ),
            tuple(part.stop - part.start for part in responses),
        )

    def _token_ends(
        self, text: str, places: Sequence[int], spans: Sequence[Span], whole: NDArray[np.int64]
    ) -> list[int]:
        """Return for each place in the text how many tokens come before it; none may lie across it."""
        pieces = [
            self.tokenizer.encode(encode(text[start:stop]))
            for start, stop in zip([0, *places], [*places, len(text)], strict=True)
        ]
        if np.array_equal(np.concatenate(pieces), whole):
            return list(np.cumsum([len(piece) for piece in pieces[:-1]]).tolist())
        # A tokenizer that begins every text in its own way: compare beginnings of the whole instead of its pieces.
        ends = []
        for number, place in enumerate(places):
            before = self.tokenizer.encode(encode(text[:place]))
            if not np.array_equal(before, whole[: len(before)]):
                where = "its end" if number % 2 else "its beginning"
                raise LineError(
                    f" message {spans[number // 2].turn} (assistant): a token lies across {where} (near "
                    f"{text[max(0, place - 12) : place + 12]!r}): what is learned would not be what is generated; "
                    "use a template whose turns begin and end with special tokens"
                )
            ends.append(len(before))
        return ends
