"""Reads the forms of public chat data as messages.

    {"messages": [{"role", "content"}, ...]}        OpenAI; unchanged
    {"conversations": [{"from", "value"}, ...]}     ShareGPT
    {"prompt", "completion"}                        strings or messages; only the completion is learned
    {"instruction", "input", "output", "history"}   Alpaca
    {"prompt", "chosen", "rejected"}                a preference; its prompt may have another form (`PREFERENCES`)

A field "system" goes before the messages. A null counts as a missing field, because tables fill them so. To add a form,
add a row to `FORMS` or `PREFERENCES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

from megatron.trainer.data.chat_template import CLOSE, OPEN, PLACE
from megatron.trainer.data.lines import (
    CHOSEN,
    COMPLETION,
    PROMPT,
    REJECTED,
    RESPONSES,
    LineError,
    refuse_preferences,
    unread_keys,
)

MESSAGES, CONVERSATIONS, INSTRUCTION, OUTPUT = "messages", "conversations", "instruction", "output"
SYSTEM = "system"
ASKED = ("question", "query", "input")
"""Other names that data sets give the prompt."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
_CALLS = "function_call"
VARIABLES = "chat_template_kwargs"
GIVEN = ("tools", VARIABLES)
"""Fields that the template gets unchanged."""
_NO_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
"""Parameters of transformers' `apply_chat_template`, which a record cannot set as template variables."""

Message = dict[str, Any]
Fields: TypeAlias = tuple[str, ...]


