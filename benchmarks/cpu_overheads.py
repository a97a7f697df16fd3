"""Fixed cost of a micro-batch and of an exchange step on CPU ranks, for dynamic_cp/data/hardware/cpu.json.

    python benchmarks/cpu_overheads.py        # 4 ranks, about a minute; prints one JSON object

Trains on micro-batches of one 16-token sample per bucket, where compute is negligible, with 1 and with 5 layers and CP
size 1, 2 and 4; differences give the cost per layer, per bucket and per exchange step (forward and backward together).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from dynamic_vs_static import MODEL, run_ranks

NUM_RANKS, SEQLEN = 4, 16
LAYERS = (1, 5)


def main() -> None:
    if "RANK" in os.environ:
        measure(int(sys.argv[1]))
        return
    ms = {}
    for layers in LAYERS:
        printed = run_ranks(NUM_RANKS, [sys.argv[0], str(layers)], timeout_s=300, stdout=subprocess.PIPE)
        ms[layers] = json.loads(printed.splitlines()[-1])
    few, many = LAYERS
    per_layer = {cp: (ms[many][cp] - ms[few][cp]) / (many - few) for cp in ms[few]}
    result = {
        "ms per layer": per_layer["1"],
        "ms per bucket": ms[few]["1"] - few * per_layer["1"],
        "ms per layer and exchange step": {cp: (per_layer[cp] - per_layer["1"]) / (int(cp) - 1) for cp in ("2", "4")},
    }
    print(json.dumps(result, indent=1))


def measure(num_layers: int) -> None:
    """Print {cp size: ms per micro-batch}."""
    import torch.distributed as dist

    from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch
    from megatron.dynamic_cp.data_iterator_wrapper import DataIteratorWrapper
    from megatron.dynamic_cp.planning import FixedPlan
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run import set_up
    from megatron.trainer.step import run_schedule

    lengths = {"min_seq_len": SEQLEN + 1, "max_seq_len": SEQLEN + 1, "mean_seq_len": SEQLEN, "lognormal_sigma": 0}
    config = json.dumps({"mode": "distribution", "type": "lognormal", **lengths})
    flags = f"{MODEL} --num-layers {num_layers} --seq-length 64 --train-iters 1 --split 1,0,0 --dynamic-cp"
    run = set_up(parse_args([*flags.split(), "--mock-data", "--varlen-mock-dataset-config-json", config]))

    def seconds(cp_size: int, num_microbatches: int) -> float:
        firsts = range(0, NUM_RANKS, cp_size)
        samples = run.splits.train.global_batch(0, num_microbatches * len(firsts))
        drawn = iter(samples)
        micro_batches = tuple(
            MicroBatch(buckets=tuple(Bucket(first_lane=f, cp_size=cp_size, samples=(next(drawn),)) for f in firsts))
            for _ in range(num_microbatches)
        )
        plan = Plan(topology=run.topology, max_tokens_per_rank=64, micro_batches=micro_batches)
        wrapper = DataIteratorWrapper(
            plan_source=FixedPlan(
                PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""), run.groups.lane
            ),
            read_sample=run.splits.train.read,
            groups=run.groups,
            chunks=run.needs,
        )
        times = []
        for _ in range(5):
            dist.barrier()
            started = time.perf_counter()
            run_schedule(run.model, wrapper.wrap(1, samples), 64, forward_only=False)
            dist.barrier()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    found = {cp_size: 1e3 * (seconds(cp_size, 36) - seconds(cp_size, 4)) / 32 for cp_size in (1, 2, 4)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
