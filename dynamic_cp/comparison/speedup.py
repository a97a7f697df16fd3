"""How many times faster one policy is than another, with an interval over the global batches.

Both policies run the same batches, so the logarithms of the ratios, batch by batch, are one paired sample: the estimate
is their mean, and the interval Student's t interval of that mean, which holds for few batches too (a bootstrap of 4 or
8 batches is too narrow). It says how much batches differ, not how well the cost model predicts.
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
        ratio: geometric mean over the batches of baseline seconds / policy seconds.
        low, high: ends of the 95 % interval of `ratio`; None with one batch, which says nothing of others.
        per_batch: the ratio of each batch.
    """

    policy: str
    baseline: str
    ratio: float
    low: float | None
    high: float | None
    per_batch: tuple[float, ...]


def speedup_of(policy: str, policy_s: Sequence[float], baseline: str, baseline_s: Sequence[float]) -> Speedup:
    """Return the speed-up from the seconds of the same batches in the same order (at least one, all > 0)."""
    per_batch = tuple(theirs / ours for ours, theirs in zip(policy_s, baseline_s, strict=True))
    logs = [math.log(ratio) for ratio in per_batch]
    mean = sum(logs) / len(logs)
    low = high = None
    if len(logs) > 1:
        deviation = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
        half = t_quantile(len(logs) - 1) * deviation / math.sqrt(len(logs))
        low, high = math.exp(mean - half), math.exp(mean + half)
    return Speedup(
        policy=policy, baseline=baseline, ratio=math.exp(mean), low=low, high=high, per_batch=per_batch
    )  # fmt: skip


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` (>= 1) degrees of freedom, to 4 digits.

    Source: table up to 30; beyond, the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_T_97_5):
        return _T_97_5[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
