"""The one judge of task plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dynamic_cp.arrays import Ints
from dynamic_cp.disaggregation.plan import TaskPlan
from dynamic_cp.disaggregation.scheduler import TASKS_PER_DOCUMENT
from dynamic_cp.disaggregation.tasks import HALF, HOLDER, SAMPLE, SERVER, START, STOP, Tasks, runs_of
from dynamic_cp.disaggregation.traffic import fetched_tokens
from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.mechanisms.blocks import MOST_FETCHED
from dynamic_cp.mechanisms.links import lanes_in_one_node
from dynamic_cp.pipeline.ticks import check_ticks, stage_ticks
from dynamic_cp.placement.legal import why_not_tiled
from dynamic_cp.plans.padding import placed_share
from dynamic_cp.types import Sample

_AGAIN = "plan these samples again"

MOST_FETCHED_IN_POOL = (4, 32)
"""(Queries, keys) that a server may fetch in a tick, over the limit of tokens per rank: servers of a pool meet the
longest documents of all stages. It bounds buffers; what they take, `MemoryModel.peak_in_ticks` counts."""


def check_task_plan(plan: TaskPlan, samples: Iterable[Sample] | None = None) -> None:
    """Refuse `plan` unless every rank can run it and every sample is in it once.

    The rules:
        1. There is a micro-batch, and as many entries of tasks as the schedule has ticks, or micro-batches.
        2. A pool has no interleaving: a chunk's ticks would have to wait for those of the other chunks of its stage.
        3. Homes tile the samples of their micro-batch; a lane holds at most max_tokens_per_rank padded tokens.
        4. Samples have the causal mask, are in one micro-batch each, and are `samples` where they are given.
        5. Tasks tile the samples of their tick, and every token is held where its home is: tasks move no tokens.
        6. Tasks are cut at multiples of tile_tokens, or where homes end; a server computes at most two of a sample, in
           either half. The second half of a sample comes after the first.
        7. What a server fetches stays below a limit, with scope stage that of placed attention.

    Raises:
        IllegalPlanError: the first broken rule, with its numbers; `micro_batch` or `tick` name it.
    """
    topology, num_rows = plan.topology, plan.num_microbatches
    if not num_rows:
        raise IllegalPlanError("the plan has 0 micro-batches, at least 1 is needed: plan a non-empty global batch")
    is_pool = plan.scope == "pool"
    if is_pool and topology.vp_size > 1:
        raise IllegalPlanError(
            f"the plan has a pool of servers over stages with vp_size {topology.vp_size}, ticks have vp_size 1: leave "
            "out interleaving (--num-layers-per-virtual-pipeline-stage), or plan scope stage",
            vp_size=topology.vp_size,
        )
    wanted = num_rows + topology.pp_size - 1 if is_pool else num_rows
    if not len(plan.forward) == len(plan.backward) == wanted:
        raise IllegalPlanError(
            f"the plan has tasks for {len(plan.forward)} forward and {len(plan.backward)} backward "
            f"{'ticks' if is_pool else 'micro-batches'}, {wanted} of each are needed: {_AGAIN}"
        )
    _check_samples(plan, samples)
    for number, batch in enumerate(plan.micro_batches):
        _check_homes(plan, number, batch.homes.astype(np.int64), batch.samples)
    if is_pool:
        check_ticks(stage_ticks(topology.pp_size, num_rows), num_rows)
        for tick, tasks in plan.ticks():
            _check_tick(plan, str(tick), tasks, plan.micro_batches_of(tick))
        return
    if plan.forward != plan.backward:
        raise IllegalPlanError(
            "the plan has other tasks backward than forward with scope stage, where both are one placement: use scope "
            "pool, or the same tasks"
        )
    for number, tasks in enumerate(plan.forward):
        _check_tick(plan, f"of micro-batch {number}", tasks, [(0, number)])


def _check_samples(plan: TaskPlan, samples: Iterable[Sample] | None) -> None:
    found: dict[int, int] = {}
    for number, batch in enumerate(plan.micro_batches):
        for sample in batch.samples:
            if sample.sample_id in found:
                raise IllegalPlanError(
                    f"sample {sample.sample_id} is in micro-batches {found[sample.sample_id]} and {number}: put every "
                    "sample into one",
                    micro_batch=number,
                )
            if sample.mask is not None:
                raise IllegalPlanError(
                    f"micro-batch {number}: {sample.mask_in_words}, tasks have all keys up to their queries: plan it "
                    "with placed attention (blocks)",
                    micro_batch=number,
                )
            found[sample.sample_id] = number
    if samples is None:
        return
    wanted = {sample.sample_id: sample for sample in samples}
    given = {sample.sample_id: sample for sample in plan.samples}
    wrong = [number for number in sorted({*wanted, *given}) if wanted.get(number) != given.get(number)]
    if wrong:
        one = wrong[0]
        raise IllegalPlanError(
            f"sample {one} is {given.get(one, 'not in the plan')}, given was {wanted.get(one, 'none')}: {_AGAIN}",
            sample_id=one,
        )


def _check_homes(plan: TaskPlan, number: int, homes: Ints, samples: Sequence[Sample]) -> None:
    lanes, multiple = plan.topology.num_lanes, plan.topology.rank_token_multiple
    reason = why_not_tiled(homes, samples) if len(homes) or samples else None
    if reason is None and len(homes) and not 0 <= homes[:, 3].min() <= homes[:, 3].max() < lanes:
        reason = f"homes are on lanes {homes[:, 3].min()} to {homes[:, 3].max()} of {lanes}"
    if reason is not None:
        raise IllegalPlanError(f"micro-batch {number}: {reason}: {_AGAIN}", micro_batch=number)
    held = [placed_share(tokens, 1, multiple) for tokens in plan.micro_batches[number].lane_tokens(lanes)]
    if max(held) > plan.max_tokens_per_rank:
        raise IllegalPlanError(
            f"micro-batch {number}: lane {held.index(max(held))} holds {max(held)} padded tokens per rank, the limit "
            f"is {plan.max_tokens_per_rank}: use more micro-batches",
            micro_batch=number,
        )


def _check_tick(plan: TaskPlan, name: str, tasks: Tasks, parts: Sequence[tuple[int, int]]) -> None:
    """Check the tasks of a tick whose `parts` are (stage, micro-batch)."""
    what = f"tick {name}" if plan.scope == "pool" else f"tasks {name}"
    samples = [sample for _, number in parts for sample in plan.micro_batches[number].samples]
    rows = tasks.rows.astype(np.int64)
    reason = why_not_tiled(rows[:, : HOLDER + 1], samples)
    if reason is None:
        reason = _why_tasks_wrong(plan, rows, parts)
    if reason is None:
        reason = why_too_much_fetched(plan, tasks)
    if reason is not None:
        raise IllegalPlanError(f"{what}: {reason}: {_AGAIN}", tick=name)


def _why_tasks_wrong(plan: TaskPlan, rows: Ints, parts: Sequence[tuple[int, int]]) -> str | None:
    for column, kind in ((HOLDER, "held"), (SERVER, "computed")):
        if not 0 <= rows[:, column].min() <= rows[:, column].max() < plan.num_servers:
            return (
                f"tokens are {kind} by servers {rows[:, column].min()} to {rows[:, column].max()} of {plan.num_servers}"
            )
    homes = homes_in_tick(plan, parts)
    # The home of a row is the last one that begins no later.
    key, at = homes[:, 0] * 2**32 + homes[:, 1], rows[:, SAMPLE] * 2**32 + rows[:, START]
    home = homes[np.searchsorted(key, at, side="right") - 1]
    for reason, wrong in (
        ("lie on", (home[:, 3] != rows[:, HOLDER]) | (home[:, 2] < rows[:, STOP])),
        ("end on the grid of", (rows[:, STOP] % plan.tile_tokens != 0) & (rows[:, STOP] != home[:, 2])),
    ):
        if wrong.any():
            sample, start, stop, holder = rows[int(wrong.argmax()), : HOLDER + 1].tolist()
            if reason == "lie on":
                return (
                    f"tokens {start} to {stop} of sample {sample} are held by server {holder}, their home "
                    f"{home[int(wrong.argmax()), 1:3].tolist()} is on {home[int(wrong.argmax()), 3]}"
                )
            return f"a task of sample {sample} ends at token {stop}, which {plan.tile_tokens} does not divide"
    ahead = (rows[1:, HALF] < rows[:-1, HALF]) & (rows[1:, SAMPLE] == rows[:-1, SAMPLE])
    if ahead.any() or not 0 <= rows[:, HALF].min() <= rows[:, HALF].max() <= 1:
        sample = rows[int(ahead.argmax()), SAMPLE] if ahead.any() else rows[int(rows[:, HALF].argmax()), SAMPLE]
        return f"halves of sample {sample} are not 0 and then 1: the first half would need keys of the second"
    runs = runs_of(rows)
    of_server, counts = np.unique(runs[:, [0, 3, 4]], axis=0, return_counts=True)
    if counts.max() > TASKS_PER_DOCUMENT:
        sample, server, _ = of_server[int(counts.argmax())].tolist()
        return f"server {server} computes {counts.max()} tasks of sample {sample}, {TASKS_PER_DOCUMENT} are possible"
    return None


def homes_in_tick(plan: TaskPlan, parts: Sequence[tuple[int, int]]) -> Ints:
    """Return int64 [home, (sample of the tick, start, stop, server)] of the micro-batches `parts`, (stage, which)."""
    found, first = [np.zeros((0, 4), np.int64)], 0
    for stage, number in parts:
        batch = plan.micro_batches[number]
        shift = np.array([first, 0, 0, stage * plan.topology.num_lanes])
        found.append(batch.homes.astype(np.int64) + shift)
        first += len(batch.samples)
    return np.concatenate(found)


def why_too_much_fetched(plan: TaskPlan, tasks: Tasks) -> str | None:
    """Return which server fetches too much for `tasks` of `plan`, with the numbers; None: none does."""
    fetched = fetched_tokens(tasks, plan.num_servers, lanes_in_one_node(plan.topology))
    most = MOST_FETCHED_IN_POOL if plan.scope == "pool" else MOST_FETCHED
    for kind, times, tokens in zip(("queries", "keys"), most, fetched, strict=True):
        if tokens.max(initial=0) > times * plan.max_tokens_per_rank:
            return (
                f"server {int(tokens.argmax())} fetches {tokens.max()} tokens' {kind}, the limit is {times} times "
                f"{plan.max_tokens_per_rank}"
            )
    return None
