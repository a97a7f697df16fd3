"""Small values that the planner's tests share."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.planner.frozen import (
    CASES,
    UnpaddedCostModel,
    frozen_hardware,
    frozen_model,
    frozen_parameters,
    frozen_topology,
)
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.cost_model import BucketCost, CostModel
from dynamic_cp.pricing.edges import Reduction
from dynamic_cp.pricing.work import Lengths
from dynamic_cp.types import Bucket, Hardware, MicroBatch, ModelShape, Plan, PlanOptions, Problem, Sample, Topology

__all__ = [
    "CASES", "CURVED_HARDWARE", "TINY_HARDWARE", "TINY_MODEL", "GivenCosts", "assert_has_places", "causal",
    "frozen_cost_model", "plan_of", "plan_of_buckets", "problem_of", "samples_of", "tiny_cost_model",
]  # fmt: skip

TINY_MODEL = ModelShape(
    num_layers=4, hidden_size=128, ffn_hidden_size=512, num_attention_heads=4, num_query_groups=2, kv_channels=32,
    vocab_size=257,
)  # fmt: skip

TINY_HARDWARE = Hardware(
    name="tiny", peak_flops_per_s=1e11, linear_flops_per_s=5e10, attention_flops_per_s=1e10,
    bandwidth_in_node_bytes_per_s=1e8, bandwidth_across_nodes_bytes_per_s=2e7, p2p_bandwidth_bytes_per_s=1e9,
    exchange_latency_s_per_layer=1e-5, forward_overhead_s_per_layer=1e-5, backward_overhead_s_per_layer=2e-5,
    overhead_s_per_bucket_stage=1e-5, linear_extra_tokens=4, attention_extra_tokens=8,
)  # fmt: skip

CURVED_HARDWARE = replace(
    TINY_HARDWARE, name="curved", attention_full_flops_per_s=1.5e10, attention_full_extra_tokens=3,
    attention_backward_flops_per_s=0.8e10, attention_backward_extra_tokens=9,
    attention_full_backward_flops_per_s=1.2e10, attention_full_backward_extra_tokens=5, head_flops_per_s=4e10,
    memory_bandwidth_bytes_per_s=1e10, collective_bandwidth_in_node_bytes_per_s=2e8,
    ring_step_overhead_s_per_layer=1e-6,
)  # fmt: skip
"""As TINY_HARDWARE, with every optional term of the device."""
FREE_HARDWARE = replace(
    TINY_HARDWARE, name="free", exchange_latency_s_per_layer=0.0, forward_overhead_s_per_layer=0.0,
    backward_overhead_s_per_layer=0.0, overhead_s_per_bucket_stage=0.0, linear_extra_tokens=0.0,
    attention_extra_tokens=0.0,
)  # fmt: skip
"""As TINY_HARDWARE, without any overhead: an empty bucket costs what its one token costs."""
HOST_HARDWARE = replace(
    CURVED_HARDWARE, name="slow host", host_forward_s_per_layer=8e-5, host_backward_s_per_layer=1.2e-4,
    host_ring_step_s_per_layer=2e-5, host_message_s_per_layer=1e-5,
)  # fmt: skip
"""Half of the buckets of a few hundred tokens wait for the host."""


def samples_of(seqlens: Iterable[int]) -> tuple[Sample, ...]:
    return tuple(Sample(sample_id=index, seqlen=int(seqlen)) for index, seqlen in enumerate(seqlens))


class GivenCosts:
    """A cost model that looks up the id of a bucket's first sample -> cost."""

    def __init__(self, costs: dict[int, BucketCost], gradient_reduction_s: float = 0.0) -> None:
        self.costs = costs
        self.reduction = Reduction(np.array([gradient_reduction_s]), np.zeros(1), 1, False, False)

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        return self.costs[bucket.samples[0].sample_id]


def plan_of(grid: list[list[tuple[int, int]]], topology: Topology) -> Plan:
    """Return a plan whose buckets (first_lane, cp_size) hold one 1-token sample each, numbered in grid order."""
    ids = count()
    rows = [
        [Bucket(first_lane=lane, cp_size=cp, samples=(Sample(sample_id=next(ids), seqlen=1),)) for lane, cp in row]
        for row in grid
    ]
    return plan_of_buckets(*rows, topology=topology, max_tokens_per_rank=1000)


def plan_of_buckets(*rows: Iterable[Bucket], topology: Topology, max_tokens_per_rank: int = 64) -> Plan:
    micro_batches = tuple(MicroBatch(buckets=tuple(row)) for row in rows)
    return Plan(topology=topology, max_tokens_per_rank=max_tokens_per_rank, micro_batches=micro_batches)


def problem_of(
    topology: Topology, model: ModelShape = TINY_MODEL, hardware: Hardware = CURVED_HARDWARE, policy: str = "dynamic",
    **options: object,
) -> Problem:  # fmt: skip
    """Return a problem with these options; without them ranks have 256 tokens and exchange by the ring."""
    given = PlanOptions(**{"max_tokens_per_rank": 256, "cp_comm_types": ("p2p",), **options})
    return Problem(topology=topology, model=model, hardware=hardware, options=given, policy=policy)


def llama_on_h100(topology: Topology, **options: object) -> Problem:
    return problem_of(topology, load_model("llama-3-8b"), load_hardware("h100"), **options)


def tiny_cost_model(topology: Topology, **options: object) -> CostModel:
    return CostModel(problem_of(topology, hardware=TINY_HARDWARE, **{"bytes_per_element": 4, **options}))


def frozen_cost_model(max_tokens_per_rank: int, **sizes: int) -> UnpaddedCostModel:
    """Return the prices of the frozen bench, on a topology of these sizes."""
    parameters, options = frozen_parameters(), {"max_tokens_per_rank": max_tokens_per_rank, "recompute": "full"}
    model, hardware = frozen_model(parameters), frozen_hardware(parameters)
    return UnpaddedCostModel(problem_of(frozen_topology(**sizes), model, hardware, **options))


def causal(seqlens: Iterable[int]) -> Lengths:
    """Return samples of these lengths, descending, with the mask of the layers."""
    return Lengths(np.asarray(seqlens, np.int64), None)


def assert_has_places(page: Path, tables: dict[str, str]) -> None:
    """A page of figures has each of these tables and no other whose name begins as theirs do."""
    text = page.read_text(encoding="utf-8")
    (kind,) = {name.partition("-")[0] for name in tables}
    assert set(re.findall(rf"<!-- begin ({kind}-\S+) -->", text)) == set(tables)
    assert all(table in text for table in tables.values())
    assert "nan" not in text
