"""What does a plan look like? Plans one global batch and draws its pipeline beside the static one.

python examples/draw_pipeline.py [PICTURE.svg]

Prints the plan as text, one line for each micro-batch, and writes the picture (SVG or PNG; default: runs/pipeline.svg).
"""

import sys
from functools import partial
from pathlib import Path

from dynamic_cp import (
    CostModel,
    PlanOptions,
    Sample,
    Topology,
    format_plan,
    load_hardware,
    load_model,
    plan_global_batch,
    simulate,
)
from dynamic_cp.decide.report.drawing import save
from dynamic_cp.decide.report.gantt import gantt
from dynamic_cp.decide.report.theme import LIGHT
from dynamic_cp.types import Problem

LENGTHS = (30_000, 12_000, 9_000, 8_000, 7_500, 7_000, 6_800, 6_500, 5_000, 4_000, 3_000, 2_500, 2_000, 1_500, 900, 400)


def main() -> None:
    """Print the plan and write the picture."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pipeline.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [Sample(sample_id=i, seqlen=n) for i, n in enumerate(LENGTHS)]
    topology = Topology(num_lanes=4, pp_size=2)
    model, hardware = load_model("llama-3-8b"), load_hardware("h100")
    options = PlanOptions(max_tokens_per_rank=8192, recompute="full")
    cost_model = CostModel(Problem(topology=topology, model=model, hardware=hardware, options=options))
    timelines = []
    for policy in ("balanced", "dynamic"):
        planned = plan_global_batch(
            samples, topology=topology, model=model, hardware=hardware, options=options, policy=policy
        )
        timelines.append((policy, simulate(planned.plan, cost_model)))
        print(f"{policy}: {planned.predicted_s:.3f} s with the reduction of gradients; without it {planned.reason}")
    print(format_plan(timelines[-1][1].plan))
    save(path, partial(gantt, timelines), LIGHT)
    print(f"{path} has the picture")


if __name__ == "__main__":
    main()
