"""What dynamic CP gives hybrids: each policy at its own fastest layout of a sweep, and what the choice of states adds.

    python -m benchmarks.hybrids                     # all lines, ten minutes of one core
    python -m benchmarks.hybrids --models qwen3-next-80b-a3b --json runs/hybrids.json
    python -m benchmarks.hybrids --ways              # all heads, all states and the choice; 1 where it loses over 2%
    python -m benchmarks.hybrids --planning          # what planning takes, over that of the twins

Modelled on H100 (docs/how-to/decide.md#hybrids): 64 GPUs, each policy at its own fastest setting, and 512 with a batch
eight times as large, each at the fastest of its two best settings of 64, the dynamic one also at those of the others.
The twin of a model has attention in every layer and the same other sizes. Gains are ratios of the sums over the
batches; in brackets those of single batches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from dynamic_cp.decide.cli.parameters import exchanges_tried
from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.config_json import hugging_face
from dynamic_cp.decide.setting import Setting
from dynamic_cp.decide.sweep import Point, Space, evaluate, sweep
from dynamic_cp.decide.sweep.evaluate import fastest_first
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import (
    CP_COMM_TYPES,
    DataParallel,
    ModelShape,
    PlannedBatch,
    PlanOptions,
    Problem,
    Sample,
    StateExchangeUse,
    Topology,
)

QWEN3_5_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
}  # fmt: skip
"""Sizes of `Qwen3_5TextConfig` of transformers 5.23 as it is."""
MODELS = ("qwen3.5-9b", "qwen3-next-80b-a3b", "nemotron-3-nano")
LENGTHS = ("github", "sft_longalign")
MAX_SEQLEN = 131072
NUM_GPUS, TIMES = 64, 8
NUM_SAMPLES, NUM_BATCHES = 256, (4, 2)
"""Samples of a batch on so many GPUs; batches on these, and on TIMES as many."""
NUM_COMPARED, MOST_LOST = 2, 1.02
"""Batches of --ways; most that a plan with a choice per bucket may take over the faster of two plans without one."""
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


def job_of(name: str, lengths: str, times: int) -> SweepJob:
    """Return the job of `times` as many GPUs and samples."""
    drawn = [
        draw_lengths(lengths, times * NUM_SAMPLES, seed, MAX_SEQLEN) for seed in range(NUM_BATCHES[min(times - 1, 1)])
    ]
    return SweepJob(
        batches=tuple(
            tuple(Sample(sample_id=index, seqlen=int(seqlen)) for index, seqlen in enumerate(one)) for one in drawn
        ),
        max_seqlen=max(int(one.max()) for one in drawn),
        model=model_of(name),
        hardware=load_hardware("h100"),
        data_parallel=DataParallel(overlap_grad_reduce=True, overlap_param_gather=True),
    )


def measure(name: str, lengths: str) -> list[Line]:
    """Return the lines of the table for a model and a workload."""
    job = job_of(name, lengths, 1)
    space = Space(num_gpus=NUM_GPUS, exchanges=exchanges_tried(None, job.model, job.state_exchange))
    found = sweep(space, job, policies=POLICIES, with_other_prices=False)
    larger, best = job_of(name, lengths, TIMES), {}
    for policy, one in found.policies.items():
        settings = [_larger(point.setting) for point in (one.best, one.next_best) if point is not None]
        if policy == "dynamic":  # as in the sweep
            settings += [_larger(replace(other, policy=policy, static_cp_size=None)) for other in found.settings]
        points = [point for point in (evaluate(setting, larger) for setting in settings) if isinstance(point, Point)]
        if points:
            best[policy] = fastest_first(points)[0]
    return [_line(name, lengths, job, found.best), _line(name, lengths, larger, best)]


def _larger(setting: Setting) -> Setting:
    return replace(setting, topology=replace(setting.topology, num_lanes=TIMES * setting.topology.num_lanes))


def _line(name: str, lengths: str, job: SweepJob, best: Mapping[str, Point]) -> Line:
    by_heads, num_states, num_shared = _exchanges(job, best["dynamic"].setting)
    return Line(
        model=name,
        lengths=lengths,
        gpus=best["dynamic"].setting.topology.world_size,
        batches_s={policy: point.batches_s for policy, point in best.items()},
        by_heads_s=by_heads,
        layouts={policy: f"{one.setting.layout}, {one.setting.recompute}" for policy, one in best.items()},
        num_states=num_states,
        num_shared=num_shared,
    )


def _exchanges(job: SweepJob, setting: Setting) -> tuple[tuple[float, ...], int, int]:
    """Return the seconds of dynamic CP where heads are exchanged, buckets that pass on states, those that share."""
    seconds = [planned.predicted_s for planned in plans_by("heads", job, setting)]
    plans = [planned.plan for planned in plans_by("auto", job, setting)]
    shared = [bucket for plan in plans for bucket in plan.buckets if bucket.cp_size > 1]
    return tuple(seconds), sum(bucket.exchanges_states for bucket in shared), len(shared)


def plans_by(use: StateExchangeUse, job: SweepJob, setting: Setting) -> list[PlannedBatch]:
    """Return the plans of all batches where lanes share linear attention so."""
    problem = replace(job, state_exchange=use).problem(setting)
    return [plan_problem(problem, batch) for batch in job.batches]


def most_lost(name: str, lengths: str) -> float:
    """Print the seconds of each way at the fastest setting; return the choice over the best of both, at its worst.

    All settings are tried that no other one beats in both time and memory, batch by batch.
    """
    job = job_of(name, lengths, 1)
    job, lost = replace(job, batches=job.batches[:NUM_COMPARED]), []
    space = Space(num_gpus=NUM_GPUS, exchanges=exchanges_tried(None, job.model, job.state_exchange))
    front = sweep(space, job, policies=("dynamic",), with_other_prices=False).front
    for point in front:
        seconds = {
            use: [one.predicted_s for one in plans_by(use, job, point.setting)] for use in ("heads", "states", "auto")
        }
        lost += [auto / min(heads, states) for heads, states, auto in zip(*seconds.values(), strict=True)]
        if point is front[0]:
            cells = [f"{sum(each) / len(each):.3f}" for each in seconds.values()]
    print("| " + " | ".join([name, lengths, *cells, f"{max(lost):.3f} of {len(lost)}"]) + " |", flush=True)
    return max(lost)


def compare_ways(models: Sequence[str], lengths: Sequence[str]) -> bool:
    """Print a line for each hybrid and workload; return whether no choice lost too much."""
    _print_header(("model", "lengths", "heads, s", "states, s", "auto, s", "auto over the best, at most"))
    hybrids = [name for name in models if model_of(name).linear_attention is not None]
    return max(most_lost(name, one) for name in hybrids for one in lengths) <= MOST_LOST


def planning_s(name: str, lengths: str, topology: Topology, times: int) -> float:
    """Return the CPU seconds of the mean plan of `times` as many samples as 64 GPUs have, each the least of some."""
    model, batches = model_of(name), job_of(name, lengths, times).batches
    options = PlanOptions(max_tokens_per_rank=20480, recompute="selective", cp_comm_types=CP_COMM_TYPES)
    topology = replace(topology, ep_size=1 if model.experts is None else 8)
    problem = Problem(topology=topology, model=model, hardware=load_hardware("h100"), options=options)
    least = [inf] * len(batches)
    for _ in range(5):
        for index, batch in enumerate(batches):
            started = time.process_time()
            plan_problem(problem, batch)
            least[index] = min(least[index], time.process_time() - started)
    return sum(least) / len(least)


def print_planning(model: str) -> None:
    """Print what planning of a hybrid takes over that of its twin, in one run: with 4 samples a GPU, and with 256."""
    names, total = (model, f"full {model}"), [[0.0, 0.0], [0.0, 0.0]]
    for lanes, pp_size in ((32, 1), (256, 1), (64, 4), (128, 2)):
        topology = Topology(num_lanes=lanes, tp_size=2, pp_size=pp_size, sequence_parallel=True)
        for (many, times), lengths in product(enumerate((topology.world_size // NUM_GPUS, 1)), LENGTHS):
            each = [planning_s(name, lengths, topology, times) for name in names]
            total[many] = [sum(both) for both in zip(total[many], each, strict=True)]
            where = f"{model}, {lanes} lanes, PP {pp_size}, {times * NUM_SAMPLES} samples, {lengths}"
            print(f"{where}: {1e3 * each[0]:.1f} ms over {1e3 * each[1]:.1f} ms", flush=True)
    by_gpus, alike = (f"{ours / theirs:.3f}" for ours, theirs in total)
    print(f"{model}: with {NUM_SAMPLES // NUM_GPUS} samples a GPU {by_gpus}, with {NUM_SAMPLES} everywhere {alike}")


def _print_header(names: Sequence[str]) -> None:
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names), flush=True)


def main() -> None:
    """Print two lines for each model and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS, f"full {MODELS[0]}"])
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--ways", action="store_true", help="compare plans by heads, by states and by choice instead")
    parser.add_argument("--planning", action="store_true", help="measure what planning takes instead")
    parser.add_argument("--json", help="write the seconds of all batches and the layouts here")
    given = parser.parse_args()
    if given.json and (given.planning or given.ways):
        parser.error("--json is for the table: leave --planning and --ways out")
    if given.ways and all(model_of(name).linear_attention is None for name in given.models):
        parser.error(f"--ways is for hybrids, and none of {', '.join(given.models)} is one")
    if given.planning:
        for name in MODELS[:2]:
            print_planning(name)
        return
    if given.ways:
        sys.exit(0 if compare_ways(given.models, given.lengths) else 1)
    _print_header(HEADER)
    lines: list[Line] = []
    for name in given.models:
        for lengths in given.lengths:
            for line in measure(name, lengths):
                print("| " + " | ".join(line.row()) + " |", flush=True)
                lines.append(line)
            if given.json:
                os.makedirs(os.path.dirname(given.json) or ".", exist_ok=True)
                with open(given.json, "w", encoding="utf-8") as file:
                    json.dump([line.__dict__ for line in lines], file, indent=1)


if __name__ == "__main__":
    main()
