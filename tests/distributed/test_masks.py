"""Samples with masks of their own: attention equals a dense softmax, shared questions train as their samples apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import FULL, Bucket, Lambda, Mask, Plan, Sample, SharedQuestion, Topology
from dynamic_cp.types.plan import MicroBatch, PlannedBatch
from examples.torch_device_mesh import VOCAB_SIZE, Document, TinyTransformer, loss_sum, problem_for
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
from tests.distributed.naive_attention import HEADS, KV_HEADS, SCALE, assert_close, random_qkv

TOLERANCE = 5e-6
PACKS: dict[str, tuple[tuple[int, Mask | None], ...]] = {
    "answers": ((23, SharedQuestion(9, (6, 3, 5))), (11, SharedQuestion(1, (1,) * 10)), (2, SharedQuestion(1, (1,)))),
    "full": ((17, FULL), (1, FULL), (6, FULL)),
    "all kinds": ((13, None), (15, FULL), (1, None), (20, SharedQuestion(4, (9, 7))), (3, FULL), (8, None)),
}


def samples_of(pack: str) -> tuple[Sample, ...]:
    return tuple(Sample(sample_id=i, seqlen=n, mask=mask) for i, (n, mask) in enumerate(PACKS[pack]))


def attend(pack: str, cp_size: int, fault: str) -> tuple[Tensor, ...]:
    """Return for this rank's tokens: which they are in the pack, output and gradients; padding left out."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Topology(num_lanes=cp_size), timeout_s=30, exchanges=("a2a",))
    bucket = Bucket(
        first_lane=0, cp_size=cp_size, samples=samples_of(pack), cp_comm_type="a2a" if cp_size > 1 else "p2p"
    )
    plan = Plan(
        topology=Topology(num_lanes=cp_size), max_tokens_per_rank=99, micro_batches=(MicroBatch(buckets=(bucket,)),)
    )
    facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""))
    packed = pack_step(lane_plan(plan, groups.lane, facts), None)
    (batch,) = micro_batches(packed, groups, torch.device("cpu"), "test", ExchangeStats())
    params = batch["packed_seq_params"]
    if fault == "a rectangle is dropped":
        params.rectangles = tuple(tuple(one for one in of[:2]) + of[3:] for of in params.rectangles)
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


