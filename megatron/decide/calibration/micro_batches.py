"""Whole micro-batches as the trainer runs them: packed, through megatron-core's schedule, on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynamic_cp.decide.calibration.measurements import Measurement
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch, Sample, Topology, largest_power_of_two
from megatron.decide.calibration.bench import Bench
from megatron.decide.calibration.timing import Probe
from megatron.dynamic_cp.data.micro_batches import micro_batches, pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.step.schedule import forward_step

NUM_MICRO_BATCHES = {"buckets": 4, "packs": 2, "held_out": 2}
_TINY_TOKENS = 16
_NUM_PACKS = {"packs": {True: 4, False: 10}, "held_out": {True: 6, False: 18}}
_SEEDS = {"packs": 1, "held_out": 2}


def buckets(bench: Bench) -> list[Measurement]:
    """Measure micro-batches with almost no tokens."""
    numbers = (1,) if bench.setup.quick else (1, 2)
    return _measure(
        bench,
        [
            micro_batch_probe(bench, "buckets", (_TINY_TOKENS * cp_size,) * number, cp_size)
            for cp_size in _cp_sizes(bench)
            for number in numbers
        ],
    )


def packs(bench: Bench) -> list[Measurement]:
    """Measure random packs on each rank alone: a step has colder caches than repeated calls of one part."""
    return _random_packs(bench, "packs", [1])


def held_out(bench: Bench) -> list[Measurement]:
    """Measure other random packs, the same on all ranks, at every CP size in turn."""
    return _random_packs(bench, "held_out", _cp_sizes(bench))


def _random_packs(bench: Bench, section: str, sizes: Sequence[int]) -> list[Measurement]:
    random, probes = np.random.default_rng(_SEEDS[section]), []
    for index in range(_NUM_PACKS[section][bench.setup.quick]):
        cp_size = sizes[index % len(sizes)]
        multiple = 2 * cp_size
        room = cp_size * int(random.uniform(0.2, 1.0) * bench.setup.max_tokens)
        longest = random.uniform(0.1, 1.0) * room
        seqlens: list[int] = []
        while not seqlens or (room >= multiple and len(seqlens) < 24):
            drawn = min(longest, float(random.lognormal(np.log(max(longest / 4, 1.0)), 1.0)), room)
            seqlen = max(1, int(drawn) // multiple) * multiple
            seqlens.append(seqlen)
            room -= seqlen
            if random.random() < 0.1:
                break
        probes.append(micro_batch_probe(bench, section, tuple(seqlens), cp_size))
    return _measure(bench, probes)


def _measure(bench: Bench, probes: Sequence[Probe]) -> list[Measurement]:
    return [replace(one, forward_s=one.forward_s / NUM_MICRO_BATCHES[one.section]) for one in bench.measure(probes)]


def _cp_sizes(bench: Bench) -> list[int]:
    return [1 << k for k in range(largest_power_of_two(bench.place.num_ranks).bit_length())]


def micro_batch_probe(bench: Bench, section: str, seqlens: tuple[int, ...], cp_size: int) -> Probe:
    """Return micro-batches in which every group of `cp_size` lanes has a pack of `seqlens`, the lengths of the whole
    group. Lanes beyond the last whole group have empty places.
    """
    num_lanes = bench.place.num_ranks
    ids = iter(range(1_000_000))
    firsts = range(0, num_lanes - num_lanes % cp_size, cp_size)
    rest = range(firsts.stop, num_lanes)
    plan = Plan(
        topology=Topology(num_lanes=num_lanes, ranks_per_node=bench.place.ranks_per_node),
        max_tokens_per_rank=max(bench.setup.max_tokens, sum(seqlens)),
        micro_batches=tuple(
            MicroBatch(
                buckets=tuple(
                    Bucket(
                        first_lane=first,
                        cp_size=cp_size,
                        samples=tuple(Sample(sample_id=next(ids), seqlen=seqlen) for seqlen in seqlens),
                    )
                    for first in firsts
                )
                + tuple(Bucket(first_lane=lane) for lane in rest)
            )
            for _ in range(NUM_MICRO_BATCHES[section])
        ),
    )
    lengths = {s.sample_id: s.seqlen for batch in plan.micro_batches for b in batch.buckets for s in b.samples}

    def read(sample_id: int) -> SampleTokens:
        tokens = np.random.default_rng(sample_id).integers(bench.setup.shard.vocab_size, size=lengths[sample_id])
        return SampleTokens.repeating(tokens)

    planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * num_lanes, reason="calibration")
    packed = pack_step(lane_plan(plan, bench.groups.lane, PlanFacts.of(planned)), read)
    schedule = get_forward_backward_func()

    def run() -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=micro_batches(packed, bench.groups, bench.device, "calibration", ExchangeStats()),
            model=bench.gpt.ddp,
            num_microbatches=NUM_MICRO_BATCHES[section],
            seq_length=bench.setup.max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )

    # One duration for both passes, because the schedule alternates them without a wait in between.
    row = Measurement(section=section, seqlens=seqlens, cp_size=cp_size, forward_s=0.0)
    tiny = section == "buckets"
    return Probe(row=row, forward=run, num_calls=3 if tiny else 1, waits=cp_size > 1, as_in_a_step=not tiny)
