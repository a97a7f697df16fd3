"""The planner as a scheduler class: groups of samples that are never slower, in simulation, than the greedy's.

Megatron-Core or verl draws, re-routes and packs samples, and asks that class for groups. Every rank that asks plans for
itself, and all find the same plan: it is a function of its input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynamic_cp.errors import DynamicCPError, InfeasibleSampleError, InvalidInputError
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Sample
from megatron.integrations.scheduler.groups import Groups, check_groups, groups_ns, groups_of, groups_of_greedy
from megatron.integrations.scheduler.job import Job

logger = logging.getLogger(__name__)

GREEDY = "Megatron-LM's greedy"

_warned: set[str] = set()


class Limits(NamedTuple):
    """What a framework asks of groups.

    Attributes:
        multiple: what the number of micro-batches must be a multiple of (interleaved pipelines).
        max_samples: of one pack; None: any.
    """

    num_lanes: int
    max_tokens_per_rank: int
    min_cp_size: int = 1
    multiple: int = 1
    max_samples: int | None = None


class PlannedGroups(NamedTuple):
    """Groups with what is expected of them.

    Attributes:
        predicted_s: simulated seconds of the forward and backward passes, as the groups run.
        greedy_s: of the greedy that they replace; None where it finds no groups.
        reason: one line: which plan won.
        sizes: CP size -> number of packs.
    """

    groups: Groups
    predicted_s: float
    greedy_s: float | None
    reason: str
    sizes: Counter[int]

    def __str__(self) -> str:
        greedy = "none" if self.greedy_s is None else f"{self.greedy_s:.4g} s"
        sizes = " ".join(f"{size}:{count}" for size, count in sorted(self.sizes.items()))
        return (
            f"{len(self.groups)} micro-batches, packs by CP size {sizes}, predicted {self.predicted_s:.4g} s, "
            f"greedy {greedy}; {self.reason}"
        )


def plan_groups(job: Job, limits: Limits, seqlens: Mapping[int, int]) -> PlannedGroups:
    """Return the faster of a plan's groups and those of Megatron-LM's greedy.

    Both are simulated as they will run, in a ring: filling empty places can make a plan slower than expected, and give
    groups more lanes than `max_cp_size`. The other one is taken then, if it has no such groups.

    Args:
        seqlens: id -> tokens, of a whole global batch.

    Raises:
        InfeasibleSampleError: a sample that all lanes together cannot hold.
        DynamicCPError: no model, lanes that are no power of two, or too few samples for a multiple.
    """
    problem = job.problem(limits.num_lanes, limits.max_tokens_per_rank, limits.min_cp_size)
    planned = plan_problem(problem, [Sample(sample_id=sample, seqlen=seqlen) for sample, seqlen in seqlens.items()])
    shape = {"multiple": limits.multiple, "max_samples": limits.max_samples}
    cost_model = CostModel(problem)
    candidates = {planned.reason: groups_of(planned.plan, **shape)}
    with contextlib.suppress(InvalidInputError):  # it may find no multiple of rows where ours does
        candidates[GREEDY] = groups_of_greedy(seqlens, cost_model, problem.options, **shape)
    seconds = {name: groups_ns(groups, seqlens, cost_model) * 1e-9 for name, groups in candidates.items()}
    largest = problem.options.largest_cp_size(problem.topology)
    reason = min(candidates, key=lambda name: (largest_of(candidates[name]) > largest, seconds[name]))
    if largest_of(candidates[reason]) > largest:
        raise InvalidInputError(
            f"{len(seqlens)} samples leave lanes without one, and larger CP groups would fill them: a CP size of "
            f"{largest_of(candidates[reason])} is needed, max_cp_size is {largest}: raise it, or the number of samples"
        )
    sizes = check_groups(
        candidates[reason],
        seqlens,
        num_lanes=limits.num_lanes,
        max_tokens_per_rank=limits.max_tokens_per_rank,
        multiple=limits.multiple,
    )
    return PlannedGroups(candidates[reason], seconds[reason], seconds.get(GREEDY), reason, sizes)


def largest_of(groups: Groups) -> int:
    """Return the largest CP size of some groups."""
    return max((lanes.count(ids) for lanes in groups for ids in lanes), default=0)


class PlainScheduler:
    """What our class needs of Megatron-Core's DefaultDynamicCPScheduler, for processes without Megatron-Core.

    Args:
        max_seqlen_per_dp_cp_rank: limit of tokens of a rank in one micro-batch.
        cp_size, dp_size: their product is the number of lanes.
        microbatch_group_size_per_vp_stage, max_num_seqs: `Limits.multiple` and `max_samples`; None: any.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
        max_num_seqs: int | None = None,
        *,
        min_cp_size: int = 1,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage
        self.max_num_seqs = max_num_seqs
        self.min_cp_size = min_cp_size


def scheduler_class(job: Job, base: type = PlainScheduler) -> type:
    """Return a scheduler class that plans with `dynamic_cp`.

    Args:
        job: what to plan for; `run()`, where a framework calls it, adds what its configuration says.
        base: the framework's DefaultDynamicCPScheduler, which draws, re-routes and packs, and plans what we cannot.
    """

    class DynamicCPPlannerScheduler(base):  # type: ignore[misc]
        """Plans a global batch by its cost on the cluster instead of by L^2 / cp."""

        replaces = base

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.job = job

        def run(self, data_iterator: Any, num_microbatches: int, *groups_and_config: Any) -> Any:
            """Take model and layout from the configuration, then do as the base class."""
            *_, config = groups_and_config
            sizes = {"tp_size": groups_and_config[1].size(), "pp_size": groups_and_config[2].size()}
            try:
                found = job.with_config(config)
                self.job = replace(found, layout={**found.layout, **sizes})
            except DynamicCPError as error:
                _warn_once(error, f"dynamic CP does not know this model, {base.__name__} plans")
            return super().run(data_iterator, num_microbatches, *groups_and_config)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
            """Return groups[micro-batch][lane] -> ids; if they cannot be planned, those of the base class, with one
            warning. Raise InfeasibleSampleError for a sample that all lanes together cannot hold."""
            seqlens = {int(sample): int(seqlen) for sample, seqlen in sample_id_seqlens}
            try:
                planned = plan_groups(self.job, limits_of(self), seqlens)
            except InfeasibleSampleError:
                raise
            except DynamicCPError as error:
                if not hasattr(base, "get_groups_and_subsamples"):
                    raise
                _warn_once(error, f"dynamic CP cannot plan here, {base.__name__} does")
                groups: Groups = super().get_groups_and_subsamples(sample_id_seqlens)
                return groups
            level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.DEBUG
            logger.log(level, "dynamic CP: %s", planned)
            return planned.groups

    return DynamicCPPlannerScheduler


def limits_of(scheduler: Any) -> Limits:
    """Return the limits that a scheduler was built for."""
    return Limits(
        num_lanes=scheduler.cp_size * scheduler.dp_size,
        max_tokens_per_rank=scheduler.max_seqlen_per_dp_cp_rank,
        min_cp_size=getattr(scheduler, "min_cp_size", 1),
        multiple=scheduler.microbatch_group_size_per_vp_stage or 1,
        max_samples=getattr(scheduler, "max_num_seqs", None),
    )


def _warn_once(error: DynamicCPError, text: str) -> None:
    """Warn of the first error of its kind; later ones differ in their numbers only."""
    kind = re.sub(r"\d+", "", str(error))
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("%s: %s", text, error)
