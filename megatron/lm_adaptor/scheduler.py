"""Our planner as a packing scheduler of Megatron-LM checkouts that have `scheduler_map` (branch dev, 2026).

    --dynamic-context-parallel --sequence-packing-scheduler dynamic_cp_planner

Such a checkout draws, re-routes and packs samples itself and asks a scheduler class for groups. Only that class is
ours. Each TP rank 0 plans for itself, every step, as the checkout's own schedulers do; a plan is a function of its
input, so all of them find the same plan.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import Hardware, ModelShape, PlanOptions, Problem, Sample, Topology
from megatron.dynamic_cp.repairs import releases, triton_imports
from megatron.lm_adaptor.checkout import SCHEDULERS, SUPPORTED_VERSIONS
from megatron.lm_adaptor.flags import add_flags
from megatron.lm_adaptor.groups import Groups, check_groups, groups_ns, groups_of, groups_of_greedy
from megatron.trainer.flags.derive import experts_of

logger = logging.getLogger(__name__)

NAME = "dynamic_cp_planner"
THEIRS = "default_dynamic_cp"
"""The one name that the checkout accepts with --dynamic-context-parallel; it means our class once that was chosen."""

_THEIR_FLAGS = {
    "--dynamic-context-parallel",
    "--context-parallel-size",
    "--max-seqlen-per-dp-cp-rank",
    "--cp-comm-type",
    "--distributed-backend",
    "--use-varlen-dataset",
    "--varlen-mock-dataset-config-json",
}
"""What the checkout has of the flags that the adaptor adds to releases."""

_MODULE = "megatron.core.datasets.data_schedule"


def scheduler_class(base: type, *, hardware: str = "h100", search: str = "fast") -> type:
    """Return a scheduler that plans with `dynamic_cp`, for a checkout's `scheduler_map`.

    Args:
        base: the checkout's DefaultDynamicCPScheduler, which draws, re-routes and packs.
        hardware: name or file for the cost model.
        search: effort of the planner.
    """

    class DynamicCPPlannerScheduler(base):  # type: ignore[misc]
        """Plans a global batch by its cost on the cluster instead of by L^2 / cp."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model: ModelShape | None = None
            self.topology = _topology(self.total_hdp_gpus)
            self.bytes_per_element = 2

        def run(self, data_iterator: Any, num_microbatches: int, *groups_and_config: Any) -> Any:
            """Take model and layout from the configuration, then do as the base class."""
            *_, config = groups_and_config
            tp_group, pp_group = groups_and_config[1], groups_and_config[2]
            self.model = model_shape(config)
            self.topology = Topology(
                num_lanes=self.total_hdp_gpus,
                tp_size=tp_group.size(),
                pp_size=pp_group.size(),
                vp_size=config.virtual_pipeline_model_parallel_size or 1,
                sequence_parallel=config.sequence_parallel,
                ep_size=getattr(config, "expert_model_parallel_size", None) or 1,
            )
            self.bytes_per_element = 2 if config.bf16 or config.fp16 else 4
            return super().run(data_iterator, num_microbatches, *groups_and_config)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
            """Return groups[micro-batch][lane] -> ids.

            Raises:
                DynamicCPError: a sample that no CP size can hold, or too few samples.
            """
            return _planned_groups(self, sample_id_seqlens, load_hardware(hardware), search)

    return DynamicCPPlannerScheduler


def _planned_groups(
    scheduler: Any, sample_id_seqlens: Sequence[tuple[int, int]], hardware: Hardware, search: str
) -> Groups:
    """Return the groups of a plan, or Megatron-LM's greedy ones where they are faster."""
    if scheduler.model is None:
        raise UnsupportedFeatureError(f"{NAME} plans inside run(), or with `model` set")
    seqlens = {int(sample): int(seqlen) for sample, seqlen in sample_id_seqlens}
    problem = Problem(
        topology=scheduler.topology,
        model=scheduler.model,
        hardware=hardware,
        options=PlanOptions(
            max_tokens_per_rank=scheduler.max_seq_len_per_rank,
            min_cp_size=scheduler.min_cp_size,
            bytes_per_element=scheduler.bytes_per_element,
            search=search,  # type: ignore[arg-type]
        ),
    )
    samples = [Sample(sample_id=sample, seqlen=seqlen) for sample, seqlen in seqlens.items()]
    planned = plan_problem(problem, samples)
    multiple = scheduler.microbatch_group_size_per_vp_stage or 1
    limits = {"multiple": multiple, "max_samples": scheduler.max_num_seqs}
    # Both as they will run: filling empty places can make a plan slower than what it was chosen against.
    cost_model = CostModel(problem)
    candidates = {planned.reason: groups_of(planned.plan, **limits)}
    with contextlib.suppress(InvalidInputError):  # its rows may not come to a multiple where ours do
        candidates["Megatron-LM's greedy"] = groups_of_greedy(seqlens, cost_model, problem.options, **limits)
    reason, groups = min(candidates.items(), key=lambda named: groups_ns(named[1], seqlens, cost_model))
    sizes = check_groups(
        groups,
        seqlens,
        num_lanes=scheduler.topology.num_lanes,
        max_tokens_per_rank=scheduler.max_seq_len_per_rank,
        multiple=multiple,
    )
    logger.debug("%d micro-batches, packs by CP size %s; %s", len(groups), dict(sizes), reason)
    return groups


