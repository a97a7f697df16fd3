"""Lengths found by probing: each rank its share, the same result or the same error everywhere, nobody left waiting."""

import os
import time
from collections import Counter
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DataError, DynamicCPError
from dynamic_cp.types import FULL, Sample, Topology
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.integrations.foreign.probing import ProbedSamples, probe_lengths
from tests import patience
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks
from tests.distributed.parity import Layout, fixed_plan, mixed_plan


def length_of(sample_id: int) -> int:
    return sample_id * sample_id % 977 + 1


def probe_counting(batches, ranks):
    """Return of each batch the lengths, what this rank probed, and the collectives; the last batch is a group's."""
    collectives, found = [], []
    for name in ("all_gather_into_tensor", "broadcast_object_list", "all_reduce", "all_gather_object"):
        real = getattr(dist, name)
        setattr(dist, name, lambda *a, name=name, real=real, **k: collectives.append(name) or real(*a, **k))
    groups = [None] * (len(batches) - 1) + [dist.new_group(ranks)]
    for sample_ids, group in zip(batches, groups, strict=True):
        if group is not None and dist.get_rank() not in ranks:
            return found
        collectives.clear()
        probed = []
        lengths = probe_lengths(sample_ids, lambda i, probed=probed: probed.append(i) or length_of(i), group=group)
        found.append((lengths.tolist(), probed, list(collectives)))
    return found


def test_every_sample_is_probed_once_and_known_everywhere():
    batches = [[7 + 3 * i for i in range(number)] for number in (1, 2, 3, 4, 5, 8, 101)]
    ranks = run_ranks(4, probe_counting, [*batches, [], [5, 6, 7]], [1, 3], timeout_s=60)
    for sample_ids, *results in zip(batches, *ranks, strict=False):
        assert [lengths for lengths, *_ in results] == [[length_of(i) for i in sample_ids]] * 4
        assert sorted(i for _, probed, _ in results for i in probed) == sample_ids
        shares = [len(probed) for _, probed, _ in results]
        assert max(shares) - min(shares) <= 1
        assert [collectives for *_, collectives in results] == [["all_gather_into_tensor"]] * 4
    assert [rank[len(batches)] for rank in ranks] == [([], [], [])] * 4, "nothing to probe needs no collective"
    assert [len(rank) - len(batches) for rank in ranks] == [1, 2, 1, 2]
    lengths = [length_of(i) for i in (5, 6, 7)]
    assert [ranks[rank][-1][:2] for rank in (1, 3)] == [(lengths, [5, 7]), (lengths, [6])]


def probe_with_failures(failures_of):
    def probe(sample_id: int, failures):
        failure = failures.get(sample_id, 10)
        if isinstance(failure, Exception):
            raise failure
        return failure

    found = []
    for failures in failures_of:
        with pytest.raises(DynamicCPError) as caught:
            probe_lengths(range(100, 110), lambda sample_id, failures=failures: probe(sample_id, failures))
        error = caught.value
        found.append((caught.type, str(error), error.details, type(error.__cause__).__name__))
    return found


