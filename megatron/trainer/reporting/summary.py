"""What a run did, in a few lines at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron.trainer.reporting.log import StepRecord


@dataclass(slots=True)
class RunSummary:
    """Sums over the iterations of this process; the first one is left out of times, it loads and compiles."""

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
        """Count an iteration."""
        self.num_iterations += 1
        self.num_tokens += record.num_tokens
        self.num_fallbacks += record.is_fallback
        self.exchanged_bytes += record.exchanged_bytes
        self.computed_tokens += record.num_tokens / (1 - record.padding_fraction)
        self.buckets_of_cp_size.update(record.cp_histogram)
        if self.num_iterations == 1:
            return
        self.num_timed += 1
        self.timed_tokens += record.num_tokens
        self.elapsed_s += record.elapsed_s
        self.predicted_s += record.predicted_s
        self.planner_s += record.planner_s
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
