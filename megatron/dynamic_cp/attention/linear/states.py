"""Linear attention by states: tokens stay, and what runs of tokens do to states is exchanged.

1. The convolution gets the tokens before each run from whoever has them (`layout.Halo`).
2. The summary (A, b) of each run is computed from its own tokens alone (`recurrence`).
3. Each lane gets the summaries of all runs for its share of the heads, composes them in the order of the samples, and
   gives back the state before each run. What a lane sends does not grow with the length of samples.
4. Runs are scanned from these states.

Backward needs no gradient of A: that of the state before a run is A' times that of the state behind it, plus what the
run's own tokens say, so the same composition backwards, of gradients; A stays where it was composed.

States, summaries and their gradients travel in float32: those in bfloat16 cost three digits of the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.dynamic_cp.attention.linear.exchange import exchanged
from megatron.dynamic_cp.attention.linear.kernels.kernel import LinearKernel
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, Share
from megatron.dynamic_cp.attention.linear.layout import LaneRows, Links, lane_rows
from megatron.dynamic_cp.attention.linear.recurrence import Steps, applied, followed, state_dtype, transposed
from megatron.dynamic_cp.attention.linear.runs import Runs
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


def by_states(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return what this lane's tokens find, [T, heads, value size]."""
    return found_in_rows(layer, x_TC, gates, lane_rows(params, x_TC.device))


def found_in_rows(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], rows: LaneRows) -> Tensor:
    """Return what the tokens of a lane find; states pass from run to run where one goes on from another."""
    x_TC = _convolved(layer, x_TC, rows)
    steps = layer.steps(x_TC, gates)
    found: Tensor | None
    if rows.has_links:
        chain = StateChain(layer, rows)
        found = _ScanLinkedRuns.apply(layer.kernel, rows, chain, steps, torch.is_grad_enabled(), *steps.tensors)
    else:
        found, _ = layer.kernel.scan(steps, rows.runs, None)
    assert found is not None
    return layer.finished(found, x_TC)


def _convolved(layer: LinearLayer, x_TC: Tensor, rows: LaneRows) -> Tensor:
    """Return a lane's rows behind the convolution, which sees those before each run."""
    num_before = layer.sizes.kernel_size - 1
    if not (num_before and rows.has_links):
        return layer.convolved(x_TC, rows.runs)
    halo = rows.halo(num_before)
    parts = [x_TC]
    if rows.lanes is not None:
        messages = [[x_TC.index_select(0, sent)] for sent in halo.sent]
        expected = [[Expected((number, x_TC.shape[1]), x_TC.dtype)] for number in halo.num_received]
        parts += [part for (part,) in exchanged(messages, expected, rows.lanes)]
    extended = torch.cat(parts).index_select(0, halo.extended)
    return layer.convolved(extended, halo.runs).index_select(0, halo.own)


class StateChain:
    """States before linked runs, and gradients of those behind them, composed by shares of heads.

    Forward comes before backward; the transitions A of this lane's share stay in between.
    """

    def __init__(self, layer: LinearLayer, rows: LaneRows) -> None:
        self._links, self._lanes, self._num_runs = rows.links, rows.lanes, len(rows.runs.lengths)
        self._heads = [slice(None)]
        if rows.lanes is not None:
            shares = [Share.of_lane(layer.sizes, lane, rows.lanes.number).heads for lane in range(rows.lanes.number)]
            self._heads = [slice(heads.start, heads.stop) for heads in shares]
        self._transitions: Tensor | None = None

    def states(self, transitions: Tensor, own: Tensor) -> Tensor:
        """Return the state before each of this lane's runs, [runs, heads, key, value].

        Args:
            transitions, own: A [linked, heads, ...] and b [linked, heads, key, value] of its linked runs.
        """
        self._transitions, added = self._scattered(transitions, own)
        behind = composed(self._transitions, added, self._links)
        before = torch.zeros_like(behind)
        before.index_copy_(0, self._links.following, behind.index_select(0, self._links.previous))
        return self._gathered(before)

    def gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of the state behind each run; `grad`: what each run's tokens say of that before."""
        assert self._transitions is not None, "forward comes first"
        (said,) = self._scattered(grad.index_select(0, self._links.own))
        before = composed_back(self._transitions, said, self._links)
        behind = torch.zeros_like(before)
        behind.index_add_(0, self._links.previous, before.index_select(0, self._links.following))
        return self._gathered(behind)

    def _scattered(self, *tensors: Tensor) -> list[Tensor]:
        """Return [linked runs of all lanes, share of the heads, ...] of [linked runs of this lane, heads, ...]."""
        if self._lanes is None:
            return [tensor.index_select(0, self._links.in_order) for tensor in tensors]
        messages = [[tensor[:, heads] for tensor in tensors] for heads in self._heads]
        of_own = messages[self._lanes.own]
        expected = [[Expected((count, *one.shape[1:]), one.dtype) for one in of_own] for count in self._links.counts]
        received = exchanged(messages, expected, self._lanes)
        return [torch.cat(parts).index_select(0, self._links.in_order) for parts in zip(*received, strict=True)]

    def _gathered(self, of_links: Tensor) -> Tensor:
        """Return [runs of this lane, heads, ...] of [linked runs of all lanes, share of the heads, ...]."""
        by_lane = of_links.index_select(0, self._links.by_lane)
        if self._lanes is not None:
            messages = [[part] for part in by_lane.split(self._links.counts)]
            number, sizes = len(self._links.own), of_links.shape[2:]
            expected = [[Expected((number, heads.stop - heads.start, *sizes), of_links.dtype)] for heads in self._heads]
            by_lane = torch.cat([part for (part,) in exchanged(messages, expected, self._lanes)], dim=1)
        if len(by_lane) == self._num_runs:
            return by_lane
        return by_lane.new_zeros((self._num_runs, *by_lane.shape[1:])).index_copy_(0, self._links.own, by_lane)


