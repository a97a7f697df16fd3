"""Records as public chat data have them, as messages.

    {"messages": [{"role", "content"}, ...]}                  OpenAI; as they are
    {"conversations": [{"from", "value"}, ...], "system"}     ShareGPT
    {"prompt", "completion"}                                  texts or messages; the completion is learned
    {"instruction", "input", "output", "system", "history"}   Alpaca

A null is taken for a field that is missing, as tables have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.trainer.data.chat_template import CLOSE, OPEN, PLACE
from megatron.trainer.data.json_text import COMPLETION, PROMPT, LineError, refuse_preferences

MESSAGES, CONVERSATIONS, INSTRUCTION, OUTPUT = "messages", "conversations", "instruction", "output"
UNDERSTOOD = "messages, conversations, prompt with completion or responses, or instruction with output"

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
_CALLS = "function_call"

Message = dict[str, Any]


def messages_of(value: Mapping[str, Any]) -> list[Message]:
    """Return the chat of a record, checked and in OpenAI's words.

    Raises:
        LineError: the record is of no known form, or of two; a message without role or content.
    """
    given = {key: entry for key, entry in value.items() if entry is not None}
    if MESSAGES in given:
        return checked(given[MESSAGES], MESSAGES, "at least one question and one answer are needed")
    refuse_preferences(given)
    forms = [fields for fields in _FORMS if all(field in given for field in fields)]
    if not forms:
        raise LineError(
            f" has no field 'messages' (it has {', '.join(map(repr, list(given)[:5])) or 'none'}): --sft reads chats "
            f"({UNDERSTOOD}); leave it out for text"
        )
    if len(forms) > 1:
        first, second = (" with ".join(map(repr, fields)) for fields in forms[:2])
        raise LineError(f" has {first} and {second}: leave one of them out")
    return _FORMS[forms[0]](given)


def checked(messages: Any, field: str, needed: str) -> list[Message]:
    """Return a list of messages.

    Raises:
        LineError: it is none, or a message has no role or content, or tool calls that are none.
    """
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
    """Return whether a mark of spans is in `value`: a template could write any of it."""
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
    """Return the tool calls of a message."""
    calls = message.get("tool_calls") or []
    return calls if isinstance(calls, list) else [calls]


def called(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call: as OpenAI has them below `function`, or in the call itself."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def with_objects(message: Message, number: int) -> Message:
    """Return a message whose tool calls have their arguments as objects, as most templates read them.

    Raises:
        LineError: arguments that are no JSON.
    """
    if not calls_of(message):
        return message
    where = f" message {number} (assistant): the arguments of a tool call"
    calls = []
    for call in calls_of(message):
        function = called(call)
        if isinstance(function.get("arguments"), str):
            function = {**function, "arguments": parsed(function["arguments"] or "{}", where)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def tools_of(value: Mapping[str, Any]) -> Any:
    """Return the tools of a record, None where it has none; they may be JSON text, which fits any table."""
    tools = value.get("tools")
    return parsed(tools, ": field 'tools'") or None if isinstance(tools, str) and tools else tools


def parsed(text: str, where: str) -> Any:
    """Return the value of a JSON text within a record.

    Raises:
        LineError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(f"{where} {'is' if 'field' in where else 'are'} not JSON ({error}): repair the line") from error


def _spoken(entry: Any, number: int) -> Any:
    """Return a message of ShareGPT in OpenAI's words."""
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


def _conversations(value: Mapping[str, Any]) -> list[Message]:
    entries = value[CONVERSATIONS]
    if isinstance(entries, list):
        entries = [_spoken(entry, number) for number, entry in enumerate(entries, 1)]
    messages = checked(entries, CONVERSATIONS, "at least one question and one answer are needed")
    return _system(value, messages) + messages


def _completion(value: Mapping[str, Any]) -> list[Message]:
    messages = []
    for field, role in ((PROMPT, "user"), (COMPLETION, "assistant")):
        part = value[field]
        if isinstance(part, str):
            part = [{"role": role, "content": part}]
        elif isinstance(part, list):
            part = [_spoken(entry, number) for number, entry in enumerate(part, 1)]
        part = checked(part, field, "a text, or at least one message, is needed")
        messages += unlearned(part) if field == PROMPT else part
    return messages


def unlearned(messages: Sequence[Message]) -> list[Message]:
    """Return messages of which nothing is learned."""
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _instruction(value: Mapping[str, Any]) -> list[Message]:
    for field in (INSTRUCTION, "input", OUTPUT):
        if not isinstance(value.get(field, ""), str):
            raise LineError(f": field {field!r} is a {type(value[field]).__name__}, not a string: repair the line")
    history = value.get("history") or []
    pairs = [*history, (value[INSTRUCTION], value[OUTPUT])]
    messages = _system(value, [])
    for number, pair in enumerate(pairs, 1):
        if not isinstance(pair, (list, tuple)) or [type(text) for text in pair] != [str, str]:
            raise LineError(f": entry {number} of 'history' is {pair!r}: pairs of a question and an answer are needed")
        question, answer = pair
        if number == len(pairs) and value.get("input"):
            question = f"{question}\n{value['input']}"
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def _system(value: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return the message of a record's field `system`, which stands before the others."""
    system = value.get("system")
    if not system or (messages and messages[0]["role"] == "system" and messages[0]["content"] == system):
        return []
    if not isinstance(system, str):
        raise LineError(f": field 'system' is a {type(system).__name__}, not a string: repair the line")
    if messages and messages[0]["role"] == "system":
        raise LineError(": field 'system' differs from the chat's own system message: leave one of them out")
    return [{"role": "system", "content": system}]


_FORMS = {
    (CONVERSATIONS,): _conversations,
    (PROMPT, COMPLETION): _completion,
    (INSTRUCTION, OUTPUT): _instruction,
}
"""The fields of a form -> its messages."""
