"""Jobs and global batches of the comparison of disaggregated attention with everything else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import CP_COMM_TYPES, Hardware, ModelShape, PlanOptions, Problem, Sample, Topology

K = 1024
_LONG = 64 * K
_TWICE, _KEPT, _CUT = 2, 0.9, 0.3


def model_of(name: str) -> ModelShape:
    """Return Llama-3-8B, or the 34B shape of the paper (that of CodeLlama-34B)."""
    if name == "8B":
        return load_model("llama-3-8b")
    return ModelShape(
        num_layers=48, hidden_size=8192, ffn_hidden_size=22016, num_attention_heads=64, num_query_groups=8,
        kv_channels=128, vocab_size=32000, gated_linear_unit=True,
    )  # fmt: skip


@cache
def documents(data: str, longest: int) -> Ints:
    """Return lengths to draw from, as the paper's simulator makes them: fewer short ones, long ones twice, stretched.

    "pretrain" are WLB-LLM-like lengths, which reach 125k before they are stretched; of ProLong every document counts.
    """
    rng = np.random.default_rng(7)
    drawn = draw_lengths("wlb" if data == "pretrain" else "prolong", 20000, 7, 8 * _LONG, min_seqlen=1).astype(float)
    short, long = drawn[drawn < _LONG], np.repeat(drawn[drawn >= _LONG], _TWICE)
    if data == "prolong":
        long = np.where(rng.random(len(long)) < _CUT, float(_LONG), long)
    mixed = np.concatenate([short[rng.random(len(short)) < _KEPT], long])
    stretched = mixed * longest / (2 * _LONG if data == "pretrain" else _LONG)
    return np.clip(stretched, 16, longest).astype(np.int64)


def batch(data: str, longest: int, num_tokens: int, seed: int) -> list[Sample]:
    """Return the samples of a global batch of so many tokens; the last one is cut to that."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = num_tokens
    for length in rng.choice(documents(data, longest), 200000).tolist():
        lengths.append(min(length, left))
        left -= lengths[-1]
        if not left:
            break
    return [Sample(sample_id=number, seqlen=length) for number, length in enumerate(lengths)]


class Case(NamedTuple):
    """One job and how large its global batch is.

    Attributes:
        model, data: names.
        longest: tokens of the longest document that may be there.
        gpus, pp: TP is 8, a lane is a node.
        rows: tokens of the batch over those of one full micro-batch.
        gb_per_s: bandwidth of a NIC; each rank has one.
        limit: tokens of a rank of TP 8, in one micro-batch.
    """

    model: str
    data: str
    longest: int
    gpus: int
    pp: int
    rows: int
    gb_per_s: float = 40.0
    limit: int = 64 * K

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, PP {self.pp}, {self.data} {self.longest // K}k, {self.rows} rows"

    @property
    def hardware(self) -> Hardware:
        return replace(load_hardware("h100"), bandwidth_across_nodes_bytes_per_s=1e9 * self.gb_per_s)

    def problem(self, vp_size: int = 1) -> Problem:
        topology = Topology(
            num_lanes=self.gpus // 8 // self.pp, tp_size=8, pp_size=self.pp, vp_size=vp_size, sequence_parallel=True
        )
        options = PlanOptions(max_tokens_per_rank=self.limit, recompute="full", cp_comm_types=CP_COMM_TYPES)
        return Problem(topology=topology, model=model_of(self.model), hardware=self.hardware, options=options)

    def samples(self, seed: int = 0) -> list[Sample]:
        lanes = self.gpus // 8 // self.pp
        return batch(self.data, self.longest, int(0.96 * lanes * self.limit * self.rows), seed)


def cost_model_of(problem: Problem) -> CostModel:
    return CostModel(problem)


def gathering(problem: Problem) -> Problem:
    """Return the problem with keys gathered before attention, as the paper's comparisons have it: nothing is hidden."""
    return replace(problem, options=replace(problem.options, cp_comm_types=("all_gather",)))


def memory_of(problem: Problem) -> MemoryModel:
    return MemoryModel(problem)
