"""What every section needs: the setup, the timer, inputs of any length, and a small GPT as training builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from dynamic_cp.decide.calibration.fit import BUCKET_LAYERS
from dynamic_cp.decide.calibration.measurements import Measurement, Setup
from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.types import largest_power_of_two
from megatron.decide.calibration.device import Place
from megatron.decide.calibration.timing import Probe, Timer
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.measuring import free_bytes
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.self_attention import use_one_rotary_table
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats

_SHORTEST = {"cuda": 256, "cpu": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    setup: Setup
    place: Place
    timer: Timer
    gpt: SmallGPT
    groups: DynamicCPGroups
    tell: Callable[[str], None]

    def measure(self, probes: Sequence[Probe]) -> list[Measurement]:
        return self.timer.measure(probes, self.tell)

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def scale(self) -> float:
        return float(self.setup.shard.kv_channels**-0.5)

    def params(self, seqlens: Sequence[int]) -> DynamicPackedSeqParams:
        positions = torch.cat([torch.arange(seqlen, device=self.device) for seqlen in seqlens])
        alone = self.groups.group(self.groups.lane, 1)
        return DynamicPackedSeqParams.build(
            tuple(seqlens), positions, alone, label="calibration", stats=ExchangeStats()
        )

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        """Return normal random numbers in the dtype of activations."""
        return torch.randn(shape, device=self.device, dtype=self.gpt.dtype).requires_grad_(grad)

    def query_key_value(self, tokens: int, *, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
        shard = self.setup.shard
        heads = (shard.num_attention_heads, shard.num_query_groups, shard.num_query_groups)
        query, key, value = (self.random(tokens, number, shard.kv_channels, grad=grad) for number in heads)
        return query, key, value

    def lengths(self) -> list[int]:
        """Return powers of two from a short sequence to the longest, with --quick every second one."""
        longest = largest_power_of_two(self.setup.max_tokens)
        shortest = min(_SHORTEST[self.device.type], longest // 8)
        found = [longest]
        while found[-1] // 2 >= shortest:
            found.append(found[-1] // (4 if self.setup.quick and found[-1] // 4 >= shortest else 2))
        return found[::-1]


_GRADIENT_BYTES = 4
_HIDDEN_WIDTHS, _MLP_WIDTHS = 16, 8
"""Activations of a layer per token, as multiples of its hidden and MLP widths, with gradients; an estimate."""


class SmallGPT:
    """The measured model: one TP rank's shard of BUCKET_LAYERS layers with RMSNorm and RoPE, without biases and
    dropout. MemoryLimitError if it does not fit into free memory.
    """

    def __init__(self, setup: Setup, device: torch.device) -> None:
        shard = setup.shard
        check_fits(setup, free_bytes(device), sharers=1 if device.type == "cuda" else setup.ranks_per_node)
        self.dtype = torch.bfloat16 if setup.element_bytes == 2 else torch.float32
        self.device = device
        self.config = TransformerConfig(
            num_layers=BUCKET_LAYERS,
            hidden_size=shard.hidden_size,
            ffn_hidden_size=shard.ffn_hidden_size,
            num_attention_heads=shard.num_attention_heads,
            num_query_groups=shard.num_query_groups,
            kv_channels=shard.kv_channels,
            normalization="RMSNorm",
            gated_linear_unit=shard.gated_linear_unit,
            activation_func=torch.nn.functional.silu if shard.gated_linear_unit else torch.nn.functional.gelu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=self.dtype == torch.bfloat16,
            params_dtype=self.dtype,
            use_cpu_initialization=device.type == "cpu",
            calculate_per_token_loss=True,
        )
        self.gpt = GPTModel(
            config=self.config,
            transformer_layer_spec=gpt_block_spec(self.config),
            vocab_size=shard.vocab_size,
            max_sequence_length=setup.max_tokens * setup.num_ranks,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).to(device)
        use_one_rotary_table(self.gpt)
        module = Float16Module(self.config, self.gpt) if self.config.bf16 else self.gpt
        self.ddp = DistributedDataParallel(self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)

    @property
    def layer(self) -> Any:
        return self.gpt.decoder.layers[0]


class WithoutAttention(torch.nn.Module):
    """Replaces core attention: returns the queries, gives keys and values zero gradients, and computes nothing."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [T, 1, heads * dim]."""
        out: Tensor = _PassQueries.apply(query, key, value)
        return out.reshape(len(out), 1, -1)


class _PassQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shapes = key.shape, value.shape
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key, value = (grad.new_zeros(shape) for shape in ctx.shapes)
        return grad, key, value


def check_fits(setup: Setup, free: int | None, sharers: int) -> None:
    """Raise MemoryLimitError if the model needs more than the `free` bytes (None: unknown) that `sharers` share."""
    shard = setup.shard
    weights = BUCKET_LAYERS * shard.linear_weights_per_layer + shard.vocabulary_weights
    needed = weights * (setup.element_bytes + _GRADIENT_BYTES)
    widths = _HIDDEN_WIDTHS * shard.hidden_size + _MLP_WIDTHS * shard.ffn_hidden_size
    needed += BUCKET_LAYERS * setup.max_tokens * setup.element_bytes * widths
    needed += setup.max_tokens * shard.vocab_size * (setup.element_bytes + 3 * _GRADIENT_BYTES)
    needed *= sharers
    if free is not None and needed > free:
        raise MemoryLimitError(
            f"measuring {BUCKET_LAYERS} layers with {setup.max_tokens} tokens on {sharers} rank(s) needs about "
            f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {setup.device}: lower --max-tokens, raise --tp or "
            "take a smaller --model",
            needed_bytes=needed,
            free_bytes=free,
        )
