"""Linear attention by states: tokens stay, and what runs of tokens do to states is exchanged.

1. The convolution gets the tokens before each run from whoever has them (`layout.Halo`).
2. The summary (A, b) of each run is computed from its own tokens alone (`recurrence`).
3. Each lane gets the summaries of all runs for its share of the heads, composes them in the order of the samples, and
   gives back the state before each run. What a lane sends does not grow with the length of samples.
4. Runs are scanned from these states.

A lane that has all rows needs no summaries: it scans branches of samples after what they go on from.

Backward needs no gradient of A: that of the state before a run is A' times that of the state behind it, plus what the
run's own tokens say, so the same composition backwards, of gradients; A stays where it was composed.

States, summaries and their gradients travel in float32: those in bfloat16 cost three digits of the output.

Shapes: T tokens, H heads, K channels of a key, V of a value, C convolved channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, Share, keeps_by_hooks
from megatron.dynamic_cp.attention.linear.layout import LaneIndex, LaneRows, LinkedRuns, lane_rows
from megatron.dynamic_cp.attention.linear.recurrence import (
    LinearKernel,
    Runs,
    Steps,
    applied,
    followed,
    state_dtype,
    transposed,
)
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected, LaneMessages, all_to_all_messages
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams

Messages = Sequence[Sequence[Tensor]]
"""[lane] tensors for it, or of it; equally many for all."""


def exchanged(messages: Messages, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams) -> Messages:
    """Return the messages of all lanes to this one, given its messages to them; gradients go the other way."""
    flat = [tensor for message in messages for tensor in message]
    return _by_lane(_Exchange.apply(expected, params, *flat), len(messages))


class _Exchange(torch.autograd.Function):
    """Forward once, backward once."""

    @staticmethod
    def forward(
        ctx: Any, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        messages = _by_lane(flat, len(expected))
        ctx.sent, ctx.params = [[Expected(tensor.shape, tensor.dtype) for tensor in one] for one in messages], params
        return tuple(tensor for message in _between_lanes(messages, expected, params) for tensor in message)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received = _between_lanes(_by_lane(grads, len(ctx.sent)), ctx.sent, ctx.params)
        return None, None, *(tensor for message in received for tensor in message)


def _between_lanes(
    messages: Messages, expected: Sequence[Sequence[Expected]], params: DynamicPackedSeqParams
) -> Messages:
    """Return the messages of the bucket's lanes to this one; other lanes of the process group have none."""
    placed = params.placed
    if placed is None:
        return all_to_all_messages(messages, expected, params)
    num_lanes, own = LaneIndex.of(params)
    others = [lane for lane in range(num_lanes) if lane != own]
    sends = [(placed.first_in_group + lane, messages[lane]) for lane in others]
    receives = [(placed.first_in_group + lane, expected[lane]) for lane in others]
    came = dict(zip(others, LaneMessages(sends, receives, params).wait(), strict=True))
    return [came[lane] if lane in came else [*map(torch.clone, messages[lane])] for lane in range(num_lanes)]


def _by_lane(flat: Sequence[Tensor], num_lanes: int) -> list[list[Tensor]]:
    each = len(flat) // num_lanes
    return [list(flat[lane * each : (lane + 1) * each]) for lane in range(num_lanes)]


def by_states(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return the output of this lane's tokens, [T, heads, value size]."""
    return output_of_rows(layer, x_TC, gates, lane_rows(params, x_TC.device), params)


def output_of_rows(
    layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], rows: LaneRows, params: DynamicPackedSeqParams
) -> Tensor:
    """Return the output of a lane's tokens; states pass from run to run where one goes on from another."""
    x_TC = _convolved(layer, x_TC, rows, params)
    steps = layer.steps(x_TC, gates)
    if not rows.has_links:
        output, _ = _scanned(layer.kernel, steps, rows.runs)
    elif rows.index is None:
        output = _scanned_by_levels(layer.kernel, steps, rows)
    elif rows.alone is None:
        output = _scanned_in_chains(layer, steps, rows, params)
    else:
        linked, others = (steps.of_rows(part) for part in (rows.alone.linked_rows, rows.alone.rows))
        parts = _scanned_in_chains(layer, linked, rows, params), _scanned(layer.kernel, others, rows.alone.runs)[0]
        output = torch.cat(parts).index_select(0, rows.alone.in_order)
    return layer.with_skip(output, x_TC)


