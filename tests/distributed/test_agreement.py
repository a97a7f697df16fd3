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


def _raise(error: Exception) -> None:
    raise error


def publish(key: str, error: DynamicCPError | None) -> tuple[Any, list[int]]:
    """Return the outcome on this rank, and who computed."""
    computed = []

    def compute() -> dict[str, Any]:
        computed.append(dist.get_rank())
        if error is not None:
            raise error
        return {"rank": dist.get_rank(), "numbers": (1, 2)}

    return outcome_of(lambda: publish_outcome(f"test/{key}", compute)), computed


def run_twice_on_rank_zero() -> list[Any]:
    values = [run_on_rank_zero(lambda value=value: (value, dist.get_rank())) for value in ("first", "second")]
    failed = outcome_of(lambda: run_on_rank_zero(lambda: _raise(DataError("torn", path="x"))))
    return [*values, failed, run_on_rank_zero(lambda: "after an error")]


def raise_some(errors: dict[int, DynamicCPError]) -> Any:
    rank = dist.get_rank()
    return outcome_of(lambda: run_on_all_ranks(lambda: _raise(errors[rank]) if rank in errors else rank))


def agree() -> dict[str, Any]:
    """Return all outcomes on this rank, one after the other."""
    return {
        "value": publish("value", None),
        "error of rank 0": publish("error", CheckpointError("no checkpoint 7", iteration=7)),
        "calls": run_twice_on_rank_zero(),
        "errors": raise_some({2: DataError("two", number=2), 1: IllegalPlanError("one", number=1)}),
        "no error": raise_some({}),
        "digests": [outcome_of(lambda one=one: check_same_digest(one[dist.get_rank()], "the plan")) for one in DIGESTS],
    }


SAME, OTHER = "f" * 64, "0" + "f" * 63
DIGESTS = [[SAME] * 3, *([OTHER if rank == odd else SAME for rank in range(3)] for odd in range(3))]


def test_outcomes_and_errors_are_the_same_on_all_ranks() -> None:
    ranks = run_ranks(3, agree, timeout_s=60)
    assert [rank["value"][0] for rank in ranks] == [{"rank": 0, "numbers": [1, 2]}] * 3
    assert [rank["value"][1] for rank in ranks] == [[0], [], []]
    error = (CheckpointError, "no checkpoint 7", {"iteration": 7})
    assert [rank["error of rank 0"][0] for rank in ranks] == [error] * 3
    calls = [["first", 0], ["second", 0], (DataError, "torn", {"path": "x"}), "after an error"]
    assert [rank["calls"] for rank in ranks] == [calls] * 3, "calls on rank 0 mix"
    lowest = (IllegalPlanError, "one (rank 1)", {"number": 1})
    assert [rank["errors"] for rank in ranks] == [lowest] * 3
    assert [rank["no error"] for rank in ranks] == [0, 1, 2]
    for number, rank in enumerate(ranks):
        same, *odd = rank["digests"]
        assert same is None
        for digests, (kind, message, details) in zip(DIGESTS[1:], odd, strict=True):
            assert kind is DisagreementError
            assert "ranks disagree on the plan" in message
            assert f"this rank has {digests[number][:15]}" in message
            assert details == {"smallest": int(OTHER[:15], 16), "largest": int(SAME[:15], 16)}


def meet_a_bug(rank: int, run: Callable[[Callable[[], Any]], Any]) -> tuple[str, float]:
    """A bug on one rank: return what this rank raises, and when."""
    started = patience.now_s()
    with pytest.raises((KeyError, DynamicCPError)) as caught:
        run(lambda: {0: "fine"}[7 if dist.get_rank() == rank else 0])
    return f"{caught.type.__name__}: {caught.value}", patience.now_s() - started


@pytest.mark.parametrize(
    ("rank", "run", "said"),
    [(0, run_on_rank_zero, "DynamicCPError: rank 0 failed: KeyError: 7"), (1, run_on_all_ranks, "KeyError: 7")],
)
def test_a_bug_on_one_rank_does_not_leave_the_others_waiting(
    rank: int, run: Callable[[Callable[[], Any]], Any], said: str
) -> None:
    outcomes = run_ranks(3, meet_a_bug, rank, run, timeout_s=60)
    assert outcomes.pop(rank)[0] == "KeyError: 7", "it keeps its own error and traceback"
    for message, seconds in outcomes:
        assert message.startswith("DynamicCPError: ")
        assert said in message
        assert f"rank {rank}" in message
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
