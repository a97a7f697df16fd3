"""Every exchange on 8 CPU ranks, two nodes of four with a slow NIC per rank between them: bytes and time.

    python benchmarks/exchanges_cpu.py                     # needs root for network namespaces; about two minutes
    python benchmarks/exchanges_cpu.py --rate 1gbit --tokens 8192 --kv-heads 2

One causal attention layer, forward and backward, over one sequence on all 8 lanes. Without namespaces (no root) links
are not throttled, times are printed but mean little, and the bytes across nodes are the counted ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from emulated_nodes import run_anyway, sent_by_nic

from dynamic_cp.types import Topology

NUM_RANKS, RANKS_PER_NODE = 8, 4
CASES = (("p2p", 1), ("all_gather", 1), ("a2a", 8), ("a2a+p2p", 2), ("a2a+p2p", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One exchange on one rank: seconds of the fastest and the median repetition, bytes of one."""

    median_s: float
    fastest_s: float
    sent_bytes: int
    crossing_bytes: int
    nic_bytes: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the sequence, a multiple of 16")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rate", default="200mbit", help="of each rank's NIC, in tc's words")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    by_rank, is_emulated = _run(args)
    link = f"NIC of {args.rate} per rank" if is_emulated else "not throttled"
    print(
        f"{args.tokens} tokens, {args.heads} query and {args.kv_heads} KV heads of {args.dim}, fp32; "
        f"2 nodes of {RANKS_PER_NODE} ranks, {link}; forward and backward of one layer\n"
    )
    print(
        "| exchange | inner x outer | sent by a rank, MB | across nodes, all ranks, MB | busiest NIC, MB | "
        "measured there, MB | median, s | fastest, s | of the ring |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    ring_s = None
    for index, (exchange, inner) in enumerate(CASES):
        found = [outcomes[index] for outcomes in by_rank]
        median_s = max(one.median_s for one in found)
        ring_s = ring_s or median_s
        measured = f"{max(one.nic_bytes for one in found) / 1e6:.1f}" if is_emulated else "-"
        print(
            f"| {exchange} | {inner} x {NUM_RANKS // inner} | {max(one.sent_bytes for one in found) / 1e6:.1f} | "
            f"{sum(one.crossing_bytes for one in found) / 1e6:.1f} | "
            f"{max(one.crossing_bytes for one in found) / 1e6:.1f} | {measured} | {median_s:.2f} | "
            f"{max(one.fastest_s for one in found):.2f} | {median_s / ring_s:.2f} |"
        )


def _run(args: argparse.Namespace) -> tuple[list[list[Outcome]], bool]:
    import megatron.dynamic_cp.groups.process_groups  # noqa: F401  once, before the ranks are forked

    torch.set_num_threads(1)
    return run_anyway(measure, NUM_RANKS, RANKS_PER_NODE, args.rate, args)


def measure(rank: int, folder: str, args: argparse.Namespace, is_emulated: bool) -> list[Outcome]:
    """Return the outcome of every case on this rank."""
    from megatron.core import parallel_state

    from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    parallel_state.initialize_model_parallel()
    groups = DynamicCPGroups.build(
        Topology(num_lanes=NUM_RANKS, ranks_per_node=RANKS_PER_NODE),
        timeout_s=300,
        exchanges=sorted({exchange for exchange, _ in CASES}),
        inner_sizes=(2, 4),
        device=torch.device("cpu"),
    )
    crossing = Crossing(rank)
    return [_measure_case(exchange, inner, groups, args, is_emulated, crossing) for exchange, inner in CASES]


def _measure_case(
    exchange: Any, inner: int, groups: Any, args: argparse.Namespace, is_emulated: bool, crossing: Crossing
) -> Outcome:
    from megatron.dynamic_cp.attention.kernels.choice import kernel_for
    from megatron.dynamic_cp.attention.thd import Attention
    from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

    local = args.tokens // NUM_RANKS
    generator = torch.Generator().manual_seed(groups.lane)
    shapes = [(local, heads, args.dim) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
    *inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    times, stats, nic_before = [], ExchangeStats(), 0
    for repetition in range(args.repeat + 1):
        if repetition == 1:  # the first one warms up
            crossing.num_bytes, stats.bytes_sent = 0, 0
            nic_before = sent_by_nic() if is_emulated else 0
        params = DynamicPackedSeqParams.build(
            (args.tokens,),
            torch.zeros(local, dtype=torch.int64),
            groups.group(0, NUM_RANKS),
            cp_comm_type=exchange,
            levels=groups.levels(0, NUM_RANKS, inner),
            label="benchmark",
            stats=stats,
        )
        dist.barrier()
        started = time.perf_counter()
        out = Attention.apply(*inputs, params, args.dim**-0.5, kernel_for(inputs[0]))
        torch.autograd.grad(out, inputs, grad)
        dist.barrier()
        times.append(time.perf_counter() - started)
    return Outcome(
        median_s=statistics.median(times[1:]),
        fastest_s=min(times[1:]),
        sent_bytes=stats.bytes_sent // args.repeat,
        crossing_bytes=crossing.num_bytes // args.repeat,
        nic_bytes=(sent_by_nic() - nic_before) // args.repeat if is_emulated else None,
    )


class Crossing:
    """Counts what this rank hands to torch.distributed for ranks of another node.

    Of gathering and scattering it counts a ring's share: everything to the next rank.
    """

    def __init__(self, rank: int) -> None:
        self.num_bytes = 0
        node = rank // RANKS_PER_NODE
        batch, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
        gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

        def is_elsewhere(peer: int) -> bool:
            return peer // RANKS_PER_NODE != node

        def next_is_elsewhere(group: Any) -> bool:
            return is_elsewhere(dist.get_global_rank(group, (group.rank() + 1) % group.size()))

        def counting_batch(operations: list[Any]) -> Any:
            self.num_bytes += sum(
                op.tensor.nbytes for op in operations if op.op is dist.isend and is_elsewhere(op.peer)
            )
            return batch(operations)

        def counting_all_to_all(output: Any, x: Any, group: Any) -> Any:
            others = sum(map(is_elsewhere, dist.get_process_group_ranks(group)))
            self.num_bytes += x.nbytes // group.size() * others
            return all_to_all(output, x, group=group)

        def counting_gather(output: Any, x: Any, group: Any) -> Any:
            self.num_bytes += (output.nbytes - x.nbytes) * next_is_elsewhere(group)
            return gather(output, x, group=group)

        def counting_scatter(output: Any, x: Any, group: Any) -> Any:
            self.num_bytes += (x.nbytes - output.nbytes) * next_is_elsewhere(group)
            return scatter(output, x, group=group)

        dist.batch_isend_irecv, dist.all_to_all_single = counting_batch, counting_all_to_all
        dist.all_gather_into_tensor, dist.reduce_scatter_tensor = counting_gather, counting_scatter


if __name__ == "__main__":
    main()
