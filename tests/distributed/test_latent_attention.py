"""Multi-latent attention trains as in a stock megatron-core model in one process, and mistakes show."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.attention import torch_thd
from megatron.dynamic_cp.attention.mechanisms.ring import LatentRing, LatentWidths, UpProjection
from megatron.dynamic_cp.attention.thd import attention_from_latents
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model import latent_attention
from megatron.dynamic_cp.model.latent_attention import DynamicCPLatentAttention
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.self_attention import rotate
from tests.distributed import reference
from tests.distributed.faults import Plant, around, marks_parameters
from tests.distributed.layouts import plan_of_exchanges
from tests.distributed.parity import TOLERANCE, Layout, case_of, errors_of_faults


def lose_the_sum_of_rotated_keys() -> Any:
    """As megatron-core does."""
    return mock.patch.object(latent_attention, "copy_to_tensor_model_parallel_region", lambda x: x)


# As megatron-core does: the norm of the latent of queries counts once for each TP rank.
sum_whole_gradients = marks_parameters(
    DynamicCPLatentAttention,
    "average_gradients_across_tp_domain",
    False,
    lambda attention: attention.q_layernorm.parameters(),
)


@around(DynamicCPLatentAttention, "_rotate")
def rotate_other_pairs(_: Any, self: Any, x: Any, cos_sin: Any) -> Any:
    return rotate(x, *cos_sin, interleaved=False)


@around(latent_attention, "cos_sin_at")
def forget_the_concentration(cos_sin_at: Any, table: Any, positions: Any, dtype: Any, _: float) -> Any:
    return cos_sin_at(table, positions, dtype, 1.0)


@around(torch_thd, "attention_thd")
def divide_scores_by_the_width_of_values(
    attend: Any, q: Any, k: Any, v: Any, params: Any, scale: float, *others: Any, **more: Any
) -> Any:
    return attend(q, k, v, params, scale * (24 / 16) ** 0.5, *others, **more)


FAULTS: dict[str, Plant] = {
    "a lost sum of rotated keys": lose_the_sum_of_rotated_keys,
    "a norm that counts once for each rank": sum_whole_gradients,
    "other pairs of channels": rotate_other_pairs,
    "YaRN without its concentration": forget_the_concentration,
    "scores divided for values": divide_scores_by_the_width_of_values,
}


@around(UpProjection, "gradient")
def count_what_is_projected_up_twice(gradient: Any, self: Any, *args: Any) -> Any:
    gradient(self, *args)
    return gradient(self, *args)


@around(UpProjection, "gradient")
def forget_what_other_lanes_project_up(gradient: Any, self: Any, *args: Any) -> Any:
    """As if the gradient of the weights was that of this lane's own tokens, of the first step of the ring."""
    before = None if self.grad_weight is None else self.grad_weight.clone()
    found = gradient(self, *args)
    self.grad_weight = self.grad_weight if before is None else before
    return found


@around(UpProjection, "gradient")
def forget_the_rotated_key(gradient: Any, self: Any, grad_2THD: Any, latents_TC: Any) -> Any:
    """In backward: what other lanes' queries say of the key that all heads share."""
    grad_2THD[0, ..., self._widths.content :] = 0
    return gradient(self, grad_2THD, latents_TC)


@around(DynamicCPLatentAttention, "_over_latents")
def normalize_on_both_sides(over: Any, self: Any, query: Any, latent: Any, *args: Any, **more: Any) -> Any:
    """The latent is normalized where it is sent from, and where it is projected up."""
    return over(self, query, self.kv_layernorm(latent), *args, **more)


FAULTS_OF_LATENTS: dict[str, Plant] = {
    "what is projected up counts twice": count_what_is_projected_up_twice,
    "what other lanes project up is forgotten": forget_what_other_lanes_project_up,
    "the rotated key is forgotten": forget_the_rotated_key,
    "normalized on both sides": normalize_on_both_sides,
}


@pytest.mark.nightly
def test_mistakes_in_latent_attention_show(reference_of: Any) -> None:
    """On two tensor-parallel ranks; without sequence parallelism, which sums up by itself."""
    case = case_of(reference_of, Layout(1, tp=2, variant="latent"))
    errors = errors_of_faults({name: (case, plant) for name, plant in FAULTS.items()})
    assert min(errors.values()) > 20 * TOLERANCE, errors


