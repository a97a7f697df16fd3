"""Before the first step on a GPU: has every attention kernel planned, and memory for one largest pack taken.

cuDNN plans a kernel for every bucket of local tokens (up to 1024, powers of two, then multiples of 32768) and each
shape of a ring (the diagonal and both halves), forward and backward, in 0.1 to 1 s each. A lane meets the most shapes
in its largest group, so packs of each bucket are attended to there, with every exchange of the run. cuDNN also plans
for each bucket of the number of sequences: up to 32, then powers of two. Only packs of the first two buckets are
attended to here; others are planned when such a pack comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from typing import TypeVar

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from dynamic_cp.errors import MemoryLimitError
from dynamic_cp.plans.padding import rank_multiple
from dynamic_cp.types import RING_ALONE, Attention, CpCommType, is_placed, needs_latents
from megatron.dynamic_cp.attention.thd import EXECUTORS
from megatron.dynamic_cp.data.micro_batches import PackedBucket, groups_of
from megatron.dynamic_cp.flags.fp8 import token_alignment
from megatron.dynamic_cp.groups.first_exchange import possible_attentions
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.model.experts import as_if_nothing_was_routed
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.trainer.flags import environment
from megatron.trainer.setup.model import Built
from megatron.trainer.setup.planned_runtime import PlannedRuntime

logger = logging.getLogger(__name__)

T = TypeVar("T")
SMALLEST_BUCKET_TOKENS = 1024
LARGEST_DOUBLED_TOKENS = 32768
PACKED_SEQUENCES = (32, 64)
"""Largest numbers of sequences in cuDNN's first two buckets; attention to short sequences is cheap."""


def token_buckets(max_tokens_per_rank: int) -> tuple[int, ...]:
    """Return the largest number of local tokens of each bucket up to the limit; the last one is the limit."""
    buckets, bucket = [], SMALLEST_BUCKET_TOKENS
    while bucket < max_tokens_per_rank:
        buckets.append(bucket)
        bucket += min(bucket, LARGEST_DOUBLED_TOKENS)
    return (*buckets, max_tokens_per_rank)


