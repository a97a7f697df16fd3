"""How far a long scan is: a bar on a terminal after a second, else a line in the log every few seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

try:
    from tqdm import tqdm
except ImportError:  # without it a terminal gets the lines of the log
    tqdm = None

logger = logging.getLogger(__name__)

BAR_AFTER_S = 1.0
LINE_EVERY_S = 5.0
TICK_EVERY_S = 0.5


class Progress:
    """Counts what is done; a context manager.

    Args:
        what: begins the line.
        total: amount to do, in `unit`.
        on_tick: called about twice a second while there is progress.
    """

    def __init__(self, what: str, total: int, unit: str, on_tick: Callable[[], None] | None = None) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._on_tick = on_tick
        self._done = 0
        self._started_s = self._line_s = self._tick_s = time.monotonic()
        self._bar = None
        if tqdm is not None and sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=True, delay=BAR_AFTER_S, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: int) -> None:
        """Say that `amount` more is done."""
        self._done += amount
        now_s = time.monotonic()
        if self._on_tick is not None and now_s - self._tick_s >= TICK_EVERY_S:
            self._tick_s = now_s
            self._on_tick()
        if self._bar is not None:
            self._bar.update(amount)
        elif now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            rate = self._done / (now_s - self._started_s)
            logger.info(
                "%s: %d of %d %s (%d %%), %.0f s to go",
                self._what,
                self._done,
                self._total,
                self._unit,
                100 * self._done // max(1, self._total),
                (self._total - self._done) / rate if rate else 0,
            )
