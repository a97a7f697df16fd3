"""What all faulty jobs share."""

import subprocess

import pytest

from dynamic_cp.search import planner_process
from tests.trainer.commandline import NO_COMPILE
from tests.trainer.conftest import few_documents, forked_planners  # noqa: F401 (fixtures of every test here)
from tests.trainer.forked_planner import warm_up


@pytest.fixture(autouse=True, scope="package")
def warm_planners(forked_planners):  # noqa: F811
    """Let them have their compiled loops, too."""
    warm_up()


@pytest.fixture
def no_compile(monkeypatch):
    """Let launched jobs leave out torch's compiler."""
    for name, value in NO_COMPILE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def fresh_planners(forked_planners):  # noqa: F811
    """Let a planner's process be what users have, an interpreter of its own: for tests of just that process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner_process, "subprocess", subprocess)
        yield
