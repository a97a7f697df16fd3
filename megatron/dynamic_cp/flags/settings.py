"""How a run is planned: frozen settings, made once from the checked flags of this trainer or of a Megatron-LM checkout.

Facts that are found later (the token limit of `auto`, exchanges that the layers lack) are arguments of `options`;
nothing changes a setting.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dynamic_cp.models import catalog
from dynamic_cp.models.table import NOT_NEGATIVE, POSITIVE, flag
from dynamic_cp.types import (
    AUTO_CHUNK_TOKENS,
    CHOICES,
    NOISE_MARGIN,
    POOL_USES,
    SEARCH_EFFORTS,
    STATE_EXCHANGE_USES,
    STATIC_POLICIES,
    CpCommType,
    DataParallel,
    PipelineLayers,
    PlanOptions,
    PoolUse,
    Recompute,
    RecomputedLayers,
    RecomputeModule,
    SearchEffort,
    StateExchangeUse,
    Topology,
    exchanges_of,
)

VERIFY_MODES = ("digest", "full", "off")


def tokens_or_auto(text: str) -> int | str:
    """Return a number of tokens or "auto"; an argparse type."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor 'auto'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSettings:
    """What both training loops say of a run to have it planned; flags are explained by their help.

    Attributes:
        seq_length: longest sample in tokens.
        recompute: activation recomputation, with its modules if selective and its layers if full.
        bytes_per_element: of an activation.
        fp32_residual: the residual stays in float32 where other activations do not; fp8: products of layers are in FP8.
        exchange_timeout_s: of every exchange between ranks.
        has_windows, has_latents: some layers have a window, which not all exchanges serve, or multi-latent attention.
        auto_places: `auto` may place attention where layers have windows; not with another loop's iterator, whose
            samples go to groups of lanes.
        pipeline_layers: layers of every model chunk of every stage, () where all have the same number.
        max_tokens_per_rank, inner_cp_sizes: None: what its memory holds; every possible one.
    """

    topology: Topology
    seq_length: int
    recompute: Recompute
    recompute_modules: tuple[RecomputeModule, ...]
    recompute_layers: RecomputedLayers
    bytes_per_element: int
    fp32_residual: bool
    fp8: bool
    data_parallel: DataParallel
    exchange_timeout_s: float
    has_windows: bool
    auto_places: bool
    has_latents: bool
    pipeline_layers: PipelineLayers
    dynamic_cp: bool = flag(
        "choose a CP size for every bucket of every micro-batch, from its samples; without this flag it is always "
        "--context-parallel-size",
        name="--dynamic-cp --dynamic-context-parallel",
    )
    static_cp_size: int = flag(
        "CP size without --dynamic-cp, and of the static plan that --dynamic-cp falls back to; must divide world "
        "size / (TP * PP)",
        1,
        name="--context-parallel-size",
        within=POSITIVE,
        metavar="C",
    )
    static_cp_policy: str = flag(
        "packing without --dynamic-cp: static fills packs in sample order and never returns to an earlier one, as "
        "Megatron's dp_balanced does (next-fit); balanced spreads the work by the cost model",
        STATIC_POLICIES[0],
        choices=STATIC_POLICIES,
    )
    max_tokens_per_rank: int | None = flag(
        "most padded tokens of a rank in one micro-batch; auto: as many as fit in the memory that "
        "--dynamic-cp-hardware states, with samples of --seq-length (the CPU hardware file states none); default: "
        "what --seq-length needs at --context-parallel-size. A limit that does not fit in memory is refused",
        name="--max-seqlen-per-dp-cp-rank",
        parse=tokens_or_auto,
        metavar="N|auto",
    )
    min_cp_size: int = flag(
        "smallest CP size (1, 2, 4, ...)", 1, name="--min-dynamic-cp-size", within=POSITIVE, metavar="CP"
    )
    max_cp_size: int | None = flag(
        "largest CP size; default: the largest the job allows",
        name="--max-dynamic-cp-size",
        within=POSITIVE,
        metavar="CP",
    )
    loss_chunk_tokens: int = flag(
        "LM head and loss over chunks of this many tokens, which backward computes again, instead of keeping the "
        f"logits of a whole micro-batch; auto: {AUTO_CHUNK_TOKENS} times TP; 0: all tokens at once",
        0,
        parse=tokens_or_auto,
        metavar="N|auto",
    )
    hardware: str | None = flag(
        f"hardware of the cost and memory model: {', '.join(catalog.hardware_names())} or a file like those; default: "
        "on CPU ranks cpu, otherwise h100, with local layers h100-local",
        name="--dynamic-cp-hardware",
        metavar="NAME|FILE",
    )
    search: SearchEffort = flag(
        "effort of the planner: fast takes milliseconds; thorough takes about ten times as long, for better plans of "
        "a pipeline; exact proves each plan the fastest, of tiny batches only, and needs pulp and highspy",
        "fast",
        name="--dynamic-cp-search",
        choices=SEARCH_EFFORTS,
    )
    lookahead: int = flag(
        "plan K global batches ahead, in the planner process beside rank 0; with 0 each step waits for its plan",
        2,
        name="--dynamic-cp-lookahead",
        within=NOT_NEGATIVE,
        metavar="K",
    )
    plan_timeout_s: float = flag(
        "seconds to wait for a plan; then the step runs the static plan (CP size --context-parallel-size, or the "
        "smallest that holds --seq-length), with a warning",
        300.0,
        name="--dynamic-cp-plan-timeout",
        within=POSITIVE,
        metavar="S",
    )
    is_strict: bool = flag(
        "end the run if the planner fails or takes too long, instead of running the static plan",
        name="--dynamic-cp-strict",
    )
    refine_every: int = flag(
        "correct the cost model every N iterations, from the measured times of buckets (bounded, logged, saved); 0: "
        "never",
        0,
        name="--dynamic-cp-refine",
        within=NOT_NEGATIVE,
        metavar="N",
    )
    dump: str | None = flag(
        "write every plan and every iteration to DIR; `dynamic-cp report --run DIR` shows them",
        name="--dynamic-cp-dump",
        metavar="DIR",
    )
    replay: str | None = flag(
        "take the plans from a dump instead of planning: the run repeats the recorded one bit for bit",
        name="--dynamic-cp-replay",
        metavar="DIR",
    )
    verify: str = flag(
        "digest: compare the plan's digest over all ranks in each step; full: also judge the whole plan and the "
        "messages of the pipeline on every rank, and follow each token from its sample to its shard; off: neither",
        "digest",
        name="--dynamic-cp-verify",
        choices=VERIFY_MODES,
    )
    cp_comm_type: CpCommType | Literal["auto"] = flag(
        "exchange inside a CP group: p2p is a ring; a2a an all-to-all of heads; all_gather one all-gather of keys "
        "and values; a2a+p2p an all-to-all inside a node and a ring across nodes; latent: a ring of the latents of "
        "multi-latent attention, which each lane projects up; blocks: each tile of attention on a lane of its own "
        "choice; auto: the planner chooses for every bucket, among those that the attention of this run has, blocks "
        "only where samples bring masks or layers have windows; p2p alone needs the fewest communicators",
        "auto",
        choices=CHOICES,
    )
    state_exchange: StateExchangeUse = flag(
        "how lanes share layers of linear attention: heads by an all-to-all each way, or states passed between the "
        "chunks of a sample, where these fit under the token limit; auto: for every bucket what is faster",
        STATE_EXCHANGE_USES[0],
        name="--dynamic-cp-state-exchange",
        choices=STATE_EXCHANGE_USES,
    )
    inner_cp_sizes: tuple[int, ...] | None = flag(
        "lanes inside a node that exchange heads in a2a+p2p and blocks: groups are built for these sizes only; "
        "default: all powers of two that divide the lanes of a node and the query heads of a tensor-parallel rank, "
        "of which a2a+p2p beside other exchanges has the largest alone where a rank would make more than 10 groups",
        name="--dynamic-cp-inner-sizes",
        metavar="N",
    )
    pool: PoolUse = flag(
        "with a pipeline: servers of all stages compute attention, in ticks in which all stages go forward or all go "
        "back; auto: in global batches in which that is faster by simulation; always: in all of them. Off by "
        "default: it has not run on a GPU",
        "off",
        name="--dynamic-cp-pool",
        choices=POOL_USES,
    )
    noise_margin: float = flag(
        "by which ticks of a pool last longer than planned, because every layer waits for the slowest server",
        NOISE_MARGIN,
        name="--dynamic-cp-noise-margin",
        within=NOT_NEGATIVE,
        metavar="SHARE",
    )
    ping_pong: bool = flag(
        "in ticks of a pool layers run in two nano-batches of a rank's tokens: one computes while what attention needs "
        "of the other travels; without it every layer waits for its exchange",
        True,
        name="--dynamic-cp-ping-pong",
    )

    @property
    def policy(self) -> str:
        """The packing policy, "dynamic" or a static one."""
        return "dynamic" if self.dynamic_cp else self.static_cp_policy

    @property
    def exchanges(self) -> tuple[CpCommType, ...]:
        """The exchanges that --cp-comm-type allows for samples without masks; `auto`: those that serve all layers."""
        return self._allowed(has_masks=False)

    @property
    def recomputes_norms(self) -> bool:
        return self.recompute == "selective" and "layernorm" in self.recompute_modules

    def _allowed(self, *, has_masks: bool, left_out: tuple[CpCommType, ...] = ()) -> tuple[CpCommType, ...]:
        return exchanges_of(
            self.cp_comm_type,
            has_windows=self.has_windows,
            has_masks=has_masks,
            has_latents=self.has_latents,
            may_be_placed=self.auto_places and self.state_exchange != "heads",  # states follow homes
            left_out=left_out,
        )

    def options(
        self, max_tokens_per_rank: int | None = None, left_out: tuple[CpCommType, ...] = (), *, has_masks: bool = False
    ) -> PlanOptions:
        """Return what the planner may do; a given `max_tokens_per_rank` replaces the settings' limit. `left_out` are
        exchanges that `auto` does not choose from (`LayerChoice`); `has_masks`: samples bring masks."""
        limit = self.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        assert limit is not None, "found once memory is known"
        # Options take the values of settings that have the same name.
        names = {field.name for field in fields(PlanOptions)} & {field.name for field in fields(self)}
        alike: dict[str, Any] = {name: getattr(self, name) for name in names - {"max_tokens_per_rank"}}
        exchanges = self._allowed(has_masks=has_masks, left_out=left_out)
        return PlanOptions(max_tokens_per_rank=limit, cp_comm_types=exchanges, **alike)

    @property
    def largest_cp_size(self) -> int:
        """As of `PlanOptions`, without the inner sizes, which are checked against it later."""
        return replace(self, inner_cp_sizes=None).options(1).largest_cp_size(self.topology)

    def used(self, options: PlanOptions) -> PlanOptions:
        """Return `options` with the CP sizes that plans of this run have: of a static policy only its own."""
        if self.policy == "dynamic":
            return options
        return replace(options, min_cp_size=self.static_cp_size, max_cp_size=self.static_cp_size)

    def completed_flags(self) -> dict[str, Any]:
        """Return the flags, by name, that were filled in or checked when the settings were made."""
        return {
            "context_parallel_size": self.static_cp_size,
            "max_seqlen_per_dp_cp_rank": "auto" if self.max_tokens_per_rank is None else self.max_tokens_per_rank,
            "max_dynamic_cp_size": self.max_cp_size,
            "loss_chunk_tokens": self.loss_chunk_tokens,
            "dynamic_cp_inner_sizes": self.inner_cp_sizes,
            "cp_comm_type": self.cp_comm_type,
            "ranks_per_node": self.topology.ranks_per_node,
        }
