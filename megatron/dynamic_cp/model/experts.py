"""A transformer layer with experts, whose router's losses and counts are those of sequences, however these are packed.

megatron-core's router takes a pack for one sequence, its static group for the bucket's and padding for tokens; with
packed samples its gradients are wrong by 29% to 125%. Here every sequence has the losses that it would have alone in a
single process, and the gradients of a step are those of

    [ sum of token losses + sum over layers, sequences of  n (aux_coeff * aux + z_coeff * z) ] / number of token losses
    aux = E / (k n^2) * sum over experts of (tokens routed to the expert) * (sum over tokens of its normalized score)
    z   = 1 / n * sum over tokens of logsumexp(logits)^2

with n tokens of a sequence, E experts and k of them for each token. Tokens without a loss, such as a chat's questions,
count in n. A prompt counts in the sequence of each of its responses; only experts compute it once. Padding and empty
places are in no loss and no count, and no expert computes them: alike, they would all go to the same few experts.

Source: Fedus et al. 2021 (Switch Transformer, arXiv 2101.03961), equations 4 to 6; Zoph et al. 2022 (ST-MoE, arXiv
2202.08906), equation 5.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.dynamic_cp.flags.experts import aux_loss_coeff
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, TokenOwners, token_owners
from megatron.dynamic_cp.repairs import releases


class DynamicCPRouter(TopKRouter):
    """megatron-core's router but for its losses and what it counts.

    Attributes:
        params: of the micro-batch that runs; its layer sets them (`LayerWithExperts`).
        aux_loss_coeff: of all load-balancing losses that are asked for together; for a sequence they are the same.
        sums: of real tokens that trained since `take_sums`, float32 [num_experts + 3]: tokens routed to each expert,
            sums of n * aux and of n * z, both without their coefficients, and of n; this rank's part.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params: DynamicPackedSeqParams | None = None
        self.aux_loss_coeff = aux_loss_coeff(self.config)
        self.sums: Tensor | None = None

    def routing(self, logits: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities and the map of tokens to experts [tokens, experts], both zero for padding."""
        owners = self._owners(logits)
        is_real = (owners.copies > 0)[:, None]
        probs, routing_map = super().routing(logits)
        probs, routing_map = probs.masked_fill(~is_real, 0), routing_map & is_real
        if not (self.training and torch.is_grad_enabled()):  # evaluation, or the first pass of a recomputation
            return probs, routing_map
        by_expert = logits.view(-1, self.config.num_moe_experts)
        aux = torch.zeros((), device=logits.device)
        z = torch.zeros((), device=logits.device)
        if self.aux_loss_coeff:
            aux = self._aux_loss(by_expert, owners)
            probs = MoEAuxLossAutoScaler.apply(probs, self.aux_loss_coeff * aux)
        if self.config.moe_z_loss_coeff:
            z = (torch.logsumexp(by_expert.float(), dim=-1).square() * owners.copies).sum()
            probs = MoEAuxLossAutoScaler.apply(probs, self.config.moe_z_loss_coeff * z)
        with torch.no_grad():
            if self.enable_expert_bias:
                self.local_tokens_per_expert += (routing_map * owners.copies[:, None]).sum(dim=0)
            losses = aux.detach().float(), z.detach(), owners.copies.sum().float()
            sums = torch.cat((routing_map.sum(dim=0).float(), torch.stack(losses)))
            self.sums = sums if self.sums is None else self.sums + sums
        return probs, routing_map

    @property
    def number_in_model(self) -> int:
        """Number of its layer, from 1. Multi-token layers count on behind the last, as in megatron-core until 0.16."""
        assert self.layer_number is not None, "its layer has told it"
        before = self.config.num_layers if getattr(self, "is_mtp_layer", False) else 0
        return int(self.layer_number) + before

    def take_sums(self) -> Tensor | None:
        """Return and reset `sums`; None where nothing trained."""
        sums, self.sums = self.sums, None
        return sums

    def forget(self) -> None:
        """Forget what was counted since the last step, which was no training."""
        self.sums = None
        if self.enable_expert_bias:
            self.local_tokens_per_expert.zero_()

    def _owners(self, logits: Tensor) -> TokenOwners:
        if self.params is None:
            raise TypeError("a router needs the parameters of its micro-batch: use gpt_block_spec")
        owners = token_owners(self.params)
        if self.config.sequence_parallel:
            segments, copies = (
                whole.chunk(self.tp_group.size())[self.tp_group.rank()] for whole in (owners.segments, owners.copies)
            )
            owners = owners._replace(segments=segments, copies=copies)
        assert len(owners.segments) == len(logits), "a row for each token"
        return owners

    def _aux_loss(self, logits: Tensor, owners: TokenOwners) -> Tensor:
        """Return this rank's part of n * aux summed over sequences: their whole counts, scores of local tokens."""
        if self.params.placed is not None:  # type: ignore[union-attr]
            raise TypeError(f"{self.params.label}: the lanes of a placed bucket do not number its samples alike")  # type: ignore[union-attr]
        routing_map, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        of_segments = torch.zeros(owners.num_segments + 1, logits.shape[-1], device=logits.device)
        of_segments.index_add_(0, owners.segments, routing_map.to(of_segments.dtype))
        self._sum_over_sample(of_segments)
        segment, sequence = owners.shares
        counts = of_segments.new_zeros(owners.num_sequences, logits.shape[-1]).index_add_(
            0, sequence, of_segments[segment]
        )
        # Each token chose k experts, so the row of a sequence adds up to k n. That of padding has no weight.
        of_sequences = counts * (self.config.num_moe_experts / counts.sum(dim=1, keepdim=True).clamp(min=1))
        weights = torch.zeros_like(of_segments).index_add_(0, segment, of_sequences[sequence])
        return (scores * weights[owners.segments]).sum()

    def _sum_over_sample(self, counts: Tensor) -> None:
        for group in (self.tp_group if self.config.sequence_parallel else None, self.params.cp_group):  # type: ignore[union-attr]
            if group is not None and group.size() > 1:
                dist.all_reduce(counts, group=group)

    # What megatron-core would do in `routing` for a pack; all of it is done above.

    def is_aux_loss_enabled(self) -> bool:
        return False

    def apply_z_loss(self, logits: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return logits

    def _apply_expert_bias(self, *_args: Any, **_kwargs: Any) -> None:
        """Count nothing. megatron-core would compile this anew for new lengths."""


class LayerWithExperts(TransformerLayer):
    """megatron-core's layer, which hands the parameters of a micro-batch to its router. They travel as the padding
    mask, which megatron-core hands on as it is, also when experts are recomputed (--recompute-modules moe) after
    another micro-batch has passed through the layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same pass that megatron-core would repeat, but with the arguments of the first one.
        self.recompute_mlp, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False
        self.mlp.register_forward_pre_hook(_hand_over, with_kwargs=True)
        if self.config.tensor_model_parallel_size > 1:
            # Each tensor-parallel rank has whole experts and only its own tokens, so gradients are summed over these
            # ranks, too. megatron-core does so with EP > 1 only.
            for parameter in self.mlp.experts.parameters():
                parameter.allreduce = False
                # megatron-core marks an expert's second bias as sequence-parallel: its gradient would be TP times as
                # large.
                parameter.sequence_parallel = False
                # Not a copy of another rank's: until 0.19 the norm of gradients counts what is not marked so on the
                # first tensor-parallel rank only, and ranks would clip by different norms.
                parameter.tensor_model_parallel = True

    def forward(
        self, *args: Any, packed_seq_params: DynamicPackedSeqParams | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        kwargs["padding_mask"] = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[no-any-return]


def _hand_over(experts: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    experts.router.params = kwargs.pop("padding_mask", None)
    return args, kwargs


class NumberedExperts(SequentialMLP):
    """megatron-core's experts of a rank, one after the other; an expert's initial weights depend on its number only.

    megatron-core's begin alike on all ranks of a block where they are made on the CPU, and their number on a rank
    changes what is made after them. Biases of second matrices are added here, to the outputs of all experts together:
    megatron-core adds them in place, expert by expert, which torch refuses where one rank has all experts.
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
        """Return the weighted outputs of the experts, [tokens, hidden size]. `tokens` is [tokens, hidden size], those
        of the first expert first; `tokens_per_expert` [experts here]; `probs` [tokens]."""
        output, _ = super().forward(tokens, tokens_per_expert, probs, *args, **kwargs)
        if self.config.add_bias_linear:
            biases = torch.stack([expert.linear_fc2.bias for expert in self.local_experts])
            of_tokens = biases.repeat_interleave(tokens_per_expert.to(biases.device), dim=0, output_size=len(output))
            output = (output + of_tokens * probs[:, None]).to(output.dtype)
        return output, None


class _WithoutItsBias(RowParallelLinear):
    """The second matrix of an expert; `NumberedExperts` adds its bias."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        output, _ = super().forward(*args, **kwargs)
        return output, None


def use_our_parts(mlp: Any) -> None:
    """Make a layer spec build our experts and our router."""
    submodules = mlp.keywords["submodules"] if releases.EXPERTS_BY_FUNCTION.here else mlp.submodules
    submodules.router = DynamicCPRouter
    experts = submodules.experts
    if isinstance(experts, functools.partial) and experts.func is SequentialMLP:
        submodules.experts = functools.partial(NumberedExperts, *experts.args, **experts.keywords)
    elif getattr(experts, "module", None) is SequentialMLP:
        experts.module = NumberedExperts


@contextlib.contextmanager
def as_if_nothing_was_routed(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Forget afterwards what the routers of `chunks` counted inside, and restore their biases."""
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
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, DynamicCPRouter))
