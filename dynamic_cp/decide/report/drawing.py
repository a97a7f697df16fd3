"""What all pictures share: one look, matplotlib imported at first use, and the same bytes for the same input. Only
matplotlib's object API is used and its settings are put back after every call: no global state, no display."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamic_cp.decide.files import write_whole
from dynamic_cp.decide.report.theme import CSS, Theme, with_variables
from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDE_IN, MEDIUM_IN, NARROW_IN = 8.4, 5.0, 4.0
"""Widths of a picture across a page, in half of it, and on a phone; text has the same size in all."""
FONT_PT, SMALL_PT = 9.0, 8.0
DASHED = (0, (4, 3))
"""Style of lines that mark a mean, or where two figures are equal."""
_DPI = 160
_FORMATS = (".png", ".svg")


class Rectangle(NamedTuple):
    """From (x0, y0) to (x1, y1) in data coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float


@contextmanager
def look(theme: Theme, *, transparent: bool = False) -> Iterator[None]:
    """Set colours and sizes for figures made and saved inside; afterwards the caller's settings are back. `transparent`
    shows the page behind instead of the theme's ground. UnsupportedFeatureError: matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"pictures need matplotlib ({error}): install the extra, pip install 'megatron-dynamic-cp[report]'"
        ) from error
    ground = "none" if transparent else theme.background
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "figure.facecolor": ground,
                "figure.constrained_layout.h_pad": 0.06,
                "axes.facecolor": ground,
                "axes.edgecolor": theme.grid,
                "axes.labelcolor": theme.ink,
                "axes.titlecolor": theme.ink,
                "axes.titlelocation": "left",
                "axes.titlesize": FONT_PT,
                "axes.labelsize": SMALL_PT,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "grid.color": theme.grid,
                "grid.linewidth": 0.7,
                "text.color": theme.ink,
                "xtick.color": theme.muted,
                "ytick.color": theme.muted,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "xtick.labelsize": SMALL_PT,
                "ytick.labelsize": SMALL_PT,
                "font.size": FONT_PT,
                "legend.fontsize": SMALL_PT,
                "legend.frameon": False,
                "savefig.facecolor": ground,
                "savefig.edgecolor": "none",
                "svg.fonttype": "none",
                "text.parse_math": False,
                "svg.hashsalt": "dynamic-cp",
            }
        )
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure; call it inside `look`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def stacked(
    width_in: float, heights_in: Sequence[float], *, each_in: float, rest_in: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with panels of `heights_in` one above the other, `each_in` more for each and `rest_in` for
    labels and legend; call it inside `look`. options: more of matplotlib's `subplots`."""
    figure = new_figure(width_in, sum(heights_in) + each_in * len(heights_in) + rest_in)
    panels = figure.subplots(len(heights_in), 1, squeeze=False, height_ratios=heights_in, **options)[:, 0]
    return figure, list(panels)


def name_cells(axis: Axis, names: Sequence[int], step: int) -> None:
    """Name every `step`-th cell of a map, at the middle of the cell."""
    places = range(0, len(names), step)
    axis.set_ticks([place + 0.5 for place in places], [str(names[place]) for place in places])


def frame_map(panel: Axes, *, first: float = 0.0, last_x: float, last_y: float) -> None:
    """Start a map in its upper left corner, without lines around it."""
    panel.set_xlim(first, last_x)
    panel.set_ylim(last_y, first)
    panel.spines[["left", "bottom"]].set_visible(False)
    panel.tick_params(length=2)


def save(path: str | Path, draw: Callable[[Theme], Figure], theme: Theme, *, transparent: bool = False) -> None:
    """Write `draw(theme)` to `path`, whole or not at all.

    Args:
        path: ends in .png or .svg.
        draw: draws a picture, such as `functools.partial(gantt, timelines)`.
        theme: `theme.LIGHT` or `theme.DARK`.
        transparent: show the page behind the picture, for pages as light or dark as the theme.

    Raises:
        InvalidInputError: another ending, or a place that cannot be written.
        UnsupportedFeatureError: matplotlib is not installed.
    """
    kind = Path(path).suffix.lower()
    if kind not in _FORMATS:
        raise InvalidInputError(
            f"{path} ends in {kind or 'nothing'}, pictures end in {' or '.join(_FORMATS)}: rename it"
        )
    if kind == ".png":
        write_whole(path, png_bytes(draw, theme, transparent=transparent))
    else:
        write_whole(path, svg_text(draw, theme, transparent=transparent).encode())


