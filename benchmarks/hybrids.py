"""What dynamic CP gives hybrids: each policy at its own fastest layout of a sweep, and what the choice of states adds.

    python -m benchmarks.hybrids                                    # all lines, an hour of one core
    python -m benchmarks.hybrids --models qwen3-next-80b-a3b --gpus 64 --json runs/hybrids.json

Modelled on H100 (docs/hybrids.md). Of each model there is also its twin with attention in every layer and the same
other sizes. Gains are ratios of the sums over the batches; in brackets those of single batches.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamic_cp.cli.tuned import exchanges_tried
from dynamic_cp.comparison.job import SweepJob
from dynamic_cp.lengths.workloads import draw_lengths
from dynamic_cp.models import hugging_face
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_problem
from dynamic_cp.setting import Setting
from dynamic_cp.sweep import Space, sweep
from dynamic_cp.types import DataParallel, ModelShape, Sample

QWEN3_5_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
}  # fmt: skip
"""Sizes of `Qwen3_5TextConfig` of transformers 5.23 as it is."""
MODELS = ("qwen3.5-9b", "qwen3-next-80b-a3b", "nemotron-3-nano")
LENGTHS = ("github", "sft_longalign")
MAX_SEQLEN = 131072
SIZES = {64: (256, 4), 512: (1024, 2)}
"""GPUs -> (samples of a batch, batches)."""
STATIC, POLICIES = ("balanced", "static"), ("dynamic", "balanced", "static", "megatron-dev")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds of the batches of each policy, and of the dynamic one where lanes exchange heads only."""

    model: str
    lengths: str
    gpus: int
    batches_s: dict[str, tuple[float, ...]]
    by_heads_s: tuple[float, ...]
    layouts: dict[str, str]
    num_states: int
    num_shared: int

    def gain(self, *others: str) -> str:
        """Return what dynamic CP gains over the fastest of other policies."""
        known = [self.batches_s[name] for name in others if name in self.batches_s]
        return _ratio(min(known, key=sum), self.batches_s["dynamic"]) if known else "-"

    def row(self) -> list[str]:
        """Return the cells of the table."""
        return [
            self.model,
            self.lengths,
            str(self.gpus),
            f"{sum(self.batches_s['dynamic']) / len(self.by_heads_s):.3f}",
            self.gain(*STATIC),
            self.gain("megatron-dev"),
            f"{self.num_states} of {self.num_shared}",
            _ratio(self.by_heads_s, self.batches_s["dynamic"]),
        ]


HEADER = ("model", "lengths", "GPUs", "dynamic, s", "over static", "over greedy", "pass on states", "over heads alone")


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    each = sorted(one / two for one, two in zip(theirs, ours, strict=True))
    return f"{sum(theirs) / sum(ours):.2f} ({each[0]:.2f}..{each[-1]:.2f})"


def model_of(name: str) -> ModelShape:
    """Return a model, or its twin with attention in every layer where its name begins with "full "."""
    plain = name.removeprefix("full ")
    model = hugging_face.model_shape(plain, QWEN3_5_9B) if plain == MODELS[0] else load_model(plain)
    return model if plain == name else replace(model, linear_attention=None, linear_attention_freq=0)


def measure(name: str, lengths: str, gpus: int) -> Line:
    """Return a line of the table."""
    num_samples, num_batches = SIZES[gpus]
    drawn = [draw_lengths(lengths, num_samples, seed, MAX_SEQLEN) for seed in range(num_batches)]
    job = SweepJob(
        batches=tuple(
            tuple(Sample(sample_id=index, seqlen=int(seqlen)) for index, seqlen in enumerate(one)) for one in drawn
        ),
        max_seqlen=max(int(one.max()) for one in drawn),
        model=model_of(name),
        hardware=load_hardware("h100"),
        data_parallel=DataParallel(overlap_grad_reduce=True, overlap_param_gather=True),
    )
    space = Space(num_gpus=gpus, exchanges=exchanges_tried(None, job.model))
    best = sweep(space, job, policies=POLICIES, with_other_prices=False).best
    by_heads, num_states, num_shared = _exchanges(job, best["dynamic"].setting)
    return Line(
        model=name,
        lengths=lengths,
        gpus=gpus,
        batches_s={policy: point.batches_s for policy, point in best.items()},
        by_heads_s=by_heads,
        layouts={policy: f"{one.setting.layout}, {one.setting.recompute}" for policy, one in best.items()},
        num_states=num_states,
        num_shared=num_shared,
    )


def _exchanges(job: SweepJob, setting: Setting) -> tuple[tuple[float, ...], int, int]:
    """Return the seconds of dynamic CP where heads are exchanged, buckets that pass on states, those that share."""
    problem, seconds, shared = job.problem(setting), [], []
    by_heads = replace(problem, options=replace(problem.options, state_exchange="heads"))
    for batch in job.batches:
        seconds.append(plan_problem(by_heads, batch).predicted_s)
        shared += [bucket for bucket in plan_problem(problem, batch).plan.buckets if bucket.cp_size > 1]
    return tuple(seconds), sum(bucket.exchanges_states for bucket in shared), len(shared)


def main() -> None:
    """Print a line for each model, workload and number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS, *(f"full {name}" for name in MODELS[:2])])
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--gpus", nargs="+", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--json", help="write the seconds of all batches and the layouts here")
    given = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER), flush=True)
    lines: list[dict[str, Any]] = []
    for gpus in given.gpus:
        for lengths in given.lengths:
            for name in given.models:
                started = time.process_time()
                line = measure(name, lengths, gpus)
                print("| " + " | ".join(line.row()) + " |", flush=True)
                lines.append({**line.__dict__, "cpu_s": time.process_time() - started})
                if given.json:
                    os.makedirs(os.path.dirname(given.json) or ".", exist_ok=True)
                    with open(given.json, "w", encoding="utf-8") as file:
                        json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
