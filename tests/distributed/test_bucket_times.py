"""Times of micro-batches: each once, of the right one, least over a CP group, without what other programs took."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dynamic_cp.errors import DisagreementError
from dynamic_cp.learning.observations import Observation
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.types import Bucket, MicroBatch, Plan
from megatron.dynamic_cp.measuring import alone_s
from megatron.dynamic_cp.step import schedule
from megatron.dynamic_cp.step.bucket_times import BucketTimes, least_of_equal_keys
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import BATCHES, Layout, mixed_plan, samples_of
from tests.distributed.trainee import Trainee
from tests.unit.support import TINY_MODEL

SAMPLES = BATCHES["long_tail"]
LINES = ("two a2a", "one pp2", "one pp2 vpp2", "one tp2 sp full", "two pp2")
DELAY_S = 0.3
"""Longer than a loaded machine makes a small micro-batch wait."""


class SleepBackward(torch.autograd.Function):
    """Identity whose backward takes some time."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


def slowed(forward_s: dict[int, float], backward_s: dict[int, float]) -> Callable[..., Any]:
    """Return a forward step that takes longer for some micro-batches; for the first chunk called (chunk 0) only."""
    first: list[Any] = []

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> Any:
        batches: list[Any] = []
        output, loss_func = schedule.forward_step((batches.append(b) or b for b in data_iterator), model)
        first[:] = first or [model]
        if model is not first[0]:
            return output, loss_func
        index = int(batches[0]["packed_seq_params"].label.split("micro-batch ")[1].split(",")[0])
        time.sleep(forward_s.get(index, 0.0))
        return SleepBackward.apply(output, backward_s.get(index, 0.0)), loss_func

    return forward_step


def build_times(trainee: Trainee, **options: Any) -> BucketTimes:
    return BucketTimes(
        trainee.model, stage=parallel_state.get_pipeline_model_parallel_rank(), lane=trainee.groups.lane,
        device=torch.device("cpu"), shape=TINY_MODEL, **options,
    )  # fmt: skip


def time_steps(layout: Layout, plan: Plan, num_steps: int, forward_step: Callable[..., Any]) -> dict[str, Any]:
    """Run steps with times; return each step's own times and duration, the gathered ones, and both gradients."""
    trainee = Trainee(layout)
    packed = trainee.pack(plan, SAMPLES)
    rank_tokens = [bucket.rank_tokens for bucket in packed.buckets]
    trainee.run(packed, rank_tokens=rank_tokens)
    without = trainee.gradients()
    times = build_times(trainee, forward_step=forward_step)
    steps = []
    for _ in range(num_steps):
        started = time.perf_counter()
        trainee.run(packed, rank_tokens=rank_tokens, forward_step_func=times.forward_step)
        steps.append((times.end_step(), time.perf_counter() - started))
    with_times = trainee.gradients()
    gathered = times.gather()
    trainee.run(packed, rank_tokens=rank_tokens, forward_step_func=times.forward_step, forward_only=True)
    return {
        "steps": steps,
        "gathered": gathered,
        "same": all(torch.equal(with_times[name], gradient) for name, gradient in without.items()),
        "num_gradients": len(without),
        "of_evaluation": times.end_step(),
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "lane": trainee.groups.lane,
    }


def facts(one: Observation) -> tuple[Any, ...]:
    exchange = one.cp_comm_type, one.inner_cp_size
    return one.stage, one.chunk, one.first_lane, one.cp_size, exchange, one.tokens, one.tokens_squared


def expected_facts(plan: Plan, stage: int, chunk: int, lane: int | None = None) -> list[tuple[Any, ...]]:
    """Return the facts of the buckets of a lane (None: of all lanes) in the order of micro-batches."""
    expected = []
    for micro_batch in plan.micro_batches:
        for bucket in micro_batch.buckets if lane is None else [micro_batch.bucket_of_lane(lane)]:
            seqlens = padded_seqlens(
                (s.seqlen for s in bucket.samples), bucket.cp_size, plan.topology.rank_token_multiple
            )
            squares = sum(seqlen**2 for seqlen in seqlens)
            exchange = bucket.cp_comm_type, bucket.inner_cp_size
            expected.append((stage, chunk, bucket.first_lane, bucket.cp_size, exchange, sum(seqlens), squares))
    return expected


