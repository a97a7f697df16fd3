"""Steps of layers in two nano-batches: an order that all keep, and seconds as an event simulation has them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dynamic_cp.arrays import Floats
from dynamic_cp.pool.layer_steps import LayerStep, Repeats, seconds_of_steps, step_table, steps_of

REPEATS: tuple[Repeats, ...] = ("nothing", "attention", "layers")


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_every_step_comes_once_and_after_what_it_needs(num_layers: int, is_backward: bool, repeats: Repeats) -> None:
    steps = steps_of(num_layers, is_backward=is_backward, repeats=repeats)
    passes = (False, True) if is_backward and repeats != "nothing" else (is_backward,)
    wanted = {
        LayerStep(what, layer, one, slot)
        for what in ("launch", "attend", "wait")  # type: ignore[misc]
        for layer in range(num_layers)
        for one in passes
        for slot in (0, 1)
    }
    assert len(steps) == len(wanted)
    assert set(steps) == wanted
    at = {step: place for place, step in enumerate(steps)}
    for step in steps:
        if step.what != "launch":
            before = "launch" if step.what == "attend" else "attend"
            assert at[step] > at[step._replace(what=before)]  # type: ignore[arg-type]
        if step.slot:
            assert at[step] > at[step._replace(slot=0)]
        if step.is_backward and repeats != "nothing":
            # Gradients need what is computed again: whole layers before they leave, attention before it is attended to.
            assert at[step._replace(what="launch", slot=0)] > at[LayerStep("attend", step.layer, False, 1)]
        following = step.layer + (-1 if step.is_backward else 1)
        if step.what == "wait" and 0 <= following < num_layers and step.is_backward == is_backward:
            assert at[LayerStep("launch", following, step.is_backward, step.slot)] > at[step]


def test_the_next_layer_is_computed_again_beside_this_one() -> None:
    """Between launch and attend of either direction there is always something of the other, but for the first layer."""
    for repeats in ("attention", "layers"):
        steps = steps_of(4, is_backward=True, repeats=repeats)  # type: ignore[arg-type]
        at = {step: place for place, step in enumerate(steps)}
        for layer in (1, 2, 3):
            launched, attended = at[LayerStep("launch", layer, True, 1)], at[LayerStep("attend", layer, True, 0)]
            between = steps[launched + 1 : attended]
            assert between == [LayerStep("launch", layer - 1, False, slot) for slot in (0, 1)]


def event_by_event(
    steps: Sequence[LayerStep], ahead: Floats, behind: Floats, attention: Floats, there: Floats, back: Floats
) -> float:
    """Return when the last server ends: servers are processes, which wait for messages of all others."""
    num_servers = ahead.shape[1]
    messages: dict[tuple[Any, ...], list[float]] = {}
    clocks, places = [0.0] * num_servers, [0] * num_servers
    while any(place < len(steps) for place in places):
        moved = False
        for server in range(num_servers):
            while places[server] < len(steps):
                step = steps[places[server]]
                key, one = (step.layer, step.is_backward, step.slot), int(step.is_backward)
                if step.what == "launch":
                    clocks[server] += ahead[one, server]
                    messages.setdefault(("sent", *key), []).append(clocks[server])
                else:
                    needed, travels = ("sent", there) if step.what == "attend" else ("done", back)
                    came = messages.get((needed, *key), [])
                    if len(came) < num_servers:
                        break
                    clocks[server] = max(clocks[server], max(came) + travels[one, step.slot])
                    if step.what == "attend":
                        clocks[server] += attention[one, step.slot, server]
                        messages.setdefault(("done", *key), []).append(clocks[server])
                    else:
                        clocks[server] += behind[one, server]
                places[server] += 1
                moved = True
        assert moved, "servers wait for each other"
    return max(clocks)


@pytest.mark.parametrize("seed", range(12))
def test_steps_take_as_long_as_an_event_simulation_says(seed: int) -> None:
    rng, draw = random.Random(seed), np.random.default_rng(seed)
    num_layers, num_servers = rng.randint(1, 5), rng.randint(1, 6)
    is_backward, repeats = bool(seed % 2), REPEATS[seed % 3]
    ahead, behind = draw.random((2, num_servers)), draw.random((2, num_servers))
    attention, there, back = draw.random((2, 2, num_servers)), draw.random((2, 2)), draw.random((2, 2))
    times = ahead, behind, attention, there, back
    steps = steps_of(num_layers, is_backward=is_backward, repeats=repeats)
    found = seconds_of_steps(step_table(num_layers, is_backward, repeats), num_layers, *times)
    assert found == pytest.approx(event_by_event(steps, *times))
    assert found >= attention[int(is_backward)].sum(axis=0).max() * num_layers
