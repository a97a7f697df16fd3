"""Draws the pictures of README and docs into docs/images; the same bytes for the same planner and matplotlib.

python -m tools.make_pictures [--output DIR]

All show one case: Llama-3-8B on 64 H100 (modelled, not measured), 256 GitHub files. A sweep gives every policy its own
fastest layout; of its batches the one with the median speed-up over the fastest static policy is drawn. `overview` has
a form for phones, too, and is also there as PNG. SVGs have no ground: they show that of the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dynamic_cp.decide.comparison import Comparison, compare_settings, verdict_of
from dynamic_cp.decide.report.cp_map import cp_map
from dynamic_cp.decide.report.curves import imbalance, knee, knee_points, length_histogram
from dynamic_cp.decide.report.drawing import NARROW_IN, save
from dynamic_cp.decide.report.gantt import gantt
from dynamic_cp.decide.report.theme import THEMES
from dynamic_cp.decide.sweep import Space, SweepJob, sweep
from dynamic_cp.decide.workloads import draw_lengths, longest_length
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import DataParallel, Sample

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NUM_BATCHES, NUM_SAMPLES, MAX_SEQLEN = 8, 256, 131072
SPACE = Space(num_gpus=64)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw everything in both themes; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=IMAGES, metavar="DIR")
    output: Path = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    comparison = compared()
    verdict = verdict_of(comparison)
    assert verdict is not None
    baseline = comparison.policy(verdict.baseline)
    ratios = next(one.per_batch for one in comparison.speedups if one.baseline == verdict.baseline)
    number = sorted(range(NUM_BATCHES), key=ratios.__getitem__)[(NUM_BATCHES - 1) // 2]
    timelines = []
    for one in (baseline, comparison.policy("dynamic")):
        timeline = one.batches[number].timeline
        assert timeline is not None
        timelines.append((one.name, timeline))
    problem = comparison.problem
    pictures = {
        "overview": partial(gantt, timelines),
        "overview-narrow": partial(gantt, timelines, width_in=NARROW_IN),
        "cp-sizes": partial(cp_map, [(name, timeline.plan) for name, timeline in timelines]),
        "lengths": partial(length_histogram, [sample.seqlen for sample in comparison.batches[number]]),
        "imbalance": partial(imbalance, [(name, timeline.lane_busy_s) for name, timeline in reversed(timelines)]),
        "knee": partial(knee, knee_points(problem.model, problem.hardware, CostModel(problem))),
    }
    for theme_name, theme in THEMES.items():
        for name, draw in pictures.items():
            save(output / f"{name}-{theme_name}.svg", draw, theme, transparent=True)
        save(output / f"overview-{theme_name}.png", pictures["overview"], theme)
    print(f"{verdict.text}\nbatch {number + 1}: {ratios[number]:.3f}x; {2 * len(pictures) + 2} files in {output}")
    return 0


def compared() -> Comparison:
    """Return the case that all pictures show."""
    batches = tuple(
        tuple(
            Sample(sample_id=index, seqlen=seqlen)
            for index, seqlen in enumerate(draw_lengths("github", NUM_SAMPLES, seed, MAX_SEQLEN).tolist())
        )
        for seed in range(NUM_BATCHES)
    )
    job = SweepJob(
        batches=batches,
        max_seqlen=longest_length("github", MAX_SEQLEN),
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100"),
        data_parallel=DataParallel(overlap_grad_reduce=True, overlap_param_gather=True),
    )
    policies = ("dynamic", "static", "balanced")
    found = sweep(SPACE, job, policies=policies, num_processes=len(os.sched_getaffinity(0)), with_other_prices=False)
    return compare_settings(job, found.settings, names=("llama-3-8b", "h100"))


if __name__ == "__main__":
    sys.exit(main())
