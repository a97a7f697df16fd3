"""What a global batch is planned for, and what the user allows the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, get_args

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types.attention import AUTO, AUTO_ALONE, TRAITS, CpCommType, check_latents, exchanges_of
from dynamic_cp.types.counts import is_power_of_two, require_at_least
from dynamic_cp.types.data_parallel import SHARDED, DataParallel
from dynamic_cp.types.hardware import Hardware
from dynamic_cp.types.model import ModelShape
from dynamic_cp.types.plan import Sample
from dynamic_cp.types.topology import Topology

Recompute = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[str, ...] = get_args(Recompute)
RecomputeModule = Literal["core_attn", "mlp", "layernorm", "moe", "gdn_norm_out", "moe_act", "mla_up_proj"]
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
"""What selective recomputation may repeat in backward, in this order: attention with its exchange, the MLP of dense
layers, both norms of a layer, router and experts with their exchange, gate and output norm of a gated delta net, the
activation function of experts, and the up-projections of latent attention. The last two are priced; the trainer has
neither."""
RecomputeMethod = Literal["uniform", "block"]
RECOMPUTE_METHODS: tuple[str, ...] = get_args(RecomputeMethod)

SearchEffort = Literal["fast", "thorough", "exact"]
SEARCH_EFFORTS: tuple[str, ...] = get_args(SearchEffort)

StateExchangeUse = Literal["auto", "heads", "states"]
STATE_EXCHANGE_USES: tuple[str, ...] = get_args(StateExchangeUse)

PoolUse = Literal["off", "auto", "always"]
POOL_USES: tuple[str, ...] = get_args(PoolUse)

STATIC_POLICIES = ("static", "balanced")
"""Policies with one CP size for all samples."""
POOL_POLICIES: Mapping[str, PoolUse] = {"pool": "always", "with-pool": "auto"}
"""Policies in which servers of all stages may compute attention -> the dynamic policy's use of the pool."""

AUTO_CHUNK_TOKENS = 1024
"""Tokens of a loss chunk with --loss-chunk-tokens auto, times tp_size: 1.25 GB in bf16 for 152k words, and the head's
products are as fast as with larger chunks. An estimate."""

NOISE_MARGIN = 0.04
"""Share by which ticks last longer than planned: for a barrier of 64 servers in every layer at 2% jitter; plans without
such a barrier pay 0.8% (`python -m benchmarks.disaggregated --only noise`)."""


class ElementBytes(NamedTuple):
    """Bytes of an element of each kind of tensor.

    Attributes:
        activation: what layers keep, and send between TP ranks.
        residual: what goes from layer to layer, and to the next stage.
        exchanged: queries, keys, values and outputs that lanes of a CP group send each other.
        weight: parameters; gradients and optimizer state have their own constants.
    """

    activation: int
    residual: int
    exchanged: int
    weight: int


class RecomputedLayers(NamedTuple):
    """Which layers full recomputation computes again; Megatron's --recompute-method and --recompute-num-layers.

    Attributes:
        method: "uniform", all layers, in units of num_layers that are computed again at once; "block", the first
            num_layers of every model chunk, one by one, and the others keep their activations.
        num_layers: at least 1.
    """

    method: RecomputeMethod = "uniform"
    num_layers: int = 1

    def share_of(self, chunks: Sequence[float]) -> float:
        """Return the share of the layers of `chunks` that is computed again."""
        if self.method == "uniform" or not sum(chunks):
            return 1.0
        return sum(min(self.num_layers, layers) for layers in chunks) / sum(chunks)

    def check(self, chunks: Sequence[float]) -> None:
        """Refuse more layers than the largest of these model chunks has, and units that do not divide one of them."""
        number, largest = self.num_layers, max(chunks)
        if number > max(1, largest):
            raise InvalidInputError(
                f"--recompute-num-layers {number} is more than the {largest:g} layers of a model chunk: "
                f"give at most {int(largest)}"
            )
        uneven = [layers for layers in sorted(set(chunks)) if layers % number]
        if self.method == "uniform" and number > 1 and uneven:
            raise InvalidInputError(
                f"the layers of a model chunk, {uneven[0]:g} is not a multiple of --recompute-num-layers {number}: "
                "change one of them"
            )


