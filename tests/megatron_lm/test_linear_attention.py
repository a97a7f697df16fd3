"""Linear attention of a checkout: its validated flags are checked, what it is planned as, and who builds its layers."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from dynamic_cp.errors import DynamicCPError
from megatron.lm_adaptor import flags
from megatron.lm_adaptor.activate import _Adaptor
from tests.megatron_lm.test_experts import validated

GATED_DELTA = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 16,
    "padded_vocab_size": 128,
    "swiglu": True,
    "untie_embeddings_and_output_weights": False,
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
        ({"hybrid_layer_pattern": "M*M-"}, "--hybrid-layer-pattern is not supported: its layers were not checked"),
    ],
)
def test_validated_flags_are_checked(values: dict[str, Any], says: str) -> None:
    with pytest.raises(DynamicCPError, match=says):
        flags.refuse_loaded(hybrid(**values))


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
