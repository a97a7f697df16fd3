"""Task plans: legal, the same as text, and as long as a simulation event by event says."""

import heapq
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynamic_cp.errors import (
    DisagreementError,
    DynamicCPError,
    IllegalPlanError,
    InfeasibleSampleError,
    InvalidInputError,
    UnsupportedFeatureError,
)
from dynamic_cp.mechanisms.blocks import MOST_FETCHED
from dynamic_cp.mechanisms.placed_seconds import kernel_seconds
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pipeline.schedule import KINDS
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.plans import serialize
from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes, lane_plan
from dynamic_cp.plans.padding import lane_tokens_of
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pool.homes import homes_in_nano_batches
from dynamic_cp.pool.legal import homes_in_tick, homes_of, peak_in_ticks, servers_of, why_too_much_fetched
from dynamic_cp.pool.prices import TaskOptions, TickPrices, task_seconds
from dynamic_cp.pool.scheduler import Rules, schedule
from dynamic_cp.pool.search import PlannedTasks, plan_tasks
from dynamic_cp.pool.tasks import NANO_BATCH, SERVER, Tasks, micro_batches_of, pool_of, samples_of, tasks_of, ticks_of
from dynamic_cp.pool.text import decode_ticks
from dynamic_cp.pool.ticks import Tick, TickTime, num_ticks, tick_order, tick_timeline
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.types import (
    BY_PLACEMENT,
    CP_COMM_TYPES,
    Bucket,
    Lambda,
    MicroBatch,
    Placement,
    Plan,
    PlanOptions,
    Problem,
    Recompute,
    Sample,
    Topology,
)
from dynamic_cp.types.placement import HOLDER, STOP, Lanes

K = 1024
MODEL, HARDWARE = load_model("llama-3-8b"), load_hardware("h100")


def cost_model_of(pp_size: int, recompute: Recompute = "full", **sizes: int) -> CostModel:
    topology = Topology(num_lanes=4, tp_size=8, pp_size=pp_size, sequence_parallel=True, **sizes)
    options = PlanOptions(max_tokens_per_rank=16 * K, recompute=recompute, cp_comm_types=(*CP_COMM_TYPES, BY_PLACEMENT))
    return CostModel(Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=options))


def batch_of(seed: int = 0, num_tokens: int = 150 * K) -> list[Sample]:
    """Return one sample that lasts longer than all others, and many shorter ones."""
    rng = random.Random(seed)
    seqlens = [50 * K + 77, 1]
    while sum(seqlens) < num_tokens:
        seqlens.append(round(rng.lognormvariate(7.5, 1.2)) % (30 * K) + 1)
    return [Sample(sample_id=number, seqlen=size) for number, size in enumerate(seqlens)]


@pytest.fixture(scope="module")
def pooled() -> PlannedTasks:
    return plan_tasks(batch_of(), cost_model_of(2), num_microbatches=[6])


@pytest.fixture(scope="module")
def in_chunks() -> PlannedTasks:
    """Two chunks on each stage; 6 of its 13 forward ticks have both micro-batches of a group."""
    return plan_tasks(batch_of(), cost_model_of(2, vp_size=2), num_microbatches=[6])


def test_a_pool_of_stages_is_legal_and_even(pooled: PlannedTasks) -> None:
    plan = pooled.plan
    pool = pool_of(plan)
    check_plan(plan, batch_of())
    assert (plan.num_microbatches, plan.num_servers, pool.num_nano_batches) == (6, 8, 2)
    assert len(pool.forward) == len(pool.backward) == 7
    # In the first tick only stage 0 holds anything; servers of stage 1 compute for it.
    first = pool.forward[0].rows
    assert set(first[:, HOLDER]) == set(range(4))
    assert set(first[:, SERVER]) > set(range(4, 8))
    assert plan.num_tokens == sum(sample.seqlen for sample in batch_of())
    assert "6 micro-batches" in repr(plan)


