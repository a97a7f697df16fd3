"""Models with layers of linear attention: losses and gradients equal those of a model that goes token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron.dynamic_cp.model import gated_delta, mamba
from tests.distributed import parity
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Layout,
    assert_equal_to_reference,
    build_chunks,
    mixed_plan,
    run_step,
)
from tests.distributed.reference import VARIANTS


@pytest.mark.parametrize("line", ["four delta_moe distributed again=core_attn", "one tp2 mamba"])
def test_hybrids_in_float64_differ_by_the_rounding_of_buffers(line: str, reference_of) -> None:
    """Those of gradients, which are in float32: what more they differ by in float32 is rounded outside these layers."""
    layout, samples = layout_of(line), BATCHES["long_tail"]
    case = layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail")
    for comparison in run_ranks(layout.topology.world_size, run_step, *case, in_float64):
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


@pytest.mark.by_day("gates of another rank")
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
