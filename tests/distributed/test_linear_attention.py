"""Linear attention over lanes, in packs and in placed buckets, equals that of each sample alone, token after token."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.placement.programme import Programme
from dynamic_cp.plans.lane_plan import PlanFacts, decode_lane, encode_lanes
from dynamic_cp.plans.stretches import Stretches
from dynamic_cp.pricing.linear_prices import sent_states
from dynamic_cp.types import (
    FULL,
    Bucket,
    LinearAttention,
    Mask,
    MicroBatch,
    Plan,
    PlannedBatch,
    Sample,
    StateExchange,
    Topology,
    parse_mask,
)
from dynamic_cp.types import STATE_EXCHANGES as WAYS
from dynamic_cp.types.branches import Branches
from dynamic_cp.types.linear_attention import LINEAR_KINDS, LinearKind
from megatron.dynamic_cp.attention.linear.layout import gathered_rows, lane_rows
from megatron.dynamic_cp.attention.linear.thd import gated_delta_net_thd, mamba2_thd
from megatron.dynamic_cp.attention.mechanisms.collectives import gathered_order
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.data.micro_batches import packed_buckets
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams
from tests.distributed.emulated_lanes import Board, EmulatedGroup, on_lanes, run_lanes
from tests.distributed.harness import params_of, run_ranks
from tests.distributed.linear_reference import REFERENCES, random_inputs, sizes_of
from tests.placements import random_placement, random_tree

LAYERS = {
    "gated_delta_net": sizes_of("gated_delta_net", 6, 3, 3, 5, 4),
    "mamba2": sizes_of("mamba2", 4, 2, 5, 3, 4),
    "mamba2_of_one_group": sizes_of("mamba2", 3, 1, 2, 4, 4),
}
THD = {"gated_delta_net": gated_delta_net_thd, "mamba2": mamba2_thd}
PACKS = [(1,), (2,), (3,), (7, 1), (16,), (5, 33, 1, 8), (77, 2)]
"""One token, fewer than lanes and than the convolution sees, odd ones, more than a block of kernels."""


def padded_to(seqlens: Sequence[int], cp_size: int) -> tuple[int, ...]:
    multiple = 2 * cp_size if cp_size > 1 else 1
    return tuple(-(-seqlen // multiple) * multiple for seqlen in seqlens)


class Whole:
    """Outputs of a pack's samples, each by itself, and gradients of the sum of these by weights.

    Attributes:
        masks: of samples in branches: each branch by itself.
        expected: outputs, gradients of what tokens bring, gradients of parameters."""

    def __init__(self, sizes: LinearAttention, seqlens: Sequence[int], masks: Sequence[Mask | None] = ()) -> None:
        self.sizes, self.seqlens, self.masks = sizes, seqlens, masks or [None] * len(seqlens)
        self.inputs, self.parameters = random_inputs(sizes, seqlens)
        generator = torch.Generator().manual_seed(1)
        shape = (sizes.num_heads, sizes.value_size)
        self.weights = [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in seqlens]
        leaves = [tensor.requires_grad_() for tensor in (*(x for one in self.inputs for x in one), *self.parameters)]
        outs = [self._alone(sample, mask) for sample, mask in zip(self.inputs, self.masks, strict=True)]
        loss = sum((out * weight).sum() for out, weight in zip(outs, self.weights, strict=True))
        grads = torch.autograd.grad(loss, leaves)
        number = len(self.inputs[0])
        self.num_of_tokens = 1 + number
        first_parameter = len(leaves) - len(self.parameters)
        of_tokens = [torch.cat(grads[first:first_parameter:number]) for first in range(number)]
        self.expected = [torch.cat(outs).detach(), *of_tokens, *grads[first_parameter:]]

    def _alone(self, sample: Sequence[Tensor], mask: Mask | None) -> Tensor:
        """Return what the tokens of a sample find; those of a segment at the end of the way to it."""
        attend = REFERENCES[self.sizes.kind]
        if not isinstance(mask, Branches):
            return attend(*sample, *self.parameters, self.sizes)
        found: list[Tensor] = []
        tokens: list[Tensor] = []
        for segment in mask.segments():
            own = torch.arange(segment.start, segment.stop)
            tokens.append(own if segment.parent < 0 else torch.cat((tokens[segment.parent], own)))
            found.append(attend(*(x[tokens[-1]] for x in sample), *self.parameters, self.sizes)[-len(own) :])
        return torch.cat(found)

    def zigzag(self, cp_size: int) -> list[Tensor]:
        """Return [lane] which token of all samples each of its rows is, -1 for padding."""
        padded = padded_to(self.seqlens, cp_size)
        numbers = torch.arange(sum(self.seqlens)).split(list(self.seqlens))
        whole = torch.cat([pad(own, (0, n - len(own)), value=-1) for own, n in zip(numbers, padded, strict=True)])
        return [*whole[torch.from_numpy(gathered_order(padded, cp_size)).argsort()].chunk(cp_size)]

    def lane(
        self, params: DynamicPackedSeqParams, *, tokens: Tensor | None = None, repeated: str = "",
        dtype: torch.dtype = torch.float64, under_autocast: bool = False,
    ) -> tuple[list[Tensor], tuple[int, int]]:  # fmt: skip
        """Return what a lane computes, as `expected`, and the bytes that it sends, forward and backward.

        Args:
            tokens: as one of `zigzag`, where they lie otherwise.
            repeated: backward computes the layer a second time, "reentrant" or as torch has it now."""
        own = self.zigzag(params.cp_group.size())[params.cp_group.rank()] if tokens is None else tokens

        def of_lane(samples: Sequence[Tensor]) -> Tensor:
            """Return the lane's rows of samples, with something that is not 0 for padding."""
            whole = torch.cat([sample.detach() for sample in samples]).to(dtype)
            return torch.cat((whole, torch.full_like(whole[:1], 0.5)))[own]

        local = [of_lane(x).requires_grad_() for x in zip(*self.inputs, strict=True)]
        parameters = [x.detach().to(dtype).clone().requires_grad_() for x in self.parameters]
        layer, arguments = THD[self.sizes.kind], (*local, *parameters, params, self.sizes)
        with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
            again = partial(checkpoint, layer, use_reentrant=repeated == "reentrant")
            with set_checkpoint_early_stop(False):  # a whole layer has something to keep at its end
                out = (again if repeated else layer)(*arguments)
        forward = params.stats.bytes_sent
        (out * of_lane(self.weights))[own >= 0].sum().backward()
        tensors = [out.detach(), *(x.grad for x in (*local, *parameters))]
        return tensors, (forward, params.stats.bytes_sent - forward)

    def joined(self, lanes: Sequence[Sequence[Tensor]], tokens: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return what lanes computed together, as `expected`."""
        rows = torch.cat([*(tokens or self.zigzag(len(lanes)))])
        order = rows.argsort()[-sum(self.seqlens) :]
        assert torch.equal(rows[order], torch.arange(len(order)))
        together = list(zip(*lanes, strict=True))
        of_tokens = [torch.cat(parts)[order] for parts in together[: self.num_of_tokens]]
        return [*of_tokens, *(torch.stack(parts).sum(0) for parts in together[self.num_of_tokens :])]

    def on_lanes(self, cp_size: int, way: StateExchange, **how: Any) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Return what emulated lanes compute, as `expected`, and the bytes that each sends; `how`: as for `lane`."""
        padded = padded_to(self.seqlens, cp_size)
        samples = tuple(
            Sample(sample_id=i, seqlen=n, mask=mask)
            for i, (n, mask) in enumerate(zip(self.seqlens, self.masks, strict=True))
        )
        lanes = on_lanes(
            padded, cp_size, lambda params: self.lane(params, **how), state_exchange=way,
            masked_samples=samples if any(self.masks) else None,
        )  # fmt: skip
        return self.joined([tensors for tensors, _ in lanes]), [sent for _, sent in lanes]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    assert len(pairs) > 4
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def assert_exact_by_both_ways(whole: Whole) -> None:
    for way, cp_size in (("heads", 1), *product(WAYS, (2, 4))):
        found, _ = whole.on_lanes(cp_size, way)
        assert error(found, whole.expected) < 1e-10, (whole.seqlens, way, cp_size)


@pytest.mark.by_day("gated_delta_net", "mamba2")
@pytest.mark.parametrize("kind", LAYERS)
def test_packs_over_lanes_equal_samples_token_after_token(kind: str) -> None:
    for seqlens in PACKS:
        assert_exact_by_both_ways(Whole(LAYERS[kind], seqlens))


@pytest.mark.nightly
def test_random_layers_and_packs_equal_samples_token_after_token() -> None:
    """Also convolutions that see nothing or much before a token, and lanes that are no power of two."""
    chosen = random.Random(7)
    for _ in range(200):
        num_groups = chosen.choice([1, 2, 3])
        kind, num_heads = chosen.choice(LINEAR_KINDS), num_groups * chosen.choice([1, 2, 3])
        others = (chosen.choice(of) for of in ([1, 2, 5], [1, 3], [1, 2, 4, 6]))
        sizes = sizes_of(kind, num_heads, num_groups, *others)
        whole = Whole(sizes, [chosen.choice([1, 2, 3, 5, 9, 17, 40, 70]) for _ in range(chosen.randint(1, 4))])
        cp_size, way = chosen.choice([1, 2, 3, 4, 8]), chosen.choice(WAYS)
        found, _ = whole.on_lanes(cp_size, way, repeated=chosen.choice(["", "", "reentrant", "by hooks"]))
        assert error(found, whole.expected) < 1e-10, (sizes, whole.seqlens, cp_size, way)


@pytest.mark.parametrize("repeated", ["reentrant", "by hooks"])
@pytest.mark.parametrize("way", WAYS)
def test_layers_may_be_computed_a_second_time(way: StateExchange, repeated: str) -> None:
    """And exchange as often, no oftener."""
    whole = Whole(LAYERS["gated_delta_net"], (5, 33, 1, 8))
    found, sent = whole.on_lanes(2, way, repeated=repeated)
    assert error(found, whole.expected) < 1e-10
    _, once = whole.on_lanes(2, way)
    assert sent == [(forward, forward + backward) for forward, backward in once]
    assert min(forward for forward, _ in once) > 0


@pytest.mark.parametrize("repeated", ["reentrant", "by hooks"])
@pytest.mark.parametrize("kind", LINEAR_KINDS)
def test_a_lane_without_heads_computes_its_layer_a_second_time_when_others_do(kind: LinearKind, repeated: str) -> None:
    whole = Whole(sizes_of(kind, 1, 1, 2, 3, 4), (5, 33))
    found, _ = whole.on_lanes(3, "heads", repeated=repeated)
    assert error(found, whole.expected) < 1e-10


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_lanes_send_what_is_planned(kind: str) -> None:
    """Heads in the mean of lanes, states lane by lane; float32, as elements of the model are 4 bytes here."""
    sizes = replace(LAYERS[kind], num_heads=8, num_groups=2)
    for seqlens, cp_size in (((24,), 2), ((64, 8, 16), 4), ((48, 16), 8)):
        whole = Whole(sizes, seqlens)
        sent = {}
        for way in WAYS:
            found, sent[way] = whole.on_lanes(cp_size, way, dtype=torch.float32)
            assert error(found, whole.expected) < 1e-4
        of_tokens = sum(seqlens) / cp_size * sizes.heads_bytes(cp_size, 4)
        assert [sum(one) / cp_size for one in zip(*sent["heads"], strict=True)] == [of_tokens] * 2
        planned = sent_states(Stretches.of_chunks(seqlens, cp_size), sizes, 4).of_lanes(np.zeros(cp_size, np.int64))
        assert sent["states"] == [*zip(*planned.sum(axis=1).tolist(), strict=True)]


def lanes_of_a_job(wholes: dict[tuple[int, ...], Whole]) -> list[Any]:
    """Return what this rank computed in micro-batches of other sizes each, and as which lane of which pack."""
    results = []
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,))}
    for micro_batch in MIXED:
        for (ranks, way), seqlens in micro_batch.items():
            if dist.get_rank() in ranks:
                padded = padded_to(seqlens, len(ranks))
                positions = torch.zeros(sum(padded) // len(ranks), dtype=torch.int64)
                params = params_of(padded, positions, groups[ranks], state_exchange=way)
                tensors, _ = wholes[seqlens].lane(params)
                results.append((seqlens, ranks.index(dist.get_rank()), tensors))
    return results


MIXED: list[dict[tuple[tuple[int, ...], StateExchange], tuple[int, ...]]] = [
    {((0, 1), "states"): (7, 1), ((2, 3), "heads"): (47, 2)},
    {((0, 1, 2, 3), "states"): (5, 33, 1, 8)},
    {((0, 1), "heads"): (16,), ((2,), "heads"): (3,), ((3,), "states"): (2,)},
    {((0, 1, 2, 3), "heads"): (33,)},
]
"""[micro-batch] (ranks, way) -> the pack that they compute."""


@pytest.mark.by_day("mamba2_of_one_group")
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_of_one_group"])
def test_ranks_of_changing_groups_compute_the_same(kind: str) -> None:
    wholes = {seqlens: Whole(LAYERS[kind], seqlens) for one in MIXED for seqlens in one.values()}
    lanes: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}
    for results in run_ranks(4, lanes_of_a_job, wholes):
        for seqlens, lane, tensors in results:
            lanes.setdefault(seqlens, {})[lane] = tensors
    assert set(lanes) == set(wholes)
    for seqlens, of_lanes in lanes.items():
        found = wholes[seqlens].joined([of_lanes[lane] for lane in sorted(of_lanes)])
        assert error(found, wholes[seqlens].expected) < 1e-10, seqlens


