"""What layers of linear attention keep for backward on a GPU is what the memory model says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dynamic_cp.memory.activations import activation_bytes
from dynamic_cp.types import LinearAttention, ModelShape, PlanOptions, StateExchange, Topology
from megatron.dynamic_cp.attention.linear import kernels, states, thd
from megatron.dynamic_cp.flags.linear_attention import linear_attention_of
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model.linear_layers import DynamicCPGatedDelta, DynamicCPMamba
from megatron.dynamic_cp.repairs import patches
from tests.distributed import reference
from tests.distributed.emulated_lanes import on_lanes
from tests.distributed.harness import initialize_model_parallel, run_ranks
from tests.released_linear_kernels import RELEASED

TOKENS, HIDDEN = 512, 64
KINDS: dict[str, tuple[type, Any, dict[str, int]]] = {
    "gated_delta_net": (
        DynamicCPGatedDelta,
        reference.DELTA,
        {
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "mamba2": (
        DynamicCPMamba,
        reference.MAMBA,
        {"mamba_num_heads": 16, "mamba_num_groups": 2, "mamba_state_dim": 128, "mamba_head_dim": 64},
    ),
}
SYMBOLS = {"gated_delta_net": "G", "mamba2": "M"}
LANES: list[tuple[int, StateExchange]] = [(1, "heads"), (2, "heads"), (2, "states")]


def kept_bytes(kind: str, more: dict[str, Any], lanes: list[tuple[int, StateExchange]]) -> list[float]:
    """Return for each way the bytes for a token that a layer keeps with its input, in bfloat16."""
    initialize_model_parallel()
    patches.repair_norm_recomputation()
    make, variant, sizes = KINDS[kind]
    config = reference.transformer_config(
        variant, hidden_size=HIDDEN, params_dtype=torch.bfloat16, bf16=True, **sizes, **more
    )
    layer = make(config, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def of_lane(params: DynamicPackedSeqParams) -> float:
        x = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = layer(x, None, packed_seq_params=params)
        assert out.requires_grad
        return sum(storage.nbytes() for storage in kept.values()) / TOKENS

    with (
        mock.patch.object(thd, "choose_linear_kernel", return_value=kernels.FLA),
        mock.patch.object(kernels, "_function", RELEASED.__getitem__),
        mock.patch.object(states, "keeps_by_hooks", return_value=False),  # these hooks only count
    ):
        found = [on_lanes((TOKENS * cp_size,), cp_size, of_lane, state_exchange=way) for cp_size, way in lanes]
    return [max(of_lanes) for of_lanes in found]


def expected_bytes(sizes: LinearAttention, options: PlanOptions, way: StateExchange) -> float:
    model = ModelShape(
        num_layers=3,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=HIDDEN,
        vocab_size=8,
        linear_attention=sizes,
        layer_pattern=f"{SYMBOLS[sizes.kind]}*-",
    )
    (layer,) = (layer for _, layer in model.stages(1)[0].layers if layer.linear_attention)
    found = activation_bytes(model, Topology(num_lanes=1), options, layer)
    residual = HIDDEN * options.element_bytes.residual  # the input of the norm before it
    return found.per_layer - residual + (found.states_per_layer / TOKENS if way == "states" else 0)


@pytest.mark.by_day("gated_delta_net-repeated0", "gated_delta_net-repeated1")
@pytest.mark.parametrize(
    ("kind", "repeated"),
    [(kind, repeated) for kind in KINDS for repeated in ([], ["core_attn"])] + [("gated_delta_net", ["gdn_norm_out"])],
)
def test_a_layer_keeps_what_the_memory_model_says(kind: str, repeated: list[str]) -> None:
    more = {"recompute_granularity": "selective", "recompute_modules": repeated} if repeated else {}
    (found,) = run_ranks(1, kept_bytes, kind, more, LANES)
    config = reference.transformer_config(KINDS[kind][1], hidden_size=HIDDEN, **KINDS[kind][2])
    sizes = linear_attention_of(config)
    assert sizes is not None
    options = PlanOptions(
        max_tokens_per_rank=TOKENS,
        recompute="selective" if repeated else "none",
        recompute_modules=tuple(repeated),
        cp_comm_types=("p2p",),
    )
    for (cp_size, way), kept in zip(LANES, found, strict=True):
        assert kept == pytest.approx(expected_bytes(sizes, options, way), rel=0.1), (cp_size, way)