@pytest.mark.nightly
def test_mistakes_in_exchanging_latents_show(reference_of: Any) -> None:
    case = case_of(reference_of, Layout(2, exchange="latent", variant="latent"), plan_of_exchanges)
    faults: dict[str, Plant] = {"nothing": contextlib.nullcontext, **FAULTS_OF_LATENTS}
    errors = errors_of_faults({name: (case, plant) for name, plant in faults.items()})
    assert errors.pop("nothing") <= TOLERANCE
    assert min(errors.values()) > 20 * TOLERANCE, errors


def test_a_lane_by_itself_projects_up_as_autograd_does() -> None:
    """Also after a micro-batch whose gradient of the weights is in the buffer already, as with fused accumulation."""
    torch.manual_seed(3)
    widths, heads, tokens, rank = LatentWidths(content=6, rotated=4, value=5), 3, 12, 7
    params = DynamicPackedSeqParams(padded_seqlens=(tokens,), seqlens=(tokens,), positions=torch.arange(tokens))
    query, latent, rotated = (torch.randn(tokens, *shape, requires_grad=True) for shape in ((heads, 10), (rank,), (4,)))
    weight = torch.nn.Parameter(torch.randn(heads * 11, rank))
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    out = attention_from_latents(query, latent, rotated, weight, widths, params, 0.3)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert weight.grad_added_to_main_grad is False  # type: ignore[attr-defined]
    found = [query.grad, latent.grad, rotated.grad, weight.grad]

    query.grad = latent.grad = rotated.grad = weight.grad = None
    keys_THD, values_THD = (latent @ weight.t()).view(tokens, heads, 11).split((6, 5), dim=-1)
    keys_THD = torch.cat((keys_THD, rotated[:, None].expand(-1, heads, -1)), dim=-1)
    scores_HTT = torch.einsum("thd,shd->hts", query, keys_THD) * 0.3
    hidden = torch.ones(tokens, tokens).triu(1).bool()
    expected = torch.einsum("hts,shd->thd", scores_HTT.masked_fill(hidden, -torch.inf).softmax(dim=-1), values_THD)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    expected.backward(grad)
    for one, wanted in zip(found, (query.grad, latent.grad, rotated.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_a_plan_with_latents_for_plain_attention_is_told() -> None:
    params = DynamicPackedSeqParams(padded_seqlens=(4,), seqlens=(4,), cp_comm_type="latent", label="step 3")
    x_THD = torch.zeros(4, 1, 8)
    with pytest.raises(UnsupportedFeatureError, match="only --multi-latent-attention has them; plan with"):
        LatentRing(params, 1, 1, x_THD.device).enter(x_THD, x_THD, x_THD)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"softmax_type": "learnable"}, "--softmax-type is not supported: it has scores of keys alone"),
        ({"no_rope_freq": 2}, "--no-rope-freq is not supported: all layers rotate"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection is not supported"),
        ({"num_query_groups": 2}, "--num-query-groups 2 is not supported: each of its 4 heads has keys of its own"),
        ({"add_qkv_bias": True}, "--add-qkv-bias is not supported"),
    ],
)
def test_what_was_not_checked_together_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"--multi-latent-attention with {said}"):
        check_supported(reference.transformer_config(reference.LATENT, **overrides))


def test_widths_that_cannot_be_are_told() -> None:
    check_supported(reference.transformer_config(reference.LATENT))
    with pytest.raises(InvalidInputError, match="--v-head-dim is 32 and --kv-channels 24, queries and keys have 24"):
        check_supported(reference.transformer_config(reference.LATENT, v_head_dim=32))
    with pytest.raises(InvalidInputError, match="--qk-pos-emb-head-dim is 7, RoPE rotates pairs"):
        check_supported(reference.transformer_config(reference.LATENT, qk_pos_emb_head_dim=7, kv_channels=23))
    with pytest.raises(UnsupportedFeatureError, match="cache_mla_latents"):
        check_supported(reference.transformer_config(reference.LATENT, cache_mla_latents=True))


def test_layers_of_transformer_engine_are_refused() -> None:
    config = reference.transformer_config(reference.LATENT)
    with pytest.raises(UnsupportedFeatureError, match="--multi-latent-attention with layers of TransformerEngine"):
        gpt_block_spec(config, transformer_impl="transformer_engine")
