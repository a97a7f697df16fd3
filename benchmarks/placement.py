"""Placements of attention: how long planning takes, how much travels, how even they are; beside a graph partitioner.

    python -m benchmarks.placement                # tables of all ways to place, and of planning times
    python -m benchmarks.placement --partitioner  # ours beside mtkahypar (MIT; pip install mtkahypar==1.7.post1)
    python -m benchmarks.placement --plans        # what planning whole global batches with masks takes

Batches are filled to 131072 tokens with documents as they come, and used if they are three quarters full. 8 nodes of 8
lanes, 4096 bytes per token of queries and outputs, 1024 of keys and values (8 query heads, 2 KV heads, 128 channels,
bf16). Planning times are the least of five, from samples to arrays, on one core, with no mask known beforehand.

mtkahypar cuts the same graph at the same two levels: vertices are blocks and tiles, a net is a row or a column. It
knows one weight per vertex, so that blocks and tiles weigh their share of all tokens and of all work; then whole rows
leave nodes and lanes with too many tokens, and our search over tiles repairs work and improves what it finds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.blocks.metric import traffic_of
from dynamic_cp.arrays import Ints
from dynamic_cp.decide.mask_rules import parse_mask_rule
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.placement.placed import Placed, placed_of
from dynamic_cp.placement.portfolio import candidates, caps_of, part_of, search_placement
from dynamic_cp.placement.runs import table_of
from dynamic_cp.placement.tile_search import improve_tiles, state_of
from dynamic_cp.placement.token_graph import Caps, TokenGraph, blocks_of
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import PlanOptions, Problem, Sample, Topology
from dynamic_cp.types.placement import PlacementProblem

DATA = ("sft_longalign", "github_bal", "prolong")
MASKS = ("causal", "lambda:64,4096", "causal_blockwise:256,2", "shared_question:4x0.2")
NUM_TOKENS = 131072
NODES_OF_8 = PlacementProblem(num_lanes=64, node_lanes=8, row_bytes=4096, column_bytes=1024)
PLANS = (
    (8, 1, 32, "github_bal", "lambda:64,1024"),
    (8, 4, 32, "github_bal", "lambda:64,1024"),
    (32, 1, 64, "sft_longalign", "lambda:64,4096"),
    (32, 1, 64, "sft_longalign", "shared_question:4x0.2"),
    (32, 4, 128, "sft_longalign", "lambda:64,4096"),
)
"""Lanes, stages, samples, lengths and masks of global batches."""
NUM_REPEATS = 5
_WEIGHT = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitioner", action="store_true", help="compare with mtkahypar instead")
    parser.add_argument("--plans", action="store_true", help="measure plans of whole global batches instead")
    parser.add_argument("--compile", action="store_true", help="only compile the planner of placements")
    parser.add_argument("--batches", type=int, default=3, help="of each data set (3)")
    parser.add_argument("--block-size", type=int, default=1024, help="for the comparison with mtkahypar (1024)")
    args = parser.parse_args()
    for mask in MASKS[:2]:
        for make in candidates(samples_of([9000, 500], mask), NODES_OF_8):  # compiles
            make(0)
    if args.compile:
        return
    if args.partitioner:
        compare(args.batches, args.block_size)
    elif args.plans:
        print_plans()
    else:
        print_ways(args.batches)
        print_times()


def batches(name: str, count: int, seed: int = 0) -> Iterator[list[int]]:
    """Yield the lengths of `count` batches."""
    batch: list[int] = []
    for size in draw_lengths(name, 20000, seed, NUM_TOKENS, min_seqlen=1).tolist():
        if sum(batch) + size > NUM_TOKENS:
            if sum(batch) >= 0.75 * NUM_TOKENS:
                yield batch
                count -= 1
                if not count:
                    return
            batch = []
        batch.append(size)


def samples_of(seqlens: list[int], rule: str) -> list[Sample]:
    mask_of = parse_mask_rule(rule)
    return [Sample(sample_id=number, seqlen=size, mask=mask_of(size)) for number, size in enumerate(seqlens)]


def print_ways(num_batches: int) -> None:
    print("MB per pass and batch, imbalances max/mean, means over batches\n")
    print("| data, mask | way | direct | multicast | in nodes | work | tokens | homes | tiles |\n" + "|---" * 9 + "|")
    for data in DATA:
        for mask in MASKS:
            found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
            for batch in batches(data, num_batches):
                for make in candidates(samples_of(batch, mask), NODES_OF_8):
                    placed = make()
                    traffic = traffic_of(placed, NODES_OF_8)
                    sizes = (len(placed.homes), len(placed.tiles))
                    found[make.name].append((*(one / 1e6 for one in traffic[:3]), *traffic[3:], *sizes))
            for name, rows in found.items():
                direct, multicast, inside, *imbalances, homes, tiles = np.mean(rows, axis=0)
                numbers = f"{direct:.0f} | {multicast:.1f} | {inside:.0f} | {imbalances[0]:.2f} | {imbalances[1]:.3f}"
                print(f"| {data} {mask} | {name} | {numbers} | {homes:.0f} | {tiles:.0f} |")


def print_times() -> None:
    print("\n| samples | mask | lanes | block size | planning ms |\n|---|---|---|---|---|")
    million = PlacementProblem(num_lanes=256, node_lanes=8, row_bytes=4096, column_bytes=1024)
    for mask in MASKS:
        for what, seqlens, problem, block_size in (
            ("131 072 tokens of sft_longalign", next(batches(DATA[0], 1)), NODES_OF_8, 1024),
            ("131 072 tokens of sft_longalign", next(batches(DATA[0], 1)), NODES_OF_8, 512),
            ("one of 131 072 tokens", [NUM_TOKENS], NODES_OF_8, 1024),
            ("a million tokens of sft_longalign", list(chain.from_iterable(batches(DATA[0], 8))), million, 2048),
            ("one of a million tokens", [1 << 20], million, 2048),
        ):
            samples = samples_of(seqlens, mask)
            took_s = min(timed(lambda: search_placement(samples, problem, block_size)) for _ in range(NUM_REPEATS))  # noqa: B023
            print(f"| {what} | {mask} | {problem.num_lanes} | {block_size} | {1e3 * took_s:.1f} |", flush=True)


def print_plans() -> None:
    """Print the CPU time of `plan_problem`, the least of some, with placed attention and without, and a step's time."""
    print(
        "| lanes | PP | samples | lengths | mask | CPU s, with placed attention | without | step s |\n"
        + "|---" * 8
        + "|"
    )
    model, hardware = load_model("llama-3-8b"), load_hardware("h100")
    for lanes, pp_size, num_samples, name, mask in PLANS:
        topology = Topology(num_lanes=lanes, tp_size=4, pp_size=pp_size, sequence_parallel=True)
        seqlens = sorted(draw_lengths(name, num_samples, 0, NUM_TOKENS, min_seqlen=1).tolist(), reverse=True)
        samples = samples_of(seqlens, mask)
        took_s, step_s = [], []
        for exchanges in (("a2a", "blocks"), ("a2a",)):
            options = PlanOptions(max_tokens_per_rank=16384, recompute="full", cp_comm_types=exchanges)
            problem = Problem(topology=topology, model=model, hardware=hardware, options=options)
            runs = [planned(problem, samples) for _ in range(NUM_REPEATS)]
            took_s.append(min(took for took, _ in runs))
            step_s.append(runs[0][1])
        cells = (lanes, pp_size, num_samples, name, mask, *(f"{one:.2f}" for one in (*took_s, step_s[0])))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def planned(problem: Problem, samples: list[Sample]) -> tuple[float, float]:
    """Return the CPU seconds that planning takes, and the seconds that a step of the plan is predicted to take."""
    started_s = time.process_time()
    predicted_s = plan_problem(problem, samples).predicted_s
    return time.process_time() - started_s, predicted_s


