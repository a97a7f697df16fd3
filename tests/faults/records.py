"""What a rank computed and holds after each step, written down as it goes, so that a kill loses nothing."""

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil

from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.trainer.loop import training
from megatron.trainer.reporting.log import StepRecord
from tests.faults.job import planner_of


def record_steps(folder: Path, rank: int) -> None:
    """Have this rank append a line of each step to `folder`/rank_N.jsonl: loss, norm, samples, what its process
    holds."""
    pretrain, wrap = training.pretrain, DataIteratorWrapper.wrap
    ids: list[int] = []
    file = open(folder / f"rank_{rank}.jsonl", "w", buffering=1)  # noqa: SIM115 (until the process ends)
    me = psutil.Process()
    planner: list[psutil.Process] = []

    def wrap_and_remember(self: DataIteratorWrapper, *args: Any) -> Any:
        data = wrap(self, *args)
        ids[:] = [sample.sample_id for bucket in self.plan.buckets for sample in bucket.samples]
        return data

    def planner_rss_mb() -> float | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if rank == 0 and not (planner and planner[0].is_running()):
                planner[:] = filter(None, [planner_of(me)])
            return planner[0].memory_info().rss / 1e6 if planner else None
        return None

    def on_step(iteration: int, record: StepRecord) -> None:
        line = {
            "iteration": iteration, "loss": record.loss.hex(), "grad_norm": record.grad_norm.hex(),
            "samples": list(ids), "rss_mb": me.memory_info().rss / 1e6, "planner_rss_mb": planner_rss_mb(),
            "fds": me.num_fds(), "threads": me.num_threads(), "children": len(me.children()),
        }  # fmt: skip
        file.write(json.dumps(line) + "\n")

    DataIteratorWrapper.wrap = wrap_and_remember
    training.pretrain = lambda args: pretrain(args, on_step=on_step)


def read_records(folder: Path, num_ranks: int) -> list[dict[int, dict[str, Any]]]:
    """Return for each rank iteration -> record; a last line that a kill cut off is left out."""
    found = []
    for rank in range(num_ranks):
        path = folder / f"rank_{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        found.append({record["iteration"]: record for record in records})
    return found
