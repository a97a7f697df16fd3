"""What a rank asks of NCCL, in the order of its calls, and what its streams and its host wait for: `nccl.Calls`.

A stream that waits for an operation, for another stream or an event has then waited for all that these had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.fake_cuda.nccl import Call, Clock, Communicator, HostWait, Message

_UNEQUAL = ("alltoall_base_", "alltoall_")  # each rank has splits of its own


class Recorder:
    """One rank's.

    Attributes:
        calls: see the module.
    """

    current: Recorder | None = None

    def __init__(self) -> None:
        Recorder.current = self
        self.calls: list[Call | HostWait] = []
        self._numbers: dict[Communicator, int] = defaultdict(int)
        self._clocks: dict[Any, dict[Communicator, int]] = defaultdict(dict)
        self._any: dict[Communicator, int] = {}
        self._ends: dict[int, tuple[Communicator, int]] = {}
        self._kept: list[Any] = []  # works, whose ids are not used again
        self._batch: list[tuple[Communicator, Message, Any]] | None = None

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
            communicator, number = self._ends[id(work)]
            self.wait_for_clock(torch.cuda.current_stream(), {communicator: number})

    def wait_for_clock(self, stream: Any, clock: Clock) -> None:
        """A stream waits for what another one had waited for when this was its clock."""
        for ours in (self._clocks[stream], self._any):
            for communicator, number in clock.items():
                ours[communicator] = max(number, ours.get(communicator, 0))

    def clock(self, stream: Any) -> dict[Communicator, int]:
        """Return what a stream has waited for."""
        return dict(self._clocks[stream])

    def host_waits(self, place: str) -> None:
        """The host waits for the current stream."""
        self.calls.append(HostWait(place, self.clock(torch.cuda.current_stream())))

    def _add(
        self,
        communicator: Communicator,
        kind: str,
        num_bytes: int,
        messages: tuple[Message, ...],
        works: Sequence[Any],
    ) -> None:
        stream = torch.cuda.current_stream()
        call = Call(communicator, kind, num_bytes, messages, self.clock(stream), dict(self._any))
        self.calls.append(call)
        self._numbers[communicator] += 1
        for work in works:
            self._ends[id(work)] = communicator, self._numbers[communicator]
