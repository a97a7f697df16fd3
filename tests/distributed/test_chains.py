"""Relays that hand on beside what is computed: what they touch meanwhile, how they end, and that results stay exact."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE
from dynamic_cp.pool import layer_steps
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, Rounds
from megatron.dynamic_cp.attention.mechanisms.transfers import ExchangeError
from megatron.dynamic_cp.attention.placed_packs import PlacedPacks
from megatron.dynamic_cp.pool import layer_pass
from megatron.dynamic_cp.pool.layer_pass import mirrored, tag_of
from megatron.dynamic_cp.pool.nano_batches import NanoBatchedLayer
from tests.distributed.faults import around
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.layouts import FULL_RECOMPUTE
from tests.distributed.parity import Case, Layout, case_of
from tests.distributed.test_nano_batches import lanes_of, run_in_nano_batches
from tests.distributed.test_ticks import planned_step

CPU = torch.device("cpu")
NODES_OF_TWO = Layout(2, pp=2, ranks_per_node=2, config=FULL_RECOMPUTE)
ROWS, COLUMNS = range(2)
_ROOT = Path(__file__).parents[2]


def computed(packs: PlacedPacks, slot: int, kind: int) -> set[int]:
    return {token for pack in packs.divisions[slot] for token in (pack.rows, pack.columns)[kind].tolist()}


def travelling(packs: PlacedPacks, slot: int, which: int, side: str, kind: int) -> set[int]:
    found = packs.rounds.get((slot, which))
    messages = () if found is None else getattr(found, side)
    return {token for one in messages for token in (one.rows, one.columns)[kind].tolist()}


@pytest.mark.by_day("two", "four_stages")
@pytest.mark.parametrize(
    "layout",
    [NODES_OF_TWO, Layout(4, pp=2, ranks_per_node=4), Layout(2, pp=4, ranks_per_node=4)],
    ids=["two", "four", "four_stages"],
)
def test_a_chain_touches_nothing_that_is_computed_meanwhile(layout: Layout) -> None:
    """But columns that the node gives back in backward, which are kept apart."""
    seen: Counter[str] = Counter()
    for lane in lanes_of(layout, "long_tail"):
        forward = lane.packs(CPU)
        forward = forward._replace(divisions=forward.divisions + ((),) * (2 - len(forward.divisions)))
        if not forward.relays:
            assert not handed_on(forward)
            continue
        assert handed_on(forward)
        for is_backward, packs in enumerate((forward, mirrored(forward))):
            assert packs.relays
            for kind in (ROWS, COLUMNS):
                # What comes for slot 1 is put in places that slot 0 does not use, and no message in another's.
                came = [
                    travelling(packs, slot, which, "receives", kind) for slot in (0, 1) for which in (ACROSS, INSIDE)
                ]
                assert len(set().union(*came)) == sum(map(len, came))
                own = set(range(packs.num_tokens))
                assert not (came[2] | came[3]) & computed(packs, 0, kind)
                assert not set().union(*came) & own
                # What slot 0 gives to other nodes is complete before slot 1; who holds it adds to its own.
                sent, given = (travelling(packs, 0, DELIVER, side, kind) for side in ("sends", "receives"))
                assert not sent & (own | computed(packs, 1, kind) | travelling(packs, 1, COLLECT, "receives", kind))
                assert given <= own
                # What the node gives back.
                collected = [travelling(packs, slot, COLLECT, "receives", kind) for slot in (0, 1)]
                overlaps = bool(collected[0] & computed(packs, 1, kind)), bool(collected[1] & given)
                if kind == ROWS:
                    assert not any(overlaps)
                    assert not collected[0] & collected[1]
                seen["apart"] += is_backward and kind == COLUMNS and any(overlaps)
                seen["handed on"] += bool(collected[0] | collected[1])
    assert seen["apart"] > 5
    assert seen["handed on"] > 5


def handed_on(packs: PlacedPacks) -> set[int]:
    """Return what a lane hands on of what it fetched."""
    return {
        token
        for slot in (0, 1)
        for kind in (ROWS, COLUMNS)
        for token in travelling(packs, slot, INSIDE, "sends", kind)
        if token >= packs.num_tokens
    }


@pytest.mark.parametrize("repeats", ["nothing", "attention", "layers"])
def test_rounds_under_way_at_once_have_tags_of_their_own(repeats: Any) -> None:
    most = 0
    for num_layers in (1, 2, 5):
        for is_backward in (False, True):
            open_passes: set[tuple[int, bool]] = set()
            for step in layer_steps.steps_of(num_layers, is_backward=is_backward, repeats=repeats):
                one = step.layer, step.is_backward
                open_passes.add(one)
                tags = [
                    tag_of(*each, which, slot)
                    for each in open_passes
                    for which in (ACROSS, INSIDE, COLLECT, DELIVER)
                    for slot in (0, 1)
                ]
                assert len(set(tags)) == len(tags)
                assert 1 <= min(tags) <= max(tags) <= 32
                most = max(most, len(open_passes))
                if (step.what, step.slot) == ("wait", 1):
                    open_passes.remove(one)
    assert most >= 2


def is_in_chain() -> bool:
    return threading.current_thread().name == "chains of transfers"


def run_losing(case: Case, which: int) -> tuple[str, bool]:
    """Return how a rank ended in a job in which the first chains of a round fail on all relays of the first stage."""
    failed = []

    @around(Rounds, "finish")
    def lose(finish: Any, self: Rounds, one: int, division: int) -> Any:
        if is_in_chain() and one == which and dist.get_rank() < 2:
            failed.append(one)
            raise ExchangeError("exchange was lost")
        return finish(self, one, division)

    with lose():
        try:
            run_in_nano_batches(case)
        except (ExchangeError, RuntimeError) as error:
            return str(error), bool(failed)
    return "nothing noticed", bool(failed)


@pytest.mark.parametrize(
    "which", [ACROSS, pytest.param(COLLECT, marks=pytest.mark.nightly)], ids=["to other nodes", "back to its node"]
)
def test_what_a_chain_meets_is_raised_where_it_is_waited_for_and_ends_all(which: int, reference_of: Any) -> None:
    case = case_of(reference_of, NODES_OF_TWO, planned_step)
    ended = run_ranks(4, run_losing, case, which, timeout_s=60)
    assert any(failed for _, failed in ended)
    for said, failed in ended:
        assert said != "nothing noticed"
        # A relay may meet the end of the other one before it waits for its own chain.
        assert "exchange was lost" in said or "onnection" in said or "closed" in said, (said, failed)
    assert any("exchange was lost" in said for said, _ in ended)


@around(Rounds, "finish")
def die_in_a_chain(finish: Any, self: Rounds, one: int, division: int) -> Any:
    """A relay of the second stage is gone while it hands something on."""
    if is_in_chain() and dist.get_rank() > 1:
        os._exit(9)
    return finish(self, one, division)


def run_dying(case: Case) -> None:
    with die_in_a_chain():
        run_in_nano_batches(case)


def test_a_relay_that_dies_ends_all_with_an_error_that_names_the_place(reference_of: Any) -> None:
    case = case_of(reference_of, NODES_OF_TWO, planned_step)
    with pytest.raises(RankError) as caught:
        run_ranks(4, run_dying, case, timeout_s=60)
    said = re.split(r"^rank \d:", str(caught.value), flags=re.MULTILINE)[1:]
    assert len(said) == 4
    assert sum("died without a word" in one for one in said) in (1, 2)
    for one in said:
        assert "died without a word" in one or "RuntimeError" in one or "ExchangeError" in one, one
        assert "nothing after" not in one
    assert any(re.search(r"exchange in .* failed at .*micro-batch", one) for one in said)


BLOCKED = """
import sys, torch, torch.distributed as dist
from megatron.dynamic_cp.pool.layer_pass import begin_chain
from megatron.trainer.ending.exits import leave
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    sys.stdin.read()
tensor = torch.zeros(4)
begin_chain(lambda: dist.irecv(tensor, 1).wait(), torch.device("cpu"))
print("waits", flush=True)
sys.stdin.readline()
leave(3)  # as pretrain_gpt.py does with an error
"""


@pytest.mark.nightly
@pytest.mark.slow  # two processes that import torch
def test_a_process_ends_although_a_chain_waits_for_ever(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-W", "ignore", "-c", BLOCKED, str(rank), str(tmp_path / "store")]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with start(1) as silent, start(0) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "waits\n"
            _, said = waiting.communicate("\n", timeout=10)
            assert waiting.returncode == 3, said
            assert "Traceback" not in said
        finally:
            silent.kill()
            waiting.kill()


def run_chains() -> list[Any]:
    """Return [chain, whether it would record gradients] in their order, and the message of one that failed."""
    found: list[Any] = []
    begun = [
        layer_pass.begin_chain(lambda number=number: found.append([number, torch.is_grad_enabled()]), CPU)
        for number in "ab"
    ]
    for one in reversed(begun):
        one.wait()

    def fail() -> None:
        raise ExchangeError("lost")

    failing = layer_pass.begin_chain(fail, CPU)
    layer_pass.begin_chain(lambda: None, CPU).wait()
    with pytest.raises(ExchangeError) as caught:
        failing.wait()
    return [*found, str(caught.value)]


def run_chains_before_and_behind_a_fork() -> list[Any]:
    """Return what `run_chains` does in a rank, and then in a process that it forks."""
    before = run_chains()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(run_chains()))
    child.start()
    assert receiver.poll(10), "the thread of the forked process runs nothing"
    behind = receiver.recv()
    child.join()
    return [before, behind]


def test_chains_run_in_their_order_also_in_a_forked_process() -> None:
    ((before, behind),) = run_ranks(1, run_chains_before_and_behind_a_fork, timeout_s=30)
    assert before == behind == [["a", False], ["b", False], "lost"]


class Stream:
    """A CUDA stream that notes what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told, self.device = name, told, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: str) -> None:
        self._told.append(f"{self._name} waits for {event}")

    def record_event(self) -> str:
        return f"what {self._name} has so far"


