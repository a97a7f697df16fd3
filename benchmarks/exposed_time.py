"""What planning and packing add to a step: live steps against replayed ones, in turn, in one run.

    python benchmarks/exposed_time.py            # 2 ranks, 2048 samples per global batch, a short and a long step

A replayed step gets its plan and its packed samples from memory; nothing is planned, published, fetched, read or packed
while it runs. Exposed time = live / replayed - 1: blocks of steps of both kinds take turns, the first step of a block
is not counted (nothing was asked for ahead of it), and the median over blocks is reported with the interquartile range.

The planner's process, the packing workers and the ranks share the machine's cores here, so on a machine with no core to
spare this also holds the time that the planner takes from the ranks (CPU seconds are listed beside it); on a GPU node
there are cores to spare. `waited` is what rank 0 stood still for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.dynamic_vs_static import lognormal, run_ranks

MODEL = (
    "--num-attention-heads 4 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--lr 1e-3 --train-iters 1 --split 1,0,0 --dynamic-cp --max-seqlen-per-dp-cp-rank 4096 "
    ""
)
STEPS = {"short": "--num-layers 1 --hidden-size 32", "long": "--num-layers 4 --hidden-size 128"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", choices=tuple(STEPS), nargs="+", default=list(STEPS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2048, help="per global batch")
    parser.add_argument("--blocks", type=int, default=5, help="of each kind")
    parser.add_argument("--block", type=int, default=4, help="measured steps of a block")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/exposed_time.json"))
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind in options.steps:
        run_ranks(options.ranks, ["-m", "benchmarks.exposed_time", *sys.argv[1:], "--steps", kind], timeout_s=1500)
        rows.append(json.loads(options.output.read_text()))
    options.output.write_text(json.dumps(rows, indent=1))
    print("| step | replayed ms | live / replayed - 1 | interquartile range | waited ms | planner ms |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            "| {step} | {replayed_ms:.0f} | {exposed:.2%} | {low:.2%} .. {high:.2%} | {waited_ms:.2f} | "
            "{planner_ms:.1f} |".format(**row)
        )


def measure(options: argparse.Namespace) -> None:
    """Time blocks of live and of replayed steps; rank 0 writes the row."""
    import torch.distributed as dist

    from megatron.dynamic_cp.step.schedule import sum_over_job
    from megatron.trainer.flags.arguments import parse_args
    from megatron.trainer.setup.run import set_up

    (kind,) = options.steps
    flags = f"{MODEL} {STEPS[kind]} --global-batch-size {options.samples}"
    run = set_up(parse_args([*flags.split(), *lognormal(4096, 40, 1.2)]))
    stream, num_samples = run.splits.train, options.samples

    def batches(block: int) -> Iterator[tuple[int, Any]]:
        """Yield more batches than a block runs, so that its last step looks ahead like all others."""
        for step in itertools.count(block * (options.block + 1)):
            yield step, stream.global_batch(step * num_samples, num_samples)

    def time_block(wrapper: Any, coming: Iterator[tuple[int, Any]]) -> tuple[float, list[float], list[Any]]:
        """Return seconds of the measured steps, rank 0's waits in them, and what was run."""
        seconds, waits, seen = 0.0, [], []
        steps = wrapper.steps(coming)
        for index in range(options.block + 1):
            dist.barrier()
            started_s = time.perf_counter()
            _, _, data = next(steps)
            for chunk in run.model:
                chunk.zero_grad_buffer()
            logged = run.run_schedule(data, wrapper, forward_only=False)
            sum_over_job(logged, exchanged_bytes=0, stop=False, device=run.runtime.device)
            if index:
                seconds += time.perf_counter() - started_s
                waits.append(wrapper.waits.plan_s + wrapper.waits.pack_s)
            seen.append(wrapper.plan)
        wrapper.close()
        return seconds, waits, seen

    ratios, waits, replayed_s, planner_s = [], [], [], []
    for block in range(options.blocks + 1):
        live_s, waited, plans = time_block(run.iterator_wrapper(stream, f"live-{block}"), batches(block))
        in_memory = list(itertools.islice(batches(block), options.block + 1))
        second_s, _, _ = time_block(replaying(run, plans, stream), iter(in_memory))
        if block == 0:
            continue  # everything is loaded now
        ratios.append(live_s / second_s - 1)
        waits += waited
        replayed_s.append(second_s / options.block)
        planner_s += [plan.facts.planner_s for plan in plans]
    run.close()
    if dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {
            "step": kind,
            "replayed_ms": 1e3 * statistics.median(replayed_s),
            "exposed": middle,
            "low": low,
            "high": high,
            "waited_ms": 1e3 * statistics.median(waits),
            "planner_ms": 1e3 * statistics.median(planner_s),
        }
        options.output.write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def replaying(run: Any, plans: list[Any], stream: Any) -> Any:
    """Return a wrapper that has the plans and the packed samples of all its steps in memory."""
    from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
    from megatron.dynamic_cp.data.micro_batches import pack_step

    packed = [pack_step(plan, stream.read) for plan in plans]

    class InMemory:
        """A plan source and a packer."""

        lookahead = 0

        def __init__(self, values: list[Any]) -> None:
            self._values = iter(values)

        def on_arrival(self, listener: Any) -> None:
            """Does nothing."""

        def request(self, step: int, samples: Any) -> None:
            """Does nothing: the plan is already in memory."""

        def take(self, step: int | None = None) -> Any:
            """Return the next one."""
            return next(self._values)

        def close(self) -> None:
            """Does nothing."""

    wrapper = DataIteratorWrapper(
        plan_source=InMemory(plans),
        read_sample=stream.read,
        groups=run.runtime.groups,
        chunks=run.needs,
        device=run.runtime.device,
    )
    wrapper._packer = InMemory(packed)
    return wrapper


if __name__ == "__main__":
    main()
