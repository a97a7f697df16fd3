"""Masks of samples and layers: attention equals a dense softmax, shared questions train as their samples apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import DataError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import (
    CAUSAL,
    CP_COMM_TYPES,
    FULL,
    Bucket,
    CausalBlockwise,
    CpCommType,
    KeyRanges,
    Lambda,
    Mask,
    Sample,
    SharedQuestion,
    Topology,
    parse_mask,
)
from examples import torch_device_mesh
from examples.torch_device_mesh import VOCAB_SIZE, Document, TinyTransformer, loss_sum, problem_for
from megatron.dynamic_cp.attention import packs
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, shared_question
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import count_held, shard_positions
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.integrations.outside import Lanes, PlannedCollator, scaled_dot_product_attention, train_step
from tests.distributed.bucket_attention import Shard, assert_equal_to_dense, attend
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.naive_attention import sees_of

TOLERANCE = 5e-6


def any_ranges(seqlen: int) -> KeyRanges:
    """Return a mask of which tokens see their own sevenths of the sample, ahead and behind, and some keys before."""
    ranges = np.zeros((seqlen, 4), np.int32)
    own = np.arange(seqlen) // 7 * 7
    ranges[:, 1] = own // 3
    ranges[:, 2], ranges[:, 3] = own, np.minimum(own + 7, seqlen)
    return KeyRanges.of(ranges)


PACKS: dict[str, tuple[tuple[int, Mask | None], ...]] = {
    "answers": ((23, SharedQuestion(9, (6, 3, 5))), (11, SharedQuestion(1, (1,) * 10)), (2, SharedQuestion(1, (1,)))),
    "trees": tuple(
        (n, parse_mask(f"tree:{text}"))
        for n, text in ((30, "4(5(2,6(3,1)),9)"), (3, "3"), (17, "1(1,1(5,1,1(4,3)))"), (21, "2(2(2(2(2(2(2,3),4)))))"))
    ),
    "full": ((17, FULL), (1, FULL), (6, FULL)),
    "rectangles": ((13, None), (15, FULL), (1, None), (20, SharedQuestion(4, (9, 7))), (3, FULL), (8, None)),
    "windows": ((41, Lambda(2, 5)), (1, Lambda(0, 1)), (30, Lambda(0, 3)), (6, Lambda(64, 4096))),
    "blocks": ((37, CausalBlockwise(4, 2)), (1, CausalBlockwise(8, 1)), (16, CausalBlockwise(4, 1, 2))),
    "ranges": ((29, any_ranges(29)), (1, any_ranges(1))),
    "all kinds": (
        *((13, None), (25, Lambda(3, 4)), (15, FULL), (1, any_ranges(1)), (20, SharedQuestion(4, (9, 7))), (1, None)),
        *(
            (22, any_ranges(22)), (19, CausalBlockwise(5, 1)), (3, FULL), (8, None),
            (11, parse_mask("tree:2(3(1,2),3)")),
        ),
    ),
}  # fmt: skip


LAYERS = {"a window": Lambda(0, 6), "a window and a sink": Lambda(2, 3)}
IN_WINDOWS = [
    f"{pack} through {layers}" for pack in ("answers", "trees", "windows", "blocks", "ranges") for layers in LAYERS
]
"""Packs that also meet layers with a window."""


def samples_of(pack: str) -> tuple[Sample, ...]:
    masks = PACKS[pack.partition(" through ")[0]]
    return tuple(Sample(sample_id=i, seqlen=n, mask=mask) for i, (n, mask) in enumerate(masks))


def layers_of(pack: str) -> Mask:
    return LAYERS.get(pack.partition(" through ")[2], CAUSAL)


def bucket_of(pack: str, cp_size: int) -> Bucket:
    return Bucket(first_lane=0, cp_size=cp_size, samples=samples_of(pack), cp_comm_type="a2a" if cp_size > 1 else "p2p")


@lru_cache
def attended(cp_size: int) -> list[dict[str, Shard]]:
    """Return for each rank pack -> its shard, in one job."""
    return run_ranks(cp_size, attend_all, cp_size, (*PACKS, *IN_WINDOWS))


def attend_all(cp_size: int, names: tuple[str, ...]) -> dict[str, Shard]:
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=cp_size), timeout_s=30, exchanges=("a2a",))
    return {name: attend([(bucket_of(name, cp_size),)], groups, layers=layers_of(name))[0] for name in names}


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("pack", [*PACKS, *IN_WINDOWS])
def test_attention_equals_a_dense_softmax(pack: str, cp_size: int) -> None:
    shards = [of_rank[pack] for of_rank in attended(cp_size)]
    assert_equal_to_dense(bucket_of(pack, cp_size), shards, layers_of(pack))


Words = Callable[[int], list[int]]


def questions(words: Words) -> list[dict[str, Any]]:
    lengths = ((300, (80, 60, 90, 40)), (40, (9, 30)), (2, (1,)))
    return [{"prompt_ids": words(p), "response_ids": [words(a) for a in answers]} for p, answers in lengths]


def trees(words: Words) -> list[dict[str, Any]]:
    """Return rows of turns: 8 branches at 3 levels, not all of whose turns are learned; 5 levels, and a talk."""

    def turn(tokens: int, *children: dict[str, Any], learned: Any = True) -> dict[str, Any]:
        return {"tokens": words(tokens), "learned": learned, "children": list(children)}

    tries = [turn(40, turn(20, turn(9), turn(1), learned=False), turn(11), turn(6, turn(13))) for _ in range(2)]
    deep = turn(1, turn(1), turn(2, turn(3), turn(1, turn(4), turn(1, turn(2), turn(1)))))
    answered = turn(30, turn(5, turn(4)), learned=[index % 3 > 0 for index in range(30)])
    return [
        {"turns": turn(450, *tries, learned=False)},
        {"turns": turn(2, deep, turn(3), turn(20))},
        {"turns": answered},
    ]


ROWS = {"questions": questions, "trees": trees}


def rows_of(kind: str) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    return ROWS[kind](lambda number: random.integers(0, VOCAB_SIZE, number).tolist())


def apart(kind: str) -> list[SampleTokens]:
    """Return each branch by itself: prompt and response together, once for each response."""
    found = []

    def add(turn: dict[str, Any], before: list[int], learned: list[bool]) -> None:
        before = [*before, *turn["tokens"]]
        learned = [*learned, *np.broadcast_to(turn["learned"], len(turn["tokens"]))]
        for child in turn["children"]:
            add(child, before, learned)
        if not turn["children"]:
            tokens = np.array(before, np.int64)
            loss = np.append(learned[1:], 0).astype(np.float32)
            found.append(SampleTokens(tokens=tokens, labels=np.append(tokens[1:], 0), loss_mask=loss))

    for row in rows_of(kind):
        if "turns" in row:
            add(row["turns"], [], [])
            continue
        answers = [{"tokens": one, "learned": True, "children": []} for one in row["response_ids"]]
        add({"tokens": row["prompt_ids"], "learned": False, "children": answers}, [], [])
    return found


def new_model() -> TinyTransformer:
    torch.manual_seed(3)
    return TinyTransformer()


Step = tuple[float, dict[str, Tensor]]
"""The loss, and the gradients of all parameters."""


def train_alone(samples: Sequence[Any], sees: Sequence[Tensor | None]) -> Step:
    """Train each sample by itself with torch's attention, and its mask pair by pair, if it has one."""
    model, total = new_model(), 0.0
    torch_attention = torch_device_mesh.F.scaled_dot_product_attention
    num_tokens = sum(one.loss_mask.sum() for one in samples)
    for one, mask in zip(samples, sees, strict=True):

        def attention(*qkv: Tensor, mask: Tensor | None = mask, is_causal: bool, enable_gqa: bool) -> Tensor:
            return torch_attention(*qkv, attn_mask=mask, is_causal=mask is None, enable_gqa=enable_gqa)

        columns = (torch.from_numpy(x)[None] for x in (one.tokens, one.labels))
        with mock.patch.object(torch_device_mesh.F, "scaled_dot_product_attention", attention):
            losses = model(*columns, torch.arange(len(one.tokens))[None])
        loss = (losses * torch.from_numpy(one.loss_mask)).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@lru_cache
