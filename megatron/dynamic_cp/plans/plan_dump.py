"""Plans, written to a dump and replayed: a run that replays its dump has the same plans bit for bit.

    DIR/plans.jsonl        one line per planned global batch: its key, its samples, its plan and why
    DIR/iterations.jsonl   one line per iteration: predicted and measured (`dynamic-cp report --run DIR` reads it)
    DIR/run.json           command line and versions
    DIR/spans/rank*.jsonl  one line per iteration and rank: when each micro-batch ran forward and backward

Rank 0 writes all but the last. If an iteration is there twice, after a resume, the last record counts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dynamic_cp.errors import DataError, DynamicCPError
from dynamic_cp.mechanisms.registry import serving_windows
from dynamic_cp.plans.lane_plan import PlanFacts, encode_lanes
from dynamic_cp.plans.serialize import digest, plan_from_dict
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.search.planner_process import Answer, Request
from dynamic_cp.types import CAUSAL, Lambda, Mask, Plan, PlanOptions, Topology

logger = logging.getLogger(__name__)

WARM_UP = "warm-up"
"""The series of plans that is not written down."""
PLANS, ITERATIONS, RUN = "plans.jsonl", "iterations.jsonl", "run.json"


class JsonLines:
    """A file that gets a JSON object per line; a full disk ends the file with a warning, not the run. Raises OSError if
    it cannot be written from the start."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed = False
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab"):
            pass
        if os.path.isfile(path):
            _cut_half_a_line(path)

    def append(self, record: Mapping[str, Any]) -> None:
        if self._failed:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
        except OSError as error:
            self._failed = True
            logger.warning("cannot write %s: %s; nothing more is written there, training continues", self._path, error)


class RunDump:
    """Writes rank 0's files of a run's dump into `folder`, which it makes; `about` goes into `run.json`. Raises OSError
    if it cannot be written."""

    def __init__(self, folder: str, about: Mapping[str, Any]) -> None:
        self._plans = JsonLines(os.path.join(folder, PLANS))
        self._iterations = JsonLines(os.path.join(folder, ITERATIONS))
        with open(os.path.join(folder, RUN), "w", encoding="utf-8") as file:
            json.dump(about, file, indent=1, default=str)
            file.write("\n")

    def write_answer(self, request: Request, answer: Answer) -> None:
        """Write a plan down, but no error, which ends the run anyway, nor the warm-up's synthetic batch."""
        if answer.whole is None or answer.facts is None or WARM_UP in request.key:
            return
        self._plans.append(
            {
                "key": request.key,
                "sample_ids": request.sample_ids.tolist(),
                "seqlens": request.seqlens.tolist(),
                "facts": asdict(answer.facts),
                "plan": json.loads(answer.whole),
            }
        )

    def write_iteration(self, record: Mapping[str, Any]) -> None:
        """Write an iteration down, with the names of `dynamic_cp.decide.report.run.RunRecord`."""
        self._iterations.append(record)


def spans_path(folder: str, rank: int) -> str:
    """Return the file of a rank's measured passes (`dynamic_cp.decide.report.run.read_spans` reads it)."""
    return os.path.join(folder, "spans", f"rank{rank:05d}.jsonl")


