"""Draws the concept drawings of the documentation into docs/drawings; the same bytes every time.

python -m tools.make_drawings [--output DIR]

They explain words (lane, bucket, zigzag, quota), so their numbers are made up but add up. What a planner makes of real
lengths is drawn by tools/make_pictures.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from dynamic_cp.decide.report.theme import THEMES, Theme

DRAWINGS = Path(__file__).resolve().parents[1] / "docs" / "drawings"
WIDTH = 600
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Canvas:
    """Collects the shapes of one drawing, in pixels from the top left corner."""

    def __init__(self, theme: Theme, height: int, title: str) -> None:
        self.theme = theme
        self._height = height
        self._title = title
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        ink: str = "",
        size: int = 14,
        edge: str = "",
    ) -> None:
        """Add a rectangle with a text in its middle."""
        stroke = edge or self.theme.background
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.36, text, ink or self.theme.ink, size, anchor="middle")

    def half_box(self, x: float, y: float, side: float, fill: str) -> None:
        """Add the lower left half of a square."""
        points = f"{x:g},{y:g} {x:g},{y + side:g} {x + side:g},{y + side:g}"
        self._shapes.append(f'<polygon points="{points}" fill="{fill}"/>')

    def text(
        self, x: float, y: float, text: str, ink: str = "", size: int = 14, *, anchor: str = "start", bold: bool = False
    ) -> None:
        """Add a line of text; y is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="{ink or self.theme.ink}" font-size="{size}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, ink: str = "", *, dashed: bool = False) -> None:
        """Add a line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink or self.theme.muted}" '
            f'stroke-width="1.5"{dash}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, ink: str = "") -> None:
        """Add a vertical or horizontal line with a head at its end."""
        ink = ink or self.theme.muted
        self.line(x1, y1, x2, y2, ink)
        if x1 == x2:
            back = -7 if y2 > y1 else 7
            points = f"{x2:g},{y2:g} {x2 - 4:g},{y2 + back:g} {x2 + 4:g},{y2 + back:g}"
        else:
            back = -7 if x2 > x1 else 7
            points = f"{x2:g},{y2:g} {x2 + back:g},{y2 - 4:g} {x2 + back:g},{y2 + 4:g}"
        self._shapes.append(f'<polygon points="{points}" fill="{ink}"/>')

    def arc(self, x1: float, x2: float, y: float, depth: float, ink: str = "") -> None:
        """Add a curve between two points of one height; `depth` pixels below it, or above if negative."""
        middle = (x1 + x2) / 2
        self._shapes.append(
            f'<path d="M{x1:g},{y:g} Q{middle:g},{y + 2 * depth:g} {x2:g},{y:g}" fill="none" '
            f'stroke="{ink or self.theme.muted}" stroke-width="1.2"/>'
        )

    def bucket(self, x: float, y: float, width: float, height: float, cp_size: int, text: str, size: int = 14) -> None:
        """Add a bucket in the colour of its CP size."""
        index = min(cp_size.bit_length() - 1, len(self.theme.cp_sizes) - 1)
        self.box(x, y, width, height, self.theme.cp_sizes[index], text, self.theme.cp_inks[index], size)

    def svg(self) -> str:
        """Return the file; it has no ground, so that of the page shows."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" role="img" font-family="{escape(FONT)}">\n'
            f"<title>{escape(self._title)}</title>\n" + "\n".join(self._shapes) + "\n</svg>\n"
        )


def _lane_names(canvas: Canvas, y: float, height: float, num_lanes: int) -> None:
    for lane in range(num_lanes):
        canvas.text(52, y + (lane + 0.5) * height + 5, f"lane {lane}", canvas.theme.muted, 13, anchor="end")


