"""What parts of the keys of a row need to know of each other: the log-sum-exp. That of no key is -inf."""

from __future__ import annotations

import torch
from torch import Tensor

SUM_DTYPE = torch.float32
"""Of what is added up over parts."""


def merged(out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and log-sum-exp over the keys of both, in SUM_DTYPE; overwrites both outputs if they are so already.

    Rows without a key in both keep the output 0 and the log-sum-exp -inf.
    """
    lse_HT, other_HT = lse_HT.to(SUM_DTYPE), other_HT.to(SUM_DTYPE)
    both_HT = torch.logaddexp(lse_HT, other_HT)
    finite_HT = both_HT.clamp_min(torch.finfo(SUM_DTYPE).min)  # -inf - -inf is no number
    share, other_share = (torch.exp(x - finite_HT).t().unsqueeze(-1) for x in (lse_HT, other_HT))
    out_THD, other_THD = out_THD.to(SUM_DTYPE), other_THD.to(SUM_DTYPE)
    return out_THD.mul_(share).add_(other_THD.mul_(other_share)), both_HT


def for_weights(lse_HT: Tensor) -> Tensor:
    """Return the log-sum-exp with which exp(score - it) is 0 for rows without a key, and not no number."""
    return lse_HT.masked_fill(lse_HT == -torch.inf, torch.inf)
