"""All lanes of a CP group in one process, a thread each: the exchange code on one device, without a communicator.

`RingShift` and the collectives are replaced by hand-overs between the threads. The autograd functions are called
directly: backward must run in the lane's own thread, where torch has one per device.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from dynamic_cp.types import CAUSAL, Mask
from megatron.dynamic_cp.attention.kernels.choice import Kernel
from megatron.dynamic_cp.attention.linear import states
from megatron.dynamic_cp.attention.mechanisms import blocks, collectives, ring
from megatron.dynamic_cp.attention.mechanisms.transfers import Expected
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, packed_shard_positions
from tests import patience

# A lane that fails leaves the others waiting.
TIMEOUT_S = 60.0


class EmulatedGroup:
    """One lane's view of a group of threads; all views share `board`."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank, self.board = rank, board
        self.post: Counter[tuple[str, int]] = Counter()

    def size(self) -> int:
        return len(self.board.mailboxes)

    def rank(self) -> int:
        return self._rank


class Board:
    """What the lanes of a group hand to each other."""

    def __init__(self, size: int) -> None:
        self.mailboxes: list[queue.Queue[Tensor | None]] = [queue.Queue() for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.posted: list[Tensor | None] = [None] * size
        self.letters: dict[tuple[int, int, int], list[Tensor]] = {}
        self.changed = threading.Condition()
        self.failed = False

    def fail(self) -> None:
        """Let the lanes end that wait for one that failed."""
        self.barrier.abort()
        for mailbox in self.mailboxes:
            mailbox.put(None)
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return what all lanes posted."""
        self.posted[rank] = tensor
        self.barrier.wait()
        everything = list(self.posted)
        self.barrier.wait()
        return everything  # type: ignore[return-value]


class Shift:
    """`exchange.RingShift` between threads. Keeps the order of the device's stream, which all threads share."""

    def __init__(
        self, tensor: Tensor, group: EmulatedGroup, params: DynamicPackedSeqParams, into: Tensor | None = None
    ) -> None:
        self._group = group
        group.board.mailboxes[(group.rank() + 1) % group.size()].put(tensor.clone())
        params.stats.bytes_sent += tensor.nbytes

    def wait(self) -> Tensor:
        received = self._group.board.mailboxes[self._group.rank()].get(timeout=TIMEOUT_S)
        if received is None:
            raise RuntimeError("another lane failed")
        return received


class Messages:
    """`transfers.LaneMessages` between threads: the n-th one that a lane expects of another is the n-th one sent."""

    def __init__(
        self, sends: Sequence[tuple[int, Sequence[Tensor]]], receives: Sequence[tuple[int, Sequence[Expected]]],
        params: DynamicPackedSeqParams, _tag: int = 0,
    ) -> None:  # fmt: skip
        group: Any = params.cp_group
        self._board, own, post = group.board, group.rank(), group.post
        with self._board.changed:
            for lane, tensors in sends:
                self._board.letters[own, lane, post["to", lane]] = [x.clone() for x in tensors]
                post["to", lane] += 1
                params.stats.bytes_sent += sum(x.nbytes for x in tensors)
            self._board.changed.notify_all()
        self._expected = []
        for lane, expected in receives:
            self._expected.append(((lane, own, post["from", lane]), expected))
            post["from", lane] += 1

    def wait(self) -> list[list[Tensor]]:
        found = []
        for key, expected in self._expected:
            with self._board.changed:
                self._board.changed.wait_for(
                    lambda key=key: key in self._board.letters or self._board.failed, TIMEOUT_S
                )
                if key not in self._board.letters:
                    raise RuntimeError("another lane failed")
                found.append(self._board.letters.pop(key))
            assert [(x.shape, x.dtype) for x in found[-1]] == list(expected), "another message came than was expected"
        return found


def _all_gather(x: Tensor, params: Any) -> Tensor:
    return torch.cat(params.cp_group.board.gather(params.cp_group.rank(), x))


def _reduce_scatter(x: Tensor, params: Any) -> Tensor:
    group = params.cp_group
    parts = [other.chunk(group.size())[group.rank()] for other in group.board.gather(group.rank(), x)]
    return torch.stack(parts).sum(0, dtype=torch.float32).to(x.dtype)


def _all_to_all(x_PTHD: Tensor, group: EmulatedGroup, _params: Any) -> Tensor:
    return torch.stack([other[group.rank()] for other in group.board.gather(group.rank(), x_PTHD)])


def _all_to_all_messages(
    messages: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Expected]], params: Any
) -> list[list[Tensor]]:
    group = params.cp_group
    posted: Any = [[tensor.clone() for tensor in message] for message in messages]
    received = [of_lane[group.rank()] for of_lane in group.board.gather(group.rank(), posted)]
    came = [[(x.shape, x.dtype) for x in message] for message in received]
    assert came == [[*map(tuple, message)] for message in expected], "another message came than was expected"
    others = [message for lane, message in enumerate(posted) if lane != group.rank()]
    params.stats.bytes_sent += sum(x.nbytes for message in others for x in message)
    return received


