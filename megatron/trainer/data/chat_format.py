"""Renders a chat with its template and finds what the assistant wrote in the text.

A span is what the model has to write: from the end of the generation prompt to the end of the turn. If the template
marks it with {% generation %}, the marked text is the span and the chat is one text. Otherwise a turn's text is the
chat up to and including the turn, and its span is what the turn adds to the generation prompt. Turns share a text as
long as each stands behind its own prompt there. A template may write earlier turns differently once later ones follow,
for example without their reasoning. Such a turn gets its own text, so every answer is learned behind the prompt that
would generate it.

Everything that messages say must be in the trained text. So the chat is rendered once more with a mark in place of each
content, reasoning, and name and argument of a call; a missing mark is an error. A search for the words themselves could
find them elsewhere, such as a tool's name in its schema.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.trainer.data.chat_records import called, calls_of, with_called, with_objects
from megatron.trainer.data.chat_template import (
    CLOSE,
    NEXT,
    OPEN,
    PLACE,
    REASONING,
    as_templates_see_it,
    render,
    uses_date,
)
from megatron.trainer.data.lines import LineError

_MARKER = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])")
"""Special tokens as templates write them: <|im_end|>, </s>, [/INST]."""
_KEY = re.compile(r"""["']type["']:""")

Message = Mapping[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Span(NamedTuple):
    """Characters [start, stop) of a text, written by the assistant in message number `turn` (from 1)."""

    start: int
    stop: int
    turn: int


class ChatText(NamedTuple):
    text: str
    spans: list[Span]


class _Answer(NamedTuple):
    """The text up to and including a turn, of which the characters [start, stop) are learned.

    If later turns follow, it ends at `common_stop`: before `stop` if the template writes more behind the last turn.
    """

    text: str
    start: int
    stop: int
    common_stop: int

    def stop_in(self, text: str) -> int | None:
        """Return where the turn ends in `text`; None if `text` does not begin with this answer and what precedes it."""
        return next((stop for stop in (self.stop, self.common_stop) if text.startswith(self.text[:stop])), None)


class _Habits(NamedTuple):
    """How a template writes turns, found by rendering small chats with it.

    Attributes:
        reads_text, reads_parts: it writes a content that is a string, or a list of parts.
        reads_arguments: it writes a tool call's arguments given as JSON text just as it writes objects, or no objects.
        end: what follows the last turn's content, without `cue`; None if it refuses a question and an answer.
        common_end: the part of `end` that is also written where another turn follows.
        next_marks: the special tokens that begin a user's and a tool's message, for templates whose `end` is empty.
        unwritten: the end of the generation prompt that is not written before an answer.
        cue: the beginning of the next prompt that it writes behind the last turn unasked; usually "".
    """

    reads_text: bool
    reads_parts: bool
    reads_arguments: bool
    end: str | None
    common_end: str
    next_marks: tuple[str, str]
    unwritten: str
    cue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A Jinja template and its variables.

    Attributes:
        name: what error messages call the template.
        tool_template: the template for chats with tools, if it is another.
        variables: special tokens by name.
        date: what templates write as today's date, "2026-11-25".
    """

    name: str
    template: str
    variables: tuple[tuple[str, str], ...] = ()
    tool_template: str | None = None
    date: str = "2000-01-01"

    @property
    def digest(self) -> str:
        """A hash (hex) of everything but the date that decides the text."""
        parts = [self.template, self.variables, *([self.tool_template] if self.tool_template else [])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def written_date(self) -> str | None:
        """The date, or None if the template never writes one."""
        return self.date if uses_date(self.template + (self.tool_template or "")) else None

    @property
    def unwritten(self) -> str:
        """The end of the generation prompt that is not written before an answer, such as an opened <think>."""
        return self._habits({}).unwritten

    def texts(self, messages: Sequence[Message], given: Mapping[str, Any] = _NOTHING) -> list[ChatText]:
        """Return the texts of a chat, ordered by the last turn that each trains; each learned turn is in exactly one.

        `given` is what the template gets besides the messages, such as `tools`. LineError if the template refuses the
        chat, hides where the assistant's text begins, or leaves something out.
        """
        messages = [
            self._readable(as_templates_see_it(message), number, given) for number, message in enumerate(messages, 1)
        ]
        whole = self._render(messages, given)
        turns = [turn for turn, message in enumerate(messages) if is_learned_answer(message)]
        if OPEN in whole:
            self._check_written(messages, turns, given)
            marked = _by_marks(whole, messages, self.name)
            for turn in turns:
                self._check_content(messages[turn], turn, "", marked.text)
            return [marked]
        texts = [ChatText(whole, [])]
        for turn in reversed(turns):
            answer = self._answer(messages, turn, given)
            if not any(answer.stop_in(one.text) for one in texts):
                texts.append(ChatText(answer.text, []))
            spans, stop = next((one.spans, stop) for one in reversed(texts) if (stop := answer.stop_in(one.text)))
            spans.insert(0, Span(answer.start, stop, turn + 1))
        return [one for one in reversed(texts) if one.spans]

    def _answer(self, messages: Sequence[Message], turn: int, given: Mapping[str, Any]) -> _Answer:
        self._check_written(messages[: turn + 1], [turn], given)
        habits = self._habits(given)
        prompt = self._render(messages[:turn], given, add_generation_prompt=True)
        text = self._render(messages[: turn + 1], given).removesuffix(habits.cue)
        start = len(prompt) if text.startswith(prompt) else self._start(prompt, text, messages, turn, given)
        self._check_content(messages[turn], turn, text[:start], text[start:])
        if habits.end == "":
            text += self._mark_behind(turn, messages[turn], habits)
        stop = len(text) if habits.end is not None and not habits.end.strip() else len(text.rstrip())
        common_stop = stop
        if habits.end and habits.common_end and text.endswith(habits.end):
            common_stop = len(text) - len(habits.end) + len(habits.common_end)
        return _Answer(text, start, max(start, stop), max(start, common_stop))

    def _mark_behind(self, turn: int, message: Message, habits: _Habits) -> str:
        """Return the token that ends a turn where the template writes none: that of the next role, or eos_token."""
        by_user, by_tool = habits.next_marks
        mark = (by_tool if message.get("tool_calls") else by_user) or dict(self.variables).get("eos_token", "")
        if not mark:
            raise LineError(
                f" message {turn + 1} (assistant): {self.name} writes nothing behind an answer, so the model would not "
                "learn to end it: write the token that ends a turn into a template of your own (--chat-template FILE)"
            )
        return mark

    def _start(self, prompt: str, text: str, messages: Sequence[Message], turn: int, given: Mapping[str, Any]) -> int:
        """Return where an answer begins in a text that does not begin with the answer's prompt: either inside the
        prompt (behind "<think>" of "<think>\\n"), or, if the template writes earlier messages differently, behind what
        the prompt adds to them.
        """
        asked = self._render([*messages[:turn], _Places().instead_of(turn, messages[turn])], given)
        before = self._render(messages[:turn], given)
        agreed = _agreed(prompt, asked)
        if len(agreed) >= len(_agreed(prompt, before)):
            return len(_agreed(agreed, text))
        cue = prompt[len(_agreed(prompt, before)) :]
        place = asked.find(PLACE) if PLACE in asked else len(asked)
        start = max(asked.rfind(cue, 0, place) + len(cue), len(_agreed(before, asked)))
        if cue not in asked[:place] or not cue.strip() or not text.startswith(asked[:start]):
            raise LineError(
                f" message {turn + 1} (assistant): {self.name} does not write its generation prompt {cue!r} before "
                "this answer, which does not say where the answer begins: mark the assistant's text with "
                "{% generation %} ... {% endgeneration %} in a template of your own (--chat-template FILE)"
            )
        return start

    def _check_written(self, messages: Sequence[Message], turns: Sequence[int], given: Mapping[str, Any]) -> None:
        """Raise LineError if the text leaves out something that a message says. `turns` are the answers that are
        learned in this text; a template may drop the reasoning of earlier ones."""
        places = _Places()
        asked = [
            places.instead_of(turn, message, is_learned=turn in turns)
            if turn in turns or not is_learned_answer(message)
            else message
            for turn, message in enumerate(messages)
        ]
        text = self._render(asked, given).replace(json.dumps(PLACE).strip('"'), PLACE)
        for place, (turn, what) in places.found.items():
            if place in text:
                continue
            where = f" where message {turns[-1] + 1} is the last" if turn != turns[-1] else ""
            other = "end a line with this message" if turn in turns[:-1] else "leave it out of the line"
            raise LineError(
                f" message {turn + 1} ({messages[turn]['role']}): {self.name} leaves out its {what}{where}: use a "
                f"template that writes it (--chat-template FILE), or {other}"
            )

    def _check_content(self, message: Message, turn: int, prompt: str, written: str) -> None:
        """Raise LineError if part of an answer's content, white space aside, is missing from prompt and answer."""
        content = message.get("content") or ""
        content = content if isinstance(content, str) else "".join(part["text"] for part in content)
        wanted, before, learned = ("".join(text.split()) for text in (content, prompt, written))
        if wanted not in before[max(0, len(before) - len(wanted) + 1) :] + learned:
            raise LineError(
                f" message {turn + 1} (assistant): {self.name} leaves out part of its content, and writes "
                f"{_shortened(written)!r} of {_shortened(content)!r}: use a template that writes all of it "
                "(--chat-template FILE)"
            )

    def _readable(self, message: Message, number: int, given: Mapping[str, Any]) -> Message:
        """Return a message as the template reads it: content as text or parts, arguments as text or objects."""
        content, habits = message.get("content"), self._habits(given)
        if not habits.reads_arguments:
            message = with_objects(message, number)
        if isinstance(content, str) and not habits.reads_text and habits.reads_parts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list):
            texts = [part if isinstance(part, str) else part.get("text") for part in content]
            if not all(isinstance(text, str) for text in texts):
                kinds = ", ".join(dict.fromkeys(str(part.get("type")) for part in content if isinstance(part, dict)))
                raise LineError(
                    f" message {number} ({message['role']}): its content has parts of type {kinds}: texts alone are "
                    "learned; leave the others out"
                )
            if not habits.reads_parts:
                return {**message, "content": "".join(map(str, texts))}
        return message

    def _habits(self, given: Mapping[str, Any]) -> _Habits:
        return _habits_of(self._template(given), self.variables, self.date)

    def _template(self, given: Mapping[str, Any]) -> str:
        return self.tool_template if given.get("tools") is not None and self.tool_template else self.template

    def _render(
        self, messages: Sequence[Message], given: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> str:
        variables = {**dict(self.variables), **given}
        return render(self.name, self._template(given), self.date, messages, variables, add_generation_prompt)


def is_learned_answer(message: Message) -> bool:
    """Return whether a message is the assistant's and its weight is not 0. Tables write null for a missing weight."""
    return message["role"] == "assistant" and (message.get("weight") is None or bool(message["weight"]))


def _by_marks(marked: str, messages: Sequence[Message], name: str) -> ChatText:
    """Return a text without its marks, and the marked spans of learned turns."""
    turns = [turn for turn, message in enumerate(messages, 1) if message["role"] == "assistant"]
    numbers = iter(turns)
    text, *parts = marked.split(OPEN)
    spans = []
    for part in parts:
        inside, closed, outside = part.partition(CLOSE)
        if not closed or CLOSE in outside:
            raise LineError(f": {name} has a generation block within another: repair the template")
        spans.append(Span(len(text), len(text) + len(inside), next(numbers, len(messages))))
        text += inside + outside
    unlearned = [turn for turn in turns if not is_learned_answer(messages[turn - 1])]
    if unlearned and len(spans) != len(turns):
        raise LineError(
            f" message {unlearned[0]} has weight 0, but {name} marks {len(spans)} answers of {len(turns)}, "
            "which does not say where it is: leave the message out, or mark every answer once"
        )
    return ChatText(text, [span for span in spans if span.turn not in unlearned])


@lru_cache(maxsize=8)
def _habits_of(template: str, variables: tuple[tuple[str, str], ...], date: str) -> _Habits:
    def write(*contents: str, role: str = "user", in_parts: bool = False, prompts: bool = False, **more: Any) -> str:
        """Return a question, an answer and a message of `role` with `more` keys, as many as contents; "" if refused."""
        roles = ("user", "assistant", role)
        messages: list[dict[str, Any]] = [
            {"role": name, "content": [{"type": "text", "text": content}] if in_parts else content}
            for name, content in zip(roles, contents, strict=False)
        ]
        messages[-1] |= more
        try:
            text = render("", template, date, messages, dict(variables), add_generation_prompt=prompts)
        except LineError:
            return ""
        return text.replace(OPEN, "").replace(CLOSE, "")

    texts, parts = (write("?", PLACE, in_parts=in_parts) for in_parts in (False, True))
    reads_text = PLACE in texts
    # A template that reads only strings may write a list as Python or JSON does.
    reads_parts = PLACE in parts and len(_KEY.findall(parts)) == len(_KEY.findall(texts))
    in_parts = reads_parts and not reads_text

    def between(role: str) -> str:
        """Return what the template writes between an answer and the content of a following message of `role`."""
        written = write("?", PLACE, NEXT, role=role, in_parts=in_parts)
        return written.partition(PLACE)[2].partition(NEXT)[0]

    def called(arguments: Any) -> str:
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        return write("?", "", in_parts=in_parts, tool_calls=[call])

    arguments = json.dumps({PLACE: 1}, ensure_ascii=False)
    by_text, by_object = called(arguments), called({PLACE: 1})
    asked = parts if in_parts else texts
    prompt = write("?", in_parts=in_parts, prompts=True)
    end, unasked = asked.rpartition(PLACE)[2], write("?", in_parts=in_parts)
    common_end = _agreed(end, between("user"))
    # There is a cue if a text that ends with the question ends as one with an answer does, and the answer follows it.
    cue = end[len(common_end) :]
    if common_end.strip() and cue.strip() and unasked.endswith(cue) and asked.startswith(unasked):
        common_end = _before_opening(common_end, asked)
        end, cue = common_end, end[len(common_end) :]
    else:
        cue = ""
    return _Habits(
        reads_text=reads_text,
        reads_parts=reads_parts,
        reads_arguments=arguments in by_text and by_object in ("", by_text),
        end=end if PLACE in asked else None,
        common_end=common_end.rstrip(),
        next_marks=(_first_mark(between("user")), _first_mark(between("tool"))),
        unwritten=prompt[len(_agreed(prompt, asked)) :],
        cue=cue,
    )


def _first_mark(text: str) -> str:
    """Return the special token with which a text begins, "" if it begins with none."""
    found = _MARKER.match(text)
    return found[0] if found else ""


def _before_opening(common_end: str, text: str) -> str:
    """Return the part of `common_end` that ends a turn, without the special token that begins the next one."""
    marks = _MARKER.findall(common_end)
    first = min(marks, key=text.find, default="")
    return common_end.rpartition(first)[0] if first in marks[1:] else common_end


def _agreed(first: str, second: str) -> str:
    """Return the longest common beginning of two texts, with special tokens whole."""
    agreed = ""
    for one, other in zip(_MARKER.split(first), _MARKER.split(second), strict=False):
        if one == other:
            agreed += one
            continue
        if not _MARKER.match(one) and not _MARKER.match(other):
            same = takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False))
            agreed += "".join(character for character, _ in same)
        break
    return agreed


