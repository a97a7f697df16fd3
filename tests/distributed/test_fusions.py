"""Weight gradients that matrix products add to their buffers, over a stand-in for apex's kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.distributed import fake_apex
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import layout_of, lines
from tests.distributed.parity import Comparison, Layout, assert_equal_to_reference, case_of, run_step
from tests.distributed.real_transformer_engine import products
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.distributed.test_transformer_engine_start import run_chunks_on_this_rank

LINES = lines("""
    two llama_tied distributed overlap fused; one tp2 sp distributed overlap fused; one pp2 llama_tied full fused
    two engine distributed overlap fused
""")
"""A tied embedding on one stage gets a gradient of both kinds."""


def run_fused_step(*args: Any) -> tuple[Comparison, int]:
    """Return the comparison of this rank, and how many products went to a buffer at once."""
    fake_apex.install()
    comparison = run_step(*args)
    return comparison, len(fake_apex.calls) + products.num_into_buffers


@pytest.mark.by_day(LINES[-1])  # another kernel, in test_chunked_head, adds those of local layers
@pytest.mark.parametrize("line", LINES)
def test_step_equals_single_process(line: str, reference_of: Any) -> None:
    layout = layout_of(line)
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
    layout = layout_of("one tp2 sp distributed fused")
    assert run_ranks(2, warm_fused_chunks, layout, timeout_s=60) == [4 * layout.num_layers + 1] * 2
