"""Run a function on forked gloo ranks: imported once in the parent, 4 ranks start in well under a second."""

import faulthandler
import io
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.repairs import cpu_backend
from tests import patience
from tests.distributed import one_gloo_device

_SAY_WHERE = signal.SIGUSR2  # training takes SIGUSR1
_LOOK_UP_S = 0.2


class RankError(RuntimeError):
    """A rank raised, died or hung; carries what each failed rank said."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0,
    shims_without: tuple[str, ...] = (),
) -> list[Any]:  # fmt: skip
    """Return [function(*args) on rank r for each r], on forked processes joined in one gloo job. RankError has the
    traceback of a rank that raised, or where one hangs after `timeout_s` of `patience`."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, folder, sender, shims_without, function, args)
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return _collect(ranks, folder, timeout_s)
        finally:
            for process, _ in ranks:
                _end(process)


def params_of(padded: tuple[int, ...], tokens: torch.Tensor, group: Any, **more: Any) -> DynamicPackedSeqParams:
    """Return the parameters of a micro-batch whose lane of `group` holds these tokens; `more`: as for `build`."""
    return DynamicPackedSeqParams.build(padded, tokens, group, **{"label": "test", "stats": ExchangeStats(), **more})


def _end(process: ForkProcess) -> None:
    process.join(timeout=2)
    if process.is_alive():
        process.kill()
        process.join()


def run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args) of a forked process, whatever that changes in itself; RankError: it raised or died."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_forked_main, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        succeeded, value = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False)
    except EOFError:
        raise RankError("the forked process died without a word") from None
    finally:
        _end(process)
    if not succeeded:
        raise RankError(value)
    return value


def _forked_main(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        _send(sender, (True, function(*args)))
    except BaseException as error:
        _send(sender, (False, str(error) if isinstance(error, RankError) else traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)


def _collect(ranks: list[tuple[ForkProcess, Any]], folder: Path, timeout_s: float) -> list[Any]:
    deadline_s = patience.now_s() + timeout_s
    results: list[Any] = [None] * len(ranks)
    failures = []
    for rank, (process, pipe) in enumerate(ranks):
        # Once a rank has failed its peers may wait for it in a collective: give them a moment, not the whole timeout.
        limit_s = 5.0 if failures else timeout_s
        until_s = min(deadline_s, patience.now_s() + limit_s)
        while not pipe.poll(_LOOK_UP_S) and patience.now_s() < until_s:
            pass
        if not pipe.poll():
            failures.append(f"rank {rank}: nothing after {limit_s} s\n{_where(process, _stacks(folder, rank))}")
            continue
        try:
            succeeded, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except EOFError:
            failures.append(f"rank {rank}: died without a word")
            continue
        if succeeded:
            results[rank] = value
        else:
            failures.append(f"rank {rank}:\n{value}")
    if failures:
        raise RankError("\n".join(failures))
    return results


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"stacks_of_rank_{rank}"


def _where(process: ForkProcess, stacks: Path) -> str:
    """Return the stacks of all threads of a rank that says nothing."""
    if process.pid is None or not stacks.exists():
        return "it had not begun"
    os.kill(process.pid, _SAY_WHERE)
    process.join(timeout=0.5)  # the stacks are being written
    return stacks.read_text()


def _rank_main(
    rank: int, world_size: int, folder: Path, sender: Any, shims_without: tuple[str, ...],
    function: Callable[..., Any], args: Any,
) -> None:  # fmt: skip
    try:
        faulthandler.register(_SAY_WHERE, _stacks(folder, rank).open("w"))
        torch.set_num_threads(1)
        cpu_backend.enable(shims_without)
        one_gloo_device.share()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        _send(sender, (True, function(*args)))
    except BaseException:
        _send(sender, (False, traceback.format_exc()))
    finally:
        sender.close()
        for started in multiprocessing.active_children():  # megatron-core keeps those that save for another time
            started.kill()
        # No teardown: a failed rank must not wait for its peers in a destructor.
        os._exit(0)


def _send(sender: Any, outcome: tuple[bool, Any]) -> None:
    """Send by value: tensors sent the usual way live in memory that ends with the sender."""
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    sender.send_bytes(buffer.getvalue())


def outcome_of(function: Callable[[], Any]) -> tuple[type, str, dict[str, Any]] | Any:
    """Return the value, or the error as (type, message, details)."""
    try:
        return function()
    except DynamicCPError as error:
        return type(error), str(error), error.details


def refuses(error: type[BaseException], call: Callable[[], Any], *says: str) -> None:
    """Assert that a call raises this error, with all of these words in its message."""
    with pytest.raises(error) as caught:
        call()
    missing = [part for part in says if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def initialize_model_parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, seed: int = 7) -> None:
    """Set up megatron-core's groups and random states as the trainer does."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
