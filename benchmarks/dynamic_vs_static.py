"""Dynamic CP against static CP on CPU ranks: the same data and model, policies interleaved step by step in one run.

    python benchmarks/dynamic_vs_static.py   # three kinds of data on 4 and on 2 ranks; prints a table, writes JSON
    python benchmarks/dynamic_vs_static.py --model experts --data chat documents --ranks 4

Each global batch is trained on under every policy in turn (the order rotates), so that a noisy machine disturbs all
equally; ratios are of the sums over batches. All policies have the same memory: padded tokens per rank are limited to
what the longest sample needs at static CP = number of ranks. Ranks share the machine's cores: this measures traffic,
padding and per-micro-batch overhead, not the waiting of idle devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from datetime import date
from pathlib import Path
from typing import Any

POLICIES = ("static", "balanced", "dynamic")
BASELINE = "static"


def lognormal(max_seqlen: int, mean_seqlen: int, sigma: float) -> list[str]:
    """Return the flags of random tokens with lognormal lengths."""
    lengths = {"min_seq_len": 32, "max_seq_len": max_seqlen, "mean_seq_len": mean_seqlen, "lognormal_sigma": sigma}
    config = {"mode": "distribution", "type": "lognormal", **lengths}
    flags = f"--seq-length {max_seqlen} --mock-data --varlen-mock-dataset-config-json"
    return [*flags.split(), json.dumps(config)]


# Name -> flags. Mean and sigma of `documents` are those of NVIDIA's dynamic-CP example (Megatron-LM, branch dev, June
# 2026); `chat` is short with a long tail, as instruction data is; `stdlib` is what `make train` reads.
DATA = {
    "chat": [*lognormal(4096, 192, 1.4), "--global-batch-size", "160"],
    "documents": [*lognormal(8192, 1024, 1.5), "--global-batch-size", "32"],
    "stdlib": [
        *("--seq-length", "4096", "--data-glob", "**/*.py", "--data-path", sysconfig.get_paths()["stdlib"]),
        *("--global-batch-size", "8"),
    ],
}
MODEL = (
    "--hidden-size 192 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --lr 1e-3 "
    ""
)
# Name -> flags; each rank of R has 8 / R of the experts.
MODELS = {
    "dense": "",
    "experts": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --expert-model-parallel-size {ranks}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--data", choices=tuple(DATA), nargs="+", default=list(DATA))
    parser.add_argument("--model", choices=tuple(MODELS), default="dense")
    parser.add_argument("--batches", type=int, default=6, help="measured global batches, after one of warm-up")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/dynamic_vs_static.json"))
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for data in options.data:
        for num_ranks in options.ranks:
            run_ranks(num_ranks, [*sys.argv, "--data", data], timeout_s=900)
            rows += json.loads(options.output.read_text())["rows"]
    about = {"date": date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.processor() or 'CPU'}"}
    options.output.write_text(json.dumps({"about": about, "options": vars(options) | {"output": None}, "rows": rows}))
    print(table(rows))


def run_ranks(num_ranks: int, command: list[str], timeout_s: float, stdout: int | None = None) -> bytes | None:
    """Run a script with its words on `num_ranks` ranks, one thread each; return what it printed if `stdout` is PIPE."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        f"--nproc-per-node={num_ranks}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], check=True, timeout=timeout_s, env=environment, stdout=stdout).stdout


