"""What stays the same while Megatron-LM trains: groups, planner, one wrapped iterator per data set, and the counts."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.utils import log_single_rank

from dynamic_cp.catalog import load_hardware
from dynamic_cp.errors import DataError
from dynamic_cp.lane_plan import PlanFacts
from dynamic_cp.planner_process import Problem
from megatron.dynamic_cp.arguments import cp_comm_types
from megatron.dynamic_cp.flops import training_flops
from megatron.dynamic_cp.foreign_iterator import ForeignIteratorWrapper, wrap_data_iterator
from megatron.dynamic_cp.lm_adaptor.data import LaneIterator
from megatron.dynamic_cp.plan_dump import WARM_UP
from megatron.dynamic_cp.planner import Planner
from megatron.dynamic_cp.planning import PlanSource, warm_up
from megatron.dynamic_cp.process_groups import DynamicCPGroups
from megatron.dynamic_cp.verify import collective_device, run_on_rank_zero
from megatron.trainer import derive, layers, memory
from megatron.trainer.step import run_schedule

logger = logging.getLogger(__name__)


class Samples(NumMicroBatchesCalculator):
    """In place of Megatron-LM's calculator: the global batch has any size, and the plan says how many micro-batches.

    Megatron-LM counts samples as micro-batches times micro-batch size times data-parallel size. Inside `counted` that
    product is the global batch; elsewhere it is rounded up to a multiple of the lanes.
    """

    def __init__(self, global_batch_size: int, num_lanes: int) -> None:
        super().__init__()
        self.num_micro_batches = -(-global_batch_size // num_lanes)
        self.current_global_batch_size = self.current_running_global_batch_size = global_batch_size
        self.micro_batch_size = 1
        self._num_lanes = num_lanes

    @property
    def overcounted(self) -> int:
        """Samples of a step that the product has too many."""
        return int(self.num_micro_batches * self._num_lanes - self.current_global_batch_size)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing changes during a run."""

    @contextlib.contextmanager
    def counted(self, args: argparse.Namespace) -> Iterator[None]:
        """Have Megatron-LM's product count the samples of the global batch: as if one lane had a micro-batch each."""
        num_micro_batches, data_parallel_size = self.num_micro_batches, args.data_parallel_size
        self.num_micro_batches, args.data_parallel_size = self.current_global_batch_size, 1
        try:
            yield
        finally:
            self.num_micro_batches, args.data_parallel_size = num_micro_batches, data_parallel_size