def test_relays_are_taken_where_they_pay_and_said() -> None:
    """Lanes of 8 ranks are nodes: none share one."""
    samples = batch_of(num_tokens=300 * K)
    planned = plan_tasks(samples, cost_model_of(4), num_microbatches=[8])
    assert pool_of(planned.plan).relay_servers == 4
    assert planned.reason.endswith("relays of 4 servers")
    assert pool_of(plan_tasks(samples, cost_model_of(1), num_microbatches=[8]).plan).relay_servers == 0
    plan = planned.plan
    assert serialize.loads(serialize.dumps(plan)) == plan == serialize.parse_plan(serialize.format_plan(plan))
    without = replace(plan, extension=replace(pool_of(plan), relay_servers=0))
    assert serialize.digest(without) != serialize.digest(plan)
    assert "relay_servers" not in serialize.dumps(without) + serialize.format_plan(without)
    check_plan(without, samples)
    wrong = replace(plan, extension=replace(pool_of(plan), relay_servers=3))
    with pytest.raises(IllegalPlanError, match="relay_servers is 3, which does not divide the 4 lanes"):
        check_plan(wrong, samples)
    with pytest.raises(InvalidInputError, match="relay_servers"):
        replace(pool_of(plan), relay_servers=-1)


def test_servers_with_nothing_else_to_do_get_more_attention() -> None:
    samples = [Sample(sample_id=number, seqlen=60 * K) for number in range(6)]
    cost_model = cost_model_of(2)
    prices = TickPrices(cost_model, TaskOptions())
    planned = plan_tasks(samples, cost_model, TaskOptions(noise_margin=0.0), num_microbatches=[6])
    first, second = pool_of(planned.plan).forward[:2]
    # Stage 1 has no micro-batch in the first tick; in the second one both have one.
    busy_s, idle_s = prices.attention_s(first, 0, 8).reshape(2, 4).mean(axis=1)
    assert idle_s > 1.3 * busy_s
    one_s, other_s = prices.attention_s(second, 0, 8).reshape(2, 4).mean(axis=1)
    assert other_s == pytest.approx(one_s, rel=0.1)
    # That takes less than with as much attention on each.
    seconds, servers, held = planned.seconds[0], servers_of(cost_model.topology, 0), np.array([15 * K] * 4 + [0] * 4)
    homes = homes_in_tick(planned.plan, [(0, 0)])
    rows = homes_in_nano_batches(homes, 4, 128)
    rules = Rules(128, 0.02, *prices.task_bytes, prices.extra_tokens(0))
    tasks = [rows[:0, :4].copy()]
    for nano_batch in range(2):
        of_nano_batch = rows[rows[:, 4] == nano_batch, :4].copy()
        tasks.append(schedule(homes, of_nano_batch, tasks[-1], np.zeros(8), rules))
    even = prices.seconds(tasks_of(homes, tasks[1:]), 0, held, servers)
    assert seconds.total_s < 0.97 * even.total_s


def test_plans_do_not_depend_on_the_order_of_samples(pooled: PlannedTasks) -> None:
    shuffled = batch_of()
    random.Random(1).shuffle(shuffled)
    other = plan_tasks(shuffled, cost_model_of(2), num_microbatches=[6])
    assert serialize.digest(other.plan) == serialize.digest(pooled.plan)
    assert other.makespan_s == pooled.makespan_s


def test_with_chunks_ticks_are_shorter_and_tasks_of_the_same_micro_batches_are_made_once(
    pooled: PlannedTasks, in_chunks: PlannedTasks
) -> None:
    plan, pool, cost_model = in_chunks.plan, pool_of(in_chunks.plan), cost_model_of(2, vp_size=2)
    check_plan(plan, batch_of())
    assert len(pool.forward) == len(pool.backward) == num_ticks(2, 2, 6) == 13
    # Micro-batches 0 and 1 meet three times in three ticks: once in the other order, then each with its next chunk.
    assert [micro_batches_of(plan, Tick("F", number)) for number in (1, 2, 3)] == [
        [(0, 1), (1, 0)], [(0, 0), (1, 1)], [(0, 1), (1, 0)]
    ]  # fmt: skip
    assert pool.forward[1] is pool.forward[3] != pool.forward[2]
    # On other servers they take as long: what a tick is said to take is what its own tasks do.
    prices, of_rows = TickPrices(cost_model, TaskOptions()), lane_tokens_of(plan)
    servers = servers_of(plan.topology, pool.relay_servers)
    for (tick, tasks), seconds in zip(ticks_of(plan), in_chunks.seconds, strict=True):
        held = np.zeros((2, 4), np.int64)
        for stage, row in micro_batches_of(plan, tick):
            held[stage] = of_rows[row]
        again = prices.seconds(tasks, KINDS.index(tick.kind), held.ravel(), servers)
        assert again == pytest.approx(seconds, rel=1e-12)
    # Half of the fill is gone, and no work.
    assert plan.micro_batches == pooled.plan.micro_batches
    assert sum(in_chunks.busy_s) == pytest.approx(sum(pooled.busy_s), rel=0.02)
    assert in_chunks.makespan_s < pooled.makespan_s


