"""What every test's process does: it keeps the parent of forked ranks lean, and knows what each test costs.

`costs.json` has the seconds that a case of a test function, or the set-up of a fixture that several tests share,
computes on all its processes; `make costs` counts them, each once. Two things follow, so that nobody does them by hand:
which tests are `slow` (not a part of `make check`), and that the costly files begin first, so that no process is left
with one at the end. A test that waits instead of computing is marked as slow itself; one that `make check` must have,
as `in_check`. Limits go by a clock that stands still while a test waits for a processor (`patience.py`).
"""

import gc
import json
import os
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_timeout

from megatron.dynamic_cp.repairs import triton_imports
from tests import patience
from tests.forked_workers import run_on_workers

triton_imports.install()  # before any test imports megatron-core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked OpenMP pool would hang

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")
patience.install()

COSTS = Path(__file__).parent / "costs.json"
SLOW_S = 0.1
"""Seconds of computing from which on a test is slow."""
_KEPT_FROM_S = 0.1

_measured: dict[str, list[float]] = defaultdict(list)
_collected: set[str] = set()
"""Tests and fixtures that there are: those that do not run keep the cost that they had."""
_shared: list[float] = []
"""Seconds of each set-up that several tests share: they do not count for the test that happened to come first."""

# What imports make is never garbage; looking for it took a fifth of the time of importing torch.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="forks that run the tests, once they are collected")
    parser.addoption("--measure-costs", type=Path, metavar="FILE", help="write what tests cost, for those that run")


def name_of(item: pytest.Item) -> str:
    """Return file::function, the same for all cases."""
    return item.nodeid.partition("[")[0]


def names_of_fixtures(item: pytest.Item) -> list[str]:
    """Return where::name of each fixture that a test has."""
    found = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    return [_name_of_fixture(definitions[-1]) for definitions in found.values()]


def _name_of_fixture(definition: pytest.FixtureDef[object]) -> str:
    return f"{definition.baseid}::{definition.argname}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    costs_s: dict[str, float] = json.loads(COSTS.read_text())
    files_s: Counter[Path] = Counter()
    shared: dict[Path, set[str]] = defaultdict(set)
    keep_by_day(items)
    for item in items:
        cost_s = costs_s.get(name_of(item), 0.0)
        _collected.update([name_of(item), *names_of_fixtures(item)])
        files_s[item.path] += cost_s
        shared[item.path].update(names_of_fixtures(item))
        dearest_s = max([cost_s, *(costs_s.get(name, 0.0) for name in names_of_fixtures(item))])
        is_slow = dearest_s >= SLOW_S or item.get_closest_marker("nightly") is not None
        if is_slow and item.get_closest_marker("in_check") is None:
            item.add_marker(pytest.mark.slow)
    for path, names in shared.items():
        files_s[path] += sum(costs_s.get(name, 0.0) for name in names)
    items.sort(key=lambda item: -files_s[item.path])


def keep_by_day(items: list[pytest.Item]) -> None:
    """Mark as nightly all cases that their function's `by_day` does not name; a name of no case is a UsageError."""
    cases_of: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("by_day") is not None:
            cases_of[name_of(item)].append(item)
    for name, cases in cases_of.items():
        wanted = cases[0].get_closest_marker("by_day").args  # type: ignore[union-attr]
        found = {case: _beginnings(case, wanted) for case in cases}
        unknown = set(wanted).difference(*found.values())
        if unknown and not any("::" in word for word in cases[0].config.args):
            raise pytest.UsageError(f"{name}: by_day names {sorted(unknown)}, of which there is no case: mend the mark")
        for case, matching in found.items():
            if not matching:
                case.add_marker(pytest.mark.nightly)


def _beginnings(case: pytest.Item, words: tuple[str, ...]) -> set[str]:
    """Return with which of the words the case's parameters begin."""
    parameters = case.name.partition("[")[2][:-1]
    return {word for word in words if parameters == word or parameters.startswith(word + "-")}


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Have a test's limit count by the clock of the tests."""
    if settings.method != "signal":
        return None
    item.cancel_timeout = patience.limit(  # type: ignore[attr-defined]  # what pytest-timeout calls in the end
        settings.timeout, lambda: pytest_timeout.timeout_sigalrm(item, settings)
    )
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_workers = session.config.getoption("--workers")
    if not num_workers or session.config.option.collectonly or session.testsfailed:
        return None

    def hear(measured: dict[str, list[float]]) -> None:
        for name, cases_s in measured.items():
            _measured[name] += cases_s

    run_on_workers(session, num_workers, lambda: dict(_measured), hear)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began_s = _own_s()
    try:
        return (yield)
    finally:
        _measured[name_of(item)].append(_own_s() - began_s)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
    if fixturedef.scope == "function":  # a part of its test
        return (yield)
    began_s = _own_s()
    try:
        return (yield)
    finally:
        _shared.append(_own_s() - began_s)
        _measured[_name_of_fixture(fixturedef)].append(_shared[-1])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    file = session.config.getoption("--measure-costs")
    if file and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        before_s = json.loads(file.read_text()) if file.exists() else {}
        looked_at = {name.partition("::")[0] for name in _collected}
        means_s = {
            name: cost_s
            for name, cost_s in before_s.items()
            if name in _collected or ((where := name.partition("::")[0]) not in looked_at and Path(where).exists())
        }
        means_s |= {name: sum(cases_s) / len(cases_s) for name, cases_s in _measured.items()}
        kept = {name: round(mean_s, 1) for name, mean_s in sorted(means_s.items()) if mean_s >= _KEPT_FROM_S}
        file.write_text(json.dumps(kept, indent=0) + "\n")


def _own_s() -> float:
    """Return the seconds that this process and its ended children have computed, but for shared set-ups."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) - sum(_shared)