def timed(run: Callable[[], Placed]) -> float:
    table_of.cache_clear()
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def compare(num_batches: int, block_size: int) -> None:
    """Print our search beside mtkahypar with the same repair."""
    partition = mtkahypar_partition()
    print(f"multicast MB, work and tokens max/mean, planning ms; block size {block_size}, {num_batches} batches\n")
    print("| data, mask | ours | mtkahypar + repair | volume ours / theirs |\n|---|---|---|---|")
    for data in DATA:
        for mask in MASKS:
            rows = []
            for batch in batches(data, num_batches):
                samples = samples_of(batch, mask)
                row: list[float] = []
                for place in (search_placement, lambda *given: partitioned(partition, *given)):
                    started_s = time.perf_counter()
                    placed = place(samples, NODES_OF_8, block_size)
                    took_ms = 1e3 * (time.perf_counter() - started_s)
                    traffic = traffic_of(placed, NODES_OF_8)
                    row += [traffic.multicast_bytes / 1e6, traffic.work_imbalance, traffic.token_imbalance, took_ms]
                rows.append(row)
            both = np.mean(rows, axis=0)
            texts = ("{:.1f}, {:.2f}, {:.2f}, {:.0f}".format(*both[side : side + 4]) for side in (0, 4))
            print(f"| {data} {mask} | {' | '.join(texts)} | {both[0] / both[4]:.2f} |", flush=True)