@pytest.mark.by_day("2-1-4", "4-2-6")
@pytest.mark.parametrize(("pp_size", "vp_size", "rows"), [(2, 1, 4), (2, 2, 4), (4, 2, 8), (4, 4, 4), (4, 2, 6)])
def test_equal_micro_batches_take_as_many_ticks_as_there_are(pp_size: int, vp_size: int, rows: int) -> None:
    """Every tick with all stages takes 1 / vp_size of a stage; embedding and head are paid once a micro-batch."""
    samples = [Sample(sample_id=number, seqlen=16 * K) for number in range(rows)]
    cost_model = cost_model_of(pp_size, vp_size=vp_size)
    found = plan_tasks(samples, cost_model, TaskOptions(noise_margin=0.0), num_microbatches=[rows])
    spans = found.spans
    assert len(spans) == 2 * num_ticks(pp_size, vp_size, rows)
    full = [number for number, span in enumerate(spans) if len(micro_batches_of(found.plan, span.tick)) == pp_size]
    whole = plan_tasks(
        samples, cost_model_of(pp_size), TaskOptions(noise_margin=0.0, ping_pong=True), num_microbatches=[rows]
    )
    stage_s = {span.tick.kind: one.linear_s for span, one in zip(whole.spans, whole.seconds, strict=True)}
    assert full or rows % pp_size
    for number in full:
        assert found.seconds[number].linear_s == pytest.approx(stage_s[spans[number].tick.kind] / vp_size)
    table, tokens = cost_model.table, 4 * K
    paid_s = float(table.edges_s_per_token.sum()) * tokens * rows
    layers_s = sum(one.total_s for one in found.seconds)
    gaps_s = found.makespan_s - layers_s
    hops_s = 2 * num_ticks(pp_size, vp_size, rows) * tokens * float(table.hop_s_per_token)
    assert 0 < gaps_s <= paid_s + hops_s + 1e-6


def test_plans_with_chunks_say_equal_tasks_once(in_chunks: PlannedTasks) -> None:
    plan = in_chunks.plan
    pool = pool_of(plan)
    assert serialize.loads(serialize.dumps(plan)) == plan == serialize.parse_plan(serialize.format_plan(plan))
    sides = serialize.plan_to_dict(plan)["pool"]
    texts = [*sides["forward"], *sides["backward"]]
    named = [text for text in texts if text[0] in "FB"]
    assert "F3 | F1\n" in serialize.format_plan(plan)
    assert "F3 | F1\n" in serialize.format_plan(plan, placements=False)
    assert len(texts) - len(named) == len({*pool.forward, *pool.backward}) < len(texts)
    assert len(named) >= 6
    with pytest.raises(InvalidInputError, match=r"pool.forward\[0\] has the tasks of tick F9, which is none of the 0"):
        serialize.plan_from_dict(
            {**serialize.plan_to_dict(plan), "pool": {**sides, "forward": ["F9", *sides["forward"][1:]]}}
        )
    # Without chunks each tick has its own, also where two are alike: texts and digests stay what they were.
    flat = replace(plan, topology=replace(plan.topology, vp_size=1))
    assert all(text[0] not in "FB" for text in serialize.plan_to_dict(flat)["pool"]["forward"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "lacks schema_version"),
        ("plan v1 policy=pool tile_tokens=128\nF1 | 0.0.1.0.0.0", "line 2 is 'F1 | 0.0.1.0.0.0': a tick looks like"),
        ("plan v1 policy=pool tile_tokens=128\nF0 | 0.0.1.0.0\n", "topology lacks"),
    ],
)
def test_texts_that_are_no_plans_are_refused(text: str, words: str) -> None:
    with pytest.raises(DynamicCPError, match=words):
        (serialize.loads if text.startswith("{") else serialize.parse_plan)(text)


