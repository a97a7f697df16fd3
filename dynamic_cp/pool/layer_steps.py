"""Steps of layers that run in two nano-batches: their order, which all servers of a pool keep, and what they take.

A layer sends out the queries and keys of a nano-batch (`launch`), computes this server's share of it (`attend`) and
gets the rest back (`wait`). What attention needs comes before a launch, the rest of the layer behind a wait. Backward
counts nano-batches by *slots*: slot 0 is nano-batch 1, slot 1 is nano-batch 0.

    forward     launch 0, launch 1, attend 0, attend 1, wait 0, the next layer's launch 0, wait 1, its launch 1, ...
    backward    the same; where attention is computed again, so for the layer that comes next ("+"), beside this one:
                launch 0, launch 1, + launch 0, + launch 1, attend 0, attend 1, + attend 0, + attend 1, and then
      of layers     wait 0, wait 1, + wait 0, + wait 1
      alone         wait 0, + wait 0, + wait 1, the next layer's launch 0, wait 1, its launch 1

No server attends to a nano-batch before all have launched it, nor goes on with one before all have attended to it.
Between these barriers servers are on their own: one without tokens begins earlier and may end later, so that it has
time for more attention than others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints

NUM_NANO_BATCHES = 2
What = Literal["launch", "attend", "wait"]
Repeats = Literal["nothing", "attention", "layers"]
"""What backward computes again."""

_KINDS: tuple[What, ...] = ("launch", "attend", "wait")


class LayerStep(NamedTuple):
    """One step of a layer; prints as `launch 0 of layer 3 backward`. `layer` counts from 0 on the stage; `slot` is the
    nano-batch, in backward 1 less it."""

    what: What
    layer: int
    is_backward: bool
    slot: int

    def __str__(self) -> str:
        return f"{self.what} {self.slot} of layer {self.layer} {'backward' if self.is_backward else 'forward'}"


def steps_of(num_layers: int, *, is_backward: bool, repeats: Repeats) -> list[LayerStep]:
    """Return the steps of all layers of a stage in one tick, in order; `repeats`: what backward computes again."""
    layers = range(num_layers)[:: -1 if is_backward else 1]
    is_repeated = is_backward and repeats != "nothing"
    # `waits`: what is left of the layer before. `again`: the repeated forward pass of the layer that comes next.
    steps: list[LayerStep] = []
    waits: list[LayerStep] = []
    again = _by_kind(layers[0], is_backward=False) if is_repeated else _NONE
    steps += again.launches + again.attends
    for place, layer in enumerate(layers):
        own = _by_kind(layer, is_backward=is_backward)
        if repeats == "layers" and is_repeated:
            steps += [*waits, *again.waits, *own.launches]
        else:
            steps += [*waits[:1], *again.waits, *own.launches[:1], *waits[1:], *own.launches[1:]]
        is_last = place + 1 == num_layers
        again = _by_kind(layers[place + 1], is_backward=False) if is_repeated and not is_last else _NONE
        steps += [*again.launches, *own.attends, *again.attends]
        waits = own.waits
    return steps + waits


class _ByKind(NamedTuple):
    launches: list[LayerStep]
    attends: list[LayerStep]
    waits: list[LayerStep]


_NONE = _ByKind([], [], [])


def _by_kind(layer: int, *, is_backward: bool) -> _ByKind:
    return _ByKind(
        *([LayerStep(what, layer, is_backward, slot) for slot in range(NUM_NANO_BATCHES)] for what in _KINDS)
    )


@lru_cache(maxsize=64)
def step_table(num_layers: int, is_backward: bool, repeats: Repeats) -> Ints:
    """Return `steps_of` as int64 [step, (kind, layer, pass, slot)]; kinds are indexes of _KINDS, pass 0 is forward, 1
    backward."""
    steps = steps_of(num_layers, is_backward=is_backward, repeats=repeats)
    return np.array([(_KINDS.index(one.what), one.layer, one.is_backward, one.slot) for one in steps], np.int64)


@compiled
def seconds_of_steps(
    steps: Ints, num_layers: int, ahead: Floats, behind: Floats, attention: Floats, there: Floats, back: Floats
) -> float:
    """Return when the last server has taken all steps of `step_table`.

    Args:
        ahead, behind: [pass, server] seconds of a nano-batch of a layer before its attention is launched, and after.
        attention: [pass, slot, server] seconds of a layer.
        there, back: [pass, slot] seconds of what travels for a layer.
    """
    num_servers = ahead.shape[1]
    clock = np.zeros(num_servers)
    launched = np.zeros((2, num_layers, 2))
    attended = np.zeros((2, num_layers, 2))
    for step in range(len(steps)):
        kind, layer, which, slot = steps[step]
        latest = 0.0
        for server in range(num_servers):
            at = clock[server]
            if kind == 0:
                at += ahead[which, server]
            elif kind == 1:
                at = max(at, launched[which, layer, slot] + there[which, slot]) + attention[which, slot, server]
            else:
                at = max(at, attended[which, layer, slot] + back[which, slot]) + behind[which, server]
            clock[server] = at
            latest = max(latest, at)
        if kind == 0:
            launched[which, layer, slot] = latest
        elif kind == 1:
            attended[which, layer, slot] = latest
    return float(clock.max())
