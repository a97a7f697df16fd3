"""Before the first iteration on CPU ranks: how fast they are, measured with steps of the run's own model.

CPUs differ by more than the planner can ignore, and so does what their ranks share. Some seconds of synthetic global
batches, run as training runs its own, correct the bundled hardware file. What came out is kept in the user's cache
folder, as a hardware file, for the next run of the same model on as many ranks of the same machine; and in the
checkpoint, so that a resumed run plans as the one that it goes on from.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from dynamic_cp.calibration.ladder import ladder
from dynamic_cp.calibration.step_fit import fit_steps, step_s
from dynamic_cp.cli.output import write_json
from dynamic_cp.errors import DynamicCPError, InvalidInputError
from dynamic_cp.learning.observations import Observation
from dynamic_cp.models.catalog import hardware_as_dict, load_hardware
from dynamic_cp.plans.serialize import dumps, loads
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import Hardware, Plan, PlannedBatch
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.agreement.verify import run_on_rank_zero
from megatron.dynamic_cp.calibration.device import cpu_name, num_cores
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.measuring.undisturbed import Moment, Took, ranks_on_node, took_since
from megatron.dynamic_cp.model.experts import as_if_nothing_was_routed
from megatron.dynamic_cp.plans.plan_source import FixedPlan
from megatron.dynamic_cp.step.bucket_times import BucketTimes
from megatron.dynamic_cp.step.schedule import run_schedule, sum_over_job
from megatron.trainer.checkpoints.state import rng_state, set_rng_state
from megatron.trainer.ending.exits import closing
from megatron.trainer.setup.model import Built
from megatron.trainer.setup.planned_runtime import PlannedRuntime
from megatron.trainer.user_cache import user_cache_folder

logger = logging.getLogger(__name__)

BUDGET_S = 7.0
"""No step begins that would end later."""
_LARGEST_SHARE = 0.8
"""Of the budget for a single step: the others need some."""
_MOST_ROUNDS = 4
_VERSION = 1
"""Of how it is measured and fitted: results of another one are not used."""


def is_wanted(mode: str, planning: PlanningSettings, device: torch.device) -> bool:
    """Return whether this run begins with a calibration: on CPU ranks, unless something else says how fast they are.

    Args:
        mode: --dynamic-cp-calibrate.

    Raises:
        InvalidInputError: one is asked for on GPUs.
    """
    if device.type != "cpu":
        if mode == "anew":
            raise InvalidInputError(
                "--dynamic-cp-calibrate anew is for CPU ranks: measure GPUs with `dynamic-cp profile`, and name its "
                "file with --dynamic-cp-hardware"
            )
        return False
    given = planning.hardware or planning.replay
    return not given and mode != "off"


def calibrate(
    runtime: PlannedRuntime, built: Built, load_saved: Callable[[], Mapping[str, Any] | None], *, anew: bool
) -> tuple[Hardware, dict[str, Any]]:
    """Return the hardware that plans of this run are made for, and what its checkpoints keep of it; collective.

    Measures only where neither the checkpoint nor the cache knows. All ranks get rank 0's numbers.

    Args:
        runtime: its hardware is corrected.
        built: what is measured.
        load_saved: returns, on rank 0, what the checkpoint that the run goes on from has kept, or None.
        anew: measure, whatever checkpoint and cache know.

    Raises:
        DynamicCPError: the checkpoint cannot be read; the same on every rank.
    """
    phase.enter("calibrating the cost model")
    job = _digest(_VERSION, runtime.topology, runtime.model_shape, runtime.used_options)
    path = _cache_path(runtime.hardware, job)
    hardware = run_on_rank_zero(
        lambda: None if anew else _as_json(_from_checkpoint(load_saved(), job) or _from_cache(path)), _from_json
    )
    if hardware is None:
        hardware = _measure(runtime, built, path)
    return hardware, {"job": job, "hardware": asdict(hardware)}


def _from_checkpoint(saved: Mapping[str, Any] | None, job: str) -> Hardware | None:
    """Return the hardware of the run that this one goes on with; None where that was another kind of job."""
    if saved is None or saved.get("job") != job:
        return None
    try:
        hardware = Hardware(**saved["hardware"])
    except (TypeError, KeyError, InvalidInputError) as error:
        logger.warning("cost model: what the checkpoint has of it is of another version (%s): plans may differ", error)
        return None
    logger.info("cost model: hardware %s of the checkpoint, so that plans are the same", hardware.name)
    return hardware


def _from_cache(path: str | None) -> Hardware | None:
    """Return what an earlier run of the same kind on this machine has found; None where there is nothing."""
    if path is None or not os.path.lexists(path):
        return None
    try:
        hardware = load_hardware(path)
    except InvalidInputError as error:
        logger.warning("cost model: %s: it is measured anew", error)
        return None
    logger.info("cost model: hardware %s, from %s", hardware.name, path)
    return hardware


def _measure(runtime: PlannedRuntime, built: Built, path: str | None) -> Hardware:
    """Return the hardware that fits steps run here and now, and keep it in `path`; collective."""
    base, topology, model, options = runtime.hardware, runtime.topology, runtime.model_shape, runtime.used_options

    def make_plans() -> list[Any]:
        cost_model = CostModel(model, base, topology, options)
        plans = ladder(cost_model, runtime.settings.seq_length)
        return [[dumps(plan), step_s(plan, cost_model)] for plan in plans]

    rungs = run_on_rank_zero(make_plans)
    plans, expected_s = [loads(text) for text, _ in rungs], [seconds for _, seconds in rungs]
    started_s = time.perf_counter()  # before, the planner's code may have been compiled, once on a machine
    with _as_if_it_had_not_been(built.wrapped):
        observations, steps = _climb(runtime, built, plans, expected_s)
    about = f"{cpu_name()}, {dist.get_world_size()} ranks of {torch.get_num_threads()} threads"

    def fit() -> dict[str, Any]:
        today = date.today().isoformat()
        found = fit_steps(
            base,
            observations,
            [(plans[index], seconds) for index, seconds in steps],
            model=model,
            topology=topology,
            options=options,
            name=f"{base.name} calibrated {today}",
            source=f"calibrated at the start of a run on {about}, torch {torch.__version__}, {today}",
        )
        logger.info(
            "cost model: hardware %s calibrated by %d steps in %.1f s on %s; %s; --dynamic-cp-calibrate anew measures "
            "again, off does not measure",
            base.name,
            len(steps),
            time.perf_counter() - started_s,
            about,
            _keep(found, path),
        )
        return asdict(found)

    return run_on_rank_zero(fit, lambda found: Hardware(**found))


def _climb(
    runtime: PlannedRuntime, built: Built, plans: Sequence[Plan], expected_s: Sequence[float]
) -> tuple[list[Observation], list[tuple[int, float]]]:
    """Run `plans`, again and again while there is time; collective.

    A small one says how fast the ranks are. Then comes the largest if there is time, because most of a training run's
    micro-batches are full, and kernels for short sequences say little of long ones. Every rank comes to the same
    decisions: they follow from the longest times of all.

    Returns:
        What buckets took, in seconds of a machine that does nothing else, and (index of the plan, such seconds) of
        each step.
    """
    ranks_per_core = max(1.0, ranks_on_node(runtime.topology) / num_cores())
    times = BucketTimes(
        built.wrapped,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        lane=runtime.groups.lane,
        device=runtime.device,
        shape=runtime.model_shape,
        keep_steps=_MOST_ROUNDS * len(plans),
        now=time.process_time,
    )
    spent_s = _run_step(
        runtime, built, plans[0], times
    ).elapsed_s  # loads kernels and connects pairs of ranks: not counted
    times.gather()
    steps: list[tuple[int, float]] = []
    slower = 1.0
    for _ in range(_MOST_ROUNDS):
        for index in dict.fromkeys((0, len(plans) - 1, *range(len(plans)))):
            left_s = min(BUDGET_S - spent_s, _LARGEST_SHARE * BUDGET_S)
            if steps and slower * expected_s[index] > left_s:
                continue
            took = _run_step(runtime, built, plans[index], times)
            spent_s += took.elapsed_s
            slower = took.elapsed_s / expected_s[index]
            steps.append((index, took.alone_s))
    observations = [
        replace(one, forward_s=ranks_per_core * one.forward_s, backward_s=ranks_per_core * one.backward_s)
        for one in times.gather()
    ]
    return observations, steps


def _run_step(runtime: PlannedRuntime, built: Built, plan: Plan, times: BucketTimes) -> Took:
    """Return how long an iteration with `plan` takes, without the optimizer; collective."""
    seqlens = {sample.sample_id: sample.seqlen for sample in plan.samples}

    def read(sample_id: int) -> SampleTokens:
        generator = np.random.default_rng(sample_id)
        tokens = generator.integers(runtime.model_shape.vocab_size, size=seqlens[sample_id])
        return SampleTokens.repeating(tokens)

    planned = PlannedBatch(
        plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * plan.topology.num_lanes, reason="calibration"
    )
    wrapper = DataIteratorWrapper(
        plan_source=FixedPlan(planned, runtime.groups.lane),
        read_sample=read,
        groups=runtime.groups,
        chunks=built.needs,
        device=runtime.device,
        verify="off",
    )
    with closing(wrapper):
        data = wrapper.wrap(0, tuple(plan.samples))
        for chunk in built.wrapped:
            chunk.zero_grad_buffer()
        dist.barrier()
        started = Moment.now()
        logged = run_schedule(
            built.wrapped,
            data,
            runtime.settings.seq_length,
            forward_only=False,
            rank_tokens=wrapper.rank_tokens,
            forward_step_func=times.forward_step,
        )
        sum_over_job(logged, exchanged_bytes=0, stop=False, device=runtime.device)
        took = took_since(started, runtime.topology)
    times.end_step()
    return took


@contextlib.contextmanager
def _as_if_it_had_not_been(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Leave gradients at zero, random states as they were and experts without a token."""
    states = rng_state()
    gathering = [chunk for chunk in chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in gathering:  # nothing has been sent yet that they could wait for
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        with as_if_nothing_was_routed(chunks):
            yield
    finally:
        for chunk in gathering:
            chunk.enable_forward_pre_hook()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        set_rng_state(states)


def _cache_path(base: Hardware, job: str) -> str | None:
    """Return where the result lies: a name for each machine and everything else that decides how fast it is."""
    folder = user_cache_folder()
    if folder is None:
        return None
    num_ranks = dist.get_world_size()
    machine_digest = _digest(job, cpu_name(), torch.__version__, torch.get_num_threads(), num_ranks, asdict(base))
    return os.path.join(folder, "calibration", f"{base.name}-{num_ranks}-ranks-{machine_digest}.json")


def _keep(hardware: Hardware, path: str | None) -> str:
    """Write `hardware` to `path` in one step; return what to say about it. A run does not end for want of a cache."""
    if path is None:
        return "not kept, this user has no cache folder"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_json(path, hardware_as_dict(hardware))
    except (OSError, DynamicCPError) as error:
        return f"not kept ({error})"
    return f"kept in {path}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _as_json(hardware: Hardware | None) -> dict[str, Any] | None:
    return None if hardware is None else asdict(hardware)


def _from_json(found: dict[str, Any] | None) -> Hardware | None:
    return None if found is None else Hardware(**found)
