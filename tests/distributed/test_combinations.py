"""Features of models together train as in a stock megatron-core model in one process, and mistakes show.

As DeepSeek-V3: latent attention, a dense layer before those with experts, and a module of multi-token prediction with
experts behind them. As gpt-oss: experts with biases and clamped gates, learned sinks, YaRN, and windows in every second
layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynamic_cp.types import CAUSAL
from megatron.dynamic_cp.attention import torch_thd
from megatron.dynamic_cp.model.experts import DynamicCPRouter, LayerWithExperts, NumberedExperts
from tests.distributed.faults import Plant, around, marks_parameters
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import TOLERANCE, case_of, run_faulty


def is_of_module(router: DynamicCPRouter) -> bool:
    return router.number_in_model > router.config.num_layers


@around(DynamicCPRouter, "_sum_over_sample")
def sum_losses_of_modules_over_the_static_group(summed: Any, self: Any, counts: torch.Tensor) -> None:
    if is_of_module(self):
        dist.all_reduce(counts, group=self.tp_cp_group)
    else:
        summed(self, counts)


@around(DynamicCPRouter, "_aux_loss")
def lose_the_losses_of_modules(aux_loss: Any, self: Any, *args: Any) -> Any:
    return (0 if is_of_module(self) else 1) * aux_loss(self, *args)


@around(DynamicCPRouter, "routing")
def leave_biases_of_modules(routing: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = routing(self, *args, **kwargs)
    if is_of_module(self):
        self.local_tokens_per_expert.zero_()
    return found


# As megatron-core does.
sum_biases_over_tensor_parallel_ranks = marks_parameters(
    LayerWithExperts,
    "sequence_parallel",
    True,
    lambda layer: [expert.linear_fc2.bias for expert in layer.mlp.experts.local_experts],
)


@around(NumberedExperts, "forward")
def add_biases_in_full(forward: Any, self: Any, tokens: Any, tokens_per_expert: Any, probs: Any) -> Any:
    """Whatever an expert counts for a token, its bias counts once."""
    output, _ = forward(self, tokens, tokens_per_expert, probs)
    biases = torch.stack([expert.linear_fc2.bias for expert in self.local_experts])
    return output + biases.repeat_interleave(tokens_per_expert, dim=0) * (1 - probs[:, None]), None


@around(torch_thd, "attention_thd")
def forget_offsets_of_windows(
    attend: Any, q: Any, k: Any, v: Any, params: Any, *args: Any, softmax_offset_H: Any
) -> Any:
    offset = softmax_offset_H if params.mask == CAUSAL else None
    return attend(q, k, v, params, *args, softmax_offset_H=offset)


DEEPSEEK, GPT_OSS = "two ep2 deepseek", "one tp2 sp gpt_oss every_second"
# Layout, what is planted, and a part of the name of what it makes wrong first of all.
FAULTS: dict[str, tuple[str, Plant, str]] = {
    "losses of modules over the static group": (DEEPSEEK, sum_losses_of_modules_over_the_static_group, "mtp."),
    "no losses of modules": (DEEPSEEK, lose_the_losses_of_modules, "mtp."),
    "biases of modules that never move": (DEEPSEEK, leave_biases_of_modules, "mtp."),
    "biases of experts once for each rank": (GPT_OSS, sum_biases_over_tensor_parallel_ranks, "linear_fc2.bias"),
    "biases of experts that are not weighted": (GPT_OSS, add_biases_in_full, "linear_fc2.bias"),
    "no learned sink in layers with a window": (GPT_OSS, forget_offsets_of_windows, "layers.0.self_attention.core"),
}


@pytest.mark.nightly
def test_mistakes_in_combinations_show(reference_of: Any) -> None:
    cases = {line: case_of(reference_of, layout_of(line)) for line in (DEEPSEEK, GPT_OSS)}
    faulty = {name: (cases[line], plant) for name, (line, plant, _) in FAULTS.items()}
    ranks = run_ranks(2, run_faulty, faulty, timeout_s=120)
    for name, (_, _, part) in FAULTS.items():
        of_ranks = [rank[name].gradient_errors for rank in ranks]
        errors = {parameter: max(errors.get(parameter, 0.0) for errors in of_ranks) for parameter in of_ranks[0]}
        worst = max(errors, key=errors.__getitem__)
        assert part in worst, (name, worst, errors[worst])
        assert errors[worst] > 20 * TOLERANCE, name
