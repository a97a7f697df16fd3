"""How tables, numbers and bars look in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamic_cp.cli.console import can_draw

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    """Return a heading."""
    from rich.text import Text

    return Text(text, style="bold")


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
