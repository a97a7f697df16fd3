"""Routers count each sample by itself, and experts start alike wherever they are; `test_parity` trains them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

from dynamic_cp.errors import IllegalPlanError
from dynamic_cp.types import Adapters
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper
from megatron.dynamic_cp.data.micro_batches import ChunkNeeds
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.model import experts
from megatron.dynamic_cp.model.adapters import train_adapters_only
from megatron.dynamic_cp.model.experts import DynamicCPRouter
from megatron.dynamic_cp.packed_seq_params import shard_positions
from megatron.dynamic_cp.repairs import patches
from tests.distributed import reference
from tests.distributed.harness import initialize_model_parallel, params_of, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Layout,
    build_chunks,
    fixed_plan,
    in_jobs_of_their_own,
    placed_plan,
    reference_name,
    sections_of,
    tensor_parallel_part,
)


def refused_plan(samples: Any, plan: Any) -> str:
    initialize_model_parallel()
    groups = DynamicCPGroups.build(plan.topology, timeout_s=60, exchanges=["blocks"])
    wrapper = DataIteratorWrapper(
        plan_source=fixed_plan(plan, groups), read_sample=lambda sample_id: reference.read_sample(samples[sample_id]),
        groups=groups, chunks=[ChunkNeeds(tokens=True, labels=True)], may_place=False,
    )  # fmt: skip
    with pytest.raises(IllegalPlanError) as caught:
        wrapper.wrap(0, samples)
    return str(caught.value)


def test_a_plan_whose_lanes_cannot_count_samples_is_refused_before_it_runs() -> None:
    samples = BATCHES["long_tail"]
    told = run_ranks(2, refused_plan, samples, placed_plan(samples, Layout(2)))
    assert told[0] == told[1]
    assert "has blocks on 2 lanes in micro-batch 0: no lane of it counts the tokens of a sample" in told[0]


def count_synthetic_tokens() -> tuple[bool, bool, bool]:
    """Return whether biases, counts and sums are as before a step that was no training."""
    initialize_model_parallel()
    _, (chunk,) = build_chunks(Layout(1, variant="moe_sigmoid"), reference.MOE_SIGMOID)
    (moved, *_) = experts.routers([chunk])
    with torch.no_grad():
        moved.expert_bias.fill_(0.5)
    with experts.as_if_nothing_was_routed([chunk]):
        moved.local_tokens_per_expert += 3
        moved.sums = torch.ones(11)
        with torch.no_grad():
            moved.expert_bias += 1
    return bool((moved.expert_bias == 0.5).all()), bool((moved.local_tokens_per_expert == 0).all()), moved.sums is None


def test_what_is_no_training_leaves_no_trace_in_routers() -> None:
    assert run_ranks(1, count_synthetic_tokens) == [(True, True, True)]


# All kinds of layers; with adapters, whose first matrices are drawn last.
STARTS = {
    "day": ("one ep2 moe_top_1", "one tp2 gpt_oss", "one tp2 latent", "one tp2 mamba_more"),
    "night": tuple(
        f"one tp2 {variant}"
        for variant in (
            *("llama_tied", "gpt2", "gated", "learned_offset", "moe_sigmoid", "deepseek", "latent_plain", "mtp_gpt2"),
            *("delta_moe", "delta_last", "halves_latent"),
        )
    ),
}
STARTING_PARTS = {
    "day": ("linear_qkv", "linear_kv_up_proj", "mlp.linear_fc1", "in_proj", "conv1d", "softmax_offset"),
    "night": ("word_embeddings", "linear_q_up_proj", "eh_proj"),
}
ADAPTERS = Adapters(rank=4, alpha=8, modules=("in_proj", "out_proj", "linear_qkv", "linear_proj"))


def what_starts_otherwise(layouts: dict[str, Layout]) -> dict[str, tuple[set[str], set[str], list[str]]]:
    """Return, for each layout, which parameters this rank lacks, has in part, and has otherwise than one with all."""
    whole: dict[str, dict[str, torch.Tensor]] = {}
    found = {}
    alone = {f"{name} alone": replace(layout, tp=1, ep=1) for name, layout in layouts.items()}
    for name, layout in in_jobs_of_their_own(alone | layouts):
        initialize_model_parallel(layout.tp, ep=layout.ep)
        config, (chunk,) = build_chunks(layout, reference.VARIANTS[layout.variant])
        train_adapters_only(chunk, ADAPTERS)
        weights = {reference_name(chunk, path): one.detach() for path, one in chunk.named_parameters()}
        if name in alone:
            whole[layout.variant] = weights
            continue
        of_all = whole[layout.variant]
        shared = {path for path, one in weights.items() if one.shape != of_all[path].shape}
        wrong = [
            path
            for path, one in chunk.named_parameters()
            for full in (of_all[reference_name(chunk, path)],)
            if not one.equal(tensor_parallel_part(one, full, sections_of(path, full, config)))
        ]
        found[name] = {*of_all} - {*weights}, shared, wrong
    return found


@pytest.mark.by_day("day")
@pytest.mark.parametrize("when", STARTS)
def test_what_weights_start_with_does_not_depend_on_who_has_them(when: str) -> None:
    """Where they are drawn on the CPU."""
    layouts = {line: layout_of(line) for line in STARTS[when]}
    ranks = run_ranks(2, what_starts_otherwise, layouts)
    for name, layout in layouts.items():
        missing, shared, wrong = zip(*(rank[name] for rank in ranks), strict=True)
        assert wrong == ([], []), name
        assert not set.intersection(*missing)
        assert bool(missing[0]) == (layout.ep == 2)
        assert bool(shared[0]) == (layout.tp == 2)
    parts = {path for _, shared, _ in ranks[0].values() for path in shared}
    for module in STARTING_PARTS[when]:
        assert any(module in path for path in parts), module


def starting_experts() -> list[torch.Tensor]:
    initialize_model_parallel()
    _, (chunk,) = build_chunks(Layout(1, variant="moe_top_1"), reference.MOE_TOP_1)
    return [one.detach() for path, one in chunk.named_parameters() if "layers.0.mlp.experts" in path and "fc1" in path]


def test_no_two_experts_start_alike() -> None:
    (first,) = run_ranks(1, starting_experts)
    assert len({float(weight.sum()) for weight in first}) == len(first) == 8
    assert max(float(weight.std()) for weight in first) < 0.03, "drawn with the standard deviation of all weights"


SEQLENS, PADDED = (5, 3, 1, 11), (8, 4, 4, 12)


def router_of_a_pack(variant: reference.ModelVariant) -> tuple[DynamicCPRouter, torch.Tensor]:
    """Return a router that knows this lane's part of a pack, and the hidden states of that, padding included."""
    initialize_model_parallel()
    groups = DynamicCPGroups.build(Layout(dist.get_world_size()).topology, timeout_s=60, exchanges=("p2p",))
    config = reference.transformer_config(variant, init_method=lambda weight: weight.copy_(router_weight()))
    patches.repair_expert_routing()
    with torch.no_grad():
        one = DynamicCPRouter(config=config, pg_collection=moe_utils.get_default_pg_collection())
    cp_size = dist.get_world_size()
    shards = [shard_positions(padded, cp_size, groups.lane) for padded in PADDED]
    tokens = torch.from_numpy(np.concatenate(shards))
    one.params = params_of(PADDED, tokens, groups.group(0, cp_size), seqlens=SEQLENS)
    held = [
        torch.nn.functional.pad(hidden_states(n), (0, 0, 0, 12))[shard]
        for n, shard in zip(SEQLENS, shards, strict=True)
    ]
    return one, torch.cat(held)[:, None]


