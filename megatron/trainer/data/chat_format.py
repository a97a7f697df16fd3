"""What a chat's assistant wrote, in the text that a template gives it.

    messages -> ChatFormat.texts -> [text and its spans, ...]

A span is what the model is to write: from behind the generation prompt to the end of the turn. If the template marks it
with {% generation %}, the marked text is the span, and a chat is one text. Otherwise a turn's text is the chat up to
it, and the span is what the turn adds to the generation prompt. Turns share a text as long as each of them stands there
behind its own prompt. A template that writes earlier turns otherwise once later ones follow (without their reasoning,
for example) gives a turn a text of its own, so that every answer is learned behind what precedes it when it is
generated.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from megatron.trainer.data.chat_records import with_objects
from megatron.trainer.data.chat_template import CLOSE, NEXT, OPEN, PLACE, as_templates_see_it, render, uses_date
from megatron.trainer.data.json_text import LineError

_MARKER = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])")
"""How templates write tokens of their own: <|im_end|>, </s>, [/INST]."""
_KEY = re.compile(r"""["']type["']:""")

Message = Mapping[str, Any]


class Span(NamedTuple):
    """Characters start .. stop - 1 of a text, written by the assistant in message number `turn`, from 1."""

    start: int
    stop: int
    turn: int


class ChatText(NamedTuple):
    """A text and what of it is learned, in order."""

    text: str
    spans: list[Span]


class _Answer(NamedTuple):
    """The text up to and with a turn, of which characters start .. stop - 1 are learned.

    Attributes:
        common_stop: where the turn ends that later ones may follow; less than `stop` where the last turn has more.
    """

    text: str
    start: int
    stop: int
    common_stop: int

    def stop_in(self, text: str) -> int | None:
        """Return where the turn ends in the text of later ones; None where it or what precedes it is not there."""
        return next((stop for stop in (self.stop, self.common_stop) if text.startswith(self.text[:stop])), None)


class _Habits(NamedTuple):
    """How a template writes, found by asking it to.

    Attributes:
        reads_text, reads_parts: which contents it writes, a text or a list of parts.
        reads_arguments: it writes a tool call's arguments that are JSON text as it writes objects, or no objects.
        end: of the last turn, behind its content; None where it refuses a question and an answer.
        common_end: what of it is there where a turn follows, too.
        next_marks: what begins a user's message and a tool's, where `end` is empty.
        unwritten: what of the generation prompt an answer does not stand behind.
    """

    reads_text: bool
    reads_parts: bool
    reads_arguments: bool
    end: str | None
    common_end: str
    next_marks: tuple[str, str]
    unwritten: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A Jinja template and what it may use besides the messages.

    Attributes:
        name: what to call it in messages.
        template: Jinja, as Hugging Face's tokenizers have it.
        tool_template: the one for chats with tools, where it is another.
        variables: special tokens by name.
        date: what templates write for today, "2026-11-25".
    """

    name: str
    template: str
    variables: tuple[tuple[str, str], ...] = ()
    tool_template: str | None = None
    date: str = "2000-01-01"

    @property
    def digest(self) -> str:
        """A hash (hex) of what decides the text besides the date."""
        parts = [self.template, self.variables, *([self.tool_template] if self.tool_template else [])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def written_date(self) -> str | None:
        """The date, where the template may write one."""
        return self.date if uses_date(self.template + (self.tool_template or "")) else None

    @property
    def unwritten(self) -> str:
        """What of the generation prompt the template does not write before an answer, such as an opened <think>."""
        return self._habits(None).unwritten

    def texts(self, messages: Sequence[Message], tools: Any = None) -> list[ChatText]:
        """Return the texts of a chat, by the last turn that each trains; every turn that is learned is in one of them.

        Raises:
            LineError: the template refuses the chat, or does not say what the assistant wrote.
        """
        given = [
            self._readable(as_templates_see_it(message), number, tools) for number, message in enumerate(messages, 1)
        ]
        whole = self._render(given, tools)
        if OPEN in whole:
            return [_by_marks(whole, given, self.name)]
        texts = [ChatText(whole, [])]
        for turn in reversed([turn for turn, message in enumerate(given) if is_learned_answer(message)]):
            answer = self._answer(given, turn, tools)
            if not any(answer.stop_in(one.text) for one in texts):
                texts.append(ChatText(answer.text, []))
            spans, stop = next((one.spans, stop) for one in reversed(texts) if (stop := answer.stop_in(one.text)))
            spans.insert(0, Span(answer.start, stop, turn + 1))
        return [one for one in reversed(texts) if one.spans]

    def _answer(self, messages: Sequence[Message], turn: int, tools: Any) -> _Answer:
        """Return the text up to and with message `turn`, and where it begins and ends."""
        prompt = self._render(messages[:turn], tools, add_generation_prompt=True)
        text = self._render(messages[: turn + 1], tools)
        start = len(prompt) if text.startswith(prompt) else self._start(prompt, text, messages, turn, tools)
        habits = self._habits(tools)
        if habits.end == "":
            text += self._mark_behind(turn, messages[turn], habits)
        stop = len(text) if habits.end is not None and not habits.end.strip() else len(text.rstrip())
        common_stop = stop
        if habits.end and habits.common_end and text.endswith(habits.end):
            common_stop = len(text) - len(habits.end) + len(habits.common_end)
        return _Answer(text, start, max(start, stop), max(start, common_stop))

    def _mark_behind(self, turn: int, message: Message, habits: _Habits) -> str:
        """Return what ends a turn that the template does not end: the token of the role that is next, or eos_token."""
        by_user, by_tool = habits.next_marks
        mark = (by_tool if message.get("tool_calls") else by_user) or dict(self.variables).get("eos_token", "")
        if not mark:
            raise LineError(
                f" message {turn + 1} (assistant): {self.name} writes nothing behind an answer, so the model would not "
                "learn to end it: write the token that ends a turn into a template of your own (--chat-template FILE)"
            )
        return mark

    def _start(self, prompt: str, text: str, messages: Sequence[Message], turn: int, tools: Any) -> int:
        """Return where an answer begins in a text that does not begin with its prompt.

        Either the answer goes on before the prompt's end (behind "<think>" of "<think>\\n"), or earlier messages are
        written otherwise: then it begins behind what the prompt adds to them.
        """
        asked = self._render([*messages[:turn], _with_places(messages[turn])], tools)
        before = self._render(messages[:turn], tools)
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

    def _readable(self, message: Message, number: int, tools: Any) -> Message:
        """Return a message as the template reads it: content as text or parts, arguments as text or objects."""
        content, habits = message.get("content"), self._habits(tools)
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

    def _habits(self, tools: Any) -> _Habits:
        return _habits_of(self._template(tools), self.variables, self.date)

    def _template(self, tools: Any) -> str:
        return self.tool_template if tools is not None and self.tool_template else self.template

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> str:
        template, variables = self._template(tools), dict(self.variables)
        return render(self.name, template, self.date, messages, tools, variables, add_generation_prompt)


def is_learned_answer(message: Message) -> bool:
    """Return whether a message is the assistant's and has not weight 0; null is what tables have in place of none."""
    return message["role"] == "assistant" and (message.get("weight") is None or bool(message["weight"]))


def _by_marks(marked: str, messages: Sequence[Message], name: str) -> ChatText:
    """Return a text without its marks, and what they enclose of turns that are learned."""
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
    """Return how a template writes the content and the end of a turn."""

    def write(*contents: str, role: str = "user", in_parts: bool = False, prompts: bool = False, **more: Any) -> str:
        """Return the text of a question, an answer and a message of `role`, as many as there are contents.

        Args:
            more: keys of the last message.
        """
        roles = ("user", "assistant", role)
        messages: list[dict[str, Any]] = [
            {"role": name, "content": [{"type": "text", "text": content}] if in_parts else content}
            for name, content in zip(roles, contents, strict=False)
        ]
        messages[-1] |= more
        try:
            text = render("", template, date, messages, None, dict(variables), add_generation_prompt=prompts)
        except LineError:
            return ""
        return text.replace(OPEN, "").replace(CLOSE, "")

    texts, parts = (write("?", PLACE, in_parts=in_parts) for in_parts in (False, True))
    reads_text = PLACE in texts
    # A template that knows texts alone may write a list as Python or JSON does.
    reads_parts = PLACE in parts and len(_KEY.findall(parts)) == len(_KEY.findall(texts))
    in_parts = reads_parts and not reads_text

    def between(role: str) -> str:
        """Return what stands between an answer and the content of a message of `role`."""
        written = write("?", PLACE, NEXT, role=role, in_parts=in_parts)
        return written.partition(PLACE)[2].partition(NEXT)[0]

    def called(arguments: Any) -> str:
        """Return the text of a question and a tool call."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
        return write("?", "", in_parts=in_parts, tool_calls=[call])

    arguments = json.dumps({PLACE: 1}, ensure_ascii=False)
    by_text, by_object = called(arguments), called({PLACE: 1})
    asked = parts if in_parts else texts
    prompt = write("?", in_parts=in_parts, prompts=True)
    return _Habits(
        reads_text=reads_text,
        reads_parts=reads_parts,
        reads_arguments=arguments in by_text and by_object in ("", by_text),
        end=asked.rpartition(PLACE)[2] if PLACE in asked else None,
        common_end=_agreed(asked.rpartition(PLACE)[2], between("user")).rstrip(),
        next_marks=(_first_mark(between("user")), _first_mark(between("tool"))),
        unwritten=prompt[len(_agreed(prompt, asked)) :],
    )


def _first_mark(text: str) -> str:
    """Return the token of its own with which a text begins, "" where it begins otherwise."""
    found = _MARKER.match(text)
    return found[0] if found else ""


def _agreed(first: str, second: str) -> str:
    """Return the beginning that two texts share, without part of a token of a template's own."""
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


def _with_places(value: Any) -> Any:
    """Return a message with a place in the stead of what it says, where it says anything."""
    if isinstance(value, str):
        return PLACE if value else value
    if isinstance(value, list):
        return [{**part, "text": PLACE} for part in value]
    said = {key: _with_places(value[key]) for key in ("content", "thinking", "reasoning_content") if key in value}
    return {**value, **said}
