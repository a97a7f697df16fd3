"""Writes docs/flags.md and docs/command.md: every flag, every option of `dynamic-cp`.

python -m tools.flags_page

They are read from the parsers and docstrings, so they say what the programs say; tests/unit/test_docs.py compares the
first two. The third is only refreshed here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from dynamic_cp.decide.cli.app import COMMANDS, TRAINING_COMMANDS, group
from dynamic_cp.decide.cli.options import Argument
from megatron.dynamic_cp.flags.exclusions import EXCLUSIONS, NEEDS
from megatron.dynamic_cp.flags.supported import UNSUPPORTED
from megatron.trainer.flags.arguments import ALREADY_SO, build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_MADE = "<!-- Made by `python -m tools.flags_page`: do not edit. -->\n\n"


def flags_page() -> str:
    """Return docs/flags.md."""
    parts = [
        "# Flags of pretrain_gpt.py\n\n" + _MADE,
        "Names and meanings are Megatron-LM's where it has the flag. Most flags of dynamic context parallelism are "
        "new. "
        "`torchrun … pretrain_gpt.py --help` prints the same. `@FILE` stands for the flags in FILE, written as in a "
        "shell, with comments behind `#`. An unknown flag is an error, and so is "
        "[one that is not supported](#refused) or that [needs another one](#needs-another-flag). Nothing is ignored "
        f"except the {len(ALREADY_SO)} switches for what is [already so](#already-so) and "
        f"{_listed([flag for need in NEEDS if not need.is_refused for flag in need.flags])}, which a log line names "
        "where they have no effect.\n",
    ]
    for part in build_parser()._action_groups:
        actions = [one for one in part._group_actions if one.option_strings and one.help != argparse.SUPPRESS]
        actions = [one for one in actions if one.dest != "help"]
        if not actions:
            continue
        title = (part.title or "").capitalize()
        parts.append(f"\n## {title}\n\n| flag (default) | meaning |\n| --- | --- |\n")
        parts += [_flag_row(one) for one in actions]
    parts.append(
        "\n## Already so\n\nScripts for Megatron-LM carry these. They are accepted and change nothing, because the "
        "trainer always does what they ask for: " + ", ".join(f"`{flag}`" for flag in ALREADY_SO) + ".\n"
    )
    parts.append(
        "\n## Refused\n\nThese belong to features that are not supported with a CP group per micro-batch. Each is an "
        "error that names the flag and the reason.\n\n| flag | reason |\n| --- | --- |\n"
    )
    parts += [f"| `{one.flag}` | {_cell(one.reason)} |\n" for one in UNSUPPORTED]
    parts.append(
        "\n## Needs another flag\n\nWithout the other flag each has no effect. It is an error, or, where scripts for "
        "Megatron-LM carry it all the same, a line of the log. Flags that belong to a kind of layer need that kind, "
        "too; their errors say so.\n\n| flag | needs | without it |\n| --- | --- | --- |\n"
    )
    for need in NEEDS:
        without = "refused" if need.is_refused else "logged"
        parts.append(f"| {_cell(', '.join(need.flags))} | {_cell(need.needs)} | {without} |\n")
    parts.append(
        "\n## Not together\n\nEach is supported, and both at once are an error that names them, the reason and the "
        "remedy.\n\n| feature | not with | reason |\n| --- | --- | --- |\n"
    )
    for feature, excluded in EXCLUSIONS.items():
        for exclusion in excluded:
            why = re.sub(r"\{[^}]*\} ", "", exclusion.why)
            parts.append(f"| {_cell(feature)} | {_cell(exclusion.other)} | {_cell(why)} |\n")
    return "".join(parts)


def _listed(flags: Collection[str]) -> str:
    return " and ".join(f"`{flag}`" for flag in flags)


def _flag_row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = ""
    if action.choices:
        value = " " + _code("|".join(str(one) for one in action.choices))
    elif action.nargs != 0:
        metavar = action.metavar or (action.type.__name__ if isinstance(action.type, type) else "…")
        value = " " + _code(str(metavar))
    default = "required" if action.required else ""
    if action.nargs != 0 and action.default not in (None, []):
        default = _code(str(action.default))
    said = (action.help or "").removesuffix(" (default: %(default)s)")  # argparse of Python 3.10 adds it to switches
    return f"| {names}{value}{_bracketed(default)} | {_cell(said)} |\n"


def command_page() -> str:
    """Return docs/command.md."""
    commands = {**COMMANDS, **TRAINING_COMMANDS}
    context = click.Context(group, info_name="dynamic-cp")
    parts = [
        "# Options of dynamic-cp\n\n" + _MADE,
        "`dynamic-cp COMMAND --help` prints the same, with examples. Exit status: 0, 2 for bad input (one line on "
        "stderr, with the remedy), 1 when stdout cannot be written, 3 for a calibration that is not good enough "
        "(`profile --strict`), 130 when interrupted. `--json FILE` or `--json -` writes the figures for programs. "
        "`NO_COLOR` is respected; without a terminal there are no colours, and a line every 25 seconds instead of a "
        "bar.\n\n",
        "| command | what it does |\n| --- | --- |\n",
        *[f"| [{name}](#{name}) | {_cell(text)} |\n" for name, text in commands.items()],
    ]
    sections: dict[str, click.Command] = {}
    for name in commands:
        command = group.get_command(context, name)
        assert command is not None
        sections[f"## {name}"] = command
        if isinstance(command, click.Group):
            sections |= {f"### {name} {below}": one for below, one in command.commands.items()}
    num_commands = Counter(_option_row(one, context) for command in sections.values() for one in command.params)
    shared = [row for row, count in num_commands.items() if count > 1]
    parts += [f"\n{title}\n{_command_section(one, context, shared)}" for title, one in sections.items()]
    parts.append("\n## Options of several commands\n" + _OPTIONS + "".join(shared))
    return "".join(parts)


_OPTIONS = "\n| option (default) | meaning |\n| --- | --- |\n"


def _command_section(command: click.Command, context: click.Context, shared: Collection[str]) -> str:
    """Return what a command does, and its options: in full if no other command has the same ones."""
    rows = {one: _option_row(one, context) for one in command.params}
    own = [row for row in rows.values() if row not in shared]
    section = f"\n{_cell(command.help or '')}\n" + (_OPTIONS + "".join(own) if own else "")
    names = [f"`{one.opts[0]}`" for one, row in rows.items() if row in shared]
    return section + (f"\n[Also](#options-of-several-commands): {', '.join(names)}.\n" if names else "")


def _option_row(parameter: click.Parameter, context: click.Context) -> str:
    record: Any = parameter.to_info_dict()
    metavar = parameter.make_metavar(context)
    if not isinstance(parameter, click.Option):
        default = "required" if parameter.required and parameter.nargs == 1 else ""
        text = parameter.text if isinstance(parameter, Argument) else "argument"
        return f"| {_code(metavar)}{_bracketed(default)} | {_cell(text)} |\n"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if not record.get("is_flag"):
        names += " " + _code(metavar)
    text = " ".join((parameter.help or "").split())
    default = ""
    found = re.search(r"\s*\[default: ([^\]]*)\]$", text)
    if found:
        default, text = found[1], text[: found.start()]
    elif parameter.required:
        default = "required"
    elif parameter.default not in (None, False) and "UNSET" not in repr(parameter.default):
        default = _code(str(parameter.default))
    if isinstance(parameter.show_default, str):
        default = parameter.show_default
    return f"| {names}{_bracketed(_cell(default))} | {_cell(text)} |\n"


def _bracketed(default: str) -> str:
    """Return a default in brackets, to stand behind the name; "" if there is none."""
    return f" ({default})" if default else ""


def _code(text: str) -> str:
    """Return `text` as code in a cell; a bar in backticks ends the cell on GitHub and shows its escape in mkdocs."""
    return f'<code class="choices">{text.replace("|", "&#124;<wbr>")}</code>' if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    """Return `text` as one line of Markdown; names of flags as code."""
    text = " ".join(text.split())
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece
        if piece.startswith("`")
        else re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", piece)
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("<", "&lt;")
        for piece in pieces
    )


def main() -> int:
    """Write the pages; return 0."""
    (DOCS / "flags.md").write_text(flags_page(), encoding="utf-8")
    (DOCS / "command.md").write_text(command_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
