"""Models with layers of linear attention: losses and gradients equal those of a model that goes token by token."""

from __future__ import annotations

import pytest

from tests.distributed.parity import BATCHES, Case, Layout, assert_all_equal_to_reference, mixed_plan

ONE_LANE = {kind: Layout(1, variant=kind) for kind in ("delta", "mamba")}


def test_one_lane(reference_of):
    samples = BATCHES["long_tail"]
    cases = {
        name: Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail"))
        for name, layout in ONE_LANE.items()
    }
    assert_all_equal_to_reference(cases)
