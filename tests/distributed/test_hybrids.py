"""Models with layers of linear attention: losses and gradients equal those of a model that goes token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron.dynamic_cp.model.linear_layers import DynamicCPGatedDelta, DynamicCPMamba
from tests.distributed import parity
from tests.distributed.faults import Plant, around, marks_parameters
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.layouts import layout_of
from tests.distributed.parity import TOLERANCE, Layout, assert_equal_to_reference, build_chunks, case_of, run_faulty
from tests.distributed.reference import VARIANTS


@around(parity, "build_chunks")
def in_float64(build: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    config, chunks = build(*args, **kwargs)
    return config, [chunk.double() for chunk in chunks]


@pytest.mark.nightly
@pytest.mark.parametrize("line", ["four delta_moe distributed again=core_attn", "one tp2 mamba"])
def test_hybrids_in_float64_differ_by_the_rounding_of_buffers(line: str, reference_of) -> None:
    """Those of gradients, which are in float32: what more they differ by in float32 is rounded outside these layers."""
    case = case_of(reference_of, layout_of(line))
    for rank in run_ranks(case.layout.topology.world_size, run_faulty, {line: (case, in_float64)}):
        errors = {"loss": rank[line].loss_error, **rank[line].gradient_errors}
        assert max(errors.values()) <= TOLERANCE / 10, errors


# As megatron-core does without sequence parallelism.
sum_no_norm_over_tp = marks_parameters(
    DynamicCPGatedDelta, "average_gradients_across_tp_domain", False, lambda layer: layer.out_norm.parameters()
)


def take_gates_of_other_rows(kind: type, gate: str, other: str) -> Plant:
    """The first projection has sections of equal size in another order: those that gate."""

    @around(kind, "_sections")
    def swapped(sections: Any, self: Any) -> dict[str, int]:
        names = {gate: other, other: gate}
        return {names.get(name, name): rows for name, rows in sections(self).items()}

    return swapped


@around(DynamicCPMamba, "_attended")
def share_out_steps_by_the_first_rank(attended: Any, self: Any, sections: Any, *others: Any) -> torch.Tensor:
    """Every TP rank has the decays of the first one's heads."""
    whole = sections["dt"].clone()
    dist.broadcast(whole, dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
    return attended(self, sections | {"dt": whole}, *others)


FAULTS: dict[str, tuple[str, Plant, str]] = {
    "a norm's gradient of own heads alone": ("one tp2 delta", sum_no_norm_over_tp, "out_norm"),
    "beta for alpha": ("one tp2 delta", take_gates_of_other_rows(DynamicCPGatedDelta, "beta", "alpha"), "A_log"),
    "z for values": ("one tp2 mamba", take_gates_of_other_rows(DynamicCPMamba, "z", "x"), "in_proj"),
    "gates of another rank": ("one tp2 mamba", share_out_steps_by_the_first_rank, "dt_bias"),
}


@pytest.mark.by_day("gates of another rank")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_over_tensor_parallel_ranks_are_noticed(fault: str, reference_of) -> None:
    line, plant, where = FAULTS[fault]
    case = case_of(reference_of, layout_of(line))
    ranks = run_ranks(2, run_faulty, {fault: (case, plant)})
    with pytest.raises(AssertionError, match=where):
        assert_equal_to_reference([rank[fault] for rank in ranks], case.layout, case.expected)


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
