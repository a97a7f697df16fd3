"""Shared by the distributed tests: the single-process reference, computed once per model and batch."""

from functools import partial

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.parity import BATCHES, Layout
from tests.distributed.reference import reference_step

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_of():
    """(layout, batch name) -> reference step of the layout's model."""
    known = {}

    def get(layout: Layout, batch: str):
        windows = {name: value for name, value in layout.config.items() if name.startswith("window_")}
        key = layout.variant, layout.num_layers, batch, tuple(windows.items())
        if key not in known:
            asked = layout.variant, BATCHES[batch], layout.num_layers, windows
            (known[key],) = run_ranks(1, reference_step, *asked, timeout_s=600)
            known[key]["in_float32"] = partial(run_ranks, 1, reference_step, *asked, False, timeout_s=600)
        return known[key]

    return get
