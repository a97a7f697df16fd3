"""How many times faster one policy is than another, with an interval over the global batches.

The estimate is the ratio of sums, all seconds of the one over all seconds of the other: the gain of a run over these
batches, and also the ratio of tokens per second. Both policies run the same batches, so the interval is paired: by the
delta method the logarithm of the ratio has the standard error of the mean of

    baseline_s / mean(baseline_s) - policy_s / mean(policy_s)

over the batches, and Student's t quantile makes the interval valid for few batches, too (a bootstrap of 4 or 8 is too
narrow). In simulated batches whose gain grows with their seconds, the interval covers the truth in 94% of cases where
seconds differ by 20%, but only in 87% (8 batches) to 91% (32) where they differ by 50%: then take more batches. It says
how much batches differ, not how well the cost model predicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

_T_97_5 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
"""97.5 % quantile of Student's t with 1, 2, 3 ... degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Times by which `policy` is faster than `baseline`.

    Attributes:
        ratio: baseline seconds of all batches / policy seconds of all batches.
        low, high: ends of the 95 % interval of `ratio`; None with one batch, which says nothing of others.
        per_batch: the ratio of each batch.
    """

    policy: str
    baseline: str
    ratio: float
    low: float | None
    high: float | None
    per_batch: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OtherPrice:
    """The gain of dynamic CP over the fastest static policy under other prices.

    Attributes:
        name: what is priced otherwise, for a sentence that begins with "with".
    """

    name: str
    speedup: Speedup


def speedup_of(policy: str, policy_s: Sequence[float], baseline: str, baseline_s: Sequence[float]) -> Speedup:
    """Return the speed-up from the seconds of the same batches in the same order (at least one, all > 0)."""
    per_batch = tuple(theirs / ours for ours, theirs in zip(policy_s, baseline_s, strict=True))
    num_batches, sum_s, baseline_sum_s = len(per_batch), math.fsum(policy_s), math.fsum(baseline_s)
    ratio = baseline_sum_s / sum_s
    low = high = None
    if num_batches > 1:
        # Their mean is 0.
        deviations = (theirs / baseline_sum_s - ours / sum_s for ours, theirs in zip(policy_s, baseline_s, strict=True))
        deviation = num_batches * math.sqrt(math.fsum(one * one for one in deviations) / (num_batches - 1))
        spread = math.exp(t_quantile(num_batches - 1) * deviation / math.sqrt(num_batches))
        low, high = ratio / spread, ratio * spread
    return Speedup(policy=policy, baseline=baseline, ratio=ratio, low=low, high=high, per_batch=per_batch)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` (>= 1) degrees of freedom, to 4 digits.

    Source: table up to 30; beyond, the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_T_97_5):
        return _T_97_5[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
