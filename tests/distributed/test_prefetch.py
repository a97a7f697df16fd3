"""Packing in worker processes: the same packs, and an end that waits for nobody."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dynamic_cp.errors import DataError, DynamicCPError
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts
from dynamic_cp.types import Bucket, Sample
from megatron.dynamic_cp.data.prefetch import Packer
from tests import patience
from tests.distributed.reference import SampleTokens


@pytest.fixture(autouse=True)
def no_other_loader() -> None:
    """Take away the handler that another test's DataLoader left: it would raise for the workers killed here."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def plan_of(num_samples: int, step: int = 0) -> LanePlan:
    """Return one micro-batch of many short samples on one lane."""
    samples = tuple(Sample(sample_id=step * num_samples + i, seqlen=1 + i % 7) for i in range(num_samples))
    facts = PlanFacts(
        digest="0" * 64, policy="test", num_microbatches=1, predicted_s=1.0, imbalance=1.0, reason="",
        num_samples=num_samples, seqlen_sum=sum(sample.seqlen for sample in samples), seqlen_squared_sum=0,
        cp_histogram={1: 1}, padding_fraction=0.0, rank_token_multiple=1,
    )  # fmt: skip
    return LanePlan(lane=0, buckets=(Bucket(first_lane=0, samples=samples),), facts=facts)


def read(sample_id: int, num_samples: int = 5) -> SampleTokens:
    tokens = 100 * sample_id + np.arange(1 + sample_id % num_samples % 7)
    return SampleTokens(tokens, tokens + 1, np.ones(len(tokens), np.float32))


def slow_read(sample_id: int) -> SampleTokens:
    time.sleep(60)
    return read(sample_id)


def fail_on_12(sample_id: int) -> SampleTokens:
    if sample_id == 12:
        raise DataError("sample 12 is torn", sample_id=12)
    if sample_id == 17:
        raise KeyError("a bug")
    return read(sample_id)


def test_workers_leave_garbage_of_the_training_process_alone() -> None:
    num_kept = gc.get_freeze_count()

    def read_where_it_is_kept(sample_id: int) -> SampleTokens:
        assert gc.get_freeze_count() > num_kept, "freeing a CUDA event of the other process would kill this one"
        return read(sample_id)

    packer = Packer(read_where_it_is_kept, num_workers=2)
    packer.submit(plan_of(5, 0))
    assert packer.take().columns.any()
    packer.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_pack_what_this_process_packs_in_the_same_order(num_workers: int) -> None:
    ahead, here = Packer(read, num_workers=num_workers), Packer(read)
    random_state = torch.get_rng_state()
    for step in range(7):
        for packer in (ahead, here):
            packer.submit(plan_of(5, step))
    for _ in range(7):
        first, second = ahead.take(), here.take()
        assert first.buckets == second.buckets
        for name in ("positions", "cu_seqlens", "columns", "loss_mask"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        assert first.columns.any()
    ahead.close()
    assert torch.equal(torch.get_rng_state(), random_state), "dropout must not depend on the number of workers"


def test_errors_of_a_worker_are_raised_where_its_step_is_taken() -> None:
    packer = Packer(fail_on_12, num_workers=1)
    for step in range(5):
        packer.submit(plan_of(5, step))
    packer.take()
    packer.take()
    with pytest.raises(DataError, match="sample 12 is torn") as caught:
        packer.take()
    assert caught.value.details == {"sample_id": 12}
    with pytest.raises(DynamicCPError, match="KeyError: 'a bug'; the rank's log has the traceback"):
        packer.take()
    packer.take()
    packer.close()


@pytest.mark.parametrize("reader", [read, slow_read])
def test_closing_waits_neither_for_plans_in_flight_nor_for_a_read(reader) -> None:
    """300 kB of plans: far more than the pipe to the worker holds."""
    packer = Packer(reader, num_workers=1)
    for step in range(10):
        packer.submit(plan_of(2048, step))
    workers = multiprocessing.active_children()
    assert workers
    closing = threading.Thread(target=packer.close, daemon=True)
    closing.start()
    closing.join(200)
    assert not closing.is_alive(), "close() hangs"
    deadline_s = patience.now_s() + 5
    while any(worker.is_alive() for worker in workers) and patience.now_s() < deadline_s:
        time.sleep(0.05)
    assert not any(worker.is_alive() for worker in workers)


def test_a_killed_worker_is_said_by_take_and_nowhere_else() -> None:
    packer = Packer(slow_read, num_workers=1)
    packer.submit(plan_of(5))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(1.0)  # DataLoader would raise here, in the middle of whatever runs
    with pytest.raises(DataError, match="--num-workers"):
        packer.take()
    packer.close()


def raising(error: BaseException) -> Iterator[None]:
    raise error
    yield


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "--num-workers"), (signal.SIGBUS, "a file that it has mapped .* became shorter under way")],
)
def test_a_worker_that_died_between_two_steps_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    """DataLoader looks every 5 s whether the worker that it waits for is alive."""
    packer = Packer(slow_read, num_workers=1)
    packer.submit(plan_of(5))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    worker.join()
    monkeypatch.setattr(packer, "_packed", raising(AssertionError("asks DataLoader for what does not come")))
    says = rf"DataLoader worker \(pid {worker.pid}\) was killed by signal {number}: .*{says}"
    with pytest.raises(DataError, match=says):
        packer.take()
    monkeypatch.undo()
    packer.close()


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_killed_while_it_sends_is_said_as_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A pack's tensors are fetched from the worker after its message came."""
    packer = Packer(read, num_workers=1)
    packer.submit(plan_of(1))
    packer.take()
    monkeypatch.setattr(packer, "_packed", raising(error))
    with pytest.raises(DataError, match="DataLoader worker ended as it sent a pack"):
        packer.take()
    monkeypatch.undo()
    packer.close()
