"""Linear attention as products of matrices, in torch: blocks of tokens at once, of all runs and heads together.

Inside a block of L tokens nothing is sequential. The output, and what the block does to the state before it (A
and b), needs the decayed products of its keys; with the delta rule also the solution of a triangular system of L
equations, which says what is new in the values (the WY form). States go from block to block: a step does the n-th of
all runs.

Shapes: T tokens, B blocks, L tokens of a block, H heads, K channels of a key, V of a value, C of all that is convolved.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3; Dao and Gu, Mamba-2 (arXiv 2405.21060),
section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.dynamic_cp.attention.linear.recurrence import (
    NORM_EPSILON,
    LinearKernel,
    Runs,
    Steps,
    applied,
    state_dtype,
)
from megatron.dynamic_cp.attention.packs import exact_dtype, to_device

BLOCK_TOKENS = 64


class RunBlocks(NamedTuple):
    """Runs cut into blocks of equally many rows, the last of each filled up; B blocks of L rows.

    The blocks stand step after step; within a step, those of the longest runs come first.

    Attributes:
        rows: [B, L] which row is where, num_rows where none is.
        places: [T] where each row is among the B * L.
        counts: [step] blocks, never more than in the step before.
        order: [run] its place among all, longest first.
    """

    rows: Tensor
    places: Tensor
    counts: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, runs: Runs) -> RunBlocks:
        """Return the blocks of `runs`, made by the first layer that asks."""
        return runs.once("blocks", lambda: cls._cut(runs.lengths, runs.cu_seqlens.device))

    @classmethod
    def _cut(cls, run_lengths: tuple[int, ...], device: torch.device) -> RunBlocks:
        lengths = np.array(run_lengths)
        size = min(BLOCK_TOKENS, int(lengths.max()))
        starts = np.cumsum(lengths) - lengths
        longest = np.argsort(-lengths, kind="stable")
        rows = []
        counts = []
        for begin in range(0, int(lengths.max()), size):
            active = longest[lengths[longest] > begin]
            counts.append(len(active))
            within = begin + np.arange(size)
            rows.append(np.where(within < lengths[active, None], starts[active, None] + within, lengths.sum()))
        every = np.concatenate(rows)
        places = np.argsort(every.reshape(-1), kind="stable")[: lengths.sum()]
        order = np.argsort(longest)
        return cls(to_device(every, device), to_device(places, device), tuple(counts), to_device(order, device))

    def cut(self, x_T: Tensor) -> Tensor:
        """Return float64 [B, heads, L, ...] of [T, heads, ...], zeros where there is no row."""
        return torch.cat((x_T, x_T.new_zeros((1, *x_T.shape[1:])))).double()[self.rows].transpose(1, 2)

    def joined(self, x_BHL: Tensor) -> Tensor:
        """Return [T, heads, ...] of [B, heads, L, ...]."""
        return x_BHL.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class _Products(NamedTuple):
    """What blocks need of their tokens before states are known; [B, heads, ...].

    Attributes:
        values: what tokens add, with what the state before the block has already.
        recalled: keys by which the latter is read, and taken off; None without a delta rule.
        transitions, own: A and b of each block (`recurrence`).
        q, k: queries, scaled, and keys.
        between: [L, L] what is left at one token of what another one added.
        since_start: what is left at each token of the state before the block.
    """

    values: Tensor
    recalled: Tensor | None
    transitions: Tensor
    own: Tensor
    q: Tensor | None
    k: Tensor
    between: Tensor
    since_start: Tensor

    @classmethod
    def of(cls, steps: Steps, blocks: RunBlocks, *, only_state: bool) -> _Products:
        """Return them for all blocks at once."""
        k, values, decay = (blocks.cut(x) for x in (steps.k_THK, steps.v_THV, steps.decay_TH))
        total = decay.cumsum(-1)
        length = total.shape[-1]
        unseen = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(unseen, -torch.inf).exp()
        since_start = total.exp()[..., None]
        kept = (k * between[..., -1, :, None]).transpose(-1, -2)
        transitions, recalled = since_start[..., -1:, :], None
        if steps.beta_TH is not None:
            beta = blocks.cut(steps.beta_TH)[..., None]
            beta_k = beta * k
            system = beta_k @ k.transpose(-1, -2) * between  # the solver takes its diagonal for ones
            known = torch.cat((beta * values, beta_k * since_start), dim=-1)
            solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
            values, recalled = solved.split((values.shape[-1], k.shape[-1]), dim=-1)
            same = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
            transitions = transitions * same - kept @ recalled
        q = None if only_state else blocks.cut(steps.q_THK) * steps.scale
        return cls(values, recalled, transitions, kept @ values, q, k, between, since_start)

    def output(self, states: Tensor) -> Tensor:
        """Return the output, given the state before each block."""
        assert self.q is not None
        values = self.values if self.recalled is None else self.values - self.recalled @ states
        return (self.q * self.since_start) @ states + (self.q @ self.k.transpose(-1, -2) * self.between) @ values


def scan(steps: Steps, runs: Runs, state: Tensor | None, *, only_state: bool = False) -> tuple[Tensor | None, Tensor]:
    """See `recurrence.Scan`. In float64: gradients of decays are small differences of large sums."""
    blocks = RunBlocks.of(runs)
    products = _Products.of(steps.by_head(), blocks, only_state=only_state)
    if state is None:
        current = products.own.new_zeros((len(runs.lengths), *products.own.shape[1:]))
    else:
        current = torch.empty_like(state).index_copy(0, blocks.order, state).double()
    before, ended = [], []
    of_steps = zip(products.transitions.split(blocks.counts), products.own.split(blocks.counts), strict=True)
    for transition, own in of_steps:
        ended.append(current[len(own) :])
        before.append(current[: len(own)])
        current = applied(transition, before[-1]) + own
    last = torch.cat((current, *reversed(ended))).index_select(0, blocks.order).to(state_dtype(steps.v_THV.dtype))
    if only_state:
        return None, last
    return blocks.joined(products.output(torch.cat(before))).to(steps.v_THV.dtype), last


def convolve(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor:
    """See `recurrence.LinearKernel`: a sum of shifted rows, without those of other runs; in float64, as `scan`."""
    positions = runs.once(
        "positions", lambda: to_device(np.concatenate([*map(np.arange, runs.lengths)]), runs.cu_seqlens.device)
    )
    num_before = weight_CK.shape[1] - 1
    x, weight = x_TC.double(), weight_CK.double()
    total = x * weight[:, num_before]
    for back in range(1, min(num_before, len(x) - 1) + 1):
        shifted = functional.pad(x[:-back], (0, 0, back, 0))
        total = total + shifted * (positions >= back)[:, None] * weight[:, num_before - back]
    if bias_C is not None:
        total = total + bias_C.double()
    return functional.silu(total).to(x_TC.dtype)


def computed_again(compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return `compute(*given)`; backward computes it again from `given`, so nothing in it may be random.

    Without this, autograd keeps a copy of every intermediate tensor, in float32 or wider.
    """
    output: Tensor = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    return output


def normalize(x: Tensor) -> Tensor:
    """See `recurrence.LinearKernel`."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPSILON)).to(x.dtype)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, width: int, gates_first: bool) -> Tensor:
    """See `recurrence.LinearKernel`. Backward computes it again; see `computed_again`."""

    def compute(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        gate = functional.silu(z.to(exact_dtype(x)))
        groups = (x * gate if gates_first else x.to(gate.dtype)).unflatten(-1, (-1, width))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)
        normed = normed.flatten(1) * weight.to(gate.dtype)
        return (normed if gates_first else normed * gate).to(x.dtype)

    return computed_again(compute, x, z, weight)


PORTABLE = LinearKernel(name="portable", convolve=convolve, normalize=normalize, scan=scan, gated_norm=gated_norm)
