"""Each lane goes on with its own random states; stock checkpoints and other numbers of lanes with a warning."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from megatron.integrations.lm_adaptor.session import DRAWN_FROM, LANES, choose_lane
from tests.distributed.harness import run_ranks


def state_of(lane: int) -> dict[str, Any]:
    return {"random_rng_state": "python's", **{name: f"{name} of {lane}" for name in DRAWN_FROM}}


def saved_by_all(sharded: bool) -> dict[str, Any]:
    """Return what lane 0 saves."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedObject

    from megatron.integrations.lm_adaptor.session import add_lanes

    states: Any = [state_of(dist.get_rank())]
    if sharded:
        states = ShardedObject("rng_state", states, (1, 1), (0, 0), replica_id=dist.get_rank())
    assert dist.group.WORLD is not None
    add_lanes(states, dist.group.WORLD)
    return {"rng_state": states.data if sharded else states}


@pytest.mark.parametrize("sharded", [True, False], ids=["torch_dist", "torch"])
def test_each_lane_gets_its_own_state_back(sharded: bool) -> None:
    checkpoint = run_ranks(3, saved_by_all, sharded)[0]
    assert {name: checkpoint["rng_state"][0][name] for name in DRAWN_FROM} == {
        name: state_of(0)[name] for name in DRAWN_FROM
    }, "the stock checkout would go on with another state"
    for lane in range(3):
        loaded = copy.deepcopy(checkpoint)
        choose_lane(loaded, lane, 3)
        del loaded["rng_state"][0][LANES]
        assert loaded["rng_state"] == [state_of(lane)]


@pytest.mark.parametrize("lanes", [1, 2])
def test_other_numbers_of_lanes_are_said(caplog: pytest.LogCaptureFixture, lanes: int) -> None:
    """One: a checkpoint without dynamic CP."""
    state = state_of(0) | ({LANES: [state_of(7)] * lanes} if lanes > 1 else {})
    for lane in (0, 1):
        with caplog.at_level(logging.WARNING):
            choose_lane({"rng_state": [state]}, lane, 4)
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint has the random states of {lanes} lanes, this run has 4: dropout differs from now on"
    ]
    assert state["torch_rng_state"] == "torch_rng_state of 0"


def test_checkpoint_without_random_states() -> None:
    checkpoint = {"model": 1}
    choose_lane(checkpoint, 0, 2)
    assert checkpoint == {"model": 1}
