"""The frozen cases of `benchmarks/planner_cases`: their model, device, lengths and the figures to reach.

Their prices know no padding. Plans are made with padding, as the product makes them, and priced again without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.problem import Problem
from dynamic_cp.arrays import Ints
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.pricing.cost_model import BucketCost, CostModel
from dynamic_cp.types import Bucket, Hardware, ModelShape, PlanOptions, Topology

CASES = Path(__file__).parents[1] / "planner_cases"

_FORMULAS = {"github": "lognormal-github", "cc": "lognormal-cc", "sftmix": "sftmix"}


class UnpaddedCostModel(CostModel):
    """Prices buckets by their true lengths, as the frozen cases do; an empty place has no tokens at all."""

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        """Return the seconds of `bucket`."""
        lengths = [sample.seqlen for sample in bucket.samples]
        return self.cost(bucket.cp_size, bucket.first_lane, sum(lengths), sum(length**2 for length in lengths))


def frozen_parameters() -> dict[str, float]:
    """Return the constants of the frozen prices."""
    return json.loads((CASES / "cost_params.json").read_text(encoding="utf-8"))


def frozen_model(parameters: Mapping[str, float]) -> ModelShape:
    """Return the shape of the model that was planned for: Llama 2 13B."""
    return ModelShape(
        num_layers=int(parameters["layers"]),
        hidden_size=int(parameters["hidden"]),
        ffn_hidden_size=int(parameters["ffn"]),
        num_attention_heads=40,
        num_query_groups=40,
        kv_channels=128,
        vocab_size=32000,
        gated_linear_unit=True,
    )


def frozen_hardware(parameters: Mapping[str, float]) -> Hardware:
    """Return the device that was planned for; not the product's `h100`: it has no curves, edges or collectives."""
    return Hardware(
        name="frozen",
        peak_flops_per_s=parameters["peak_flops_per_s"],
        linear_flops_per_s=parameters["peak_flops_per_s"] * parameters["linear_mfu"],
        attention_flops_per_s=parameters["attention_flops_per_s"],
        bandwidth_in_node_bytes_per_s=parameters["bandwidth_in_node_bytes_per_s"],
        bandwidth_across_nodes_bytes_per_s=parameters["bandwidth_across_nodes_bytes_per_s"],
        p2p_bandwidth_bytes_per_s=parameters["p2p_bandwidth_bytes_per_s"],
        exchange_latency_s_per_layer=parameters["ring_latency_s_per_layer"],
        forward_overhead_s_per_layer=parameters["forward_overhead_s_per_layer"],
        backward_overhead_s_per_layer=parameters["backward_overhead_s_per_layer"],
        overhead_s_per_bucket_stage=parameters["overhead_s_per_bucket_stage"],
        linear_extra_tokens=parameters["linear_extra_tokens"],
        attention_extra_tokens=parameters["attention_extra_tokens"],
        linear_backward_over_forward=parameters["linear_backward_over_forward"],
        attention_backward_over_forward=parameters["attention_backward_over_forward"],
        exchange_backward_over_forward=parameters["comm_backward_over_forward"],
        recompute_overhead_credit=parameters["recompute_overhead_credit"],
    )


def frozen_topology(**sizes: int) -> Topology:
    """Return a topology of the frozen prices: they divide P2P bytes by tp_size, as sequence parallelism does."""
    return Topology(sequence_parallel=True, ranks_per_node=8, **sizes)


def frozen_cases() -> list[dict[str, Any]]:
    """Return configuration and figures of every case and seed."""
    return json.loads((CASES / "cases.json").read_text(encoding="utf-8"))


def tiny_instances() -> list[dict[str, Any]]:
    """Return the instances of 6 to 12 samples with their optimal plans."""
    return json.loads((CASES / "exact.json").read_text(encoding="utf-8"))


def lengths_of(case: Mapping[str, Any]) -> Ints:
    """Return the lengths of a case in input order, from its file or drawn again.

    Raises:
        ValueError: the draw has another number of tokens than it had.
    """
    file = CASES / "lengths" / f"{case['case']}.seed{case['seed']}.npy"
    if file.exists():
        lengths = np.load(file).astype(np.int64)
    else:
        lengths = draw_lengths(_FORMULAS[case["workload"]], case["num_samples"], case["seed"], case["max_seqlen"])
    if lengths.sum() != case["total_tokens"]:
        raise ValueError(f"{case['case']}: drew {lengths.sum()} tokens, the case has {case['total_tokens']}")
    return lengths


def frozen_problem(name: str, case: Mapping[str, Any], lengths: Sequence[int] | Ints) -> Problem:
    """Return the problem of a case or of a tiny instance."""
    parameters = frozen_parameters()
    return Problem(
        name=name,
        seqlens=np.asarray(lengths, np.int64),
        topology=frozen_topology(num_lanes=case["lanes"], tp_size=case["tp"], pp_size=case["pp"], vp_size=case["vpp"]),
        model=frozen_model(parameters),
        hardware=frozen_hardware(parameters),
        options=PlanOptions(
            max_tokens_per_rank=case["max_tokens_per_rank"],
            recompute="full",
            static_cp_size=case.get("static_cp"),
            cp_comm_types=("p2p",),
        ),
        cost_model_type=UnpaddedCostModel,
    )
