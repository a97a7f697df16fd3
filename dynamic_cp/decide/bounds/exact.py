"""The best plan of a tiny batch, by mixed-integer programming: `--search exact`, and an oracle for tests.

For every number of micro-batches one program decides packing, CP sizes, exchanges, lanes and order together:

    hold[sample, row, group]   a sample is in the bucket of an aligned group of lanes in a micro-batch (row)
    runs[row, group]           the group has a bucket there; the groups of a row tile the lanes
    used[row, group, option]   its exchange, and whether it passes on states of linear attention
    end[operation, lane]       when a lane has done an operation; lanes of one bucket wait for each other

Prices are exact: they are convex and piecewise linear in the sums over a bucket, so each exposed exchange is one
variable above zero and above its line. Durations of groups that do not run are zero, hence a lane's duration is a sum
and needs no large constant; only waiting for the other lanes of a bucket does. Batches that take at most a
minute or two have about 10 samples on 4 lanes.

Needs `pulp` with the solver HiGHS (`pip install megatron-dynamic-cp[exact]`). The search is limited by counted
nodes, so its answer does not depend on the clock.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from dynamic_cp.decide.bounds import bound_at
from dynamic_cp.errors import InfeasibleSampleError, InvalidInputError, UnsupportedFeatureError
from dynamic_cp.mechanisms.stage_attention import Convex
from dynamic_cp.memory.activations import tokens_of_states
from dynamic_cp.pipeline.schedule import EMBEDDING, HEAD, pipeline_graph
from dynamic_cp.pipeline.simulator import makespan_ns
from dynamic_cp.plans.padding import padded_seqlen, round_up
from dynamic_cp.plans.stretches import states_of_sample
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.table import CONSTANT, convex_of, prices_of
from dynamic_cp.pricing.work import lengths_of
from dynamic_cp.types import STATE_EXCHANGES, Bucket, MicroBatch, Plan, Sample

_FEASIBLE = 2
"""HiGHS has values for all variables (kSolutionStatusFeasible)."""
TOLERANCE = 1e-6
"""Plans that differ less are equally good: the solver computes in floats and rounds no duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """What the exact search found.

    Attributes:
        plan: the best plan; None when none was found within the limits, or none beats `known_s` by TOLERANCE.
        makespan_s: its simulated makespan; `known_s` without a plan.
        bound_s: no plan with the tried numbers of micro-batches is faster.
        status: "optimal" (to TOLERANCE), or "limit" when a search was cut short.
        num_microbatches: what was tried.
    """

    plan: Plan | None
    makespan_s: float
    bound_s: float
    status: Literal["optimal", "limit"]
    num_microbatches: tuple[int, ...]


class _Group(NamedTuple):
    """Aligned lanes; options: rows of the price table, and as many behind its last for buckets that pass on states."""

    first_lane: int
    k: int
    link: int
    options: tuple[int, ...]

    @property
    def lanes(self) -> range:
        return range(self.first_lane, self.first_lane + (1 << self.k))