def one_cp_size(theme: Theme) -> str:
    """The same samples with one CP size for all, and with one for each bucket."""
    canvas = Canvas(theme, 396, "One CP size for all samples against one for each bucket")
    canvas.text(0, 18, "One CP size for all: 4, because the longest sample needs it", bold=True)
    left, lane = 60, 28
    _lane_names(canvas, 30, lane, 4)
    x = left
    for width, name in ((170, "long"), (81, "a"), (76, "b"), (76, "c"), (32, "d"), (32, "e")):
        canvas.bucket(x, 30, width, 4 * lane, 4, name)
        x += width
    end = x
    canvas.text(left, 162, "The short ones are cut in four as well: 3/4 of their keys and values", theme.muted, 13)
    canvas.text(left, 180, "travel, attention works on small pieces, no group runs beside another.", theme.muted, 13)
    canvas.text(0, 224, "A CP size for every bucket", bold=True)
    top = 236
    _lane_names(canvas, top, lane, 4)
    canvas.bucket(left, top, 170, 4 * lane, 4, "long")
    x = left + 170
    canvas.bucket(x, top, 128, 2 * lane, 2, "a")
    canvas.bucket(x + 128, top, 96, lane, 1, "d")
    canvas.bucket(x + 128, top + lane, 96, lane, 1, "e")
    canvas.bucket(x, top + 2 * lane, 224, lane, 1, "b")
    canvas.bucket(x, top + 3 * lane, 224, lane, 1, "c")
    canvas.line(end, 24, end, 368, dashed=True)
    canvas.line(x + 224, top - 8, x + 224, 368, dashed=True)
    canvas.arrow(end - 2, 362, x + 226, 362)
    canvas.text(left, 384, "time →", theme.muted, 13)
    for index, cp_size in enumerate((1, 2, 4)):
        canvas.bucket(left + 80 + 76 * index, 371, 66, 18, cp_size, f"CP {cp_size}", 12)
    return canvas.svg()


def words(theme: Theme) -> str:
    """Lanes, buckets, micro-batches and CP groups."""
    canvas = Canvas(theme, 330, "Lanes, buckets, micro-batches and CP groups")
    left, top, lane, column = 112, 40, 46, 116
    for index in range(4):
        canvas.text(left + (index + 0.5) * column, 30, f"micro-batch {index}", theme.muted, 13, anchor="middle")
    for index in range(4):
        y = top + index * lane
        canvas.text(0, y + 20, f"lane {index}")
        canvas.text(0, y + 36, f"ranks {2 * index}, {2 * index + 1}", theme.muted, 12)
    places = (
        (0, 0, 4, "sample 7", "32k tokens"),
        (1, 0, 2, "sample 3", "12k"),
        (1, 2, 2, "samples 5, 9", "7k + 5k"),
        (2, 0, 1, "samples 1, 4", "4k + 3k"),
        (2, 1, 1, "sample 0", "7k"),
        (2, 2, 2, "sample 8", "13k"),
        (3, 0, 1, "sample 2", "6k"),
        (3, 1, 1, "6, 10, 11", "3k + 2k + 1k"),
        (3, 2, 1, "sample 12", "6k"),
    )
    for column_index, first, cp_size, name, tokens in places:
        x, y, height = left + column_index * column, top + first * lane, cp_size * lane
        canvas.bucket(x + 1, y, column - 2, height, cp_size, "")
        ink = theme.cp_inks[cp_size.bit_length() - 1]
        canvas.text(x + column / 2, y + height / 2 - 2, name, ink, 13, anchor="middle")
        canvas.text(x + column / 2, y + height / 2 + 14, tokens, ink, 12, anchor="middle")
    canvas.box(left + 3 * column + 1, top + 3 * lane, column - 2, lane, theme.empty, "padding only", size=12)
    y = top + 4 * lane + 26
    canvas.text(0, y, "A bucket is a box: a pack of samples on cp_size neighbouring lanes, its CP group.", size=13)
    canvas.text(
        0, y + 22, "Colours are CP sizes 1, 2 and 4. With TP 2 a lane is two ranks; with a pipeline each", size=13
    )
    canvas.text(0, y + 44, "stage has these lanes, and a bucket runs on the same lanes of every stage.", size=13)
    canvas.text(0, y + 66, "13 samples, 4 micro-batches: one plan for one global batch.", theme.muted, 13)
    return canvas.svg()


