"""What megatron-core's shape handshake costs a pipeline, against shapes that come from the plan.

    python benchmarks/pipeline_handshake.py            # all pipelines on CPU ranks, 4 minutes idle; prints a table
    python benchmarks/pipeline_handshake.py PP4        # one of them

The same micro-batches run with and without the handshake in turn, so a noisy machine disturbs both alike; figures are
medians over the repeats, the ratio is the median of the ratios of neighbours. Gloo on one machine: a message costs some
system calls, not a network's latency, and there is no GPU that the host would have to wait for.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from dynamic_vs_static import MODEL, run_ranks

# Name -> (micro-batches, tokens of each).
SHAPES = {"many small": (64, 32), "some": (16, 256), "few large": (4, 1024)}
# Name -> flags.
PIPELINES = {
    "PP2": "--pipeline-model-parallel-size 2",
    "PP2 VPP2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "PP4": "--pipeline-model-parallel-size 4",
}
NUM_REPEATS, NUM_WARM_UP = 16, 2
LENGTHS = {"mode": "distribution", "type": "lognormal", "min_seq_len": 33, "max_seq_len": 2049, "mean_seq_len": 256}


def main() -> None:
    if "RANK" in os.environ:
        measure(sys.argv[1])
        return
    print("| pipeline | micro-batches | planned ms | handshake ms | handshake / planned | us per micro-batch |")
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or PIPELINES:
        printed = run_ranks(int(PIPELINES[name].split()[1]), [sys.argv[0], name], timeout_s=500, stdout=subprocess.PIPE)
        for row in json.loads(printed.splitlines()[-1]):
            print("| {name} | {what} | {planned:.1f} | {handshake:.1f} | {ratio:.3f} | {us:.0f} |".format(**row))


def measure(name: str) -> None:
    """Print the rows of one pipeline."""
    import numpy as np
    import torch.distributed as dist

    from dynamic_cp.lane_plan import PlanFacts, lane_plan
    from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch, Sample
    from megatron.dynamic_cp.data_iterator_wrapper import StepData
    from megatron.dynamic_cp.micro_batches import PackedStep, for_chunk, micro_batches, pack_step
    from megatron.dynamic_cp.packed_seq_params import ExchangeStats
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run import set_up
    from megatron.trainer.step import run_schedule

    flags = f"{MODEL} --num-layers 4 --seq-length 2048 --train-iters 1 --split 1,0,0 --dynamic-cp {PIPELINES[name]}"
    mock = ["--mock-data", "--varlen-mock-dataset-config-json", json.dumps(LENGTHS | {"lognormal_sigma": 1.0})]
    run = set_up(parse_args([*flags.split(), *mock]))

    def pack(num_microbatches: int, seqlen: int) -> PackedStep:
        rows = [Bucket(first_lane=0, samples=(Sample(sample_id=i, seqlen=seqlen),)) for i in range(num_microbatches)]
        plan = Plan(
            topology=run.topology,
            max_tokens_per_rank=seqlen,
            micro_batches=tuple(MicroBatch(buckets=(bucket,)) for bucket in rows),
        )
        planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason="")
        return pack_step(lane_plan(plan, 0, PlanFacts.of(planned)), lambda _: Tokens(seqlen))

    class Tokens:
        def __init__(self, seqlen: int) -> None:
            self.tokens = self.labels = np.arange(seqlen) % 250
            self.loss_mask = np.ones(seqlen, np.float32)

    def seconds(packed: PackedStep, handshake: bool) -> float:
        batches = list(micro_batches(packed, run.groups, run.device, "", ExchangeStats()))
        data = StepData([for_chunk(batches, needs) for needs in run.needs], len(batches), 0, 0)
        rank_tokens = None if handshake else [bucket.rank_tokens for bucket in packed.buckets]
        for chunk in run.model:
            chunk.zero_grad_buffer()
        dist.barrier()
        started = time.perf_counter()
        run_schedule(run.model, data, 2048, forward_only=False, rank_tokens=rank_tokens)
        dist.barrier()
        return time.perf_counter() - started

    table: list[dict[str, Any]] = []
    for what, (num_microbatches, seqlen) in SHAPES.items():
        packed = pack(num_microbatches, seqlen)
        pairs = []
        for repeat in range(NUM_REPEATS + NUM_WARM_UP):
            first = repeat % 2 == 0
            times = {handshake: seconds(packed, handshake) for handshake in (first, not first)}
            pairs.append((times[False], times[True]))
        del pairs[:NUM_WARM_UP]
        planned_s, handshake_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        table.append(
            {
                "name": name,
                "what": f"{what}: {num_microbatches} of {seqlen} tokens",
                "planned": 1e3 * planned_s,
                "handshake": 1e3 * handshake_s,
                "ratio": statistics.median(handshake / planned for planned, handshake in pairs),
                "us": 1e6 * statistics.median(handshake - planned for planned, handshake in pairs) / num_microbatches,
            }
        )
    if dist.get_rank() == 0:
        print(json.dumps(table), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
