"""Sets up the planning of a run, for both training loops: this trainer's and that of a Megatron-LM checkout.

runtime = PlannedRuntime.agree(settings, ...)  # before the model: token limit, dump and replay, CP groups
runtime.check_attention(chunks)                # TransformerEngine's, before the first step
runtime = runtime.start()                      # rank 0's planner
runtime.warm_up()                              # no step waits for the planner's compiler

The token limit `auto` is computed, and what does not fit into memory is refused, before anything is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch

from dynamic_cp.errors import InvalidInputError, MemoryLimitError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import hardware_of_layers, load_hardware
from dynamic_cp.pricing.allowed import allowed_cp_sizes, capacity_tokens
from dynamic_cp.types import CpCommType, Hardware, ModelShape, PlanOptions, Problem, Sample, Topology
from dynamic_cp.types.counts import counted
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.agreement.verify import run_on_rank_zero
from megatron.dynamic_cp.attention.te.support import LayerChoice
from megatron.dynamic_cp.flags.settings import PlanningSettings
from megatron.dynamic_cp.groups.attention_check import check_attention
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.plans.plan_dump import WARM_UP, RecordedPlans, RunDump
from megatron.dynamic_cp.plans.plan_source import PlanSource, warm_up
from megatron.dynamic_cp.plans.planner import Planner


def first_hardware(settings: PlanningSettings, device: torch.device, layers: LayerChoice) -> Hardware:
    """Return the hardware that the cost model begins with; rank 0 reads it for all. DynamicCPError on every rank if it
    does not exist, or lacks the memory that `auto` needs. Collective."""

    def load() -> dict[str, Any]:
        hardware = load_hardware(_hardware_name(settings, device, layers))
        check_memory_is_known(settings, hardware)
        return asdict(hardware)

    return run_on_rank_zero(load, lambda found: Hardware(**found))


def _hardware_name(settings: PlanningSettings, device: torch.device, layers: LayerChoice) -> str:
    """Return the hardware asked for, or the device's; local layers have their own, with their attention kernels."""
    if settings.hardware or device.type == "cpu":
        return settings.hardware or "cpu"
    return hardware_of_layers("h100", is_local=layers.impl == "local")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRuntime:
    """The planner of a run and what its plans run on.

    Attributes:
        arguments: all flags of the run by name, completed with values that were found; records keep them.
        hardware, hardware_name: what the cost model begins with, and its name as given.
        options: what the planner may do, with the token limit that memory allows and the exchanges that the layers
            have.
        has_masks: whether training samples have their own masks.
        dump, recorded: on rank 0, if plans are dumped or replayed.
        planner: on rank 0 after `start`.
    """

    settings: PlanningSettings
    arguments: Mapping[str, Any]
    device: torch.device
    layers: LayerChoice
    model_shape: ModelShape
    hardware: Hardware
    hardware_name: str
    options: PlanOptions
    has_masks: bool
    groups: DynamicCPGroups
    dump: RunDump | None
    recorded: RecordedPlans | None
    planner: Planner | None = None

    @classmethod
    def agree(
        cls,
        settings: PlanningSettings,
        *,
        arguments: Mapping[str, Any],
        device: torch.device,
        layers: LayerChoice,
        model_shape: ModelShape,
        hardware: Hardware,
        has_masks: bool = False,
    ) -> PlannedRuntime:
        """Return the runtime before the model is built, without a planner. Collective.

        Args:
            arguments: all flags of the run by name.
            hardware: see `first_hardware`.
            has_masks: whether training samples have their own masks.

        Raises DynamicCPError: on every rank: the token limit exceeds the memory, or a dump cannot be written or read.
        """
        # Rank 0 computes this for all, so that no rank can differ or fail alone.
        limit = run_on_rank_zero(
            lambda: max_tokens_per_rank(settings, model_shape, hardware, layers.left_out, has_masks=has_masks),
            int,
        )
        phase.limit_tokens(limit)
        options = settings.options(limit, layers.left_out, has_masks=has_masks)
        arguments = {
            **arguments,
            "max_seqlen_per_dp_cp_rank": limit,
            "transformer_impl": layers.impl,
            "cp_comm_types_left_out": layers.left_out,
        }
        dump, recorded = _dump_and_replay(settings, options, arguments, model_shape)
        groups = DynamicCPGroups.for_plans(
            model_shape, settings.topology, options, timeout_s=settings.exchange_timeout_s, device=device
        )
        return cls(
            settings=settings,
            arguments=arguments,
            device=device,
            layers=layers,
            model_shape=model_shape,
            hardware=hardware,
            hardware_name=_hardware_name(settings, device, layers),
            options=options,
            has_masks=has_masks,
            groups=groups,
            dump=dump,
            recorded=recorded,
        )

    @property
    def topology(self) -> Topology:
        return self.settings.topology

    @property
    def problem(self) -> Problem:
        """The problem to plan, with the hardware before refinement."""
        return Problem(
            topology=self.topology,
            model=self.model_shape,
            hardware=self.hardware,
            options=self.options,
            policy=self.settings.policy,
            data_parallel=self.settings.data_parallel,
        )

    def check_attention(self, model: Sequence[torch.nn.Module]) -> str:
        """Compare TransformerEngine's attention with plain products; return a log line, "" for local layers, whose
        kernels are checked when they are chosen. UnsupportedFeatureError as in `attention_check.check_attention`.
        Collective."""
        if self.layers.impl != "transformer_engine":
            return ""
        return check_attention(model, self.groups, self.options.cp_comm_types, self.device)

    def start(self) -> PlannedRuntime:
        """Return this with rank 0's planner, which needs a `close`. Collective.

        DynamicCPError on every rank if no static plan holds --seq-length.
        """
        planner: list[Planner] = []

        def make() -> None:
            planner.append(
                Planner(
                    self.problem,
                    max_seqlen=self.settings.seq_length,
                    ahead=True,
                    strict=self.settings.is_strict,
                    recorded=self.recorded,
                    on_answer=self.dump.write_answer if self.dump is not None else None,
                    publish_whole=self.settings.verify == "full",
                )
            )

        run_on_rank_zero(make)
        return replace(self, planner=planner[0] if planner else None)

    def warm_up(self, more: Sequence[Sample] = ()) -> str:
        """Plan a synthetic batch, and the batch `more` as in `plan_source.warm_up`, unless plans are replayed; return a
        line for the log. DynamicCPError on every rank if rank 0 found no plan. Collective."""
        if self.settings.replay is not None:
            return f"plans are those of {self.settings.replay}"
        ready_s = warm_up(self.plan_source(WARM_UP), self.settings.seq_length, more)
        return f"planner ready after {ready_s:.1f} s, {self.settings.search} search"

    def plan_source(self, name: str, hardware_of: Callable[[int], Hardware] | None = None) -> PlanSource:
        """Return the source of this rank's plans; `name` is unique in the job, `hardware_of` is as in `PlanSource`."""
        return PlanSource(
            self.planner,
            topology=self.topology,
            lane=self.groups.lane,
            name=name,
            lookahead=self.settings.lookahead,
            timeout_s=self.settings.plan_timeout_s,
            hardware_of=hardware_of,
        )

    def describe(self) -> tuple[str, ...]:
        """Return lines for the log: the groups, the number of a rank's communicators, and what plans obey."""
        is_auto = self.settings.max_tokens_per_rank is None
        pool = "" if self.settings.pool == "off" else f" with a pool of all stages ({self.settings.pool})"
        of_memory = " (auto: what the memory of its hardware holds)" if is_auto else ""
        number, of_each = MemoryModel(self.problem).num_communicators, self.hardware.communicator_bytes_per_group
        communicators = (
            f"communicators of a rank: {self.groups.num_communicators} made for CP groups; with megatron-core's "
            f"{number} by the memory model" + (f", {1e-9 * number * of_each:.1f} GB" if of_each else "")
        )
        policy = (
            f"policy {self.settings.policy}{pool}, {self.options.max_tokens_per_rank} padded tokens per rank and "
            f"micro-batch{of_memory}, hardware {self.hardware_name} for the cost model"
        )
        return self.groups.describe(), communicators, policy

    def close(self) -> None:
        if self.planner is not None:
            self.planner.close()