def zigzag(theme: Theme) -> str:
    """Which chunks of a sample a lane holds, and why their attention work is equal."""
    canvas = Canvas(theme, 372, "Zigzag: each lane holds an early and a late chunk of a sample")
    colors = (theme.cp_sizes[0], theme.cp_sizes[1], theme.cp_sizes[2], theme.cp_sizes[3])
    inks = (theme.cp_inks[0], theme.cp_inks[1], theme.cp_inks[2], theme.cp_inks[3])
    canvas.text(0, 18, "A sample at CP 4: 2 · 4 = 8 chunks; lane i holds chunks i and 7 - i", bold=True)
    for chunk in range(8):
        owner = min(chunk, 7 - chunk)
        canvas.box(chunk * 75, 30, 75, 32, colors[owner], f"{chunk}", inks[owner])
        canvas.text(chunk * 75 + 37, 80, f"lane {owner}", theme.muted, 12, anchor="middle")
    left, top, cell = 0, 118, 29
    canvas.text(left, 108, "Attention work: chunk (row) × keys (column)", theme.muted, 13)
    for row in range(8):
        owner = min(row, 7 - row)
        for column in range(row + 1):
            x, y = left + column * cell, top + row * cell
            if column < row:
                canvas.box(x, y, cell, cell, colors[owner])
            else:
                canvas.box(x, y, cell, cell, theme.empty)
                canvas.half_box(x + 1, y + 1, cell - 2, colors[owner])
    x = 292
    canvas.text(x, 136, "Causal attention: a token looks back.", size=14)
    canvas.text(x, 156, "Late chunks have more to look at.", size=14)
    for owner in range(4):
        y = 178 + owner * 34
        low, high = owner + 0.5, 7 - owner + 0.5
        canvas.box(x, y, low * 20, 24, colors[owner])
        canvas.box(x + low * 20, y, high * 20, 24, colors[owner])
        canvas.text(x + 8 * 20 + 8, y + 17, f"lane {owner}: {low:g} + {high:g} = 8", size=12)
    canvas.text(x, 334, "Each lane does the same work.", size=14)
    canvas.text(x, 354, "A sample is padded to 2 · CP tokens.", theme.muted, 13)
    return canvas.svg()


def quotas(theme: Theme) -> str:
    """A lane's fair share of the work, which decides which samples are spread."""
    canvas = Canvas(theme, 340, "The quota of a lane decides the CP size of a sample")
    seconds = (8.4, 3.6, 2.0, 1.6, 1.2, 1.0, 0.8, 0.6, 0.4, 0.4)
    base, scale, left, width = 250, 24, 30, 30
    quota = sum(seconds) / 4
    canvas.text(0, 18, "Work of each sample, and the quota of a lane", bold=True)
    for index, value in enumerate(seconds):
        cp_size = {0: 4, 1: 2}.get(index, 1)
        x = left + index * (width + 4)
        canvas.bucket(x, base - value * scale, width, value * scale, cp_size, "")
        canvas.text(x + width / 2, base + 16, f"{cp_size}", theme.muted, 12, anchor="middle")
    canvas.line(left - 8, base - quota * scale, left + 10 * (width + 4), base - quota * scale, theme.ink, dashed=True)
    canvas.text(
        left + 10 * (width + 4) - 4, base - quota * scale - 8, "quota = all work / 4 lanes", size=13, anchor="end"
    )
    canvas.text(left, base + 34, "CP size of each sample", theme.muted, 12)
    x0, bar = 412, 36
    lanes = (
        ((4, 2.1), (2, 1.8), (1, 0.6), (1, 0.4)),
        ((4, 2.1), (2, 1.8), (1, 0.8), (1, 0.4)),
        ((4, 2.1), (1, 1.6), (1, 1.2)),
        ((4, 2.1), (1, 2.0), (1, 1.0)),
    )
    for index, parts in enumerate(lanes):
        canvas.text(x0 + index * (bar + 6) + bar / 2, base + 16, f"lane {index}", theme.muted, 12, anchor="middle")
        y = float(base)
        for cp_size, value in parts:
            y -= value * scale
            canvas.bucket(x0 + index * (bar + 6), y, bar, value * scale, cp_size, "")
    canvas.line(x0 - 8, base - quota * scale, x0 + 4 * (bar + 6), base - quota * scale, theme.ink, dashed=True)
    canvas.text(
        0, base + 60, "The longest sample alone would keep one lane busy for longer than the quota: it", size=13
    )
    canvas.text(
        0, base + 78, "gets as many lanes as it needs, no more. Short samples stay whole and level the rest.", size=13
    )
    return canvas.svg()