def measure(options: argparse.Namespace) -> None:
    """Time every policy on the same global batches; rank 0 writes the rows."""
    import torch.distributed as dist

    from dynamic_cp.types import Problem
    from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
    from megatron.dynamic_cp.plans.plan_source import PlanSource
    from megatron.dynamic_cp.plans.planner import Planner
    from megatron.dynamic_cp.step.schedule import run_schedule, sum_over_job
    from megatron.trainer.flags.arguments import parse_args
    from megatron.trainer.setup.run import set_up

    num_ranks = int(os.environ["WORLD_SIZE"])
    (data_name,) = options.data
    model = f"{MODEL} {MODELS[options.model].format(ranks=num_ranks)}"
    flags = f"{model} --num-layers 4 --train-iters 1 --context-parallel-size {num_ranks} --dynamic-cp --split 1,0,0"
    settings = parse_args([*flags.split(), *DATA[data_name]])
    seq_length, batch_size = settings.planning.seq_length, settings.training.global_batch_size
    run = set_up(settings)
    wrappers = {}
    for name in POLICIES:
        problem = Problem(
            topology=run.runtime.topology,
            model=run.runtime.model_shape,
            hardware=run.runtime.hardware,
            options=run.runtime.options,
            policy=name,
        )
        planner = Planner(problem, max_seqlen=seq_length) if dist.get_rank() == 0 else None
        source = PlanSource(planner, topology=run.runtime.topology, lane=run.runtime.groups.lane, name=name)
        wrappers[name] = DataIteratorWrapper(
            plan_source=source, read_sample=run.splits.train.read, groups=run.runtime.groups, chunks=run.needs
        )
    totals: dict[str, dict[str, Any]] = {
        name: {"seconds": 0.0, "planner_s": 0.0, "predicted_s": 0.0, "tokens": 0, "padded": 0.0, "bytes": 0, "mbs": 0}
        for name in POLICIES
    }
    losses: dict[str, list[float]] = {name: [] for name in POLICIES}
    names = list(POLICIES)
    for batch in range(options.batches + 1):
        samples = run.splits.train.global_batch(batch * batch_size, batch_size)
        for name in names[batch % len(names) :] + names[: batch % len(names)]:
            for chunk in run.model:
                chunk.zero_grad_buffer()
            run.optimizer.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            data = wrappers[name].wrap(batch + 1, samples)
            logged = run_schedule(run.model, data, seq_length, forward_only=False)
            exchanged = wrappers[name].exchange_stats.bytes_sent
            sums = sum_over_job(logged, exchanged_bytes=exchanged, stop=False, device=run.runtime.device)
            elapsed = time.perf_counter() - started
            losses[name].append(sums.loss)
            if batch == 0:
                continue
            plan, total = wrappers[name].plan.facts, totals[name]
            total["seconds"] += elapsed
            total["planner_s"] += plan.planner_s
            total["predicted_s"] += plan.predicted_s
            total["tokens"] += plan.seqlen_sum
            total["padded"] += plan.seqlen_sum / (1 - plan.padding_fraction)
            total["bytes"] += sums.exchanged_bytes
            total["mbs"] += plan.num_microbatches
    for name in POLICIES:
        difference = max(abs(a - b) / b for a, b in zip(losses[name], losses[BASELINE], strict=True))
        if difference > 1e-4:
            raise AssertionError(f"{name} gave another loss than {BASELINE}: relative difference {difference}")
    if dist.get_rank() == 0:
        rows = [row(data_name, num_ranks, name, totals, options.batches) for name in POLICIES]
        options.output.write_text(json.dumps({"rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def row(data: str, num_ranks: int, name: str, totals: dict[str, dict[str, Any]], num_batches: int) -> dict[str, Any]:
    """Return the figures of a policy; ratios are to static."""
    total, baseline = totals[name], totals[BASELINE]
    return {
        "data": data,
        "ranks": num_ranks,
        "policy": name,
        "step_ms": 1e3 * total["seconds"] / num_batches,
        "tokens_per_s": total["tokens"] / total["seconds"],
        "speedup": baseline["seconds"] / total["seconds"],
        "padding": 1 - total["tokens"] / total["padded"],
        "exchanged_mib_per_step": total["bytes"] / num_batches / 2**20,
        "num_microbatches": total["mbs"] / num_batches,
        "planner_ms": 1e3 * total["planner_s"] / num_batches,
        "predicted_over_measured": total["predicted_s"] / total["seconds"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    columns = {
        "data": "{data}",
        "ranks": "{ranks}",
        "policy": "{policy}",
        "step ms": "{step_ms:.0f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "speed-up": "{speedup:.2f}",
        "padding": "{padding:.1%}",
        "exchanged MiB/step": "{exchanged_mib_per_step:.1f}",
        "micro-batches": "{num_microbatches:.1f}",
        "planner ms": "{planner_ms:.1f}",
        "predicted / measured": "{predicted_over_measured:.2f}",
    }
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    lines = [f"| {' | '.join(columns.values())} |".format(**row) for row in rows]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