Partition = Callable[[list[list[int]], list[int], list[int], int, int], Ints]


def mtkahypar_partition() -> Partition:
    """Return (nets, their bytes, weights, parts, cap) -> [vertex] part, by mtkahypar."""
    try:
        import mtkahypar
    except ImportError as error:
        raise SystemExit(f"{error}: pip install mtkahypar==1.7.post1") from None
    library: Any = mtkahypar.initialize(min(2, os.cpu_count() or 1), False)
    mtkahypar.set_seed(0)

    def partition(nets: list[list[int]], net_bytes: list[int], weights: list[int], num_parts: int, cap: int) -> Ints:
        context = library.context_from_preset(mtkahypar.PresetType.DEFAULT)
        context.set_partitioning_parameters(num_parts, 0.03, mtkahypar.Objective.KM1)
        context.logging = False
        context.set_individual_target_block_weights([cap] * num_parts)
        graph = library.create_hypergraph(context, len(weights), len(nets), nets, weights, net_bytes)
        return np.array(graph.partition(context).get_partition(), np.int64)

    return partition


def partitioned(partition: Partition, samples: list[Sample], problem: PlacementProblem, block_size: int) -> Placed:
    """Return the placement that a partitioner finds over nodes and then over the lanes of each, repaired."""
    blocks = blocks_of(samples, block_size, problem.row_bytes, problem.column_bytes)
    graph, node_lanes = blocks.graph, problem.node_lanes
    of_nodes, of_lanes = caps_of(graph, problem.num_lanes, node_lanes, problem.token_tolerance, problem.work_tolerance)
    nodes, tile_nodes = part_and_repair(partition, graph, of_nodes)
    homes, lanes = np.empty_like(nodes), np.empty_like(tile_nodes)
    for node in range(len(of_nodes.tokens)):
        tiles = np.flatnonzero(tile_nodes == node)
        part, vertices = part_of(graph, nodes, tiles, node)
        caps = Caps(*(one[node * node_lanes : (node + 1) * node_lanes] for one in of_lanes))
        part_homes, part_lanes = part_and_repair(partition, part, caps)
        is_here = nodes[vertices] == node
        homes[vertices[is_here]] = node * node_lanes + part_homes[is_here]
        lanes[tiles] = node * node_lanes + part_lanes
    return placed_of(blocks, homes, lanes, problem)


def part_and_repair(partition: Partition, graph: TokenGraph, caps: Caps) -> tuple[Ints, Ints]:
    num_vertices, num_parts = len(graph.tokens), len(caps.tokens)
    nets = [
        [vertex, *(num_vertices + graph.members[side, graph.starts[side, vertex] : graph.starts[side, vertex + 1]])]
        for vertex in range(num_vertices)
        for side in range(2)
    ]
    shares = [one / max(one.sum(), 1) for one in (graph.tokens, graph.work)]
    weights = np.round(np.concatenate(shares) * _WEIGHT / 2).astype(int)
    slack = min(caps.tokens[0] * num_parts / max(graph.tokens.sum(), 1), caps.work[0] * num_parts / graph.work.sum())
    cap = int(np.ceil(_WEIGHT / num_parts * max(slack, 1.01)))
    net_bytes = np.maximum(1, graph.net_bytes.T.reshape(-1) // 1024)
    parts = partition([list(map(int, net)) for net in nets], net_bytes.tolist(), weights.tolist(), num_parts, cap)
    homes, lanes = parts[:num_vertices].copy(), parts[num_vertices:].copy()
    repair_tokens(graph, caps, homes, lanes)
    improve_tiles(graph, state_of(graph, homes, lanes, num_parts), caps, 6)
    return homes, lanes


def repair_tokens(graph: TokenGraph, caps: Caps, homes: Ints, lanes: Ints) -> None:
    """Move whole rows, with their tiles there, from parts with too many tokens to those with the fewest."""
    for _ in range(len(homes)):
        held = np.bincount(homes, graph.tokens, len(caps.tokens))
        here, there = int(np.argmax(held - caps.tokens)), int(np.argmin(held))
        excess = held[here] - caps.tokens[here]
        own = np.flatnonzero((homes == here) & (graph.tokens > 0) & (held[there] + graph.tokens <= caps.tokens[there]))
        if excess <= 0 or not len(own):
            return
        vertex = own[np.argmin(np.abs(graph.tokens[own] - excess))]
        homes[vertex] = there
        lanes[(graph.ends[0] == vertex) & (lanes == here)] = there


if __name__ == "__main__":
    main()