BRANCHES = [
    ((12,), ["shared_question:3,4,5"]),
    ((9,), ["tree:1(1(2,3(1)),1)"]),
    ((40, 5, 22), ["tree:20(3(7),10)", None, "shared_question:1,1,20"]),
]


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_branches_go_on_from_the_prefix_that_they_share(kind: str) -> None:
    for seqlens, texts in BRANCHES:
        assert_exact_by_both_ways(Whole(LAYERS[kind], seqlens, [text and parse_mask(text) for text in texts]))


@pytest.mark.nightly
def test_random_branches_go_on_from_the_prefixes_that_they_share() -> None:
    chosen = np.random.default_rng(11)
    for _ in range(150):
        seqlens = chosen.integers(1, 60, chosen.integers(1, 4)).tolist()
        masks = [random_tree(chosen, n) if chosen.random() < 0.8 else None for n in seqlens]
        whole = Whole(LAYERS[chosen.choice([*LAYERS])], seqlens, masks)
        cp_size, way = int(chosen.choice([1, 2, 3, 4, 8])), chosen.choice(WAYS)
        found, _ = whole.on_lanes(cp_size, way, repeated=chosen.choice(["", "", "reentrant", "by hooks"]))
        assert error(found, whole.expected) < 1e-10, (seqlens, masks, cp_size, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2"])
def test_autocast_rounds_no_states(kind: str, way: StateExchange) -> None:
    whole = Whole(LAYERS[kind], (5, 33, 1, 8))
    found, _ = whole.on_lanes(2, way, dtype=torch.float32, under_autocast=True)
    assert error(found, whole.expected) < 1e-4


def test_parameters_of_a_micro_batch_do_not_hold_themselves() -> None:
    """What layers keep in them ends with them, not when garbage is collected."""
    params = params_of((8,), torch.arange(4), EmulatedGroup(0, Board(2)))
    alive = weakref.ref(params)
    rows = lane_rows(params, torch.device("cpu"))
    assert rows.halo(3).num_received == (0, 3)
    assert len(rows.links.jumps) == 2
    gathered_rows(params, torch.device("cpu"))
    del params, rows
    assert alive() is None


def test_what_states_cannot_follow_is_refused() -> None:
    samples = (Sample(sample_id=0, seqlen=4, mask=FULL),)
    placed = PlacedLane(programme=Programme((), (), (), (0, 0)), samples=samples, num_tokens=4)
    whole, group = Whole(LAYERS["mamba2"], (4,)), cast(Any, EmulatedGroup(0, Board(1)))
    for message, more in {
        "the plan places attention at iteration 3 for a model without linear": {"placed": placed},
        "sample 0 has the mask full at iteration 3": {"masked_samples": samples},
    }.items():
        params = params_of((4,), torch.arange(4), group, label="iteration 3", **more)
        with pytest.raises(UnsupportedFeatureError, match=message):
            whole.lane(params)


BESIDE = 1
"""Lanes of the process group before those of the bucket, and behind them: no part of it."""


def random_bucket(random: np.random.Generator, num_lanes: int, inner: int, most_tokens: int = 60) -> Bucket:
    lengths = random.integers(1, most_tokens, random.integers(1, 5)).tolist()
    samples = tuple(
        Sample(sample_id=7 + i, seqlen=n, mask=random_tree(random, n) if random.random() < 0.4 else None)
        for i, n in enumerate(lengths)
    )
    return Bucket(
        first_lane=0, cp_size=num_lanes * inner, samples=samples, cp_comm_type="blocks", inner_cp_size=inner,
        placement=random_placement(random, samples, num_lanes, 2), state_exchange="states",
    )  # fmt: skip


def placed_lanes(bucket: Bucket, tp_size: int = 1) -> list[PlacedLane]:
    """Return what each lane gets of the plan, by way of its message."""
    topology = Topology(num_lanes=bucket.cp_size, tp_size=tp_size, sequence_parallel=tp_size > 1)
    plan = Plan(topology=topology, max_tokens_per_rank=1000, micro_batches=(MicroBatch(buckets=(bucket,)),))
    planned = PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,) * bucket.cp_size, reason="test")
    lanes = []
    for message in encode_lanes(plan, PlanFacts.of(planned)):
        (packed,) = packed_buckets(decode_lane(message))
        assert packed.placed is not None
        lanes.append(packed.placed)
    return lanes


