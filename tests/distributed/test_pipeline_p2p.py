"""Pipelines whose message shapes come from the plan: bit-equal to megatron-core's handshake, without its messages."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication

from dynamic_cp.errors import DisagreementError, UnsupportedFeatureError
from dynamic_cp.pipeline.schedule import stage_operations
from dynamic_cp.types import Plan, Sample
from megatron.dynamic_cp.data.micro_batches import PackedStep
from megatron.dynamic_cp.step.pipeline_p2p import PlannedP2PCommunicator, message_orders
from tests.distributed import reference
from tests.distributed.harness import RankError, initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import BATCHES, Layout, build_chunks, mixed_plan, samples_of, static_plan
from tests.distributed.trainee import Trainee

SHAPE_MESSAGE = torch.int64
"""What the handshake sends; activations and gradients are floating point."""


def run_and_count(trainee: Trainee, packed: PackedStep, *, forward_only: bool, **options: Any) -> dict[str, Any]:
    """Return what is logged, all gradients, messages sent by type, and how often the host waited for the device."""
    waits = []
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: waits.append(device)
    try:
        with counted_messages() as sent:
            logged = trainee.run(packed, forward_only=forward_only, **options)
    finally:
        torch.cuda.synchronize = synchronize
    return {"logged": logged, "gradients": trainee.gradients(), "sent": sent, "waits": len(waits)}


@contextmanager
def counted_messages() -> Iterator[Counter[torch.dtype]]:
    sent: Counter[torch.dtype] = Counter()
    batched, single = dist.batch_isend_irecv, p2p_communication._p2p_ops
    pp_group = parallel_state.get_pipeline_model_parallel_group()

    def count_batched(operations: list[Any]) -> Any:
        # Ring attention sends this way, too, in groups of its own.
        ours = [one for one in operations if one.op is dist.isend and one.group is pp_group]
        sent.update(operation.tensor.dtype for operation in ours)
        return batched(operations)

    def count_single(**tensors: Any) -> Any:
        sent.update(t.dtype for name, t in tensors.items() if name.startswith("tensor_send") and t is not None)
        return single(**tensors)

    dist.batch_isend_irecv, p2p_communication._p2p_ops = count_batched, count_single
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, p2p_communication._p2p_ops = batched, single


def run_both(
    layout: Layout, plans: Sequence[Plan], samples: Sequence[Sample], settings: dict[str, Any], handshake: bool
) -> list[dict[str, Any]]:
    """Return for each plan, and each of training and evaluation, the outcome with and without the handshake."""
    trainee = Trainee(layout, **settings)
    outcomes = []
    for plan in plans:
        packed = trainee.pack(plan, samples)
        rank_tokens = [bucket.rank_tokens for bucket in packed.buckets]
        for forward_only in (False, True):
            planned = run_and_count(
                trainee, packed, forward_only=forward_only, rank_tokens=rank_tokens, verify_messages=True
            )
            stock = run_and_count(trainee, packed, forward_only=forward_only) if handshake else None
            outcomes.append({"stock": stock, "planned": planned, "tokens": rank_tokens, "forward_only": forward_only})
    return outcomes


LINES = ("one pp2", "two pp2", "one pp2 vpp2", "one pp4", "one tp2 sp pp2", "one pp2 bf16")


def expected_messages(layout: Layout, num_microbatches: int, forward_only: bool) -> int:
    """Return the tensors that all ranks of a pipeline send: one across each border of virtual stages, and back."""
    borders = layout.pp * layout.vpp - 1
    return borders * num_microbatches * (1 if forward_only else 2)


@pytest.mark.by_day("one pp2 vpp2")
@pytest.mark.parametrize("line", LINES)
def test_planned_shapes_change_nothing_but_messages(line: str) -> None:
    layout, samples = layout_of(line), BATCHES["long_tail"]
    plans = [mixed_plan(samples, layout)]
    if layout.vpp == 1:
        plans.append(static_plan(samples, layout, cp_size=layout.lanes))  # one micro-batch: fewer than stages
    ranks = run_ranks(layout.topology.world_size, run_both, layout, plans, samples, {}, True, timeout_s=90)
    for outcomes in zip(*ranks, strict=True):
        check_equal(layout, outcomes)
        pipelines = layout.topology.world_size // layout.pp
        num_messages = pipelines * expected_messages(layout, len(outcomes[0]["tokens"]), outcomes[0]["forward_only"])
        planned = sum((outcome["planned"]["sent"] for outcome in outcomes), Counter())
        stock = sum((outcome["stock"]["sent"] for outcome in outcomes), Counter())
        assert planned.total() == num_messages > 0
        assert planned[SHAPE_MESSAGE] == 0
        assert stock[SHAPE_MESSAGE] == num_messages, "the handshake has gone: this file compares nothing"
        assert stock.total() == 2 * num_messages
        assert [outcome["planned"]["waits"] for outcome in outcomes] == [0] * len(outcomes)
        assert sum(outcome["stock"]["waits"] for outcome in outcomes) > num_messages, "megatron-core waits no longer"
    assert max(len(set(outcome["tokens"])) for outcomes in ranks for outcome in outcomes) >= 3, "lengths are not ragged"
    if layout.lanes > 1:
        assert any(min(outcome["tokens"]) == 1 for outcomes in ranks for outcome in outcomes), "no empty place"


def check_equal(layout: Layout, outcomes: Sequence[dict[str, Any]]) -> None:
    """Losses and gradients are the same bit by bit; some of both exist."""
    num_losses = 0
    for outcome in outcomes:
        stock, planned = outcome["stock"], outcome["planned"]
        assert len(stock["logged"]) == len(planned["logged"])
        assert all(torch.equal(a, b) for a, b in zip(stock["logged"], planned["logged"], strict=True))
        num_losses += len(planned["logged"])
        assert stock["gradients"].keys() == planned["gradients"].keys() != set()
        for parameter, gradient in planned["gradients"].items():
            assert torch.equal(gradient, stock["gradients"][parameter]), parameter
        total = sum(gradient.abs().sum().item() for gradient in planned["gradients"].values())
        assert (total == 0) == outcome["forward_only"]
    assert num_losses == layout.lanes * layout.tp * len(outcomes[0]["tokens"])


@pytest.mark.nightly
def test_interleaving_without_overlap() -> None:
    """The handshake aborts here on gloo (it is always batched); with planned shapes unequal lengths are right."""
    layout, samples = layout_of("one pp2 vpp2"), BATCHES["long_tail"]
    plans = [mixed_plan(samples, layout)]
    settings = {"overlap_p2p_comm": False, "batch_p2p_comm": False}
    ranks = run_ranks(2, run_both, layout, plans, samples, settings, False, timeout_s=60)
    overlapped = run_ranks(2, run_both, layout, plans, samples, {}, False, timeout_s=60)
    for outcomes, expected in zip(zip(*ranks, strict=True), zip(*overlapped, strict=True), strict=True):
        pairs = zip(outcomes, expected, strict=True)
        check_equal(layout, [{**outcome, "stock": wanted["planned"]} for outcome, wanted in pairs])


def run_with_tokens(layout: Layout, samples: Sequence[Sample], tokens_of_stage: Sequence[Sequence[int]]) -> str:
    """Run a planned pass in which each stage believes its own tokens; return the error that it met."""
    trainee = Trainee(layout)
    packed = trainee.pack(plan_of_three(layout, samples), samples)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    believed = tokens_of_stage[stage]
    assert [bucket.rank_tokens for bucket in packed.buckets] == [5, 9, 30]
    with pytest.raises(DisagreementError) as caught:
        trainee.run(packed, rank_tokens=believed, verify_messages=len({tuple(t) for t in tokens_of_stage}) > 1)
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are still in step
    assert total.item() == layout.pp
    return str(caught.value)


def plan_of_three(layout: Layout, samples: Sequence[Sample]) -> Plan:
    micro_batches = [static_plan((sample,), layout, cp_size=1).micro_batches[0] for sample in samples]
    return Plan(topology=layout.topology, max_tokens_per_rank=100, micro_batches=tuple(micro_batches))


@pytest.mark.parametrize(
    ("line", "tokens", "says"),
    [
        ("one pp4", [[5, 9, 30], [5, 9, 30], [5, 8, 30], [5, 9, 30]],
         "stage 1 sends message 1 as (9, 1, 128), stage 2 expects (8, 1, 128)"),
        ("one pp2", [[5, 9, 30], [5, 9]], "stage 0 sends 3 messages, stage 1 expects 2"),
        ("one pp2", [[5, 9, 30, 7]] * 2, "is done with 3 of 4 messages"),
    ],
    ids=["lengths", "numbers", "unfinished"],
)  # fmt: skip
def test_plans_that_do_not_fit_are_found_on_all_stages(line: str, tokens: list[list[int]], says: str) -> None:
    """Those of neighbours that differ before they exchange anything."""
    layout = layout_of(line)
    messages = run_ranks(layout.pp, run_with_tokens, layout, samples_of(5, 9, 30), tokens, timeout_s=60)
    assert all(says in message for message in messages)


def run_wrong_plan(layout: Layout, samples: Sequence[Sample], tokens: Sequence[int]) -> None:
    trainee = Trainee(layout)
    trainee.run(trainee.pack(plan_of_three(layout, samples), samples), rank_tokens=tokens)


@pytest.mark.by_day("order")
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, 30, 9], "(9, 1, 128) torch.float32 for micro-batch 1 (send_next), the plan says (30, 1, 128)"),
        (
            [5, 9, 31],
            "stage 0 has (30, 1, 128) torch.float32 for micro-batch 2 (send_next), the plan says (31, 1, 128)",
        ),
        ([5, 9], "stage 0 is asked for message 3 (send_next), the plan has 2"),
    ],
    ids=["order", "length", "number"],
)
def test_wrong_plan_is_caught_by_its_sender(tokens: list[int], message: str) -> None:
    """All stages believe the same wrong plan: the sender stops before the neighbour reads other numbers."""
    layout, samples = layout_of("one pp2"), samples_of(5, 9, 30)
    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(2, run_wrong_plan, layout, samples, tokens, timeout_s=20)


def refuse_fixed_lengths() -> str:
    initialize_model_parallel(1, 2)
    config, _ = build_chunks(Layout(1, pp=2), reference.LLAMA)
    config.variable_seq_lengths = False
    with pytest.raises(UnsupportedFeatureError) as caught:
        PlannedP2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config, [5])
    return str(caught.value)


def test_fixed_lengths_are_refused() -> None:
    assert "variable_seq_lengths is False" in run_ranks(2, refuse_fixed_lengths, timeout_s=30)[0]


# The order of messages, without ranks.


@pytest.mark.parametrize("pp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("vp_size", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_orders_are_those_of_the_planner(pp_size: int, vp_size: int, groups: int) -> None:
    """Two sources: megatron-core's table here, the simulator's schedule there."""
    num_microbatches = groups * pp_size
    for stage in range(pp_size):
        orders = message_orders(stage, pp_size, num_microbatches, vp_size, pp_size, forward_only=False)
        operations = stage_operations(stage, pp_size, num_microbatches, vp_size)
        virtual = [(op.kind, op.micro_batch, op.chunk * pp_size + stage) for op in operations]
        last = pp_size * vp_size - 1
        forward = [(index, at) for kind, index, at in virtual if kind == "F"]
        backward = [(index, at) for kind, index, at in virtual if kind == "B"]
        assert orders.recv_prev == tuple(index for index, at in forward if at > 0)
        assert orders.send_next == tuple(index for index, at in forward if at < last)
        assert orders.recv_next == tuple(index for index, at in backward if at < last)
        assert orders.send_prev == tuple(index for index, at in backward if at > 0)


@pytest.mark.parametrize(
    ("pp_size", "vp_size", "num_microbatches", "group_size"), [(2, 2, 5, 3), (4, 3, 13, 8), (2, 1, 1, 2)]
)
def test_both_ends_of_a_pipe_have_one_order(pp_size: int, vp_size: int, num_microbatches: int, group_size: int) -> None:
    """Also with groups of micro-batches that are larger than the pipeline or unequal."""
    orders = [
        message_orders(stage, pp_size, num_microbatches, vp_size, group_size, forward_only=False)
        for stage in range(pp_size)
    ]
    for stage in range(pp_size):
        following = (stage + 1) % pp_size
        assert orders[stage].send_next == orders[following].recv_prev
        assert orders[following].send_prev == orders[stage].recv_next
    assert sum(len(one.send_next) for one in orders) == (pp_size * vp_size - 1) * num_microbatches
    evaluation = message_orders(0, pp_size, num_microbatches, vp_size, group_size, forward_only=True)
    assert evaluation == orders[0]._replace(recv_next=(), send_prev=())
