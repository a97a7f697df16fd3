"""A comparison as plain data for JSON.

    {"schema_version": 1, "inputs": {...}, "policies": {"dynamic": {"batches": [{...}], "mean": {...}, ...}, ...},
     "speedup": {"static": {...}, ...}, "other_prices": {...}, "verdict": {...}}

Every figure has its unit in its name. Fractions are of iteration_s, except padding_fraction, which is of all computed
tokens. The mean of a ratio over batches is the ratio of the sums. null means unknown. Only plan_s differs between runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dynamic_cp.decide.comparison.values import (
    CONFIDENCE,
    BatchOutcome,
    Comparison,
    PlanOutcome,
    PolicyOutcome,
    Speedup,
    mean_of,
)
from dynamic_cp.decide.comparison.verdict import verdict_of
from dynamic_cp.decide.setting import Setting
from dynamic_cp.plans.serialize import digest
from dynamic_cp.types import Problem

SCHEMA_VERSION = 1

_RATES = (
    *("iteration_s", "makespan_s", "lower_bound_s", "time_over_bound", "num_microbatches", "num_tokens"),
    *("tokens_per_s_per_gpu", "tflops_per_gpu"),
)
_SHARES = ("busy", "exchange", "bubble", "pipeline_bubble", "cp_wait", "dp_wait")
"""Parts of an iteration, and sums of parts, that are given as shares of it."""
_COSTS = ("peak_bytes", "sent_in_node_bytes", "sent_across_nodes_bytes", "plan_s")
_SPREAD = ("iteration_s", "makespan_s", "time_over_bound", "tokens_per_s_per_gpu", "tflops_per_gpu")


def to_dict(comparison: Comparison, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `comparison` as plain data; `inputs`: more of what the user gave, such as the source of the lengths."""
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": {
            "model": comparison.model_name,
            "hardware": comparison.hardware_name,
            **job_to_dict(comparison.problem),
            "is_tuned": comparison.is_tuned,
            "num_batches": len(comparison.batches),
            "num_samples": [len(batch) for batch in comparison.batches],
            "num_tokens": [sum(sample.seqlen for sample in batch) for batch in comparison.batches],
            **(inputs or {}),
        },
        "policies": {one.policy: _policy(one) for one in comparison.policies},
        **judgement_to_dict(comparison),
    }


def job_to_dict(problem: Problem) -> dict[str, Any]:
    """Return how a job is planned and what options change of its model; only hybrids have `state_exchange`."""
    topology, model, said = problem.topology, problem.model, asdict(problem.options)
    if model.linear_attention is None:
        del said["state_exchange"]
    return {
        "topology": {**asdict(topology), "world_size": topology.world_size},
        "options": said,
        "mtp_num_layers": model.mtp_num_layers,
        "expert_imbalance": None if model.experts is None else model.experts.imbalance,
    }


def judgement_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return speed-ups, gains under other prices and the verdict as plain data."""
    verdict = verdict_of(comparison)
    return {
        "speedup": {one.baseline: _speedup_to_dict(one) for one in comparison.speedups},
        "other_prices": {
            one.name: {"baseline": one.speedup.baseline, **_speedup_to_dict(one.speedup)}
            for one in comparison.other_prices
        },
        "verdict": None
        if verdict is None
        else {
            "pays": verdict.pays,
            "baseline": verdict.baseline,
            "headline": verdict.headline,
            "reason": verdict.reason,
            "other_prices": verdict.other_prices,
            "settled_by": [{"what": one.what, "command": " ".join(one.command) or None} for one in verdict.settled_by],
            "saved_s": dict(verdict.saved_s),
        },
    }


def _speedup_to_dict(speedup: Speedup) -> dict[str, Any]:
    return {
        "ratio": speedup.ratio,
        "low": speedup.low,
        "high": speedup.high,
        "confidence": CONFIDENCE,
        "per_batch": list(speedup.per_batch),
    }


def setting_to_dict(setting: Setting) -> dict[str, Any]:
    """Return a setting under the names of the command's options."""
    topology = setting.topology
    return {
        "tp": topology.tp_size,
        "pp": topology.pp_size,
        "pipeline_layers": [list(chunks) for chunks in setting.pipeline_layers] or None,
        "vpp": topology.vp_size,
        "ep": topology.ep_size,
        "lanes": topology.num_lanes,
        "recompute": setting.recompute,
        "recompute_method": setting.recompute_layers.method if setting.recompute == "full" else None,
        "recompute_num_layers": setting.recompute_layers.num_layers if setting.recompute == "full" else None,
        "max_tokens_per_rank": setting.max_tokens_per_rank,
        "cp_comm_type": setting.cp_comm_type,
        "static_cp_size": setting.static_cp_size,
        "max_cp_size": setting.max_cp_size,
    }


def _policy(outcome: PolicyOutcome) -> dict[str, Any]:
    batches = [_batch(one) for one in outcome.batches]
    return {
        "max_tokens_per_rank": outcome.max_tokens_per_rank,
        "static_cp_size": outcome.static_cp_size,
        "max_cp_size": outcome.setting.max_cp_size,
        "setting": setting_to_dict(outcome.setting),
        "available_bytes": outcome.available_bytes,
        "fits_memory": outcome.fits_memory,
        "batches": batches,
        "mean": _mean(outcome, batches),
        "stdev": {name: outcome.stdev(name) for name in _SPREAD},
    }


def _batch(outcome: BatchOutcome) -> dict[str, Any]:
    planned, parts = (outcome.planned, outcome.parts) if isinstance(outcome, PlanOutcome) else (None, None)
    plan = planned.plan if planned else None
    shares = {name: None if parts is None else getattr(parts, f"{name}_s") / outcome.iteration_s for name in _SHARES}
    return {
        **{name: getattr(outcome, name) for name in _RATES},
        **{f"{name}_fraction": share for name, share in shares.items()},
        "padding_fraction": outcome.padding_fraction,
        "parts_s": None if parts is None else dict(parts),
        "imbalance": planned.imbalance if planned else None,
        "cp_histogram": None if plan is None else {str(cp): count for cp, count in plan.cp_histogram.items()},
        **{name: getattr(outcome, name, None) for name in _COSTS},
        "digest": None if plan is None else digest(plan),
        "reason": outcome.reason,
    }


def _mean(outcome: PolicyOutcome, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number over the batches, for ratios the ratio of sums; None if a value is unknown."""
    means: dict[str, Any] = {}
    for name, first in batches[0].items():
        values = [batch[name] for batch in batches]
        if name == "parts_s":
            unknown = any(value is None for value in values)
            means[name] = None if unknown else {key: mean_of([value[key] for value in values], None) for key in first}
        elif name not in ("cp_histogram", "digest", "reason"):
            means[name] = mean_of(values, outcome.weights(name))
    return means
