"""Writes tests/golden/*.txt: small plans and timelines as text, to be reviewed as a diff.

python -m tools.regenerate_goldens

tests/golden/*.txt: what the planner makes of given samples, at given prices that no hardware file changes.
tests/golden/timelines/*.txt: what the simulator makes of the given plan at the top of the file, at round prices, so
that a reader can redo the times by hand.

`tools.command_goldens` writes tests/golden/command/*: what `dynamic-cp` prints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dynamic_cp.pipeline.schedule import peak_in_flight_tokens
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pipeline.timeline import Timeline
from dynamic_cp.plans.padding import lane_tokens_of, rank_tokens
from dynamic_cp.plans.serialize import format_plan, parse_plan
from dynamic_cp.pricing.cost_model import BucketCost, CostModel
from dynamic_cp.pricing.edges import Reduction
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import Bucket, CpCommType, Experts, Hardware, ModelShape, PlanOptions, Problem, Sample, Topology

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
TIMELINES = FOLDER / "timelines"

MODEL = ModelShape(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=32000,
)
EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=2048)
HARDWARE = Hardware(
    name="round",
    peak_flops_per_s=2e14,
    linear_flops_per_s=1e14,
    attention_flops_per_s=1e14,
    bandwidth_in_node_bytes_per_s=1e11,
    bandwidth_across_nodes_bytes_per_s=1e10,
    p2p_bandwidth_bytes_per_s=1e10,
    exchange_latency_s_per_layer=1e-5,
    forward_overhead_s_per_layer=1e-5,
    backward_overhead_s_per_layer=1e-5,
    overhead_s_per_bucket_stage=1e-5,
)
CASES = {
    # one long document, a few middle ones, many short ones; groups of 4 span nodes
    "mixed_cp_4_lanes": (Topology(num_lanes=4, ranks_per_node=2), [60000, 20000, 9000, 9000, *[1500] * 6, *[300] * 6]),
    "three_lanes_pp2": (Topology(num_lanes=3, pp_size=2), [30000, 12000, 8000, 5000, 700, 50, 1]),
    "two_lanes_pp2_vp2_tp2": (
        Topology(num_lanes=2, tp_size=2, pp_size=2, vp_size=2, sequence_parallel=True),
        [20001, 5003, 5001, 4000, 17],
    ),
    # all exchanges to choose from; groups of 8 span nodes
    "mixed_exchanges_8_lanes": (
        Topology(num_lanes=8, ranks_per_node=4),
        [90000, 40000, 16000, 16000, 9000, 9000, *[1500] * 9, *[300] * 6],
    ),
    # lanes wait for each other in every layer, two by two and all together
    "experts_of_2_lanes_8_lanes": (
        Topology(num_lanes=8, ep_size=2, ranks_per_node=4),
        [60000, 20000, 16000, 9000, 9000, *[1500] * 9, *[300] * 6],
    ),
    "experts_of_4_lanes_pp2": (
        Topology(num_lanes=4, ep_size=4, pp_size=2, ranks_per_node=4),
        [60000, 20000, 16000, 9000, 9000, *[1500] * 9, *[300] * 6],
    ),
}
"""Name -> case. With "exchanges" in its name it may use all of them, else p2p; with "experts" every layer has some."""


def render(name: str) -> str:
    """Return the golden text of the case `name`."""
    topology, seqlens = CASES[name]
    exchanges: tuple[CpCommType, ...] = ("p2p", "all_gather", "a2a", "a2a+p2p") if "exchanges" in name else ("p2p",)
    options = PlanOptions(max_tokens_per_rank=16384, recompute="full", cp_comm_types=exchanges)
    samples = [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(seqlens)]
    model = MODEL if topology.ep_size == 1 else replace(MODEL, experts=EXPERTS)
    planned = plan_global_batch(samples, topology=topology, model=model, hardware=HARDWARE, options=options)
    timeline = simulate(
        planned.plan, CostModel(Problem(topology=topology, model=model, hardware=HARDWARE, options=options))
    )
    return f"{format_plan(planned.plan)}\n{planned.reason}\n\n{_timeline_text(timeline)}"


class RoundPrices:
    """1 us forward and 2 us backward per padded token of a rank; with pipelining a hop takes 100 us."""

    TEXT = (
        "prices: 1 us forward, 2 us backward per padded token of a rank and stage (divided by its chunks); hop 100 us; "
        "embedding 10 + 20 us; head 200 + 400 us"
    )
    reduction = Reduction(np.zeros(1), np.zeros(1), 1, hides_reduce=False, hides_gather=False)

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def bucket_cost(self, bucket: Bucket) -> BucketCost:
        forward_s = rank_tokens(bucket, self.topology.rank_token_multiple) * 1e-6
        hop_s = 100e-6 if self.topology.pp_size > 1 else 0.0
        return BucketCost(forward_s, 2 * forward_s, hop_s, 10e-6, 20e-6, 200e-6, 400e-6)


def render_timeline(text: str) -> str:
    """Return the golden text of the plan in the first paragraph of `text`."""
    plan = parse_plan(text.partition("\n\n")[0])
    timeline = simulate(plan, RoundPrices(plan.topology))
    return f"{format_plan(plan)}\n{RoundPrices.TEXT}\n\n{_timeline_text(timeline)}\n{_split_text(timeline)}"


def _split_text(timeline: Timeline) -> str:
    """Return one line per stage and lane: where its time went, in milliseconds, and its tokens in flight."""
    split, topology = timeline.split, timeline.plan.topology
    peak = peak_in_flight_tokens(lane_tokens_of(timeline.plan), topology.pp_size, topology.vp_size)
    lines = ["busy + pipeline bubble + CP wait + DP wait in ms; most tokens in flight"]
    parts = (split.busy_ns, split.pipeline_bubble_ns, split.cp_wait_ns, split.dp_wait_ns)
    for stage, lane in np.ndindex(peak.shape):
        shares = " + ".join(f"{part[stage, lane] / 1e6:.3f}" for part in parts)
        lines.append(f"stage {stage} lane {lane}: {shares}; {peak[stage, lane]} tokens")
    return "\n".join(lines) + "\n"


def _timeline_text(timeline: Timeline) -> str:
    """Return one line per stage and lane: each operation with its end in milliseconds."""
    lines = [f"ends in ms (chunk F|B micro-batch), makespan {timeline.makespan_s * 1e3:.3f}"]
    topology = timeline.plan.topology
    for stage in range(topology.pp_size):
        for lane in range(topology.num_lanes):
            spans = [span for span in timeline.spans if span.stage == stage and lane in span.bucket.lanes]
            ends = " ".join(f"{span.operation}@{span.end_ns / 1e6:.3f}" for span in spans)
            lines.append(f"stage {stage} lane {lane}: {ends}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(render(case))
        print(FOLDER / f"{case}.txt")
    for path in sorted(TIMELINES.glob("*.txt")):
        path.write_text(render_timeline(path.read_text()))
        print(path)
