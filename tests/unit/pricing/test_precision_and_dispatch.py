"""FP8 by rates of a hardware file, dispatchers of experts, the host of experts, and what hides collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamic_cp.errors import InvalidInputError
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware, load_model
from dynamic_cp.pipeline.simulator import simulate
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.pricing.edges import Edges, Reduction, tensor_s_per_token
from dynamic_cp.pricing.experts import EXPOSED_SHARE, expert_prices
from dynamic_cp.types import Bucket, Hardware, MicroBatch, ModelShape, Plan, Problem, Sample, Topology
from tests.unit.support import problem_of

H100, DENSE = load_hardware("h100"), load_model("llama-3-8b")
MOE = load_model("qwen3-30b-a3b")
TWO_NODES = Topology(num_lanes=16, ep_size=16)


def problem(
    model: ModelShape = DENSE, topology: Topology | None = None, hardware: Hardware = H100, **options: object
) -> Problem:
    given = {"max_tokens_per_rank": 8192, "cp_comm_types": ("auto",), **options}
    return problem_of(topology or Topology(num_lanes=8), model, hardware, **given)


def sent_s(**experts: object) -> float:
    """Seconds of a routed token on the way to experts and back, forward, all layers."""
    model = replace(MOE, experts=replace(MOE.experts, **experts))
    return expert_prices(model.stages(1)[0], problem(model, TWO_NODES))[0].per_routed


def test_products_in_fp8_are_faster_and_pay_for_casts() -> None:
    in_fp8 = H100.in_fp8()
    assert in_fp8.linear_flops_per_s == pytest.approx(H100.fp8_linear_flops_per_s)
    assert in_fp8.expert_flops_per_s / H100.expert_flops_per_s == pytest.approx(1040 / 613)
    assert in_fp8.attention_flops_per_s == H100.attention_flops_per_s
    bf16, fp8 = (CostModel(problem(fp8=is_on)).cost(1, 0, 8192, 8192**2) for is_on in (False, True))
    assert 1.2 < (bf16.forward_s + bf16.backward_s) / (fp8.forward_s + fp8.backward_s) < 1.6
    assert fp8.head_forward_s == bf16.head_forward_s, "the head stays in bf16"
    # What a product takes besides is a larger share in FP8, of narrow layers more than of wide ones.
    channels = H100.expert_extra_channels * (1040 / 613 - 1)
    stage = CostModel(problem(fp8=True)).stage
    one_s = 2 * DENSE.num_layers * DENSE.linear_weights_per_layer / H100.fp8_linear_flops_per_s
    assert stage._linear_s_per_token == pytest.approx(one_s * (1 + channels / DENSE.hidden_size))
    free = replace(H100, memory_bandwidth_bytes_per_s=0.0)
    cast = fp8.forward_s - CostModel(problem(fp8=True, hardware=free)).cost(1, 0, 8192, 8192**2).forward_s
    channels = 4 * 4096 + 2 * (4096 + 1024) + 3 * 14336
    assert cast == pytest.approx(32 * 8192 * 2 * channels / H100.memory_bandwidth_bytes_per_s)


def test_hardware_without_a_rate_of_fp8_prices_it_as_bf16_but_for_casts() -> None:
    old = replace(H100, fp8_linear_flops_per_s=0.0)
    assert old.in_fp8().linear_flops_per_s == old.linear_flops_per_s
    slower = CostModel(problem(hardware=old, fp8=True)).cost(1, 0, 8192, 8192**2).forward_s
    assert slower > CostModel(problem(hardware=old)).cost(1, 0, 8192, 8192**2).forward_s


def test_a_domain_of_72_gpus_is_one_node_of_jobs_that_it_holds_or_divides() -> None:
    gb200 = load_hardware("gb200")
    assert [gb200.node_ranks(ranks) for ranks in (8, 64, 72, 128, 144, 256)] == [72, 72, 72, 64, 72, 64]
    assert [H100.node_ranks(ranks) for ranks in (4, 8, 12, 64)] == [8, 8, 8, 8]
    near, far = (
        CostModel(problem(topology=Topology(num_lanes=64, ranks_per_node=ranks), hardware=gb200))
        .cost(16, 0, 16 * 8192, (16 * 8192) ** 2, "a2a")
        .forward_s
        for ranks in (72, 8)
    )
    assert near < far


def test_gathers_of_sequence_parallelism_send_fp8() -> None:
    topology = Topology(num_lanes=2, tp_size=4, sequence_parallel=True)
    bf16, fp8 = (tensor_s_per_token(problem(topology=topology, fp8=is_on)) for is_on in (False, True))
    assert fp8 == pytest.approx(0.75 * bf16)
    without = replace(topology, sequence_parallel=False)
    assert tensor_s_per_token(problem(topology=without, fp8=True)) == bf16


def test_fp8_keeps_fewer_bytes_of_activations_and_copies_of_weights() -> None:
    bf16, copied, kept = (
        MemoryModel(problem(**options)).peak_at(8192)[0]
        for options in ({}, {"fp8": True}, {"fp8": True, "fp8_param": True})
    )
    assert 0.8 < kept.activations_bytes / bf16.activations_bytes < 0.9
    assert copied.activations_bytes == kept.activations_bytes
    assert kept.weights_bytes == bf16.weights_bytes, "by rows and by columns, a byte each"
    layers = DENSE.num_parameters - DENSE.vocabulary_weights
    assert copied.weights_bytes - bf16.weights_bytes == pytest.approx(2 * layers, rel=1e-3)


def test_a_copy_a_node_is_cheaper_than_a_copy_an_expert() -> None:
    """By hand: 8 of 128 experts on 16 ranks of 2 nodes."""
    across, in_node = 1 / 40e9, 1 / 360e9
    copy_bytes = 48 * 2 * 2048 * 2 * 8
    assert sent_s() == pytest.approx(copy_bytes * (8 / 16 * across + 7 / 16 * in_node))
    reached = (1 - 1 / 2**8) / 8, 15 * (1 - (15 / 16) ** 8) / 8
    for dispatcher in ("deepep", "hybridep"):
        assert sent_s(dispatcher=dispatcher) == pytest.approx(copy_bytes * (reached[0] * across + reached[1] * in_node))
    assert sent_s(dispatcher="deepep", overlapped=True) == pytest.approx(EXPOSED_SHARE * sent_s(dispatcher="deepep"))
    # A token that is sent to experts of one group meets one node.
    assert sent_s(dispatcher="deepep", num_groups=2, group_topk=1) < sent_s(dispatcher="deepep")
    assert sent_s(num_groups=2, group_topk=1) == sent_s()
    with pytest.raises(InvalidInputError, match="dispatcher is 'nccl': use one of alltoall, deepep, hybridep"):
        sent_s(dispatcher="nccl")


def test_narrow_experts_are_multiplied_more_slowly() -> None:
    wide = replace(MOE, experts=replace(MOE.experts, ffn_hidden_size=7680))
    seconds = {
        model.experts.ffn_hidden_size: expert_prices(model.stages(1)[0], problem(model, TWO_NODES))[0].per_mean
        / model.stages(1)[0].sum(lambda layer: layer.expert_weights)
        for model in (MOE, wide)
    }
    assert 1.1 < seconds[768] / seconds[7680] < 1.6


@pytest.mark.parametrize("ep_size", [1, 8])
def test_the_host_launches_experts_too(ep_size: int) -> None:
    """Few tokens take what the host takes for a layer and its experts, whether or not lanes share them."""
    topology = Topology(num_lanes=8, ep_size=ep_size)
    buckets = tuple(Bucket(first_lane=lane, samples=(Sample(sample_id=lane, seqlen=64),)) for lane in range(8))
    plan = Plan(topology=topology, max_tokens_per_rank=8192, micro_batches=(MicroBatch(buckets=buckets),))
    host = {
        each_s: simulate(plan, CostModel(problem(MOE, topology, replace(
            H100, host_expert_forward_s_per_layer=each_s, host_expert_backward_s_per_layer=each_s
        )))).makespan_s
        for each_s in (0.01, 0.02)
    }  # fmt: skip
    assert host[0.02] - host[0.01] == pytest.approx(2 * 48 * 0.01)
    assert host[0.01] == pytest.approx(48 * (0.00088 + 0.00099 + 2 * 0.01), rel=0.05)


def test_hidden_collectives_slow_what_hides_them() -> None:
    seconds = np.full((1, 1, 1), 4.0)
    edges = Edges(first_start_s=np.zeros((1, 1, 1)), first_s=seconds, last_end_s=seconds * 2, last_s=seconds)
    free = Reduction(np.array([2.0]), np.array([0.0]), 4, True, True)
    slowing = free._replace(slows=0.2)
    exposed = free.exposed_s(edges, 8.0)
    assert exposed == pytest.approx(0.5)
    assert slowing.exposed_s(edges, 8.0) == pytest.approx(exposed + 0.2 * (2.0 - exposed))
    assert slowing.exposed_s(edges, 8.0) >= slowing.least_s > free.least_s == 0.0
    open_air = slowing._replace(hides_reduce=False, hides_gather=False)
    assert open_air.exposed_s(edges, 8.0) == open_air.least_s == 2.0
