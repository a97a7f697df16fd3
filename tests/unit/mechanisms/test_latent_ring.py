"""The ring of latents: its price by hand, what it sends and keeps, and that the planner takes it where it pays."""

from dataclasses import replace

import pytest

from dynamic_cp.decide.plan_arrays import plan_lengths
from dynamic_cp.decide.sent import sent_by_plan
from dynamic_cp.errors import UnsupportedFeatureError
from dynamic_cp.mechanisms.registry import MECHANISMS
from dynamic_cp.mechanisms.stage_attention import Linear, StageAttention
from dynamic_cp.memory.memory_model import MemoryModel
from dynamic_cp.models.catalog import load_hardware
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_problem
from dynamic_cp.types import AUTO, CP_COMM_TYPES, ModelShape, Plan, Topology, exchanges_of
from tests.unit.support import CURVED_HARDWARE, TINY_MODEL, plan_of_buckets, problem_of, samples_of

LATENT = exchanges_of("latent")
ANY = exchanges_of(AUTO, has_latents=True)

DEEPSEEK_V3 = ModelShape(
    num_layers=4, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128, num_query_groups=128,
    kv_channels=192, vocab_size=129280, gated_linear_unit=True, q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128,
    qk_pos_emb_head_dim=64, v_head_dim=128,
)  # fmt: skip
"""Four layers of its shape, dense."""


def stage_of(topology: Topology, hardware=CURVED_HARDWARE, model: ModelShape = DEEPSEEK_V3) -> StageAttention:
    stage = model.stages(topology.pp_size)[0]
    return StageAttention(stage, problem_of(topology, model, hardware), node_lanes=8)


def test_a_token_is_71_times_smaller():
    stage = stage_of(Topology(num_lanes=8))
    layers = DEEPSEEK_V3.num_layers
    assert stage.latent_bytes == layers * 2 * (512 + 64) == layers * 1152
    sent, full = (
        MECHANISMS[name].sent_bytes(8, 1, 1.0, stage.narrow_kv_bytes, 1, stage.latent_bytes)
        for name in ("latent", "p2p")
    )
    # Of keys and values 98304 where values are padded, 81920 where not.
    assert (stage.kv_bytes, stage.narrow_kv_bytes) == (layers * 98304, layers * 81920)
    assert (sent.ring_steps, sent.inner) == (full.ring_steps, full.inner) == (7, 0)
    assert round(81920 / 1152) == 71
    assert full.forward / sent.forward == pytest.approx(81920 / 1152)
    assert sent.backward == 2 * sent.forward
    # TP ranks share heads, and each sends all latents.
    split = stage_of(Topology(num_lanes=8, tp_size=8))
    assert (split.latent_bytes, split.kv_bytes) == (stage.latent_bytes, stage.kv_bytes / 8)


@pytest.mark.parametrize(("cp_size", "tp_size"), [(2, 1), (8, 1), (8, 4)])
def test_the_price_is_that_of_the_ring_with_projections(cp_size, tp_size):
    """Links that take no time leave attention of the ring and what each lane projects up for the others."""
    fast = replace(CURVED_HARDWARE, bandwidth_in_node_bytes_per_s=1e30, exchange_latency_s_per_layer=0.0)
    stage = stage_of(Topology(num_lanes=8, tp_size=tp_size), fast)
    once_s = 2 * 4 * 512 * 128 * (128 + 128) / tp_size / fast.linear_flops_per_s
    latent, ring = (MECHANISMS[name].price(stage, cp_size, 1, 1, 0) for name in ("latent", "p2p"))
    # Backward projects up again, and has gradients of latents and weights; its own lane's are the layer's.
    for found, plain, times in zip(latent, ring, (cp_size - 1, 3 * cp_size - 2), strict=True):
        constant, per_token, per_token2 = found.linear.plus(plain.linear, -1.0)
        assert per_token2 == pytest.approx(0, abs=1e-25)
        assert per_token == pytest.approx(times * once_s / cp_size)
        assert constant == pytest.approx(times * once_s * fast.linear_extra_tokens)


def test_only_what_sends_no_heads_sends_values_as_they_are():
    """A slow link, nothing else in the price: bytes of keys with those of values, narrow or padded."""
    slow = replace(CURVED_HARDWARE, bandwidth_in_node_bytes_per_s=1.0, exchange_latency_s_per_layer=0.0)
    stage, steps = stage_of(Topology(num_lanes=8), slow), 3
    gathered = MECHANISMS["all_gather"].price(stage, 4, 1, 1, 0)[0].linear.per_token
    assert gathered == pytest.approx(steps * 4 * 81920 / 4, rel=1e-6)
    exposed = MECHANISMS["p2p"].price(stage, 4, 1, 1, 0)[0].kinks
    assert sum(kink.weight * kink.inner.per_token for kink in exposed) == pytest.approx(steps * 4 * 81920 / 4, rel=1e-6)
    heads = MECHANISMS["a2a"].price(stage, 4, 4, 1, 0)[0].linear.per_token
    assert heads == pytest.approx(3 / 4 * 4 * 2 * 98304 / 4, rel=1e-6)
    plain = stage_of(Topology(num_lanes=8), slow, TINY_MODEL)
    assert plain.narrow_kv_bytes == plain.kv_bytes


