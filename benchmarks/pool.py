"""A pool of both pipeline stages against dynamic CP, on CPU ranks in two nodes with a slow NIC per rank between them.

    python benchmarks/pool.py                          # needs root for network namespaces; a minute
    python benchmarks/pool.py --lanes 2 --rate 1gbit   # as many ranks as cores, or times are those of the cores

One document is 64 times as long as each of the others. All plans run in turn in one job, on the same samples: dynamic
CP, a pool whose layers run in two nano-batches, and one without ping-pong. Their losses must agree. A node has the
lanes of one stage, so that everything between stages crosses. Without namespaces (no root) links are not throttled.

Wall times mean something only where each rank has a core of its own and nobody else uses it. Hence the second measure,
*laid out*: the CPU time of every operation of every rank (of the fastest repetition), along the longest path through
the schedule; a tick takes as long as its busiest rank. It has no links in it, so that it shows what two nano-batches
cost and not what they hide.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from emulated_nodes import run_anyway, sent_by_nic

from dynamic_cp.pipeline.schedule import Operation, needed_operation, stage_operations

TIMES_AS_LONG = 64
KINDS: dict[str, dict[str, Any]] = {
    "dynamic CP, 1F1B": {"pool": "off"},
    "pool, two nano-batches": {"pool": "always", "ping_pong": True},
    "pool, one stream": {"pool": "always", "ping_pong": False},
}
"""Name -> options of the planner; with `--vpp` 1F1B is interleaved."""
MODEL = (
    "--hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --lr 1e-4 --train-iters 1 "
    "--mock-data --dynamic-cp --dynamic-cp-pool always --distributed-backend gloo --num-workers 0 --eval-iters 0 "
    "--make-vocab-size-divisible-by 8"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One plan on one rank, with a value for each repetition."""

    num_microbatches: int
    predicted_s: float
    seconds: tuple[float, ...]
    operations_s: tuple[float, ...]
    sent_bytes: int
    nic_bytes: int | None
    loss: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="stages")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks of a stage")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--short", type=int, default=128, help="tokens of a short document")
    parser.add_argument("--num-short", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--rate", default="1gbit", help="of each rank's NIC, in tc's words")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    by_rank, is_emulated = _run(args)
    link = f"NIC of {args.rate} per rank" if is_emulated else "not throttled"
    print(
        f"PP {args.pp}, VPP {args.vpp}, {args.lanes} lanes, {args.layers} layers a stage, a document of "
        f"{TIMES_AS_LONG * args.short} tokens and {args.num_short} of {args.short}; {args.pp} nodes of {args.lanes} "
        f"ranks, {link}; "
        f"{args.repeat} repetitions, {os.cpu_count()} cores\n"
    )
    print(
        "| plan | micro-batches | predicted, s | of dynamic | laid out, s | of dynamic | wall, median, s | "
        "of dynamic | wall, fastest, s | of dynamic | attention sent, MB | NICs, MB |\n" + "|---" * 12 + "|"
    )
    first: tuple[float, ...] | None = None
    for index, kind in enumerate(KINDS):
        found = [outcomes[index] for outcomes in by_rank]
        slowest = [max(times) for times in zip(*(one.seconds for one in found), strict=True)]
        laid_out_s = _laid_out_s(kind, found, args.pp, args.vpp, args.lanes)
        figures = found[0].predicted_s, laid_out_s, statistics.median(slowest), min(slowest)
        first = first or figures
        nics = f"{sum(one.nic_bytes or 0 for one in found) / 1e6:.1f}" if is_emulated else "-"
        cells = " | ".join(f"{value:.3f} | {value / base:.2f}" for value, base in zip(figures, first, strict=True))
        print(
            f"| {kind} | {found[0].num_microbatches} | {cells} | "
            f"{sum(one.sent_bytes for one in found) / 1e6:.1f} | {nics} |"
        )


def _laid_out_s(kind: str, found: Sequence[Outcome], pp_size: int, vp_size: int, num_lanes: int) -> float:
    """Return the longest path through the schedule in CPU seconds; in every operation lanes wait for each other."""
    each = np.array([one.operations_s for one in found]).reshape(pp_size, num_lanes, -1).max(axis=1)
    if KINDS[kind]["pool"] == "always":
        return float(each.max(axis=0).sum())
    rows = found[0].num_microbatches
    ends: dict[tuple[int, Operation], float] = {}
    operations = [stage_operations(stage, pp_size, rows, vp_size) for stage in range(pp_size)]
    places, free_s = [0] * pp_size, [0.0] * pp_size
    while len(ends) < 2 * rows * pp_size * vp_size:
        for stage, own in enumerate(operations):
            if places[stage] == len(own):
                continue
            operation = own[places[stage]]
            need = needed_operation(stage, operation, pp_size, vp_size)
            if need is not None and (need.stage, need.operation) not in ends:
                continue
            ready_s = 0.0 if need is None else ends[need.stage, need.operation]
            free_s[stage] = max(free_s[stage], ready_s) + each[stage, places[stage]]
            ends[stage, operation] = free_s[stage]
            places[stage] += 1
    return max(free_s)


def _timed(owner: Any, name: str, times: list[float]) -> None:
    """Return a function that also says how much CPU time it takes."""
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        started_s = time.process_time()
        try:
            return real(*args, **options)
        finally:
            times.append(time.process_time() - started_s)

    setattr(owner, name, call)


def _run(args: argparse.Namespace) -> tuple[list[list[Outcome]], bool]:
    import megatron.trainer.setup.run  # noqa: F401  once, before the ranks are forked

    torch.set_num_threads(1)
    return run_anyway(measure, args.pp * args.lanes, args.lanes, args.rate, args)


def measure(rank: int, folder: str, args: argparse.Namespace, is_emulated: bool) -> list[Outcome]:
    """Return the outcome of each plan on this rank."""
    from dataclasses import replace

    from megatron.core.pipeline_parallel import schedules

    from dynamic_cp.search.search import plan_batch
    from dynamic_cp.types import Problem, Sample
    from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
    from megatron.dynamic_cp.data.sample_tokens import SampleTokens
    from megatron.dynamic_cp.plans.plan_source import FixedPlan
    from megatron.dynamic_cp.pool import ticks
    from megatron.trainer.flags.arguments import parse_args
    from megatron.trainer.setup.run import set_up

    num_ranks, longest = args.pp * args.lanes, TIMES_AS_LONG * args.short
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(args.lanes)}
    words = (
        f"{MODEL} --seq-length {longest} --num-layers {args.layers * args.pp} --pipeline-model-parallel-size {args.pp} "
        f"--num-virtual-stages-per-pipeline-rank {args.vpp} "
        f"--max-seqlen-per-dp-cp-rank {longest} --global-batch-size {args.num_short + 1}"
    )
    job = set_up(parse_args(words.split(), num_ranks))
    lengths = [longest, *[args.short] * args.num_short]
    samples = tuple(Sample(sample_id=number, seqlen=seqlen) for number, seqlen in enumerate(lengths))

    def read(number: int) -> SampleTokens:
        drawn = np.random.default_rng(number).integers(1, 100, lengths[number] + 1)
        return SampleTokens(tokens=drawn[:-1], labels=drawn[1:], loss_mask=np.ones(lengths[number], np.float32))

    runtime = job.runtime
    wrappers: dict[str, Any] = {}
    planned = {}
    for kind in KINDS:
        problem = Problem(
            topology=runtime.topology,
            model=runtime.model_shape,
            hardware=runtime.hardware,
            options=replace(runtime.options, **KINDS[kind]),
        )
        planned[kind] = plan_batch(problem, samples)
        wrappers[kind] = DataIteratorWrapper(
            plan_source=FixedPlan(planned[kind], runtime.groups.lane),
            read_sample=read,
            groups=runtime.groups,
            chunks=job.needs,
            device=runtime.device,
        )
    times: list[float] = []
    for owner, name in (
        (schedules, "forward_step"),
        (schedules, "backward_step"),
        (ticks._Server, "serve"),
        (ticks._Microbatches, "backward"),
    ):
        _timed(owner, name, times)
    operations: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    sent, nics, losses = {}, {}, {}
    for repetition in range(args.repeat + 1):  # the first one warms up
        for kind in KINDS:
            times.clear()
            found = _step(job, wrappers[kind], repetition, samples, is_emulated)
            losses[kind], elapsed_s, sent[kind], nics[kind] = found
            if repetition:
                seconds[kind].append(elapsed_s)
                operations[kind].append(tuple(times))
    if max(losses.values()) / min(losses.values()) > 1 + 1e-4:
        raise AssertionError(f"losses are {losses}, the same is expected")
    job.close()
    return [
        Outcome(
            num_microbatches=planned[kind].plan.num_microbatches,
            predicted_s=planned[kind].predicted_s,
            seconds=tuple(seconds[kind]),
            operations_s=tuple(np.array(operations[kind]).min(axis=0).tolist()),
            sent_bytes=sent[kind],
            nic_bytes=nics[kind] if is_emulated else None,
            loss=losses[kind],
        )
        for kind in KINDS
    ]


def _step(job: Any, wrapper: Any, step: int, samples: Any, is_emulated: bool) -> tuple[float, float, int, int]:
    """Return loss, seconds, bytes counted for attention, and bytes that left the NIC, of one step without optimizer."""
    from megatron.dynamic_cp.step.schedule import sum_over_job

    for chunk in job.model:
        chunk.zero_grad_buffer()
    data = wrapper.wrap(step, samples)
    dist.barrier()
    nic_before, started_s = sent_by_nic() if is_emulated else 0, time.perf_counter()
    logged = job.run_schedule(data, wrapper, forward_only=False)
    dist.barrier()
    elapsed_s, nic = time.perf_counter() - started_s, sent_by_nic() - nic_before if is_emulated else 0
    sums = sum_over_job(logged, exchanged_bytes=0, stop=False, device=job.runtime.device)
    return sums.loss, elapsed_s, wrapper.exchange_stats.bytes_sent, nic


if __name__ == "__main__":
    main()
