"""What a step did: its record, the log line and scalars made of records, and a summary of the run.

The line is Megatron-LM's (` [time] iteration 5/ 100 | consumed samples: ... | lm loss: ... |`), for its parsers,
followed by plan facts. Tokens and FLOPs are those of the whole job, without padding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from operator import attrgetter
from pathlib import Path
from typing import Any

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.plans.lane_plan import PlanFacts
from dynamic_cp.plans.serialize import format_cp_sizes
from megatron.dynamic_cp.flags.features import FUTURE_LOSS
from megatron.dynamic_cp.step.schedule import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One iteration.

    Attributes:
        loss: mean over the unmasked tokens of the global batch.
        elapsed_s: wall time.
        wait_s: part of elapsed_s in which rank 0 waited for the plan and for packed samples.
        flops: of the whole job, from true lengths.
        exchanged_bytes: sent for attention by all ranks.
        routing: of tokens to experts; None for a dense model.
        future_losses: one per depth of multi-token prediction, as `loss`.
        peak_bytes: highest allocation of torch on this rank so far; None on the CPU.
        share_of_others: share of the cores that other processes took; None if unknown (GPUs).
    """

    plan: PlanFacts
    loss: float
    grad_norm: float
    learning_rate: float
    elapsed_s: float
    wait_s: float
    flops: float
    exchanged_bytes: int
    share_of_others: float | None = None
    routing: Routing | None = None
    future_losses: tuple[float, ...] = ()
    peak_bytes: int | None = None