def png_bytes(draw: Callable[[Theme], Figure], theme: Theme, *, transparent: bool = False) -> bytes:
    """Return `draw(theme)` as PNG, 160 pixels an inch."""
    buffer = io.BytesIO()
    with look(theme, transparent=transparent):
        draw(theme).savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def svg_text(draw: Callable[[Theme], Figure], theme: Theme, *, transparent: bool = False) -> str:
    """Return `draw(theme)` as SVG that keeps text as text."""
    buffer = io.StringIO()
    with look(theme, transparent=transparent):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        draw(theme).savefig(buffer, format="svg", metadata=nothing)
    return _compact(buffer.getvalue())


def inline_svg(draw: Callable[[Theme], Figure], *, name: str, label: str) -> str:
    """Return an <svg> element in the colours of its HTML page. `name`, of letters and hyphens and used once on the
    page, begins all ids inside; `label` is for screen readers and escaped here."""
    from html import escape

    svg = with_variables(svg_text(draw, CSS))
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r' (?:xmlns(?::xlink)?|version)="[^"]*"', "", svg, count=3)
    svg = svg.replace("xlink:href", "href")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _compact(svg: str) -> str:
    """Return `svg` with two decimals in coordinates, bars as short paths, and without metadata. Text that is read, such
    as the number at a tick, keeps its digits."""
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _with_two_decimals, tag[0]), svg)
    number = r"(-?[\d.]+)"
    bar = rf"M {number} {number} \nL {number} \2 \nL \3 {number} \nL \1 \4 \nz\s*"
    svg = re.sub(bar, r"M\1 \2H\3V\4H\1z", svg)
    return re.sub(r"\n\s*", "\n", svg)


def _with_two_decimals(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def add_rectangles(axes: Axes, rectangles: Sequence[Rectangle], color: str, **style: Any) -> None:
    """Draw all `rectangles` as one path, so that thousands are one element of a file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if not rectangles:
        return
    corners = [
        corner
        for one in rectangles
        for corner in (
            (one.x0, one.y0), (one.x1, one.y0), (one.x1, one.y1), (one.x0, one.y1), (one.x0, one.y0)
        )
    ]  # fmt: skip
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(rectangles)
    # add_patch would look at every corner to find limits, which all pictures set themselves.
    axes.add_artist(PathPatch(Outline(corners, codes), facecolor=color, **{"linewidth": 0, **style}))


def add_legend(figure: Figure, entries: Sequence[tuple[str, str]], *, width_in: float, title: str = "") -> None:
    """Put a legend of (label, colour) patches under the picture."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=label) for label, color in entries]
    add_handles(figure, handles, width_in=width_in, title=title)


def add_handles(figure: Figure, handles: Sequence[Artist], *, width_in: float, title: str = "") -> None:
    """Put a legend of labelled artists under the picture, in as many rows as the width needs."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), int(width_in * 72 / (28 + 0.56 * SMALL_PT * longest))))
    rows = -(-len(handles) // columns)
    columns = -(-len(handles) // rows)
    # Legends fill column by column, but entries should be read row by row.
    by_column = [handles[index] for column in range(columns) for index in range(column, len(handles), columns)]
    figure.legend(
        handles=by_column, loc="outside lower left", ncols=columns, handlelength=1.1, columnspacing=1.4,
        title=title or None, title_fontsize=SMALL_PT, alignment="left",
    )  # fmt: skip


def time_unit(seconds: float) -> tuple[float, str]:
    """Return (factor, unit) that make `seconds` easy to read: s, ms or µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return factor, unit
    return 1e6, "µs"


def format_s(seconds: float) -> str:
    """Return seconds with three digits and a unit, not to be parted by a line break: 1.23 s, 45.6 ms."""
    factor, unit = time_unit(seconds) if seconds else (1.0, "s")
    number = f"{seconds * factor:#.3g}".rstrip(".") if 0 < seconds * factor < 999.5 else f"{seconds * factor:.0f}"
    return f"{number}\u00a0{unit}"


def format_count(value: float) -> str:
    """Return a number with three digits: 950, 12.0k, 4.56M; whole numbers below a thousand as they are."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:#.3g}".rstrip(".") + suffix
    return f"{value:#.3g}".rstrip(".") if value % 1 else f"{value:.0f}"


def format_bytes(num_bytes: float) -> str:
    """Return bytes with three digits and a unit, not to be parted by a line break: 950 B, 12.3 MB."""
    number = format_count(num_bytes)
    unit = "" if number[-1].isdigit() else number[-1]
    return f"{number.removesuffix(unit)}\u00a0{unit}B"


def format_tokens(tokens: int) -> str:
    """Return a number of tokens, multiples of 1024 in k or M: 512, 8k, 128k, 1M."""
    for factor, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens >= factor and tokens % factor == 0:
            return f"{tokens // factor}{suffix}"
    return format_count(tokens) if tokens >= 10_000 else str(tokens)