def tokens_of(lane: PlacedLane, bucket: Bucket) -> Tensor:
    """Return which of the tokens of a bucket each row of a lane is, -1 for padding."""
    names = [sample.sample_id for sample in bucket.samples]
    firsts = np.cumsum([0, *(sample.seqlen for sample in bucket.samples)])
    held = [firsts[names.index(s.sample_id)] + shard for s, shard in zip(lane.samples, lane.shards(), strict=False)]
    padding = lane.num_tokens - sum(map(len, held))
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *held, np.full(padding, -1)]))


def computed(whole: Whole, bucket: Bucket, tp_size: int = 1, **how: Any) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return what the lanes of a bucket compute, as `Whole.expected`, and the bytes that each sends."""
    lanes, board = placed_lanes(bucket, tp_size), Board(bucket.cp_size + 2 * BESIDE)
    tokens = [tokens_of(lane, bucket) for lane in lanes]

    def work(lane: int) -> Any:
        group: Any = EmulatedGroup(BESIDE + lane, board)
        held, placed = lanes[lane].num_tokens, replace(lanes[lane], first_in_group=BESIDE)
        positions = torch.zeros(held, dtype=torch.int64)
        params = params_of((held,), positions, group, label="emulated", placed=placed, state_exchange="states")
        return whole.lane(params, tokens=tokens[lane], **how)

    found = run_lanes(bucket.cp_size, work, [board])
    assert not board.letters, "a message was sent that nobody takes"
    return whole.joined([tensors for tensors, _ in found], tokens), [sent for _, sent in found]


def whole_of(kind: str, bucket: Bucket) -> Whole:
    samples = bucket.samples
    return Whole(LAYERS[kind], [sample.seqlen for sample in samples], [sample.mask for sample in samples])


@pytest.mark.by_day("3-1-gated_delta_net", "3-2-mamba2_of_one_group")
@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba2_of_one_group"])
@pytest.mark.parametrize(("num_lanes", "inner"), [(2, 1), (3, 1), (5, 1), (3, 2)])
def test_homes_anywhere_equal_samples_token_after_token(kind: str, num_lanes: int, inner: int) -> None:
    random = np.random.default_rng([num_lanes, inner])
    for turn in range(3):
        bucket = random_bucket(random, num_lanes, inner)
        whole = whole_of(kind, bucket)
        found, _ = computed(whole, bucket, tp_size=1 + turn % 2)
        assert error(found, whole.expected) < 1e-10, str(bucket)
        found, sent = computed(whole, bucket, dtype=torch.float32)
        assert error(found, whole.expected) < 1e-3
        planned = sent_states(Stretches.of_placement(bucket), whole.sizes, 4)
        of_lanes = planned.of_lanes(np.zeros(bucket.cp_size, np.int64)).sum(axis=1)
        assert np.allclose(sent, of_lanes.T, rtol=1e-12, atol=0), "a lane sends something else than is planned"


@pytest.mark.nightly
def test_random_homes_equal_samples_token_after_token() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        bucket = random_bucket(random, int(random.integers(1, 6)) + 1, int(random.choice([1, 1, 2])), 100)
        whole = whole_of(str(random.choice([*LAYERS])), bucket)
        found, _ = computed(
            whole,
            bucket,
            tp_size=int(random.choice([1, 2])),
            repeated=str(random.choice(["", "", "reentrant", "by hooks"])),
        )
        assert error(found, whole.expected) < 1e-10, str(bucket)
