"""A transformer layer with experts, whose router knows the micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.router import DynamicCPRouter
from megatron.dynamic_cp.repairs import releases


class LayerWithExperts(TransformerLayer):
    """megatron-core's layer; hands the parameters of a micro-batch to its router.

    They go the way of a padding mask, which megatron-core hands on as it is, also when the experts are recomputed
    (--recompute-modules moe): by then another micro-batch may have passed through the layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same pass that megatron-core would repeat, but with the arguments that it was called with.
        self.recompute_mlp, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False
        self.mlp.register_forward_pre_hook(_hand_over, with_kwargs=True)
        if self.config.tensor_model_parallel_size > 1:
            # Whole experts on each tensor-parallel rank see the tokens of that rank: their gradients are summed over
            # these ranks, too. megatron-core does so with EP > 1 only.
            for parameter in self.mlp.experts.parameters():
                parameter.allreduce = False
                # megatron-core marks the bias of an expert's second matrix as one of a share of the sequence, so that
                # its gradient would be summed once more: TP times as large.
                parameter.sequence_parallel = False
                # No copy of what another rank has: until 0.19 the norm of gradients counts what is not marked so on
                # the first tensor-parallel rank only, and ranks clip by norms of their own.
                parameter.tensor_model_parallel = True

    def forward(
        self, *args: Any, packed_seq_params: DynamicPackedSeqParams | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """See TransformerLayer.forward."""
        kwargs["padding_mask"] = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[no-any-return]


def _hand_over(experts: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    experts.router.params = kwargs.pop("padding_mask", None)
    return args, kwargs


class NumberedExperts(SequentialMLP):
    """megatron-core's experts of a rank, one after the other; what one starts with depends on its number only.

    megatron-core's begin alike on all ranks of a block where they are made on the CPU, and what is made after them
    begins otherwise with another number of them on a rank.

    Biases of second matrices are added here, to the outputs of all experts together. megatron-core adds them expert by
    expert to what autograd holds, in place, which torch refuses where one rank has all experts.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        if config.add_bias_linear:
            submodules = dataclasses.replace(submodules, linear_fc2=_WithoutItsBias)
        seed = int(torch.randint(2**31, ()))
        with torch.random.fork_rng(devices=()):
            super().__init__(num_local_experts, config, submodules, *args, **kwargs)
            if self.config.perform_initialization and self.config.use_cpu_initialization:
                first = self.ep_group.rank() * self.num_local_experts
                for number, expert in enumerate(self.local_experts, start=first):
                    torch.manual_seed(seed + number)
                    self.config.init_method(expert.linear_fc1.weight)
                    self.config.output_layer_init_method(expert.linear_fc2.weight)

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return what experts make of their tokens, weighted, [tokens, hidden size].

        Args:
            tokens: [tokens, hidden size], those of the first expert first.
            tokens_per_expert: [experts here].
            probs: [tokens] weights.
        """
        output, _ = super().forward(tokens, tokens_per_expert, probs, *args, **kwargs)
        if self.config.add_bias_linear:
            biases = torch.stack([expert.linear_fc2.bias for expert in self.local_experts])
            of_tokens = biases.repeat_interleave(tokens_per_expert.to(biases.device), dim=0, output_size=len(output))
            output = (output + of_tokens * probs[:, None]).to(output.dtype)
        return output, None


class _WithoutItsBias(RowParallelLinear):
    """The second matrix of an expert; whoever has the expert adds its bias."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the product alone."""
        output, _ = super().forward(*args, **kwargs)
        return output, None


def use_our_parts(mlp: Any) -> None:
    """Have the experts of a layer spec, and their router, built as ours."""
    submodules = mlp.keywords["submodules"] if releases.EXPERTS_BY_FUNCTION.here else mlp.submodules
    submodules.router = DynamicCPRouter
    experts = submodules.experts
    if isinstance(experts, functools.partial) and experts.func is SequentialMLP:
        submodules.experts = functools.partial(NumberedExperts, *experts.args, **experts.keywords)
    elif getattr(experts, "module", None) is SequentialMLP:
        experts.module = NumberedExperts


@contextlib.contextmanager
def as_if_nothing_was_routed(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Forget afterwards what the routers of `chunks` counted inside, and what a step made of it."""
    held = [(router, router.expert_bias) for router in routers(chunks)]
    before = [None if bias is None else bias.clone() for _, bias in held]
    try:
        yield
    finally:
        for (router, bias), values in zip(held, before, strict=True):
            router.forget()
            if bias is not None:
                bias.copy_(values)


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[DynamicCPRouter]:
    """Yield the routers of model chunks."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, DynamicCPRouter))
