"""The part of a comparison's page about placed attention: tiles, bytes by link, and the share of each lane."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.decide.report.drawing import (
    DASHED,
    MEDIUM_IN,
    SMALL_PT,
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    format_bytes,
    format_count,
    frame_map,
    name_cells,
    new_figure,
)
from dynamic_cp.decide.report.page import picture
from dynamic_cp.decide.report.placed_tiles import MAX_SAMPLES, placed_tiles, samples_by_work
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.decide.sent import nodes_of, sent_by_bucket
from dynamic_cp.mechanisms.placed_seconds import work_of_tiles
from dynamic_cp.placement.cuts import placement_under
from dynamic_cp.placement.sent import Sent
from dynamic_cp.types import Bucket, Causal, Full, Lambda, Mask, Placement, Plan, Problem, counted
from dynamic_cp.types.placement import LANE, Lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LayerMask = Causal | Full | Lambda
_MAX_CELLS = 32
"""Most lanes, or nodes, that a picture of bytes shows one by one; if there are more, neighbours share a cell."""
_MAX_BARS, _LEVELS = 64, 4
_NUMBER_PT = 36
"""Width in points of a cell that has room for a number of bytes."""


def placed_links(sent: Sent, nodes: Ints, theme: Theme, *, first_lane: int = 0, width_in: float = MEDIUM_IN) -> Figure:
    """Return the picture of the bytes that lanes of a bucket send each other, and nodes if there are several; `nodes`:
    [lane] -> its node, numbered from 0."""
    num_lanes, num_nodes = len(nodes), int(nodes.max()) + 1
    per_cell = -(-num_lanes // _MAX_CELLS)
    panels = [("lane", sent.between(np.arange(num_lanes) // per_cell), per_cell)]
    if num_nodes > 1:
        nodes_per_cell = -(-num_nodes // _MAX_CELLS)
        between = sent.between(nodes // nodes_per_cell)
        np.fill_diagonal(between, 0.0)
        panels.append(("node", between, nodes_per_cell))
    columns = len(panels) if width_in >= MEDIUM_IN else 1
    rows = len(panels) // columns
    side_in = min(3.0, width_in / columns - 0.55)
    figure = new_figure(width_in, rows * (side_in + 0.65) + 0.75)
    for panel, (what, grid, size) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        _draw(panel, grid, theme, has_numbers=side_in * 72 / len(grid) > _NUMBER_PT)
        _describe(panel, what, grid, size, first_lane if what == "lane" else 0)
        if what == "lane" and size == 1:
            for edge in (np.flatnonzero(np.diff(nodes)) + 1).tolist():
                panel.axhline(edge, color=theme.muted, linewidth=0.8)
                panel.axvline(edge, color=theme.muted, linewidth=0.8)
    steps = [(f"to {(level + 1) / _LEVELS:.0%}", theme.cp_sizes[level]) for level in range(_LEVELS)]
    add_legend(figure, steps, width_in=width_in, title="of the largest")
    return figure


def _draw(panel: Axes, grid: Floats, theme: Theme, *, has_numbers: bool) -> None:
    size, most = len(grid), float(grid.max())
    cells: dict[int, list[Rectangle]] = defaultdict(list)
    for sender, receiver in np.argwhere(grid > 0).tolist():
        level = min(_LEVELS - 1, int(_LEVELS * grid[sender, receiver] / most))
        cells[level].append(Rectangle(receiver, receiver + 1, sender, sender + 1))
        if has_numbers:
            text = format_bytes(float(grid[sender, receiver]))
            panel.text(
                receiver + 0.5, sender + 0.5, text, ha="center", va="center", fontsize=SMALL_PT - 1,
                color=theme.cp_inks[level],
            )  # fmt: skip
    add_rectangles(panel, [Rectangle(0, size, 0, size)], theme.band)
    for level, rectangles in sorted(cells.items()):
        add_rectangles(panel, rectangles, theme.cp_sizes[level], edgecolor=theme.background, linewidth=0.4)


def _describe(panel: Axes, what: str, grid: Floats, per_cell: int, first: int) -> None:
    size = len(grid)
    panel.set_title(f"from {what} to {what}: largest {format_bytes(float(grid.max()))}", fontsize=SMALL_PT)
    frame_map(panel, last_x=size, last_y=size)
    panel.set_aspect("equal")
    for axis in (panel.xaxis, panel.yaxis):
        name_cells(axis, range(first, first + size * per_cell, per_cell), -(-size // 8))
    of = f" (cells of {per_cell})" if per_cell > 1 else ""
    panel.set_xlabel(f"to {what}{of}")
    panel.set_ylabel(f"from {what}")


def placed_shares(
    bucket: Bucket,
    mask: LayerMask,
    sent: Sent,
    nodes: Ints,
    theme: Theme,
    *,
    windowed: tuple[float, LayerMask] | None = None,
    width_in: float = MEDIUM_IN,
) -> Figure:
    """Return the picture of `lane_shares` with max / mean; with many lanes a bar is the largest of neighbours."""
    shares = lane_shares(bucket, mask, sent, nodes, windowed)
    per_bar = -(-bucket.cp_size // _MAX_BARS)
    begins = np.arange(0, bucket.cp_size, per_bar)
    figure = new_figure(width_in, 3.6)
    panels = figure.subplots(len(shares), 1, sharex=True)
    for index, (panel, (name, values)) in enumerate(zip(panels, shares.items(), strict=True)):
        bars = np.maximum.reduceat(values, begins)
        rectangles = [
            Rectangle(begin, min(begin + per_bar, bucket.cp_size), 0.0, height)
            for begin, height in zip(begins.tolist(), bars.tolist(), strict=True)
        ]
        add_rectangles(panel, rectangles, theme.series_color(index), edgecolor=theme.background, linewidth=0.5)
        mean = float(values.mean())
        panel.axhline(mean, color=theme.ink, linewidth=1, linestyle=DASHED)
        ratio = f"{values.max() / mean:.2f}" if mean else "–"
        panel.set_title(f"{name}: mean {format_count(mean)}, max/mean {ratio}", fontsize=SMALL_PT)
        panel.set_ylim(0, 1.08 * float(values.max()) or 1)
        panel.set_xlim(0, bucket.cp_size)
        panel.set_yticks([0, float(values.max())], ["0", format_count(float(values.max()))])
        panel.tick_params(length=2)
    name_cells(panels[-1].xaxis, bucket.lanes, -(-bucket.cp_size // 8))
    panels[-1].set_xlabel("lane" if per_bar == 1 else f"lane (bars of {per_bar}, the largest)")
    return figure


def lane_shares(
    bucket: Bucket,
    mask: LayerMask,
    sent: Sent,
    nodes: Ints,
    windowed: tuple[float, LayerMask] | None = None,
) -> dict[str, Floats]:
    """Return what -> [lane]: tokens held, pairs computed (mean of the layers), bytes sent. `mask` is that of samples
    without one; `windowed`: the share of layers with a window, and their mask; then `mask` is that of the others."""
    placement, inner, num_groups = bucket.placement, bucket.inner_cp_size, bucket.num_inner_groups
    assert placement is not None
    share = 0.0 if windowed is None else windowed[0]
    pairs = (1.0 - share) * _lane_pairs(placement, bucket, mask)
    if windowed is not None:
        own = placement_under(placement, bucket.samples, windowed[1], Lanes(num_groups, 0, num_groups))
        pairs += share * _lane_pairs(own, bucket, windowed[1])
    # The lanes of an inner group share its tokens, and the heads of its pairs, equally.
    return {
        "tokens held": np.repeat(np.array(placement.home_tokens(num_groups), np.float64) / inner, inner),
        "pairs computed": np.repeat(pairs / inner, inner),
        "bytes sent": sent.of_lanes(nodes).sum(axis=(0, 1)),
    }


def _lane_pairs(placement: Placement, bucket: Bucket, mask: LayerMask) -> Floats:
    """Return [inner group] -> pairs that the kernels of a layer compute."""
    pairs = work_of_tiles(placement, bucket.samples, mask).squared_tokens * mask.pairs_per_token2
    return np.bincount(placement.tiles[:, LANE], pairs, bucket.num_inner_groups).astype(np.float64)


def placed_section(name: str, plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return the pictures of the plan's placed bucket with most work, and a note; empty if no bucket is placed."""
    rows = [
        (sum(sample.squared_tokens for sample in bucket.samples), -index, bucket)
        for index, micro_batch in enumerate(plan.micro_batches)
        for bucket in micro_batch.buckets
        if bucket.placement is not None
    ]
    if not rows:
        return {"placed": [], "placed_note": ""}
    _, index, bucket = max(rows, key=lambda row: row[:2])
    sent, nodes = sent_by_bucket(bucket, problem), nodes_of(plan.topology)[bucket.first_lane : bucket.lanes.stop]
    nodes -= nodes[0]
    model = problem.model
    mask, *windows = model.layer_masks
    windowed = (model.num_windowed_layers / model.num_attention_layers, windows[0]) if windows else None
    pictures = [
        picture(
            partial(placed_tiles, bucket, mask), name="tiles", title="Who computes which tile", width_in=WIDE_IN,
            caption=_of_tiles(bucket, mask, windowed),
        ),
        picture(
            partial(placed_links, sent, nodes, first_lane=bucket.first_lane), name="links",
            title="Bytes from lane to lane", width_in=MEDIUM_IN, caption=_of_links(sent, nodes, problem),
        ),
        picture(
            partial(placed_shares, bucket, mask, sent, nodes, windowed=windowed), name="shares",
            title="What each lane has of it", width_in=MEDIUM_IN,
            caption="Even tokens make linear layers even, even pairs attention. Dashed: the mean of the lanes.",
        ),
    ]  # fmt: skip
    which = f"micro-batch {-index} of {name}" + (", of all placed ones that with most work" if len(rows) > 1 else "")
    return {"placed": pictures, "placed_note": f"{which[0].upper()}{which[1:]}: {_counts(bucket)}."}


