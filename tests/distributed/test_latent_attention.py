"""Multi-latent attention trains as in a stock megatron-core model in one process, and mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.attention import torch_thd
from megatron.dynamic_cp.attention.mechanisms.latents import LatentRing, LatentWidths, UpProjection
from megatron.dynamic_cp.attention.thd import attention_from_latents
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.layout.packed_seq_params import DynamicPackedSeqParams
from megatron.dynamic_cp.model import latent_attention
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.model.rotary import cos_sin_at, rotate
from tests.distributed import reference
from tests.distributed.harness import run_ranks
from tests.distributed.layouts import plan_of_exchanges
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Layout,
    mixed_plan,
    run_faulty,
)


def lose_the_sum_of_rotated_keys(monkeypatch: Any) -> None:
    """As megatron-core does."""
    monkeypatch.setattr(latent_attention, "copy_to_tensor_model_parallel_region", lambda x: x)


def sum_whole_gradients(monkeypatch: Any) -> None:
    """As megatron-core does: the norm of the latent of queries counts once for each TP rank."""
    built = latent_attention.DynamicCPLatentAttention.__init__

    def summed(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        for parameter in self.q_layernorm.parameters():
            parameter.average_gradients_across_tp_domain = False

    monkeypatch.setattr(latent_attention.DynamicCPLatentAttention, "__init__", summed)


def rotate_other_pairs(monkeypatch: Any) -> None:
    def halves(self: Any, x: Any, cos_sin: Any) -> Any:
        return rotate(x, *cos_sin, interleaved=False)

    monkeypatch.setattr(latent_attention.DynamicCPLatentAttention, "_rotate", halves)


def forget_the_concentration(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        latent_attention, "cos_sin_at", lambda table, positions, dtype, _: cos_sin_at(table, positions, dtype, 1.0)
    )


def divide_scores_by_the_width_of_values(monkeypatch: Any) -> None:
    attend = torch_thd.attention_thd

    def by_values(q: Any, k: Any, v: Any, params: Any, scale: float, *others: Any, **more: Any) -> Any:
        return attend(q, k, v, params, scale * (24 / 16) ** 0.5, *others, **more)

    monkeypatch.setattr(torch_thd, "attention_thd", by_values)


FAULTS: dict[str, Callable[[Any], None]] = {
    "a lost sum of rotated keys": lose_the_sum_of_rotated_keys,
    "a norm that counts once for each rank": sum_whole_gradients,
    "other pairs of channels": rotate_other_pairs,
    "YaRN without its concentration": forget_the_concentration,
    "scores divided for values": divide_scores_by_the_width_of_values,
}


def count_what_is_projected_up_twice(monkeypatch: Any) -> None:
    gradient = UpProjection.gradient

    def doubled(self: Any, *args: Any) -> Any:
        gradient(self, *args)
        return gradient(self, *args)

    monkeypatch.setattr(UpProjection, "gradient", doubled)


def forget_what_other_lanes_project_up(monkeypatch: Any) -> None:
    """As if the gradient of the weights was that of this lane's own tokens, of the first step of the ring."""
    gradient = UpProjection.gradient

    def only_first(self: Any, *args: Any) -> Any:
        before = None if self.grad_weight is None else self.grad_weight.clone()
        found = gradient(self, *args)
        self.grad_weight = self.grad_weight if before is None else before
        return found

    monkeypatch.setattr(UpProjection, "gradient", only_first)


def forget_the_rotated_key(monkeypatch: Any) -> None:
    """In backward: what other lanes' queries say of the key that all heads share."""
    gradient = UpProjection.gradient

    def without(self: Any, grad_2THD: Any, latents_TC: Any) -> Any:
        grad_2THD[0, ..., self._widths.content :] = 0
        return gradient(self, grad_2THD, latents_TC)

    monkeypatch.setattr(UpProjection, "gradient", without)


def normalize_on_both_sides(monkeypatch: Any) -> None:
    """The latent is normalized where it is sent from, and where it is projected up."""
    over = latent_attention.DynamicCPLatentAttention._over_latents

    def again(self: Any, query: Any, latent: Any, *args: Any, **more: Any) -> Any:
        return over(self, query, self.kv_layernorm(latent), *args, **more)

    monkeypatch.setattr(latent_attention.DynamicCPLatentAttention, "_over_latents", again)


FAULTS_OF_LATENTS: dict[str, Callable[[Any], None]] = {
    "what is projected up counts twice": count_what_is_projected_up_twice,
    "what other lanes project up is forgotten": forget_what_other_lanes_project_up,
    "the rotated key is forgotten": forget_the_rotated_key,
    "normalized on both sides": normalize_on_both_sides,
}


@pytest.mark.nightly
def test_mistakes_in_latent_attention_show(reference_of: Any) -> None:
    """On two tensor-parallel ranks; without sequence parallelism, which sums up by itself."""
    layout, samples = Layout(1, tp=2, variant="latent"), BATCHES["long_tail"]
    plan = mixed_plan(samples, layout)
    case = Case(layout, samples, plan, reference_of(layout, "long_tail"))
    ranks = run_ranks(2, run_faulty, {name: (case, plant) for name, plant in FAULTS.items()}, timeout_s=120)
    for name in FAULTS:
        assert max(rank[name].gradient_error for rank in ranks) > 20 * TOLERANCE, name


@pytest.mark.nightly
def test_mistakes_in_exchanging_latents_show(reference_of: Any) -> None:
    layout, samples = Layout(2, exchange="latent", variant="latent"), BATCHES["long_tail"]
    plan = plan_of_exchanges(samples, layout)
    case = Case(layout, samples, plan, reference_of(layout, "long_tail"))
    faults: dict[str, Callable[[Any], None]] = {"nothing": lambda _: None, **FAULTS_OF_LATENTS}
    ranks = run_ranks(2, run_faulty, {name: (case, plant) for name, plant in faults.items()}, timeout_s=120)
    assert max(rank["nothing"].gradient_error for rank in ranks) <= TOLERANCE
    for name in FAULTS_OF_LATENTS:
        assert max(rank[name].gradient_error for rank in ranks) > 20 * TOLERANCE, name


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
