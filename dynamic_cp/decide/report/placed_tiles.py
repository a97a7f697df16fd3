"""Tiles of a placed bucket: which lane computes which queries against which keys, in which division; who holds them.

A square is a sample: queries from top to bottom, keys from left to right, as far as its mask allows. The strips at its
upper and left edge are its homes. If there are more lanes than colors, neighbours share one."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.decide.report.drawing import (
    SMALL_PT,
    WIDE_IN,
    Rectangle,
    add_legend,
    add_rectangles,
    format_tokens,
    frame_map,
    new_figure,
)
from dynamic_cp.decide.report.theme import Theme
from dynamic_cp.placement.runs import table_of
from dynamic_cp.types import CAUSAL, Bucket, Mask, Placement
from dynamic_cp.types.placement import COLUMN, DIVISION, HOLDER, LANE, ROW, SAMPLE, START, STOP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Outline

MAX_SAMPLES = 3
_MAX_TILES, _CELLS, _MAX_RUNS = 400, 64, 500
_STRIP, _GAP = 0.05, 0.02
"""Width of the strips of homes and their distance, as shares of the sample."""
_PALEST = 0.25


def samples_by_work(bucket: Bucket) -> list[tuple[int, float]]:
    """Return (number of a sample, its share of the bucket's pairs), most first; the first ones are drawn."""
    work = [sample.squared_tokens for sample in bucket.samples]
    order = sorted(range(len(work)), key=lambda number: (-work[number], number))
    return [(number, work[number] / sum(work)) for number in order]


def placed_tiles(bucket: Bucket, mask: Mask, theme: Theme, *, width_in: float = WIDE_IN) -> Figure:
    """Return the picture of the samples with most work in a placed bucket, as many as the width holds."""
    placement = bucket.placement
    assert placement is not None
    num_shown = MAX_SAMPLES if width_in > WIDE_IN - 1 else 1
    samples = [number for number, _ in samples_by_work(bucket)[:num_shown]]
    num_rows, tiles = (1 if placement.num_divisions == 1 else 2), placement.tiles.astype(np.int64)
    lanes_per_color = lanes_of_color(bucket.num_inner_groups, len(theme.cp_sizes))
    side_in = min(3.4, (width_in - 0.5) / len(samples) - 0.2)
    figure = new_figure(width_in, num_rows * (side_in + 0.55) + 0.75)
    panels = figure.subplots(num_rows, len(samples), squeeze=False)
    for column, number in enumerate(samples):
        for row in range(num_rows):
            panel = panels[row][column]
            if row == 0:
                colors = {color: (theme.cp_sizes[color], 1.0) for color in range(len(theme.cp_sizes))}
                of_tile = tiles[:, LANE] // lanes_per_color
            else:
                steps = np.linspace(_PALEST, 1.0, placement.num_divisions).tolist()
                colors = {division: (theme.series[0], alpha) for division, alpha in enumerate(steps)}
                of_tile = tiles[:, DIVISION]
            _draw(panel, bucket, number, of_tile, colors, mask, theme)
            _draw_homes(panel, placement, number, bucket.samples[number].seqlen, lanes_per_color, theme)
            _describe(panel, bucket, number, row, column == 0, num_rows, placement.num_divisions)
    add_legend(
        figure, _lane_legend(bucket, lanes_per_color * bucket.inner_cp_size, theme), width_in=width_in, title="lane"
    )
    return figure


def lanes_of_color(num_lanes: int, num_colors: int) -> int:
    """Return how many neighbouring lanes share a color: a power of two."""
    return 1 << max(0, -(-num_lanes // num_colors) - 1).bit_length()


def _lane_legend(bucket: Bucket, lanes_per_color: int, theme: Theme) -> list[tuple[str, str]]:
    entries = []
    for color, first in enumerate(bucket.lanes[::lanes_per_color]):
        last = min(first + lanes_per_color, bucket.lanes.stop) - 1
        entries.append((str(first) if first == last else f"{first}–{last}", theme.cp_sizes[color]))
    return entries


def _draw(
    panel: Axes, bucket: Bucket, number: int, of_tile: Ints, colors: dict[int, tuple[str, float]],
    mask: Mask, theme: Theme,
) -> None:  # fmt: skip
    """Draw the tiles of a sample; `of_tile` has the color of each."""
    placement, sample = bucket.placement, bucket.samples[number]
    assert placement is not None
    tiles = placement.tiles.astype(np.int64)
    mine = placement.homes[tiles[:, ROW], SAMPLE] == number
    is_exact = int(mine.sum()) <= _MAX_TILES
    rectangles = (_exact if is_exact else _reduced)(placement, tiles[mine], of_tile[mine])
    outline = _allowed(sample.mask_in(mask), sample.seqlen)
    for color, found in sorted(rectangles.items()):
        fill, alpha = colors[color]
        line = {"edgecolor": theme.background, "linewidth": 0.4} if is_exact else {}
        add_rectangles(panel, found, fill, alpha=alpha, **line)
    if outline is not None:
        for patch in panel.patches:
            patch.set_clip_path(outline, panel.transData)


def _exact(placement: Placement, tiles: Ints, of_tile: Ints) -> dict[int, list[Rectangle]]:
    found: dict[int, list[Rectangle]] = defaultdict(list)
    homes = placement.homes
    for (queries, keys), color in zip(tiles[:, :2].tolist(), of_tile.tolist(), strict=True):
        (_, first, last, _), (_, begin, end, _) = homes[queries].tolist(), homes[keys].tolist()
        found[color].append(Rectangle(begin, end, first, last))
    return found


def _reduced(placement: Placement, tiles: Ints, of_tile: Ints) -> dict[int, list[Rectangle]]:
    """Return cells in the color of what lies in their middle; neighbours of one color are joined."""
    number = placement.homes[tiles[0, ROW], SAMPLE]
    own = np.flatnonzero(placement.homes[:, SAMPLE] == number)
    first, seqlen = int(own[0]), int(placement.homes[own[-1], STOP])
    colors = np.full((len(own), len(own)), -1, np.int16)
    colors[tiles[:, ROW] - first, tiles[:, COLUMN] - first] = of_tile
    edges = np.linspace(0, seqlen, _CELLS + 1).tolist()
    middles = (np.arange(_CELLS) + 0.5) * (seqlen / _CELLS)
    home = np.searchsorted(placement.homes[own, START], middles, side="right") - 1
    cells = colors[home[:, None], home[None, :]]
    found: dict[int, list[Rectangle]] = defaultdict(list)
    begins = np.concatenate([[0], np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1, [_CELLS]]).tolist()
    for top, bottom in pairwise(begins):
        changes = np.concatenate([[0], np.flatnonzero(np.diff(cells[top])) + 1, [_CELLS]]).tolist()
        for left, right in pairwise(changes):
            color = int(cells[top, left])
            if color >= 0:
                found[color].append(Rectangle(edges[left], edges[right], edges[top], edges[bottom]))
    return found


def _allowed(mask: Mask, seqlen: int) -> Outline | None:
    """Return the outline of the pairs that a mask allows; None if it is too ragged to be seen."""
    from matplotlib.path import Path as Outline

    corners: list[tuple[float, float]] = []
    table = table_of(mask, seqlen)
    if len(table) > _MAX_RUNS:
        return None
    for row, stop, begin, end, begin_step, end_step in table.tolist():
        rows = stop - row
        bottom = (end + end_step * (rows - 1), stop), (begin + begin_step * (rows - 1), stop)
        corners += [(begin, row), (end, row), *bottom, (begin, row)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(table)
    return Outline(corners, codes)


def _draw_homes(
    panel: Axes, placement: Placement, number: int, seqlen: int, lanes_per_color: int, theme: Theme
) -> None:
    strips: dict[int, list[Rectangle]] = defaultdict(list)
    near, far = -_GAP * seqlen, -(_GAP + _STRIP) * seqlen
    homes = placement.homes[placement.homes[:, SAMPLE] == number].astype(np.int64)
    colors = homes[:, HOLDER] // lanes_per_color
    begins = np.flatnonzero(np.diff(colors, prepend=-1)).tolist()
    for first, following in zip(begins, [*begins[1:], len(homes)], strict=True):
        start, stop = int(homes[first, START]), int(homes[following - 1, STOP])
        strips[int(colors[first])] += [Rectangle(start, stop, far, near), Rectangle(far, near, start, stop)]
    for color, rectangles in sorted(strips.items()):
        add_rectangles(panel, rectangles, theme.cp_sizes[color])


def _describe(
    panel: Axes, bucket: Bucket, number: int, row: int, is_first: bool, num_rows: int, num_divisions: int
) -> None:
    sample = bucket.samples[number]
    if row == 0:
        mask = "" if sample.mask is None or sample.mask == CAUSAL else f" · {str(sample.mask).split(':')[0]}"
        panel.set_title(f"sample {sample.sample_id} · {format_tokens(sample.seqlen)} tokens{mask}", fontsize=SMALL_PT)
    elif is_first:
        panel.set_title(f"by division: first pale, last ({num_divisions - 1}) strong", fontsize=SMALL_PT)
    far = -(_GAP + _STRIP) * sample.seqlen
    frame_map(panel, first=far, last_x=sample.seqlen, last_y=sample.seqlen)
    panel.set_aspect("equal")
    ticks = [0, sample.seqlen]
    panel.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    panel.set_yticks(ticks, [format_tokens(tick) for tick in ticks])
    if row == num_rows - 1:
        panel.set_xlabel("key (tokens)")
    if is_first:
        panel.set_ylabel("query (tokens)")