def test_on_a_gpu_a_chain_is_queued_at_once_and_keeps_what_it_reads_until_it_is_waited_for() -> None:
    told: list[str] = []
    main, side = Stream("the main stream", told), Stream("the side stream", told)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream._name}")
        yield
        told.append(f"off {stream._name}")

    class Messages:
        pass

    alive: list[weakref.ref[Messages]] = []

    def work() -> Messages:
        told.append("hands on")
        came = Messages()
        alive.append(weakref.ref(came))
        return came

    replaced: dict[str, Callable[..., Any]] = {
        "current_stream": lambda device: main,
        "stream": on,
        "Stream": lambda device: side,
    }
    with mock.patch.multiple(torch.cuda, **replaced), mock.patch.dict(layer_pass._streams, clear=True):
        chain = layer_pass.begin_chain(work, side.device)
        assert told == [
            "the side stream waits for the main stream", "on the side stream", "hands on", "off the side stream",
        ]  # fmt: skip
        assert alive[0]() is not None
        chain.wait()
        assert told[4:] == ["the main stream waits for what the side stream has so far"]
        gc.collect()
        assert alive[0]() is None
        layer_pass.begin_chain(work, side.device)
        assert list(layer_pass._streams.values()) == [side]


def test_layers_read_all_of_a_gradient() -> None:
    """What is kept apart is added where a layer takes its gradients, and where they are given back."""
    one = BackwardPass.__new__(BackwardPass)
    one.grad_2SHD, one._collected_2SHD = torch.ones(2, 4, 1, 1), torch.full((2, 4, 1, 1), 2.0)
    assert one.grad_of_columns(slice(1, 3)).flatten().tolist() == [3.0] * 4
    one._collected_2SHD = None
    assert one.grad_of_columns(slice(1, 3)).flatten().tolist() == [1.0] * 4
    assert "grad_of_columns" in NanoBatchedLayer.gradients.__code__.co_names