def _counts(bucket: Bucket) -> str:
    placement = bucket.placement
    assert placement is not None
    shared = f" that share out heads by {bucket.inner_cp_size}" if bucket.inner_cp_size > 1 else ""
    return f"{counted(len(bucket.samples), 'sample')} on {bucket.cp_size} lanes{shared}, {placement.describe()}"


def _of_tiles(bucket: Bucket, mask: Mask, windowed: tuple[float, Mask] | None) -> str:
    shares = samples_by_work(bucket)
    shown = sum(share for _, share in shares[:MAX_SAMPLES])
    text = (
        "A square is a sample, its rows are queries and its columns keys, as far as the mask allows. The strips are "
        "its homes: who holds these tokens."
    )
    if windowed is not None:
        text += f" Shown is the mask of the layers without a window ({mask}); the others compute where queries are."
    if len(shares) > MAX_SAMPLES:
        text += f" The {MAX_SAMPLES} samples with most work, of {len(shares)}, are {shown:.0%} of it"
        text += ", narrow pages show the first."
    return text


def _of_links(sent: Sent, nodes: Ints, problem: Problem) -> str:
    in_node, across = sent.of_lanes(nodes).sum(axis=(0, 2)).tolist()
    ranks = "" if problem.topology.tp_size == 1 else f" of one of {problem.topology.tp_size} TP ranks"
    lines = " (lines part them)" if len(nodes) <= _MAX_CELLS else ""
    between = f", {format_bytes(across)} to other nodes{lines}" if nodes[-1] else ""
    return f"Forward and backward, all layers{ranks}: {format_bytes(in_node)} inside nodes{between}."
