"""NCCL's rules on calls that are written down by hand: what gets through, and what does not."""

from __future__ import annotations

import pytest

from tests.fake_cuda.nccl import Call, Calls, Communicator, HostWait, Message, problems

A, B = Communicator((0, 1), "a"), Communicator((0, 1), "b")
CONNECTING = ", connecting"


def call(on: Communicator, kind: str = "sum", num_bytes: int = 4, **after: int) -> Call:
    """A collective; `after`: name of a communicator -> how many operations its stream has waited for."""
    clock = {one: after[one.name] for one in (A, B) if one.name in after}
    return Call(on, kind, num_bytes, after=clock, after_any=clock)


def messages(*entries: tuple[str, int], num_bytes: int = 4, on: Communicator = A, after: int = 0) -> Call:
    clock = {on: after}
    batch = tuple(Message(what == "send", peer, num_bytes) for what, peer in entries)
    return Call(on, "messages", messages=batch, after=clock, after_any=clock)


def ways_stuck(calls: Calls) -> set[str]:
    """Return how ranks run where they get stuck."""
    return {line.partition(":")[0] for line in problems(calls)}


ALWAYS = {f"with {queues}{more}" for queues in ("one queue", "many queues") for more in ("", CONNECTING)}


def test_a_ring_of_single_messages_gets_through_where_one_rank_receives_first() -> None:
    calls = {
        0: [messages(("send", 1)), messages(("recv", 1), after=1)],
        1: [messages(("recv", 0)), messages(("send", 0), after=1)],
    }
    assert not problems(calls)


def test_two_communicators_in_opposite_orders() -> None:
    """Where a stream waits in between always; else it is the first connections that meet."""
    without = {0: [call(A), call(B)], 1: [call(B), call(A)]}
    assert ways_stuck(without) == {f"with {queues}{CONNECTING}" for queues in ("one queue", "many queues")}
    waiting = {0: [call(A), call(B, a=1)], 1: [call(B), call(A, b=1)]}
    assert ways_stuck(waiting) == ALWAYS


def test_a_host_that_waits_calls_nothing() -> None:
    calls = {0: [call(A), HostWait("reads", {A: 1}), call(B)], 1: [call(B), HostWait("reads", {B: 1}), call(A)]}
    assert ways_stuck(calls) == ALWAYS


def test_one_queue_holds_up_what_waits_for_nothing() -> None:
    """A stream of each rank waits for its first operation, and another one calls the second."""
    calls = {0: [call(A), call(B)._replace(after_any={A: 1})], 1: [call(B), call(A)._replace(after_any={B: 1})]}
    assert "with one queue" in ways_stuck(calls)
    assert "with many queues" not in ways_stuck(calls)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], r"collective 0 on a of \(0, 1\): {0: \('sum', 4\)}"),
        ([call(A, "gather")], r"{0: \('sum', 4\), 1: \('gather', 4\)}"),
        ([call(A, num_bytes=8)], r"{0: \('sum', 4\), 1: \('sum', 8\)}"),
    ],
)
def test_ranks_that_call_other_things_are_named(theirs: list[Call], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert not (found := problems({0: [call(A)], 1: theirs})), found


def test_messages_that_do_not_meet_are_named() -> None:
    for theirs, sizes in (([messages(("recv", 0), num_bytes=8)], "[4, 8]"), ([], "[4]")):
        assert problems({0: [messages(("send", 1))], 1: theirs}) == [f"message 0 on a, rank 0 to 1: {sizes} bytes"]


def test_two_collectives_that_are_swapped_on_one_rank_are_noticed() -> None:
    calls = [call(A, "gather"), call(A, "sum", a=1), call(B, "gather", a=2)]
    assert not problems({0: calls, 1: calls})
    swapped = [calls[1]._replace(after={}), calls[0]._replace(after={A: 1}), calls[2]]
    assert problems({0: calls, 1: swapped})
    crossed = [calls[0], call(B, "gather", a=1), call(A, "sum", a=1, b=1)]
    assert problems({0: [*calls[:2], call(B, "gather", a=2)], 1: crossed})
