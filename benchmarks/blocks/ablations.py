"""Tables B: what block size, density, tolerance, divisions and candidates do to a placement, varied one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.blocks import ours
from benchmarks.blocks.compared import MASKS
from benchmarks.blocks.metric import traffic_of
from benchmarks.blocks.setting import Setting, masked
from benchmarks.planner.report import Row, table
from dynamic_cp.placement.placed import Placed
from dynamic_cp.placement.portfolio import search_placement
from dynamic_cp.placement.runs import table_of
from dynamic_cp.types import Sample
from dynamic_cp.types.counts import MAX_COUNT

DATA = "sft_longalign"
NUM_BATCHES = 3
BLOCK_SIZE = 512
NUM_DIVISIONS = 4
BLOCK_SIZES = (256, 512, 1024, 2048, 4096)
DIVISIONS = (1, 2, 4, 8)
TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.4)
CANDIDATES = (0, 4, 8, 16, MAX_COUNT)
SPARSE = {
    "lambda": [f"lambda:64,{window}" for window in (512, 1024, 2048, 4096, 8192)],
    "causal_blockwise": [f"causal_blockwise:256,{count}" for count in (1, 2, 4, 8, 16)],
    "shared_question": [f"shared_question:{count}x0.2" for count in (1, 2, 4, 8, 16)],
}


def measure(setting: Setting, num_batches: int = NUM_BATCHES, masks: Sequence[str] = MASKS) -> list[Row]:
    """Return a row for each value of each thing that is varied, and each mask."""
    rows = [
        {"varied": "block size", "value": size, **measured(mask, setting, num_batches, block_size=size)}
        for mask in masks
        for size in BLOCK_SIZES
    ]
    rows += [
        {"varied": "divisions", "value": count, **measured(mask, setting, num_batches, num_divisions=count)}
        for mask in masks
        for count in DIVISIONS
    ]
    rows += [
        {"varied": "tolerance", "value": share, **measured(mask, setting, num_batches, tolerance=share)}
        for mask in masks
        for share in TOLERANCES
    ]
    rows += [
        {"varied": "density", "value": mask, **measured(mask, setting, num_batches)}
        for sparse in SPARSE.values()
        for mask in sparse
    ]
    rows += [row for mask in masks for row in measured_candidates(mask, setting, num_batches)]
    return rows


def measured(
    mask: str,
    setting: Setting,
    num_batches: int,
    *,
    block_size: int = BLOCK_SIZE,
    num_divisions: int = NUM_DIVISIONS,
    tolerance: float = 0.1,
) -> Row:
    """Return means over batches; planning time is from samples to arrays, with no mask known beforehand."""
    problem = replace(setting.placement_problem, work_tolerance=tolerance)
    found = []
    for samples in _batches(mask, setting, num_batches):
        table_of.cache_clear()
        started_s = time.perf_counter()
        placed: Placed = search_placement(samples, problem, block_size)
        took_s = time.perf_counter() - started_s
        traffic = traffic_of(placed, problem)
        price = ours.price(ours.divided(placed, samples, num_divisions, setting), setting)
        work = sum(sample.squared_tokens for sample in samples) / sum(sample.seqlen**2 for sample in samples)
        found.append(
            {
                "density": work,
                "planning_ms": 1e3 * took_s,
                "multicast_mb": traffic.multicast_bytes / 1e6,
                "direct_mb": traffic.direct_bytes / 1e6,
                **price._asdict(),
            }
        )
    return {"mask": mask, **{name: float(np.mean([row[name] for row in found])) for name in found[0]}}


def measured_candidates(mask: str, setting: Setting, num_batches: int) -> list[Row]:
    """Return, for each number of candidates, the time over that with all of them, and what planning takes; means."""
    times, cpu_s = np.empty((2, num_batches, len(CANDIDATES)))
    for batch, samples in enumerate(_batches(mask, setting, num_batches)):
        if batch == 0:
            ours.chosen(samples, setting)  # who is first loads the compiled code
        for place, most in enumerate(CANDIDATES):
            started_s = time.process_time()
            bucket = ours.chosen(samples, setting, most)
            cpu_s[batch, place] = time.process_time() - started_s
            times[batch, place] = ours.price(bucket, setting).milliseconds
    ratios = np.exp(np.log(times / times[:, -1:]).mean(axis=0))
    return [
        {"varied": "candidates", "value": most, "mask": mask, "ratio": ratio, "cpu_s": took_s}
        for most, ratio, took_s in zip(CANDIDATES, ratios.tolist(), cpu_s.mean(axis=0).tolist(), strict=True)
    ]


def _batches(mask: str, setting: Setting, num_batches: int) -> Iterator[list[Sample]]:
    for seqlens in setting.batches(DATA, num_batches):
        yield masked(seqlens, mask)


def grid_markdown(rows: Sequence[Row], varied: str) -> str:
    """Return masks by values: MB between nodes, imbalance of work, milliseconds, and how many of them are exposed."""
    of_it = [row for row in rows if row["varied"] == varied]
    values = list(dict.fromkeys(row["value"] for row in of_it))
    lines = []
    for mask in dict.fromkeys(row["mask"] for row in of_it):
        cells = [row for row in of_it if row["mask"] == mask]
        texts = [
            f"{row['multicast_mb']:.0f}; {row['work_imbalance']:.2f}; {row['milliseconds']:.2f} "
            f"({row['exposed_ms']:.2f})"
            for row in cells
        ]
        lines.append((mask.partition(":")[0], *texts))
    return table(" | ".join(["mask", *map(str, values)]), lines)


def block_sizes_markdown(rows: Sequence[Row]) -> str:
    """Return the grid of block sizes, and their planning times."""
    of_it = [row for row in rows if row["varied"] == "block size"]
    took = [np.mean([row["planning_ms"] for row in of_it if row["value"] == size]) for size in BLOCK_SIZES]
    times = ", ".join(f"{size}: {one:.1f}" for size, one in zip(BLOCK_SIZES, took, strict=True))
    return f"{grid_markdown(rows, 'block size')}\n\nPlanning, ms by block size, mean over masks: {times}."


def candidates_markdown(rows: Sequence[Row]) -> str:
    """Return masks by numbers of candidates: time over that with all of them, and CPU seconds."""
    of_it = [row for row in rows if row["varied"] == "candidates"]
    lines = [
        (mask.partition(":")[0], *(f"{row['ratio']:.2f} ({row['cpu_s']:.2f})" for row in of_it if row["mask"] == mask))
        for mask in dict.fromkeys(row["mask"] for row in of_it)
    ]
    return table(" | ".join(["mask", *map(str, CANDIDATES[:-1]), "all"]), lines)


def density_markdown(rows: Sequence[Row]) -> str:
    """Return a line for each mask."""
    of_it = sorted(
        (row for row in rows if row["varied"] == "density"), key=lambda row: (row["mask"][:6], row["density"])
    )
    lines = [
        (row["mask"], f"{row['density']:.3f}", f"{row['multicast_mb']:.1f}", f"{row['direct_mb']:.0f}",
         f"{row['milliseconds']:.2f}", f"{row['exposed_ms']:.2f}")
        for row in of_it
    ]  # fmt: skip
    return table("mask | density | MB between nodes | without multicast | ms | exposed", lines)