def _topology(num_lanes: int) -> Topology:
    """Return the layout of the job as far as Megatron-Core knows it: loops that call no `run()` say only the lanes."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        return Topology(num_lanes=num_lanes)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    return Topology(
        num_lanes=num_lanes,
        tp_size=tp_size,
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        vp_size=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        sequence_parallel=tp_size > 1,
        ep_size=parallel_state.get_expert_model_parallel_world_size() or 1,
    )


def model_shape(config: Any) -> ModelShape:
    """Return the numbers of a checkout's model; without the training loop's arguments the LM head is left out."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=_vocab_size(),
        gated_linear_unit=config.gated_linear_unit,
        experts=experts_of(config),
        source="configuration of the checkout",
    )


def _vocab_size() -> int:
    try:
        arguments = importlib.import_module("megatron.training.global_vars").get_args()
    except (ImportError, AssertionError):  # another loop, or no arguments were parsed
        return 1
    return int(arguments.padded_vocab_size)


def register(*, hardware: str = "h100", search: str = "fast", as_theirs: bool = False) -> type:
    """Add the scheduler to the checkout's `scheduler_map` as "dynamic_cp_planner"; return it.

    Args:
        hardware, search: see `scheduler_class`.
        as_theirs: also under the checkout's own name, the only one that its configuration accepts.

    Raises:
        UnsupportedFeatureError: the checkout has no such table or base class.
    """
    triton_imports.install()
    module = importlib.import_module(_MODULE)
    for symbol in SCHEDULERS:
        if not hasattr(module, symbol):
            raise UnsupportedFeatureError(
                f"{_MODULE} has no {symbol}: use a checkout of dev from August 2026 on", symbol=symbol
            )
    chosen = scheduler_class(module.DefaultDynamicCPScheduler, hardware=hardware, search=search)
    module.scheduler_map[NAME] = chosen
    if as_theirs:
        module.scheduler_map[THEIRS] = chosen
    return chosen


def check_device() -> None:
    """Check that a run with the scheduler can train here.

    Raises:
        UnsupportedFeatureError: there is no device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedFeatureError(
            f"--sequence-packing-scheduler {NAME} needs CUDA devices, torch sees none: branch dev asserts one, and its "
            f"attention of packed samples is TransformerEngine's; on CPU ranks train a release, check out "
            f"{SUPPORTED_VERSIONS[releases.newest().version]}"
        )


def take_choice(argv: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Return the command line as the checkout accepts it, and what was meant for us.

    The checkout lists its schedulers in a type annotation and in checks, which nothing can be added to; so the choice
    is exchanged for the name that it knows.

    Raises:
        UnsupportedFeatureError: a flag of ours that only releases have.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--sequence-packing-scheduler")
    parser.add_argument("--dynamic-cp-hardware", default="h100")
    parser.add_argument("--dynamic-cp-search", default="fast", choices=("fast", "thorough"))
    ours, rest = parser.parse_known_args(list(argv))
    _refuse_flags_of_releases(rest)
    ours.is_chosen = ours.sequence_packing_scheduler == NAME
    if ours.sequence_packing_scheduler is not None:
        rest += ["--sequence-packing-scheduler", THEIRS if ours.is_chosen else ours.sequence_packing_scheduler]
    return rest, ours


def _refuse_flags_of_releases(argv: Sequence[str]) -> None:
    """Check that no flag is given that the adaptor adds to releases only: the checkout would list all that it has."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings} - _THEIR_FLAGS
    given = [word for word in (word.split("=", 1)[0] for word in argv) if word in ours]
    if given:
        raise UnsupportedFeatureError(
            f"{', '.join(given)} is for releases, and this checkout (branch dev) packs samples itself: leave it out, "
            f"and give --dynamic-context-parallel --sequence-packing-scheduler {NAME}",
            flags=tuple(given),
        )
