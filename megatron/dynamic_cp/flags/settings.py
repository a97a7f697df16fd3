"""How a run is planned: frozen settings, made once from the checked flags of this trainer or of a Megatron-LM checkout.

Facts that are found later (the token limit of `auto`, exchanges that the layers lack) are arguments here and part of
the `PlanOptions` that are made from the settings; nothing changes a setting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dynamic_cp.pricing.resolution import exchanges_of
from dynamic_cp.types import (
    FP32_STATE,
    NOISE_MARGIN,
    CpCommType,
    PipelineLayers,
    PlanOptions,
    PoolUse,
    Recompute,
    RecomputeModule,
    SearchEffort,
    StateDtypes,
    Topology,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningSettings:
    """What both training loops say of a run to have it planned.

    Attributes:
        topology: arrangement of the job's ranks.
        seq_length: longest sample in tokens.
        policy: "dynamic" or a static one.
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch; None: what its memory holds.
        static_cp_size: CP size of the static policies; min_cp_size, max_cp_size: of the dynamic one, None: the largest.
        cp_comm_type: the exchange inside a CP group, "auto": the planner chooses.
        inner_cp_sizes: that a2a+p2p may use, None: every possible one.
        recompute: activation recomputation; recompute_modules: what of it is selective.
        bytes_per_element: of an activation, follows from the model's precision.
        fp32_residual: the residual stays in float32 where other activations do not.
        distributed_optimizer: its state is sharded over the lanes; state: its dtypes, and those of gradients.
        hardware: name or file for the cost and memory model, None: by the device.
        search: effort of the planner.
        lookahead: global batches that are planned ahead.
        plan_timeout_s: after which a step runs the static plan; is_strict: the run ends instead.
        verify: what ranks compare in each step, of `arguments.VERIFY_MODES`.
        refine_every: iterations between corrections of the cost model, 0: never.
        dump, replay: folders that plans are written to and taken from.
        exchange_timeout_s: of every exchange between ranks.
        has_windows: some layers have a window, which not all exchanges serve.
        auto_places: `auto` may place attention where layers have windows; not where another loop's iterator hands out
            samples, which go to groups of lanes.
        has_latents: the model has multi-latent attention.
        pool: whether servers of all stages may compute attention; noise_margin, ping_pong: as in `PlanOptions`.
        pipeline_layers: layers of every model chunk of every stage, () where all have the same number.
    """

    topology: Topology
    seq_length: int
    policy: str
    max_tokens_per_rank: int | None
    static_cp_size: int
    min_cp_size: int
    max_cp_size: int | None
    cp_comm_type: CpCommType | Literal["auto"]
    inner_cp_sizes: tuple[int, ...] | None
    recompute: Recompute
    recompute_modules: tuple[RecomputeModule, ...]
    bytes_per_element: int
    distributed_optimizer: bool
    hardware: str | None
    search: SearchEffort
    lookahead: int
    plan_timeout_s: float
    is_strict: bool
    verify: str
    refine_every: int
    dump: str | None
    replay: str | None
    exchange_timeout_s: float
    has_windows: bool = False
    auto_places: bool = True
    has_latents: bool = False
    pipeline_layers: PipelineLayers = ()
    fp32_residual: bool = False
    state: StateDtypes = FP32_STATE
    pool: PoolUse = "off"
    noise_margin: float = NOISE_MARGIN
    ping_pong: bool = True

    @property
    def exchanges(self) -> tuple[CpCommType, ...]:
        """The exchanges that --cp-comm-type allows where samples have the mask of the model's layers; `auto` those that
        serve layers with windows, where there are any.
        """
        return self._allowed(has_masks=False)

    @property
    def recomputes_norms(self) -> bool:
        """Whether --recompute-modules has layernorm."""
        return self.recompute == "selective" and "layernorm" in self.recompute_modules

    def _allowed(self, *, has_masks: bool, left_out: tuple[CpCommType, ...] = ()) -> tuple[CpCommType, ...]:
        return exchanges_of(
            self.cp_comm_type,
            has_windows=self.has_windows,
            has_masks=has_masks,
            has_latents=self.has_latents,
            may_be_placed=self.auto_places,
            left_out=left_out,
        )

    def options(
        self,
        max_tokens_per_rank: int | None = None,
        left_out: tuple[CpCommType, ...] = (),
        *,
        has_masks: bool = False,
    ) -> PlanOptions:
        """Return what the planner may do.

        Args:
            max_tokens_per_rank: the limit where the settings leave it to memory.
            left_out: exchanges that `auto` does not choose from, see `LayerChoice`.
            has_masks: whether samples bring masks of their own.
        """
        limit = self.max_tokens_per_rank if max_tokens_per_rank is None else max_tokens_per_rank
        assert limit is not None, "found once memory is known"
        return PlanOptions(
            max_tokens_per_rank=limit,
            min_cp_size=self.min_cp_size,
            max_cp_size=self.max_cp_size,
            static_cp_size=self.static_cp_size,
            cp_comm_types=self._allowed(has_masks=has_masks, left_out=left_out),
            inner_cp_sizes=self.inner_cp_sizes,
            recompute=self.recompute,
            recompute_modules=self.recompute_modules,
            bytes_per_element=self.bytes_per_element,
            fp32_residual=self.fp32_residual,
            state=self.state,
            search=self.search,
            pool=self.pool,
            noise_margin=self.noise_margin,
            ping_pong=self.ping_pong,
        )

    def used(self, options: PlanOptions) -> PlanOptions:
        """Return `options` with the CP sizes that plans of this run have: of a static policy only its own."""
        if self.policy == "dynamic":
            return options
        return replace(options, min_cp_size=self.static_cp_size, max_cp_size=self.static_cp_size)

    def completed_flags(self) -> dict[str, Any]:
        """Return those flags, under their names, that were filled in or checked when the settings were made."""
        return {
            "context_parallel_size": self.static_cp_size,
            "max_seqlen_per_dp_cp_rank": "auto" if self.max_tokens_per_rank is None else self.max_tokens_per_rank,
            "max_dynamic_cp_size": self.max_cp_size,
            "dynamic_cp_inner_sizes": self.inner_cp_sizes,
            "cp_comm_type": self.cp_comm_type,
            "ranks_per_node": self.topology.ranks_per_node,
        }
