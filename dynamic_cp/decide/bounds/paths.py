"""A lower bound on the makespan of every pipelined plan with a given number of micro-batches, without an LP solver.

Lanes form two classes: those that hold the longest sample (in a given micro-batch) and the others. A makespan is a
maximum of sums of durations, hence convex, so replacing the lanes of a class by one average lane lowers it. What is
left is a game: one player spreads the work of the batch over classes and micro-batches, the other one picks a path
through the operations. ANY mix of paths proves a bound: it crosses forward and backward of micro-batch i of class c
n[c, i] times on average, and the cheapest way to spread the work against these numbers has a closed form
(`_proven_s`). Both players learn by regret matching; the path player's average is the proof.

What the spread must obey, all per lane of the class, above the floors that every bucket pays:
    * alpha * forward + beta * backward, over all lanes, is at least the work of the batch in that direction;
    * backward / forward of every bucket lies between the extremes of the price table;
    * the micro-batch of the longest sample pays at least the price of that sample;
    * embedding and head cost what all tokens cost (spread on their own, which only lowers the bound).
Ignored, which also only lowers it: coupling of lanes, hops, that samples other than the longest are indivisible.

Source: Narayanan et al. 2021 for the schedule; regret matching+ and linear averaging from Tammelin 2014,
arXiv 1407.5042; valid for any mix of paths by LP duality.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dynamic_cp._jit import compiled
from dynamic_cp.arrays import Floats, Ints
from dynamic_cp.pipeline.schedule import EMBEDDING, HEAD, Graph, pipeline_graph

NUM_DIRECTIONS = 5
"""Directions (1 - t, t) of (forward, backward), t = 0, 1/4, .. 1, in which the work is bounded."""
NUM_SLOTS = 6
"""Durations of a micro-batch: forward and backward in the middle, on the first, on the last virtual stage."""
_PROVE_EVERY = 4


class Spread(NamedTuple):
    """What the path player plays against. Class 0 holds the longest sample; seconds are averages over all lanes.

    Attributes:
        shares: [class] -> share of the lanes.
        floors_s: [FORWARD, BACKWARD] of every bucket.
        work_s: [NUM_DIRECTIONS] least work above the floors, per lane.
        least_ratio, inverse_ratio: backward / forward above the floors is at least the one, forward / backward at
            least the other (0 = no limit).
        longest_s: [FORWARD, BACKWARD] of the longest sample above the floors; zeros when it binds nowhere.
        token_s: [embedding forward, embedding backward, head forward, head backward] of all tokens, per lane.
    """

    shares: Floats
    floors_s: Floats
    work_s: Floats
    least_ratio: float
    inverse_ratio: float
    longest_s: Floats
    token_s: Floats


def path_bound_s(
    spread: Spread, pp_size: int, vp_size: int, num_microbatches: int, position: int, steps: int, enough_s: float
) -> float:
    """Return seconds that every plan with `num_microbatches` and the longest sample in `position` takes at least.

    Args:
        spread: the work and where it may go.
        pp_size, vp_size, num_microbatches: the schedule.
        position: micro-batch of the longest sample.
        steps: rounds of the game; more prove more.
        enough_s: stop when this much is proven.
    """
    graph = pipeline_graph(pp_size, num_microbatches, vp_size)
    slot = _slots(pp_size, num_microbatches, vp_size)
    proven_s = _play(slot, graph, spread, num_microbatches, vp_size, position, steps, enough_s)
    # Every operation and every edge is rounded to whole nanoseconds.
    return float(proven_s) - 1e-9 * len(slot)


@lru_cache(maxsize=256)
def _slots(pp_size: int, num_microbatches: int, vp_size: int) -> Ints:
    """Return [operation] -> NUM_SLOTS * micro-batch + which of its durations; a pipeline has at least two stages."""
    graph = pipeline_graph(pp_size, num_microbatches, vp_size)
    slots: Ints = NUM_SLOTS * graph.micro_batch + graph.kind + 2 * graph.pays[:, EMBEDDING] + 4 * graph.pays[:, HEAD]
    return slots


class _Paths(NamedTuple):
    """What the path player knows of each class of lanes, and what it learns.

    Attributes:
        via_list: [class, operation] -> share of the paths that come from the operation before it on its stage, where
            the rest come from the one that sends to it.
        regrets: [class, operation, before | sender].
        ends, end_regrets: [class, stage] -> share of the paths that end there, and its regrets.
        classes, class_regrets: [class] -> share of the paths that are in the class, and its regrets.
        class_values: [class] -> seconds of its mix of paths.
        crossings: [class, row, forward | backward | seconds of edges] of the mix of all.
    """

    via_list: Floats
    regrets: Floats
    ends: Floats
    end_regrets: Floats
    classes: Floats
    class_regrets: Floats
    class_values: Floats
    crossings: Floats


@compiled
def _play(
    slot: Ints, graph: Graph, spread: Spread, num_rows: int, vp_size: int, position: int, steps: int, enough_s: float
) -> float:
    """Return what the average of the path player proves.

    A step of the game: the work lies as it was spread last, so every operation has a duration; the path player moves
    towards the longest paths; the other one moves work to rows that these crossed less.

    Example:
        Two stages, two rows, one class, F lasts 1 s and B 2 s. Mixes begin even: half of what reaches B1 of the first
        stage came by its own list, half from the second stage. The second half is longer, regret grows there, and soon
        nearly all paths are F1, then F1 B1 F2 B2 of the second stage, then B2: 9 s. They cross row 1 for 4 s and row 2
        for 5 s, so some work moves from row 2 to row 1, until the cheapest spread against the average of the crossings
        is the best proof that there is.

    Args:
        slot: of `_slots`.
        graph: of the pipeline; hops take no time.
        num_rows .. enough_s: as in `path_bound_s`.
    """
    shares, token_s = spread.shares, spread.token_s
    num_classes, num_operations, num_stages = len(shares), len(slot), len(graph.last)
    # Work of either kind (least and largest backward / forward) and tokens: where it lies, what it paid.
    kinds = 3 if token_s.sum() > 0.0 else 2
    parts, paid = np.empty((3, num_classes, num_rows)), np.zeros((3, num_classes, num_rows))
    for lanes in range(num_classes):
        parts[:, lanes, :] = shares[lanes] / num_rows
    paths = _even_paths(num_classes, num_operations, num_stages, num_rows)
    durations, average = np.zeros(num_rows * NUM_SLOTS), np.zeros((num_classes, num_rows, 3))
    values, end_values = np.zeros(num_operations), np.zeros(num_stages)
    best_s = -np.inf
    for step in range(steps):
        for lanes in range(num_classes):
            _durations_of(lanes, spread, parts, vp_size, position, durations)
            _learn_paths(lanes, slot, graph, durations, values, paths)
            for stage in range(num_stages):
                end_values[stage] = values[graph.last[stage]]
            paths.class_values[lanes] = _match(paths.end_regrets[lanes], paths.ends[lanes], end_values)
        _match(paths.class_regrets, paths.classes, paths.class_values)
        for lanes in range(num_classes):
            paths.crossings[lanes] = 0.0
            if paths.classes[lanes] > 0.0:
                _count_crossings(lanes, slot, graph, token_s, vp_size, paths)
        average += 3.0 / (step + 3.0) * (paths.crossings - average)
        if step % _PROVE_EVERY == _PROVE_EVERY - 1 or step == steps - 1:
            best_s = max(best_s, _proven_s(average, spread, position))
            if best_s >= enough_s:
                break
        for kind in range(kinds):
            weights = _weights(kind, spread.least_ratio, spread.inverse_ratio)
            _spread_again(paths.crossings, weights, shares, paid[kind], parts[kind])
    return best_s


@compiled
def _even_paths(num_classes: int, num_operations: int, num_stages: int, num_rows: int) -> _Paths:
    """Return even mixes, from which nothing is learned yet."""
    return _Paths(
        np.full((num_classes, num_operations), 0.5),
        np.zeros((num_classes, num_operations, 2)),
        np.full((num_classes, num_stages), 1.0 / num_stages),
        np.zeros((num_classes, num_stages)),
        np.full(num_classes, 1.0 / num_classes),
        np.zeros(num_classes),
        np.zeros(num_classes),
        np.zeros((num_classes, num_rows, 3)),
    )


@compiled
def _durations_of(lanes: int, spread: Spread, parts: Floats, vp_size: int, position: int, durations: Floats) -> None:
    """Write the seconds of every slot in a class of lanes, where the work lies as `parts` says."""
    shares, floors_s, work_s, token_s = spread.shares, spread.floors_s, spread.work_s, spread.token_s
    least_ratio, inverse_ratio, longest_s = spread.least_ratio, spread.inverse_ratio, spread.longest_s
    forward_s, backward_s = work_s[0], 2.0 * work_s[NUM_DIRECTIONS // 2] - work_s[0]
    second_s = max(0.0, (backward_s - least_ratio * forward_s) / (1.0 - least_ratio * inverse_ratio))
    first_s = max(0.0, forward_s - inverse_ratio * second_s)
    rest = max(0.0, 1.0 - longest_s.sum() * shares[0] / max(forward_s + backward_s, 1e-300))
    for row in range(parts.shape[2]):
        first = rest * first_s * parts[0, lanes, row] / shares[lanes]
        second = rest * second_s * parts[1, lanes, row] / shares[lanes]
        both = (floors_s[0] + first + inverse_ratio * second, floors_s[1] + least_ratio * first + second)
        for kind in range(2):
            duration = both[kind]
            if lanes == 0 and row == position:
                duration += longest_s[kind]
            duration /= vp_size
            tokens = parts[2, lanes, row] / shares[lanes]
            at = NUM_SLOTS * row + kind
            durations[at] = duration
            durations[at + 2] = duration + token_s[kind] * tokens
            durations[at + 4] = duration + token_s[2 + kind] * tokens


@compiled
def _learn_paths(lanes: int, slot: Ints, graph: Graph, durations: Floats, values: Floats, paths: _Paths) -> None:
    """Write the seconds until the end of each operation by the mix of paths; then turn the mix to what was longer."""
    befores, senders, regrets, via_list = graph.before, graph.sender, paths.regrets, paths.via_list
    for index in range(len(slot)):
        before, source = befores[index], senders[index]
        value = 0.0
        if before < 0:
            if source >= 0:
                value = values[source]
        elif source < 0:
            value = values[before]
        else:
            value = via_list[lanes, index] * values[before] + (1.0 - via_list[lanes, index]) * values[source]
            for_list = max(0.0, regrets[lanes, index, 0] + values[before] - value)
            for_data = max(0.0, regrets[lanes, index, 1] + values[source] - value)
            regrets[lanes, index, 0], regrets[lanes, index, 1] = for_list, for_data
            if for_list + for_data > 0.0:
                via_list[lanes, index] = for_list / (for_list + for_data)
        values[index] = value + durations[slot[index]]


@compiled
def _count_crossings(lanes: int, slot: Ints, graph: Graph, token_s: Floats, vp_size: int, paths: _Paths) -> None:
    """Follow the mix of paths backwards and write how often it crosses each row of a class."""
    befores, senders, via_list, crossings = graph.before, graph.sender, paths.via_list, paths.crossings
    num_rows = crossings.shape[1]
    flow, crossed = np.zeros(len(slot)), np.zeros(num_rows * NUM_SLOTS)
    for stage in range(len(graph.last)):
        flow[graph.last[stage]] += paths.classes[lanes] * paths.ends[lanes, stage]
    for index in range(len(slot) - 1, -1, -1):
        here = flow[index]
        if here == 0.0:
            continue
        crossed[slot[index]] += here
        before, source = befores[index], senders[index]
        if before < 0:
            if source >= 0:
                flow[source] += here
        elif source < 0:
            flow[before] += here
        else:
            flow[before] += here * via_list[lanes, index]
            flow[source] += here * (1.0 - via_list[lanes, index])
    for row in range(num_rows):
        at = NUM_SLOTS * row
        for kind in range(2):
            inner, first_stage, last_stage = crossed[at + kind], crossed[at + 2 + kind], crossed[at + 4 + kind]
            crossings[lanes, row, kind] = (inner + first_stage + last_stage) / vp_size
            crossings[lanes, row, 2] += first_stage * token_s[kind] + last_stage * token_s[2 + kind]


@compiled
def _match(regrets: Floats, strategy: Floats, gains: Floats) -> float:
    """Return what `strategy` gains; then learn from it (both arrays change in place)."""
    gained = 0.0
    for index in range(regrets.shape[0]):
        gained += strategy[index] * gains[index]
    total = 0.0
    for index in range(regrets.shape[0]):
        regrets[index] = max(0.0, regrets[index] + gains[index] - gained)
        total += regrets[index]
    for index in range(regrets.shape[0]):
        strategy[index] = regrets[index] / total if total > 0.0 else 1.0 / regrets.shape[0]
    return gained


@compiled
def _weights(kind: int, least_ratio: float, inverse_ratio: float) -> tuple[float, float, float]:
    """Return the weights of (forward, backward, edges) in a kind of work."""
    if kind == 0:
        return 1.0, least_ratio, 0.0
    if kind == 1:
        return inverse_ratio, 1.0, 0.0
    return 0.0, 0.0, 1.0


@compiled
def _spread_again(
    crossings: Floats, weights: tuple[float, float, float], shares: Floats, regrets: Floats, parts: Floats
) -> None:
    """Move one kind of work to where the last paths crossed less, as if they crossed there once more."""
    lost = 0.0
    for lanes in range(parts.shape[0]):
        for row in range(parts.shape[1]):
            lost += parts[lanes, row] * _price(crossings[lanes, row], weights) / shares[lanes]
    total = 0.0
    for lanes in range(parts.shape[0]):
        for row in range(parts.shape[1]):
            gain = lost - _price(crossings[lanes, row], weights) / shares[lanes]
            regrets[lanes, row] = max(0.0, regrets[lanes, row] + gain)
            parts[lanes, row] = max(0.0, regrets[lanes, row] + gain) * shares[lanes]
            total += parts[lanes, row]
    for lanes in range(parts.shape[0]):
        for row in range(parts.shape[1]):
            parts[lanes, row] = parts[lanes, row] / total if total > 0.0 else shares[lanes] / parts.shape[1]


@compiled
def _price(crossing: Floats, weights: tuple[float, float, float]) -> float:
    return crossing[0] * weights[0] + crossing[1] * weights[1] + crossing[2] * weights[2]  # type: ignore[no-any-return]


@compiled
def _proven_s(average: Floats, spread: Spread, position: int) -> float:
    """Return the least that any spread of the work costs against `average` crossings."""
    shares, floors_s, work_s, longest_s = spread.shares, spread.floors_s, spread.work_s, spread.longest_s
    least_ratio, inverse_ratio = spread.least_ratio, spread.inverse_ratio
    fixed_s = 0.0
    prices = np.full(3, np.inf)
    for lanes in range(average.shape[0]):
        for row in range(average.shape[1]):
            fixed_s += floors_s[0] * average[lanes, row, 0] + floors_s[1] * average[lanes, row, 1]
            for kind in range(3):
                price = _price(average[lanes, row], _weights(kind, least_ratio, inverse_ratio)) / shares[lanes]
                prices[kind] = min(prices[kind], price)
    # The direction (alpha, beta) in which both kinds of work cost no more than these least prices.
    beta = (prices[1] - inverse_ratio * prices[0]) / (1.0 - inverse_ratio * least_ratio)
    alpha = prices[0] - beta * least_ratio
    if alpha < 0.0:
        alpha, beta = 0.0, min(prices[0] / least_ratio, prices[1])
    if alpha + beta <= 0.0:
        return -np.inf
    # The work is concave in its direction, so a chord lies below it.
    at = beta / (alpha + beta) * (NUM_DIRECTIONS - 1)
    below = min(int(at), NUM_DIRECTIONS - 2)
    fixed_s += (alpha + beta) * (work_s[below] + (at - below) * (work_s[below + 1] - work_s[below]))
    if longest_s.sum() > 0.0:
        # What the longest sample costs above its share of the work.
        forward = average[0, position, 0] - alpha * shares[0]
        backward = average[0, position, 1] - beta * shares[0]
        fixed_s += _least_above(longest_s[0], longest_s[1], least_ratio, inverse_ratio, forward, backward)
    return fixed_s + prices[2]  # type: ignore[no-any-return]


@compiled
def _least_above(
    x: float, z: float, least_ratio: float, inverse_ratio: float, forward: float, backward: float
) -> float:
    """Return the least forward * x' + backward * z' over allowed (x', z') with x' >= x and z' >= z.

    Neither kind of work has a negative price here, so the least is at a corner.
    """
    least = np.inf
    for corner in range(4):
        x_here, z_here = x, z
        if corner == 0:
            z_here = max(z, least_ratio * x)
        elif corner == 1:
            x_here = max(x, inverse_ratio * z)
        elif corner == 2:
            x_here = z / least_ratio
        elif inverse_ratio > 0.0:
            z_here = x / inverse_ratio
        close = 1e-9 * (x_here + z_here)
        is_above = x_here >= x - close and z_here >= z - close
        if is_above and z_here >= least_ratio * x_here - close and x_here >= inverse_ratio * z_here - close:
            least = min(least, forward * x_here + backward * z_here)
    return least if least < np.inf else -np.inf