def _scanned(kernel: LinearKernel, steps: Steps, runs: Runs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output, and the state behind each run."""
    output, last = kernel.scan(steps, runs, state)
    assert output is not None
    return output, last


def _scanned_by_levels(kernel: LinearKernel, steps: Steps, rows: LaneRows) -> Tensor:
    """Return the output of a lane that has all rows: branches are scanned after what they go on from."""
    outputs, state = [], None
    for level in rows.levels:
        before = None if state is None else state.index_select(0, level.previous)
        of_level, state = _scanned(kernel, steps.of_rows(level.rows), level.runs, before)
        outputs.append(of_level)
    return torch.cat(outputs).index_select(0, rows.by_row)


def _scanned_in_chains(layer: LinearLayer, steps: Steps, rows: LaneRows, params: DynamicPackedSeqParams) -> Tensor:
    """Return the output of linked runs; lanes exchange the states before them."""
    chain, is_recorded = StateChain(layer.sizes, rows, params), torch.is_grad_enabled()
    output: Tensor = _ScanLinkedRuns.apply(layer.kernel, rows.linked, chain, steps, is_recorded, *steps.tensors)
    return output


def _convolved(layer: LinearLayer, x_TC: Tensor, rows: LaneRows, params: DynamicPackedSeqParams) -> Tensor:
    """Return a lane's rows behind the convolution, which sees those before each run."""
    num_before = layer.sizes.kernel_size - 1
    if not (num_before and rows.has_links):
        return layer.convolved(x_TC, rows.runs)
    halo = rows.halo(num_before)
    parts = [x_TC]
    if rows.index is not None:
        messages = [[x_TC.index_select(0, sent)] for sent in halo.sent]
        expected = [[Expected((number, x_TC.shape[1]), x_TC.dtype)] for number in halo.num_received]
        parts += [part for (part,) in exchanged(messages, expected, params)]
    extended = torch.cat(parts).index_select(0, halo.extended)
    return layer.convolved(extended, halo.runs).index_select(0, halo.own)


class StateChain:
    """States before linked runs, and gradients of those behind them, composed by shares of heads."""

    def __init__(self, sizes: LinearAttention, rows: LaneRows, params: DynamicPackedSeqParams) -> None:
        self._links, self._params, self._num_runs = rows.links, params, len(rows.linked.lengths)
        num_lanes, self._lane = LaneIndex.of(params)
        shares = [Share.of_lane(sizes, lane, num_lanes).heads for lane in range(num_lanes)]
        self._heads = [slice(heads.start, heads.stop) for heads in shares]

    def states(self, transitions: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before each of this lane's linked runs, [runs, heads, key, value], and what backward needs.

        Args:
            transitions, own: A [runs, heads, ...] and b [runs, heads, key, value] of them.
        """
        of_all, added = self._scattered(transitions, own)
        behind = composed(of_all, added, self._links)
        before = torch.zeros_like(behind)
        before.index_copy_(0, self._links.following, behind.index_select(0, self._links.previous))
        return self._gathered(before), of_all

    def gradients(self, grad: Tensor, of_all: Tensor) -> Tensor:
        """Return the gradient of the state behind each of them.

        Args:
            grad: of the state before each of them, from its own tokens alone.
            of_all: transitions of all runs, of this lane's share of the heads, as `states` returned them.
        """
        (own,) = self._scattered(grad)
        before = composed_back(of_all, own, self._links)
        behind = torch.zeros_like(before)
        behind.index_add_(0, self._links.previous, before.index_select(0, self._links.following))
        return self._gathered(behind)

    def _scattered(self, *tensors: Tensor) -> list[Tensor]:
        """Return [runs of all lanes, share of the heads, ...] of [runs of this lane, heads, ...]."""
        messages = [[tensor[:, heads] for tensor in tensors] for heads in self._heads]
        of_own = messages[self._lane]
        expected = [[Expected((count, *one.shape[1:]), one.dtype) for one in of_own] for count in self._links.counts]
        received = exchanged(messages, expected, self._params)
        return [torch.cat(parts).index_select(0, self._links.in_order) for parts in zip(*received, strict=True)]

    def _gathered(self, of_links: Tensor) -> Tensor:
        """Return [runs of this lane, heads, ...] of [runs of all lanes, share of the heads, ...]."""
        by_lane = of_links.index_select(0, self._links.by_lane)
        messages = [[part] for part in by_lane.split(self._links.counts)]
        sizes, dtype = of_links.shape[2:], of_links.dtype
        expected = [[Expected((self._num_runs, heads.stop - heads.start, *sizes), dtype)] for heads in self._heads]
        return torch.cat([part for (part,) in exchanged(messages, expected, self._params)], dim=1)


def composed(transitions: Tensor, own: Tensor, links: LinkedRuns) -> Tensor:
    """Return the state behind each linked run; those that go on from none begin with zeros.

    First runs with those right before them, then pairs with the pairs before them, and so on: launches are as many as
    the logarithm of the longest chain.

    Args:
        transitions, own: A and b of each, [linked, heads, ...].
    """
    for later, earlier in links.jumps:
        own = own.index_add(0, later, applied(transitions.index_select(0, later), own.index_select(0, earlier)))
        transitions = _longer(transitions, later, earlier)
    return own


def composed_back(transitions: Tensor, grad: Tensor, links: LinkedRuns) -> Tensor:
    """Return the gradient of the state before each linked run: its own, and those of runs that go on from it."""
    previous = torch.zeros(len(grad), dtype=torch.int64, device=grad.device)
    previous.index_copy_(0, links.following, links.previous)
    for later, earlier in links.jumps:
        way = transitions.index_select(0, previous.index_select(0, later))
        grad = grad.index_add(0, earlier, applied(transposed(way), grad.index_select(0, later)))
        transitions = _longer(transitions, later, earlier)
    return grad


def _longer(transitions: Tensor, later: Tensor, earlier: Tensor) -> Tensor:
    """Return the transitions of chains twice as long, where enough runs come before."""
    both = followed(transitions.index_select(0, later), transitions.index_select(0, earlier))
    return transitions.index_copy(0, later, both)


def summaries(kernel: LinearKernel, steps: Steps, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return (A, b) of each run: [runs, heads, key, key] or [runs, heads], and [runs, heads, key, value]."""
    if steps.beta_TH is None:
        _, own = kernel.scan(steps, runs, None, only_state=True)
        return _sums(steps.decay_TH, runs).exp(), own
    num_tokens, num_heads, value_size = steps.v_THV.shape
    key_size = steps.k_THK.shape[2]
    nothing = steps.v_THV.new_zeros((num_tokens, num_heads, key_size))
    start = torch.zeros(
        (len(runs.lengths), num_heads, key_size, value_size + key_size),
        dtype=state_dtype(steps.v_THV.dtype),
        device=nothing.device,
    )
    start[..., value_size:] = torch.eye(key_size, dtype=start.dtype, device=start.device)
    wide = steps._replace(v_THV=torch.cat((steps.v_THV, nothing), dim=-1))
    _, last = kernel.scan(wide, runs, start, only_state=True)
    return last[..., value_size:].contiguous(), last[..., :value_size].contiguous()


def _sums(decay_TH: Tensor, runs: Runs) -> Tensor:
    """Return the sum of each run, [runs, heads]; sums of all before it are taken off, so in float64."""
    total = torch.nn.functional.pad(decay_TH.to(torch.float64).cumsum(0), (0, 0, 1, 0))
    return total.index_select(0, runs.cu_seqlens).diff(dim=0).to(decay_TH.dtype)


class _ScanLinkedRuns(torch.autograd.Function):
    """Scans from the states before runs; backward exchanges gradients of states where forward exchanged states.

    Backward walks the graph of the scan twice. Where saved tensors go through hooks, a checkpoint would repeat its
    whole region each time: there runs are scanned once more instead, and only tensors of this function are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: LinearKernel,
        runs: Runs,
        chain: StateChain,
        steps: Steps,
        is_recorded: bool,
        *tensors: Tensor,
    ) -> Tensor:
        state, of_all = chain.states(*summaries(kernel, steps, runs))
        ctx.kernel, ctx.runs, ctx.chain, ctx.scale, ctx.scanned = kernel, runs, chain, steps.scale, None
        if is_recorded and not keeps_by_hooks():
            ctx.scanned = _Scan.of(kernel, runs, steps, state)
            ctx.save_for_backward(of_all)
            return ctx.scanned.output.detach()
        ctx.save_for_backward(of_all, state, *tensors)
        return _scanned(kernel, steps, runs, state)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_all, *kept = ctx.saved_tensors
        scan, ctx.scanned = ctx.scanned, None
        if scan is None:
            state, *tensors = kept
            scan = _Scan.of(ctx.kernel, ctx.runs, Steps.of(tensors, ctx.scale), state)
        (of_state,) = torch.autograd.grad(scan.output, scan.state, grad, retain_graph=True)
        behind = ctx.chain.gradients(of_state, of_all)
        grads = torch.autograd.grad((scan.output, scan.last), scan.tensors, (grad, behind), allow_unused=True)
        return None, None, None, None, None, *grads


class _Scan(NamedTuple):
    """A scan of runs with its graph: tensors of the steps, states before runs, the output, states behind runs."""

    tensors: list[Tensor]
    state: Tensor
    output: Tensor
    last: Tensor

    @classmethod
    def of(cls, kernel: LinearKernel, runs: Runs, steps: Steps, state: Tensor) -> _Scan:
        """Scan `steps`."""
        steps = steps.with_tensors([tensor.detach().requires_grad_() for tensor in steps.tensors])
        state = state.detach().requires_grad_()
        with torch.enable_grad():
            return cls(steps.tensors, state, *_scanned(kernel, steps, runs, state))
