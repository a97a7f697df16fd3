"""What a step pays besides its layers: embedding, LM head and loss, TP collectives, gradients and parameters.

All are optional: a hardware file without their coefficient leaves them at 0.

Once a step, lanes exchange gradients and parameters, some of which computation hides. A step reduces the gradients of
every rank over all lanes, and gathers the parameters that the optimizer changed. An optimizer whose state the lanes do
not share changes all parameters on each lane, from whole gradients, which take twice the bytes. With
`--overlap-grad-reduce` a stage sends the gradients of a bucket once all lanes have them: the first stage's first chunk
during its last backward pass, every other chunk (which Megatron-Core does not cut into buckets) as a whole behind its
own. `--overlap-param-gather` mirrors that ahead of the first forward passes. What is exposed lies between the end of
the last operation and that of the last reduction, and where forward passes wait for parameters:

    reduced = max(last bucket behind the backward pass, all buckets behind the first one's gradients)

What is hidden takes `collective_device_fraction` of the device from the computation that hides it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamic_cp.arrays import Floats
from dynamic_cp.types import Hardware, Problem, Topology

LOSS_FORWARD_BYTES_PER_LOGIT = 22
"""Counted passes of the vocabulary-parallel cross entropy in fp32: read bf16, write fp32 (6), read for the maximum (4),
read and write exponentials (8), read for the sum (4). An estimate; the fused kernel needs about half."""
LOSS_BACKWARD_BYTES_PER_LOGIT = 14
"""Read and write the fp32 gradient (8), cast it to bf16 (6). An estimate."""


def edges_s_per_token(problem: Problem) -> tuple[float, float, float, float]:
    """Return seconds per token of a rank: embedding forward and backward, head with loss forward and backward."""
    model, hardware, topology = problem.model, problem.hardware, problem.topology
    row_bytes = model.hidden_size * problem.options.element_bytes.activation
    collective_s = _collective_s(row_bytes, hardware, topology)
    # Read a row and write it; add a row of gradients to the table (read, add, write).
    embedding_s = memory_s(2 * row_bytes, hardware) + collective_s
    added_bytes = 2 * problem.data_parallel.state.gradient_bytes * model.hidden_size
    embedding_back_s = memory_s(row_bytes + added_bytes, hardware) + collective_s / 2
    logits = model.vocab_size / topology.tp_size
    gemm_s = 2 * model.hidden_size * logits / hardware.head_flops_per_s if hardware.head_flops_per_s else 0.0
    head_s = gemm_s + memory_s(LOSS_FORWARD_BYTES_PER_LOGIT * logits, hardware) + collective_s / 2
    head_back_s = (
        problem.linear_backward_over_forward * gemm_s
        + memory_s(LOSS_BACKWARD_BYTES_PER_LOGIT * logits, hardware)
        + collective_s
    )
    if chunk := problem.options.loss_chunk_tokens:
        # Logits and losses once more; each chunk writes and reads its gradient of the weights, and adds it to theirs.
        moved_bytes = 2 * (problem.options.element_bytes.weight + problem.data_parallel.state.gradient_bytes)
        head_back_s += head_s + memory_s(moved_bytes * model.hidden_size * logits / chunk, hardware)
    # The modules of multi-token prediction embed their tokens, and use the head, where the last stage does.
    modules = model.mtp_num_layers
    return (
        embedding_s,
        embedding_back_s,
        model.num_heads * head_s + modules * embedding_s,
        model.num_heads * head_back_s + modules * embedding_back_s,
    )


def tensor_s_per_token(problem: Problem) -> float:
    """Return the seconds of one layer's TP collectives per token of a rank, the same forward and backward.

    Forward needs two all-reduces, or with sequence parallelism two all-gathers and two reduce-scatters: the same bytes,
    of which all-gathers send half as many in FP8. Backward mirrors them; the all-gathers of sequence parallelism that
    it repeats run behind GEMMs. Where collectives overlap with GEMMs, a part of them stays exposed.
    """
    options, hardware = problem.options, problem.hardware
    row_bytes = problem.model.hidden_size * options.element_bytes.activation
    gathers_fp8 = options.fp8 and problem.topology.sequence_parallel
    exposed = hardware.tp_overlap_exposed_fraction if options.tp_comm_overlap else 1.0
    return 2 * exposed * (0.75 if gathers_fp8 else 1.0) * _collective_s(row_bytes, hardware, problem.topology)


def _collective_s(bytes_per_token: float, hardware: Hardware, topology: Topology) -> float:
    """Return the seconds of one all-reduce over the TP ranks, per token."""
    bandwidth, tp_size = hardware.collective_bandwidth_in_node_bytes_per_s, topology.tp_size
    if not bandwidth or tp_size == 1:
        return 0.0
    if tp_size > topology.ranks_per_node:
        bandwidth = hardware.bandwidth_across_nodes_bytes_per_s
    return 2 * bytes_per_token * (tp_size - 1) / tp_size / bandwidth


def memory_s(moved_bytes: float, hardware: Hardware) -> float:
    """Return the seconds of moving so many bytes through memory; 0 where its bandwidth is not known."""
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    return moved_bytes / bandwidth if bandwidth else 0.0


def ddp_bucket_size(num_lanes: int, static_cp_size: int) -> int:
    """Return the parameters of a gradient bucket: what megatron-core takes at this static CP size.

    megatron-core's default follows the data-parallel size, which is num_lanes here whatever the CP sizes are.
    """
    return max(40_000_000, 1_000_000 * (num_lanes // static_cp_size))


class Edges(NamedTuple):
    """First forward and last backward pass of every model chunk, in seconds, each [stage, chunk, lane].

    Attributes:
        first_start_s, first_s: when its first forward pass begins, and how long that takes.
        last_end_s, last_s: when its last backward pass ends, and how long that takes.
    """

    first_start_s: Floats
    first_s: Floats
    last_end_s: Floats
    last_s: Floats


class Reduction(NamedTuple):
    """Seconds of the collectives over all lanes of each stage, and what hides them.

    Attributes:
        reduce_s, gather_s: [stage] gradients of its rank, and parameters.
        num_buckets: of the first chunk of the first stage; all others have one.
        hides_reduce, hides_gather: they run beside computation.
        slows: share of the hidden seconds by which that lasts longer.
    """

    reduce_s: Floats
    gather_s: Floats
    num_buckets: int
    hides_reduce: bool
    hides_gather: bool
    slows: float = 0.0

    @classmethod
    def of(cls, problem: Problem) -> Reduction:
        """Return the collectives of a step of `problem`; 0 seconds where the hardware has no bandwidth for them."""
        topology, data_parallel = problem.topology, problem.data_parallel
        dense, experts = _weights(problem)
        # Only ranks with the same experts reduce them: blocks of lanes apart, so they pay the same link.
        copies = max(1.0, topology.num_lanes * topology.tp_size / topology.ep_size)
        shares = dense * (topology.num_lanes - 1) / topology.num_lanes + experts * (copies - 1) / copies
        moved_s = shares / bandwidth if (bandwidth := _bandwidth(problem)) else np.zeros_like(shares)
        bucket_weights = ddp_bucket_size(topology.num_lanes, problem.options.static_cp_size or 1)
        # Without shares of the optimizer a ring sends sums back, in place of parameters.
        is_sharded = data_parallel.distributed_optimizer
        return cls(
            reduce_s=data_parallel.state.gradient_bytes * (1 if is_sharded else 2) * moved_s,
            gather_s=problem.options.element_bytes.weight * is_sharded * moved_s,
            num_buckets=max(1, -(-int((dense[0] + experts[0]) / topology.vp_size) // bucket_weights)),
            hides_reduce=data_parallel.overlap_grad_reduce,
            hides_gather=data_parallel.overlap_param_gather,
            slows=problem.hardware.collective_device_fraction,
        )

    @property
    def least_s(self) -> float:
        """Seconds that no plan hides."""
        reduce_s, gather_s = float(self.reduce_s.max()), float(self.gather_s.max())
        return reduce_s * (self.slows if self.hides_reduce else 1) + gather_s * (self.slows if self.hides_gather else 1)

    def exposed_s(self, edges: Edges, makespan_s: float) -> float:
        """Return the seconds by which a step of `makespan_s` with these edges is longer.

        Example:
            One stage, one lane, 4 buckets, a reduction of 2 s: behind a last backward pass of 1 s, whose first bucket
            is there after 0.25 s, 2 - 0.75 s are exposed; behind one of 8 s the last bucket, 0.5 s.
        """
        reduce_s, gather_s = float(self.reduce_s.max()), float(self.gather_s.max())
        reduced_s = max(0.0, self._reduced_s(edges) - makespan_s) if self.hides_reduce else reduce_s
        gathered_s = max(0.0, self._awaited_s(edges)) if self.hides_gather else gather_s
        hidden_s = max(0.0, reduce_s - reduced_s) + max(0.0, gather_s - gathered_s)
        return reduced_s + gathered_s + self.slows * hidden_s

    def _reduced_s(self, edges: Edges) -> float:
        """Return when the last gradients are reduced: chunk after chunk of a stage, the first chunk last."""
        num_stages, num_chunks = edges.last_s.shape[:2]
        end_s = np.zeros(num_stages)
        for chunk in reversed(range(num_chunks)):
            part_s, buckets = self.reduce_s / num_chunks, self._buckets(num_stages, chunk)
            ready_s = (edges.last_end_s[:, chunk] - edges.last_s[:, chunk] * (1 - 1 / buckets)[:, None]).max(axis=1)
            last_s = edges.last_end_s[:, chunk].max(axis=1) + part_s / buckets
            end_s = np.maximum(np.maximum(end_s, ready_s) + part_s, last_s)
        return float(end_s.max())

    def _awaited_s(self, edges: Edges) -> float:
        """Return how long the forward pass that waits longest waits for parameters."""
        num_stages, num_chunks = edges.first_s.shape[:2]
        waits_s = [0.0]
        for chunk in range(num_chunks):
            part_s, buckets = self.gather_s / num_chunks, self._buckets(num_stages, chunk)
            begun_s = chunk * part_s
            start_s, lasts_s = edges.first_start_s[:, chunk].min(axis=1), edges.first_s[:, chunk].min(axis=1)
            waits_s += (begun_s + part_s / buckets - start_s).tolist()
            waits_s += (begun_s + part_s - start_s - lasts_s * (1 - 1 / buckets)).tolist()
        return max(waits_s)

    def _buckets(self, num_stages: int, chunk: int) -> Floats:
        """Return [stage] buckets of a chunk."""
        buckets = np.ones(num_stages)
        buckets[0] = self.num_buckets if chunk == 0 else 1
        return buckets


def _bandwidth(problem: Problem) -> float:
    """Return bytes per second of a collective over all lanes: a ring over nodes uses all NICs of a node."""
    hardware, topology = problem.hardware, problem.topology
    bandwidth = hardware.collective_bandwidth_in_node_bytes_per_s
    if bandwidth and topology.spans_nodes(0, topology.num_lanes):
        return min(bandwidth, topology.lanes_per_node * hardware.bandwidth_across_nodes_bytes_per_s)
    return bandwidth


def _weights(problem: Problem) -> tuple[Floats, Floats]:
    """Return [stage] trained weights of a rank without routed experts, and of those."""
    model, topology = problem.model, problem.topology
    stages = model.stages(topology.pp_size)
    if (adapters := problem.data_parallel.adapters) is not None:
        trained = [adapters.weights(stage, model, topology.tp_size) for stage in stages]
        return np.array(trained, np.float64), np.zeros(len(stages))
    dense = [
        stage.sum(lambda layer: layer.held_weights) + model.vocabulary_weights_on(index, topology.pp_size)
        for index, stage in enumerate(stages)
    ]
    experts = [stage.sum(lambda layer: layer.held_expert_weights) for stage in stages]
    return np.array(dense, np.float64) / topology.tp_size, np.array(experts, np.float64) / topology.ep_size
