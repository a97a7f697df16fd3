"""Whether a placement computes what the masks of its samples allow, all of it once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Ints
from dynamic_cp.placement.runs import Tiles, count_tiles, runs_of
from dynamic_cp.types import CAUSAL, Mask, Placement, Sample
from dynamic_cp.types.placement import COLUMN, DIVISION, HOLDER, LANE, ROW, SAMPLE, START, STOP


def why_misplaced(placement: Placement, samples: Sequence[Sample], num_lanes: int, mask: Mask = CAUSAL) -> str | None:
    """Return the first thing that is wrong, with its numbers and a remedy; None if nothing is. Homes must tile every
    sample, in order, on lanes of the bucket; two homes of a sample have one tile if the mask (`mask` for samples that
    bring none) allows a pair between them, and none otherwise."""
    homes, tiles = placement.homes.astype(np.int64), placement.tiles.astype(np.int64)
    remedy = ": plan these samples again"
    for what, lanes in (("home", homes[:, HOLDER]), ("tile", tiles[:, LANE])):
        (wrong,) = np.nonzero((lanes < 0) | (lanes >= num_lanes))
        if wrong.size:
            number = int(wrong[0])
            return f"{what} {number} of its placement is on lane {lanes[number]} of {num_lanes}{remedy}"
    if tiles[:, DIVISION].min(initial=0) < 0:
        return f"a tile of its placement is in division {tiles[:, DIVISION].min()}, the first one is 0{remedy}"
    if (reason := why_not_tiled(homes, samples)) is not None:
        return reason + remedy
    (strange,) = np.nonzero((tiles[:, :2].min(axis=1) < 0) | (tiles[:, :2].max(axis=1) >= len(homes)))
    if strange.size:
        number = int(strange[0])
        return f"tile {number} of its placement names homes {tiles[number, :2].tolist()} of {len(homes)}{remedy}"
    wanted = tiles_between(placement, samples, mask)
    given = np.sort(tiles[:, ROW] * len(homes) + tiles[:, COLUMN])
    needed = wanted.rows * len(homes) + wanted.columns
    if np.array_equal(given, needed):
        return None
    twice = given[1:][given[1:] == given[:-1]]
    key = int(np.concatenate([twice, np.setxor1d(given, needed)]).min())
    row, column = divmod(key, len(homes))
    (sample, start, stop, _), (of_keys, first, end, _) = homes[row].tolist(), homes[column].tolist()
    return (
        f"queries {start} to {stop} of sample {samples[sample].sample_id} meet keys {first} to {end} of sample "
        f"{samples[of_keys].sample_id} in {(given == key).sum()} tiles, under the mask "
        f"{str(samples[sample].mask_in(mask))[:40]} in {(needed == key).sum()}{remedy}"
    )


def tiles_between(placement: Placement, samples: Sequence[Sample], mask: Mask) -> Tiles:
    """Return the tiles that must lie between the homes of a placement, ascending; `mask`: of samples that bring
    none."""
    runs = runs_of(with_masks(samples, mask))
    return count_tiles(runs, *_cuts_of(np.ascontiguousarray(placement.homes, np.int64), runs.seqlens))


@compiled
def _cuts_of(homes: Ints, seqlens: Ints) -> tuple[Ints, Ints]:
    """Return where homes cut their samples, as `runs.cut_samples` does."""
    starts = np.zeros(len(seqlens) + 1, np.int64)
    for home in range(len(homes)):
        starts[homes[home, SAMPLE] + 1] += 1
    for sample in range(len(seqlens)):
        starts[sample + 1] += starts[sample] + 1
    cuts = np.empty(len(homes) + len(seqlens), np.int64)
    for home in range(len(homes)):
        cuts[home + homes[home, SAMPLE]] = homes[home, START]
    for sample in range(len(seqlens)):
        cuts[starts[sample + 1] - 1] = seqlens[sample]
    return starts, cuts


def with_masks(samples: Sequence[Sample], mask: Mask) -> Sequence[Sample]:
    """Return `samples` with the mask of their tokens in layers with `mask`; in causal layers they stay as they are."""
    if mask == CAUSAL:
        return samples
    return [replace(sample, mask=sample.mask_in(mask)) for sample in samples]


def why_not_tiled(homes: Ints, samples: Sequence[Sample]) -> str | None:
    """Return where homes [home, (sample, start, stop, ...)] do not follow each other from the first to the last token
    of every sample, in words; None if they tile all samples."""
    wanted = [(number, 0, sample.seqlen) for number, sample in enumerate(samples)]
    sample, start, stop = homes[:, SAMPLE], homes[:, START], homes[:, STOP]
    begins = np.flatnonzero(np.diff(sample, prepend=-1) != 0)
    ends = np.append(begins[1:], len(homes)) - 1
    found = list(zip(sample[begins].tolist(), start[begins].tolist(), stop[ends].tolist(), strict=True))
    for wants, has in zip(wanted, found, strict=False):
        if wants != has:
            return (
                f"homes hold tokens {has[1]} to {has[2]} of sample {has[0]}, not 0 to {wants[2]} of sample {wants[0]}"
            )
    if len(found) != len(wanted):
        return f"homes hold {len(found)} samples of {len(wanted)}"
    empty = np.flatnonzero(stop <= start)
    if empty.size:
        return f"home {empty[0]} holds tokens {start[empty[0]]} to {stop[empty[0]]}, none"
    inside = np.diff(sample) == 0
    (gaps,) = np.nonzero(inside & (start[1:] != stop[:-1]))
    if gaps.size:
        return f"home {gaps[0] + 1} begins at token {start[gaps[0] + 1]}, the one before it ends at {stop[gaps[0]]}"
    return None
