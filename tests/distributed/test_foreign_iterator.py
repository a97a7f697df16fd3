"""ForeignIteratorWrapper: what a training loop's own iterators yield comes out once, right, and on every layout."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.foreign import LAYOUTS, LaneData, RankRecord, lane_data, run_foreign
from tests.distributed.harness import run_ranks
from tests.distributed.parity import Layout

NUM_BATCHES = 50


def all_data(layout: Layout, num_items: int, **kinds) -> list[LaneData]:
    return [lane_data(lane, num_items, **kinds) for lane in range(layout.lanes)]


def all_tokens(data: list[LaneData], steps: slice, global_batch_size: int) -> Counter:
    """Return every (lane, number, position) of the given steps."""
    tokens: Counter = Counter()
    for lane, items in enumerate(data):
        share = global_batch_size // len(data) + (lane < global_batch_size % len(data))
        for item in items[steps.start * share : steps.stop * share]:
            for piece in item:
                number = (int(piece["tokens"][0]) - 1) // 512 % 4096
                tokens.update((lane, number, position) for position in range(len(piece["tokens"])))
    return tokens


def check_ranks(
    layout: Layout, ranks: list[RankRecord], data: list[LaneData], global_batch_size: int, num_batches: int
) -> int:
    """Every token once per TP rank of the stages that read it; ranks without data know the packs. Returns tokens."""
    assert {len(rank.steps) for rank in ranks} == {rank.ended_at for rank in ranks} == {num_batches}
    looked_at = 0
    for step in range(num_batches):
        records = [rank.steps[step] for rank in ranks]
        assert len({record.counts for record in records}) == 1
        assert len({record.consumed for record in records}) == 1
        expected = all_tokens(data, slice(step, step + 1), global_batch_size)
        lengths = Counter((lane, number) for lane, number, _ in expected)
        assert records[0].counts[1:] == (sum(lengths.values()), sum(n * n for n in lengths.values()))
        for lane in range(layout.lanes):
            packs = [rank.steps[step].packs for rank in ranks if rank.lane == lane]
            assert len(packs) == layout.tp * layout.pp
            assert all(pack == packs[0] for pack in packs), "stages and TP ranks of a lane differ"
        for tp_rank in range(layout.tp):
            for column in ("tokens", "labels"):
                came = Counter(
                    token
                    for rank in ranks
                    if rank.tp_rank == tp_rank
                    for token in rank.steps[step].tokens.get(column, [])
                )
                assert came == expected, f"step {step}: {column}"
                looked_at += len(came)
    return looked_at


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_comes_out_once(name: str) -> None:
    """50 global batches, uneven shares; samples with and without labels, masks and position ids."""
    layout, global_batch_size = LAYOUTS[name], 7 if name != "dp3" else 6
    share = -(-global_batch_size // layout.lanes)
    data = all_data(layout, NUM_BATCHES * share, flavours=(0, 1, 4, 3, 2))
    settings = {"lookahead": 1, "verify": "full"}
    ranks = run_ranks(layout.topology.world_size, run_foreign, layout, data, global_batch_size, settings)
    assert check_ranks(layout, ranks, data, global_batch_size, NUM_BATCHES) > 10_000
    if layout.lanes > 2:
        cp_sizes = {pack[0] for rank in ranks for step in rank.steps for pack in step.packs}
        assert cp_sizes >= {1, 2}, "the plans do not mix CP sizes"