def with_side(plan: Plan, **sides: tuple[Tasks, ...]) -> Plan:
    return replace(plan, extension=replace(pool_of(plan), **sides))


def with_rows(plan: Plan, change: Any) -> Plan:
    pool = pool_of(plan)
    rows = pool.forward[1].rows.copy()
    found = change(rows)
    rows = rows if found is None else found
    return with_side(plan, forward=(pool.forward[0], Tasks(rows), *pool.forward[2:]))


def set_at(column: int, value: int) -> Any:
    def change(rows: Any) -> None:
        rows[0, column] = value

    return change


def three_tasks(rows: Any) -> Any:
    """Let server 7 compute three runs of a sample, with runs of others between."""
    sample = np.bincount(rows[:, 0]).argmax()
    own = np.flatnonzero((rows[:, 0] == sample) & (rows[:, NANO_BATCH] == 1))
    assert len(own) >= 5
    rows[own, SERVER] = 6
    rows[own[[0, 2, 4]], SERVER] = 7


def off_the_grid(rows: Any) -> Any:
    row = int((rows[:, STOP] - rows[:, 1] > 200).argmax())
    parts = np.repeat(rows[row : row + 1], 2, axis=0)
    parts[0, STOP] = parts[1, 1] = parts[0, 1] + 100
    return np.concatenate([rows[:row], parts, rows[row + 1 :]])


def all_in_the_second_nano_batch(rows: Any) -> None:
    """A sample of the first micro-batch, which is on stage 1 in this tick."""
    of_first = np.unique(rows[rows[:, HOLDER] >= 4, 0])
    sample = next(sample for sample in of_first if (rows[rows[:, 0] == sample, NANO_BATCH] == 0).sum() == 1)
    rows[rows[:, 0] == sample, NANO_BATCH] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_at(SERVER, 8), "computed by servers 0 to 8 of 8"),
        (set_at(HOLDER, 7), r"held by server 7, their home \[0, \d+\] is on"),
        (set_at(STOP, 5), "begins at token|ends at|hold"),
        (set_at(NANO_BATCH, 2), "nano-batches of sample"),
        (lambda rows: rows[1:], "not 0 to|hold"),
        (three_tasks, "server [67] computes 3 tasks of sample 0"),
        (off_the_grid, "which 128 does not divide"),
        (
            all_in_the_second_nano_batch,
            r"first nano-batch of sample \d+ of micro-batch \d has 0 tokens, in another tick \d+",
        ),
    ],
)
def test_wrong_tasks_are_refused(pooled: PlannedTasks, change: Any, words: str) -> None:
    with pytest.raises(IllegalPlanError, match=words) as caught:
        check_plan(with_rows(pooled.plan, change), batch_of())
    assert str(caught.value).startswith("tick F1")


def test_wrong_plans_are_refused(pooled: PlannedTasks) -> None:
    plan = pooled.plan
    bucket = plan.micro_batches[0].buckets[0]
    assert bucket.placement is not None
    homes = bucket.placement.homes
    masked = replace(bucket.samples[0], mask=Lambda(0, 64))
    lanes, one_lane = homes.copy(), homes.copy()
    lanes[0, 3] = 4
    one_lane[:, 3] = 0
    tiles = np.array([[0, 0, 0, 0]], np.int32)
    more = Sample(sample_id=10**6, seqlen=5)
    pool = pool_of(plan)
    wrong = {
        "0 micro-batches": replace(plan, micro_batches=()),
        "tasks for 7 forward and 7 backward ticks, 13 of each": replace(
            plan, topology=replace(plan.topology, vp_size=2)
        ),
        "tasks for 6 forward and 7 backward ticks, 7 of each": with_side(plan, forward=pool.forward[1:]),
        "has the mask": with_bucket(plan, replace(bucket, samples=(masked, *bucket.samples[1:]))),
        "homes are on lanes 0 to 4 of 4": with_bucket(plan, with_homes(bucket, lanes)),
        "padded tokens per rank, the limit is": with_bucket(plan, with_homes(bucket, one_lane)),
        "1 tiles and 0 masks of layers": with_bucket(plan, replace(bucket, placement=Placement(homes, tiles))),
        "is twice in the plan": replace(plan, micro_batches=(plan.micro_batches[1], *plan.micro_batches[1:])),
        "4 buckets, in a plan with a pool 1 has all 4 lanes": on_lane_0(plan),
    }
    for words, one in wrong.items():
        with pytest.raises(IllegalPlanError, match=words):
            check_plan(one)
    with pytest.raises(IllegalPlanError, match="lacks 1 of"):
        check_plan(plan, [*batch_of(), more])
    check_plan(replace(plan, max_tokens_per_rank=int(lane_tokens_of(plan).max())))
    # Without its pool it lacks tiles.
    with pytest.raises(IllegalPlanError, match="in 0 tiles"):
        check_plan(replace(plan, extension=None))
    with pytest.raises(UnsupportedFeatureError, match="a pool of 8 servers, whose ticks are no 1F1B"):
        simulate(plan, cost_model_of(2))


