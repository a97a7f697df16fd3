"""Pictures of lengths and lanes: how lengths spread, how evenly lanes work, which CP size is best for which length.

`knee`: with more lanes a long sample runs faster, but chunks (S / 2cp tokens) fill kernels worse, and at the knee the
exchange no longer hides behind computing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.decide.report.drawing import (
    DASHED,
    MEDIUM_IN,
    SMALL_PT,
    add_handles,
    add_legend,
    format_count,
    format_s,
    format_tokens,
    new_figure,
    time_unit,
)
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.work import batch_flops, length_sums, squared_tokens
from dynamic_cp.types import Hardware, ModelShape, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_SEQLENS = tuple(1 << power for power in range(10, 19))
_MAX_POINTS, _MAX_CURVES = 512, 8


def length_histogram(seqlens: Iterable[int], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of `seqlens` (tokens): how samples, tokens and attention work (sum of S^2, causal) spread, a
    bar per doubling of the length. InvalidInputError: there are no lengths."""
    lengths = np.fromiter(seqlens, np.int64)
    if not lengths.size:
        raise InvalidInputError("a histogram of 0 lengths has no bars: give at least 1")
    edges, shares = length_shares(lengths)
    figure = new_figure(width_in, 3.7)
    panels = figure.subplots(3, 1, sharex=True)
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
    """Return (powers of two that bound the buckets, shares of samples, tokens and squared tokens in each). A bucket
    holds its upper bound and not its lower one; that of 1 to 2 holds both. The first and the last are not empty."""
    exponents = np.frexp(np.maximum(1, lengths - 1).astype(np.float64))[1] - 1
    low, high = int(exponents.min()), int(exponents.max())
    edges: Ints = 1 << np.arange(low, high + 2, dtype=np.int64)
    values = lengths.astype(np.float64)
    weights = (np.ones_like(values), values, values**2)
    counts = [np.bincount(exponents - low, weight, high - low + 1) for weight in weights]
    return edges, (counts[0] / counts[0].sum(), counts[1] / counts[1].sum(), counts[2] / counts[2].sum())


def imbalance(
    lane_busy_s: Sequence[tuple[str, Sequence[float]]], theme: Theme, *, width_in: float = MEDIUM_IN
) -> Figure:
    """Return the picture of (policy, `Timeline.lane_busy_s`) pairs: lanes from busiest to idlest, means dashed. Beyond
    512 lanes a curve goes through 512 of them, ends included."""
    figure = new_figure(width_in, 2.9 + 0.2 * len(lane_busy_s))
    panel = figure.subplots()
    longest_s = max(max(busy_s) for _, busy_s in lane_busy_s)
    factor, unit = time_unit(longest_s)
    for index, (name, busy_s) in enumerate(lane_busy_s):
        ordered = np.sort(np.asarray(busy_s, np.float64))[::-1]
        mean_s = float(ordered.mean())
        color = theme.series_color(index)
        points = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).round().astype(int))
        # A lane is a step to the next place, so that one lane alone is a line as well.
        places = np.append(points, len(ordered)) / len(ordered) * 100
        heights = np.append(ordered[points], ordered[-1]) * factor
        ratio = ordered[0] / mean_s if mean_s else 1.0
        label = f"{name}: busiest {format_s(ordered[0])}, mean {format_s(mean_s)}, max/mean {ratio:.2f}"
        panel.step(places, heights, where="post", color=color, linewidth=1.8, label=label)
        panel.axhline(mean_s * factor, color=color, linewidth=1, linestyle=DASHED)
    panel.set_ylim(0, 1.08 * longest_s * factor or 1)
    panel.set_xlim(0, 100)
    panel.grid(axis="y")
    lanes = {len(busy_s) for _, busy_s in lane_busy_s}
    of = f" of {lanes.pop()}" if len(lanes) == 1 else ""
    panel.set_xlabel(f"lanes{of}, from busiest to idlest (%)")
    panel.set_ylabel(f"busy time of a lane ({unit})")
    figure.legend(loc="outside lower left", ncols=1, handlelength=1.4, fontsize=SMALL_PT)
    return figure


