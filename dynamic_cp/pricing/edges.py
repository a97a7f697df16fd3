"""What a step pays besides its layers: embedding, LM head and loss, TP collectives.

All are optional: a hardware file without their coefficient leaves them at 0.
"""

from __future__ import annotations

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
    embedding_s = _memory_s(2 * row_bytes, hardware) + collective_s
    added_bytes = 2 * problem.data_parallel.state.gradient_bytes * model.hidden_size
    embedding_back_s = _memory_s(row_bytes + added_bytes, hardware) + collective_s / 2
    logits = model.vocab_size / topology.tp_size
    gemm_s = 2 * model.hidden_size * logits / hardware.head_flops_per_s if hardware.head_flops_per_s else 0.0
    head_s = gemm_s + _memory_s(LOSS_FORWARD_BYTES_PER_LOGIT * logits, hardware) + collective_s / 2
    head_back_s = (
        problem.linear_backward_over_forward * gemm_s
        + _memory_s(LOSS_BACKWARD_BYTES_PER_LOGIT * logits, hardware)
        + collective_s
    )
    if chunk := problem.options.loss_chunk_tokens:
        # Logits and losses once more; each chunk writes and reads its gradient of the weights, and adds it to theirs.
        moved_bytes = 2 * (problem.options.element_bytes.weight + problem.data_parallel.state.gradient_bytes)
        head_back_s += head_s + _memory_s(moved_bytes * model.hidden_size * logits / chunk, hardware)
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

    Forward needs two all-reduces, or with sequence parallelism two all-gathers and two reduce-scatters: the same bytes.
    Backward mirrors them; the all-gathers of sequence parallelism that it repeats run behind GEMMs. Where collectives
    overlap with GEMMs, a part of them stays exposed.
    """
    row_bytes = problem.model.hidden_size * problem.options.element_bytes.activation
    exposed = problem.hardware.tp_overlap_exposed_fraction if problem.options.tp_comm_overlap else 1.0
    return 2 * exposed * _collective_s(row_bytes, problem.hardware, problem.topology)


def _collective_s(bytes_per_token: float, hardware: Hardware, topology: Topology) -> float:
    """Return the seconds of one all-reduce over the TP ranks, per token."""
    bandwidth, tp_size = hardware.collective_bandwidth_in_node_bytes_per_s, topology.tp_size
    if not bandwidth or tp_size == 1:
        return 0.0
    if tp_size > topology.ranks_per_node:
        bandwidth = hardware.bandwidth_across_nodes_bytes_per_s
    return 2 * bytes_per_token * (tp_size - 1) / tp_size / bandwidth


def _memory_s(moved_bytes: float, hardware: Hardware) -> float:
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    return moved_bytes / bandwidth if bandwidth else 0.0
