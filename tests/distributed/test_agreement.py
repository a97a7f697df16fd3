"""Nobody raises alone: outcomes and errors are the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dynamic_cp.errors import CheckpointError, DataError, DisagreementError, DynamicCPError, IllegalPlanError
from megatron.dynamic_cp.agreement.verify import (
    SilentRankZeroError,
    check_same_digest,
    publish_outcome,
    run_on_all_ranks,
    run_on_rank_zero,
    stop_waiting_after,
)
from tests import patience
from tests.distributed.harness import run_ranks


def outcome_of(function: Callable[[], Any]) -> tuple[type, str, dict[str, Any]] | Any:
    """Return the value, or the error as (type, message, details)."""
    try:
        return function()
    except DynamicCPError as error:
        return type(error), str(error), error.details


def publish(error: DynamicCPError | None) -> tuple[Any, list[int]]:
    """Return the outcome on this rank, and who computed."""
    computed = []

    def compute() -> dict[str, Any]:
        computed.append(dist.get_rank())
        if error is not None:
            raise error
        return {"rank": dist.get_rank(), "numbers": (1, 2)}

    return outcome_of(lambda: publish_outcome("test/key", compute)), computed


def test_rank_zero_computes_and_all_ranks_get_its_value() -> None:
    results = run_ranks(3, publish, None, timeout_s=60)
    assert [value for value, _ in results] == [{"rank": 0, "numbers": [1, 2]}] * 3
    assert [computed for _, computed in results] == [[0], [], []]


def test_error_of_rank_zero_is_raised_on_all_ranks() -> None:
    results = run_ranks(3, publish, CheckpointError("no checkpoint 7", iteration=7), timeout_s=60)
    assert [value for value, _ in results] == [(CheckpointError, "no checkpoint 7", {"iteration": 7})] * 3


def fail_unexpectedly() -> tuple[str, float]:
    """A bug on rank 0: return what this rank raises and when."""
    started = patience.now_s()
    with pytest.raises((KeyError, DynamicCPError)) as caught:
        run_on_rank_zero(lambda: {}["missing"])
    return f"{caught.type.__name__}: {caught.value}", patience.now_s() - started


def test_bug_on_rank_zero_does_not_leave_the_others_waiting() -> None:
    results = run_ranks(3, fail_unexpectedly, timeout_s=20)
    assert results[0][0] == "KeyError: 'missing'", "rank 0 keeps its own error and traceback"
    for message, seconds in results[1:]:
        assert "rank 0 failed: KeyError: 'missing'" in message
        assert seconds < 10


def run_twice_on_rank_zero() -> list[Any]:
    values = [run_on_rank_zero(lambda value=value: (value, dist.get_rank())) for value in ("first", "second")]
    failed = outcome_of(lambda: run_on_rank_zero(lambda: _raise(DataError("torn", path="x"))))
    return [*values, failed, run_on_rank_zero(lambda: "after an error")]


def _raise(error: Exception) -> None:
    raise error


def test_calls_on_rank_zero_do_not_mix() -> None:
    expected = [["first", 0], ["second", 0], (DataError, "torn", {"path": "x"}), "after an error"]
    assert run_ranks(3, run_twice_on_rank_zero, timeout_s=60) == [expected] * 3


def raise_some(errors: dict[int, DynamicCPError]) -> Any:
    rank = dist.get_rank()
    return outcome_of(lambda: run_on_all_ranks(lambda: _raise(errors[rank]) if rank in errors else rank))


def test_lowest_rank_with_an_error_speaks_for_all() -> None:
    errors = {2: DataError("two", number=2), 1: IllegalPlanError("one", number=1)}
    assert run_ranks(3, raise_some, errors, timeout_s=60) == [(IllegalPlanError, "one (rank 1)", {"number": 1})] * 3


def test_nothing_is_raised_without_an_error() -> None:
    assert run_ranks(3, raise_some, {}, timeout_s=60) == [0, 1, 2]


def compare_digests(digests: list[str]) -> Any:
    return outcome_of(lambda: check_same_digest(digests[dist.get_rank()], "the plan"))


def test_digests_are_compared() -> None:
    same, other = "f" * 64, "0" + "f" * 63
    assert run_ranks(3, compare_digests, [same] * 3, timeout_s=60) == [None] * 3
    for odd_one in range(3):
        digests = [other if rank == odd_one else same for rank in range(3)]
        results = run_ranks(3, compare_digests, digests, timeout_s=60)
        for rank, (kind, message, details) in enumerate(results):
            assert kind is DisagreementError
            assert "ranks disagree on the plan" in message
            assert f"this rank has {digests[rank][:15]}" in message
            assert details == {"smallest": int(other[:15], 16), "largest": int(same[:15], 16)}


def fail_with_a_bug_on_rank_1() -> Any:
    started = patience.now_s()
    outcome = outcome_of(lambda: run_on_all_ranks(lambda: {0: "fine"}[0 if dist.get_rank() != 1 else 7]))
    return outcome, patience.now_s() - started


def outcome_or_bug() -> Any:
    try:
        return fail_with_a_bug_on_rank_1()
    except KeyError as error:
        return ("bug", str(error)), 0.0


def test_a_bug_on_one_rank_does_not_leave_the_others_waiting() -> None:
    outcomes = run_ranks(3, outcome_or_bug, timeout_s=60)
    assert outcomes[1][0] == ("bug", "7")
    for rank in (0, 2):
        (kind, message, _), seconds = outcomes[rank]
        assert kind is DynamicCPError
        assert "KeyError: 7" in message
        assert "rank 1" in message
        assert seconds < 10


def wait_for_a_silent_rank_0() -> Any:
    """Rank 0 never speaks; the others are asked to leave soon."""
    if dist.get_rank() == 0:
        return None
    stop_waiting_after(0.5)
    started_s, began_s = time.monotonic(), patience.now_s()
    outcome = outcome_of(lambda: publish_outcome("never", lambda: None))
    assert time.monotonic() - started_s >= 0.5
    return outcome, patience.now_s() - began_s


def test_nobody_waits_for_a_dead_rank_0_after_a_signal() -> None:
    _, first, second = run_ranks(3, wait_for_a_silent_rank_0, timeout_s=60)
    for (kind, message, _), seconds in (first, second):
        assert kind is SilentRankZeroError
        assert "rank 0 has not said anything about 'never'" in message
        assert seconds < 5
