"""Plans as arrays say what the plan says, for any number of lanes; wrong arguments are named."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp import DynamicCPError, check_plan, load_hardware, load_model, plan_lengths, simulate
from dynamic_cp.decide.plan_arrays import PlanArrays
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.pricing.allowed import allowed_cp_sizes
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import PlanOptions, Problem, Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, samples_of, tiny_cost_model

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


def planned(seqlens: Any, **changes: Any) -> PlanArrays:
    arguments: dict[str, Any] = {"num_lanes": 6, "max_tokens_per_rank": 256, "model": TINY_MODEL}
    return plan_lengths(seqlens, **(arguments | {"hardware": TINY_HARDWARE, "cp_comm_types": "p2p"} | changes))


class Elsewhere:
    """Like a tensor that NumPy cannot see."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self._error("it is on cuda:0")


@settings(max_examples=20)
@given(
    seqlens=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    num_lanes=st.integers(1, 9),
    pp_size=st.sampled_from((1, 2)),
    tp_size=st.sampled_from((1, 2)),
    exchanges=st.sampled_from(("p2p", "auto", ("a2a", "p2p"))),
)
def test_arrays_say_what_the_plan_says(
    seqlens: list[int], num_lanes: int, pp_size: int, tp_size: int, exchanges: Any
) -> None:
    plan = planned(
        seqlens, num_lanes=num_lanes, pp_size=pp_size, tp_size=tp_size, sequence_parallel=tp_size > 1,
        max_tokens_per_rank=512, cp_comm_types=exchanges,
    )  # fmt: skip
    inner = plan.planned.plan
    check_plan(inner, samples_of(seqlens))
    assert plan.num_lanes == num_lanes
    assert sorted(plan.sample_order) == list(range(len(seqlens)))
    seen: list[int] = []
    for index, micro_batch in enumerate(inner.micro_batches):
        for lane in range(num_lanes):
            bucket = micro_batch.bucket_of_lane(lane)
            samples = plan.samples_of(lane, index)
            assert samples.tolist() == [sample.sample_id for sample in bucket.samples]
            assert (plan.micro_batch_of_sample[samples] == index).all()
            assert (plan.first_lane_of_sample[samples] == bucket.first_lane).all()
            assert (plan.cp_size_of_sample[samples] == bucket.cp_size).all()
            assert plan.first_lane[index, lane] == bucket.first_lane
            assert plan.cp_size[index, lane] == bucket.cp_size
            assert plan.inner_cp_size[index, lane] == bucket.inner_cp_size
            assert plan.cp_comm_type[index, lane] == bucket.cp_comm_type
            tokens = rank_tokens(bucket, inner.topology.rank_token_multiple)
            assert plan.rank_tokens[index, lane] == tokens
            padded = plan.padded_seqlens_of(lane, index)
            assert padded.sum() == tokens * bucket.cp_size
            assert len(padded) == max(1, len(samples))
            assert (padded[: len(samples)] >= np.array(seqlens)[samples]).all()
            assert plan.is_first(lane, index) == (lane == bucket.first_lane)
            if plan.is_first(lane, index):
                seen += samples.tolist()
    assert sorted(seen) == list(range(len(seqlens)))


@settings(max_examples=20)
@given(
    seqlens=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    num_lanes=st.integers(1, 9),
    max_cp_size=st.sampled_from((1, 4)),
    pp_size=st.sampled_from((1, 2)),
)
def test_a_longer_sample_runs_alone_and_all_others_keep_the_limit(
    seqlens: list[int], num_lanes: int, max_cp_size: int, pp_size: int
) -> None:
    largest = min(max_cp_size, 1 << (num_lanes.bit_length() - 1))
    changes = {"num_lanes": num_lanes, "max_cp_size": largest, "pp_size": pp_size}
    plan = planned(seqlens, **changes, overlong="alone")
    inner = plan.planned.plan
    check_plan(inner, samples_of(seqlens))
    for bucket in inner.buckets:
        is_alone = len(bucket.samples) == 1 and bucket.num_tokens > 256 * largest
        assert is_alone or rank_tokens(bucket, 1) <= 256
    prices = tiny_cost_model(inner.topology, max_tokens_per_rank=inner.max_tokens_per_rank, bytes_per_element=2)
    assert plan.predicted_s == pytest.approx(simulate(inner, prices).iteration_s)
    if max(seqlens) <= 256 * largest:
        assert plan.digest == planned(seqlens, **changes).digest


