"""A second simulator, by the rules alone: a heap of ends and arrivals, which books every ns of every (stage, lane)."""

import heapq
from collections import Counter
from typing import NamedTuple

from dynamic_cp.pipeline.schedule import stage_operations


class Played(NamedTuple):
    """Nanoseconds by (stage, lane); `finished` is false when the lists deadlock."""

    finished: bool
    makespan_ns: int
    busy_ns: Counter
    pipeline_bubble_ns: Counter
    cp_wait_ns: Counter
    dp_wait_ns: Counter


def megatron_lists(plan) -> dict:
    """Return (stage, lane) -> the operations that it runs, in Megatron-Core's order."""
    topology = plan.topology
    return {
        (stage, lane): stage_operations(stage, topology.pp_size, plan.num_microbatches, topology.vp_size)
        for stage in range(topology.pp_size)
        for lane in range(topology.num_lanes)
    }


def play(plan, costs, lists, longer_ns=None, waiting=None) -> Played:
    """Run `lists` ((stage, lane) -> operations); `costs`: id of a bucket's first sample -> BucketCost. `longer_ns`:
    (kind, micro-batch, lane) -> more than that; `waiting`: [micro-batch] -> lane -> who starts together with it."""
    longer_ns = longer_ns or Counter()
    pp, vp = plan.topology.pp_size, plan.topology.vp_size
    last = pp * vp - 1
    bucket_at = [{lane: bucket for bucket in row.buckets for lane in bucket.lanes} for row in plan.micro_batches]
    todo = {place: list(reversed(operations)) for place, operations in lists.items()}
    running: set[tuple[int, int]] = set()
    usable = {("F", index, 0, lane) for index in range(len(plan.micro_batches)) for lane in bucket_at[index]}
    heap: list[tuple[int, int, tuple]] = []
    count, now = 0, 0
    busy, pipeline, group, data = Counter(), Counter(), Counter(), Counter()

    def post(when, what):
        nonlocal count
        count += 1
        heapq.heappush(heap, (when, count, what))

    def price_ns(operation, virtual, bucket, lane):
        cost = costs[bucket.samples[0].sample_id]
        if operation.kind == "F":
            parts = [cost.forward_s / vp, cost.embedding_forward_s, cost.head_forward_s]
        else:
            parts = [cost.backward_s / vp, cost.embedding_backward_s, cost.head_backward_s]
        whole, embedding, head = (round(part * 1e9) for part in parts)
        longer = longer_ns[operation.kind, operation.micro_batch, lane]
        return whole + longer + embedding * (virtual == 0) + head * (virtual == last)

    def has_input(stage, operation, lane):
        return (operation.kind, operation.micro_batch, operation.chunk * pp + stage, lane) in usable

    def start(stages):
        for stage, lane in todo:
            if stage not in stages or (stage, lane) in running or not todo[stage, lane]:
                continue
            operation = todo[stage, lane][-1]
            bucket = bucket_at[operation.micro_batch][lane]
            lanes = bucket.lanes if waiting is None else waiting[operation.micro_batch][lane]
            places = [(stage, member) for member in lanes]
            if any(place in running or todo[place][-1:] != [operation] for place in places):
                continue
            if all(has_input(stage, operation, member) for member in lanes):
                running.update(places)
                virtual = operation.chunk * pp + stage
                for member in lanes:
                    bucket = bucket_at[operation.micro_batch][member]
                    post(now + price_ns(operation, virtual, bucket, member), ("end", stage, operation, member))

    def book(until):
        lanes_at_work = {lane for (_, lane), rest in todo.items() if rest}
        for (stage, lane), rest in todo.items():
            if (stage, lane) in running:
                counter = busy
            elif lane not in lanes_at_work:
                counter = data
            elif not rest or not has_input(stage, rest[-1], lane):
                counter = pipeline
            else:
                counter = group
            counter[stage, lane] += until - now

    start(range(pp))
    while heap:
        book(heap[0][0])
        now, stages = heap[0][0], set()
        while heap and heap[0][0] == now:
            what, stage, operation, lane = heapq.heappop(heap)[2]
            stages.add(stage)
            virtual = operation.chunk * pp + stage
            if what == "arrival":
                usable.add((operation.kind, operation.micro_batch, virtual, lane))
                continue
            running.remove((stage, lane))
            todo[stage, lane].pop()
            bucket = bucket_at[operation.micro_batch][lane]
            hop_ns = round(costs[bucket.samples[0].sample_id].p2p_s * 1e9)
            if operation.kind == "F" and virtual == last:
                usable.add(("B", operation.micro_batch, virtual, lane))
            elif operation.kind == "F" or virtual > 0:
                target = virtual + (1 if operation.kind == "F" else -1)
                arriving = operation._replace(chunk=target // pp)
                post(now + hop_ns, ("arrival", target % pp, arriving, lane))
        start(stages)
    return Played(not any(todo.values()), now, busy, pipeline, group, data)
