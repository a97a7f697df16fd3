"""Policies that are planners of other systems: found, run and judged like our own."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from dynamic_cp.comparison.job import Job, batch_outcome, rates
from dynamic_cp.comparison.values import BatchOutcome, PolicyOutcome
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.all_gather import AllGather
from dynamic_cp.peers.peer import PeerResult
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import PlannedBatch, PlanOptions, Sample

PEERS = ("megatron-0.16.1", "flexsp", "wlb", "wlb-exposed")
"""Planners of others, compared on request."""
PEER_GROUP = "dynamic_cp.peers"
"""Entry points of peers that need more than this package."""

Peer = Callable[[Sequence[Sample], CostModel], PeerResult]


def load_peer(name: str) -> Peer:
    """Return the planner of a peer; UnsupportedFeatureError: what it needs is not installed."""
    if name in ("wlb", "wlb-exposed"):
        from dynamic_cp.peers import wlb

        return wlb.peer
    if name == "flexsp":
        try:
            importlib.import_module("pulp")
        except ImportError as error:
            raise UnsupportedFeatureError(
                f"policy flexsp solves MILPs with pulp, which is missing ({error}): pip install 'pulp<4'"
            ) from error
        from dynamic_cp.peers import flexsp

        return flexsp.peer
    found = importlib.metadata.entry_points(group=PEER_GROUP, name=name)
    remedy = "pip install 'megatron-dynamic-cp[train]', or leave it out"
    if not found:
        raise UnsupportedFeatureError(f"policy {name} has no entry point in group {PEER_GROUP}: {remedy}")
    try:
        return cast(Peer, next(iter(found)).load())
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"policy {name} runs the scheduler of megatron-core, which cannot be imported ({error}): {remedy}"
        ) from error


def outcome_of_peer(
    name: str,
    peer: Peer,
    job: Job,
    options: PlanOptions,
    count: Callable[[], None],
) -> PolicyOutcome:
    """Return what `peer` makes of all batches; UnsupportedFeatureError: it has no result for this job.

    `count` is called after every batch. "wlb-exposed" gathers all keys before attention, which hides nothing of it, as
    WLB-LLM and the comparisons of DistCA do; "wlb" has the exchanges of the job.
    """
    if name == "wlb-exposed":
        options = replace(options, cp_comm_types=(AllGather.name,))
    prices = job.prices(options)
    memory = job.memory(options, None)
    batches = []
    for batch in job.batches:
        if job.model.window is not None or any(sample.mask is not None for sample in batch):
            raise UnsupportedFeatureError(f"policy {name} knows only the causal mask: leave it out")
        start_s = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PuLP 3 announces PuLP 4
            result = peer(batch, prices.all)
        plan_s = time.perf_counter() - start_s
        if result.seconds is None:
            raise UnsupportedFeatureError(f"policy {name} has no result here: {result.note}; leave it out")
        if result.plan is None:
            batches.append(
                BatchOutcome(
                    planned=None,
                    timeline=None,
                    parts=None,
                    num_microbatches=None,
                    padding_fraction=None,
                    peak_bytes=None,
                    sent_in_node_bytes=None,
                    sent_across_nodes_bytes=None,
                    plan_s=plan_s,
                    note=result.note,
                    **rates(job, batch, result.seconds, prices),
                )
            )
            count()
            continue
        check_plan(result.plan, batch)
        timeline = simulate(result.plan, prices.all)
        planned = PlannedBatch(
            plan=result.plan,
            predicted_s=timeline.iteration_s,
            predicted_busy_s=timeline.lane_busy_s,
            reason=result.note,
        )
        batches.append(batch_outcome(job, planned, prices, memory, plan_s, result.note))
        count()
    return PolicyOutcome(
        setting=job.setting_of(name, options),
        batches=tuple(batches),
        available_bytes=memory.available_bytes if job.hardware.hbm_bytes else None,
    )
