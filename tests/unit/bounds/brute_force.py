"""Every legal plan of a tiny batch, one after the other: what the exact search and the bounds are held against."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from dynamic_cp.memory.activations import tokens_of_states
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.padding import rank_tokens
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import BucketCost, CostModel
from dynamic_cp.types import Bucket, Plan, PlanOptions, Problem, Sample, Topology
from tests.unit.support import TINY_HARDWARE, TINY_MODEL, plan_of_buckets, samples_of


class Best(NamedTuple):
    plan: Plan
    makespan_s: float
    num_plans: int


class Remembered:
    """Prices of a cost model, each bucket priced once."""

    def __init__(self, model: CostModel) -> None:
        self.reduction = model.reduction
        self.table = model.table
        self._costs: dict[Bucket, BucketCost] = {}
        self._model = model

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        if bucket not in self._costs:
            self._costs[bucket] = self._model.bucket_cost(bucket)
        return self._costs[bucket]


def best_plan(samples: tuple[Sample, ...], model: CostModel, counts: range) -> Best | None:
    """Return the fastest plan with a number of micro-batches in `counts`; None when there is no legal one."""
    best, best_ns, num_plans = None, 0, 0
    remembered = Remembered(model)
    for num_microbatches in counts:
        for plan in all_plans(samples, model, num_microbatches):
            num_plans += 1
            total_ns = makespan_ns(plan, remembered)
            if best is None or total_ns < best_ns:
                best, best_ns = plan, total_ns
    if best is None:
        return None
    check_plan(best, samples)
    return Best(best, best_ns / 1e9, num_plans)


def all_plans(samples: tuple[Sample, ...], model: CostModel, num_microbatches: int) -> Iterator[Plan]:
    topology, options = model.topology, model.options

    @cache
    def bucket_of(
        first_lane: int, cp_size: int, inside: tuple[Sample, ...], exchange: str, inner: int, way: str
    ) -> Bucket:
        return Bucket(
            first_lane=first_lane, cp_size=cp_size, samples=inside, cp_comm_type=exchange, inner_cp_size=inner,
            state_exchange=way,
        )  # fmt: skip

    of_state = tokens_of_states(model.model, topology, options)

    def ways_of(bucket: Bucket) -> tuple[str, ...]:
        """Every way to share linear attention: states where these fit alone, heads unless states are asked for."""
        held = rank_tokens(bucket, topology.rank_token_multiple) + len(bucket.samples) * of_state
        if bucket.cp_size == 1 or not model.may_pass_on_states or held > options.max_tokens_per_rank:
            return ("heads",)
        return ("heads", "states") if options.state_exchange == "auto" else ("states",)

    def fits(bucket: Bucket) -> bool:
        return rank_tokens(bucket, topology.rank_token_multiple) <= options.max_tokens_per_rank

    sizes = [k for k in range(topology.num_lanes.bit_length()) if k == 0 or model.table.capacities[k] > 0]
    one_is_allowed = model.table.capacities[0] > 0
    for rows in product(tuple(tilings(topology.num_lanes, sizes)), repeat=num_microbatches):
        slots = [(row, lane, k) for row, tiling in enumerate(rows) for lane, k in tiling]
        for places in product(range(len(slots)), repeat=len(samples)):
            inside: list[list[Sample]] = [[] for _ in slots]
            for sample, place in zip(samples, places, strict=True):
                inside[place].append(sample)
            choices = []
            for (_, lane, k), held in zip(slots, inside, strict=True):
                if (k > 0 and not held) or (k == 0 and held and not one_is_allowed):
                    break
                exchanges, where = exchanges_of(model, lane, k), (lane, 1 << k, tuple(held))
                by_heads = bucket_of(*where, *exchanges[0], "heads")
                buckets = [bucket_of(*where, *exchange, way) for exchange in exchanges for way in ways_of(by_heads)]
                if held and not fits(buckets[0]):
                    break
                choices.append(buckets)
            else:
                for chosen in product(*choices):
                    grid: list[list[Bucket]] = [[] for _ in rows]
                    for (row, _, _), bucket in zip(slots, chosen, strict=True):
                        grid[row].append(bucket)
                    limit = options.max_tokens_per_rank
                    yield plan_of_buckets(*grid, topology=topology, max_tokens_per_rank=limit)


def exchanges_of(model: CostModel, first_lane: int, k: int) -> tuple[tuple[str, int], ...]:
    """Every exchange of the options with every inner size."""
    link = int(model.table.links[k, first_lane >> k])
    rows = slice(int(model.table.first_option[k, link]), int(model.table.end_option[k, link]))
    return model.attentions[rows]


def tilings(num_lanes: int, sizes: list[int], first_lane: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    """All (first lane, log2 of the CP size) that tile the lanes with aligned groups."""
    if first_lane == num_lanes:
        yield ()
    for k in sizes:
        if first_lane % (1 << k) == 0 and first_lane + (1 << k) <= num_lanes:
            for rest in tilings(num_lanes, sizes, first_lane + (1 << k)):
                yield ((first_lane, k), *rest)


class Tiny(NamedTuple):
    samples: tuple[Sample, ...]
    model: CostModel
    counts: range


def tiny_case(seed: int, most_assignments: int, tp_sizes: tuple[int, ...] = (1,)) -> Tiny:
    """Return a random batch with at most about `most_assignments` ways to place the samples.

    With a TP size above 1, sequence parallelism rounds the tokens of a rank."""
    draw = random.Random(seed)
    while True:
        pp_size = draw.choice((1, 1, 2, 2, 3))
        tp_size = draw.choice(tp_sizes)
        topology = Topology(
            num_lanes=draw.choice((1, 2, 2, 3, 4)), tp_size=tp_size, sequence_parallel=tp_size > 1, pp_size=pp_size,
            vp_size=draw.choice((1, 1, 2)) if pp_size == 2 else 1, ranks_per_node=draw.choice((1, 2, 3, 8)),
        )  # fmt: skip
        limit = draw.choice((32, 64, 100))
        options = PlanOptions(
            max_tokens_per_rank=limit,
            bytes_per_element=4,
            min_cp_size=draw.choice((1, 1, 1, 2)) if topology.num_lanes % 2 == 0 else 1,
            cp_comm_types=draw.choice((("p2p",), ("p2p", "a2a+p2p"), ("all_gather", "p2p"), ("p2p", "a2a"))),
            recompute=draw.choice(("none", "selective", "full")),
        )
        longest = limit * topology.max_cp_size
        samples = samples_of(
            draw.choice((draw.randint(1, longest), draw.randint(1, limit), draw.randint(1, 8)))
            for _ in range(draw.randint(1, 5))
        )
        tokens = sum(sample.seqlen for sample in samples)
        multiple = topology.num_microbatches_multiple
        fewest = -(-tokens // (topology.num_lanes * limit))
        fewest = -(-fewest // multiple) * multiple
        counts = range(fewest, fewest + draw.choice((1, 2)) * multiple, multiple)
        slots = topology.num_lanes * counts[-1]
        exchanges = len(options.cp_comm_types) ** counts[-1]
        if slots ** len(samples) * exchanges <= most_assignments:
            model = CostModel(Problem(topology=topology, model=TINY_MODEL, hardware=TINY_HARDWARE, options=options))
            return Tiny(samples, model, counts)
