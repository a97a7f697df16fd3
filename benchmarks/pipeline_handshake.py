"""What megatron-core's shape handshake costs a pipeline, against shapes that come from the plan.

    python benchmarks/pipeline_handshake.py            # all pipelines on CPU ranks, 4 minutes idle; prints a table
    python benchmarks/pipeline_handshake.py PP4        # one of them

The same micro-batches run with and without the handshake in turn, so a noisy machine disturbs both equally. Wall times
are the least of the repeats, CPU times (all ranks together) their medians: what others do on the machine only adds.
Gloo on one machine: a message costs some system calls, not a network's latency, and there is no GPU that the host would
have to wait for.
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
BARE = "messages alone"
BARE_SHAPE = {BARE: (256, 32)}
# Name -> flags.
PIPELINES = {
    "PP2": "--pipeline-model-parallel-size 2",
    "PP2 VPP2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "PP4": "--pipeline-model-parallel-size 4",
}
NUM_REPEATS, NUM_WARM_UP = 12, 2
LENGTHS = {"mode": "distribution", "type": "lognormal", "min_seq_len": 33, "max_seq_len": 2049, "mean_seq_len": 256}


def main() -> None:
    if "RANK" in os.environ:
        measure(sys.argv[1])
        return
    print(
        "| pipeline | micro-batches | planned ms | handshake ms | ratio | CPU planned ms | CPU handshake ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or PIPELINES:
        printed = run_ranks(int(PIPELINES[name].split()[1]), [sys.argv[0], name], timeout_s=500, stdout=subprocess.PIPE)
        for row in json.loads(printed.splitlines()[-1]):
            cells = [*row[:2], *(f"{ms:.1f} | {stock_ms:.1f} | {stock_ms / ms:.3f}" for ms, stock_ms in row[2:])]
            print(f"| {' | '.join(cells)} |", flush=True)


def measure(name: str) -> None:
    """Print the rows of one pipeline."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
    from dynamic_cp.types import Bucket, MicroBatch, Plan, PlannedBatch, Sample
    from megatron.dynamic_cp.data.data_iterator_wrapper import StepData
    from megatron.dynamic_cp.data.micro_batches import PackedStep, for_chunk, micro_batches, pack_step
    from megatron.dynamic_cp.packed_seq_params import ExchangeStats
    from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator
    from megatron.dynamic_cp.step.schedule import run_schedule
    from megatron.trainer.flags.arguments import parse_args
    from megatron.trainer.setup.run import set_up

    flags = f"{MODEL} --num-layers 4 --seq-length 2048 --train-iters 1 --split 1,0,0 --dynamic-cp {PIPELINES[name]}"
    mock = ["--mock-data", "--varlen-mock-dataset-config-json", json.dumps(LENGTHS | {"lognormal_sigma": 1.0})]
    run = set_up(parse_args([*flags.split(), *mock]))

    def pack(num_microbatches: int, seqlen: int) -> PackedStep:
        rows = [Bucket(first_lane=0, samples=(Sample(sample_id=i, seqlen=seqlen),)) for i in range(num_microbatches)]
        plan = Plan(
            topology=run.runtime.topology,
            max_tokens_per_rank=seqlen,
            micro_batches=tuple(MicroBatch(buckets=(bucket,)) for bucket in rows),
        )
        planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason="")
        return pack_step(lane_plan(plan, 0, PlanFacts.of(planned)), lambda _: Tokens(seqlen))

    class Tokens:
        def __init__(self, seqlen: int) -> None:
            self.tokens = self.labels = np.arange(seqlen) % 250
            self.loss_mask = np.ones(seqlen, np.float32)

    def messages(packed: PackedStep, handshake: bool) -> None:
        """Exchange what two stages exchange in a step, computing nothing."""
        pp_group = parallel_state.get_pipeline_model_parallel_group()
        rank_tokens = [bucket.rank_tokens for bucket in packed.buckets]
        planned = PlannedP2PCommunicator(pp_group, run.config, rank_tokens)
        communicator = P2PCommunicator(pp_group, run.config) if handshake else planned
        shape = (rank_tokens[0], 1, run.config.hidden_size)
        tensor = torch.zeros(shape)
        for _ in rank_tokens:
            if pp_group.rank() == 0:
                # Not in one call: the handshake would wait for the answer's shape before it sent the question.
                communicator.send_forward(tensor, False)
                communicator.recv_backward(shape, False)
            else:
                communicator.recv_forward(shape, False)
                communicator.send_backward(tensor, False)

    def seconds(packed: PackedStep, handshake: bool, computing: bool) -> tuple[float, float]:
        """Return wall and CPU seconds of a step."""
        batches = list(micro_batches(packed, run.runtime.groups, run.runtime.device, "", ExchangeStats()))
        data = StepData([for_chunk(batches, needs) for needs in run.needs], len(batches), 0, 0)
        rank_tokens = None if handshake else [bucket.rank_tokens for bucket in packed.buckets]
        for chunk in run.model:
            chunk.zero_grad_buffer()
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        if computing:
            run_schedule(run.model, data, 2048, forward_only=False, rank_tokens=rank_tokens)
        else:
            messages(packed, handshake)
        cpu_s = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
        dist.barrier()
        wall_s = time.perf_counter() - started
        dist.all_reduce(cpu_s)
        return wall_s, cpu_s.item()

    table: list[tuple[Any, ...]] = []
    for what, (num_microbatches, seqlen) in ((BARE_SHAPE if name == "PP2" else {}) | SHAPES).items():
        packed = pack(num_microbatches, seqlen)
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for repeat in range(NUM_REPEATS + NUM_WARM_UP):
            first = repeat % 2 == 0
            for handshake in (first, not first):
                times[handshake].append(seconds(packed, handshake, computing=what != BARE))
        (wall, cpu), (stock_wall, stock_cpu) = (
            zip(*times[handshake][NUM_WARM_UP:], strict=True) for handshake in (False, True)
        )
        least_ms = [1e3 * min(column) for column in (wall, stock_wall)]
        cpu_ms = [1e3 * statistics.median(column) for column in (cpu, stock_cpu)]
        table.append((name, f"{what}: {num_microbatches} of {seqlen} tokens", least_ms, cpu_ms))
    if dist.get_rank() == 0:
        print(json.dumps(table), flush=True)
    run.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
