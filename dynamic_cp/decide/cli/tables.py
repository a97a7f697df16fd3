"""The terminal: colours and progress bars where somebody watches, tables, numbers and bars; plain text in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import click

if TYPE_CHECKING:  # imported where something is shown, so that --help starts at once
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, what comes next)."""


def say_nothing(done: int, total: int, text: str) -> None:
    """Take what a `Progress` is told where nobody watches."""


def console() -> Console:
    """Return what writes to stdout; it honours NO_COLOR, COLUMNS and pipes."""
    from rich.console import Console

    class Pipeable(Console):
        """Leaves it to the command what a closed pipe means; rich would exit with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Pipeable(highlight=False, emoji=False, markup=False)


def can_draw(out: Console) -> bool:
    """Return whether `out` takes more than ASCII."""
    return out.encoding.lower().startswith("utf")


FIRST_LINE_S, EVERY_S = 10.0, 25.0
"""Without a terminal: when work first says how far it is, and how often then."""


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show a bar on stderr while work runs, which leaves nothing behind; without a terminal a line now and then."""
    if sys.stderr is None:  # it was closed
        yield say_nothing
        return
    if not sys.stderr.isatty():
        with _lines(what) as steps:
            yield steps
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{what}: {text}")


@contextmanager
def _lines(what: str) -> Iterator[Progress]:
    """Say on stderr how far it is, after FIRST_LINE_S and then each EVERY_S: a job's log shows that it works."""
    began_s, ended, latest = time.monotonic(), threading.Event(), [""]

    def watch() -> None:
        wait_s = FIRST_LINE_S
        while not ended.wait(wait_s):
            with suppress(OSError):  # nobody reads it
                click.echo(f"dynamic-cp: {what}{latest[0]}, {time.monotonic() - began_s:.0f} s", err=True)
            wait_s = EVERY_S

    def steps(done: int, total: int, text: str) -> None:
        latest[0] = f": {text}" + f", {done} of {total}" * (total > 1)

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield steps
    finally:
        ended.set()
        watcher.join()


_EIGHTHS = " ▏▎▍▌▋▊▉█"
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column: its head, its cell of what stands in a row, from which width of the terminal on it is shown."""

    name: str
    cell: Callable[[Row], str]
    from_width: int = 0


def table_of(
    rows: Iterable[Row],
    columns: Sequence[Column[Row]],
    out: Console,
    *,
    left: int = 1,
    is_bold: Callable[[Row], bool],
) -> Table:
    """Return the table of `rows` with the columns that `out` is wide enough for; others as in `make_table`."""
    shown = [column for column in columns if out.width >= column.from_width]
    table = make_table([column.name for column in shown], left=left)
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown), style="bold" if is_bold(row) else "")
    return table


def make_table(columns: Sequence[str], *, left: int = 1) -> Table:
    """Return an empty table with a line under its head; the first `left` columns are words, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="bold")
    for index, name in enumerate(columns):
        is_number = index >= left
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number and " " not in name, overflow="fold"
        )
    return table


def bar(share: float, width: int, out: Console) -> str:
    """Return a bar of `share` (0 .. 1) of `width` characters, as wide as its filled part."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    if not can_draw(out):
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def heading(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="bold")


def note(text: str) -> Text:
    """Return what may be missed."""
    from rich.text import Text

    return Text(text, style="dim")


def tokens(number: float) -> str:
    """Return a number of tokens in at most 5 characters or so: 512, 8k, 1.5M."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}G"
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    if number >= 1024 and number % 1024 == 0:
        return f"{number // 1024:.0f}k"
    return f"{number:.0f}"


def grouped(number: float) -> str:
    """Return a number with thin groups of thousands: 1 234 567."""
    return f"{number:,.0f}".replace(",", " ")


def gb(num_bytes: float | None) -> str:
    """Return a number of bytes in GB, without the unit; a dash where it is unknown."""
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.1f}"


def percent(share: float) -> str:
    """Return a share with one decimal; what is not zero does not look so."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def seconds(value: float) -> str:
    """Return seconds with 4 digits or so, with their unit."""
    if value >= 100:
        return f"{value:.1f} s"
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3g} ms" if value < 0.001 else f"{value * 1e3:.1f} ms"
