"""Which CP sizes a bucket may have and how many tokens it may hold."""

from __future__ import annotations

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.padding import padded_seqlens, rank_multiple
from dynamic_cp.types import PlanOptions, Topology


def allowed_cp_sizes(topology: Topology, options: PlanOptions) -> tuple[int, ...]:
    """Return the CP sizes that a bucket with samples may have, ascending; InvalidInputError when there is none."""
    largest = options.largest_cp_size(topology)
    if options.max_cp_size not in (None, largest):
        raise InvalidInputError(
            f"max_cp_size is {options.max_cp_size}, the largest group of {topology.num_lanes} lanes has {largest}: "
            f"give at most {topology.max_cp_size} (--max-dynamic-cp-size)",
            max_cp_size=options.max_cp_size,
            num_lanes=topology.num_lanes,
        )
    if options.min_cp_size > largest:
        raise InvalidInputError(
            f"min_cp_size is {options.min_cp_size}, the largest allowed CP size is {largest}: "
            "lower min_cp_size (--min-dynamic-cp-size) or raise max_cp_size (--max-dynamic-cp-size)",
            min_cp_size=options.min_cp_size,
            max_cp_size=largest,
        )
    return tuple(1 << k for k in range(options.min_cp_size.bit_length() - 1, largest.bit_length()))


def capacity_tokens(cp_size: int, topology: Topology, options: PlanOptions) -> int:
    """Return the largest sum of padded lengths (tokens, all ranks of the group) that a bucket of `cp_size` may hold.

    A rank holds a multiple of 2 tokens (two zigzag chunks) if cp_size > 1, and of the topology's rank_token_multiple.
    """
    unit = rank_multiple(cp_size, topology.rank_token_multiple)
    return options.max_tokens_per_rank // unit * unit * cp_size


def may_span_all(topology: Topology, options: PlanOptions) -> bool:
    """Return whether a bucket may span all lanes, of which there may be any number but one."""
    return topology.num_lanes > 1 and options.largest_cp_size(topology) == topology.max_cp_size


def widest_bucket(topology: Topology, options: PlanOptions, *, places: bool) -> tuple[int, int]:
    """Return (tokens that the bucket which holds most may hold, its lanes); all lanes where attention is placed."""
    sizes = (*allowed_cp_sizes(topology, options), *((topology.num_lanes,) if places else ()))
    return max((capacity_tokens(size, topology, options), size) for size in sizes)


def limit_that_holds(seqlen: int, topology: Topology, options: PlanOptions) -> int:
    """Return the limit of tokens per rank, no lower than that of `options`, at which a group holds `seqlen` tokens."""
    largest = allowed_cp_sizes(topology, options)[-1]
    padded = padded_seqlens((seqlen,), largest, topology.rank_token_multiple)[0]
    return max(options.max_tokens_per_rank, padded // largest)


def token_capacity(cp_size: int, topology: Topology, options: PlanOptions) -> int:
    """Return the padded tokens that a bucket of `cp_size` may hold; 0 where the options exclude the size."""
    is_allowed = options.min_cp_size <= cp_size <= options.largest_cp_size(topology)
    return capacity_tokens(cp_size, topology, options) if is_allowed else 0
