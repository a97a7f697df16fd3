"""How samples, tokens and attention work spread over sequence lengths: few are long and hold most of the work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.report.drawing import FONT_PT, MEDIUM_IN, SMALL_PT, format_count, format_tokens, new_figure
from dynamic_cp.report.theme import Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def length_histogram(seqlens: Iterable[int], theme: Theme, *, width_in: float = MEDIUM_IN, title: str = "") -> Figure:
    """Return the picture of `seqlens` (tokens): three rows of bars, one bar per doubling of the length.

    Attention work is the sum of S^2, as causal attention has it.

    Raises:
        InvalidInputError: there are no lengths.
    """
    lengths = np.fromiter(seqlens, np.int64)
    if not lengths.size:
        raise InvalidInputError("a histogram of 0 lengths has no bars: give at least 1")
    edges, shares = length_shares(lengths)
    figure = new_figure(width_in, 3.7 + (0.3 if title else 0.0))
    panels = figure.subplots(3, 1, sharex=True)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_PT + 2, fontweight="bold")
    squares = float((lengths.astype(np.float64) ** 2).sum())
    names = (
        f"samples ({format_count(len(lengths))})",
        f"tokens ({format_count(float(lengths.sum()))})",
        f"attention work (ΣS² = {format_count(squares)} tokens²)",
    )
    places = np.arange(len(edges) - 1)
    for index, (panel, name, share) in enumerate(zip(panels, names, shares, strict=True)):
        panel.bar(places, 100 * share, width=0.86, color=theme.series_color(index))
        panel.set_title(name, fontsize=SMALL_PT, pad=3)
        top = float(100 * share.max())
        panel.set_ylim(0, 1.28 * top)
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="x", length=0)
        for place, value in zip(places, 100 * share, strict=True):
            if value >= 0.5 and len(places) <= 16:
                panel.text(place, value + 0.03 * top, f"{value:.0f}%", ha="center", va="bottom", fontsize=SMALL_PT - 1)
    # Labels stand at the edges of bars: a bar goes from one power of two to the next.
    step = -(-len(edges) // (15 if width_in > 4.5 else 10))
    panels[-1].set_xticks(np.arange(len(edges))[::step] - 0.5, [format_tokens(int(edge)) for edge in edges[::step]])
    panels[-1].set_xlim(-0.75, len(places) - 0.25)
    panels[-1].set_xlabel("sequence length (tokens)")
    return figure


def length_shares(lengths: Ints) -> tuple[Ints, tuple[Floats, Floats, Floats]]:
    """Return (powers of two that bound the buckets, shares of samples, tokens and squared tokens in every bucket).

    A bucket holds its upper bound (limits are often powers of two) and not its lower one; that of 1 to 2 holds both.
    The first and the last hold at least one sample.
    """
    exponents = np.frexp(np.maximum(1, lengths - 1).astype(np.float64))[1] - 1
    low, high = int(exponents.min()), int(exponents.max())
    edges: Ints = 1 << np.arange(low, high + 2, dtype=np.int64)
    values = lengths.astype(np.float64)
    weights = (np.ones_like(values), values, values**2)
    counts = [np.bincount(exponents - low, weight, high - low + 1) for weight in weights]
    return edges, (counts[0] / counts[0].sum(), counts[1] / counts[1].sum(), counts[2] / counts[2].sum())
