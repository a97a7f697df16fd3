"""Placed attention in two nano-batches of a lane's tokens: one nano-batch is computed while the other one travels.

The nano-batches are the two divisions of a programme; rows of the first need no columns of the second. A layer has six
steps in each direction: `launch` what others fetch of a nano-batch, `attend` to what this lane computes of it, `wait`
for what others computed. In between, the lane does the rest of the layer. Backward runs the programme mirrored: columns
that both use are fetched for the second nano-batch, and their gradients given back with those of the first. Every
member of the group, with or without tokens, takes the same steps in the same order (`dynamic_cp.pool.layer_steps`).

A *chain* is two transfers that go on beside computation: once the first one is there, this rank copies or adds up
something and the second one begins. On CPU ranks one daemon thread runs all chains in their order; on a GPU a chain is
queued on a stream of its own, which alone waits for NCCL. A chain waits only for messages sent at its step and for the
chains before it, so the earliest one of all ranks never waits for a later one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from dynamic_cp.errors import DisagreementError
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, NUM_ROUNDS
from dynamic_cp.pool.layer_steps import NUM_NANO_BATCHES, LayerStep, What
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, ForwardPass, Rounds
from megatron.dynamic_cp.attention.mechanisms.transfers import LaneMessages
from megatron.dynamic_cp.attention.placed_packs import PlacedPacks
from megatron.dynamic_cp.measuring import span
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams

Work = Callable[[], Any]
"""Waits for a transfer and begins the next one. Returns what the device may still read or write when it returns."""


class Chain(Protocol):
    """A chain that has begun."""

    def wait(self) -> None:
        """Wait until its second transfer has begun; raise what kept it from that."""


def begin_chain(work: Work, device: torch.device) -> Chain:
    """Begin a chain behind those before it, and behind what this thread has queued on `device` so far."""
    if device.type == "cuda":
        return _OnStream(work, _stream_of(device))
    chain = _InThread(work)
    _thread().put(chain)
    return chain


class _InThread:
    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def run(self) -> None:
        """Do the work, and keep an error for `wait`."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # which has the buffers of a layer
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _OnStream:
    """A chain on a GPU. The work's tensors were made on another stream, which must not reuse their memory before it has
    waited for this one. Memory made here goes back to this stream, whose next chain waits for all that was queued
    elsewhere."""

    def __init__(self, work: Work, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._kept = work()
        self._end = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        """See Chain.wait; the current stream waits."""
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._kept = None


_threads: list[SimpleQueue[_InThread]] = []
_streams: dict[torch.device, torch.cuda.Stream] = {}


def _thread() -> SimpleQueue[_InThread]:
    if not _threads:
        _threads.append(SimpleQueue())
        threading.Thread(target=_run, args=(_threads[0],), name="chains of transfers", daemon=True).start()
    return _threads[0]


def _run(chains: SimpleQueue[_InThread]) -> None:
    with torch.no_grad():  # a thread has its own mode
        while True:
            chains.get().run()


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# A forked process has only the thread that forked.
os.register_at_fork(after_in_child=_threads.clear)


_BACK = {ACROSS: DELIVER, INSIDE: COLLECT, COLLECT: INSIDE, DELIVER: ACROSS}
"""Round -> the round in the opposite direction."""
_BEHIND = {ACROSS: INSIDE, COLLECT: DELIVER}
"""Round -> the round that hands on what came in it."""


class StepOrder:
    """Checks that the steps of a tick come in their order; `label` names the place in the run, for messages."""

    def __init__(self, steps: Sequence[LayerStep], label: str) -> None:
        self.steps, self._label, self._next = tuple(steps), label, 0

    def take(self, step: LayerStep) -> None:
        """Raise DisagreementError unless `step` is the next one."""
        planned = self.steps[self._next] if self._next < len(self.steps) else None
        if step != planned:
            raise DisagreementError(
                f"{self._label}: {step} is about to run as step {self._next} of {len(self.steps)}, which "
                f"is {planned or 'none'} on the other ranks of the pool: layers do not run in two nano-batches as "
                "planned, this is a bug; train without --dynamic-cp-ping-pong"
            )
        self._next += 1

    def finish(self) -> None:
        """Raise DisagreementError if steps are left: other ranks wait for them."""
        if self._next < len(self.steps):
            raise DisagreementError(
                f"{self._label}: {self._next} steps of layers in two nano-batches ran, the tick has {len(self.steps)}; "
                f"the next one is {self.steps[self._next]}: this is a bug; train without --dynamic-cp-ping-pong"
            )


def mirrored(packs: PlacedPacks) -> PlacedPacks:
    """Return the programme of backward: what was given back last is fetched first, the same way in reverse."""
    last = NUM_NANO_BATCHES - 1
    rounds = {(last - nano_batch, _BACK[way]): one._replace(sends=one.receives, receives=one.sends)
              for (nano_batch, way), one in packs.rounds.items()}  # fmt: skip
    return packs._replace(divisions=packs.divisions[::-1], rounds=rounds)


def tag_of(layer: int, is_backward: bool, which: int, slot: int) -> int:
    """Return the tag of a round's messages, from 1 to 32; all other messages have 0. The thread of chains and the one
    that computes begin rounds in no common order. In each direction at most two layers are under way on a rank,
    neighbours; a later one with the same tags begins when all of an earlier one is sent, so messages with one tag
    keep their order."""
    return 1 + ((layer % 2 * 2 + is_backward) * NUM_NANO_BATCHES + slot) * NUM_ROUNDS + which


class LayerPass:
    """One direction of one layer, for the steps of `layer` and `is_backward` in a tick. `one` is what it works with: a
    caller fills it before `launch` and reads it after `wait`. `packs` is the programme, mirrored for backward."""

    def __init__(
        self,
        one: ForwardPass | BackwardPass,
        packs: PlacedPacks,
        params: DynamicPackedSeqParams,
        step_order: StepOrder,
        layer: int,
        *,
        is_backward: bool,
    ) -> None:
        self.one, self._packs, self._step_order = one, packs, step_order
        self._layer, self._is_backward = layer, is_backward
        self._rounds = Rounds(one, packs.rounds, params, partial(tag_of, layer, is_backward))
        self._device = params.positions.device
        self._chains: dict[tuple[int, int], Chain] = {}

    def launch(self, slot: int) -> None:
        """Begin to send what others fetch of a nano-batch, also over relays."""
        self._take("launch", slot)
        self._begin(ACROSS, slot)

    def attend(self, slot: int) -> None:
        """Compute this lane's part of a nano-batch, and begin to give it back, also over relays."""
        self._take("attend", slot)
        self._finish(ACROSS, slot)
        with span("nano-batch %d of 2", slot):
            for pack in self._packs.divisions[slot]:
                self.one.attend(pack)
        self._begin(COLLECT, slot)

    def wait(self, slot: int) -> None:
        """Wait for what others computed of a nano-batch, and add it up."""
        self._take("wait", slot)
        self._finish(COLLECT, slot)

    def _begin(self, first: int, slot: int) -> None:
        """Begin a round, and the one behind it: at once where nothing of the first one is handed on."""
        self._rounds.begin(first, slot)
        if self._packs.relays:
            self._chains[first, slot] = begin_chain(partial(self._hand_on, first, slot), self._device)
        else:
            self._rounds.begin(_BEHIND[first], slot)

    def _hand_on(self, first: int, slot: int) -> LaneMessages | None:
        """Wait for a round and begin the one behind it, beside what is computed.

        Both touch different rows: those of a nano-batch have places of their own (`places_in_buffers` reuses none
        within two divisions) and are fetched in their nano-batch. Columns are fetched before anyone needs them and
        given back once all have added to them. Only columns of the last nano-batch are in use while the node gives back
        their sums of the other nano-batch, which are kept apart (`BackwardPass`).
        """
        came = self._rounds.finish(first, slot)
        self._rounds.begin(_BEHIND[first], slot)
        return came

    def _finish(self, first: int, slot: int) -> None:
        chain = self._chains.pop((first, slot), None)
        if chain is None:
            self._rounds.finish(first, slot)
        else:
            chain.wait()
        self._rounds.finish(_BEHIND[first], slot)

    def run(self, what: What, slot: int) -> None:
        {"launch": self.launch, "attend": self.attend, "wait": self.wait}[what](slot)

    def _take(self, what: What, slot: int) -> None:
        self._step_order.take(LayerStep(what, self._layer, self._is_backward, slot))
