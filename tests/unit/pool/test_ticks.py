"""Ticks, and steps of layers in two nano-batches: each once, in an order in which no stage waits for ever."""

import random
from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any

import numpy as np
import pytest

from dynamic_cp.arrays import Floats
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.pipeline.schedule import Operation, most_alive_tokens, stage_operations
from dynamic_cp.pool import ticks as ticks_module
from dynamic_cp.pool.layer_steps import LayerStep, Repeats, seconds_of_steps, step_table, steps_of
from dynamic_cp.pool.ticks import num_ticks, stage_ticks, tick_order
from tests.unit.pool.judge_of_ticks import check_ticks


def words_of(pp_size: int, vp_size: int, rows: int) -> list[str]:
    """Return the ticks and what each stage runs, as the docstring has them."""
    stages = [" ".join(str(one or "-") for one in own) for own in stage_ticks(pp_size, vp_size, rows)]
    return [" ".join(map(str, tick_order(pp_size, vp_size, rows))), *stages]


def test_the_examples_of_the_docstring() -> None:
    order, *stages = words_of(2, 1, 3)
    assert order == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert stages == ["0F0 0F1 - 0F2 0B0 - 0B1 0B2", "- 0F0 0B0 0F1 0B1 0F2 0B2 -"]
    for line in (*(line.replace("0F", "F").replace("0B", "B") for line in stages), *words_of(2, 2, 2)):
        assert line in " ".join((ticks_module.__doc__ or "").split())


@pytest.mark.parametrize(("pp_size", "vp_size"), list(product((1, 2, 3, 4), (1, 2, 3, 4))))
def test_chunks_run_once_each_after_their_inputs_and_no_tick_is_empty(pp_size: int, vp_size: int) -> None:
    """What `check_ticks` says is said again without it: where each operation stands, and whether its input is ahead."""
    last = pp_size * vp_size - 1
    for rows in range(1, 10):
        ticks = stage_ticks(pp_size, vp_size, rows)
        check_ticks(ticks, vp_size, rows)
        count = num_ticks(pp_size, vp_size, rows)
        assert count <= ceil(rows / pp_size) * pp_size * vp_size + pp_size - 1
        if rows % pp_size == 0 or vp_size == 1:
            assert count == rows * vp_size + pp_size - 1
        assert {len(own) for own in ticks} == {2 * count}
        place = {
            (one.kind, one.chunk * pp_size + stage, one.micro_batch): at
            for stage, own in enumerate(ticks)
            for at, one in enumerate(own)
            if one is not None
        }
        assert sorted(place) == sorted((kind, g, row) for kind in "FB" for g in range(last + 1) for row in range(rows))
        for (kind, virtual, row), at in place.items():
            before = ("F", virtual - 1, row) if kind == "F" else ("B", virtual + 1, row)
            if kind == "B":
                assert at > place["F", virtual, row]
            assert at > place.get(before, -1)
        for stage, own in enumerate(ticks):
            alive = most_alive_tokens([one for one in own if one is not None], np.ones((rows, 1), np.int64))[0]
            most = (vp_size + 1) * pp_size - 1 - 2 * stage
            assert alive <= min(most, vp_size * rows)
            if rows >= 2 * pp_size or vp_size == 1:
                assert alive == min(most, rows * vp_size)
        for kinds in zip(*ticks, strict=True):
            assert len({one.kind for one in kinds if one is not None}) == 1, "a tick in which nobody computes"


@pytest.mark.parametrize(("pp_size", "vp_size", "rows"), [(2, 1, 2), (4, 1, 8), (2, 2, 4), (4, 3, 8)])
def test_the_stock_schedule_deadlocks_with_a_pool_and_is_refused(pp_size: int, vp_size: int, rows: int) -> None:
    stock = [stage_operations(stage, pp_size, rows, vp_size) for stage in range(pp_size)]
    with pytest.raises(IllegalPlanError, match="tick 0 deadlocks: stage 1 is at 0F0 before 0F0 of stage 0") as caught:
        check_ticks(stock, vp_size, rows)
    assert "run `tick_order` on all of them" in str(caught.value)
    assert caught.value.tick == 0
    if vp_size > 1:
        return
    # Also where every stage waits for its input: then phases differ.
    late = [[*[None] * stage, *own, *[None] * (pp_size - 1 - stage)] for stage, own in enumerate(stock)]
    with pytest.raises(IllegalPlanError, match=r"stage \d is at 0[FB]\d, stage \d at 0[FB]\d|before 0"):
        check_ticks(late, 1, rows)


def changed(stage: int, place: int, operation: Operation | None) -> Any:
    ticks = stage_ticks(2, 1, 3)
    ticks[stage][place] = operation
    return ticks


@pytest.mark.parametrize(
    ("ticks", "words"),
    [
        (changed(0, 0, None), "stage 0 runs 0F0 0 times, it must be 1"),
        (changed(1, 0, Operation("F", 2)), "stage 1 runs 0F2 2 times, it must be 1"),
        ([stage_ticks(2, 1, 3)[0], stage_ticks(2, 1, 3)[1][:-1]], "stage 1 has 7 ticks, others have more"),
        ([stage_ticks(2, 1, 3)[0], [*stage_ticks(2, 1, 3)[1][1:], None]], "stage 1 is at 0F0 before 0F0 of stage 0"),
        ([[*stage_ticks(2, 1, 3)[0], None], [None, *stage_ticks(2, 1, 3)[1]]], "stage 1 at 0B0|stage 0 is at 0F2"),
    ],
)
def test_lists_that_hang_are_refused_with_the_stages_that_do(ticks: Any, words: str) -> None:
    with pytest.raises(IllegalPlanError, match=words):
        check_ticks(ticks, 1, 3)


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
            if step.layer:  # what the next layer sends out again travels beside this one's attention
                repeated = at[LayerStep("launch", step.layer - 1, False, 1)]
                assert at[step._replace(what="launch", slot=1)] < repeated < at[step._replace(what="attend", slot=0)]
        following = step.layer + (-1 if step.is_backward else 1)
        if step.what == "wait" and 0 <= following < num_layers and step.is_backward == is_backward:
            assert at[LayerStep("launch", following, step.is_backward, step.slot)] > at[step]


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