def with_homes(bucket: Bucket, homes: Any) -> Bucket:
    return replace(bucket, placement=Placement(homes, np.zeros((0, 4), np.int32)))


def with_bucket(plan: Plan, *buckets: Bucket) -> Plan:
    return replace(plan, micro_batches=(MicroBatch(buckets=buckets), *plan.micro_batches[1:]))


def on_lane_0(plan: Plan) -> Plan:
    whole = Bucket(first_lane=0, samples=plan.micro_batches[0].buckets[0].samples)
    empty = (Bucket(first_lane=lane) for lane in range(1, 4))
    return with_bucket(replace(plan, max_tokens_per_rank=10**6), whole, *empty)


def test_what_servers_fetch_is_limited() -> None:
    # One sample on lane 0 alone, its last queries on all others: each fetches all its keys.
    rows = [[0, 100 * part, 100 * (part + 1), 0, part, 0] for part in range(12)]
    assert why_too_much_fetched(Tasks(np.array(rows, np.int32)), 12, 1200, MOST_FETCHED) is None
    away = [[0, 100 * part, 100 * (part + 1), part, (part + 5) % 12, 0] for part in range(12)]
    reason = why_too_much_fetched(Tasks(np.array(away, np.int32)), 12, 120, MOST_FETCHED)
    assert reason is not None
    assert "fetches 1100 tokens' keys, the limit is 8 times 120" in reason


@pytest.mark.by_day("in_chunks")
@pytest.mark.parametrize("which", ["pooled", "in_chunks"])
def test_every_server_gets_what_its_tasks_are_and_no_more(which: str, request: pytest.FixtureRequest) -> None:
    """Programmes as they arrive: tasks are computed where the plan says, by programmes that know their tokens."""
    planned: PlannedTasks = request.getfixturevalue(which)
    plan = planned.plan
    facts = PlanFacts.of(planned.planned_batch(cost_model_of(2, vp_size=plan.topology.vp_size)))
    messages = encode_lanes(plan, facts)
    lanes = [decode_lane(message) for message in messages]
    assert lanes == [lane_plan(plan, lane, facts) for lane in range(4)]
    assert facts.num_servers == 8
    parts = [[decode_ticks(text) for text in lane.extension] for lane in lanes]
    for tick, tasks in ticks_of(plan):
        computed = []
        for server in range(plan.num_servers):
            stage, lane = divmod(server, 4)
            ticks = parts[lane][stage]
            programme, samples = (ticks.forward if tick.kind == "F" else ticks.backward)[tick.number]
            ids = [sample.sample_id for sample in samples]
            for nano_batch, tiles in enumerate(programme.tiles):
                rows = {row for row, _ in tiles}
                computed += [
                    (
                        ids[programme.held[row].sample], programme.held[row].start, programme.held[row].stop, server,
                        nano_batch,
                    )
                    for row in rows
                ]  # fmt: skip
        all_samples = samples_of(plan, tick)
        wanted = [(all_samples[row[0]].sample_id, row[1], row[2], row[4], row[5]) for row in tasks.rows.tolist()]
        assert sorted(computed) == sorted(wanted)
    for index, micro_batch in enumerate(plan.micro_batches):
        held = [
            sum(home[2] - home[1] for home in lanes[lane].parts[index][0] if home[3] < 0)  # type: ignore[index]
            for lane in range(4)
        ]
        homes = homes_of(micro_batch)
        assert held == np.bincount(homes[:, 3], homes[:, 2] - homes[:, 1], 4).tolist()
    if which == "in_chunks":
        own = parts[0][0].forward
        assert own[1] is own[3] is not own[2]
    # A message holds a lane's servers of both stages; JSON of the whole plan is as large as all of them.
    assert max(map(len, messages)) < 40_000


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(DisagreementError, match="a server's part of the plan is 'abc'"):
        decode_ticks("abc")


