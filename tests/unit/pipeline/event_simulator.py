"""A second simulator, written from the rules alone: a heap of ends and arrivals instead of a longest path.

It knows nothing of the order in which operations can run, and it books every nanosecond of every (stage, lane) while
it passes, so it also judges the split of the time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import NamedTuple


class Played(NamedTuple):
    """Nanoseconds by (stage, lane); `finished` is false when the lists deadlock."""

    finished: bool
    makespan_ns: int
    busy_ns: Counter
    pipeline_bubble_ns: Counter
    cp_wait_ns: Counter
    dp_wait_ns: Counter


def play(plan, costs, lists) -> Played:
    """Run `lists` ((stage, lane) -> operations); `costs`: id of a bucket's first sample -> BucketCost."""
    pp, vp = plan.topology.pp_size, plan.topology.vp_size
    last = pp * vp - 1
    bucket_at = [{lane: bucket for bucket in row.buckets for lane in bucket.lanes} for row in plan.micro_batches]
    todo = {place: list(reversed(operations)) for place, operations in lists.items()}
    running: set[tuple[int, int]] = set()
    usable = {("F", index, 0, b.first_lane) for index, row in enumerate(plan.micro_batches) for b in row.buckets}
    heap: list[tuple[int, int, tuple]] = []
    count, now = 0, 0
    busy, pipeline, group, data = Counter(), Counter(), Counter(), Counter()

    def post(when, what):
        nonlocal count
        count += 1
        heapq.heappush(heap, (when, count, what))

    def price_ns(operation, virtual, bucket):
        cost = costs[bucket.samples[0].sample_id]
        if operation.kind == "F":
            parts = [cost.forward_s / vp, cost.embedding_forward_s, cost.head_forward_s]
        else:
            parts = [cost.backward_s / vp, cost.embedding_backward_s, cost.head_backward_s]
        whole, embedding, head = (round(part * 1e9) for part in parts)
        return whole + embedding * (virtual == 0) + head * (virtual == last)

    def has_input(stage, operation, bucket):
        return (operation.kind, operation.micro_batch, operation.chunk * pp + stage, bucket.first_lane) in usable

    def start(stages):
        for stage, lane in todo:
            if stage not in stages or (stage, lane) in running or not todo[stage, lane]:
                continue
            operation = todo[stage, lane][-1]
            bucket = bucket_at[operation.micro_batch][lane]
            places = [(stage, member) for member in bucket.lanes]
            if any(place in running or todo[place][-1:] != [operation] for place in places):
                continue
            if has_input(stage, operation, bucket):
                running.update(places)
                virtual = operation.chunk * pp + stage
                post(now + price_ns(operation, virtual, bucket), ("end", stage, operation, bucket))

    def book(until):
        lanes_at_work = {lane for (_, lane), rest in todo.items() if rest}
        for (stage, lane), rest in todo.items():
            if (stage, lane) in running:
                counter = busy
            elif lane not in lanes_at_work:
                counter = data
            elif not rest or not has_input(stage, rest[-1], bucket_at[rest[-1].micro_batch][lane]):
                counter = pipeline
            else:
                counter = group
            counter[stage, lane] += until - now

    start(range(pp))
    while heap:
        book(heap[0][0])
        now, stages = heap[0][0], set()
        while heap and heap[0][0] == now:
            what, stage, operation, bucket = heapq.heappop(heap)[2]
            stages.add(stage)
            virtual = operation.chunk * pp + stage
            if what == "arrival":
                usable.add((operation.kind, operation.micro_batch, virtual, bucket.first_lane))
                continue
            for member in bucket.lanes:
                running.remove((stage, member))
                todo[stage, member].pop()
            hop_ns = round(costs[bucket.samples[0].sample_id].p2p_s * 1e9)
            if operation.kind == "F" and virtual == last:
                usable.add(("B", operation.micro_batch, virtual, bucket.first_lane))
            elif operation.kind == "F" or virtual > 0:
                target = virtual + (1 if operation.kind == "F" else -1)
                arriving = operation._replace(chunk=target // pp)
                post(now + hop_ns, ("arrival", target % pp, arriving, bucket))
        start(stages)
    return Played(not any(todo.values()), now, busy, pipeline, group, data)
