"""Features of models together train as in a stock megatron-core model in one process, and mistakes show.

As DeepSeek-V3: latent attention, a dense layer before those with experts, and a module of multi-token prediction with
experts behind them. As gpt-oss: experts with biases and clamped gates, learned sinks, YaRN, and windows in every second
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.types import CAUSAL
from megatron.dynamic_cp.attention import torch_thd
from megatron.dynamic_cp.model import experts
from megatron.dynamic_cp.model.router import DynamicCPRouter
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import EVERY_SECOND
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Layout,
    mixed_plan,
    run_faulty,
)


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


def sum_biases_over_tensor_parallel_ranks(monkeypatch: Any) -> None:
    """As megatron-core does."""
    built = experts.LayerWithExperts.__init__

    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        for expert in self.mlp.experts.local_experts:
            expert.linear_fc2.bias.sequence_parallel = True

    monkeypatch.setattr(experts.LayerWithExperts, "__init__", marked)


def add_biases_in_full(monkeypatch: Any) -> None:
    """Whatever an expert counts for a token, its bias counts once."""
    found = experts.NumberedExperts.forward

    def unweighted(self: Any, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        output, _ = found(self, tokens, tokens_per_expert, probs)
        biases = torch.stack([expert.linear_fc2.bias for expert in self.local_experts])
        return output + biases.repeat_interleave(tokens_per_expert, dim=0) * (1 - probs[:, None]), None

    monkeypatch.setattr(experts.NumberedExperts, "forward", unweighted)


def forget_offsets_of_windows(monkeypatch: Any) -> None:
    attend = torch_thd.attention_thd

    def without(q: Any, k: Any, v: Any, params: Any, *args: Any, softmax_offset_H: Any) -> Any:
        offset = softmax_offset_H if params.mask == CAUSAL else None
        return attend(q, k, v, params, *args, softmax_offset_H=offset)

    monkeypatch.setattr(torch_thd, "attention_thd", without)


DEEPSEEK, GPT_OSS = (
    Layout(2, ep=2, variant="deepseek"),
    Layout(1, tp=2, sp=True, variant="gpt_oss", config=EVERY_SECOND),
)
# Layout, what is planted, and a part of the name of what it makes wrong first of all.
FAULTS: dict[str, tuple[Layout, Callable[[Any], None], str]] = {
    "losses of modules over the static group": (DEEPSEEK, sum_losses_of_modules_over_the_static_group, "mtp."),
    "no losses of modules": (DEEPSEEK, lose_the_losses_of_modules, "mtp."),
    "biases of modules that never move": (DEEPSEEK, leave_biases_of_modules, "mtp."),
    "biases of experts once for each rank": (GPT_OSS, sum_biases_over_tensor_parallel_ranks, "linear_fc2.bias"),
    "biases of experts that are not weighted": (GPT_OSS, add_biases_in_full, "linear_fc2.bias"),
    "no learned sink in layers with a window": (GPT_OSS, forget_offsets_of_windows, "layers.0.self_attention.core"),
}


@pytest.mark.nightly
def test_mistakes_in_combinations_show(reference_of: Any) -> None:
    samples = BATCHES["long_tail"]
    cases = {
        name: (Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail")), plant)
        for name, (layout, plant, _) in FAULTS.items()
    }
    ranks = run_ranks(2, run_faulty, cases, timeout_s=120)
    for name, (_, _, part) in FAULTS.items():
        of_ranks = [rank[name].gradient_errors for rank in ranks]
        errors = {parameter: max(errors.get(parameter, 0.0) for errors in of_ranks) for parameter in of_ranks[0]}
        worst = max(errors, key=errors.__getitem__)
        assert part in worst, (name, worst, errors[worst])
        assert errors[worst] > 20 * TOLERANCE, name