def test_lanes_beside_a_longer_sample_do_the_rest() -> None:
    plan = planned([700] + [100] * 240, num_lanes=4, max_cp_size=1, overlong="alone")
    assert plan.imbalance < 1.02  # from the fewest micro-batches alone, annealing ends at 1.13
    packs = plan.packs()
    assert sorted(sample for row in packs for pack in row for sample in pack) == list(range(241))
    assert {len(row) for row in packs} == {plan.num_microbatches}
    assert all(pack and (pack == [0] or len(pack) <= 2) for row in packs for pack in row)
    with pytest.raises(InvalidInputError, match="3 samples at CP sizes up to 1 leave some of 6 places"):
        planned([200, 200, 30], max_cp_size=1).packs()


def test_a_longer_sample_runs_alone_where_the_host_decides() -> None:
    job = {"model": "qwen2.5-7b", "hardware": "h100", "tp_size": 4, "sequence_parallel": True}
    plan = plan_lengths(
        [3000, 500], num_lanes=2, max_tokens_per_rank=1024, max_cp_size=1, check_memory=False, overlong="alone", **job
    )
    assert plan.packs() == [[[0]], [[1]]]


SLIMES = (
    ((0,), (14,), (11, 15), (6, 9, 10, 12)), ((1,), (7,), (2, 4, 8), (3, 5, 13)),
)  # fmt: skip
"""What `build_dp_schedule` of slime 624b824 makes of LENGTHS: [rank][micro-batch], cap 8192, FLOPs balanced twice."""
LENGTHS = [15000, 9000, 700, 4000, 3500, 300, 2000, 8000, 1500, 800, 200, 5000, 2500, 1200, 6000, 400]


