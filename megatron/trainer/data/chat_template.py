"""Renders chat templates as transformers does.

A template gets a message without its null keys, and its reasoning under every name by which templates read it.
`strftime_now` gives the run's date at midnight; with the time of day, a text could have another length tomorrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import metadata
from typing import Any, NoReturn

from megatron.trainer.data.lines import LineError

# Unicode noncharacters, which no text contains. OPEN and CLOSE mark spans in a rendered text, PLACE and NEXT stand for
# contents in trial renderings.
OPEN, CLOSE, PLACE, NEXT = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which data have a message's reasoning. Most templates read the first, gpt-oss and LFM2.5 the second."""

TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}

_SAFE_JINJA = (3, 1, 6)
"""Templates come with other people's tokenizers. An older version lets them leave the sandbox (CVE-2025-27516)."""


def why_no_templates() -> str | None:
    """Return why templates cannot be rendered safely here, None if they can."""
    needed = ".".join(map(str, _SAFE_JINJA))
    try:
        version = metadata.version("jinja2")
    except metadata.PackageNotFoundError:
        return f"jinja2 is not installed, {needed} or later is needed"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) >= _SAFE_JINJA:
        return None
    return f"jinja2 {version} is installed, {needed} or later keeps a template from running code"


def as_templates_see_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null keys, its reasoning also under `reasoning_content` and `thinking`."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def uses_date(template: str) -> bool:
    return "strftime_now" in template


def why_no_template(template: str) -> str | None:
    """Return what is wrong with a template, None if it compiles."""
    import jinja2

    try:
        _compiled(template, "2000-01-01")
    except jinja2.TemplateError as error:
        return f"line {getattr(error, 'lineno', '?')}: {error}"
    return None


def render(
    name: str,
    template: str,
    date: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """Return the text of messages, with OPEN and CLOSE around each generation block.

    Args:
        name: what error messages call the template.
        date: what `strftime_now` formats, "2026-11-25".
        variables: what else the template may read: special tokens by name, and what the record gives.

    Raises LineError: the template refuses the chat."""
    import jinja2

    try:
        text = _compiled(template, date).render(
            {"tools": None, "documents": None, **variables},
            messages=messages,
            add_generation_prompt=add_generation_prompt,
        )
    except (
        *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
        *(RecursionError, MemoryError),
    ) as error:
        said = str(error) or type(error).__name__
        raise LineError(f": {name} refuses this chat ({said}): repair the chat or the template") from error
    return str(text)


@lru_cache(maxsize=8)
def _compiled(template: str, date: str) -> Any:
    """Return the template, with the functions and filters that transformers gives templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace as JinjaNamespace

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return OPEN + str(caller()) + CLOSE

    class PublicNamespace(JinjaNamespace):
        def __init__(self, /, *args: Any, **attributes: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **attributes).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace cannot have {name!r}: names begin with a letter")
            super().__setitem__(name, value)

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
    environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
    environment.globals["namespace"] = PublicNamespace
    return environment.from_string(template)