def test_one_lane_has_a_pool_of_its_stages() -> None:
    topology = Topology(num_lanes=1, tp_size=8, pp_size=2, sequence_parallel=True)
    options = PlanOptions(max_tokens_per_rank=64 * K, recompute="full", cp_comm_types=("p2p",))
    samples = batch_of()
    plan = plan_tasks(
        samples,
        CostModel(Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=options)),
        num_microbatches=[6],
    ).plan
    check_plan(plan, samples)
    assert serialize.loads(serialize.dumps(plan)) == plan == serialize.parse_plan(serialize.format_plan(plan))
    assert plan.num_servers == 2
    assert plan.num_placed == 0
    assert any((tasks.rows[:, HOLDER] != tasks.rows[:, SERVER]).any() for _, tasks in ticks_of(plan))


# ---- times


def ends_event_by_event(
    layer_ns: list[int], num_layers: int, ahead: list[list[int]], behind: list[list[int]], hops: list[list[int]],
    pp_size: int, vp_size: int, rows: int,
) -> list[int]:  # fmt: skip
    """Return [stage] when all is done: every stage is a process, every layer a meeting of all of them."""
    order = tick_order(pp_size, vp_size, rows)
    arrived: dict[tuple[str, int, int], int] = {}
    waiting: dict[int, int] = {}
    met: dict[tuple[int, int], list[int]] = {}
    ends = [0] * pp_size
    events: list[tuple[int, int, int, int]] = [(0, stage, 0, -1) for stage in range(pp_size)]
    heapq.heapify(events)

    def inputs(stage: int, place: int) -> tuple[str, int, int] | None:
        kind, unit = order[place].kind, order[place].unit(stage, pp_size, vp_size, rows)
        if unit is None:
            return None
        source = unit.chunk * pp_size + stage + (-1 if kind == "F" else 1)
        return (kind, source, unit.micro_batch) if 0 <= source < pp_size * vp_size else None

    while events:
        now, stage, place, layer = heapq.heappop(events)
        if layer == -1:  # wants to begin a tick
            needed = inputs(stage, place)
            if needed is not None and arrived.get(needed, now + 1) > now:
                if needed in arrived:
                    heapq.heappush(events, (arrived[needed], stage, place, -1))
                else:
                    waiting[stage] = place
                continue
            heapq.heappush(events, (now + ahead[place][stage], stage, place, 0))
            continue
        if layer < num_layers:  # at a layer, which all begin together
            here = met.setdefault((place, layer), [])
            here.append(stage)
            if len(here) == pp_size:
                for one in here:
                    heapq.heappush(events, (now + layer_ns[place], one, place, layer + 1))
            continue
        end = now + behind[place][stage]
        unit = order[place].unit(stage, pp_size, vp_size, rows)
        if unit is not None:
            key = (order[place].kind, unit.chunk * pp_size + stage, unit.micro_batch)
            arrived[key] = end + hops[place][stage]
            for other in [one for one, at in waiting.items() if inputs(one, at) == key]:
                heapq.heappush(events, (max(arrived[key], ends[other]), other, waiting.pop(other), -1))
        ends[stage] = end
        if place + 1 < len(order):
            heapq.heappush(events, (end, stage, place + 1, -1))
    return ends