def router_gradient_of_a_pack() -> torch.Tensor:
    """Return the gradient of a router's weights by its losses alone, of a pack on two lanes."""
    one, states = router_of_a_pack(reference.MOE)
    probs, routing_map = one(states)
    num_real = torch.tensor(int(routing_map.any(dim=1).sum()))
    dist.all_reduce(num_real)
    assert int(num_real) == sum(SEQLENS)
    (0 * probs.sum()).backward()
    dist.all_reduce(one.weight.grad)
    return one.weight.grad


def router_weight() -> torch.Tensor:
    return torch.randn(8, reference.HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)) * 0.1


def hidden_states(seqlen: int) -> torch.Tensor:
    return torch.randn(seqlen, reference.HIDDEN_SIZE, generator=torch.Generator().manual_seed(seqlen))


def test_router_losses_are_the_published_ones_of_every_sample() -> None:
    """In float64, sample by sample, as the papers write them; see `model/router.py`."""
    weight = router_weight().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for seqlen in SEQLENS:
        logits = hidden_states(seqlen).double() @ weight.T
        fractions = torch.zeros(8, dtype=torch.float64)  # of the k n choices, for each expert
        for token in logits.detach():
            for expert in token.sort(descending=True).indices[:2]:
                fractions[expert] += 1 / (2 * seqlen)
        balance = 8 * (fractions * logits.softmax(dim=1).mean(dim=0)).sum()
        z = logits.exp().sum(dim=1).log().square().mean()
        total = total + seqlen * (0.3 * balance + 0.05 * z)
    total.backward()
    for gradient in run_ranks(2, router_gradient_of_a_pack):
        error = (gradient.double() - weight.grad).abs().max() / weight.grad.abs().max()
        assert error <= TOLERANCE


def routed_and_counted() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens of each expert in two micro-batches, and those that move its bias and that are logged."""
    one, states = router_of_a_pack(reference.MOE_SIGMOID)
    routed = [one(scale * states)[1].sum(dim=0) for scale in (1, -1)]
    with torch.no_grad():
        one(states)  # the first pass of a recomputation
        one.eval()
        one(states)
    return sum(routed), one.local_tokens_per_expert, one.take_sums()[:8]  # type: ignore[return-value,index]


def test_each_micro_batch_is_counted_once_and_an_evaluation_never() -> None:
    ((routed, moving, logged),) = run_ranks(1, routed_and_counted)
    assert int(routed.sum()) == 2 * reference.MOE_SIGMOID.config["moe_router_topk"] * sum(SEQLENS)
    assert moving.tolist() == logged.tolist() == routed.tolist()
