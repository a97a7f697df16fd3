# ruff: noqa: E402 (torch comes after the library)
"""What runs on fake CUDA tensors, in a process of its own: `python -m tests.fake_cuda.cases LIBRARY RESULTS CASE ...`.

Each case is a function that asserts; its notes go to the file RESULTS with the error of those that failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import time
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.fake_cuda import library

if __name__ == "__main__":
    library.load(Path(sys.argv[1]))  # before torch

import numpy as np
import pytest
import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # what megatron-core and torch say about packages that are not here
from megatron.core import parallel_state
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from dynamic_cp.decide.calibration.measurements import Measurement
from dynamic_cp.placement.programme import Programme, programmes_of
from dynamic_cp.placement.transport import ACROSS, INSIDE
from dynamic_cp.plans.lane_plan import PlanFacts, lane_plan
from dynamic_cp.types import CAUSAL, FULL, Bucket, MicroBatch, Plan, PlannedBatch, Sample, Topology
from dynamic_cp.types.placement import ROW, Lanes
from megatron.decide.calibration.timing import Probe, Timer
from megatron.dynamic_cp.agreement import verify
from megatron.dynamic_cp.attention import packs, placed_packs, torch_thd
from megatron.dynamic_cp.attention.kernels import choice as kernels
from megatron.dynamic_cp.attention.kernels import flash as kernels_flash
from megatron.dynamic_cp.attention.kernels.choice import FLASH
from megatron.dynamic_cp.attention.linear import kernels as linear_check
from megatron.dynamic_cp.attention.mechanisms import collectives
from megatron.dynamic_cp.attention.mechanisms import transfers as exchange
from megatron.dynamic_cp.attention.placed_packs import PlacedLane
from megatron.dynamic_cp.attention.thd import EXECUTORS, Attention, attention_thd
from megatron.dynamic_cp.data.micro_batches import PackedBucket, PackedStep, micro_batches, pack_step, shards_of
from megatron.dynamic_cp.groups.process_groups import DynamicCPGroups
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats, boundaries
from megatron.dynamic_cp.plans.planner import Planner
from megatron.dynamic_cp.pool import layer_pass
from megatron.integrations.post_training.caller_order import OUTPUTS, agreed_order
from megatron.integrations.post_training.losses import Objective, agreed_columns, count_tokens
from megatron.trainer.data import index_once
from megatron.trainer.flags.arguments import parse_args
from megatron.trainer.loop.training import pretrain
from megatron.trainer.reporting.log import StepRecord
from megatron.trainer.setup import planned_runtime
from megatron.trainer.setup.planned_runtime import PlannedRuntime
from tests.distributed import post_training
from tests.fake_cuda import nccl, runtime
from tests.fake_cuda.nccl import Call, HostWait
from tests.fake_cuda.recorder import Recorder, UnderWay
from tests.fake_cuda.tensors import Answer, Collective, FakeGPU, HostWaits, NotForNCCL
from tests.fake_cuda.waits import AT_START, BEFORE_A_PASS, IN_A_STEP, NOW_AND_THEN
from tests.placements import random_placement

Notes = dict[str, Any]
BF16 = torch.bfloat16


@contextlib.contextmanager
def job(rank: int, num_ranks: int, store: dist.Store | None = None) -> Iterator[None]:
    """Be `rank` of a job over NCCL, on the device of the same number."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    verify._calls = index_once._calls = 0  # each rank counts its exchanges from the start
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=store or dist.HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.cuda.set_device(0)


def build_groups(num_lanes: int) -> DynamicCPGroups:
    return DynamicCPGroups.build(
        Topology(num_lanes=num_lanes), timeout_s=60.0, exchanges=tuple(EXECUTORS), inner_sizes=(2, 4), query_heads=8,
        lane_ranks=range(num_lanes),
    )  # fmt: skip


def packed_step(rank: int, buckets: list[PackedBucket]) -> PackedStep:
    positions = torch.from_numpy(np.concatenate([shard for bucket in buckets for shard in shards_of(bucket, rank)]))
    return PackedStep(
        buckets=tuple(buckets),
        positions=positions,
        cu_seqlens=torch.from_numpy(np.concatenate([boundaries(bucket.padded_seqlens) for bucket in buckets])),
        columns=torch.zeros(3, len(positions), dtype=torch.int64),
        loss_mask=torch.ones(len(positions)),
    )


