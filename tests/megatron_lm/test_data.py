"""Global batches of any size, drawn by lanes; samples without their trailing padding."""

import multiprocessing
import signal
from functools import partial

import numpy as np
import pytest
import torch

from dynamic_cp.errors import DataError
from megatron.integrations.lm_adaptor.data import (
    LaneIterator,
    LaneSampler,
    build_loader,
    end_workers,
    ignore,
    only_item,
    trimmed,
)


def drawn(num_lanes: int, global_batch_size: int, num_samples: int, consumed: int = 0) -> list[list[int]]:
    return [
        [
            index
            for (index,) in LaneSampler(
                num_samples=num_samples, consumed_samples=consumed, global_batch_size=global_batch_size, lane=lane,
                num_lanes=num_lanes,
            )
        ]
        for lane in range(num_lanes)
    ]  # fmt: skip


@pytest.mark.parametrize(("num_lanes", "global_batch_size"), [(4, 12), (4, 7), (3, 2), (1, 5)])
def test_lanes_share_each_global_batch(num_lanes: int, global_batch_size: int) -> None:
    lanes = drawn(num_lanes, global_batch_size, 10 * global_batch_size + 1)
    for step in range(10):
        batch: list[int] = []
        for lane, indices in enumerate(lanes):
            share = global_batch_size // num_lanes + (lane < global_batch_size % num_lanes)
            batch += indices[step * share : (step + 1) * share]
        first = step * global_batch_size
        assert sorted(batch) == list(range(first, first + global_batch_size))
    assert sum(map(len, lanes)) == 10 * global_batch_size, "a batch that is not full was drawn"


def test_a_run_goes_on_with_other_lanes() -> None:
    for num_lanes in (2, 4):
        indices = [index for lane in drawn(num_lanes, 6, 30, 12) for index in lane]
        assert sorted(indices) == list(range(12, 30))


def item(mask: list[int], cu_seqlens: list[int] | None = None) -> dict[str, np.ndarray]:
    tokens = np.arange(len(mask))
    made = {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.array(mask, dtype=np.float32)}
    return made if cu_seqlens is None else made | {"cu_seqlens": np.array(cu_seqlens)}


def test_tokens_after_the_last_loss_are_cut() -> None:
    cut = trimmed(item([0, 1, 0, 1, 0, 0]))
    assert cut["tokens"].tolist() == [0, 1, 2, 3]
    assert cut["labels"].tolist() == [1, 2, 3, 4]


def test_each_sample_of_a_pack_is_cut() -> None:
    cut = trimmed(item([0, 1, 0, 0, 0, 0, 1, 0], [0, 3, 3, 5, 8]))
    assert cut["cu_seqlens"].tolist() == [0, 2, 3, 5], "samples: 2 of 3 tokens, none of 0, 1 of 2 (no loss), 2 of 3"
    assert cut["tokens"].tolist() == [0, 1, 3, 5, 6]
    assert cut["loss_mask"].sum() == 2


def test_boundaries_that_contradict_the_tokens() -> None:
    with pytest.raises(DataError, match="ascend from 0 to 4 tokens"):
        trimmed(item([1, 1, 1, 1], [0, 2]))


def test_loader_yields_single_items() -> None:
    data = [
        {"tokens": torch.arange(n), "loss_mask": torch.ones(n), "attention_mask": None, "max_seqlen": 9}
        for n in (3, 4, 5, 6)
    ]
    sampler = LaneSampler(num_samples=4, consumed_samples=0, global_batch_size=2, lane=1, num_lanes=2)
    items = list(build_loader(data, sampler, num_workers=0))  # type: ignore[arg-type]
    assert [len(one["tokens"]) for one in items] == [4, 6]
    assert set(items[0]) == {"tokens", "loss_mask"}
    assert only_item([data[0]])["tokens"].tolist() == [0, 1, 2]


def test_workers_that_ignore_a_signal_end_when_they_are_told() -> None:
    """The interpreter ends child processes by SIGTERM when it leaves, and waits for them without limit."""
    sampler = LaneSampler(num_samples=4, consumed_samples=0, global_batch_size=2, lane=0, num_lanes=1)
    data = [{"tokens": torch.arange(3)} for _ in range(4)]
    loader = build_loader(data, sampler, num_workers=1, worker_init=partial(ignore, signal.SIGTERM))  # type: ignore[arg-type]
    assert len(next(iter(loader))["tokens"]) == 3
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(0.5)
    assert worker.is_alive(), "the signal that asks a run to save ended it"
    end_workers(loader)
    worker.join(200)
    assert not worker.is_alive()
    end_workers(build_loader(data, sampler, num_workers=0))  # type: ignore[arg-type]


def test_ranks_that_read_nothing_say_so() -> None:
    with pytest.raises(DataError, match="reads no validation data"):
        next(LaneIterator("validation", None))
