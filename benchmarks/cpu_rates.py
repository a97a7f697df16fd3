"""Rates of CPU ranks that share a machine, for dynamic_cp/data/hardware/cpu.json.

    python benchmarks/cpu_rates.py --ranks 4        # prints one JSON object; about a minute

All ranks work at the same time, one thread each, as in training. FLOPs are counted as the cost model counts them:
causal attention of width q costs 2 q S^2 forward.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 48, 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, folder, results))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=300)
    print(json.dumps(results.get(), indent=1))


def measure(rank: int, num_ranks: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = {f"linear_flops_per_s at {n} tokens": linear(n) for n in (16, 128, 1024, 4096)}
    for seqlen in (64, 256, 1024, 4096):
        forward, backward = attention(seqlen)
        found[f"attention_flops_per_s at {seqlen} tokens"] = forward
        found[f"attention_backward_over_forward at {seqlen} tokens"] = backward
    for num_bytes in (64, 1 << 18, 1 << 22):
        found[f"ring step_s of {num_bytes} bytes"] = ring_step(num_bytes)
    if rank == 0:
        results.put({name: float(f"{value:.3g}") for name, value in found.items()})


def seconds(function: Callable[[], Any], at_least_s: float = 1.0) -> float:
    """Return the mean seconds of a call while all ranks call it for `at_least_s`."""
    function()
    dist.barrier()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < at_least_s:
        function()
        calls += 1
    mean = (time.perf_counter() - started) / calls
    dist.barrier()
    return mean


def linear(num_tokens: int) -> float:
    x, weight = torch.randn(num_tokens, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN)
    return 2 * num_tokens * HIDDEN * 4 * HIDDEN / seconds(lambda: x @ weight)


def attention(seqlen: int) -> tuple[float, float]:
    from megatron.dynamic_cp.attention.tiles import tile_backward, tile_forward

    q, grad = (torch.randn(seqlen, HEADS, HEAD_DIM) for _ in range(2))
    k, v = (torch.randn(seqlen, KV_HEADS, HEAD_DIM) for _ in range(2))
    how = {"causal": True, "scale": HEAD_DIM**-0.5}
    out, lse = tile_forward(q, k, v, **how)
    forward_s = seconds(lambda: tile_forward(q, k, v, **how))
    backward_s = seconds(lambda: tile_backward(grad, q, k, v, out, lse, **how))
    return 2 * HEADS * HEAD_DIM * seqlen**2 / forward_s, backward_s / forward_s


def ring_step(num_bytes: int) -> float:
    """Return the seconds of sending to the next rank and receiving from the previous one; a fixed number of turns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    turns = 40
    dist.barrier()
    started = time.perf_counter()
    for _ in range(turns):
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return (time.perf_counter() - started) / turns


if __name__ == "__main__":
    main()