@pytest.mark.by_day("two a2a")
@pytest.mark.parametrize("line", LINES)
def test_every_micro_batch_is_timed_once_on_every_chunk(line: str) -> None:
    layout = layout_of(line)
    plan = mixed_plan(SAMPLES, layout)
    ranks = run_ranks(layout.topology.world_size, time_steps, layout, plan, 2, schedule.forward_step, timeout_s=90)
    num_compared, shares = 0, []
    for rank in ranks:
        assert rank["same"], "timing changed a gradient"
        assert rank["num_gradients"] > 10
        assert rank["of_evaluation"] == []
        assert rank["gathered"] == ranks[0]["gathered"]
        for observations, duration_s in rank["steps"]:
            for chunk in range(layout.vpp):
                found = [facts(one) for one in observations if one.chunk == chunk]
                assert found == expected_facts(plan, rank["stage"], chunk, rank["lane"])
                num_compared += len(found)
            assert len(observations) == plan.num_microbatches * layout.vpp
            seconds = [seconds for one in observations for seconds in (one.forward_s, one.backward_s)]
            assert min(seconds) > 0
            assert sum(seconds) < duration_s
            shares.append(sum(seconds) / duration_s)
    assert num_compared == 2 * layout.topology.world_size * layout.vpp * plan.num_microbatches
    if layout.pp == 1:
        assert max(shares) > 0.4, "without a pipeline, most of a step is forward and backward"
    check_gathered(layout, plan, ranks)


def check_gathered(layout: Layout, plan: Plan, ranks: Sequence[dict[str, Any]]) -> None:
    """Every bucket once per stage, chunk and step, with the least times of its ranks."""
    gathered = ranks[0]["gathered"]
    stages = [(stage, chunk) for stage in range(layout.pp) for chunk in range(layout.vpp)]
    expected = Counter(one for stage, chunk in stages for one in expected_facts(plan, stage, chunk) * 2)
    assert Counter(facts(one) for one in gathered) == expected
    own = [one for rank in ranks for observations, _ in rank["steps"] for one in observations]
    assert {one.forward_s for one in gathered} <= {one.forward_s for one in own}
    for one in gathered:
        same = [other for other in own if facts(other) == facts(one)]
        assert len(same) >= 2 * one.cp_size * layout.tp
        assert one.forward_s >= min(other.forward_s for other in same)
        assert one.backward_s >= min(other.backward_s for other in same)


@pytest.mark.by_day("one pp2 vpp2")
@pytest.mark.parametrize("line", ["one pp2", "one pp2 vpp2"])
def test_time_belongs_to_its_micro_batch(line: str) -> None:
    """On each stage, micro-batch 1 is slow forward and 2 backward, on its first chunk: nothing else gets longer."""
    layout = layout_of(line)
    plan = mixed_plan(samples_of(30, 31, 32, 33, 34, 35, 36, 37), layout)
    forward_step = slowed({1: DELAY_S}, {2: DELAY_S})
    ranks = run_ranks(2, time_slowed, layout, plan, forward_step, timeout_s=60)
    for observations in ranks:
        of_chunk = [one for one in observations if one.chunk == 0]
        for slow, seconds in ((1, [one.forward_s for one in of_chunk]), (2, [one.backward_s for one in of_chunk])):
            assert seconds[slow] > 0.9 * DELAY_S > max(seconds[:slow] + seconds[slow + 1 :])
        if layout.vpp > 1:
            others = [one for one in observations if one.chunk == 1]
            assert max(max(one.forward_s, one.backward_s) for one in others) < 0.9 * DELAY_S


def time_slowed(layout: Layout, plan: Plan, forward_step: Callable[..., Any]) -> list[Observation]:
    trainee = Trainee(layout)
    packed = trainee.pack(plan, samples_of(30, 31, 32, 33, 34, 35, 36, 37))
    trainee.run(packed)
    times = build_times(trainee, forward_step=forward_step)
    steps = []
    for _ in range(3):
        trainee.run(packed, forward_step_func=times.forward_step)
        steps.append(times.end_step())
    return [least(of_one) for of_one in zip(*steps, strict=True)]


def least(same: Sequence[Observation]) -> Observation:
    """Return the least times of one bucket: a loaded machine may stop a rank for long, hardly thrice at one place."""
    assert len({facts(one) for one in same}) == 1
    forward_s, backward_s = min(one.forward_s for one in same), min(one.backward_s for one in same)
    return dataclasses.replace(same[0], forward_s=forward_s, backward_s=backward_s)


def test_waiting_for_a_peer_is_left_out() -> None:
    """Lane 1 comes late to a bucket of both: lane 0 waits for it inside its forward pass, the least does not."""
    layout, (sample, *_) = Layout(2), samples_of(200)
    bucket = Bucket(first_lane=0, cp_size=2, samples=(sample,))
    plan = Plan(topology=layout.topology, max_tokens_per_rank=1000, micro_batches=(MicroBatch(buckets=(bucket,)),) * 1)
    (own_0, gathered), (own_1, _) = run_ranks(2, come_late, layout, plan, timeout_s=60)
    assert len(gathered) == len(own_0) == len(own_1) == 3
    assert min(one.forward_s for one in own_0) > 0.9 * DELAY_S > min(one.forward_s for one in own_1)
    assert gathered == [least(of_one) for of_one in zip(own_0, own_1, strict=True)]


