"""Which mechanisms a job may use is decided in one file; by default command, trainer and functions agree."""

import inspect
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from dynamic_cp import plan_global_batch, plan_lengths
from dynamic_cp.decide.cli.parameters import DEFAULT_POLICIES, JobInput
from dynamic_cp.decide.cli.simulate import command as simulate
from dynamic_cp.decide.comparison import compare_policies
from dynamic_cp.decide.comparison.job import SweepJob
from dynamic_cp.decide.plan_arrays import _exchanges
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.models.table import flags_of
from dynamic_cp.pool.prices import TaskOptions
from dynamic_cp.types import (
    AUTO,
    AUTO_ALONE,
    CHOICES,
    RING_ALONE,
    TRAITS,
    UNPLACED,
    PlanOptions,
    Problem,
    Sample,
    Topology,
    allowed_exchanges,
    exchanges_of,
    is_placed,
    parse_mask,
    with_exchanges,
)
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.integrations.scheduler import job as scheduler
from tests.unit.mechanisms.test_latent_ring import DEEPSEEK_V3
from tests.unit.support import TINY_HARDWARE, TINY_MODEL


def test_auto_is_the_same_by_flags_and_by_model() -> None:
    windowed = replace(TINY_MODEL, window_tokens=48)
    assert windowed.window is not None
    assert DEEPSEEK_V3.has_latents
    for model in (TINY_MODEL, windowed, DEEPSEEK_V3):
        has = {"has_windows": model.window is not None, "has_latents": model.has_latents}
        for has_masks in (False, True):
            names = exchanges_of(AUTO, has_masks=has_masks, **has)
            assert allowed_exchanges(AUTO, model, has_masks=has_masks) == names
            assert any(map(is_placed, names)) == (has_masks or has["has_windows"])
            assert all(TRAITS[name].serves_windows for name in names) or not has["has_windows"]
        assert _exchanges(AUTO, model) == exchanges_of(AUTO, may_be_placed=False, **has)
        assert exchanges_of(AUTO, left_out=RING_ALONE) == tuple(name for name in exchanges_of(AUTO) if name != "p2p")
    assert CHOICES[0] == AUTO
    assert set(CHOICES[1:]) == set(TRAITS) == {*UNPLACED, *filter(is_placed, TRAITS)}


def defaults_of(asked: Any) -> dict[str, Any]:
    """Return the default of each parameter of a function, flag of settings or field of a class, that has one."""
    if asked is PlanningSettings:
        return {flag.field: flag.options.get("default") for flag in flags_of(asked)}
    if inspect.isclass(asked):
        return {field.name: field.default for field in fields(asked) if field.default is not MISSING}
    given = inspect.signature(asked).parameters.values()
    return {one.name: one.default for one in given if one.default is not one.empty}


def test_where_nothing_is_said_all_plan_alike() -> None:
    words = ["--lengths", "github", "--global-batch-size", "8", "--lanes", "4"]
    given = simulate.make_context("simulate", words).params
    job = JobInput.of(given)
    of_command = {field.name: getattr(job.options, field.name) for field in fields(PlanOptions)}
    of_command |= {field.name: getattr(job.topology, field.name) for field in fields(Topology)}
    of_command |= {"hardware": job.hardware, "data_parallel": job.data_parallel, "policy": "dynamic"}
    of_command |= {"policies": tuple(DEFAULT_POLICIES.split(",")), "tp_overlap": job.tp_overlap}
    of_command |= {"distributed_optimizer": job.data_parallel.distributed_optimizer}
    of_command |= {"noise_margin": given["noise_margin"], "ping_pong": not given["no_ping_pong"]}
    # Limits come from memory unless they are given; the flag of the trainer is the static fallback, too.
    excused = {(compare_policies, "limit_from_memory"), (PlanningSettings, "static_cp_size")}
    excused |= {(PlanningSettings, "max_tokens_per_rank"), (PlanningSettings, "hardware")}
    seen = []
    asked = (PlanOptions, Topology, Problem, SweepJob, TaskOptions, PlanningSettings)
    for one in (*asked, plan_lengths, plan_global_batch, compare_policies, scheduler.job_of):
        for name, default in defaults_of(one).items():
            if name not in of_command or (one, name) in excused or (one is scheduler.job_of and default is None):
                continue
            if name == "cp_comm_types":
                model = job.model_shape
                default = _exchanges(default, model) if default == AUTO else default
                default = with_exchanges(PlanOptions(max_tokens_per_rank=1, cp_comm_types=default), model).cp_comm_types
            assert default == of_command[name], (one, name)
            seen.append(name)
    assert defaults_of(PlanningSettings)["cp_comm_type"] == AUTO
    assert len(seen) > 50
    assert seen.count("cp_comm_types") == seen.count("data_parallel") - 2 == 2


def test_auto_is_an_option_of_its_own_and_a_problem_has_it_resolved() -> None:
    auto, ring = PlanOptions(max_tokens_per_rank=9), PlanOptions(max_tokens_per_rank=9, cp_comm_types=RING_ALONE)
    assert auto.cp_comm_types == AUTO_ALONE
    windowed = replace(TINY_MODEL, window_tokens=48)
    for model in (TINY_MODEL, windowed, DEEPSEEK_V3):
        problem = Problem(topology=Topology(num_lanes=4), model=model, hardware=TINY_HARDWARE, options=auto)
        assert problem.options.cp_comm_types == allowed_exchanges(AUTO, model)
        masked = with_exchanges(auto, model, [Sample(sample_id=0, seqlen=9, mask=parse_mask("full"))])
        assert any(map(is_placed, masked.cp_comm_types))
        assert with_exchanges(ring, model) is ring
    with pytest.raises(InvalidInputError, match="'auto' is unknown: use auto, or some of p2p"):
        PlanOptions(max_tokens_per_rank=9, cp_comm_types=(*AUTO_ALONE, *RING_ALONE))