@dataclass
class _Context:
    """What autograd gives a function."""

    saved_tensors: tuple[Tensor, ...] = ()
    params: Any = None
    scale: float = 0.0
    kernel: Any = None
    exchange: Any = field(default=None)

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


@contextlib.contextmanager
def _threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that have given back MKL's memory when this is left: a fork meanwhile inherits a lock nobody opens."""
    threads: list[Path] = []
    with ThreadPoolExecutor(
        number, initializer=lambda: threads.append(Path(f"/proc/self/task/{threading.get_native_id()}"))
    ) as pool:
        yield pool
    deadline = patience.now_s() + TIMEOUT_S
    while any(thread.exists() for thread in threads):
        assert patience.now_s() < deadline, "a lane's thread does not end"
        time.sleep(1e-4)


def attend(
    inputs_THD: list[Tensor], padded_seqlens: tuple[int, ...], cp_size: int, kernel: Kernel, exchange: str = "p2p",
    inner: int = 2, around: Callable[[], Any] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return out and the gradients of q, k and v of the whole pack; `around` makes a context manager for all passes."""
    device = inputs_THD[0].device
    board = Board(cp_size)
    outer = max(1, cp_size // inner)
    inner_boards, outer_boards = [Board(inner) for _ in range(outer)], [Board(outer) for _ in range(inner)]
    starts = torch.tensor((0, *padded_seqlens[:-1])).cumsum(0)
    starts = starts.repeat_interleave(torch.tensor([seqlen // cp_size for seqlen in padded_seqlens]))
    tokens = [
        (starts + torch.from_numpy(packed_shard_positions(padded_seqlens, cp_size, rank))).to(device)
        for rank in range(cp_size)
    ]

    inside = contextlib.ExitStack()
    begin = threading.Barrier(cp_size, lambda: inside.enter_context(around()) if around else None, TIMEOUT_S)
    end = threading.Barrier(cp_size, inside.close, TIMEOUT_S)

    def lane(rank: int) -> list[Tensor]:
        group = EmulatedGroup(rank, board)
        levels = {
            "a2a": (group, None),
            "a2a+p2p": (
                EmulatedGroup(rank % inner, inner_boards[rank // inner]),
                EmulatedGroup(rank // inner, outer_boards[rank % inner]),
            ),
        }
        params = DynamicPackedSeqParams.build(
            padded_seqlens,
            tokens[rank],
            group,  # type: ignore[arg-type]
            cp_comm_type=exchange,  # type: ignore[arg-type]
            label="emulated",
            stats=ExchangeStats(),
            levels=levels.get(exchange, (None, group)) if cp_size > 1 else None,  # type: ignore[arg-type]
        )
        q, k, v, grad = (x[tokens[rank]] for x in inputs_THD)
        context = _Context()
        begin.wait()
        with torch.no_grad():
            out = Attention.forward(context, q, k, v, params, q.shape[-1] ** -0.5, kernel)
            grads = Attention.backward(context, grad)
        end.wait()
        return [out, *grads[:3]]

    lanes = run_lanes(cp_size, lane, [board, *inner_boards, *outer_boards], (begin, end), inside)
    whole = [torch.empty_like(x) for x in (inputs_THD[0], *inputs_THD[:3])]
    for rank, parts in enumerate(lanes):
        for target, part in zip(whole, parts, strict=True):
            target[tokens[rank]] = part
    return whole


def run_lanes(
    number: int, lane: Callable[[int], Any], boards: Sequence[Board], barriers: Sequence[threading.Barrier] = (),
    inside: contextlib.AbstractContextManager[Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Return what `lane` does for each of `number` lanes, in threads whose transfers go over `boards`."""

    def guarded(rank: int) -> Any:
        """Let the other lanes end, too, when this one fails."""
        try:
            return lane(rank)
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            for board in boards:
                board.fail()
            raise

    with (
        mock.patch.object(ring, "RingShift", Shift),
        mock.patch.object(collectives, "all_gather_tokens", _all_gather),
        mock.patch.object(collectives, "reduce_scatter_tokens", _reduce_scatter),
        mock.patch.object(collectives, "all_to_all_heads", _all_to_all),
        mock.patch.object(blocks, "LaneMessages", Messages),
        mock.patch.object(states, "all_to_all_messages", _all_to_all_messages),
        mock.patch.object(states, "LaneMessages", Messages),
        inside or contextlib.nullcontext(),
        _threads(number) as pool,
    ):
        return list(pool.map(guarded, range(number)))


def on_lanes(
    padded_seqlens: tuple[int, ...], cp_size: int, work: Callable[[DynamicPackedSeqParams], Any], **more: Any
) -> list[Any]:
    """Return what `work` does on each lane with the parameters of a pack; on the CPU it may run backward passes."""
    board = Board(cp_size)

    def lane(rank: int) -> Any:
        positions = torch.from_numpy(packed_shard_positions(padded_seqlens, cp_size, rank))
        group: Any = EmulatedGroup(rank, board)
        return work(
            DynamicPackedSeqParams.build(
                padded_seqlens, positions, group, label="emulated", stats=ExchangeStats(), **more
            )
        )

    return run_lanes(cp_size, lane, [board])


class Placed(NamedTuple):
    """What a lane of a placed bucket computed: its tensors have padding behind its tokens, lse is [T, heads]. With
    exchanged heads lse is of the inner group's tokens and of this lane's heads."""

    tensors: tuple[Tensor, ...]
    params: DynamicPackedSeqParams
    sent_bytes: tuple[int, int]


def attend_placed(
    inputs_THD: Sequence[Sequence[Tensor]], lanes: Sequence[PlacedLane], kernel: Kernel, mask: Mask = CAUSAL
) -> list[Placed]:
    """Return what each lane of a placed bucket computes of its q, k, v and gradient of the output."""
    board, inner = Board(len(lanes)), lanes[0].inner_cp_size
    inner_boards = [Board(inner) for _ in range(len(lanes) // inner)]

    def lane(rank: int) -> Placed:
        q, k, v, grad = inputs_THD[rank]
        stats = ExchangeStats()
        group = EmulatedGroup(rank, board)
        members = EmulatedGroup(rank % inner, inner_boards[rank // inner]) if inner > 1 else None
        params = DynamicPackedSeqParams.build(
            (len(q),),
            torch.zeros(len(q), dtype=torch.int64, device=q.device),
            group,  # type: ignore[arg-type]
            cp_comm_type="blocks",
            levels=(members, group),  # type: ignore[arg-type]
            label="emulated", stats=stats, mask=mask, placed=lanes[rank],
        )  # fmt: skip
        context = _Context()
        with torch.no_grad():
            out = Attention.forward(context, q, k, v, params, q.shape[-1] ** -0.5, kernel)
            forward_bytes = stats.bytes_sent
            grads = Attention.backward(context, grad)
        tensors = (out, context.saved_tensors[3].t(), *(x for x in grads[:3] if x is not None))
        return Placed(tensors, params, (forward_bytes, stats.bytes_sent - forward_bytes))

    found = run_lanes(len(lanes), lane, [board, *inner_boards])
    assert not board.letters, "a message was sent that nobody takes"
    return found
