"""What a global batch is planned for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types.attention import AUTO, AUTO_ALONE, CpCommType, check_latents, exchanges_of
from dynamic_cp.types.data_parallel import SHARDED, DataParallel
from dynamic_cp.types.hardware import Hardware
from dynamic_cp.types.model import ModelShape
from dynamic_cp.types.options import EVERY_LAYER, PlanOptions, StateExchangeUse
from dynamic_cp.types.plan import Sample
from dynamic_cp.types.topology import Topology


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
    """Return `options` with the mechanisms of `auto` for `model` and these samples, where they leave it at that."""
    if options.cp_comm_types != AUTO_ALONE:
        return options
    has_masks = any(sample.mask is not None for sample in samples)
    names = allowed_exchanges(AUTO, model, has_masks=has_masks, state_exchange=options.state_exchange)
    return replace(options, cp_comm_types=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a plan depends on besides the samples; arguments of `search.plan_global_batch`.

    Attributes:
        options: with the mechanisms of `auto` for a batch without masks, where they were left open; `plan_global_batch`
            and `compare_policies` ask the samples first.
        data_parallel: of it plans with a pool follow, which are planned by memory; others have their seconds of it.
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
                f"{reason}: use an ep_size (--expert-model-parallel-size) that divides the experts of the model",
                ep_size=topology.ep_size,
                tp_size=topology.tp_size,
            )
        self._check_recomputed_layers()
        if self.options.pool != "off" and self.model.linear_attention is not None:
            raise UnsupportedFeatureError(
                f"a pool of attention servers does not know layers with linear attention, and pool is "
                f"{self.options.pool!r}: leave the pool out (--dynamic-cp-pool off)",
                pool=self.options.pool,
            )

    @property
    def linear_backward_over_forward(self) -> float:
        """Seconds of a matrix product's backward pass over its forward pass: half of it is the weights' gradient, which
        frozen weights have none of. Limits: products of adapters themselves are not counted.
        """
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
