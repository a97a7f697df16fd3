"""Linear attention of a checkout: its validated flags are checked, what it is planned as, and who builds its layers."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from dynamic_cp.errors import DynamicCPError
from megatron.dynamic_cp.repairs import releases
from megatron.lm_adaptor import flags
from megatron.lm_adaptor.activate import _Adaptor
from tests.megatron_lm.test_experts import SIZES, validated

GATED_DELTA = {
    **SIZES,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_layers": 4,
}


def hybrid(**values: Any) -> Namespace:
    return validated(**{**GATED_DELTA, **values})


@pytest.mark.parametrize("freq", [2, [1, 0, 1, 0]])
@pytest.mark.parametrize("name", ["gated_delta_net", "gdn"], ids=["until_0_19", "since_0_20"])
def test_a_checkouts_gated_delta_nets_are_planned(name: str, freq: int | list[int]) -> None:
    args = hybrid(experimental_attention_variant=name, linear_attention_freq=freq)
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    linear = shape.linear_attention
    assert linear is not None
    assert (linear.kind, linear.num_heads, linear.num_groups) == ("gated_delta_net", 4, 2)
    assert (linear.key_size, linear.value_size, linear.kernel_size) == (8, 16, 4)
    assert shape.linear_attention_freq == (freq if isinstance(freq, int) else tuple(freq))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant 'dsa' is not supported"),
        ({"linear_attention_freq": [1, 0]}, "linear-attention-freq. .* is of 2 layers, the model has 4"),
        ({"swiglu": False}, "another activation than that of --swiglu"),
        (
            {"recompute_modules": ["core_attn", "gdn_norm_out"]},
            "--recompute-modules gdn_norm_out is not supported: the TransformerConfig of checkouts knows it from 0.19",
        ),
        (
            {"hybrid_override_pattern": "G*G-"},
            "--hybrid-override-pattern is not supported: checkouts train layers of a pattern from 0.18 on",
        ),
    ],
)
def test_validated_flags_are_checked(values: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_imported", lambda: "0.16.1")
    with pytest.raises(DynamicCPError, match=says):
        flags.refuse_loaded(hybrid(**values))


@pytest.mark.parametrize(
    ("symbols", "says"),
    [("M-M*", ""), ("M-|M*", r"has \|: its symbols are"), ("M-M*/M*", "has /: its symbols are")],
    ids=["supported", "borders_of_stages", "modules"],
)
def test_a_checkouts_pattern_is_planned(symbols: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.18 on; its flag of heads may be left out."""
    monkeypatch.setattr(releases, "_imported", lambda: "0.18.2")
    sizes = {"mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_num_heads": None}
    names = {"hybrid_layer_pattern": symbols, "hybrid_override_pattern": None, "experimental_attention_variant": None}
    args = hybrid(**sizes, **names, swiglu=False, squared_relu=True)
    if says:
        with pytest.raises(DynamicCPError, match=says):
            flags.refuse_loaded(args)
        return
    flags.refuse_loaded(args)
    shape = flags.model_shape(args)
    assert shape.linear_attention is not None
    assert (shape.layer_pattern, shape.linear_attention.kind) == (symbols, "mamba2")
    assert (shape.linear_attention.num_heads, shape.linear_attention.key_size) == (8, 16)


def test_norms_of_gated_delta_nets_are_recomputed_since_0_19(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_imported", lambda: "0.19.2")
    flags.refuse_loaded(hybrid(recompute_modules=["gdn_norm_out"]))


def test_the_stock_specs_of_patterns_may_be_named() -> None:
    args = hybrid(spec=["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"])
    flags.refuse_loaded(args)
    args.spec[1] = "gdp_stack_spec"
    with pytest.raises(DynamicCPError, match="--spec is not supported: --dynamic-cp has its own layer specification"):
        flags.refuse_loaded(args)


def test_a_pattern_has_a_model_of_its_own() -> None:
    """Its checkpoints are those of patterns, also of releases that would look for a class of theirs."""
    adaptor = _Adaptor.__new__(_Adaptor)
    adaptor._asked = None
    theirs = adaptor._HybridModel(SimpleNamespace)
    assert theirs(size=1).size == 1
    assert isinstance(theirs(size=1), SimpleNamespace)
    assert adaptor._gpt_to_hybrid_load(lambda *given: given, "args", "saved", "model") == ("args", "saved", "model")
    adaptor._asked = Namespace()
    ours, gpt = Namespace(hybrid_layer_pattern="M-M*"), Namespace(hybrid_layer_pattern=None)
    assert adaptor._gpt_to_hybrid_load(None, ours, Namespace(hybrid_override_pattern="M-M*"), []) == (None, False)
    with pytest.raises(DynamicCPError, match="the checkpoint is of a model without --hybrid-layer-pattern"):
        adaptor._gpt_to_hybrid_load(None, ours, gpt, [])
    assert adaptor._gpt_to_hybrid_load(lambda *given: given, gpt, ours, []) == (gpt, ours, [])


def test_a_way_to_share_layers_needs_some() -> None:
    from tests.megatron_lm.test_flags import planned

    with pytest.raises(DynamicCPError, match="--dynamic-cp-state-exchange states is for layers that this model does"):
        planned("--dynamic-cp-state-exchange", "states")


def test_specs_of_layers_are_the_checkouts_own_without_dynamic_cp() -> None:
    """Ours are made by GPTModel: the checkout's need TransformerEngine."""
    adaptor = _Adaptor.__new__(_Adaptor)
    for asked, expected in ((None, ("config", 1)), (Namespace(), None)):
        adaptor._asked = asked
        assert adaptor._variant_spec(lambda config, vp_stage: (config, vp_stage), "config", vp_stage=1) == expected
