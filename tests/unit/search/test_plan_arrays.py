"""Plans as arrays say what the plan says, for any number of lanes; wrong arguments are named."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamic_cp import DynamicCPError, check_plan, load_hardware, load_model, plan_lengths, simulate
from dynamic_cp.decide.plan_arrays import PlanArrays
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, MemoryLimitError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.pricing.allowed import allowed_cp_sizes
from dynamic_cp.types import PlanOptions, Problem, Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, samples_of, tiny_cost_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


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
        seqlens,
        num_lanes=num_lanes,
        pp_size=pp_size,
        tp_size=tp_size,
        sequence_parallel=tp_size > 1,
        max_tokens_per_rank=512,
        cp_comm_types=exchanges,
    )
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


def test_fewer_samples_than_lanes() -> None:
    plan = planned([30, 20], num_lanes=7)
    assert plan.num_microbatches == 1
    assert set(plan.sample_order) == {0, 1}
    empty = [lane for lane in range(7) if not len(plan.samples_of(lane, 0))]
    assert empty
    assert all(plan.padded_seqlens_of(lane, 0).tolist() == [1] for lane in empty)


def test_no_context_parallelism_where_none_is_allowed() -> None:
    seqlens = np.random.default_rng(0).integers(1, 250, 40)
    plan = planned(seqlens, max_cp_size=1)
    assert (plan.cp_size == 1).all()
    assert plan.num_microbatches > 1
    tokens = np.zeros(plan.cp_size.shape)
    np.add.at(tokens, (plan.micro_batch_of_sample, plan.first_lane_of_sample), seqlens)
    assert tokens.max() <= 256
    assert tokens.sum() == seqlens.sum()


def test_lists_arrays_and_tensors_give_one_plan() -> None:
    torch = pytest.importorskip("torch")
    seqlens = [500, 3, 70, 70, 9]
    digests = {planned(given).digest for given in (seqlens, tuple(seqlens), np.array(seqlens, np.int32))}
    digests.add(planned(torch.tensor(seqlens)).digest)
    digests.add(planned(seqlens, num_lanes=np.int64(6), max_tokens_per_rank=np.int32(256)).digest)
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


def test_numpys_own_truth_values_are_pythons() -> None:
    """JSON, of which a digest is made, does not know them."""
    plans = [planned([500, 3], tp_size=2, sequence_parallel=on) for on in (True, np.bool_(True))]
    assert plans[0].digest == plans[1].digest != planned([500, 3], tp_size=2).digest


def test_a_sample_too_long_is_named_with_both_numbers_and_your_argument() -> None:
    with pytest.raises(InfeasibleSampleError, match=r"sample 1 has 1100 tokens.*holds 1024.*max_tokens_per_rank") as at:
        planned([5, 1100])
    assert (at.value.sample_id, at.value.seqlen, at.value.capacity_tokens) == (1, 1100, 1024)


@pytest.mark.parametrize(
    ("seqlens", "changes", "message"),
    [
        ([], {}, r"shape \(0,\)"),
        (5, {}, r"shape \(\)"),
        ([[1, 2]], {}, r"shape \(1, 2\)"),
        ([[1, 2], [3]], {}, "no array"),
        ([1.5], {}, "float64, integers"),
        ([True], {}, "bool, integers"),
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
)
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


def test_values_are_short_when_printed() -> None:
    generator = np.random.default_rng(0)
    found = planned(generator.integers(1, 500, 3000))
    plan, batch = found.planned.plan, GlobalBatch.of(samples_of([5, 900] * 999))
    timeline = simulate(plan, tiny_cost_model(Topology(num_lanes=6), max_tokens_per_rank=256))
    texts = [repr(found), repr(found.planned), repr(plan), repr(batch), repr(timeline)]
    assert max(map(len, texts)) < 400, texts
    assert "3000 samples" in texts[0]
    assert f"{found.num_microbatches} micro-batches" in texts[0]
    assert "on 6 lanes" in texts[0]
    assert f"{found.predicted_s:.4g} s" in texts[1]
    assert "3000 samples" in texts[2]
    assert texts[3] == "<GlobalBatch: 1998 samples, 904095 tokens, longest 900>"
    assert "source" not in repr(load_hardware("h100"))
