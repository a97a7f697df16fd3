"""One layer of linear attention, or a share of its heads: how it convolves, and what its tokens do to states.

Channels that are convolved are sections, each of all heads or of all groups (a gated delta net's key heads, Mamba-2's B
and C), one after the other: q k v, or x B C. A share of the heads has of each section what these heads need.

Shapes: T tokens, H heads, G groups of heads, K channels of a key (weight: taps), V of a value, C convolved channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.recurrence import LinearKernel, Runs, Steps, state_dtype
from megatron.dynamic_cp.attention.packs import exact_dtype


def keeps_by_hooks() -> bool:
    """Return whether tensors that autograd saves go through hooks, as in checkpoints that are not reentrant.

    torch can be asked for it in one way only: hooks cannot be disabled where there are some.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("keeps_by_hooks only asks"):
            return False
    except RuntimeError:
        return True


class Share(NamedTuple):
    """Neighbouring heads, and the groups that they need; both may be none."""

    heads: range
    groups: range

    @classmethod
    def of_lane(cls, sizes: LinearAttention, lane: int, num_lanes: int) -> Share:
        return cls(sizes.heads_of_lane(lane, num_lanes), sizes.groups_of_lane(lane, num_lanes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearLayer:
    """What a layer, or a share of it, computes with.

    Attributes:
        sizes: of the whole layer on a tensor-parallel rank; share: which of its heads this is.
        kernel: what computes runs.
        weight_CK, bias_C: of the convolution, of the share's channels; bias None: there is none.
        decay_rate_H, skip_H: of Mamba-2, of the share's heads: logarithm of the rate of decay (A_log), and the weight
            of a token's own value in its output (D); None: it is a gated delta net.
    """

    sizes: LinearAttention
    share: Share
    kernel: LinearKernel
    weight_CK: Tensor
    bias_C: Tensor | None = None
    decay_rate_H: Tensor | None = None
    skip_H: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        parameters = (self.weight_CK, self.bias_C, self.decay_rate_H, self.skip_H)
        return [parameter for parameter in parameters if parameter is not None]

    def of_share(self, share: Share) -> LinearLayer:
        heads = slice(share.heads.start, share.heads.stop)
        return replace(
            self,
            share=share,
            weight_CK=channels_of(self.weight_CK, self.sizes, [share], dim=0)[0],
            bias_C=None if self.bias_C is None else channels_of(self.bias_C, self.sizes, [share])[0],
            decay_rate_H=None if self.decay_rate_H is None else self.decay_rate_H[heads],
            skip_H=None if self.skip_H is None else self.skip_H[heads],
        )

    def convolved(self, x_TC: Tensor, runs: Runs) -> Tensor:
        """Return the share's channels behind the convolution of runs."""
        return self.kernel.convolve(x_TC, self.weight_CK, self.bias_C, runs)

    def steps(self, x_TC: Tensor, rows: Tensor | None, gates: list[Tensor]) -> tuple[Steps, Tensor]:
        """Return what tokens do to states, and their values before that, [T, heads, value size], of convolved channels
        and gates [T, heads]: beta and decay, or dt. `rows` says which rows of the channels are the tokens', None: all.
        """
        num_keys = 2 * len(self.share.groups) * self.sizes.key_size
        keys, values = _Parted.apply(x_TC, rows, num_keys, self.decay_rate_H is None)
        keys, values = keys.unflatten(2, (-1, self.sizes.key_size)), values.unflatten(1, (-1, self.sizes.value_size))
        if self.decay_rate_H is None:
            beta, decay = gates
            q, k = (self._served(x) for x in self.kernel.normalize(keys).unbind())
            return Steps(q, k, values, decay, beta, scale=self.sizes.key_size**-0.5), values
        (step,) = gates
        decay = (-self.decay_rate_H.to(exact_dtype(step)).exp() * step).to(step.dtype)
        key, query = (self._served(x) for x in keys.unbind())
        return Steps(query, key, _Weighted.apply(values, step, None), decay, None, scale=1.0), values

    def with_skip(self, output_THV: Tensor, values_THV: Tensor) -> Tensor:
        """Return the output with each token's own weighted value."""
        if self.skip_H is None:
            return output_THV
        # Its gradient is summed over channels, then over tokens: one sum of all rounds six times as much.
        skip_TH = self.skip_H.to(state_dtype(output_THV.dtype)).expand(output_THV.shape[:2])
        weighted: Tensor = _Weighted.apply(values_THV, skip_TH, output_THV)
        return weighted

    def _served(self, x_TGK: Tensor) -> Tensor:
        """Return groups for the share's heads: a delta rule takes those that serve equally many, others one each."""
        per_group = self.sizes.num_heads // self.sizes.num_groups
        heads, groups = self.share
        each = len(heads) if len(groups) == 1 else per_group
        if len(heads) != each * len(groups):  # the share cuts a group
            return x_TGK.repeat_interleave(per_group, dim=1).narrow(
                1, heads.start - groups.start * per_group, len(heads)
            )
        return x_TGK if self.sizes.has_delta_rule or each == 1 else x_TGK.repeat_interleave(each, dim=1)


def channels_of(x: Tensor, sizes: LinearAttention, shares: Sequence[Share], dim: int = -1) -> list[Tensor]:
    """Return the channels of each share of a tensor whose `dim` has all convolved channels.

    The tensor is cut once, so that backward joins it once: of a slice each, it would add up tensors full of zeros.
    """
    keys, values = ("groups", sizes.num_groups, sizes.key_size), ("heads", sizes.num_heads, sizes.value_size)
    pieces: list[tuple[int, list[bool]]] = []  # (channels, which shares have them)
    for name, number, width in (keys, keys, values) if sizes.has_delta_rule else (values, keys, keys):
        wanted = [getattr(share, name) for share in shares]
        cuts = sorted({0, number, *(end for one in wanted for end in (one.start, one.stop))})
        pieces += [(width * (stop - start), [start in one for one in wanted]) for start, stop in pairwise(cuts)]
    parts = [*zip(x.split([width for width, _ in pieces], dim), (of for _, of in pieces), strict=True)]
    of_shares = ([part for part, of in parts if of[index]] for index in range(len(shares)))
    return [torch.cat(own or [x.narrow(dim, 0, 0)], dim) for own in of_shares]


class _Parted(torch.autograd.Function):
    """(x_TC, rows, key channels, whether these come first) -> keys [2, T, channels of each section], values [T, ...].

    One copy each, and one back: kernels want their inputs in one piece.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, rows: Tensor | None, num_keys: int, keys_first: bool) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.keys_first, ctx.shape = rows, keys_first, x_TC.shape
        keys, values = _keys_and_values(x_TC, num_keys, keys_first)
        if rows is None:
            return keys.contiguous(), values.contiguous()
        return keys.index_select(1, rows), values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.rows is None:
            sections = [*of_keys, of_values] if ctx.keys_first else [of_values, *of_keys]
            return torch.cat(sections, dim=1), None, None, None
        grad = of_values.new_zeros(ctx.shape)
        keys, values = _keys_and_values(grad, 2 * of_keys.shape[2], ctx.keys_first)
        keys.index_copy_(1, ctx.rows, of_keys)
        values.index_copy_(0, ctx.rows, of_values)
        return grad, None, None, None


def _keys_and_values(x_TC: Tensor, num_keys: int, keys_first: bool) -> tuple[Tensor, Tensor]:
    """Return views of both sections of keys, [2, T, channels], and of the values."""
    first = 0 if keys_first else x_TC.shape[1] - num_keys
    keys = x_TC[:, first : first + num_keys].unflatten(1, (2, -1)).transpose(0, 1)
    return keys, x_TC[:, num_keys:] if keys_first else x_TC[:, :first]


class _Weighted(torch.autograd.Function):
    """(x [T, H, V], weights [T, H] at least in float32, addend or None) -> x * weights + addend, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, addend: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        if addend is None:
            return torch.mul(x, weights[..., None], out=torch.empty_like(x))
        return torch.addcmul(addend, x, weights[..., None], out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        of_x = torch.mul(grad, weights[..., None], out=torch.empty_like(x))
        return of_x, (grad * x.to(weights.dtype)).sum(-1), grad if ctx.needs_input_grad[2] else None
