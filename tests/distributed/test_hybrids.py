"""Models with layers of linear attention: losses and gradients equal those of a model that goes token by token."""

from __future__ import annotations

import pytest

from dynamic_cp.plans.validate import check_plan
from tests.distributed.parity import BATCHES, Case, Layout, assert_all_equal_to_reference, mixed_plan
from tests.distributed.test_parity import FULL_RECOMPUTE, SELECTIVE_RECOMPUTE

BY_DAY = {
    "delta_dp4": Layout(4, variant="delta_moe", distributed_optimizer=True, config=SELECTIVE_RECOMPUTE),
    "mamba_dp4": Layout(4, variant="mamba", config=FULL_RECOMPUTE),
    "delta_tp2_sp": Layout(2, tp=2, sp=True, variant="delta"),
    "mamba_tp2_pp2_vpp2": Layout(1, tp=2, pp=2, vpp=2, variant="mamba"),
}


def cases_of(layouts: dict[str, Layout], reference_of, batch: str = "long_tail", seed: int = 0) -> dict[str, Case]:
    samples, cases = BATCHES[batch], {}
    for name, layout in layouts.items():
        plan = mixed_plan(samples, layout, seed=seed)
        check_plan(plan, samples)
        cases[name] = Case(layout, samples, plan, reference_of(layout, batch))
    return cases


def test_hybrids_equal_single_process(reference_of) -> None:
    cases = cases_of(BY_DAY, reference_of)
    ways = {bucket.state_exchange for bucket in cases["delta_dp4"].plan.buckets if bucket.cp_size > 1}
    assert ways == {"heads", "states"}
    assert_all_equal_to_reference(cases)