EVERY_LAYER = RecomputedLayers()
"""All layers, one by one: the default of full recomputation."""


def _require_known(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidInputError(f"{name} {value!r} is unknown: use one of {', '.join(known)}")


def chunk_tokens(given: int | str, tp_size: int) -> int:
    """Return the tokens of a chunk of the loss that --loss-chunk-tokens gives, 0: of all tokens at once."""
    if isinstance(given, str):  # auto
        return AUTO_CHUNK_TOKENS * tp_size
    if given < 0:
        raise InvalidInputError(
            f"--loss-chunk-tokens is {given}, it must be at least 0: give tokens or auto, or leave it out"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user allows the planner.

    Attributes:
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        min_cp_size, max_cp_size: allowed CP sizes (powers of two); max_cp_size None: the topology's largest.
        static_cp_size: CP size of the static policies (comparison and fallback); divides num_lanes.
        cp_comm_types: exchanges that a bucket with cp_size > 1 may use; the first wins a tie. ("auto",): a `Problem`
            puts those of --cp-comm-type auto in its place.
        inner_cp_sizes: inner sizes that a2a+p2p and blocks may use, powers of two above 1; None: see `Sharing.of`.
        recompute_modules, recompute_layers: what selective, and in which layers full recomputation repeats.
        loss_chunk_tokens: tokens whose logits exist at once, which backward computes again; 0: all, kept for backward.
        tp_comm_overlap: TP collectives overlap with GEMMs (--tp-comm-overlap), in buffers of one shape.
        bytes_per_element: bytes of an activation or a weight (2 for bf16, 4 for fp32); by kind: `element_bytes`.
        fp32_residual: the residual takes 4 bytes whatever the others take.
        fp8: products of layers are in FP8 (--fp8-format); fp8_param: so are their weights (--fp8-param-gather), of
            which otherwise a copy in FP8 is kept as well.
        search: how long to look for a plan: "fast" (milliseconds), "thorough" (some ten times as long), or "exact": the
            dynamic policy searches until its plan is proven the fastest, possible for tiny batches only.
        pool: whether servers of all stages may compute attention in ticks: never, if faster in simulation ("auto"), or
            always; only in the dynamic policy.
        state_exchange: how lanes may share layers with linear attention: "heads" in all buckets of several lanes,
            "states" in those whose states fit under the limit, or "auto", whatever is faster in each bucket.
        noise_margin: share by which ticks last longer than planned, >= 0.
        ping_pong: layers of a pool run in two nano-batches, of which one computes while the other travels.
    """

    max_tokens_per_rank: int
    min_cp_size: int = 1
    max_cp_size: int | None = None
    static_cp_size: int | None = None
    cp_comm_types: tuple[CpCommType, ...] = AUTO_ALONE
    inner_cp_sizes: tuple[int, ...] | None = None
    recompute: Recompute = "none"
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    recompute_layers: RecomputedLayers = EVERY_LAYER
    loss_chunk_tokens: int = 0
    tp_comm_overlap: bool = False
    bytes_per_element: int = 2
    fp32_residual: bool = False
    fp8: bool = False
    fp8_param: bool = False
    search: SearchEffort = "fast"
    pool: PoolUse = "off"
    noise_margin: float = NOISE_MARGIN
    ping_pong: bool = True
    state_exchange: StateExchangeUse = "auto"

    def __post_init__(self) -> None:
        require_at_least(1, max_tokens_per_rank=self.max_tokens_per_rank, bytes_per_element=self.bytes_per_element)
        require_at_least(0, loss_chunk_tokens=self.loss_chunk_tokens)
        for name in ("min_cp_size", "max_cp_size"):
            value = getattr(self, name)
            if value is not None and not is_power_of_two(value):
                raise InvalidInputError(f"{name} {value} is not a power of two: use 1, 2, 4, ...")
        for value in self.inner_cp_sizes or ():
            if not is_power_of_two(value) or value == 1:
                raise InvalidInputError(f"inner_cp_sizes: {value} is not a power of two above 1: use 2, 4, ...")
        self._check_recompute()
        _require_known("search", self.search, SEARCH_EFFORTS)
        _require_known("pool", self.pool, POOL_USES)
        _require_known("state_exchange", self.state_exchange, STATE_EXCHANGE_USES)
        if self.search == "exact" and self.pool != "off":
            raise UnsupportedFeatureError(
                f"search exact proves no plans with a pool, and pool is {self.pool!r}: leave the pool out "
                "(--dynamic-cp-pool off), or use search thorough"
            )
        if not self.noise_margin >= 0:
            raise InvalidInputError(
                f"noise_margin is {self.noise_margin}, at least 0 is needed: give a share such as {NOISE_MARGIN}"
            )
        if not isinstance(self.cp_comm_types, tuple) or not self.cp_comm_types:
            raise InvalidInputError(
                f"cp_comm_types is {self.cp_comm_types!r}, a tuple with at least 1 exchange is needed: "
                f"use some of {', '.join(TRAITS)}"
            )
        for index, exchange in enumerate(self.cp_comm_types if self.cp_comm_types != AUTO_ALONE else ()):
            if exchange not in TRAITS or exchange in self.cp_comm_types[:index]:
                what = "unknown" if exchange not in TRAITS else "there twice"
                raise InvalidInputError(
                    f"cp_comm_types: {exchange!r} is {what}: use {AUTO}, or some of {', '.join(TRAITS)}, each once"
                )

    def largest_cp_size(self, topology: Topology) -> int:
        """Return the largest CP size that a bucket may have."""
        return min(self.max_cp_size or topology.max_cp_size, topology.max_cp_size)

    def _check_recompute(self) -> None:
        _require_known("recompute", self.recompute, RECOMPUTE_MODES)
        if unknown := [name for name in self.recompute_modules if name not in RECOMPUTE_MODULES]:
            raise InvalidInputError(
                f"recompute_modules: {unknown[0]!r} is unknown: use some of {', '.join(RECOMPUTE_MODULES)}"
            )
        method, number = self.recompute_layers
        _require_known("recompute method", method, RECOMPUTE_METHODS)
        require_at_least(1, recompute_num_layers=number)
        if self.recompute_layers == EVERY_LAYER:
            return
        if self.recompute != "full":
            raise InvalidInputError(
                f"--recompute-method {method} --recompute-num-layers {number} says which layers full recomputation "
                f"repeats, it is {self.recompute}: use full recomputation, or leave them out"
            )
        if self.pool != "off":
            raise UnsupportedFeatureError(
                f"in a pool all ranks recompute layer by layer, it is --recompute-method {method} "
                f"--recompute-num-layers {number}: use uniform and 1, or leave the pool out"
            )

    @property
    def recomputes_all(self) -> bool:
        """Whether every layer is computed again."""
        return self.recompute == "full" and self.recompute_layers.method == "uniform"

    @property
    def repeated(self) -> frozenset[RecomputeModule]:
        """Modules that backward computes again; with "block" only in the first layers of each model chunk."""
        if self.recompute == "full":
            return frozenset(RECOMPUTE_MODULES)
        return frozenset(self.recompute_modules) if self.recompute == "selective" else frozenset()

    @property
    def element_bytes(self) -> ElementBytes:
        """Bytes of an element of each kind of tensor."""
        residual = 4 if self.fp32_residual else self.bytes_per_element
        return ElementBytes(
            activation=self.bytes_per_element,
            residual=residual,
            exchanged=self.bytes_per_element,
            weight=self.bytes_per_element,
        )


def allowed_exchanges(
    wanted: str,
    model: ModelShape,
    *,
    has_masks: bool = False,
    may_be_placed: bool = True,
    state_exchange: StateExchangeUse = "auto",
) -> tuple[CpCommType, ...]:
    """Return `exchanges_of` for `model`.

    Args:
        state_exchange: as of `PlanOptions`: with "heads" nothing is placed beside linear attention.

    Raises:
        UnsupportedFeatureError: an exchange of latents, which the model does not have.
    """
    names = exchanges_of(
        wanted,
        has_windows=model.window is not None,
        has_masks=has_masks,
        has_latents=model.has_latents,
        may_be_placed=may_be_placed and (model.linear_attention is None or state_exchange != "heads"),
    )
    check_latents(names, model.kv_lora_rank)
    return names


def with_exchanges(options: PlanOptions, model: ModelShape, samples: Iterable[Sample] = ()) -> PlanOptions:
    """Return `options` with the mechanisms of `auto` for `model` and these samples, if no mechanism is named."""
    if options.cp_comm_types != AUTO_ALONE:
        return options
    has_masks = any(sample.mask is not None for sample in samples)
    names = allowed_exchanges(AUTO, model, has_masks=has_masks, state_exchange=options.state_exchange)
    return replace(options, cp_comm_types=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a plan depends on besides the samples; arguments of `search.plan_global_batch`.

    Attributes:
        options: AUTO_ALONE is replaced by the mechanisms of `auto` for a batch without masks; `plan_global_batch` and
            `compare_policies` ask the samples first.
        data_parallel: only plans with a pool, which are planned by memory, depend on it; others take its seconds.
    """

    topology: Topology
    model: ModelShape
    hardware: Hardware
    options: PlanOptions
    policy: str = "dynamic"
    data_parallel: DataParallel = SHARDED

    def __post_init__(self) -> None:
        topology = self.topology
        object.__setattr__(self, "options", with_exchanges(self.options, self.model))
        self.data_parallel.state.check_weights(self.options.element_bytes.weight)
        reason = self.model.why_no_expert_split(ep_size=topology.ep_size, tp_size=topology.tp_size)
        if reason is not None:
            raise InvalidInputError(
                f"{reason}: use an ep_size (--expert-model-parallel-size) that divides the experts of the model"
            )
        self._check_recomputed_layers()
        if self.options.pool != "off" and self.model.linear_attention is not None:
            raise UnsupportedFeatureError(
                f"a pool of attention servers does not know layers with linear attention, and pool is "
                f"{self.options.pool!r}: leave the pool out (--dynamic-cp-pool off)"
            )

    @property
    def rates(self) -> Hardware:
        """The hardware at the precision of products."""
        return self.hardware.in_fp8() if self.options.fp8 else self.hardware

    @property
    def linear_backward_over_forward(self) -> float:
        """Backward over forward seconds of a matrix product: half of backward is the weights' gradient, which frozen
        weights lack. Limit: products of adapters themselves are not counted."""
        return self.hardware.linear_backward_over_forward / (1 if self.data_parallel.adapters is None else 2)

    def recomputed_share(self, stages: Iterable[int] | None = None) -> float:
        """Return the share of the layers of some pipeline stages (None: of all) in which backward repeats something."""
        if self.options.recompute_layers == EVERY_LAYER:
            return 1.0
        chunks = self.model.chunks(self.topology.pp_size, self.topology.vp_size)
        chosen = chunks if stages is None else [chunks[stage] for stage in stages]
        return self.options.recompute_layers.share_of([*chain.from_iterable(chosen)])

    def _check_recomputed_layers(self) -> None:
        layers, topology = self.options.recompute_layers, self.topology
        if layers == EVERY_LAYER:
            return
        if self.model.mtp_num_layers:
            raise UnsupportedFeatureError(
                f"--recompute-method {layers.method} --recompute-num-layers {layers.num_layers} does not go with "
                "multi-token prediction, whose modules megatron-core recomputes one at a time only: use uniform and 1"
            )
        layers.check([*chain.from_iterable(self.model.chunks(topology.pp_size, topology.vp_size))])
