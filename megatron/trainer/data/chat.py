"""Chats: lines {"messages": [{"role": ..., "content": ...}, ...]}, their text by a template, and what is learned of it.

    line -> parse_chats -> ChatFormat.spans -> text and the spans that the assistant wrote -> ChatLines.tokens

A span is the content of an assistant turn and the token that ends the turn; turns of weight 0 have none. If the
template marks the turn with {% generation %}, the marked text is the span; otherwise it is what the turn adds to the
text after the generation prompt, without the white space after the end-of-turn token.

Lines {"prompt": ..., "responses": [...]} are as many chats, which have the prompt in common: the user's message as a
text, or messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron.trainer.data.json_text import (
    PROMPT,
    RESPONSES,
    LineError,
    check_prompt,
    encode,
    object_of_line,
    question_of,
)
from megatron.trainer.data.tokenizer import TextTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# Characters that no text has (Unicode noncharacters): they mark spans while a template is rendered.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


_SAFE_JINJA = (3, 1, 6)
"""Templates come with tokenizers that others made. Before this version one could leave the sandbox (CVE-2025-27516)."""


class Span(NamedTuple):
    """Characters start .. stop - 1 of a chat's text, written by its assistant in message number `turn`, from 1."""

    start: int
    stop: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A Jinja template and what it may use besides the messages.

    Attributes:
        name: what to call it in messages.
        template: Jinja, as Hugging Face's tokenizers have it.
        variables: special tokens by name.
    """

    name: str
    template: str
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """A hash (hex) of what decides the text."""
        return hashlib.sha256(json.dumps([self.template, self.variables]).encode()).hexdigest()[:16]

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, list[Span]]:
        """Return the text of a chat and what its assistant wrote, in order.

        Raises:
            LineError: the template refuses the chat, or does not say what the assistant wrote.
        """
        marked = self._render(messages, tools)
        text, spans = (
            self._spans_by_marks(marked, messages)
            if OPEN in marked
            else (marked, self._spans_by_prefixes(marked, messages, tools))
        )
        turns = [turn for turn, message in enumerate(messages, 1) if message["role"] == "assistant"]
        unlearned = [turn for turn in turns if not _is_learned(messages[turn - 1])]
        if not unlearned:
            return text, spans
        if len(spans) != len(turns):
            raise LineError(
                f" message {unlearned[0]} has weight 0, but {self.name} marks {len(spans)} answers of {len(turns)}, "
                "which does not say where it is: leave the message out, or mark every answer once"
            )
        return text, [span for span in spans if span.turn not in unlearned]

    def _spans_by_marks(self, marked: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Span]]:
        turns = iter([number for number, message in enumerate(messages, 1) if message["role"] == "assistant"])
        text, spans = "", []
        head, *parts = marked.split(OPEN)
        text += head
        for part in parts:
            inside, closed, outside = part.partition(CLOSE)
            if not closed or CLOSE in outside:
                raise LineError(f": {self.name} has a generation block within another: repair the template")
            spans.append(Span(len(text), len(text) + len(inside), next(turns, len(messages))))
            text += inside + outside
        return text, spans

    def _spans_by_prefixes(self, text: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Span]:
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:turn], tools, add_generation_prompt=True)
            answered = self._render(messages[: turn + 1], tools)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise LineError(
                    f" message {turn + 1} (assistant): {self.name} writes earlier messages in another way once later "
                    "ones follow, so what was learned would not be what is generated: mark the assistant's text with "
                    "{% generation %} ... {% endgeneration %} in a template of your own (--chat-template FILE)"
                )
            content = message["content"].strip()
            after = answered[max(0, answered.find(content, len(prompt))) + len(content) :]
            stop = len(answered.rstrip()) if after.strip() else len(answered)
            spans.append(Span(len(prompt), max(len(prompt), stop), turn + 1))
        return spans

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        import jinja2

        try:
            text = _compiled(self.template).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **dict(self.variables),
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
            *(RecursionError, MemoryError),
        ) as error:
            said = str(error) or type(error).__name__
            raise LineError(f": {self.name} refuses this chat ({said}): repair the chat or the template") from error
        return str(text)

    def check(self) -> str | None:
        """Return what is wrong with the template, None when it compiles."""
        import jinja2

        try:
            _compiled(self.template)
        except jinja2.TemplateError as error:
            return f"line {getattr(error, 'lineno', '?')}: {error}"
        return None


def why_no_templates() -> str | None:
    """Return why no template of others can be rendered here, None when it can."""
    needed = ".".join(map(str, _SAFE_JINJA))
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        return f"jinja2 is not installed, {needed} or later is needed"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= _SAFE_JINJA:
        return None
    return f"jinja2 {version} is installed, {needed} or later keeps a template from running code"


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """Return the template, with what Hugging Face's templates expect of their environment.

    DEVIATION: `strftime_now` is not there. Reason: a text that changes with the date has another length tomorrow.
    Recovery: templates that ask for it use a fixed date when it is missing.
    """
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return OPEN + str(caller()) + CLOSE

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)


class Chats(NamedTuple):
    """What a line holds: one chat, or as many as it has responses.

    Attributes:
        messages: of each chat.
        tools: for the template, None where the line has none.
        share_prompt: they end with the responses to one prompt.
    """

    messages: list[list[dict[str, Any]]]
    tools: Any
    share_prompt: bool


def parse_chats(line: bytes) -> Chats:
    """Return the chats of a line.

    Raises:
        LineError: no JSON object with messages, or with a prompt and responses; a message without role or content, or
            no assistant to learn.
    """
    value = object_of_line(line, '{"messages": [...]}')
    if _has_mark(value.get("tools")):
        raise LineError(": field 'tools' has the noncharacter U+FDD0 or U+FDD1: remove it")
    if RESPONSES in value:
        question = question_of(value, "messages")
        given = [{"role": "user", "content": question.prompt}] if isinstance(question.prompt, str) else question.prompt
        _check_messages(given, PROMPT, "a text, or at least one message, is needed")
        shared = [one | {"weight": 0} if one["role"] == "assistant" else one for one in given]
        chats = [[*shared, {"role": "assistant", "content": response}] for response in question.responses]
        if _has_mark([*question.responses]):
            raise LineError(f": field {RESPONSES!r} has the noncharacter U+FDD0 or U+FDD1: remove it")
        return Chats(chats, value.get("tools"), True)
    if "messages" not in value:
        raise LineError(
            f" has no field 'messages' (it has {', '.join(map(repr, list(value)[:5])) or 'none'}): "
            "--sft reads chats; leave it out for text"
        )
    messages = value["messages"]
    _check_messages(messages, "messages", "at least one question and one answer are needed")
    if not any(message["role"] == "assistant" and _is_learned(message) for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise LineError(f" has no assistant message to learn, {len(messages)} of {roles}: nothing of it can be learned")
    return Chats([messages], value.get("tools"), False)


def _check_messages(messages: Any, field: str, needed: str) -> None:
    """Raise LineError where these are no messages."""
    if not isinstance(messages, list) or not messages:
        said = f"{len(messages)} messages" if isinstance(messages, list) else f"a {type(messages).__name__}"
        raise LineError(f": field {field!r} is {said}: {needed}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise LineError(f" message {number} is a {type(message).__name__}, not an object: repair the line")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise LineError(f" message {number} has role {role!r}: use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            said = f"is a {type(content).__name__}, not a string" if "content" in message else "is missing"
            raise LineError(f" message {number} ({role}): its content {said}: repair the line")
        if _has_mark(message):
            raise LineError(f" message {number} ({role}) has the noncharacter U+FDD0 or U+FDD1: remove it")
        if role == "assistant" and message.get("weight") not in (None, 0, 1):
            raise LineError(
                f" message {number} ({role}) has weight {message['weight']!r}: 0, which is not learned, and 1 are "
                "supported"
            )


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Return False for weight 0; null is what tables have in place of a missing one."""
    return message.get("weight") is None or bool(message["weight"])