def ahead(theme: Theme) -> str:
    """What each process does two steps ahead."""
    canvas = Canvas(theme, 290, "Planning ahead: while step k trains, step k + 2 is planned")
    left, step = 132, 152
    rows = ("planner process", "rank 0's thread", "each rank's threads", "all ranks")
    for row, name in enumerate(rows):
        y = 40 + row * 52
        canvas.text(0, y + 22, name, size=13)
        canvas.line(left, y + 42, 598, y + 42, theme.grid)
    for index in range(3):
        x = left + index * step
        label = "k" if index == 0 else f"k + {index}"
        canvas.text(x + step / 2, 24, f"while step {label} trains", theme.muted, 12, anchor="middle")
        ahead_label = f"k + {index + 2}"
        canvas.box(x + 4, 42, 62, 34, theme.series[0], f"plan {ahead_label}", theme.background, 11)
        canvas.box(x + 68, 94, 54, 34, theme.series[2], "publish", theme.background, 11)
        canvas.box(x + 78, 146, 70, 34, theme.series[1], "fetch, pack", theme.background, 11)
        canvas.box(x + 2, 198, step - 4, 34, theme.cp_sizes[2], f"step {label} runs", theme.cp_inks[2], 11)
    for index in range(4):
        x = left + index * step
        canvas.line(x, 34, x, 240, theme.muted, dashed=True)
    canvas.text(0, 262, "Between two steps stands one exchange of 24 bytes: all ranks have the same plan,", size=13)
    canvas.text(0, 280, "or the same error. Lengths come from an index: nothing is read in order to plan.", size=13)
    return canvas.svg()


