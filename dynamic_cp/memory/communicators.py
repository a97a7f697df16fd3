"""How many communicators a rank makes: each process group that carries a tensor of a device has buffers of its own.

NCCL makes one when a group is used for the first time. A rank uses these from the start: that of all ranks (outcomes,
losses), of its TP ranks, of its pipeline stages, of its lanes (gradients), of the optimizer's norm, of tied embeddings,
and of experts. CP groups, and rings and inner groups of mechanisms, are warmed at start, so that what they take is
known before the first step; none is made later. Those that are created but never used (megatron-core creates some 20)
take nothing.
"""

from __future__ import annotations

from dynamic_cp.mechanisms.mechanism import Sharing
from dynamic_cp.mechanisms.registry import MECHANISMS, chosen_inner_sizes
from dynamic_cp.types import ModelShape, PlanOptions, Topology


def num_communicators(model: ModelShape, topology: Topology, options: PlanOptions, sharing: Sharing) -> int:
    """Return how many communicators a rank of the stage with most of them makes."""
    pp_size, is_alone = topology.pp_size, topology.world_size == 1
    shares_table = model.share_embeddings_and_output_weights or model.mtp_num_layers > 0
    of_megatron = (
        2 * (not is_alone)  # of all ranks: the job's, and that of the optimizer's norm
        + (topology.tp_size > 1)
        # Interleaved stages send to each neighbour apart, so each is a pair; of two stages both are one pair.
        + (pp_size > 1)
        + (pp_size > 2 and topology.vp_size > 1)
        + (pp_size > 1 and shares_table)
        + (topology.num_lanes > 1)
        + 2 * (topology.ep_size > 1)  # of the block, and of the ranks with the same experts
    )
    largest = options.largest_cp_size(topology)
    sizes = [1 << k for k in range(1, largest.bit_length())]
    used = [size for size in sizes if size >= options.min_cp_size]
    mechanisms = [MECHANISMS[name] for name in options.cp_comm_types]
    of_mechanisms = sum(mechanism.num_more_groups(size, sharing) for mechanism in mechanisms for size in used)
    # Inner groups of a mechanism are CP groups of smaller sizes.
    inner = chosen_inner_sizes(options.cp_comm_types, largest, sharing) if of_mechanisms else ()
    return of_megatron + len({*used, *inner}) + of_mechanisms + (options.pool != "off")