def come_late(layout: Layout, plan: Plan) -> tuple[list[Observation], list[Observation]]:
    trainee = Trainee(layout)
    packed = trainee.pack(plan, samples_of(200))
    trainee.run(packed)

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> Any:
        def late() -> Iterator[dict[str, Any]]:
            time.sleep(DELAY_S * trainee.groups.lane)
            yield from data_iterator

        return times.forward_step(late(), model)

    times = build_times(trainee)
    own = []
    for _ in range(3):
        dist.barrier()
        trainee.run(packed, forward_step_func=forward_step)
        own += times.end_step()
    return own, times.gather()


def test_least_ignores_passes_that_did_not_end() -> None:
    def row(micro_batch: int, forward_s: float, backward_s: float) -> list[float]:
        return [0, micro_batch, 0, 0, 0, 2, 0, 1, 64, 4096, 0, forward_s, backward_s]

    nan = float("nan")
    rows = np.array([row(1, 3, 4), row(0, 5, nan), row(1, 2, 6), row(0, nan, nan)])
    found = least_of_equal_keys(rows)
    np.testing.assert_array_equal(found, np.array([row(0, 5, nan), row(1, 2, 4)]))


class FakeEvent:
    """A CUDA event that counts who waits for it."""

    num_waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        FakeEvent.num_waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_events_are_waited_for_after_the_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that a GPU takes, with events of the CPU's clock."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    times, step = trivial_step("cuda")
    started = time.perf_counter()
    for _ in range(3):
        step(times.forward_step)
    duration_s = time.perf_counter() - started
    assert FakeEvent.num_waits == 0
    observations = times.end_step()
    assert FakeEvent.num_waits == 6
    seconds = [seconds for one in observations for seconds in (one.forward_s, one.backward_s)]
    assert len(seconds) == 6
    assert 0 < min(seconds) <= sum(seconds) < duration_s


def gather_unequal() -> tuple[int, str]:
    times, step = trivial_step("cpu", keep_steps=2)
    for _ in range(3):
        step(times.forward_step)
        times.end_step()
    num_kept = sum(map(len, times._steps))
    if dist.get_rank() == 0:
        times._steps.clear()
    with pytest.raises(DisagreementError) as caught:
        times.gather()
    return num_kept, str(caught.value)


def test_only_the_latest_steps_are_kept_and_ranks_must_agree() -> None:
    (num_kept, said), other = run_ranks(2, gather_unequal, timeout_s=60)
    assert (num_kept, said) == other
    assert num_kept == 2
    assert "ranks timed 0 to 2 micro-batches" in said


def trivial_step(device: str, **options: Any) -> tuple[BucketTimes, Callable[[Callable[..., Any]], None]]:
    """Return times of a model that does nearly nothing, and what runs one micro-batch of 32 sequences through it."""

    class Params:
        local_cp_size, cp_comm_type, inner_cp_size, masked_samples = 1, "p2p", 1, None
        padded_seqlens, state_exchange = tuple(range(1, 33)), "heads"

    model = torch.nn.Linear(4, 4)
    x = torch.randn(4, 4)

    def forward_step(data_iterator: Iterator[dict[str, Any]], chunk: torch.nn.Module) -> Any:
        next(data_iterator)
        return chunk(x), lambda output: (output.sum(),)

    def step(timed_forward_step: Callable[..., Any]) -> None:
        output, loss_func = timed_forward_step(iter([{"packed_seq_params": Params}]), model)
        loss_func(output)[0].backward()

    options |= {"shape": TINY_MODEL, "forward_step": forward_step}
    return BucketTimes([model], stage=0, lane=0, device=torch.device(device), **options), step


@pytest.mark.parametrize(
    ("elapsed", "own", "busy", "idle", "expected"),
    [
        (10.0, 20.0, 20.0, 0.0, 10.0),  # two cores, all of them the ranks'
        (10.0, 8.0, 20.0, 0.0, 4.0),  # 12 of 20 seconds were others'
        (10.0, 8.0, 12.0, 8.0, 10.0),  # others took 4, and 8 were left over
        (10.0, 4.0, 500.0, 140.0, 10.0),  # 64 cores, most of them others', but some are free
        (10.0, 6.0, 19.0, 1.0, 6.75),  # others took 13, while now and then a core was free
        (10.0, 25.0, 20.0, 0.0, 10.0),  # ticks are coarse
        (10.0, 8.0, 0.0, 0.0, 10.0),  # the system does not say
    ],
)
def test_what_others_took_is_left_out_where_no_core_was_idle(elapsed, own, busy, idle, expected):
    assert alone_s(elapsed, own, busy, idle) == pytest.approx(expected)
