"""Compares TransformerEngine's attention with plain products before the first step: each exchange, in the job's groups.

TransformerEngine chooses its kernel and its exchange by versions, packages and environment variables, and accepts some
that are wrong: all_gather with flash-attn 2 is off by its whole norm and raises nothing. `te.support` refuses what is
known; this check finds the rest at start-up, in some milliseconds per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.types import Attention, CpCommType, is_placed, needs_latents
from megatron.dynamic_cp.agreement.verify import run_on_all_ranks
from megatron.dynamic_cp.groups.first_exchange import possible_attentions
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, packed_shard_positions
from megatron.dynamic_cp.repairs import releases

TOLERANCE = 0.02
"""Allowed error, of the norm. bfloat16 rounds output and gradients to 0.2 to 0.6 % of it."""
LANES_WITHIN_TOLERANCE = 16
"""Each step of a ring rounds again: with more lanes the allowed error grows as the root of their number."""
CHUNK_TOKENS = (1, 2, 9)
"""Tokens of each of the 2 * cp chunks, for three sequences."""

NAMES = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


def check_attention(
    model: Sequence[torch.nn.Module], groups: DynamicCPGroups, exchanges: Sequence[CpCommType], device: torch.device
) -> str:
    """Compare TransformerEngine's attention, alone and with each exchange of each group; return a line for the log.

    Collective over the job. "" where layers of this rank have another attention.

    Args:
        model: chunks of this rank.
        exchanges: that plans of the run may have.

    Raises UnsupportedFeatureError: something else is computed; the same on every rank."""
    named = (module for chunk in model for module in chunk.modules())
    attention = next((module for module in named if type(module).__name__ == "TransformerEngineAttention"), None)
    return run_on_all_ranks(lambda: "" if attention is None else _judge(attention, groups, exchanges, device), device)


class Compared(NamedTuple):
    """One way to compute attention beside plain products.

    Attributes:
        exchange: "" on one lane alone.
        errors: what of NAMES -> the error of this lane's rows, in norm.
        allowed: the largest right one.
    """

    exchange: str
    num_lanes: int
    errors: dict[str, float]
    allowed: float

    @property
    def where(self) -> str:
        return f"with {self.exchange} over {self.num_lanes} lanes" if self.exchange else "on one lane alone"

    @property
    def wrong(self) -> dict[str, float]:
        """Those of `errors` that are too large or NaN."""
        return {name: error for name, error in self.errors.items() if not error <= self.allowed}


def compare_attention(
    attention: torch.nn.Module,
    groups: DynamicCPGroups,
    exchanges: Sequence[CpCommType],
    device: torch.device,
    chunk_tokens: Sequence[int] = CHUNK_TOKENS,
) -> Iterator[Compared]:
    """Yield how far a core attention is from plain products, alone and with each exchange of each group of this lane.

    Collective in each group. What is placed or travels as latents is left out.

    Args:
        chunk_tokens: of each sequence, as CHUNK_TOKENS.
    """
    config = attention.config
    query_heads = config.num_attention_heads // config.tensor_model_parallel_size
    exchanges = _compared_exchanges(exchanges)
    for first, size in sorted(groups.groups, key=lambda place: place[1]):
        group = groups.group(first, size)
        seqlens = tuple(2 * size * tokens for tokens in chunk_tokens)
        inputs, rows = _inputs(config, seqlens, size, groups.lane - first, device)
        expected = _plain_attention(inputs, rows, seqlens, group)
        allowed = TOLERANCE * max(1.0, size / LANES_WITHIN_TOLERANCE) ** 0.5
        inner_sizes = sorted({inner for place, of, inner in groups.outer_groups if (place, of) == (first, size)})
        for possible in possible_attentions(exchanges, size, query_heads, inner_sizes) if size > 1 else [Attention()]:
            params = DynamicPackedSeqParams.build(
                seqlens,
                torch.zeros(len(rows), dtype=torch.int64, device=device),
                group,
                cp_comm_type=possible.cp_comm_type,
                levels=groups.levels(first, size, possible.inner_cp_size),
                label=f"start-up (check of attention, {possible.cp_comm_type} over {size} lanes)",
                stats=ExchangeStats(),
            )
            actual = _attend(attention, [x[rows] for x in inputs], params)
            errors = {
                name: float((one.double() - other).norm() / other.norm())
                for name, one, other in zip(NAMES, actual, expected, strict=True)
            }
            yield Compared(possible.cp_comm_type if size > 1 else "", size, errors, allowed)


def _compared_exchanges(exchanges: Sequence[CpCommType]) -> list[CpCommType]:
    return [name for name in exchanges if not is_placed(name) and not needs_latents(name)]


def _judge(
    attention: torch.nn.Module, groups: DynamicCPGroups, exchanges: Sequence[CpCommType], device: torch.device
) -> str:
    compared, worst, wrong = 0, 0.0, dict[str, str]()
    results = compare_attention(attention, groups, exchanges, device)
    for one in releases.each_named(f"attention of {attention.implementation}", results):
        compared += 1
        worst = max(worst, *one.errors.values())
        for name, error in one.wrong.items():
            text = f"{one.where} the {name} is off by {error:.3g} of its norm, {one.allowed:.3g} is allowed"
            wrong.setdefault(one.exchange, text)
    if wrong:
        right = [name for name in _compared_exchanges(exchanges) if name not in wrong and "" not in wrong]
        raise UnsupportedFeatureError(
            f"{attention.implementation} computes something else than attention here: {'; '.join(wrong.values())}. "
            f"Use {f'--cp-comm-type {right[0]}, ' if right else ''}--transformer-impl local or another version; "
            "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1 shows what TransformerEngine chose"
        )
    return (
        f"attention of {attention.implementation} checked: {compared} exchanges at most {worst:.2g} of the norm away "
        "from plain products"
    )


def _inputs(
    config: TransformerConfig, seqlens: tuple[int, ...], cp_size: int, rank: int, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return (q, k, v and output gradient of the whole pack, the same on all lanes; this lane's rows)."""
    tp_size = config.tensor_model_parallel_size
    generator = torch.Generator().manual_seed(cp_size)
    heads, kv_heads = config.num_attention_heads // tp_size, max(1, config.num_query_groups // tp_size)
    inputs = tuple(
        torch.randn(sum(seqlens), number, config.kv_channels, generator=generator).to(device, config.params_dtype)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    starts = np.repeat((0, *accumulate(seqlens[:-1])), [seqlen // cp_size for seqlen in seqlens])
    return inputs, torch.from_numpy(starts + packed_shard_positions(seqlens, cp_size, rank)).to(device)


def _attend(attention: torch.nn.Module, inputs: Sequence[Tensor], params: DynamicPackedSeqParams) -> list[Tensor]:
    *qkv, grad = (x.detach() for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    try:
        out = attention(*qkv, None, packed_seq_params=params)
    except RuntimeError as error:
        folders = releases.two_cudnns()
        if not folders or "cudnn" not in str(error).lower():
            raise
        raise UnsupportedFeatureError(
            f"two versions of cuDNN are loaded, from {folders}, and attention of {attention.implementation} fails: "
            "put those of torch first, as in docs/GPU.md (LD_PRELOAD), or remove the others"
        ) from error
    return [out.detach().view_as(grad), *torch.autograd.grad(out, qkv, grad.view_as(out))]


def _plain_attention(
    inputs: tuple[Tensor, ...], rows: Tensor, seqlens: tuple[int, ...], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return NAMES of this lane's rows, in float64, by plain causal attention; lanes only add up gradients."""
    q, k, v, grad = (x.double() for x in inputs)
    query, k, v = q[rows].requires_grad_(), k.requires_grad_(), v.requires_grad_()
    copies, local, start, outs = q.shape[1] // k.shape[1], 0, 0, []
    for seqlen in seqlens:
        mine = slice(local, local + seqlen // group.size())
        key, value = (x[start : start + seqlen].repeat_interleave(copies, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", query[mine], key) * q.shape[-1] ** -0.5
        later = torch.arange(start, start + seqlen, device=rows.device) > rows[mine, None]
        outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(later, float("-inf")).softmax(-1), value))
        local, start = mine.stop, start + seqlen
    out = torch.cat(outs)
    grad_q, *grads_kv = torch.autograd.grad(out, (query, k, v), grad[rows])
    for x in grads_kv:
        dist.all_reduce(x, group=group)
    return [out.detach(), grad_q, *(x[rows] for x in grads_kv)]