def train_apart(kind: str) -> Step:
    return train_alone(apart(kind), [None] * len(apart(kind)))


def train_together(exchange: str, step_of: Callable[[Lanes], Any]) -> tuple[Step, Any]:
    """Return a step on lanes, and the CP sizes of its plan."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p", exchange), timeout_s=60)
    wrapped = DistributedDataParallel(new_model(), process_group=lanes.mesh.get_group())
    step = step_of(lanes)
    result = train_step(lanes, wrapped, step, loss_sum, label="step")
    gradients = {name: parameter.grad for name, parameter in wrapped.module.named_parameters()}
    return (result.loss, gradients), step.plan.facts.cp_histogram


def collated(kind: str, lanes: Lanes) -> Any:
    (step,) = lanes.agreed([PlannedCollator(lanes.problem, lanes.lane)(rows_of(kind))])
    return step


def read_one_by_one(lanes: Lanes) -> Any:
    made = [shared_question(*row.values()) for row in rows_of("questions")]
    samples = [Sample(sample_id=i, seqlen=len(one.tokens), mask=mask) for i, (one, mask) in enumerate(made)]
    return lanes.step(samples, lambda index: made[index][0])


SHIMS = tuple(shim.name for shim in cpu_backend.SHIMS)


def assert_trains_as(expected: Step, num_lanes: int, exchange: str, step_of: Callable[[Lanes], Any]) -> None:
    ranks = run_ranks(num_lanes, train_together, exchange, step_of, shims_without=SHIMS, timeout_s=120)
    for (loss, gradients), sizes in ranks:
        assert max(sizes) == num_lanes
        assert abs(loss - expected[0]) <= TOLERANCE * expected[0]
        for name, gradient in gradients.items():
            error = (gradient - expected[1][name]).abs().max() / expected[1][name].abs().max()
            assert error <= TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.by_day("1-a2a-read_one_by_one")
@pytest.mark.parametrize(
    ("num_lanes", "exchange", "step_of"),
    [(1, "a2a", read_one_by_one), *((2, exchange, partial(collated, "questions")) for exchange in ("a2a", "blocks"))],
    ids=lambda value: str(getattr(value, "__name__", "collated" if callable(value) else value)),
)
def test_a_shared_question_trains_as_its_samples_apart(
    num_lanes: int, exchange: str, step_of: Callable[[Lanes], Any]
) -> None:
    assert_trains_as(train_apart("questions"), num_lanes, exchange, step_of)


@pytest.mark.by_day("2-blocks")
@pytest.mark.parametrize(("num_lanes", "exchange"), [(2, "a2a"), (2, "blocks"), (4, "a2a")])
def test_a_tree_of_turns_trains_as_its_branches_apart(num_lanes: int, exchange: str) -> None:
    assert_trains_as(train_apart("trees"), num_lanes, exchange, partial(collated, "trees"))


MASKS = (
    *((600, Lambda(8, 40)), (180, CausalBlockwise(32, 2)), (90, any_ranges(90)), (25, None), (1, Lambda(0, 1))),
    *((64, FULL), (33, Lambda(0, 4))),
)
MASKED = tuple(Sample(sample_id=i, seqlen=n, mask=mask) for i, (n, mask) in enumerate(MASKS))


def read_masked(lanes: Lanes) -> Any:
    return lanes.step(MASKED, lambda index: Document(MASKED[index]))


@pytest.mark.by_day("3")
@pytest.mark.parametrize(("num_lanes", "exchange"), [(1, "a2a"), (2, "a2a"), (3, "blocks")])
def test_samples_with_masks_train_as_with_dense_masks(num_lanes: int, exchange: str) -> None:
    expected = train_alone([Document(sample) for sample in MASKED], [sees_of(sample) for sample in MASKED])
    assert_trains_as(expected, num_lanes, exchange, read_masked)


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p"), timeout_s=60)
    limit = lanes.problem.options.max_tokens_per_rank
    sample = Sample(sample_id=3, seqlen=limit + 1, mask=Lambda(1, 8))
    with pytest.raises(UnsupportedFeatureError) as not_served:
        lanes.step([sample], lambda _: Document(sample))
    with pytest.raises(InvalidInputError) as short:
        PlannedCollator(lanes.problem, lanes.lane)([{"prompt_ids": [1], "response_ids": [[2]]}])
    assert str(not_served.value).startswith(
        "sample 3 has the mask lambda:1,8, which p2p cannot serve on several lanes, and the longest of its batch has "
        f"{limit + 1} tokens, a lane holds {limit}: allow a2a"
    )
    return [str(not_served.value), str(short.value)]


def test_masks_that_no_exchange_serves_and_prompts_that_are_too_short_are_refused_on_all_ranks() -> None:
    ranks = run_ranks(2, refused, shims_without=SHIMS, timeout_s=120)
    assert ranks[0] == ranks[1]
    assert ranks[0][1].startswith("a prompt of 1 tokens has 1 responses, the shortest of 1: at least 2 tokens")


NUM_LANES = 4
# One token makes 7 of padding on four lanes, of which three then have nothing else.
ON_FOUR, ON_TWO, ALONE = (1, 37, 2, 16, 9, 30, 5, 1), (6, 1, 8, 3, 23), (5, 1, 12)


def bucket(first_lane: int, cp_size: int, seqlens: tuple[int, ...], exchange: CpCommType = "p2p") -> Bucket:
    samples = tuple(Sample(sample_id=100 * first_lane + i, seqlen=n) for i, n in enumerate(seqlens))
    inner = 2 if exchange == "a2a+p2p" else 1
    return Bucket(first_lane=first_lane, cp_size=cp_size, samples=samples, cp_comm_type=exchange, inner_cp_size=inner)


def steps(exchange: CpCommType) -> tuple[tuple[Bucket, ...], ...]:
    """Return micro-batches of four lanes, of two with an empty place beside them, of single lanes and of 1 token."""
    of_two: CpCommType = "p2p" if exchange == "a2a+p2p" else exchange
    return (
        (bucket(0, 4, ON_FOUR, exchange),),
        (bucket(0, 2, ON_TWO, of_two), bucket(2, 2, (), of_two)),
        tuple(bucket(lane, 1, ALONE) for lane in range(4)),
        (bucket(0, 4, (1,), exchange),),
    )


Found = dict[CpCommType, list[Shard]]


def attend_on_rank() -> tuple[Found, Found]:
    """Return this lane's part of every micro-batch, by all exchanges and by portable blocks."""
    initialize_model_parallel()
    topology = Topology(num_lanes=NUM_LANES)
    groups = DynamicCPGroups.build(topology, timeout_s=30, exchanges=CP_COMM_TYPES, inner_sizes=(2,))
    found: Found = {exchange: attend(steps(exchange), groups, FULL) for exchange in CP_COMM_TYPES}
    portable: Found = {"a2a+p2p": attend(steps("a2a+p2p"), groups, FULL, kernel="portable")}
    return found, portable


