"""Steps of a ladder are legal and tell coefficients apart; what others take of a machine is not the ranks' time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dynamic_cp import load_hardware
from dynamic_cp.calibration.ladder import ladder
from dynamic_cp.calibration.step_fit import fit_steps, step_s
from dynamic_cp.learning.observations import Observation
from dynamic_cp.plans.padding import padded_seqlens
from dynamic_cp.plans.validate import check_plan
from dynamic_cp.pricing.capacity import allowed_cp_sizes
from dynamic_cp.pricing.cost_model import CostModel
from dynamic_cp.search.search import plan_global_batch
from dynamic_cp.types import Hardware, ModelShape, Plan, PlanOptions, Sample, Topology

CPU = load_hardware("cpu")
MODEL = ModelShape(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=384,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    vocab_size=384,
    gated_linear_unit=True,
    source="made up",
)
TOPOLOGY = Topology(num_lanes=4, ranks_per_node=4)
OPTIONS = PlanOptions(max_tokens_per_rank=2048, bytes_per_element=4)

LAYOUTS = {
    "4 lanes": (TOPOLOGY, OPTIONS, 4096),
    "1 lane": (Topology(num_lanes=1), OPTIONS, 2048),
    "6 lanes": (Topology(num_lanes=6), replace(OPTIONS, max_tokens_per_rank=1500), 1000),
    "PP 2, VPP 2": (Topology(num_lanes=2, pp_size=2, vp_size=2), OPTIONS, 4096),
    "TP 3 with SP": (Topology(num_lanes=4, tp_size=3, sequence_parallel=True), OPTIONS, 333),
    "static": (TOPOLOGY, replace(OPTIONS, min_cp_size=2, max_cp_size=2), 4096),
    "tiny": (TOPOLOGY, replace(OPTIONS, max_tokens_per_rank=20), 80),
    "any exchange": (TOPOLOGY, replace(OPTIONS, cp_comm_types=("p2p", "a2a", "all_gather", "a2a+p2p")), 4096),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rungs_are_legal_and_show_every_cp_size_from_few_tokens_to_the_limit(layout: str) -> None:
    topology, options, max_seqlen = LAYOUTS[layout]
    rungs = ladder(CostModel(MODEL, CPU, topology, options), max_seqlen)
    for rung in rungs:
        check_plan(rung)
        assert set(rung.cp_histogram) - {1} == set(allowed_cp_sizes(topology, options)) - {1}
        assert max(sample.seqlen for sample in rung.samples) <= max_seqlen
    tokens = [rung.num_tokens for rung in rungs]
    assert tokens == sorted(tokens)
    assert tokens[0] <= 128 * rungs[0].num_microbatches * topology.num_lanes
    for rung in rungs[:-1]:
        assert max(len(bucket.samples) for bucket in rung.buckets) >= 4, "short samples, too"
    fullest = max(bucket.num_tokens / bucket.cp_size for bucket in rungs[-1].buckets)
    assert fullest > options.max_tokens_per_rank / 2


def observed(plan: Plan, truth: CostModel, rng: random.Random) -> list[Observation]:
    """Return what the buckets of `plan` take where `truth` holds, with some noise."""
    found = []
    for bucket in plan.buckets:
        padded = padded_seqlens((sample.seqlen for sample in bucket.samples), bucket.cp_size, 1)
        cost = truth.bucket_cost(bucket)
        found.append(
            Observation(
                cp_size=bucket.cp_size,
                first_lane=bucket.first_lane,
                tokens=sum(padded),
                tokens_squared=sum(seqlen * seqlen for seqlen in padded),
                forward_s=cost.forward_s * rng.lognormvariate(0, 0.1),
                backward_s=cost.backward_s * rng.lognormvariate(0, 0.1),
            )
        )
    return found


def fitted(truth: Hardware, *, waiting: float = 1.0, num_rungs: int = 3) -> Hardware:
    """Return what is fitted to the first rungs on a machine where `truth` holds, and steps take `waiting` as long."""
    model = CostModel(MODEL, truth, TOPOLOGY, OPTIONS)
    rungs, rng = ladder(CostModel(MODEL, CPU, TOPOLOGY, OPTIONS), 4096)[-num_rungs:], random.Random(3)
    return fit_steps(
        CPU,
        [one for rung in 2 * rungs for one in observed(rung, model, rng)],
        [(rung, waiting * step_s(rung, model) * rng.uniform(1.0, 1.1)) for rung in 2 * rungs],
        model=MODEL,
        topology=TOPOLOGY,
        options=OPTIONS,
        name="fitted",
        source="measured for a test",
    )


@pytest.mark.parametrize(
    ("linear", "attention", "overhead", "waiting"), [(1, 1, 1, 1), (0.1, 0.2, 8, 1), (5, 3, 0.2, 1.4)]
)
def test_steps_of_a_real_batch_are_predicted_on_machines_unlike_the_bundled_one(
    linear: float, attention: float, overhead: float, waiting: float
) -> None:
    """Lengths and sizes that no rung had; rates 10 times lower than the bundled file has them to 5 times higher."""
    truth = replace(
        CPU,
        linear_flops_per_s=linear * CPU.linear_flops_per_s,
        attention_flops_per_s=attention * CPU.attention_flops_per_s,
        forward_overhead_s_per_layer=overhead * CPU.forward_overhead_s_per_layer,
        backward_overhead_s_per_layer=overhead * CPU.backward_overhead_s_per_layer,
        overhead_s_per_bucket_stage=overhead * CPU.overhead_s_per_bucket_stage,
    )
    found = fitted(truth, waiting=waiting)
    rng = random.Random(1)
    samples = [Sample(sample_id=index, seqlen=rng.randint(50, 4096)) for index in range(24)]
    plan = plan_global_batch(samples, topology=TOPOLOGY, model=MODEL, hardware=CPU, options=OPTIONS).plan
    expected = waiting * step_s(plan, CostModel(MODEL, truth, TOPOLOGY, OPTIONS))
    assert step_s(plan, CostModel(MODEL, found, TOPOLOGY, OPTIONS)) == pytest.approx(expected, rel=0.08)
    assert found.name == "fitted"
    assert all(found.source[name].startswith("measured for a test") for name in ("linear_flops_per_s",))
    assert found.source["hbm_bytes"] == CPU.source["hbm_bytes"]


def test_with_too_few_buckets_to_tell_terms_apart_all_are_weighed_alike() -> None:
    model = CostModel(MODEL, CPU, TOPOLOGY, OPTIONS)
    rung = ladder(model, 4096)[0]
    found = fit_steps(
        CPU,
        [],
        [(rung, 3 * step_s(rung, model))],
        model=MODEL,
        topology=TOPOLOGY,
        options=OPTIONS,
        name="weighed",
        source="measured for a test",
    )
    assert step_s(rung, CostModel(MODEL, found, TOPOLOGY, OPTIONS)) == pytest.approx(3 * step_s(rung, model), rel=1e-3)
    assert found.attention_flops_per_s == pytest.approx(CPU.attention_flops_per_s / 3, rel=1e-3)