def pack_of(rank_tokens: int, cp_size: int, most_sequences: int) -> tuple[int, ...]:
    """Return padded lengths of at most `most_sequences` sequences with `rank_tokens`, rounded to even, on each lane."""
    unit = 2 * cp_size  # of a sequence: two tokens on each lane
    units = max(1, rank_tokens // 2)
    number = min(most_sequences, units)
    return tuple(unit * (units // number + (index < units % number)) for index in range(number))


def warm_up_packs(
    blocks: Collection[tuple[int, int]],
    two_levels: Iterable[tuple[int, int, int]],
    exchanges: Sequence[CpCommType],
    *,
    max_tokens_per_rank: int,
    query_heads: int,
) -> list[PackedBucket]:
    """Return the packs that a lane attends to, in an order that all lanes of a block share.

    Args:
        blocks: (first lane, size) of the lane's groups.
        two_levels: (first lane, size, inner size) of its groups for exchanges of two levels.
        exchanges: those that plans of the run may have.
        query_heads: of a tensor-parallel rank.
    """
    inner_sizes = {inner for _, _, inner in two_levels}
    # The plan decides what a lane does in a placement; its kernels are those of other exchanges.
    exchanges = [name for name in exchanges if not is_placed(name)]
    # With latents, kernels see the same shapes as in a ring of keys and values.
    exchanges = list(dict.fromkeys(RING_ALONE[0] if needs_latents(name) else name for name in exchanges))
    places: dict[tuple[Attention, int], tuple[int, int]] = {}
    for first, size in sorted(blocks, key=lambda block: block[1]):
        for attention in (
            possible_attentions(exchanges, size, query_heads, sorted(inner_sizes)) if size > 1 else [Attention()]
        ):
            # Where shapes do not grow with the group, the largest one has them all.
            executor = EXECUTORS[attention.cp_comm_type]
            assert executor is not None, "placements were left out"
            each_size = size == 1 or executor.grows_with_group
            places[attention, size if each_size else 0] = first, size
    return [
        PackedBucket(
            first_lane=first,
            cp_size=size,
            cp_comm_type=attention.cp_comm_type,
            inner_cp_size=attention.inner_cp_size,
            padded_seqlens=padded_seqlens,
        )
        for (attention, _), (first, size) in places.items()
        for tokens in token_buckets(max_tokens_per_rank)
        for padded_seqlens in dict.fromkeys(pack_of(tokens, size, most) for most in PACKED_SEQUENCES)
    ]


def warm_up_attention(
    attentions: Sequence[torch.nn.Module],
    packs: Sequence[PackedBucket],
    groups: DynamicCPGroups,
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Attend to each pack, forward and backward; return the bytes sent. Collective in each group.

    `attentions` are core attentions as megatron-core builds them, one for each kind of kernel; `query_heads` and
    `kv_heads` are those of a tensor-parallel rank.
    """
    stats = ExchangeStats()
    for pack in packs:
        group, levels = groups_of(pack, groups)
        params = DynamicPackedSeqParams.build(
            pack.padded_seqlens,
            torch.zeros(pack.rank_tokens, dtype=torch.int64, device=device),
            group,
            cp_comm_type=pack.cp_comm_type,
            levels=levels,
            label=f"start-up (warm-up of attention, {pack.cp_comm_type} over {pack.cp_size} lanes)",
            stats=stats,
        )
        query, key, value = (
            torch.zeros(pack.rank_tokens, heads, head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (query_heads, kv_heads, kv_heads)
        )
        for attention in attentions:
            out = attention(query, key, value, None, packed_seq_params=params)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
    return stats.bytes_sent


def warm_up_device(runtime: PlannedRuntime, built: Built) -> None:
    """Attend once to a pack of each kind, and run one pack of the token limit through each chunk. Collective, on CUDA.

    Gradients are zero afterwards, random states as before. A step needs more memory, for the optimizer's state and a
    pipeline's other micro-batches (see the memory model). MemoryLimitError, on this rank only: the limit does not fit.
    """
    logger.info("%s", environment.describe())
    config, chunks, groups, device = built.config, built.chunks, runtime.groups, runtime.device
    limit = runtime.options.max_tokens_per_rank
    tp_size = config.tensor_model_parallel_size
    query_heads = config.num_attention_heads // tp_size
    packs = warm_up_packs(
        groups.groups,
        groups.outer_groups,
        runtime.options.cp_comm_types,
        max_tokens_per_rank=limit,
        query_heads=query_heads,
    )
    started = time.perf_counter()
    sent = _within_memory(
        lambda: warm_up_attention(
            _one_of_each_mask(chunks),
            packs,
            groups,
            query_heads=query_heads,
            kv_heads=config.num_query_groups // tp_size,
            head_dim=config.kv_channels,
            dtype=config.params_dtype,
            device=device,
        ),
        limit,
    )
    attended = time.perf_counter()
    if runtime.model_shape.linear_attention is not None:
        tune = import_module("megatron.decide.linear_warm_up").warm_up  # no part of the core: asked for by name
        given = groups, runtime.model_shape, runtime.options, tp_size, config.params_dtype, device
        logger.info("%s", _within_memory(lambda: tune(*given), limit))
    tuned = time.perf_counter()
    with as_if_nothing_was_routed(chunks):
        _within_memory(lambda: run_chunks(config, chunks, built.wrapped, groups, limit, device), limit)
    logger.info(
        "warm-up: %d packs of attention in %.1f s with %d bytes sent per rank, a pack of %d tokens through each model "
        "chunk in %.1f s; %.2f GB of device memory reserved; a step adds what the optimizer allocates at first use "
        "and what the other micro-batches in flight of a pipeline hold",
        len(packs),
        attended - started,
        sent,
        limit,
        time.perf_counter() - tuned,
        torch.cuda.max_memory_reserved(device) / 1e9,
    )


def _one_of_each_mask(chunks: Sequence[GPTModel]) -> list[torch.nn.Module]:
    """Return one core attention per kind of window, "none" among them, of the layers that have attention."""
    layers = (layer.self_attention for chunk in chunks for layer in chunk.decoder.layers)
    attentions = (layer.core_attention for layer in layers if hasattr(layer, "core_attention"))
    return list({getattr(attention, "window", None): attention for attention in attentions}.values())


def run_chunks(
    config: TransformerConfig,
    chunks: Sequence[GPTModel],
    wrapped: Sequence[DistributedDataParallel],
    groups: DynamicCPGroups,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Run a pack of `num_tokens`, on one lane, forward and backward through each chunk, as if there was no pipeline.
    Gradients are zero afterwards, random states as before. Collective among tensor-parallel ranks."""
    tp_size = config.tensor_model_parallel_size
    shares = tp_size if config.sequence_parallel else 1
    multiple = rank_multiple(2, shares * token_alignment(config))  # of two zigzag chunks, as packs of one lane are cut
    seqlens = pack_of(num_tokens - num_tokens % multiple, 1, PACKED_SEQUENCES[0])
    num_tokens = sum(seqlens)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = (torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states())
    zeros = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    for chunk, parallel in zip(chunks, wrapped, strict=True):
        params = DynamicPackedSeqParams.build(
            seqlens,
            torch.cat([torch.arange(seqlen, device=device) for seqlen in seqlens]),
            groups.group(groups.lane, 1),
            label="start-up (warm-up of the allocator)",
            stats=ExchangeStats(),
        )
        if not chunk.pre_process:
            hidden = torch.ones(num_tokens // shares, 1, config.hidden_size, dtype=config.params_dtype, device=device)
            chunk.set_input_tensor(hidden.requires_grad_())
        gathers = parallel.ddp_config.overlap_param_gather
        if gathers:  # no gather has been started that they could wait for
            parallel.disable_forward_pre_hook(param_sync=False)
        with parallel.no_sync():
            labels = zeros if chunk.post_process else None
            out = parallel(zeros, zeros, None, labels=labels, packed_seq_params=params)
            out.sum().backward()
        if gathers:
            parallel.enable_forward_pre_hook()
        parallel.zero_grad_buffer()
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    tracker.set_states(states[2])


def _within_memory(compute: Callable[[], T], limit: int) -> T:
    """Return `compute()`, which contains collectives; MemoryLimitError if this rank's device is too small. Other ranks
    wait inside `compute`, where no message would be heard, so its launcher has to end them (`ending.failures`)."""
    try:
        return compute()
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"start-up: {limit} padded tokens per rank (--max-seqlen-per-dp-cp-rank) do not fit in the device's "
            f"memory ({str(error).splitlines()[0]}): lower the limit, raise the largest CP size, or recompute "
            "activations (--recompute-granularity full)"
        ) from error