@lru_cache
def on_ranks() -> list[tuple[Found, Found]]:
    return run_ranks(NUM_LANES, attend_on_rank, timeout_s=60)


def assert_all_equal_to_dense(exchange: CpCommType, ranks: Sequence[Found]) -> None:
    for index, buckets in enumerate(steps(exchange)):
        for one in buckets:
            if one.samples:
                assert_equal_to_dense(one, [ranks[lane][exchange][index] for lane in one.lanes], FULL)


@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
def test_every_exchange_equals_a_dense_softmax(exchange: CpCommType) -> None:
    ranks = [found for found, _ in on_ranks()]
    assert_all_equal_to_dense(exchange, ranks)
    empty = ranks[2][exchange][1]
    assert all(torch.isfinite(x).all() for x in empty.tensors)


def test_portable_blocks_compute_it_too() -> None:
    """What a CUDA device computes in float32."""
    assert_all_equal_to_dense("a2a+p2p", [portable for _, portable in on_ranks()])


def test_a_call_that_asks_for_another_mask_than_was_planned_is_refused() -> None:
    for mask, asked in ((FULL, True), (CAUSAL, False)):
        params = packs.DynamicPackedSeqParams(positions=torch.arange(3), mask=mask)
        with pytest.raises(UnsupportedFeatureError) as caught:
            scaled_dot_product_attention(*torch.zeros(3, 1, 4, 3, 8), is_causal=asked, packed_seq_params=params)
        assert f"is_causal={asked}" in str(caught.value)
        assert f"only {mask} attention" in str(caught.value)
        assert f"plan for a ModelShape with causal_attention={asked}" in str(caught.value)