def composed(transitions: Tensor, own: Tensor, links: Links) -> Tensor:
    """Return the state behind each linked run; those that go on from none begin with zeros.

    Runs and those right before them, then pairs and those before them: a launch for each step would wait for the one
    before, and steps are as many as the logarithm of the longest way.

    Args:
        transitions, own: A and b of each, [linked, heads, ...].
    """
    for later, earlier in links.jumps:
        own = own.index_add(0, later, applied(transitions.index_select(0, later), own.index_select(0, earlier)))
        transitions = _longer(transitions, later, earlier)
    return own


def composed_back(transitions: Tensor, grad: Tensor, links: Links) -> Tensor:
    """Return the gradient of the state before each linked run: what it says, and what those say that go on from it."""
    previous = torch.zeros(len(grad), dtype=torch.int64, device=grad.device)
    previous.index_copy_(0, links.following, links.previous)
    for later, earlier in links.jumps:
        way = transitions.index_select(0, previous.index_select(0, later))
        grad = grad.index_add(0, earlier, applied(transposed(way), grad.index_select(0, later)))
        transitions = _longer(transitions, later, earlier)
    return grad


def _longer(transitions: Tensor, later: Tensor, earlier: Tensor) -> Tensor:
    """Return the transitions of twice as many runs where there are as many before them."""
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


def _linked_summaries(kernel: LinearKernel, steps: Steps, rows: LaneRows) -> tuple[Tensor, Tensor]:
    """Return the summaries of those runs of a lane that are linked."""
    if rows.linked_rows is None:
        return summaries(kernel, steps, rows.runs)
    if not rows.linked_runs.lengths:
        _, num_heads, value_size = steps.v_THV.shape
        key_size = steps.k_THK.shape[2]
        sizes = (0, num_heads) if steps.beta_TH is None else (0, num_heads, key_size, key_size)
        return steps.decay_TH.new_zeros(sizes), steps.decay_TH.new_zeros((0, num_heads, key_size, value_size))
    linked = steps.with_tensors([tensor.index_select(0, rows.linked_rows) for tensor in steps.tensors])
    return summaries(kernel, linked, rows.linked_runs)


class _ScanLinkedRuns(torch.autograd.Function):
    """Scans from the states before runs; backward exchanges gradients of states where forward exchanged states."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: LinearKernel,
        rows: LaneRows,
        chain: StateChain,
        steps: Steps,
        is_recorded: bool,
        *tensors: Tensor,
    ) -> Tensor:
        steps = steps.with_tensors([tensor.detach().requires_grad_(is_recorded) for tensor in tensors])
        state = chain.states(*_linked_summaries(kernel, steps, rows)).requires_grad_(is_recorded)
        with torch.set_grad_enabled(is_recorded):
            found, last = kernel.scan(steps, rows.runs, state)
        assert found is not None
        ctx.chain, ctx.scanned = chain, (steps.tensors, state, found, last)
        return found.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, state, found, last = ctx.scanned
        ctx.scanned = None
        (of_state,) = torch.autograd.grad(found, state, grad, retain_graph=True)
        grads = torch.autograd.grad((found, last), tensors, (grad, ctx.chain.gradients(of_state)), allow_unused=True)
        return None, None, None, None, None, *grads
