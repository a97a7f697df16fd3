"""Re-routing: sizes and contents, one exchange of exactly the bytes needed, and faults that reach all ranks alike."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dynamic_cp.errors import DataError, DisagreementError, DynamicCPError, IllegalPlanError, InvalidInputError
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import PlannedBatch, Sample
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.data.token_audit import combine, token_checksum
from megatron.dynamic_cp.packed_seq_params import shard_positions
from megatron.integrations.foreign import rerouting
from megatron.integrations.foreign.iterator import ForeignIteratorWrapper
from megatron.integrations.foreign.rerouting import (
    Destination,
    columns_to_send,
    incoming,
    make_sample_id,
    outgoing,
    sample_origin,
)
from megatron.integrations.foreign.samples import read_item
from tests import patience
from tests.distributed.foreign import LAYOUTS, LaneData, groups_of, lane_data, make_wrapper, piece_of, run_foreign
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.parity import Layout, mixed_plan

ALL = ChunkNeeds(tokens=True, labels=True)


# Without ranks: checksums, samples, sizes.


def test_checksum_does_not_depend_on_order_or_split() -> None:
    tokens, positions = np.arange(100, 164), np.arange(64)
    whole = token_checksum(5, positions, tokens)
    shards = [shard_positions(64, 4, rank) for rank in range(4)]
    parts = [token_checksum(np.full(16, 5), shard, tokens[shard]) for shard in shards]
    assert combine(sum(parts)) == whole
    assert combine(int(np.array(parts, dtype=np.int64).sum())) == whole
    assert token_checksum(5, positions[:0], tokens[:0]) == 0


def test_checksum_sees_each_kind_of_mistake() -> None:
    tokens, positions = np.arange(100, 164), np.arange(64)
    swapped = tokens.copy()
    swapped[[3, 40]] = swapped[[40, 3]]
    shifted = np.roll(tokens, 1)
    changed = tokens + (positions == 7)
    sums = [
        token_checksum(5, positions, tokens), token_checksum(6, positions, tokens),
        token_checksum(5, positions, tokens, column=1), token_checksum(5, positions, swapped),
        token_checksum(5, positions, shifted), token_checksum(5, positions, changed),
        token_checksum(5, positions[1:], tokens[1:]),
        token_checksum(5, np.append(positions, 9), np.append(tokens, 109)),
        token_checksum(5, positions, tokens.astype(np.float32)),
    ]  # fmt: skip
    assert len(set(sums)) == len(sums)
    assert all(0 <= total < 2**50 for total in sums)


def test_sum_of_checksums_of_4096_ranks_fits() -> None:
    assert 4096 * (2**50 - 1) < 2**63
    wrapped = int(np.array([2**50 - 1] * 10_000, dtype=np.int64).sum())
    assert combine(wrapped) == combine((2**50 - 1) * 10_000)


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"tokens": None}, "tokens", "missing"),
        ({"tokens": np.zeros(10)}, "tokens", "dtype float64"),
        ({"tokens": np.zeros((1, 10), int)}, "tokens", r"shape \(1, 10\)"),
        ({"tokens": list(range(10))}, "tokens", "is a list"),
        ({"tokens": np.zeros(0, int)}, "labels", "10 values, key 'tokens' has 0"),
        ({"tokens": np.full(10, 2**31)}, "tokens", "int32"),
        ({"labels": torch.zeros(9, dtype=torch.int64)}, "labels", "9 values, key 'tokens' has 10"),
        ({"loss_mask": np.array(["a"] * 10)}, "loss_mask", "dtype <U1"),
        ({"position_ids": torch.zeros(10)}, "position_ids", "dtype float32"),
        ({"cu_seqlens": np.array([0, 4, 9])}, "cu_seqlens", "ends at 9, key 'tokens' has 10"),
        ({"cu_seqlens": np.array([0, 4, 4, 10])}, "cu_seqlens", "ascend"),
        ({"cu_seqlens": np.array([1, 10])}, "cu_seqlens", "begin with 0"),
        ({"cu_seqlens": np.array([0, 4, 9]), "cu_seqlens_padded": np.array([0, 10])}, "cu_seqlens_padded", "3 bound"),
        ({"cu_seqlens": np.array([0, 6, 9]), "cu_seqlens_padded": np.array([0, 4, 10])}, "cu_seqlens_padded",
         "6 tokens, 'cu_seqlens_padded' gives it 4"),
        ({"mask": 5}, "mask", "is a int, a text is needed for each sample"),
        ({"mask": ["full", None]}, "mask", "has 2 masks, the item 1 samples: give one each"),
        ({"mask": "ranges:" + "A" * 9}, "mask", "holds no key ranges"),
        ({"mask": "shared_question:3,4"}, "mask",
         "prompt and answers have 7 tokens, the sample 10: both must be equal"),
        ({"mask": "shared_question:3,4,3", "labels": None}, "labels", "is missing, and in a shared_question"),
    ],
)  # fmt: skip
def test_bad_item_is_refused_by_key(change: dict[str, Any], key: str, message: str) -> None:
    item = {"tokens": np.arange(10), "labels": np.arange(10), "loss_mask": np.ones(10)}
    assert len(read_item(item, ALL)) == 1
    with pytest.raises(DataError, match=message) as caught:
        read_item(item | change, ALL)
    assert caught.value.key == key
    assert repr(key) in str(caught.value)


def test_item_that_is_no_dict_is_refused() -> None:
    with pytest.raises(DataError, match="yielded a Tensor"):
        read_item(torch.arange(10), ALL)


def test_padding_of_packs_is_left_out() -> None:
    item = {
        "tokens": torch.tensor([1, 2, 3, 0, 4, 5, 0, 0]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([0, 4, 8], dtype=torch.int32),
        "loss_mask": torch.tensor([True, True, True, False, True, True, False, False]),
    }
    first, second = read_item(item, ALL)
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.column("labels").tolist() == [2, 3, 0]
    assert first.column("loss_mask").view(np.float32).tolist() == [1, 1, 0]
    assert second.tokens.tolist() == [4, 5]
    assert second.column("position_ids").tolist() == [0, 1]


def test_samples_are_copies() -> None:
    """An iterator may fill the same buffer again while samples wait for their plan."""
    item = {"tokens": np.arange(4, dtype=np.int32), "loss_mask": np.ones(4, np.float32)}
    (sample,) = read_item(item, ALL)
    item["tokens"][:] = 9
    item["loss_mask"][:] = 9
    assert sample.tokens.tolist() == [0, 1, 2, 3]
    assert sample.loss_mask.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("given", "columns"),
    [((0, 0, 0, 5), ""), ((0, 0, 5, 0), ""), ((0, 0, 2, 3), "loss_mask"), ((1, 1, 5, 0), "position_ids loss_mask")],
)
def test_only_what_does_not_follow_from_the_plan_is_sent(given: tuple[int, ...], columns: str) -> None:
    """Whether the last token of a sample has a loss does not follow where only some samples bring labels."""
    sent = columns_to_send(*given)
    assert sent.names == ("tokens", "labels", *columns.split())
    assert sent.own_labels == (given[3] == 0)
    assert set(sent.for_stage(ChunkNeeds(tokens=True, labels=False)).names) <= {"tokens", "position_ids"}
    assert set(sent.for_stage(ChunkNeeds(tokens=False, labels=True)).names) <= {"labels", "loss_mask"}


@pytest.mark.by_day("False-6", "True-4")
@pytest.mark.parametrize("num_lanes", [1, 3, 4, 6])
@pytest.mark.parametrize("sp", [False, True])
def test_both_sides_know_the_sizes(num_lanes: int, sp: bool) -> None:
    """What lanes send is, row by row, what the others expect; each token goes to one lane."""
    layout = Layout(num_lanes, tp=2 if sp else 1, sp=sp)
    step, num_tokens = 9, 0
    for seed in range(5):
        random = np.random.default_rng(seed)
        drawn = [
            [piece_of(lane, k, int(random.integers(1, 60)), 0) for k in range(int(random.integers(0, 6)) + (lane == 0))]
            for lane in range(num_lanes)
        ]
        samples = tuple(
            Sample(sample_id=make_sample_id(step, lane, order, num_lanes), seqlen=len(piece["tokens"]))
            for lane, pieces in enumerate(drawn)
            for order, piece in enumerate(pieces)
        )
        plan = mixed_plan(samples, layout, seed)
        facts = PlanFacts.of(
            PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * num_lanes, reason="test")
        )
        plans = [lane_plan(plan, lane, facts) for lane in range(num_lanes)]
        places: list[list[Destination]] = [[None] * len(pieces) for pieces in drawn]
        for bucket in plan.buckets:
            padded = rerouting._padded(bucket, plans[0])
            for sample, length in zip(bucket.samples, padded, strict=False):
                _, lane, order = sample_origin(sample.sample_id, num_lanes)
                places[lane][order] = Destination(bucket.first_lane, bucket.cp_size, length)
        sent = [
            outgoing([read_item(p, ALL)[0] for p in pieces], places[lane], ("tokens",), num_lanes)
            for lane, pieces in enumerate(drawn)
        ]
        arriving = [incoming(plan_of_lane, step, num_lanes) for plan_of_lane in plans]
        came: Counter = Counter()
        for lane, expected in enumerate(arriving):
            assert list(expected.rows) == [leaving.rows[lane] for leaving in sent]
            received = [np.split(leaving.words[:, 0], np.cumsum(leaving.rows)[:-1])[lane].tolist() for leaving in sent]
            tokens = [token for part in received for token in part]
            for token, id_, position in zip(tokens, expected.sample_ids, expected.positions, strict=True):
                _, owner, order = sample_origin(int(id_), num_lanes)
                assert token == drawn[owner][order]["tokens"][position]
            assert len(set(expected.targets.tolist())) == len(tokens)
            came.update(tokens)
        assert set(came.values()) == {1}
        assert len(came) == sum(sample.seqlen for sample in samples)
        num_tokens += len(came)
    assert num_tokens > 200


# On ranks: how much is sent.


def all_data(layout: Layout, num_items: int, flavour: int) -> list[LaneData]:
    return [lane_data(lane, num_items, flavours=(flavour,)) for lane in range(layout.lanes)]


@pytest.mark.by_day("pp2_vpp2")
@pytest.mark.parametrize(
    ("name", "flavour", "columns_of_stage"),
    [
        ("dp4", 0, [2]),  # tokens and labels; the mask follows from the lengths
        ("dp4", 1, [3]), ("dp4", 3, [4]), ("pp2", 1, [1, 2]), ("pp2_vpp2", 2, [1, 1]), ("tp2", 1, [3]),
    ],
)  # fmt: skip
def test_bytes_sent_are_the_bytes_needed(name: str, flavour: int, columns_of_stage: list[int]) -> None:
    """4 bytes a token and column that another lane drew; nothing for padding, nothing that a stage does not read."""
    layout = LAYOUTS[name]
    ranks = run_ranks(layout.topology.world_size, run_foreign, layout, all_data(layout, 16, flavour), 8, {})
    total = 0
    for stage, num_columns in enumerate(columns_of_stage):
        for step in range(len(ranks[0].steps)):
            drawing = [rank.steps[step] for rank in ranks if rank.stage == stage and rank.tp_rank == 0]
            sent = sum(record.sent_bytes for record in drawing)
            assert sent == 4 * num_columns * sum(record.arrived_rows_from_others for record in drawing)
            broadcast = sum(record.broadcast_bytes for record in drawing)
            assert broadcast == (layout.tp - 1) * 4 * num_columns * sum(record.real_tokens for record in drawing)
            total += sent
        others = [rank for rank in ranks if rank.tp_rank > 0]
        assert all(step.sent_bytes == step.broadcast_bytes == 0 for rank in others for step in rank.steps)
    assert total > 1000


COUNTED = (
    "all_to_all_single", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "all_gather",
    "all_to_all", "all_gather_object", "broadcast_object_list", "send", "isend", "scatter", "gather",
)  # fmt: skip


def count_collectives(layout: Layout, data: list[LaneData]) -> list[tuple[str, int, int]]:
    """Return (collective, bytes of its largest tensor, step) for each call on this rank."""
    wrapper, _, _ = make_wrapper(layout, data, 8)
    calls: list[tuple[str, int, int]] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, max(a.nbytes for a in args if isinstance(a, torch.Tensor)), wrapper.step))
            return original(*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(dist, name, counted(name))
    for _ in range(2):
        next(wrapper)
    return calls


@pytest.mark.by_day("pp2")
@pytest.mark.parametrize("name", ["dp4", "pp2", "tp2"])
def test_one_collective_moves_the_tokens(name: str) -> None:
    layout = LAYOUTS[name]
    data = all_data(layout, 8, 3)  # tokens, labels and position ids are integers, the mask is float32
    ranks = run_ranks(4, count_collectives, layout, data)
    for rank, calls in enumerate(ranks):
        draws = rank % layout.tp == 0
        for step in range(2):
            names = Counter(call for call, _, s in calls if s == step)
            assert names["all_to_all_single"] == draws
            assert names["broadcast"] == (layout.tp > 1)
            assert names["reduce_scatter_tensor"] == draws
            assert names["all_gather_into_tensor"] == (draws and rank < layout.lanes * layout.tp)
            assert names["all_reduce"] == 4, "outcome and sum of drawing, the plan, agreement before re-routing"
            assert sum(names.values()) <= 8
        small = [size for call, size, _ in calls if call not in ("all_to_all_single", "broadcast")]
        assert max(small) <= 16 * 8, "only lengths and places go to all lanes"


# On ranks: faults.


Plant = Callable[[ForeignIteratorWrapper, pytest.MonkeyPatch], None]


def on_rank(rank: int, plant: Plant) -> Plant:
    return lambda wrapper, patched: plant(wrapper, patched) if dist.get_rank() == rank else None


def changing_item(number: int, change: Callable[[dict[str, Any]], Any]) -> Plant:
    """Return a fault of one item of a rank's iterator, if it has one."""

    def plant(wrapper: ForeignIteratorWrapper, _: Any) -> None:
        drawer = wrapper._drawer
        if drawer.draws:
            original = drawer._own_iterator()
            changed = (change(item) if index == number else item for index, item in enumerate(original))
            drawer._data_iterators = [changed] * len(drawer._chunks)

    return plant


