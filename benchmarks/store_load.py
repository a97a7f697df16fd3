"""How the job's store carries the plans of a large job: one server, a plan for 4096 lanes, a request per rank.

    python benchmarks/store_load.py              # 4096 lanes, 32768 samples, 4096 ranks

Rank 0 publishes one message per lane (a real plan, encoded), every rank asks whether its own is there and gets it, then
rank 0 deletes them all. A few connections stand for the ranks, each asks for many of them one after the other: the
figures are the server's throughput with this machine's cores shared by server and clients, not a rank's latency, and
not what thousands of open connections cost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from datetime import timedelta
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=2, help="with one connection each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    import torch.distributed as dist

    messages = plan_messages(options.lanes, options.samples)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    share = options.ranks // options.processes
    pipes = []
    for number in range(options.processes):
        ours, theirs = context.Pipe()
        ranks = range(number * share, (number + 1) * share)
        context.Process(target=clients, args=(theirs, server.port, ranks, options.lanes), daemon=True).start()
        ours.recv()
        pipes.append(ours)
    size = sum(map(len, messages))
    print(f"plan of {options.samples} samples on {options.lanes} lanes, {options.ranks} ranks:")
    print(f"{size / 1e6:.2f} MB in {len(messages)} messages, the largest {max(map(len, messages))} bytes")
    print("| round | publish ms | all ranks have theirs, ms | operations per s | delete ms |\n|---|---|---|---|---|")
    for number in range(options.rounds):
        started_s = time.perf_counter()
        server.multi_set([f"{number}/{lane}" for lane in range(options.lanes)], messages)
        published_s = time.perf_counter()
        for pipe in pipes:
            pipe.send(number)
        num_operations = sum(pipe.recv() for pipe in pipes)
        fetched_s = time.perf_counter()
        for lane in range(options.lanes):
            server.delete_key(f"{number}/{lane}")
        deleted_s = time.perf_counter()
        fetch_s = fetched_s - published_s
        print(
            f"| {number} | {1e3 * (published_s - started_s):.0f} | {1e3 * fetch_s:.0f} | "
            f"{num_operations / fetch_s:.0f} | {1e3 * (deleted_s - fetched_s):.0f} |"
        )


def plan_messages(num_lanes: int, num_samples: int) -> list[bytes]:
    """Return the messages of a real plan."""
    from dynamic_cp.decide.workloads import draw_lengths
    from dynamic_cp.models.catalog import load_hardware, load_model
    from dynamic_cp.plans.lane_plan import PlanFacts, encode_lanes
    from dynamic_cp.search.search import plan_global_batch
    from dynamic_cp.types import PlanOptions, Sample, Topology

    seqlens = draw_lengths("github", num_samples, 0, 131072, min_seqlen=64, overlong="truncate").tolist()
    planned = plan_global_batch(
        [Sample(sample_id=index, seqlen=seqlen) for index, seqlen in enumerate(seqlens)],
        topology=Topology(num_lanes=num_lanes),
        model=load_model("llama-3-8b"),
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=16384, cp_comm_types=("p2p",)),
    )
    return encode_lanes(planned.plan, PlanFacts.of(planned))


def clients(pipe: Any, port: int, ranks: range, num_lanes: int) -> None:
    """Fetch for many ranks."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    pipe.send("connected")
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        num_operations = 0
        for rank in ranks:
            key = f"{number}/{rank % num_lanes}"
            while not store.check([key]):  # the server is still writing the plan down
                num_operations += 1
            store.get(key)
            num_operations += 2
        pipe.send(num_operations)


if __name__ == "__main__":
    main()
