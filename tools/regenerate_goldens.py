"""Writes tests/golden/*.txt: small plans and timelines as text, to be reviewed as a diff.

python tools/regenerate_goldens.py
"""

from __future__ import annotations

from pathlib import Path

from dynamic_cp.catalog import load_hardware, load_model
from dynamic_cp.cost_model import CostModel
from dynamic_cp.search import plan_global_batch
from dynamic_cp.serialize import format_plan
from dynamic_cp.simulator import Timeline, simulate
from dynamic_cp.types import PlanOptions, Sample, Topology

FOLDER = Path(__file__).parents[1] / "tests" / "golden"

CASES = {
    # one long document, a few middle ones, many short ones; groups of 4 span nodes
    "mixed_cp_4_lanes": (Topology(num_lanes=4, ranks_per_node=2), [60000, 20000, 9000, 9000, *[1500] * 6, *[300] * 6]),
    "three_lanes_pp2": (Topology(num_lanes=3, pp_size=2), [30000, 12000, 8000, 5000, 700, 50, 1]),
    "two_lanes_pp2_vp2_tp2": (
        Topology(num_lanes=2, tp_size=2, pp_size=2, vp_size=2, sequence_parallel=True),
        [20001, 5003, 5001, 4000, 17],
    ),
}


def render(name: str) -> str:
    """Return the golden text of the case `name`."""
    topology, seqlens = CASES[name]
    model, hardware = load_model("llama-3-8b"), load_hardware("h100")
    options = PlanOptions(max_tokens_per_rank=16384, recompute="full")
    samples = [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(seqlens)]
    planned = plan_global_batch(samples, topology=topology, model=model, hardware=hardware, options=options)
    timeline = simulate(planned.plan, CostModel(model, hardware, topology, options))
    return f"{format_plan(planned.plan)}\n{planned.reason}\n\n{_timeline_text(timeline)}"


def _timeline_text(timeline: Timeline) -> str:
    """Return one line per stage and lane: each operation with its end in milliseconds."""
    lines = [f"ends in ms (chunk F|B micro-batch), makespan {timeline.makespan_s * 1e3:.3f}"]
    topology = timeline.plan.topology
    for stage in range(topology.pp_size):
        for lane in range(topology.num_lanes):
            spans = [span for span in timeline.spans if span.stage == stage and lane in span.bucket.lanes]
            lines.append(
                f"stage {stage} lane {lane}: " + " ".join(f"{span.operation}@{span.end_s * 1e3:.3f}" for span in spans)
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(render(case))
        print(FOLDER / f"{case}.txt")