def dump_entry(iteration: int, record: StepRecord) -> dict[str, Any]:
    """Return an iteration's entry in the dump: the fields of `dynamic_cp.decide.report.run.RunRecord` and some more."""
    plan = record.plan
    return {
        "iteration": iteration,
        "predicted_s": plan.predicted_s,
        "measured_s": record.elapsed_s,
        "loss": record.loss,
        "num_microbatches": plan.num_microbatches,
        "cp_histogram": dict(plan.cp_histogram),
        "padding": plan.padding_fraction,
        "imbalance": plan.imbalance,
        "planner_s": plan.planner_s,
        "exposed_s": record.wait_s,
        "tokens": plan.seqlen_sum,
        "samples": plan.num_samples,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "exchanged_bytes": record.exchanged_bytes,
        "is_fallback": plan.fallback is not None,
        **({"num_servers": plan.num_servers} if plan.num_servers else {}),
        **({"future_losses": list(record.future_losses)} if record.future_losses else {}),
        **{name: value for name in ("peak_bytes", "share_of_others") if (value := getattr(record, name)) is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The iterations of one log line; figures are means over them."""

    records: tuple[StepRecord, ...]
    world_size: int

    def mean(self, name: str) -> float:
        """Return the mean of a field of records, or of their plans (`plan.imbalance`)."""
        return sum(map(attrgetter(name), self.records)) / len(self.records)

    def routing_mean(self, name: str) -> float:
        """Return the mean of a field of LayerRouting over iterations and layers; 0.0 for a dense model."""
        return sum(one.routing.mean(name) for one in self.records if one.routing) / len(self.records)

    @property
    def router_losses(self) -> dict[str, float]:
        """The training losses of routers, without their coefficients, under Megatron-LM's names."""
        routing = self.records[-1].routing
        if routing is None:
            return {}
        return {name: self.routing_mean(field) for name, field in _losses_of(routing)}

    @property
    def future_losses(self) -> dict[str, float]:
        """Mean losses of multi-token prediction, under Megatron-LM's names."""
        of_depths = zip(*(record.future_losses for record in self.records), strict=True)
        return {FUTURE_LOSS.format(depth): sum(losses) / len(losses) for depth, losses in enumerate(of_depths, 1)}

    @property
    def tokens_per_s(self) -> float:
        return self.mean("plan.seqlen_sum") / self.mean("elapsed_s")

    @property
    def tflops_per_s_per_rank(self) -> float:
        return self.mean("flops") / self.mean("elapsed_s") / self.world_size / 1e12


def iteration_line(interval: Interval, *, iteration: int, train_iters: int, consumed_samples: int) -> str:
    """Return the log line after `iteration`."""
    last = interval.records[-1]
    histogram: Counter[int] = Counter()
    for record in interval.records:
        histogram.update(record.plan.cp_histogram)
    num_pooled = sum(record.plan.num_servers > 0 for record in interval.records)
    fields = [
        f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1e3 * interval.mean('elapsed_s'):.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {interval.tflops_per_s_per_rank:.4f}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.plan.num_samples:5d}",
        f"lm loss: {interval.mean('loss'):.6E}",
        *(f"{name}: {value:.6E}" for name, value in interval.router_losses.items()),
        *(f"{name}: {loss:.6E}" for name, loss in interval.future_losses.items()),
        f"grad norm: {last.grad_norm:.3f}",
        f"num_microbatches: {last.plan.num_microbatches}",
        format_cp_sizes(histogram),
        *([f"in a pool: {num_pooled} of {len(interval.records)}"] if num_pooled else []),
        f"tokens: {interval.mean('plan.seqlen_sum'):.0f}",
        f"padding: {100 * interval.mean('plan.padding_fraction'):.1f}%",
        f"predicted time (ms): {1e3 * interval.mean('plan.predicted_s'):.1f}",
        f"measured/predicted: {interval.mean('elapsed_s') / interval.mean('plan.predicted_s'):.3f}",
        *([] if last.share_of_others is None else [f"other processes: {interval.mean('share_of_others'):.1%}"]),
        f"planner (ms): {1e3 * interval.mean('plan.planner_s'):.1f}",
        f"waited for it (ms): {1e3 * interval.mean('wait_s'):.1f}",
        f"imbalance: {interval.mean('plan.imbalance'):.3f}",
        *([] if last.routing is None else [f"imbalance of experts: {interval.routing_mean('imbalance'):.3f}"]),
        f"exchanged: {interval.mean('exchanged_bytes') / 1e6:.2f} MB",
        f"tokens/s: {interval.tokens_per_s:.0f}",
    ]
    return " | ".join(fields) + " |"


def validation_line(split: str, iteration: int, loss: float) -> str:
    """Return the log line of an evaluation; `loss` is the mean over its tokens."""
    perplexity = exp(min(20.0, loss))
    return f" {split} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"


def _losses_of(routing: Routing) -> list[tuple[str, str]]:
    """Return (Megatron-LM's name, field) of each training loss of routers."""
    aux = [("load_balancing_loss", "aux_loss")] if routing.has_aux_loss else []
    return aux + ([("z_loss", "z_loss")] if routing.has_z_loss else [])


def layer_scalars(interval: Interval) -> dict[str, float]:
    """Return each layer's routing in the last iteration, under Megatron-LM's names, which count layers from 0."""
    routing = interval.records[-1].routing
    if routing is None:
        return {}
    fields = [*_losses_of(routing), ("imbalance", "imbalance")]
    return {
        f"moe/{name}_layer_{number - 1}": getattr(layer, field)
        for name, field in fields
        for number, layer in routing.layers.items()
    }


def plan_scalars(interval: Interval) -> dict[str, float]:
    of_experts = {"dynamic-cp/imbalance-of-experts": interval.routing_mean("imbalance")}
    return {
        **(of_experts if interval.records[-1].routing else {}),
        "dynamic-cp/num-microbatches": interval.records[-1].plan.num_microbatches,
        "dynamic-cp/tokens-per-second": interval.tokens_per_s,
        "dynamic-cp/padding": interval.mean("plan.padding_fraction"),
        "dynamic-cp/predicted-time": interval.mean("plan.predicted_s"),
        "dynamic-cp/planner-time": interval.mean("plan.planner_s"),
        "dynamic-cp/wait-time": interval.mean("wait_s"),
        "dynamic-cp/imbalance": interval.mean("plan.imbalance"),
        "dynamic-cp/exchanged-bytes": interval.mean("exchanged_bytes"),
    }


class Scalars:
    """Writes scalars under Megatron-LM's names to TensorBoard and Weights & Biases; silent without either.

    `folder` is for TensorBoard's event files, `wandb` for wandb.init, whose environment variables (WANDB_MODE=offline
    and others) apply, too; `per_layer` adds each layer's routing. InvalidInputError if wandb does not start.
    """

    def __init__(
        self, folder: str | None = None, wandb: Mapping[str, Any] | None = None, *, per_layer: bool = False
    ) -> None:
        self._per_layer = per_layer
        self._writer: Any = None
        self._wandb_run: Any = None
        if wandb is not None:
            self._wandb_run = _start_wandb(wandb)
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(log_dir=folder)

    def write(self, interval: Interval, iteration: int) -> None:
        last = interval.records[-1]
        self._write(
            {
                "lm loss": interval.mean("loss"),
                **interval.future_losses,
                "grad-norm": last.grad_norm,
                "learning-rate": last.learning_rate,
                "batch-size": last.plan.num_samples,
                "iteration-time": interval.mean("elapsed_s"),
                "throughput": interval.tflops_per_s_per_rank,
                **interval.router_losses,
                **(layer_scalars(interval) if self._per_layer else {}),
                **plan_scalars(interval),
            },
            iteration,
        )

    def write_validation(self, split: str, loss: float, iteration: int) -> None:
        self._write({f"lm loss {split}": loss}, iteration)

    def _write(self, scalars: Mapping[str, float], iteration: int) -> None:
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, iteration)
        if self._wandb_run is not None:
            self._wandb_run.log(dict(scalars), step=iteration)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb_run is not None:
            self._wandb_run.finish()


