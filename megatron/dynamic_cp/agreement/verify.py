"""Nobody raises alone: ranks exchange an outcome first, then all continue or all raise the same error.

An outcome that one rank has (rank 0's files, plans) goes through the job's store, one that all have through a small
all-reduce. A lost rank is the exception: its errors from torch and gloo are told from bugs here.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dynamic_cp.errors import DisagreementError, DynamicCPError
from megatron.dynamic_cp.agreement import messages, phase

_PLACE = r"\[\S*gloo/\S+:\d+\] "
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "Read timeout",
    "Wait timeout",
    "Application timeout caused pair closure",
    "Connect timeout",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
)
_OF_GLOO = re.compile(rf"{_PLACE}.*({'|'.join(_GONE)})")
T = TypeVar("T")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether another rank or the job's store is gone; only the text tells gloo's RuntimeErrors from bugs."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)) is not None
    )


def words_of(error: BaseException) -> str:
    """Return the first line of an error's text, without the place in gloo's sources and gloo's advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(_PLACE, "", first).split(". This is typically", 1)[0].rstrip(". ")


def collective_device() -> torch.device:
    """Return the device of a collective's tensors: this rank's GPU under NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def job_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _unchanged(value: Any) -> Any:
    return value


def publish_outcome(key: str, compute: Callable[[], Any], as_value: Callable[[Any], T] = _unchanged) -> T:
    """Return what rank 0's `compute()` returned, on every rank; raise its DynamicCPError on every rank. Any other
    exception is a bug: rank 0 raises it as it is, and the others get its text instead of waiting. `key` is unique in
    the job and equal on all ranks. `compute` returns a JSON value, in which tuples become lists; `as_value` converts
    it on every rank."""
    store = job_store()
    if dist.get_rank() != 0:
        return messages.decode(_wait_for(store, key), f"under {key!r} in the job's store", as_value)
    try:
        with _beating():
            message = messages.encode_value(compute())
        value = as_value(messages.value_of(message))  # as all ranks do
    except DynamicCPError as error:
        store.set(key, messages.encode_error(error))
        raise
    except Exception as error:
        failed = DynamicCPError(f"rank 0 failed: {type(error).__name__}: {error}; its log has the traceback")
        store.set(key, messages.encode_error(failed))
        raise
    store.set(key, message)
    return value


_BEAT_KEY = "dynamic_cp/rank_zero_is_waiting"
_BEAT_EVERY_S = 1.0
_silence_s = math.inf
_looked_s = _give_up_at_s = -math.inf
_seen_beat = b""
_beats = 0
_next_beat_s = 0.0


def stop_waiting_after(seconds: float) -> None:
    """Make this rank give up on rank 0 after `seconds` of silence. For signal handlers: rank 0 may be dead."""
    global _silence_s, _looked_s
    _silence_s, _looked_s = seconds, -math.inf


def beat() -> None:
    """Tell waiting ranks that rank 0 is alive, at most once a second; rank 0 calls it often."""
    global _beats, _next_beat_s
    if time.monotonic() >= _next_beat_s:
        _beats += 1
        _next_beat_s = time.monotonic() + _BEAT_EVERY_S
        job_store().set(_BEAT_KEY, str(_beats))


@contextlib.contextmanager
def _beating() -> Iterator[None]:
    """Beat while rank 0 computes, so that signalled ranks keep waiting for it."""
    done = threading.Event()
    _beat_until(done)
    try:
        yield
    finally:
        done.set()


def keep_beating() -> None:
    """Beat on rank 0 until its process ends, after a signal ended the run; do nothing on other ranks."""
    if dist.get_rank() == 0:
        _beat_until(threading.Event())


def _beat_until(done: threading.Event) -> None:
    def beat_until_done() -> None:
        with contextlib.suppress(RuntimeError):  # from the store; the main thread will see it, too
            while not done.wait(_BEAT_EVERY_S):
                beat()

    threading.Thread(target=beat_until_done, name="dynamic-cp-beat", daemon=True).start()


def rank_zero_is_silent() -> bool:
    """Return whether rank 0 has been silent for longer than `stop_waiting_after` allows; ask often."""
    global _give_up_at_s, _seen_beat, _looked_s
    if _silence_s == math.inf:
        return False
    now_s = time.monotonic()
    begins = now_s - _looked_s > _BEAT_EVERY_S  # a new wait: the last beat seen may be old
    _looked_s = now_s
    if not begins and now_s <= _give_up_at_s:
        return False
    beat_now = job_store().get(_BEAT_KEY) if job_store().check([_BEAT_KEY]) else b""
    if not begins and beat_now == _seen_beat:
        return True
    _seen_beat, _give_up_at_s = beat_now, now_s + _silence_s
    return False


def _wait_for(store: dist.Store, key: str) -> bytes:
    """Return `key`'s value once it is there. Polls, because no signal handler runs while the store itself waits."""
    started_s = time.monotonic()
    deadline_s = started_s + store.timeout.total_seconds()
    pause_s = 0.0005
    try:
        while not store.check([key]):
            if time.monotonic() > deadline_s or rank_zero_is_silent():
                raise silent_rank_zero(key, started_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.02)
        return bytes(store.get(key))
    except RuntimeError as error:  # what a store raises
        raise lost_store(error) from error