@pytest.mark.parametrize("seed", range(12))
def test_ticks_take_as_long_as_an_event_simulation_says(seed: int) -> None:
    rng = random.Random(seed)
    pp_size, rows, num_layers = rng.choice([1, 2, 3, 5]), rng.randint(1, 7), rng.randint(1, 4)
    vp_size = seed % 3 + 1
    order = tick_order(pp_size, vp_size, rows)
    layer_ns = [rng.randint(1, 50) for _ in order]
    ahead, behind, hops = ([[rng.randint(0, 60) for _ in range(pp_size)] for _ in order] for _ in range(3))
    times = [
        TickTime(tick, num_layers * layer_ns[place], tuple(ahead[place]), tuple(behind[place]), tuple(hops[place]))
        for place, tick in enumerate(order)
    ]
    spans = tick_timeline(times, pp_size, vp_size, rows)
    assert [span.tick for span in spans] == list(order)
    found = ends_event_by_event(layer_ns, num_layers, ahead, behind, hops, pp_size, vp_size, rows)
    assert list(spans[-1].stage_ends_ns) == found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_same_tiles_cost_the_same_as_tasks_and_as_placed_attention(num_stages: int, pooled: PlannedTasks) -> None:
    """Squares, rectangles, rows that are short, and a launch for each nano-batch of a server but its first."""
    stage = cost_model_of(num_stages).stage.attention
    plan = pooled.plan
    for tick, tasks in ticks_of(plan):
        placement, samples = tasks.placement(), samples_of(plan, tick)
        placed = kernel_seconds(stage, placement, samples, Lanes(8, 0, 1))
        by_nano_batch = task_seconds(stage, tasks, 8)
        assert by_nano_batch.shape == (2, 2, 8)
        assert by_nano_batch.sum(axis=1) == pytest.approx(placed, rel=1e-12)
    # One rectangle: 200 queries behind 1000 keys, and each of the two kernels pays for the 200.
    one = Tasks(np.array([[0, 0, 1000, 0, 0, 0], [0, 1000, 1200, 0, 1, 0]], np.int32))
    for direction, side in enumerate(stage.sides):
        square = side.first.per_token2 * 200 * (201 + side.first.extra_tokens)  # 200 * 201 / 2 pairs
        full = side.later.per_token2 * 200 * (2 * 1000 + side.later.extra_tokens)
        assert task_seconds(stage, one, 2)[direction, 0, 1] == pytest.approx(square + full)
        assert side.later.extra_tokens > 0


def test_ping_pong_hides_transfers_and_recomputation_repeats_attention(pooled: PlannedTasks) -> None:
    tasks, held = pool_of(pooled.plan).forward[3], np.full(8, 16 * K)
    servers = servers_of(pooled.plan.topology, 0)
    found = {}
    for recompute in ("none", "full"):
        for ping_pong in (False, True):
            prices = TickPrices(cost_model_of(2, recompute=recompute), TaskOptions(ping_pong=ping_pong))
            found[recompute, ping_pong] = [prices.seconds(tasks, direction, held, servers) for direction in range(2)]
    for recompute in ("none", "full"):
        for one, other in zip(found[recompute, False], found[recompute, True], strict=True):
            # One round after the other, each as long as its busiest link.
            assert 0 < one.exchange_s < one.exposed_s < 2 * one.exchange_s
            assert other.exposed_s < 0.4 * other.exchange_s
            assert other.total_s < one.total_s
    (_, plain), (_, full) = found["none", True], found["full", True]
    (forward, _) = found["none", True]
    assert full.attention_s == pytest.approx(plain.attention_s + forward.attention_s)
    # What forward fetches again is there for the gradients, in two nano-batches.
    assert plain.exchange_s < full.exchange_s < 0.8 * (plain.exchange_s + forward.exchange_s)
    (_, plain_stream), (_, full_stream) = found["none", False], found["full", False]
    assert full_stream.exchange_s == pytest.approx(plain_stream.exchange_s + found["none", False][0].exchange_s)
    assert full.linear_s > plain.linear_s


def test_a_margin_stretches_layers_only_and_all_figures_agree(pooled: PlannedTasks) -> None:
    samples = batch_of()
    without = plan_tasks(samples, cost_model_of(2), TaskOptions(noise_margin=0.0), num_microbatches=[6])
    assert without.plan == pooled.plan
    layers = sum(one.total_s for one in without.seconds)
    assert pooled.makespan_s - without.makespan_s == pytest.approx(0.04 * layers, rel=1e-3)
    assert without.makespan_s >= layers
    durations = [span.end_ns - span.start_ns for span in without.spans]
    assert durations == [round(one.total_s * 1e9) for one in without.seconds]
    kinds = [KINDS.index(span.tick.kind) for span in without.spans]
    assert sorted(kinds) == [0] * 7 + [1] * 7