class RecordedPlans:
    """The plans of a dump, in place of a planner. Topology and options are this run's, `layer_masks` its model's
    (`ModelShape.layer_masks`). Raises DataError if there is no dump in `folder`."""

    def __init__(
        self, folder: str, topology: Topology, options: PlanOptions, layer_masks: tuple[Mask, ...] = (CAUSAL,)
    ) -> None:
        self._path = os.path.join(folder, PLANS)
        self._topology, self._options, self._layer_masks = topology, options, layer_masks
        self._offsets: dict[str, int] = {}
        try:
            with open(self._path, "rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    self._offsets[_key_of(line, f"{self._path}:{number}")] = offset
                    offset += len(line)
        except OSError as error:
            raise DataError(f"--dynamic-cp-replay: cannot read {self._path}: {error}: give a dump's folder") from error
        if not self._offsets:
            raise DataError(f"--dynamic-cp-replay: {self._path} holds 0 plans, at least 1 is needed: check the folder")

    def __call__(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        except DynamicCPError as error:
            return Answer(key=request.key, error=error)

    def _answer(self, request: Request) -> Answer:
        if request.key not in self._offsets:
            raise DataError(
                f"{self._path} has no plan for {request.key}, it holds {len(self._offsets)} others: replay no more "
                "iterations than were recorded, with the same --eval-interval and --eval-iters",
            )
        with open(self._path, "rb") as file:
            file.seek(self._offsets[request.key])
            record = json.loads(file.readline())
        plan = plan_from_dict(record["plan"])
        if plan.topology != self._topology:
            raise DataError(
                f"{self._path} was planned for {plan.topology}, this run is {self._topology}: replay on the same layout"
            )
        if [record["sample_ids"], record["seqlens"]] != [request.sample_ids.tolist(), request.seqlens.tolist()]:
            raise DataError(
                f"{self._path} planned other samples for {request.key}: {len(record['seqlens'])} of "
                f"{sum(record['seqlens'])} tokens, this run has {len(request.seqlens)} of "
                f"{int(request.seqlens.sum())}: replay with the same data, --seed and --global-batch-size"
            )
        if plan.max_tokens_per_rank > self._options.max_tokens_per_rank:
            raise DataError(
                f"{self._path} allows {plan.max_tokens_per_rank} tokens per rank, this run "
                f"{self._options.max_tokens_per_rank}: raise --max-seqlen-per-dp-cp-rank"
            )
        if plan.extension is not None and self._options.pool == "off":
            raise DataError(
                f"{self._path} has a plan with {plan.num_servers} servers of all stages for {request.key}, this run "
                "has 0: replay with --dynamic-cp-pool auto"
            )
        self._check_windows(plan)
        check_plan(plan, request.samples)
        try:
            facts = PlanFacts(**{**record["facts"], "digest": digest(plan), "cp_histogram": plan.cp_histogram})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{self._path} was written by another version: {request.key} says {sorted(record.get('facts', {}))} "
                f"({error}): replay with the version that recorded it"
            ) from error
        return Answer(
            key=request.key, lanes=tuple(encode_lanes(plan, facts)), whole=json.dumps(record["plan"]), facts=facts
        )

    def _check_windows(self, plan: Plan) -> None:
        used = {bucket.cp_comm_type for bucket in plan.buckets if bucket.cp_size > 1}
        has_windows = any(isinstance(mask, Lambda) for mask in self._layer_masks)
        if has_windows and (others := used - set(serving_windows(used))):
            raise DataError(
                f"{self._path} has plans with {' '.join(sorted(others))}, which serves no layers with a window: replay "
                "with the same --window-size"
            )
        placed = {bucket.placement.layer_masks or (CAUSAL,) for bucket in plan.buckets if bucket.placement is not None}
        if plan.extension is not None:  # homes only, for layers that all see all keys before them
            placed = set()
        for masks in placed - {self._layer_masks}:
            recorded, ours = (", ".join(map(str, each)) for each in (masks, self._layer_masks))
            raise DataError(
                f"{self._path} has attention placed for layers with the masks {recorded}, those of this run have "
                f"{ours}: replay with the same --window-size, --window-attn-skip-freq and --window-sink-tokens"
            )


def _cut_half_a_line(path: str) -> None:
    """Remove the half line that a killed run left at the end of a file."""
    with open(path, "rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            logger.warning("%s ended in half a line of %d bytes, which are removed", path, size - end)
            file.truncate(end)


def _key_of(line: bytes, where: str) -> str:
    try:
        key = json.loads(line)["key"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{where} is not the record of a plan ({error}): was the file cut? Remove the line") from error
    return str(key)
