"""One layer of linear attention, or a share of its heads: how it convolves, and what its tokens do to states.

Channels that are convolved are sections, each of all heads or of all groups (a gated delta net's key heads, Mamba-2's B
and C), one after the other: q k v, or x B C. A share of the heads has of each section what these heads need.

Shapes: T tokens, H heads, G groups of heads, K channels of a key (weight: taps), V of a value, C convolved channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.recurrence import LinearKernel, Runs, Steps, state_dtype

NORM_EPSILON = 1e-6


def computed_again(compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return `compute(*given)`, which backward computes again of `given`; nothing in it is random.

    Autograd would keep float32 copies of each step.
    """
    output: Tensor = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    return output


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
        """Return the share of a lane."""
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
        """Those that there are."""
        parameters = (self.weight_CK, self.bias_C, self.decay_rate_H, self.skip_H)
        return [parameter for parameter in parameters if parameter is not None]

    def of_share(self, share: Share) -> LinearLayer:
        """Return a share of a whole layer."""
        heads = slice(share.heads.start, share.heads.stop)
        return replace(
            self,
            share=share,
            weight_CK=channels_of(self.weight_CK, self.sizes, share, dim=0),
            bias_C=None if self.bias_C is None else channels_of(self.bias_C, self.sizes, share),
            decay_rate_H=None if self.decay_rate_H is None else self.decay_rate_H[heads],
            skip_H=None if self.skip_H is None else self.skip_H[heads],
        )

    def convolved(self, x_TC: Tensor, runs: Runs) -> Tensor:
        """Return the share's channels behind the convolution of runs."""
        return self.kernel.convolve(x_TC, self.weight_CK, self.bias_C, runs)

    def steps(self, x_TC: Tensor, gates: list[Tensor]) -> Steps:
        """Return what tokens do to states, from convolved channels and [T, heads] gates: beta and decay, or dt."""
        sections = _sections(self.sizes)
        widths = [width * len(self.share.groups if of_groups else self.share.heads) for of_groups, width in sections]
        split = zip(x_TC.split(widths, dim=1), sections, strict=True)
        parts = [part.unflatten(1, (-1, width)) for part, (_, width) in split]
        if self.decay_rate_H is None:
            q, k, v = parts
            beta, decay = gates
            q, k = (self._grouped(_Normalized.apply(x)) for x in (q, k))
            return Steps(q, k, v.contiguous(), decay, beta, scale=self.sizes.key_size**-0.5)
        x, key, query = parts
        (step,) = gates
        decay = -self.decay_rate_H.to(step.dtype).exp() * step
        value = computed_again(lambda x, step: (x.to(step.dtype) * step[..., None]).to(x.dtype), x, step)
        return Steps(self._grouped(query), self._grouped(key), value, decay, None, scale=1.0)

    def with_skip(self, output_THV: Tensor, x_TC: Tensor) -> Tensor:
        """Return the output with each token's own weighted value; `x_TC`: the convolved channels."""
        if self.skip_H is None:
            return output_THV
        dtype = state_dtype(output_THV.dtype)
        own_THV = x_TC[:, : output_THV[0].numel()].view_as(output_THV)

        def skipped(skip_H: Tensor, own: Tensor) -> Tensor:
            # Its gradient is summed over channels, then over tokens: one sum of all rounds six times as much.
            return skip_H.to(dtype).expand(own.shape[:2])[..., None] * own.to(dtype)

        return (output_THV.to(dtype) + computed_again(skipped, self.skip_H, own_THV)).to(output_THV.dtype)

    def _grouped(self, x_TGK: Tensor) -> Tensor:
        """Return groups that serve equally many heads each; where a share cuts a group, a copy for each head."""
        per_group = self.sizes.num_heads // self.sizes.num_groups
        heads, groups = self.share
        first = heads.start - groups.start * per_group
        if len(groups) == 1 or (first == 0 and len(heads) == len(groups) * per_group):
            return x_TGK
        return x_TGK.repeat_interleave(per_group, dim=1).narrow(1, first, len(heads))


def channels_of(x: Tensor, sizes: LinearAttention, share: Share, dim: int = -1) -> Tensor:
    """Return a share's channels of a tensor whose `dim` has all convolved channels."""
    parts = []
    first = 0
    for of_groups, width in _sections(sizes):
        wanted = share.groups if of_groups else share.heads
        parts.append(x.narrow(dim, first + wanted.start * width, len(wanted) * width))
        first += (sizes.num_groups if of_groups else sizes.num_heads) * width
    return torch.cat(parts, dim=dim)


def _sections(sizes: LinearAttention) -> tuple[tuple[bool, int], ...]:
    """Return (whether it is of groups, width of one) of each section."""
    keys, values = (True, sizes.key_size), (False, sizes.value_size)
    return (keys, keys, values) if sizes.has_delta_rule else (values, keys, keys)


class _Normalized(torch.autograd.Function):
    """Vectors of length 1. Backward needs the output, which the kernel saves, too, and one number for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.to(state_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPSILON)
        normalized = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normalized, scale)
        return normalized

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        normalized, scale = ctx.saved_tensors
        wide, wide_grad = normalized.to(scale.dtype), grad.to(scale.dtype)
        along = (wide * wide_grad).sum(-1, keepdim=True)
        return (scale * (wide_grad - wide * along)).to(grad.dtype)
