"""What a token does to the state of a head, for both kinds of layers.

    with beta (gated delta net):  S <- a S + k (beta (v - (a S)' k))'        a = exp(decay)
    without (Mamba-2):            S <- a S + k v'                            found: scale S' q

of S [key size, value size]. So what a run of tokens does to the state before it is S -> A S + b: its summary. Columns
of a state do not meet, so a run from the state [0 | I] with the values [v | 0] ends with [b | A]. Without beta, A is a
number for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """What tokens do, for each of some heads.

    Attributes:
        q_THK, k_THK, v_THV: in the dtype of the model; queries and keys may be of groups of heads, equally large.
        decay_TH: logarithms, at most 0, in that of states.
        beta_TH: in that of states; None: as in Mamba-2.
        scale: of what is found.
    """

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_TH: Tensor
    beta_TH: Tensor | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        tensors = (self.q_THK, self.k_THK, self.v_THV, self.decay_TH, self.beta_TH)
        return [tensor for tensor in tensors if tensor is not None]

    def of_rows(self, rows: Tensor) -> Steps:
        """Return the same of some rows."""
        return self.with_tensors([tensor.index_select(0, rows) for tensor in self.tensors])

    def by_head(self) -> Steps:
        """Return the same with a query and a key of each head."""
        per_group = self.v_THV.shape[1] // self.k_THK.shape[1]
        if per_group == 1:
            return self
        q_THK, k_THK = (x.repeat_interleave(per_group, dim=1) for x in (self.q_THK, self.k_THK))
        return self._replace(q_THK=q_THK, k_THK=k_THK)

    def with_tensors(self, tensors: list[Tensor]) -> Steps:
        """Return the same with other `tensors`."""
        return Steps.of(tensors, self.scale)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], scale: float) -> Steps:
        """Return those whose `tensors` are these."""
        q_THK, k_THK, v_THV, decay_TH, *beta = tensors
        return cls(q_THK, k_THK, v_THV, decay_TH, beta[0] if beta else None, scale)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what states, summaries and decays are in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def applied(transition: Tensor, state: Tensor) -> Tensor:
    """Return A S, of A [..., heads, key size, key size] or [..., heads]."""
    if transition.ndim == state.ndim:
        return transition @ state
    return transition[..., None, None] * state


def followed(later: Tensor, earlier: Tensor) -> Tensor:
    """Return the transition of two runs, of those of both, [runs, heads, ...]."""
    return later @ earlier if later.ndim == 4 else later * earlier


def transposed(transition: Tensor) -> Tensor:
    """Return A', of A [runs, heads, ...]."""
    return transition.transpose(-1, -2) if transition.ndim == 4 else transition