def _dump_and_replay(
    settings: PlanningSettings, options: PlanOptions, arguments: Mapping[str, Any], model_shape: ModelShape
) -> tuple[RunDump | None, RecordedPlans | None]:
    """Return rank 0's dump and recorded plans; DynamicCPError on every rank if a folder is unusable. Collective."""
    opened: list[Any] = [None, None]

    def open_both() -> None:
        if settings.dump is not None:
            about = {"arguments": arguments, "versions": _versions()}
            try:
                opened[0] = RunDump(settings.dump, about)
            except OSError as error:
                raise InvalidInputError(f"--dynamic-cp-dump: cannot write {error}: give another folder") from error
        if settings.replay is not None:
            opened[1] = RecordedPlans(settings.replay, settings.topology, options, model_shape.layer_masks)

    run_on_rank_zero(open_both)
    return opened[0], opened[1]


def _versions() -> dict[str, str]:
    names = ("megatron-dynamic-cp", "megatron-core", "torch", "numpy", "numba", "transformer-engine")
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_memory_is_known(settings: PlanningSettings, hardware: Hardware) -> None:
    """Raise InvalidInputError if the limit is `auto` and the hardware file states no memory."""
    if settings.max_tokens_per_rank is None and not hardware.hbm_bytes:
        raise InvalidInputError(
            f"--max-seqlen-per-dp-cp-rank auto needs hbm_bytes, which hardware {hardware.name!r} does not state: "
            "give the limit in tokens, or a --dynamic-cp-hardware file with hbm_bytes"
        )


