"""What a rank asks of NCCL, in the order of its calls, and what its streams and its host wait for: `nccl.Calls`.

A stream that waits for an operation, for another stream or an event has then waited for all that these had. Until the
current stream has waited for an operation, nobody may use what it receives, nor write to what it sends; until it has
waited for another stream, nobody may use what that one wrote. Rows of a tensor count by themselves where an operator
has their numbers from the host.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
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


class Indexed(NamedTuple):
    """That an operator uses only some places of a dimension of `tensor`; `numbers` are int64."""

    tensor: torch.Tensor
    dim: int
    numbers: NDArray[np.int64]


class _Part(NamedTuple):
    """Elements of a storage: those of a tensor, or with `numbers` only some of its dimension `dim`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    dim: int = -1
    numbers: bytes = b""

    @classmethod
    def of(cls, tensor: torch.Tensor, indexed: Indexed | None) -> _Part:
        whole = cls(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.element_size())
        if indexed is None or indexed.tensor is not tensor:
            return whole
        return whole._replace(dim=indexed.dim % tensor.dim(), numbers=indexed.numbers.tobytes())

    def is_all_of(self, storage: torch.UntypedStorage) -> bool:
        return self.dim < 0 and int(np.prod(self.size)) * self.itemsize == storage.nbytes()

    def overlaps(self, other: _Part) -> bool:
        return self.itemsize != other.itemsize or len(np.intersect1d(self._elements(), other._elements())) > 0

    def _elements(self) -> NDArray[np.int64]:
        found = np.array([self.offset])
        for dim, (size, stride) in enumerate(zip(self.size, self.stride, strict=True)):
            places = np.frombuffer(self.numbers, np.int64) if dim == self.dim else np.arange(size)
            found = np.add.outer(found, places * stride).reshape(-1)
        return found


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
        # Storage -> which stream wrote to what part of it, and its last number of that.
        self._written: dict[int, dict[tuple[Any, _Part], int]] = {}
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

    def check_use(
        self, what: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor], indexed: Indexed | None = None
    ) -> None:
        """Assert that the current stream has waited for all that it reads to be received and all it writes to be sent.

        Raises:
            UnderWay: it has not."""
        stream = torch.cuda.current_stream()
        waited = self._clocks[stream]
        for writes, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._under_way:
                    self._check_memory(what, key, writes)
                for (writer, part), number in self._written.get(key, {}).items():
                    if writer is stream or waited.get(writer, 0) >= number:
                        continue
                    if part.overlaps(_Part.of(tensor, indexed)):
                        raise UnderWay(f"{what} {'writes' if writes else 'reads'} what another stream still writes")

    def writes(
        self, made: Iterable[torch.Tensor], written: Iterable[torch.Tensor], indexed: Indexed | None = None
    ) -> None:
        """Remember that the current stream makes tensors, or writes to them: `check_use` has let it."""
        stream = torch.cuda.current_stream()
        self._num_written[stream] += 1
        known = {tensor.untyped_storage()._cdata for tensor in written}
        for tensor in (*(one for one in made if one.untyped_storage()._cdata not in known), *written):
            storage, part = tensor.untyped_storage(), _Part.of(tensor, indexed)
            if storage._cdata not in known or part.is_all_of(storage):
                self._written[storage._cdata] = {}  # who waits for this has waited for what was there before
            self._written.setdefault(storage._cdata, {})[stream, part] = self._num_written[stream]

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