def exact_plan(
    samples: Iterable[Sample],
    cost_model: CostModel,
    *,
    counts: tuple[int, int] | None = None,
    allow_empty: bool = True,
    padded: bool = True,
    known_s: float = float("inf"),
    max_nodes: int = 200_000,
) -> ExactPlan:
    """Return the plan with the least makespan over a range of numbers of micro-batches.

    Args:
        counts: least and most micro-batches; None: from the fewest that hold all tokens, to one per sample.
        allow_empty: whether lanes may be without samples in a micro-batch.
        padded: whether prices and limits are of padded lengths; False only with a cost model that ignores padding.
        known_s: makespan of a plan that is known; only better ones are looked for.
        max_nodes: nodes of the search tree, per number of micro-batches.

    Raises:
        UnsupportedFeatureError: pulp or HiGHS is not installed.
        InvalidInputError: tokens of a rank are rounded (sequence parallelism), or no plan exists in the range.
    """
    pulp = _pulp()
    samples = tuple(sorted(samples, key=lambda sample: (-sample.seqlen, sample.sample_id)))
    _check_provable(samples, cost_model)
    topology, limit = cost_model.topology, cost_model.options.max_tokens_per_rank
    multiple = topology.num_microbatches_multiple
    fewest = -(-sum(sample.seqlen for sample in samples) // (topology.num_lanes * limit))
    first = round_up(max(1, fewest if counts is None else counts[0]), multiple)
    last = max(first, round_up(len(samples), multiple)) if counts is None else counts[1]
    best, best_s, bound_s, is_cut = None, known_s, known_s, False
    tried = tuple(range(first, last + 1, multiple))
    lengths = lengths_of(samples, cost_model.model)
    below_s = {count: bound_at(lengths, cost_model.table, topology, limit, count) for count in tried}
    for num_microbatches in sorted(tried, key=lambda count: below_s[count]):
        if below_s[num_microbatches] >= best_s:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pulp 3 announces the names of pulp 4
            program = _Program(pulp, samples, cost_model, num_microbatches, allow_empty=allow_empty, padded=padded)
            found, proven_s, was_cut = program.solve(best_s, max_nodes)
        bound_s, is_cut = min(bound_s, max(proven_s, below_s[num_microbatches])), is_cut or was_cut
        if found is not None:
            found_s = makespan_ns(found, cost_model) / 1e9
            if found_s < best_s:
                best, best_s = found, found_s
    if best is None and best_s == float("inf") and not is_cut:
        raise InvalidInputError(
            f"no plan with {first} .. {last} micro-batches exists for {len(samples)} samples: allow more micro-batches"
        )
    bound_s = min(bound_s, best_s)
    status: Literal["optimal", "limit"] = "limit" if is_cut and bound_s < best_s * (1 - TOLERANCE) else "optimal"
    return ExactPlan(plan=best, makespan_s=best_s, bound_s=bound_s, status=status, num_microbatches=tried)


def _check_provable(samples: Sequence[Sample], cost_model: CostModel) -> None:
    """Refuse samples and a model for which there is no plan, or whose plan the program does not describe."""
    table = cost_model.table
    if table.rank_token_multiple > 1:
        raise InvalidInputError(
            f"tokens of a rank are rounded to a multiple of {table.rank_token_multiple}, the exact search needs 1: "
            "plan without sequence parallelism"
        )
    if not samples:
        raise InvalidInputError("the global batch has 0 samples, at least 1 is needed: give samples")
    longest, held = max(sample.seqlen for sample in samples), int(table.capacities.max())
    if longest > held:
        raise InfeasibleSampleError(
            f"a sample has {longest} tokens, the largest group holds {held}: raise the token limit or the CP size",
            seqlen=longest,
            capacity_tokens=held,
        )


def _pulp() -> Any:
    try:
        import highspy  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401  # pulp's HiGHS
        import pulp  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"the exact search needs {error.name}, which is not installed: pip install megatron-dynamic-cp[exact]"
        ) from error
    return pulp


