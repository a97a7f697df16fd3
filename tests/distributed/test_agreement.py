"""Outcomes and errors are the same on all ranks, and what ranks tell each other is data: nothing planted is run."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import (
    CheckpointError,
    DataError,
    DisagreementError,
    DynamicCPError,
    IllegalPlanError,
    InfeasibleSampleError,
    InvalidInputError,
)
from megatron.dynamic_cp.agreement import messages
from megatron.dynamic_cp.agreement.verify import (
    SilentRankZeroError,
    check_same_digest,
    job_store,
    publish_outcome,
    run_on_all_ranks,
    run_on_rank_zero,
    stop_waiting_after,
)
from megatron.dynamic_cp.plans.plan_source import PlanSource
from megatron.dynamic_cp.plans.planner import ERROR, PLAN, WHOLE, lane_key
from megatron.integrations.foreign import probing
from tests import patience
from tests.distributed.harness import outcome_of, run_ranks
from tests.distributed.test_planning import PROBLEM
from tests.payload import Payload, planted, works


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


NOT_MESSAGES = {
    "nothing": b"",
    "no text": b"\xff\xfe",
    "no JSON": b"{",
    "another kind of value": b"[1]",
    "neither value nor error": b"{}",
    "an unknown class": b'{"error": "os.system", "message": "x", "details": {}}',
    "a message that is no text": b'{"error": "DataError", "message": 1, "details": {}}',
    "details without names": b'{"error": "DataError", "message": "x", "details": [1]}',
    "nested too deeply": b"[" * 100_000,
    "an integer of thousands of digits": b'{"value": ' + b"1" * 5000 + b"}",
}


def read_planted(stored: dict[str, bytes]) -> dict[str, Any]:
    """Return what rank 1 makes of each message that stands where it expects rank 0's."""
    if dist.get_rank() == 0:
        for name, message in stored.items():
            job_store().set(name, message)
    dist.barrier()
    return {
        name: None if dist.get_rank() == 0 else outcome_of(lambda name=name: publish_outcome(name, lambda: None))
        for name in stored
    }


def test_what_is_planted_in_place_of_an_outcome_is_not_run(tmp_path: Path) -> None:
    assert works(tmp_path)
    mark = tmp_path / "ran"
    _, found = run_ranks(2, read_planted, {"a pickle": planted(mark), **NOT_MESSAGES}, timeout_s=60)
    assert not mark.exists()
    assert found.keys() > NOT_MESSAGES.keys()
    for name, (kind, text, _) in found.items():
        assert kind is DisagreementError, name
        assert text.startswith(f"no message of this program under {name!r} in the job's store: ")
        assert "SECURITY.md" in text


def test_values_that_a_caller_does_not_expect_are_refused() -> None:
    (kind, text, _) = run_ranks(2, read_with_a_decoder, b'{"value": {"name": "h100"}}', timeout_s=60)[1]
    assert kind is DisagreementError
    assert "KeyError" in text


def read_with_a_decoder(message: bytes) -> Any:
    if dist.get_rank() == 0:
        return job_store().set("key", message)
    return outcome_of(lambda: publish_outcome("key", lambda: None, lambda value: value["numbers"]))


def take_planted(message: bytes) -> Any:
    """Return what rank 1 makes of `message` in place of its part of a plan."""
    source = PlanSource(None, topology=PROBLEM.topology, lane=1)
    if dist.get_rank() == 0:
        job_store().set(lane_key("dynamic_cp/plan/train/0", 1), message)
        return None
    source.request(0, ())
    outcome = outcome_of(lambda: source.take(0))
    source.close()
    return outcome


def checksummed(body: bytes) -> bytes:
    """Return a lane's part as somebody would write it who knows how."""
    return PLAN + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def test_what_is_planted_in_place_of_a_plan_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    kind, text, _ = run_ranks(2, take_planted, ERROR + planted(mark), timeout_s=60)[1]
    assert not mark.exists()
    assert kind is DisagreementError
    assert "SECURITY.md" in text


@pytest.mark.parametrize(
    "message", [b"", b"P", b"P\xff", b"X" + b"{}", checksummed(b"[]"), checksummed(b'[1,{"cp_histogram":{"x":1}},[]]')]
)
def test_a_part_of_no_plan_is_refused(message: bytes) -> None:
    kind, text, _ = run_ranks(2, take_planted, message, timeout_s=60)[1]
    assert kind is DisagreementError
    assert "part of the plan" in text


def read_whole(message: bytes) -> Any:
    job_store().set(lane_key("dynamic_cp/plan/train/0", WHOLE), message)
    return outcome_of(lambda: PlanSource(None, topology=PROBLEM.topology, lane=0).whole(0))