def part_bars(times: Sequence[tuple[str, Mapping[str, float]]], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of (name, part -> seconds) pairs: a bar each, of its parts one behind the other."""
    figure = new_figure(width_in, 1.3 + 0.45 * len(times))
    panel = figure.subplots()
    factor, unit = time_unit(max(sum(parts.values()) for _, parts in times))
    names = list(dict.fromkeys(part for _, parts in times for part in parts))
    colors = {name: theme.series_color(index) for index, name in enumerate(names)}
    for place, (_, parts) in enumerate(times):
        ends = np.cumsum([0.0, *parts.values()]) * factor
        panel.barh(place, np.diff(ends), left=ends[:-1], height=0.6, color=[colors[part] for part in parts])
        label, points = format_s(ends[-1] / factor), "offset points"
        panel.annotate(label, (ends[-1], place), (4, 0), textcoords=points, va="center", fontsize=SMALL_PT)
    panel.set_yticks(range(len(times)), [name for name, _ in times])
    panel.set_ylim(len(times) - 0.5, -0.5)
    panel.margins(x=0.12)
    panel.set_xlabel(f"time ({unit})")
    add_legend(figure, list(colors.items()), width_in=width_in)
    return figure


class KneePoint(NamedTuple):
    """One sample alone on `cp_size` lanes: seconds of forward and backward on all stages, model FLOPs utilisation."""

    seqlen: int
    cp_size: int
    seconds: float
    mfu: float
    fits: bool


def knee_points(
    model: ModelShape, hardware: Hardware, cost_model: CostModel, seqlens: Sequence[int] = DEFAULT_SEQLENS
) -> tuple[KneePoint, ...]:
    """Return a point for every length and CP size that an exchange of the options serves, on the first lanes. A point
    `fits` if the CP size holds the sample at the token limit."""
    topology = cost_model.topology
    points = []
    for k, capacity in enumerate(cost_model.table.capacities.tolist()):
        cp_size = 1 << k
        if not capacity:
            continue
        for seqlen in seqlens:
            padded = -(-seqlen // (2 * cp_size)) * 2 * cp_size if cp_size > 1 else seqlen
            sample = Sample(sample_id=0, seqlen=seqlen)
            cost = cost_model.cost(cp_size, 0, padded, squared_tokens([sample], [padded], model))
            seconds = topology.pp_size * (cost.forward_s + cost.backward_s)
            seconds += cost.embedding_forward_s + cost.embedding_backward_s + cost.head_forward_s + cost.head_backward_s
            flops = batch_flops(model, *length_sums([sample], model)).model_flops
            mfu = flops / (seconds * cp_size * topology.tp_size) / hardware.peak_flops_per_s
            points.append(KneePoint(seqlen, cp_size, seconds, mfu, seqlen <= capacity))
    return tuple(points)


def knee(points: Sequence[KneePoint], theme: Theme, *, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of `knee_points`: MFU against length, a curve per CP size; filled dots fit the token limit."""
    figure = new_figure(width_in, 3.3 if width_in > 4.5 else 3.6)
    panel = figure.subplots()
    _draw_mfu(panel, points, theme)
    handles = [handle for handle in panel.lines if not str(handle.get_label()).startswith("_")]
    about = "CP size (filled: fits the token limit; broad: best of these)"
    add_handles(figure, handles, width_in=width_in, title=about)
    return figure


def _draw_mfu(panel: Axes, points: Sequence[KneePoint], theme: Theme) -> None:
    sizes = sorted({point.cp_size for point in points})[:_MAX_CURVES]
    for cp_size in sizes:
        color = theme.cp_color(cp_size)
        curve = [point for point in points if point.cp_size == cp_size]
        # A muted edge, because the palest colours are made for bars and would be lost as thin lines.
        for line_color, linewidth in ((theme.muted, 2.6), (color, 1.6)):
            panel.plot(
                [point.seqlen for point in curve], [100 * point.mfu for point in curve], color=line_color,
                linewidth=linewidth,
            )  # fmt: skip
        for fits in (True, False):
            marked = [point for point in curve if point.fits == fits]
            face = color if fits else theme.background
            panel.plot(
                [point.seqlen for point in marked], [100 * point.mfu for point in marked], linestyle="none",
                marker="o", markersize=4.5, color=theme.muted, markerfacecolor=face, markeredgewidth=0.6,
                label=f"{cp_size}" if fits else None,
            )  # fmt: skip
    seqlens = sorted({point.seqlen for point in points})
    best = {seqlen: [point.mfu for point in points if point.seqlen == seqlen and point.fits] for seqlen in seqlens}
    envelope = [(seqlen, 100 * max(mfus)) for seqlen, mfus in best.items() if mfus]
    panel.plot(
        [seqlen for seqlen, _ in envelope], [mfu for _, mfu in envelope], color=theme.grid, linewidth=9,
        solid_capstyle="round", zorder=1,
    )  # fmt: skip
    panel.set_xscale("log", base=2)
    step = -(-len(seqlens) // 9)
    panel.set_xticks(seqlens[::step], [format_tokens(seqlen) for seqlen in seqlens[::step]])
    panel.minorticks_off()
    panel.grid()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("length of a sample alone (tokens)")
    panel.set_ylabel("model FLOPs utilisation (% of peak)")
