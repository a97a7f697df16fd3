"""What a rank asks of NCCL, in the order of its calls, and what its streams and its host wait for: `nccl.Calls`.

A stream that waits for an operation, for another stream or an event has then waited for all that these had. Until the
current stream has waited for an operation, nobody may use what it receives, nor write to what it sends; until it has
waited for another stream, nobody may use what that one wrote.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fake_cuda.nccl import Call, Clock, Communicator, HostWait, Message


class UnderWay(AssertionError):
    """An operator uses memory that NCCL still receives into or sends from, or that another stream still writes."""


_UNEQUAL = ("alltoall_base_", "alltoall_")  # each rank has splits of its own


class _Transfer(NamedTuple):
    """That an operation receives into, or sends from, a storage."""

    name: str
    receives: bool
    work: Any
    memory: StorageWeakRef


class Recorder:
    """One rank's.

    Attributes:
        calls: see the module."""

    current: Recorder | None = None

    def __init__(self) -> None:
        Recorder.current = self
        self.calls: list[Call | HostWait] = []
        self._numbers: dict[Communicator, int] = defaultdict(int)
        self._clocks: dict[Any, dict[Any, int]] = defaultdict(dict)  # of communicators, and of other streams
        self._written: dict[int, tuple[Any, int]] = {}  # storage -> which stream wrote to it, and its number of that
        self._num_written: dict[Any, int] = defaultdict(int)
        self._any: dict[Communicator, int] = {}
        self._ends: dict[int, tuple[Communicator, int, Clock]] = {}  # and what the stream had waited for that began it
        self._kept: list[Any] = []  # works, whose ids are not used again
        self._under_way: dict[int, list[_Transfer]] = defaultdict(list)
        self._batch: list[tuple[Communicator, Message, Any]] | None = None

    @classmethod
    @contextlib.contextmanager
    def of_this_rank(cls) -> Iterator[Recorder]:
        """Record what follows, and nothing behind it."""
        yield cls()
        cls.current = None

    def collective(self, name: str, args: Sequence[Any], group: dist.ProcessGroup, num_bytes: int, work: Any) -> None:
        """Add a call of torch.distributed; of messages of a batch only the whole batch."""
        self._kept.append(work)
        ranks = dist.get_process_group_ranks(group)
        communicator = Communicator(tuple(ranks), f"{group.group_desc} ({group.group_name})")
        if name not in ("send", "recv_"):
            self._add(communicator, name, 0 if name in _UNEQUAL else num_bytes, (), [work])
            return
        peer = ranks[args[2]]  # send(tensors, group, dst, tag), recv_(tensors, group, src, tag): ranks of the group
        message = Message(name == "send", peer, num_bytes)
        if self._batch is not None:
            self._batch.append((communicator, message, work))
            return
        pair = Communicator(tuple(sorted((dist.get_rank(), peer))), f"pair of {communicator.name}")
        self._add(pair, "messages", 0, (message,), [work])

    def transfers(self, name: str, work: Any, received: Iterable[torch.Tensor], sent: Iterable[torch.Tensor]) -> None:
        """Remember that the operation of a work receives into and sends from the memory of these tensors."""
        for receives, tensors in ((True, received), (False, sent)):
            for tensor in tensors:
                memory = StorageWeakRef(tensor.untyped_storage())  # kept, so that the address is not used again
                self._under_way[memory.cdata].append(_Transfer(name, receives, work, memory))

    def check_use(self, what: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Assert that the current stream has waited for all that it reads to be received and all it writes to be sent.

        Raises:
            UnderWay: it has not."""
        for writes, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._under_way:
                    self._check_memory(what, key, writes)
                stream, (writer, number) = torch.cuda.current_stream(), self._written.get(key, (None, 0))
                if writer not in (None, stream) and self._clocks[stream].get(writer, 0) < number:
                    raise UnderWay(f"{what} {'writes' if writes else 'reads'} what another stream still writes")

    def writes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember that the current stream makes these tensors, or writes to them."""
        stream = torch.cuda.current_stream()
        self._num_written[stream] += 1
        for tensor in tensors:
            self._written[tensor.untyped_storage()._cdata] = stream, self._num_written[stream]

    def _check_memory(self, what: str, key: int, writes: bool) -> None:
        waited = self._clocks[torch.cuda.current_stream()]
        for transfer in self._under_way[key]:
            communicator, number, _ = self._ends.get(id(transfer.work), (None, 0, {}))
            if communicator is not None and waited.get(communicator, 0) >= number:
                continue
            if transfer.receives or writes:
                does = "receives into" if transfer.receives else "sends"
                raise UnderWay(f"{what} {'writes' if writes else 'reads'} what {transfer.name} still {does}")

    def begin_batch(self) -> None:
        """Hold messages back until `end_batch`."""
        self._batch = []

    def end_batch(self, works: Sequence[Any]) -> None:
        """Add the messages of the batch as one operation, for which each of its works waits."""
        assert self._batch
        batch, self._batch = self._batch, None
        self._kept += works
        every = [*works, *(work for _, _, work in batch)]
        self._add(batch[0][0], "messages", 0, tuple(message for _, message, _ in batch), every)

    def wait_for_work(self, work: Any) -> None:
        """The current stream waits for the operation of a work."""
        if id(work) in self._ends:
            communicator, number, before = self._ends[id(work)]
            self.wait_for_clock(torch.cuda.current_stream(), before | {communicator: number})

    def wait_for_clock(self, stream: Any, clock: Clock) -> None:
        """A stream waits for what another one had waited for when this was its clock."""
        for ours, theirs in ((self._clocks[stream], clock), (self._any, _of_nccl(clock))):
            for one, number in theirs.items():
                ours[one] = max(number, ours.get(one, 0))

    def clock(self, stream: Any) -> dict[Any, int]:
        """Return what a stream has waited for, with its own number."""
        return {**self._clocks[stream], stream: self._num_written[stream]}

    def host_waits(self, place: str) -> None:
        """The host waits for the current stream."""
        self.calls.append(HostWait(place, _of_nccl(self.clock(torch.cuda.current_stream()))))

    def _add(
        self, communicator: Communicator, kind: str, num_bytes: int, messages: tuple[Message, ...], works: Sequence[Any]
    ) -> None:
        clock = self.clock(torch.cuda.current_stream())
        after = _of_nccl(clock)
        self.calls.append(Call(communicator, kind, num_bytes, messages, after, dict(self._any)))
        self._numbers[communicator] += 1
        of_streams = {one: number for one, number in clock.items() if one not in after}
        for work in works:
            self._ends[id(work)] = communicator, self._numbers[communicator], of_streams


def _of_nccl(clock: dict[Any, int]) -> dict[Communicator, int]:
    return {one: number for one, number in clock.items() if isinstance(one, Communicator)}