def test_ticks_need_more_memory_and_a_plan_that_has_none_is_left_out() -> None:
    cost_model, samples = cost_model_of(4), batch_of()
    topology, options = cost_model.topology, cost_model.options
    problem = Problem(topology=topology, model=MODEL, hardware=HARDWARE, options=options)
    memory = MemoryModel(problem)
    held = np.full((12, 4), 1000, np.int64)
    none = np.zeros((4, 2, 4), np.int64)
    kinds = {"in_nano_batches": True, "has_relays": False}
    ticks, stock = peak_in_ticks(memory, held, none, **kinds), memory.peak_at(1000)
    for stage in range(4):
        assert ticks[stage].activations_bytes / stock[stage].activations_bytes == pytest.approx(
            (2 * 4 - 1 - 2 * stage) / (4 - stage)
        )
    in_chunks = MemoryModel(replace(problem, topology=replace(topology, vp_size=2)))
    chunked = peak_in_ticks(in_chunks, held, none, **kinds)
    for stage in range(4):
        kept = chunked[stage].activations_bytes / stock[stage].activations_bytes
        assert kept == pytest.approx((3 * 4 - 1 - 2 * stage) / 2 / (4 - stage))
    more = peak_in_ticks(memory, held, none + 500, **kinds)
    # With full recomputation a second layer is there, too, whatever is fetched.
    assert 1.1 * ticks[0].exchange_bytes < more[0].exchange_bytes < 1.5 * ticks[0].exchange_bytes
    alone, more_alone = (
        peak_in_ticks(memory, held, one, in_nano_batches=False, has_relays=True)[0].exchange_bytes
        for one in (none, none + 500)
    )
    assert alone < ticks[0].exchange_bytes
    assert more_alone == pytest.approx(1.5 * alone)
    # Relays add up what their neighbours give back: two gradients in float32 of one KV head on each of 8 ranks.
    relays = peak_in_ticks(memory, held, none, in_nano_batches=True, has_relays=True)[0].exchange_bytes
    assert relays - ticks[0].exchange_bytes == 1000 * 2 * 128 * 4
    planned = plan_tasks(samples, cost_model, memory=memory, num_microbatches=[8])
    assert 0 < planned.peak_bytes <= memory.available_bytes
    assert max(stage.total_bytes for stage in memory.peak(planned.plan)) == planned.peak_bytes
    pools = ("off", "auto", "always")
    models = [MemoryModel(replace(problem, options=replace(options, pool=pool))) for pool in pools]
    limits = [model.max_tokens_per_rank(8 * K) for model in models]
    assert limits[0] > limits[1] > limits[2] > 1000
    # A run that may have a pool makes its group.
    without, with_pool = (model.peak_at(1000)[0].communicators_bytes for model in models[:2])
    assert with_pool - without == HARDWARE.communicator_bytes_per_group > 0
    little = MemoryModel(replace(problem, hardware=replace(HARDWARE, hbm_bytes=planned.peak_bytes, name="little")))
    with pytest.raises(InfeasibleSampleError, match="the first stage keeping 7 of them"):
        plan_tasks(samples, cost_model, memory=little, num_microbatches=[8])


def test_what_has_no_tasks_is_refused() -> None:
    samples = batch_of()
    with pytest.raises(UnsupportedFeatureError, match="sample 0 has the mask lambda"):
        plan_tasks([replace(samples[0], mask=Lambda(0, 64))], cost_model_of(2))
    good = cost_model_of(2)
    for model, words in (
        (replace(MODEL, window_tokens=512), "have the masks lambda"),
        (replace(MODEL, pipeline_layers=((15,), (17,))), "stages have 15 to 17 layers"),
        (replace(MODEL, pipeline_layers=((7, 9), (8, 8))), "model chunks have 7 to 9 layers"),
        (load_model("mixtral-8x7b"), "have 8 experts"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=words):
            TickPrices(
                CostModel(Problem(topology=good.topology, model=model, hardware=HARDWARE, options=good.options)),
                TaskOptions(),
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_margin": -0.1}, "noise_margin is -0.1"),
        ({"tolerances": (0.1, -0.2)}, r"tolerances are \(0.1, -0.2\)"),
        ({"tolerances": ()}, "at least one"),
        ({"tolerances": (0.2, 0.1)}, r"tolerances are \(0.2, 0.1\), \(0.1, 0.2\) is their order"),
        ({"tile_tokens": 100}, "tile_tokens is 100, a multiple of 16"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DynamicCPError, match=words):
        TaskOptions(**options)