def bucket(
    exchange: str, rank: int, cp_size: int, inner: int = 1, seqlens: tuple[int, ...] = (3, 1, 4)
) -> PackedBucket:
    """Return a bucket of `cp_size` lanes that holds `rank`; sequence i has 2 * cp_size * seqlens[i] tokens.

    The last chunk of each is padding."""
    return PackedBucket(
        first_lane=rank - rank % cp_size,
        cp_size=cp_size,
        cp_comm_type=exchange,  # type: ignore[arg-type]
        inner_cp_size=inner,
        padded_seqlens=tuple(2 * cp_size * seqlen for seqlen in seqlens),
        seqlens=tuple(2 * cp_size * seqlen - seqlen for seqlen in seqlens),
    )


def placed_bucket(rank: int, inner: int = 1, seed: int = 6, lanes_of_node: int = 2, num_lanes: int = 8) -> PackedBucket:
    """Return a placed bucket of `num_lanes`, on nodes of two by default, which holds causal samples and full ones."""
    num_groups, group = num_lanes // inner, rank // inner
    samples = tuple(Sample(sample_id=i, seqlen=n, mask=FULL if i % 2 else None) for i, n in enumerate((70, 1, 33)))
    placement = random_placement(np.random.default_rng(seed), samples, num_groups, 2)
    programme = programmes_of(placement, samples, Lanes(num_groups, 0, lanes_of_node // inner))[group]
    num_tokens = programme.num_tokens // inner + 1
    held = tuple(samples[number] for number in placement.samples_of(group))
    return PackedBucket(
        first_lane=0, cp_size=num_lanes, cp_comm_type="blocks", inner_cp_size=inner, padded_seqlens=(num_tokens,),
        placed=PlacedLane(
            programme=programme, samples=held, num_tokens=num_tokens, inner_cp_size=inner, inner_rank=rank % inner
        ),
    )  # fmt: skip


def buckets_of_lanes(rank: int, num_lanes: int) -> list[PackedBucket]:
    return [
        bucket("p2p", rank, 1), bucket("p2p", rank, 2, seqlens=(1,)), bucket("p2p", rank, num_lanes),
        bucket("all_gather", rank, num_lanes), bucket("a2a", rank, 2, 2),
        bucket("a2a", rank, num_lanes, num_lanes),  # more lanes than KV heads
        *(bucket("a2a+p2p", rank, num_lanes, inner) for inner in (2, 4) if inner < num_lanes),
    ]  # fmt: skip


def placed_buckets(rank: int, num_lanes: int) -> list[PackedBucket]:
    """Return a placed bucket whose lanes send messages, and one whose lanes exchange heads in pairs, too."""
    return [placed_bucket(rank, inner, num_lanes=num_lanes) for inner in (1, 2)]


def qkv(num_tokens: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    """Return 8 query heads and 2 KV heads of width 64, on the device."""
    return [
        torch.empty(num_tokens, heads, 64, dtype=dtype, device=torch.cuda.current_device(), requires_grad=True)
        for heads in (8, 2, 2)
    ]


def attention(kernel: Any, rank: int) -> Notes:
    """Every exchange on a rank of eight, all but the first also full: shapes, types, transfers as planned, no wait."""
    notes: Notes = {"calls": 0, "transfers": 0, "messages": 0}
    device = torch.device("cuda", rank)
    with job(rank, 8), Recorder.of_this_rank():
        with FakeGPU(AT_START) as gpu:
            groups = build_groups(8)
        assert {place for place, _ in gpu.waits} <= {
            "megatron.dynamic_cp.groups.first_exchange:_check",
            "megatron.dynamic_cp.packed_seq_params:build",
        }
        with FakeGPU() as gpu:
            steps = [(CAUSAL, buckets_of_lanes(rank, 8) + placed_buckets(rank, 8))]
            if rank > 0:
                steps.append((FULL, buckets_of_lanes(rank, 8)))  # placed samples bring their masks
            batches = [
                batch
                for mask, buckets in steps
                for batch in micro_batches(
                    packed_step(rank, buckets).pin_memory(), groups, device, "", ExchangeStats(), mask
                )
            ]
            for batch in batches:
                params = batch["packed_seq_params"]
                before = len(gpu.collectives)
                inputs = qkv(len(params.positions))
                for _ in range(2):  # the second layer finds what the first one kept
                    out = Attention.apply(*inputs, params, 0.125, kernel)
                    _check_like(out, inputs[0], device)
                    grads = torch.autograd.grad(out, inputs, torch.empty_like(out))
                    for grad, value in zip(grads, inputs, strict=True):
                        _check_like(grad, value, device)
                num_transfers = len(gpu.collectives) - before
                assert num_transfers == 2 * _num_transfers(params), (params.cp_comm_type, gpu.collectives[before:])
                notes["transfers"] += num_transfers
                notes["messages"] += num_transfers if params.placed is not None else 0
        assert not gpu.waits
        notes["calls"] += gpu.num_calls
    assert notes["calls"] > 1000
    return notes


def attention_of_all(num_lanes: int, num_placements: int) -> Notes:
    """Every exchange and random placements on all lanes, backward passes behind those of other micro-batches."""
    calls: dict[int, list[Call | HostWait]] = {}
    store = dist.HashStore()
    for rank in range(num_lanes):
        recorder, device = Recorder(), torch.device("cuda", rank)
        with job(rank, num_lanes, dist.PrefixStore(str(rank), store)):
            with FakeGPU(AT_START):
                groups = build_groups(num_lanes)
            placed = [
                placed_bucket(rank, inner, seed, lanes_of_node, num_lanes)
                for seed in range(num_placements)
                for inner, lanes_of_node in ((1, 8), (1, 2), (1, 4), (2, 4))
            ]
            with FakeGPU():
                buckets = [*buckets_of_lanes(rank, num_lanes), *placed_buckets(rank, num_lanes), *placed]
                step = packed_step(rank, buckets).pin_memory()
                waiting = []
                for batch in micro_batches(step, groups, device, "", ExchangeStats(), CAUSAL):
                    params = batch["packed_seq_params"]
                    inputs = qkv(len(params.positions))
                    waiting.append((Attention.apply(*inputs, params, 0.125, FLASH), inputs))
                    if len(waiting) == 3:
                        for out, of_out in waiting:
                            torch.autograd.grad(out, of_out, torch.empty_like(out))
                        waiting.clear()
        calls[rank] = recorder.calls
    return {"nccl": _together(calls)}


def _num_transfers(params: DynamicPackedSeqParams) -> int:
    """Return the calls that a layer makes, forward and backward; a shift of the ring is two."""
    size, ring = params.local_cp_size, params.ring_size
    assert size is not None
    if size == 1:
        return 0
    if params.placed is not None:
        return _num_messages(params.placed.programme) + (0 if params.heads_group is None else 4)
    if params.cp_comm_type == "all_gather":
        return 3  # keys and values twice, their gradients once
    shifts = (ring - 1) + (ring - 1) + (ring - 1)  # keys and values in both passes, and their gradients
    heads = 0 if params.cp_comm_type == "p2p" else 4
    return 2 * shifts + heads + 0


def _num_messages(programme: Programme) -> int:
    """Return what a lane sends and receives, forward and backward; forward nothing is given back for columns."""
    total = 0
    for one in programme.exchanges:
        for _, entries in (*one.sends, *one.receives):
            total += 1 + (one.round in (ACROSS, INSIDE) or any(kind == ROW for _, kind in entries))
    return total


def _check_like(actual: torch.Tensor, expected: torch.Tensor, device: torch.device) -> None:
    assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, device), actual


MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--make-vocab-size-divisible-by 8 --untie-embeddings-and-output-weights --bf16 --seq-length 512 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --global-batch-size 4 --train-iters 2 --lr 1e-3 --dynamic-cp "
    "--distributed-backend nccl --transformer-impl local --max-seqlen-per-dp-cp-rank 256 --use-distributed-optimizer"
)


PADDED_WORDS = 136  # of 128 and the end of a document


def train(words: str, num_ranks: int, also: Mapping[str, Answer] | None = None, ranks_per_node: int = 8) -> Notes:
    """Train on all ranks, one after the other: rank 0 first, which leaves the others its plans in the store."""
    os.environ["LOCAL_WORLD_SIZE"] = str(min(num_ranks, ranks_per_node))
    store, notes, said = dist.HashStore(), {}, []
    describe = PlannedRuntime.describe

    def listen(runtime: PlannedRuntime) -> tuple[str, ...]:
        said[:] = describe(runtime)
        return tuple(said)

    calls: dict[int, list[Call | HostWait]] = {}
    for rank in range(num_ranks):
        recorder = Recorder()
        with unittest.mock.patch.object(PlannedRuntime, "describe", listen):
            notes[f"rank {rank}"] = _train_rank(words, rank, num_ranks, store, IN_A_STEP | dict(also or {}))
        calls[rank] = recorder.calls
    return {**notes, "nccl": _together(calls), "said": said[1]}


def _together(calls: dict[int, list[Call | HostWait]]) -> Notes:
    """Return what NCCL makes of all ranks' calls: they go together, and no longer once two of one rank are swapped."""
    Recorder.current = None
    found = nccl.problems(calls)
    assert not found, "\n".join(found[:5])
    made = {rank: {one.communicator for one in of_rank if isinstance(one, Call)} for rank, of_rank in calls.items()}
    random, swaps = np.random.default_rng(0), _swaps(calls)
    for rank, first, second in random.permutation(swaps)[:_NUM_SWAPS].tolist():
        assert nccl.problems({**calls, rank: _swapped(calls[rank], first, second)}), (rank, first, second)
    return {
        "calls": sum(map(len, calls.values())),
        "swaps": min(_NUM_SWAPS, len(swaps)),
        "communicators": max(sum(len(one.ranks) > 1 for one in of_rank) for of_rank in made.values()),
    }


_NUM_SWAPS = 8


def _swaps(calls: dict[int, list[Call | HostWait]]) -> list[tuple[int, int, int]]:
    """Return (rank, number of a call, number of another) of collectives that follow each other on a communicator."""
    swaps = []
    for rank, of_rank in calls.items():
        latest: dict[nccl.Communicator, tuple[int, Call]] = {}
        for number, call in enumerate(of_rank):
            if not isinstance(call, Call) or len(call.communicator.ranks) == 1 or call.kind == "messages":
                continue
            before = latest.get(call.communicator)
            if before is not None and (before[1].kind, before[1].num_bytes) != (call.kind, call.num_bytes):
                swaps.append((rank, before[0], number))
            latest[call.communicator] = number, call
    return swaps


def _swapped(calls: list[Call | HostWait], first: int, second: int) -> list[Call | HostWait]:
    """Return the calls with two of them the other way round; what streams have waited for stays as it was."""
    ours, theirs = calls[first], calls[second]
    assert isinstance(ours, Call)
    assert isinstance(theirs, Call)
    swapped = list(calls)
    swapped[first] = theirs._replace(after=ours.after, after_any=ours.after_any)
    swapped[second] = ours._replace(after=theirs.after, after_any=theirs.after_any)
    return swapped


def post_training_step(*losses: str) -> Notes:
    """Losses of pairs on 4 lanes: nothing of a micro-batch waits; a loss waits for what its tokens are counted to."""
    calls: dict[int, list[Call | HostWait]] = {}
    samples, store, sums = post_training.batch_of_pairs(), dist.HashStore(), 0
    by_id = {sample.sample_id: post_training.read_sample(sample) for sample in samples}
    on_four = Bucket(first_lane=0, cp_size=4, samples=samples[:2], cp_comm_type="a2a", inner_cp_size=4)
    on_two = Bucket(first_lane=0, cp_size=2, samples=samples[2:3], cp_comm_type="a2a", inner_cp_size=2)
    alone = (Bucket(first_lane=2, samples=samples[3:4]), Bucket(first_lane=3, samples=samples[4:]))
    plan = Plan(
        topology=Topology(num_lanes=4),
        max_tokens_per_rank=512,
        micro_batches=(MicroBatch(buckets=(on_four,)), MicroBatch(buckets=(on_two, *alone))),
    )
    facts = PlanFacts.of(PlannedBatch(plan=plan, predicted_s=1.0, predicted_busy_s=(1.0,), reason=""))
    for rank in range(4):
        recorder, device = Recorder(), torch.device("cuda", rank)
        of_lane = lane_plan(plan, rank, facts)
        with job(rank, 4, dist.PrefixStore(str(rank), store)):
            with FakeGPU(AT_START):
                groups = build_groups(4)
            with FakeGPU(BEFORE_A_PASS) as gpu:
                order, held = agreed_order(samples, of_lane, device)
                packed = pack_step(of_lane, by_id.__getitem__).pin_memory()
                batches = list(micro_batches(packed, groups, device, "", ExchangeStats()))
                for name in losses:
                    gpu.answers = dict(BEFORE_A_PASS)
                    loss = post_training.LOSSES[name][0]
                    columns = agreed_columns(order, post_training.columns_of(samples), loss, of_lane, device)
                    counts = count_tokens(order, held, [batch["loss_mask"] for batch in batches], device)
                    objective = Objective.of(loss, columns, counts)
                    gpu.answers, before = {}, len(gpu.collectives)
                    for batch, micro_batch in zip(batches, held, strict=True):
                        mask, params = batch["loss_mask"], batch["packed_seq_params"]
                        outputs = {name: torch.rand_like(mask).requires_grad_() for name in OUTPUTS}
                        share = objective.share(outputs, mask, micro_batch, params)
                        read = [outputs[name] for name in loss.needs if name in OUTPUTS]
                        for grad in torch.autograd.grad(share, read):
                            _check_like(grad, mask, device)
                    sums += len(gpu.collectives) - before
                assert {place for place, _ in gpu.waits} == set(BEFORE_A_PASS)
        calls[rank] = recorder.calls
    return {"nccl": _together(calls), "sums of responses": sums}


def _train_rank(
    words: str, rank: int, num_ranks: int, store: dist.Store, in_a_step: Mapping[str, Answer]
) -> dict[str, Any]:
    gpu = FakeGPU(AT_START | in_a_step)
    steps: list[Counter[tuple[str, str]]] = []
    seen: Counter[tuple[str, str]] = Counter()
    losses: list[float] = []
    transfers: list[Collective] = []

    def on_step(_: int, record: StepRecord) -> None:
        transfers[:], gpu.collectives = gpu.collectives, []
        steps.append(gpu.waits - seen)
        seen.update(steps[-1])
        losses.append(record.loss)
        gpu.answers = dict(in_a_step)  # from now on only what a step may wait for

    with job(rank, num_ranks, store), gpu:
        pretrain(parse_args(f"{MODEL} {words}".split()), on_step=on_step)
    assert losses == [2.0, 2.0], losses
    assert {place for place, _ in steps[-1]} == set(in_a_step), steps[-1]
    return {
        "calls": gpu.num_calls,
        "waits of the last step": _readable(steps[-1]),
        "waits": _readable(gpu.waits),
        "transfers of the last step": dict(Counter(f"{one.name} over {one.num_ranks}" for one in transfers)),
        "gradients of the last step": sum(one.num_elements for one in transfers if "reduce_scatter" in one.name),
        "logits at once": gpu.most_rows[PADDED_WORDS],
    }


def _readable(waits: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{place} ({what})": number for (place, what), number in sorted(waits.items())}


def calibration() -> Notes:
    """The timer of `dynamic-cp profile`, by events."""
    row = Measurement(section="bucket", forward_s=0.0)
    waits = {f"megatron.decide.calibration.timing:{name}": Answer(why="a window") for name in ("_finish", "_on_gpu")}
    with job(0, 1), FakeGPU(waits):
        timer = Timer(device=torch.device("cuda", 0), window_s=0.01, num_windows=2, alone=True)
        rows = timer.measure([Probe(row=row, forward=lambda: torch.empty(3, device="cuda"))] * 2)
    assert all(row.forward_s > 0 for row in rows)
    return {"rows": len(rows)}


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def faults() -> Notes:
    """Planted ones, each in the product's own code."""
    rank, device = 5, torch.device("cuda", 5)
    noticed: dict[str, str] = {}

    def attend(one: PackedBucket, step: Callable[[PackedStep], PackedStep] = PackedStep.pin_memory) -> None:
        with FakeGPU():
            (batch,) = micro_batches(step(packed_step(rank, [one])), groups, device, "", ExchangeStats())
            params = batch["packed_seq_params"]
            out = attention_thd(*qkv(len(params.positions)), params, 0.125)
            out.sum().backward()

    def notice(name: str, error: type[BaseException], words: str, break_it: Any, one: PackedBucket) -> None:
        attend(one)
        with break_it, pytest.raises(error, match=words) as caught:
            attend(one)
        noticed[name] = type(caught.value).__name__

    with job(rank, 8), Recorder.of_this_rank():
        with FakeGPU(AT_START):
            groups = build_groups(8)
        ring, gather = bucket("p2p", rank, 8), bucket("all_gather", rank, 8)
        patch = unittest.mock.patch.object

        on_host = patch(packs, "to_device", lambda values, device: torch.from_numpy(values))
        notice(
            "boundaries left on the host", FakeTensorDeviceMismatchError, "cuda:5 and cpu|cpu and cuda", on_host, ring
        )

        blocking = patch(packs, "to_device", lambda values, device: torch.from_numpy(values).to(device))
        notice("a blocking copy", HostWaits, r"attention.packs:build|<lambda>", blocking, ring)

        forward = kernels_flash.forward

        def reads(*args: Any) -> Any:
            args[0].sum().item()
            return forward(*args)

        reading = patch(kernels, "FLASH", dataclasses.replace(FLASH, forward=reads))
        notice("a value that is read", HostWaits, "cases:reads", _with_kernel(reading), ring)

        shift = exchange.RingShift.wait
        cast = patch(exchange.RingShift, "wait", lambda self: shift(self).float())
        notice("keys of another type", AssertionError, "flash gets", cast, ring)

        early = patch(exchange.RingShift, "wait", lambda self: self._received)
        notice("a shift that nobody waits for", UnderWay, "reads what recv_ still receives", early, ring)

        early = patch(
            exchange.LaneMessages,
            "wait",
            lambda self: [exchange._of_message(*one) for one in zip(self._received, self._receives, strict=True)],
        )
        notice("messages that nobody waits for", UnderWay, "reads what recv_ still", early, placed_bucket(rank))

        reuse = patch(exchange.RingShift, "wait", lambda self: (self._sent.zero_(), shift(self))[1])
        notice("a tensor that is overwritten while it is sent", UnderWay, "writes what send still sends", reuse, ring)

        def chain() -> None:
            with FakeGPU():
                keys, total = torch.ones(3, device=device), torch.zeros(3, device=device)
                layer_pass.begin_chain(lambda: total.add_(keys), device).wait()
                total.sum()

        chain()
        for name, waits in (("a chain that begins too early", "wait_stream"), ("one that ends late", "wait_event")):
            unheard = patch(runtime.Stream, waits, lambda *_: None)
            with unheard, pytest.raises(UnderWay, match="what another stream still writes"):
                chain()
            noticed[name] = "UnderWay"

        def beside_a_chain(numbers: list[int]) -> None:
            with FakeGPU():
                total = torch.zeros(4, 2, device=device)
                of_chain, ours = (packs.to_device(np.array(one), device) for one in ([0, 1], numbers))
                chain = layer_pass.begin_chain(lambda: total[:, :1].index_fill_(0, of_chain, 1.0), device)
                total[:, 1:].zero_()
                total.index_select(0, ours)
                chain.wait()
                total.sum()

        beside_a_chain([2, 3])
        with pytest.raises(UnderWay, match=r"index_select.* reads what another stream still writes"):
            beside_a_chain([1, 2])
        noticed["rows that a chain still writes"] = "UnderWay"

        order = patch(collectives, "row_order", lambda params, device: torch.arange(8 * len(params.positions)))
        notice("an index left on the host", (FakeTensorDeviceMismatchError, HostWaits), "cpu", order, gather)

        order = patch(placed_packs, "to_device", lambda values, device: torch.from_numpy(values))
        notice(
            "places of a message left on the host", (FakeTensorDeviceMismatchError, HostWaits), "cpu", order,
            placed_bucket(rank),
        )  # fmt: skip

        halves = patch(
            dist, "all_gather_into_tensor", lambda out, x, group: _torch_gather(out[: len(out) // 2], x, group=group)
        )
        notice("a gather that is too short", NotForNCCL, "over 8 ranks", halves, gather)

        with pytest.raises(HostWaits, match="page-locked"):
            attend(ring, lambda step: step)
        noticed["memory that is not page-locked"] = "HostWaits"
        with FakeGPU(), pytest.raises(NotForNCCL, match="on cpu"):
            dist.all_reduce(torch.ones(1))
        noticed["a collective of the host's memory"] = "NotForNCCL"
        attend(ring)
    assert len(noticed) == 15
    return {"noticed": noticed}


@contextlib.contextmanager
def _with_kernel(patched: Any) -> Iterator[None]:
    kernels.choose_kernel.cache_clear()
    with patched:
        yield
    kernels.choose_kernel.cache_clear()


_torch_gather = dist.all_gather_into_tensor

OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
VPP = f"--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 {OVERLAP}"
HYBRID = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 16"
)
MAMBA = "--num-layers 3 --hybrid-override-pattern M*- --mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 16"
K_OF_L = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
POOL = "--max-seqlen-per-dp-cp-rank 512 --pipeline-model-parallel-size 2 --dynamic-cp-pool always"

CASES: dict[str, Callable[[], Notes]] = {
    "attention with flash": lambda: attention(FLASH, 5),
    "attention on all lanes": lambda: attention_of_all(4, 0),
    "train alone": lambda: train(
        f"--max-seqlen-per-dp-cp-rank 512 --num-workers 1 --eval-iters 1 --dynamic-cp-refine 1 {RECOMPUTE}",
        1,
        NOW_AND_THEN,
    ),
    "train with PP and VPP": lambda: train(f"{VPP} --seq-length 256 --global-batch-size 8", 2),
    "train adapters of a hybrid by states": lambda: train(
        f"{HYBRID} --dynamic-cp-state-exchange states --lora-rank 4 --loss-chunk-tokens 128", 2
    ),
    "post-training": lambda: post_training_step("ppo", "dpo"),
    "faults are noticed": faults,
    "calibration": calibration,
    "attention on the first lane": lambda: attention(FLASH, 0),
    "many placements": lambda: attention_of_all(8, 3),
    "train on 4 lanes": lambda: train(f"--cp-comm-type auto {OVERLAP}", 4),
    "train on 8 lanes": lambda: train(f"--cp-comm-type auto {OVERLAP}", 8),
    "train with TP and PP": lambda: train(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 8
    ),
    "train 2 lanes with PP and VPP": lambda: train(VPP, 4),
    "train a hybrid by heads": lambda: train(f"{HYBRID} {K_OF_L} --dynamic-cp-state-exchange heads", 2),
    "train a hybrid with blocks": lambda: train(f"{HYBRID} --cp-comm-type blocks", 4),
    "train Mamba-2": lambda: train(MAMBA, 4),
    "train with blocks": lambda: train("--cp-comm-type blocks", 8),
    "train with a pool": lambda: train(POOL, 2),
    "train with a pool of nodes": lambda: train(f"{POOL} {RECOMPUTE}", 8, ranks_per_node=2),
}


def once_for_each_kernel(check: Callable[..., float]) -> Callable[..., float]:
    """Return a check of a kernel that the first run with it makes for all: it is a third of the operators of a run."""
    errors: dict[str, float] = {}

    def replaced(kernel: Any, *args: Any, **kwargs: Any) -> float:
        if kernel.name not in errors:
            errors[kernel.name] = check(kernel, *args, **kwargs)
        return errors[kernel.name]

    return replaced


def main(library_path: str, results: str, *names: str) -> None:
    runtime.install(Path(library_path))
    for module, name in ((torch_thd, "check_kernel"), (linear_check, "check_linear_kernel")):
        setattr(module, name, once_for_each_kernel(getattr(module, name)))
    faulthandler.enable()  # says where it hangs: whoever waits too long aborts it
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCHDYNAMO_DISABLE="1")
    Planner.discard = lambda *_: None  # ranks of one job run one after the other here
    planned_runtime.Planner = lambda *args, **how: Planner(*args, **{**how, "ahead": False})  # no process for each job
    found: dict[str, Notes] = {}
    for name in names:
        started_s = time.process_time()
        try:
            found[name] = CASES[name]()
        except BaseException:
            found[name] = {"error": traceback.format_exc()}
        found[name]["cpu_s"] = round(time.process_time() - started_s, 2)
        Path(results).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
