"""What a token does to the state of a head, for both kinds of layers, and what a kernel that computes it is.

    with beta (gated delta net):  S <- a S + k (beta (v - (a S)' k))'        a = exp(decay)
    without (Mamba-2):            S <- a S + k v'                            output: scale S' q

of S [key size, value size]. So what a run of tokens does to the state before it is S -> A S + b: its summary. Columns
of a state do not meet, so a run from the state [0 | I] with the values [v | 0] ends with [b | A]. Without beta, A is a
number for each head. A kernel computes all runs of a pack in one call.

Shapes: T tokens, H heads (or groups of heads), K channels of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.packs import to_device
from megatron.dynamic_cp.packed_seq_params import boundaries

Kept = TypeVar("Kept")
NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Runs of rows, one after the other; nothing passes from one to the next.

    Attributes:
        lengths: rows of each, at least 1.
        cu_seqlens: their boundaries on the device, int32 [num_runs + 1].
        host_cu_seqlens: the same on the host.
        kept: what kernels derive from it, by name, filled by the first layer.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    host_cu_seqlens: Tensor
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, lengths: Sequence[int], device: torch.device) -> Runs:
        """Return runs of these lengths with their boundaries on `device`."""
        bounds = boundaries(lengths)
        return cls(
            lengths=tuple(lengths), cu_seqlens=to_device(bounds, device), host_cu_seqlens=torch.from_numpy(bounds)
        )

    def once(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned for the first layer."""
        if name not in self.kept:
            self.kept[name] = make()
        kept: Kept = self.kept[name]
        return kept


class Steps(NamedTuple):
    """What tokens do, for each of some heads.

    Attributes:
        q_THK, k_THK, v_THV: in the dtype of the model; queries and keys may be of groups of heads, equally large.
        decay_TH: logarithms, at most 0, in that of states.
        beta_TH: in that of states; None: as in Mamba-2.
        scale: of the output.
    """

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_TH: Tensor
    beta_TH: Tensor | None
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
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
        return Steps.of(tensors, self.scale)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], scale: float) -> Steps:
        q_THK, k_THK, v_THV, decay_TH, *beta = tensors
        return cls(q_THK, k_THK, v_THV, decay_TH, beta[0] if beta else None, scale)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, summaries and decays: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def applied(transition: Tensor, state: Tensor) -> Tensor:
    """Return A S, of A [..., key size, key size], or a number of each head whose last dim is 1."""
    return transition * state if transition.shape[-1] == 1 else transition @ state


def transposed(transition: Tensor) -> Tensor:
    return transition if transition.shape[-1] == 1 else transition.transpose(-1, -2)


Convolve = Callable[[Tensor, Tensor, "Tensor | None", Runs], Tensor]


class Scan(Protocol):
    """The recurrence of runs."""

    def __call__(
        self, steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False
    ) -> tuple[Tensor | None, Tensor]:
        """Return the output [T, heads, value size], and the state behind each run [runs, heads, key, value].

        Args:
            state: before each run; None: zeros.
            only_state: the output is not needed, and may be None.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """How runs are computed; autograd differentiates both.

    Attributes:
        convolve: (x_TC, weight [C, kernel size], bias [C] or None, runs) -> each channel convolved with the tokens
            before it in its run, and SiLU.
        normalize: [..., K] -> the same with vectors of length 1, x / sqrt(sum of squares + NORM_EPSILON).
        scan: the recurrence.
        gated_norm: (x, z [T, C], weight [C], epsilon, channels of a group, whether it gates before the norm) -> an RMS
            norm of each group of x, times SiLU of z.
    """

    name: str
    convolve: Convolve
    normalize: Callable[[Tensor], Tensor]
    scan: Scan
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, int, bool], Tensor]
