"""Features of layers by themselves: what they compute and refuse; fused weight gradients of a stand-in for apex."""

import functools
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.transformer.utils import is_layer_window_attention

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from dynamic_cp.types import Sample, SharedQuestion
from megatron.dynamic_cp.attention.mechanisms.ring import LatentRing, LatentWidths
from megatron.dynamic_cp.attention.thd import attention_from_latents, executor_of
from megatron.dynamic_cp.data import micro_batches
from megatron.dynamic_cp.data.sample_tokens import SampleTokens
from megatron.dynamic_cp.flags.attention import concentration, set_sinks, windows_of
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model.layer_specs import gpt_block_spec
from megatron.dynamic_cp.packed_seq_params import DynamicPackedSeqParams, FutureColumns, shard_positions
from tests.distributed import fake_apex
from tests.distributed.harness import initialize_model_parallel, params_of, run_ranks
from tests.distributed.layouts import layout_of, lines
from tests.distributed.parity import Comparison, Layout, assert_equal_to_reference, case_of, run_step
from tests.distributed.real_transformer_engine import products
from tests.distributed.real_transformer_engine.engine import run_ranks_with
from tests.distributed.real_transformer_engine.wheels import PINNED
from tests.distributed.reference import LATENT, LLAMA, MTP, ModelVariant, transformer_config, window_mask
from tests.distributed.test_transformer_engine_start import run_chunks_on_this_rank
from tests.layer_choices import chosen_layers

UNIFORM_BY_TWO = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
LATENTS, LATER = "--multi-latent-attention with", "--mtp-num-layers 2 with"
REFUSED: list[tuple[ModelVariant, dict[str, Any], str]] = [
    (LLAMA, {"qk_l2_norm": True}, "--qk-l2-norm and --qk-layernorm both normalize"),
    (LATENT, {"softmax_type": "learnable"}, f"{LATENTS} --softmax-type is not supported: it has scores of keys alone"),
    (LATENT, {"no_rope_freq": 2}, f"{LATENTS} --no-rope-freq is not supported: all layers rotate"),
    (LATENT, {"fp32_residual_connection": True}, f"{LATENTS} --fp32-residual-connection is not supported"),
    (LATENT, {"num_query_groups": 2}, f"{LATENTS} --num-query-groups 2 is not supported: each of its 4 heads has keys"),
    (LATENT, {"add_qkv_bias": True}, f"{LATENTS} --add-qkv-bias is not supported"),
    (LATENT, {"v_head_dim": 32}, "--v-head-dim is 32 and --kv-channels 24, queries and keys have 24"),
    (LATENT, {"qk_pos_emb_head_dim": 7, "kv_channels": 23}, "--qk-pos-emb-head-dim is 7, RoPE rotates pairs"),
    (LATENT, {"cache_mla_latents": True}, "cache_mla_latents"),
    (MTP, {"window_size": (7, 0)}, f"{LATER} --window-size is not supported"),
    (MTP, {"no_rope_freq": 2}, f"{LATER} --no-rope-freq is not supported"),
    (MTP, {"fp32_residual_connection": True}, f"{LATER} --fp32-residual-connection is not supported"),
    (MTP, BLOCK, f"{LATER} --recompute-method block --recompute-num-layers 1 is not supported"),
    (MTP, UNIFORM_BY_TWO, f"{LATER} --recompute-method uniform --recompute-num-layers 2 is not supported"),
    (MTP, {"mtp_loss_scaling_factor": 0.0}, r"--mtp-loss-scaling-factor is 0\.0, it must be greater than 0"),
]


@pytest.mark.parametrize(("variant", "overrides", "said"), REFUSED)
def test_what_was_not_checked_together_is_refused(variant: ModelVariant, overrides: dict[str, Any], said: str) -> None:
    check_supported(transformer_config(variant))
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=said):
        check_supported(transformer_config(variant, **overrides))


def test_the_concentration_is_that_of_megatron_core() -> None:
    scales: list[tuple[float | None, float | None]] = [(1.0, 0.0), (0.707, 0.3), (None, 1.0), (1.0, None)]
    for stretch, (own, of_all) in product((0.5, 1.0, 40.0), scales):
        config: Any = SimpleNamespace(yarn_rotary_scaling_factor=stretch, yarn_mscale=own, yarn_mscale_all_dim=of_all)
        assert concentration(config) == pytest.approx(yarn._yarn_get_concentration_factor_from_config(config))
    assert concentration(SimpleNamespace()) == 1.0


