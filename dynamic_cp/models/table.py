"""The table of flags: classes of settings whose fields are flags. Parser, ranges, settings and docs are made from it.

    class TrainingSettings:
        seed: int = flag("seed of weights and of the order of samples", 1234)  # --seed N
        recompute_activations: InitVar[bool] = flag("...")  # parsed, and no setting: it only decides another one

A field's type says what its flag takes: a number, text, several of them (`tuple`), or nothing (`bool`; --no-... can be
given, too, if it may be None or is on by default).
"""

from __future__ import annotations

import argparse
import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.types.counts import MAX_COUNT

REQUIRED = object()
"""Default of a flag that must be given."""
_USUAL = object()
_MOST_LAYERS = 10_000


class Range(NamedTuple):
    """What a number must be, in words, and the check."""

    text: str
    has: Callable[[Any], bool]


POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("at least 0", lambda value: value >= 0)
LENGTH = Range(f"greater than 0 and at most {MAX_COUNT}", lambda value: 0 < value <= MAX_COUNT)
FRACTION = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A row of the table: a field of the settings with its type as text, names of the flag, its name among parsed
    arguments, title on --help (None: that of the class), and options of `ArgumentParser.add_argument`."""

    field: str
    kind: str
    names: tuple[str, ...]
    destination: str
    group: str | None
    within: Range | None
    options: Mapping[str, Any]


def flag(
    help: str,
    default: Any = _USUAL,
    *,
    name: str = "",
    group: str | None = None,
    within: Range | None = None,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a field of a class of settings that is a flag.

    Args:
        default: of the parser: REQUIRED, [] for any number of values; usually False of a `bool`, None of others.
        name: if not the field's: all names of the flag, and "=destination" if that is not the first.
        group, parse: title, if not the class's, and type of the parser, if not the field's.
        within: what each value but None is checked against.
    """
    options = {"help": help, "type": parse, "choices": choices, "metavar": metavar}
    given = {option: value for option, value in options.items() if value is not None}
    return field(metadata={"flag": (name, default, group, within, given)})


expert_flag = partial(flag, group="experts")
"""A flag that is refused without --num-experts."""


def destination_of(name: str) -> str:
    """Return where a parser puts the value of a flag that says nothing else."""
    return name.removeprefix("--").replace("-", "_")


def flag_of(destination: str) -> str:
    """Return the flag that a parser keeps under a name."""
    return "--" + destination.replace("_", "-")


def flags_of(settings: type) -> Iterator[Flag]:
    """Yield the flags among the fields of a class."""
    for entry in settings.__dataclass_fields__.values():  # type: ignore[attr-defined]  # `fields` leaves out InitVar
        if "flag" not in entry.metadata:
            continue
        name, default, group, within, given = entry.metadata["flag"]
        words, _, destination = (name or flag_of(entry.name)).partition("=")
        names = tuple(words.split())
        yield Flag(
            field=entry.name,
            kind=entry.type,
            names=names,
            destination=destination or destination_of(names[0]),
            group=group,
            within=within,
            options=_options_of(entry.type, default, given),
        )


def _options_of(kind: str, default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parser's options from a field's type (as text), its default and the `given` ones."""
    kinds = set(re.findall(r"\w+", kind))
    if "bool" in kinds:
        action = argparse.BooleanOptionalAction if "None" in kinds or default is True else "store_true"
        usual = None if "None" in kinds else False
        return {**given, "action": action, "default": usual if default is _USUAL else default}
    options: dict[str, Any] = {} if default is _USUAL else {"default": default}
    if default is REQUIRED:
        options = {"required": True}
    if "type" in given:
        return options | given
    if "tuple" in kinds:
        options["nargs"] = "*" if default == [] else "+"
    number = next((number for number in (int, float) if number.__name__ in kinds), None)
    return {**options, **({} if number is None else {"type": number}), **given}


def add_group(parser: Any, title: str, table: Mapping[type, str]) -> None:
    """Add the flags with a title to a parser; `table`: class of settings -> the usual title of its flags."""
    group = parser.add_argument_group(title)
    for settings, usual in table.items():
        for row in flags_of(settings):
            if title == (row.group or usual):
                group.add_argument(*row.names, dest=row.destination, **row.options)


def check_ranges(arguments: Any, *table: type) -> None:
    """Raise InvalidInputError if a number of the parsed arguments is out of its range or not finite."""
    for row in (row for settings in table for row in flags_of(settings)):
        value = getattr(arguments, row.destination)
        if isinstance(value, float) and not math.isfinite(value):
            within = "" if row.within is None else f", {row.within.text}"
            raise InvalidInputError(f"{row.names[0]} is {value}, it must be finite{within}")
        if row.within is not None and value is not None and not row.within.has(value):
            raise InvalidInputError(f"{row.names[0]} is {value}, it must be {row.within.text}")


def said(arguments: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Return field -> value of a class, from parsed arguments; lists become tuples."""
    found = {row.field: arguments[row.destination] for row in flags_of(settings)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def layer_pattern(remedy: str) -> Callable[[str], int | tuple[int, ...]]:
    """Return an argparse type: a value for each layer, as on Megatron-LM's command line: a number, or lists of numbers
    that `*` repeats and `+` joins, such as `[1,1,0]*4`; nothing else is evaluated. `remedy` ends the error message."""

    def parse(text: str) -> int | tuple[int, ...]:
        try:
            value = _evaluated(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {remedy}") from None
        return tuple(value) if isinstance(value, list) else value

    return parse


def shown(values: Any) -> str:
    """Return a number or a list as messages have it."""
    return ",".join(map(str, values)) if isinstance(values, list | tuple) else str(values)


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_evaluated(element) for element in node.elts]
        return [value for value in values if isinstance(value, int) or _refuse()]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right if len(left) * right <= _MOST_LAYERS else _refuse()
    return _refuse()


def _refuse() -> Any:
    raise ValueError