def _has_mark(value: Any) -> bool:
    """Return whether a mark of spans is in `value`: a template could write any of it."""
    values = [value]
    while values:
        one = values.pop()
        if isinstance(one, str) and (OPEN in one or CLOSE in one):
            return True
        if isinstance(one, dict):
            values += [*one, *one.values()]
        elif isinstance(one, list):
            values += one
    return False


class ReadChat(NamedTuple):
    """A chat as tokens, or a prompt and its responses one after the other.

    Attributes:
        tokens: int64 [n].
        is_target: which of them the assistant wrote, bool [n].
        answers: tokens of each response; none for a chat.
    """

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_]
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReader:
    """Reads chat lines as tokens."""

    tokenizer: TextTokenizer
    chat_format: ChatFormat

    def tokens(self, line: bytes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the tokens of a line, and which of them its assistant wrote; see `read`."""
        return self.read(line)[:2]

    def measure(self, line: bytes) -> tuple[int, ...]:
        """Return what `scan.scan_lines` needs of a line: the first learned token is one after the beginning."""
        whole, is_target, answers = self.read(line)
        return len(whole), 1 + int(is_target[1:].argmax()), int(is_target[1:].sum()), *answers

    def read(self, line: bytes) -> ReadChat:
        """Return a line as tokens.

        Raises:
            LineError: a chat that is malformed, or of which tokens are part prompt and part answer.
        """
        chats = parse_chats(line)
        if not chats.share_prompt:
            return self._read(chats.messages[0], chats.tools)
        return self._joined([self._read(messages, chats.tools) for messages in chats.messages])

    def _read(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> ReadChat:
        text, spans = self.chat_format.spans(messages, tools)
        whole = self.tokenizer.encode(encode(text))
        is_target = np.zeros(len(whole), dtype=np.bool_)
        places = [place for span in spans for place in (span.start, span.stop)]
        ends = self._token_ends(text, places, spans, whole)
        for first, end in zip(ends[::2], ends[1::2], strict=True):
            is_target[first:end] = True
        if not is_target[1:].any():
            raise LineError(f": {self.chat_format.name} gives no assistant's token of its {len(whole)}")
        return ReadChat(whole, is_target)

    def _joined(self, chats: Sequence[ReadChat]) -> ReadChat:
        """Return chats that have their prompt in common as one; what follows a response is of no use to it."""
        firsts = [int(chat.is_target.argmax()) for chat in chats]
        prompt = chats[0].tokens[: firsts[0]]
        check_prompt(len(prompt))
        for number, (chat, first) in enumerate(zip(chats, firsts, strict=True), 1):
            if not np.array_equal(chat.tokens[:first], prompt):
                raise LineError(
                    f": {self.chat_format.name} writes the prompt of response {number} in another way than that of "
                    "response 1, so they cannot share it: give them lines of their own"
                )
        ends = [len(chat.is_target) - int(chat.is_target[::-1].argmax()) for chat in chats]
        parts = [
            (chat.tokens[first:end], chat.is_target[first:end])
            for chat, first, end in zip(chats, firsts, ends, strict=True)
        ]
        return ReadChat(
            np.concatenate([prompt, *(tokens for tokens, _ in parts)]),
            np.concatenate([np.zeros(len(prompt), np.bool_), *(is_target for _, is_target in parts)]),
            tuple(len(tokens) for tokens, _ in parts),
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