def test_transfers_hide_behind_projections_too():
    stage = stage_of(Topology(num_lanes=8))
    latent, ring = (MECHANISMS[name].price(stage, 4, 1, 1, 0)[0] for name in ("latent", "p2p"))
    first, later = stage.sides[0].steps(4)
    sent = Linear(stage.latency_s, stage.latent_bytes / 4 / stage.bandwidths[0])
    up = Linear(stage.projecting_up.constant, stage.projecting_up.per_token / 4)
    assert [kink.weight for kink in latent.kinks] == [kink.weight for kink in ring.kinks] == [1, 2]
    for kink, step in zip(latent.kinks, (first, later), strict=True):
        assert kink.inner == pytest.approx(sent.plus(step, -1.0).plus(up, -1.0))


def test_memory_is_that_of_two_lanes_in_a_group_of_any_size():
    kept = [MECHANISMS["latent"].kept_bytes(cp_size, 1, 1.0, 98304.0, 1, 1152.0) for cp_size in (2, 8, 64)]
    assert kept == [2 * 98304 + 4 * 1152] * 3
    job = Topology(num_lanes=64, tp_size=8, sequence_parallel=True), DEEPSEEK_V3, load_hardware("h100")
    memory = (MemoryModel(problem_of(*job, cp_comm_types=names)) for names in (LATENT, ("p2p",)))
    exchanged = [one.peak_at(4096, 16)[0].exchange_bytes for one in memory]
    assert exchanged == [4096 * (2 * 98304 / 8 + 4 * 1152), 4096 * 16 * 98304 / 8]


def test_a_model_without_latents_has_none_to_send():
    with pytest.raises(UnsupportedFeatureError, match="kv_lora_rank of this model is 0: use p2p or auto"):
        CostModel(problem_of(Topology(num_lanes=4), cp_comm_types=LATENT))


def with_a_ring(plan: Plan) -> Plan:
    """Return `plan` with keys and values in the place of latents."""
    rows = [
        [replace(one, cp_comm_type="p2p") if one.cp_comm_type == "latent" else one for one in row.buckets]
        for row in plan.micro_batches
    ]
    return plan_of_buckets(*rows, topology=plan.topology, max_tokens_per_rank=plan.max_tokens_per_rank)


@pytest.mark.parametrize("nodes_apart", [False, True])
def test_the_planner_takes_it_where_it_pays(nodes_apart):
    """Long samples of 128 heads over slow links: latents; no plan gets slower by having them to choose from."""
    topology = Topology(num_lanes=8, tp_size=8, sequence_parallel=True, ranks_per_node=8 if nodes_apart else 64)
    samples = samples_of([65536, 40000, 9000, 5000, 3000, 2000, 1000, 700, 300, 1])
    found = {}
    for names in (CP_COMM_TYPES, ANY, LATENT):
        options = {"max_tokens_per_rank": 16384, "cp_comm_types": names, "recompute": "full"}
        problem = problem_of(topology, DEEPSEEK_V3, load_hardware("h100"), **options)
        planned = plan_problem(problem, samples)
        check_plan(planned.plan, samples)
        used = {bucket.cp_comm_type for bucket in planned.plan.buckets if bucket.cp_size > 1}
        found[names] = planned.predicted_s, used
        if names == LATENT:
            sent = [sum(sent_by_plan(plan, problem)) for plan in (planned.plan, with_a_ring(planned.plan))]
            assert sent[1] == pytest.approx(81920 / 8 / 1152 * sent[0])
    assert found[ANY][0] <= found[CP_COMM_TYPES][0] * (1 + 1e-9)
    assert found[LATENT][1] == {"latent"}
    if nodes_apart:
        assert "latent" in found[ANY][1]
        assert found[ANY][0] < 0.95 * found[CP_COMM_TYPES][0]
        arrays = plan_lengths(
            [sample.seqlen for sample in samples], num_lanes=8, tp_size=8, sequence_parallel=True, ranks_per_node=8,
            max_tokens_per_rank=16384, recompute="full", cp_comm_types=AUTO, model=DEEPSEEK_V3, hardware="h100",
        )  # fmt: skip
        assert arrays.predicted_s == found[ANY][0], "auto means the same to plans as arrays"
        assert "latent" in arrays.cp_comm_type
