"""A run's objects that Megatron-LM does not know: groups, planner, a wrapped iterator per data set; and its steps.

Megatron-LM's checkpoints keep the random states of the first lane, because lanes with equal shapes draw equally many
random numbers. With dynamic CP each lane computes other tokens, so dropout needs the states of all lanes. They are
added under a name that Megatron-LM does not read.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from dynamic_cp.errors import DataError
from dynamic_cp.pricing.work import batch_flops
from megatron.decide import linear_warm_up
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.agreement.verify import collective_device, run_on_all_ranks
from megatron.dynamic_cp.attention.linear.kernels import prepare_linear_kernel
from megatron.dynamic_cp.flags.linear_attention import linear_attention_of
from megatron.dynamic_cp.flags.shape import layer_needs
from megatron.dynamic_cp.step.schedule import Routing, run_schedule, sum_over_routers
from megatron.integrations.foreign.iterator import ForeignIteratorWrapper, wrap_data_iterator
from megatron.integrations.foreign.rerouting import in_phase
from megatron.integrations.lm_adaptor.counts import StepFlops, tell_tracker
from megatron.integrations.lm_adaptor.data import LaneIterator
from megatron.integrations.lm_adaptor.flags import Planned, model_shape, with_heads
from megatron.trainer.checkpoints.interchange import COEFFICIENTS
from megatron.trainer.checkpoints.state import Position
from megatron.trainer.loop.refining import Refining
from megatron.trainer.reporting.log import StepRecord, dump_entry
from megatron.trainer.setup import layers
from megatron.trainer.setup.planned_runtime import PlannedRuntime, first_hardware

logger = logging.getLogger(__name__)

LANES = "dynamic_cp_lanes"
DRAWN_FROM = ("torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""The generators that a forward pass draws from."""


def add_lanes(states: Any, lanes: dist.ProcessGroup) -> None:
    """Add the states of all lanes to Megatron-LM's `rng_state`, [state] or a ShardedObject of it. Collective."""
    (state,) = getattr(states, "data", states)
    every: list[Any] = [None] * lanes.size()
    dist.all_gather_object(every, {name: state[name] for name in DRAWN_FROM}, group=lanes)
    state[LANES] = every


def choose_lane(checkpoint: dict[str, Any], lane: int, num_lanes: int) -> None:
    """Let a run go on with the random states of `lane`, if the loaded checkpoint has them for as many lanes."""
    if "rng_state" not in checkpoint:
        return
    (state,) = checkpoint["rng_state"]
    saved = state.get(LANES, ())
    if len(saved) == num_lanes:
        state.update(saved[lane])
    elif lane == 0:
        logger.warning(
            "the checkpoint has the random states of %d lanes, this run has %d: dropout differs from now on",
            max(1, len(saved)),
            num_lanes,
        )


TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""Names of the iterators and of their series of plans."""


class Session:
    """The parts of a run that Megatron-LM does not know. `theirs` are its arguments; it sets iteration and consumed
    samples there later. `position` has the coefficients of the cost model, `flops` counts steps of the training data.
    """

    def __init__(self, theirs: argparse.Namespace, planned: Planned) -> None:
        self.position = Position()
        self.flops = StepFlops()
        self._chunks: list[torch.nn.Module] = []
        self._routing: Routing | None = None
        self.device = collective_device()
        self._theirs = theirs
        self._refining: Refining | None = None
        self._wrappers: dict[str, ForeignIteratorWrapper] = {}
        layer_choice = layers.choose(layer_needs(with_heads(theirs), planned.settings), self.device)
        linear_attention = linear_attention_of(theirs)
        if linear_attention is not None:
            of_rank = linear_attention.of_rank(theirs.tensor_model_parallel_size)
            run_on_all_ranks(lambda: prepare_linear_kernel(of_rank, theirs.params_dtype, self.device), self.device)
        runtime = PlannedRuntime.agree(
            planned.settings,
            arguments=planned.arguments,
            device=self.device,
            layers=layer_choice,
            model_shape=model_shape(theirs, planned.settings.pipeline_layers),
            hardware=first_hardware(planned.settings, self.device, layer_choice),
        )
        self.runtime = runtime.start()
        of_ranks = theirs.tensor_model_parallel_size, theirs.params_dtype, self.device
        try:
            ready = self.runtime.warm_up()
            tuned = linear_warm_up.warm_up(runtime.groups, runtime.model_shape, runtime.options, *of_ranks)
        except BaseException:
            self.runtime.close()
            raise
        for line in filter(None, (layer_choice.describe(), *self.runtime.describe(), ready, tuned)):
            log_single_rank(logger, logging.INFO, f"dynamic CP: {line}")

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

        Returns what the script's loss function logged, for each micro-batch. Without a backward pass it is one entry,
        summed over the lanes: some of Megatron-LM's means are over micro-batches, which here have any size.
        DynamicCPError, on all ranks: the data ended, or as `ForeignIteratorWrapper.wrap`.
        """
        chunks = list(model) if isinstance(model, list) else [model]
        if not self._chunks and (checked := self.runtime.check_attention(chunks)):
            log_single_rank(logger, logging.INFO, f"dynamic CP: {checked}")
        self._chunks = chunks
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if not forward_only:
            if self._refining is None:
                self._refining = Refining(self.runtime, chunks, self.position, forward_step_func)
            forward_step_func = self._refining.forward_step
        wrapper = self._wrapper(iterators, chunks)
        if not forward_only:
            iteration = self._theirs.curr_iteration + 1
            phase.enter(f"iteration {iteration}, plan and samples")
        try:
            step = next(wrapper)
        except StopIteration:
            raise DataError(
                f"the {iterators[0].name} data ended at step {wrapper.step}, before the run did: give more data, or "
                "lower --train-iters or --eval-iters"
            ) from None
        if not forward_only:
            phase.enter(f"iteration {iteration}, forward and backward passes")
        logged = run_schedule(
            chunks,
            step,
            seq_length,
            forward_only=forward_only,
            rank_tokens=wrapper.rank_tokens,
            verify_messages=self.runtime.settings.verify == "full",
            forward_step_func=forward_step_func,
        )
        if forward_only:
            return sum_over_lanes(logged)
        phase.enter(f"iteration {iteration}, the optimizer's step")
        self.flops.add(batch_flops(self.runtime.model_shape, step.seqlen_sum, step.seqlen_squared_sum).model_flops)
        return logged

    def _wrapper(self, iterators: list[LaneIterator], chunks: list[torch.nn.Module]) -> ForeignIteratorWrapper:
        name = iterators[0].name
        if name not in self._wrappers:
            items = [iterator.items for iterator in iterators]
            first_step, consumed_samples = self._first_step(name)
            self._wrappers[name] = wrap_data_iterator(
                items if len(items) > 1 else items[0],
                chunks,
                plan_source=self.runtime.plan_source(
                    name, self._refining.hardware if name == TRAIN and self._refining is not None else None
                ),
                groups=self.runtime.groups,
                global_batch_size=self._theirs.global_batch_size,
                verify=self.runtime.settings.verify,
                first_step=first_step,
                consumed_samples=consumed_samples,
            )
        return self._wrappers[name]

    def _first_step(self, name: str) -> tuple[int, int]:
        """Return (number of a series' next global batch, samples consumed before). Both follow from what was consumed,
        so that a resumed run gives its plans the same names."""
        if name == TRAIN:
            return self._theirs.iteration + 1, self._theirs.consumed_train_samples
        if name == VALIDATION and not self._theirs.skip_train:
            consumed_samples = self._theirs.consumed_valid_samples
            return consumed_samples // self._theirs.global_batch_size, consumed_samples
        return 0, 0

    def show_routers(self, num_micro_batches: int) -> None:
        """Sum up what routers did in the latest step, and have Megatron-LM log it. Collective."""
        self._routing = sum_over_routers(self._chunks, self.device)
        if self._routing is not None:
            tell_tracker(self._routing, self._chunks, num_micro_batches)

    def end_step(
        self,
        iteration: int,
        *,
        losses: Mapping[str, Any],
        learning_rate: float | None,
        grad_norm: float | None,
        elapsed_s: float,
    ) -> StepRecord:
        """Return the record of an iteration, equal on all ranks but for `wait_s`; dump it, and refine the cost model.

        Collective: one all-reduce of the job, more where the cost model is refined. `losses` is what Megatron-LM logs,
        empty before the last pipeline stage; the first one is recorded. The other figures are None where nothing is
        trained.
        """
        wrapper = self._wrappers[TRAIN]
        assert wrapper.plan is not None
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if losses and dist.get_rank() == dist.get_world_size() - 1:
            sums[0] = next(iter(losses.values()))
        sums[1] = wrapper.exchange_stats.bytes_sent
        with in_phase(f"the sums of iteration {iteration}"):
            dist.all_reduce(sums)
            loss, exchanged_bytes = sums.tolist()
        stats = wrapper.stats
        record = StepRecord(
            plan=wrapper.plan.facts,
            loss=loss,
            grad_norm=0.0 if grad_norm is None else float(grad_norm),
            learning_rate=0.0 if learning_rate is None else float(learning_rate),
            elapsed_s=elapsed_s,
            wait_s=stats.draw_s + stats.plan_wait_s + stats.reroute_s,
            flops=self.flops.latest,
            exchanged_bytes=int(exchanged_bytes),
            routing=self._routing,
        )
        if self.runtime.dump is not None:
            self.runtime.dump.write_iteration(dump_entry(iteration, record))
        assert self._refining is not None
        self._refining.end_step(iteration)
        setattr(self._theirs, COEFFICIENTS, self.position.coefficients)
        return record

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the coefficients and random states of a checkpoint that was read and not yet applied. The
        coefficients are among Megatron-LM's arguments, which every checkpoint format saves."""
        self.position.coefficients = getattr(checkpoint.get("args"), COEFFICIENTS, None)
        setattr(self._theirs, COEFFICIENTS, self.position.coefficients)
        if self._theirs.hidden_dropout > 0 and not self._theirs.no_load_rng:
            choose_lane(checkpoint, self.runtime.groups.lane, self.runtime.groups.num_lanes)

    def close(self) -> None:
        """End the planner and the threads that fetch plans."""
        for wrapper in self._wrappers.values():
            wrapper.close()
        self.runtime.close()


def sum_over_lanes(logged: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return [one dict of sums over micro-batches and lanes], [] where nothing was logged. `logged` has for each
    micro-batch key -> [sum, number of tokens]; a script that logs something else raises DataError."""
    if not logged:
        return []
    sums = {}
    for key in logged[0]:
        values = [entry[key].reshape(-1) for entry in logged]
        if values[0].numel() != 2:
            raise DataError(
                f"the loss function of the script logs {values[0].numel()} values as {key!r}, [sum of losses, number "
                "of tokens] is needed"
            )
        sums[key] = torch.stack(values).sum(dim=0)
        dist.all_reduce(sums[key], group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return [sums]
