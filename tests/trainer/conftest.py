"""Runs that several tests compare with or go on from."""

import functools
from pathlib import Path

import pytest

from megatron.trainer.checkpoints import checkpoint_files
from megatron.trainer.data import mock
from tests.trainer.forked_planner import fork_planners
from tests.trainer.training_ranks import losses, train

SAVED, LAST = 2, 4
"""Iterations that runs go on from, and that they end with. What was not restored shows in the loss of the first one
after SAVED, or of the second if it is the optimizer's or the scheduler's."""
TO_LAST = f"--train-iters {LAST} --lr-decay-iters 8"


@pytest.fixture(autouse=True, scope="package")
def few_documents():
    """Let mock data be few: ranks index and shuffle them again in every run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mock, "NUM_DOCUMENTS", 20_000)
        yield


@pytest.fixture(autouse=True, scope="package")
def forked_planners():
    """Let a planner's process have its imports and compiled loops from its rank."""
    with pytest.MonkeyPatch.context() as patched:
        fork_planners(patched)
        yield


@pytest.fixture(scope="session")
def _runs(tmp_path_factory):
    """Words of a command line, ranks -> losses of its iterations, and the folder with checkpoint SAVED."""

    @functools.cache
    def get(words: str, num_ranks: int) -> tuple[list[float], Path]:
        folder = tmp_path_factory.mktemp("uninterrupted")
        found = losses(train(num_ranks, TO_LAST, words, f"--save-interval {SAVED} --save {folder}"))
        assert len(found) == LAST
        (folder / checkpoint_files.TRACKER).write_text(f"{SAVED}\n")
        assert checkpoint_files.latest(str(folder)).name == f"iter_{SAVED:07d}"
        return found, folder

    return get


@pytest.fixture(scope="session")
def uninterrupted(_runs):
    """Words of a command line, ranks -> losses of its iterations."""
    return lambda words, num_ranks=4: _runs(words, num_ranks)[0]


@pytest.fixture(scope="session")
def saved_by(_runs):
    """Words of a command line, ranks -> folder to load from, with the checkpoint of SAVED; nobody writes there."""
    return lambda words, num_ranks=4: _runs(words, num_ranks)[1]


@pytest.fixture(scope="session")
def resumed(_runs):
    """Let a run go on from checkpoint SAVED of another, `on` other ranks or from another `base`: words of that one,
    more words -> its records, whose losses are those of the run that was not interrupted, within `tolerance`."""

    def get(words: str, more: str = "", *, ranks: int = 2, on: int | None = None, base: str | None = None, **tolerance):
        expected, folder = _runs(words, ranks)
        records = train(on or ranks, words if base is None else base, TO_LAST, more, f"--load {folder}")
        assert sorted(records) == list(range(SAVED + 1, LAST + 1))
        assert losses(records) == pytest.approx(expected[SAVED:], **(tolerance or {"rel": 1e-5}))
        return records

    return get
