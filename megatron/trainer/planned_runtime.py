"""How a run is planned, set up once for both training loops: this trainer's and that of a Megatron-LM checkout.

runtime = PlannedRuntime.agree(args, ...)    # before the model: token limit, dump and replay, CP groups
runtime = runtime.start()                    # rank 0's planner; with other hardware where that was measured
runtime.warm_up()                            # no step waits for the planner's compiler
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch

from dynamic_cp.catalog import load_hardware
from dynamic_cp.errors import InvalidInputError
from dynamic_cp.planner_process import Problem
from dynamic_cp.types import Hardware, ModelShape, Topology
from megatron.dynamic_cp.arguments import cp_comm_types
from megatron.dynamic_cp.plan_dump import WARM_UP, RecordedPlans, RunDump
from megatron.dynamic_cp.planner import Planner
from megatron.dynamic_cp.planning import PlanSource, warm_up
from megatron.dynamic_cp.process_groups import DynamicCPGroups
from megatron.dynamic_cp.verify import run_on_rank_zero
from megatron.trainer import derive, memory


def first_hardware(args: argparse.Namespace, device: torch.device) -> Hardware:
    """Return what the cost model begins with, which rank 0 reads for all; collective.

    Raises:
        DynamicCPError: no such hardware, or it lacks the memory that `auto` needs; the same on every rank.
    """

    def load() -> dict[str, Any]:
        hardware = load_hardware(_hardware_name(args, device))
        memory.check_memory_is_known(args, hardware)
        return asdict(hardware)

    return run_on_rank_zero(load, lambda found: Hardware(**found))


def _hardware_name(args: argparse.Namespace, device: torch.device) -> str:
    return args.dynamic_cp_hardware or ("cpu" if device.type == "cpu" else "h100")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRuntime:
    """What plans a run and what its plans run on.

    Attributes:
        args: flags of the run, under this trainer's names.
        device: where this rank computes.
        topology: arrangement of the job's ranks.
        model_shape: what the cost model prices.
        hardware: what it begins with; hardware_name: as the run was given it.
        is_auto: the token limit is what the memory of the hardware holds.
        groups: CP groups of this rank.
        dump: rank 0's, where plans are written down.
        recorded: rank 0's, where they are taken from a dump.
        planner: rank 0's once it was started.
    """

    args: argparse.Namespace
    device: torch.device
    topology: Topology
    model_shape: ModelShape
    hardware: Hardware
    hardware_name: str
    is_auto: bool
    groups: DynamicCPGroups
    dump: RunDump | None
    recorded: RecordedPlans | None
    planner: Planner | None = None

    @classmethod
    def agree(
        cls, args: argparse.Namespace, *, device: torch.device, hardware: Hardware, vocab_rows: int
    ) -> PlannedRuntime:
        """Return what all ranks know before the model is built; without a planner yet. Collective.

        Args:
            hardware: see `first_hardware`.
            vocab_rows: of the embedding table.

        Raises:
            DynamicCPError: the token limit does not fit into memory, or a dump cannot be written or read; the same on
                every rank.
        """
        topology, model_shape = derive.topology(args), derive.model_shape(args, vocab_rows)
        is_auto = args.max_seqlen_per_dp_cp_rank == "auto"
        # Every rank would find the same; rank 0 says it for all, so that none can differ or fail alone.
        args.max_seqlen_per_dp_cp_rank = run_on_rank_zero(
            lambda: memory.max_tokens_per_rank(args, model_shape, hardware), int
        )
        dump, recorded = _dump_and_replay(args, topology)
        groups = DynamicCPGroups.build(
            topology,
            timeout_s=60 * args.distributed_timeout_minutes,
            min_cp_size=args.min_dynamic_cp_size,
            max_cp_size=args.max_dynamic_cp_size,
            exchanges=cp_comm_types(args),
            inner_sizes=args.dynamic_cp_inner_sizes,
            query_heads=args.num_attention_heads // topology.tp_size,
            device=device,
        )
        return cls(
            args=args,
            device=device,
            topology=topology,
            model_shape=model_shape,
            hardware=hardware,
            hardware_name=_hardware_name(args, device),
            is_auto=is_auto,
            groups=groups,
            dump=dump,
            recorded=recorded,
        )

    def measured(self, hardware: Hardware) -> PlannedRuntime:
        """Return the same with the hardware that was found by measuring."""
        return replace(self, hardware=hardware, hardware_name=hardware.name)

    def start(self) -> PlannedRuntime:
        """Return the same with rank 0's planner, which the caller closes; collective, because it may fail there.

        Raises:
            DynamicCPError: no static plan holds --seq-length; the same on every rank.
        """
        problem = Problem(
            topology=self.topology,
            model=self.model_shape,
            hardware=self.hardware,
            options=derive.plan_options(self.args),
            policy=derive.policy(self.args),
        )
        planner: list[Planner] = []

        def make() -> None:
            planner.append(
                Planner(
                    problem,
                    max_seqlen=self.args.seq_length,
                    ahead=True,
                    strict=self.args.dynamic_cp_strict,
                    recorded=self.recorded,
                    on_answer=self.dump.write_answer if self.dump is not None else None,
                    publish_whole=self.args.dynamic_cp_verify == "full",
                )
            )

        run_on_rank_zero(make)
        return replace(self, planner=planner[0] if planner else None)

    def warm_up(self) -> str:
        """Plan a made-up batch, unless plans are replayed; return a line for the log. Collective.

        Raises:
            DynamicCPError: rank 0 found no plan; the same on every rank.
        """
        if self.args.dynamic_cp_replay is not None:
            return f"plans are those of {self.args.dynamic_cp_replay}"
        ready_s = warm_up(self.plan_source(WARM_UP), self.args.seq_length)
        return f"planner ready after {ready_s:.1f} s, {self.args.dynamic_cp_search} search"

    def plan_source(self, name: str, hardware_of: Callable[[int], Hardware] | None = None) -> PlanSource:
        """Return where this rank gets plans from.

        Args:
            name: unique in the job.
            hardware_of: see `PlanSource`.
        """
        return PlanSource(
            self.planner,
            topology=self.topology,
            lane=self.groups.lane,
            name=name,
            lookahead=self.args.dynamic_cp_lookahead,
            timeout_s=self.args.dynamic_cp_plan_timeout,
            hardware_of=hardware_of,
        )

    def describe(self) -> tuple[str, str]:
        """Return two lines for the log: the groups, and what plans follow."""
        of_memory = " (auto: what the memory of its hardware holds)" if self.is_auto else ""
        return self.groups.describe(), (
            f"policy {derive.policy(self.args)}, {self.args.max_seqlen_per_dp_cp_rank} padded tokens per rank and "
            f"micro-batch{of_memory}, hardware {self.hardware_name} for the cost model"
        )

    def close(self) -> None:
        """End the planner."""
        if self.planner is not None:
            self.planner.close()


def _dump_and_replay(args: argparse.Namespace, topology: Topology) -> tuple[RunDump | None, RecordedPlans | None]:
    """Return what rank 0 writes plans to and takes them from; collective, because either may fail there.

    Raises:
        DynamicCPError: a folder that cannot be written or read; the same on every rank.
    """
    opened: list[Any] = [None, None]

    def open_both() -> None:
        if args.dynamic_cp_dump is not None:
            about = {"arguments": vars(args), "versions": _versions()}
            try:
                opened[0] = RunDump(args.dynamic_cp_dump, about)
            except OSError as error:
                raise InvalidInputError(f"--dynamic-cp-dump: cannot write {error}: give another folder") from error
        if args.dynamic_cp_replay is not None:
            opened[1] = RecordedPlans(args.dynamic_cp_replay, topology, derive.plan_options(args))

    run_on_rank_zero(open_both)
    return opened[0], opened[1]


def _versions() -> dict[str, str]:
    names = ("megatron-dynamic-cp", "megatron-core", "torch", "numpy", "numba", "transformer-engine")
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
