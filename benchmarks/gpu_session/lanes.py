"""Static against dynamic CP on ONE device: every bucket of two plans, computed as one lane of it would compute it.

    python -m benchmarks.gpu_session.lanes --output gains.json NAME=STATIC.json,DYNAMIC.json ...

Real kernels, modules, autograd and host; transfers of rings are replaced by the data that stays, as `dynamic-cp
profile` does for its rings. A lane waits for the others of its bucket; so the seconds of a plan follow from those of
its buckets (no pipeline). Each bucket is set beside the cost model's seconds and the memory model's bytes.

`plans/` has those of `dynamic-cp simulate --lengths github --global-batch-size 96 --lanes 8 --tp 2 --max-seqlen 65536
--max-tokens-per-rank 16384`, and of lognormal lengths; `tiny` is for a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamic_cp.decide.calibration.fit import BUCKET_LAYERS
from dynamic_cp.decide.calibration.measurements import Setup
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.plans import serialize
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Bucket, ModelShape, Plan, PlanOptions, Problem, Topology
from megatron.decide.calibration.bench import Bench, SmallGPT
from megatron.decide.calibration.device import Place, set_up
from megatron.decide.calibration.sections import emulated, no_transfers
from megatron.decide.calibration.timing import Timer
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

Key = tuple[int, tuple[int, ...]]
"""CP size, padded lengths of a bucket, longest first."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--hardware", default="h200-local")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=180, help="of measuring; buckets that are left are told")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths: dry run on a CPU")
    parser.add_argument("--output", type=Path, required=True)
    o = parser.parse_args(words)
    ends = time.monotonic() + o.seconds
    plans = {}
    for one in o.plans:
        name, _, files = one.partition("=")
        plans[name] = [serialize.loads(Path(file).read_text(encoding="utf-8")) for file in files.split(",")]
    wanted = Counter(key_of(b, o.shrink) for two in plans.values() for plan in two for b in _buckets(plan))
    lanes = Lanes(o, max(sum(padded) // cp_size for cp_size, padded in wanted))
    rows: dict[Key, dict[str, Any]] = {}
    for key, _ in wanted.most_common():
        if time.monotonic() > ends:
            print(f"out of time: {len(wanted) - len(rows)} of {len(wanted)} buckets are not measured", flush=True)
            break
        rows[key] = lanes.row(*key)
    result: dict[str, Any] = {"device": lanes.place.name, "torch": torch.__version__, "hardware": o.hardware}
    result |= {"buckets": [*rows.values()], "plans": gains(plans, rows, o.shrink)}
    for what, other in (("predicted_s", "measured_s"), ("predicted_bytes", "peak_bytes")):
        ratios = [row[what] / row[other] for row in rows.values() if other in row]
        if ratios:
            least, median, most = min(ratios), np.median(ratios), max(ratios)
            print(
                f"{what} over {other} of {len(ratios)} buckets: {least:.3f}, median {median:.3f}, {most:.3f}",
                flush=True,
            )
    o.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0 if len(rows) == len(wanted) else 2


def _buckets(plan: Plan) -> list[Bucket]:
    return [bucket for micro_batch in plan.micro_batches for bucket in micro_batch.buckets if bucket.samples]


def key_of(bucket: Bucket, shrink: int) -> Key:
    unit = 2 * bucket.cp_size
    lengths = (-(-max(unit, sample.seqlen // shrink) // unit) * unit for sample in bucket.samples)
    return bucket.cp_size, tuple(sorted(lengths, reverse=True))


def gains(plans: dict[str, list[Plan]], rows: dict[Key, dict[str, Any]], shrink: int) -> dict[str, Any]:
    """Return seconds of the plans all of whose buckets were measured, and dynamic over static."""
    found = {}
    for name, two in plans.items():
        if any(key_of(bucket, shrink) not in rows for plan in two for bucket in _buckets(plan)):
            continue
        of: dict[str, Any] = {}
        for which, plan in zip(("static", "dynamic"), two, strict=True):
            seconds = {what: step_s(plan, lambda b, what=what: rows[key_of(b, shrink)][what])
                       for what in ("measured_s", "predicted_s")}  # fmt: skip
            of[which] = {**seconds, "micro_batches": len(plan.micro_batches)}
        for what in ("measured", "predicted"):
            of[f"gain_{what}"] = of["static"][f"{what}_s"] / of["dynamic"][f"{what}_s"]
        found[name] = of
        print(name, json.dumps(of), flush=True)
    return found


def step_s(plan: Plan, seconds: Callable[[Bucket], float]) -> float:
    """Return when the last lane is ready; lanes of a bucket wait for each other."""
    ready = np.zeros(plan.topology.num_lanes)
    for bucket in _buckets(plan):
        lanes = slice(bucket.first_lane, bucket.first_lane + bucket.cp_size)
        ready[lanes] = ready[lanes].max() + seconds(bucket)
    return float(ready.max())


class Lanes:
    """One lane after the other on this device; BUCKET_LAYERS layers of one TP rank's shard, nothing of TP."""

    def __init__(self, o: argparse.Namespace, most_tokens: int) -> None:
        self.place: Place = set_up(o.device)
        self._repeats = o.repeats
        on_gpu = self.place.device.type == "cuda"
        setup = Setup(
            device=self.place.name,
            torch_version=torch.__version__,
            model=_model(o),
            tp_size=o.tp,
            element_bytes=2 if on_gpu else 4,
            num_ranks=1,
            ranks_per_node=1,
            max_tokens=max(512, most_tokens),
            quick=True,
            date="",
        )
        timer = Timer(device=self.place.device, window_s=0.0, num_windows=1, alone=True)
        groups = DynamicCPGroups.build(Topology(num_lanes=1), timeout_s=60, exchanges=("p2p",))
        gpt = SmallGPT(setup, self.place.device)
        self._bench = Bench(setup=setup, place=self.place, timer=timer, gpt=gpt, groups=groups, tell=print)
        problem = Problem(
            topology=Topology(num_lanes=8),
            model=replace(setup.shard, num_layers=BUCKET_LAYERS),
            hardware=load_hardware(o.hardware),
            options=PlanOptions(max_tokens_per_rank=1 << 20, cp_comm_types=("p2p",)),
        )
        self._prices, self._memory, self._words = CostModel(problem), MemoryModel(problem), setup.shard.vocab_size

    def row(self, cp_size: int, padded: tuple[int, ...]) -> dict[str, Any]:
        """Return what a bucket takes here, and what the models say."""
        squares = sum(seqlen * seqlen for seqlen in padded)
        parts = self._memory.peak_at(sum(padded) // cp_size, cp_size)[0]
        rest = parts.optimizer_bytes + parts.communicators_bytes + parts.step_bytes  # what runs here has none of it
        row = {
            "cp_size": cp_size,
            "seqlens": padded,
            "measured_s": self._measured_s(cp_size, padded),
            "predicted_s": sum(self._prices.cost(cp_size, 0, sum(padded), squares)),
            "predicted_bytes": parts.total_bytes - rest,
        }
        if self.place.device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return row

    def _measured_s(self, cp_size: int, padded: tuple[int, ...]) -> float:
        device, gpt = self.place.device, self._bench.gpt
        params: Any = self._bench.params(padded)
        if cp_size > 1:
            params = emulated(params, cp_size, cp_size // 2)
        ids = torch.randint(self._words, (1, sum(padded) // cp_size), device=device)
        places = torch.cat([torch.arange(seqlen // cp_size, device=device) for seqlen in padded])
        vars(params)["positions"] = places

        def step() -> None:
            gpt.ddp(ids, places[None], None, labels=ids, packed_seq_params=params).float().sum().backward()

        times = []
        with no_transfers():
            for _ in range(1 + self._repeats):
                self._finish()
                started = time.perf_counter()
                step()
                self._finish()
                times.append(time.perf_counter() - started)
        return float(np.median(times[1:]))

    def _finish(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()


def _model(o: argparse.Namespace) -> ModelShape:
    model = load_model(o.model)
    if o.shrink == 1:
        return model
    small = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2}
    return replace(model, kv_channels=16, vocab_size=256, **small)


if __name__ == "__main__":
    raise SystemExit(main())
