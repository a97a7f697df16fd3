"""Placed attention: any placement, on lanes of one process and on gloo ranks, equals a dense softmax in float64."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.placement.cuts import placement_under
from dynamic_cp.placement.legal import tiles_between, why_misplaced
from dynamic_cp.placement.programme import programmes_of
from dynamic_cp.placement.transport import ACROSS, COLLECT, DELIVER, INSIDE, fetches_of, messages_of
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.types import (
    CAUSAL,
    FULL,
    Bucket,
    Causal,
    CausalBlockwise,
    Full,
    KeyRanges,
    Lambda,
    Mask,
    MicroBatch,
    ModelShape,
    Placement,
    Plan,
    PlannedBatch,
    Sample,
    SharedQuestion,
    Topology,
    Tree,
    parse_mask,
)
from dynamic_cp.types.placement import Lanes
from megatron.dynamic_cp.attention.kernels.choice import CPU, KERNELS
from megatron.dynamic_cp.attention.mechanisms import blocks
from megatron.dynamic_cp.attention.mechanisms.transfers import ExchangeError, LaneMessages
from megatron.dynamic_cp.attention.packs import Pack
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.data.micro_batches import COLUMNS, micro_batches, pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.data.token_audit import check_tokens
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import ExchangeStats
from tests.distributed.emulated_lanes import Placed, attend_placed
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.naive_attention import (
    DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    Exact,
    assert_all_close,
    exact_samples,
    random_qkv,
)
from tests.distributed.test_masks import any_ranges
from tests.placements import random_placement
from tests.sent_bytes import placed_bytes

MODEL = ModelShape(
    num_layers=1, hidden_size=HEADS * DIM, ffn_hidden_size=1, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
    kv_channels=DIM, vocab_size=1,
)  # fmt: skip
BF16 = torch.bfloat16
MOST_SAMPLES = 20
"""Of a bucket, whose samples have their numbers in it as ids, or those and a multiple of this."""
# Every mask, prime lengths that no block divides, samples of one token.
SAMPLES = tuple(
    Sample(sample_id=i, seqlen=seqlen, mask=mask)
    for i, (seqlen, mask) in enumerate(
        (
            *((53, None), (1, None), (23, FULL), (41, Lambda(2, 5)), (29, CausalBlockwise(4, 2))),
            *((31, SharedQuestion(7, (11, 4, 9))), (19, any_ranges(19)), (1, FULL), (2, None)),
            (30, parse_mask("tree:4(5(2,6(3,1)),9)")),
        )
    )
)


class Case(NamedTuple):
    """A random placement. idle: so many last lanes hold nothing, so many first ones compute nothing; mask: of samples
    that bring none; inner: lanes that exchange heads; window: of the layer that attends."""

    num_lanes: int
    node_lanes: int
    num_divisions: int
    kv_heads: int = KV_HEADS
    idle: int = 0
    samples: tuple[Sample, ...] = SAMPLES
    mask: Causal | Full = CAUSAL
    inner: int = 1
    window: Lambda | None = None

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.num_lanes, 0, self.node_lanes)

    @property
    def seen(self) -> Mask:
        """The mask of the layer that attends."""
        return self.window or self.mask

    @property
    def own(self) -> Placement:
        """The placement of that layer."""
        return placement_under(self.placement, self.samples, self.seen, self.lanes)

    @property
    def placement(self) -> Placement:
        return _placement(self)

    @property
    def num_tokens(self) -> int:
        return sum(sample.seqlen for sample in self.samples)

    @property
    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the output of all tokens."""
        return random_qkv(self.num_tokens, self.num_tokens, self.kv_heads)

    @property
    def expected(self) -> list[Exact]:
        return _expected(self.kv_heads, self.samples, self.seen)


BF16_CASE = Case(4, 2, 4, samples=tuple(Sample(sample_id=i, seqlen=n) for i, n in enumerate((256, 130, 9))))


