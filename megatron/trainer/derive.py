"""What the planner has to know of a run, from its arguments: pure functions without torch."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import lcm
from typing import Any

from dynamic_cp.padding import padded_seqlens, round_up
from dynamic_cp.types import ModelShape, PlanOptions, Recompute, Topology
from megatron.dynamic_cp.arguments import cp_comm_types


def padded_vocab_size(vocab_size: int, divisor: int, tp_size: int) -> int:
    """Return the rows of the embedding table for `vocab_size` token ids.

    DEVIATION: the least common multiple of `divisor` and `tp_size`, where Megatron-LM takes their product. Reason: the
    rows of padding are part of the softmax, so a table that grows with TP changes every loss and cannot be loaded at
    another TP size. Recovery: --make-vocab-size-divisible-by divisor * tp_size.
    """
    return round_up(vocab_size, lcm(divisor, tp_size))


def topology(args: argparse.Namespace) -> Topology:
    """Return the arrangement of the job's ranks."""
    return Topology(
        num_lanes=args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size),
        tp_size=args.tensor_model_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        vp_size=args.virtual_pipeline_model_parallel_size or 1,
        ranks_per_node=args.ranks_per_node,
        sequence_parallel=args.sequence_parallel,
    )


def default_max_tokens_per_rank(args: argparse.Namespace) -> int:
    """Return the padded tokens of a rank that holds one sample of --seq-length at the static CP size."""
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    static_cp_size = args.context_parallel_size
    return padded_seqlens((args.seq_length,), static_cp_size, multiple)[0] // static_cp_size


def plan_options(args: argparse.Namespace, max_tokens_per_rank: int | None = None) -> PlanOptions:
    """Return what the planner may do, with `max_tokens_per_rank` where the limit of `args` is still to be found."""
    recompute: Recompute = args.recompute_granularity or "none"
    return PlanOptions(
        max_tokens_per_rank=max_tokens_per_rank or args.max_seqlen_per_dp_cp_rank,
        min_cp_size=args.min_dynamic_cp_size,
        max_cp_size=args.max_dynamic_cp_size,
        static_cp_size=args.context_parallel_size,
        cp_comm_types=cp_comm_types(args),
        inner_cp_sizes=args.dynamic_cp_inner_sizes,
        recompute=recompute,
        bytes_per_element=2 if args.bf16 else 4,
        search=args.dynamic_cp_search,
    )


def used_options(args: argparse.Namespace, max_tokens_per_rank: int | None = None) -> PlanOptions:
    """Return `plan_options` with the CP sizes that plans of this run have: without --dynamic-cp only the static one."""
    options = plan_options(args, max_tokens_per_rank)
    if args.dynamic_cp:
        return options
    return replace(options, min_cp_size=args.context_parallel_size, max_cp_size=args.context_parallel_size)


def policy(args: argparse.Namespace) -> str:
    """Return the planner's policy: dynamic, or the static one of --static-cp-policy."""
    return "dynamic" if args.dynamic_cp else str(args.static_cp_policy)


def model_shape(args: argparse.Namespace, vocab_rows: int) -> ModelShape:
    """Return the numbers of the model that decide its cost, with `vocab_rows` rows of the embedding table."""
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        vocab_size=vocab_rows,
        gated_linear_unit=args.swiglu,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        source="command line",
    )


def model_identity(args: argparse.Namespace, vocab_rows: int) -> dict[str, Any]:
    """Return what two runs must share to load each other's weights."""
    # Named one by one: what ModelShape learns about other models must not part a run from its checkpoints.
    names = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
        "normalization position_embedding_type rotary_base rotary_percent rotary_interleaved max_position_embeddings "
        "disable_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights"
    )
    identity = {name: getattr(args, name) for name in names.split()}
    return identity | {"vocab_size": vocab_rows, "gated_linear_unit": args.swiglu}