OF_ENGINE: dict[str, Any] = {
    **{"capability": (9, 0), "flash_attn": 2, "attention_backend": "auto", "bf16": True, "kv_channels": 64},
    "version": "2.20.0",
}


@pytest.mark.parametrize(
    ("has", "said"),
    [({"has_windows": True}, "--window-size"), ({"softmax_type": "off-by-one"}, "--softmax-type off-by-one")],
)
def test_layers_of_transformer_engine_lack_some_features(has: dict[str, Any], said: str) -> None:
    assert chosen_layers(None, "p2p", **OF_ENGINE).impl == "transformer_engine"
    choice = chosen_layers(None, "auto", **OF_ENGINE, **has)
    assert choice.impl == "local"
    assert said in choice.reason
    with pytest.raises(UnsupportedFeatureError, match=rf"{said}.* with local layers only"):
        chosen_layers("transformer_engine", "auto", **OF_ENGINE, **has)


def test_latents_have_no_layers_of_transformer_engine() -> None:
    with pytest.raises(UnsupportedFeatureError, match="--multi-latent-attention with layers of TransformerEngine"):
        gpt_block_spec(transformer_config(LATENT), transformer_impl="transformer_engine")


# Windows.


def config_of(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_layers": 6, "window_size": None, "window_attn_skip_freq": None, **values})


@pytest.mark.parametrize("skip", [None, 1, 2, 3, 7, [1, 0, 0, 1, 1, 0]])
def test_windows_are_those_of_megatron_core(skip: Any) -> None:
    """The token itself is not in Megatron's number, and it is in ours; layers count from 1."""
    for before in (0, 1, 5, 40):
        windows = windows_of(config_of(window_size=(before, 0), window_attn_skip_freq=skip))
        for layer in range(1, 7):
            window = windows.of_layer(layer)
            assert (window is not None) == is_layer_window_attention((before, 0), skip, layer)
            if window is not None:
                hidden = window_mask(12, (before, 0))
                sees = torch.zeros(12, 12, dtype=torch.bool)
                for row, (begin, end, second, last) in enumerate(window.key_ranges(12)):
                    sees[row, begin:end] = sees[row, second:last] = True
                assert torch.equal(sees, ~hidden)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"window_attn_skip_freq": 2},
         "--window-attn-skip-freq 2 skips windows, and there is none: give --window-size"),
        ({"window_size": (-1, 0)}, r"--window-size is -1,0, two numbers are needed, tokens before .at least 0."),
        ({"window_size": (4,)}, "--window-size is 4, two numbers are needed"),
        ({"window_size": (4, 2)}, "--window-size 4,2 shows 2 tokens behind a token, attention is causal: give 4,0"),
        ({"window_size": (4, -1)}, "attention is causal: give 4,0"),
        ({"window_size": (4, 0), "window_attn_skip_freq": 0}, "--window-attn-skip-freq is 0, the smallest allowed"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [1, 0]}, "1,0 has 2 entries, the model has 6 layers"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [2] * 6}, "2,2,2,2,2,2 has 6 entries"),
        ({"window_sink_tokens": 4},
         "--window-sink-tokens 4 is for layers with a window, and there is none: give --win"),
        ({"window_size": (4, 0), "window_sink_tokens": -1}, "--window-sink-tokens is -1, the smallest allowed number"),
    ],
)  # fmt: skip
def test_a_window_that_cannot_be_is_told_at_once(values: dict[str, Any], says: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=says):
        windows_of(config_of(**values))
    sink_tokens = values.pop("window_sink_tokens", 0)
    config = transformer_config(LLAMA, **{"num_layers": 6, **values})
    set_sinks(config, sink_tokens)
    with pytest.raises((InvalidInputError, UnsupportedFeatureError), match=says):
        check_supported(config)


def refuse_on_this_rank() -> str:
    """Return what the layers say of a plan whose exchange serves no windows."""
    initialize_model_parallel()
    group = dist.group.WORLD
    params = params_of((8,), torch.arange(4), group, label="step 3", cp_comm_type="p2p")
    window = windows_of(config_of(window_size=(1, 0))).of_layer(1)
    assert window is not None
    windowed = params.with_mask(window)
    assert windowed is params.with_mask(window), "layers share what is derived"
    assert params.with_mask(params.mask) is params
    assert windowed.stats is params.stats
    executor_of(params, 4, 4, torch.device("cpu"))
    with pytest.raises(UnsupportedFeatureError) as caught:
        executor_of(windowed, 4, 4, torch.device("cpu"))
    return str(caught.value)


