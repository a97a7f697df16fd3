"""Which CP sizes and inner sizes the exchanges of a run can have, found before anything is built.

Pure functions of the command line; neither torch nor megatron-core is needed.
"""

from __future__ import annotations

import argparse

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.heads import inner_sizes
from dynamic_cp.types import Topology, is_power_of_two
from megatron.dynamic_cp.arguments import cp_comm_types


def complete_exchanges(args: argparse.Namespace, topology: Topology) -> None:
    """Check the exchanges of `args` against heads and nodes and fill in what follows, in place.

    `dynamic_cp_inner_sizes` becomes the tuple of inner sizes that a2a+p2p may use. Where no `max_dynamic_cp_size` was
    given and the one exchange of the run cannot serve the largest group, it becomes the largest that it can serve.

    Raises:
        InvalidInputError: an inner size or a CP size that the exchange cannot have; the message has both numbers.
    """
    from dynamic_cp.links import lanes_in_one_node  # here: it imports numpy

    query_heads = args.num_attention_heads // args.tensor_model_parallel_size
    node_lanes = lanes_in_one_node(topology)
    largest = args.max_dynamic_cp_size or topology.max_cp_size
    exchanges = cp_comm_types(args)
    if args.dynamic_cp_inner_sizes is not None:
        _check_inner_sizes(args.dynamic_cp_inner_sizes, exchanges, query_heads, node_lanes, largest)
    possible = inner_sizes("a2a+p2p", largest, (query_heads, 1), node_lanes) if "a2a+p2p" in exchanges else ()
    wanted = args.dynamic_cp_inner_sizes
    args.dynamic_cp_inner_sizes = tuple(sorted(size for size in possible if wanted is None or size in wanted))
    if args.cp_comm_type not in ("a2a", "a2a+p2p"):
        return

    def serves(cp_size: int) -> bool:
        if args.cp_comm_type == "a2a":
            return query_heads % cp_size == 0
        return any(inner < cp_size for inner in args.dynamic_cp_inner_sizes)

    sizes = [1 << k for k in range(1, largest.bit_length())]
    served = [size for size in sizes if serves(size)]
    for flag, cp_size in (
        ("--context-parallel-size", args.context_parallel_size),
        ("--min-dynamic-cp-size", args.min_dynamic_cp_size),
        ("--max-dynamic-cp-size", args.max_dynamic_cp_size or 1),
    ):
        if cp_size > 1 and not serves(cp_size):
            raise InvalidInputError(
                f"{flag} {cp_size} is a size that --cp-comm-type {args.cp_comm_type} cannot serve "
                f"({_rule(args.cp_comm_type, query_heads, node_lanes)}): use {' or '.join(map(str, [1, *served]))}, "
                "--cp-comm-type p2p or auto",
                cp_size=cp_size,
                query_heads=query_heads,
                lanes_per_node=node_lanes,
            )
    if sizes and not served:
        raise InvalidInputError(
            f"--cp-comm-type {args.cp_comm_type} can serve none of the CP sizes 2 to {largest} "
            f"({_rule(args.cp_comm_type, query_heads, node_lanes)}): use --cp-comm-type p2p or auto",
            largest=largest,
            query_heads=query_heads,
            lanes_per_node=node_lanes,
        )
    if served and args.max_dynamic_cp_size is None:
        args.max_dynamic_cp_size = served[-1]


def _rule(exchange: str, query_heads: int, node_lanes: int) -> str:
    if exchange == "a2a":
        return f"it must divide the {query_heads} query heads of a tensor-parallel rank"
    return (
        "an inner size must lie above 1 and below it and divide both the "
        f"{query_heads} query heads of a tensor-parallel rank and the blocks of {node_lanes} lanes that lie in one node"
    )


def _check_inner_sizes(
    sizes: list[int], exchanges: tuple[str, ...], query_heads: int, node_lanes: int, largest: int
) -> None:
    if "a2a+p2p" not in exchanges:
        raise InvalidInputError(
            f"--dynamic-cp-inner-sizes {' '.join(map(str, sizes))} is for a2a+p2p, --cp-comm-type allows "
            f"{' '.join(exchanges)}: add --cp-comm-type a2a+p2p or auto, or drop the flag"
        )
    for size in sizes:
        reason = None
        if not is_power_of_two(size) or size == 1:
            reason = "it is not 2, 4, 8, ..."
        elif size >= largest:
            reason = f"it must be below the largest CP size, {largest}"
        elif query_heads % size:
            reason = f"it does not divide the {query_heads} query heads of a tensor-parallel rank"
        elif node_lanes % size:
            reason = f"it does not divide the blocks of {node_lanes} lanes that lie in one node"
        if reason is not None:
            raise InvalidInputError(
                f"--dynamic-cp-inner-sizes {size} is not possible: {reason}; give another size, or drop the flag to "
                "allow every possible one",
                inner_cp_size=size,
                query_heads=query_heads,
                lanes_per_node=node_lanes,
                largest=largest,
            )