def test_packs_on_the_page_are_as_slimes_and_not_slower() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/other-loops.md").read_text(encoding="utf-8")
    (code,) = (one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PlannedPacker" in one)
    theirs: dict[str, Any] = {}
    exec(code, theirs)
    config, sizes = {"dp_size": 2, "cp_size": 1}, {"global_batch_size": 16, "rollout_indices": range(16)}
    found = theirs["build_dp_schedule"](SimpleNamespace(max_tokens_per_gpu=8192), config, LENGTHS, **sizes)
    partitions, indices, *numbers = found
    assert numbers == [[len(indices[0])], [16]]
    rows = [[[part[at] for at in one] for one in row] for part, row in zip(partitions, indices, strict=True)]
    assert [[at for one in row for at in one] for row in indices] == [list(range(len(part))) for part in partitions]
    assert all(len(pack) == 1 or sum(LENGTHS[one] for one in pack) <= 8192 for row in rows for pack in row)
    options = PlanOptions(max_tokens_per_rank=15000, cp_comm_types=("p2p",))
    names = {"model": load_model("qwen2.5-7b"), "hardware": load_hardware("h100")}
    price = CostModel(Problem(topology=Topology(num_lanes=2), options=options, **names)).duration_ns
    packs = [[[LENGTHS[one] for one in pack] for pack in row] for row in (*rows, *SLIMES)]
    ranks = [sum(price(1, 0, sum(one), sum(length**2 for length in one)) for one in row) for row in packs]
    assert max(ranks[:2]) <= max(ranks[2:])
    bins = theirs["PlannedPacker"]()._pack_implementation(LENGTHS)
    assert sorted(sample for pack in bins for sample in pack) == list(range(16))
    assert max(sum(LENGTHS[one] for one in pack) for pack in bins) <= 16384


def test_lists_arrays_and_tensors_give_one_plan() -> None:
    torch = pytest.importorskip("torch")
    seqlens = [500, 3, 70, 70, 9]
    digests = {planned(given).digest for given in (seqlens, tuple(seqlens), np.array(seqlens, np.int32))}
    digests.add(planned(torch.tensor(seqlens)).digest)
    digests.add(planned(seqlens, num_lanes=np.int64(6), max_tokens_per_rank=np.int32(256)).digest)
    digests.add(planned(seqlens, sequence_parallel=np.bool_(False)).digest)
    assert len(digests) == 1


def test_model_by_name_or_hugging_face_config() -> None:
    assert planned([9], model="llama-3-8b", hardware="h100").predicted_s > planned([9], model=LLAMA).predicted_s > 0


def test_travels_as_a_pickle_and_cannot_be_changed() -> None:
    plan = planned([500, 3, 70])
    other = pickle.loads(pickle.dumps(plan))
    assert other.digest == plan.digest
    assert other.samples_of(0, 0).tolist() == plan.samples_of(0, 0).tolist()
    for one in (plan, other):
        with pytest.raises(ValueError, match="read-only"):
            one.cp_size[0, 0] = 7
        with pytest.raises(ValueError, match="read-only"):
            one.sample_order[0] = 7


def test_a_sample_too_long_is_named_with_both_numbers_and_your_argument() -> None:
    with pytest.raises(InfeasibleSampleError, match=r"sample 1 has 1100 tokens.*holds 1024.*max_tokens_per_rank") as at:
        planned([5, 1100])
    assert (at.value.sample_id, at.value.seqlen, at.value.capacity_tokens) == (1, 1100, 1024)


@pytest.mark.parametrize(
    ("seqlens", "changes", "message"),
    [
        ([], {}, r"shape \(0,\)"), (5, {}, r"shape \(\)"), ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([[1, 2], [3]], {}, "no array"), ([1.5], {}, "float64, integers"), ([True], {}, "bool, integers"),
        (Elsewhere(TypeError), {}, "no array: it is on cuda:0: .*CPU tensor"),
        (Elsewhere(RuntimeError), {}, "no array: it is on cuda:0: .*CPU tensor"),
        ([3, 0], {}, r"seqlens\[1\] is 0"),
        ([3, -1], {}, r"seqlens\[1\] is -1"),
        ([2**31], {}, r"seqlens\[0\] is 2147483648"),
        ([3], {"num_lanes": 0}, "num_lanes is 0"),
        ([3], {"num_lanes": 2.0}, "num_lanes is 2.0, an integer"),
        ([3], {"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
        ([3], {"max_tokens_per_rank": "many"}, "max_tokens_per_rank is 'many': give tokens, or 'auto'"),
        ([3], {"max_tokens_per_rank": "auto"}, "hardware 'tiny' gives no hbm_bytes.*: give max_tokens_per_rank"),
        ([3], {"distributed_optimizer": 1}, "distributed_optimizer is 1, True or False"),
        ([3], {"check_memory": "no"}, "check_memory is 'no', True or False"),
        ([3], {"overlong": "drop"}, "overlong is 'drop': give 'error'"),
        ([3], {"overlong": "alone", "masks": "full"}, "without masks 'alone'"),
        ([3], {"max_cp_size": 8}, "max_cp_size is 8, the largest group of 6 lanes has 4: give at most 4"),
        ([3], {"min_cp_size": 4, "max_cp_size": 2}, "lower min_cp_size"),
        ([3], {"cp_comm_types": "ring"}, "'ring' is unknown"),
        ([3], {"cp_comm_types": ()}, "cp_comm_types"),
        ([3], {"cp_comm_types": None}, "cp_comm_types is None: give 'auto', or some of p2p"),
        ([3], {"sequence_parallel": "no"}, "sequence_parallel is 'no', True or False"),
        ([3], {"policy": "best"}, "policy 'best' is unknown"),
        ([3], {"model": "llama"}, "none of the bundled models"),
        ([3], {"model": {}}, "model_type is None"),
        ([3], {"hardware": "b100"}, "none of the bundled hardware"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(seqlens: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DynamicCPError, match=message):
        planned(seqlens, **changes)


def test_an_exchange_that_cannot_serve_a_sample() -> None:
    with pytest.raises(
        UnsupportedFeatureError, match=r"1200 tokens.*cp_comm_types a2a can serve holds 1024: allow p2p"
    ):
        planned([1200], num_lanes=8, cp_comm_types="a2a")


@pytest.mark.parametrize(("lane", "micro_batch"), [(6, 0), (-1, 0), (0, 1), (0, -1), (1.0, 0), ("0", 0)])
def test_places_outside_the_plan(lane: Any, micro_batch: int) -> None:
    plan = planned([3])
    with pytest.raises(InvalidInputError, match="is not in the plan"):
        plan.samples_of(lane, micro_batch)


def test_remedies_name_arguments_of_plan_lengths() -> None:
    """What a message tells to change must be an argument, beside the flag that only Megatron's users have."""
    options = PlanOptions(max_tokens_per_rank=8, min_cp_size=2, max_cp_size=1, cp_comm_types=("p2p",))
    with pytest.raises(InvalidInputError, match=r"min_cp_size \(--min-dynamic-cp-size\)"):
        allowed_cp_sizes(Topology(num_lanes=2), options)


EIGHT_B: dict[str, Any] = {"model": "llama-3-8b", "hardware": "h100", "num_lanes": 8, "recompute": "full"}


def test_a_plan_that_needs_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryLimitError, match=r"229\.\d+ GB .* 75\.35 GB are available") as at:
        planned([30_000, 20_000], **(EIGHT_B | {"max_tokens_per_rank": 32768, "max_cp_size": 1, "recompute": "none"}))
    assert at.value.needed_bytes > 3 * at.value.available_bytes
    for remedy in ("lower max_tokens_per_rank (--", "recompute more", "a larger tp_size (--", "check_memory=False"):
        assert remedy in str(at.value)
    # The same where the loop keeps less state than Megatron does, and where the memory is not known.
    for other in ({"check_memory": False}, {"hardware": "cpu"}):
        changes = {"max_tokens_per_rank": 32768, "max_cp_size": 1, "recompute": "none", **other}
        assert planned([30_000, 20_000], **(EIGHT_B | changes)).num_microbatches == 1


def test_the_limit_that_follows_from_memory() -> None:
    seqlens = [30_000, 12_000, 7_000, 7_500]
    found = planned(seqlens, **(EIGHT_B | {"max_tokens_per_rank": "auto"}))
    memory = MemoryModel(
        Problem(
            topology=Topology(num_lanes=8),
            model=load_model("llama-3-8b"),
            hardware=load_hardware("h100"),
            options=PlanOptions(max_tokens_per_rank=1, recompute="full", cp_comm_types=("p2p",)),
        )
    )
    limit = found.planned.plan.max_tokens_per_rank
    assert limit == memory.max_tokens_per_rank(30_000)
    assert found.digest == planned(seqlens, **(EIGHT_B | {"max_tokens_per_rank": limit})).digest
    whole = planned(seqlens, **(EIGHT_B | {"max_tokens_per_rank": "auto", "num_lanes": 16}))
    assert limit < whole.planned.plan.max_tokens_per_rank, "more lanes hold less of the optimizer each"
    with pytest.raises(MemoryLimitError, match="use the distributed optimizer"):
        planned(seqlens, **(EIGHT_B | {"max_tokens_per_rank": "auto", "distributed_optimizer": False}))
