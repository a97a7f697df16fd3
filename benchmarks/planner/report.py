"""Markdown tables, and their places in a document between marker comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
"""One line of a table, as it stands in the JSON file."""


def table(header: str, rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """Return a Markdown table; columns after the first `left` are aligned to the right."""
    names = [name.strip() for name in header.split("|")]
    lines = [" | ".join(names), " | ".join("---" if column < left else "---:" for column in range(len(names)))]
    lines += [" | ".join(str(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def percent(share: float, digits: int = 0) -> str:
    """Return `share` in percent."""
    return f"{100 * share:.{digits}f}%"


def inserted(document: str, tables: Mapping[str, str]) -> str:
    """Return `document` with each table between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: a table has no place.
    """
    for name, text in tables.items():
        place = re.compile(rf"(<!-- begin {re.escape(name)} -->).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
        document, count = place.subn(lambda found, text=text: f"{found[1]}\n{text}\n{found[2]}", document)
        if count != 1:
            raise ValueError(f"the document has {count} places for table {name!r}, it needs 1: add the two markers")
    return document
