"""Tables G: plans for lanes that share experts, beside plans of a planner that does not know that they wait.

Both know what experts cost. The ignorant one plans as if each rank had all of them (EP 1), with the same lengths,
limits and prices otherwise; its plan then runs with EP. The lower bound is below every plan, level rows included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.planner.problem import Problem, timed
from benchmarks.planner.report import Row, table
from dynamic_cp.decide.bounds import lower_bound
from dynamic_cp.decide.workloads import draw_lengths
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.types import Experts, ModelShape, PlanOptions, Topology

K = 1024
GOAL = 1.03
"""Most that plans may take over the bound, on average over a table and without a pipeline."""


class Setting(NamedTuple):
    """A line of the table: a workload, a model of `MODELS` and a layout."""

    workload: str
    model: str
    pp: int
    ep: int
    lanes: int
    limit: int
    samples: int
    max_seqlen: int = 128 * K
    tp: int = 1

    @property
    def name(self) -> str:
        """The text that `--cases` searches."""
        return f"{self.workload}_{self.model}_pp{self.pp}_ep{self.ep}_n{self.lanes}"


def _models() -> dict[str, ModelShape]:
    dense = load_model("llama-3-8b")
    return {
        "8b-like": replace(dense, experts=Experts(num_experts=64, topk=2, ffn_hidden_size=dense.ffn_hidden_size // 2)),
        "mixtral-8x7b": load_model("mixtral-8x7b"),
        "qwen3-30b-a3b": load_model("qwen3-30b-a3b"),
    }


SETTINGS = (
    Setting("lognormal-github", "8b-like", 1, 32, 32, 16 * K, 512),
    Setting("lognormal-github", "8b-like", 1, 8, 32, 16 * K, 512),
    Setting("lognormal-github", "8b-like", 1, 8, 8, 16 * K, 128),
    Setting("lognormal-github", "8b-like", 2, 8, 16, 16 * K, 512),
    Setting("lognormal-cc", "8b-like", 1, 32, 32, 16 * K, 2048),
    Setting("github_bal", "8b-like", 1, 32, 32, 16 * K, 512),
    Setting("github_bal", "8b-like", 1, 64, 64, 32 * K, 2048),
    Setting("sft_longalign", "8b-like", 1, 32, 32, 16 * K, 512),
    Setting("lognormal-github", "mixtral-8x7b", 1, 8, 32, 16 * K, 512),
    Setting("github_bal", "mixtral-8x7b", 2, 8, 16, 16 * K, 512),
    Setting("lognormal-github", "qwen3-30b-a3b", 1, 32, 32, 16 * K, 512),
    Setting("lognormal-github", "qwen3-30b-a3b", 1, 8, 32, 16 * K, 512),
    Setting("github_bal", "qwen3-30b-a3b", 4, 8, 8, 16 * K, 512),
)


def problem_of(setting: Setting, *, ep_size: int | None = None) -> Problem:
    """Return the problem of a line; `ep_size`: another number of ranks that share experts."""
    return Problem(
        name=setting.name,
        seqlens=draw_lengths(setting.workload, setting.samples, 0, setting.max_seqlen),
        topology=Topology(
            num_lanes=setting.lanes,
            tp_size=setting.tp,
            pp_size=setting.pp,
            sequence_parallel=setting.tp > 1,
            ep_size=setting.ep if ep_size is None else ep_size,
        ),
        model=_models()[setting.model],
        hardware=load_hardware("h100"),
        options=PlanOptions(max_tokens_per_rank=setting.limit, recompute="full", cp_comm_types=("p2p", "a2a")),
    )


def measure(settings: Sequence[Setting] = SETTINGS) -> list[Row]:
    """Return a row for each setting."""
    return [_compared(one) for one in settings]


def _compared(setting: Setting) -> Row:
    problem = problem_of(setting)
    planned, ms = timed(problem)
    ignorant = problem_of(setting, ep_size=1).planned().plan
    bound = lower_bound(problem.samples, problem.cost_model)
    return {
        **setting._asdict(),
        "plan_s": problem.seconds(planned.plan),
        "ignorant_s": problem.seconds(replace(ignorant, topology=problem.topology)),
        "bound_s": bound.seconds,
        "bound_binds": bound.binds,
        "num_microbatches": planned.plan.num_microbatches,
        "ms": ms,
        "reason": planned.reason,
    }


def markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    return table(
        "lengths | model | PP·EP·lanes | plan s | / bound | ignorant of EP, / bound | / plan | ms",
        (
            [
                row["workload"],
                row["model"],
                f"{row['pp']}·{row['ep']}·{row['lanes']}",
                f"{row['plan_s']:.3f}",
                f"{row['plan_s'] / row['bound_s']:.3f}",
                f"{row['ignorant_s'] / row['bound_s']:.3f}",
                f"{row['ignorant_s'] / row['plan_s']:.3f}",
                f"{row['ms']:.0f}",
            ]
            for row in rows
        ),
        left=2,
    )
