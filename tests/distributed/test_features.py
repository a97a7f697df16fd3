"""Features of attention and positions train as in a stock megatron-core model in one process, and mistakes show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.attention import merge
from megatron.dynamic_cp.attention.mechanisms import collectives
from megatron.dynamic_cp.flags.positions import concentration
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model import layer_parts, self_attention
from megatron.dynamic_cp.model.self_attention import DynamicCPSelfAttention
from tests.distributed import reference
from tests.distributed.faults import Plant, around
from tests.distributed.harness import run_ranks
from tests.distributed.parity import TOLERANCE, Layout, case_of, errors_of_faults
from tests.layer_choices import chosen_layers


@around(DynamicCPSelfAttention, "__init__")
def rotate_every_layer(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    self._rotates = True


@around(DynamicCPSelfAttention, "__init__")
def rotate_the_other_layers(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    self._rotates = not self._rotates


def forget_the_concentration() -> Any:
    return mock.patch.object(self_attention, "concentration", return_value=1.0)


@around(DynamicCPSelfAttention, "_apply_output_gate")
def leave_the_gate_open(_: Any, self: Any, x: Any, gate: Any) -> Any:
    return x + 0 * gate.reshape(x.shape)


@around(DynamicCPSelfAttention, "_apply_output_gate")
def gate_by_heads_of_others(apply: Any, self: Any, x: Any, gate: Any) -> Any:
    return apply(self, x, gate.flip(2))


@around(layer_parts.TorchL2Norm, "forward")
def normalize_the_sum(forward: Any, self: Any, x: Any) -> Any:
    """The norm of queries and keys without weights: the sum of squares becomes 1, not their mean."""
    return forward(self, x) / x.shape[-1] ** 0.5


@around(self_attention.RotaryEmbedding, "get_emb")
def lose_the_stretch(get_emb: Any, self: Any, max_seq_len: int) -> Any:
    """As if the table were made of plain RoPE."""
    return get_emb(self_attention.RotaryEmbedding(32, 1.0, use_cpu_initialization=True), max_seq_len)


def forget_the_offset() -> Any:
    return mock.patch.object(merge.RowSums, "add_offset")


@around(merge.RowSums, "add_offset")
def forget_the_offset_in_backward(add_offset: Any, self: Any, offset_H: Any) -> None:
    lse_HT = self.lse_HT
    add_offset(self, offset_H)
    self.lse_HT = lse_HT


@around(merge.RowGradients, "offset_gradient")
def learn_no_offset(offset_gradient: Any, self: Any, offset_H: Any) -> Any:
    return 0 * offset_gradient(self, offset_H)


@around(collectives.HeadExchange, "__init__")
def take_offsets_of_others(init: Any, self: Any, *args: Any) -> None:
    """As if a lane computed the first heads, whichever it has."""
    init(self, *args)
    self.heads = slice(0, self.heads.stop - self.heads.start)


FAULTS: dict[str, tuple[str, Plant]] = {
    "a layer that is not to be rotated": ("unrotated", rotate_every_layer),
    "the other layers": ("unrotated", rotate_the_other_layers),
    "YaRN without its concentration": ("yarn", forget_the_concentration),
    "no gate": ("gated", leave_the_gate_open),
    "gates of other heads": ("gated", gate_by_heads_of_others),
    "no score beside those of keys": ("learned_offset", forget_the_offset),
    "a score that backward forgets": ("learned_offset", forget_the_offset_in_backward),
    "a score that is not learned": ("learned_offset", learn_no_offset),
    "scores of other heads": ("learned_offset", take_offsets_of_others),
    "another norm": ("l2_norms", normalize_the_sum),
    "frequencies that are not scaled": ("scaled", lose_the_stretch),
    "positions that are not divided": ("interpolated", lose_the_stretch),
}


@pytest.mark.nightly
def test_mistakes_in_features_show(reference_of: Any) -> None:
    layouts = {name: Layout(2, variant=name) for name, _ in FAULTS.values()}
    layouts["learned_offset"] = Layout(2, variant="learned_offset", exchange="a2a")
    cases = {name: case_of(reference_of, layout) for name, layout in layouts.items()}
    errors = errors_of_faults({fault: (cases[variant], plant) for fault, (variant, plant) in FAULTS.items()})
    assert min(errors.values()) > 20 * TOLERANCE, errors


SCALES: list[tuple[float | None, float | None]] = [(1.0, 0.0), (1.0, 1.0), (0.707, 0.3), (None, 1.0), (1.0, None)]
STRETCHES = [(stretch, *scales) for stretch in (0.5, 1.0, 2.0, 40.0) for scales in SCALES]


def concentrations_of_megatron_core() -> list[float]:
    tables = (
        YarnRotaryEmbedding(16, scaling_factor=stretch, mscale=own, mscale_all_dim=of_all, use_cpu_initialization=True)
        for stretch, own, of_all in STRETCHES
    )
    return [table.get_emb(4)[1] for table in tables]


def test_the_concentration_is_that_of_megatron_core() -> None:
    names = "yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"
    ours = [concentration(SimpleNamespace(**dict(zip(names, values, strict=True)))) for values in STRETCHES]
    assert ours == pytest.approx(run_ranks(1, concentrations_of_megatron_core)[0], rel=1e-12)
    assert concentration(SimpleNamespace()) == 1.0


def test_two_norms_of_queries_and_keys_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="--qk-l2-norm and --qk-layernorm both normalize"):
        check_supported(reference.transformer_config(reference.LLAMA, qk_l2_norm=True))


def test_layers_of_transformer_engine_have_no_score_beside_those_of_keys() -> None:
    settings: dict[str, Any] = {"capability": (9, 0), "flash_attn": 2, "attention_backend": "auto", "bf16": True}
    settings |= {"kv_channels": 128, "version": "2.20.0"}
    assert chosen_layers(None, "p2p", **settings).impl == "transformer_engine"
    assert chosen_layers(None, "p2p", softmax_type="learnable", **settings).impl == "local"
    with pytest.raises(UnsupportedFeatureError, match=r"--softmax-type off-by-one.* with local layers only"):
        chosen_layers("transformer_engine", "p2p", softmax_type="off-by-one", **settings)