class StepFlops:
    """FLOPs of the latest steps, from the true lengths of their samples."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._is_over = False

    def add(self, flops: float) -> None:
        """Count a step."""
        if self._is_over:
            self._steps.clear()
            self._is_over = False
        self._steps.append(flops)

    @property
    def latest(self) -> float:
        """FLOPs of the latest step."""
        return self._steps[-1]

    @property
    def mean(self) -> float:
        """Mean FLOPs of the steps since `start_interval`; until there is one, of those before it."""
        return sum(self._steps) / len(self._steps)

    def start_interval(self) -> None:
        """Begin the next log interval with the next step."""
        self._is_over = True


class Session:
    """The parts of a run that Megatron-LM does not know.

    Args:
        args: Megatron-LM's.
        planning: see `flags.planning_arguments`.

    Attributes:
        layers: TransformerEngine's or local ones, by --transformer-impl.
        facts: of the latest plan of the training data.
        flops: of its latest steps.
    """

    def __init__(self, args: argparse.Namespace, planning: argparse.Namespace) -> None:
        self.args = args
        self.facts: PlanFacts | None = None
        self.flops = StepFlops()
        self._planning = planning
        self._device = collective_device()
        self._wrappers: dict[str, ForeignIteratorWrapper] = {}
        self.topology = derive.topology(planning)
        self.layers = layers.choose(planning, self._device)
        name = planning.dynamic_cp_hardware or ("cpu" if self._device.type == "cpu" else "h100")
        hardware = run_on_rank_zero(lambda: load_hardware(name))
        self.model_shape = derive.model_shape(planning, args.padded_vocab_size)
        planning.max_seqlen_per_dp_cp_rank = run_on_rank_zero(
            lambda: memory.max_tokens_per_rank(planning, self.model_shape, hardware)
        )
        self.groups = DynamicCPGroups.build(
            self.topology,
            timeout_s=60 * args.distributed_timeout_minutes,
            min_cp_size=planning.min_dynamic_cp_size,
            max_cp_size=planning.max_dynamic_cp_size,
            exchanges=cp_comm_types(planning),
            inner_sizes=planning.dynamic_cp_inner_sizes,
            query_heads=args.num_attention_heads // self.topology.tp_size,
            device=self._device,
        )
        problem = Problem(
            topology=self.topology,
            model=self.model_shape,
            hardware=hardware,
            options=derive.plan_options(planning),
            policy=derive.policy(planning),
        )
        self._planner: Planner | None = None
        run_on_rank_zero(lambda: self._start_planner(problem))
        ready_s = warm_up(self._plan_source(WARM_UP), args.seq_length)
        limits = (
            f"{self.topology.num_lanes} lanes, {planning.max_seqlen_per_dp_cp_rank} padded tokens per rank and "
            f"micro-batch, hardware {name}; planner ready after {ready_s:.1f} s"
        )
        for line in (self.layers.describe(), self.groups.describe(), limits):
            log_single_rank(logger, logging.INFO, f"dynamic CP: {line}")

    def _start_planner(self, problem: Problem) -> None:
        self._planner = Planner(
            problem,
            max_seqlen=self.args.seq_length,
            ahead=True,
            strict=self._planning.dynamic_cp_strict,
            publish_whole=self._planning.dynamic_cp_verify == "full",
        )

    def _plan_source(self, name: str) -> PlanSource:
        return PlanSource(
            self._planner,
            topology=self.topology,
            lane=self.groups.lane,
            name=name,
            lookahead=self._planning.dynamic_cp_lookahead,
            timeout_s=self._planning.dynamic_cp_plan_timeout,
        )

    def run_step(
        self,
        *,
        forward_step_func: Any,
        data_iterator: LaneIterator | list[LaneIterator],
        model: Any,
        seq_length: int,
        forward_only: bool = False,
        **unused: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Run the next global batch of `data_iterator`: Megatron-LM calls this in place of a schedule.

        Returns:
            What the script's loss function logged, for each micro-batch. Without a backward pass one entry, already
            summed over the lanes: some of Megatron-LM's means are over micro-batches, which here have any size.

        Raises:
            DynamicCPError: the data ended, or see `ForeignIteratorWrapper.wrap`; the same on all ranks.
        """
        chunks = list(model) if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        wrapper = self._wrapper(iterators, chunks)
        try:
            step = next(wrapper)
        except StopIteration:
            raise DataError(
                f"the {iterators[0].name} data ended at step {wrapper.step}, before the run did: give more data, or "
                "lower --train-iters or --eval-iters"
            ) from None
        logged = run_schedule(
            chunks,
            step,
            seq_length,
            forward_only=forward_only,
            rank_tokens=wrapper.rank_tokens,
            verify_messages=self._planning.dynamic_cp_verify == "full",
            forward_step_func=forward_step_func,
        )
        if forward_only:
            return sum_over_lanes(logged)
        assert wrapper.plan is not None
        self.facts = wrapper.plan.facts
        self.flops.add(training_flops(self.model_shape, step.seqlen_sum, step.seqlen_squared_sum))
        return logged

    def _wrapper(self, iterators: list[LaneIterator], chunks: list[torch.nn.Module]) -> ForeignIteratorWrapper:
        name = iterators[0].name
        if name not in self._wrappers:
            items = [iterator.items for iterator in iterators]
            self._wrappers[name] = wrap_data_iterator(
                items if len(items) > 1 else items[0],
                chunks,
                plan_source=self._plan_source(name),
                groups=self.groups,
                global_batch_size=self.args.global_batch_size,
                verify=self._planning.dynamic_cp_verify,
                first_step=self.args.iteration if name == "train" else 0,
                consumed_samples=self.args.consumed_train_samples if name == "train" else 0,
            )
        return self._wrappers[name]

    def describe_step(self) -> str:
        """Return one line about the plan of the latest step."""
        facts = self.facts
        assert facts is not None
        sizes = " ".join(f"{cp_size}:{count}" for cp_size, count in sorted(facts.cp_histogram.items()))
        return (
            f" dynamic CP | micro-batches: {facts.num_microbatches} | samples: {facts.num_samples} | "
            f"tokens: {facts.seqlen_sum} | buckets by CP size: {sizes} | "
            f"padding: {100 * facts.padding_fraction:.1f} % | "
            f"predicted (ms): {1000 * facts.predicted_s:.1f} | planner (ms): {1000 * facts.planner_s:.1f} |"
            + (f" static plan: {facts.fallback} |" if facts.fallback else "")
        )

    def close(self) -> None:
        """End the planner and the threads that fetch plans."""
        for wrapper in self._wrappers.values():
            wrapper.close()
        if self._planner is not None:
            self._planner.close()


def sum_over_lanes(logged: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return [one dict of sums over micro-batches and lanes], [] where nothing was logged.

    Args:
        logged: of each micro-batch, key -> [sum, number of tokens].

    Raises:
        DataError: the script's loss function logs something else.
    """
    if not logged:
        return []
    sums = {}
    for key in logged[0]:
        values = [entry[key].reshape(-1) for entry in logged]
        if values[0].numel() != 2:
            raise DataError(
                f"the loss function of the script logs {values[0].numel()} values as {key!r}, [sum of losses, number "
                "of tokens] is needed",
                key=key,
            )
        sums[key] = torch.stack(values).sum(dim=0)
        dist.all_reduce(sums[key], group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return [sums]


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the next micro-batch in the order of Megatron-LM's get_batch; takes its place in the script."""
    batch = next(data_iterator)
    return (
        batch["tokens"],
        batch["labels"],
        batch["loss_mask"],
        None,
        batch["position_ids"],
        batch["packed_seq_params"],
    )
