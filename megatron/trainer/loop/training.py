"""The training loop: samples -> plan -> micro-batches -> forward and backward -> optimizer -> log; and evaluations.

`--dynamic-cp` and static CP differ only in the policy of the planner.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from dynamic_cp.errors import DynamicCPError
from dynamic_cp.plans.global_batch import GlobalBatch
from dynamic_cp.pricing.work import batch_flops
from megatron.dynamic_cp.agreement import phase
from megatron.dynamic_cp.agreement.verify import keep_beating
from megatron.dynamic_cp.data.data_iterator_wrapper import DataIteratorWrapper, Step
from megatron.dynamic_cp.measuring import Moment, share_of_others, span
from megatron.dynamic_cp.step.schedule import sum_over_job, sum_over_routers
from megatron.trainer.checkpoints import loading
from megatron.trainer.checkpoints.saving import Saver
from megatron.trainer.checkpoints.state import Position
from megatron.trainer.data.build import SampleStream
from megatron.trainer.ending.exits import ExitSignals, closing, exit_signals
from megatron.trainer.ending.stop_guard import StopGuard
from megatron.trainer.flags.settings import Settings, TrainingSettings
from megatron.trainer.loop.refining import Refining
from megatron.trainer.reporting.log import (
    Interval,
    RunSummary,
    StepRecord,
    dump_entry,
    iteration_line,
    validation_line,
)
from megatron.trainer.reporting.profiling import Profiling
from megatron.trainer.setup.run import Run, set_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluates one split; does nothing if it is empty or --eval-iters is 0. Every evaluation takes the first
    --eval-iters global batches of the split, so their losses are comparable."""

    run: Run
    split: str
    stream: SampleStream | None

    @classmethod
    def of(cls, run: Run, split: str) -> Evaluation:
        stream = run.splits.valid if split == "validation" else run.splits.test
        if run.settings.training.eval_iters == 0:
            stream = None
        return cls(run=run, split=split, stream=stream)

    def log(self, iteration: int) -> None:
        """Evaluate and log the mean loss per token. Collective."""
        if self.stream is None:
            return
        phase.enter(f"evaluation after iteration {iteration}")
        loss = self._loss(self.stream, iteration)
        logger.info(validation_line(self.split, iteration, loss))
        self.run.scalars.write_validation(self.split, loss, iteration)

    def _loss(self, stream: SampleStream, iteration: int) -> float:
        run, training = self.run, self.run.settings.training
        loss_sum, num_tokens = 0.0, 0
        batches = (
            (batch, stream.global_batch(batch * training.global_batch_size, training.global_batch_size))
            for batch in range(training.eval_iters)
        )
        with _evaluating(run.model), closing(run.iterator_wrapper(stream, f"{self.split}@{iteration}")) as wrapper:
            for _, _, data in wrapper.steps(batches):
                logged = run.run_schedule(data, wrapper, forward_only=True)
                sums = sum_over_job(logged, exchanged_bytes=0, stop=False, device=run.runtime.device)
                loss_sum, num_tokens = loss_sum + sums.loss_sum, num_tokens + sums.num_tokens
        return loss_sum / max(1, num_tokens)


@contextlib.contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch off dropout, and gradients, which megatron-core's schedules record even in forward-only passes."""
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in chunks:
            chunk.train()


class NotFiniteError(DynamicCPError):
    """Training diverged. Raised on every rank, between two collectives."""


def pretrain(settings: Settings, on_step: Callable[[int, StepRecord], None] | None = None) -> None:
    """Train as `settings` say; DynamicCPErrors are raised on every rank. Collective. Process groups stay open.
    `on_step` is called on every rank with each iteration and its record; for benchmarks and tests."""
    with closing(StopGuard(settings.parallel.stopped_process_timeout)):
        _pretrain(settings, on_step)


