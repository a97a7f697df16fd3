"""The values every stage passes on: samples, topology, model, hardware, plan.

    sample -> bucket (one CP group's share of one micro-batch) -> micro-batch (all lanes) -> plan (one global batch)

A *lane* is one position on the data-parallel x context-parallel axis, 0 .. num_lanes - 1. It exists on every pipeline
stage and holds `tp_size` ranks. Values are frozen and hold no live handles; what can be derived is a property.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

from dynamic_cp.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    LaneOrLanes = TypeVar("LaneOrLanes", int, NDArray[np.int64])

CpCommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]
CP_COMM_TYPES: tuple[CpCommType, ...] = get_args(CpCommType)
_INNER_SIZES: Mapping[CpCommType, Literal["one", "all", "chosen"]] = {
    "p2p": "one",
    "all_gather": "one",
    "a2a": "all",
    "a2a+p2p": "chosen",
}
"""Mechanism -> how many lanes of a group exchange heads: none with another, all, or as many as the planner chooses."""
CHOOSES_INNER_SIZE = tuple(name for name, inner in _INNER_SIZES.items() if inner == "chosen")
"""Mechanisms that do not imply `Bucket.inner_cp_size`."""

IN_NODE, ACROSS_NODES = 0, 1
"""The link of a group of lanes."""

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[str, ...] = get_args(Recompute)

SearchEffort = Literal["fast", "thorough"]
SEARCH_EFFORTS: tuple[str, ...] = get_args(SearchEffort)


def is_power_of_two(value: int) -> bool:
    """Return whether `value` is 1, 2, 4, 8, ..."""
    return value >= 1 and value & (value - 1) == 0


def largest_power_of_two(value: int) -> int:
    """Return the largest power of two that is <= `value` (`value` >= 1)."""
    return 1 << (value.bit_length() - 1)


def counted(number: int, noun: str) -> str:
    """Return `1 sample` or `2 samples`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


MAX_COUNT = 2**31 - 1
"""Largest length, size or number of anything: cu_seqlens and the planner's sums are integers of fixed width."""


MAX_LANES = 2**20
"""Largest number of lanes: arrays have one entry per micro-batch and lane."""