class _Program:
    """The program of one number of micro-batches; times are in units of `unit_s`."""

    def __init__(
        self,
        pulp: Any,
        samples: Sequence[Sample],
        cost_model: CostModel,
        num_microbatches: int,
        *,
        allow_empty: bool,
        padded: bool,
    ) -> None:
        self.pulp, self.samples, self.cost_model, self.padded = pulp, samples, cost_model, padded
        self.rows = range(num_microbatches)
        self.allow_empty = allow_empty
        topology, table = cost_model.topology, cost_model.table
        self.num_rows = len(table.terms)
        self.most_states = sum(map(states_of_sample, self.samples))
        self.groups = [
            _Group(lane, k, link, self._options(k, link))
            for k in range(len(table.capacities))
            if k == 0 or table.capacities[k] > 0
            for lane in range(0, (topology.num_lanes >> k) << k, 1 << k)
            for link in (int(table.links[k, lane >> k]),)
        ]
        self.problem = pulp.LpProblem("exact", pulp.LpMinimize)
        self.unit_s = self._latest_s() / 1000.0
        self.makespan = self._number("makespan")
        self.hold: dict[tuple[int, int, int], Any] = {}
        self.runs: dict[tuple[int, int], Any] = {}
        self.used: dict[tuple[int, int], dict[int, Any]] = {}
        self.problem += self.makespan
        self._pack()
        self.durations = [[self._price(row, index) for index in range(len(self.groups))] for row in self.rows]
        blocks = range(topology.num_lanes // topology.expert_lanes if topology.expert_lanes > 1 else 0)
        self.block_durations = [[self._block_price(row, block) for block in blocks] for row in self.rows]
        self._schedule()

    def solve(self, below_s: float, max_nodes: int) -> tuple[Plan | None, float, bool]:
        """Return (a plan faster than `below_s` or None, seconds that none beats, whether the search was cut short)."""
        if below_s < float("inf"):
            self.problem += self.makespan <= below_s * (1 - TOLERANCE) / self.unit_s
        solver = self.pulp.HiGHS(msg=False, gapRel=1e-7, mip_max_nodes=max_nodes, threads=1)
        # One by one: pulp's `solve` ends in a KeyError where the nodes were not enough.
        solver.createAndConfigureSolver(self.problem)
        solver.buildSolverModel(self.problem)
        solver.callSolver(self.problem)
        highs = self.problem.solverModel
        status = highs.modelStatusToString(highs.getModelStatus())
        if "nfeasible" in status:
            return None, below_s * (1 - TOLERANCE), False
        for variable, value in zip(self.problem.variables(), highs.getSolution().col_value, strict=True):
            variable.varValue = value
        found = self._plan() if highs.getInfo().primal_solution_status == _FEASIBLE else None
        # Chunks, edges and hops are rounded to nanoseconds, each by half of one at most.
        proven_s = highs.getInfo().mip_dual_bound * self.unit_s - 1.5e-9 * self.num_operations
        return found, max(0.0, proven_s), status != "Optimal"

    def _options(self, k: int, link: int) -> tuple[int, ...]:
        table = self.cost_model.table
        rows = range(int(table.first_option[k, link]), int(table.end_option[k, link]))
        passes = k > 0 and self.cost_model.may_pass_on_states
        return (*rows, *(self.num_rows + row for row in rows if passes))

    def _number(self, name: str) -> Any:
        return self.pulp.LpVariable(name, lowBound=0)

    def _choice(self, name: str) -> Any:
        return self.pulp.LpVariable(name, cat="Binary")

    def _tokens(self, sample: Sample, k: int) -> int:
        return padded_seqlen(sample.seqlen, int(self.cost_model.table.multiples[k])) if self.padded else sample.seqlen

    def _latest_s(self) -> float:
        """Return a time by which every sensible plan has ended: every sample in a micro-batch of its own."""
        total_s = 0.0
        topology, table = self.cost_model.topology, self.cost_model.table
        for sample in self.samples:
            costs, more_s = [], [0.0]
            for group in self.groups:
                tokens = self._tokens(sample, group.k)
                if tokens <= table.capacities[group.k]:
                    square = self.cost_model.model.density(sample) * tokens * tokens
                    costs.append(self.cost_model.cost(1 << group.k, group.first_lane, tokens, square))
                    if group.options[-1] >= self.num_rows:
                        shifts = self.cost_model.state_shifts[group.k, group.link].sum(axis=0)
                        more_s.append(float(prices_of(shifts, np.float64(tokens), np.float64(square)).sum()))
            cost = max(costs, key=lambda one: one.forward_s + one.backward_s)
            total_s += sum(cost) + cost.p2p_s * 2 * topology.pp_size * topology.vp_size + max(more_s)
        empty = self.cost_model.bucket_cost(Bucket(first_lane=0))
        total_s += len(self.rows) * (sum(empty) + empty.p2p_s * 2 * topology.pp_size * topology.vp_size)
        return total_s * topology.pp_size

    def _pack(self) -> None:
        """Every sample in one bucket, buckets tile the lanes, none holds too much."""
        pulp, table = self.pulp, self.cost_model.table
        for row in self.rows:
            for index, group in enumerate(self.groups):
                runs = self.runs[row, index] = self._choice(f"runs_{row}_{index}")
                held = []
                for at, sample in enumerate(self.samples):
                    tokens = self._tokens(sample, group.k)
                    if tokens <= table.capacities[group.k] and not self._is_mirrored(at, group):
                        hold = self.hold[at, row, index] = self._choice(f"hold_{at}_{row}_{index}")
                        self.problem += hold <= runs
                        held.append((hold, tokens))
                self.problem += (
                    pulp.lpSum(tokens * hold for hold, tokens in held) <= int(table.capacities[group.k]) * runs
                )
                if group.k > 0 or not self.allow_empty:
                    self.problem += pulp.lpSum(hold for hold, _ in held) >= runs
            for lane in range(self.cost_model.topology.num_lanes):
                self.problem += pulp.lpSum(self.runs[row, i] for i, g in enumerate(self.groups) if lane in g.lanes) == 1
        for at in range(len(self.samples)):
            self.problem += pulp.lpSum(hold for key, hold in self.hold.items() if key[0] == at) == 1

    def _is_mirrored(self, at: int, group: _Group) -> bool:
        """Return whether the longest sample need not be tried there: lanes that are alike can be exchanged."""
        num_lanes, links = self.cost_model.topology.num_lanes, self.cost_model.table.links
        alike = num_lanes & (num_lanes - 1) == 0 and (links == links[:, :1]).all()
        return at == 0 and group.first_lane > 0 and bool(alike)

    def _price(self, row: int, index: int) -> tuple[Any, Any, Any]:
        """Return forward and backward of a chunk and the tokens of a rank, all zero where the group does not run."""
        pulp, group = self.pulp, self.groups[index]
        vp_size = self.cost_model.topology.vp_size
        size, name = 1 << group.k, f"{row}_{index}"
        runs = self.runs[row, index]
        held = [
            (self.hold[at, row, index], self._tokens(sample, group.k), self.cost_model.model.density(sample))
            for at, sample in enumerate(self.samples)
            if (at, row, index) in self.hold
        ]
        tokens = pulp.lpSum(count * hold for hold, count, _ in held)
        squares = pulp.lpSum(density * count * count * hold for hold, count, density in held)
        used = {group.options[0]: runs}
        if len(group.options) > 1:
            used = {option: self._choice(f"used_{name}_{option}") for option in group.options}
            self.problem += pulp.lpSum(used.values()) == runs
        self.used[row, index] = used
        if group.options[-1] >= self.num_rows:
            self._limit_states(row, index)
        empty = self.cost_model.bucket_cost(Bucket(first_lane=group.first_lane)) if group.k == 0 else None
        passed_on = [
            states_of_sample(sample, size) * self.hold[at, row, index]
            for at, sample in enumerate(self.samples)
            if (at, row, index) in self.hold
        ]
        sides = []
        for direction, side in enumerate(("forward", "backward")):
            duration = self._number(f"{side}_{name}")
            for option in group.options:
                convex, per_sample_s = self._price_of(group, option, direction)
                exposed = []
                for number, (weight, inner) in enumerate(convex.kinks):
                    shown = self._number(f"shown_{name}_{option}_{direction}_{number}")
                    exposed.append(shown)
                    line = inner.constant * runs + inner.per_token * tokens + inner.per_token2 * squares
                    self.problem += shown >= weight / self.unit_s * line
                linear = convex.linear
                price = linear.constant * runs + linear.per_token * tokens + linear.per_token2 * squares
                price = price / self.unit_s + pulp.lpSum(exposed)
                if per_sample_s:
                    price += per_sample_s / self.unit_s * pulp.lpSum(passed_on)
                most_s = self._most_s(convex, group) + self.most_states * per_sample_s
                most = 0.0 if len(group.options) == 1 else most_s / self.unit_s
                self.problem += duration >= price - most * (runs - used[option])
                if convex.host_s:
                    self.problem += duration >= convex.host_s / self.unit_s * used[option]
            if empty is not None:
                # A bucket with samples costs at least as much as an empty place.
                self.problem += duration >= empty[direction] / self.unit_s * runs
            sides.append(duration * (1.0 / vp_size))
        rank_tokens: Any = tokens * (1.0 / size)
        if empty is not None and self.padded:
            rank_tokens = self._number(f"rank_tokens_{name}")
            self.problem += rank_tokens >= tokens
            self.problem += rank_tokens >= runs
        return sides[0], sides[1], rank_tokens

    def _price_of(self, group: _Group, option: int, direction: int) -> tuple[Convex, float]:
        """Return what a bucket of an option pays, and the seconds that each sample of it adds."""
        terms = self.cost_model.table.terms[option % self.num_rows, direction]
        if option < self.num_rows:
            return convex_of(terms), 0.0
        of_bucket, of_sample = self.cost_model.state_shifts[group.k, group.link, :, direction]
        return convex_of(terms + of_bucket), float(of_sample[CONSTANT])

    def _limit_states(self, row: int, index: int) -> None:
        """Pass on states only where they fit under the token limit; there always, if a run asks for states."""
        prices, group = self.cost_model, self.groups[index]
        limit, sum_of = prices.options.max_tokens_per_rank, self.pulp.lpSum
        of_sample = tokens_of_states(prices.model, prices.topology, prices.options)
        held = sum_of(
            (self._tokens(sample, group.k) / (1 << group.k) + of_sample * states_of_sample(sample))
            * self.hold[at, row, index]
            for at, sample in enumerate(self.samples)
            if (at, row, index) in self.hold
        )
        by_heads = sum_of(used for option, used in self.used[row, index].items() if option < self.num_rows)
        self.problem += held <= limit * self.runs[row, index] + of_sample * self.most_states * by_heads
        if prices.options.state_exchange == "states":
            self.problem += held >= limit * by_heads

    def _block_price(self, row: int, block: int) -> tuple[Any, Any]:
        """Return forward and backward of a chunk on all lanes of a block that share experts, as `pipeline/coupling`."""
        topology, table, sum_of = self.cost_model.topology, self.cost_model.table, self.pulp.lpSum
        size, name = topology.expert_lanes, f"{row}_{block}"
        lanes = range(block * size, (block + 1) * size)
        here = [
            (prices, len(set(lanes) & set(group.lanes)))
            for group, prices in zip(self.groups, self.durations[row], strict=True)
            if not set(lanes).isdisjoint(group.lanes)
        ]
        mean = sum_of(prices[2] * (num_lanes / size) for prices, num_lanes in here)
        routed = self._number(f"routed_{name}")
        self.problem += routed >= table.imbalance * mean
        for prices, _ in here:
            self.problem += routed >= prices[2]
        sides = []
        for direction, side in enumerate(("forward", "backward")):
            longest = self._number(f"longest_{side}_{name}")
            for prices, _ in here:
                self.problem += longest >= prices[direction]
            constant, per_mean, per_routed = (table.expert_terms[direction] / topology.vp_size / self.unit_s).tolist()
            block_s = self._number(f"block_{side}_{name}")
            self.problem += block_s >= longest + constant + per_mean * mean + per_routed * routed
            self.problem += block_s >= table.expert_host_s[direction] / topology.vp_size / self.unit_s
            sides.append(block_s)
        return sides[0], sides[1]

    def _most_s(self, convex: Convex, group: _Group) -> float:
        """Return seconds that no bucket of the group exceeds at the price `convex`."""
        capacity = float(self.cost_model.table.capacities[group.k])
        constant, per_token, per_token2 = convex.linear
        most = constant + max(0.0, per_token) * capacity + max(0.0, per_token2) * capacity * self.samples[0].seqlen * 2
        for weight, inner in convex.kinks:
            most += weight * (max(0.0, inner.constant) + max(0.0, inner.per_token) * capacity)
        return most

    def _schedule(self) -> None:
        """Ends of all operations of all lanes, as in `pipeline/longest_path.py`."""
        topology, table = self.cost_model.topology, self.cost_model.table
        graph = pipeline_graph(topology.pp_size, len(self.rows), topology.vp_size)
        self.num_operations = len(graph.kind)
        latest = self._latest_s() / self.unit_s
        sum_of, block = self.pulp.lpSum, topology.expert_lanes
        edges = (table.edges_s_per_token / self.unit_s).tolist()
        hops = [
            [
                table.hop_s_per_token
                / self.unit_s
                * sum_of(
                    prices[2]
                    for group, prices in zip(self.groups, self.durations[row], strict=True)
                    if lane in group.lanes
                )
                for lane in range(topology.num_lanes)
            ]
            for row in self.rows
        ]
        ends: list[dict[int, Any]] = []  # [operation][lane]
        operations = zip(*(column.tolist() for column in graph[:-1]), strict=True)
        for stage, row, chunk, kind, before, sender, pays in operations:
            earlier = ends[before] if before >= 0 else {}
            edge = sum((edges[2 * which + kind] for which in (EMBEDDING, HEAD) if pays[which]), start=0.0)
            done = {}
            for lane in range(topology.num_lanes):
                here = [
                    prices
                    for group, prices in zip(self.groups, self.durations[row], strict=True)
                    if lane in group.lanes
                ]
                if block > 1:
                    duration = self.block_durations[row][lane // block][kind] + sum_of(edge * one[2] for one in here)
                else:
                    duration = sum_of(prices[kind] + edge * prices[2] for prices in here)
                end = done[lane] = self._number(f"end_{stage}_{row}_{chunk}_{kind}_{lane}")
                for other in range(lane // block * block, (lane // block + 1) * block):
                    self.problem += end >= duration + earlier.get(other, 0)
                    if sender >= 0:
                        self.problem += end >= duration + hops[row][other] + ends[sender][other]
                for other, earlier_end in earlier.items():
                    together = [
                        self.runs[row, i] for i, g in enumerate(self.groups) if lane in g.lanes and other in g.lanes
                    ]
                    if other != lane and together:
                        wait = latest * (1 - sum_of(together))
                        self.problem += end >= duration + earlier_end - wait
            ends.append(done)
        for index in graph.last:
            for end in ends[index].values():
                self.problem += self.makespan >= end

    def _plan(self) -> Plan:
        micro_batches = []
        for row in self.rows:
            buckets = []
            for index, group in enumerate(self.groups):
                if self.runs[row, index].value() < 0.5:
                    continue
                inside = tuple(
                    sample
                    for at, sample in enumerate(self.samples)
                    if (at, row, index) in self.hold and self.hold[at, row, index].value() > 0.5
                )
                option = max(group.options, key=lambda one: self.used[row, index][one].value())
                attention = self.cost_model.attentions[option % self.num_rows]
                buckets.append(
                    Bucket(
                        first_lane=group.first_lane,
                        cp_size=1 << group.k,
                        samples=inside,
                        cp_comm_type=attention.cp_comm_type,
                        inner_cp_size=attention.inner_cp_size,
                        state_exchange=STATE_EXCHANGES[option >= self.num_rows],
                    )
                )
            micro_batches.append(MicroBatch(buckets=tuple(sorted(buckets, key=lambda bucket: bucket.first_lane))))
        return Plan(
            topology=self.cost_model.topology,
            max_tokens_per_rank=self.cost_model.options.max_tokens_per_rank,
            micro_batches=tuple(micro_batches),
            policy="exact",
        )
