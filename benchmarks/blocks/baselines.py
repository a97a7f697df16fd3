"""What others do with a micro-batch, each at its best degree: rings, Ulysses with data parallelism, whole documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from benchmarks.blocks.rings import Ring, chunked, ring_seconds
from benchmarks.blocks.setting import LAYER, Setting
from dynamic_cp.arrays import Floats
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Sample

_QUOTAS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""Tried bounds: a document that takes longer than this times the mean of the lanes gets a larger group."""
_NUM_RESIMULATED = 2
_FEWEST_TOKENS = 64
"""No larger group is tried if it leaves fewer tokens of a document on a lane."""

Group = tuple[int, int]
"""First lane and size."""


def baselines(samples: Sequence[Sample], setting: Setting) -> Mapping[str, float]:
    """Return forward + backward milliseconds by name."""
    found = {"ring": _ring_s(samples, Ring(setting.num_lanes, zigzag=False), setting)}
    zigzag = {ring: _ring_s(samples, ring, setting) for ring in _zigzag_rings(setting)}
    found["zigzag ring"] = zigzag[Ring(setting.num_lanes)]
    single = {ring: seconds for ring, seconds in zigzag.items() if not ring.window}
    # TransformerEngine, and LoongTrain as in DCP's paper, exchange heads among no more lanes than there are KV heads.
    found["TransformerEngine"] = min(s for ring, s in single.items() if LAYER.num_query_groups % ring.inner == 0)
    found["double ring"] = min(s for ring, s in zigzag.items() if LAYER.num_query_groups % ring.inner == 0)
    found["repeated KV heads"] = min(zigzag.values())
    found["Ulysses x DP"] = min(_ulysses_s(samples, inner, setting) for inner in _inner_sizes(setting))
    found["whole documents"] = min(_documents_s(samples, setting), planner_s(samples, setting))
    return {name: 1e3 * seconds for name, seconds in found.items()}


def planner_s(samples: Sequence[Sample], setting: Setting) -> float:
    """Return the seconds of this project's plan without placed attention, which has whole samples on CP groups."""
    return makespan_ns(plan_problem(setting.problem, samples).plan, setting.cost_model) / 1e9


def _inner_sizes(setting: Setting) -> list[int]:
    most = min(setting.node_lanes, LAYER.num_attention_heads)
    return [1 << k for k in range(most.bit_length())]


def _zigzag_rings(setting: Setting) -> list[Ring]:
    """Return rings of all lanes, with every number of lanes that exchange heads, and every window inside a node."""
    rings = []
    for inner in _inner_sizes(setting):
        size = setting.num_lanes // inner
        windows = [1 << k for k in range(1, (setting.node_lanes // inner).bit_length()) if 1 << k < size]
        rings += [Ring(size, inner, window) for window in (0, *windows)]
    return rings


def _ring_s(samples: Sequence[Sample], ring: Ring, setting: Setting, first_lane: int = 0) -> float:
    return sum(ring_seconds(chunked(tuple(samples), ring.size, zigzag=ring.zigzag), ring, setting, first_lane))


@lru_cache(maxsize=65536)
def _alone_s(sample: Sample, ring: Ring, setting: Setting) -> float:
    return _ring_s((sample,), ring, setting)


def _ulysses_s(samples: Sequence[Sample], inner: int, setting: Setting) -> float:
    """Return the seconds of the slowest group of `inner` lanes that exchange heads; samples longest first."""
    ring = Ring(1, inner)
    groups: list[list[Sample]] = [[] for _ in range(setting.num_lanes // inner)]
    load = np.zeros(len(groups))
    for sample in samples:
        group = int(load.argmin())
        groups[group].append(sample)
        load[group] += _alone_s(sample, ring, setting)
    return max(_ring_s(group, ring, setting) for group in groups if group)


def _documents_s(samples: Sequence[Sample], setting: Setting) -> float:
    """Return the seconds of whole documents, each on a group of a power of two of lanes; the longest first."""
    ways = [_ways(sample, setting) for sample in samples]
    mean_s = sum(way[0] for way in ways) / setting.num_lanes
    found = [_assigned(samples, ways, quota * mean_s, setting) for quota in _QUOTAS]
    found = sorted(found, key=lambda one: one[0])[:_NUM_RESIMULATED]
    return min(_simulated_s(groups, setting) for _, groups in found)


def _rings_of(size: int, setting: Setting) -> list[Ring]:
    """Return what a group may do: a ring, or exchange heads among as many lanes as possible and a ring of the rest."""
    inner = min(size, setting.node_lanes, LAYER.num_attention_heads)
    return [Ring(size)] + ([Ring(size // inner, inner)] if inner > 1 else [])


def _ways(sample: Sample, setting: Setting) -> list[float]:
    """Return the seconds of a sample alone on 1, 2, 4, ... lanes."""
    found = []
    for k in range(setting.num_lanes.bit_length()):
        if found and sample.seqlen >> k < _FEWEST_TOKENS:
            break
        found.append(min(_alone_s(sample, ring, setting) for ring in _rings_of(1 << k, setting)))
    return found


def _assigned(
    samples: Sequence[Sample], ways: list[list[float]], quota_s: float, setting: Setting
) -> tuple[float, dict[Group, list[Sample]]]:
    """Return (seconds of the busiest lane, the samples of each group)."""
    load = np.zeros(setting.num_lanes)
    sizes = [
        next((k for k, seconds in enumerate(of_size) if seconds <= quota_s), int(np.argmin(of_size)))
        for of_size in ways
    ]
    groups: dict[Group, list[Sample]] = defaultdict(list)
    for number in sorted(range(len(samples)), key=lambda number: (-sizes[number], -ways[number][sizes[number]])):
        size = 1 << sizes[number]
        busiest = load.reshape(-1, size).max(axis=1)
        first = int(busiest.argmin()) * size
        load[first : first + size] = busiest.min() + ways[number][sizes[number]]
        groups[first, size].append(samples[number])
    return float(load.max()), groups


def _simulated_s(groups: Mapping[Group, Sequence[Sample]], setting: Setting) -> float:
    """Return the seconds of the busiest lane, with all samples of a group in one pack."""
    load: Floats = np.zeros(setting.num_lanes)
    for (first, size), samples in groups.items():
        load[first : first + size] += min(_ring_s(samples, ring, setting, first) for ring in _rings_of(size, setting))
    return float(load.max())
