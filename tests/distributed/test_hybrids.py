"""Layers of linear attention beside megatron-core's own modules: what they compute, and what checkpoints hold."""

import contextlib
import importlib
import sys
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import silu, softplus

from megatron.dynamic_cp.model.linear_layers import DynamicCPGatedDelta, DynamicCPMamba
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, ExchangeStats
from megatron.trainer.checkpoints.saving import expect_results
from tests.distributed import reference, token_by_token
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.distributed.linear_reference import mamba2, sizes_of
from tests.distributed.parity import Layout, build_chunks
from tests.distributed.reference import VARIANTS

SEQLENS = 5, 130, 1, 40
KINDS = {"delta": reference.DELTA, "mamba": reference.MAMBA}
STOCK_TOLERANCE = 2e-5
"""megatron-core's rule in torch computes in float32 by itself."""


class _Norm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


class _GatedNorm(torch.nn.Module):
    """mamba_ssm's norm of groups of channels, with the constructor and the checkpoint of megatron-core's."""

    def __init__(self, size: int, eps: float, group_size: int, **_unused: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = torch.nn.Parameter(torch.ones(size)), eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class _NoTracker:
    def fork(self) -> Any:
        return contextlib.nullcontext()


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scan(zxbcdt: Any, weight: Any, bias: Any, dt_bias: Any, rates: Any, D: Any, chunk_size: int, **given: Any) -> Any:
    """Return what mamba_ssm's kernel computes of one sample, a token after the other."""
    heads, width, groups = len(dt_bias), given["headdim"], given["ngroups"]
    values = heads * width
    keys = (len(weight) - values) // 2
    sizes = sizes_of("mamba2", heads, groups, keys // groups, width, weight.shape[1])
    z, xbc, dt = zxbcdt[0].double().split([values, values + 2 * keys, heads], -1)
    step = softplus(dt + dt_bias)
    found = mamba2(xbc, step, (-rates.double()).log(), D.double(), weight[:, None].double(), bias.double(), sizes)
    return (found.flatten(1) * silu(z)).float()[None]


def import_without_triton(name: str) -> Any:
    """Return a module of megatron-core that imports Triton's programs of inference."""
    operations = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    sys.modules.setdefault(operations, mock.MagicMock())
    return importlib.import_module(name)


def stock_layer(kind: str, config: Any, parts: Any = None) -> torch.nn.Module:
    """Return megatron-core's module on a CPU, with local parts or those of its spec for TransformerEngine."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if kind == "delta":
        module = importlib.import_module("megatron.core.ssm.gated_delta_net")
        common = getattr(module, "common", module)  # a package since 0.19
        common.HAVE_FLA, common.l2norm, common.get_cuda_rng_tracker = True, _l2norm, _NoTracker
        parts = parts or module.GatedDeltaNetSubmodules(ColumnParallelLinear, _Norm, RowParallelLinear)
        layer = module.GatedDeltaNet(config, parts, layer_number=1, pg_collection=groups)

        def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # theirs is compiled
            return self.out_norm(x.flatten(0, -2)) * silu(gate.flatten(0, -2))

        layer._apply_gated_norm = MethodType(gated_norm, layer)
        return layer
    module = import_without_triton("megatron.core.ssm.mamba_mixer")
    module.HAVE_MAMBA_SSM, module.get_cuda_rng_tracker = True, _NoTracker
    module.ExtendedRMSNorm, module.mamba_split_conv1d_scan_combined = _GatedNorm, _scan
    parts = parts or module.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    return module.MambaMixer(config, parts, config.hidden_size, layer_number=1, pg_collection=groups)


def our_layer(kind: str, config: Any) -> torch.nn.Module:
    make = DynamicCPGatedDelta if kind == "delta" else DynamicCPMamba
    return make(config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())


def config_of(kind: str, **overrides: Any) -> Any:
    torch._dynamo.config.disable = True
    return reference.transformer_config(KINDS[kind], deterministic_mode=True, **overrides)


def name_in(stock: torch.nn.Module, name: str) -> str:
    """Return our name of a parameter in megatron-core's module, which since 0.19 has the convolution's itself."""
    return name if name in dict(stock.named_parameters()) else name.replace("conv1d.", "conv1d_")


def compare(kind: str) -> dict[str, float]:
    """Return the relative errors of outputs and gradients of a pack against samples one by one."""
    initialize_model_parallel()
    torch.manual_seed(3)
    config = config_of(kind)
    stock, ours = stock_layer(kind, config), our_layer(kind, config)
    theirs = dict(stock.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            counterpart = theirs[name_in(stock, name)]
            if name in ("A_log", "dt_bias"):  # some heads that forget slowly
                counterpart.copy_(torch.linspace(-0.5, 1.2, len(counterpart)))
            counterpart.add_(torch.randn_like(counterpart) * 0.1)
            parameter.copy_(counterpart)
    assert len(theirs) == len(dict(ours.named_parameters()))
    samples = [torch.randn(seqlen, 1, config.hidden_size) for seqlen in SEQLENS]
    weights = torch.randn(sum(SEQLENS), 1, config.hidden_size)
    given = {} if kind == "mamba" else {"attention_mask": None}
    wanted = torch.cat([stock(sample, **given)[0] for sample in samples])
    (wanted * weights).sum().backward()
    params = DynamicPackedSeqParams.build(
        SEQLENS, torch.cat([torch.arange(seqlen) for seqlen in SEQLENS]),
        ProcessGroupCollection.use_mpu_process_groups().cp, label="test", stats=ExchangeStats(),
    )  # fmt: skip
    found, bias = ours(torch.cat(samples), None, packed_seq_params=params)
    assert bias is None
    (found * weights).sum().backward()
    errors = {"output": _error(found, wanted)}
    for name, parameter in ours.named_parameters():
        errors[name] = _error(parameter.grad, theirs[name_in(stock, name)].grad)
    return errors


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_megatron_cores_does(kind: str) -> None:
    errors = run_ranks(1, compare, kind)[0]
    assert len(errors) >= 7
    assert max(errors.values()) < STOCK_TOLERANCE, errors


def load_and_save(kind: str, is_stock: bool, source: str | None, target: str | None) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer, random ones or those of `source`; `target`: where they are saved."""
    tp_size = torch.distributed.get_world_size()
    initialize_model_parallel(tp_size)
    torch.manual_seed(5 + torch.distributed.get_rank())
    config = config_of(kind, tensor_model_parallel_size=tp_size)
    layer = stock_layer(kind, config) if is_stock else our_layer(kind, config)
    if source is None:
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(torch.randn_like(parameter) if "out_norm" not in name else torch.ones_like(parameter))
    else:
        loaded = dist_checkpointing.load(layer.sharded_state_dict(prefix="layer."), source)
        layer.load_state_dict({name.removeprefix("layer."): value for name, value in loaded.items()})
    if target is not None:
        expect_results()  # megatron-core's own queue is a process that imports the program anew
        dist_checkpointing.save(layer.sharded_state_dict(prefix="layer."), target)
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


@pytest.mark.by_day("mamba")
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_go_to_and_from_megatron_cores_layers(kind: str, tmp_path: Any) -> None:
    """Ours on two tensor-parallel ranks -> theirs on one -> ours on two: what each rank had."""
    first, second = tmp_path / "ours", tmp_path / "theirs"
    for folder in (first, second):
        folder.mkdir()
    saved = run_ranks(2, load_and_save, kind, False, None, str(first))
    config = config_of(kind)
    (theirs,) = run_ranks(1, load_and_save, kind, True, str(first), str(second))
    for name, whole in theirs.items():
        ours = name.replace("conv1d_", "conv1d.")
        parts = [rank[ours] for rank in saved]
        sections = token_by_token.sections_of(f"self_attention.{ours}", config)
        if parts[0].shape == whole.shape:
            wanted = parts[0]
        elif sections is None:
            wanted = torch.cat(parts, dim=1 if ours.startswith("out_proj") else 0)
        else:
            halves = [part.split([rows // 2 for rows in sections]) for part in parts]
            wanted = torch.cat([torch.cat(both) for both in zip(*halves, strict=True)])
        assert torch.equal(whole, wanted), name
    again = run_ranks(2, load_and_save, kind, False, str(second), None)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(saved, again, strict=True) for name in one)


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