def dense(pack: str, cp_size: int) -> tuple[Tensor, ...]:
    """Return the same of all real tokens, by a softmax over each whole sample, in float64."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = [-(-sample.seqlen // multiple) * multiple for sample in samples_of(pack)]
    *inputs, grad = random_qkv(sum(padded), sum(padded))
    inputs = [x.requires_grad_() for x in inputs]
    outs, kept, start = [], [], 0
    for sample, tokens in zip(samples_of(pack), padded, strict=True):
        real = slice(start, start + sample.seqlen)
        q, k, v = (x[real] for x in inputs)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        ranges = (sample.mask or Lambda(0, sample.seqlen)).key_ranges(sample.seqlen)
        keys = torch.arange(sample.seqlen)
        begin, end, second, last = (torch.from_numpy(x.astype(np.int64))[:, None] for x in ranges.T)
        sees = ((keys >= begin) & (keys < end)) | ((keys >= second) & (keys < last))
        scores = torch.einsum("thd,shd->hts", q, k) * SCALE
        outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v))
        kept.append(torch.arange(real.start, real.stop))
        start += tokens
    chosen, out = torch.cat(kept), torch.cat(outs)
    grads = torch.autograd.grad(out, inputs, grad[chosen])
    return (chosen, out.detach(), *(x[chosen] for x in grads))


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("pack", PACKS)
def test_attention_equals_a_dense_softmax(pack: str, cp_size: int) -> None:
    ranks = run_ranks(cp_size, attend, pack, cp_size, "")
    expected = dense(pack, cp_size)
    order = torch.cat([rank[0] for rank in ranks]).argsort()
    assert torch.equal(torch.cat([rank[0] for rank in ranks])[order], expected[0])
    for part in range(1, 5):
        assert_close(torch.cat([rank[part] for rank in ranks])[order], expected[part])


def test_a_dropped_rectangle_is_noticed() -> None:
    (found,) = run_ranks(1, attend, "answers", 1, "a rectangle is dropped")
    with pytest.raises(AssertionError, match="error"):
        assert_close(found[1], dense("answers", 1)[1])


def questions() -> list[tuple[list[int], list[list[int]]]]:
    """Return prompts with their responses, one of them long."""
    random = np.random.default_rng(5)

    def words(number: int) -> list[int]:
        return random.integers(0, VOCAB_SIZE, number).tolist()

    return [
        (words(p), [words(a) for a in answers]) for p, answers in ((300, (80, 60, 90, 40)), (40, (9, 30)), (2, (1,)))
    ]


def apart() -> list[SampleTokens]:
    """Return prompt and response together, once for each response."""
    found = []
    for prompt, responses in questions():
        for response in responses:
            tokens = np.array([*prompt, *response], np.int64)
            loss = np.r_[np.zeros(len(prompt) - 1), np.ones(len(response)), 0.0].astype(np.float32)
            found.append(SampleTokens(tokens=tokens, labels=np.append(tokens[1:], 0), loss_mask=loss))
    return found


def new_model() -> TinyTransformer:
    torch.manual_seed(3)
    return TinyTransformer()


def train_apart() -> tuple[float, dict[str, Tensor]]:
    model, total = new_model(), 0.0
    num_tokens = sum(one.loss_mask.sum() for one in apart())
    for one in apart():
        columns = (torch.from_numpy(x)[None] for x in (one.tokens, one.labels))
        losses = model(*columns, torch.arange(len(one.tokens))[None])
        loss = (losses * torch.from_numpy(one.loss_mask)).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def train_together(collated: bool) -> tuple[float, dict[str, Tensor], Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p", "a2a"), timeout_s=60)
    wrapped = DistributedDataParallel(new_model(), process_group=lanes.mesh.get_group())
    if collated:
        collator = PlannedCollator(lanes.problem, lanes.lane)
        features = [{"prompt_ids": prompt, "response_ids": responses} for prompt, responses in questions()]
        (step,) = lanes.agreed([collator(features)])
    else:
        made = [shared_question(*one) for one in questions()]
        samples = [Sample(sample_id=i, seqlen=len(one.tokens), mask=mask) for i, (one, mask) in enumerate(made)]
        step = lanes.step(samples, lambda index: made[index][0])
    result = train_step(lanes, wrapped, step, loss_sum, label="step")
    gradients = {name: parameter.grad for name, parameter in wrapped.module.named_parameters()}
    return result.loss, gradients, step.plan.facts.cp_histogram


@pytest.mark.parametrize(("num_lanes", "collated"), [(1, False), (2, True)])
def test_a_shared_question_trains_as_its_samples_apart(num_lanes: int, collated: bool) -> None:
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    loss, expected = train_apart()
    for found, gradients, sizes in run_ranks(num_lanes, train_together, collated, shims_without=shims, timeout_s=120):
        assert max(sizes) == num_lanes
        assert abs(found - loss) <= TOLERANCE * loss
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= TOLERANCE, f"{name}: {error:.1e}"


def refused() -> list[str]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    lanes = Lanes.build(mesh, problem_for(mesh.size(), "p2p", "a2a"), timeout_s=60)
    sample = Sample(sample_id=3, seqlen=40, mask=Lambda(1, 8))
    with pytest.raises(UnsupportedFeatureError) as no_kernel:
        lanes.step([sample], lambda _: Document(sample))
    with pytest.raises(InvalidInputError) as short:
        PlannedCollator(lanes.problem, lanes.lane)([{"prompt_ids": [1], "response_ids": [[2]]}])
    return [str(no_kernel.value), str(short.value)]


def test_masks_without_a_kernel_and_prompts_that_are_too_short_are_refused_on_all_ranks() -> None:
    shims = tuple(shim.name for shim in cpu_backend.SHIMS)
    ranks = run_ranks(2, refused, shims_without=shims, timeout_s=120)
    assert ranks[0] == ranks[1]
    assert ranks[0][0].startswith("sample 3 has the mask lambda:1,8, which can be planned, but no kernel here computes")
    assert ranks[0][1].startswith("a prompt of 1 tokens has 1 responses, the shortest of 1: at least 2 tokens")