def _require_at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise InvalidInputError(f"{name} is {value!r}, an integer is needed", name=name, value=value)
        if not minimum <= value <= MAX_COUNT:
            raise InvalidInputError(
                f"{name} is {value}, the {'smallest' if value < minimum else 'largest'} allowed value is "
                f"{minimum if value < minimum else MAX_COUNT}: give {minimum} <= {name} <= {MAX_COUNT}",
                name=name,
                value=value,
                minimum=minimum,
                maximum=MAX_COUNT,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One input sequence: its id (unique in the global batch) and its unpadded length in tokens (>= 1)."""

    sample_id: int
    seqlen: int

    def __post_init__(self) -> None:
        if not isinstance(self.seqlen, Integral) or isinstance(self.seqlen, bool) or self.seqlen > MAX_COUNT:
            raise InvalidInputError(
                f"sample {self.sample_id} has {self.seqlen!r} tokens, an integer from 1 to {MAX_COUNT} is needed: "
                "check where its length comes from",
                sample_id=self.sample_id,
                seqlen=self.seqlen,
            )
        if self.seqlen < 1:
            raise InvalidInputError(
                f"sample {self.sample_id} has {self.seqlen} tokens, at least 1 is needed: "
                "drop empty samples before planning",
                sample_id=self.sample_id,
                seqlen=self.seqlen,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How the ranks of a job are arranged.

    Attributes:
        tp_size, pp_size: tensor- and pipeline-parallel sizes.
        vp_size: model chunks per pipeline stage (1 = no interleaving).
        num_lanes: world size / (tp_size * pp_size); any integer >= 1.
        ranks_per_node: ranks of one node; lanes of a node are adjacent.
        sequence_parallel: tokens of a rank are padded to a multiple of tp_size.
    """

    num_lanes: int
    tp_size: int = 1
    pp_size: int = 1
    vp_size: int = 1
    ranks_per_node: int = 8
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        _require_at_least(
            1,
            num_lanes=self.num_lanes,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            vp_size=self.vp_size,
            ranks_per_node=self.ranks_per_node,
        )
        if self.num_lanes > MAX_LANES:
            raise InvalidInputError(
                f"num_lanes is {self.num_lanes}, at most {MAX_LANES} can be planned: check world size / (TP x PP)",
                num_lanes=self.num_lanes,
                max_lanes=MAX_LANES,
            )
        if self.vp_size > 1 and self.pp_size == 1:
            raise InvalidInputError(
                f"vp_size is {self.vp_size} but pp_size is 1: interleaving needs pp_size >= 2",
                vp_size=self.vp_size,
                pp_size=1,
            )

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.num_lanes * self.tp_size * self.pp_size

    @property
    def max_cp_size(self) -> int:
        """Largest context-parallel size: the largest power of two <= num_lanes."""
        return largest_power_of_two(self.num_lanes)

    @property
    def lanes_per_node(self) -> int:
        """Lanes that share a node (at least 1)."""
        return max(1, self.ranks_per_node // self.tp_size)

    @property
    def rank_token_multiple(self) -> int:
        """Tokens of a rank in one micro-batch are a multiple of this (tp_size with sequence parallelism, else 1)."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def num_microbatches_multiple(self) -> int:
        """num_microbatches is a multiple of this (the VPP micro-batch group size, pp_size; 1 without VPP)."""
        return self.pp_size if self.vp_size > 1 else 1

    def spans_nodes(self, first_lane: int, cp_size: int) -> bool:
        """Return whether lanes first_lane .. first_lane + cp_size - 1 lie on more than one node, on any stage.

        Ranks are numbered TP first, then lanes, then pipeline stages, as megatron-core does.
        """
        return cp_size > 1 and any(self.spans_nodes_on(stage, first_lane, cp_size) for stage in self.stages_that_differ)

    @property
    def stages_that_differ(self) -> range:
        """Pipeline stages whose lanes may lie otherwise on nodes than those of the stages before."""
        return range(self.pp_size if self.num_lanes * self.tp_size % self.ranks_per_node else 1)

    def spans_nodes_on(self, stage: int, first_lane: LaneOrLanes, cp_size: int) -> LaneOrLanes:
        """Return whether the ranks of a group lie on several nodes on `stage`; of an array of first lanes: of each."""
        first = (stage * self.num_lanes + first_lane) * self.tp_size
        last = first + cp_size * self.tp_size - 1
        return first // self.ranks_per_node != last // self.ranks_per_node  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a dense transformer that decide its cost.

    Attributes:
        ffn_hidden_size: width of the MLP's inner layer (one branch of it if gated).
        num_query_groups: KV heads (= num_attention_heads for multi-head attention).
        kv_channels: width of one head.
        gated_linear_unit: SwiGLU-like MLP (three matrices) instead of two.
        causal_attention: a token attends to those before it; False = to all (DiT), twice the attention FLOPs.
        share_embeddings_and_output_weights: the LM head is the embedding table once more.
        other_weights_per_layer: weights of further matrices that every token meets once per layer (the query and output
            projection of a DiT's cross-attention).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    gated_linear_unit: bool = False
    causal_attention: bool = True
    share_embeddings_and_output_weights: bool = False
    other_weights_per_layer: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        _require_at_least(0, other_weights_per_layer=self.other_weights_per_layer)
        _require_at_least(
            1,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            vocab_size=self.vocab_size,
        )
        if self.num_attention_heads % self.num_query_groups:
            raise InvalidInputError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}: every KV head serves the same number of query heads",
                num_attention_heads=self.num_attention_heads,
                num_query_groups=self.num_query_groups,
            )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    def why_no_split(self, *, tp_size: int, pp_size: int, vp_size: int, ranks_per_node: int) -> str | None:
        """Return why TP, PP and VPP cannot split the model evenly over ranks, None where they can."""
        if tp_size > ranks_per_node:
            return "TP beyond a node"
        if any(size % tp_size for size in (self.num_attention_heads, self.num_query_groups, self.ffn_hidden_size)):
            return "TP does not divide heads, KV heads or the MLP"
        if self.num_layers % (pp_size * vp_size):
            return "PP x VPP does not divide the layers"
        if vp_size > 1 and pp_size == 1:
            return "VPP without a pipeline"
        return None

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (as wide again for the values)."""
        return self.num_query_groups * self.kv_channels

    @property
    def linear_weights_per_layer(self) -> int:
        """Weights of the matrices of one transformer layer (QKV, output projection, MLP), without biases and norms."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        mlp_matrices = 3 if self.gated_linear_unit else 2
        return attention + mlp_matrices * self.hidden_size * self.ffn_hidden_size + self.other_weights_per_layer

    @property
    def vocabulary_weights(self) -> int:
        """Weights of the embedding table, and of the LM head where it is a table of its own."""
        tables = 1 if self.share_embeddings_and_output_weights else 2
        return tables * self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms (one scale per channel, two norms a layer and a last one); no biases."""
        layer = self.linear_weights_per_layer + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + self.vocabulary_weights

    @property
    def attention_flops_per_token2(self) -> int:
        """Forward FLOPs of one layer's attention per squared token of a sequence: scores and values, half if causal."""
        return (2 if self.causal_attention else 4) * self.query_size


class Attention(NamedTuple):
    """How the lanes of a CP group compute attention together; `dynamic_cp.mechanisms` has a model of each mechanism.

    Attributes:
        cp_comm_type: the mechanism.
        inner_cp_size: as in `Bucket`.
    """

    cp_comm_type: CpCommType = "p2p"
    inner_cp_size: int = 1

    @property
    def chooses_inner_size(self) -> bool:
        """Whether the mechanism and the CP size leave the inner size open."""
        return self.cp_comm_type in CHOOSES_INNER_SIZE

    def __str__(self) -> str:
        """Return what plans and reports call it: `a2a`, or with the inner size that it chooses `a2a+p2p/8`."""
        return f"{self.cp_comm_type}/{self.inner_cp_size}" if self.chooses_inner_size else self.cp_comm_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one context-parallel group computes in one micro-batch.

    `samples` may be empty: a minimal all-padding sequence with a zero loss mask then keeps the lane in step.

    Attributes:
        inner_cp_size: neighbouring lanes that exchange heads by all-to-all: lanes first_lane + k * inner_cp_size and
            the following are inner group k; lanes with equal index in their inner groups form the outer ring of
            cp_size / inner_cp_size members. Implied by p2p and all_gather (1) and by a2a (cp_size: leave it at 1);
            a2a+p2p chooses a power of two, 1 < inner_cp_size < cp_size.
    """

    first_lane: int
    cp_size: int = 1
    samples: tuple[Sample, ...] = ()
    cp_comm_type: CpCommType = "p2p"
    inner_cp_size: int = 1

    def __post_init__(self) -> None:
        if self.first_lane < 0:  # thousands of buckets are made for a plan: the call would cost more than the check
            _require_at_least(0, first_lane=self.first_lane)
        if not is_power_of_two(self.cp_size):
            raise InvalidInputError(
                f"cp_size {self.cp_size} of the bucket at lane {self.first_lane} is not a power of two: "
                "use 1, 2, 4, ...",
                cp_size=self.cp_size,
                first_lane=self.first_lane,
            )
        if self.cp_comm_type not in CP_COMM_TYPES:
            raise InvalidInputError(
                f"cp_comm_type {self.cp_comm_type!r} is unknown: use one of {', '.join(CP_COMM_TYPES)}",
                cp_comm_type=self.cp_comm_type,
            )
        if _INNER_SIZES[self.cp_comm_type] != "one" or self.inner_cp_size != 1:
            self._set_inner_cp_size()

    def _set_inner_cp_size(self) -> None:
        """Refuse an inner size that the exchange does not have; fill in the one that a2a implies."""
        inner, where = self.inner_cp_size, f"the bucket at lane {self.first_lane}"
        if self.attention.chooses_inner_size:
            if not isinstance(inner, Integral) or not is_power_of_two(inner) or not 1 < inner < self.cp_size:
                raise InvalidInputError(
                    f"inner_cp_size {inner} of {where} ({self.cp_comm_type}, cp_size {self.cp_size}) is not a power "
                    f"of two between 1 and {self.cp_size}: "
                    + (
                        "use 2, 4, ... below cp_size" if self.cp_size > 2 else "use p2p or a2a, they need no inner size"
                    ),
                    inner_cp_size=inner,
                    cp_size=self.cp_size,
                    first_lane=self.first_lane,
                )
            return
        implied = self.cp_size if _INNER_SIZES[self.cp_comm_type] == "all" else 1
        if inner not in (1, implied):
            raise InvalidInputError(
                f"inner_cp_size {inner} of {where} is not {implied}, which {self.cp_comm_type} with cp_size "
                f"{self.cp_size} implies: leave it out, or use a2a+p2p",
                inner_cp_size=inner,
                cp_size=self.cp_size,
                first_lane=self.first_lane,
            )
        object.__setattr__(self, "inner_cp_size", implied)

    @property
    def attention(self) -> Attention:
        """How its lanes compute attention."""
        return Attention(self.cp_comm_type, self.inner_cp_size)

    @property
    def lanes(self) -> range:
        """Lanes of the group."""
        return range(self.first_lane, self.first_lane + self.cp_size)

    @property
    def num_tokens(self) -> int:
        """Unpadded tokens of all samples."""
        return sum(sample.seqlen for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One step of all lanes: buckets in lane order that tile them."""

    buckets: tuple[Bucket, ...]

    def bucket_of_lane(self, lane: int) -> Bucket:
        """Return the bucket that holds `lane`; KeyError when no bucket does."""
        for bucket in self.buckets:
            if lane in bucket.lanes:
                return bucket
        raise KeyError(lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Packing, CP size per bucket and number of micro-batches of one global batch.

    Attributes:
        topology: the ranks that it is for.
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        micro_batches: in the order in which every lane runs them.
        policy: name of the method that made it.
    """

    topology: Topology
    max_tokens_per_rank: int
    micro_batches: tuple[MicroBatch, ...]
    policy: str = "dynamic"

    def __post_init__(self) -> None:
        _require_at_least(1, max_tokens_per_rank=self.max_tokens_per_rank)
        if len(self.policy.split()) != 1:
            raise InvalidInputError(f"policy {self.policy!r} is not one word: the text form of a plan needs that")

    def __repr__(self) -> str:
        return f"<Plan: {self.describe()}, policy {self.policy}>"

    def describe(self) -> str:
        """Return in some words how large it is; `serialize.format_plan` writes all of it."""
        num_samples, sizes = sum(len(bucket.samples) for bucket in self.buckets), " ".join(map(str, self.cp_histogram))
        return (
            f"{counted(num_samples, 'sample')} ({self.num_tokens} tokens) in "
            f"{counted(self.num_microbatches, 'micro-batch')} on {counted(self.topology.num_lanes, 'lane')}, "
            f"CP sizes {sizes or 'none'}"
        )

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, the same on every lane."""
        return len(self.micro_batches)

    @property
    def buckets(self) -> Iterator[Bucket]:
        """All buckets, micro-batch by micro-batch, in lane order."""
        return (bucket for micro_batch in self.micro_batches for bucket in micro_batch.buckets)

    @property
    def samples(self) -> Iterator[Sample]:
        """All samples, in the order of the buckets."""
        return (sample for bucket in self.buckets for sample in bucket.samples)

    @property
    def num_tokens(self) -> int:
        """Unpadded tokens of the global batch."""
        return sum(bucket.num_tokens for bucket in self.buckets)

    @property
    def cp_histogram(self) -> Mapping[int, int]:
        """cp_size -> number of non-empty buckets of that size, ascending."""
        return dict(sorted(Counter(bucket.cp_size for bucket in self.buckets if bucket.samples).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Coefficients of the cost model, read from `dynamic_cp/data/hardware/*.json` (each number has its source there).

    Formulas: `dynamic_cp.cost_model`. All are of one rank; bandwidths are what a rank reaches, not the datasheet's. A
    coefficient whose default is 0 belongs to an optional term: at 0 the term is not priced.

    Attributes:
        linear_flops_per_s, linear_extra_tokens: rate of the GEMMs; a short pack pays for that many tokens more.
        attention_flops_per_s, attention_extra_tokens: causal forward kernel on L tokens; its rate is
            attention_flops_per_s * L / (L + attention_extra_tokens).
        attention_full_*: the same for a tile without a mask; 0 = as causal.
        attention_backward_*, attention_full_backward_*: the same for backward, which has 2.5 times the FLOPs; 0 = as
            long as attention_backward_over_forward says.
        head_flops_per_s: rate of the LM head.
        memory_bandwidth_bytes_per_s: of the device's memory; prices the embedding and the loss.
        collective_bandwidth_in_node_bytes_per_s: bus bandwidth inside a node; prices TP collectives and the gradient
            reduction.
        ring_step_overhead_s_per_layer: kernels and merging of one more ring step, not hidden; twice that backward.
        hbm_bytes: memory of the device; 0 = unknown.
        hbm_reserved_bytes: what context, libraries and fragmentation take of it.
        communicator_bytes_per_group: buffers of one process group.
    """

    name: str
    peak_flops_per_s: float
    linear_flops_per_s: float
    attention_flops_per_s: float
    bandwidth_in_node_bytes_per_s: float
    bandwidth_across_nodes_bytes_per_s: float
    p2p_bandwidth_bytes_per_s: float
    exchange_latency_s_per_layer: float
    forward_overhead_s_per_layer: float
    backward_overhead_s_per_layer: float
    overhead_s_per_bucket_stage: float
    linear_extra_tokens: float = 0.0
    attention_extra_tokens: float = 0.0
    attention_full_flops_per_s: float = 0.0
    attention_full_extra_tokens: float = 0.0
    attention_backward_flops_per_s: float = 0.0
    attention_backward_extra_tokens: float = 0.0
    attention_full_backward_flops_per_s: float = 0.0
    attention_full_backward_extra_tokens: float = 0.0
    linear_backward_over_forward: float = 2.0
    attention_backward_over_forward: float = 2.5
    exchange_backward_over_forward: float = 2.0
    recompute_overhead_credit: float = 0.5
    head_flops_per_s: float = 0.0
    memory_bandwidth_bytes_per_s: float = 0.0
    collective_bandwidth_in_node_bytes_per_s: float = 0.0
    ring_step_overhead_s_per_layer: float = 0.0
    hbm_bytes: float = 0.0
    hbm_reserved_bytes: float = 0.0
    communicator_bytes_per_group: float = 0.0
    source: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in (
            "peak_flops_per_s",
            "linear_flops_per_s",
            "attention_flops_per_s",
            "bandwidth_in_node_bytes_per_s",
            "bandwidth_across_nodes_bytes_per_s",
            "p2p_bandwidth_bytes_per_s",
        ):
            if not getattr(self, name) > 0:
                raise InvalidInputError(
                    f"hardware {self.name!r}: {name} is {getattr(self, name)}, it must be > 0", name=name
                )
        for entry in fields(self):
            if entry.type == "float" and not 0 <= getattr(self, entry.name) < math.inf:
                raise InvalidInputError(
                    f"hardware {self.name!r}: {entry.name} is {getattr(self, entry.name)}, it must be a number >= 0",
                    name=entry.name,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user allows the planner.

    Attributes:
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        min_cp_size, max_cp_size: allowed CP sizes (powers of two); max_cp_size None = the topology's largest.
        static_cp_size: CP size of the static policies (comparison and fallback); divides num_lanes.
        cp_comm_types: exchanges that a bucket with cp_size > 1 may use; the first wins a tie.
        inner_cp_sizes: inner sizes that a2a+p2p may use, powers of two above 1; None = every possible one.
        recompute: activation recomputation of the run.
        bytes_per_element: bytes of one activation (2 for bf16, 4 for fp32).
        search: how long to look for a plan: "fast" (milliseconds) or "thorough" (some ten times as long).
    """

    max_tokens_per_rank: int
    min_cp_size: int = 1
    max_cp_size: int | None = None
    static_cp_size: int | None = None
    cp_comm_types: tuple[CpCommType, ...] = ("p2p",)
    inner_cp_sizes: tuple[int, ...] | None = None
    recompute: Recompute = "none"
    bytes_per_element: int = 2
    search: SearchEffort = "fast"

    def __post_init__(self) -> None:
        _require_at_least(1, max_tokens_per_rank=self.max_tokens_per_rank, bytes_per_element=self.bytes_per_element)
        for name in ("min_cp_size", "max_cp_size"):
            value = getattr(self, name)
            if value is not None and not is_power_of_two(value):
                raise InvalidInputError(
                    f"{name} {value} is not a power of two: use 1, 2, 4, ...", name=name, value=value
                )
        for value in self.inner_cp_sizes or ():
            if not is_power_of_two(value) or value == 1:
                raise InvalidInputError(
                    f"inner_cp_sizes: {value} is not a power of two above 1: use 2, 4, ...", value=value
                )
        if self.recompute not in RECOMPUTE_MODES:
            raise InvalidInputError(f"recompute {self.recompute!r} is unknown: use one of {', '.join(RECOMPUTE_MODES)}")
        if self.search not in SEARCH_EFFORTS:
            raise InvalidInputError(f"search {self.search!r} is unknown: use one of {', '.join(SEARCH_EFFORTS)}")
        if not isinstance(self.cp_comm_types, tuple) or not self.cp_comm_types:
            raise InvalidInputError(
                f"cp_comm_types is {self.cp_comm_types!r}, a tuple with at least 1 exchange is needed: "
                f"use some of {', '.join(CP_COMM_TYPES)}"
            )
        for index, exchange in enumerate(self.cp_comm_types):
            if exchange not in CP_COMM_TYPES or exchange in self.cp_comm_types[:index]:
                what = "unknown" if exchange not in CP_COMM_TYPES else "there twice"
                raise InvalidInputError(
                    f"cp_comm_types: {exchange!r} is {what}: use some of {', '.join(CP_COMM_TYPES)}, each once",
                    cp_comm_type=exchange,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A plan with what is expected of it and why it was chosen.

    Attributes:
        predicted_s: simulated time of one iteration: forward and backward of all micro-batches, and the reduction of
            gradients after them.
        predicted_busy_s: simulated compute seconds of each lane on one pipeline stage.
        reason: one line: which candidate won, against which, by how much.
    """

    plan: Plan
    predicted_s: float
    predicted_busy_s: tuple[float, ...]
    reason: str

    def __repr__(self) -> str:
        return f"<PlannedBatch: predicted {self.predicted_s:.4g} s, {self.plan.describe()}; {self.reason}>"

    @property
    def imbalance(self) -> float:
        """max / mean of the lanes' busy seconds (1 = perfectly even)."""
        mean = sum(self.predicted_busy_s) / len(self.predicted_busy_s)
        return max(self.predicted_busy_s) / mean if mean > 0 else 1.0
