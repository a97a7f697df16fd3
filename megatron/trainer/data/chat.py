"""Turns a line of chats, {"messages": [{"role": ..., "content": ...}, ...]}, into tokens and marks the learned ones.

`chat_records` brings other forms of chats into this one. A line is one text if its template writes a turn the same way
whatever follows it. Otherwise it takes as many texts as are needed for each answer to stand behind its own prompt
(`chat_format`). Answers of weight 0 are not learned. A line {"prompt": ..., "responses": [...]} is one chat per
response, all with the same prompt: a user's message as a string, or a list of messages.
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
    """The chats of a line: one, or one for each response.

    Attributes:
        given: what the template gets besides the messages, such as `tools`.
        share_prompt: the chats are responses to one prompt.
        unread: `lines.unread_keys` of the line.
    """

    messages: list[list[dict[str, Any]]]
    given: Mapping[str, Any]
    share_prompt: bool
    unread: tuple[str, ...]


def parse_chats(line: bytes) -> Chats:
    """Return the chats of a line. LineError if it is no JSON object of a known form (`chat_records`), a message lacks
    role or content, or no assistant's message is learned."""
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
    """Return a preference's chats, the chosen first; LineError as in `parse_chats`, for each of the two."""
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
    tokenizer: TextTokenizer
    chat_format: ChatFormat

    def read(self, line: bytes) -> list[Document]:
        """Return a line's documents; LineError if it is malformed, or a token lies across prompt and answer."""
        chats = parse_chats(line)
        first, *others = [self.shared(chats)] if chats.share_prompt else self._documents(chats)
        return [first._replace(unread=chats.unread), *others]

    def shared(self, chats: Chats) -> Document:
        """Return chats with a common prompt as one document. LineError if the template writes the prompt differently in
        one of them, or a chat takes several texts."""
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
        """Return the tokens of a text; LineError if a token lies across the border of prompt and answer."""
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
        """Join chats with a common prompt to one document; what a template writes behind a response is dropped."""
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
        """Return the number of tokens before each place of the text; LineError if a token lies across a place."""
        pieces = [
            self.tokenizer.encode(encode(text[start:stop]))
            for start, stop in zip([0, *places], [*places, len(text)], strict=True)
        ]
        if np.array_equal(np.concatenate(pieces), whole):
            return list(np.cumsum([len(piece) for piece in pieces[:-1]]).tolist())
        # This tokenizer begins every text in its own way, so compare beginnings of the whole text, not pieces.
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
