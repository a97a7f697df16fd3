"""Layers with experts train as those of a stock megatron-core model in one process, and mistakes show.

Router losses and moved biases included: the stock model sees one unpacked sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.dynamic_cp.model import experts, router
from tests.distributed.harness import run_ranks
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Comparison,
    Layout,
    assert_all_equal_to_reference,
    in_jobs_of_their_own,
    mixed_plan,
    run_step,
)
from tests.distributed.test_features import recomputing
from tests.distributed.test_parity import FULL_RECOMPUTE

# What runs with every change; the others guard more layouts of the same code.
EVERY_DAY = {
    "dp2_recomputed": Layout(2, ep=2, variant="moe_top_1", config=recomputing("moe", "mlp")),
    "dp4_ep2": Layout(4, ep=2, variant="moe", exchange="mixed"),
    "dp4_ep4_overlap": Layout(
        4, ep=4, variant="moe_top_1", distributed_optimizer=True, overlap_grad_reduce=True, config=FULL_RECOMPUTE
    ),
    "tp2_sp": Layout(2, tp=2, sp=True, variant="moe"),
    "tp2_sp_ep2": Layout(2, tp=2, ep=2, sp=True, variant="moe_sigmoid"),
    "pp2_vpp2_ep2": Layout(
        2,
        pp=2,
        vpp=2,
        ep=2,
        variant="moe_sigmoid",
        distributed_optimizer=True,
        config=recomputing("moe", "layernorm", "core_attn"),
    ),
}
EACH_NIGHT = {
    "one_rank": Layout(1, variant="moe"),
    "dp2_sigmoid_full": Layout(2, ep=2, variant="moe_sigmoid", config=FULL_RECOMPUTE),
    "dp4": Layout(4, variant="moe"),
    "dp4_ep2_distributed_optimizer": Layout(4, ep=2, variant="moe_sigmoid", distributed_optimizer=True),
    "dp4_ep4": Layout(4, ep=4, variant="moe_sigmoid", exchange="mixed"),
    "dp4_ep2_one_for_each": Layout(4, ep=2, variant="moe_top_1", exchange="all_gather"),
    "six_lanes_ep2": Layout(6, ep=2, variant="moe"),
    "six_lanes_ep2_distributed_optimizer": Layout(6, ep=2, variant="moe_sigmoid", distributed_optimizer=True),
    "dp8_ep8": Layout(8, ep=8, variant="moe"),
    "tp2_sp_distributed_optimizer": Layout(2, tp=2, sp=True, variant="moe_top_1", distributed_optimizer=True),
    "tp2_sp_ep4": Layout(4, tp=2, ep=4, sp=True, variant="moe_top_1"),
    "pp2": Layout(2, pp=2, variant="moe"),
    "pp2_ep2": Layout(2, pp=2, ep=2, variant="moe_sigmoid"),
    "pp2_ep2_recomputed": Layout(2, pp=2, ep=2, variant="moe", config=recomputing("moe")),
    "pp2_vpp2_ep2_full": Layout(2, pp=2, vpp=2, ep=2, variant="moe_top_1", config=FULL_RECOMPUTE),
    "tp2_sp_pp2_ep2": Layout(2, tp=2, pp=2, ep=2, sp=True, variant="moe", distributed_optimizer=True),
}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(EVERY_DAY, id="every day"),
        pytest.param(EACH_NIGHT, id="each night", marks=pytest.mark.nightly),
    ],
)
def test_experts_equal_single_process(layouts: dict[str, Layout], reference_of: Any) -> None:
    samples = BATCHES["long_tail"]
    cases = {}
    for name, layout in layouts.items():
        plan = mixed_plan(samples, layout)
        assert max(plan.cp_histogram) == min(layout.lanes, 8 if layout.lanes == 8 else 4)
        assert min(layout.lanes, 2) == 1 or any(not bucket.samples for bucket in plan.buckets), "no empty place"
        cases[name] = Case(layout, samples, plan, reference_of(layout, "long_tail"))
    assert_all_equal_to_reference(cases)


def count_padding(monkeypatch: Any) -> None:
    """Padding belongs to the last sample of its bucket."""
    found = router.token_owners
    monkeypatch.setattr(router, "token_owners", lambda params: found(params).clamp(max=len(params.padded_seqlens) - 1))


def take_a_pack_for_a_sequence(monkeypatch: Any) -> None:
    found = router.token_owners

    def first(params: Any) -> torch.Tensor:
        owners = found(params)
        return torch.where(owners < len(params.padded_seqlens), 0, owners)

    monkeypatch.setattr(router, "token_owners", first)


def sum_over(group_of: Callable[[Any], Any]) -> Callable[[Any], None]:
    def plant(monkeypatch: Any) -> None:
        monkeypatch.setattr(
            router.DynamicCPRouter,
            "_sum_over_sample",
            lambda self, counts: dist.all_reduce(counts, group=group_of(self)),
        )

    return plant


def lose_the_tensor_parallel_sum_of_experts(monkeypatch: Any) -> None:
    built = experts.LayerWithExperts.__init__

    def without(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        for parameter in self.mlp.experts.parameters():
            parameter.allreduce = True

    monkeypatch.setattr(experts.LayerWithExperts, "__init__", without)


def count_twice_when_recomputing(monkeypatch: Any) -> None:
    """Both passes of a recomputation count what is routed."""
    routed = router.DynamicCPRouter.routing

    def counting(self: Any, logits: torch.Tensor, **kwargs: Any) -> Any:
        found = routed(self, logits, **kwargs)
        if self.training and not torch.is_grad_enabled():
            self.local_tokens_per_expert += found[1].sum(dim=0) * torch.arange(8)
        return found

    monkeypatch.setattr(router.DynamicCPRouter, "routing", counting)


PLAIN = Layout(2, ep=2, variant="moe")
TENSOR_PARALLEL = Layout(1, tp=2, sp=True, variant="moe")
FAULTS = {
    "padding is routed": (PLAIN, count_padding),
    "a pack is a sequence": (PLAIN, take_a_pack_for_a_sequence),
    "over the static group": (PLAIN, sum_over(lambda self: self.tp_cp_group)),
    "a tensor-parallel sum of counts is lost": (TENSOR_PARALLEL, sum_over(lambda self: self.params.cp_group)),
    "a tensor-parallel sum of gradients is lost": (TENSOR_PARALLEL, lose_the_tensor_parallel_sum_of_experts),
    "a recomputation counts twice": (
        Layout(2, ep=2, variant="moe_sigmoid", config=FULL_RECOMPUTE),
        count_twice_when_recomputing,
    ),
}


def run_faulty(cases: dict[str, Case]) -> dict[str, Comparison]:
    found = {}
    for name, (_, plant) in in_jobs_of_their_own(FAULTS):
        with pytest.MonkeyPatch.context() as patched:
            plant(patched)
            found[name] = run_step(*cases[name], None)
    return found


def test_mistakes_with_experts_show(reference_of: Any) -> None:
    samples = BATCHES["long_tail"]
    cases = {
        name: Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail"))
        for name, (layout, _) in FAULTS.items()
    }
    ranks = run_ranks(2, run_faulty, cases, timeout_s=120)
    errors = {name: max(rank[name].gradient_error for rank in ranks) for name in FAULTS}
    assert min(errors.values()) > 20 * TOLERANCE, errors
