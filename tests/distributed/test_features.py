"""Features of attention and positions train as in a stock megatron-core model in one process, and mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from dynamic_cp.errors import InvalidInputError, UnsupportedFeatureError
from megatron.dynamic_cp.attention import merge
from megatron.dynamic_cp.attention.mechanisms import heads
from megatron.dynamic_cp.flags.positions import concentration
from megatron.dynamic_cp.flags.supported import check_supported
from megatron.dynamic_cp.model import norm, rotary, self_attention
from tests.distributed import reference
from tests.distributed.harness import run_ranks
from tests.distributed.parity import (
    BATCHES,
    TOLERANCE,
    Case,
    Layout,
    mixed_plan,
    run_faulty,
)
from tests.layer_choices import chosen_layers

# Alone where lanes mix CP sizes, together in every kind of layout.
ALONE = {variant.name: Layout(2, variant=variant.name) for variant in reference.FEATURES}
ALONE["learned_offset"] = Layout(2, variant="learned_offset", exchange="a2a")


def rotate_every_layer(monkeypatch: Any) -> None:
    built = self_attention.DynamicCPSelfAttention.__init__

    def rotating(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self._rotates = True

    monkeypatch.setattr(self_attention.DynamicCPSelfAttention, "__init__", rotating)


def rotate_the_other_layers(monkeypatch: Any) -> None:
    built = self_attention.DynamicCPSelfAttention.__init__

    def rotating(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self._rotates = not self._rotates

    monkeypatch.setattr(self_attention.DynamicCPSelfAttention, "__init__", rotating)


def forget_the_concentration(monkeypatch: Any) -> None:
    monkeypatch.setattr(self_attention, "concentration", lambda config: 1.0)


def leave_the_gate_open(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        self_attention.DynamicCPSelfAttention, "_apply_output_gate", lambda self, x, gate: x + 0 * gate.reshape(x.shape)
    )


def gate_by_heads_of_others(monkeypatch: Any) -> None:
    original = self_attention.DynamicCPSelfAttention._apply_output_gate
    monkeypatch.setattr(
        self_attention.DynamicCPSelfAttention,
        "_apply_output_gate",
        lambda self, x, gate: original(self, x, gate.flip(2)),
    )


def normalize_the_sum(monkeypatch: Any) -> None:
    """The norm of queries and keys without weights: the sum of squares becomes 1, not their mean."""
    original = norm.TorchL2Norm.forward
    monkeypatch.setattr(norm.TorchL2Norm, "forward", lambda self, x: original(self, x) / x.shape[-1] ** 0.5)


def lose_the_stretch(monkeypatch: Any) -> None:
    """As if the table were made of plain RoPE."""
    plain = rotary.RotaryEmbedding.get_emb

    def unstretched(self: Any, max_seq_len: int) -> Any:
        fresh = rotary.RotaryEmbedding(32, 1.0, use_cpu_initialization=True)
        return plain(fresh, max_seq_len)

    monkeypatch.setattr(rotary.RotaryEmbedding, "get_emb", unstretched)


def forget_the_offset(monkeypatch: Any) -> None:
    monkeypatch.setattr(merge.RowSums, "add_offset", lambda self, offset_H: None)


def forget_the_offset_in_backward(monkeypatch: Any) -> None:
    original = merge.RowSums.add_offset

    def without_sum(self: Any, offset_H: Any) -> None:
        lse_HT = self.lse_HT
        original(self, offset_H)
        self.lse_HT = lse_HT

    monkeypatch.setattr(merge.RowSums, "add_offset", without_sum)


def learn_no_offset(monkeypatch: Any) -> None:
    original = merge.RowGradients.offset_gradient
    monkeypatch.setattr(merge.RowGradients, "offset_gradient", lambda self, offset_H: 0 * original(self, offset_H))


def take_offsets_of_others(monkeypatch: Any) -> None:
    """As if a lane computed the first heads, whichever it has."""
    built = heads.HeadExchange.__init__

    def first(self: Any, *args: Any) -> None:
        built(self, *args)
        self.heads = slice(0, self.heads.stop - self.heads.start)

    monkeypatch.setattr(heads.HeadExchange, "__init__", first)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
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
    samples = BATCHES["long_tail"]
    cases = {
        name: Case(layout, samples, mixed_plan(samples, layout), reference_of(layout, "long_tail"))
        for name, layout in ALONE.items()
    }
    faulty = {name: (cases[variant], plant) for name, (variant, plant) in FAULTS.items()}
    ranks = run_ranks(2, run_faulty, faulty, timeout_s=120)
    for name in FAULTS:
        assert max(rank[name].gradient_error for rank in ranks) > 20 * TOLERANCE, name


@pytest.mark.parametrize("stretch", [0.5, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("scales", [(1.0, 0.0), (1.0, 1.0), (0.707, 0.3), (None, 1.0), (1.0, None)])
def test_the_concentration_is_that_of_megatron_core(stretch: float, scales: tuple[float | None, float | None]) -> None:
    named = {"yarn_mscale": scales[0], "yarn_mscale_all_dim": scales[1]}
    config = SimpleNamespace(yarn_rotary_scaling_factor=stretch, **named)

    def found() -> float:
        table = YarnRotaryEmbedding(
            16, scaling_factor=stretch, mscale=scales[0], mscale_all_dim=scales[1], use_cpu_initialization=True
        )
        return table.get_emb(4)[1]

    assert concentration(config) == pytest.approx(run_ranks(1, found)[0], rel=1e-12)
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
