"""Placed attention in two nano-batches of a lane's tokens: one nano-batch is computed while the other one travels.

The nano-batches are the two divisions of a programme; rows of the first need no columns of the second. A layer has six
steps in each direction: `launch` what others fetch of a nano-batch, `attend` to what this lane computes of it, and
`wait` for what others computed. Between them the lane does the rest of the layer for either nano-batch.

Backward runs the programme mirrored: columns that both nano-batches use are fetched for the second nano-batch, and
their gradients given back with those of the first. Every member of the group takes the same steps in the same order
(`dynamic_cp.pool.layer_steps`), also those without tokens; a rank on which another one comes up says so before it sends
anything (`StepOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dynamic_cp.errors import DisagreementError
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, NUM_ROUNDS
from dynamic_cp.pool.layer_steps import NUM_NANO_BATCHES, Step, What
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, ForwardPass, Rounds
from megatron.dynamic_cp.attention.mechanisms.transfers import LaneMessages
from megatron.dynamic_cp.attention.placed_packs import PlacedPacks
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.measuring.nvtx import span
from megatron.dynamic_cp.pool import chains

_BACK = {ACROSS: DELIVER, INSIDE: COLLECT, COLLECT: INSIDE, DELIVER: ACROSS}
"""Round -> the one that takes the opposite way."""
_BEHIND = {ACROSS: INSIDE, COLLECT: DELIVER}
"""Round -> the one that hands on what came in it."""


class StepOrder:
    """Sees to it that the steps of a tick come in their order.

    Args:
        steps: all of them; label: where in the run this is, for messages.
    """

    def __init__(self, steps: Sequence[Step], label: str) -> None:
        self.steps, self._label, self._next = tuple(steps), label, 0

    def take(self, step: Step) -> None:
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

    Rounds that are begun by the thread of `chains` and by the one that computes have no common order. Of each direction
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
        self._chains: dict[tuple[int, int], chains.Chain] = {}

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
            self._chains[first, slot] = chains.begin(partial(self._hand_on, first, slot), self._device)
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
        self._step_order.take(Step(what, self._layer, self._is_backward, slot))