def test_an_exchange_that_serves_no_windows_is_named() -> None:
    assert (
        run_ranks(2, refuse_on_this_rank, timeout_s=60)
        == [
            "the plan asks for p2p at step 3, which does not serve layers with a window: plan with all_gather or a2a "
            "or blocks (--cp-comm-type)"
        ]
        * 2
    )


# Latents.


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


# Further tokens.


def test_later_columns_are_those_of_the_whole_sample_shifted() -> None:
    """On both lanes: token, label, loss and position of the token so many places further on, 0 behind the end."""
    seqlens, padded, num_depths = (11, 3, 1), (12, 4, 4), 2
    samples = tuple(Sample(sample_id=number, seqlen=seqlen) for number, seqlen in enumerate(seqlens))
    values = [
        SampleTokens(
            tokens=100 * number + np.arange(10, 10 + seqlen),
            labels=100 * number + np.arange(50, 50 + seqlen),
            loss_mask=np.ones(seqlen, np.float32),
        )
        for number, seqlen in enumerate(seqlens)
    ]
    for lane in range(2):
        shards = [shard_positions(length, 2, lane) for length in padded]
        bucket = micro_batches.Bucket(first_lane=0, cp_size=2, samples=samples)
        columns = micro_batches.read_shard(bucket, shards, shards, values.__getitem__, num_depths)
        for depth in range(1, num_depths + 1):
            for name in micro_batches.COLUMNS:
                expected = []
                for shard, one in zip(shards, values, strict=True):
                    whole = np.arange(len(one.tokens)) if name == "position_ids" else getattr(one, name)
                    expected.append(np.append(whole[depth:], np.zeros(20))[shard])
                assert columns[f"{name} {depth}"].tolist() == np.concatenate(expected).tolist(), (name, depth, lane)


def test_a_sample_with_a_mask_has_no_later_tokens() -> None:
    bucket = micro_batches.Bucket(
        first_lane=0, samples=(Sample(sample_id=7, seqlen=9, mask=SharedQuestion(3, (3, 3))),)
    )
    with pytest.raises(UnsupportedFeatureError, match=r"--mtp-num-layers: sample 7 has a mask of its own"):
        micro_batches._check_has_future(bucket)


def test_columns_are_those_of_their_depth() -> None:
    columns = FutureColumns(columns=torch.arange(24).reshape(2, 3, 4), loss_mask=torch.arange(8.0).reshape(2, 4))
    assert [one.tolist() for one in columns.inputs(2)] == [[[12, 13, 14, 15]], [[20, 21, 22, 23]]]
    assert [one.tolist() for one in columns.targets(1)] == [[[4, 5, 6, 7]], [[0.0, 1.0, 2.0, 3.0]]]


LINES = lines("""
    two llama_tied distributed overlap fused; one tp2 sp distributed overlap fused; one pp2 llama_tied full fused
    two engine distributed overlap fused
""")
"""A tied embedding on one stage gets a gradient of both kinds."""


def run_fused_step(*args: Any) -> tuple[Comparison, int]:
    """Return the comparison of this rank, and how many products went to a buffer at once."""
    fake_apex.install()
    comparison = run_step(*args)
    return comparison, len(fake_apex.calls) + products.num_into_buffers


@pytest.mark.by_day(LINES[-1])  # another kernel, in test_chunked_head, adds those of local layers
@pytest.mark.parametrize("line", LINES)
def test_step_equals_single_process(line: str, reference_of: Any) -> None:
    layout = layout_of(line)
    case = case_of(reference_of, layout)
    run = run_ranks if layout.transformer_impl == "local" else functools.partial(run_ranks_with, PINNED)
    results = run(layout.topology.world_size, run_fused_step, *case)
    assert_equal_to_reference([comparison for comparison, _ in results], layout, case.expected)
    of_a_stage = 4 * layout.num_layers // layout.pp  # four matrices in each layer
    last = of_a_stage + 1
    stages = [of_a_stage, last] if layout.pp == 2 else [last, last]
    assert [number for _, number in results] == [number * case.plan.num_microbatches for number in stages]


def warm_fused_chunks(layout: Layout) -> int:
    fake_apex.install()
    run_chunks_on_this_rank(layout)
    return len(fake_apex.calls)


def test_a_pack_through_the_chunks_leaves_no_trace() -> None:
    layout = layout_of("one tp2 sp distributed fused")
    assert run_ranks(2, warm_fused_chunks, layout, timeout_s=60) == [4 * layout.num_layers + 1] * 2
