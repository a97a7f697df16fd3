"""DataIteratorWrapper: every token goes in and comes out once, each lane reads its own samples, ranks fail together."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import DataError, DisagreementError, DynamicCPError, IllegalPlanError
from dynamic_cp.types import FULL, Bucket, MicroBatch, Plan, Sample, Topology
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from tests import patience
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import fixed_plan, mixed_plan
from tests.distributed.reference import SampleTokens

BOTH = (ChunkNeeds(tokens=True, labels=True),)
SAMPLES = tuple(
    Sample(sample_id=index + 1, seqlen=seqlen) for index, seqlen in enumerate((37, 90, 1, 16, 5, 24, 9, 2, 30, 1, 12))
)


def read_telling_tokens(sample: Sample) -> SampleTokens:
    """Return tokens that say whose they are and where, other labels, and a mask with holes."""
    positions = np.arange(sample.seqlen, dtype=np.int64)
    tokens = sample.sample_id * 1000 + positions
    return SampleTokens(tokens, tokens + 500_000, (positions % 5 != 3).astype(np.float32))


@dataclass
class Wrapped:
    """What one rank got: per chunk and micro-batch the tensors by name, and the fields of the packed parameters."""

    lane: int
    tp_rank: int
    chunks: list[list[dict[str, Any]]]
    counts: tuple[int, int, int]
    read: list[int]


def wrap(
    topology: Topology, samples: tuple[Sample, ...], plans: Sequence[Plan], chunks: Sequence[ChunkNeeds] = BOTH,
    read: Callable[[Sample], SampleTokens] = read_telling_tokens,
) -> list[Wrapped]:  # fmt: skip
    initialize_model_parallel(topology.tp_size, topology.pp_size)
    groups = DynamicCPGroups.build(topology, timeout_s=30, exchanges=("p2p",))
    by_id = {sample.sample_id: sample for sample in samples}
    outcomes = []
    for step, plan in enumerate(plans):
        log: list[int] = []
        wrapper = DataIteratorWrapper(
            plan_source=fixed_plan(plan, groups),
            read_sample=lambda sample_id, log=log: log.append(sample_id) or read(by_id[sample_id]),
            groups=groups,
            chunks=chunks,
        )
        data = wrapper.wrap(step, samples)
        got = [[batch | {"packed_seq_params": facts(batch)} for batch in iterator] for iterator in data.data_iterators]
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        counts = (data.num_microbatches, data.seqlen_sum, data.seqlen_squared_sum)
        outcomes.append(Wrapped(groups.lane, tp_rank, got, counts, log))
    return outcomes


def facts(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the packed parameters without their groups, which stay on their rank."""
    params = batch["packed_seq_params"]
    boundaries = [getattr(params, f"cu_seqlens_{name}") for name in ("q", "kv", "q_padded", "kv_padded")]
    return {
        "one_tensor": all(x is boundaries[0] for x in boundaries),
        "group_ranks": dist.get_process_group_ranks(params.cp_group),
        "ring_ranks": dist.get_process_group_ranks(params.ring_group),
        **{f.name: getattr(params, f.name) for f in dataclasses.fields(params) if not f.name.endswith("_group")},
    }


@pytest.mark.by_day("three all_gather", "two tp2 sp")
@pytest.mark.parametrize("line", ["one", "four", "three all_gather", "two tp2", "two tp2 sp"])
def test_every_token_comes_out_once(line: str) -> None:
    layout = layout_of(line)
    plans = [mixed_plan(SAMPLES, layout, seed) for seed in range(4)]
    ranks = run_ranks(layout.topology.world_size, wrap, layout.topology, SAMPLES, plans, timeout_s=60)
    expected = Counter(int(token) for sample in SAMPLES for token in read_telling_tokens(sample).tokens)
    for number, plan in enumerate(plans):
        outcomes = [outcomes[number] for outcomes in ranks]
        for outcome in outcomes:
            check_lane(plan, outcome)
        for tp_rank in range(layout.tp):
            batches = [batch for outcome in outcomes if outcome.tp_rank == tp_rank for batch in outcome.chunks[0]]
            assert Counter(token for one in batches for token in one["tokens"].flatten().tolist() if token) == expected


