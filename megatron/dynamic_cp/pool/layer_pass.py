"""Placed attention in two nano-batches of a lane's tokens: one nano-batch is computed while the other one travels.

The nano-batches are the two divisions of a programme; rows of the first need no columns of the second. A layer has six
steps in each direction: `launch` what others fetch of a nano-batch, `attend` to what this lane computes of it, and
`wait` for what others computed. Between them the lane does the rest of the layer for either nano-batch.

Backward runs the programme mirrored: columns that both nano-batches use are fetched for the second nano-batch, and
their gradients given back with those of the first. Every member of the group takes the same steps in the same order
(`dynamic_cp.pool.layer_steps`), also those without tokens; a rank on which another one comes up says so before it sends
anything (`StepOrder`).

*Chains* of transfers go on beside what is computed: once the first one is there, the second one begins.
Between them something is copied or added up, which nobody but this rank can do. On CPU ranks a thread does it, for all
chains of the process, in their order. It is a daemon: a process that ends does not wait for it. On a GPU the whole
chain is queued at once on a stream of its own, where waiting for NCCL holds up that stream alone.

Ranks begin their chains at the same steps of a tick. A chain waits for messages that others send at its step, outside
chains or in theirs, and for the chains before it; so the earliest one of all ranks never waits for a later one.
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
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.measuring.nvtx import span

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
    """A chain on a CPU rank."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def run(self) -> None:
        """Do the work; an error is kept for who waits."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # which has the buffers of a layer
        self._is_done.set()

    def wait(self) -> None:
        """See Chain.wait."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _OnStream:
    """A chain on a GPU.

    What its work returns was made on another stream, whose allocator must not have the memory back before that stream
    has waited for this one. What is made here goes back to this stream, whose next chain waits for all that was queued
    elsewhere before it uses it again.
    """

    def __init__(self, work: Work, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._kept = work()
        self._end = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        """See Chain.wait; it is the current stream that waits."""
        torch.cuda.current_stream(self._device).wait_event(self._end)
        self._kept = None


_threads: list[SimpleQueue[_InThread]] = []
_streams: dict[torch.device, torch.cuda.Stream] = {}


def _thread() -> SimpleQueue[_InThread]:
    """Return what the thread of this process takes its chains from."""
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


# A forked process has no thread but the one that forked.
os.register_at_fork(after_in_child=_threads.clear)


_BACK = {ACROSS: DELIVER, INSIDE: COLLECT, COLLECT: INSIDE, DELIVER: ACROSS}
"""Round -> the one that takes the opposite way."""
_BEHIND = {ACROSS: INSIDE, COLLECT: DELIVER}
"""Round -> the one that hands on what came in it."""


class StepOrder:
    """Sees to it that the steps of a tick come in their order.

    Args:
        steps: all of them; label: where in the run this is, for messages.
    """

    def __init__(self, steps: Sequence[LayerStep], label: str) -> None:
        self.steps, self._label, self._next = tuple(steps), label, 0

    def take(self, step: LayerStep) -> None:
        """Raise DisagreementError unless `step` is the next one."""
        planned = self.steps[self._next] if self._next < len(self.steps) else None
        if step != planned:
            raise DisagreementError(
                f"{self._label}: {step} is about to run as step {self._next} of {len(self.steps)}, which "
                f"is {planned or 'none'} on the other ranks of the pool: layers do not run in two nano-batches as "
                "planned, this is a bug; train without --dynamic-cp-ping-pong",
                found=str(step),
                planned=str(planned),
            )
        self._next += 1

    def finish(self) -> None:
        """Raise DisagreementError if steps are left: other ranks wait for them."""
        if self._next < len(self.steps):
            raise DisagreementError(
                f"{self._label}: {self._next} steps of layers in two nano-batches ran, the tick has {len(self.steps)}; "
                f"the next one is {self.steps[self._next]}: this is a bug; train without --dynamic-cp-ping-pong",
                found=self._next,
                planned=len(self.steps),
            )


def mirrored(packs: PlacedPacks) -> PlacedPacks:
    """Return the programme of backward: what was given back last is fetched first, over the way it took."""
    last = NUM_NANO_BATCHES - 1
    rounds = {(last - nano_batch, _BACK[way]): one._replace(sends=one.receives, receives=one.sends)
              for (nano_batch, way), one in packs.rounds.items()}  # fmt: skip
    return packs._replace(divisions=packs.divisions[::-1], rounds=rounds)


def tag_of(layer: int, is_backward: bool, which: int, slot: int) -> int:
    """Return the tag of the messages of a round, from 1 to 32; 0 is that of all other ones.

    Rounds that are begun by the thread of chains and by the one that computes have no common order. Of each direction
    at most two layers are under way on a rank, neighbours; a later one with the same tags begins when all of an earlier
    one is sent, so that messages with one tag keep their order.
    """
    return 1 + ((layer % 2 * 2 + is_backward) * NUM_NANO_BATCHES + slot) * NUM_ROUNDS + which


class LayerPass:
    """One direction of one layer.

    Args:
        one: what it works with; a caller fills it before `launch` and reads it after `wait`.
        packs: the programme, for backward mirrored.
        params: of the micro-batch.
        step_order: of the tick; layer, is_backward: which steps these are.
    """

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
        """Begin to send what others fetch of a nano-batch, over relays, too."""
        self._take("launch", slot)
        self._begin(ACROSS, slot)

    def attend(self, slot: int) -> None:
        """Compute what this lane does of a nano-batch, and begin to give it back, over relays, too."""
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

        That reads and writes other rows than this: those of a nano-batch have places of their own (`places_in_buffers`
        uses none a second time within two divisions), and who fetches a row does so in its nano-batch. Columns are
        fetched before anyone needs them and given back once all have added to them. But columns of the nano-batch that
        comes last are in use while the node gives back what it computed of them in the other nano-batch: that is kept
        apart (`BackwardPass`).
        """
        came = self._rounds.finish(first, slot)
        self._rounds.begin(_BEHIND[first], slot)
        return came

    def _finish(self, first: int, slot: int) -> None:
        """Wait for a round and the one behind it, and put what came where it belongs."""
        chain = self._chains.pop((first, slot), None)
        if chain is None:
            self._rounds.finish(first, slot)
        else:
            chain.wait()
        self._rounds.finish(_BEHIND[first], slot)

    def run(self, what: What, slot: int) -> None:
        """Take one of the steps."""
        {"launch": self.launch, "attend": self.attend, "wait": self.wait}[what](slot)

    def _take(self, what: What, slot: int) -> None:
        self._step_order.take(LayerStep(what, self._layer, self._is_backward, slot))