def cases(num_lanes: int) -> Iterator[Case]:
    """Yield nodes of one lane, of two and of all, each with 1, 2, 4 and 8 divisions."""
    for node_lanes in sorted({1, 2, num_lanes}):
        for turn, num_divisions in enumerate((1, 2, 4, 8)):
            idle = (turn + node_lanes) % 2 if num_lanes < 8 else 3 * (turn % 2)
            yield Case(num_lanes, node_lanes, num_divisions, (KV_HEADS, HEADS, 1)[turn % 3], idle)


@lru_cache
def _expected(kv_heads: int, samples: tuple[Sample, ...], mask: Mask) -> list[Exact]:
    return exact_samples(Case(1, 1, 1, kv_heads, 0, samples).inputs, samples, mask)


@lru_cache
def _placement(case: Case) -> Placement:
    random = np.random.default_rng(case[:5])
    masks = (case.mask,) if case.window is None else (case.mask, case.window)
    placement = random_placement(random, case.samples, case.num_lanes - case.idle, case.num_divisions, *masks)
    placement.tiles[:, 2] += case.idle
    assert why_misplaced(placement, case.samples, case.num_lanes, case.mask) is None
    return placement


def lanes_of(case: Case) -> list[PlacedLane]:
    """Return what each lane does, with 0, 1 or 2 tokens more than it needs, and one at least where it holds nothing."""
    placement = case.placement
    lanes = []
    for lane, programme in enumerate(programmes_of(placement, case.samples, case.lanes)):
        samples = tuple(case.samples[number] for number in placement.samples_of(lane))
        num_tokens = max(1, -(-programme.num_tokens // case.inner) + lane % 3)
        one = PlacedLane(programme=programme, samples=samples, num_tokens=num_tokens, inner_cp_size=case.inner)
        lanes += [replace(one, inner_rank=rank) for rank in range(case.inner)]
    return lanes


def num_held(lane: PlacedLane) -> int:
    """Return the tokens that a lane holds, without padding."""
    return sum(home.stop - home.start for home in lane.homes)


def tokens_of(lane: PlacedLane, samples: Sequence[Sample]) -> Tensor:
    """Return which of the tokens of `samples` a lane holds."""
    firsts = np.cumsum([0, *(sample.seqlen for sample in samples)])
    held = zip(lane.samples, lane.shards(), strict=False)
    tokens = [firsts[sample.sample_id % MOST_SAMPLES] + shard for sample, shard in held]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *tokens]))


def attend(
    case: Case, lanes: Sequence[PlacedLane], kernel: str = CPU.name, dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Placed]:  # fmt: skip
    """Return what all lanes compute; padding holds values as any token, but no gradient comes to it."""
    inputs = []
    for lane in lanes:
        tokens = tokens_of(lane, case.samples)
        num_padding = lane.num_tokens - len(tokens)
        *qkv, grad = (x[tokens].to(dtype) for x in case.inputs)
        qkv = [torch.cat([x, torch.ones(num_padding, *x.shape[1:], dtype=dtype)]) for x in qkv]
        grad = torch.cat([grad, grad.new_zeros(num_padding, *grad.shape[1:])])
        inputs.append([x.to(device) for x in (*qkv, grad)])
    return attend_placed(inputs, lanes, KERNELS[kernel], case.seen)


