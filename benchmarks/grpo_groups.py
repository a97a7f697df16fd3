"""What the planner gives as Megatron-Core's scheduler: its groups against the greedy's, on batches like GRPO's.

    python -m benchmarks.grpo_groups                # 12 cases with a pipeline, ten seconds
    python -m benchmarks.grpo_groups --flat         # 4 without one, too
    python -m benchmarks.grpo_groups --limit 16384  # fewer, larger micro-batches

A batch has 8 responses to each prompt, log-normal, cut at a longest sample. Both packings fill every lane, as the class
hands them out, and are simulated on H100s with one limit of tokens for both. No device is used.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron.integrations.scheduler.job import job_of
from megatron.integrations.scheduler.planned import Limits, plan_groups

SEEDS = range(3)


class Batches(NamedTuple):
    """Global batches of one kind: the longest sample, in tokens, and how many there are."""

    longest: int
    num_samples: int


BATCHES = (Batches(16384, 512), Batches(32768, 512), Batches(32768, 256), Batches(65536, 256))
LIMIT = 8192
"""Tokens of a rank in one micro-batch: 8 lanes hold the longest sample."""


class Layout(NamedTuple):
    """A model on so many lanes."""

    model: str
    tp_size: int
    pp_size: int
    num_lanes: int

    def __str__(self) -> str:
        return f"{self.model} TP {self.tp_size} PP {self.pp_size}, {self.num_lanes} lanes"


LAYOUTS = (Layout("qwen2.5-7b", 2, 4, 8), Layout("llama-3-70b", 8, 8, 8), Layout("llama-3-70b", 4, 8, 16))
FLAT = (Layout("qwen2.5-7b", 2, 1, 16),)


class Gain(NamedTuple):
    """The greedy's seconds over ours for each seed, and the mean seconds that planning took."""

    ratios: tuple[float, ...]
    planning_s: float


def rollouts(seed: int, num_samples: int, longest: int) -> dict[int, int]:
    """Return id -> tokens of 8 responses to each prompt, as a post-training loop has them: not padded."""
    generator = np.random.default_rng(seed)
    prompts = np.repeat(np.clip(generator.lognormal(6, 0.8, num_samples // 8), 32, 4096), 8)
    responses = np.maximum(generator.lognormal(8, 1, num_samples), 16)
    return dict(enumerate(np.minimum(prompts + responses, longest).astype(int).tolist()))


def gain(layout: Layout, batches: Batches, limit: int = LIMIT, seeds: Sequence[int] = SEEDS) -> Gain:
    """Return what the planner gives on some batches of one kind."""
    sizes = {"tp_size": layout.tp_size, "pp_size": layout.pp_size, "sequence_parallel": True}
    job = job_of(layout.model, hardware="h100", layout=sizes)
    limits = Limits(num_lanes=layout.num_lanes, max_tokens_per_rank=limit)
    ratios, begin_s = [], time.perf_counter()
    for seed in seeds:
        found = plan_groups(job, limits, rollouts(seed, batches.num_samples, batches.longest))
        assert found.greedy_s is not None, "the greedy packs every batch whose lanes are a power of two"
        ratios.append(found.greedy_s / found.predicted_s)
    return Gain(tuple(ratios), (time.perf_counter() - begin_s) / len(ratios))


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of some ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(layouts: Sequence[Layout], limit: int) -> Iterator[str]:
    """Yield the lines of a Markdown table, and below it the smallest ratio and the mean of all."""
    yield "| layout | " + " | ".join(f"{b.longest // 1024}k, {b.num_samples} samples" for b in BATCHES) + " |"
    yield "| --- |" + " --- |" * len(BATCHES)
    means, every, planning_s = [], [], []
    for layout in layouts:
        gains = [gain(layout, batches, limit) for batches in BATCHES]
        means += [geometric_mean(found.ratios) for found in gains]
        every += [ratio for found in gains for ratio in found.ratios]
        planning_s += [found.planning_s for found in gains]
        yield f"| {layout} | " + " | ".join(f"{mean:.3f}" for mean in means[-len(BATCHES) :]) + " |"
    yield ""
    yield (
        f"{len(means)} cases, {len(every)} batches: smallest {min(every):.4f}, geometric mean "
        f"{geometric_mean(means):.3f}; both packings together took {min(planning_s):.2f} to {max(planning_s):.2f} s"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flat", action="store_true", help="layouts without a pipeline, too")
    parser.add_argument("--limit", type=int, default=LIMIT, help="tokens of a rank in one micro-batch, of both")
    options = parser.parse_args()
    for line in table(LAYOUTS + FLAT if options.flat else LAYOUTS, options.limit):
        print(line, flush=True)


if __name__ == "__main__":
    main()
