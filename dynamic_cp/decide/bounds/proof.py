"""`--search exact`: the fastest plan of a tiny batch, by a mixed-integer program that starts from the best packing.

The proof is of the modelled time: over all packings of up to one micro-batch for each sample, CP sizes, exchanges with
closed forms, lanes and orders, to a millionth. It has no clock: it ends after a counted number of nodes, and then says
how much faster a plan could be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamic_cp.decide.bounds.exact import exact_plan
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.plans.padding import round_up
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import MicroBatch, Sample, is_placed

MOST_CHOICES = 450
"""Samples x micro-batches x exchanges of all groups of lanes: 8 samples in as many micro-batches on 4 lanes with a ring
have 448, and took 50 s at most with CBC; HiGHS takes less."""
MAX_NODES = 20_000
"""Of the search tree, for each number of micro-batches."""
_REMEDY = "use --search thorough (--dynamic-cp-search)"


class Proof(NamedTuple):
    """What is known of the fastest plan.

    Attributes:
        micro_batches: of a plan that is faster than the known one; None: there is none, or none was found.
        makespan_ns: of the faster of both.
        reason: for the user.
    """

    micro_batches: tuple[MicroBatch, ...] | None
    makespan_ns: int
    reason: str


def check_provable(samples: Sequence[Sample], cost_model: CostModel, exchanges: Sequence[str]) -> None:
    """Raise UnsupportedFeatureError for a batch too large to prove, or a job whose plans the program does not know."""
    topology = cost_model.topology
    if placed := [name for name in exchanges if is_placed(name)]:
        raise UnsupportedFeatureError(
            f"an exact search does not know plans with {' '.join(placed)}, which this batch may have: name another "
            f"exchange (--cp-comm-type), or {_REMEDY}"
        )
    if topology.rank_token_multiple > 1:
        raise UnsupportedFeatureError(
            f"an exact search needs tokens of a rank that are not rounded, they are to a multiple of "
            f"{topology.rank_token_multiple} (--sequence-parallel or FP8): {_REMEDY}"
        )
    table, num_ways = cost_model.table, 0
    for k, held in enumerate(table.capacities):
        num_options = int((table.end_option[k] - table.first_option[k]).max()) if held else k == 0
        num_ways += (topology.num_lanes >> k) * num_options * (2 if k and cost_model.may_pass_on_states else 1)
    num_rows = round_up(len(samples), topology.num_microbatches_multiple)
    num_choices = len(samples) * num_rows * num_ways
    if num_choices > MOST_CHOICES:
        raise UnsupportedFeatureError(
            f"an exact search proves batches of at most {MOST_CHOICES} choices, this one has {num_choices} "
            f"({len(samples)} samples x {num_rows} micro-batches x {num_ways} ways of groups): {_REMEDY}, or give "
            "fewer samples"
        )


def prove(samples: Sequence[Sample], cost_model: CostModel, known_ns: int, known_reason: str) -> Proof:
    """Return whether a plan of `known_ns` nanoseconds is the fastest one, or a faster one, and what is proven of it.

    Raises:
        UnsupportedFeatureError: pulp or HiGHS is not installed.
    """
    exact = exact_plan(samples, cost_model, known_s=known_ns / 1e9, max_nodes=MAX_NODES)
    makespan_ns = known_ns if exact.plan is None else round(exact.makespan_s * 1e9)
    if exact.status == "optimal":
        proven = "proven the fastest"
    else:
        gain = makespan_ns / 1e9 / exact.bound_s - 1 if exact.bound_s > 0 else float("inf")
        proven = f"the proof ended after {MAX_NODES} nodes: no plan is below {exact.bound_s:.6f} s ({gain:.2%} less)"
    if exact.plan is None:
        return Proof(None, makespan_ns, f"{known_reason}; {proven}")
    found = f"exact m={exact.plan.num_microbatches}: {makespan_ns / 1e9:.6f} s, {proven}; before {known_reason}"
    return Proof(exact.plan.micro_batches, makespan_ns, found)
