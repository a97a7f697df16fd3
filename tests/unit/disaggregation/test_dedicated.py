"""Servers without weights: priced by the same tasks, transfers and ticks, and slower than servers in place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamic_cp.cli import main
from dynamic_cp.disaggregation.dedicated import plan_dedicated, problem_without
from dynamic_cp.disaggregation.prices import TaskOptions, TickPrices, TickSeconds
from dynamic_cp.disaggregation.search import PlannedTasks, plan_tasks
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Lambda, Problem, Sample
from tests.unit.disaggregation.test_choice import prices, problem_of
from tests.unit.disaggregation.test_task_plans import HARDWARE, K

IDEAL = TaskOptions(noise_margin=0.0)
ONE_GIANT = [Sample(sample_id=number, seqlen=120 * K if number == 0 else 8 * K) for number in range(90)]


def planned(samples: list[Sample], problem: Problem, number: int, *, knows_memory: bool = False) -> PlannedTasks:
    left = problem_without(problem, number)
    memory = MemoryModel(left) if knows_memory else None
    return plan_dedicated(samples, CostModel(left), replace(IDEAL, attention_servers=number), memory=memory)


def seconds_of(found: PlannedTasks, part: str) -> float:
    return sum(getattr(one, part) for one in found.seconds)


@pytest.fixture(scope="module")
def by_number() -> dict[int, PlannedTasks]:
    """Dedicated servers of 16 -> what they take."""
    problem = problem_of(4)
    return {number: planned(ONE_GIANT, problem, number, knows_memory=True) for number in (4, 8)}


@pytest.fixture(scope="module")
def in_place() -> PlannedTasks:
    return plan_tasks(ONE_GIANT, prices(problem_of(4)), IDEAL)


@pytest.mark.parametrize(
    ("seconds", "total_s"),
    [
        (TickSeconds(8.0, 2.0, 1.0, 1.0), 8.0 + 3.0 / 8),  # layers decide
        (TickSeconds(2.0, 8.0, 1.0, 1.0), 8.0 + 9.0 / 8),  # servers do
        (TickSeconds(2.0, 1.0, 8.0, 8.0), 8.0 + 9.0 / 8),  # links do
        (TickSeconds(4.0, 4.0, 4.0, 4.0), 6.0 + 8.0 / 8),  # a half waits for itself
    ],
)
def test_layers_of_one_half_run_beside_attention_of_the_other(seconds: TickSeconds, total_s: float) -> None:
    assert seconds.on_their_own(4.0, is_in_halves=True).total_s == pytest.approx(total_s)
    alone = seconds.on_their_own(4.0, is_in_halves=False)
    assert alone.total_s == seconds.linear_s + seconds.attention_s + seconds.exchange_s
    # One layer has nothing of another half to run beside, and never takes longer than one half after the other.
    assert seconds.on_their_own(0.5, is_in_halves=True).total_s <= alone.total_s


def test_no_number_of_dedicated_servers_beats_servers_in_place(
    by_number: dict[int, PlannedTasks], in_place: PlannedTasks
) -> None:
    assert all(found.makespan_s > in_place.makespan_s for found in by_number.values())
    # Layers get fewer ranks, attention gets more.
    layers_s, attention_s = ([seconds_of(by_number[n], part) for n in (4, 8)] for part in ("linear_s", "attention_s"))
    assert layers_s == sorted(layers_s)
    assert attention_s == sorted(attention_s, reverse=True)
    assert layers_s[0] < layers_s[-1]
    for number, found in by_number.items():
        assert found.plan.topology.num_lanes == 4 - number // 4
        assert found.plan.num_tokens == sum(sample.seqlen for sample in ONE_GIANT)
        assert found.plan.pool is None
        assert f"{number} of 16 servers dedicated" in found.reason
        assert found.peak_bytes > 0


def test_attention_of_all_servers_is_the_attention_of_the_batch(
    by_number: dict[int, PlannedTasks], in_place: PlannedTasks
) -> None:
    """The busiest server of each tick has at least the mean of what all servers in place compute."""
    pool, of_ticks = in_place.plan.pool, TickPrices(prices(problem_of(4)), IDEAL)
    assert pool is not None
    mean_s = sum(
        float(of_ticks.attention_s(tasks, direction, 16).sum())
        for direction, side in enumerate((pool.forward, pool.backward))
        for tasks in side
    )
    for number, found in by_number.items():
        total_s = seconds_of(found, "attention_s") * number
        assert 0.98 * mean_s <= total_s
        # Ranges are whole tiles and ticks may be uneven to a tolerance where transfers decide.
        assert total_s <= 1.9 * mean_s


def test_ranks_with_weights_have_more_to_do_as_they_get_fewer(by_number: dict[int, PlannedTasks]) -> None:
    busy_s = [max(found.busy_s) for found in by_number.values()]
    assert busy_s == sorted(busy_s)
    assert busy_s[-1] > 1.3 * busy_s[0]


def test_micro_batches_keep_their_tokens_as_far_as_memory_holds_them() -> None:
    """12 of 16 servers leave one lane: four times the tokens of a rank, of 7 micro-batches at once."""
    assert problem_without(problem_of(4), 12).options.max_tokens_per_rank == 4 * 64 * K
    found = planned(ONE_GIANT, problem_of(4), 12)
    assert max(sum(one.seqlen for one in row.buckets[0].samples) for row in found.plan.micro_batches) > 64 * K
    small = replace(problem_of(4), hardware=replace(HARDWARE, hbm_bytes=16 * 10**9))
    assert planned(ONE_GIANT, small, 4).plan.num_tokens == found.plan.num_tokens
    with pytest.raises(InfeasibleSampleError, match="within memory"):
        planned(ONE_GIANT, small, 12, knows_memory=True)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "--attention-servers 0 leaves 16 of 16"),
        (3, "leaves 13 of 16 servers (lanes by stages) for the layers of 4 stages"),
        (16, "give a multiple of 4 up to 12"),
        (-4, "leaves 20 of 16"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_numbers(number: int, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        problem_without(problem_of(4), number)
    assert said in str(caught.value)


def test_masks_are_refused_as_for_any_pool() -> None:
    masked = [Sample(sample_id=0, seqlen=8 * K, mask=Lambda(0, 512))]
    with pytest.raises(UnsupportedFeatureError, match="use placed attention"):
        planned(masked, problem_of(4), 4)


JOB = (
    "simulate --lengths prolong --max-seqlen 32768 --global-batch-size 16 --lanes 2 --tp 8 --pp 2 --recompute full "
    "--max-tokens-per-rank 32768 --batches 1"
)


def test_the_command_compares_them_and_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB.split(), "--policy", "pool", "--attention-servers", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "pool-dedicated, priced only: 2 of 4 servers dedicated" in shown
    assert "both on all 4 take" in shown
    assert main([*JOB.split(), "--policy", "pool-dedicated"]) == 2
    assert "policy pool-dedicated has 0 dedicated servers" in capsys.readouterr().err
    assert main([*JOB.split(), "--policy", "pool", "--attention-servers", "3"]) == 2
    assert "give a multiple of 2 up to 2" in capsys.readouterr().err
