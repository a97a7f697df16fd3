"""Options as fields of the dataclass that holds their values, and commands whose --help and errors name them."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from dynamic_cp.errors import DynamicCPError, IllegalPlanError, InvalidInputError

_TRAINER_FLAGS = {
    "--max-seqlen-per-dp-cp-rank": ("--max-tokens-per-rank",),
    "--max-dynamic-cp-size": ("--max-dynamic-cp-size", "--lanes", "--gpus"),
    "--context-parallel-size": ("--static-cp-size",),
    "--seq-length": ("--max-seqlen",),
    "--tokenizer-model": ("--tokenizer",),
    "--tokenizer-type HuggingFaceTokenizer": ("--tokenizer",),
    "--tensor-model-parallel-size": ("--tp",),
    "--pipeline-model-parallel-size": ("--pp",),
    "--expert-model-parallel-size": ("--ep",),
    "--dynamic-cp-state-exchange": ("--state-exchange",),
}
"""Flag of the trainer -> the option that is the same here, the first that a command has."""

_ARGUMENTS = {
    "num_lanes": "--lanes",
    "num_gpus": "--gpus",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "vp_size": "--vpp",
    "ep_size": "--ep",
    "ranks_per_node": "--ranks-per-node",
    "max_seqlen": "--max-seqlen",
    "max_tokens_per_rank": "--max-tokens-per-rank",
    "static_cp_size": "--static-cp-size",
    "max_cp_size": "--max-dynamic-cp-size",
    "cp_comm_types": "--cp-comm-type",
}
"""Argument of the library -> the option that is the same."""


def with_own_flags(message: str, options: Collection[str]) -> str:
    """Return `message` with the `options` of a command in place of arguments and of flags of the trainer."""
    # "argument (--flag)"; a value, as in "p2p or auto (--cp-comm-type)", stays.
    message = re.sub(r"\b(?:[a-z]+_[a-z_]+|seqlen) \((--[a-z-]+)\)", r"\1", message)
    for flag, same in _TRAINER_FLAGS.items():
        own = next((option for option in same if option in options), None)
        if own is not None:
            message = re.sub(rf"{flag}(?![\w-])", own, message)
    for argument, option in _ARGUMENTS.items():
        if option in options:  # no part of a path
            message = re.sub(rf"(?<![\w./-]){argument}(?![\w/-]|\.\w)", option, message)
    first = re.match(r"([a-z]+) (?:is |['\"])", message)
    return f"--{message}" if first and f"--{first[1]}" in options else message


_Command = TypeVar("_Command", bound=Callable[..., Any])
_Values = TypeVar("_Values")


class Option(click.Option):
    """An option that --help shows in a section of its own."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Argument(click.Argument):
    """An argument that --help explains."""

    section = "Arguments"

    def __init__(self, *args: Any, help: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self.text


class Command(click.Command):
    """A command whose --help has sections and keeps its examples as they are, and whose errors name its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words of the command line; an error says whose they are, which click forgets for some."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of the planner comes out with the names that were typed."""
        try:
            return super().invoke(ctx)
        except IllegalPlanError:
            raise
        except DynamicCPError as error:
            options = {name for parameter in self.params for name in parameter.opts}
            if ctx.params.get("max_dynamic_cp_size") is None:
                options.discard("--max-dynamic-cp-size")  # nothing was limited: more lanes help
            error.args = (with_own_flags(str(error), options),)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "") or "Options", []).append(record)
        first, last = sections.pop("Arguments", []), sections.pop("Options", [])
        for title, records in [("Arguments", first), *sections.items(), ("Options", last)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def subcommand(name: str, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return what makes a function a command; `examples`: lines that --help shows below its options."""
    return click.command(name, cls=Command, epilog=f"\b\nExamples:{examples}")


class TokensOrAuto(click.ParamType[Any]):
    """A number of tokens, or 'auto' for what memory holds."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto" or isinstance(value, int):
            return cast("int | str", value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of tokens nor 'auto'", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "N|auto"


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between."""

    name = "N,.."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(word) for word in value.split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)
        if min(numbers) < 1 and param is not None:
            raise InvalidInputError(f"{param.opts[0]} is {min(numbers)}, at least 1 is needed: change it")
        return numbers

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name


class Names(click.ParamType[Any]):
    """A name out of a list that shells complete, or a path; the reader of the value judges it."""

    def __init__(self, metavar: str, names: Callable[[], Sequence[str]]) -> None:
        self.name = metavar
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so, then files."""
        found = [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
        return [*found, CompletionItem(incomplete, type="file")]


def option(help: str, kind: Any = str, default: Any = None, *, flag: str = "", **settings: Any) -> Any:
    """Return a field of a dataclass that an option sets, or such an option alone for `options_in`.

    Args:
        help: what --help says; `options_of` fills in a {name}.
        kind: int, float or str; bool for a switch; a tuple of choices; or a type of click.
        default: shown by --help unless it is None, as is that of a switch.
        flag: the option, where it is not named as the field.
        settings: more of `click.option`.
    """
    given: dict[str, Any] = {"help": help, **settings}
    if kind is bool:
        default, given["is_flag"] = False, True
    else:
        given["type"] = click.Choice(kind) if isinstance(kind, tuple) else kind
        if kind is int or isinstance(kind, click.IntRange):
            given.setdefault("metavar", "N")
        if default is not None:
            given |= {"default": default, "show_default": True}
    metadata = {"flag": flag, "given": given}
    if given.get("required"):
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=() if given.get("multiple") else default, metadata=metadata)


def options_in(title: str, **options: Any) -> Callable[[_Command], _Command]:
    """Add options (of `option`) by the names of their parameters to a section of --help."""

    def add(command: _Command) -> _Command:
        for name, one in reversed(options.items()):
            flag = one.metadata["flag"] or f"--{name.replace('_', '-')}"
            command = click.option(flag, name, cls=Option, section=title, **one.metadata["given"])(command)
        return command

    return add


def options_of(values: Any, title: str, names: str, **said: str) -> Callable[[_Command], _Command]:
    """Add the options of some fields of a dataclass to a section of --help.

    Args:
        names: of the fields, with blanks between.
        said: what help texts fill in.
    """
    fields = {field.name: field for field in dataclasses.fields(values)}
    options = {name: fields[name] for name in names.split()}
    for name, one in options.items() if said else ():
        given = {**one.metadata["given"], "help": one.metadata["given"]["help"].format(**said)}
        options[name] = dataclasses.field(metadata={**one.metadata, "given": given})
    return options_in(title, **options)


def taken(given: Mapping[str, Any], values: type[_Values]) -> _Values:
    """Return `values` filled from the options of the same names."""
    names = {field.name for field in dataclasses.fields(cast(Any, values))}
    return values(**{name: value for name, value in given.items() if name in names})


def command_line(ctx: click.Context, name: str = "", without: Collection[str] = ()) -> list[str]:
    """Return what to type to get the same again: the command, and each option that was given with its value.

    Args:
        name: of another command that takes them; "": the same.
        without: names of parameters to leave out.
    """
    words = [f"dynamic-cp {name or ctx.command.name}"]
    for parameter in ctx.command.params:
        assert parameter.name is not None
        is_given = ctx.get_parameter_source(parameter.name) == click.core.ParameterSource.COMMANDLINE
        if not is_given or parameter.name in without:
            continue
        value = ctx.params[parameter.name]
        if isinstance(getattr(parameter, "type", None), Numbers):
            value = ",".join(map(str, value))
        for one in value if isinstance(value, tuple) else (value,):
            words.append(parameter.opts[0] if one is True else f"{parameter.opts[0]} {shlex.quote(str(one))}")
    return words


json_option = options_in(
    "Output", json=option("Write the figures as JSON ('-': to stdout, instead of text).", metavar="FILE|-")
)
"""Adds --json."""


def output_option(help: str, metavar: str, **settings: Any) -> Callable[[_Command], _Command]:
    return options_in("Output", output=option(help, metavar=metavar, **settings))
