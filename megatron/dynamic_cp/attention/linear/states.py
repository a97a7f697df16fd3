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
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, keeps_by_hooks
from megatron.dynamic_cp.attention.linear.layout import Halo, LaneIndex, LaneRows, LinkedRuns, lane_rows
from megatron.dynamic_cp.attention.linear.recurrence import LinearKernel, Runs, Steps, applied, state_dtype, transposed
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected, LaneMessages, all_to_all_messages
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

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
    steps, values = layer.steps(*_convolved(layer, x_TC, rows, params), gates)
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
    return layer.with_skip(output, values)


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


def _convolved(
    layer: LinearLayer, x_TC: Tensor, rows: LaneRows, params: DynamicPackedSeqParams
) -> tuple[Tensor, Tensor | None]:
    """Return rows behind the convolution, which sees those before each run, and which of them the lane's are."""
    num_before = layer.sizes.kernel_size - 1
    if not (num_before and rows.has_links):
        return layer.convolved(x_TC, rows.runs), None
    halo = rows.halo(num_before)
    extended = _Extended.apply(x_TC, halo, None if rows.index is None else params)
    return layer.convolved(extended, halo.runs), halo.own


class _Extended(torch.autograd.Function):
    """(x_TC, halo, parameters of the lanes or None) -> each run behind the rows before it, which other lanes send."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, halo: Halo, params: DynamicPackedSeqParams | None) -> Tensor:
        ctx.halo, ctx.params = halo, params
        extended = x_TC.index_select(0, halo.extended)
        if params is not None:
            sent = x_TC.index_select(0, halo.sent)
            shapes = [(number, *sent.shape[1:]) for number in halo.num_received]
            received = _of_lanes(sent, halo.num_sent, shapes, params)
            extended.index_copy_(0, halo.arrived, received)
        return extended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        halo: Halo = ctx.halo
        of_rows = grad.index_select(0, halo.own)
        of_rows.index_add_(0, halo.copied_rows, grad.index_select(0, halo.copied))
        if ctx.params is not None:
            arrived = grad.index_select(0, halo.arrived)
            shapes = [(number, *arrived.shape[1:]) for number in halo.num_sent]
            returned = _of_lanes(arrived, halo.num_received, shapes, ctx.params)
            of_rows.index_add_(0, halo.sent, returned)
        return of_rows, None, None


def _of_lanes(
    x: Tensor, num_sent: Sequence[int], shapes: Sequence[tuple[int, ...]], params: DynamicPackedSeqParams, dim: int = 0
) -> Tensor:
    """Return what lanes send to this one, joined along `dim`, given its rows for each of them, lane after lane."""
    messages = [[part] for part in x.split([*num_sent])]
    expected = [[Expected(shape, x.dtype)] for shape in shapes]
    return torch.cat([part for (part,) in _between_lanes(messages, expected, params)], dim)


class StateChain:
    """States before linked runs, and gradients of those behind them, composed by shares of heads."""

    def __init__(self, sizes: LinearAttention, rows: LaneRows, params: DynamicPackedSeqParams) -> None:
        self._links, self._params, self._num_runs = rows.links, params, len(rows.linked.lengths)
        num_lanes, self._lane = LaneIndex.of(params)
        self._num_heads = [len(sizes.heads_of_lane(lane, num_lanes)) for lane in range(num_lanes)]

    def states(self, summary: Summary) -> tuple[Tensor, Tensor]:
        """Return the state before each of this lane's linked runs, as the summary has b, and what backward needs: the
        transitions of all runs, of this lane's share of the heads."""
        of_all = Summary(self._scattered(summary.together), summary.num_own)
        transitions = of_all.transitions.contiguous()
        behind = composed(of_all, self._links)
        before = torch.zeros_like(behind)
        before.index_copy_(1, self._links.following, behind.index_select(1, self._links.previous))
        return self._gathered(before), transitions

    def gradients(self, grad: Tensor, of_all: Tensor) -> Tensor:
        """Return the gradient of the state behind each of them, given that of the state before each, from its own
        tokens alone, and what `states` returned for backward."""
        own = self._scattered(grad.flatten(2) if of_all.ndim == 3 else grad)
        before = composed_back(of_all, own, self._links)
        behind = torch.zeros_like(before)
        behind.index_add_(1, self._links.previous, before.index_select(1, self._links.following))
        return self._gathered(behind).view_as(grad)

    def _scattered(self, x: Tensor) -> Tensor:
        """Return [share of the heads, runs of all lanes, ...] of [runs of this lane, heads, ...]."""
        own = self._num_heads[self._lane]
        shapes = [(own, count, *x.shape[2:]) for count in self._links.counts]
        joined = _of_lanes(x.transpose(0, 1).contiguous(), self._num_heads, shapes, self._params, 1)
        return joined.index_select(1, self._links.in_order)

    def _gathered(self, of_links: Tensor) -> Tensor:
        """Return [runs of this lane, heads, ...] of [share of the heads, runs of all lanes, ...]."""
        by_lane = of_links.transpose(0, 1).index_select(0, self._links.by_lane)
        shapes = [(self._num_runs, heads, *of_links.shape[2:]) for heads in self._num_heads]
        return _of_lanes(by_lane, self._links.counts, shapes, self._params, 1)


