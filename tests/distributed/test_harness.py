"""What a hung rank leaves to read, and that threads of a test do not outlive it into the ranks of the next."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from megatron.dynamic_cp.attention.kernels.choice import CPU
from megatron.trainer.ending.exits import EXIT_SIGNALS
from tests.distributed import emulated_lanes
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.naive_attention import random_qkv


def wait_for_what_never_comes() -> None:
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # training takes them, too
    time.sleep(600)


@pytest.mark.slow  # it waits
def test_a_hung_rank_is_named_with_where_it_hangs() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, wait_for_what_never_comes, timeout_s=5)
    first, second = str(caught.value).split("rank 1: ")
    for text in (first, second):
        assert "nothing after 5" in text
        assert "in wait_for_what_never_comes" in text


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_emulated_lanes_leave_no_thread_that_holds_a_lock_of_mkl() -> None:
    """A process forked while such a thread ends hangs in its first bfloat16 product. Joining is not enough: of 300 of
    these calls 152 left threads behind before they were waited for."""
    inputs = [x.to(torch.bfloat16) for x in random_qkv(152, 152)]
    for _ in range(20):
        before = threads()
        emulated_lanes.attend(inputs, (8, 128, 16), 4, CPU)
        assert threads() <= before