def messages_of(value: Mapping[str, Any]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the chat of a record in OpenAI's form, and the record's `unread_keys`. LineError if the record has no
    known form, or two, or a message lacks role or content."""
    given, form = without_nulls(value), (MESSAGES,)
    if MESSAGES not in given:
        refuse_preferences(given)
        form = _form(given, FORMS, f"--sft reads chats ({words(_READ)}); leave it out for text")
    return _with_system(given, FORMS[form](given)), unread_of(given, form)


def unread_of(given: Mapping[str, Any], form: Fields) -> tuple[str, ...]:
    beside = ("input", "history", OUTPUT) if INSTRUCTION in form else ()
    return unread_keys(given, *form, *beside, SYSTEM, *GIVEN)


def preference_of(value: Mapping[str, Any]) -> tuple[list[list[Message]], tuple[str, ...]]:
    """Return the chosen and the rejected chat of a preference, whose prompt is not learned, and its `unread_keys`.
    LineError if the record is no preference, its prompt has two forms, or its answers are equal or malformed."""
    given = without_nulls(value)
    fields = _form(given, PREFERENCES, f"preferences are read ({words(PREFERENCES)})")
    answers = [_answer(given, field) for field in (CHOSEN, REJECTED)]
    prompt = PREFERENCES[fields](given)
    common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))]
    is_text = isinstance(given.get(PROMPT), str)
    if prompt and not _are_whole(common, prompt, is_text=is_text):
        common = []
    elif prompt:
        prompt = [message for message in prompt if not is_text and message not in common]
    shared = [*prompt, *common]
    if answers[0] == answers[1] or not shared:
        why = "are the same" if shared else f"have no message in common and no {PROMPT!r} precedes them"
        asked = None if shared else next((field for field in ASKED if field in given), None)
        remedy = f"rename {asked!r} to {PROMPT!r}" if asked else "repair or remove the line"
        raise LineError(f": {CHOSEN!r} and {REJECTED!r} {why}: {remedy}")
    chats = [[*_with_system(given, unlearned(shared)), *answer[len(common) :]] for answer in answers]
    return chats, unread_of(given, fields)


def prompt_of(value: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a prompt, behind a system message; LineError if it is neither a text nor messages."""
    return _with_system(value, _prompt(value))


def _are_whole(common: Sequence[Message], prompt: Sequence[Message], *, is_text: bool) -> bool:
    """Return whether what both chats begin with is the whole prompt; a text prompt may differ from it."""
    return bool(common) and common[0]["role"] != "assistant" and (is_text or prompt[-1] in common)


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without null fields, which tables have for missing ones."""
    return {key: entry for key, entry in value.items() if entry is not None}


def words(forms: Iterable[Fields]) -> str:
    """Return the forms for a message: "messages, prompt with completion, or instruction with output"."""
    *others, last = (" with ".join(fields) for fields in forms)
    return f"{', '.join(others)}, or {last}"


def _form(given: Mapping[str, Any], forms: Mapping[Fields, object], read: str) -> Fields:
    """Return the fields of the record's one form, the largest of nested ones; `read` ends the error if it has none."""
    found = [fields for fields in forms if all(field in given for field in fields)]
    found = [fields for fields in found if not any(set(fields) < set(other) for other in found)]
    if not found:
        missing = next(iter(forms))[0]
        raise LineError(f" has no field {missing!r} (it has {', '.join(map(repr, list(given)[:5])) or 'none'}): {read}")
    if len(found) > 1:
        first, second = (" with ".join(map(repr, fields)) for fields in found[:2])
        raise LineError(f" has {first} and {second}: leave one of them out")
    return found[0]


def checked(messages: Any, field: str, needed: str) -> list[Message]:
    """Return `messages`; LineError if it is no list or empty, or a message lacks role or content or has a bad call."""
    if not isinstance(messages, list) or not messages:
        said = f"{len(messages)} messages" if isinstance(messages, list) else f"a {type(messages).__name__}"
        raise LineError(f": field {field!r} is {said}: {needed}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise LineError(f" message {number} is a {type(message).__name__}, not an object: repair the line")
        role = message.get("role")
        if role not in ROLES:
            raise LineError(f" message {number} has role {role!r}: use one of {', '.join(ROLES)}")
        where = f" message {number} ({role})"
        if has_mark(message):
            raise LineError(f"{where} has the noncharacter U+FDD0, U+FDD1 or U+FDD2: remove it")
        _check_content(message, where)
        for call in calls_of(message):
            if not isinstance(call, dict) or not isinstance(called(call).get("name"), str):
                raise LineError(
                    f'{where}: a tool call is {{"function": {{"name": ..., "arguments": ...}}}}, not {call!r}'
                )
        if role == "assistant" and message.get("weight") not in (None, 0, 1):
            raise LineError(f"{where} has weight {message['weight']!r}: 0, which is not learned, and 1 are supported")
    return messages


def has_mark(value: Any) -> bool:
    """Return whether `value` contains a mark of spans anywhere, because a template could write any part of it."""
    values = [value]
    while values:
        one = values.pop()
        if isinstance(one, str) and any(mark in one for mark in (OPEN, CLOSE, PLACE)):
            return True
        if isinstance(one, dict):
            values += [*one, *one.values()]
        elif isinstance(one, list):
            values += one
    return False


def _check_content(message: Message, where: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant" and calls_of(message)):
        return
    if isinstance(content, list):
        wrong = next((part for part in content if not isinstance(part, dict) or "type" not in part), None)
        if wrong is None:
            return
        raise LineError(f'{where}: a part of its content is {{"type": "text", "text": ...}}, not {wrong!r}')
    if content is not None:
        raise LineError(f"{where}: its content is a {type(content).__name__}, not a string: repair the line")
    said = "null" if "content" in message else "missing"
    calls = " and it has no tool_calls" if message["role"] == "assistant" else ""
    raise LineError(f'{where}: its content is {said}{calls}: write its text ("" for none), or leave the message out')


def calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls") or []
    return calls if isinstance(calls, list) else [calls]


def called(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a tool call with name and arguments: its `function` as OpenAI has it, or the call itself."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def with_called(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call with its name and arguments replaced by `function`, where `called` finds them."""
    return {**call, "function": function} if isinstance(call.get("function"), dict) else function


def with_objects(message: Message, number: int) -> Message:
    """Return a message whose tool calls have objects as arguments, as most templates want; LineError if not JSON."""
    if not calls_of(message):
        return message
    where = f" message {number} (assistant): the arguments of a tool call"
    calls = []
    for call in calls_of(message):
        function = called(call)
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": parsed(function["arguments"] or "{}", where)}
        calls.append(with_called(call, function))
    return {**message, "tool_calls": calls}


def given_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record gives its template besides messages: tools, and variables (TRL's column). Both may be JSON
    text. LineError if that is not JSON, variables are no object or have a reserved name, or there is a mark of spans.
    """
    given = {}
    for field in GIVEN:
        entry = value.get(field)
        if isinstance(entry, str) and entry:
            entry = parsed(entry, f": field {field!r}") or None
        if has_mark(entry):
            raise LineError(f": field {field!r} has the noncharacter U+FDD0, U+FDD1 or U+FDD2: remove it")
        given[field] = entry
    variables = given.pop(VARIABLES) or {}
    if not isinstance(variables, dict):
        raise LineError(f": field {VARIABLES!r} is a {type(variables).__name__}, not an object: repair the line")
    if taken := [name for name in variables if name in _NO_VARIABLES]:
        raise LineError(f": field {VARIABLES!r} has {taken[0]!r}, which is no variable of templates: leave it out")
    return {**given, **variables}


def parsed(text: str, where: str) -> Any:
    """Return the value of a JSON text; LineError, which begins with `where`, if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"{where} {'is' if 'field' in where else 'are'} not JSON ({error}): repair the line") from error


def _spoken(entry: Any, number: int) -> Any:
    if not isinstance(entry, dict):
        return entry
    names = {"from": "role", "value": "content"}
    message = {names.get(key, key): value for key, value in entry.items()}
    role = message.get("role")
    if role != _CALLS:
        return message | {"role": _ROLE_OF_SPEAKER.get(role, role) if isinstance(role, str) else role}
    calls = parsed(str(message["content"]), f" message {number} ({_CALLS}): its calls")
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return message | {"role": "assistant", "content": None, "tool_calls": calls}


def _chat(value: Mapping[str, Any]) -> list[Message]:
    return checked(value[MESSAGES], MESSAGES, "at least one question and one answer are needed")


def _conversations(value: Mapping[str, Any]) -> list[Message]:
    needed = "at least one question and one answer are needed"
    return checked(_all_spoken(value[CONVERSATIONS]), CONVERSATIONS, needed)


def _completion(value: Mapping[str, Any]) -> list[Message]:
    return [*unlearned(_prompt(value)), *_answer(value, COMPLETION)]


def _prompt(value: Mapping[str, Any]) -> list[Message]:
    return _said(value, PROMPT, "user")


def _answer(value: Mapping[str, Any], field: str) -> list[Message]:
    return _said(value, field, "assistant")


def _said(value: Mapping[str, Any], field: str, role: str) -> list[Message]:
    """Return a field's content as messages: a string is one of `role`, and a preference may give one without a list."""
    part = value[field]
    if isinstance(part, str):
        part = [{"role": role, "content": part}]
    elif isinstance(part, dict) and field in (CHOSEN, REJECTED):
        part = [part]
    return checked(_all_spoken(part), field, "a text, or at least one message, is needed")


def _all_spoken(entries: Any) -> Any:
    if not isinstance(entries, list):
        return entries
    return [_spoken(entry, number) for number, entry in enumerate(entries, 1)]


def unlearned(messages: Sequence[Message]) -> list[Message]:
    """Return messages with weight 0 for the assistant's, so that nothing of them is learned."""
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _instruction(value: Mapping[str, Any]) -> list[Message]:
    for field in (INSTRUCTION, "input", OUTPUT):
        if not isinstance(value.get(field, ""), str):
            raise LineError(f": field {field!r} is a {type(value[field]).__name__}, not a string: repair the line")
    history = value.get("history") or []
    pairs = [*history, (value[INSTRUCTION], value[OUTPUT])]
    messages = []
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise LineError(f": entry {number} of 'history' is {pair!r}: pairs of a question and an answer are needed")
        question, answer = pair
        if number == len(pairs) and value.get("input"):
            question = f"{question}\n{value['input']}"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _question(value: Mapping[str, Any]) -> list[Message]:
    """Return the chat of an instruction up to its last answer; a preference has that in other fields."""
    if value.get(OUTPUT):
        raise LineError(f" has {OUTPUT!r} beside {CHOSEN!r} and {REJECTED!r}: leave {OUTPUT!r} out")
    return _instruction({**value, OUTPUT: ""})[:-1]


def _with_system(value: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages behind the record's `system` message, if it has one."""
    system = value.get(SYSTEM)
    if not system or (messages[0]["role"] == "system" and messages[0]["content"] == system):
        return messages
    if not isinstance(system, str):
        raise LineError(f": field 'system' is a {type(system).__name__}, not a string: repair the line")
    if messages[0]["role"] == "system":
        raise LineError(": field 'system' differs from the chat's own system message: leave one of them out")
    return [{"role": "system", "content": system}, *messages]


FORMS: Mapping[Fields, Callable[[Mapping[str, Any]], list[Message]]] = MappingProxyType(
    {
        (MESSAGES,): _chat,
        (CONVERSATIONS,): _conversations,
        (PROMPT, COMPLETION): _completion,
        (INSTRUCTION, OUTPUT): _instruction,
    }
)
"""Fields of a form -> function that makes messages of a record."""
_READ = (*FORMS, (PROMPT, RESPONSES))
PREFERENCES: Mapping[Fields, Callable[[Mapping[str, Any]], list[Message]]] = MappingProxyType(
    {
        (CHOSEN, REJECTED): lambda _: [],
        (PROMPT, CHOSEN, REJECTED): _prompt,
        (CONVERSATIONS, CHOSEN, REJECTED): _conversations,
        (INSTRUCTION, CHOSEN, REJECTED): _question,
    }
)
"""Fields of a preference -> function that makes the messages before its answers."""