class Summary(NamedTuple):
    """What runs do to states: `together` is [b | A], so that both are sent and composed at once. With a delta rule it
    is [..., heads, key size, value size + key size], else [..., heads, key size * value size + 1]; `num_own` are of b.
    """

    together: Tensor
    num_own: int

    @property
    def own(self) -> Tensor:
        """Return b."""
        return self.together[..., : self.num_own]

    @property
    def transitions(self) -> Tensor:
        """Return A."""
        return self.together[..., self.num_own :]


def composed(summary: Summary, links: LinkedRuns) -> Tensor:
    """Return the state behind each linked run, given their summary [heads, linked, ...], which is overwritten; those
    that go on from none begin with zeros.

    First runs with those right before them, then pairs with the pairs before them, and so on: launches are as many as
    the logarithm of the longest chain.
    """
    together = summary.together
    for later, earlier, _ in links.jumps:
        last = Summary(together.index_select(1, later), summary.num_own)
        both = applied(last.transitions, together.index_select(1, earlier))
        both[..., : summary.num_own].add_(last.own)
        together.index_copy_(1, later, both)
    return summary.own


def composed_back(transitions: Tensor, grad: Tensor, links: LinkedRuns) -> Tensor:
    """Return the gradient of the state before each linked run: its own, and those of runs that go on from it. Both are
    [heads, linked, ...]; the gradient is overwritten."""
    for number, (later, earlier, before) in enumerate(links.jumps, start=1):
        way = transposed(transitions.index_select(1, before))
        grad.index_add_(1, earlier, applied(way, grad.index_select(1, later)))
        if number < len(links.jumps):  # transitions of chains twice as long
            both = applied(transitions.index_select(1, later), transitions.index_select(1, earlier))
            transitions = transitions.index_copy(1, later, both)
    return grad


def summaries(kernel: LinearKernel, steps: Steps, runs: Runs) -> Summary:
    """Return those of runs, [runs, heads, ...]."""
    (num_tokens, num_heads, value_size), key_size = steps.v_THV.shape, steps.k_THK.shape[2]
    if steps.beta_TH is None:
        _, own = kernel.scan(steps, runs, None, only_state=True)
        transitions = _sums(steps.decay_TH, runs).exp()[..., None]
        return Summary(torch.cat((own.flatten(2), transitions), dim=-1), key_size * value_size)
    nothing = steps.v_THV.new_zeros(()).expand(num_tokens, num_heads, key_size)
    start = torch.zeros(
        (len(runs.lengths), num_heads, key_size, value_size + key_size),
        dtype=state_dtype(steps.v_THV.dtype),
        device=nothing.device,
    )
    start[..., value_size:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    wide = steps._replace(v_THV=torch.cat((steps.v_THV, nothing), dim=-1))
    _, last = kernel.scan(wide, runs, start, only_state=True)
    return Summary(last, value_size)


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
        state, of_all = chain.states(summaries(kernel, steps, runs))
        state = state.reshape(*state.shape[:2], steps.k_THK.shape[2], -1)
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
        steps = steps.with_tensors([tensor.detach().requires_grad_() for tensor in steps.tensors])
        state = state.detach().requires_grad_()
        with torch.enable_grad():
            return cls(steps.tensors, state, *_scanned(kernel, steps, runs, state))
