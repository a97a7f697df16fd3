"""One way to lay out and plan a job: what a sweep tries, what a comparison judges, what a launch line says.
What a sweep tries by default is here, too, for its search and its --help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from dynamic_cp.decide.stage_splits import in_words
from dynamic_cp.types import (
    CP_COMM_TYPES,
    EVERY_LAYER,
    POOL_POLICIES,
    RECOMPUTE_MODES,
    RING_ALONE,
    STATIC_POLICIES,
    CpCommType,
    PipelineLayers,
    PlanOptions,
    Recompute,
    RecomputedLayers,
    SearchEffort,
    Topology,
)

TpOverlap = Literal["none", "static", "all"]
TP_OVERLAPS: tuple[str, ...] = get_args(TpOverlap)
"""Jobs whose TP collectives overlap with GEMMs. Userbuffers have one shape: a static job can pad each pack to it, which
is priced as free, so "static" gives a baseline the most it can gain; dynamic CP has no such shape."""

MAX_VP_SIZE = 5
"""Most model chunks per pipeline stage, where chunks are whole layers; more gain little and take longer to plan."""

LIMIT_DIVISORS = (1, 2, 4)
"""Token limits per rank: what memory holds, divided by these; lower limits leave memory free."""

RECOMPUTED = (*RECOMPUTE_MODES, "block")
"""What backward may recompute: a mode, or the first layers of every model chunk, as few as memory asks for."""

EXCHANGES: tuple[tuple[CpCommType, ...], ...] = (CP_COMM_TYPES, RING_ALONE)
"""All exchanges that suit a model without windows and latents; or the ring alone, with fewer communicators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Policy, layout and limits of a job.

    Attributes:
        max_tokens_per_rank: limit of padded tokens of a rank in one micro-batch.
        static_cp_size: CP size of a static policy, or of static plans in another; None: the least for all samples.
        max_cp_size: largest CP size of the other policies; None: the largest of the topology.
        pipeline_layers: stage -> model chunk -> layers; (): the same number everywhere.
        loss_chunk_tokens: tokens whose logits exist at once; 0: all.
    """

    policy: str
    topology: Topology
    recompute: Recompute
    max_tokens_per_rank: int
    cp_comm_types: tuple[CpCommType, ...]
    static_cp_size: int | None = None
    max_cp_size: int | None = None
    pipeline_layers: PipelineLayers = ()
    recompute_layers: RecomputedLayers = EVERY_LAYER
    loss_chunk_tokens: int = 0

    @property
    def is_static(self) -> bool:
        """Whether all samples have one CP size."""
        return self.policy in STATIC_POLICIES

    @property
    def has_pool(self) -> bool:
        """Whether servers of all stages may compute attention."""
        return self.policy in POOL_POLICIES

    @property
    def cp_comm_type(self) -> str:
        """--cp-comm-type: the exchange, or auto if there are several."""
        return "auto" if len(self.cp_comm_types) > 1 else self.cp_comm_types[0]

    @property
    def name(self) -> str:
        """The policy, with its CP size if that is static: what tables and pictures call it."""
        return f"{self.policy} CP {self.static_cp_size}" if self.is_static and self.static_cp_size else self.policy

    @property
    def split(self) -> list[str]:
        """Sizes above 1 that split the model, as `TP 2`; with unlike stages their layers, as `PP 2 (31+30 layers)`."""
        topology = self.topology
        unlike = f" ({in_words(self.pipeline_layers)})" if self.pipeline_layers else ""
        sizes = [("TP", topology.tp_size, ""), ("PP", topology.pp_size, unlike)]
        sizes += [("VPP", topology.vp_size, ""), ("EP", topology.ep_size, "")]
        return [f"{name} {size}{more}" for name, size, more in sizes if size > 1]

    @property
    def recomputed(self) -> str:
        """What backward repeats: none, selective, full, or the first layers of every model chunk, such as `block 3`."""
        return self.recompute if self.recompute_layers == EVERY_LAYER else " ".join(map(str, self.recompute_layers))

    @property
    def layout(self) -> str:
        """Layout in words, such as `TP 2, PP 4, VPP 2, 8 lanes, full recomputation`."""
        topology = self.topology
        words = ["TP 1"] * (topology.tp_size == 1) + self.split
        words[1:1] = ["PP 1"] * (topology.pp_size == 1)
        words.append(f"{topology.num_lanes} lane{'' if topology.num_lanes == 1 else 's'}")
        words += [f"{self.recomputed} recomputation"] * (self.recompute != "none")
        words += [f"losses over {self.loss_chunk_tokens} tokens"] * (self.loss_chunk_tokens > 0)
        return ", ".join(words)

    @property
    def words(self) -> str:
        """All of it but the policy, such as `TP 2, 8 lanes, limit 16384, exchange auto, CP up to 4`."""
        largest = f", CP up to {self.max_cp_size}" if self.max_cp_size else ""
        return f"{self.layout}, limit {self.max_tokens_per_rank}, exchange {self.cp_comm_type}{largest}"

    def options(self, search: SearchEffort = "fast") -> PlanOptions:
        """Return the planner's options; a static policy has groups of its one size only."""
        fixed = self.static_cp_size if self.is_static else None
        return PlanOptions(
            max_tokens_per_rank=self.max_tokens_per_rank,
            min_cp_size=fixed or 1,
            max_cp_size=fixed or self.max_cp_size,
            static_cp_size=self.static_cp_size,
            cp_comm_types=self.cp_comm_types,
            recompute=self.recompute,
            recompute_layers=self.recompute_layers,
            loss_chunk_tokens=self.loss_chunk_tokens,
            search=search,
            pool=POOL_POLICIES.get(self.policy, "off"),
        )


def sizes_in(reason: str) -> list[str]:
    """Return the options that a reason for refusing a layout is about, such as `--pp` and `--vpp`."""
    return [f"--{name.lower()}" for name in ("TP", "PP", "VPP", "EP") if re.search(rf"\b{name}\b", reason)]