@pytest.mark.parametrize("message", [b"\xff", b"{"])
def test_no_whole_plan_is_refused(message: bytes) -> None:
    kind, text, _ = run_ranks(1, read_whole, message, timeout_s=60)[0]
    assert kind is InvalidInputError
    assert "not JSON" in text


def fail_on_rank_1(run: str, mark: Path) -> Any:
    """A peer that sends an object with code in it."""
    error = DataError("bad sample", evil=Payload(mark), lanes=(1, 2), path=Path("x"), number=np.int64(7), rate=0.5)

    def compute(rank: int) -> None:
        if dist.get_rank() == rank:
            raise error

    runs: dict[str, Callable[[], Any]] = {
        "all ranks": lambda: run_on_all_ranks(lambda: compute(1)),
        "rank 0": lambda: publish_outcome("key", lambda: compute(0)),
    }
    kind, text, details = outcome_of(runs[run])
    return kind, text, details if details is not error.details else "its own"


@pytest.mark.parametrize("run", ["all ranks", "rank 0"])
def test_an_error_travels_as_its_text_and_plain_details(run: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    ranks = run_ranks(2, fail_on_rank_1, run, mark, timeout_s=60)
    assert [text for _, text, _ in ranks] == ["bad sample (rank 1)" if run == "all ranks" else "bad sample"] * 2
    assert [details == "its own" for *_, details in ranks] == [run == "rank 0", False], "rank 0 keeps its traceback"
    for kind, _, details in ranks:
        assert kind is DataError
        if details != "its own":
            assert details.pop("evil").startswith("<tests.payload.Payload object")
            assert details == {"lanes": [1, 2], "path": "x", "number": 7, "rate": 0.5}
    assert not mark.exists()


class OwnError(InfeasibleSampleError):
    """A class that only one program knows."""


def fail_in_a_class_of_its_own() -> Any:
    return outcome_of(lambda: publish_outcome("key", lambda: _raise(OwnError("too long", seqlen=7))))


def test_an_error_of_another_class_arrives_as_the_nearest_of_ours() -> None:
    own, other = run_ranks(2, fail_in_a_class_of_its_own, timeout_s=60)
    assert own == (OwnError, "too long", {"seqlen": 7})
    assert other == (InfeasibleSampleError, "too long", {"seqlen": 7})


def publish_what_is_no_json(value: Any) -> str:
    with pytest.raises((TypeError, ValueError, DynamicCPError)) as caught:
        publish_outcome("key", lambda: value)
    return f"{caught.type.__name__}: {caught.value}"


def test_a_value_that_is_no_json_is_a_bug_that_all_ranks_hear_of() -> None:
    own, other = run_ranks(2, publish_what_is_no_json, Path("x"), timeout_s=60)
    assert own.startswith("TypeError")
    assert other.startswith("DynamicCPError: rank 0 failed: TypeError: ")


def probe_with_code(mark: Path) -> Any:
    class Evil(DataError):
        def __reduce__(self) -> Any:
            return Payload(mark).__reduce__()

    if dist.get_rank() == 0:
        probing.DataError = Evil  # type: ignore[misc]
    kind, text, details = outcome_of(lambda: probing.probe_lengths([0], lambda sample_id: 0))
    return kind.__name__, text, details


def test_a_peer_that_fails_to_probe_sends_no_code(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (own, *_), (kind, text, details) = run_ranks(2, probe_with_code, mark, timeout_s=60)
    assert not mark.exists()
    assert (own, kind) == ("Evil", "DataError")
    assert text.startswith("sample 0 could not be probed for its length on rank 0")
    assert details == {"sample_id": 0, "rank": 0}


def gather(texts: list[bytes]) -> list[list[bytes]]:
    """Return what all ranks say, what two of three say, and what nobody says."""
    mine, device = texts[dist.get_rank()], torch.device("cpu")
    group = dist.new_group([0, 2])
    found = [messages.all_gather_bytes(mine, device), messages.all_gather_bytes(b"", device)]
    return found + ([messages.all_gather_bytes(mine, device, group)] if dist.get_rank() != 1 else [])


def test_bytes_of_any_length_are_gathered() -> None:
    texts = [b"", b"one\0", b"\0" * 70_000]
    for rank, found in enumerate(run_ranks(3, gather, texts, timeout_s=60)):
        assert found == [texts, [b""] * 3, *([[texts[0], texts[2]]] if rank != 1 else [])]


def test_messages_are_json() -> None:
    """For whoever looks into the store."""
    assert json.loads(run_ranks(1, published, timeout_s=60)[0]) == {"value": [1, "two", None]}


def published() -> bytes:
    publish_outcome("key", lambda: (1, "two", None))
    return bytes(job_store().get("key"))