class _Places:
    """Marks that replace what messages say; `found` maps each to (index of its message, what it replaces)."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, str]] = {}

    def instead_of(self, turn: int, message: Message, *, is_learned: bool = True) -> Message:
        """Return a message with marks. An assistant's message that is not learned gets them in its calls only."""

        def mark(what: str) -> str:
            place = f"{PLACE}{len(self.found)}{PLACE}"
            self.found[place] = (turn, what)
            return place

        def marked(call: Message) -> Message:
            function = dict(called(call))
            of, given = f"call of {function['name']!r}", function.get("arguments")
            function["name"] = mark(of)
            if isinstance(given, str) and given:  # a template that reads text writes it unchanged
                function["arguments"] = json.dumps({mark(f"{of} (arguments)"): 1}, ensure_ascii=False)
            if isinstance(given, dict):
                both = [(mark(f"{of} (argument {key!r})"), mark(f"{of} (argument {key!r})")) for key in given]
                function["arguments"] = dict(both)
            return with_called(call, function)

        asked = dict(message)
        if calls := calls_of(message):
            asked["tool_calls"] = [marked(call) for call in calls]
        if message["role"] == "assistant" and not is_learned:
            return asked
        content = message.get("content")
        if isinstance(content, list):
            asked["content"] = [{**part, "text": mark("content")} if part["text"].strip() else part for part in content]
        elif content and content.strip():
            asked["content"] = mark("content")
        reasons = {key: message[key] for key in REASONING if message.get(key) and message["role"] == "assistant"}
        return {**asked, **dict.fromkeys(reasons, mark("reasoning") if reasons else "")}


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]} ... {text[-15:]}"
