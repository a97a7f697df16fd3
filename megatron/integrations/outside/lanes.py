"""The lanes of a torch job: every rank of a DeviceMesh is one lane, for all CP sizes of its micro-batches.

A mesh of (dp, cp) is flattened: every micro-batch splits it anew, and gradients are reduced over all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.plans.lane_plan import LanePlan, PlanFacts, lane_plan
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Problem, Sample
from megatron.decide import linear_warm_up
from megatron.dynamic_cp.agreement.verify import agree, check_same_digest, run_on_all_ranks
from megatron.dynamic_cp.attention.linear.kernels import prepare_linear_kernel
from megatron.dynamic_cp.data.micro_batches import PackedStep, ReadSample, pack_step
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneStep:
    """A lane's part of a step: of the plan, and its shards, micro-batch after micro-batch. `digest` is that of the
    plan, and of the tokens if all lanes have read them all; it is equal on all lanes."""

    plan: LanePlan
    packed: PackedStep
    digest: str

    def pin_memory(self) -> LaneStep:
        """Return the step in page-locked memory; a DataLoader calls this."""
        return replace(self, packed=self.packed.pin_memory())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """All ranks of a job as lanes, with the CP groups that plans may use.

    Attributes:
        mesh: one-dimensional, over all lanes: what DistributedDataParallel or `fully_shard` reduce gradients over.
        problem: what is planned for.
    """

    mesh: DeviceMesh
    groups: DynamicCPGroups
    problem: Problem
    device: torch.device

    @classmethod
    def build(cls, mesh: DeviceMesh, problem: Problem, *, timeout_s: float = 600.0) -> Lanes:
        """Build and warm the CP groups. Collective: all ranks of the job call it, with equal arguments.

        Args:
            mesh: holds every rank of the job once, in any shape such as (dp, cp); with names if it has several
                dimensions.
            problem: its topology has as many lanes as the mesh has ranks, and no TP or PP.
            timeout_s: of every exchange between lanes.

        Raises InvalidInputError: the mesh and the topology differ, or the mesh leaves ranks out. Raises
        UnsupportedFeatureError: layers with windows, or linear attention whose kernel is missing or wrong on a rank."""
        _check_mesh(mesh, problem)
        _check_masks(problem)
        flat = mesh if mesh.ndim == 1 else mesh._flatten("dynamic_cp_lanes")
        device = torch.device(flat.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        if problem.model.linear_attention is not None:
            sizes, dtype = problem.model.linear_attention, torch.bfloat16
            run_on_all_ranks(lambda: prepare_linear_kernel(sizes, dtype, device), device)
        groups = DynamicCPGroups.for_plans(
            problem.model,
            problem.topology,
            problem.options,
            timeout_s=timeout_s,
            device=device,
            lane_ranks=flat.mesh.flatten().tolist(),
        )
        tuned = linear_warm_up.warm_up(groups, problem.model, problem.options, 1, torch.bfloat16, device)
        if tuned and groups.lane == 0:
            logger.info("%s", tuned)
        return cls(mesh=flat, groups=groups, problem=problem, device=device)

    @property
    def lane(self) -> int:
        """This rank's lane."""
        return self.groups.lane

    @property
    def num_lanes(self) -> int:
        return self.groups.num_lanes

    def plan(self, samples: Sequence[Sample]) -> LanePlan:
        """Return this lane's part of the plan of a global batch. Collective: every rank plans the whole batch, in
        milliseconds, and compares digests. `pack` also takes plans of `plans.plan_source`, which plans ahead in its own
        process. DynamicCPError, on every rank: there is no plan, or ranks planned different batches."""
        return agree(
            lambda: plan_for_lane(self.problem, samples, self.lane),
            lambda plan: plan.facts.digest,
            what="the plan of a global batch",
            device=self.device,
        )

    def pack(self, plan: LanePlan, read_sample: ReadSample) -> LaneStep:
        """Read, pad and shard what this lane computes. Collective: a sample that cannot be read is an error on all.
        `read_sample` takes an id of this lane and returns tokens, labels (labels[i] follows tokens[i]) and loss mask,
        all of the planned length."""
        packed = run_on_all_ranks(lambda: pack_step(plan, read_sample), self.device)
        return LaneStep(plan=plan, packed=packed, digest=plan.facts.digest)

    def step(self, samples: Sequence[Sample], read_sample: ReadSample) -> LaneStep:
        """Plan and pack a global batch."""
        return self.pack(self.plan(samples), read_sample)

    def agreed(self, steps: Iterable[LaneStep]) -> Iterator[LaneStep]:
        """Yield the steps of a DataLoader, each after all lanes have it and hold the same batch. Collective.
        DynamicCPError, on all lanes: what a lane's collator raised, different batches, or a lane that has no more."""
        iterator = iter(steps)
        while True:
            step = run_on_all_ranks(lambda: next(iterator, None), self.device)
            check_same_digest("0" if step is None else step.digest, "the global batch of a step", self.device)
            if step is None:
                return
            yield step


def plan_for_lane(problem: Problem, samples: Sequence[Sample], lane: int) -> LanePlan:
    """Return the part of `lane` in the plan of a global batch; a pure function."""
    planned = plan_problem(problem, samples)
    return lane_plan(planned.plan, lane, PlanFacts.of(planned))


def _check_masks(problem: Problem) -> None:
    model = problem.model
    if model.window is not None:
        remedy = (
            f'give every sample the mask parse_mask("{model.window}") and plan with a ModelShape without a window, or '
            if model.num_windowed_layers == model.num_layers
            else ""
        )
        raise UnsupportedFeatureError(
            f"{model.windows_in_words}, loops outside Megatron have one mask for all layers, that of each sample: "
            f"{remedy}train it with Megatron's layers (pretrain_gpt.py --window-size)"
        )


def _check_mesh(mesh: DeviceMesh, problem: Problem) -> None:
    topology = problem.topology
    if topology.tp_size * topology.pp_size != 1:
        raise InvalidInputError(
            f"the topology has tp_size {topology.tp_size} and pp_size {topology.pp_size}, loops outside Megatron have "
            "1 and 1: give Topology(num_lanes=...) alone"
        )
    if mesh.size() != dist.get_world_size():
        raise InvalidInputError(
            f"the mesh has {mesh.size()} ranks, the job {dist.get_world_size()}: every rank must be a lane; give the "
            "mesh of all ranks"
        )
    if mesh.size() != topology.num_lanes:
        raise InvalidInputError(
            f"the mesh has {mesh.size()} ranks, the topology {topology.num_lanes} lanes: plan with "
            f"Topology(num_lanes={mesh.size()})"
        )
