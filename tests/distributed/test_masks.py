"""Samples with masks of their own: attention equals a dense softmax, shared questions train as their samples apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import (
    CAUSAL,
    FULL,
    Bucket,
    CausalBlockwise,
    KeyRanges,
    Lambda,
    Mask,
    Plan,
    Sample,
    SharedQuestion,
    Topology,
    Tree,
    parse_mask,
)
from dynamic_cp.types.plan import MicroBatch, PlannedBatch
from examples import torch_device_mesh
from examples.torch_device_mesh import VOCAB_SIZE, Document, TinyTransformer, loss_sum, problem_for
from megatron.dynamic_cp.attention import packs
from megatron.dynamic_cp.attention.kernels.choice import CPU, KERNELS
from megatron.dynamic_cp.attention.thd import Attention
from megatron.dynamic_cp.data.micro_batches import micro_batches, pack_step
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.data.shared_question import shared_question
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import ExchangeStats
from megatron.dynamic_cp.layout.sharding import packed_shard_positions
from megatron.dynamic_cp.outside import Lanes, PlannedCollator, train_step
from megatron.dynamic_cp.repairs import cpu_backend
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.naive_attention import (
    SCALE,
    Exact,
    assert_all_close,
    assert_close,
    exact,
    random_qkv,
    sees_of,
    sees_of_pack,
)

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


@lru_cache
def attended(cp_size: int) -> list[dict[str, tuple[Tensor, ...]]]:
    """Return for each rank pack -> `attend`, in one job."""
    return run_ranks(cp_size, attend_all, cp_size, (*PACKS, *IN_WINDOWS))


def attend_all(cp_size: int, names: tuple[str, ...]) -> dict[str, tuple[Tensor, ...]]:
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=cp_size), timeout_s=30, exchanges=("a2a",))
    return {name: attend(name, cp_size, groups) for name in names}


def attend(pack: str, cp_size: int, groups: DynamicCPGroups) -> tuple[Tensor, ...]:
    """Return for this rank's tokens: which they are in the pack, output and gradients; padding left out."""
    bucket = Bucket(
        first_lane=0, cp_size=cp_size, samples=samples_of(pack), cp_comm_type="a2a" if cp_size > 1 else "p2p"
    )
    plan = Plan(
        topology=Topology(num_lanes=cp_size), max_tokens_per_rank=99, micro_batches=(MicroBatch(buckets=(bucket,)),)
    )
    facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""))
    packed = pack_step(lane_plan(plan, groups.lane, facts), None)
    (batch,) = micro_batches(packed, groups, torch.device("cpu"), "test", ExchangeStats())
    params = batch["packed_seq_params"].with_mask(layers_of(pack))
    padded = params.padded_seqlens
    local = packed_shard_positions(padded, cp_size, groups.lane)
    starts = np.repeat(np.cumsum((0, *padded[:-1])), np.array(padded) // cp_size)
    tokens = torch.from_numpy(local + starts)
    *inputs, grad = (x[tokens].float() for x in random_qkv(sum(padded), sum(padded)))
    real = torch.from_numpy(local) < torch.tensor([s.seqlen for s in bucket.samples]).repeat_interleave(
        torch.tensor(padded) // cp_size
    )
    grad = grad * real[:, None, None]
    inputs = [x.requires_grad_() for x in inputs]
    out = Attention.apply(*inputs, params, SCALE, KERNELS[CPU.name])
    grads = torch.autograd.grad(out, inputs, grad)
    return tuple(x.detach()[real] for x in (tokens, out, *grads))


def dense(pack: str, cp_size: int) -> tuple[Tensor, list[Exact]]:
    """Return the same of all real tokens, by a softmax over each whole sample."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-sample.seqlen // multiple) * multiple for sample in samples_of(pack)]
    seen = sees_of_pack(samples_of(pack), padded, layers_of(pack))
    out, _, *grads = exact(random_qkv(sum(padded), sum(padded)), seen)
    (chosen,) = seen.any(1).nonzero(as_tuple=True)
    return chosen, [one.of(chosen) for one in (out, *grads)]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("pack", [*PACKS, *IN_WINDOWS])
def test_attention_equals_a_dense_softmax(pack: str, cp_size: int) -> None:
    ranks = [of_rank[pack] for of_rank in attended(cp_size)]
    chosen, expected = dense(pack, cp_size)
    tokens, *found = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    order = tokens.argsort()
    assert torch.equal(tokens[order], chosen)
    assert_all_close([part[order] for part in found], expected)


def drop_a_rectangle() -> None:
    original = SharedQuestion.rectangles
    SharedQuestion.rectangles = lambda self, seqlen: original(self, seqlen)[:2] + original(self, seqlen)[3:]


def let_branches_see_a_sibling() -> None:
    original = Tree.rectangles
    Tree.rectangles = lambda self, seqlen: tuple(
        one._replace(num_columns=one.num_columns + 1) if not one.causal else one for one in original(self, seqlen)
    )


def widen_windows_by_one() -> None:
    original = Lambda.key_ranges
    Lambda.key_ranges = lambda self, seqlen: original(Lambda(self.sink, self.window + 1), seqlen)


def give_rows_the_ranges_of_the_row_before() -> None:
    original = packs._with_padding
    packs._with_padding = lambda ranges, padded: np.concatenate((ranges[:1], original(ranges, padded)[:-1]))


def plant_and_attend(fault: str) -> dict[str, tuple[Tensor, ...]]:
    FAULTS[fault][0]()
    return attend_all(1, tuple(PACKS))


FAULTS = {
    plant.__name__: (plant, noticed)
    for plant, noticed in (
        (drop_a_rectangle, ("answers", "rectangles", "all kinds")),
        (let_branches_see_a_sibling, ("trees", "all kinds")),
        (widen_windows_by_one, ("windows", "blocks", "all kinds")),
        (give_rows_the_ranges_of_the_row_before, ("windows", "blocks", "ranges", "all kinds")),
    )
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed_where_they_matter_and_nowhere_else(fault: str) -> None:
    (found,) = run_ranks(1, plant_and_attend, fault)
    for pack, (_, out, *_) in found.items():
        if pack in FAULTS[fault][1]:
            with pytest.raises(AssertionError, match="error"):
                assert_close(out, dense(pack, 1)[1][0])
        else:
            assert_close(out, dense(pack, 1)[1][0])


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


@lru_cache
def train_apart(kind: str) -> tuple[float, dict[str, Tensor]]:
    model, total = new_model(), 0.0
    num_tokens = sum(one.loss_mask.sum() for one in apart(kind))
    for one in apart(kind):
        columns = (torch.from_numpy(x)[None] for x in (one.tokens, one.labels))
        losses = model(*columns, torch.arange(len(one.tokens))[None])
        loss = (losses * torch.from_numpy(one.loss_mask)).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def train_together(kind: str, exchange: str, collated: bool) -> tuple[float, dict[str, Tensor], Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p", exchange), timeout_s=60)
    wrapped = DistributedDataParallel(new_model(), process_group=lanes.mesh.get_group())
    if collated:
        collator = PlannedCollator(lanes.problem, lanes.lane)
        (step,) = lanes.agreed([collator(rows_of(kind))])
    else:
        made = [shared_question(*row.values()) for row in rows_of(kind)]
        samples = [Sample(sample_id=i, seqlen=len(one.tokens), mask=mask) for i, (one, mask) in enumerate(made)]
        step = lanes.step(samples, lambda index: made[index][0])
    result = train_step(lanes, wrapped, step, loss_sum, label="step")
    gradients = {name: parameter.grad for name, parameter in wrapped.module.named_parameters()}
    return result.loss, gradients, step.plan.facts.cp_histogram


def assert_trains_as_apart(kind: str, num_lanes: int, exchange: str, collated: bool = True) -> None:
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    loss, expected = train_apart(kind)
    for found, gradients, sizes in run_ranks(
        num_lanes, train_together, kind, exchange, collated, shims_without=shims, timeout_s=120
    ):
        assert max(sizes) == num_lanes
        assert abs(found - loss) <= TOLERANCE * loss
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("num_lanes", "exchange", "collated"), [(1, "a2a", False), (2, "a2a", True), (2, "blocks", True)]
)
def test_a_shared_question_trains_as_its_samples_apart(num_lanes: int, exchange: str, collated: bool) -> None:
    assert_trains_as_apart("questions", num_lanes, exchange, collated)


@pytest.mark.parametrize(("num_lanes", "exchange"), [(2, "a2a"), (2, "blocks"), (4, "a2a")])
def test_a_tree_of_turns_trains_as_its_branches_apart(num_lanes: int, exchange: str) -> None:
    assert_trains_as_apart("trees", num_lanes, exchange)


def count_prefixes_once() -> None:
    """The loss of a turn that branches share counts once, not once for each of them."""
    original = Tree.segments
    Tree.segments = lambda self: [one._replace(num_branches=1) for one in original(self)]


def let_positions_go_on() -> None:
    """A branch goes on from the end of its sibling, not of its parent."""
    Tree.positions = lambda self, seqlen: np.arange(seqlen)


def plant_and_train(fault: Callable[[], None]) -> tuple[float, dict[str, Tensor], Any]:
    fault()
    return train_together("trees", "a2a", True)


@pytest.mark.parametrize("fault", [count_prefixes_once, let_positions_go_on, let_branches_see_a_sibling])
def test_faults_of_trees_are_noticed(fault: Callable[[], None]) -> None:
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    _, expected = train_apart("trees")
    ((_, found, _),) = run_ranks(1, plant_and_train, fault, shims_without=shims, timeout_s=120)
    assert max((found[name] - one).abs().max() / one.abs().max() for name, one in expected.items()) > 100 * TOLERANCE


MASKED = tuple(
    Sample(sample_id=i, seqlen=n, mask=mask)
    for i, (n, mask) in enumerate(
        (
            *((600, Lambda(8, 40)), (180, CausalBlockwise(32, 2)), (90, any_ranges(90)), (25, None), (1, Lambda(0, 1))),
            *((64, FULL), (33, Lambda(0, 4))),
        )
    )
)


def train_masked_alone() -> tuple[float, dict[str, Tensor]]:
    """Train each sample by itself with torch's attention and its mask pair by pair."""
    model, total = new_model(), 0.0
    torch_attention = torch_device_mesh.F.scaled_dot_product_attention
    num_tokens = sum(Document(sample).loss_mask.sum() for sample in MASKED)
    for sample in MASKED:
        document, sees = Document(sample), sees_of(sample)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool, sees: Tensor = sees
        ) -> Tensor:
            return torch_attention(q, k, v, attn_mask=sees, enable_gqa=enable_gqa)

        with mock.patch.object(torch_device_mesh.F, "scaled_dot_product_attention", attention):
            columns = (torch.from_numpy(x)[None] for x in (document.tokens, document.labels))
            losses = model(*columns, torch.arange(sample.seqlen)[None])
        loss = (losses * torch.from_numpy(document.loss_mask)).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def train_masked_on_lanes(exchange: str) -> tuple[float, dict[str, Tensor], Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p", exchange), timeout_s=60)
    wrapped = DistributedDataParallel(new_model(), process_group=lanes.mesh.get_group())
    step = lanes.step(MASKED, lambda index: Document(MASKED[index]))
    result = train_step(lanes, wrapped, step, loss_sum, label="step")
    gradients = {name: parameter.grad for name, parameter in wrapped.module.named_parameters()}
    return result.loss, gradients, step.plan.facts.cp_histogram


@pytest.mark.parametrize(("num_lanes", "exchange"), [(1, "a2a"), (2, "a2a"), (3, "blocks")])
def test_samples_with_masks_train_as_with_dense_masks(num_lanes: int, exchange: str) -> None:
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    loss, expected = train_masked_alone()
    for found, gradients, sizes in run_ranks(
        num_lanes, train_masked_on_lanes, exchange, shims_without=shims, timeout_s=120
    ):
        assert max(sizes) == num_lanes
        assert abs(found - loss) <= TOLERANCE * loss
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= TOLERANCE, f"{name}: {error:.1e}"


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
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    ranks = run_ranks(2, refused, shims_without=shims, timeout_s=120)
    assert ranks[0] == ranks[1]
    assert ranks[0][1].startswith("a prompt of 1 tokens has 1 responses, the shortest of 1: at least 2 tokens")
