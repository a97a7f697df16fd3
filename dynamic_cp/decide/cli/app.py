"""The group of subcommands, and how an error becomes one line on stderr and an exit status."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from dynamic_cp.errors import DynamicCPError, IllegalPlanError

EXIT_NO_OUTPUT = 1
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ESTALE)
"""errno of a failed write to an open file."""
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
COMMAND_GROUP = "dynamic_cp.commands"
"""Entry points of commands that need more than this package; each names a click.Command."""

COMMANDS = {
    "lengths": "Describe lengths: quantiles, and the share of each class of lengths.",
    "plan": "Plan one global batch and predict its time.",
    "check": "Judge a plan that `plan --output` wrote.",
    "simulate": "Compare policies on several global batches: does dynamic CP pay?",
    "sweep": "Search TP, PP, VPP, limits and recomputation for some GPUs.",
    "trace": "Write a timeline for Perfetto or chrome://tracing.",
    "report": "Write one HTML file with pictures, tables and inputs.",
    "hardware": "Print a hardware file with its sources, ready to edit.",
    "doctor": "Check the installation and say how to fix it.",
    "first-day": "Check, calibrate and train on this node; predicted beside measured.",
    "completion": "Print the script that completes options in your shell.",
}
"""Subcommand -> its line of help, in the order of first use. `_ELSEWHERE` names those that are not in cli/NAME.py."""
_ELSEWHERE = {
    **{name: f"dynamic_cp.decide.cli.inspect:{name}" for name in ("check", "hardware", "doctor", "completion")},
    **{name: f"dynamic_cp.decide.cli.pages:{name}" for name in ("report", "trace")},
    "first-day": "dynamic_cp.decide.first_day.command:command",
}

TRAINING_COMMANDS = {
    "profile": "Measure this device and write a hardware file (needs torch).",
    "weights": "Convert weights from and to Hugging Face (needs torch).",
}
"""Commands of COMMAND_GROUP that this project brings -> their line of help, known without an import."""


class LazyGroup(click.Group):
    """Imports a subcommand when it is called, so that --help starts at once."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. A reader that closes the pipe is no failure; click would exit with 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            return 0

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Return the context; --help and --version print here, so the pipe may close here, too."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError as error:
            _drop_output()
            raise click.exceptions.Exit(0) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(name for name in _entry_points() if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in COMMANDS:
            module, _, name = _ELSEWHERE.get(cmd_name, f"dynamic_cp.decide.cli.{cmd_name}:command").partition(":")
            found: click.Command = getattr(importlib.import_module(module), name)
            found.short_help = COMMANDS[cmd_name]
            return found
        if cmd_name not in _entry_points():
            return None
        try:
            other: click.Command = _entry_points()[cmd_name].load()
        except ImportError as error:
            raise click.ClickException(
                f"{cmd_name} needs what is not installed ({error}): pip install 'megatron-dynamic-cp[train]'"
            ) from error
        return other

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, subcommand, its arguments); UsageError: an unknown name, with the nearest one."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx))
            hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"there is no command {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing any."""
        rows = [*COMMANDS.items()]
        for name, entry in _entry_points().items():
            if name not in COMMANDS:
                rows.append((name, TRAINING_COMMANDS.get(name, f"From {entry.value}.")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    found = importlib.metadata.entry_points(group=COMMAND_GROUP)
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name)}


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Does dynamic CP pay for these lengths on this cluster?
  dynamic-cp simulate --lengths github --global-batch-size 256 --lanes 16 --tp 2
Which settings suit 64 GPUs?
  dynamic-cp sweep --lengths github --global-batch-size 512 --gpus 64
""",
)
@click.version_option(package_name="megatron-dynamic-cp", prog_name="dynamic-cp")
def group() -> None:
    """Plan dynamic context parallelism without a GPU: every micro-batch gets its own CP size.

    Every figure is a prediction by a cost model and an exact simulator of the pipeline schedule. `dynamic-cp COMMAND
    --help` has the options and examples of each command.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0; 130 when interrupted; after one line on stderr, 2 for bad input or
    an illegal plan, 1 if stdout cannot be written."""
    _stand_in_for_closed_stdout()
    _print_what_the_terminal_can()
    try:
        status = _run(None if argv is None else list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:  # files that are read and written have errors of their own: what is left is stdout
        if error.errno not in _WRITE_ERRORS:
            raise
        _drop_output()
        return _fail(f"cannot write to stdout: {error.strerror or error}: choose another place", EXIT_NO_OUTPUT)


def _run(arguments: list[str] | None) -> int:
    try:
        status = group.main(args=arguments, prog_name="dynamic-cp", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        return EXIT_BAD_INPUT
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "dynamic-cp"
        message = " ".join(error.format_message().split()).rstrip(".")
        return _fail(f"{message} ({path} --help lists the options)")
    except click.ClickException as error:
        return _fail(error.format_message())
    except IllegalPlanError as error:
        first_line, *grid = str(error).splitlines()
        click.echo("\n".join(grid), nl=bool(grid))
        return _fail(f"illegal plan: {first_line}")
    except DynamicCPError as error:
        return _fail(" ".join(str(error).split("\n")))
    except click.Abort:
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """Send what is left of the output nowhere, or Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError):  # no real file: a test's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stand_in_for_closed_stdout() -> None:
    """Make a closed stdout (None) fail on writing, as a full one does; nothing else may get its file number."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")


def _print_what_the_terminal_can() -> None:
    """Print `?` for a character that a stream cannot show, instead of ending in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(message: str, status: int = EXIT_BAD_INPUT) -> int:
    _say(f"dynamic-cp: error: {message}")
    return status


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told that stderr is full
        click.echo(text, err=True)
