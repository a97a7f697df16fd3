"""Models with layers of linear attention: losses and gradients equal those of a model that goes token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from dynamic_cp.plans.validate import check_plan
from megatron.dynamic_cp.model import gated_delta, mamba
from tests.distributed import parity
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Layout,
    assert_all_equal_to_reference,
    assert_equal_to_reference,
    build_chunks,
    mixed_plan,
    plans_of_blocks,
    run_step,
)
from tests.distributed.reference import VARIANTS
from tests.distributed.test_parity import FULL_RECOMPUTE, SELECTIVE_RECOMPUTE

NORMS_DROPPED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "gdn_norm_out"]}
WINDOW = {"window_size": (15, 0)}
BY_DAY = {
    "delta_dp4": Layout(4, variant="delta_moe", distributed_optimizer=True, config=SELECTIVE_RECOMPUTE),
    "delta_tp2_pp2_vpp2": Layout(1, tp=2, pp=2, vpp=2, variant="delta", config=NORMS_DROPPED),
    "mamba_dp4": Layout(4, variant="mamba", config=FULL_RECOMPUTE),
    "mamba_tp2": Layout(1, tp=2, variant="mamba"),
    "mamba_tp2_sp": Layout(2, tp=2, sp=True, variant="mamba_moe"),
    "modules_pp2": Layout(2, pp=2, variant="delta_mtp", config=FULL_RECOMPUTE),
    "delta_more_dp4": Layout(4, variant="delta_more", exchange="all_gather", config={**WINDOW, **SELECTIVE_RECOMPUTE}),
    "mamba_more_tp2_sp": Layout(
        2, tp=2, sp=True, variant="mamba_more", exchange="all_gather", config=WINDOW | {"window_attn_skip_freq": 4}
    ),
    "delta_latent_dp4": Layout(4, variant="delta_latent", exchange="mixed"),
}
KINDS = {"delta": "delta_moe", "mamba": "mamba_moe"}
BY_NIGHT = {
    f"{kind}_{name}": layout
    for kind, with_experts in KINDS.items()
    for name, layout in {
        "dp4_heads": Layout(4, variant=kind, states="heads"),
        "dp4_states": Layout(4, variant=kind, states="states"),
        "dp4_ep2": Layout(4, ep=2, variant=with_experts, distributed_optimizer=True),
        "six_lanes": Layout(6, variant=kind),
        "dp8": Layout(8, variant=kind, distributed_optimizer=True, overlap_grad_reduce=True),
        "six_lanes_ep2": Layout(6, ep=2, variant=with_experts, config=SELECTIVE_RECOMPUTE),
        "dp2_full_recompute": Layout(2, variant=with_experts, config=FULL_RECOMPUTE),
        "tp2_sp": Layout(2, tp=2, sp=True, variant=kind, config=SELECTIVE_RECOMPUTE),
        "tp2_sp_ep2": Layout(2, tp=2, sp=True, ep=2, variant=with_experts),
        "pp2": Layout(2, pp=2, variant=kind, exchange="mixed"),
        "pp2_unlike_stages": Layout(2, pp=2, variant=kind, config={"num_layers_in_first_pipeline_stage": 1}),
        "pp2_vpp2": Layout(2, pp=2, vpp=2, variant=kind, distributed_optimizer=True, config=FULL_RECOMPUTE),
        "tp2_sp_pp2": Layout(2, tp=2, sp=True, pp=2, ep=2, variant=with_experts, distributed_optimizer=True),
    }.items()
} | {
    "delta_halves": Layout(2, tp=2, variant="delta_halves"),
    "modules_dp4_ep2": Layout(4, ep=2, variant="delta_mtp", distributed_optimizer=True, config=SELECTIVE_RECOMPUTE),
    "delta_more_pp2": Layout(2, pp=2, variant="delta_more", exchange="all_gather", config=WINDOW | FULL_RECOMPUTE),
    "delta_more_tp2": Layout(1, tp=2, variant="delta_more", exchange="all_gather", config=WINDOW),
    "mamba_more_six_lanes": Layout(6, variant="mamba_more", exchange="all_gather", config=WINDOW),
    "delta_latent_tp2_sp": Layout(2, tp=2, sp=True, variant="delta_latent", exchange="latent"),
    "halves_latent_pp2": Layout(2, pp=2, variant="halves_latent", distributed_optimizer=True),
    "linear_modules_dp4": Layout(4, variant="delta_last", config=NORMS_DROPPED),
    "modules_six_lanes": Layout(6, variant="delta_mtp"),
    "modules_tp2_sp": Layout(2, tp=2, sp=True, variant="delta_mtp"),
    "modules_pp2_vpp2": Layout(2, pp=2, vpp=2, variant="delta_mtp", distributed_optimizer=True),
}


def cases_of(layouts: Mapping[str, Layout], reference_of: Any, batch: str = "long_tail") -> dict[str, Case]:
    samples, cases = BATCHES[batch], {}
    for name, layout in layouts.items():
        plan = mixed_plan(samples, layout)
        check_plan(plan, samples)
        cases[name] = Case(layout, samples, plan, reference_of(layout, batch))
    return cases


def test_hybrids_equal_single_process(reference_of) -> None:
    cases = cases_of(BY_DAY, reference_of)
    for name in ("delta_dp4", "mamba_dp4"):
        ways = {(bucket.cp_size, bucket.state_exchange) for bucket in cases[name].plan.buckets if bucket.cp_size > 1}
        assert len(ways) >= 3, "not both ways"
    assert_all_equal_to_reference(cases, bytes_too=True)


PLACED_BY_DAY = {"delta_dp4": Layout(4, variant="delta")}
PLACED_BY_NIGHT = {
    f"{kind}_{name}": layout
    for kind in ("delta", "mamba")
    for name, layout in {
        "six_lanes": Layout(6, variant=kind, config=FULL_RECOMPUTE),
        "tp2_sp": Layout(2, tp=2, sp=True, variant=kind, config=SELECTIVE_RECOMPUTE),
        "pp2_vpp2": Layout(3, pp=2, vpp=2, variant=kind, distributed_optimizer=True),
    }.items()
} | {
    "delta_more": Layout(4, variant="delta_more", exchange="all_gather", config=WINDOW | NORMS_DROPPED),
    "mamba_more": Layout(3, variant="mamba_more", exchange="all_gather", config=WINDOW | {"window_attn_skip_freq": 4}),
    "delta_latent": Layout(3, variant="delta_latent"),
    "linear_modules": Layout(3, variant="delta_last"),
}


@pytest.mark.by_day("day")
@pytest.mark.parametrize("when", ["day", "night"])
def test_states_follow_homes_of_placed_attention(when: str, reference_of) -> None:
    samples, layouts = BATCHES["long_tail"], PLACED_BY_DAY if when == "day" else PLACED_BY_NIGHT
    planned = {"planned": (layouts["delta_dp4"], 640)} if when == "day" else {}
    cases = {
        name: Case(layout, samples, plan, reference_of(layout, "long_tail"))
        for name, (layout, plan) in plans_of_blocks(samples, layouts, planned).items()
    }
    for case in cases.values():
        check_plan(case.plan, samples)
        assert any(bucket.is_placed and bucket.exchanges_states for bucket in case.plan.buckets)
    assert_all_equal_to_reference(cases, bytes_too=True)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", ["long_tail", "few", "tiny"])
def test_hybrids_on_all_layouts_equal_single_process(batch: str, reference_of) -> None:
    layouts = BY_NIGHT if batch == "long_tail" else {name: BY_NIGHT[name] for name in BY_NIGHT if "_dp4_" in name}
    assert_all_equal_to_reference(cases_of(layouts, reference_of, batch), bytes_too=True)


@pytest.mark.parametrize("name", ["delta_dp4", "mamba_tp2"])
def test_hybrids_in_float64_differ_by_the_rounding_of_buffers(name: str, reference_of) -> None:
    """Those of gradients, which are in float32: what more they differ by in float32 is rounded outside these layers."""
    (case,) = cases_of({name: BY_DAY[name]}, reference_of).values()
    for comparison in run_ranks(case.layout.topology.world_size, run_step, *case, in_float64):
        errors = {"loss": comparison.loss_error, **comparison.gradient_errors}
        assert max(errors.values()) <= TOLERANCE / 10, errors


def in_float64() -> None:
    build = parity.build_chunks

    def doubled(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        config, chunks = build(*args, **kwargs)
        return config, [chunk.double() for chunk in chunks]

    parity.build_chunks = doubled


def sum_no_norm_over_tp() -> None:
    """As megatron-core does without sequence parallelism."""
    init = gated_delta.DynamicCPGatedDelta.__init__

    def unmarked(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.out_norm.parameters():
            parameter.average_gradients_across_tp_domain = False

    gated_delta.DynamicCPGatedDelta.__init__ = unmarked


def take_gates_of_other_rows(kind: type, gate: str, other: str) -> Callable[[], None]:
    """The first projection has sections of equal size in another order: those that gate."""

    def sabotage() -> None:
        sections = kind._sections

        def swapped(self: Any) -> dict[str, int]:
            names = {gate: other, other: gate}
            return {names.get(name, name): rows for name, rows in sections(self).items()}

        kind._sections = swapped

    return sabotage


def share_out_steps_by_the_first_rank() -> None:
    """Every TP rank has the decays of the first one's heads."""
    attended = mamba.DynamicCPMamba._attended

    def of_first(self: Any, sections: Any, *others: Any) -> torch.Tensor:
        whole = sections["dt"].clone()
        torch.distributed.broadcast(whole, torch.distributed.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return attended(self, sections | {"dt": whole}, *others)

    mamba.DynamicCPMamba._attended = of_first


DELTA = Layout(1, tp=2, variant="delta")
FAULTS = {
    "a norm's gradient of own heads alone": (DELTA, sum_no_norm_over_tp, "out_norm"),
    "beta for alpha": (DELTA, take_gates_of_other_rows(gated_delta.DynamicCPGatedDelta, "beta", "alpha"), "A_log"),
    "z for values": (
        Layout(1, tp=2, variant="mamba"),
        take_gates_of_other_rows(mamba.DynamicCPMamba, "z", "x"),
        "in_proj",
    ),
    "gates of another rank": (Layout(1, tp=2, variant="mamba"), share_out_steps_by_the_first_rank, "dt_bias"),
}


@pytest.mark.by_day("a norm's gradient of own heads alone", "gates of another rank")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_over_tensor_parallel_ranks_are_noticed(fault: str, reference_of) -> None:
    layout, sabotage, where = FAULTS[fault]
    samples = BATCHES["long_tail"]
    expected = reference_of(layout, "long_tail")
    found = run_ranks(2, run_step, layout, samples, mixed_plan(samples, layout), expected, sabotage)
    with pytest.raises(AssertionError, match=where):
        assert_equal_to_reference(found, layout, expected)


def test_a_pattern_needs_no_module_of_another_half() -> None:
    """What a symbol leaves out has no parameters."""
    names = run_ranks(1, names_of_parameters)[0]
    halves = [
        {name.split(".")[3] for name in names if name.startswith(f"decoder.layers.{layer}.")} for layer in range(4)
    ]
    mixer = {"input_layernorm", "self_attention"}
    assert halves == [mixer, mixer, {"pre_mlp_layernorm", "mlp"}, mixer]


def test_tensors_are_saved_under_megatron_cores_names() -> None:
    """Those of its class of hybrids, whose layers fuse a norm into the projection behind it, and number layers."""
    (names,) = run_ranks(1, names_in_checkpoints, "mamba")
    of_mamba = [
        *("in_proj.layer_norm_weight", *(f"in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt"))),
        *(f"conv1d.{name}.{part}" for name in ("weight", "bias") for part in "xBC"),
        *("A_log", "dt_bias", "D", "norm.weight", "out_proj.weight"),
    ]
    layers = [f"decoder.layers.{layer}.mixer.{name}" for layer in (0, 3) for name in of_mamba]
    layers += [f"decoder.layers.1.self_attention.linear_{name}" for name in ("qkv.layer_norm_weight", "qkv.weight")]
    layers += ["decoder.layers.1.self_attention.linear_proj.weight"]
    layers += [f"decoder.layers.2.mlp.linear_{name}.weight" for name in ("fc1", "fc2")]
    layers += ["decoder.layers.2.mlp.linear_fc1.layer_norm_weight", "decoder.final_norm.weight"]
    assert {name for name in names if name.startswith("decoder.")} == set(layers)
    (names,) = run_ranks(1, names_in_checkpoints, "delta")
    linear = {name.removeprefix("decoder.layers.0.self_attention.") for name in names if "layers.0.self_att" in name}
    sections = ("query", "key", "value")
    assert linear == {
        *("in_proj.layer_norm_weight", *(f"in_proj.weight.{part}" for part in (*sections, "z", "beta", "alpha"))),
        *(f"conv1d.weight.{part}" for part in sections),
        *("A_log", "dt_bias", "out_norm.weight", "out_proj.weight"),
    }


def names_in_checkpoints(variant: str) -> set[str]:
    initialize_model_parallel()
    _, (chunk,) = build_chunks(Layout(1, variant=variant), VARIANTS[variant])
    found = set()
    for one in chunk.sharded_state_dict().values():
        parts = one.build() if isinstance(one, ShardedTensorFactory) else [one]
        found |= {part.key for part in (parts.values() if isinstance(parts, dict) else parts)}
    return {name for name in found if not name.endswith(("_extra_state", ".bias"))}


def names_of_parameters() -> list[str]:
    initialize_model_parallel()
    _, (chunk,) = build_chunks(Layout(1, variant="mamba"), VARIANTS["mamba"])
    return [name for name, _ in chunk.named_parameters()]
