"""Samples with masks of their own: attention equals a dense softmax, shared questions train as their samples apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import (
    CAUSAL,
    FULL,
    Bucket,
    CausalBlockwise,
    KeyRanges,
    Lambda,
    Mask,
    Sample,
    SharedQuestion,
    Topology,
    Tree,
    parse_mask,
)
from examples import torch_device_mesh
from examples.torch_device_mesh import VOCAB_SIZE, Document, TinyTransformer, loss_sum, problem_for
from megatron.dynamic_cp.attention import packs
from megatron.dynamic_cp.data.sample_tokens import SampleTokens, shared_question
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.repairs import cpu_backend
from megatron.integrations.outside import Lanes, PlannedCollator, train_step
from tests.distributed.bucket_attention import Shard, assert_equal_to_dense, attend
from tests.distributed.faults import Plant, around
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
            (22, any_ranges(22)),
            (19, CausalBlockwise(5, 1)),
            (3, FULL),
            (8, None),
            (11, parse_mask("tree:2(3(1,2),3)")),
        ),
    ),
}


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


@around(SharedQuestion, "rectangles")
def drop_a_rectangle(rectangles: Any, self: SharedQuestion, seqlen: int) -> Any:
    return rectangles(self, seqlen)[:2] + rectangles(self, seqlen)[3:]


@around(Tree, "rectangles")
def let_branches_see_a_sibling(rectangles: Any, self: Tree, seqlen: int) -> Any:
    return tuple(
        one._replace(num_columns=one.num_columns + 1) if not one.causal else one for one in rectangles(self, seqlen)
    )


@around(Lambda, "key_ranges")
def widen_windows_by_one(key_ranges: Any, self: Lambda, seqlen: int) -> Any:
    return key_ranges(Lambda(self.sink, self.window + 1), seqlen)


@around(packs, "_with_padding")
def give_rows_the_ranges_of_the_row_before(with_padding: Any, ranges: Any, padded: Any) -> Any:
    return np.concatenate((ranges[:1], with_padding(ranges, padded)[:-1]))


FAULTS: dict[Plant, tuple[str, ...]] = {
    drop_a_rectangle: ("answers", "rectangles", "all kinds"),
    let_branches_see_a_sibling: ("trees", "all kinds"),
    widen_windows_by_one: ("windows", "blocks", "all kinds"),
    give_rows_the_ranges_of_the_row_before: ("windows", "blocks", "ranges", "all kinds"),
}


def plant_and_attend() -> list[dict[str, Shard]]:
    """Return pack -> shard of a lane alone, for each fault."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=1), timeout_s=30, exchanges=("a2a",))
    found = []
    for plant in FAULTS:
        with plant():
            found.append({name: attend([(bucket_of(name, 1),)], groups)[0] for name in PACKS})
    return found


def test_faults_are_noticed_where_they_matter_and_nowhere_else() -> None:
    (of_faults,) = run_ranks(1, plant_and_attend)
    for noticed, found in zip(FAULTS.values(), of_faults, strict=True):
        for pack, shard in found.items():
            wrong = pytest.raises(AssertionError, match="error") if pack in noticed else contextlib.nullcontext()
            with wrong:
                assert_equal_to_dense(bucket_of(pack, 1), [shard], CAUSAL)


Words = Callable[[int], list[int]]


def questions(words: Words) -> list[dict[str, Any]]:
    """Return rows of prompts with their responses, one of them long."""
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


@around(Tree, "segments")
def count_prefixes_once(segments: Any, self: Tree) -> Any:
    """The loss of a turn that branches share counts once, not once for each of them."""
    return [one._replace(num_branches=1) for one in segments(self)]


@around(Tree, "positions")
def let_positions_go_on(_: Any, self: Tree, seqlen: int) -> Any:
    """A branch goes on from the end of its sibling, not of its parent."""
    return np.arange(seqlen)


def plant_and_train(fault: Plant) -> Step:
    with fault():
        return train_together("a2a", partial(collated, "trees"))[0]


@pytest.mark.by_day("count_prefixes_once", "let_branches_see_a_sibling")
@pytest.mark.parametrize("fault", [count_prefixes_once, let_positions_go_on, let_branches_see_a_sibling])
def test_faults_of_trees_are_noticed(fault: Plant) -> None:
    _, expected = train_apart("trees")
    ((_, found),) = run_ranks(1, plant_and_train, fault, shims_without=SHIMS, timeout_s=120)
    assert max((found[name] - one).abs().max() / one.abs().max() for name, one in expected.items()) > 100 * TOLERANCE


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