def max_tokens_per_rank(
    settings: PlanningSettings,
    model: ModelShape,
    hardware: Hardware,
    left_out: tuple[CpCommType, ...] = (),
    *,
    has_masks: bool = False,
) -> int:
    """Return the limit of padded tokens of a rank in one micro-batch; a pure function of settings and hardware file.

    All micro-batches in flight are assumed to reach the limit, with exchange buffers of the smallest CP size that holds
    a sample of --seq-length. If memory is unknown, a limit in tokens is not checked.

    Args:
        left_out: exchanges that the layers lack.
        has_masks: whether samples have their own masks.

    Raises InvalidInputError: the limit is `auto` and memory is unknown. Raises MemoryLimitError: what is asked for does
    not fit; with both numbers and the remedies."""
    check_memory_is_known(settings, hardware)
    limit, topology = settings.max_tokens_per_rank, settings.topology
    if limit is not None and not hardware.hbm_bytes:
        return limit
    options = settings.used(settings.options(limit or 1, left_out, has_masks=has_masks))
    memory = MemoryModel(
        Problem(
            topology=topology, model=model, hardware=hardware, options=options, data_parallel=settings.data_parallel
        )
    )
    try:
        if limit is None:
            return memory.max_tokens_per_rank(settings.seq_length)
        sizes = allowed_cp_sizes(topology, options)
        # A sample that no group holds has its attention placed on all lanes.
        holds = (cp for cp in sizes if capacity_tokens(cp, topology, options) >= settings.seq_length)
        smallest = next(holds, sizes[-1])
        memory.check_limit_fits(limit, smallest)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; if the device has more memory than {hardware.name}, name it with --dynamic-cp-hardware",
            **error.details,
        ) from error
    return limit


def check_state_fits(problem: Problem, ranks: Sequence[int], free_bytes: int | None, num_positions: int = 0) -> None:
    """Refuse a model whose weights, gradients and optimizer states do not fit into a host's memory together.

    Args:
        ranks: those of the host, which share its memory.
        free_bytes: of the host, with swap; None: unknown, and nothing is refused.
        num_positions: rows of the table of learned positions, 0 without one.

    Raises MemoryLimitError: with both numbers and the remedies."""
    topology, model = problem.topology, problem.model
    stages = MemoryModel(problem).peak_at(2 * topology.rank_token_multiple)
    of_stage = [one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in stages]
    # Every TP rank of the first stage has the whole table of positions, with gradients and optimizer states.
    table = num_positions * model.hidden_size * problem.options.element_bytes.weight
    of_stage[0] *= 1 + table / stages[0].weights_bytes
    needed = sum(of_stage[rank // (topology.num_lanes * topology.tp_size)] for rank in ranks)
    if free_bytes is not None and needed > free_bytes:
        positions = f", {num_positions} positions (--max-position-embeddings, --seq-length)" if num_positions else ""
        raise MemoryLimitError(
            f"weights, gradients and optimizer states of the {counted(len(ranks), 'rank')} of this host need "
            f"{needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free: make the model smaller (hidden size "
            f"{model.hidden_size}, {counted(model.num_layers, 'layer')}, a vocabulary of {model.vocab_size}{positions})"
            " or use more hosts",
            needed_bytes=needed,
            free_bytes=free_bytes,
        )
