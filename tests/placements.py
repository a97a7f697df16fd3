"""Random placements: any cuts, any lanes, any divisions; what planners never make must work as well."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.placement.legal import tiles_between
from dynamic_cp.types import CAUSAL, FULL, CausalBlockwise, Lambda, Mask, Placement, Sample, Tree
from dynamic_cp.types.placement import Lanes


def random_mask(random: np.random.Generator, seqlen: int) -> Mask | None:
    return (
        None,
        FULL,
        Lambda(int(random.integers(6)), int(random.integers(1, 12))),
        CausalBlockwise(int(random.integers(1, 8)), int(random.integers(1, 3))),
        parse_mask_rule("shared_question:3x0.3")(seqlen),
        random_tree(random, seqlen),
    )[int(random.integers(6))]


def random_tree(random: np.random.Generator, seqlen: int) -> Tree:
    """Return one of up to 9 segments and 4 levels."""
    cuts = random.choice(np.arange(1, seqlen), min(seqlen - 1, int(random.integers(9))), replace=False)
    lengths = np.diff(np.concatenate([[0], np.sort(cuts), [seqlen]])).tolist()
    depths = [0]
    for _ in lengths[1:]:
        depths.append(int(random.integers(1, min(depths[-1] + 1, 3) + 1)))
    return Tree(tuple(lengths), tuple(depths))


def random_samples(random: np.random.Generator, most_tokens: int = 60) -> tuple[Sample, ...]:
    """Return up to 5 samples, of one token and more, with any masks."""
    lengths = random.integers(1, most_tokens, random.integers(1, 6)).tolist()
    return tuple(Sample(sample_id=i, seqlen=n, mask=random_mask(random, n)) for i, n in enumerate(lengths))


def random_placement(
    random: np.random.Generator, samples: Sequence[Sample], num_lanes: int, num_divisions: int, *masks: Mask
) -> Placement:
    """Return a legal one with up to 6 homes of each sample; `masks`: those of layers, of samples that bring none."""
    homes = []
    for number, sample in enumerate(samples):
        inner = random.integers(1, sample.seqlen + 1, random.integers(6))
        cuts = np.unique([0, *inner.tolist(), sample.seqlen]).tolist()
        homes += [(number, start, stop, random.integers(num_lanes)) for start, stop in pairwise(cuts)]
    without_tiles = Placement(np.array(homes, np.int32), np.zeros((0, 4), np.int32))
    wanted = tiles_between(without_tiles, samples, masks[0] if masks else CAUSAL)
    lanes, divisions = (random.integers(number, size=len(wanted.rows)) for number in (num_lanes, num_divisions))
    tiles = np.column_stack([wanted.rows, wanted.columns, lanes, divisions])
    layer_masks = masks if any(isinstance(mask, Lambda) for mask in masks) else ()
    return Placement(without_tiles.homes, random.permutation(tiles).astype(np.int32), layer_masks)


def random_lanes(random: np.random.Generator) -> Lanes:
    """Return up to 10 lanes, of which the first ones may lie in the middle of a node, and the last ones, too."""
    node_lanes = int(random.choice([1, 2, 3, 4, 8]))
    return Lanes(int(random.integers(1, 11)), int(random.integers(3 * node_lanes)), node_lanes)