FAILURES = [
    (KeyError("text"), "KeyError: 'text'"), (DataError("the file is cut"), "the file is cut"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad\nbyte"), "bad byte"),
    (0, "its length is 0, an integer from 1 to"), (-2, "its length is -2"), (2.5, "its length is 2.5"),
    (None, "its length is None"), (1 << 40, "its length is 1099511627776"),
]  # fmt: skip
"""What probing a sample does -> what is said of it."""


def test_a_failure_on_one_rank_is_the_same_error_on_all():
    several = {109: DataError("last"), 103: DataError("third"), 105: DataError("fifth"), 107: DataError("later")}
    ranks = run_ranks(4, probe_with_failures, [*({106: one} for one, _ in FAILURES), several], timeout_s=60)
    for (_, said), *results in zip(FAILURES, *ranks, strict=False):
        for kind, message, details, _ in results:
            assert kind is DataError
            assert message.startswith("sample 106 could not be probed for its length on rank 2: ")
            assert said in message
            assert "\n" not in message
            assert details == {"sample_id": 106, "rank": 2}
        has_cause = [cause != "NoneType" for *_, cause in results]
        assert has_cause == [False, False, True, False], "its rank has the traceback"
    of_several = [rank[-1][1] for rank in ranks]
    assert {(said.split()[1], said.split("rank ")[1][0]) for said in of_several} == {("103", "3")}, "the first speaks"


def probe_beside_a_dead_rank(how, told, timeout_s):
    """Rank 2 is killed, or hangs, in the middle of its share; write what the others say."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()

    def probe(sample_id: int) -> int:
        if rank == 2 and sample_id == 6:
            if how == "killed":
                os._exit(9)
            time.sleep(60)
        return 5

    started = patience.now_s()
    try:
        probe_lengths(range(12), probe, group=group)
    except DynamicCPError as error:
        (told / str(rank)).write_text(f"{patience.now_s() - started} {error}")


@pytest.mark.slow  # it waits
@pytest.mark.by_day("killed")
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_lost_rank_does_not_hang_the_others(tmp_path, how):
    with pytest.raises(RankError, match=r"rank 2: (died without a word|nothing after 5[\s\S]*in probe\n)"):
        run_ranks(4, probe_beside_a_dead_rank, how, tmp_path, 2, timeout_s=5)
    for rank in (0, 1, 3):
        seconds, message = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(seconds) < 4.5
        assert "probing the lengths of samples 0 .. 11: one of 4 ranks ended or did not answer" in message
        assert "\n" not in message


# Data sets.


class Words:
    """Tokenizes when it is asked; item 13 is broken on demand."""

    def __init__(self, num_items: int = 40, broken: bool = False) -> None:
        self.num_items, self.broken = num_items, broken
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int):
        self.asked.append(index)
        ids = list(range(index, index + 2 + index % 7))
        if self.broken and index == 13:
            return {"labels": ids}
        if index % 3 == 0:
            return torch.tensor(ids)
        return {"tokens": ids[:-1], "labels": ids[1:]} if index % 3 == 1 else np.array(ids)


def stream_of_words(broken=False):
    dataset = Words(broken=broken)
    samples = ProbedSamples(dataset, order=lambda position: (7 * position) % 40, num_batches=2)
    batches, asked = [], []
    try:
        for step in range(8):
            batches.append([(s.sample_id, s.seqlen) for s in samples.global_batch(10 * step, 10)])
            asked.append(len(dataset.asked))
    except DynamicCPError as error:
        return str(error)
    read = samples.read(3)
    return batches, asked, read.tokens.tolist(), read.labels.tolist(), read.loss_mask.tolist()


def test_a_data_set_that_tokenizes_on_the_fly():
    results = run_ranks(4, stream_of_words, timeout_s=60)
    batches, asked, *read = results[0]
    assert [found for found, *_ in results] == [batches] * 4
    assert [s for batch in batches for s in batch] == [(p, 1 + (7 * p) % 40 % 7) for p in range(80)]
    assert asked == [5, 5, 10, 10, 10, 10, 10, 10], "two batches at a time, each item once"
    assert read == [[21], [22], [1.0]]


def test_a_broken_item_is_the_same_error_on_all_ranks():
    (message,) = set(run_ranks(2, stream_of_words, True, timeout_s=60))
    assert "item 13 could not be probed for its length on rank" in message
    assert "no 'tokens' (it has 'labels')" in message


def wrap_words(plan):
    """Train-side: probe a global batch, wrap it, return the tokens of this lane."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=4), timeout_s=30, exchanges=("p2p",))
    samples = ProbedSamples(Words())
    wrapper = DataIteratorWrapper(
        plan_source=fixed_plan(plan, groups), read_sample=samples.read, groups=groups,
        chunks=[ChunkNeeds(tokens=True, labels=True)],
    )  # fmt: skip
    data = wrapper.wrap(0, samples.global_batch(0, 12))
    got = [batch["tokens"].flatten() for batch in data.data_iterators[0]]
    return torch.cat(got).tolist(), data.seqlen_sum


def test_the_wrapper_trains_on_a_data_set_that_tokenizes_on_the_fly():
    batch = tuple(Sample(sample_id=i, seqlen=1 + i % 7) for i in range(12))
    results = run_ranks(4, wrap_words, mixed_plan(batch, Layout(4)), timeout_s=60)
    expected = Counter(token for i in range(12) for token in range(i, i + 1 + i % 7) if token)
    assert sum((Counter(token for token in tokens if token) for tokens, _ in results), Counter()) == expected
    assert {seqlen_sum for _, seqlen_sum in results} == {sum(sample.seqlen for sample in batch)}


@pytest.mark.parametrize("item", [[], [1], [[1, 2]], {"tokens": [1, 2], "labels": [1]}, {"labels": [1]}])
def test_items_of_wrong_shapes_are_refused(item):
    samples = ProbedSamples([item])
    with pytest.raises(DataError, match="item 0 has"):
        samples.read(0)
    with pytest.raises(DataError, match="0 items"):
        ProbedSamples([])


class Masked(Words):
    """Words of which every third item sees all of itself; item `unfit` has a mask of other lengths."""

    def __init__(self, unfit: int | None = None) -> None:
        super().__init__()
        self.unfit = unfit

    def __getitem__(self, index: int):
        ids = list(range(index, index + 2 + index % 7))
        mask = "shared_question:50,60" if index == self.unfit else "full" if index % 3 == 0 else None
        return {"tokens": ids[:-1], "labels": ids[1:], "mask": mask}


def masked_batch(unfit, has_masks):
    samples = ProbedSamples(Masked(unfit), has_masks=has_masks)
    try:
        return [samples.global_batch(0, 30), samples.read(4).tokens.tolist()]
    except DynamicCPError as error:
        return str(error)


@pytest.mark.parametrize(
    ("unfit", "has_masks", "said"),
    [
        (7, True,
         "item 7 cannot have the mask shared_question:50,60: prompt and answers have 110 tokens, the sample 1"),
        (None, False, "item 0 has a mask, ProbedSamples(..., has_masks=False) looks for none: set it to True"),
    ],
)  # fmt: skip
def test_masks_that_cannot_be_are_the_same_error_on_all_ranks(unfit, has_masks, said):
    (message,) = set(run_ranks(2, masked_batch, unfit, has_masks, timeout_s=60))
    assert said in message


def test_masks_of_items_are_known_everywhere():
    (found, read), other = run_ranks(2, masked_batch, None, True, timeout_s=60)
    assert found == tuple(Sample(sample_id=i, seqlen=1 + i % 7, mask=FULL if i % 3 == 0 else None) for i in range(30))
    assert [found, read] == other
    assert read == [4, 5, 6, 7, 8]