class SilentRankZeroError(DynamicCPError):
    """Rank 0 is probably dead. The only error that is not exchanged: a collective would wait for rank 0, too."""


def silent_rank_zero(key: str, since_s: float) -> SilentRankZeroError:
    """Return the error of a rank that has waited for rank 0 since `since_s` on time.monotonic()."""
    return SilentRankZeroError(
        f"{phase.current()}: rank 0 has not said anything about {key!r} for {time.monotonic() - since_s:.0f} s, rank "
        f"{dist.get_rank()} waits no longer: see rank 0's log"
    )


def lost_store(error: Exception | str) -> DynamicCPError:
    """Return the error of a rank that the job's store does not answer."""
    first_line = str(error).split("\n", 1)[0]
    kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
    return DynamicCPError(
        f"{phase.current()}: rank {dist.get_rank()} cannot reach the job's store ({kind}{first_line}): has rank 0 or "
        "its host ended? See its log; resume from the last checkpoint"
    )


def lost_rank(error: Exception) -> DynamicCPError:
    """Return the error of a rank whose collective failed because another rank is gone."""
    return DynamicCPError(
        f"{phase.current()}: one of {dist.get_world_size()} ranks ended or did not answer "
        f"({words_of(error)}); see the logs of the other ranks; resume from the last checkpoint"
    )


_calls = 0


def run_on_rank_zero(compute: Callable[[], Any], as_value: Callable[[Any], T] = _unchanged) -> T:
    """Call `publish_outcome` with a counted key; all ranks must call this equally often."""
    global _calls
    _calls += 1
    return publish_outcome(f"rank_zero/{_calls}", compute, as_value)


def run_on_all_ranks(compute: Callable[[], T], device: torch.device | None = None) -> T:
    """Return this rank's `compute()`, or raise the DynamicCPError of the lowest failing rank on all ranks. Collective.
    Any other exception is a bug: its rank raises it as it is, the others get its text. `device` holds the
    collective's tensors; None: what the job's backend needs."""
    return agree(compute, None, device=device)


def agree(
    compute: Callable[[], T],
    digest_of: Callable[[T], str] | None,
    *,
    what: str = "",
    device: torch.device | None = None,
) -> T:
    """Like `run_on_all_ranks`, and compare a digest of the value in the same collective of 24 bytes. `digest_of`
    returns the value's digest in hex; None compares nothing. If digests differ, all ranks raise a DisagreementError,
    which says `what` differs."""
    error = bug = value = None
    try:
        value = compute()
    except SilentRankZeroError:
        raise
    except DynamicCPError as caught:
        error = caught
    except Exception as caught:
        bug, error = caught, DynamicCPError(f"{type(caught).__name__}: {caught}; the rank's log has the traceback")
    prefix = 0 if error is not None or digest_of is None else _digest_prefix(digest_of(value))  # type: ignore[arg-type]
    device = device or collective_device()
    extremes = torch.tensor([int(error is not None), prefix, -prefix], device=device)
    try:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        has_error, largest, smallest = extremes.tolist()
        if not has_error:
            _check_equal(prefix, largest, -smallest, what)
            return value  # type: ignore[return-value]
        gathered = messages.all_gather_bytes(b"" if error is None else messages.encode_error(error), device)
    except RuntimeError as lost:
        if bug is not None:
            raise bug from lost
        raise error or lost_rank(lost) from lost
    if bug is not None:
        raise bug
    rank, message = next((rank, message) for rank, message in enumerate(gathered) if message)
    first = messages.decode_error(message, f"from rank {rank}")
    texts = {str(messages.decode_error(one, "from a rank")) if one else None for one in gathered}
    if len(texts) > 1 or len(gathered) == 1:
        first.args = (f"{first} (rank {rank})",)
    raise first


def _digest_prefix(digest: str) -> int:
    return int(digest[:15], 16)


def _check_equal(prefix: int, largest: int, smallest: int, what: str) -> None:
    if largest != smallest:
        raise DisagreementError(
            f"ranks disagree on {what}: digests {smallest:015x} and {largest:015x} (this rank has {prefix:015x}); "
            "all ranks must run the same version with the same settings",
            smallest=smallest,
            largest=largest,
        )


def check_same_digest(digest: str, what: str, device: torch.device | None = None) -> None:
    """Raise DisagreementError on all ranks unless `digest` (hex) is the same everywhere. Collective, 24 bytes."""
    agree(lambda: digest, lambda same: same, what=what, device=device)
