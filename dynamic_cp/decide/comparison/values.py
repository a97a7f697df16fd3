"""The values of a comparison, which `compare.py` fills in, and how many times faster one policy is than another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING

from dynamic_cp.decide.comparison.parts import TimeParts, mean_parts
from dynamic_cp.decide.setting import Setting
from dynamic_cp.pipeline.timeline import Timeline
from dynamic_cp.types import PlannedBatch, Problem, Sample

if TYPE_CHECKING:
    from dynamic_cp.pool.search import PlannedTasks

CONFIDENCE = 0.95

_T_97_5 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""97.5 % quantile of Student's t with 1, 2, 3 ... degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times faster `policy` is than `baseline`: the ratio of their seconds over all batches, with the ends of
    its 95 % interval (None with one batch, which says nothing about others), and the ratio of each batch."""

    policy: str
    baseline: str
    ratio: float
    low: float | None
    high: float | None
    per_batch: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OtherPrice:
    """The gain of dynamic CP over the fastest static policy under the other prices that `name` describes."""

    name: str
    speedup: Speedup


def speedup_of(policy: str, policy_s: Sequence[float], baseline: str, baseline_s: Sequence[float]) -> Speedup:
    """Return the speed-up from the seconds of the same batches in the same order (at least one, all > 0).

    The estimate is the ratio of the sums: the gain of a run over these batches. The interval is paired, because both
    policies run the same batches. By the delta method the logarithm of the ratio has the standard error of the mean of

        baseline_s / mean(baseline_s) - policy_s / mean(policy_s)

    over the batches. Student's t keeps it valid for few batches, where a bootstrap (of 4 or 8) is too narrow. In
    simulated batches whose gain grows with their seconds it covers the truth in 94% of cases if seconds differ by 20%,
    but only in 87% (8 batches) to 91% (32) if they differ by 50%: then take more batches. The interval says how much
    batches differ, not how well the cost model predicts.
    """
    per_batch = tuple(theirs / ours for ours, theirs in zip(policy_s, baseline_s, strict=True))
    num_batches, sum_s, baseline_sum_s = len(per_batch), math.fsum(policy_s), math.fsum(baseline_s)
    ratio = baseline_sum_s / sum_s
    low = high = None
    if num_batches > 1:
        # The deviations have mean 0.
        deviations = (theirs / baseline_sum_s - ours / sum_s for ours, theirs in zip(policy_s, baseline_s, strict=True))
        deviation = num_batches * math.sqrt(math.fsum(one * one for one in deviations) / (num_batches - 1))
        spread = math.exp(t_quantile(num_batches - 1) * deviation / math.sqrt(num_batches))
        low, high = ratio / spread, ratio * spread
    return Speedup(policy=policy, baseline=baseline, ratio=ratio, low=low, high=high, per_batch=per_batch)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` (>= 1) degrees of freedom, to 4 digits. Source: beyond
    the table, the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5)."""
    if degrees <= len(_T_97_5):
        return _T_97_5[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What one policy makes of one global batch: a `PlanOutcome` or a `PoolOutcome`.

    Attributes:
        iteration_s, makespan_s: seconds of forward and backward, with and without the reduction of gradients.
        lower_bound_s: no legal plan of this batch at the policy's token limit has a smaller makespan_s.
        num_tokens: true tokens of the batch.
        tokens_per_s_per_gpu, tflops_per_gpu: of true tokens and model FLOPs.
        padding_fraction: share of padding in all tokens that are computed.
        peak_bytes: of the rank that needs most; None where a pool's is unknown.
        plan_s: seconds of planning on this machine (measured, so never the same twice).
        note: how a pool, or a plan without one, was chosen; "" if there was no choice.
    """

    iteration_s: float
    makespan_s: float
    lower_bound_s: float
    num_microbatches: int
    num_tokens: int
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    padding_fraction: float
    peak_bytes: float | None
    plan_s: float
    note: str = ""

    @property
    def time_over_bound(self) -> float:
        """makespan_s / lower_bound_s, at least 1."""
        return self.makespan_s / self.lower_bound_s

    @property
    def num_computed_tokens(self) -> float:
        """Tokens with padding."""
        return self.num_tokens / (1 - self.padding_fraction)

    @property
    def reason(self) -> str:
        """Why the plan was chosen."""
        return self.note


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome(BatchOutcome):
    """Outcome of a plan whose attention stays on its stage; bytes are what all ranks send for attention."""

    planned: PlannedBatch
    timeline: Timeline
    parts: TimeParts
    sent_in_node_bytes: float
    sent_across_nodes_bytes: float

    @property
    def reason(self) -> str:
        return self.planned.reason

    @property
    def sent_bytes(self) -> float:
        return self.sent_in_node_bytes + self.sent_across_nodes_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutcome(BatchOutcome):
    """Outcome of a plan whose attention is computed by servers on all stages; `pool`: the plan and its ticks."""

    pool: PlannedTasks


DENOMINATORS: Mapping[str, str] = {
    "tokens_per_s_per_gpu": "iteration_s",
    "tflops_per_gpu": "iteration_s",
    "time_over_bound": "lower_bound_s",
    "padding_fraction": "num_computed_tokens",
}
"""Figure that is a ratio -> what its denominator grows with, so that its mean over batches is a ratio of sums."""


def mean_of(values: Sequence[float | None], denominators: Sequence[float] | None) -> float | None:
    """Return the mean of a figure over batches; None if one is unknown. With `denominators` the figure is a ratio and
    its mean the ratio of sums, such as all tokens / all seconds, so that the figures of a row agree with each other."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if denominators is None:
        return statistics.fmean(known)
    return math.fsum(map(mul, known, denominators)) / math.fsum(denominators)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """What one policy makes of all global batches.

    Attributes:
        setting: its layout, CP sizes and token limit (if memory sets it, that of its own CP sizes).
        available_bytes: memory of a rank that plans may use; None = unknown.
    """

    setting: Setting
    batches: tuple[BatchOutcome, ...]
    available_bytes: float | None

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.setting.policy

    @property
    def name(self) -> str:
        """The policy, with its CP size if it has a static one."""
        return self.setting.name

    @property
    def static_cp_size(self) -> int | None:
        """CP size of a static policy; None for others."""
        return self.setting.static_cp_size if self.setting.is_static else None

    @property
    def max_tokens_per_rank(self) -> int:
        return self.setting.max_tokens_per_rank

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure over the batches, as `mean_of`; None if it is unknown."""
        return mean_of([getattr(one, name, None) for one in self.batches], self.weights(name))

    def stdev(self, name: str) -> float | None:
        """Return the standard deviation of a figure over the batches; None if it is unknown or there is one batch."""
        values = [getattr(one, name) for one in self.batches]
        return None if None in values or len(values) == 1 else statistics.stdev(values)

    def weights(self, name: str) -> list[float] | None:
        """Return the denominators of a figure that is a ratio; None for others."""
        denominator = DENOMINATORS.get(name) or ("iteration_s" if name.endswith("_fraction") else None)
        return None if denominator is None else [getattr(one, denominator) for one in self.batches]

    @property
    def iteration_s(self) -> float:
        """Mean seconds of an iteration."""
        return sum(one.iteration_s for one in self.batches) / len(self.batches)

    @property
    def parts(self) -> TimeParts | None:
        """Mean parts of an iteration; they add up to `iteration_s`."""
        parts = tuple(one.parts for one in self.batches if isinstance(one, PlanOutcome))
        return mean_parts(parts) if len(parts) == len(self.batches) else None

    @property
    def peak_bytes(self) -> float | None:
        """Most memory that any of the batches needs."""
        peaks = [one.peak_bytes for one in self.batches if one.peak_bytes is not None]
        return max(peaks) if len(peaks) == len(self.batches) else None

    @property
    def fits_memory(self) -> bool:
        """Whether every batch fits in memory, as far as need and memory are known."""
        return self.peak_bytes is None or self.available_bytes is None or self.peak_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policies side by side on the same global batches.

    Attributes:
        model_name, hardware_name: as the user called them.
        problem: as given, but with the dynamic policy's max_tokens_per_rank and max_cp_size where memory set them. If
            `is_tuned`, layout and options are those of the dynamic policy, or of the first one without it.
        is_tuned: every policy has a layout of its own, on as many ranks; else all have that of `problem`.
        policies: in the order in which they were asked for.
        other_prices: gains under other prices, if a search has them.
    """

    model_name: str
    hardware_name: str
    problem: Problem
    batches: tuple[tuple[Sample, ...], ...]
    policies: tuple[PolicyOutcome, ...]
    is_tuned: bool = False
    other_prices: tuple[OtherPrice, ...] = ()

    def policy(self, name: str) -> PolicyOutcome:
        """Return the outcome of a policy; KeyError: it was not compared."""
        for one in self.policies:
            if one.policy == name:
                return one
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the compared policies."""
        return tuple(one.policy for one in self.policies)

    @property
    def speedups(self) -> tuple[Speedup, ...]:
        """Speed-ups of the dynamic policy over each other one; () without it."""
        if "dynamic" not in self.names:
            return ()
        ours = [one.iteration_s for one in self.policy("dynamic").batches]
        return tuple(
            speedup_of("dynamic", ours, other.policy, [one.iteration_s for one in other.batches])
            for other in self.policies
            if other.policy != "dynamic"
        )