def giving(iterators: Any) -> Plant:
    return lambda wrapper, _: setattr(wrapper._drawer, "_data_iterators", iterators)


def changing_in_transit(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(_: ForeignIteratorWrapper, patched: pytest.MonkeyPatch) -> None:
        original = dist.all_to_all_single

        def changed(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(output, *args, **kwargs)
            output.copy_(change(output.clone()))
            return result

        patched.setattr(dist, "all_to_all_single", changed)

    return plant


def changing_plan(method: str, change: Callable[[Any], Any]) -> Plant:
    def plant(wrapper: ForeignIteratorWrapper, _: Any) -> None:
        original = getattr(wrapper._plan_source, method)
        setattr(wrapper._plan_source, method, lambda step: change(original(step)))

    return plant


ON_FIRE = "the data iterator raised OSError: disk on fire"


def burn(_: Any) -> Any:
    raise OSError("disk on fire")


def lose_the_store(_: Any) -> Any:
    raise DynamicCPError("the store is gone")


def lose_a_token(_: ForeignIteratorWrapper, patched: pytest.MonkeyPatch) -> None:
    """The lane computes on one token less."""
    original = rerouting.count_packed

    def count(packed: Any, arriving: rerouting.Incoming, names: Any, lane: int) -> list[int]:
        rows = {name: getattr(arriving, name)[:-1] for name in ("targets", "sample_ids", "positions", "is_last")}
        return original(packed, dataclasses.replace(arriving, **rows), names, lane)

    patched.setattr(rerouting, "count_packed", count)


def plan_for_other_lengths(wrapper: ForeignIteratorWrapper, _: Any) -> None:
    """The planner is told of a sample one token longer than it is."""
    original = wrapper._plan_source.request

    def request(step: int, samples: Any) -> None:
        longer = [Sample(sample_id=s.sample_id, seqlen=s.seqlen + (i == 3)) for i, s in enumerate(samples)]
        original(step, longer)

    wrapper._plan_source.request = request


class Fault(NamedTuple):
    """What is planted on which layouts, and what all ranks say of it; `rank` speaks in `step`, None: whichever."""

    layouts: tuple[str, ...]
    plant: Plant
    kind: type
    says: tuple[str, ...]
    rank: int | None = None
    step: int | None = None
    verify: str = "digest"


EVERY = ("dp4", "pp2", "tp2")
IN_TRANSIT = Fault(EVERY, burn, DisagreementError, ("re-routing of step 0 changed",), step=0, verify="full")
FAULTS = {
    "iterator raises late": Fault(("dp4",), on_rank(2, changing_item(3, burn)), DataError, (ON_FIRE,), rank=2, step=1),
    "iterator raises": Fault(("pp2", "tp2"), on_rank(2, changing_item(3, burn)), DataError, (ON_FIRE,), rank=2, step=0),
    "torn mask": Fault(
        ("dp4",),
        on_rank(3, changing_item(0, lambda item: item | {"loss_mask": item["loss_mask"][:-1]})),
        DataError, ("'loss_mask'", "lane 3", "step 0"), rank=3, step=0,
    ),
    "no iterator": Fault(EVERY, on_rank(2, giving(None)), InvalidInputError, ("has no data iterator",), rank=2),
    "iterators of other chunks": Fault(
        ("dp4",), giving([iter([]), iter([])]), InvalidInputError, ("2 data iterators were given for 1 model chunks",)
    ),
    "samples for an iterator": Fault(
        ("dp4",),
        giving([{"tokens": np.arange(5)}]),
        InvalidInputError,
        ("the data iterator is a dict: pass iter(...) of it",),
    ),
    "stages draw other samples": Fault(
        ("pp2",),
        on_rank(3, lambda wrapper, _: next(wrapper._drawer._own_iterator())),
        DisagreementError,
        ("pipeline stage 1 drew 8 samples in 8 items for step 0, the first stage 8 in 8, of other lengths",),
        step=0,
    ),
    "swapped tokens": IN_TRANSIT._replace(
        plant=on_rank(2, changing_in_transit(lambda words: torch.cat([words[1:2], words[:1], words[2:]])))
    ),
    "changed mask": IN_TRANSIT._replace(
        plant=on_rank(2, changing_in_transit(lambda words: torch.cat([words[:-1], 1 - words[-1:]])))
    ),
    "lost token": Fault(
        ("dp4",), on_rank(1, lose_a_token), DisagreementError, ("tokens and gave out",), step=0, verify="full"
    ),
    "plan for other lengths": Fault(
        ("dp4",), plan_for_other_lengths, DisagreementError, ("is in 1 buckets of the plan with",), rank=1
    ),
    # Its last sample is in two buckets: rank 0, which knows the lengths, must notice.
    "illegal plan": Fault(
        ("dp4",),
        changing_plan("whole", lambda plan: dataclasses.replace(plan, micro_batches=plan.micro_batches * 2)),
        IllegalPlanError, ("is twice in the plan",), rank=0, step=0, verify="full",
    ),
    "other part of the plan": Fault(
        ("pp2",),
        on_rank(3, changing_plan("take", lambda plan: dataclasses.replace(plan, buckets=plan.buckets[::-1]))),
        DisagreementError,
        ("lane 1 has another part of the plan of step 0",),
        verify="full",
    ),
    "no plan": Fault(
        ("pp2",), on_rank(3, changing_plan("take", lose_the_store)), DynamicCPError, ("the store is gone",), rank=3
    ),
}  # fmt: skip


def fail_foreign(layout: Layout, data: list[LaneData], faults: list[str]) -> list[tuple[type, str, int, float]]:
    """Return (error, message, step, seconds) of this rank for each fault; collectives show that all are in step."""
    groups, found = groups_of(layout), []
    for fault in faults:
        settings = {"groups": groups, "name": fault, "verify": FAULTS[fault].verify}
        wrapper, _, _ = make_wrapper(layout, data, 8, **settings)
        with pytest.MonkeyPatch.context() as patched:
            FAULTS[fault].plant(wrapper, patched)
            started_s = patience.now_s()
            with pytest.raises(DynamicCPError) as caught:
                for _ in wrapper:
                    pass
        found.append((type(caught.value), str(caught.value), wrapper.step, patience.now_s() - started_s))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == layout.topology.world_size, fault
    return found


@pytest.mark.parametrize("name", EVERY)
def test_faults_fail_all_ranks_alike(name: str) -> None:
    layout = LAYOUTS[name]
    faults = [fault for fault, one in FAULTS.items() if name in one.layouts]
    ranks = run_ranks(4, fail_foreign, layout, all_data(layout, 32, 1), faults, timeout_s=60)
    for fault, *found in zip(faults, *ranks, strict=True):
        planted, (kind, message, step, _) = FAULTS[fault], found[0]
        assert all(one[:3] == found[0][:3] for one in found), fault
        assert max(seconds for *_, seconds in found) < 20, fault
        assert kind is planted.kind, fault
        assert all(part in message for part in planted.says), message
        assert planted.rank is None or message.endswith(f"(rank {planted.rank})"), message
        assert planted.step in (None, step), fault


class OnlyNext:
    """Has no __iter__, as megatron-core's RerunDataIterator in some versions."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)


def draw_with_only_next(layout: Layout, data: list[LaneData]) -> int:
    wrapper, _, _ = make_wrapper(layout, data, 8)
    wrapper._drawer._data_iterators = OnlyNext(wrapper._drawer._data_iterators)
    return sum(1 for _ in wrapper)


def test_iterator_needs_no_more_than_next() -> None:
    assert run_ranks(2, draw_with_only_next, Layout(2), all_data(Layout(2), 8, 1)) == [2, 2]


def die_in(name: str, rank: int) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os._exit(1)

    if dist.get_rank() == rank:
        setattr(dist, name, die)


def wrap_with_a_dying_rank(layout: Layout, collective: str, rank: int) -> None:
    wrapper, _, _ = make_wrapper(layout, all_data(layout, 16, 1), 8)
    next(wrapper)
    die_in(collective, rank)
    next(wrapper)
    # Ranks that have no part in the collective learn of it by the next one of all.
    next(wrapper)


@pytest.mark.by_day("dp4-all_to_all_single")
@pytest.mark.parametrize(
    ("name", "collective", "rank", "phase"),
    [
        ("dp4", "all_to_all_single", 2, "re-routing of step 1 (exchange, all-to-all over 4 lanes)"),
        ("dp4", "reduce_scatter_tensor", 1, "re-routing of step 1 (directory, reduce-scatter over 4 lanes)"),
        ("dp4", "all_gather_into_tensor", 3, "drawing the samples of step 1"),
        ("tp2", "broadcast", 2, "re-routing of step 1 (broadcast to 2 TP ranks)"),
    ],
)
def test_killed_rank_ends_the_others_with_the_phase(name: str, collective: str, rank: int, phase: str) -> None:
    started_s = patience.now_s()
    with pytest.raises(RankError) as caught:
        run_ranks(4, wrap_with_a_dying_rank, LAYOUTS[name], collective, rank, timeout_s=60)
    assert patience.now_s() - started_s < 30
    reports = str(caught.value).split("\nrank ")
    assert sum("died without a word" in report for report in reports) == 1
    others = [report for report in reports if "died without a word" not in report]
    assert len(others) == 3
    assert all("DynamicCPError" in report and "one of 4 ranks ended or did not answer" in report for report in others)
    assert not any("starting up" in report for report in others)
    assert any(phase in report for report in others)