def _start_wandb(options: Mapping[str, Any]) -> Any:
    import wandb  # most installations lack it

    try:
        Path(options["dir"]).mkdir(parents=True, exist_ok=True)
        return wandb.init(**options)
    except (wandb.Error, OSError) as error:
        raise InvalidInputError(
            f"--wandb-project {options['project']}: wandb does not start ({type(error).__name__}: {error}): log "
            "in with `wandb login`, or set WANDB_MODE=offline"
        ) from error


@dataclass(slots=True)
class RunSummary:
    """Sums over the iterations of this process. Times leave out the first one, which loads and compiles."""

    num_iterations: int = 0
    num_timed: int = 0
    num_tokens: int = 0
    num_fallbacks: int = 0
    elapsed_s: float = 0.0
    predicted_s: float = 0.0
    planner_s: float = 0.0
    wait_s: float = 0.0
    timed_tokens: int = 0
    exchanged_bytes: int = 0
    computed_tokens: float = 0.0
    taken_s: float | None = None
    buckets_of_cp_size: Counter[int] = field(default_factory=Counter)

    def add(self, record: StepRecord) -> None:
        self.num_iterations += 1
        self.num_tokens += record.plan.seqlen_sum
        self.num_fallbacks += record.plan.fallback is not None
        self.exchanged_bytes += record.exchanged_bytes
        self.computed_tokens += record.plan.seqlen_sum / (1 - record.plan.padding_fraction)
        self.buckets_of_cp_size.update(record.plan.cp_histogram)
        if self.num_iterations == 1:
            return
        self.num_timed += 1
        self.timed_tokens += record.plan.seqlen_sum
        self.elapsed_s += record.elapsed_s
        self.predicted_s += record.plan.predicted_s
        self.planner_s += record.plan.planner_s
        self.wait_s += record.wait_s
        if record.share_of_others is not None:
            self.taken_s = (self.taken_s or 0.0) + record.share_of_others * record.elapsed_s

    def describe(self) -> str:
        """Return the lines, "" for a run without iterations."""
        if not self.num_iterations:
            return ""
        num_buckets = self.buckets_of_cp_size.total()
        sizes = ", ".join(
            f"{size}: {number / num_buckets:.0%}" for size, number in sorted(self.buckets_of_cp_size.items())
        )
        lines = [
            f"summary of {self.num_iterations} iterations, {self.num_tokens} tokens, "
            f"{1 - self.num_tokens / self.computed_tokens:.1%} padding",
            f"  buckets by CP size: {sizes}; {self.exchanged_bytes / 1e6:.1f} MB exchanged for attention",
        ]
        if self.num_timed:
            step_ms, planner_ms, wait_ms = (
                1e3 * seconds / self.num_timed for seconds in (self.elapsed_s, self.planner_s, self.wait_s)
            )
            others = ""
            if self.taken_s is not None:
                others = f"; other processes took {self.taken_s / self.elapsed_s:.1%} of the cores"
            lines += [
                f"  {step_ms:.1f} ms per iteration, {self.timed_tokens / self.elapsed_s:.0f} tokens/s, "
                f"measured/predicted {self.elapsed_s / self.predicted_s:.3f} (without the first iteration){others}",
                f"  planner {planner_ms:.1f} ms per iteration beside the steps, waited for plans and samples "
                f"{wait_ms:.2f} ms ({wait_ms / step_ms:.2%})",
            ]
        if self.num_fallbacks:
            lines.append(f"  {self.num_fallbacks} iterations ran the static plan because the planner failed: see above")
        return "\n".join(lines)
