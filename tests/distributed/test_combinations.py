"""Features of models together train as in a stock megatron-core model in one process, and mistakes show.

As DeepSeek-V3: latent attention, a dense layer before those with experts, and a module of multi-token prediction with
experts behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.dynamic_cp.model.router import DynamicCPRouter
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
from tests.distributed.test_parity import FULL_RECOMPUTE, plan_of_exchanges

EVERY_DAY = {
    "dp4_mixed_ep2": Layout(4, ep=2, variant="deepseek", exchange="mixed"),
    "tp2_sp_ep2": Layout(2, tp=2, sp=True, ep=2, variant="deepseek"),
    "pp2_ep2": Layout(2, pp=2, ep=2, variant="deepseek", distributed_optimizer=True, config=FULL_RECOMPUTE),
}
EACH_NIGHT = {
    "one_rank": Layout(1, variant="deepseek"),
    "dp4": Layout(4, variant="deepseek", exchange="mixed", config=FULL_RECOMPUTE),
    "dp4_ep4": Layout(4, ep=4, variant="deepseek", exchange="all_gather", distributed_optimizer=True),
    "dp4_ep2_recomputed": Layout(
        4, ep=2, variant="deepseek", exchange="a2a", config=recomputing("moe", "core_attn", "layernorm", "mlp")
    ),
    "six_lanes_ep2": Layout(6, ep=2, variant="deepseek", overlap_grad_reduce=True),
    "tp2_sp": Layout(2, tp=2, sp=True, variant="deepseek", distributed_optimizer=True),
    "tp2_sp_ep4_full_recompute": Layout(2, tp=2, sp=True, ep=4, variant="deepseek", config=FULL_RECOMPUTE),
    "pp2": Layout(2, pp=2, variant="deepseek"),
    "pp2_vpp2_ep2": Layout(2, pp=2, vpp=2, ep=2, variant="deepseek", distributed_optimizer=True),
    "tp2_sp_pp2_ep2": Layout(2, tp=2, sp=True, pp=2, ep=2, variant="deepseek", config=FULL_RECOMPUTE),
    "two_modules_without_latents": Layout(2, ep=2, variant="moe_mtp", exchange="all_gather"),
    "a_dense_module": Layout(2, ep=2, variant="moe_sigmoid_mtp"),
}


@pytest.mark.parametrize(
    "layouts", [pytest.param(EVERY_DAY, id="day"), pytest.param(EACH_NIGHT, id="night", marks=pytest.mark.nightly)]
)
def test_features_together_equal_single_process(layouts: dict[str, Layout], reference_of: Any) -> None:
    """Router losses and moved biases of the module's experts included; bytes of exchanges are those of the plan."""
    samples = BATCHES["long_tail"]
    cases = {}
    for name, layout in layouts.items():
        plan = (plan_of_exchanges if layout.exchange == "mixed" else mixed_plan)(samples, layout)
        assert max(plan.cp_histogram) == min(layout.lanes, 4)
        expected = reference_of(layout, "long_tail")
        if layout.variant == "deepseek":
            assert "mtp.layers.0.transformer_layer.mlp.router.expert_bias" in expected["expert_biases"]
            assert "decoder.layers.0.mlp.linear_fc1.weight" in expected["gradients"], "the first layer is dense"
        cases[name] = Case(layout, samples, plan, expected)
    assert_all_equal_to_reference(cases, bytes_too=layouts is EVERY_DAY)


def is_of_module(router: DynamicCPRouter) -> bool:
    return router.number_in_model > router.config.num_layers


def sum_losses_of_modules_over_the_static_group(monkeypatch: Any) -> None:
    summed = DynamicCPRouter._sum_over_sample

    def over_static(self: Any, counts: torch.Tensor) -> None:
        if is_of_module(self):
            dist.all_reduce(counts, group=self.tp_cp_group)
        else:
            summed(self, counts)

    monkeypatch.setattr(DynamicCPRouter, "_sum_over_sample", over_static)


def lose_the_losses_of_modules(monkeypatch: Any) -> None:
    found = DynamicCPRouter._aux_loss
    monkeypatch.setattr(
        DynamicCPRouter, "_aux_loss", lambda self, *args: (0 if is_of_module(self) else 1) * found(self, *args)
    )


def leave_biases_of_modules(monkeypatch: Any) -> None:
    routed = DynamicCPRouter.routing

    def uncounted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = routed(self, *args, **kwargs)
        if is_of_module(self):
            self.local_tokens_per_expert.zero_()
        return found

    monkeypatch.setattr(DynamicCPRouter, "routing", uncounted)


FAULTS: dict[str, Callable[[Any], None]] = {
    "losses of modules over the static group": sum_losses_of_modules_over_the_static_group,
    "no losses of modules": lose_the_losses_of_modules,
    "biases of modules that never move": leave_biases_of_modules,
}


def run_faulty(cases: dict[str, Case]) -> dict[str, Comparison]:
    found = {}
    for name, plant in in_jobs_of_their_own(FAULTS):
        with pytest.MonkeyPatch.context() as patched:
            plant(patched)
            found[name] = run_step(*cases[name], None)
    return found


def test_mistakes_in_combinations_show(reference_of: Any) -> None:
    samples, layout = BATCHES["long_tail"], Layout(2, ep=2, variant="deepseek")
    case = Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail"))
    ranks = run_ranks(2, run_faulty, dict.fromkeys(FAULTS, case), timeout_s=120)
    for name in FAULTS:
        errors = {
            parameter: max(rank[name].gradient_errors.get(parameter, 0.0) for rank in ranks)
            for parameter in ranks[0][name].gradient_errors
        }
        assert max(errors, key=errors.__getitem__).startswith("mtp."), (name, errors)
        assert max(errors.values()) > 20 * TOLERANCE, name
