"""Placed attention in two halves of a lane's tokens: one half is computed while the other one travels.

The halves are the two divisions of a programme; rows of the first need no columns of the second. A layer has six steps
in each direction: `launch` what others fetch of a half, `attend` to what this lane computes of it, and `wait` for what
others computed. Between them the lane does the rest of the layer for either half:

    forward    launch 0, launch 1, attend 0, attend 1, wait 0, the next layer's launch 0, wait 1, its launch 1, ...
    backward   the same with turns for halves: turn 0 is half 1, turn 1 is half 0

Backward runs the programme mirrored: columns that both halves use are fetched for the second half, and their gradients
given back with those of the first. Every member of the group takes the same steps in the same order (`steps_of`), also
those without tokens; a rank on which another one comes up says so before it sends anything (`Turns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dynamic_cp.errors import DisagreementError
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE
from megatron.dynamic_cp.attention.mechanisms.blocks import BackwardPass, ForwardPass, Rounds
from megatron.dynamic_cp.attention.placed_packs import PlacedPacks
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.measuring.nvtx import span

NUM_HALVES = 2
What = Literal["launch", "attend", "wait"]
Repeats = Literal["nothing", "attention", "layers"]
"""What backward computes again."""

_BACK = {ACROSS: DELIVER, INSIDE: COLLECT, COLLECT: INSIDE, DELIVER: ACROSS}
"""Round -> the one that takes the opposite way."""


class Step(NamedTuple):
    """One step of a layer; prints as `launch 0 of layer 3 backward`.

    Attributes:
        what: which.
        layer: of the stage, from 0.
        is_backward: its direction.
        turn: 0 or 1: the half, or in backward 1 less it.
    """

    what: What
    layer: int
    is_backward: bool
    turn: int

    def __str__(self) -> str:
        return f"{self.what} {self.turn} of layer {self.layer} {'backward' if self.is_backward else 'forward'}"


def steps_of(num_layers: int, *, is_backward: bool, repeats: Repeats) -> list[Step]:
    """Return the steps of all layers of a stage in one tick, in their order.

    Layers are interleaved at their ends: what one half gets back travels while the other one's next layer begins. Those
    that are recomputed as a whole are not.

    Args:
        repeats: what this tick, or the backward one to come, computes again.
    """
    steps: list[Step] = []
    waits: list[Step] = []
    for layer in reversed(range(num_layers)) if is_backward else range(num_layers):
        *launches, first, second, wait, last_wait = _alone(layer, is_backward)
        repeated = _alone(layer, False) if is_backward and repeats != "nothing" else []
        if repeats == "layers":
            steps += [*repeated, *launches, first, second, wait, last_wait]
            continue
        # The forward pass that is repeated comes with the gradient of what leaves the layer first.
        steps += [*waits[:1], *repeated, launches[0], *waits[1:], launches[1], first, second]
        waits = [wait, last_wait]
    return steps + waits


def _alone(layer: int, is_backward: bool) -> list[Step]:
    """Return the steps of a layer that no other one interleaves."""
    kinds: tuple[What, ...] = ("launch", "attend", "wait")
    return [Step(what, layer, is_backward, turn) for what in kinds for turn in range(NUM_HALVES)]


class Turns:
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
                f"{self._label}: {step} is about to run as step {self._next} of {len(self.steps)}, which is "
                f"{planned or 'none'} on the other ranks of the pool: layers do not run in two halves as planned, this "
                "is a bug; train without --dynamic-cp-ping-pong",
                found=str(step),
                planned=str(planned),
            )
        self._next += 1

    def finish(self) -> None:
        """Raise DisagreementError if steps are left: other ranks wait for them."""
        if self._next < len(self.steps):
            raise DisagreementError(
                f"{self._label}: {self._next} steps of layers in two halves ran, the tick has {len(self.steps)}; the "
                f"next one is {self.steps[self._next]}: this is a bug; train without --dynamic-cp-ping-pong",
                found=self._next,
                planned=len(self.steps),
            )


def mirrored(packs: PlacedPacks) -> PlacedPacks:
    """Return the programme of backward: what was given back last is fetched first, over the way it took."""
    last = NUM_HALVES - 1
    rounds = {(last - half, _BACK[way]): one._replace(sends=one.receives, receives=one.sends)
              for (half, way), one in packs.rounds.items()}  # fmt: skip
    return packs._replace(divisions=packs.divisions[::-1], rounds=rounds)


class TwoHalves:
    """One direction of one layer.

    Args:
        one: what it works with; a caller fills it before `launch` and reads it after `wait`.
        packs: the programme, for backward mirrored.
        params: of the micro-batch.
        turns: of the tick; layer, is_backward: which steps these are.
    """

    def __init__(
        self,
        one: ForwardPass | BackwardPass,
        packs: PlacedPacks,
        params: DynamicPackedSeqParams,
        turns: Turns,
        layer: int,
        *,
        is_backward: bool,
    ) -> None:
        self.one, self._packs, self._turns = one, packs, turns
        self._layer, self._is_backward = layer, is_backward
        self._rounds = Rounds(one, packs.rounds, params)

    def launch(self, turn: int) -> None:
        """Begin to send what others fetch of a half."""
        self._take("launch", turn)
        self._rounds.begin(ACROSS, turn)
        if turn > 0:  # what came for the half before goes on inside the node
            self._rounds.finish(ACROSS, 0)
            self._rounds.begin(INSIDE, 0)

    def attend(self, turn: int) -> None:
        """Compute what this lane does of a half, and begin to give it back."""
        self._take("attend", turn)
        if turn > 0:
            self._rounds.finish(ACROSS, turn)
            self._rounds.begin(INSIDE, turn)
        self._rounds.finish(INSIDE, turn)
        with span("half %d of 2", turn):
            for pack in self._packs.divisions[turn]:
                self.one.attend(pack)
        self._rounds.begin(COLLECT, turn)
        self._rounds.give_back(turn)

    def wait(self, turn: int) -> None:
        """Add up what others computed of a half, and wait for it."""
        self._take("wait", turn)
        self._rounds.finish(DELIVER, turn)

    def run(self, what: What, turn: int) -> None:
        """Take one of the steps."""
        {"launch": self.launch, "attend": self.attend, "wait": self.wait}[what](turn)

    def _take(self, what: What, turn: int) -> None:
        self._turns.take(Step(what, self._layer, self._is_backward, turn))
