"""What all faulty jobs share."""

from __future__ import annotations

import pytest

from megatron.trainer.data import mock


@pytest.fixture(autouse=True, scope="package")
def few_documents():
    """Let mock data be few: the ranks of every job index and shuffle them again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mock, "NUM_DOCUMENTS", 20_000)
        yield