_LANE_X = tuple(158 + 56 * lane + 16 * (lane // 4) for lane in range(8))
"""Middle of lane 0 to 7; 0 to 3 are on one node."""


def _ring(canvas: Canvas, y: float, across: str) -> None:
    for lane in range(7):
        canvas.arrow(_LANE_X[lane] + 13, y, _LANE_X[lane + 1] - 13, y, across if lane == 3 else "")
    for x1, y1, x2, y2 in ((_LANE_X[7], y + 12, _LANE_X[7], y + 34), (_LANE_X[7], y + 34, _LANE_X[0], y + 34)):
        canvas.line(x1, y1, x2, y2, across)
    canvas.arrow(_LANE_X[0], y + 34, _LANE_X[0], y + 13, across)


def _gather(canvas: Canvas, y: float, across: str) -> None:
    for node in (0, 4):
        canvas.line(_LANE_X[node], y + 34, _LANE_X[node + 3], y + 34)
        for x in _LANE_X[node : node + 4]:
            canvas.arrow(x, y + 34, x, y + 13)
    canvas.line(_LANE_X[3], y + 34, _LANE_X[4], y + 34, across)


def _pairs(canvas: Canvas, y: float, across: str, *, between_nodes: bool) -> None:
    for first in range(8):
        for second in range(first + 1, 8):
            apart = _LANE_X[second] - _LANE_X[first]
            if first // 4 == second // 4:
                canvas.arc(_LANE_X[first], _LANE_X[second], y + 12, 6 + apart / 14)
            elif between_nodes:
                canvas.arc(_LANE_X[first], _LANE_X[second], y + 12, 6 + apart / 14, across)


def _all_to_all(canvas: Canvas, y: float, across: str) -> None:
    _pairs(canvas, y, across, between_nodes=True)


def _two_levels(canvas: Canvas, y: float, across: str) -> None:
    _pairs(canvas, y, across, between_nodes=False)
    for lane in range(4):
        canvas.arc(_LANE_X[lane], _LANE_X[lane + 4], y - 12, -22, across)


def exchanges(theme: Theme) -> str:
    """What moves between the lanes of a CP group in each of the four exchanges, with bytes and steps."""
    canvas = Canvas(theme, 662, "Four ways to exchange among 8 lanes on two nodes")
    canvas.text(0, 18, "CP 8 on two nodes of 4 lanes: what a lane sends forward in one layer", bold=True)
    canvas.text(
        0, 38, "1 kv = keys and values of a lane's tokens. Multi-head attention: queries are half as much,", size=13
    )
    canvas.text(0, 55, "outputs, too. Every lane has a NIC of its own.", size=13)
    across = theme.series[1]
    rows = (
        ("p2p", "a ring", _ring, "7 steps of 1 kv, each behind the attention of the one before",
         "NIC: 7 kv over one of each node, one after the other"),
        ("all_gather", "all at once", _gather, "7 kv at once; attention waits for them",
         "NIC: priced as in p2p, 7 kv over one of each node"),
        ("a2a", "heads for tokens", _all_to_all, "2 all-to-alls (q, k, v; then outputs), 1.75 kv; attention waits",
         "NIC: 1 kv of it, over the lane's own"),
        ("a2a+p2p", "inner 4, outer 2", _two_levels, "2 all-to-alls in the node, 1.5 kv; between them a ring: 1 step",
         "NIC: 1 kv over the lane's own, hidden as in p2p"),
    )  # fmt: skip
    for index, (name, how, draw, steps, crossing) in enumerate(rows):
        top = 68 + index * 143
        y = top + 48
        canvas.line(0, top, WIDTH, top, theme.grid)
        canvas.text(0, y - 2, name, bold=True)
        canvas.text(0, y + 16, how, theme.muted, 12)
        for node in (0, 4):
            canvas.box(_LANE_X[node] - 24, y - 22, _LANE_X[3] - _LANE_X[0] + 48, 44, theme.band)
        draw(canvas, y, across)
        for lane, x in enumerate(_LANE_X):
            canvas.bucket(x - 13, y - 12, 26, 24, 8, f"{lane}", 13)
        canvas.text(_LANE_X[0] - 24, top + 113, steps, size=13)
        canvas.text(_LANE_X[0] - 24, top + 131, crossing, theme.muted, 13)
    canvas.line(0, 648, 24, 648, across)
    canvas.text(32, 652, "between the nodes", theme.muted, 12)
    canvas.line(160, 648, 184, 648)
    canvas.text(192, 652, "inside a node", theme.muted, 12)
    return canvas.svg()


ALL: dict[str, Callable[[Theme], str]] = {
    "one-cp-size": one_cp_size,
    "words": words,
    "zigzag": zigzag,
    "quotas": quotas,
    "ahead": ahead,
    "exchanges": exchanges,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw everything in both themes; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=DRAWINGS, metavar="DIR")
    output: Path = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    for theme_name in ("light", "dark"):
        for name, draw in ALL.items():
            (output / f"{name}-{theme_name}.svg").write_text(draw(THEMES[theme_name]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
