"""Nothing grows and nothing is left: memory over many planned and packed steps, what a run leaves in its process."""

import contextlib
import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist

from dynamic_cp.types import PlanOptions, Sample, Topology
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.plans.plan_source import PlanSource
from megatron.dynamic_cp.plans.planner import Planner
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop import training
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.reference import SampleTokens
from tests.distributed.test_planning import PROBLEM as THREE_LANES
from tests.trainer.commandline import command_line

pytestmark = pytest.mark.usefixtures("fresh_planners")
BATCH = 64
PROBLEM = replace(
    THREE_LANES,
    topology=Topology(num_lanes=1),
    options=PlanOptions(max_tokens_per_rank=8192, bytes_per_element=4, cp_comm_types=("p2p",)),
)
MAX_GROWTH_MB = 4.0
"""Over 150 steps, whose packs are 100 MB in all."""


def seqlen_of(sample_id: int) -> int:
    """Return a ragged length that anybody can compute."""
    return 1 + sample_id * 2654435761 % 1000


def read(sample_id: int) -> SampleTokens:
    tokens = np.full(seqlen_of(sample_id), sample_id, dtype=np.int64)
    return SampleTokens(tokens, tokens, np.ones(len(tokens), dtype=np.float32))


def census() -> dict[str, Any]:
    """Return what this process holds, and what is in shared memory under the names of it and its children."""
    me = psutil.Process()
    return {
        "fds": me.num_fds(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native_threads": me.num_threads(),
        "children": [" ".join(child.cmdline())[-60:] for child in me.children(recursive=True)],
        "shared_files": sorted(name for name in os.listdir("/dev/shm") if str(me.pid) in name),
    }


def settled_census(expected: dict[str, Any]) -> dict[str, Any]:
    """Return the census once it is the expected one, or after a second."""
    for _ in range(20):
        if census() == expected:
            break
        time.sleep(0.05)
    return census()


def plan_and_pack(num_steps: int, num_workers: int) -> dict[str, Any]:
    """Plan and pack ahead in this single rank; return RSS of the rank, planner and workers by step, and censuses."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(PROBLEM.topology, timeout_s=30, exchanges=("p2p",))
    rss: dict[str, list[float]] = {"rank": [], "planner": [], "worker": []}
    counts, num_tokens = [], 0
    for _ in range(2):  # the first round is for what libraries keep for good
        before = census()
        with contextlib.closing(Planner(PROBLEM, max_seqlen=1000, ahead=True)) as planner:
            source = PlanSource(planner, topology=PROBLEM.topology, lane=0, name=f"series {len(counts)}", lookahead=2)
            wrapper = DataIteratorWrapper(
                plan_source=source, read_sample=read, groups=groups, chunks=(ChunkNeeds(tokens=True, labels=True),),
                num_workers=num_workers,
            )  # fmt: skip
            children = psutil.Process().children()
            named = {"rank": psutil.Process(), "planner": children[0]} | dict.fromkeys(["worker"], children[-1])
            with contextlib.closing(wrapper):
                batches = (
                    (
                        step,
                        tuple(
                            Sample(sample_id=i, seqlen=seqlen_of(i)) for i in range(step * BATCH, (step + 1) * BATCH)
                        ),
                    )
                    for step in range(num_steps if counts else 3)
                )
                for prepared in wrapper.steps(batches):
                    num_tokens += sum(batch["tokens"].numel() for batch in prepared.data.data_iterators[0])
                    if counts:
                        for name, process in named.items():
                            rss[name].append(process.memory_info().rss / 1e6)
        counts.append((before, settled_census(before)))
    return {"rss": rss, "counts": counts, "num_tokens": num_tokens}


@pytest.mark.nightly
@pytest.mark.parametrize("num_workers", [0, 2])
def test_planning_and_packing_keep_nothing(num_workers: int) -> None:
    (found,) = run_ranks(1, plan_and_pack, 200, num_workers, timeout_s=120)
    assert found["num_tokens"] >= 200 * BATCH * 400, "it packed"
    for name, values in found["rss"].items():
        assert len(values) == 200
        assert np.mean(values[-20:]) - np.mean(values[40:60]) < MAX_GROWTH_MB, (name, values[::20])
    _, (before, after) = found["counts"]
    assert after == before


LEFT = {"threads": ["MainThread"], "children": [], "shared_files": []}


def train_and_count(words: list[str]) -> dict[str, Any]:
    os.environ["RANK"] = str(dist.get_rank())
    training.pretrain(parse_args(words, dist.get_world_size()))
    return settled_census(census() | LEFT)


@pytest.mark.nightly
def test_a_run_leaves_no_thread_process_or_shared_file_in_its_process(tmp_path) -> None:
    words = "--dynamic-cp --mock-data --max-seqlen-per-dp-cp-rank 64 --num-layers 1 --num-workers 2 --split 90,10,0"
    more = f"--eval-interval 2 --eval-iters 1 --save {tmp_path} --save-interval 4"
    for found in run_ranks(2, train_and_count, command_line(words, more), timeout_s=100):
        assert {name: found[name] for name in LEFT} == LEFT
