"""Shared by the distributed tests: the single-process reference, computed once per model and batch."""

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.parity import BATCHES
from tests.distributed.reference import reference_step

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference_of():
    """(variant, batch name) -> reference step."""
    known = {}

    def get(variant: str, batch: str):
        if (variant, batch) not in known:
            known[variant, batch] = run_ranks(1, reference_step, variant, BATCHES[batch])[0]
        return known[variant, batch]

    return get