def _pretrain(settings: Settings, on_step: Callable[[int, StepRecord], None] | None) -> None:
    started_s = time.monotonic()
    run = set_up(settings)
    position = _first_position(run)
    validation = Evaluation.of(run, "validation")
    with closing(run):
        refining = Refining(run.runtime, run.model, position)
        wrapper = run.iterator_wrapper(run.splits.train, "train", refining.hardware)
        with (
            exit_signals() as signals,
            closing(wrapper),
            closing(Profiling(settings.profiling, settings.logging.tensorboard_dir, run.runtime.device)) as profiling,
        ):
            saver = Saver(run.trainable, settings.checkpoints.save, in_background=settings.checkpoints.async_save)
            loop = Loop(
                run=run,
                wrapper=wrapper,
                refining=refining,
                profiling=profiling,
                saver=saver,
                validation=validation,
                signals=signals,
                started_s=started_s,
                on_step=on_step,
            )
            try:
                interrupted = loop.train(position)
            except NotFiniteError:  # on all ranks: the earlier checkpoint is good
                saver.finish()
                raise
        if not interrupted:
            validation.log(position.iteration)
            Evaluation.of(run, "test").log(position.iteration)


def _first_position(run: Run) -> Position:
    """Return the first position: the start, or that of the checkpoint, which is loaded."""
    position, checkpoints = None, run.settings.checkpoints
    if checkpoints.load is not None:
        phase.enter("loading the checkpoint")
        position = loading.load(
            run.trainable,
            checkpoints.load,
            finetune=checkpoints.finetune,
            required=checkpoints.exit_on_missing_checkpoint,
        )
    if position is None:
        position = Position()
        if run.settings.model.lora_rank is not None and dist.get_rank() == 0:
            logger.warning("no checkpoint is loaded: adapters are trained beside random weights; give --load a model")
    train_iters = run.settings.training.train_iters
    if position.iteration >= train_iters:
        logger.info("nothing to train: iteration %d of %d", position.iteration, train_iters)
    return position


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The objects that every iteration uses. A signal in `signals` asks the run to leave; `started_s` is on the
    monotonic clock; `on_step` is called with each iteration and its record."""

    run: Run
    wrapper: DataIteratorWrapper
    refining: Refining
    profiling: Profiling
    saver: Saver
    validation: Evaluation
    signals: ExitSignals
    started_s: float
    on_step: Callable[[int, StepRecord], None] | None

    def train(self, position: Position) -> bool:
        """Train from `position` on and update it; return whether the run was asked to leave before its end."""
        run, saver, training = self.run, self.saver, self.run.settings.training
        checkpoints = run.settings.checkpoints
        records: list[StepRecord] = []
        summary = RunSummary()
        interrupted = False
        saved = position.iteration if _same_folder(checkpoints.load, checkpoints.save) else None
        first = position.iteration + 1
        steps = self.wrapper.steps(_batches(run.splits.train, position, training))
        while position.iteration < training.train_iters:
            phase.enter(f"iteration {position.iteration + 1}, plan and samples")
            self.profiling.begin(position.iteration + 1)
            with span("iteration %d", position.iteration + 1):
                record, stop, is_writing = self._step(steps)
            self.profiling.end(position.iteration + 1)
            if stop:
                # Saving may keep rank 0 for long; meanwhile it must signal the others that it lives.
                keep_beating()
            if saver.has_unnamed and not is_writing:
                phase.enter(f"iteration {position.iteration + 1}, naming the previous checkpoint")
                saver.finish()
            position.iteration += 1
            position.consumed_samples += record.plan.num_samples
            if position.iteration == first:
                logger.info("first plan: %s", self.wrapper.plan.facts.reason)
            records.append(record)
            summary.add(record)
            if run.runtime.dump is not None:
                run.runtime.dump.write_iteration(dump_entry(position.iteration, record))
            if self.on_step is not None:
                self.on_step(position.iteration, record)
            if position.iteration % run.settings.logging.log_interval == 0:
                _log(run, records, position)
                records.clear()
            finished = position.iteration == training.train_iters
            if _divides(training.eval_interval, position.iteration) and not (stop or finished):
                self.validation.log(position.iteration)
            stop = stop or _divides(training.exit_interval, position.iteration)
            due = _divides(checkpoints.save_interval, position.iteration)
            if checkpoints.save is not None and (due or stop or finished) and saved != position.iteration:
                phase.enter(f"iteration {position.iteration}, saving")
                saver.save(position, wait=stop or finished)
                saved = position.iteration
            if stop and not finished:
                logger.info("leaving after iteration %d (%s)", position.iteration, self.signals.received or "as asked")
                interrupted = True
                break
        if saver.has_unnamed:
            phase.enter("waiting for the files of the last checkpoint")
            saver.finish()
        if summary.num_iterations:
            logger.info("%s", summary.describe())
        return interrupted

    def _step(self, steps: Iterator[Step]) -> tuple[StepRecord, bool, bool]:
        """Run the next of `steps`; return its record, whether any rank wants to stop, and whether any still writes.
        NotFiniteError on every rank if loss or gradient norm is not finite."""
        run, runtime, wrapper = self.run, self.run.runtime, self.wrapper
        started = time.perf_counter()
        on_gpu = runtime.device.type == "cuda"
        began = None if on_gpu else Moment.now()
        iteration, samples, data = next(steps)
        phase.enter(f"iteration {iteration}, forward and backward passes")
        for chunk in run.model:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        logged = run.run_schedule(data, wrapper, forward_only=False, forward_step_func=self.refining.forward_step)
        sums = sum_over_job(
            logged,
            exchanged_bytes=wrapper.exchange_stats.bytes_sent,
            stop=self._wants_stop(),  # after the passes, so that a signal ends the iteration in which it came
            device=runtime.device,
            is_writing=self.saver.is_writing(),
            process_s=0.0 if began is None else time.process_time() - began.process_s,
            num_depths=runtime.model_shape.mtp_num_layers,
        )
        with span("sums over routers"):
            routing = sum_over_routers(run.model, runtime.device)
        others = None if began is None else share_of_others(began, sums.process_s, runtime.topology)
        self.refining.end_step(iteration)
        _check_finite("loss", sums.loss, iteration)
        for future_loss in sums.future_losses:
            _check_finite("loss of multi-token prediction", future_loss, iteration)
        learning_rate = get_canonical_lr_for_logging(run.optimizer.param_groups)
        phase.enter(f"iteration {iteration}, the optimizer's step")
        with span("optimizer"):
            _, grad_norm, _ = run.optimizer.step()
        _check_finite("gradient norm", float(grad_norm), iteration)
        run.scheduler.step(increment=len(samples))
        waits = wrapper.waits
        record = StepRecord(
            plan=wrapper.plan.facts,
            loss=sums.loss,
            future_losses=sums.future_losses,
            grad_norm=float(grad_norm),
            learning_rate=learning_rate,
            elapsed_s=time.perf_counter() - started,
            wait_s=waits.plan_s + waits.pack_s,
            flops=batch_flops(runtime.model_shape, data.seqlen_sum, data.seqlen_squared_sum).model_flops,
            exchanged_bytes=sums.exchanged_bytes,
            share_of_others=others,
            routing=routing,
            peak_bytes=torch.cuda.max_memory_allocated(runtime.device) if on_gpu else None,
        )
        return record, sums.stop, sums.is_writing

    def _wants_stop(self) -> bool:
        """Return whether this rank wants to leave: it got a signal, or its time is over."""
        minutes = self.run.settings.training.exit_duration_in_mins
        is_late = minutes is not None and time.monotonic() - self.started_s > 60 * minutes
        return bool(self.signals.received) or is_late


def _batches(stream: SampleStream, position: Position, training: TrainingSettings) -> Iterator[tuple[int, GlobalBatch]]:
    """Yield (iteration, samples) of every iteration after `position`, which the caller may change meanwhile."""
    consumed_samples, sizes = position.consumed_samples, training.batch_sizes
    for iteration in range(position.iteration + 1, training.train_iters + 1):
        num_samples = sizes.at(consumed_samples)
        yield iteration, stream.global_batch(consumed_samples, num_samples)
        consumed_samples += num_samples


def _divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def _check_finite(what: str, value: float, iteration: int) -> None:
    if not math.isfinite(value):
        raise NotFiniteError(
            f"{what} is {value} at iteration {iteration}: nothing was saved since the last checkpoint; "
            "resume from it with a lower --lr or a smaller --clip-grad"
        )


def _log(run: Run, records: Sequence[StepRecord], position: Position) -> None:
    interval = Interval(records=tuple(records), world_size=run.runtime.topology.world_size)
    logger.info(
        iteration_line(
            interval,
            iteration=position.iteration,
            train_iters=run.settings.training.train_iters,
            consumed_samples=position.consumed_samples,
        )
    )
    run.scalars.write(interval, position.iteration)


def _same_folder(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and os.path.realpath(first) == os.path.realpath(second)