def whole_of(lanes: Sequence[PlacedLane], samples: Sequence[Sample], found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return tensors of the tokens of `samples`, from those of the lanes."""
    tokens = [tokens_of(lane, samples) for lane in lanes]
    order = torch.cat(tokens).argsort()
    assert torch.equal(torch.cat(tokens)[order], torch.arange(len(order)))
    return [
        torch.cat([x[: len(held)] for x, held in zip(part, tokens, strict=True)])[order]
        for part in zip(*found, strict=True)
    ]


def values(expected: Sequence[Exact]) -> list[Tensor]:
    return [one.value for one in expected]


def assert_padding_gets_nothing(lanes: Sequence[PlacedLane], found: Sequence[Sequence[Tensor]]) -> None:
    """Its output and its gradients are 0."""
    for lane, tensors in zip(lanes, found, strict=True):
        assert not any(x[num_held(lane) :].any() for x in (tensors[0], *tensors[-3:]))


def attended(case: Case, lanes: Sequence[PlacedLane], **how: Any) -> list[Tensor]:
    return whole_of(lanes, case.samples, [[x.cpu() for x in one.tensors] for one in attend(case, lanes, **how)])


def pairs_of(packs: Sequence[Pack]) -> int:
    total = 0
    for pack in packs:
        if pack.host_ranges is not None:
            total += int((pack.host_ranges[:, 1::2] - pack.host_ranges[:, ::2]).sum())
        else:
            squares = zip(pack.row_seqlens, pack.column_seqlens, strict=True)
            total += sum(rows * (rows + 1) // 2 if pack.causal else rows * columns for rows, columns in squares)
    return total


def assert_counts_as_planned(case: Case, found: Sequence[Placed]) -> Counter[str]:
    """Pairs and bytes of every lane are those of the placement; return what there was."""
    placement = case.own
    tiles = placement.tiles.astype(np.int64)
    wanted = tiles_between(placement, case.samples, case.seen)
    pairs = dict(
        zip(zip(wanted.rows.tolist(), wanted.columns.tolist(), strict=True), wanted.pairs.tolist(), strict=True)
    )
    of_lane: Counter[int] = Counter()
    for row, column, lane, _ in tiles.tolist():
        of_lane[lane] += pairs[row, column]
    fetches = fetches_of(placement, case.lanes)
    tokens = (placement.homes[:, 2] - placement.homes[:, 1]).astype(np.int64)
    query, keys, lse = 4 * HEADS * DIM, 2 * 4 * case.kv_heads * DIM, 4 * HEADS
    seen: Counter[str] = Counter()
    for direction, there, back in ((0, (query, keys), (query + lse, 0)), (1, (3 * query + lse, keys), (query, keys))):
        messages = messages_of(fetches, tokens, np.array(there, float), np.array(back, float))
        sent = np.bincount(messages.sender, messages.num_bytes, case.num_lanes)
        assert [one.sent_bytes[direction] for one in found] == sent.tolist()
        for name, number in (("across", ACROSS), ("inside", INSIDE), ("collect", COLLECT), ("deliver", DELIVER)):
            seen[f"{name} {direction}"] += int((messages.round == number).sum())
    every = programmes_of(case.placement, case.samples, case.lanes)
    programmes = [one.of_layers(case.seen) for one in every]
    for lane, one in enumerate(found):
        packs = [
            pack for division in blocks.placed_packs(one.params, torch.device("cpu")).divisions for pack in division
        ]
        assert pairs_of(packs) == of_lane[lane]
        seen["idle"] += not of_lane[lane]
        seen["holds nothing"] += not placement.home_tokens(case.num_lanes)[lane]
        seen["ranged"] += sum(pack.key_ranges is not None for pack in packs)
        fetched = sum(held.num_tokens for held in programmes[lane].held if held.kind >= 0)
        seen["reused"] += sum(programmes[lane].buffer_tokens) < fetched
    seen["relayed"] += int((fetches.source != placement.homes[fetches.home, 3]).sum())
    seen["tokens"] += int((tokens == 1).sum())
    return seen


def assert_case(case: Case, kernel: str = CPU.name) -> Counter[str]:
    lanes = lanes_of(case)
    found = attend(case, lanes, kernel)
    tensors = [one.tensors for one in found]
    try:
        assert_all_close(whole_of(lanes, case.samples, tensors), case.expected)
        assert_padding_gets_nothing(lanes, tensors)
        return assert_counts_as_planned(case, found)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


@pytest.mark.by_day("3")
@pytest.mark.parametrize("num_lanes", [2, 3, 4, 8])
def test_lanes_of_one_process_equal_a_dense_softmax(num_lanes: int) -> None:
    seen: Counter[str] = Counter()
    for case in cases(num_lanes):
        seen += assert_case(case)
    rounds = [f"{name} {direction}" for name in ("inside", "collect", "across", "deliver") for direction in (0, 1)]
    for what in (*rounds, "ranged", "reused", "idle", "holds nothing", "tokens"):
        assert seen[what] > 0, what
    assert (seen["relayed"] > 0) == (num_lanes > 2), "two lanes have nobody to hand on to"


def test_lanes_that_exchange_heads_equal_a_dense_softmax() -> None:
    """Placements of inner groups of 2 and 4 lanes, with KV heads that are repeated, as many, and more."""
    seen: Counter[str] = Counter()
    for turn, (num_groups, node_groups, inner) in enumerate(((2, 1, 2), (3, 3, 2), (4, 2, 2), (2, 2, 4), (3, 2, 4))):
        kv_heads = (KV_HEADS, HEADS, 1)[turn % 3]
        case = Case(num_groups, node_groups, (1, 2, 4, 8)[turn % 4], kv_heads, turn % 2, inner=inner)
        lanes = lanes_of(case)
        found = [one.tensors for one in attend(case, lanes)]
        parts = [(out, *grads) for out, _, *grads in found]
        out, _, *grads = case.expected
        assert_all_close(whole_of(lanes, case.samples, parts), [out, *grads])
        assert_padding_gets_nothing(lanes, parts)
        held = [num_held(lane) for lane in lanes]
        seen["a lane has nothing"] += not all(held)
        seen["a home is cut"] += len([home for lane in lanes for home in lane.homes]) > len(case.placement.homes)
        seen["KV heads are repeated"] += kv_heads < inner
    assert all(seen[what] for what in ("a lane has nothing", "a home is cut", "KV heads are repeated"))


def test_portable_blocks_compute_it_too() -> None:
    """What a CUDA device computes in float32."""
    assert assert_case(Case(4, 2, 2), "portable")["ranged"]


def test_layers_with_full_attention_see_all_of_their_samples() -> None:
    samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate((37, 1, 60, 2)))
    for num_lanes, node_lanes in ((2, 1), (3, 3), (4, 2)):
        seen = assert_case(Case(num_lanes, node_lanes, 4, samples=samples, mask=FULL))
        assert seen["inside 0"] + seen["across 0"] > 0
        assert not seen["ranged"]
    with pytest.raises(AssertionError, match="output: error"):
        assert_all_close(values(_expected(KV_HEADS, samples, CAUSAL)), _expected(KV_HEADS, samples, FULL))


def test_layers_with_a_window_keep_the_homes_of_those_without() -> None:
    """Samples within the window are causal, longer ones see ranges of keys; only keys travel."""
    samples = tuple(Sample(sample_id=i, seqlen=seqlen) for i, seqlen in enumerate((83, 1, 60, 2, 17)))
    seen: Counter[str] = Counter()
    for num_lanes, node_lanes, window in ((2, 1, Lambda(0, 16)), (3, 3, Lambda(4, 7)), (4, 2, Lambda(1, 1))):
        case = Case(num_lanes, node_lanes, 4, idle=num_lanes % 2, samples=samples, window=window)
        seen += assert_case(case)
        assert len(case.own.homes) > len(case.placement.homes)
        with pytest.raises(UnsupportedFeatureError, match="attention is placed for layers with the masks causal"):
            attend(case._replace(window=Lambda(9, 9)), lanes_of(case))
    assert seen["ranged"] > 0
    assert seen["inside 0"] > 0
    assert seen["across 1"] > 0
    assert not seen["collect 0"]
    with pytest.raises(AssertionError, match="output: error"):
        assert_all_close(values(_expected(KV_HEADS, samples, Lambda(4, 7))), _expected(KV_HEADS, samples, Lambda(4, 6)))


def test_layers_with_a_window_cut_the_masks_that_samples_bring() -> None:
    """Answers see the end of their prompt only; of all masks both kinds of layers compute what they should."""
    looking_back = [one for one in SAMPLES if one.mask != FULL]
    samples = tuple(replace(one, sample_id=i) for i, one in enumerate(looking_back))
    assert {type(one.mask) for one in samples} == {type(None), Lambda, CausalBlockwise, SharedQuestion, KeyRanges, Tree}
    seen = Counter[str]()
    for num_lanes, node_lanes, inner, sink in ((2, 1, 1, 0), (4, 2, 1, 0), (3, 3, 1, 2)):
        window = Lambda(sink, 9)
        case = Case(num_lanes, node_lanes, 2, samples=samples, window=window, inner=inner)
        seen += assert_case(case)
        without = case._replace(window=None)
        assert why_misplaced(case.own, samples, num_lanes, window) is None
        assert_all_close(attended(without, lanes_of(without)), without.expected)
    assert seen["ranged"] > 0
    answers = (samples[4],)
    assert isinstance(answers[0].mask, SharedQuestion)
    with pytest.raises(AssertionError, match="output: error"):
        assert_all_close(values(_expected(KV_HEADS, answers, window)), _expected(KV_HEADS, answers, CAUSAL))


def test_bf16_is_summed_in_float32() -> None:
    """The bounds are those of other exchanges (test_attention.py)."""
    case = BF16_CASE
    expected = exact_samples([x.to(BF16).double() for x in case.inputs], case.samples)
    found = attended(case, lanes_of(case), dtype=BF16)
    assert {x.dtype for x in (found[0], *found[2:])} == {BF16}
    pairs = zip(found, expected, strict=True)
    out_error, lse_error, *grad_errors = [
        ((x.double() - wanted.value).norm() / wanted.value.norm()).item() for x, wanted in pairs
    ]
    assert out_error < 2.4e-3
    assert lse_error < 1e-5
    assert max(grad_errors) < 6e-3


# On ranks.


NUM_RANKS = 4
NODE_LANES = 1, 2
STEP = (((0, 4),), ((0, 2), (2, 2)), ((0, 1), (1, 3)), ((0, 3), (3, 1)))
"""Buckets of each micro-batch: first lane and lanes. Two of three lanes lie in a group of four, at both its ends."""
SHARED_HEADS = (((0, 4),),)
"""A micro-batch more where nodes have more than one lane: two and two of its lanes exchange heads."""


def bucket_of(first_lane: int, cp_size: int, index: int, node_lanes: int) -> Bucket:
    """Return a bucket with samples of its own, but for an empty place on lane 3."""
    first_id = MOST_SAMPLES * (100 * node_lanes + 10 * index + first_lane)
    samples = tuple(replace(sample, sample_id=first_id + sample.sample_id) for sample in SAMPLES)
    if cp_size == 1:
        return Bucket(first_lane=first_lane, samples=samples if first_lane < 3 else ())
    inner = 1 if index < len(STEP) else 2
    placement = Case(cp_size // inner, node_lanes, index + 1, idle=index % 2).placement
    return Bucket(
        first_lane=first_lane, cp_size=cp_size, cp_comm_type="blocks", inner_cp_size=inner, samples=samples,
        placement=placement,
    )  # fmt: skip


@lru_cache
def plan_of(node_lanes: int) -> Plan:
    micro_batches = tuple(
        MicroBatch(buckets=tuple(bucket_of(*place, index, node_lanes) for place in places))
        for index, places in enumerate(STEP + (SHARED_HEADS if node_lanes > 1 else ()))
    )
    topology = Topology(num_lanes=NUM_RANKS, ranks_per_node=node_lanes)
    plan = Plan(topology=topology, max_tokens_per_rank=300, micro_batches=micro_batches)
    check_plan(plan)
    return plan


def lane_plans(plan: Plan) -> list[LanePlan]:
    planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * NUM_RANKS, reason="")
    return [decode_lane(message) for message in encode_lanes(plan, PlanFacts.of(planned))]


@lru_cache
def lane_plans_of(node_lanes: int) -> list[LanePlan]:
    return lane_plans(plan_of(node_lanes))


def read_sample(sample_id: int) -> SampleTokens:
    random = np.random.default_rng(sample_id)
    tokens, labels, weights = random.integers(1, 1000, (3, SAMPLES[sample_id % MOST_SAMPLES].seqlen))
    return SampleTokens(tokens=tokens, labels=labels, loss_mask=weights.astype(np.float32))


class OnRank(NamedTuple):
    """What a rank found of a placed bucket: output and gradients, bytes that it sent, and its columns of data."""

    tensors: tuple[Tensor, ...]
    sent_bytes: int
    columns: dict[str, Tensor]


@lru_cache
def on_ranks() -> list[dict[int, list[OnRank | None]]]:
    for node_lanes in NODE_LANES:
        lane_plans_of(node_lanes)  # once, before ranks are forked
    return run_ranks(NUM_RANKS, attend_on_rank, timeout_s=60)


def attend_on_rank() -> dict[int, list[OnRank | None]]:
    """Return for nodes of 1 and of 2 lanes what this rank finds of each micro-batch; None where it is not placed."""
    initialize_model_parallel()
    device = torch.device("cpu")
    groups = DynamicCPGroups.build(
        Topology(num_lanes=NUM_RANKS), timeout_s=30, exchanges=("blocks",), inner_sizes=(2,), query_heads=HEADS
    )
    found = {}
    for node_lanes in NODE_LANES:
        plan = lane_plans_of(node_lanes)[groups.lane]
        packed = pack_step(plan, read_sample)
        check_tokens(plan, packed, read_sample, "a placed step", device)
        stats = ExchangeStats()
        found[node_lanes] = [
            find(batch, stats) for batch in micro_batches(packed, groups, device, f"nodes of {node_lanes}", stats)
        ]
    assert packed.columns is not None
    packed.columns[1, 0] += groups.lane == 2
    with pytest.raises(DisagreementError, match="changed between reading and sharding"):
        check_tokens(plan, packed, read_sample, "a placed step", device)
    return found


def find(batch: dict[str, Any], stats: ExchangeStats) -> OnRank | None:
    params = batch["packed_seq_params"]
    if params.placed is None:
        return None
    tokens = tokens_of(params.placed, SAMPLES)
    num_padding = params.placed.num_tokens - len(tokens)
    inputs = [x[tokens].float() for x in Case(1, 1, 1).inputs]
    *qkv, grad = (torch.cat([x, x.new_zeros(num_padding, *x.shape[1:])]) for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    before = stats.bytes_sent
    out = Attention.apply(*qkv, params, SCALE, KERNELS[CPU.name])
    grads = torch.autograd.grad(out, qkv, grad)
    columns = {name: batch[name][0].clone() for name in COLUMNS}
    return OnRank((out.detach(), *grads), stats.bytes_sent - before, columns)


def placed_buckets() -> Iterator[tuple[Bucket, list[PlacedLane], list[OnRank]]]:
    """Yield all placed buckets of `on_ranks`, what their lanes do, and what they found."""
    for node_lanes in NODE_LANES:
        steps = [pack_step(plan, None) for plan in lane_plans_of(node_lanes)]
        for index, micro_batch in enumerate(plan_of(node_lanes).micro_batches):
            for bucket in micro_batch.buckets:
                if bucket.placement is not None:
                    lanes = [steps[lane].buckets[index].placed for lane in bucket.lanes]
                    found = [on_ranks()[lane][node_lanes][index] for lane in bucket.lanes]
                    yield bucket, lanes, found


def test_ranks_equal_a_dense_softmax_and_send_what_is_priced() -> None:
    """Buckets of 2, 3 and 4 ranks."""
    seen: Counter[tuple[int, int]] = Counter()
    out, _, *grads = Case(1, 1, 1).expected
    for bucket, lanes, found in placed_buckets():
        tensors = [one.tensors for one in found]
        assert_all_close(whole_of(lanes, SAMPLES, tensors), [out, *grads])
        assert_padding_gets_nothing(lanes, tensors)
        node_lanes = bucket.samples[0].sample_id // MOST_SAMPLES // 100
        sent = placed_bytes(bucket, MODEL, Topology(num_lanes=NUM_RANKS, ranks_per_node=node_lanes), 4)
        assert [one.sent_bytes for one in found] == sent.sum(axis=0).tolist()
        seen[bucket.cp_size, bucket.inner_cp_size] += 1
    assert seen == {(2, 1): 4, (3, 1): 4, (4, 1): 2, (4, 2): 1}


def assert_columns_of(bucket: Bucket, lanes: Sequence[PlacedLane], columns: Sequence[dict[str, Tensor]]) -> None:
    """Every token has what was read of it, and the position that its mask gives it; padding has 0."""
    read = [read_sample(sample.sample_id) for sample in bucket.samples]
    positions = [None if sample.mask is None else sample.mask.positions(sample.seqlen) for sample in bucket.samples]
    of_samples = zip(positions, bucket.samples, strict=True)
    expected = {
        **{name: [getattr(one, name) for one in read] for name in ("tokens", "labels", "loss_mask")},
        "position_ids": [np.arange(one.seqlen) if by_mask is None else by_mask for by_mask, one in of_samples],
    }
    for name, parts in expected.items():
        found = [[one[name]] for one in columns]
        assert np.array_equal(whole_of(lanes, SAMPLES, found)[0].numpy(), np.concatenate(parts)), name
        assert not any(one[name][num_held(lane) :].any() for lane, one in zip(lanes, columns, strict=True))


def test_lanes_get_the_tokens_of_their_homes() -> None:
    num_restarting = 0
    for bucket, lanes, found in placed_buckets():
        assert_columns_of(bucket, lanes, [one.columns for one in found])
        num_restarting += sum(isinstance(sample.mask, SharedQuestion) for sample in bucket.samples)
    assert num_restarting == 11


def lose_a_message() -> str:
    """Return the error of this lane when lane 0 does not send its last message of a layer."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=2), timeout_s=1, exchanges=("blocks",))
    bucket = Bucket(first_lane=0, cp_size=2, cp_comm_type="blocks", samples=SAMPLES, placement=Case(2, 1, 2).placement)
    row = MicroBatch(buckets=(bucket,))
    plan = Plan(topology=Topology(num_lanes=2, ranks_per_node=1), max_tokens_per_rank=300, micro_batches=(row,))
    packed = pack_step(lane_plans(plan)[groups.lane], None)
    (batch,) = micro_batches(packed, groups, torch.device("cpu"), "step 7", ExchangeStats())
    params = batch["packed_seq_params"]
    q, k, v = (torch.ones(params.placed.num_tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    sent: list[LaneMessages] = []
    lost = -1

    class Losing(LaneMessages):
        def __init__(self, sends: Any, *args: Any) -> None:
            if any(x.nbytes for _, tensors in sends for x in tensors):
                sent.append(self)
            super().__init__([] if len(sent) == lost else sends, *args)

    blocks.LaneMessages = Losing
    Attention.apply(q, k, v, params, SCALE, KERNELS[CPU.name])
    assert len(sent) > 2
    if groups.lane == 0:
        lost = 2 * len(sent)
    try:
        Attention.apply(q, k, v, params, SCALE, KERNELS[CPU.name])
    except ExchangeError as error:
        return str(error)
    time.sleep(2)  # alive: a dead one is noticed at once
    return ""


@pytest.mark.slow  # it waits
def test_a_lost_message_is_an_error_that_names_the_place() -> None:
    """Whoever waits for it says so after the timeout of the group."""
    _, message = run_ranks(2, lose_a_message, timeout_s=20)
    assert "exchange in dynamic_cp_lanes_0_to_1 (ranks [0, 1]) failed at step 7, micro-batch 0, lanes 0..1" in message
    assert "imed out" in message
