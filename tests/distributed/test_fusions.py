"""Weight gradients that matrix products add to their buffers, over a stand-in for apex's kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed import fake_apex
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import FULL_RECOMPUTE
from tests.distributed.parity import Comparison, Layout, assert_equal_to_reference, case_of, run_step
from tests.distributed.real_transformer_engine import products
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.distributed.test_transformer_engine_start import run_chunks_on_this_rank

FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
SHARDED: dict[str, Any] = {"distributed_optimizer": True, "overlap_grad_reduce": True}

LAYOUTS = {
    # A tied embedding on one stage gets a gradient of both kinds.
    "dp2_tied_overlap_grad_reduce": Layout(2, variant="llama_tied", **SHARDED, config=FUSED),
    "tp2_sp_overlap_grad_reduce": Layout(1, tp=2, sp=True, **SHARDED, config=FUSED),
    "pp2_tied_full_recompute": Layout(1, pp=2, variant="llama_tied", config=FUSED | FULL_RECOMPUTE),
    "transformer_engine": Layout(2, transformer_impl="transformer_engine", **SHARDED, config=FUSED),
}


def run_fused_step(*args: Any) -> tuple[Comparison, int]:
    """Return the comparison of this rank, and how many products went to a buffer at once."""
    fake_apex.install()
    comparison = run_step(*args, None)
    return comparison, len(fake_apex.calls) + products.num_into_buffers


@pytest.mark.by_day("transformer_engine")  # another kernel, in test_chunked_head, adds those of local layers
@pytest.mark.parametrize("name", LAYOUTS)
def test_step_equals_single_process(name: str, reference_of: Any) -> None:
    layout = LAYOUTS[name]
    case = case_of(reference_of, layout)
    run = run_ranks if layout.transformer_impl == "local" else functools.partial(run_ranks_with, PINNED)
    results = run(layout.topology.world_size, run_fused_step, *case)
    assert_equal_to_reference([comparison for comparison, _ in results], layout, case.expected)
    of_a_stage = 4 * layout.num_layers // layout.pp  # four matrices in each layer
    last = of_a_stage + 1
    stages = [of_a_stage, last] if layout.pp == 2 else [last, last]
    assert [number for _, number in results] == [number * case.plan.num_microbatches for number in stages]


def warm_fused_chunks(layout: Layout) -> int:
    fake_apex.install()
    run_chunks_on_this_rank(layout)
    return len(fake_apex.calls)


def test_a_pack_through_the_chunks_leaves_no_trace() -> None:
    layout = Layout(1, tp=2, sp=True, distributed_optimizer=True, config=FUSED)
    assert run_ranks(2, warm_fused_chunks, layout, timeout_s=60) == [4 * layout.num_layers + 1] * 2
