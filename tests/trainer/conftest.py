"""Runs that several tests compare with or go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.data import mock
from tests.trainer.training_ranks import losses, train

SAVED = 3
"""Iteration that runs go on from; an uninterrupted one ends at 8."""


@pytest.fixture(autouse=True, scope="package")
def few_documents():
    """Let mock data be few: ranks index and shuffle them again in every run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mock, "NUM_DOCUMENTS", 20_000)
        yield


@pytest.fixture(scope="session")
def _runs(tmp_path_factory):
    """Words of a command line -> losses of its iterations on 4 ranks, and the folder with checkpoint SAVED."""
    known: dict[str, tuple[list[float], Path]] = {}

    def get(words: str) -> tuple[list[float], Path]:
        if words not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            known[words] = losses(train(4, words, f"--save-interval {SAVED} --save {folder}")), folder
            assert len(known[words][0]) == 8
            (folder / checkpoint_files.TRACKER).write_text(f"{SAVED}\n")
            assert checkpoint_files.latest(str(folder)).name == f"iter_{SAVED:07d}"
        return known[words]

    return get


@pytest.fixture(scope="session")
def uninterrupted(_runs):
    """Words of a command line -> losses of its iterations on 4 ranks."""
    return lambda words: _runs(words)[0]


@pytest.fixture(scope="session")
def saved_by(_runs):
    """Words of a command line -> folder to load from, with its checkpoint of iteration SAVED; nobody writes there."""
    return lambda words: _runs(words)[1]
