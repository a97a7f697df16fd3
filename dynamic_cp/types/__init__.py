"""The values that every part passes on: samples, topology, model, hardware, plan. All are frozen, without live handles.

    sample -> bucket (one CP group's share of one micro-batch) -> micro-batch (all lanes) -> plan (one global batch)

A *lane* is one position on the data-parallel x context-parallel axis, 0 .. num_lanes - 1. It exists on every pipeline
stage and holds TP-size ranks. Read in this order: `counts` (checks that all share), `topology`, `attention`, `masks`,
`branches`, `placement`, `linear_attention`, `plan`, then what a batch is planned for: `layers`,
`experts`, `linear_layers`, `model`, `hardware`, `data_parallel`, `problem`.
"""

from dynamic_cp.types.attention import (
    ACROSS_NODES,
    AUTO,
    AUTO_ALONE,
    BY_PLACEMENT,
    CHOICES,
    CHOOSES_INNER_SIZE,
    CP_COMM_TYPES,
    IN_NODE,
    RING_ALONE,
    TRAITS,
    UNPLACED,
    Attention,
    CpCommType,
    Traits,
    check_latents,
    exchanges_of,
    is_placed,
    needs_latents,
)
from dynamic_cp.types.branches import Branches, SharedQuestion, Tree, parse_mask
from dynamic_cp.types.counts import MAX_COUNT, counted, is_power_of_two, largest_power_of_two
from dynamic_cp.types.data_parallel import DTYPES_OF, FP32_STATE, SHARDED, Adapters, DataParallel, StateDtypes
from dynamic_cp.types.experts import EXPERT_IMBALANCE, Experts, layers_with_experts
from dynamic_cp.types.hardware import Hardware
from dynamic_cp.types.layers import Layer, PipelineLayers, Stage
from dynamic_cp.types.linear_attention import STATE_EXCHANGES, LinearAttention, StateExchange
from dynamic_cp.types.masks import CAUSAL, FULL, Causal, CausalBlockwise, Full, KeyRanges, Lambda, Mask, Rectangle
from dynamic_cp.types.model import ModelShape
from dynamic_cp.types.placement import Placement, parse_placement
from dynamic_cp.types.plan import Bucket, MicroBatch, Plan, PlanExtension, PlannedBatch, Sample
from dynamic_cp.types.problem import (
    AUTO_CHUNK_TOKENS,
    EVERY_LAYER,
    NOISE_MARGIN,
    POOL_POLICIES,
    POOL_USES,
    RECOMPUTE_METHODS,
    RECOMPUTE_MODES,
    RECOMPUTE_MODULES,
    SEARCH_EFFORTS,
    STATE_EXCHANGE_USES,
    STATIC_POLICIES,
    PlanOptions,
    PoolUse,
    Problem,
    Recompute,
    RecomputedLayers,
    RecomputeMethod,
    RecomputeModule,
    SearchEffort,
    StateExchangeUse,
    allowed_exchanges,
    chunk_tokens,
    with_exchanges,
)
from dynamic_cp.types.topology import MAX_LANES, Topology

__all__ = [
    "ACROSS_NODES", "AUTO", "AUTO_ALONE", "AUTO_CHUNK_TOKENS", "BY_PLACEMENT", "CAUSAL", "CHOICES",
    "CHOOSES_INNER_SIZE", "CP_COMM_TYPES", "DTYPES_OF", "EVERY_LAYER", "EXPERT_IMBALANCE", "FP32_STATE", "FULL",
    "IN_NODE", "MAX_COUNT", "MAX_LANES", "NOISE_MARGIN", "POOL_POLICIES", "POOL_USES", "RECOMPUTE_METHODS",
    "RECOMPUTE_MODES", "RECOMPUTE_MODULES", "RING_ALONE", "SEARCH_EFFORTS", "SHARDED", "STATE_EXCHANGES",
    "STATE_EXCHANGE_USES", "STATIC_POLICIES", "TRAITS", "UNPLACED", "Adapters", "Attention", "Branches", "Bucket",
    "Causal", "CausalBlockwise", "CpCommType", "DataParallel", "Experts", "Full", "Hardware", "KeyRanges", "Lambda",
    "Layer", "LinearAttention", "Mask", "MicroBatch", "ModelShape", "PipelineLayers", "Placement", "Plan",
    "PlanExtension", "PlanOptions", "PlannedBatch", "PoolUse", "Problem", "Recompute", "RecomputeMethod",
    "RecomputeModule", "RecomputedLayers", "Rectangle", "Sample", "SearchEffort", "SharedQuestion", "Stage",
    "StateDtypes", "StateExchange", "StateExchangeUse", "Topology", "Traits", "Tree", "allowed_exchanges",
    "check_latents", "chunk_tokens", "counted", "exchanges_of", "is_placed", "is_power_of_two",
    "largest_power_of_two", "layers_with_experts", "needs_latents", "parse_mask", "parse_placement", "with_exchanges",
]  # fmt: skip
