"""The terminal: colours and progress bars where somebody watches, nothing but text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, what comes next)."""


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


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show a bar on stderr while work runs, if that is a terminal; it leaves nothing behind."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: it was closed
        yield lambda done, total, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=f"{what}: {text}")
