"""Runs that several tests compare with."""

import pytest

from tests.trainer.training_ranks import losses, train


@pytest.fixture(scope="session")
def uninterrupted():
    """Words of a command line -> losses of its 8 iterations on 4 ranks."""
    known = {}

    def get(words: str) -> list[float]:
        if words not in known:
            known[words] = losses(train(4, words))
            assert len(known[words]) == 8
        return known[words]

    return get