def test_labels_of_full_attention_are_needed_and_not_shifted() -> None:
    problem = problem_for(1)
    collate = PlannedCollator(replace(problem, model=replace(problem.model, causal_attention=False)), 0)
    with pytest.raises(DataError, match=r"sample 1 has input_ids and 0 labels.*so give labels"):
        collate([{"input_ids": [1], "labels": [2]}, {"input_ids": [1, 2]}])
    packed = collate([{"input_ids": [4, 5, 6], "labels": [-100, 8, 9]}]).packed
    assert packed.columns is not None
    assert packed.loss_mask is not None
    assert (packed.columns[:2].tolist(), packed.loss_mask.tolist()) == ([[4, 5, 6], [0, 8, 9]], [0.0, 1.0, 1.0])


def test_a_lane_holds_what_is_no_padding_first() -> None:
    counts = set()
    for cp_size in (1, 2, 4, 8):
        for padded in (2 * cp_size, 6 * cp_size):
            for seqlen in range(1, padded + 1):
                for rank in range(cp_size):
                    held = shard_positions(padded, cp_size, rank) < seqlen
                    count = count_held(seqlen, padded, cp_size, rank)
                    assert held[:count].all()
                    assert not held[count:].any() or cp_size == 1
                    assert count == held.sum()
                    counts.add((count == 0, count == len(held)))
    assert counts >= {(True, False), (False, True), (False, False)}
