"""Before the first step on a GPU: every kernel of attention is planned, and memory for one largest pack is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from dynamic_cp.errors import MemoryLimitError
from megatron.dynamic_cp.flags.fp8 import token_alignment
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.dynamic_cp.model.experts import as_if_nothing_was_routed
from megatron.trainer.flags import environment
from megatron.trainer.setup.attention_warm_up import PACKED_SEQUENCES, warm_up_attention, warm_up_packs
from megatron.trainer.setup.model import Built
from megatron.trainer.setup.planned_runtime import PlannedRuntime

logger = logging.getLogger(__name__)

T = TypeVar("T")


def warm_up_device(runtime: PlannedRuntime, built: Built) -> None:
    """Attend once to a pack of each kind, and run one pack of the token limit through each chunk; collective.

    Ranks compute on CUDA devices. Leaves gradients at zero and random states as they were.

    Raises:
        MemoryLimitError: the token limit does not fit in this rank's device; only this rank knows.

    Limits: a step holds more, the optimizer's state and other micro-batches of a pipeline; see the memory model.
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
        time.perf_counter() - attended,
        torch.cuda.max_memory_reserved(device) / 1e9,
    )


def _one_of_each_mask(chunks: Sequence[GPTModel]) -> list[torch.nn.Module]:
    """Return a core attention of a layer with a window and of one without, as far as there are any."""
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
    """Run a pack of `num_tokens` on a lane by itself forward and backward through each chunk, as if there was no
    pipeline; collective among tensor-parallel ranks.

    Gradients are zero afterwards, random states as before.
    """
    tp_size = config.tensor_model_parallel_size
    shares = tp_size if config.sequence_parallel else 1
    num_tokens -= num_tokens % (shares * token_alignment(config))  # as plans do
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = (torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states())
    zeros = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    for chunk, parallel in zip(chunks, wrapped, strict=True):
        seqlens = _split(num_tokens)
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
        if gathers:  # nothing has been sent yet that they could wait for
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


def _split(num_tokens: int) -> tuple[int, ...]:
    """Return at most 32 lengths of together `num_tokens`."""
    number = min(PACKED_SEQUENCES[0], num_tokens)
    return tuple(num_tokens // number + (index < num_tokens % number) for index in range(number))


def _within_memory(compute: Callable[[], T], limit: int) -> T:
    """Return `compute()`, which has collectives in it.

    A rank without memory tells nobody: the others wait for it inside `compute`, where nothing it sends would be heard.
    It ends with the error, and its launcher ends them (see `megatron.trainer.ending.failures`).

    Raises:
        MemoryLimitError: the device of this rank is too small.
    """
    try:
        return compute()
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"start-up: {limit} padded tokens per rank (--max-seqlen-per-dp-cp-rank) do not fit in the device's "
            f"memory ({str(error).splitlines()[0]}): lower the limit, raise the largest CP size, or recompute "
            "activations (--recompute-granularity full)"
        ) from error
