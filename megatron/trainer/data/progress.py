"""Progress of a long scan: a bar on a terminal after a second, otherwise a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

BAR_AFTER_S = 1.0
LINE_EVERY_S = 5.0
TICK_EVERY_S = 0.5
WIDTH = 30  # of the text before a bar


class Progress:
    """Counts what is done; a context manager.

    Args:
        what: begins the line.
        total: amount to do, in `unit`.
        unit: "bytes" or what is counted.
        on_tick: called about twice a second while there is progress.
    """

    def __init__(self, what: str, total: int, unit: str, on_tick: Callable[[], None] | None = None) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._on_tick = on_tick
        self._done = 0
        self._started_s = self._line_s = self._tick_s = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: int) -> None:
        """Say that `amount` more is done."""
        self._done += amount
        now_s = time.monotonic()
        if now_s - self._tick_s < TICK_EVERY_S:
            return
        self._tick_s = now_s
        if self._on_tick is not None:
            self._on_tick()
        if sys.stderr.isatty():
            self._show_bar(now_s)
        elif now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            share = self._done / max(1, self._total)
            logger.info(
                "%s: %.0f %% of %d %s, %.0f s to go",
                self._what,
                100 * share,
                self._total,
                self._unit,
                (now_s - self._started_s) * (1 - share) / share if share else 0,
            )

    def _show_bar(self, now_s: float) -> None:
        if self._bar is None:
            if now_s - self._started_s < BAR_AFTER_S:
                return
            self._bar = _make_bar(self._unit == "bytes")
            what = self._what if len(self._what) <= WIDTH else "…" + self._what[-WIDTH:]
            self._bar.add_task(what, total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)


def _make_bar(counts_bytes: bool) -> Any:
    from rich import progress  # what is short shows no bar and needs no rich
    from rich.console import Console

    amounts = (
        [progress.DownloadColumn(), progress.TransferSpeedColumn()] if counts_bytes else [progress.MofNCompleteColumn()]
    )
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *amounts,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # no thread: there may be a fork
    )
