"""Would NCCL get through? The calls of each rank, played together under NCCL's rules.

- A communicator works through the operations of a rank in the order of their calls; messages that are sent and received
  in one batch are one operation.
- An operation starts when its call was made, the one before it on its communicator is done, and all that its stream had
  waited for by then is. It is done when all its partners have started theirs: nothing is buffered.
- With one queue (CUDA_DEVICE_MAX_CONNECTIONS=1), kernels that wait stand before all that comes later: an operation also
  needs those of earlier calls to have started, and to be done what any stream has waited for.
- Where connections block, the first call on a communicator holds up the host until all members are at theirs, and so
  does the first message between two ranks.
- Where the host waits for the device, it goes on when all is done that its stream has waited for.

Imports no torch: `tests.fake_cuda.recorder` writes the calls down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

Clock = Mapping["Communicator", int]
"""How many operations of each communicator are done."""


class Communicator(NamedTuple):
    """Ranks that have one, and its name, which they share."""

    ranks: tuple[int, ...]
    name: str


class Message(NamedTuple):
    """What a rank sends to another, or receives from it."""

    is_sent: bool
    peer: int
    num_bytes: int


class Call(NamedTuple):
    """An operation of a rank.

    Attributes:
        kind: of a collective, or "messages".
        num_bytes: of a collective whose ranks all have as many, else 0.
        after: what its stream has waited for.
        after_any: what any stream has."""

    communicator: Communicator
    kind: str
    num_bytes: int = 0
    messages: tuple[Message, ...] = ()
    after: Clock = MappingProxyType({})
    after_any: Clock = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.kind} on {self.communicator.name} of {self.communicator.ranks}"


class HostWait(NamedTuple):
    """The host waits for the device."""

    place: str
    after: Clock


Place = tuple[int, Communicator, int]
"""Rank, communicator, and the number of an operation on it."""
Calls = Mapping[int, Sequence[Call | HostWait]]


def problems(calls: Calls) -> list[str]:
    """Return in words what does not fit together; else where ranks wait for each other for ever, however they run."""
    partners, unequal = _partners(calls)
    return unequal or [
        f"with {'one queue' if one_queue else 'many queues'}{', connecting' * connects}: {line}"
        for one_queue, connects in product((False, True), repeat=2)
        for line in _Play(calls, partners, one_queue=one_queue, connects=connects).stuck()
    ]


def _numbered(calls: Sequence[Call | HostWait]) -> Iterator[tuple[int, Call]]:
    """Yield each operation of a rank with its number on its communicator."""
    counts: Counter[Communicator] = Counter()
    for call in calls:
        if isinstance(call, Call):
            yield counts[call.communicator], call
            counts[call.communicator] += 1


def _partners(calls: Calls) -> tuple[dict[Place, set[Place]], list[str]]:
    """Return with whose operations each one meets, and in words where those are none or others."""
    of_collective: dict[tuple[Communicator, int], dict[int, tuple[int, Call]]] = defaultdict(dict)
    of_message: dict[tuple[Communicator, int, int, int], list[tuple[Place, int]]] = defaultdict(list)
    for rank, of_rank in calls.items():
        counts: Counter[tuple[object, ...]] = Counter()
        for number, call in _numbered(of_rank):
            if call.kind != "messages":
                of_collective[call.communicator, counts[call.communicator,]][rank] = number, call
                counts[call.communicator,] += 1
            for is_sent, peer, num_bytes in call.messages:
                pair = (rank, peer) if is_sent else (peer, rank)
                order = counts[call.communicator, is_sent, peer]
                of_message[(call.communicator, *pair, order)].append(((rank, call.communicator, number), num_bytes))
                counts[call.communicator, is_sent, peer] += 1
    partners: dict[Place, set[Place]] = defaultdict(set)
    unequal = []
    for (communicator, number), members in of_collective.items():
        places = {(rank, communicator, at) for rank, (at, _) in members.items()}
        if (
            set(members) != set(communicator.ranks)
            or len({(one.kind, one.num_bytes) for _, one in members.values()}) > 1
        ):
            met = {rank: (one.kind, one.num_bytes) for rank, (_, one) in sorted(members.items())}
            unequal.append(f"collective {number} on {communicator.name} of {communicator.ranks}: {met}")
        for place in places:
            partners[place] |= places
    for (communicator, sender, receiver, order), ends in of_message.items():
        if len(ends) != 2 or ends[0][1] != ends[1][1]:
            sizes = [size for _, size in ends]
            unequal.append(f"message {order} on {communicator.name}, rank {sender} to {receiver}: {sizes} bytes")
        for place, _ in ends:
            partners[place] |= {other for other, _ in ends}
    return partners, unequal


class _Play:
    """All ranks side by side, each as far as the rules let it.

    Args:
        partners: of `_partners`.
        one_queue, connects: see the module."""

    def __init__(self, calls: Calls, partners: Mapping[Place, set[Place]], *, one_queue: bool, connects: bool) -> None:
        self._calls, self._partners, self._one_queue, self._connects = calls, partners, one_queue, connects
        self._at = dict.fromkeys(calls, 0)  # rank -> calls that its host has behind it
        self._issued: dict[int, list[tuple[Place, Call]]] = {rank: [] for rank in calls}  # and not started
        self._numbers: dict[int, Counter[Communicator]] = {rank: Counter() for rank in calls}
        self._reached: set[Place] = set()  # by the host, which may be held up there
        self._begun: set[Place] = set()
        self._done: dict[int, Counter[Communicator]] = {rank: Counter() for rank in calls}
        self._connected: set[tuple[Communicator, int, int]] = set()

    def stuck(self) -> list[str]:
        while sum(self._moves(rank) for rank in self._calls):
            pass
        return [line for rank in self._calls for line in self._waiting(rank)]

    def _moves(self, rank: int) -> bool:
        """Let a rank go as far as it gets; return whether it did."""
        before = self._at[rank], len(self._begun), self._done[rank].total(), len(self._reached)
        while self._at[rank] < len(self._calls[rank]) and self._host_passes(rank, self._calls[rank][self._at[rank]]):
            self._at[rank] += 1
        waiting = self._issued[rank]
        self._issued[rank] = []
        for index, (place, call) in enumerate(waiting):
            if self._starts(place, call):
                self._begun.add(place)
            elif self._one_queue:
                self._issued[rank] = waiting[index:]
                break
            else:
                self._issued[rank].append((place, call))
        for communicator, number in self._numbers[rank].items():
            at = (rank, communicator, self._done[rank][communicator])
            if at[2] < number and at in self._begun and self._partners[at] <= self._begun:
                self._done[rank][communicator] += 1
        return before != (self._at[rank], len(self._begun), self._done[rank].total(), len(self._reached))

    def _host_passes(self, rank: int, call: Call | HostWait) -> bool:
        if isinstance(call, HostWait):
            return self._is_behind(rank, call.after)
        place = (rank, call.communicator, self._numbers[rank][call.communicator])
        self._reached.add(place)
        if self._connects and not self._is_connected(place, call):
            return False
        self._numbers[rank][call.communicator] += 1
        self._issued[rank].append((place, call))
        return True

    def _is_connected(self, place: Place, call: Call) -> bool:
        rank, communicator, number = place
        if number == 0 and any((other, communicator, 0) not in self._reached for other in communicator.ranks):
            return False
        fresh = {other for other in self._partners[place] if (communicator, rank, other[0]) not in self._connected}
        if call.messages and not fresh <= self._reached:
            return False
        self._connected |= {(communicator, rank, other) for other, _, _ in fresh}
        return True

    def _starts(self, place: Place, call: Call) -> bool:
        rank, communicator, number = place
        after = call.after_any if self._one_queue else call.after
        return self._done[rank][communicator] == number and self._is_behind(rank, after)

    def _is_behind(self, rank: int, clock: Clock) -> bool:
        return all(self._done[rank][communicator] >= number for communicator, number in clock.items())

    def _waiting(self, rank: int) -> list[str]:
        """Return the first thing that a rank waits for."""
        undone = [
            call for number, call in _numbered(self._calls[rank]) if number >= self._done[rank][call.communicator]
        ]
        if undone:
            return [f"rank {rank} waits in {undone[0]}"]
        if self._at[rank] < len(self._calls[rank]):
            return [f"the host of rank {rank} waits in {self._calls[rank][self._at[rank]]}"]
        return []