def check_lane(plan: Plan, outcome: Wrapped) -> None:
    """The micro-batches of one rank are what the plan says."""
    (batches,) = outcome.chunks
    buckets = [micro_batch.bucket_of_lane(outcome.lane) for micro_batch in plan.micro_batches]
    assert outcome.counts == (len(buckets), sum(s.seqlen for s in SAMPLES), sum(s.seqlen**2 for s in SAMPLES))
    assert outcome.read == [sample.sample_id for bucket in buckets for sample in bucket.samples]
    for bucket, batch in zip(buckets, batches, strict=True):
        tokens, labels, mask, position_ids = (batch[key] for key in ("tokens", "labels", "loss_mask", "position_ids"))
        params = batch["packed_seq_params"]
        num_tokens = sum(params["padded_seqlens"]) // bucket.cp_size
        assert [x.shape for x in (tokens, labels, mask, position_ids)] == [(1, num_tokens)] * 4
        assert mask.dtype == torch.float32
        assert {x.dtype for x in (tokens, labels, position_ids)} == {torch.int64}
        assert num_tokens % plan.topology.rank_token_multiple == 0
        assert params["positions"].shape == (num_tokens,)
        # Real tokens tell where they come from: labels, mask and positions must fit. All of padding is 0.
        real = tokens != 0
        assert torch.equal(position_ids, tokens % 1000 * real)
        assert torch.equal(params["positions"][real[0]], position_ids[real])
        assert torch.equal(labels, (tokens + 500_000) * real)
        assert torch.equal(mask, ((position_ids % 5 != 3) & real).float())
        assert set((tokens[real] // 1000).tolist()) <= {sample.sample_id for sample in bucket.samples}

        assert params["one_tensor"], "TransformerEngine needs the same tensor four times"
        assert params["cu_seqlens_q"].dtype == torch.int32
        assert params["cu_seqlens_q"].diff().tolist() == list(params["padded_seqlens"])
        assert len(params["padded_seqlens"]) == max(1, len(bucket.samples))
        assert params["max_seqlen_q"] == params["max_seqlen_kv"] == max(params["padded_seqlens"])
        assert params["qkv_format"] == "thd"
        assert params["local_cp_size"] == bucket.cp_size == len(params["group_ranks"])
        assert dist_ranks(plan.topology, bucket, outcome.tp_rank) == params["group_ranks"] == params["ring_ranks"]
        assert params["cp_comm_type"] == bucket.cp_comm_type
        assert f"lanes {bucket.first_lane}..{bucket.lanes[-1]}" in params["label"]


def dist_ranks(topology: Topology, bucket: Bucket, tp_rank: int) -> list[int]:
    return [lane * topology.tp_size + tp_rank for lane in bucket.lanes]


def test_chunks_get_what_they_need() -> None:
    plan = one_row(Topology(num_lanes=1), Bucket(first_lane=0, samples=SAMPLES))
    chunks = [
        ChunkNeeds(tokens=tokens, labels=labels) for tokens, labels in ((True, False), (False, False), (False, True))
    ]
    ((outcome,),) = run_ranks(1, wrap, plan.topology, SAMPLES, [plan], chunks, timeout_s=60)
    present = [{key for key, value in batch.items() if value is not None} for (batch,) in outcome.chunks]
    assert present == [
        {"tokens", "position_ids", "packed_seq_params"},
        {"packed_seq_params"},
        {"labels", "loss_mask", "packed_seq_params"},
    ]
    # megatron-core's schedules look every key up.
    every_key = {"tokens", "position_ids", "labels", "loss_mask", "packed_seq_params"}
    assert all(set(batch) == every_key for (batch,) in outcome.chunks)
    assert len(outcome.read) == len(set(outcome.read)) == len(SAMPLES), "chunks share what was read"
    ((middle,),) = run_ranks(1, wrap, plan.topology, SAMPLES, [plan], chunks[1:2], timeout_s=60)
    assert middle.read == []
    ((batch,),) = middle.chunks
    assert batch["packed_seq_params"]["padded_seqlens"] == tuple(sample.seqlen for sample in SAMPLES)


def one_row(topology: Topology, *buckets: Bucket) -> Plan:
    return Plan(topology=topology, max_tokens_per_rank=1 << 20, micro_batches=(MicroBatch(buckets=buckets),))


@pytest.mark.by_day("True")
@pytest.mark.parametrize(("sequence_parallel", "num_tokens"), [(False, 1), (True, 2)])
def test_empty_place_is_the_least_padding(sequence_parallel: bool, num_tokens: int) -> None:
    topology = Topology(num_lanes=2, tp_size=2, sequence_parallel=sequence_parallel)
    plan = one_row(topology, Bucket(first_lane=0, samples=SAMPLES[:1]), Bucket(first_lane=1))
    ranks = run_ranks(4, wrap, topology, SAMPLES[:1], [plan], timeout_s=60)
    empty = [outcome for (outcome,) in ranks if outcome.lane == 1]
    assert len(empty) == 2
    for outcome in empty:
        ((batch,),) = outcome.chunks
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[key].tolist() == [[0] * num_tokens]
        assert batch["packed_seq_params"]["padded_seqlens"] == (num_tokens,)
        assert outcome.read == []


# Ranks fail together.


FOUR_LANES = Topology(num_lanes=4)
ONE_SAMPLE_A_LANE = one_row(
    FOUR_LANES, *(Bucket(first_lane=lane, samples=(sample,)) for lane, sample in enumerate(SAMPLES[:4]))
)


def read_or_fail(sample: Sample) -> SampleTokens:
    """Samples 2 and 4, of lanes 1 and 3, are unreadable."""
    if sample.sample_id in (2, 4):
        raise DataError(f"sample {sample.sample_id} is torn", sample_id=sample.sample_id)
    return read_telling_tokens(sample)


def read_too_little(sample: Sample) -> SampleTokens:
    """Sample 3, of lane 2, has lost its last token."""
    whole = read_telling_tokens(sample)
    if sample.sample_id != 3:
        return whole
    return SampleTokens(whole.tokens[:-1], whole.labels[:-1], whole.loss_mask[:-1])


def one_each(*held: int) -> Plan:
    return one_row(FOUR_LANES, *(Bucket(first_lane=lane, samples=(SAMPLES[i],)) for lane, i in enumerate(held)))


def with_another_mask() -> Plan:
    buckets = list(ONE_SAMPLE_A_LANE.micro_batches[0].buckets)
    buckets[1] = Bucket(first_lane=1, samples=(dataclasses.replace(SAMPLES[1], mask=FULL),))
    return one_row(FOUR_LANES, *buckets)


class Fault(NamedTuple):
    """What goes wrong on which lanes, and what all ranks say of it."""

    kind: type
    says: str
    plan: Plan = ONE_SAMPLE_A_LANE
    lanes: tuple[int, ...] = (0, 1, 2, 3)
    read: Callable[[Sample], SampleTokens] = read_telling_tokens
    verify: str = "digest"


FAULTS = {
    "unreadable samples": Fault(DataError, r"^sample 2 is torn \(rank 1\)$", read=read_or_fail),
    "a changed sample": Fault(
        DataError,
        "sample 3 has 0 tokens, 0 labels and a loss mask of 0, its index says 1.*index it again",
        read=read_too_little,
    ),
    "other masks than the batch": Fault(
        IllegalPlanError,
        "has sample 2 with the mask full, this rank's global batch says None: all ranks must read",
        with_another_mask(),
    ),
    "different plans": Fault(
        DisagreementError, "ranks disagree on the plan of step 0", one_each(3, 2, 1, 0), lanes=(2,)
    ),
    "an illegal plan": Fault(IllegalPlanError, "", one_each(0, 1, 2, 0), verify="full"),
}


def fail_to_wrap() -> dict[str, tuple[type, str, dict[str, Any], float]]:
    """Return each error of this rank and the seconds until it came; after each, do what the next step begins with."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(FOUR_LANES, timeout_s=30, exchanges=("p2p",))
    by_id, found = {sample.sample_id: sample for sample in SAMPLES}, {}
    for name, fault in FAULTS.items():
        wrapper = DataIteratorWrapper(
            plan_source=fixed_plan(fault.plan if groups.lane in fault.lanes else ONE_SAMPLE_A_LANE, groups),
            read_sample=lambda sample_id, read=fault.read: read(by_id[sample_id]),
            groups=groups,
            chunks=BOTH,
            verify=fault.verify,
        )
        started = patience.now_s()
        with pytest.raises(DynamicCPError) as caught:
            wrapper.wrap(0, SAMPLES[:4])
        found[name] = type(caught.value), str(caught.value), caught.value.details, patience.now_s() - started
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == FOUR_LANES.world_size, f"ranks are out of step after {name}"
    return found


def test_faults_fail_all_ranks_alike() -> None:
    ranks = run_ranks(4, fail_to_wrap, timeout_s=60)
    for name, fault in FAULTS.items():
        errors = [rank[name] for rank in ranks]
        for kind, message, _, seconds in errors:
            assert kind is fault.kind, name
            assert re.search(fault.says, message), message
            assert seconds < 10
        if fault.kind is not DisagreementError:  # which says what this rank has
            assert len({message for _, message, *_ in errors}) == 1
    assert ranks[0]["unreadable samples"][2] == {"sample_id": 2}
