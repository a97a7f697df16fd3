"""Linear attention by states: tokens stay, and what chunks of tokens do to states is exchanged.

1. The convolution gets the tokens before each chunk from whoever has them (`layout.Halo`).
2. The summary (A, b) of each chunk is computed from its own tokens alone (`recurrence`).
3. Each lane gets the summaries of all chunks for its share of the heads, composes them in the order of the sample, and
   gives back the state before each chunk. What a lane sends does not grow with the length of samples.
4. Chunks are scanned from these states.

Backward needs no gradient of A: that of the state before a chunk is A' times that of the state behind it, plus what the
chunk's own tokens say, so the same composition backwards, of gradients; A stays where it was composed.

States, summaries and their gradients travel in float32: those in bfloat16 cost three digits of the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynamic_cp.types import LinearAttention
from megatron.dynamic_cp.attention.linear.exchange import exchanged
from megatron.dynamic_cp.attention.linear.kernels.kernel import LinearKernel
from megatron.dynamic_cp.attention.linear.layer import LinearLayer, Share
from megatron.dynamic_cp.attention.linear.layout import chunk_runs, halo
from megatron.dynamic_cp.attention.linear.recurrence import Steps, applied, followed, state_dtype, transposed
from megatron.dynamic_cp.attention.linear.runs import Runs
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams


def by_states(layer: LinearLayer, x_TC: Tensor, gates: list[Tensor], params: DynamicPackedSeqParams) -> Tensor:
    """Return what this lane's tokens find, [T, heads, value size]."""
    x_TC = _convolved(layer, x_TC, params)
    steps = layer.steps(x_TC, gates)
    runs = chunk_runs(params, x_TC.device)
    chain = StateChain(layer.sizes, params)
    found: Tensor = _ScanChunks.apply(layer.kernel, runs, chain, steps, torch.is_grad_enabled(), *steps.tensors)
    return layer.finished(found, x_TC)


def _convolved(layer: LinearLayer, x_TC: Tensor, params: DynamicPackedSeqParams) -> Tensor:
    """Return this lane's rows behind the convolution, which sees those before each chunk."""
    num_before = layer.sizes.kernel_size - 1
    if not num_before:
        return layer.convolved(x_TC, chunk_runs(params, x_TC.device))
    edges = halo(params, num_before, x_TC.device)
    messages = [[x_TC.index_select(0, rows)] for rows in edges.sent]
    expected = [[Expected((number, x_TC.shape[1]), x_TC.dtype)] for number in edges.num_received]
    received = exchanged(messages, expected, params)
    extended = torch.cat((x_TC, *(rows for (rows,) in received))).index_select(0, edges.extended)
    return layer.convolved(extended, edges.runs).index_select(0, edges.own)


class StateChain:
    """States before the chunks of each sample, and their gradients, composed by shares of heads.

    Forward comes before backward; the transitions A of this lane's share stay in between.
    """

    def __init__(self, sizes: LinearAttention, params: DynamicPackedSeqParams) -> None:
        self._params, self._num_lanes = params, params.cp_group.size()
        shares = [Share.of_lane(sizes, lane, self._num_lanes).heads for lane in range(self._num_lanes)]
        self._heads = [slice(heads.start, heads.stop) for heads in shares]
        self._transitions: Tensor | None = None

    def states(self, transitions: Tensor, own: Tensor) -> Tensor:
        """Return the state before each of this lane's chunks, [runs, heads, key, value].

        Args:
            transitions, own: A [runs, heads, ...] and b [runs, heads, key, value] of this lane's chunks.
        """
        self._transitions, own = (in_sample_order(of_lanes) for of_lanes in self._scattered(transitions, own))
        behind = composed(self._transitions, own)
        return self._gathered(torch.cat((torch.zeros_like(own[:1]), behind[:-1])))

    def gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of the state behind each chunk; `grad`: what each chunk's tokens say of that before."""
        assert self._transitions is not None, "forward comes first"
        (of_lanes,) = self._scattered(grad)
        own, back = in_sample_order(of_lanes), transposed(self._transitions)
        before = composed(back.flip(0), own.flip(0)).flip(0)
        return self._gathered(torch.cat((before[1:], torch.zeros_like(own[:1]))))

    def _scattered(self, *tensors: Tensor) -> list[Tensor]:
        """Return [lane, runs, heads, ...] of the chunks of all lanes, of this lane's share of the heads."""
        messages = [[tensor[:, heads] for tensor in tensors] for heads in self._heads]
        expected = [Expected(one.shape, one.dtype) for one in messages[self._params.cp_group.rank()]]
        received = exchanged(messages, [expected] * self._num_lanes, self._params)
        return [torch.stack(parts) for parts in zip(*received, strict=True)]

    def _gathered(self, of_chunks: Tensor) -> Tensor:
        """Return those of this lane's chunks, of all heads; `of_chunks`: [chunk, samples, heads, ...] of its share."""
        of_lanes = in_lane_order(of_chunks)
        _, num_runs, _, *sizes = of_lanes.shape
        expected = [[Expected((num_runs, heads.stop - heads.start, *sizes), of_chunks.dtype)] for heads in self._heads]
        returned = exchanged([[part] for part in of_lanes], expected, self._params)
        return torch.cat([part for (part,) in returned], dim=1)


def composed(transitions: Tensor, own: Tensor) -> Tensor:
    """Return the state behind each chunk of a chain that begins with zeros.

    Pairs of neighbours, then pairs of pairs: a launch for each step would wait for the one before, and steps are as
    many as the logarithm of the chunks.

    Args:
        transitions, own: A and b of each chunk, [chunk, samples, heads, ...].
    """
    reach = 1
    while reach < len(own):
        later = transitions[reach:]
        own = torch.cat((own[:reach], applied(later, own[:-reach]) + own[reach:]))
        transitions = torch.cat((transitions[:reach], followed(later, transitions[:-reach])))
        reach *= 2
    return own


def in_sample_order(of_lanes: Tensor) -> Tensor:
    """Return [chunk, samples, ...] of [lane, runs, ...]: lane r has of each sample chunks r and 2 * cp - 1 - r."""
    first, second = of_lanes.unflatten(1, (-1, 2)).unbind(2)
    return torch.cat((first, second.flip(0)))


def in_lane_order(of_chunks: Tensor) -> Tensor:
    """Return [lane, runs, ...] of [chunk, samples, ...]: undoes `in_sample_order`."""
    first, second = of_chunks.chunk(2)
    return torch.stack((first, second.flip(0)), dim=2).flatten(1, 2)


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


class _ScanChunks(torch.autograd.Function):
    """Scans from the states before chunks; backward exchanges gradients of states where forward exchanged states."""

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
        steps = steps.with_tensors([tensor.detach().requires_grad_(is_recorded) for tensor in tensors])
        state = chain.states(*summaries(kernel, steps, runs)).requires_grad_(is_recorded)
        with torch.set_grad_enabled(is_recorded):
            found, last = kernel.scan(steps, runs, state)
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
